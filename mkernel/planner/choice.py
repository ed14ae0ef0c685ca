"""What the cost model would choose: the candidates of a problem and a class of rows, and the one that is predicted to be fastest.

Where GPUs have not confirmed it, the rules of thumb of each op choose (docs/planner.md), unless ``MKERNEL_PLANNER`` says ``model``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mkernel import env
from mkernel.planner import allgather_gemm, reduce
from mkernel.planner.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem
from mkernel.planner.derived import replaced
from mkernel.planner.gemm import BLOCK_K, BLOCK_M, GemmTile, choose_load_rows, row_of_b
from mkernel.planner.machine import Machine, machine_named
from mkernel.planner.predict import predict
from mkernel.planner.predict_gemm import least_seconds
from mkernel.planner.prediction import ALONE, Conditions
from mkernel.planner.pushing import pushing_ctas
from mkernel.planner.reduce import ALLREDUCE, ReducePlan, ReduceProblem
from mkernel.planner.row_classes import EXAMINED_ROWS, MOST_KERNELS, Kernel, class_of, classes
from mkernel.planner.spans import most_shares
from mkernel.planner.specialize import parse
from mkernel.planner.split import Split, SplitError
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology

__all__ = ["Ranked", "candidates", "choose", "model_decides", "plan_allgather_gemm", "plan_reduce", "ranked"]

_WIDTHS = (256, 192, 128, 64)
_PAIRED_WIDTHS = (256, 192, 128)  # of several ranks: narrower tiles load nearly as much of A as alone
_SHARED_WIDTHS, _SHARES_OF_SHARDS = (192, 128), (2, 3, 4)  # of tiles of single shards
_PULLING = (14,)  # beside what the rules have
_TAGGED_WIDTH, _TAGGED_ROUNDS = 64, 2  # of gathers: more rounds never pay, and wider tiles would be more kernels (docs/speed_log.md)
# Of workspace: in one step every rank has room for all partial tiles of all ranks. Larger results are no faster by it (docs/benchmarks.md).
_ONE_STEP_BYTES = 64 << 20
_FEW_ROWS = 2048  # of a reduction: beyond, tiles of 64 columns never pay
CONFIRMED_SMS = 132
_PER_DOUBLING = 4  # classes that are examined, beyond 128 rows: what is best changes slowly there
_CLASSES = tuple(rows for rows in classes(EXAMINED_ROWS) if rows % max(1, (1 << (rows - 1).bit_length()) // (2 * _PER_DOUBLING)) == 0)
# How much each counts: all numbers of digits that M may have count alike, so that thousands of rows do not outvote tens.
_WEIGHTS = tuple(math.log((end + 1) / (before + 1)) for before, end in itertools.pairwise((0, *_CLASSES)))
_WORTH = 0.98  # of the time of the rules' plan: a candidate that promises less is not worth another kernel;
# and between ranks, by chunks or partial tiles, which predictions are as far off, unless they differ in loads, or in the number of tiles
_WORTH_OF_TILES = 0.9
_WORTH_OF_PUSHED = 0.95  # the same of gathers whose chunks are pushed by CTAs, of which most times are known (docs/speed_log.md)


class Ranked(NamedTuple):
    """A candidate and the seconds that it is predicted to take."""

    seconds: float
    plan: Any


# By columns of a tile, CTAs of a cluster, and CTAs that do not multiply, at least: False where no plan with such tiles is wanted.
MayWin = Callable[[int, int, int], bool]


def _always(block_n: int, cluster: int, others: int) -> bool:
    return True


def _rules(problem: Any, rows: int, sm_count: int, specialize: str | None) -> Any:
    if isinstance(problem, AllGatherGemmProblem):
        return allgather_gemm.make_plan(problem, rows, sm_count, specialize=specialize)
    return reduce.make_plan(problem, rows, sm_count, specialize=specialize)


def candidates(
    problem: AllGatherGemmProblem | ReduceProblem, rows: int, sm_count: int, specialize: str | None = None, may_win: MayWin = _always
) -> Iterator[Any]:
    """Plans that kernels can do, each once: first that of the rules, then other tile widths, SMs that push or pull, and groups of tiles.

    ``may_win``: asked before a plan whose K is not shared is made.
    """
    rules = _rules(problem, rows, sm_count, specialize)
    yield rules
    if isinstance(problem, AllGatherGemmProblem):
        yield from _gathers(problem, rows, sm_count, specialize, rules, may_win)
    else:
        yield from _reductions(problem, rows, sm_count, specialize, rules, may_win)
        if problem.op == ALLREDUCE and problem.algorithm is None and problem.topology.num_nodes == 1 < problem.topology.size:
            yield from _by_another_algorithm(problem, rows, sm_count, specialize, rules, may_win)


def _gathers(
    problem: AllGatherGemmProblem, rows: int, sm_count: int, specialize: str | None, rules: AllGatherGemmPlan, may_win: MayWin
) -> Iterator[AllGatherGemmPlan]:
    topology = problem.topology
    if topology.size == 1:
        yield from _products(problem, rows, sm_count, specialize, rules, may_win)
        return
    if allgather_gemm.may_travel_in_packets(problem, rows):
        yield from _in_packets(problem, rows, sm_count, specialize, rules, may_win)
    if rules.packets:
        return
    inside, most = topology.num_nodes == 1, max(1, sm_count // 4)
    spans = _spans(topology, rows)
    pushing = 0, *pushing_ctas(topology)  # CTAs; none: a warp of every computing one
    for split in [Split(intra_comm=ctas) for ctas in pushing if ctas <= most] if inside else [Split()]:
        pushed_by_warps = inside and not split.intra_comm  # a warp that pushes stands in front of the loads of both CTAs of a pair
        for width in _WIDTHS:
            if may_win(width, 1, 0):
                plan = allgather_gemm.make_plan(problem, rows, sm_count, split, GemmTile.deepest(width), specialize)
                if plan != rules:
                    yield plan
                for span in spans if split.intra_comm or topology.size == 2 else ():
                    tiling = Tiling(width, span, 1)
                    spanning = allgather_gemm.make_plan(problem, rows, sm_count, split, specialize=specialize, tiling=tiling)
                    if spanning not in (plan, rules):
                        yield spanning
            yield from (plan for plan in _sharing_of_shards(problem, rows, sm_count, split, specialize, width) if plan != rules)
            if width in _PAIRED_WIDTHS and not pushed_by_warps and _may_bind(problem, rows) and may_win(width, 2, 0):
                yield from (plan for plan in _in_pairs(problem, rows, sm_count, split, specialize, width) if plan != rules)


def _in_pairs(
    problem: AllGatherGemmProblem, rows: int, sm_count: int, split: Split, specialize: str | None, width: int
) -> Iterator[AllGatherGemmPlan]:
    for span in (1, *_spans(problem.topology, rows, 2 * BLOCK_M)):
        with contextlib.suppress(SplitError):  # few SMs
            pairs = Tiling(width, span, 1, 2)
            yield allgather_gemm.make_plan(problem, rows, sm_count, split, specialize=specialize, tiling=pairs)


def _sharing_of_shards(
    problem: AllGatherGemmProblem, rows: int, sm_count: int, split: Split, specialize: str | None, width: int
) -> Iterator[AllGatherGemmPlan]:
    """K of the tiles of single shards shared by CTAs, where tiles are few: what is left to do when the last chunk has come is a share.

    So shares may be more than there are SMs.
    """
    tiles = problem.topology.size * math.ceil(rows / BLOCK_M) * math.ceil(problem.n / width)
    if width not in _SHARED_WIDTHS or not split.intra_comm or problem.canonical or tiles > sm_count:
        return
    for shares in _SHARES_OF_SHARDS:
        tiling = Tiling(width, 1, shares, 1, 0)
        with contextlib.suppress(TilingError):  # fewer k steps
            yield allgather_gemm.make_plan(problem, rows, sm_count, split, specialize=specialize, tiling=tiling)


def _spans(topology: Topology, rows: int, of_tiles: int = BLOCK_M) -> list[int]:
    """Numbers of shards for tiles to span: all, where there are fewer tiles then. Some begin as early as those of single shards.

    ``of_tiles``: the rows that CTAs take together. Of shards that are no higher the rules see to it.
    """
    size = topology.size
    fewer = rows > of_tiles and math.ceil(size * rows / of_tiles) < size * math.ceil(rows / of_tiles)
    return [size] if fewer and topology.num_nodes == 1 else []


def _shares(problem: AllGatherGemmProblem | ReduceProblem, rows: int, sm_count: int, width: int) -> list[int]:
    """Numbers of shares of K that may be worth their sums: as many as there are SMs, half as many, or two. ``rows``: that tiles lie in."""
    most = 0 if problem.canonical else most_shares(rows, problem.n, problem.k, width, sm_count)
    return sorted({most, max(2, most // 2), 2}) if most >= 2 else []


def _sharings(
    problem: AllGatherGemmProblem | ReduceProblem,
    rows: int,
    sm_count: int,
    widths: tuple[int, ...],
    known: tuple[int, int] | None,
    may_win: MayWin,
) -> Iterator[tuple[int, int]]:
    """Widths of tiles and shares of their K, one of them among these, but ``known``; narrow tiles only where all are worked on at once."""
    for width in widths:
        if width == _WIDTHS[-1] and math.ceil(rows / BLOCK_M) * math.ceil(problem.n / width) > sm_count:
            continue
        for shares in (1, *_shares(problem, rows, sm_count, width)):
            if (width, shares) != known and (shares > 1 or may_win(width, 1, 0)):
                yield width, shares


def _in_packets(
    problem: AllGatherGemmProblem, rows: int, sm_count: int, specialize: str | None, rules: AllGatherGemmPlan, may_win: MayWin
) -> Iterator[AllGatherGemmPlan]:
    """Where shards travel in packets, or could: as in a world of one; in tagged ones, where each CTA takes its rows in few rounds."""
    all_rows, asked = rows * problem.topology.size, None if rules.packets else 1
    known = (rules.tile.block_n, rules.shares) if rules.packets else None
    alone = (Tiling(width, None, shares, 1, asked) for width, shares in _sharings(problem, all_rows, sm_count, _WIDTHS, known, may_win))
    widths = _PAIRED_WIDTHS if _may_bind(problem, all_rows) else ()
    pairs = (Tiling(width, None, 1, 2, asked) for width in widths if may_win(width, 2, 0))
    for tiling in itertools.chain([None] if rules.packets else [], alone, pairs):
        plan = rules
        if tiling is not None:
            try:
                plan = allgather_gemm.make_plan(problem, rows, sm_count, specialize=specialize, tiling=tiling)
            except SplitError:  # one SM is no pair
                continue
            yield plan
        if plan.tile.block_n == _TAGGED_WIDTH and plan.rounds <= _TAGGED_ROUNDS:
            yield replaced(plan, tagged=True)


def _may_bind(problem: AllGatherGemmProblem | ReduceProblem, rows: int) -> bool:
    """Whether loads may bind, so that pairs of CTAs may pay: elsewhere one N and K would have too many kernels to choose from."""
    return rows > BLOCK_M and (problem.n % BLOCK_K != 0 or problem.k % BLOCK_K != 0)


def _products(
    problem: AllGatherGemmProblem, rows: int, sm_count: int, specialize: str | None, rules: AllGatherGemmPlan, may_win: MayWin
) -> Iterator[AllGatherGemmPlan]:
    """In a world of one, where the width, shares and pairs are all that plans of a class differ in."""
    for width in _WIDTHS:
        if (width, 1, 1) != (rules.tile.block_n, rules.shares, rules.cluster) and may_win(width, 1, 0):
            yield allgather_gemm.make_plan(problem, rows, sm_count, Split(), GemmTile.deepest(width), specialize)
        if _may_bind(problem, rows) and may_win(width, 2, 0):
            pairs = Tiling(width, 1, 1, 2)
            with contextlib.suppress(SplitError):  # few SMs
                yield allgather_gemm.make_plan(problem, rows, sm_count, Split(), specialize=specialize, tiling=pairs)
        for shares in _shares(problem, rows, sm_count, width):
            if (width, shares) != (rules.tile.block_n, rules.shares):
                tiling = Tiling(width, 1, shares)
                yield allgather_gemm.make_plan(problem, rows, sm_count, Split(), specialize=specialize, tiling=tiling)


def _reductions(
    problem: ReduceProblem, rows: int, sm_count: int, specialize: str | None, rules: ReducePlan, may_win: MayWin
) -> Iterator[ReducePlan]:
    topology = problem.topology
    most = max(1, sm_count // 4)
    pulls = problem.op == ALLREDUCE and topology.num_nodes == 1 < topology.size and not rules.one_shot
    # Partial tiles of 64 columns take up to twice as long as predicted: many small stores, and flags, over the links.
    widths = _WIDTHS if topology.size == 1 and rows <= _FEW_ROWS else _WIDTHS[:-1]
    if rules.span > 1:  # a reduce-scatter in packets: or by partial tiles
        for width in widths:
            if may_win(width, 1, 0):
                yield reduce.make_plan(problem, rows, sm_count, Split(), specialize=specialize, tiling=Tiling(width, 1))
    if rules.packets:
        yield from _sharing(problem, rows, sm_count, specialize, rules, may_win)
    may_share = reduce.are_few(problem, rows)  # then a plan of a width may share K unasked
    for split in [Split(), *(Split(intra_comm=ctas) for ctas in _PULLING if pulls and ctas <= most)]:
        pulling = (split.intra_comm or reduce.fewest_pulling(sm_count)) if pulls and not rules.everywhere else 0
        for width in widths:
            tile, paired = GemmTile.deepest(width, sent=True), width in _PAIRED_WIDTHS and _may_bind(problem, rows)
            if not (may_share or may_win(width, 1, pulling) or (paired and may_win(width, 2, pulling))):
                continue
            # Where everyone adds up everything, groups are those of the tile that was made narrower.
            known = split == Split() and width == rules.tile.block_n and not rules.everywhere and rules.cluster == 1
            plan = rules if known else reduce.make_plan(problem, rows, sm_count, split, tile, specialize=specialize)
            if plan.tile.block_n == width and plan != rules:  # packets, and one step, have no wider tiles than 128 columns
                yield plan
            if pulls and not plan.everywhere and plan.group_tiles < plan.tiles and width > 64:
                yield reduce.make_plan(problem, rows, sm_count, split, tile, plan.tiles, specialize)
            # Of several ranks not where values travel in packets, or in one step, which add in another order.
            if paired and (topology.size == 1 or not plan.everywhere):
                with contextlib.suppress(SplitError, TilingError):  # few SMs, or one step is asked for
                    tiling = Tiling(width, cluster=2)
                    yield reduce.make_plan(problem, rows, sm_count, split, specialize=specialize, tiling=tiling)


def _by_another_algorithm(
    problem: ReduceProblem, rows: int, sm_count: int, specialize: str | None, rules: ReducePlan, may_win: MayWin
) -> Iterator[ReducePlan]:
    """Plans of an all-reduce, whose problem leaves it open, by the algorithm that the rules did not choose."""
    other, few = "two_shot" if rules.one_shot else "one_shot", reduce.are_few(problem, rows)
    for width in _WIDTHS[:-1]:
        if few or may_win(width, 1, 0):
            tile = GemmTile.deepest(width, sent=True)
            plan = reduce.make_plan(problem, rows, sm_count, Split(), tile, specialize=specialize, algorithm=other)
            if plan.tile.block_n == width and (not plan.one_shot or plan.workspace_bytes <= _ONE_STEP_BYTES):
                yield plan


def _sharing(
    problem: ReduceProblem, rows: int, sm_count: int, specialize: str | None, rules: ReducePlan, may_win: MayWin
) -> Iterator[ReducePlan]:
    """Reductions in packets, with K shared and without."""
    known = rules.tile.block_n, rules.shares
    for width, shares in _sharings(problem, rows * rules.span, sm_count, _WIDTHS[-2:], known, may_win):
        plan = reduce.make_plan(problem, rows, sm_count, Split(), specialize=specialize, tiling=Tiling(width, None, shares))
        if plan.packets and plan.shares == shares:  # there is room
            yield plan


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


def _is_left_out(plan: Any) -> bool:
    """Whether a plan's kernel is for any N and K between ranks, of which there are sixteen at most, and seldom the fastest."""
    if plan.specialize & {"n", "k"} or plan.problem.topology.size == 1:
        return False
    width, gathers = plan.tile.block_n, isinstance(plan, AllGatherGemmPlan)
    if plan.cluster > 1:
        return bool(width == _PAIRED_WIDTHS[-1] or plan.packets)
    if plan.shares > 1:
        return bool(width > _WIDTHS[-2])
    if not gathers or plan.tagged:
        return False
    if plan.packets:
        return bool(width == _WIDTHS[0])
    return bool(width == _WIDTHS[-1] or (not plan.split.intra_comm and width < _WIDTHS[0]))


