"""``mk.trace``: from the device's records to intervals, Chrome JSON, picture and summary."""

from __future__ import annotations

import json
import pickle
import threading
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel import abi
from mkernel.abi import FlagKind, Role, TraceKind
from mkernel.errors import AbortedError, ArgumentError
from mkernel.runtime.clock import Clock
from mkernel.runtime.pictures import perfetto
from mkernel.runtime.pictures.occupancy import Intervals, occupancy
from mkernel.runtime.trace import Trace, trace
from mkernel.runtime.traces import Traces

RECORD = np.dtype([("kind", np.uint32), ("argument", np.uint32), ("begin", np.uint64), ("end", np.uint64)])
START = 1_700_000_000_000_000_000  # a device clock, far from 0


class FakeWorld:
    """A world, and its recorder, that hands out what a device would have written."""

    rank = 2
    offset = Clock(-START, 5)

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

    def clock(self) -> Clock:
        return self.offset

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
    """A track per CTA, named by the role in which it began; waits of a scheduler are not on it."""
    path = traced().save(tmp_path / "t.json")
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    forward = next(e for e in spans if e["name"] == "forward 9")
    assert (forward["pid"], forward["ts"], forward["dur"], forward["cat"]) == (2, 1.5, 0.5, "intra_comm")
    named = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert set(named.values()) == {"intra_comm 0 (CTA 0)", "inter_send 0 (CTA 1)", "compute 0 (CTA 2)"}
    assert named.keys() == {e["tid"] for e in spans}
    shown = sum(kind != TraceKind.wait for intervals in LANES.values() for kind, *_ in intervals)
    assert len(spans) == shown


def flag(kind: FlagKind, role: Role, peer: int) -> Any:
    """What a record of the lane of flags has for a kind."""
    return TraceKind.flag | kind << abi.TRACE_FLAG_KIND_SHIFT | role << abi.TRACE_ROLE_SHIFT | peer << abi.TRACE_PEER_SHIFT


FLAGS = {
    (0, 1): [(TraceKind.tile, 0, 100, 300), (TraceKind.tile, 1, 700, 900)],
    (0, 3): [
        (flag(FlagKind.entry, Role.compute, 1), 1, 0, 400),  # 100 to 300 it computes: 200 are lost, 100 of them to rank 3
        (flag(FlagKind.entry, Role.compute, 3), 3, 0, 100),
        (flag(FlagKind.chunk, Role.compute, 3), 17, 350, 700),  # ends later: 350 to 700
    ],
    (1, 2): [(TraceKind.send, 0, 0, 1000)],
}


def test_waits_for_ranks_are_cut_so_that_the_last_to_come_counts() -> None:
    events = traced(FLAGS).events
    waits = events[events["lane"] == abi.TRACE_FLAG_LANE]
    assert [(int(e["peer"]), int(e["flag"]), int(e["begin"]), int(e["end"])) for e in waits] == [(1, 0, 0, 350), (3, 1, 350, 700)]
    assert set(waits["kind"]) == {TraceKind.flag}
    assert set(waits["role"]) == {Role.compute}


def test_time_of_roles_and_what_was_lost_to_whom() -> None:
    found = occupancy(traced(FLAGS).events)
    assert found.span == 1000
    assert found.roles == {Role.compute: (1, 400, 500, 100), Role.intra_comm: (1, 1000, 0, 0)}
    expected = np.zeros_like(found.lost)
    expected[1, FlagKind.entry], expected[3, FlagKind.chunk] = 150, 350
    assert (found.lost == expected).all()
    assert (found.moving, found.overlap) == (1000, 0.4)


def test_the_role_of_a_cta_is_what_its_waits_say() -> None:
    """One with nothing to push is of its role all the same, and one that pushes beside its tiles computes."""
    lanes = {
        (0, 1): [(TraceKind.tile, 0, 200, 300)],
        (0, 3): [(flag(FlagKind.entry, Role.intra_comm, 1), 1, 0, 100)],
        (1, 1): [(TraceKind.tile, 1, 0, 300)],
        (1, 2): [(TraceKind.send, 0, 100, 200)],
        (1, 3): [(flag(FlagKind.entry, Role.compute, 1), 1, 0, 50)],
    }
    trace = traced(lanes)
    assert {role: time.ctas for role, time in occupancy(trace.events).roles.items()} == {Role.compute: 1, Role.intra_comm: 1}
    assert {"intra_comm × 1", "compute × 1"} <= {
        t.text for t in ElementTree.fromstring(trace._repr_svg_()).iter("{http://www.w3.org/2000/svg}text")
    }


def test_a_picture_in_a_notebook_has_the_title_that_was_asked_for() -> None:
    assert ">the best split<" in traced().plot(title="the best split")._repr_svg_()


