"""Heights of tiles of swapped operands (``kernels_src/tile/shape.cuh``): those that instructions have, and those that a kernel has.

Each is code of its own in a kernel, so that few are compiled: those that the classes of rows of one N and K want most. A kernel that
serves all N and K, or a tiling that a caller asks for, has the usual ones.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mkernel.planner.derived import replaced
from mkernel.planner.tiling import Tiling, TilingError

__all__ = [
    "MOST_MORE_KERNELS",
    "NARROW_COLUMNS",
    "SWAPPED_COLUMNS",
    "SWAPPED_ROWS",
    "SWAPPED_UNIT",
    "WIDE_COLUMNS",
    "Heights",
    "asked_heights",
    "bits_of",
    "every_height",
    "halves_rows",
    "heights_of",
    "height_of",
    "highest",
    "may_take_turns",
    "most_wanted",
    "several_blocks",
    "unit_of",
    "usual_heights",
    "with_heights",
]

Heights = tuple[int, ...]  # ascending
Kind = TypeVar("Kind")

# Of tiles of swapped operands: columns, those of narrow ones, and rows at most. Rows at least where a warpgroup has several blocks of 64
# columns, and at most, by columns of wide ones and of those that warpgroups have in turn: so many accumulators threads have registers for.
SWAPPED_COLUMNS, NARROW_COLUMNS, SWAPPED_ROWS = 128, 64, 256
_SEVERAL_ROWS, WIDE_COLUMNS, _ROWS_IN_TURN = 64, {192: 192, 256: 160}, 160
SWAPPED_UNIT = 8  # rows of A, of which they load a multiple
# Of one N and K, the sum of all heights that its kernels have: NVRTC takes half a millisecond for each row of them, beside .4 s for a
# kernel. And of one kernel, so that NVRTC has it in a second; there are more kernels if need be (docs/speed_log.md).
_MOST, _MOST_OF_KERNEL = 4800, 1200
MOST_MORE_KERNELS = _MOST // _MOST_OF_KERNEL
# Below so many rows instructions take as long for 8 rows less: they read as many columns.
_LOW, _LOW_STEP = 64, 16


def several_blocks(columns: int, at_once: int = 1) -> bool:
    """Whether a warpgroup has several blocks of 64 columns of such tiles; ``at_once``: tiles that the warpgroups have."""
    return at_once > 1 or columns in WIDE_COLUMNS


def halves_rows(columns: int) -> bool:
    """Whether each warpgroup has half of the rows of such tiles, and all columns."""
    return columns > SWAPPED_COLUMNS and columns % SWAPPED_COLUMNS != 0


def highest(columns: int, at_once: int = 1) -> int:
    """Rows of such tiles with so many columns, at most."""
    return _ROWS_IN_TURN if at_once > 1 else WIDE_COLUMNS.get(columns, SWAPPED_ROWS)


def unit_of(cluster_n: int, unit: int = SWAPPED_UNIT) -> int:
    """A multiple of so many rows of a tile is loaded: the CTAs of a cluster that are neighbours in N load as many each, in units of 8."""
    return max(unit, SWAPPED_UNIT * cluster_n)


@functools.cache
def usual_heights(columns: int = SWAPPED_COLUMNS, at_once: int = 1, most: int = SWAPPED_ROWS, unit: int = SWAPPED_UNIT) -> Heights:
    """Those of a kernel that has them for any call: in steps of 16 up to 128 rows, and of 32 beyond, but of several blocks of 16.

    ``unit``: each is a multiple of it.
    """
    several = range(_SEVERAL_ROWS, highest(columns, at_once) + 1, 16)
    found = several if several_blocks(columns, at_once) else (*range(16, 129, 16), *range(160, most + 1, 32))
    return tuple(height for height in found if height % unit == 0)


@functools.cache
def every_height(columns: int = SWAPPED_COLUMNS, at_once: int = 1, most: int = SWAPPED_ROWS, unit: int = SWAPPED_UNIT) -> Heights:
    """Those that there are instructions for, and that differ in time. ``unit``: each is a multiple of it.

    Of several blocks, which is all that threads have registers for, those between take as long as the next one.
    """
    if several_blocks(columns, at_once):
        return usual_heights(columns, at_once, unit=unit)
    low = max(unit, _LOW_STEP)
    return (*range(low, _LOW, low), *range(_LOW, most + 1, unit))


def asked_heights(asked: Tiling, columns: int = SWAPPED_COLUMNS, most: int = SWAPPED_ROWS, unit: int = SWAPPED_UNIT) -> Heights:
    """Those of the kernel of what is asked for, whose tiles have so many columns. ``most``, ``unit``: as ``every_height``, of CTAs alone.

    Raises
    ------
    TilingError
        There are no tiles as high as that.
    """
    at_once, unit = asked.tiles_at_once or 1, unit_of(asked.cluster_n or 1, unit)
    if asked.block_m is None:
        return usual_heights(columns, at_once, most, unit)
    possible = every_height(columns, at_once, most, unit)
    if asked.block_m not in possible:
        beside = f" and {asked.cluster_n} CTAs in N" if unit > SWAPPED_UNIT and asked.cluster_n else ""
        raise TilingError(f"{asked}: with {columns} columns{beside}, block_m must be one of {', '.join(map(str, possible))}")
    return (asked.block_m,)


def height_of(rows: int, tile_rows: int, heights: Heights) -> int:
    """The least of these heights of which so many rows of tiles hold ``rows`` rows."""
    return heights[bisect.bisect_left(heights, -(-rows // tile_rows))]


@functools.cache
def bits_of(heights: Heights) -> int:
    """The same for a kernel: bit i says that there are tiles of 8 (i + 1) rows."""
    return sum(1 << height // SWAPPED_UNIT - 1 for height in heights)


def heights_of(bits: int) -> Heights:
    """Those that ``bits_of`` says."""
    return tuple(SWAPPED_UNIT * (i + 1) for i in range(bits.bit_length()) if bits >> i & 1)


def may_take_turns(plan: Any) -> bool:
    """False where warpgroups have tiles in turn, but no CTA has two."""
    return getattr(plan, "tiles_at_once", 1) == 1 or plan.taken * plan.ctas_together > (plan.split.compute or 1)


def with_heights(plan: Any, kernels: Sequence[Heights]) -> Any:
    """The plan by one of the kernels that have these heights: with more rows of tiles if none has it as high, and fewer if it is higher."""
    rows = plan.span * plan.rows
    tile_rows = max(plan.swapped, -(-rows // kernels[-1][-1]))
    heights = next(heights for heights in kernels if heights[-1] * tile_rows >= rows)
    return replaced(plan, heights=heights, swapped=-(-rows // height_of(rows, tile_rows, heights)))


def most_wanted(wanted: Mapping[Kind, Mapping[int, float]], size: Mapping[Kind, int]) -> dict[Kind, list[Heights]]:
    """The heights without which calls take longest, and the highest, by kind of kernel: of several kernels, each with higher tiles.

    ``wanted``: how much each height of a kind counts. Without it, tiles are as high as the next one, and take longer in proportion: the
    ones that matter least for what NVRTC takes go, until few are left. ``size``: how many times as much code a height is as of others.
    """
    left = {kind: dict(of_kind) for kind, of_kind in wanted.items()}
    while sum(size[kind] * height for kind, of_kind in left.items() for height in of_kind) > _MOST:
        lost = {
            (kind, low, high): of_kind[low] * math.log(high / low) / (size[kind] * low)
            for kind, of_kind in left.items()
            for low, high in itertools.pairwise(sorted(of_kind))
        }
        if not lost:
            break
        kind, low, high = min(lost, key=lambda one: lost[one])
        left[kind][high] += left[kind].pop(low)
    return {kind: _in_kernels(tuple(sorted(of_kind)), _MOST_OF_KERNEL // size[kind]) for kind, of_kind in left.items()}


def _in_kernels(heights: Heights, most: int) -> list[Heights]:
    """These heights, in order, as kernels of about as much code have them: of about ``most`` at most."""
    each = sum(heights) / math.ceil(sum(heights) / most)
    middles = [before + height / 2 for before, height in zip(itertools.accumulate(heights, initial=0), heights, strict=False)]
    of_kernels = itertools.groupby(zip(heights, middles, strict=True), key=lambda one: one[1] // each)
    return [tuple(height for height, _ in of_kernel) for _, of_kernel in of_kernels]