@functools.lru_cache(maxsize=4096)
def _fastest(
    problem: Any,
    of_class: int,
    sm_count: int,
    machine: Machine,
    specialize: str | None,
    kept: frozenset[Any] | None = None,
) -> Any:
    """The fastest candidate, if it is faster than the rules' plan by more than the model can tell apart; ``kept``: of these kernels.

    Plans whose tiles alone take longer than they may are not made: of some 12 candidates that is most of what a choice costs.
    """
    below = math.inf  # what a candidate must be to be chosen

    @functools.cache
    def least(block_n: int, cluster: int, others: int) -> float:
        rows = of_class * (1 if allreduce else problem.topology.size)
        load_rows = choose_load_rows(of_class)
        n, k = problem.n, problem.k
        b_row = row_of_b(n, k, problem.b_row_major)
        return least_seconds(machine, ALONE, rows, n, k, block_n, load_rows, cluster, sm_count - others, b_row)

    def may_win(block_n: int, cluster: int, others: int) -> bool:
        return least(block_n, cluster, others) < min(below, _worth_of(rules, block_n, cluster) * of_rules)

    allreduce, rules, of_rules, best = getattr(problem, "op", None) == ALLREDUCE, None, math.inf, None
    for plan in candidates(problem, of_class, sm_count, specialize, may_win):
        is_allowed = plan.spec in kept if kept is not None else not _is_left_out(plan)
        if rules is None:
            rules = best = plan
            if is_allowed:
                of_rules = _predicted(plan, machine).seconds
                below = _WORTH * of_rules
        elif is_allowed and (seconds := _predicted(plan, machine).seconds) < min(below, _worth(rules, plan) * of_rules):
            best, below = plan, seconds
    return best