def test_waits_of_a_sending_thread_are_not_work() -> None:
    """In inter_send one thread waits for what it puts, inside the interval of the put."""
    lanes = {(0, 2): [(TraceKind.put, 0, 0, 1000)], (0, 3): [(flag(FlagKind.chunk, Role.inter_send, 2), 5, 100, 700)]}
    trace = traced(lanes)
    assert occupancy(trace.events).roles == {Role.inter_send: (1, 400, 600, 0)}
    spans = [(e["name"], e["ts"], e["dur"]) for e in perfetto.tracks(2, trace.events) if e["ph"] == "X"]
    assert spans == [("put 0", 0.0, 0.1), ("waits for rank 2: data 5", 0.1, 0.6), ("put 0", 0.7, 0.3)]


def test_what_a_cta_moves_beside_its_tiles_has_a_track_of_its_own() -> None:
    lanes = {(0, 1): [(TraceKind.tile, 0, 0, 500)], (0, 2): [(TraceKind.send, 0, 200, 300), (TraceKind.send, 1, 600, 700)]}
    events = perfetto.tracks(2, traced(lanes).events)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}  # type: ignore[index]
    where = {e["name"]: names[e["tid"]] for e in events if e["ph"] == "X"}
    assert where == {
        "tile 0": "intra_comm 0 (CTA 0)",
        "send 0": "intra_comm 0 (CTA 0): beside its tiles",
        "send 1": "intra_comm 0 (CTA 0)",
    }


@pytest.mark.parametrize("turn", range(20))
def test_intervals_are_sets_of_points(rng: np.random.Generator, turn: int) -> None:
    """Against sets of whole numbers."""

    def draw() -> tuple[Intervals, set[int]]:
        begin = rng.integers(0, 60, int(rng.integers(0, 9)))
        end = begin + rng.integers(0, 15, begin.size)
        events = np.zeros(begin.size, [("begin", np.int64), ("end", np.int64)])
        events["begin"], events["end"] = begin, end
        return Intervals.of(events), {x for b, e in zip(begin.tolist(), end.tolist(), strict=True) for x in range(b, e)}

    def points(some: Intervals) -> set[int]:
        covered = [x for b, e in zip(some.begin.tolist(), some.end.tolist(), strict=True) for x in range(b, e)]
        assert len(covered) == len(set(covered))
        return set(covered)

    (a, in_a), (b, in_b) = draw(), draw()
    assert points(a) == in_a
    assert points(a.plus(b)) == in_a | in_b
    assert points(a.minus(b)) == in_a - in_b
    assert a.shared(b) == len(in_a & in_b)
    at = rng.integers(-5, 90, 30)
    assert a.until(at).tolist() == [sum(x < limit for x in in_a) for limit in at.tolist()]


def test_traces_of_ranks_lie_on_one_time_axis(tmp_path: Path) -> None:
    one, other = traced(), traced(FLAGS)
    other._rank, other.start_ns, other.clock_error_ns = 0, one.start_ns + 5000, 7
    traces = Traces([one, other])
    assert traces.clock_error_ns == 12, "of both together"
    events = json.loads(traces.save(tmp_path / "t.json").read_text())["traceEvents"]
    begins = {rank: min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == rank) for rank in (0, 2)}
    assert begins == {2: 0.0, 0: 5.0}
    assert traces.blame.shape == (4, 4)
    assert traces.blame[0].tolist() == [0, 0.075, 0, 0.175], "us, over 2 CTAs"
    assert traces.culprit() == 3
    assert "most was lost waiting for rank 3: 0.1 us (data 0.1)" in traces.summary()
    with pytest.raises(ArgumentError, match="one trace of each rank"):
        Traces([one, one])


def test_gathered_traces_are_those_that_were_recorded() -> None:
    """By two ranks of one host, whose exchanges a dictionary of queues carries."""
    given = {0: traced(FLAGS), 1: traced()}
    given[0]._rank, given[1]._rank = 0, 1
    meet, told = threading.Barrier(2), {}

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def exchange(self, what: str, value: Any) -> list[Any]:
            told[self.rank] = json.dumps(value)
            meet.wait(60)
            found = [json.loads(told[rank]) for rank in (0, 1)]
            meet.wait(60)
            return found

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda rank: Traces.gather(Rank(rank), given[rank]), (0, 1)))
    for traces in results:
        for found, original in zip(traces.traces, given.values(), strict=True):
            assert found.events.tobytes() == original.events.tobytes()
            assert (found.rank, found.start_ns, found.clock_error_ns) == (original.rank, original.start_ns, original.clock_error_ns)


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
