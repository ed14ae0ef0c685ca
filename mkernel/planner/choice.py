"""What the cost model would choose: the candidates of a problem and a class of rows, and the one that is predicted to be fastest.

Where GPUs have not confirmed it, the rules of thumb of each op choose (docs/planner.md), unless ``MKERNEL_PLANNER`` says ``model``.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mkernel import env
from mkernel.planner import allgather_gemm, reduce
from mkernel.planner.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem
from mkernel.planner.candidates import candidates, compiled_in
from mkernel.planner.heights import Heights, heights_of, may_take_turns, most_wanted, with_heights
from mkernel.planner.kinds import serves_all
from mkernel.planner.machine import Machine, machine_named
from mkernel.planner.predict import predict
from mkernel.planner.prediction import ALONE, Conditions
from mkernel.planner.reduce import ReducePlan, ReduceProblem
from mkernel.planner.row_classes import EXAMINED_ROWS, MOST_KERNELS, Kernel, class_of, classes
from mkernel.planner.split import Split
from mkernel.planner.tiling import Tiling

__all__ = ["Ranked", "candidates", "choose", "model_decides", "plan_allgather_gemm", "plan_reduce", "ranked"]

CONFIRMED_SMS = 132
_PER_DOUBLING = 8  # classes that are examined, beyond 128 rows: what is best changes slowly there
_HEIGHTS_PER_DOUBLING = 16  # the same of heights of tiles


def _some_classes(per_doubling: int) -> tuple[int, ...]:
    return tuple(rows for rows in classes(EXAMINED_ROWS) if rows % max(1, (1 << (rows - 1).bit_length()) // (2 * per_doubling)) == 0)


_CLASSES = _some_classes(_PER_DOUBLING)
# How much each counts: all numbers of digits that M may have count alike, so that thousands of rows do not outvote tens.
_WEIGHTS = tuple(math.log((end + 1) / (before + 1)) for before, end in itertools.pairwise((0, *_CLASSES)))
# Of the kernels of one N and K: how much less calls must take by another one, in the mean over all digits of M, to be worth that one.
_LEAST_GAIN = 3e-4
_MISSING = math.log(4)  # how much longer a class counts for that has no kernel yet
# Of the time of the rules' plan, between ranks: what a candidate by another kernel must promise to be chosen; and by chunks or partial
# tiles, which predictions are as far off, unless they differ in loads, or in the number of tiles; and clusters of reductions in packets,
# which wait for other ranks together. In a world of one predictions rank plans better than the rules do (docs/speed_log.md, "What is
# chosen, fitted").
_WORTH = 0.98
_WORTH_OF_TILES = 0.9
_WORTH_OF_SWAPPED = 0.95  # of the latter with swapped operands
_WORTH_OF_PACKETS = 0.8, 0.95  # of a reduction in tiles, which take less than predicted; with swapped operands (docs/speed_log.md)
_WORTH_OF_PUSHED = 0.95  # the same of gathers whose chunks are pushed by CTAs, of which most times are known (docs/speed_log.md)


class Promised(NamedTuple):
    """A candidate, the seconds that it is predicted to take, and the share of the rules' time that it must stay below."""

    plan: Any
    seconds: float
    worth: float


class Ranked(NamedTuple):
    """A candidate and the seconds that it is predicted to take."""

    seconds: float
    plan: Any


def ranked(
    problem: Any, rows: int, sm_count: int, machine: Machine, specialize: str | None = None, conditions: Conditions = ALONE
) -> list[Ranked]:
    """All candidates for the class of ``rows``, the fastest first; of equals the one that comes first, so that all ranks agree."""
    found = [_predicted(plan, machine, conditions) for plan in candidates(problem, class_of(rows), sm_count, specialize)]
    return sorted(found, key=lambda one: one.seconds)


def _predicted(plan: Any, machine: Machine, conditions: Conditions = ALONE) -> Ranked:
    prediction = predict(plan, machine, conditions)
    assert prediction is not None, "there is a model of every op with candidates"
    return Ranked(prediction.seconds, plan)


