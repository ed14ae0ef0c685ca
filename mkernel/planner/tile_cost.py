"""What a tile costs: its products, what is loaded for it, and what comes beside both (docs/model.md)."""

from __future__ import annotations

import math
from typing import NamedTuple

from mkernel.planner.gemm import BLOCK_K, between
from mkernel.planner.heights import NARROW_COLUMNS, WIDE_COLUMNS, halves_rows
from mkernel.planner.machine import Machine
from mkernel.planner.prediction import ITEM, blend

__all__ = ["IN_TURN", "Around", "Operands", "TileCost", "TileShape", "end_of_tile", "tile_cost"]

_LINE = 128  # bytes
_WARPGROUPS = 2  # that multiply
_DEEP = 4  # stages that hide what loads wait for
# How much of what all SMs load is read from L2, by columns of a tile: what neighbours ask for at the same time is read once. By ncu
# (lts__t_sectors_op_read of l1tex__m_xbar2l1tex_read_bytes, an H100, 2212 x 2560 x 7424; docs/model.md), where 16 neighbours, the SMs of a
# GPC, had 16 rows of tiles.
_READ = {64: 0.97, 128: 0.70, 192: 0.56, 256: 0.56}
_NEIGHBOURS = 16
_READ_BY_CLUSTERS = 0.77  # fitted
# The same between ranks, beside chunks or partial tiles: CTAs that wait, store or push at different times leave the step. Fitted.
_READ_APART = {64: 0.97, 128: 0.82, 192: 0.80, 256: 0.60}
# Fitted: how many times as long a row of 128 bytes takes an SM that lies in two lines, in whole sectors, and with half a one at either end.
_SPLIT_ROW, _HALVES = 1.4, 1.85
_PAIRED_APART = 1.07  # fitted: how many times as long tiles take where pairs also wait for other ranks, of what others take
# Fitted: the same of swapped operands, by columns of a tile and CTAs of a cluster;
_SWAPPED = {
    64: {1: 0.95, 2: 1.03, 4: 1.04},
    128: {1: 0.98, 2: 0.99, 4: 1.02},
    192: {1: 1.02, 2: 1.03, 4: 1.07},
    256: {1: 1.04, 2: 1.08, 4: 1.1},
}
_SWAPPED_IN_LINE = 0.98  # of clusters of four CTAs in one line, but of wide tiles; and of tiles that warpgroups have in turn
_SWAPPED_IN_TURN = {1: 1.0, 2: 1.03, 4: 1.02}
IN_TURN = 0.3  # fitted: of what a tile costs beside its k steps, where warpgroups have tiles in turn, of all but the last
# Fitted: what a row takes the SM that others of its cluster load it for, of what a whole line takes that it loads itself.
_RECEIVED = 0.65
_SMS_OF_TPC = 2  # as if these took what they load through one port: fitted (docs/speed_log.md, "Full waves")
_LOAD_BESIDE = 0.9  # fitted: of what an SM takes otherwise, where SMs also move data for other ranks
# Fitted: how many rows in two lines, in whole sectors, L2 answers, of those that it answers CTAs alone: what neighbours ask for at the same
# time it reads once, and clusters do not keep step.
_TOGETHER = {1: 1.0, 2: 0.88, 4: 0.74}  # by CTAs of a cluster
# Fitted: how many times as long L2 takes for such rows of A, which several CTAs load, where these are not in step, or nearly all load
# the same.
_APART_A, _FEW_ROWS = 1.32, 2
_SECTOR = 32  # bytes
# Fitted: a step whose data are there, of however few products; 240 cycles by stamps (docs/speed_log.md, "What a k step of few rows waits
# for").
_STEP = 0.14e-6
_SHARP = 12  # fitted: how sharply the longer one of products and loads tells what a k step takes
_SHALLOW = 1.05  # fitted: times as long with three stages as with four, of the GEMM ops
_LOADED_BEYOND = 1.03  # fitted: how many times as long where more columns are loaded than multiplied


class TileShape(NamedTuple):
    """What CTAs multiply at a time, as a plan says it.

    Attributes
    ----------
    rows, columns
        Of the result.
    load_rows, load_columns
        Of A and B, that are loaded (0: all columns).
    cluster, cluster_n
        CTAs that load the columns of B together, and the rows of A.
    stages
        That the loads have (0: not known).
    swapped
        Operands are, so that each warpgroup has half of the columns, or one has all of a narrow tile's, and all rows;
    in_turn
        or each all of its own, so that the end of a tile is beside the beginning of the next one.
    sharing_k
        The CTAs of a cluster share K.
    low
        One warpgroup has all the rows that are loaded, and the other one multiplies nothing.
    """

    rows: int
    columns: int
    load_rows: int
    cluster: int = 1
    cluster_n: int = 1
    stages: int = 0
    swapped: bool = False
    in_turn: bool = False
    sharing_k: bool = False
    low: bool = False
    load_columns: int = 0

    @property
    def multiplied(self) -> int:
        """Rows that are multiplied."""
        return self.rows // _WARPGROUPS if self.low else self.rows

    @property
    def ctas(self) -> int:
        """CTAs of a cluster, whose tiles are neighbours."""
        return self.cluster * self.cluster_n


