"""Which client runs how: `rows.tsv` is a pairwise table, small enough for every push; `every_row` is the full product.

`python -m tests.clients.table` makes the table anew, the same one for the same factors and seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import combinations, product
from pathlib import Path

from tests.clients.base import Client
from tests.clients.dqn import DQN, SoftDQN
from tests.clients.gan import GAN, R1GAN
from tests.clients.generation import Writer
from tests.clients.heads import MultiTask
from tests.clients.lora import LoRA
from tests.clients.ppo import PPO
from tests.clients.refused import REFUSED
from tests.clients.teachers import BYOL, DINO, MoCo
from tests.clients.wgan import WGAN, ClampedCritic

CLIENTS: dict[str, type[Client]] = {
    "dqn": DQN,
    "soft_dqn": SoftDQN,
    "wgan": WGAN,
    "clamped_critic": ClampedCritic,
    "gan": GAN,
    "r1": R1GAN,
    "byol": BYOL,
    "dino": DINO,
    "moco": MoCo,
    "multitask": MultiTask,
    "ppo": PPO,
    "lora": LoRA,
    "generate": Writer,
}

PATH = Path(__file__).with_name("rows.tsv")
SEED = 3


@dataclass(frozen=True, order=True)
class Row:
    """One run under mfsdp, to be compared with DDP.

    Attributes:
        client: Of `CLIENTS`.
        ranks: World size.
        sharding: Of `MFSDPStrategy`.
        accumulate: Microbatches in a step.
        precision: Of the Trainer.
        recompute: Blocks are computed again in backward.
        resume: Once more from a checkpoint of the middle.
    """

    client: str
    ranks: int
    sharding: str
    accumulate: int
    precision: str
    recompute: bool
    resume: bool

    def __str__(self) -> str:
        words = [self.client, f"{self.ranks}ranks", self.sharding, f"accumulate{self.accumulate}", self.precision]
        words += ["recompute"] * self.recompute + ["resume"] * self.resume
        return "-".join(words)


FACTORS: dict[str, Sequence[object]] = {
    "client": list(CLIENTS),
    "ranks": [2, 3],
    "sharding": ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    "accumulate": [1, 3],
    "precision": ["32-true", "64-true", "bf16-mixed"],
    "recompute": [False, True],
    "resume": [False, True],
}
assert list(FACTORS) == [field.name for field in fields(Row)]


def possible(row: Row) -> bool:
    return CLIENTS[row.client].recomputes or not row.recompute


def every_row() -> Iterator[Row]:
    """The full product."""
    return (row for values in product(*FACTORS.values()) if possible(row := Row(*values)))  # type: ignore[arg-type]


def weights(row: Row) -> str:
    """What of a row matters beside its client: else no table is small. Clients that write weights try sharded ones in both precisions."""
    if row.sharding != "optim_grads_params":
        return "whole"
    return "sharded, mixed" if row.precision == "bf16-mixed" else "sharded"


def pairs(row: Row) -> set[tuple[str, object, str, object]]:
    """What a row shows: two factors with their values."""
    values = dict(zip(FACTORS, astuple(row), strict=True))
    if (row.client, row.sharding) in REFUSED:
        return {("client", row.client, "refused", row.sharding)}
    found = {(one, values[one], two, values[two]) for one, two in combinations(list(FACTORS)[1:], 2)}
    found |= {("client", row.client, name, values[name]) for name in ("ranks", "accumulate", "recompute", "resume")}
    if CLIENTS[row.client].writes or weights(row) != "sharded, mixed":
        found.add(("client", row.client, "weights", weights(row)))
    found.add(("client", row.client, "mixed", row.precision == "bf16-mixed"))
    return found


def cost(row: Row) -> float:
    """About in proportion to its time: a run under DDP, one under mfsdp, and half a run when it is resumed."""
    return row.ranks * (row.accumulate + 2) * (5 if row.resume else 4)


def pairwise_rows(seed: int = SEED) -> list[Row]:
    """Rows in which every pair occurs that is possible, drawn greedily, cheap ones first among equals."""
    rows = list(every_row())
    random.Random(seed).shuffle(rows)
    pairs_of = {row: pairs(row) for row in rows}
    left: set[tuple[str, object, str, object]] = set().union(*pairs_of.values())
    chosen: list[Row] = []
    while left:
        best = max(rows, key=lambda row: (len(pairs_of[row] & left), -cost(row)))
        chosen.append(best)
        left -= pairs_of[best]
    order = {name: index for index, name in enumerate(CLIENTS)}
    return sorted(chosen, key=lambda row: (order[row.client], row))


def _occurring(row: Row) -> set[tuple[str, object]]:
    is_refused = (row.client, row.sharding) in REFUSED
    return {*vars(row).items(), *([("refused", (row.client, row.sharding))] if is_refused else [])}


def by_day(rows: Sequence[Row]) -> list[Row]:
    """Few of these rows, in which every client, every value of the other factors and every refusal occurs: what a push runs."""
    left = set().union(*map(_occurring, rows))
    chosen = []
    while left:
        best = max(rows, key=lambda row: (len(left & _occurring(row)), -cost(row)))
        chosen.append(best)
        left -= _occurring(best)
    return [row for row in rows if row in chosen]


def read_rows() -> list[Row]:
    """What is in the file."""
    header, *lines = PATH.read_text().splitlines()
    assert header.split("\t") == list(FACTORS)
    kinds = {name: {str(value): value for value in values} for name, values in FACTORS.items()}
    return [
        Row(**{name: kinds[name][cell] for name, cell in zip(FACTORS, line.split("\t"), strict=True)})  # type: ignore[arg-type]
        for line in lines
    ]


def write_rows() -> None:
    lines = ["\t".join(FACTORS), *("\t".join(map(str, astuple(row))) for row in pairwise_rows())]
    PATH.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_rows()
