"""What every part of the cost model shares: under which conditions a call runs, what is predicted of it, and the cost of a tile."""

from __future__ import annotations

import math
from typing import NamedTuple

from mkernel.planner.gemm import BLOCK_K
from mkernel.planner.heights import NARROW_COLUMNS, halves_rows
from mkernel.planner.machine import Machine

__all__ = [
    "ALONE",
    "BATCH",
    "BEHIND",
    "IN_TURN",
    "RESOURCES",
    "Conditions",
    "Prediction",
    "TileCost",
    "blend",
    "busy_of",
    "end_of_tile",
    "tile_cost",
]

ITEM = 2  # bytes of a 16-bit element
RESOURCES = ("tensor", "load", "memory", "link", "network", "engine", "add", "routing", "entry", "start", "latency")
_LINE = 128  # bytes
_WARPGROUPS = 2  # that multiply
_BATCH_CALLS = 20
_BLEND = 3.0
# How much of what all SMs load is read from L2, by columns of a tile: what neighbours ask for at the same time is read once. By ncu
# (lts__t_sectors_op_read of l1tex__m_xbar2l1tex_read_bytes, an H100, 2212 x 2560 x 7424; docs/model.md), where 16 neighbours, the SMs of a
# GPC, had 16 rows of tiles.
_READ = {64: 0.97, 128: 0.82, 192: 0.56, 256: 0.56}
_NEIGHBOURS = 16
# The same between ranks, beside chunks or partial tiles: CTAs that wait, store or push at different times leave the step. Fitted.
_READ_APART = {64: 0.97, 128: 0.82, 192: 0.80, 256: 0.60}
# Fitted: how many times as long a row of 128 bytes takes an SM that lies in two lines, in whole sectors, and with half a one at either end.
_SPLIT_ROW, _HALVES = 1.4, 1.95
_PAIRED_APART = 1.07  # fitted: how many times as long tiles take where pairs also wait for other ranks, of what others take
_SWAPPED = {1: 0.98, 2: 1.03, 4: 1.04}  # fitted: of swapped operands, by CTAs of a cluster;
_SWAPPED_IN_LINE = 0.98  # and of clusters of four CTAs in one line, or of narrow tiles alone;
_NARROW = 0.95
# the same of wide tiles, by their columns, and of tiles that warpgroups have in turn
_WIDE = {192: {1: 1.02, 2: 1.04, 4: 1.07}, 256: {1: 1.04, 2: 1.08, 4: 1.1}}
_SWAPPED_IN_TURN = {1: 1.0, 2: 1.0, 4: 1.02}
IN_TURN = 0.3  # fitted: of what a tile costs beside its k steps, where warpgroups have tiles in turn, of all but the last
# Fitted: what a row takes the SM that others of its cluster load it for, of what a whole line takes that it loads itself.
_RECEIVED = 0.4
_SMS_OF_TPC = 2  # as if these took what they load through one port: fitted (docs/speed_log.md, "Full waves")
_LOAD_BESIDE = 0.9  # fitted: of what an SM takes otherwise, where SMs also move data for other ranks
# Fitted: how many rows in two lines, in whole sectors, L2 answers, of those that it answers CTAs alone: what neighbours ask for at the same
# time it reads once, and clusters do not keep step.
_TOGETHER = {1: 1.0, 2: 0.8, 4: 0.65}  # by CTAs of a cluster
# Fitted: how many times as long L2 takes for such rows of A, which several CTAs load, where these are not in step, or nearly all load
# the same.
_APART_A, _FEW_ROWS = 1.25, 2
_SECTOR = 32  # bytes
# Fitted: a step whose data are there, of however few products; 240 cycles by stamps (docs/speed_log.md, "What a k step of few rows waits
# for").
_STEP = 0.14e-6
_SHALLOW = 1.05  # fitted: times as long with three stages as with four


class Conditions(NamedTuple):
    """How a call runs.

    Attributes
    ----------
    hot
        Right behind another call of the same world.
    calls
        Calls in a row, without a rest between them.
    rested
        Whether the GPU has rested before the first of them.
    """

    hot: bool = False
    calls: int = 1
    rested: bool = True


ALONE = Conditions()  # as the bench's mode "isolated"
BEHIND = Conditions(hot=True)  # as one of a few calls in a stream
BATCH = Conditions(hot=True, calls=_BATCH_CALLS)  # as the bench's mode "back-to-back"