def _may_be_chosen(plan: Any) -> bool:
    """Whether the plan's kernel is for one N and K, or of those that serve all of them."""
    return bool(plan.specialize & {"n", "k"}) or serves_all(plan)


def _fastest(problem: Any, of_class: int, sm_count: int, machine: Machine, specialize: str | None, kept: frozenset[Any]) -> Any:
    """The fastest plan by one of these kernels, if it is faster than the rules' by more than the model can tell apart."""
    return _best(_promised(problem, of_class, sm_count, machine, specialize, kept), kept)


def _best(promised: Sequence[Promised], kept: frozenset[Any]) -> Any:
    """The same of these, the rules' first. If none is, and the rules' kernel is none of those, the fastest of the others."""
    rules, *others = promised
    worth = [one for one in others if one.seconds < one.worth * rules.seconds]
    if not worth and rules.plan.spec not in kept:
        worth = others
    return min(worth, key=lambda one: one.seconds, default=rules).plan  # of equals the first


@functools.lru_cache(maxsize=1)  # ``choose`` asks twice in a row
def _promised(
    problem: Any, of_class: int, sm_count: int, machine: Machine, specialize: str | None, kept: frozenset[Any] | None = None
) -> list[Promised]:
    """All candidates, the rules' plan first; ``kept``: else by these kernels only."""
    rules, *others = candidates(problem, of_class, sm_count, specialize, kept)
    found = [Promised(rules, _predicted(rules, machine).seconds, 1.0)]
    return found + [Promised(plan, _weighed(rules, plan, machine), _worth(rules, plan)) for plan in others]


def _weighed(rules: Any, plan: Any, machine: Machine) -> float:
    """Predicted seconds, of packets where the rules have tiles so many that these are surely slower."""
    is_other = isinstance(plan, ReducePlan) and plan.packets and not rules.packets
    return _predicted(plan, machine).seconds / (_WORTH_OF_PACKETS[plan.swapped > 0] if is_other else 1.0)


def _differs_in_tiles(rules: Any, plan: Any) -> bool:
    """Whether a plan that is else like the rules' has other loads, or fewer tiles, of the same width."""
    return bool(plan.tile.block_n == rules.tile.block_n and (plan.ctas_together > rules.ctas_together or plan.span > rules.span))


def _worth(rules: Any, plan: Any) -> float:
    """The most that a plan may take of the rules' time, to be chosen instead."""
    gathers = isinstance(plan, AllGatherGemmPlan)
    if rules.problem.topology.size == 1:
        return 1.0
    if getattr(plan, "algorithm", None) != getattr(rules, "algorithm", None):
        return _WORTH_OF_TILES
    if rules.packets or (gathers and plan.packets):  # of which predictions are near
        waits = plan.packets and not gathers and plan.ctas_together > 1
        if not waits:
            return 1.0 if plan.spec == rules.spec else _WORTH
        return _WORTH_OF_SWAPPED if plan.swapped else _WORTH_OF_TILES
    alike = (rules.split, rules.packets) == (plan.split, plan.packets)
    if alike and _differs_in_tiles(rules, plan):
        return _WORTH
    return _WORTH_OF_PUSHED if gathers and plan.split.intra_comm else _WORTH_OF_TILES


def _seconds_by(problem: Any, of_class: int, sm_count: int, machine: Machine, specialize: str | None) -> dict[Any, float]:
    """By kernel that the class may have: the seconds that it is predicted to take, and longer where it must promise more."""
    found: dict[Any, float] = {}
    others: dict[Any, float] = {}
    for plan, seconds, worth in _promised(problem, of_class, sm_count, machine, specialize):
        among = found if _may_be_chosen(plan) else others
        among[plan.spec] = min(seconds / worth, among.get(plan.spec, math.inf))
    return found or others


