"""Decisions that all ranks make alike from what they told each other at ``init``: nodes, target, devices, network."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from mkernel.errors import ArgumentError, MismatchError
from mkernel.planner.topology import Topology

__all__ = [
    "RankInfo",
    "Gpu",
    "choose_device",
    "choose_link",
    "choose_signals",
    "choose_target",
    "choose_topology",
    "host_slot",
    "require_equal",
    "require_same_build",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that a rank's process sees."""

    ordinal: int  # in that process
    identity: str  # the same GPU has the same identity in every process
    capability: tuple[int, int]
    peers: tuple[int, ...]  # ordinals it reaches directly


@dataclasses.dataclass(frozen=True, slots=True)
class RankInfo:
    """What one rank tells about itself."""

    host: str
    options: dict[str, Any]  # arguments of init: must be equal on all ranks
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""  # why GPUs that seem to be there cannot be used
    preferred: int | None = None  # the ordinal that the process has chosen itself
    number: int | None = None  # of the process on its host, as its launcher tells it
    networks: dict[str, str] = dataclasses.field(default_factory=dict)  # RDMA transports: why they cannot be used here; "": they can
    links: dict[str, float] = dataclasses.field(default_factory=dict)  # link layers of ports for rc, with their fastest rates (Gb/s)
    host_signals: list[str] = dataclasses.field(default_factory=list)  # transports whose flags lie in host memory
    engine: str = "host"  # what moves the bytes of emulated links
    shares: bool = False  # it may share a GPU with another rank: both are processes, whose kernels take turns by time slices
    version: str = ""  # of mkernel
    sources: str = ""  # digest of the device code

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RankInfo:
        gpus = tuple(Gpu(g["ordinal"], g["identity"], (g["capability"][0], g["capability"][1]), tuple(g["peers"])) for g in fields["gpus"])
        return cls(**{**fields, "gpus": gpus})


