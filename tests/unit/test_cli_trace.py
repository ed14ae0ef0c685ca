"""``mk.trace``: from the device's records to intervals, Chrome JSON, picture and summary."""

from __future__ import annotations

import json
import pickle
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel import abi
from mkernel.abi import Role, TraceKind
from mkernel.errors import AbortedError, ArgumentError
from mkernel.runtime.trace import Trace, trace

RECORD = np.dtype([("kind", np.uint32), ("argument", np.uint32), ("begin", np.uint64), ("end", np.uint64)])
START = 1_700_000_000_000_000_000  # a device clock, far from 0


class FakeWorld:
    """A world, and its recorder, that hands out what a device would have written."""

    rank = 2

    @property
    def recorder(self) -> FakeWorld:
        return self

    def __init__(self, lanes: dict[tuple[int, int], list[tuple[TraceKind, int, int, int]]], ctas: int = 4, fails: bool = False) -> None:
        self.lanes, self.ctas, self.fails = lanes, ctas, fails

    def begin(self, capacity: int) -> None:
        self.records = np.zeros((self.ctas, abi.TRACE_LANES, capacity), RECORD)
        for (cta, lane), intervals in self.lanes.items():
            kept = intervals[: capacity - 1]
            self.records[cta, lane, 0]["begin"] = len(kept)
            for at, (kind, argument, begin, end) in enumerate(kept, 1):
                self.records[cta, lane, at] = (kind, argument, START + begin, START + end)

    def end(self) -> Any:
        if self.fails:
            raise AbortedError("gone")
        return self.records


LANES = {
    (0, 2): [(TraceKind.send, 0, 0, 1000), (TraceKind.forward, 9, 1500, 2000)],
    (0, 1): [(TraceKind.tile, 7, 2100, 4000)],  # joined compute
    (1, 2): [(TraceKind.wait, 3, 100, 200), (TraceKind.put, 0, 200, 900)],
    (2, 0): [(TraceKind.wait, 4, 1000, 1800)],
    (2, 1): [(TraceKind.tile, 0, 0, 900), (TraceKind.tile, 4, 1800, 2700)],
}


def traced(lanes: dict[Any, Any] = LANES, **options: Any) -> Trace:
    with trace(FakeWorld(lanes), **options) as result:
        assert not result.events.size
    return result


def test_record_type_is_the_abi() -> None:
    assert RECORD.itemsize == abi.ctypes.sizeof(abi.TraceRecord)


def test_intervals_are_relative_ordered_and_have_roles() -> None:
    events = traced().events
    assert events["begin"].min() == 0
    assert (np.diff(events["begin"]) >= 0).all()
    assert {(int(e["cta"]), int(e["lane"])): Role(int(e["role"])) for e in events} == {
        (0, 2): Role.intra_comm,
        (0, 1): Role.compute,
        (1, 2): Role.inter_send,  # its first interval is a wait: the next one tells
        (2, 0): Role.compute,
        (2, 1): Role.compute,
    }
    assert len(events) == sum(map(len, LANES.values()))


def test_chrome_json(tmp_path: Path) -> None:
    path = traced().save(tmp_path / "t.json")
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum(map(len, LANES.values()))
    forward = next(e for e in spans if e["name"] == "forward 9")
    assert (forward["pid"], forward["ts"], forward["dur"], forward["cat"]) == (2, 1.5, 0.5, "intra_comm")
    named = {e["tid"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert named == {e["tid"] for e in spans}


def test_picture_has_a_bar_per_interval_and_a_row_per_cta(tmp_path: Path) -> None:
    traced().plot(tmp_path / "t.svg", title="a < b")
    root = ElementTree.parse(tmp_path / "t.svg").getroot()
    titles = [t.text for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == sum(map(len, LANES.values()))
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in texts
    assert {"intra_comm × 1", "inter_send × 1", "compute × 1"} <= set(texts)


def test_invisible_intervals_are_merged() -> None:
    many = {(0, 1): [(TraceKind.tile, i, 10 * i, 10 * i + 9) for i in range(20_000)]}
    assert traced(many, capacity=30_000)._repr_svg_().count("<rect") < 4000


def test_empty_trace_still_draws() -> None:
    empty = traced({})
    ElementTree.fromstring(empty._repr_svg_())
    assert empty.summary() == "rank 2: no intervals"


def test_summary_counts_and_shares() -> None:
    summary = traced().summary()
    assert summary.startswith("rank 2: 4.0 us, 3 CTAs")
    tiles = next(line for line in summary.splitlines() if "tile" in line)
    assert "compute" in tiles
    assert "3 x" in tiles
    assert f"{100 * (1900 + 900 + 900) / (2 * 4000):.1f} %" in tiles


def test_a_full_lane_is_told(caplog: pytest.LogCaptureFixture) -> None:
    result = traced({(0, 1): [(TraceKind.tile, i, i, i + 1) for i in range(5)]}, capacity=4)
    assert result.truncated
    assert len(result.events) == 3
    assert "not enough" in caplog.text
    assert not traced().truncated


def test_capacity_is_checked() -> None:
    with pytest.raises(ArgumentError, match="capacity"):
        trace(FakeWorld({}), capacity=1)


def test_the_error_inside_the_block_is_the_one_raised() -> None:
    with pytest.raises(ZeroDivisionError), trace(FakeWorld({}, fails=True)):
        raise ZeroDivisionError
    with pytest.raises(AbortedError), trace(FakeWorld({}, fails=True)):
        pass


def test_what_was_recorded_travels_between_processes() -> None:
    original = traced()
    original._world.lock = threading.Lock()  # type: ignore[union-attr]  # a world cannot be pickled
    back = pickle.loads(pickle.dumps(original))
    assert back._repr_svg_() == original._repr_svg_()
    assert back.summary() == original.summary()
    with pytest.raises(ArgumentError, match="another process"), back:
        pass
