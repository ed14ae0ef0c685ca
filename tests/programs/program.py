"""Random programs: sequences of calls as an application makes them, drawn from a seed.

A program says everything: which calls in which order on a world of which shape, where each array lies, who is late, how the network
behaves. Its ``repr`` makes an equal one, so that a failure can be printed as a script. Seeds that differ in their last six bits only share
their kernels (``palette``): compiling is what takes the time on target cpu.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

from mkernel.plan.topology import Topology
from tests.programs.calls import OPS, Call, Limits, fits, log_uniform

__all__ = ["Network", "Program", "Step", "draw", "palette", "topology"]

PLACES = ("heap", "ordinary")
OUTS = ("none", "fresh", "reused", "heap")
WORKSPACES = 128 << 10, 1 << 20  # bytes
HELD = 10_000, 2_000_000  # turns
CANDIDATES = 32
SHARED_BITS = 6  # of a seed: what they do not reach decides the kernels


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One call.

    ``number``: of the step in the program it was drawn for; with the program's seed it decides the inputs. ``places``: where each operand
    lies. ``padded``: arrays (also "out") whose rows lie apart. ``late``: a rank, one of its CTAs (-1: all), after how many asynchronous
    copies it rests each time, and for how many turns of target cpu's scheduler (on GPUs a rank, before the call: microseconds). ``stream``,
    ``library``, ``graph``: on GPUs only.
    """

    number: int
    call: Call
    places: tuple[str, ...]
    out: str = "none"
    padded: tuple[str, ...] = ()
    barrier: bool = False  # afterwards
    late: tuple[tuple[int, int, int, int], ...] = ()
    stream: int = 0
    library: str = "cupy"
    graph: int = 0  # steps that follow each other with the same number, not 0, are captured and replayed as one graph

    def __str__(self) -> str:
        places = ", ".join((*self.places, f"out {self.out}", *(f"{name} padded" for name in self.padded)))
        more = [f"late {self.late}" if self.late else "", "then a barrier" if self.barrier else ""]
        gpu = [f"stream {self.stream}" if self.stream else "", self.library if self.library != "cupy" else ""]
        gpu.append(f"graph {self.graph}" if self.graph else "")
        return "; ".join(filter(None, [f"{self.number}: {self.call}", places, *more, *gpu]))


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """How the emulated network behaves: see ``mkernel.transport.emulated.Faults``. Microseconds."""

    delay_us: float = 0.0
    reorder_us: float = 0.0
    ack_us: float = 0.0
    host_signals: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program for one world. ``sms`` and ``put_bytes``: what target cpu has, and how large puts should be there."""

    world: str  # nodes x ranks per node
    seed: int
    steps: tuple[Step, ...]
    sms: int = 8
    put_bytes: int = 512 << 10
    network: Network = Network()
    prepared: bool = True  # all plans are made before the first call: nothing but calls follows

    @property
    def topology(self) -> Topology:
        return topology(self.world)

    def __str__(self) -> str:
        head = f"program {self.seed} on {self.world}, {self.sms} SMs, puts of {self.put_bytes}, {self.network}, prepared {self.prepared}"
        return "\n".join([head, *(f"  {step}" for step in self.steps)])


def topology(world: str) -> Topology:
    nodes, per_node = map(int, world.split("x"))
    return Topology(nodes * per_node, per_node)


def palette(world: str, seed: int, kernels: int, sms: int, target: int, limits: Limits, ops: Sequence[type[Call]] = OPS) -> list[Call]:
    """Calls of at most so many kernels: every op once, then any.

    Their workspaces are about ``target`` bytes large: what one call leaves where another one writes is what sequences are about, and
    workspaces of any sizes have little in common.
    """
    rng, shape = random.Random(f"palette {world} {seed}"), topology(world)
    chosen: list[Call] = []
    order = rng.sample(list(ops), len(ops))
    while len(chosen) < kernels:
        op = order[len(chosen)] if len(chosen) < len(order) else rng.choice(list(ops))
        drawn = [call for call in (op.draw(rng, shape, limits) for _ in range(CANDIDATES)) if fits(call, shape, sms)]
        if drawn:
            chosen.append(min(drawn, key=lambda call: _far(call.workspace(shape, sms), target)))
    return chosen


def _far(size: int, target: int) -> float:
    """How different two numbers of bytes are, as a ratio."""
    return abs(math.log((size + 1) / target))


def draw(world: str, seed: int, steps: int = 10, kernels: int = 6, limits: Limits = Limits(), ops: Sequence[type[Call]] = OPS) -> Program:  # noqa: B008
    """The program of a seed: the same for the same arguments."""
    shape, family = topology(world), seed >> SHARED_BITS
    shared = random.Random(f"shared {world} {family}")
    sms = shared.choice((4, 6, 8))
    put_bytes = shared.choice((512 << 10, 64 << 10, 16 << 10))
    target = log_uniform(shared, *WORKSPACES)
    base = palette(world, family, kernels, sms, target, limits, ops)
    compiled = {call.kernel(shape, sms) for call in base}
    rng = random.Random(f"program {world} {seed}")
    few = rng.sample(base, min(len(base), rng.randint(3, 5)))
    drawn: list[Step] = []
    for number in range(steps):
        before = drawn[-1].call if drawn else None
        if before is not None and rng.random() < 0.2:
            call = before
        else:
            call = _sized(rng, _next(rng, few, before), shape, sms, limits, compiled, target)
        drawn.append(_step(rng, number, call, shape))
    return Program(world, seed, tuple(drawn), sms, put_bytes, _network(rng, shape), rng.random() < 0.8)


def _sized(rng: random.Random, call: Call, world: Topology, sms: int, limits: Limits, compiled: set[object], target: int) -> Call:
    """The call, or one of other sizes that needs no other kernel: of any, or with a workspace that overlaps others' at random places."""
    count = rng.choice((0, 1, CANDIDATES, CANDIDATES))
    drawn = [other for other in (call.resized(rng, world, limits) for _ in range(2 * count)) if fits(other, world, sms)]
    known = [call, *(other for other in drawn if other.kernel(world, sms) in compiled)]
    wanted = int(target * math.exp(rng.uniform(-0.5, 0.5)))
    return known[-1] if count < CANDIDATES else min(known, key=lambda other: _far(other.workspace(world, sms), wanted))


