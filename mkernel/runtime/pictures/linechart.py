"""Measurements as an SVG line chart: one line per name, a point per measurement."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence

from mkernel.runtime.pictures import svg

__all__ = ["draw"]

_WIDTH, _HEIGHT, _EDGE = 760, 300, 8
_FONT, _TITLE_FONT = 11, 13
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#9d755d")
_TICKS = 5


def draw(title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, doublings: bool = False) -> str:
    """SVG text. The y axis begins at 0; at the x axis stand the values that points have. ``doublings``: it is logarithmic, x is above 0."""
    head, top = svg.header(title, _EDGE, _TITLE_FONT, _WIDTH)
    points = [point for line in lines.values() for point in line]
    most = max((y for _, y in points), default=0.0) or 1.0
    values = sorted({x for x, _ in points})
    left, right, above = 64.0, _WIDTH - 24.0, top + 34
    below = above + _HEIGHT
    along = math.log2 if doublings else float
    least, span = (along(values[0]), along(values[-1]) - along(values[0]) or 1.0) if values else (0.0, 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (along(x) - least) / span * (right - left), below - y / most * _HEIGHT

    body = [f'<text x="{left}" y="{above - 12:.1f}">{html.escape(svg.fitted(y_label, _FONT, right - left))}</text>']
    step = _nice(most / _TICKS)
    for i in range(int(most / step) + 1):
        y = i * step
        at = below - y / most * _HEIGHT
        body.append(f'<line x1="{left}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#e8e8e8"/>')
        body.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{round(y, 12):g}</text>')
    for x in values:
        body.append(f'<text x="{place(x, 0.0)[0]:.1f}" y="{below + 16:.1f}" text-anchor="middle">{x:g}</text>')
    label = html.escape(svg.fitted(x_label, _FONT, right - left))
    body.append(f'<text x="{(left + right) / 2:.1f}" y="{below + 34:.1f}" text-anchor="middle">{label}</text>')
    legend = below + 52
    for i, (name, line) in enumerate(lines.items()):
        body += _line([place(x, y) for x, y in line], _COLOURS[i % len(_COLOURS)])
        body += _named(name, legend + i * 16, _COLOURS[i % len(_COLOURS)], left, right - left - 20)
    return svg.page(_WIDTH, legend + max(len(lines), 1) * 16 + _EDGE, _FONT, [*head, *body])


def _nice(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)


def _line(points: Sequence[tuple[float, float]], colour: str) -> Iterator[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'


def _named(name: str, y: float, colour: str, left: float, room: float) -> Iterator[str]:
    yield f'<rect x="{left}" y="{y - 9:.1f}" width="12" height="10" fill="{colour}"/>'
    yield f'<text x="{left + 18}" y="{y:.1f}">{html.escape(svg.fitted(name, _FONT, room))}</text>'
