"""A trace as an SVG picture: time to the right, one row per CTA, rows grouped by role. No drawing library needed."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mkernel.abi import Role, TraceKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["COLOURS", "draw"]

COLOURS = {
    TraceKind.tile: "#4c78a8",
    TraceKind.wait: "#c9c9c9",
    TraceKind.send: "#f58518",
    TraceKind.put: "#e45756",
    TraceKind.forward: "#eeca3b",
    TraceKind.reduce: "#54a24b",
}
_ROLE_ORDER = (Role.intra_comm, Role.inter_send, Role.inter_reduce, Role.compute)  # the order in which CTAs take roles
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 1000, 110, 20, 64, 44
_ROWS_HEIGHT, _MIN_ROW, _MAX_ROW, _GROUP_GAP = 560, 3, 24, 10
_MERGE_PIXELS = 0.3  # gaps that nobody can see are closed, so that a trace of 10^5 intervals stays a small file
_SCHEDULER_LANE = 0


def draw(events: NDArray[Any], title: str) -> str:
    """SVG text of ``Trace.events``. Waits of a compute CTA's scheduler are the thin strip under its tiles."""
    rows = _rows(events)
    span = max(int(events["end"].max()), 1) if events.size else 1
    scale = (_WIDTH - _LEFT - _RIGHT) / span
    height = min(max(_ROWS_HEIGHT // max(len(rows), 1), _MIN_ROW), _MAX_ROW)
    body: list[str] = []
    y, previous = _TOP, None
    for cta, role in rows:
        if role != previous:
            y += _GROUP_GAP if previous is not None else 0
            count = sum(r == role for _, r in rows)
            body.append(f'<text x="{_LEFT - 8}" y="{y + max(height, 10)}" text-anchor="end">{role.name} × {count}</text>')
            previous = role
        body.extend(_row(events[events["cta"] == cta], y, height, scale))
        y += height
    return "\n".join([_head(y + _BOTTOM, title), *_axis(span, scale, y), *body, *_legend(), "</svg>"]) + "\n"


def _rows(events: NDArray[Any]) -> list[tuple[int, Role]]:
    """CTAs from top to bottom. A communication CTA that joined compute stays in the group of its first role."""
    roles: dict[int, Role] = {}
    for event in events:
        cta, role = int(event["cta"]), Role(int(event["role"]))
        if roles.setdefault(cta, role) == Role.compute:
            roles[cta] = role
    return sorted(roles.items(), key=lambda item: (_ROLE_ORDER.index(item[1]), item[0]))


def _row(events: NDArray[Any], y: float, height: float, scale: float) -> Iterator[str]:
    strip = max(height * 0.25, 1)
    for lane in (1, 2, _SCHEDULER_LANE):
        top, thickness = (y + height - strip, strip) if lane == _SCHEDULER_LANE else (y, height - 1)
        for kind, label, begin, end in _merged(events[events["lane"] == lane], _MERGE_PIXELS / scale):
            x, width = _LEFT + begin * scale, max((end - begin) * scale, 0.2)
            yield (
                f'<rect x="{x:.2f}" y="{top:.1f}" width="{width:.2f}" height="{thickness:.1f}" fill="{COLOURS[kind]}">'
                f"<title>{label}: {(end - begin) / 1e3:.2f} µs</title></rect>"
            )


def _merged(events: NDArray[Any], gap: float) -> Iterator[tuple[TraceKind, str, int, int]]:
    """(kind, label, begin, end) of one lane, with intervals of a kind joined where both they and the gap between are invisible."""
    run: tuple[TraceKind, str, int, int] | None = None
    for event in events:
        kind, begin, end = TraceKind(int(event["kind"])), int(event["begin"]), int(event["end"])
        label = f"CTA {int(event['cta'])} {kind.name} {int(event['argument'])}"
        if run is not None and run[0] == kind and begin - run[3] < gap and end - begin < gap:
            run = (kind, run[1], run[2], max(run[3], end))
            continue
        if run is not None:
            yield run
        run = (kind, label, begin, end)
    if run is not None:
        yield run


def _head(height: float, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="{_LEFT}" y="22" font-size="14">{html.escape(title)}</text>'
    )


def _axis(span: int, scale: float, bottom: float) -> Iterator[str]:
    step = _nice(span / 8)
    for i in range(int(span / step) + 1):
        x = _LEFT + i * step * scale
        yield f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{bottom + 4}" stroke="#e8e8e8"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{i * step / 1e3:g}</text>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{bottom + 36}" text-anchor="end">µs</text>'


def _nice(step: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(step, 1.0)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= max(step, 1.0))


def _legend() -> Iterator[str]:
    for i, (kind, colour) in enumerate(COLOURS.items()):
        x = _LEFT + i * 90
        yield f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="44">{kind.name}</text>'
