"""Random sequences of calls of every op on overlapping areas, checked element by element; sums are of integers that float16 holds.

The same on threads of ``mk.launch`` and in processes of several hosts. An op joins with a line in ``KINDS``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

import mkernel as mk
from mkernel.ops.schedule import choice_of
from mkernel.planner import moe_dispatch_gemm as planner
from mkernel.planner import ring_attention
from mkernel.planner.topology import Topology
from tests.ops import ring_body, varlen_body
from tests.ops.moe_body import ROUTINGS, Model, draw_ids

MOST = 40  # tokens of a rank
N = K = H = 64
MODEL = Model(H, H, 2, 2, "float16", True, False, False, 1, MOST)
FOREVER = 1 << 40  # turns: as long as anybody else can go on


def integers(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float16)


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of all ranks. ``late``: a rank, one of its CTAs, and after how many asynchronous copies it rests each time."""

    kind: str
    seed: int
    rows: int
    late: tuple[int, int, int] | None


def draw(rng: np.random.Generator, ranks: int, count: int, most_rows: int = 1024) -> list[Step]:
    steps = []
    for _ in range(count):
        late = (int(rng.integers(ranks)), int(rng.choice([0, 0, 0, 1, 2])), int(2 ** rng.uniform(0, 5)))
        rows = int(2 ** rng.uniform(0, np.log2(most_rows)))
        steps.append(Step(str(rng.choice(list(KINDS))), int(rng.integers(1 << 30)), rows, late if rng.random() < 0.8 else None))
    return steps


def draw_each(rng: np.random.Generator, world: Topology, count: int, most_rows: int, kinds: Sequence[str] = ()) -> list[Step]:
    """At least one step of each kind, or of each of ``kinds`` and no other, in which each rank's data travels; ``count`` in all."""
    steps, kinds = [], kinds or list(KINDS)
    for at, step in enumerate(draw(rng, world.size, max(count, len(kinds)), most_rows)):
        wanted = kinds[at] if at < len(kinds) else str(rng.choice(kinds))
        step = dataclasses.replace(step, kind=wanted)
        while at < len(kinds) and not travels(step, world):
            step = dataclasses.replace(step, seed=int(rng.integers(1 << 30)))
        steps.append(step)
    return [steps[at] for at in rng.permutation(len(steps))]


