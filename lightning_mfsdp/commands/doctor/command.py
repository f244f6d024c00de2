"""`doctor`: alone for this host, or started on all ranks by torchrun or srun. Rank 0 prints what all have found."""

from __future__ import annotations

import os
import resource
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_mfsdp._lightning_api import SLURMEnvironment, TorchElasticEnvironment
from lightning_mfsdp.base import compat
from lightning_mfsdp.base.tables import readable_bytes, table_lines
from lightning_mfsdp.commands.doctor.ranks import (
    Exchange,
    RankFacts,
    clock_findings,
    difference_findings,
    facts_of_rank,
    first_of_hosts,
    measured_clock,
    shared_gpu_findings,
    unreached,
    unreached_findings,
)
from lightning_mfsdp.commands.doctor.speed import (
    all_gather_speed,
    host_speed_findings,
    network_rate,
    network_speed_findings,
    nvlink_rate,
    product_speed,
    product_speed_findings,
)
from lightning_mfsdp.commands.doctor.storage import storage_findings, storage_of_rank
from lightning_mfsdp.launch.checks import (
    Finding,
    interface_findings,
    loader_file_findings,
    open_file_findings,
    shared_memory_findings,
    variable_findings,
)
from lightning_mfsdp.launch.communication import store_of_this_start

__all__ = ["add_doctor_command"]


def add_doctor_command(subparsers: Any) -> None:
    """Add `doctor` to a parser."""
    text = "what is wrong with the hosts of a run, and what to do; torchrun or srun starts it on all of them"
    parser = subparsers.add_parser("doctor", help=text, description=text)
    parser.add_argument("--storage", type=Path, metavar="FOLDER", help="for checkpoints; is written to")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="of each measurement of speed (2)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="of the wait for other ranks (120)")
    parser.set_defaults(run=_run)


@dataclass(frozen=True)
class _Report:
    """What was looked at, as pairs of a name and a value, and what is wrong."""

    facts: list[tuple[str, str]]
    findings: list[Finding]

    def add(self, facts: Sequence[tuple[str, str]], findings: Sequence[Finding]) -> None:
        self.facts.extend(facts)
        self.findings.extend(findings)

    def lines(self) -> list[str]:
        told = [line for finding in self.findings for line in ("", finding.what, f"  {finding.advice}")]
        return [*table_lines(self.facts), "", f"findings: {len(self.findings)}" if told else "no findings", *told]


def _run(arguments: Namespace) -> int:
    timeout = timedelta(seconds=arguments.timeout)
    launched = _launched()
    local_rank = 0 if launched is None else launched.local_rank()
    device = _device(local_rank)
    store = None
    if launched is not None:
        store = store_of_this_start(launched, timeout)
    channel = Exchange(
        store and compat.PrefixStore("doctor", store),
        0 if launched is None else launched.global_rank(),
        1 if launched is None else launched.world_size(),
    )
    ranks = channel.gather_facts(facts_of_rank(device, _own_findings(channel.size)))
    report = _Report([], [])
    _compare(report, ranks, channel)
    is_connected = _try_connections(report, ranks, channel)
    _measure_products(report, ranks, channel, device, arguments.seconds)
    if store is not None and is_connected:
        _measure_gathers(report, ranks, channel, store, device, arguments.seconds, timeout)
    if arguments.storage is not None:
        _measure_storage(report, arguments.storage, ranks, channel, arguments.seconds)
    else:
        report.add([("storage", "not looked at; --storage FOLDER does")], [])
    if channel.rank == 0:
        sys.stdout.writelines(f"{line}\n" for line in report.lines())
    code: int = channel.gather(1 if report.findings else 0)[0]  # equal on all, or launchers of other nodes would wait
    channel.close()
    return code


def _launched() -> Any:
    """Lightning's object for the launcher that has started this process as one of several; `None`: it runs alone."""
    for kind in (TorchElasticEnvironment, SLURMEnvironment):
        if kind.detect() and (environment := kind()).world_size() > 1:
            return environment
    return None


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _own_findings(world_size: int) -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        *variable_findings(os.environ),
        *interface_findings(os.environ),
        *open_file_findings(hard, world_size),
        *loader_file_findings(soft),
        *shared_memory_findings(),
    ]


