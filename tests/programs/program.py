"""Random programs: sequences of calls as an application makes them, drawn from a seed.

A program says everything: which calls in which order on a world of which shape, where each array lies, who is late, how the network
behaves. Its ``repr`` makes an equal one, so that a failure can be printed as a script. Seeds that differ in their last six bits only share
their kernels (``palette``): compiling is what takes the time on target cpu.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Sequence

from mkernel import env
from mkernel.planner.row_classes import classes
from mkernel.planner.topology import Topology
from tests.programs.calls import OPS, Call, Limits, fits, log_uniform

__all__ = ["Network", "Program", "Step", "draw", "palette", "topology"]

PLACES = ("heap", "ordinary")
OUTS = ("none", "fresh", "reused", "heap")
WORKSPACES = 128 << 10, 1 << 20  # bytes
HELD = 10_000, 2_000_000  # turns
ASLEEP = 6.0, 300.0  # seconds: longer than run's timeout, shorter than what a rank may take to come
FOREVER = 1 << 40  # turns: as long as anybody else can go on
CANDIDATES = 32
SHARED_BITS = 6  # of a seed: what they do not reach decides the kernels


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One call.

    ``number``: of the step in the program it was drawn for; with the program's seed it decides the inputs. ``places``: where each operand
    lies; ``gathered``: where the rows that the op is asked to keep. ``padded``: arrays (also "out") whose rows lie apart. ``late``: a
    rank, one of its CTAs (-1: all), after how many asynchronous copies it rests each time, and for how many turns of target cpu's
    scheduler (on GPUs a rank, before the call: microseconds). ``asleep``: a rank, and the seconds of virtual time that it spends on its
    host before the call; on target cpu only. ``stream``, ``library``, ``graph``: on GPUs only. ``max_rows``: where plans are made first,
    this one is for calls of up to so many (0: of its own size), counted as its own rows are; ``planned``: False where an earlier step's
    plan covers it.
    """

    number: int
    call: Call
    places: tuple[str, ...]
    out: str = "none"
    padded: tuple[str, ...] = ()
    barrier: bool = False  # afterwards
    late: tuple[tuple[int, int, int, int], ...] = ()
    asleep: tuple[int, float] | None = None
    stream: int = 0
    library: str = "cupy"
    max_rows: int = 0
    planned: bool = True
    gathered: str = "none"
    graph: int = 0  # steps that follow each other with the same number, not 0, are captured and replayed as one graph

    def __str__(self) -> str:
        places = ", ".join((*self.places, f"out {self.out}", *(f"{name} padded" for name in self.padded)))
        more = [
            f"gathered {self.gathered}" if self.gathered != "none" else "",
            f"late {self.late}" if self.late else "",
            f"asleep {self.asleep}" if self.asleep else "",
            "then a barrier" if self.barrier else "",
            f"planned for {self.max_rows} rows" if self.max_rows else "" if self.planned else "not planned",
        ]
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
    sms: bool = False  # SMs play it: mkernel.runtime.fabric, which knows no acks


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program for one world. ``sms`` and ``put_bytes``: what target cpu has, and how large puts should be there.

    ``planner``: whose plans the calls have, as MKERNEL_PLANNER says it.
    """

    world: str  # nodes x ranks per node
    seed: int
    steps: tuple[Step, ...]
    sms: int = 8
    put_bytes: int = 512 << 10
    network: Network = Network()
    prepared: bool = True  # all plans are made before the first call: nothing but calls follows
    planner: str = "auto"

    @property
    def topology(self) -> Topology:
        return topology(self.world)

    def __str__(self) -> str:
        head = f"program {self.seed} on {self.world}, {self.sms} SMs, puts of {self.put_bytes}, {self.network}, prepared {self.prepared}"
        head += f", plans of {self.planner}"
        return "\n".join([head, *(f"  {step}" for step in self.steps)])


def topology(world: str) -> Topology:
    nodes, per_node = map(int, world.split("x"))
    return Topology(nodes * per_node, per_node)


@functools.lru_cache(maxsize=64)  # programs of a family share theirs
def palette(
    world: str, seed: int, kernels: int, sms: int, target: int, limits: Limits, ops: tuple[type[Call], ...] = OPS, planner: str = "auto"
) -> tuple[Call, ...]:
    """Calls of at most so many kernels: every mechanism of every op once, then any. ``planner``: the one that is asked now.

    Their workspaces are about ``target`` bytes large: what one call leaves where another one writes is what sequences are about, and
    workspaces of any sizes have little in common.
    """
    rng, shape = random.Random(f"palette {world} {seed}"), topology(world)
    chosen: list[Call] = []
    mechanisms = [(op, mechanism) for op in ops for mechanism in op.mechanisms_in(shape)]
    order = rng.sample(mechanisms, len(mechanisms))
    while len(chosen) < kernels:
        op, mechanism = order[len(chosen)] if len(chosen) < len(order) else rng.choice(mechanisms)
        drawn = [op.draw(rng, shape, limits, mechanism) for _ in range(CANDIDATES)]
        with env.override(MKERNEL_PLANNER="rules"):  # the model takes a second for as many, and its workspaces are as large or nearly so
            near = sorted((call for call in drawn if fits(call, shape, sms)), key=lambda call: _far(call.workspace(shape, sms), target))
        chosen += itertools.islice((call for call in near if fits(call, shape, sms)), 1)
    return tuple(chosen)


def _far(size: int, target: int) -> float:
    """How different two numbers of bytes are, as a ratio."""
    return abs(math.log((size + 1) / target))


def draw(
    world: str,
    seed: int,
    steps: int = 10,
    kernels: int = 6,
    limits: Limits = Limits(),  # noqa: B008
    ops: Sequence[type[Call]] = OPS,
    sms: int | None = None,
) -> Program:
    """The program of a seed: the same for the same arguments. ``sms``: of each rank; None: some that target cpu has.

    On target cpu the rules or the model choose plans, one of them for all programs of a family.
    """
    family = seed >> SHARED_BITS
    planner = "auto" if sms is not None else random.Random(f"planner {world} {family}").choice(("rules", "model"))
    with env.override(MKERNEL_PLANNER=planner):
        return _drawn(world, seed, steps, kernels, limits, tuple(ops), sms, planner)


def _drawn(
    world: str, seed: int, steps: int, kernels: int, limits: Limits, ops: tuple[type[Call], ...], sms: int | None, planner: str
) -> Program:
    shape, family = topology(world), seed >> SHARED_BITS
    shared = random.Random(f"shared {world} {family}")
    few_sms = shared.choice((4, 6, 8))
    sms = sms or few_sms
    put_bytes = shared.choice((512 << 10, 64 << 10, 16 << 10))
    target = log_uniform(shared, *WORKSPACES)
    base = palette(world, family, kernels, sms, target, limits, ops, planner)
    compiled = {call.kernel(shape, sms) for call in base}
    rng = random.Random(f"program {world} {seed}")
    few = rng.sample(base, min(len(base), rng.randint(3, 5)))
    drawn: list[Step] = []
    for number in range(steps):
        before = drawn[-1].call if drawn else None
        if before is not None and rng.random() < 0.2:
            call = before
        else:
            left = before.workspace(shape, sms) if before is not None else 0
            call = _sized(rng, _next(rng, few, before), shape, sms, limits, compiled, left if left and rng.random() < 0.8 else target)
        drawn.append(_step(rng, number, call, shape, sms))
    network, prepared = _network(rng, shape), rng.random() < 0.85
    if prepared:  # else the others may wait for that rank on their hosts, where no virtual time passes
        drawn = _plans(rng, [_maybe_asleep(rng, step, shape, sms) for step in drawn], shape, sms, compiled)
    return Program(world, seed, tuple(drawn), sms, put_bytes, network, prepared, planner)


def _sized(rng: random.Random, call: Call, world: Topology, sms: int, limits: Limits, compiled: set[object], target: int) -> Call:
    """The call, or one of other sizes that needs no other kernel: of any, or such that its workspace begins and ends near another's end.

    Areas lie one after the other in a workspace, so its size decides what lies where; a little more is best, because then the last area of
    the one is within the last of the other.
    """
    count = rng.choice((0, 1, CANDIDATES, CANDIDATES, CANDIDATES, CANDIDATES))
    drawn = [other for other in (call.resized(rng, world, limits) for _ in range(2 * count)) if fits(other, world, sms)]
    known = [call, *(other for other in drawn if other.kernel(world, sms) in compiled)]
    wanted = int(target * math.exp(rng.uniform(-0.1, 0.8)))
    return known[-1] if count < CANDIDATES else min(known, key=lambda other: _far(other.workspace(world, sms), wanted))


def _next(rng: random.Random, calls: Sequence[Call], before: Call | None) -> Call:
    """Mostly of another op than the call before: it leaves other things at other places."""
    others = [call for call in calls if before is None or (call.op, call.mechanism) != (before.op, before.mechanism)]
    return rng.choice(others if others and rng.random() < 0.8 else list(calls))


def _step(rng: random.Random, number: int, call: Call, world: Topology, sms: int) -> Step:
    operands = call.inputs(world, 0)
    places = tuple(rng.choice(PLACES) for _ in operands)
    out = rng.choice(OUTS)
    arrays = {**operands, "out": call.result(world, 0)}
    padded = tuple(name for name, array in arrays.items() if array.padded and rng.random() < 0.25 and (name, out) != ("out", "none"))
    gathered = rng.choice(PLACES) if call.keeps(world) is not None and rng.random() < 0.3 else "none"
    return Step(number, call, places, out, padded, rng.random() < 0.05, _late(rng, world, sms), gathered=gathered)


def _late(rng: random.Random, world: Topology, sms: int) -> tuple[tuple[int, int, int, int], ...]:
    """Mostly one rank; some, each for a time of its own; or nobody.

    Where nobody else can go on, the shortest rest ends: whoever rests longest falls behind all others by as much as the protocol allows.
    """
    if rng.random() < 0.05:
        return ()
    ranks = rng.sample(range(world.size), min(world.size, rng.choice((1, 1, 1, 2, world.size))))
    return tuple((rank, *_rest(rng, sms)) for rank in ranks)


def _rest(rng: random.Random, sms: int) -> tuple[int, int, int]:
    """Who of a rank rests, after how many copies, for how long.

    Mostly it is the first CTA, which communicates, time and again amid its copies; else all CTAs, or the rank from the beginning.
    """
    turns = rng.randint(FOREVER, 2 * FOREVER) if rng.random() < 0.7 else log_uniform(rng, *HELD)
    how = rng.random()
    if how < 0.1:
        return -1, 0, turns
    cta = -1 if how < 0.2 else rng.choice((0, 0, 0, 0, 0, 1, 2, rng.randrange(sms)))
    return cta, log_uniform(rng, 1, 32), turns


def _maybe_asleep(rng: random.Random, step: Step, world: Topology, sms: int) -> Step:
    """Seldom with a rank that comes seconds late to a call in which it and others have something to do: they let the time pass."""
    if rng.random() >= 0.03 or world.size == 1 or step.call.workspace(world, sms) == 0:
        return step
    return dataclasses.replace(step, asleep=(rng.randrange(world.size), rng.uniform(*ASLEEP)))


def _plans(rng: random.Random, steps: Sequence[Step], world: Topology, sms: int, compiled: set[object]) -> list[Step]:
    """Some steps plan for more rows than they have; later ones of the same problem and split are then left to that plan, or have their own.

    Plans for many rows need the kernels of all classes up to there: such steps are found whose kernels others need anyway.
    """
    planned, most = list[Step](), dict[object, int]()
    for step in steps:
        key, rows = step.call.sized(1), step.call.sizes
        if rows <= most.get(key, -1) and rng.random() < 0.8:
            planned.append(dataclasses.replace(step, planned=False))
            continue
        wanted = max(1, rows, max(other.call.sizes for other in steps if other.call.sized(1) == key))
        wanted = wanted if rng.random() < 0.7 else log_uniform(rng, wanted, 2 * wanted)
        ends = [step.call.sized(end) for end in classes(wanted)]  # whose split does not fit, where they are done in another way
        if rng.random() < 0.7 and all(fits(end, world, sms) and end.kernel(world, sms) in compiled for end in ends):
            most[key] = max(wanted, most.get(key, 0))
            step = dataclasses.replace(step, max_rows=wanted)
        planned.append(step)
    return planned


def _network(rng: random.Random, world: Topology) -> Network:
    if world.num_nodes == 1 or rng.random() < 0.3:
        return Network()
    delay, reorder, ack = (rng.choice((0.0, 0.0, 20.0, 100.0, 400.0)) for _ in range(3))
    if rng.random() < 0.3:
        return Network(delay, reorder, sms=True)
    return Network(delay, reorder, ack, rng.random() < 0.2)
