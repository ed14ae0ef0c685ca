"""The result of a run: the JSON that is saved, and the table that is printed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mkernel.bench.stats import Measurement, tera
from mkernel.tools.table import format_table

__all__ = ["ALONE", "ENGINE", "FUSED", "GRAPH", "MODES", "SCHEMA", "SOLO", "TUNED", "Report", "Row", "render", "rivals", "told"]

SCHEMA = 1
MODES = ("isolated", "back-to-back")
GRAPH = "graph"  # a mode that is measured where it is asked for
FUSED = "fused"  # the whole op, the split chosen by mkernel or by --split
TUNED = "fused tuned"  # with the split that mk.tune finds, where that is another one
ALONE = "cuBLAS alone"  # the local compute of one rank, all inputs already there
ENGINE = "engine alone"  # the op's puts by a kernel that only sends; worlds of several nodes
SOLO = "fused alone"  # the same local compute by our kernel in a world of one


@dataclasses.dataclass
class Row:
    """One shape. ``times[contestant][mode]`` in milliseconds; a contestant without a time has a reason in ``missing``."""

    label: str
    shape: dict[str, int]
    flops: float  # of one rank
    link_bytes: int  # into one GPU over NVLink
    network_bytes: int  # into one GPU over its network card
    link_ms: float
    network_ms: float
    worst: float = float("inf")  # largest error over its bound, all elements of all ranks; right if <= 1
    times: dict[str, dict[str, Measurement]] = dataclasses.field(default_factory=dict)
    host: dict[str, Measurement] = dataclasses.field(default_factory=dict)  # microseconds to enqueue one call on an empty queue
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    tuned: dict[str, int] | None = None  # the split that mk.tune found
    predicted: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  # by mode in ms, "binds", "machine": what the cost model says of FUSED

    @property
    def correct(self) -> bool:
        return self.worst <= 1.0

    def time(self, contestant: str, mode: str = "isolated") -> float | None:
        measurement = self.times.get(contestant, {}).get(mode)
        return None if measurement is None else measurement.median

    @property
    def bound_ms(self) -> float | None:
        """The largest of best compute alone, link and network; None where no compute alone was measured."""
        alone = [time for time in (self.time(ALONE), self.time(SOLO)) if time is not None]
        return max(min(alone), self.link_ms, self.network_ms) if alone else None

    def efficiency(self, contestant: str = FUSED, mode: str = "isolated") -> float | None:
        bound, time = self.bound_ms, self.time(contestant, mode)
        return None if bound is None or time is None else bound / time


@dataclasses.dataclass
class Report:
    op: str
    title: str
    world: dict[str, int]  # ranks, nodes, ranks_per_node
    target: str
    dtype: str
    date: str
    command: str
    versions: dict[str, str]
    settings: dict[str, Any]
    machine: dict[str, Any]  # GPU names; clocks before and after
    rows: list[Row] = dataclasses.field(default_factory=list)
    resumed: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # date, command and machine of each run after the first
    schema: int = SCHEMA

    @property
    def correct(self) -> bool:
        return bool(self.rows) and all(row.correct for row in self.rows)

    def differs_from(self, earlier: Report) -> str:
        """What rows of this run and of an earlier one cannot stand beside each other for; "" if they can."""
        ours, theirs = self._conditions, earlier._conditions
        changed = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        return "; ".join(f"{name} {theirs.get(name)!r}, now {ours.get(name)!r}" for name in changed)

    @property
    def _conditions(self) -> dict[str, Any]:
        """What a row may depend on besides its shape, as JSON has it."""
        found = {name: getattr(self, name) for name in ("op", "title", "target", "dtype")} | {"machine": self.machine.get("name")}
        for name in ("world", "versions", "settings"):
            found |= {f"{name}: {key}": value for key, value in getattr(self, name).items()}
        conditions: dict[str, Any] = json.loads(json.dumps(found))
        return conditions

    def resume(self, earlier: Report) -> None:
        """Go on where ``earlier`` ended: its rows come first, and what it says of itself."""
        this_run = {"date": self.date, "command": self.command, "machine": self.machine}
        self.rows[:0], self.resumed = earlier.rows, [*earlier.resumed, this_run]
        self.date, self.command, self.machine = earlier.date, earlier.command, earlier.machine

    def to_json(self) -> str:
        """The report as JSON. Median, bound and eff stand beside the samples that they follow from."""
        data = dataclasses.asdict(self)
        for row, raw in zip(self.rows, data["rows"], strict=True):
            raw["worst"] = row.worst if row.worst != float("inf") else None  # JSON has no infinity
            raw["summary"] = _summary(row)
        return _to_json(data) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        data = json.loads(text)
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"schema {schema}: this version reads schema {SCHEMA}")
        rows = [_row(raw) for raw in data.pop("rows")]
        return cls(rows=rows, **data)


def _to_json(value: Any, indent: str = "") -> str:
    """JSON text of ``value``, a line per entry; a list without containers, such as the samples of a rank, is one line."""
    if isinstance(value, Mapping):
        entries, (left, right) = [f"{json.dumps(str(name))}: {_to_json(entry, indent + ' ')}" for name, entry in value.items()], "{}"
    elif isinstance(value, (list, tuple)) and any(isinstance(entry, (Mapping, list, tuple)) for entry in value):
        entries, (left, right) = [_to_json(entry, indent + " ") for entry in value], "[]"
    else:
        return json.dumps(value, allow_nan=False)
    separator = f",\n{indent} "
    return f"{left}\n{indent} {separator.join(entries)}\n{indent}{right}" if entries else left + right


def _summary(row: Row) -> dict[str, Any]:
    def figures(measurement: Measurement) -> dict[str, float]:
        return {"median": measurement.median, "p10": measurement.p10, "p90": measurement.p90, "rank": measurement.rank}

    return {
        "correct": row.correct,
        "bound_ms": row.bound_ms,
        "efficiency": {mode: row.efficiency(FUSED, mode) for mode in MODES},
        "times": {name: {mode: figures(m) for mode, m in modes.items()} for name, modes in row.times.items()},
        "host": {name: figures(m) for name, m in row.host.items()},
    }


def _row(raw: dict[str, Any]) -> Row:
    raw = dict(raw)
    raw.pop("summary")
    raw["worst"] = float("inf") if raw["worst"] is None else raw["worst"]
    raw["times"] = {name: {mode: _measurement(m) for mode, m in modes.items()} for name, modes in raw["times"].items()}
    raw["host"] = {name: _measurement(m) for name, m in raw["host"].items()}
    return Row(**raw)


def _measurement(raw: Mapping[str, Any]) -> Measurement:
    return Measurement(tuple(tuple(samples) for samples in raw["samples"]), raw["unit"], raw["method"])


# ---- the table

_NONE = "-"


def _ms(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 10 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def render(report: Report) -> str:
    """The table, times in ms: medians of the slowest rank. A wrong result has no time."""
    world = report.world
    head = (
        f"{report.op}: {report.title}\n{world['ranks']} ranks on {world['nodes']} node(s), {report.dtype}, target {report.target}, "
        f"{report.machine.get('name', 'unknown device')}; ms, median (p10-p90) of the slowest rank"
    )
    rest = report.settings.get("cooldown_ms", 0)
    head += f", after at least {rest:g} ms of rest" if rest else ", without rest"
    if world["nodes"] > 1 and report.settings.get("network"):
        head += f"; network: {report.settings['network']}"
    contestants = _contestants(report.rows)
    lines = [_line(row, contestants, _has_graphs(report.rows)) for row in report.rows]
    headers = ["shape", *contestants, "predicted", "b2b " + FUSED]
    headers += [f"b2b {name}" for name in _others(contestants)] + ["b2b predicted"]
    if _has_graphs(report.rows):
        headers += [f"graph {name}" for name in (FUSED, *_others(contestants))]
    headers += ["link"] + (["network"] if world["nodes"] > 1 else []) + ["bound", "eff", "eff b2b", "TFLOP/s", "host us", "err/bound"]
    if world["nodes"] == 1:
        lines = [line[: headers.index("link") + 1] + line[headers.index("link") + 2 :] for line in lines]
    notes = _notes(report.rows)
    return "\n".join([head, "", format_table(headers, lines), *(["", *notes] if notes else [])])


def told(row: Row) -> str:
    """One line that says what a row has found, for readers who wait for the table."""
    if not row.correct:
        return f"{row.label}: WRONG"
    times = (f"{name} {_ms(row.time(name))} (b2b {_ms(row.time(name, 'back-to-back'))})" for name in row.times)
    return f"{row.label}: {', '.join(times)}"


def _contestants(rows: Iterable[Row]) -> list[str]:
    """Names of contestants in order of appearance; FUSED first, whether or not it has a time."""
    return list(dict.fromkeys([FUSED, *(name for row in rows for name in row.times)]))


def rivals(contestants: Collection[str]) -> list[str]:
    """The names that are not ours and no floors; where there are none, as in a world of one, compute alone."""
    found = [name for name in contestants if not name.startswith(FUSED) and name not in (ALONE, ENGINE, SOLO)]
    return found or ([ALONE] if ALONE in contestants else [])


def _others(contestants: Collection[str]) -> list[str]:
    """Names whose back-to-back time has a column: not those of floors."""
    with_column = {TUNED, *rivals(contestants)}
    return [name for name in contestants if name in with_column]


def _has_graphs(rows: Iterable[Row]) -> bool:
    return any(GRAPH in modes for row in rows for modes in row.times.values())


def _line(row: Row, contestants: list[str], graphs: bool) -> list[str]:
    fused = row.times.get(FUSED, {}).get("isolated")
    first = "WRONG" if not row.correct else _NONE if fused is None else f"{_ms(fused.median)} ({_ms(fused.p10)}-{_ms(fused.p90)})"
    time = row.time(FUSED)
    host = row.host.get(FUSED)
    return [
        row.label,
        first,
        *(_ms(row.time(name)) for name in contestants[1:]),
        _ms(row.predicted.get("isolated")),
        _ms(row.time(FUSED, "back-to-back")),
        *(_ms(row.time(name, "back-to-back")) for name in _others(contestants)),
        _ms(row.predicted.get("back-to-back")),
        *(_ms(row.time(name, GRAPH)) for name in (FUSED, *_others(contestants)) if graphs),
        _ms(row.link_ms),
        _ms(row.network_ms),
        _ms(row.bound_ms),
        _ratio(row.efficiency()),
        _ratio(row.efficiency(mode="back-to-back")),
        _NONE if time is None else f"{tera(row.flops, time):.0f}",
        _NONE if host is None else f"{host.median:.1f}",
        _NONE if row.worst == float("inf") else f"{row.worst:.2f}",
    ]


def _notes(rows: Sequence[Row]) -> list[str]:
    """Reasons why contestants are missing, each once, with its shapes unless it holds for all."""
    shapes: dict[str, list[str]] = {}
    for row in rows:
        for name, reason in row.missing.items():
            shapes.setdefault(f"{name}: {reason}", []).append(row.label)
    return [note if len(labels) == len(rows) else f"{note} ({', '.join(labels)})" for note, labels in shapes.items()]