def _is_sure(rules: Any) -> bool:
    """Whether predictions are nearer than between ranks by chunks or partial tiles."""
    return bool(rules.problem.topology.size == 1 or rules.packets)


def _worth_of(rules: Any, block_n: int, cluster: int) -> float:
    """The most that ``_worth`` says of any plan with such tiles."""
    problem = rules.problem
    gathers = isinstance(problem, AllGatherGemmProblem)
    packets, span = gathers and allgather_gemm.may_travel_in_packets(problem, rules.rows), problem.topology.size if gathers else 1
    differs = _WORTH_OF_PUSHED if gathers else _WORTH_OF_TILES
    return _WORTH if packets or _is_sure(rules) or _differs_in_tiles(rules, block_n, cluster, span) else differs


def _differs_in_tiles(rules: Any, block_n: int, cluster: int, span: int) -> bool:
    """Whether a plan that is else like the rules' has other loads, or fewer tiles, of the same width."""
    return bool(block_n == rules.tile.block_n and (cluster > rules.cluster or span > rules.span))


def _worth(rules: Any, plan: Any) -> float:
    """The most that a plan may take of the rules' time, to be chosen instead."""
    gathers = isinstance(plan, AllGatherGemmPlan)
    if getattr(plan, "algorithm", None) != getattr(rules, "algorithm", None):
        return _WORTH_OF_TILES
    if _is_sure(rules) or (gathers and plan.packets):  # of which predictions are near
        return _WORTH
    alike = (rules.split, rules.packets) == (plan.split, plan.packets)
    if alike and _differs_in_tiles(rules, plan.tile.block_n, plan.cluster, plan.span):
        return _WORTH
    return _WORTH_OF_PUSHED if gathers and plan.split.intra_comm else _WORTH_OF_TILES