def _covering(seconds: Sequence[Mapping[Kernel, float]], weights: Sequence[float]) -> frozenset[Kernel]:
    """At most ``MOST_KERNELS`` kernels, one at least possible for each class: those without which calls would take longest.

    Taken one after the other, each the one by which the mean of the logarithms of all classes' times falls most, as far as that is
    ``_LEAST_GAIN``. Where a class can have none of these, others that most such classes can have take the places of the last.

    ``seconds``: of each class, by kernel. ``weights``: of the classes.
    """
    order = _most_useful(seconds, weights)
    for number in range(len(order), -1, -1):
        kept = order[:number]
        left = [list(kernels) for kernels in seconds if not any(kernel in kernels for kernel in kept)]
        while left and len(kept) < MOST_KERNELS:
            best, _ = collections.Counter(itertools.chain.from_iterable(left)).most_common(1)[0]
            kept.append(best)
            left = [kernels for kernels in left if best not in kernels]
        if not left:
            return frozenset(kept)
    raise AssertionError("few plain kernels are possible everywhere")


def _most_useful(seconds: Sequence[Mapping[Kernel, float]], weights: Sequence[float]) -> list[Kernel]:
    """The kernels of ``_covering``, the most useful first."""
    # Of a class, how much longer it takes by a kernel than by its fastest, as a logarithm; without any that it may have a lot.
    longer = [{kernel: math.log(one / min(of_class.values())) for kernel, one in of_class.items()} for of_class in seconds]
    left, whole = [_MISSING] * len(longer), sum(weights)
    order: list[Kernel] = []
    while len(order) < MOST_KERNELS:
        gains: dict[Kernel, float] = {}
        for of_class, now, weight in zip(longer, left, weights, strict=True):
            for kernel, one in of_class.items():
                gains[kernel] = gains.get(kernel, 0.0) + weight * max(0.0, now - one)
        best = max(gains, key=lambda kernel: gains[kernel])  # of equals the first
        if gains[best] < _LEAST_GAIN * whole:
            break
        order.append(best)
        left = [min(now, of_class.get(best, now)) for of_class, now in zip(longer, left, strict=True)]
    return order


@functools.lru_cache(maxsize=64)
def _kept(problem: Any, sm_count: int, machine: Machine, specialize: str | None) -> frozenset[Any]:
    """The kernels that one N and K has for all numbers of rows: few, and every class can have one."""
    seconds = {rows: _seconds_by(problem, rows, sm_count, machine, specialize) for rows in _CLASSES}
    while True:
        kept = _covering(list(seconds.values()), [*_WEIGHTS, *[0.0] * (len(seconds) - len(_WEIGHTS))])
        others = [rows for rows in classes(EXAMINED_ROWS) if rows not in seconds]
        left = [rows for rows in others if not any(plan.spec in kept for plan in candidates(problem, rows, sm_count, specialize, kept))]
        if not left:
            return kept
        seconds |= {rows: _seconds_by(problem, rows, sm_count, machine, specialize) for rows in left}


@functools.lru_cache(maxsize=4096)
def choose(problem: Any, of_class: int, sm_count: int, machine: Machine, specialize: str | None) -> Any:
    """The plan for a class of rows: ``_of_any_height`` if kernels have that height, else the fastest by the heights that they have."""
    plan = _of_any_height(problem, of_class, sm_count, machine, specialize)
    if not _has_own_heights(plan):
        return plan  # fewer heights make the others no faster
    heights = _heights(problem, sm_count, machine, specialize)
    mine = with_heights(plan, heights[plan.spec])
    if mine.block_rows == plan.block_rows:
        return mine  # neither do they here
    kept = _kept(problem, sm_count, machine, specialize)
    rules, *others = _promised(problem, of_class, sm_count, machine, specialize, kept)
    found = [_of_heights(rules.plan, one, heights.get(one.plan.spec), machine) for one in others]
    return _best([rules, *found], kept)


@functools.lru_cache(maxsize=4096)
def _of_any_height(problem: Any, of_class: int, sm_count: int, machine: Machine, specialize: str | None) -> Any:
    """``_fastest``, by the kernels that the problem may have, as if each had all heights."""
    return _fastest(problem, of_class, sm_count, machine, specialize, _kept(problem, sm_count, machine, specialize))


def _has_own_heights(plan: Any) -> bool:
    """Whether operands are swapped, and the kernel is for one N and K, so that it has the heights that its own classes want."""
    return bool(plan.swapped and plan.specialize & {"n", "k"})


