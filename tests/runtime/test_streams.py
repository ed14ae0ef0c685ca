"""Streams, graphs and libraries of arrays over a model that knows what happens before what (gpu_model.py). No GPU, no luck."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError
from mkernel.memory.driver import DriverError
from mkernel.runtime import gpu_arrays, streams
from mkernel.runtime.arrays import Crossing, Library
from mkernel.runtime.launch import run
from mkernel.runtime.streams import LaunchQueue
from mkernel.runtime.world import Options, World
from tests.runtime.fake import FakePlan
from tests.runtime.gpu_model import DTYPES, IMPLICIT, LEGACY, PER_THREAD, CupyArray, Gpu, Tensor, model

M, N, K = 16, 16, 16


class Place:
    """A world of one rank on the model, and what a program does there."""

    def __init__(self, world: World, gpu: Gpu, cupy: Any, torch: Any) -> None:
        self.world, self.gpu, self.cupy, self.torch = world, gpu, cupy, torch
        self.now = {"cupy": cupy.now, "torch": torch.now}

    def array(self, library: str, shape: tuple[int, int] = (M, K)) -> Any:
        if library == "cupy":
            return self.cupy.empty(shape, DTYPES["float16"])
        return self.torch.empty(shape, "float16", "cuda:0")

    def use(self, library: str, stream: int) -> None:
        self.now[library].stream = stream

    def call(self, a: Any = None, b: Any = None, **options: Any) -> Any:
        a = self.array("cupy") if a is None else a
        return mk.allgather_gemm(a, self.array("cupy", (K, N)) if b is None else b, world=self.world, **options)

    def work(self, stream: int, label: str = "work") -> int:
        return self.gpu.work(stream, label)

    @property
    def last(self) -> int:
        """The node of the call that has run last."""
        return next(node for label, node in reversed(self.gpu.ran) if label[0] == "call")

    @property
    def calls(self) -> list[int]:
        """The nodes of all calls that have run, replays included, in the order in which the host has launched them."""
        return [node for label, node in self.gpu.ran if label[0] == "call"]

    def check(self) -> None:
        """Every call of the world is ordered after the one before."""
        calls = self.calls
        for before, after in itertools.pairwise(calls):
            assert self.gpu.ordered(before, after), "two calls of the world are not ordered"


def on_model(monkeypatch: pytest.MonkeyPatch, fn: Callable[[Place], Any]) -> Any:
    gpu, cupy, torch, device = model(monkeypatch)
    options = Options(target="cuda", timeout=5.0, entry_timeout=20.0, heap_bytes=1 << 20)
    return run(lambda world: fn(Place(world, gpu, cupy, torch)), 1, options, make_device=device)[0]


# ---- whose stream, whose memory


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_the_first_operand_decides(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands that are still being made on a stream of torch, say: the call runs there, and so does its result's memory."""

    def use(place: Place) -> None:
        for _ in range(20):
            stream = place.gpu.stream()
            place.use(library, stream)
            a, w = place.array(library), place.array(library, (N, K))
            made = place.work(stream)
            c = place.call(a, w.t() if library == "torch" else w.T)
            assert type(c) is (Tensor if library == "torch" else CupyArray)
            assert c.made_on == stream
            assert place.gpu.ordered(made, place.last)
            assert place.gpu.find(stream).last == {place.last}
            place.use(library, 0)

    on_model(monkeypatch, use)


def test_torch_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        monkeypatch.delitem(sys.modules, "torch")
        assert type(place.call()) is CupyArray
        assert "torch" not in sys.modules

    on_model(monkeypatch, use)


