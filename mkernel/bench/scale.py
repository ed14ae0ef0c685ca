"""How calls are predicted to scale with nodes: curves by op, strong and weak, what binds at each size, and where algorithms change.

Worlds of more than ``MAX_RANKS`` ranks (ring attention: ``MOST_RANKS``) cannot run, nor plans that need more than there is: their points
are on paper only. Needs no GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mkernel.abi import COUNTED_OFFSET, MAX_RANKS, SIGNAL_FLAGS
from mkernel.errors import ArgumentError
from mkernel.ops.moe import check_columns
from mkernel.planner import moe_combine, moe_dispatch_gemm, moe_gemm_combine, reduce
from mkernel.planner.allgather_gemm import AllGatherGemmProblem
from mkernel.planner.allgather_gemm import make_plan as plan_allgather
from mkernel.planner.choose_moe import plan_moe_dispatch_gemm, plan_moe_gemm_combine
from mkernel.planner.machine import Machine
from mkernel.planner.predict import predict
from mkernel.planner.prediction import ITEM, Prediction
from mkernel.planner.ring_attention import make_plan as plan_attention
from mkernel.planner.ring_problem import MOST_RANKS, RingAttentionProblem, Sizes
from mkernel.planner.split import SplitError
from mkernel.planner.topology import Topology
from mkernel.tools.table import format_table

__all__ = ["GROWTHS", "SCALED", "Point", "curve", "moe_plans", "scale_table", "switch_table"]

GROWTHS = ("strong", "weak")
_DTYPE = "bfloat16"
_ROWS, _COLUMNS, _HIDDEN = 1 << 18, 1 << 18, 8192  # of all ranks together
_RANK_ROWS, _RANK_COLUMNS = 1024, 4096  # of each
_HEADS, _KV_HEADS, _HEAD_DIM = 16, 8, 128
_LENGTH, _RANK_LENGTH = 1 << 22, 8192
_MOE_HIDDEN, _MOE_INNER, _EXPERTS, _TOPK = 7168, 2048, 256, 8
_TOKENS, _RANK_TOKENS = 1 << 20, 4096
_FLAG_WORDS = (COUNTED_OFFSET - SIGNAL_FLAGS) // 8  # of the signal segment
_HEAP_BYTES = 100 << 30  # of an H200's memory, that operands and results leave
_SWITCHED = (1024, 8192)  # columns of an all-reduce of few rows, K of a rank is _RANK_ROWS
_FEW_ROWS = tuple(1 << power for power in range(11))
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Point:
    """One world of a curve.

    Attributes
    ----------
    ideal
        Seconds of the products alone, at the rate of a rested GPU.
    missing
        What keeps mkernel from running it: ``ranks``, ``flags``, ``heap``, ``SMs``, ``columns`` (of moe's tables), ``shape``.
    """

    nodes: int
    ranks: int
    ideal: float
    prediction: Prediction | None
    missing: tuple[str, ...] = ()

    @property
    def efficiency(self) -> float:
        """The products alone over the call; 0 where nothing is predicted."""
        return self.ideal / self.prediction.seconds if self.prediction else 0.0


class _Found(NamedTuple):
    """What is found of a world: seconds of the products alone, the call, and its plans."""

    ideal: float
    prediction: Prediction | None
    plans: tuple[Any, ...]


class _UnsplitError(ValueError):
    """A world into which the shape cannot be split any more."""


def _gemm(machine: Machine, m: int, n: int, k: int) -> float:
    return 2.0 * m * n * k / (machine.sm_flops * machine.sms)


def _whole(total: int, parts: int, unit: int) -> int:
    if total % (parts * unit):
        raise _UnsplitError
    return total // parts


def _allgather_gemm(machine: Machine, world: Topology, weak: bool) -> _Found:
    rows = _RANK_ROWS if weak else _whole(_ROWS, world.size, 1)
    n = _RANK_COLUMNS if weak else _whole(_COLUMNS, world.size, 8)
    plan = plan_allgather(AllGatherGemmProblem(world, n, _HIDDEN, _DTYPE, True), rows, machine.sms)
    return _Found(_gemm(machine, rows * world.size, n, _HIDDEN), predict(plan, machine), (plan,))


def _reduced(op: str) -> Callable[[Machine, Topology, bool], _Found]:
    def of(machine: Machine, world: Topology, weak: bool) -> _Found:
        k = _RANK_COLUMNS if weak else _whole(_COLUMNS, world.size, 8)
        scatters = op == reduce.REDUCE_SCATTER
        all_rows = (_RANK_ROWS * (world.size if scatters else 8)) if weak else _ROWS
        rows = _whole(all_rows, world.size, 1) if scatters else all_rows
        problem = reduce.ReduceProblem(op, world, _HIDDEN, k, _DTYPE, True)
        plan = reduce.make_plan(problem, rows, machine.sms)
        return _Found(_gemm(machine, all_rows, _HIDDEN, k), predict(plan, machine), (plan,))

    return of


def _ring_attention(machine: Machine, world: Topology, weak: bool) -> _Found:
    rows = _RANK_LENGTH if weak else _whole(_LENGTH, world.size, 1)
    scale = 1 / math.sqrt(_HEAD_DIM)
    problem = RingAttentionProblem(world, _HEADS, _KV_HEADS, _HEAD_DIM, _DTYPE, False, "contiguous", scale)
    flops = 4.0 * _HEADS * rows * rows * world.size * _HEAD_DIM
    plan = plan_attention(problem, Sizes(1, rows).code, machine.sms)
    return _Found(flops / (machine.attention_flops * machine.sms), predict(plan, machine), (plan,))


def moe_plans(machine: Machine, world: Topology, tokens: int, sizes: tuple[int, int, int, int], *, gated: bool) -> tuple[Any, Any]:
    """Plans of a dispatch and of a combine of so many tokens of all ranks under uniform routing, which nobody has drawn.

    ``sizes``: H, F, experts of a rank, choices of a token.
    """
    hidden, inner, experts, topk = sizes
    mine = math.ceil(tokens / world.size)
    rows = mine * topk
    most = math.ceil((rows + 8 * math.sqrt(rows)) / 64) * 64
    dispatched = moe_dispatch_gemm.MoeDispatchGemmProblem(
        world, inner, hidden, _DTYPE, True, experts, topk, mine, most, 1, False, gated, 0.0
    )  # fmt: skip
    combined = moe_combine.MoeCombineProblem(world, hidden, _DTYPE, topk, experts, mine, most, True)
    return (
        plan_moe_dispatch_gemm(dispatched, machine.sms, machine=machine),
        plan_moe_gemm_combine(moe_gemm_combine.MoeGemmCombineProblem(combined, inner, True), machine.sms, machine=machine),
    )


def _moe_layer(machine: Machine, world: Topology, weak: bool) -> _Found:
    """Uniform routing; an expert per rank at least: where there are more ranks than experts, weak scaling adds experts."""
    experts = max(1, _EXPERTS // world.size) if weak else _whole(_EXPERTS, world.size, 1)
    tokens = _RANK_TOKENS * world.size if weak else _TOKENS
    plans = moe_plans(machine, world, tokens, (_MOE_HIDDEN, _MOE_INNER, experts, _TOPK), gated=True)
    first, second = (predict(plan, machine, tokens=tokens) for plan in plans)
    if first is None or second is None:
        raise AssertionError("the model knows both kernels of the layer")
    both = Prediction(*(one + other for one, other in zip(first, second, strict=True)))
    return _Found(_gemm(machine, tokens // world.size * _TOPK, 3 * _MOE_INNER, _MOE_HIDDEN), both, plans)


SCALED: dict[str, Callable[[Machine, Topology, bool], _Found]] = {
    "allgather_gemm": _allgather_gemm,
    reduce.REDUCE_SCATTER: _reduced(reduce.REDUCE_SCATTER),
    reduce.ALLREDUCE: _reduced(reduce.ALLREDUCE),
    "ring_attention": _ring_attention,
    "moe_layer": _moe_layer,
}


def curve(op: str, growth: str, machine: Machine, nodes: Iterable[int], ranks_per_node: int = 8) -> list[Point]:
    """What is predicted of ``op`` in worlds of so many nodes, until its shape cannot be split further.

    Parameters
    ----------
    growth
        ``strong``: the shape of all ranks together stays; ``weak``: that of each rank does (M of an all-reduce, too).
    """
    found = []
    for count in nodes:
        world = Topology(count * ranks_per_node, ranks_per_node)
        missing = ["ranks"] if world.size > (MOST_RANKS if op == "ring_attention" else MAX_RANKS) else []
        try:
            of = SCALED[op](machine, world, growth == "weak")
        except (SplitError, _UnsplitError) as error:
            missing.append("shape" if isinstance(error, _UnsplitError) else "SMs")
            found.append(Point(count, world.size, 0.0, None, tuple(missing)))
            continue
        missing += ["flags"] if any(plan.flag_words > _FLAG_WORDS for plan in of.plans) else []
        missing += ["heap"] if any(plan.workspace_bytes + plan.staging_bytes > _HEAP_BYTES for plan in of.plans) else []
        missing += ["columns"] if op == "moe_layer" and not _has_columns(world) else []
        found.append(Point(count, world.size, of.ideal, of.prediction, tuple(missing)))
    return found


def _has_columns(world: Topology) -> bool:
    try:
        check_columns(world, _TOPK)
    except ArgumentError:
        return False
    return True


def scale_table(op: str, machine: Machine, most_nodes: int, ranks_per_node: int) -> str:
    """Both curves of an op, as text."""
    nodes = [1 << power for power in range(most_nodes.bit_length())]
    rows = []
    curves = [curve(op, growth, machine, nodes, ranks_per_node) for growth in GROWTHS]
    for points in zip(*curves, strict=True):
        cells = [str(points[0].nodes), str(points[0].ranks)]
        for point in points:
            if point.prediction is None:
                cells += ["-", "-", "-"]
            else:
                cells += [f"{point.prediction.seconds * 1e3:.3f}", f"{point.efficiency:.2f}", point.prediction.binds]
        rows.append([*cells, *(", ".join(point.missing) or "-" for point in points)])
    of_each = [[f"{growth} ms", "efficiency", "binds"] for growth in GROWTHS]
    head = ["nodes", "ranks", *of_each[0], *of_each[1], *(f"{growth} lacks" for growth in GROWTHS)]
    return format_table(head, rows)


def switch_table(machine: Machine, most_nodes: int, ranks_per_node: int) -> str:
    """All-reduces of few rows: up to how many rows they take one step, by the planner's rule and by the model, and how long some take."""
    rows = []
    for count in (1 << power for power in range(1, most_nodes.bit_length(), 2)):
        world, cells = Topology(count * ranks_per_node, ranks_per_node), [str(count)]
        for n in _SWITCHED:
            times = [_both(machine, world, each, n) for each in _FEW_ROWS]
            ruled = [each for each in _FEW_ROWS if reduce.choose_algorithm(world, each, n, ITEM) == "one_shot"]
            better = [each for each, (one, two) in zip(_FEW_ROWS, times, strict=True) if one < two]
            one, two = times[_FEW_ROWS.index(_SHOWN)]
            cells += [str(max(ruled, default=0)), str(max(better, default=0)), f"{one * 1e6:.0f}", f"{two * 1e6:.0f}"]
        rows.append(cells)
    columns = ("rule", "model", f"{_SHOWN} rows, one step us", "two steps us")
    return format_table(["nodes", *(f"N {n}: {column}" for n in _SWITCHED for column in columns)], rows)


def _both(machine: Machine, world: Topology, rows: int, n: int) -> tuple[float, float]:
    """Seconds of an all-reduce in one step and in two."""
    found = []
    for algorithm in reduce.ALGORITHMS:
        problem = reduce.ReduceProblem(reduce.ALLREDUCE, world, n, _RANK_ROWS, _DTYPE, True, algorithm=algorithm)
        prediction = predict(reduce.make_plan(problem, rows, machine.sms), machine)
        found.append(prediction.seconds if prediction else math.inf)
    one, two = found
    return one, two
