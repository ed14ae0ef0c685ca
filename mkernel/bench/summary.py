"""What a report of many shapes comes to: our time over that of the baselines, in a line per mode, and as a picture against M."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from mkernel.bench.baselines import NCCL
from mkernel.bench.report import FUSED, GRAPH, MODES, Report, Row, rivals
from mkernel.runtime.pictures import svg

__all__ = ["plot", "ratio", "slower_than", "summarize"]

_WIDTH, _HEIGHT, _FONT, _TITLE_FONT, _EDGE = 910, 420, 11, 13, 48
_COLOURS = dict(zip((*MODES, GRAPH), ("#4c78a8", "#f58518", "#54a24b"), strict=True))


def ratio(row: Row, mode: str, others: Sequence[str]) -> float | None:
    """Our time over the best of ``others``; None where one of both is missing."""
    ours = row.time(FUSED, mode)
    times = [time for name in others if (time := row.time(name, mode)) is not None]
    return None if ours is None or not times else ours / min(times)


def _first(row: Row) -> list[str]:
    """The rival that targets are set against."""
    return [NCCL] if NCCL in row.times else _rivals(row)[:1]


def _rivals(row: Row) -> list[str]:
    return rivals(row.times)


def slower_than(row: Row, limit: float) -> bool:
    """Whether a row takes more than ``limit`` of NCCL+cuBLAS in any mode."""
    return any(found > limit for mode in MODES if (found := ratio(row, mode, _first(row))) is not None)


def summarize(report: Report) -> Iterator[str]:
    """Lines for people: geometric mean, worst, how many are slower, against NCCL+cuBLAS and against the best; how far predictions were."""
    modes = [mode for mode in (*MODES, GRAPH) if any(mode in times for row in report.rows for times in row.times.values())]
    several = any(len(_rivals(row)) > 1 for row in report.rows)
    for mode in modes:
        for what, others_of in (("", _first), ("the best baseline", _rivals)) if several else (("", _first),):
            found = [(value, row) for row in report.rows if (value := ratio(row, mode, others_of(row))) is not None]
            if len(found) > 1:
                mean = math.exp(math.fsum(math.log(value) for value, _ in found) / len(found))
                worst, row = max(found, key=lambda one: one[0])
                slower = sum(value > 1 for value, _ in found)
                name = what or next(iter(_first(row)))
                figures = f"geometric mean {mean:.3f}, worst {worst:.2f} ({row.label}), {slower} of {len(found)} above 1"
                yield f"{mode}, fused / {name}: {figures}"
    for mode in MODES:
        errors = [abs(row.predicted[mode] / time - 1) for row in report.rows if mode in row.predicted and (time := row.time(FUSED, mode))]
        if len(errors) > 1:
            errors.sort()
            median, high = errors[len(errors) // 2], errors[min(len(errors) - 1, int(0.9 * len(errors)))]
            yield f"{mode}, predicted / fused: median error {100 * median:.1f} %, 90th percentile {100 * high:.1f} %"


def plot(report: Report) -> str:
    """SVG: a point per shape and mode, M (or T, or S) to the right, our time over NCCL+cuBLAS upwards, both logarithmic."""
    points = [
        (size, value, mode, row.label)
        for row in report.rows
        for mode in _COLOURS
        if (value := ratio(row, mode, _first(row))) is not None and (size := _size(row))
    ]
    title = f"{report.op}, {report.world['nodes']}x{report.world['ranks_per_node']} ranks: fused / baseline; {', '.join(_COLOURS)}"
    head, top = svg.header(title, _EDGE, _TITLE_FONT, _WIDTH)
    if not points:
        return svg.page(_WIDTH, math.ceil(top + _EDGE), _FONT, head)
    right = max(2.0, *(size for size, *_ in points))
    low, high = min(0.5, *(value for _, value, *_ in points)), max(2.0, *(value for _, value, *_ in points))
    bottom = top + _HEIGHT

    def x(size: float) -> float:
        return _EDGE + (_WIDTH - 2 * _EDGE) * math.log(size) / math.log(right)

    def y(value: float) -> float:
        return bottom - _HEIGHT * math.log(value / low) / math.log(high / low)

    body = []
    for power in range(math.ceil(math.log2(right)) + 1):
        if 2**power <= right and power % 2 == 0:
            body.append(f'<text x="{x(2**power):.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{2**power}</text>')
    for value in (0.25, 0.5, 0.7, 0.8, 1.0, 1.5, 2.0, 4.0):
        if low <= value <= high:
            colour = "black" if value == 1 else "#dddddd"
            body.append(f'<line x1="{_EDGE}" x2="{_WIDTH - _EDGE}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{colour}"/>')
            body.append(f'<text x="{_EDGE - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for size, value, mode, label in points:
        note = html.escape(svg.clean(f"{label}, {mode}: {value:.2f}"))
        body.append(f'<circle cx="{x(size):.1f}" cy="{y(value):.1f}" r="3" fill="{_COLOURS[mode]}"><title>{note}</title></circle>')
    return svg.page(_WIDTH, math.ceil(bottom + _EDGE), _FONT, [*head, *body])


def _size(row: Row) -> int:
    """What the plot has to the right."""
    return next((row.shape[name] for name in ("M", "T", "S") if name in row.shape), 0)