class Prediction(NamedTuple):
    """Seconds of a call, and how long each resource is busy in them.

    ``tensor``: multiplying; ``load``: from L2 into the SMs; ``memory``, ``link``, ``network``: what goes over each, at its full rate;
    ``engine``: its puts; ``add``: a node's sums, by the CTAs for that; ``routing``: until rows of MoE have places; ``entry``: until all
    ranks are known to have entered; ``start``: launch, prologue and end. What is left, ``latency``, are waits: for flags, and for what
    comes last.
    """

    seconds: float
    tensor: float = 0.0
    load: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    network: float = 0.0
    start: float = 0.0
    engine: float = 0.0
    add: float = 0.0
    entry: float = 0.0
    routing: float = 0.0

    @property
    def latency(self) -> float:
        """What no resource's work explains."""
        busy = max(self.tensor, self.load, self.memory, self.link, self.network, self.engine, self.add)
        return max(0.0, self.seconds - self.start - self.entry - self.routing - busy)

    @property
    def binds(self) -> str:
        """The name of what takes longest: one of ``RESOURCES``."""
        return max(RESOURCES, key=lambda name: float(getattr(self, name)))


class TileCost(NamedTuple):
    """Seconds of one tile on one SM: of the tensor cores, of loads, of both together with what a tile costs beside them."""

    tensor: float
    load: float
    seconds: float


class _Rows(NamedTuple):
    """What rows of 128 bytes of a matrix cost: how many times as long one takes an SM, and how many L2 answers in a second."""

    of_sm: float
    of_l2: float
    whole: bool  # each is one line of L2


def _rows(machine: Machine, values: int, ctas: int) -> _Rows:
    """The rows of a matrix, of 128 bytes each: lines; or in two lines, in whole sectors or with half a sector at either end.

    Where they follow each other by whole sectors, every second or fourth of them is one line all the same. ``values``: from one row to
    the next; ``ctas``: of a cluster.
    """
    if values * ITEM % _LINE == 0:
        return _Rows(1.0, machine.l2_rows, True)
    if values * ITEM % _SECTOR != 0:
        return _Rows(_HALVES, machine.l2_rows_split, False)
    begin = math.gcd(values * ITEM, _LINE) / _LINE  # the share of rows that begin with a line
    answered = 1 / (begin / machine.l2_rows + (1 - begin) / machine.l2_rows_sectors) * _TOGETHER[ctas]
    return _Rows(begin + (1 - begin) * _SPLIT_ROW, answered, False)


def blend(*seconds: float) -> float:
    """Seconds of things that are done side by side and disturb each other: more than the longest, less than the sum."""
    most = max(seconds)
    return most * float(sum((one / most) ** _BLEND for one in seconds)) ** (1 / _BLEND) if most > 0 else 0.0


def _once(block_m: int, block_n: int, rows: int = _NEIGHBOURS) -> float:
    """Rows of 128 bytes that differ, of all that neighbours load for a k step, where they have so many rows of tiles."""
    return rows * block_m + _NEIGHBOURS / rows * block_n


