"""Real programs come to what DDP comes to, step by step and when resumed, and what each is about happens.

A push runs some rows of a pairwise table, in which every client and value occurs; the night runs the table.
`CLIENTS=all` takes the full product of some 2,000 runs (tests/nightly.sh), `CLIENTS=all:moco` one client's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Hashable
from functools import cache

import pytest

from tests.clients.refused import REFUSED
from tests.clients.runs import run_rows
from tests.clients.table import CLIENTS, FACTORS, Row, by_day, every_row, pairs, read_rows
from tests.helpers.distributed import RankError, run_distributed
from tests.helpers.nights import NIGHT
from tests.lightning.models import FOREIGN_WARNINGS

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in FOREIGN_WARNINGS]

WHICH, _, ONE = os.environ.get("CLIENTS", "").partition(":")
TABLE = read_rows()
ROWS = TABLE if NIGHT else by_day(TABLE)
if WHICH == "all":
    ROWS = [row for row in every_row() if ONE in ("", row.client)]


def start_of(row: Row) -> Hashable:
    """Rows with the same answer share one start of processes, which must end within the helper's timeout."""
    return row.ranks if WHICH != "all" else (row.ranks, row.client, row.accumulate, row.precision)


@cache
def errors(start: Hashable) -> dict[str, str]:
    """Of all ranks, for each row of a start; empty where it passed."""
    rows = [row for row in ROWS if start_of(row) == start]
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_distributed(run_rows, rows[0].ranks, folder, rows)
        except RankError as error:  # a hang, or a rank that died: it is not tried again for every row
            return {str(row): str(error) for row in rows}
    return {
        str(row): "\n".join(f"rank {rank}: {one[str(row)]}" for rank, one in enumerate(found) if one[str(row)])
        for row in rows
    }


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_client_comes_to_what_it_comes_to_under_ddp(row: Row) -> None:
    error = errors(start_of(row))[str(row)]
    assert not error, error


def test_the_table_holds_every_possible_pair() -> None:
    possible = set().union(*map(pairs, every_row()))
    assert possible == set().union(*map(pairs, TABLE))


def test_the_table_names_every_client_and_value() -> None:
    for index, values in enumerate(FACTORS.values()):
        for rows in (TABLE, by_day(TABLE)):
            assert {list(vars(row).values())[index] for row in rows} == set(values)


def test_refused_clients_are_in_the_table() -> None:
    assert {client for client, _ in REFUSED} <= set(CLIENTS)