def test_subclasses_belong_to_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parameter(Tensor):
        pass

    def use(place: Place) -> None:
        b = Parameter(place.torch, place.array("torch", (K, N)).host)
        assert type(place.call(place.array("torch"), b)) is Tensor

    on_model(monkeypatch, use)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_named_stream_owns_the_result(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the operands live until the call has ended, also if nobody else holds them."""

    def use(place: Place) -> None:
        mine, theirs = place.gpu.stream(), place.gpu.stream()
        place.use(library, mine)
        a, b = place.array(library), place.array(library, (K, N))
        made = place.work(mine)
        place.gpu.slow()
        c = place.call(a, b, stream=theirs)
        assert c.made_on == theirs
        assert place.gpu.find(theirs).last == {place.last}
        assert place.gpu.ordered(made, place.last)
        held = [thing for _, thing in place.world.backend.queue._held]
        if library == "torch":
            assert (a.recorded, b.recorded, c.recorded) == ([theirs], [theirs], [])
        else:
            assert held[0] is a
            assert held[1] is b
            assert len(held) == 2
        place.gpu.pending.clear()

    on_model(monkeypatch, use)


def test_what_is_held_is_let_go_when_its_call_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        queue, gpu = place.world.backend.queue, place.gpu
        place.world._stop_watchdog.set()  # which lets go, too
        place.world._watchdog.join()
        before = set(gpu.events)
        gpu.slow()
        place.call(stream=gpu.stream())
        assert len(queue._held) == 2
        queue.release()
        assert len(queue._held) == 2
        gpu.pending.clear()
        queue.release()
        assert not queue._held
        assert set(gpu.events) == before

    on_model(monkeypatch, use)


def test_a_program_that_makes_no_more_calls_gets_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        place.gpu.slow()
        a = place.array("cupy")
        dropped = weakref.ref(a)
        place.call(a, stream=place.gpu.stream())
        del a
        place.world.bound_calls.clear()
        gc.collect()
        assert dropped() is not None
        place.gpu.pending.clear()
        deadline = time.monotonic() + 60.0
        while dropped() is not None:
            assert time.monotonic() < deadline, "the watchdog did not let go"
            time.sleep(0.005)

    on_model(monkeypatch, use)


def test_the_current_stream_needs_no_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        stream = place.gpu.stream()
        place.use("cupy", stream)
        place.gpu.slow()
        place.call(stream=stream)
        place.call(stream=place.cupy.cuda.Stream(stream))
        assert not place.world.backend.queue._held

    on_model(monkeypatch, use)


def test_out_of_another_library_makes_it_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: what the library was doing with ``out`` comes before the call, what it does next after it."""

    def use(place: Place) -> None:
        for named in (False, True):
            mine, theirs, third = (place.gpu.stream() for _ in range(3))
            place.use("cupy", mine)
            place.use("torch", theirs)
            out = place.array("torch", (M, N))
            reads = place.work(theirs)
            c = place.call(out=out, **({"stream": third} if named else {}))
            assert c is out
            assert place.gpu.ordered(reads, place.last)
            assert place.gpu.ordered(place.last, place.work(theirs))
            assert place.gpu.ordered(place.last, place.work(mine)) != named, "a named stream holds up nobody else"

    on_model(monkeypatch, use)


def test_operands_of_two_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        mine, theirs = place.gpu.stream(), place.gpu.stream()
        place.use("torch", mine)
        place.use("cupy", theirs)
        b = place.array("cupy", (K, N))
        made = place.work(theirs)
        assert type(place.call(place.array("torch"), b)) is Tensor
        assert place.gpu.ordered(made, place.last)
        assert place.gpu.ordered(place.last, place.work(theirs)), "which may overwrite b"

    on_model(monkeypatch, use)


class Interface:
    """An array by ``__cuda_array_interface__`` alone."""

    def __init__(self, array: Any, stream: int | None, read_only: bool = False) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": "<f2",
            "data": (array.ctypes.data, read_only),
            "strides": array.strides,
            "version": 3,
            "stream": stream,
        }


class Packed:
    """An array by DLPack alone, that makes the stream it is given wait, as the protocol asks."""

    def __init__(self, place: Place, array: Any, stream: int) -> None:
        self.place, self.array, self.stream, self.asked = place, array, stream, list[int]()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int, max_version: Any = None) -> object:
        self.asked.append(stream)
        if stream != -1:
            self.place.gpu.order(self.stream, stream)
        return self.array.__dlpack__()


