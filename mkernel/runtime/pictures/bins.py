"""A long trace in a picture of bounded size: time in bins, each in the colour of the kind of interval that took most of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mkernel.abi import TraceKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["busiest", "drawn_in_bins"]

_MOST_CELLS = 320_000  # bins times lanes; one takes at most 9 bytes
_FEWEST_BINS = 20


def busiest(events: NDArray[Any], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """The kind that covers most of each bin, -1 where none covers any: len(edges) - 1 numbers. Intervals of a kind must not overlap."""
    kinds = np.unique(events["kind"]).astype(np.int64)
    covered = np.stack([_covered(events[events["kind"] == kind], edges) for kind in kinds])
    winners = kinds[covered.argmax(axis=0)]
    return np.where(covered.any(axis=0), winners, -1)


def _covered(events: NDArray[Any], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Nanoseconds of each bin inside an interval, at least 1 where one begins: an interval without length still shows."""
    begins, ends = np.sort(events["begin"]), np.sort(events["end"])
    found = np.diff(_before(begins, edges) - _before(ends, edges))
    starts = np.diff(np.searchsorted(begins, edges, "left"))
    return np.maximum(found, starts > 0)


def _before(times: NDArray[np.int64], edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum over the times of how long before each edge they are. May wrap around; differences of two such sums do not."""
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(times)])
    count = np.searchsorted(times, edges, "left")
    before: NDArray[np.int64] = count * edges - sums[count]
    return before


def drawn_in_bins(
    strips: Iterable[tuple[float, float, NDArray[Any]]],
    span: int,
    left: float,
    pixels: float,
    colours: Mapping[TraceKind, str],
) -> tuple[list[str], float]:
    """SVG paths of the strips (top, thickness, events of one lane), one per kind and thickness; and how many ns a bin has.

    Time 0 is drawn at x ``left``, ``span`` (ns) is ``pixels`` to the right of it.
    """
    strips = list(strips)
    bins = int(min(pixels, max(_MOST_CELLS // max(len(strips), 1), _FEWEST_BINS), span))
    edges = np.arange(bins + 1, dtype=np.int64) * span // bins
    edges[-1] = span + 1  # an interval that begins at the very end belongs to the last bin
    paths: dict[tuple[TraceKind, float], list[str]] = {}
    for top, thickness, events in strips:
        for kind, moves in _moves(busiest(events, edges)):
            paths.setdefault((kind, thickness), []).append(f"M0 {top + thickness / 2:g}{moves}")
    scale = f'transform="translate({left:g} 0) scale({pixels / bins:.6g} 1)"'
    return [
        f'<path {scale} stroke="{colours[kind]}" stroke-width="{thickness:g}" d="{"".join(moves)}"/>'
        for (kind, thickness), moves in paths.items()
    ], span / bins


def _moves(kinds: NDArray[np.int64]) -> Iterable[tuple[TraceKind, str]]:
    """Relative moves of a path per kind: over the bins of other kinds, through its own."""
    begins = np.flatnonzero(np.diff(kinds, prepend=-2))
    lengths = np.diff(begins, append=len(kinds)).tolist()
    at: dict[int, int] = {}
    parts: dict[int, list[str]] = {}
    for begin, length, kind in zip(begins.tolist(), lengths, kinds[begins].tolist(), strict=True):
        if kind >= 0:
            gap = begin - at.get(kind, 0)
            parts.setdefault(kind, []).append(f"m{gap} 0h{length}" if gap else f"h{length}")
            at[kind] = begin + length
    return [(TraceKind(kind), "".join(moves)) for kind, moves in parts.items()]