def _kernels_of(problem: Any, of_class: int, sm_count: int, specialize: str | None) -> list[Any]:
    plans = list(candidates(problem, of_class, sm_count, specialize))
    known = [plan.spec for plan in plans if not _is_left_out(plan)]
    return list(dict.fromkeys(known or [plan.spec for plan in plans]))


def _covering(
    wanted: Sequence[Kernel], possible: Callable[[int], Iterable[Kernel]], weights: Sequence[float] | None = None
) -> frozenset[Kernel]:
    """At most ``MOST_KERNELS`` kernels, one at least possible for each of the classes that want ``wanted``: those wanted most, if they do.

    Where a class can have none of these, others that most such classes can have take the places of the last. ``weights``: of the classes.
    """
    votes: dict[Kernel, float] = {}
    for kernel, weight in zip(wanted, weights or itertools.repeat(1.0), strict=False):
        votes[kernel] = votes.get(kernel, 0.0) + weight
    order = sorted(votes, key=lambda kernel: -votes[kernel])  # of equals the first
    for number in range(min(MOST_KERNELS, len(order)), -1, -1):
        kept = order[:number]
        left = [list(possible(at)) for at, kernel in enumerate(wanted) if kernel not in kept]
        left = [kernels for kernels in left if not any(kernel in kept for kernel in kernels)]
        while left and len(kept) < MOST_KERNELS:
            best, _ = collections.Counter(itertools.chain.from_iterable(left)).most_common(1)[0]
            kept.append(best)
            left = [kernels for kernels in left if best not in kernels]
        if not left:
            return frozenset(kept)
    raise AssertionError("few plain kernels are possible everywhere")