def _next(rng: random.Random, calls: Sequence[Call], before: Call | None) -> Call:
    """Mostly of another op than the call before: it leaves other things at other places."""
    others = [call for call in calls if before is None or call.op != before.op]
    return rng.choice(others if others and rng.random() < 0.7 else list(calls))


def _step(rng: random.Random, number: int, call: Call, world: Topology) -> Step:
    operands = call.inputs(world, 0)
    places = tuple(rng.choice(PLACES) for _ in operands)
    out = rng.choice(OUTS)
    arrays = {**operands, "out": call.result(world, 0)}
    padded = tuple(name for name, array in arrays.items() if array.padded and rng.random() < 0.25 and (name, out) != ("out", "none"))
    return Step(number, call, places, out, padded, rng.random() < 0.05, _late(rng, world))


def _late(rng: random.Random, world: Topology) -> tuple[tuple[int, int, int, int], ...]:
    """Nobody; some ranks from the beginning; or single CTAs, mostly the first, which communicate, time and again amid their copies.

    They rest a little, or for as long as anybody else can go on.
    """
    if rng.random() < 0.25:
        return ()
    ranks = rng.sample(range(world.size), rng.choice((1, 1, max(1, world.size // 2))))
    if rng.random() < 0.2:
        return tuple((rank, -1, 0, log_uniform(rng, *HELD)) for rank in ranks)
    return tuple((rank, rng.choice((0, 0, 0, 1, 2)), log_uniform(rng, 1, 64), log_uniform(rng, *HELD)) for rank in ranks)


def _network(rng: random.Random, world: Topology) -> Network:
    if world.num_nodes == 1 or rng.random() < 0.3:
        return Network()
    delay, reorder, ack = (rng.choice((0.0, 0.0, 20.0, 100.0, 400.0)) for _ in range(3))
    return Network(delay, reorder, ack, rng.random() < 0.2)