class Operands(NamedTuple):
    """A product with ``n`` columns and ``k`` of K; and how many values there are from one row of A, and of B, to the next, as stored."""

    n: int
    k: int
    a_row: int
    b_row: int

    @property
    def steps(self) -> int:
        """Steps of K."""
        return -(-self.k // BLOCK_K)


class Around(NamedTuple):
    """What goes on while a tile is multiplied.

    Attributes
    ----------
    active
        SMs that have a tile at the same time.
    together
        Rows of tiles that neighbours have.
    there
        The share of the CTAs that has a tile, where some of a cluster have none.
    from_memory
        Loads come from there, not from L2.
    apart
        CTAs are not in step, because they also wait for other ranks.
    beside
        Other SMs move data, as also where CTAs are ``apart``: then those that multiply are no faster.
    """

    active: float
    together: int = _NEIGHBOURS
    there: float = 1.0
    from_memory: bool = False
    apart: bool = False
    beside: bool = False

    @property
    def moves(self) -> bool:
        """Whether data move to other ranks."""
        return self.apart or self.beside


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


def _once(block_m: int, block_n: int, rows: int = _NEIGHBOURS) -> float:
    """Rows of 128 bytes that differ, of all that neighbours load for a k step, where they have so many rows of tiles."""
    return rows * block_m + _NEIGHBOURS / rows * block_n


def _given(blocks: int, whole: int, shared: bool = False) -> int:
    """Rows of 128 bytes that shared memory gives in a k step: of ``blocks``, in blocks of 64, once, and with each block ``whole``.

    ``shared``: blocks are given to both warpgroups, and of ``whole`` half to each.
    """
    return blocks * (_WARPGROUPS if shared else 1) + -(-blocks // NARROW_COLUMNS) * whole


def _share_of_load(machine: Machine, around: Around) -> float:
    """What an SM takes of its ``sm_load``: more where no other SM of its TPC loads, as where CTAs are fewer than TPCs."""
    if around.moves:
        return _LOAD_BESIDE
    shared = min(1.0, max(0.0, _SMS_OF_TPC - machine.sms / around.active))  # of those that load, how many share a port
    return 1 / (shared + (1 - shared) / machine.load_boost)


def end_of_tile(machine: Machine, tile: TileShape, n: int) -> float:
    """What a tile costs beside its k steps."""
    return (machine.tile + (machine.tile_split if n * ITEM % _SECTOR else 0.0)) * tile.rows * tile.columns / (128 * 256)


def _load_of_step(machine: Machine, tile: TileShape, operands: Operands, around: Around) -> float:
    """Seconds until a k step's rows are there, and given to the tensor cores."""
    # Shared memory takes what is loaded, and gives each warpgroup its rows of A and all of B.
    given = _given(tile.columns, tile.rows, halves_rows(tile.columns)) if tile.swapped else _given(tile.multiplied, tile.columns)
    columns = tile.load_columns or tile.columns
    shared = (given + tile.load_rows + columns) * BLOCK_K * ITEM / machine.sm_shared
    of_a, of_b = _rows(machine, operands.a_row, tile.ctas), _rows(machine, operands.b_row, tile.ctas)
    height, width = tile.load_rows / tile.cluster_n, columns / tile.cluster  # of A and B that this CTA loads
    # An SM takes rows of 128 bytes at its own rate, also those that others load for it, and L2 answers all SMs at one of its own.
    taken = height * of_a.of_sm + width * of_b.of_sm + _RECEIVED * (tile.load_rows - height + columns - width)
    of_sm = taken * _LINE / (machine.sm_load * _share_of_load(machine, around))
    is_slow = not of_a.whole and (around.apart or (tile.ctas == 1 and around.together <= _FEW_ROWS))
    of_l2 = around.there * height * (_APART_A if is_slow else 1.0) / of_a.of_l2 + width / of_b.of_l2
    of_bytes = _read(tile, around) * (height + width) * _LINE / machine.l2
    of_memory = machine.memory_latency / tile.stages if around.from_memory and tile.stages else 0.0  # as many loads are under way at once
    return max(shared, of_sm, of_l2 * around.active, of_bytes * around.active, of_memory, _STEP)


def _read(tile: TileShape, around: Around) -> float:
    """How much of what SMs load is read from L2: what neighbours ask for at the same time once.

    Clusters ask at different times, and those that share K for different k.
    """
    if tile.sharing_k:
        return 1.0
    if tile.ctas > 1:
        return _READ_BY_CLUSTERS
    if around.apart:
        return _READ_APART[tile.columns]
    of_rows = _once(tile.rows, tile.columns, around.together) / _once(tile.rows, tile.columns)
    return between(_READ, tile.columns) * min(1.0, of_rows)


def _longer(machine: Machine, tile: TileShape, around: Around) -> float:
    """How many times as long k steps of a kind of tile take as its products and loads say; of clusters of four no longer than alone."""
    longer = machine.paired * (_PAIRED_APART if around.apart else 1.0) if tile.ctas == 2 else 1.0
    longer *= _SHALLOW if 0 < tile.stages < _DEEP and not around.beside else 1.0
    longer *= _LOADED_BEYOND if tile.load_columns > tile.columns else 1.0
    if not tile.swapped:
        return longer
    if tile.in_turn:
        return longer * _SWAPPED_IN_TURN[tile.ctas]
    in_line = max(tile.cluster, tile.cluster_n) == 4 and tile.columns not in WIDE_COLUMNS
    return longer * (_SWAPPED_IN_LINE if in_line else _SWAPPED[tile.columns][tile.ctas])


def tile_cost(machine: Machine, tile: TileShape, operands: Operands, around: Around, speed: float = 1.0) -> TileCost:
    """The cost of a tile. ``speed``: the share of the SM's rate that is left (``Machine.speed``)."""
    clock = min(machine.boost, 1.0 if around.moves else machine.sms / around.active)
    products = 2.0 * tile.multiplied * tile.columns * BLOCK_K * operands.steps
    tensor = products / (machine.sm_flops * clock * speed)
    load = operands.steps * _load_of_step(machine, tile, operands, around)
    end = end_of_tile(machine, tile, operands.n) * (IN_TURN if tile.in_turn else 1.0)
    return TileCost(tensor, load, blend(tensor, load, sharpness=_SHARP) * _longer(machine, tile, around) + end)