def travels(step: Step, world: Topology) -> bool:
    """Whether each rank has something for another node, beside signals."""
    if step.kind in ROUTED:
        for rank, ids in enumerate(routing(world.size, step)):
            if all(world.node(int(expert) // MODEL.experts) == world.node(rank) for expert in ids[ids >= 0]):
                return False
    return step.kind != "packed attention" or max(packed_of(step).lengths, default=0) >= 2 * world.size


def gather(world: Any, step: Step) -> bool:
    a, b = [integers(step.seed + r, step.rows, K) for r in range(world.size)], integers(step.seed - 1, K, N)
    # Few rows inside a node travel in packets; every other time in chunks, as a PreparedPlan asks for them.
    split: Any = choice_of(None, None, {"packets": 0}) if step.seed % 2 and world.num_nodes == 1 else None
    return np.array_equal(mk.allgather_gemm(a[world.rank], b, split=split), np.concatenate(a).astype(np.float32) @ b.astype(np.float32))


def reduced(algorithm: str | None) -> Callable[[Any, Step], bool]:
    def use(world: Any, step: Step) -> bool:
        rows = step.rows * world.size
        a, b = ([integers(step.seed + r, *shape) for r in range(world.size)] for shape in ((rows, K), (K, N)))
        whole = sum(x.astype(np.float32) @ y.astype(np.float32) for x, y in zip(a, b, strict=True))
        if algorithm is not None:
            return np.array_equal(mk.gemm_allreduce(a[world.rank], b[world.rank], algorithm=algorithm), whole)
        own = whole[step.rows * world.rank :][: step.rows]
        return np.array_equal(mk.gemm_reduce_scatter(a[world.rank], b[world.rank]), own)

    return use


def routing(ranks: int, step: Step) -> list[Any]:
    """The experts of each rank's tokens."""
    rng = np.random.default_rng(step.seed)
    return draw_ids(rng, MODEL, ranks, str(rng.choice(ROUTINGS)))


def routed(world: Any, step: Step) -> tuple[Any, Any, Any, Any]:
    """Tokens of this rank, their experts, weights; factors of all experts, each of which multiplies by one."""
    ids = routing(world.size, step)[world.rank]
    own = np.random.default_rng(step.seed + world.rank + 1)
    x, weights = own.integers(-4, 5, (len(ids), H)).astype(np.float16), own.integers(0, 3, ids.shape).astype(np.float32)
    return x, ids, weights, np.arange(1, 1 + MODEL.experts * world.size)


def experts(world: Any, factors: Any) -> Any:
    own = factors[world.rank * MODEL.experts :][: MODEL.experts]
    return (own[:, None, None] * np.eye(H)).astype(np.float16)


def others(world: Any) -> tuple[int, int]:
    """Node mates, and ranks of the rail: each has an SM of its own that writes to it."""
    return world.ranks_per_node - 1, world.num_nodes - 1


def split_of(world: Any, step: Step, copying: int = 1, sending: int | None = None, again: int = 0) -> mk.Split | None:
    """Every other time one that leaves each role an SM or two: what is not waited for shows where one does everything in turn.

    ``copying``, ``sending``: the fewest SMs of the roles that the op has here.
    """
    rng = np.random.default_rng([step.seed, again])
    sending = min(1, world.num_nodes - 1) if sending is None else sending
    intra, inter = (least and least + int(rng.integers(2)) for least in (copying, sending))
    compute = [None, 1, 2][int(rng.integers(3))]
    fits = intra + inter + (compute or 1) <= world.backend.sm_count
    return mk.Split(compute, intra, inter) if fits and rng.random() < 0.5 else None


def layer(world: Any, step: Step) -> bool:
    x, ids, weights, factors = routed(world, step)
    both = experts(world, factors), experts(world, factors)
    y = mk.moe_layer(x, ids, weights, *both, activation=None, max_tokens=MOST, split=split_of(world, step))
    return np.array_equal(y, x * (weights * np.where(ids >= 0, factors[ids], 0) ** 2).sum(1, keepdims=True))


def there_and_back(world: Any, step: Step) -> bool:
    x, ids, weights, factors = routed(world, step)
    d = mk.moe_dispatch_gemm(x, ids, experts(world, factors), max_tokens=MOST, split=split_of(world, step))
    y = mk.moe_combine(d.y, d.routing, topk_weights=weights, split=split_of(world, step, again=1))
    return np.array_equal(y, x * (weights * np.where(ids >= 0, factors[ids], 0)).sum(1, keepdims=True))


def attention(world: Any, step: Step) -> bool:
    sizes = 1 + step.seed % 2, 2 * (1 + step.rows // 8)
    gathered = [ring_body.inputs(ring_body.PLANTED, step.seed, rank, 0, *sizes) for rank in range(world.size)]
    mine = ring_body.inputs(ring_body.PLANTED, step.seed, world.rank, 0, *sizes)
    found = ring_body.one_call(ring_body.PLANTED, mine, split_of(world, step, *others(world)))
    return not ring_body.errors(ring_body.PLANTED, world.size, world.rank, gathered, *found)


def packed_of(step: Step) -> varlen_body.Packed:
    rng = np.random.default_rng(step.seed)
    return varlen_body.Packed(tuple(int(2 ** rng.uniform(0, 8)) for _ in range(rng.integers(0, 5))), int(rng.integers(3)))


def packed_attention(world: Any, step: Step) -> bool:
    model, packed = varlen_body.PLANTED, packed_of(step)
    whole = varlen_body.whole(model, step.seed, 0, packed)
    mine = varlen_body.inputs(model, whole, packed, world.rank, world.size)
    found = varlen_body.one_call(model, mine, np.array(packed.ends(), np.int32), split_of(world, step, *others(world)))
    return not varlen_body.errors(model, whole, packed, world.rank, world.size, *found)


def refused(world: Any, step: Step) -> bool:
    x, ids, _, factors = routed(world, step)
    if world.rank == step.seed % world.size:
        x, ids = np.ones((3, H), np.float16), np.full((3, 2), 999, np.int32)
    try:
        mk.moe_dispatch_gemm(x, ids, experts(world, factors), max_tokens=MOST, split=split_of(world, step))
    except mk.RoutingError:
        return True
    return False


KINDS = {
    "allgather_gemm": gather,
    "gemm_reduce_scatter": reduced(None),
    "one shot": reduced("one_shot"),
    "two shot": reduced("two_shot"),
    "layer": layer,
    "dispatch and combine": there_and_back,
    "refused": refused,
    "attention": attention,
    "packed attention": packed_attention,
}
ROUTED = ("layer", "dispatch and combine", "refused")  # kinds whose tokens are routed


def hold(world: Any, step: Step, number: int) -> None:
    """Let the late CTA rest, between threads of ``mk.launch`` on target cpu."""
    world.backend.thread_ranks.hold(world.rank, FOREVER + number, step.late[2], step.late[1])


def program(world: Any, steps: Sequence[Step], rest: Callable[[Any, Step, int], None] = hold) -> list[int]:
    """Numbers of the steps that are wrong. Calls follow each other without a barrier. ``rest``: what a late rank does before a call."""
    wrong = []
    for number, step in enumerate(steps):
        if step.late is not None and step.late[0] == world.rank:
            rest(world, step, number)
        if not KINDS[step.kind](world, step):
            wrong.append(number)
    return wrong


@contextlib.contextmanager
def small_plans() -> Iterator[None]:
    """A few rows are several puts, and chunks of keys wait for room."""
    with mock.patch.object(planner, "PUT_BYTES", 256), mock.patch.object(ring_attention, "SCALE", ring_body.TINY):
        yield