def require_same_build(builds: Sequence[tuple[str, str]]) -> None:
    """Raise MismatchError, the same on every rank, where the ranks run different versions of mkernel or different kernels."""
    texts = [f"mkernel {version} with kernels {sources}" for version, sources in builds]
    ranks = {text: [rank for rank, other in enumerate(texts) if other == text] for text in texts}
    if len(ranks) > 1:
        found = "; ".join(f"rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items())
        raise MismatchError(f"the ranks run different code: {found} (install one mkernel everywhere; set MKERNEL_KERNELS_SRC alike)")


def require_equal(infos: Sequence[RankInfo]) -> None:
    """Raise ArgumentError, the same on every rank, where the ranks called init with different options."""
    for name, value in infos[0].options.items():
        for rank, info in enumerate(infos):
            if info.options.get(name) != value:
                raise ArgumentError(
                    name, info.options.get(name), f"rank {rank} differs from rank 0, which has {value}", "pass the same everywhere"
                )


def choose_topology(infos: Sequence[RankInfo], ranks_per_node: int | None) -> Topology:
    """Nodes of consecutive ranks: those of one host, or parts of it where ``ranks_per_node`` says so."""
    size = len(infos)
    hosts = [info.host for info in infos]
    runs = [1]
    for before, host in itertools.pairwise(hosts):
        if host == before:
            runs[-1] += 1
        else:
            runs.append(1)
    if len(runs) != len(set(hosts)):
        raise ArgumentError(
            "comm", hosts, "ranks of one host must be consecutive", "map ranks by node, e.g. mpirun --map-by node:PE or block order"
        )
    if len(set(runs)) != 1:
        raise ArgumentError("comm", runs, "every host must have the same number of ranks", "start the same number of processes per host")
    if ranks_per_node is None:
        ranks_per_node = runs[0]
    if ranks_per_node < 1 or runs[0] % ranks_per_node:
        raise ArgumentError("ranks_per_node", ranks_per_node, f"must divide the {runs[0]} ranks of a host")
    return Topology(size, ranks_per_node)


def choose_network(infos: Sequence[RankInfo]) -> str:
    """The RDMA transport that every rank can use, the first in order of preference. Raises ArgumentError with what is missing where."""
    reasons = []
    for name in infos[0].networks:
        rank = next((rank for rank, info in enumerate(infos) if info.networks.get(name, "unknown")), None)
        mixed = _different_links(infos) if name == "rc" else ""
        if rank is None and not mixed:
            return name
        if rank is None:
            reasons.append(f"{name}: {mixed}")
            continue
        reasons.append(f"{name}: rank {rank}: {infos[rank].networks.get(name, 'unknown')}")
    rule = f"the ranks are on several hosts, and no network fits all ({'; '.join(reasons)})"
    raise ArgumentError("transport", "auto", rule, "see `python -m mkernel doctor`")


def choose_link(infos: Sequence[RankInfo]) -> str | None:
    """The link layer of ``rc`` on all ranks: of those that all have the fastest, by the slowest rank. None where no rank tells any.

    Raises ArgumentError where there is none in common.
    """
    if not any(info.links for info in infos):
        return None
    common = [link for link in infos[0].links if all(link in info.links for info in infos)]
    if not common:
        raise ArgumentError("transport", "'rc'", _different_links(infos), "choose cards of one network with MKERNEL_NIC")
    return max(sorted(common, reverse=True), key=lambda link: min(info.links[link] for info in infos))  # InfiniBand before Ethernet


def _different_links(infos: Sequence[RankInfo]) -> str:
    """Why the ranks' cards do not go together; empty if they do."""
    if not any(info.links for info in infos) or set.intersection(*(set(info.links) for info in infos)):
        return ""
    there = "; ".join(f"rank {rank}: {', '.join(info.links) or 'none'}" for rank, info in enumerate(infos))
    return f"the ranks' cards have no link layer in common ({there})"


def choose_signals(infos: Sequence[RankInfo], transport: str) -> bool:
    """Whether flags lie in host memory, where an engine raises them. Raises ArgumentError where the ranks' environments differ."""
    for rank, info in enumerate(infos):
        if (transport in info.host_signals) != (transport in infos[0].host_signals):
            rule = f"rank {rank} raises flags otherwise than rank 0"
            raise ArgumentError(
                "transport", repr(transport), rule, "set MKERNEL_RC_SIGNAL and MKERNEL_EMULATED_HOST_SIGNALS alike on all ranks"
            )
    return transport in infos[0].host_signals


def choose_engine(infos: Sequence[RankInfo]) -> str:
    """What moves the bytes of emulated links: ``host`` or ``sms``. Raises ArgumentError where the ranks' environments differ."""
    for rank, info in enumerate(infos):
        if info.engine != infos[0].engine:
            rule = f"rank {rank} differs from rank 0, which has {infos[0].engine}"
            raise ArgumentError("MKERNEL_EMULATED_ENGINE", info.engine, rule, "set it alike on all ranks")
    return infos[0].engine


def choose_target(infos: Sequence[RankInfo], target: str) -> str:
    """``cuda`` if every rank has its own usable GPU (or all share), ``cpu`` if there is none; else an error that says what to do."""
    if target == "cpu":
        return "cpu"
    if target not in ("auto", "cuda"):
        raise ArgumentError("target", repr(target), "must be auto, cuda or cpu")
    remedy = "pass target='cpu' to run without GPUs" if target == "auto" else "see `python -m mkernel doctor`"
    seen = any(info.gpus or info.gpu_problem for info in infos)
    if not seen:
        if target == "auto":
            return "cpu"
        raise ArgumentError("target", "cuda", "no rank sees a GPU", remedy)
    for rank, info in enumerate(infos):
        if info.gpu_problem:
            raise ArgumentError("target", target, f"rank {rank}: {info.gpu_problem}", remedy)
        if not info.gpus:
            raise ArgumentError("target", target, f"rank {rank} sees no GPU, others do", remedy)
        if info.shares != infos[0].shares:
            raise ArgumentError("target", target, f"rank {rank} shares GPUs, or rank 0 does", "set MKERNEL_SHARE_GPUS alike on all ranks")
    chosen = [choose_device(infos, rank, target) for rank in range(len(infos))]
    used: dict[str, int] = {}
    for rank, gpu in enumerate(chosen):
        if gpu.capability != (9, 0):
            text = ".".join(map(str, gpu.capability))
            raise ArgumentError("target", target, f"rank {rank}: GPU {gpu.ordinal} has compute capability {text}, kernels need 9.0", remedy)
        if gpu.identity in used and not infos[rank].shares:
            raise ArgumentError("target", target, f"ranks {used[gpu.identity]} and {rank} are on one GPU", "one rank per GPU; " + remedy)
        used[gpu.identity] = rank
    _require_peer_access(infos, chosen, target, remedy)
    return "cuda"


def host_slot(infos: Sequence[RankInfo], rank: int, below: float = math.inf) -> int:
    """The number of a rank's process on its host: as the launcher counts, where that tells all ranks apart, else by their order.

    The ranks of a world may be some of a host's processes only, as those of a tensor-parallel group are. ``below``: what the launcher says
    counts only where all numbers are less.
    """
    mates = [other for other, info in enumerate(infos) if info.host == infos[rank].host]
    told = [number for mate in mates if (number := infos[mate].number) is not None and number < below]
    place = mates.index(rank)
    return told[place] if len(set(told)) == len(mates) else place


def choose_device(infos: Sequence[RankInfo], rank: int, target: str = "cuda") -> Gpu:
    """The GPU of a rank: the one its process has chosen, the only one it sees, else that of its slot.

    Slots that launchers tell count where each names a GPU; GPUs may be given to the last of a host's processes only.
    """
    info = infos[rank]
    if info.preferred is not None:
        return next(gpu for gpu in info.gpus if gpu.ordinal == info.preferred)
    if len(info.gpus) == 1:
        return info.gpus[0]
    slot = host_slot(infos, rank, len(info.gpus))
    turn, ordinal = divmod(slot, len(info.gpus))
    if turn and info.shares:  # not the same order again, so that ranks of a rail, that copy to each other, are on different GPUs
        return info.gpus[(ordinal + turn) % len(info.gpus)]
    if turn:
        rule = f"rank {rank} is number {slot} of its host, which has {len(info.gpus)} GPUs"
        raise ArgumentError("target", target, rule, "start one rank per GPU, or pass target='cpu'")
    return info.gpus[slot]


def _require_peer_access(infos: Sequence[RankInfo], chosen: Sequence[Gpu], target: str, remedy: str) -> None:
    for rank, gpu in enumerate(chosen):
        ordinals = {g.identity: g.ordinal for g in infos[rank].gpus}
        for peer, other in enumerate(chosen):
            if other.identity == gpu.identity or infos[peer].host != infos[rank].host:
                continue
            if other.identity not in ordinals:
                rule = f"rank {rank} does not see the GPU of rank {peer}, so it cannot reach its memory"
                raise ArgumentError(
                    "target", target, rule, "let every process of a host see all its GPUs (CUDA_VISIBLE_DEVICES); " + remedy
                )
            if ordinals[other.identity] not in gpu.peers:
                raise ArgumentError(
                    "target", target, f"no peer access between the GPUs of ranks {rank} and {peer} (nvidia-smi topo -p2p r)", remedy
                )