def _given(blocks: int, whole: int, shared: bool = False) -> int:
    """Rows of 128 bytes that shared memory gives in a k step: of ``blocks``, in blocks of 64, once, and with each block ``whole``.

    ``shared``: blocks are given to both warpgroups, and of ``whole`` half to each.
    """
    return blocks * (_WARPGROUPS if shared else 1) + -(-blocks // NARROW_COLUMNS) * whole


def _share_of_load(machine: Machine, active: float, beside: bool) -> float:
    """What an SM takes of its ``sm_load``: more where no other SM of its TPC loads, as where CTAs are fewer than TPCs."""
    if beside:
        return _LOAD_BESIDE
    shared = min(1.0, max(0.0, _SMS_OF_TPC - machine.sms / active))  # of those that load, how many share a port
    return 1 / (shared + (1 - shared) / machine.load_boost)


def end_of_tile(machine: Machine, block_m: int, block_n: int, n: int) -> float:
    """What a tile costs beside its k steps."""
    return (machine.tile + (machine.tile_split if n * ITEM % _SECTOR else 0.0)) * block_m * block_n / (128 * 256)


def tile_cost(
    machine: Machine, block_m: int, block_n: int, n: int, k: int, load_rows: int, speed: float, sums: int = 0, cluster: int = 1,
    cluster_n: int = 1, stages: int = 0, active: float = 0.0, shallow: bool = False, apart: bool = False, b_row: int = 0,
    a_row: int = 0, together: int = _NEIGHBOURS, beside: bool = False, there: float = 1.0,
    swapped: bool = False, in_turn: bool = False, sharing_k: bool = False,
) -> TileCost:  # fmt: skip
    """The cost of a tile of ``block_m x block_n`` of a product with ``n`` columns, of whose A ``load_rows`` rows are loaded.

    ``speed``: the share of the SM's rate that is left (``Machine.speed``); ``sums``: partial tiles that are added to it; ``cluster``:
    CTAs that load the columns of B together, and ``cluster_n`` the rows of A; ``there``: which share of the CTAs has a tile, where some
    of a cluster have none; ``stages``: of the tile, if its loads come from memory, not from L2; ``active``: SMs that have a tile at the
    same time (0: all); ``shallow``: three stages, too few to hide what loads wait for; ``apart``: CTAs are not in step, because they
    also wait for other ranks; ``b_row``: values of a row of B as it is stored (0: ``n``, row-major); ``a_row``: of one of A (0: ``k``);
    ``together``: rows of tiles that neighbours have; ``beside``: other SMs move data meanwhile, as also where CTAs are ``apart``: then
    those that multiply are no faster;
    ``swapped``: operands are, so that each warpgroup has half of the columns, or one has all of a narrow tile's, and all rows;
    ``in_turn``: or each all of its own, so that the end of a tile is beside the beginning of the next one;
    ``sharing_k``: the CTAs of a cluster share K.
    """
    steps = -(-k // BLOCK_K)
    active = active or machine.sms
    free = 1.0 if apart or beside else machine.sms / active
    clock = min(machine.boost, free)
    tensor = 2.0 * block_m * block_n * BLOCK_K * steps / (machine.sm_flops * clock * speed)
    # Shared memory takes what is loaded, and gives each warpgroup its rows of A and all of B.
    given = _given(block_n, block_m, halves_rows(block_n)) if swapped else _given(block_m, block_n)
    shared = (given + load_rows + block_n) * BLOCK_K * ITEM / machine.sm_shared
    ctas = cluster * cluster_n
    of_a, of_b = _rows(machine, a_row or k, ctas), _rows(machine, b_row or n, ctas)
    is_alone = ctas == 1
    height, width = load_rows / cluster_n, block_n / cluster  # of A and B that this CTA loads
    # An SM takes rows of 128 bytes at its own rate, also those that others load for it, and L2 answers all SMs at one of its own.
    taken = height * of_a.of_sm + width * of_b.of_sm + _RECEIVED * (load_rows - height + block_n - width)
    of_sm = taken * _LINE / (machine.sm_load * _share_of_load(machine, active, apart or beside))
    is_slow = not of_a.whole and (apart or (is_alone and together <= _FEW_ROWS))
    of_l2 = there * height * (_APART_A if is_slow else 1.0) / of_a.of_l2 + width / of_b.of_l2
    # What neighbours ask for at the same time it reads once; clusters ask at different times, or for different k.
    read = 1.0
    if is_alone and not sharing_k:
        read = _READ_APART[block_n] if apart else _READ[block_n] * min(1.0, _once(block_m, block_n, together) / _once(block_m, block_n))
    load = steps * max(shared, of_sm, of_l2 * active, read * (height + width) * _LINE * active / machine.l2)
    load = max(load, steps * _STEP)
    if stages:  # as many loads are under way at once
        load = max(load, steps * machine.memory_latency / stages)
    fixed = end_of_tile(machine, block_m, block_n, n) * (IN_TURN if in_turn else 1.0)
    longer = 1.0  # in clusters of four as long as alone
    if ctas == 2:
        longer = machine.paired * (_PAIRED_APART if apart else 1.0)
    longer *= _SHALLOW if shallow else 1.0
    if swapped:
        longer *= _NARROW if is_alone and block_n == NARROW_COLUMNS else 1.0
        in_line = max(cluster, cluster_n) == 4 and block_n not in _WIDE and not in_turn
        by_ctas = _SWAPPED_IN_TURN if in_turn else _WIDE.get(block_n, _SWAPPED)
        longer *= _SWAPPED_IN_LINE if in_line else by_ctas[ctas]
    return TileCost(tensor, load, max(tensor, load) * longer + fixed + sums * block_m * block_n * ITEM / machine.add)


def busy_of(conditions: Conditions, machine: Machine, seconds: float) -> float:
    """How long the GPU has worked without rest at the end of a call of about so many seconds."""
    return seconds * conditions.calls + (0.0 if conditions.rested else machine.warm)
