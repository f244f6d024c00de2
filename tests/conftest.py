"""Tests marked `nightly` are left out unless MFSDP_NIGHTLY=1, and a process group that a file made ends with the file.

Workers that share a run take the longest files first, by `durations.json`, so that they end together. `DURATIONS=some/file` writes
such a file of the run: `.ci/run` does, and what it wrote becomes the new `tests/durations.json` when files have come or grown.
`RECORD=.ci/runs.tsv` writes there with which versions all tests ran, and how many passed.

REQUIRE=gpus2 (or gpu, gpus4): a test that is skipped for want of GPUs, and needs no more than so many, fails.
"""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

# Before torch is imported. Two workers share two cores: threads of one that wait for each other would burn the time of the other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from tests.helpers import runs
from tests.helpers.gpus import REQUIRED, should_have_run

SECONDS = json.loads(Path(__file__).with_name("durations.json").read_text())
UNKNOWN_S = 20.0  # a file that is not listed is taken for a long one
measured: Counter[str] = Counter()


def file_of(nodeid: str) -> str:
    return nodeid.split("::")[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: -SECONDS.get(file_of(item.nodeid), UNKNOWN_S))
    if os.environ.get("MFSDP_NIGHTLY") == "1":
        return
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            item.add_marker(pytest.mark.skip(reason="runs at night: set MFSDP_NIGHTLY=1"))


def pytest_collection_finish() -> None:
    """A collection looks at what tests make, and not at all that was imported: half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    required = os.environ.get("REQUIRE")
    if required and required not in REQUIRED:
        raise pytest.UsageError(f"REQUIRE={required}: expected one of {', '.join(REQUIRED)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    required = os.environ.get("REQUIRE")
    if required and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if should_have_run(reason, required):
            report.outcome, report.longrepr = "failed", f"REQUIRE={required}, but this test was skipped. {reason}"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    measured[file_of(report.nodeid)] += report.duration


def pytest_report_header() -> str:
    return "with " + ", ".join(f"{name} {version}" for name, version in runs.versions().items())


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if path := os.environ.get("DURATIONS"):
        rounded = {name: round(seconds, 1) for name, seconds in measured.most_common()}
        Path(path).write_text(json.dumps(rounded, indent=1) + "\n")
    if path := os.environ.get("RECORD"):
        stats = session.config.pluginmanager.getplugin("terminalreporter").stats
        counts = {name: len(stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
        runs.record(
            Path(path), counts | {"failed": counts["failed"] + counts["error"]}, os.environ.get("RECORD_AS", "pytest")
        )


@pytest.fixture(autouse=True, scope="module")
def process_groups_and_ranks_end_with_a_file() -> Iterator[None]:
    """A Trainer makes a group in the process of the tests; Lightning and `fully_shard` look for it. Another rank would warn of nothing."""
    yield
    rank_zero_only.rank = 0
    if dist.is_initialized():
        dist.destroy_process_group()
