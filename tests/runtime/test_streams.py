"""The order of calls and graphs over a model of a GPU that knows what happens before what (gpu_model.py). No GPU, no luck."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mkernel.errors import ArgumentError
from mkernel.memory.driver import DriverError
from mkernel.runtime.cuda import events, queries, streams
from mkernel.runtime.cuda.streams import LaunchQueue
from tests.runtime.fake import FakePlan
from tests.runtime.gpu_libraries import Tensor
from tests.runtime.gpu_model import CONTEXT, IMPLICIT, LEGACY, PER_THREAD
from tests.runtime.model_device import ModelBackend
from tests.runtime.place import K, M, N, Place, on_model


def test_a_change_of_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        for stream in [*(place.gpu.stream() for _ in range(3)), LEGACY]:
            place.call(stream=stream)
            place.call(stream=stream)
        place.check()

    on_model(monkeypatch, use)


def test_on_one_stream_nothing_is_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cached call asks of the driver."""

    def use(place: Place) -> None:
        a, b, c = place.arrays()
        place.call(a, b, out=c)
        place.gpu.calls.clear()
        place.call(a, b, out=c)
        assert place.gpu.calls == ["cuCtxGetCurrent", "cuStreamGetCaptureInfo_v2", "cuEventRecord"]
        place.use("cupy", place.gpu.stream())
        place.call(a, b, out=c)
        place.gpu.calls.clear()
        place.call(a, b, out=c)
        assert place.gpu.calls == ["cuCtxGetCurrent", "cuStreamGetCaptureInfo_v2", "cuStreamGetId", "cuEventRecord"]

    on_model(monkeypatch, use)


def test_a_new_stream_with_the_handle_of_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        stream = place.gpu.stream()
        place.call(stream=stream)
        place.gpu.destroy(stream)
        place.gpu.stream(handle=stream)
        place.use("cupy", stream)
        place.call()
        place.check()

    on_model(monkeypatch, use)


def test_the_per_thread_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """One handle, a stream for every thread."""

    def use(place: Place) -> None:
        place.call(stream=PER_THREAD)
        thread = threading.Thread(target=lambda: place.call(stream=PER_THREAD))
        thread.start()
        thread.join()
        place.call(stream=PER_THREAD)
        place.check()
        assert len(place.calls) == 3

    on_model(monkeypatch, use)


def test_threads_share_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on a stream of its own: every call is launched whole, in one order, on its thread's stream."""

    def use(place: Place) -> None:
        problems: list[BaseException] = []
        ready = threading.Barrier(4)

        def work() -> None:
            try:
                stream = place.gpu.stream()
                place.use("cupy", stream)  # of this thread
                ready.wait()
                for size in (16, 32, 48, 64, 16, 32):
                    c = place.call(place.array("cupy", (size, K)))
                    assert c.shape == (size, N)
                    assert c.made_on == stream
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        assert len(place.calls) == place.world.call_number == 24
        place.check()

    on_model(monkeypatch, use)


def test_a_stream_that_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle of no stream, and the legacy stream while another one is captured: the call is refused, and does not count."""

    def use(place: Place) -> None:
        a, b, c = place.arrays()
        place.call(a, b, out=c)
        with pytest.raises(DriverError):
            place.call(a, b, out=c, stream=0xDEAD)
        captured = place.gpu.stream(blocking=True)
        place.gpu.begin_capture(captured)
        with pytest.raises(ArgumentError, match=r"legacy default stream.*being captured"):
            place.call(a, b, out=c)
        place.gpu.end_capture(captured)
        assert place.world.call_number == 1
        place.call(a, b, out=c)
        assert IMPLICIT == queries._CAPTURE_IMPLICIT

    on_model(monkeypatch, use)


# ---- graphs


def captured(place: Place, stream: int, calls: int, *others: int) -> Any:
    """A graph of that many calls, taking turns on the streams."""
    place.gpu.begin_capture(stream)
    for other in others:
        place.gpu.order(stream, other)
    for i in range(calls):
        place.call(out=place.array("cupy", (M, N)), stream=(stream, *others)[i % (1 + len(others))])
    for other in others:
        place.gpu.order(other, stream)
    return place.gpu.end_capture(stream)


def test_eager_captured_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager on S, captured on T, eager on U: S and U are ordered."""

    def use(place: Place) -> None:
        s, t, u = (place.gpu.stream() for _ in range(3))
        place.call(stream=s)
        captured(place, t, 1)
        place.call(stream=u)
        assert len(place.calls) == 2
        place.check()

    on_model(monkeypatch, use)