def test_streams_of_other_producers(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        for turn in range(3):  # the second and third call are cached
            producer = place.gpu.stream()
            a, b = np.zeros((M, K), np.float16), np.zeros((K, N), np.float16)
            made = place.work(producer)
            packed = Packed(place, b, producer)
            c = place.call(Interface(a, producer), packed)
            assert type(c) is CupyArray
            assert place.gpu.ordered(made, place.last), turn
            assert packed.asked[-1] == LEGACY
            assert place.gpu.ordered(place.last, place.work(producer))
            alone = place.gpu.stream()
            made = place.work(alone)
            place.call(place.array("cupy"), Packed(place, b, alone))
            assert place.gpu.ordered(made, place.last), turn
            place.call(Interface(a, None))

    on_model(monkeypatch, use)


def test_read_only_arrays_are_no_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        out = np.zeros((M, N), np.float16)
        with pytest.raises(ArgumentError, match="read-only"):
            place.call(out=Interface(out, None, read_only=True))
        place.call(out=Interface(out, None))

    on_model(monkeypatch, use)


def test_out_must_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        memory = place.cupy.empty((2 * M, K), DTYPES["float16"]).host
        a, over = CupyArray(memory[:M]), CupyArray(memory[M - 1 : 2 * M - 1])
        for operands in ({"a": a}, {"b": a}):
            with pytest.raises(ArgumentError, match=f"out = .*overlaps {next(iter(operands))}"):
                place.call(**operands, out=over)
        place.call(a, out=CupyArray(memory[M:]))
        wide = place.cupy.empty((M, 2 * K), DTYPES["float16"]).host  # rows of both take turns in memory, and share no byte
        assert mk.gemm_allreduce(CupyArray(wide[:, :K]), place.array("cupy", (K, N)), out=CupyArray(wide[:, K:]), world=place.world)

    on_model(monkeypatch, use)


# ---- the order of calls


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
        a, b, c = place.array("cupy"), place.array("cupy", (K, N)), place.array("cupy", (M, N))
        place.call(a, b, out=c)
        place.gpu.calls.clear()
        place.call(a, b, out=c)
        asked = ["cuCtxGetCurrent", "cuStreamGetCaptureInfo_v2", "cuStreamGetId", "cuEventRecord"]
        assert place.gpu.calls == asked

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
        a, b, c = place.array("cupy"), place.array("cupy", (K, N)), place.array("cupy", (M, N))
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
        assert IMPLICIT == streams._CAPTURE_IMPLICIT

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
        a, b, c = place.array("cupy"), place.array("cupy", (K, N)), place.array("cupy", (M, N))
        place.call(a, b, out=c)
        place.gpu.slow()

        def interrupt(seconds: float) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(streams.time, "sleep", interrupt)
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


def test_a_cached_call_follows_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters that were prepared for a workspace which has moved since are prepared again."""

    def use(place: Place) -> None:
        a, b, c = place.array("cupy"), place.array("cupy", (K, N)), place.array("cupy", (M, N))
        world, offsets = place.world, list[int]()
        launch = world.launch
        monkeypatch.setattr(world, "launch", lambda e, p, s: (offsets.append(p.gather_offset), launch(e, p, s)))
        place.call(a, b, out=c)
        wall = world.empty(1000, "uint8")  # so that the workspace cannot stay where it is
        large = FakePlan(digest=2, workspace_bytes=100_000)
        moved = world.executable(large, lambda: large).scratch_offset
        place.call(a, b, out=c)
        assert offsets == [0, moved]
        assert moved != 0
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


# ---- any program


@dataclasses.dataclass
class Thing:
    """An array of a program, with the work that was done to it."""

    library: str
    array: Any
    writer: int | None = None
    readers: list[int] = dataclasses.field(default_factory=list)


class Program:
    """Random calls, captures and replays on random streams, between random work of two libraries.

    The program keeps the rules of docs/streams.md: a library's own work is in order, what follows a call on a named stream is ordered
    by whoever has named it, and so is what a graph does to arrays of a library which was not captured.
    """

    LIBRARIES = ("cupy", "torch")

    def __init__(self, place: Place, seed: int) -> None:
        self.place, self.gpu, self.random = place, place.gpu, random.Random(seed)
        self.streams = [place.gpu.stream() for _ in range(5)]
        for library in self.LIBRARIES:
            place.use(library, self.random.choice(self.streams))
        self.squares = {library: [Thing(library, place.array(library)) for _ in range(4)] for library in self.LIBRARIES}
        self.graphs: list[tuple[Any, list[tuple[list[Thing], Thing]]]] = []
        self.call()  # the plan is made before a capture

    def current(self, library: str) -> int:
        return self.place.now[library].stream

    def any(self, library: str | None = None) -> Thing:
        return self.random.choice(self.squares[library or self.random.choice(self.LIBRARIES)])

    def steps(self, count: int) -> None:
        kinds = [self.work, self.work, self.move, self.call, self.call, self.call, self.named, self.capture, self.replay, self.replay]
        for _ in range(count):
            self.random.choice(kinds)()
            self.place.check()

    def touched(self, thing: Thing, node: int, *, writes: bool) -> None:
        """Work on an array comes after whatever wrote it, and a write after all that reads it."""
        for before in [thing.writer, *(thing.readers if writes else [])]:
            assert before is None or before == node or self.gpu.ordered(before, node), "work on an array is not ordered"
        if writes:
            thing.writer, thing.readers = node, []
        else:
            thing.readers.append(node)

    def work(self) -> None:
        """A kernel of the array's library."""
        thing = self.any()
        self.touched(thing, self.gpu.work(self.current(thing.library), ("work",)), writes=self.random.random() < 0.5)

    def move(self) -> None:
        """A library goes on on another stream, in its own order."""
        library, stream = self.random.choice(self.LIBRARIES), self.random.choice(self.streams)
        self.gpu.order(self.current(library), stream)
        self.place.use(library, stream)

    def operands(self) -> tuple[list[Thing], Thing]:
        a, b = self.any(), self.any()
        out = self.random.choice([t for library in self.LIBRARIES for t in self.squares[library] if t is not a and t is not b])
        return [a, b], out

    def made(self, inputs: list[Thing], out: Thing, node: int) -> None:
        for thing in inputs:
            self.touched(thing, node, writes=False)
        self.touched(out, node, writes=True)

    def launch(self, inputs: list[Thing], out: Thing, **options: Any) -> None:
        self.place.call(inputs[0].array, inputs[1].array, out=out.array, **options)

    def call(self) -> None:
        inputs, out = self.operands()
        if self.random.random() < 0.3:  # a new result, that the library of the first operand goes on with
            out = Thing(inputs[0].library, self.place.call(inputs[0].array, inputs[1].array))
            self.squares[out.library][self.random.randrange(4)] = out
        else:
            self.launch(inputs, out)
        self.made(inputs, out, self.place.last)

    def named(self) -> None:
        inputs, out = self.operands()
        stream = self.random.choice(self.streams)
        self.launch(inputs, out, stream=stream)
        self.made(inputs, out, self.place.last)
        waits = {thing.library for thing in inputs}  # out of another library is not the program's part
        waits |= {out.library} if out.library == inputs[0].library else set()
        for library in sorted(waits):
            self.gpu.order(stream, self.current(library))

    def capture(self) -> None:
        """On the current stream of a library, and, forked from it, a second one; between the captured calls, eager ones."""
        library = self.random.choice(self.LIBRARIES)
        stream, before = self.gpu.stream(), self.current(library)
        fork = self.gpu.stream() if self.random.random() < 0.5 else None
        self.gpu.begin_capture(stream)
        if fork is not None:
            self.gpu.order(stream, fork)
        self.place.use(library, stream)
        calls: list[tuple[list[Thing], Thing]] = []
        for _ in range(self.random.randint(1, 4)):
            a, b, out = (self.random.choice(self.squares[library]) for _ in range(3))
            if out is a or out is b:
                continue
            where = fork if fork is not None and self.random.random() < 0.5 else None
            if where is not None:
                self.place.use(library, where)
            self.launch([a, b], out)
            self.place.use(library, stream)
            calls.append(([a, b], out))
            if self.random.random() < 0.3:
                self.gpu.work(stream, ("work",))
            if self.random.random() < 0.3:
                other = next(one for one in self.LIBRARIES if one != library)
                c, d, e = (self.random.choice(self.squares[other]) for _ in range(3))
                if e is not c and e is not d:
                    self.launch([c, d], e)
                    self.made([c, d], e, self.place.last)
        if fork is not None:
            self.gpu.order(fork, stream)
        self.place.use(library, before)
        self.graphs.append((self.gpu.end_capture(stream), calls))

    def replay(self) -> None:
        if not self.graphs:
            return
        graph, calls = self.random.choice(self.graphs)
        before = len(self.place.calls)
        library = calls[0][1].library if calls else self.LIBRARIES[0]
        self.gpu.replay(graph, self.current(library))
        for (inputs, out), node in zip(calls, self.place.calls[before:], strict=True):
            self.made(inputs, out, node)


@pytest.mark.parametrize("seed", range(8))
def test_any_program(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_model(monkeypatch, lambda place: Program(place, seed).steps(150))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 108))
def test_many_programs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_model(monkeypatch, lambda place: Program(place, seed).steps(300))


