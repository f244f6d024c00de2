"""What `doctor` knows of each rank, and what is wrong between them: other versions, shared GPUs, clocks, connections."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lightning_mfsdp.base.compat import Store
from lightning_mfsdp.base.sockets import addresses_of_host, network_of_host
from lightning_mfsdp.base.tables import number_ranges
from lightning_mfsdp.commands.environment import environment
from lightning_mfsdp.launch.checks import Finding
from lightning_mfsdp.launch.relay import open_listener

__all__ = [
    "Exchange",
    "RankFacts",
    "clock_findings",
    "difference_findings",
    "facts_of_rank",
    "first_of_hosts",
    "measured_clock",
    "outliers",
    "shared_gpu_findings",
    "unreached",
    "unreached_findings",
]

# Facts that may differ between ranks.
_OWN = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "RANK", "platform")
_CLOCK_S = 1.0
_CONNECT_S = 5.0
_AT_ONCE = 32  # connections of one host
_SHOWN = 8  # hosts, in a finding


@dataclass(frozen=True)
class RankFacts:
    """What a rank knows without the others.

    Attributes:
        host: Name of its host.
        network: Equal for ranks of one host.
        addresses: At which others may reach the host, likely ones first.
        gpu: Identity of the GPU it computes on; empty for a CPU.
        facts: Versions, GPUs and variables, as `lightning-mfsdp env` prints them.
        findings: Of its host alone: what is wrong, and what to do.
    """

    host: str
    network: str
    addresses: Sequence[str]
    gpu: str
    facts: Mapping[str, str]
    findings: Sequence[tuple[str, str]]


class Exchange:
    """Small objects from each rank to each other through a store, so that it works where process groups cannot connect."""

    def __init__(self, store: Store | None, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._calls = 0

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank, by rank; JSON must know it. Collective."""
        if self._store is None:
            return [value]
        self._calls += 1
        self._store.set(f"{self._calls}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            values = [json.loads(self._store.get(f"{self._calls}/{rank}")) for rank in range(self.size)]
            self._store.set(f"{self._calls}/all", json.dumps(values))
            return values
        answer: list[Any] = json.loads(self._store.get(f"{self._calls}/all"))
        return answer

    def close(self) -> None:
        """Nothing more is exchanged: rank 0, whose process may hold the store, waits until others have read all. Collective."""
        if self._store is not None and self.rank == 0:
            self._store.wait([f"closed/{rank}" for rank in range(1, self.size)])
        elif self._store is not None:
            self._store.set(f"closed/{self.rank}", "")

    def gather_facts(self, facts: RankFacts) -> list[RankFacts]:
        """What each rank knows, by rank; hosts of equal names get the number of their first rank. Collective."""
        ranks = [RankFacts(**fields) for fields in self.gather(asdict(facts))]
        hosts = first_of_hosts(ranks)
        names = Counter(ranks[first].host for first in hosts)
        for first, members in hosts.items():
            if names[name := ranks[first].host] > 1:
                for rank in members:
                    ranks[rank] = replace(ranks[rank], host=f"{name} of rank {first}")
        return ranks


def facts_of_rank(device: torch.device, findings: Iterable[Finding]) -> RankFacts:
    """What this rank knows.

    Args:
        device: That it computes on.
        findings: Of its host.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return RankFacts(
        host=socket.gethostname(),
        network="\n".join(network_of_host()),
        addresses=addresses_of_host(),
        gpu=uuid,
        facts=environment(),
        findings=[(finding.what, finding.advice) for finding in findings],
    )


def first_of_hosts(ranks: Sequence[RankFacts]) -> dict[int, list[int]]:
    """Ranks of each host, by the first of them."""
    hosts: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        hosts.setdefault(facts.network, []).append(rank)
    return {members[0]: members for members in hosts.values()}


def difference_findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Versions, GPUs and variables that differ between ranks."""
    findings = []
    names = {name for facts in ranks for name in facts.facts} - set(_OWN)
    for name in sorted(names):
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(ranks):
            holders.setdefault(facts.facts.get(name, "not set"), []).append(rank)
        if len(holders) > 1:
            parts = [f"{value} on {_with_hosts(ranks, members)}" for value, members in holders.items()]
            findings.append(Finding(f"{name} differs: {'; '.join(parts)}", _advice_for(name)))
    return findings


def shared_gpu_findings(ranks: Sequence[RankFacts]) -> list[Finding]:
    """GPUs that several ranks compute on."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, facts in enumerate(ranks):
        if facts.gpu:
            users.setdefault((facts.network, facts.gpu), []).append(rank)
    return [
        Finding(
            f"{_with_hosts(ranks, members)} compute on the same GPU, {gpu}",
            "start one process for each GPU, and leave CUDA_VISIBLE_DEVICES to the launcher",
        )
        for (_, gpu), members in users.items()
        if len(members) > 1
    ]


def measured_clock(exchange: Exchange) -> list[float]:
    """How many seconds the clock of each rank is ahead of rank 0's, but for the time that a message takes. Collective."""
    exchange.gather(None)  # so that the next one does not wait for a late rank
    clocks: list[float] = exchange.gather(time.time())
    return [clock - clocks[0] for clock in clocks]


def clock_findings(ranks: Sequence[RankFacts], ahead_s: Sequence[float]) -> list[Finding]:
    """Hosts whose clock is not that of rank 0."""
    return [
        Finding(
            f"the clock of host {ranks[first].host} is {abs(ahead_s[first]):.1f} s {'ahead of' if ahead_s[first] > 0 else 'behind'} "
            f"that of {ranks[0].host}, so logs and times of files cannot be compared",
            "have chrony or ntpd set it",
        )
        for first in first_of_hosts(ranks)
        if abs(ahead_s[first]) > _CLOCK_S
    ]


def unreached(ranks: Sequence[RankFacts], exchange: Exchange, *, timeout_s: float = _CONNECT_S) -> list[list[int]]:
    """By rank, first ranks of the hosts to which it cannot open a connection; first ranks alone try. Collective."""
    firsts = first_of_hosts(ranks)
    if len(firsts) == 1:
        return [[] for _ in ranks]
    is_first = exchange.rank in firsts
    with open_listener(is_reachable=True) as listener:  # connections wait in its queue, and nothing has to accept them
        ports: list[int] = exchange.gather(listener.getsockname()[1])

        def reaches(first: int) -> bool:
            return any(_connects(address, ports[first], timeout_s) for address in ranks[first].addresses)

        others = [first for first in firsts if is_first and first != exchange.rank]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            failed = [
                first for first, is_reached in zip(others, pool.map(reaches, others), strict=True) if not is_reached
            ]
        every: list[list[int]] = exchange.gather(failed)
    return every


def unreached_findings(ranks: Sequence[RankFacts], failed: Sequence[Sequence[int]]) -> list[Finding]:
    """Hosts that others cannot connect to."""
    findings = []
    for target in sorted({first for firsts in failed for first in firsts}):
        sources = [ranks[rank].host for rank, firsts in enumerate(failed) if target in firsts]
        findings.append(
            Finding(
                f"host {ranks[target].host} at {_listed(ranks[target].addresses)} is not reached from {_listed(sources)}",
                "have the firewall let all ports between the hosts through, or name the interface that connects them in "
                "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
            )
        )
    return findings


def outliers(values: Mapping[str, float], *, factor: float = 0.5) -> list[str]:
    """Names of hosts whose speed is less than `factor` times the median of all; of two hosts, than the faster one's."""
    ordered = sorted(values.values())
    median = ordered[len(ordered) // 2] if ordered else 0.0
    return [name for name, value in values.items() if value < factor * median]


def _connects(address: str, port: int, timeout_s: float) -> bool:
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _advice_for(name: str) -> str:
    if name.startswith("GPU"):
        return "choose equal nodes: all ranks wait for the slowest one, and the smallest memory is the limit"
    if name.isupper() and "_" in name:
        return "set it alike on all ranks, in the script that the launcher starts on each node"
    return "install the same version on all hosts"


def _with_hosts(ranks: Sequence[RankFacts], members: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(ranks[rank].host for rank in members))
    return f"ranks {number_ranges(members)} ({_listed(hosts)})"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
