"""A trace as an SVG picture: time to the right, one row per CTA, rows grouped by role. No drawing library needed.

A picture stays under ``MOST_BYTES`` however long the trace is. Up to ``MOST_BARS`` visible intervals are drawn one by one, each with its
name and duration; beyond that, time is cut into bins, each in the colour of what took most of it (``bins.py``), and a line under the title
says so.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mkernel.abi import TRACE_FLAG_LANE, Role, TraceKind
from mkernel.runtime.pictures import svg
from mkernel.runtime.pictures.bins import drawn_in_bins
from mkernel.runtime.pictures.occupancy import home_roles

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["COLOURS", "MOST_BARS", "MOST_BYTES", "draw"]

COLOURS = {
    TraceKind.tile: "#4c78a8",
    TraceKind.wait: "#c9c9c9",
    TraceKind.flag: "#8c8c8c",
    TraceKind.send: "#f58518",
    TraceKind.put: "#e45756",
    TraceKind.forward: "#eeca3b",
    TraceKind.reduce: "#54a24b",
    TraceKind.fetch: "#b279a2",
    TraceKind.route: "#9d755d",
}
MOST_BYTES = 4 << 20
MOST_BARS = 20_000
_MOST_ROWS = 1024  # CTAs; a GPU runs one per SM
_ROLE_ORDER = (Role.intra_comm, Role.inter_send, Role.inter_reduce, Role.compute)  # roles in the order in which CTAs take them
_WIDTH, _RIGHT, _BOTTOM = 1000, 20, 44
_FONT, _TITLE_FONT = 11, 14
_ROWS_HEIGHT, _MIN_ROW, _MAX_ROW, _GROUP_GAP = 560, 3, 24, 14
_MERGE_PIXELS = 0.3  # pixels of a gap that is too narrow to be seen, and is closed
_SCHEDULER_LANE = 0
_THIN = (_SCHEDULER_LANE, TRACE_FLAG_LANE)  # lanes of waits: a strip at the bottom of a row
_LANES = (1, 2, *_THIN)  # in the order in which they are painted


def draw(events: NDArray[Any], title: str) -> str:
    """SVG text of ``Trace.events``. Waits are the thin strip at the bottom of a row: those for flags of other ranks are darker."""
    page = _Page(events)
    bars = list(itertools.islice(page.bars(), MOST_BARS + 1))
    note = ""
    if len(bars) > MOST_BARS:
        bars, bin_ns = drawn_in_bins(page.strips(), page.span, page.left, _WIDTH - _RIGHT - page.left, COLOURS)
        note = f"{events.size} intervals: each bin of {bin_ns / 1e3:.3g} µs has the colour of what took most of it"
    if page.left_out:
        note += f"{'; ' if note else ''}the first {_MOST_ROWS} of {_MOST_ROWS + page.left_out} CTAs"
    head, top = svg.header(f"{title}\n{note}" if note else title, 8, _TITLE_FONT, _WIDTH)
    shift = top + 42  # of the rows, below the legend
    rows = [f'<g transform="translate(0 {shift:.1f})">', *page.axis(), *page.labels, *bars, "</g>"]
    return svg.page(_WIDTH, math.ceil(shift + page.height + _BOTTOM), _FONT, [*head, *_legend(top + 12), *rows])


class _Page:
    """Where the rows of a trace lie, and the time axis: y from 0 (the first row) to ``height``."""

    def __init__(self, events: NDArray[Any]) -> None:
        self._events = events
        rows = _rows(events)
        self.left_out = max(len(rows) - _MOST_ROWS, 0)
        rows = rows[:_MOST_ROWS]
        counts = {role: sum(r == role for _, r in rows) for role in _ROLE_ORDER}
        names = {role: f"{role.name} × {count}" for role, count in counts.items() if count}
        self.left = 16 + math.ceil(max((svg.width(name, _FONT) for name in names.values()), default=80))
        self.span = max(int(events["end"].max()), 1) if events.size else 1
        self._scale = (_WIDTH - self.left - _RIGHT) / self.span
        self._row_height = min(max(_ROWS_HEIGHT // max(len(rows), 1), _MIN_ROW), _MAX_ROW)
        self.labels: list[str] = []
        self._tops: list[tuple[int, float]] = []  # of each CTA
        y, previous = 0.0, None
        for cta, role in rows:
            if role != previous:
                y += _GROUP_GAP if previous is not None else 0
                baseline = y + max(self._row_height, 10)
                self.labels.append(f'<text x="{self.left - 8}" y="{baseline:g}" text-anchor="end">{html.escape(names[role])}</text>')
                previous = role
            self._tops.append((cta, y))
            y += self._row_height
        self.height = max(y, 12.0)

    def strips(self) -> Iterator[tuple[float, float, NDArray[Any]]]:
        """(top, thickness, events) of every lane of every CTA that did anything, from top to bottom."""
        order = np.argsort(self._events["cta"], kind="stable")
        by_cta = self._events[order]
        ctas = by_cta["cta"]
        strip = max(self._row_height * 0.25, 1)
        for cta, y in self._tops:
            of_cta = by_cta[np.searchsorted(ctas, cta, "left") : np.searchsorted(ctas, cta, "right")]
            for lane in _LANES:
                events = of_cta[of_cta["lane"] == lane]
                if events.size:
                    yield (y + self._row_height - strip, strip, events) if lane in _THIN else (y, self._row_height - 1, events)

    def bars(self) -> Iterator[str]:
        """One rectangle per interval that can be told from its neighbours."""
        for top, thickness, events in self.strips():
            for kind, label, begin, end in _merged(events, _MERGE_PIXELS / self._scale):
                x, width = self.left + begin * self._scale, max((end - begin) * self._scale, 0.2)
                yield (
                    f'<rect x="{x:.2f}" y="{top:.1f}" width="{width:.2f}" height="{thickness:.1f}" fill="{COLOURS[kind]}">'
                    f"<title>{label}: {(end - begin) / 1e3:.2f} µs</title></rect>"
                )

    def axis(self) -> Iterator[str]:
        """A line per round number of microseconds, each with its number."""
        step = _nice(self.span / 8)
        for i in range(int(self.span / step) + 1):
            x = self.left + i * step * self._scale
            label = f"{i * step / 1e3:g}"
            middle = min(x, _WIDTH - 2 - svg.width(label, _FONT) / 2)
            yield f'<line x1="{x:.1f}" y1="-4" x2="{x:.1f}" y2="{self.height + 4:g}" stroke="#e8e8e8"/>'
            yield f'<text x="{middle:.1f}" y="{self.height + 18:g}" text-anchor="middle">{label}</text>'
        yield f'<text x="{_WIDTH - _RIGHT}" y="{self.height + 36:g}" text-anchor="end">µs</text>'


def _rows(events: NDArray[Any]) -> list[tuple[int, Role]]:
    """CTAs from top to bottom. A communication CTA that joined compute stays in the group of its first role."""
    roles = home_roles(events)
    return sorted(roles.items(), key=lambda item: (_ROLE_ORDER.index(item[1]), item[0]))


def _merged(events: NDArray[Any], gap: float) -> Iterator[tuple[TraceKind, str, int, int]]:
    """(kind, label, begin, end) of one lane, with intervals of a kind joined where both they and the gap between are invisible."""
    run: tuple[int, str, int, int] | None = None
    columns = (events[name].tolist() for name in ("cta", "kind", "argument", "begin", "end", "peer"))
    for cta, kind, argument, begin, end, peer in zip(*columns, strict=True):
        if run is not None and run[0] == kind and begin - run[3] < gap and end - begin < gap:
            run = (kind, run[1], run[2], max(run[3], end))
            continue
        if run is not None:
            yield TraceKind(run[0]), *run[1:]
        what = f"waits for rank {peer}" if kind == TraceKind.flag else f"{TraceKind(kind).name} {argument}"
        run = (kind, f"CTA {cta} {what}", begin, end)
    if run is not None:
        yield TraceKind(run[0]), *run[1:]


def _nice(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(step, 1.0)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= max(step, 1.0))


def _legend(y: float) -> Iterator[str]:
    for i, (kind, colour) in enumerate(COLOURS.items()):
        x = 8 + i * 90
        yield f'<rect x="{x}" y="{y:.1f}" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="{y + 10:.1f}">{kind.name}</text>'
