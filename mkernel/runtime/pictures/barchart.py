"""Measurements as an SVG bar chart: one bar per line, with its label on the left and its value on the right."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mkernel.runtime.pictures import svg

__all__ = ["Bar", "draw"]

_WIDTH, _LINE_HEIGHT, _GROUP_GAP, _EDGE = 910, 18, 6, 8
_FONT, _TITLE_FONT = 11, 13
_LABELS = 0.5  # of the width, at most


class Bar(NamedTuple):
    """One measurement in ms: the bar ends at ``median``, a line reaches from ``fastest`` to ``slowest``. Groups have gaps between them."""

    group: int
    label: str
    median: float
    fastest: float
    slowest: float
    colour: str


def draw(title: str, bars: Sequence[Bar]) -> str:
    """SVG text. Titles and labels of any length stay inside: titles are broken into lines, labels end in an ellipsis."""
    head, y = svg.header(title, _EDGE, _TITLE_FONT, _WIDTH)
    labels = [svg.fitted(bar.label, _FONT, _LABELS * _WIDTH) for bar in bars]
    left = 2 * _EDGE + math.ceil(max((svg.width(label, _FONT) for label in labels), default=0.0))
    right = 2 * _EDGE + math.ceil(max((svg.width(_value(bar), _FONT) for bar in bars), default=0.0))
    scale = max(_WIDTH - left - right, 1) / (max((bar.slowest for bar in bars), default=1.0) or 1.0)
    body: list[str] = []
    y += 14
    for i, (bar, label) in enumerate(zip(bars, labels, strict=True)):
        y += _GROUP_GAP if i and bar.group != bars[i - 1].group else 0
        body += _line(bar, label, left, y, scale)
        y += _LINE_HEIGHT
    return svg.page(_WIDTH, math.ceil(y + _EDGE), _FONT, [*head, *body])


def _line(bar: Bar, label: str, left: float, y: float, scale: float) -> Iterator[str]:
    begin, end, middle = left + bar.fastest * scale, left + bar.slowest * scale, y + _LINE_HEIGHT / 2 - 2
    yield f'<text x="{left - _EDGE}" y="{y + 11:.1f}" text-anchor="end">{html.escape(label)}</text>'
    yield f'<rect x="{left}" y="{y:.1f}" width="{bar.median * scale:.1f}" height="{_LINE_HEIGHT - 4}" fill="{bar.colour}"/>'
    yield f'<line x1="{begin:.1f}" x2="{end:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" stroke="black"/>'
    yield f'<text x="{end + _EDGE:.1f}" y="{y + 11:.1f}">{_value(bar)}</text>'


def _value(bar: Bar) -> str:
    return f"{bar.median:.4f} ms"