def _of_heights(rules: Any, promised: Promised, kernels: list[Heights] | None, machine: Machine) -> Promised:
    """The same of a kernel that has few heights, if it has any."""
    if kernels is None:
        return promised
    plan = with_heights(promised.plan, kernels)
    if not may_take_turns(plan):  # higher tiles may be too few
        return promised._replace(plan=plan, seconds=math.inf)
    same = plan.block_rows == promised.plan.block_rows
    return promised._replace(plan=plan, seconds=promised.seconds if same else _weighed(rules, plan, machine))


@functools.lru_cache(maxsize=64)
def _heights(problem: Any, sm_count: int, machine: Machine, specialize: str | None) -> dict[Any, list[Heights]]:
    """By kernel with swapped operands that one N and K has: the heights of tiles that it is compiled for, or several are."""
    wanted: dict[Any, dict[int, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    kept = _kept(problem, sm_count, machine, specialize)
    for before, rows in itertools.pairwise((0, *_some_classes(_HEIGHTS_PER_DOUBLING))):
        plan = _of_any_height(problem, rows, sm_count, machine, specialize)
        if _has_own_heights(plan):
            wanted[plan.spec][plan.block_rows] += math.log((rows + 1) / (before + 1))
    gathers = isinstance(problem, AllGatherGemmProblem) and problem.topology.size > 1  # (reductions take NVRTC a second without any)
    sizes: dict[Any, int] = {}
    for kernel in kept:
        constants = dict(kernel.constants)
        if "kHeights" in constants:
            sizes[kernel] = 2 if gathers or constants.keys() & {"kColumns", "kAlternates"} else 1
            wanted.setdefault(kernel, {heights_of(constants["kHeights"])[-1]: 0.0})  # if no class wants it that was looked at
    return most_wanted(wanted, sizes)


def model_decides(problem: Any, sm_count: int) -> bool:
    """Whether it may: where it was confirmed, in one node, on as many SMs as an H200 has (docs/model.md)."""
    asked, topology = env.PLANNER.get(), problem.topology
    return asked == "model" or (asked == "auto" and topology.num_nodes == 1 and sm_count == CONFIRMED_SMS)


def _chosen(problem: Any, rows: int, sm_count: int, split: Split | None, specialize: str | None, machine: Machine | None) -> Any:
    """The model's plan; None where the rules decide: where a split is given, or compiled into kernels, or the model was not confirmed."""
    if split is not None or not model_decides(problem, sm_count):
        return None
    fields = compiled_in(problem, specialize)
    if "split" in fields:
        return None
    machine = machine or machine_named(env.MACHINE.get(), sm_count)
    return choose(problem, class_of(rows), sm_count, machine, str(fields)).of_rows(rows)


def plan_allgather_gemm(
    problem: AllGatherGemmProblem,
    rows: int,
    sm_count: int,
    split: Split | None = None,
    *,
    specialize: str | None = None,
    tiling: Tiling | None = None,
    machine: Machine | None = None,
) -> AllGatherGemmPlan:
    """The plan of a call, by the rules, or by the model (``MKERNEL_PLANNER``) of ``machine`` if no tiling is asked for.

    Raises SplitError, TilingError.
    """
    chosen: AllGatherGemmPlan | None = _chosen(problem, rows, sm_count, split, specialize, machine) if tiling is None else None
    return chosen or allgather_gemm.make_plan(problem, rows, sm_count, split, specialize=specialize, tiling=tiling)


def plan_reduce(
    problem: ReduceProblem,
    rows: int,
    sm_count: int,
    split: Split | None = None,
    *,
    specialize: str | None = None,
    tiling: Tiling | None = None,
    machine: Machine | None = None,
) -> ReducePlan:
    """The plan of a call, by the rules, or by the model (``MKERNEL_PLANNER``) of ``machine`` if no tiling is asked for.

    Raises SplitError, TilingError.
    """
    chosen: ReducePlan | None = _chosen(problem, rows, sm_count, split, specialize, machine) if tiling is None else None
    return chosen or reduce.make_plan(problem, rows, sm_count, split, specialize=specialize, tiling=tiling)
