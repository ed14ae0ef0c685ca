"""What the cost model knows of a machine: rates, latencies and fixed costs of one GPU, its links and its network.

Values of H200 come from the measurements in docs/planner.md ("The measurements behind the numbers") where there is one. The others, marked
"fitted", make the predictions agree with measured calls; docs/model.md says with which, and how large the error is on the rest.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkernel import env
from mkernel.errors import ArgumentError

__all__ = [
    "EMULATED",
    "FABRIC",
    "H100",
    "H200",
    "MACHINES",
    "PYTHON_PUT",
    "RDMA",
    "Machine",
    "Network",
    "asked_or_known",
    "changed",
    "load",
    "machine_named",
    "machine_of",
    "network_of",
    "save",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """What carries data between nodes; each field is of one rank and one direction.

    Attributes
    ----------
    bandwidth
        Bytes per second of a rank's network card, or of all cards that serve its GPU.
    latency
        Seconds from the end of a put until its flag is seen.
    put
        Seconds that the engine needs for a put, however small.
    reaction
        Seconds until the engine has seen the first command of a call that comes after a pause,
    reaction_hot
        and of one that follows another.
    oversubscription
        How many times less the switches above the leaves carry than the cards below them; 1: full bisection.
    leaf_nodes
        Nodes whose cards of one rail are on one leaf switch: what they send to each other goes no higher.
    issue
        Seconds that a thread of the GPU needs for a command to the engine.
    hop
        Seconds of each switch on the way beyond the first.
    radix
        Ports of a switch, which say how many switches are on the way: one up to ``radix`` nodes, two more for each tier of the fat tree.
    """

    bandwidth: float
    latency: float
    put: float
    reaction: float
    reaction_hot: float
    oversubscription: float = 1.0
    leaf_nodes: int = 1
    issue: float = 1e-6
    hop: float = 0.0
    radix: int = 64

    def seconds(self, to_each: float, nodes: int) -> float:
        """How long the cards of a rank, or its share of the switches, are busy with so many bytes to each other node."""
        beyond = max(0, nodes - max(1, self.leaf_nodes))  # nodes that are reached through the switches above the leaf
        return to_each / self.bandwidth * max(nodes - 1, beyond * self.oversubscription)

    def delay(self, nodes: int) -> float:
        """Seconds from the end of a put until its flag is seen, in a world of so many nodes."""
        tiers, reached = 1, self.radix
        while reached < nodes:
            tiers, reached = tiers + 1, reached * max(2, self.radix // 2)
        return self.latency + 2 * (tiers - 1) * self.hop


# 50 GB/s and 5 us are what it is paced to. A put and the reaction are Python's: fitted to "engine alone" of
# docs/benchmarks/*-2x2-2026-11-22.json.
EMULATED = Network(bandwidth=50e9, latency=5e-6, put=26e-6, reaction=157e-6, reaction_hot=27e-6)
# Played by SMs (docs/fabric.md), without an engine on the host: 5 us are asked for, the rest are fences, and looks at commands and flags.
# Latency and reactions are fitted to docs/benchmarks/*-2x1-sms-*.json and *-2x2-sms-*.json; assumed: a put takes a microsecond.
FABRIC = Network(bandwidth=50e9, latency=11e-6, put=1e-6, reaction=8e-6, reaction_hot=8e-6)
# Assumed: one 400 Gb/s card per GPU. The compiled engine takes 0.16 us of CPU for a put (docs/transports.md), what its card and provider
# take comes to that; a hot one has seen a command after 0.6 us, one that sleeps is woken; a switch takes 0.3 us.
RDMA = Network(bandwidth=50e9, latency=4e-6, put=0.5e-6, reaction=10e-6, reaction_hot=2e-6, hop=0.3e-6)
PYTHON_PUT = 4e-6  # seconds of the engine in Python: 3.9 us of CPU (docs/transports.md)


def network_of(said: str | None, otherwise: Network) -> Network:
    """The network that a report of the bench names (``settings.network``); ``otherwise`` where that says no more."""
    said = said or ""
    if said.startswith("emulated by sms"):
        return FABRIC
    if said == "srd":
        return dataclasses.replace(RDMA, put=PYTHON_PUT)
    return RDMA if said == "rc" else otherwise


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """One kind of GPU in a node of its kind. Rates in bytes, or floating-point operations, per second; times in seconds.

    Attributes
    ----------
    sms
        SMs.
    sm_flops
        The tile loop of one SM, 16-bit operands, at the clock of a GPU that has rested.
    slow_after, slow_octave
        A GPU that has worked longer than ``slow_after`` loses this share of ``sm_flops`` with every doubling of that time: it is at its
        power limit.
    warm
        How long it has worked before a call that no rest precedes.
    sm_load
        From L2 into the shared memory of one SM.
    boost
        How many times ``sm_flops`` an SM has where few multiply: GPUs that multiply on all SMs are at their power limit.
    load_boost
        How many times ``sm_load`` an SM has where the other one of its TPC loads nothing.
    l2
        From L2 to all SMs together.
    sm_shared
        Into and out of the shared memory of one SM, together.
    l2_rows, l2_rows_sectors, l2_rows_split
        How many rows of 128 bytes L2 answers all SMs together in a second: lines; in two lines that begin with a sector; in two others.
    paired
        How many times as long a k step takes where pairs of CTAs load B together, beside what that saves.
    memory
        Device memory, read.
    memory_latency
        Until a load from device memory has filled a stage, among those of many SMs.
    l2_bytes
        Of L2 that a matrix may fill and stay.
    start, start_hot, start_lone, start_early
        What a call takes beside its work: launch, prologue, first loads, end. Alone; behind another call; and the same of kernels that may
        begin before the one before them has ended (``KernelSpec.early``), in a world of one.
    tile
        Per tile of 128 x 256: its result leaves the registers, and the next tile's first loads arrive. In proportion to its size.
    tile_split
        How much more that takes where rows of the result do not begin at multiples of 32 bytes.
    link
        NVLink out of one GPU, or into it, to all peers together.
    link_pair
        The same where there is one peer.
    cta_link
        What one communication CTA sends or fetches beside tiles.
    warps_link
        What a copying warp of every computing CTA moves together.
    entry
        Until a rank knows that all ranks have entered a call.
    flag
        From a peer's store until a waiting CTA goes on.
    add
        Bytes of partial tiles that one SM reads and adds.
    beside
        By how much longer a tile takes while links carry as much as they can, as a share.
    attention_flops, attention_item
        The attention loop of one SM, and what a tile of query rows takes beside it.
    network
        Between nodes.
    poll
        Until a thread, or a warp with a word for each lane, has looked at a flag that is up. Not measured: assumed.
    """

    name: str
    sms: int
    sm_flops: float
    slow_after: float
    slow_octave: float
    warm: float
    sm_load: float
    boost: float
    load_boost: float
    l2: float
    sm_shared: float
    l2_rows: float
    l2_rows_sectors: float
    l2_rows_split: float
    paired: float
    memory: float
    memory_latency: float
    l2_bytes: int
    start: float
    start_hot: float
    start_lone: float
    start_early: float
    tile: float
    tile_split: float
    link: float
    link_pair: float
    cta_link: float
    warps_link: float
    entry: float
    flag: float
    add: float
    beside: float
    attention_flops: float
    attention_item: float
    network: Network
    poll: float = 0.7e-6

    def speed(self, busy: float) -> float:
        """The share of ``sm_flops`` that is left after so many seconds of work."""
        return 1.0 if busy <= self.slow_after else max(0.6, 1 - self.slow_octave * math.log2(busy / self.slow_after))

    def with_network(self, network: Network) -> Machine:
        return dataclasses.replace(self, network=network)


H200 = Machine(
    name="NVIDIA H200",
    sms=132,
    sm_flops=6.6e12,  # 131,072 cycles of a tile of 128 x 256 x 8192 (docs/speed_log.md) at 1.6 GHz
    slow_after=1e-3,  # fitted: cuBLAS alone of 8192 to 32768, isolated and back to back
    slow_octave=0.021,
    warm=7.2e-3,  # fitted: "fused alone" of docs/benchmarks/*-1x2-*.json, which were taken without rest
    sm_load=115e9,  # fitted: 646 times of 129 shapes in a world of one (docs/speed_log.md, "What is chosen, fitted")
    boost=1.05,  # fitted to the same times
    load_boost=1.24,  # fitted: 398 times of 68 shapes in a world of one (docs/speed_log.md, "Full waves")
    l2=9.7e12,  # not measured: what each slice of L2 gives in the H100, of which there are 96, not 80
    sm_shared=320e9,
    l2_rows=117e9,
    l2_rows_sectors=72e9,
    l2_rows_split=56e9,
    paired=1.0,
    memory=4.3e12,  # M = 1 with 2048 and 4096 of K: 34 MB of weights more take 8.2 to 8.5 us; the data sheet says 4.8
    memory_latency=1.35e-6,  # fitted: few rows by tiles of 64 and 128 columns, with 8 and 6 stages (docs/speed_log.md)
    l2_bytes=50 << 20,
    start=7.0e-6,  # fitted: "fused alone" of 2048
    start_hot=4.2e-6,
    start_lone=5.1e-6,  # fitted, as sm_load
    start_early=2.4e-6,  # the same
    tile=1.15e-6,
    tile_split=0.3e-6,
    link=320e9,  # four GPUs all to all
    link_pair=363e9,
    cta_link=40e9,
    warps_link=220e9,
    entry=3.4e-6,  # fitted: few rows and 2048; two flags of 0.7 us each, and the work around them
    flag=2.1e-6,  # fitted: few rows; a flag's round trip takes 1.4 us
    add=60e9,
    beside=0.12,  # fitted: gemm_reduce_scatter of 8192 on four GPUs
    attention_flops=5.8e12,  # fitted: a world of one (docs/speed_log.md)
    attention_item=3.0e-6,
    network=EMULATED,
)

# Fitted: 420 calls of 130 shapes, in a world of one and between two GPUs (docs/model.md). What they do not tell is as of the H200.
H100 = dataclasses.replace(
    H200,
    name="NVIDIA H100 80GB HBM3",
    sm_flops=6.48e12,
    boost=1.10,
    l2=8.1e12,
    paired=1.05,
    memory=2.59e12,
    memory_latency=1.7e-6,
    start=8.2e-6,
    start_lone=8.2e-6,
    tile=2.3e-6,
    entry=3.6e-6,
    flag=1.75e-6,
    cta_link=35e9,
    warps_link=260e9,
)

MACHINES = {"h100": H100, "h200": H200}


def changed(machine: Machine, **values: float) -> Machine:
    """The machine with other values of fields that are rates, shares or times."""
    return dataclasses.replace(machine, **values)  # type: ignore[arg-type]


def machine_of(device: str, sms: int | None = None) -> Machine:
    """The description of a device by its name, with ``sms`` SMs (None: all of them). A GPU that is not known is taken for an H200."""
    known = next((machine for word, machine in MACHINES.items() if word in device.lower()), H200)
    return known if sms is None or sms == known.sms else dataclasses.replace(known, sms=sms)


def machine_named(text: str | Path | None, sms: int | None = None) -> Machine:
    """The description of a name: ``h100``, ``h200`` (None), or a file that ``save`` has written.

    Raises
    ------
    ArgumentError
        There is no such description.
    """
    known = MACHINES.get(str(text or "h200").lower())
    if known is None:
        try:
            known = load(Path(text or ""))
        except (OSError, ValueError, KeyError) as error:
            rule = f"must be {', '.join(MACHINES)} or a file of `mkernel calibrate`: {error}"
            raise ArgumentError("MKERNEL_MACHINE", text, rule) from None
    return known if sms is None or sms == known.sms else dataclasses.replace(known, sms=sms)


def asked_or_known(device: str, sms: int) -> Machine:
    """The description that the environment names, else that of a device by its name. Raises ArgumentError."""
    return machine_named(env.MACHINE.get(), sms) if env.MACHINE.is_set() else machine_of(device, sms)


def save(machine: Machine, path: Path, remarks: Mapping[str, str]) -> None:
    """Write a description as JSON; ``remarks``: what is to be known of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"remarks": dict(remarks), "machine": dataclasses.asdict(machine)}, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Machine:
    """The description that ``save`` has written. Raises ValueError where a field is missing, unknown or no positive number."""
    raw: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8"))["machine"])
    network = raw.pop("network", None)
    try:
        machine = Machine(**raw, network=Network(**network))
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None
    for part in (machine, machine.network):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name not in ("name", "network") and not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{path}: {field.name} is {value!r}, must be a number >= 0")
    return machine