@pytest.mark.parametrize("others", [0, 1, 2])
def test_replays_beside_eager_calls(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        place.call()
        graphs = [captured(place, place.gpu.stream(), 4, *(place.gpu.stream() for _ in range(others))) for _ in range(2)]
        for graph in (graphs[0], graphs[0], graphs[1], graphs[0]):
            place.gpu.replay(graph, place.gpu.stream())
            place.call(stream=place.gpu.stream())
            place.gpu.replay(graph, place.gpu.stream())
        assert len(place.calls) == 1 + 4 * 9
        place.check()

    on_model(monkeypatch, use)


def test_a_capture_costs_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many calls: a wait in front, and one record off their path."""

    def use(place: Place) -> None:
        place.call()
        for calls in (1, 20):
            graph = captured(place, place.gpu.stream(), calls)
            kinds = [node.kind for node in graph.nodes.values()]
            assert (kinds.count("kernel"), kinds.count("wait"), kinds.count("record")) == (calls, 1, 1)
            record = next(number for number, node in graph.nodes.items() if node.kind == "record")
            assert not any(record in node.before for node in graph.nodes.values())
            assert all(len(node.before) <= 1 for node in graph.nodes.values())

    on_model(monkeypatch, use)


def test_streams_of_a_capture_that_are_ordered_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph gets no dependency twice, which the driver might refuse."""

    def use(place: Place) -> None:
        s, t = place.gpu.stream(), place.gpu.stream()
        place.call()
        place.gpu.begin_capture(s)
        for before, after in ((s, t), (t, s), (s, t)):
            place.call(out=place.array("cupy", (M, N)), stream=before)
            place.gpu.order(before, after)
        place.call(out=place.array("cupy", (M, N)), stream=t)
        place.gpu.order(t, s)
        place.gpu.replay(place.gpu.end_capture(s), s)
        assert len(place.calls) == 5
        place.check()

    on_model(monkeypatch, use)


def test_calls_beside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager ones between the captured ones, and two captures at once."""

    def use(place: Place) -> None:
        s, t, u = (place.gpu.stream() for _ in range(3))
        place.call(stream=s)
        place.gpu.begin_capture(t)
        place.gpu.begin_capture(u)
        for stream in (t, s, u, t, s, u):
            place.call(out=place.array("cupy", (M, N)), stream=stream)
        graphs = [place.gpu.end_capture(stream) for stream in (t, u)]
        for graph in graphs:
            place.gpu.replay(graph, place.gpu.stream())
        place.call(stream=u)
        assert len(place.calls) == 3 + 2 * 2 + 1
        place.check()

    on_model(monkeypatch, use)


def test_in_a_capture_cupy_needs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        stream = place.gpu.stream()
        a, b = place.array("torch"), place.array("torch", (K, N))
        place.call(a, b)
        place.call()
        place.use("torch", stream)
        place.gpu.begin_capture(stream)
        with pytest.raises(ArgumentError, match=r"out = None.*captured.*pass out="):
            place.call(stream=stream)
        c = place.call(a, b)
        assert (type(c), c.made_on) == (Tensor, stream), "from the graph's pool"
        fork = place.gpu.stream()
        place.gpu.order(stream, fork)
        place.call(a, b, stream=fork)
        place.gpu.order(fork, stream)
        graph = place.gpu.end_capture(stream)
        assert a.recorded == [], "who keeps the graph keeps its operands"
        place.gpu.replay(graph, stream)
        place.check()

    on_model(monkeypatch, use)


def test_operands_from_outside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other library is not captured: nothing of it gets into the graph; the other way round, the call is refused."""

    def use(place: Place) -> None:
        stream = place.gpu.stream()
        a, b, out = place.array("torch"), place.array("cupy", (K, N)), place.array("torch", (M, N))
        place.call(a, b, out=out)
        place.use("torch", stream)
        place.use("cupy", place.gpu.stream())
        place.work(place.cupy.now.stream)
        place.gpu.begin_capture(stream)
        place.call(a, b, out=out)
        before = place.world.call_number
        with pytest.raises(ArgumentError, match="being captured"):
            place.call(b, a.t(), out=place.array("cupy", (M, N)), stream=place.gpu.stream())
        assert place.world.call_number == before
        graph = place.gpu.end_capture(stream)
        place.gpu.replay(graph, stream)
        place.call(a, b)
        place.check()

    on_model(monkeypatch, use)


def test_synchronize_waits_for_this_world_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a capture, too: by an event, and by no call that waits for the whole GPU."""

    def use(place: Place) -> None:
        place.call()
        graph = captured(place, place.gpu.stream(), 2)
        place.gpu.replay(graph, place.gpu.stream())
        queue = place.world.backend.queue
        place.gpu.pending.add(queue._tail)
        seen: list[bool] = []

        def happens() -> None:
            seen.append(queue._idle())
            place.gpu.pending.clear()

        thread = threading.Timer(0.01, happens)
        thread.start()
        place.world.synchronize()
        thread.join()
        assert seen == [False]
        assert "cuCtxSynchronize" not in place.gpu.calls

    on_model(monkeypatch, use)


def test_a_full_queue_waits_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C there is no failure of the world: nothing was launched."""

    def use(place: Place) -> None:
        a, b, c = place.arrays()
        place.call(a, b, out=c)
        place.gpu.slow()

        def interrupt(seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(events.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(1000):
                place.call(a, b, out=c)
        launched = place.world.call_number
        assert launched == len(place.calls) <= streams._MARK_EVERY * (streams._MARKS + 1)
        place.gpu.pending.clear()
        place.call(a, b, out=c)
        assert place.world.call_number == launched + 1

    on_model(monkeypatch, use)


def test_everything_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> Any:
        for _ in range(40):
            place.call(stream=place.gpu.stream())
        place.world.synchronize()
        queue = place.world.backend.queue
        for event in queue.close():
            place.gpu.cuEventDestroy(event)
        assert set(place.gpu.events) == set()
        queue._anything = False  # so that the world closes without them

    on_model(monkeypatch, use)


# ---- cached calls


def test_a_workspace_that_grows_leaves_cached_calls_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves, so that captured graphs stay valid, too."""

    def use(place: Place) -> None:
        a, b, c = place.arrays()
        world, offsets = place.world, list[int]()
        launch = world.launch
        monkeypatch.setattr(world, "launch", lambda e, p, *rest: (offsets.append(p.gather_offset), launch(e, p, *rest)))
        place.call(a, b, out=c)
        wall = world.empty(1000, "uint8")
        large = FakePlan(digest=2, workspace_bytes=100_000)
        assert world.executable(large, lambda: large).scratch_offset == 0
        place.call(a, b, out=c)
        assert offsets == [0, 0]
        assert wall.size == 1000

    on_model(monkeypatch, use)


def test_remembered_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        kept = [place.array("cupy") for _ in range(600)]
        b, c = place.array("cupy", (K, N)), place.array("cupy", (M, N))
        for a in kept:
            place.call(a, b, out=c)
            assert len(place.world.bound_calls) <= 512
        assert place.world.call_number == 600

    on_model(monkeypatch, use)


@pytest.mark.parametrize(("sms", "is_ordered"), [(66, False), (67, True)])
def test_worlds_are_ordered_where_they_do_not_fit_beside_each_other(monkeypatch: pytest.MonkeyPatch, sms: int, is_ordered: bool) -> None:
    def use(place: Place) -> None:
        for world in place.worlds:
            place.call(world=world, stream=place.gpu.stream())
        (first, _), (second, _) = place.calls
        assert place.gpu.ordered(first, second) == is_ordered

    on_model(monkeypatch, use, worlds=2, sms=sms)


def test_a_world_that_comes_after_a_graph_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def use(place: Place) -> None:
        backend = place.world.backend
        assert isinstance(backend, ModelBackend)
        place.call(stream=(stream := place.gpu.stream()))
        place.gpu.begin_capture(stream)
        place.call(*place.arrays()[:2], out=place.arrays()[2], stream=stream)
        place.gpu.end_capture(stream)
        backend.join(backend.ROOM)
        assert caplog.text == ""
        other = LaunchQueue(CONTEXT)
        other.join(1, backend.ROOM)
        assert "graphs captured before this world was opened" in caplog.text
        other.close()

    on_model(monkeypatch, use)
