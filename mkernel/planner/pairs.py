"""Pairs of CTAs that load columns of B together (``kernels_src/tile/pair.cuh``): where they pay, and what goes with them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Container

from mkernel.planner.gemm import BLOCK_K, BLOCK_M, GemmTile, row_of_b
from mkernel.planner.split import COMMUNICATION_ROLES, Split, SplitError

__all__ = [
    "Paired",
    "choose",
    "clusters_name",
    "complete",
    "ctas_of_clusters",
    "loads_bind",
    "lone_row",
    "may_pay",
    "mechanism",
    "tiles_of_cluster",
    "upper_tile",
]

# Of the time of CTAs alone with the same tile, where rows of B are not aligned: in a world of one 0.73 to 0.87 was measured
# (docs/speed_log.md). Of narrower tiles less of what is loaded is of B.
_TIME = {256: 0.86, 128: 0.9}
_GAIN = 0.97  # of the time of CTAs alone: a count of waves is no better than that
_FEW_TURNS = 4  # from here on, CTAs that finish early have taken others' tiles
_NO_PAIR = 0xFFFFFFFF  # more than there are
# Of so many SMs of a large device one, at most, has no three others of its GPC for a cluster of four: of 8 GPCs two each.
_LEFT_OVER = 8
# An H200 has room for 30 of four CTAs, 15 of eight. In a world of one plans have as many: where there is no room for one, it begins when
# another one ends, and nobody waits for it.
_LEFT_OVER_ALONE = 11
_FEWEST_K = 1024  # of shorter products nobody has measured pairs, whose CTAs wait for each other at every tile


@dataclasses.dataclass(frozen=True, slots=True)
class Paired:
    """What a rank multiplies: ``shards`` times ``rows`` rows, none of whose tiles reaches over the end of a shard, by a ``k x n`` B."""

    shards: int
    rows: int
    n: int
    k: int
    b_row_major: bool

    def turns(self, tile: GemmTile, ctas: int, cluster: int = 1) -> float:
        """Tiles that one CTA multiplies one after the other, of ``ctas`` in clusters of so many."""
        taken = self.shards * math.ceil(self.rows / (cluster * BLOCK_M)) * math.ceil(self.n / tile.block_n)
        turns = taken / max(1, ctas // cluster)
        return math.ceil(turns) if cluster > 1 and turns <= _FEW_TURNS else turns  # CTAs alone may cut the last tiles into halves


def clusters_name(cluster: int, cluster_n: int) -> str:
    """What clusters of so many CTAs in M and N are called."""
    of_two = {(2, 1): "pairs of CTAs", (1, 2): "pairs of CTAs in N"}
    return of_two.get((cluster, cluster_n), f"clusters of {cluster} x {cluster_n} CTAs")


def mechanism(cluster: int, cluster_n: int) -> str:
    """The same among the mechanisms of a plan, in short; of CTAs alone nothing."""
    of_few = {(1, 1): "", (2, 1): ", pairs", (1, 2): ", pairs in N"}
    return of_few.get((cluster, cluster_n), f", clusters of {cluster} x {cluster_n}")


def tiles_of_cluster(taken: tuple[int, int], clusters: tuple[int, int], tile_rows: int, tiles_n: int) -> list[tuple[int, int]]:
    """Rows and columns of the tiles that there are of what a cluster takes, row by row; ``taken``: its own row and column."""
    ms, ns = (range(at * ctas, min((at + 1) * ctas, end)) for at, ctas, end in zip(taken, clusters, (tile_rows, tiles_n), strict=True))
    return [(m, n) for m in ms for n in ns]


def loads_bind(product: Paired) -> bool:
    """Whether rows of B begin at no multiple of 128 bytes: each 128 bytes of them that are loaded then lie in two lines of L2."""
    return row_of_b(product.n, product.k, product.b_row_major) % BLOCK_K != 0


def may_pay(product: Paired) -> bool:
    """Whether pairs pay for some number of rows."""
    return product.k >= _FEWEST_K and loads_bind(product)


def choose(
    product: Paired, alone: GemmTile, wanted: Split, default: Split, sm_count: int, spared: Container[str], *, sent: bool = False
) -> tuple[GemmTile, Split] | None:
    """Tile and split with which pairs of CTAs are faster than CTAs alone with the tile ``alone``, by the rules of thumb.

    None: there are none, or the split that is wanted has a role that is no whole number of pairs. ``sent``: as in ``GemmTile.deepest``.
    """
    if (wanted.intra_comm == 0 and default.intra_comm) or product.rows <= BLOCK_M or not may_pay(product):
        return None
    try:
        split = complete(wanted, default, sm_count, spared, 2, alone=False)
    except SplitError:  # few SMs, or an odd number
        return None
    tile = _tile_of_pairs(product, alone, split.compute or 1, sent)
    return None if tile is None else (tile, split)


@functools.lru_cache(maxsize=4096)
def _tile_of_pairs(product: Paired, alone: GemmTile, ctas: int, sent: bool) -> GemmTile | None:
    """The tile, where ``ctas`` CTAs multiply from the start."""

    def seconds(tile: GemmTile, cluster: int) -> float:
        of_tile = tile.block_n / tile.relative_speed
        return product.turns(tile, ctas, cluster) * of_tile * (_TIME[tile.block_n] if cluster > 1 else 1.0)

    best = min((GemmTile.deepest(block_n, sent=sent) for block_n in _TIME), key=lambda tile: seconds(tile, 2))
    return best if product.turns(alone, ctas) >= 1 and seconds(best, 2) < _GAIN * seconds(alone, 1) else None


def ctas_of_clusters(sm_count: int, cluster: int, alone: bool) -> int:
    """CTAs that run at once in clusters of so many; of more than two not on each SM. ``alone``: in a world of one."""
    left_over = sm_count // (_LEFT_OVER_ALONE if alone and cluster % 4 == 0 else _LEFT_OVER) if cluster > 2 else 0
    return (sm_count - left_over) // cluster * cluster


def complete(wanted: Split, default: Split, sm_count: int, spared: Container[str], cluster: int, alone: bool) -> Split:
    """``Split.complete`` for a kernel in clusters of so many CTAs, all of one role. ``alone``: in a world of one.

    Raises
    ------
    SplitError
        As ``Split.complete``; or ``wanted`` has a role that is no whole number of clusters.
    """
    if cluster == 1:
        return wanted.complete(default, sm_count, spared)
    even = Split(default.compute, *(-(-(getattr(default, role) or 0) // cluster) * cluster for role in COMMUNICATION_ROLES))
    found = wanted.complete(even, ctas_of_clusters(sm_count, cluster, alone), spared, cluster)
    if any((number or 0) % cluster for number in (found.compute, *(getattr(found, role) for role in COMMUNICATION_ROLES))):
        number = "an even number of SMs where CTAs are pairs" if cluster == 2 else f"a multiple of {cluster} SMs where CTAs are clusters"
        raise SplitError(found, f"each role needs {number}", "make it even" if cluster == 2 else "make it one")
    return found


def lone_row(tile_rows: int, tiles_n: int, group_m: int) -> tuple[int, int]:
    """Pairs of tiles before the last group of ``group_m`` rows, an even number, and rows of pairs in it, if its last row is alone.

    Pairs are numbered in the raster order of pairs of rows, in groups of half as many. Else there are no pairs from the first number on.
    """
    whole = tile_rows // group_m * group_m
    return (whole // 2 * tiles_n, (tile_rows - whole + 1) // 2) if tile_rows % 2 else (_NO_PAIR, 1)


def upper_tile(pair: int, whole_pairs: int, last_pairs: int) -> int:
    """The number of a pair's upper tile in the raster order of single tiles; of ``lone_row``.

    A last row may be alone: in its group each column has an odd number of tiles.
    """
    return 2 * pair - (0 if pair < whole_pairs else (pair - whole_pairs) // last_pairs)