@functools.lru_cache(maxsize=64)
def _kept(problem: Any, sm_count: int, machine: Machine, specialize: str | None) -> frozenset[Any]:
    """The kernels that most numbers of rows would choose: one N and K has no more of them."""
    wanted = [_fastest(problem, rows, sm_count, machine, specialize).spec for rows in _CLASSES]
    return _covering(wanted, functools.cache(lambda at: _kernels_of(problem, _CLASSES[at], sm_count, specialize)), _WEIGHTS)


@functools.lru_cache(maxsize=4096)
def choose(problem: Any, of_class: int, sm_count: int, machine: Machine, specialize: str | None) -> Any:
    """The plan for a class of rows: ``_fastest``, of the kernels that the problem may have."""
    plan = _fastest(problem, of_class, sm_count, machine, specialize)
    kept = _kept(problem, sm_count, machine, specialize)
    return plan if plan.spec in kept else _fastest(problem, of_class, sm_count, machine, specialize, kept)


def model_decides(problem: Any, sm_count: int) -> bool:
    """Whether it may: where it was confirmed, in one node, on as many SMs as an H200 has (docs/model.md)."""
    asked, topology = env.PLANNER.get(), problem.topology
    return asked == "model" or (asked == "auto" and topology.num_nodes == 1 and sm_count == CONFIRMED_SMS)


def _chosen(problem: Any, rows: int, sm_count: int, split: Split | None, specialize: str | None, machine: Machine | None) -> Any:
    """The model's plan; None where the rules decide: where a split is given, or compiled into kernels, or the model was not confirmed."""
    if split is not None or not model_decides(problem, sm_count):
        return None
    default = allgather_gemm.SPECIALIZED if isinstance(problem, AllGatherGemmProblem) else reduce.SPECIALIZED[problem.op]
    fields = parse(specialize, default)
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