def _compare(report: _Report, ranks: Sequence[RankFacts], channel: Exchange) -> None:
    """What hosts say of themselves, and where they differ."""
    hosts = first_of_hosts(ranks)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    report.add(
        [
            ("ranks", f"{channel.size} on {len(hosts)} host{'s' if len(hosts) > 1 else ''}"),
            *((name, ranks[0].facts[name]) for name in ("torch", "NCCL", "NVIDIA driver", "GPUs")),
            ("open files", "unlimited" if soft == resource.RLIM_INFINITY else str(soft)),
            ("/dev/shm", readable_bytes(shared.f_frsize * shared.f_blocks) if shared else "not there"),
        ],
        [],
    )
    by_finding: dict[tuple[str, ...], list[str]] = {}
    for first in hosts:
        for finding in ranks[first].findings:
            by_finding.setdefault(tuple(finding), []).append(ranks[first].host)
    for (what, advice), names in by_finding.items():
        where = "" if len(names) == len(hosts) else f"host{'s' if len(names) > 1 else ''} {', '.join(names)}: "
        report.findings.append(Finding(f"{where}{what}", advice))
    ahead_s = measured_clock(channel)
    report.add(
        [("clocks", f"within {max(ahead_s) - min(ahead_s):.3f} s")] if len(hosts) > 1 else [],
        [*difference_findings(ranks), *shared_gpu_findings(ranks), *clock_findings(ranks, ahead_s)],
    )


def _try_connections(report: _Report, ranks: Sequence[RankFacts], channel: Exchange) -> bool:
    """Whether all hosts reach each other."""
    failed = unreached(ranks, channel)
    findings = unreached_findings(ranks, failed)
    if len(first_of_hosts(ranks)) > 1:
        report.add(
            [("connections", "not all, so gathers were not measured" if findings else "all hosts to all")], findings
        )
    return not findings


def _measure_products(
    report: _Report, ranks: Sequence[RankFacts], channel: Exchange, device: torch.device, seconds: float
) -> None:
    """How fast ranks compute, all at the same time."""
    channel.gather(None)  # so that they begin together
    speeds: list[float] = channel.gather(product_speed(device, seconds))
    slowest = min(range(len(speeds)), key=speeds.__getitem__)
    text = f"{speeds[slowest] / 1e12:.3g} TFLOP/s" + (f" on rank {slowest}, the slowest" if len(speeds) > 1 else "")
    report.add([("matrix products", text)], product_speed_findings(ranks, speeds))


def _measure_gathers(
    report: _Report,
    ranks: Sequence[RankFacts],
    channel: Exchange,
    store: compat.Store,
    device: torch.device,
    seconds: float,
    timeout: timedelta,
) -> None:
    """How fast ranks of a host gather from each other, and all ranks."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=channel.rank, world_size=channel.size, timeout=timeout)
    try:
        hosts = first_of_hosts(ranks)
        members = next(members for members in hosts.values() if channel.rank in members)
        own = all_gather_speed(compat.new_group(members), device, seconds) if len(members) > 1 else 0.0
        everyone = dist.group.WORLD
        assert everyone is not None
        together = all_gather_speed(everyone, device, seconds) if len(hosts) > 1 else 0.0
        speeds: list[float] = channel.gather(own)
    finally:
        dist.destroy_process_group()
    by_host = {ranks[first].host: speeds[first] for first, members in hosts.items() if len(members) > 1}
    nvlink, network = (nvlink_rate(), network_rate()) if device.type == "cuda" else (None, None)
    if by_host:
        slowest = min(by_host, key=by_host.__getitem__)
        text = f"{by_host[slowest] / 1e9:.2f} GB/s" + (f" on {slowest}, the slowest" if len(by_host) > 1 else "")
        report.add([(f"all-gather in a host, {backend}", text)], host_speed_findings(by_host, nvlink))
    if len(hosts) > 1:
        report.add(
            [(f"all-gather of all, {backend}", f"{together / 1e9:.2f} GB/s")],
            network_speed_findings(together, network),
        )


def _measure_storage(
    report: _Report, folder: Path, ranks: Sequence[RankFacts], channel: Exchange, seconds: float
) -> None:
    """Whether a folder takes checkpoints, and how fast."""
    seen = storage_of_rank(folder, ranks, channel, seconds)
    findings = storage_findings(folder, ranks, seen)
    facts = [("storage", str(folder))]
    if seen[0].write_speed:
        together = sum(storage.write_speed for storage in seen)
        replaced = (
            "exchanges them" if seen[0].exchanges else "renames twice; a load after a crash between them finishes it"
        )
        facts += [
            ("  writes", f"{together / 1e6:.0f} MB/s of all hosts, {readable_bytes(seen[0].free_bytes)} free"),
            ("  to replace a folder", replaced),
        ]
    report.add(facts, findings)