def _without(owner: type, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, lambda self, *arguments: None)


def _eager_wait_left_out(patch: pytest.MonkeyPatch) -> None:
    real = LaunchQueue.launched

    def launched(self: LaunchQueue, turn: Any) -> None:
        real(self, turn)
        self._anything = False

    patch.setattr(LaunchQueue, "launched", launched)


def _graph_wait_left_out(patch: pytest.MonkeyPatch) -> None:
    real = Gpu._cuStreamWaitEvent

    def wait(self: Gpu, stream: int, event: int, flags: int) -> int:
        return real(self, stream, self.event() if flags == 1 else event, flags)

    patch.setattr(Gpu, "_cuStreamWaitEvent", wait)


def _never_replayable(patch: pytest.MonkeyPatch) -> None:
    real = LaunchQueue._launched_in_capture

    def launched(self: LaunchQueue, capture: Any, stream: int, stream_id: int) -> None:
        real(self, capture, stream, stream_id)
        self._replayable = False

    patch.setattr(LaunchQueue, "_launched_in_capture", launched)


def _record_stays_at_the_first_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gpu, "_cuGraphAddDependencies", lambda self, *arguments: 0)
    patch.setattr(Gpu, "_cuGraphRemoveDependencies", lambda self, *arguments: 0)


REVERSALS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "operands are not waited for": _without(LaunchQueue, "follow"),
    "libraries do not wait for calls": _without(LaunchQueue, "lead"),
    "eager calls do not wait": _eager_wait_left_out,
    "graphs do not wait": _graph_wait_left_out,
    "graphs do not record": lambda patch: patch.setattr(Gpu, "_cuGraphAddEventRecordNode", lambda self, *arguments: 0),
    "graphs record too early": _record_stays_at_the_first_call,
    "streams of a capture are not ordered": lambda patch: patch.setattr(
        Gpu, "_cuStreamUpdateCaptureDependencies", lambda self, *arguments: 0
    ),
    "eager calls on the last stream do not wait for replays": _never_replayable,
    "the call runs on CuPy's stream": lambda patch: patch.setattr(
        gpu_arrays.GpuTorchLibrary, "stream", lambda self: self.device.cupy_library.stream()
    ),
    "crossings are taken for plain calls": _without(Crossing, "enter"),
    "crossings end without a word": _without(Crossing, "leave"),
}


@pytest.mark.parametrize("reversal", REVERSALS)
def test_programs_find_planted_reversals(reversal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(place: Place) -> bool:
        for seed in range(20):
            try:
                Program(place, seed).steps(150)
            except (AssertionError, KeyError):
                return True
        return False

    with monkeypatch.context() as patch:
        REVERSALS[reversal](patch)
        assert on_model(patch, found)


def test_libraries_say_what_they_do() -> None:
    assert Library.one_stream
    assert not gpu_arrays.ForeignLibrary.one_stream
