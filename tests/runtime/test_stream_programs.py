"""Random programs of calls, captures and replays over a model of a GPU (gpu_model.py): everything that must be ordered is."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mkernel.runtime.arrays.libraries import Crossing
from mkernel.runtime.cuda import libraries as gpu_arrays
from mkernel.runtime.cuda.streams import LaunchQueue
from mkernel.runtime.world import World
from tests.runtime.gpu_model import Gpu
from tests.runtime.model_device import ModelBackend
from tests.runtime.place import Place, on_model


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
        self.graphs: list[tuple[Any, list[tuple[list[Thing], Thing, Thing | None]], list[World]]] = []
        for world in place.worlds:
            self.call(world)  # the plan is made before a capture

    def current(self, library: str) -> int:
        return self.place.now[library].stream

    def any(self, library: str | None = None) -> Thing:
        return self.random.choice(self.squares[library or self.random.choice(self.LIBRARIES)])

    def steps(self, count: int) -> None:
        kinds = [self.work, self.work, self.move, self.call, self.call, self.call, self.named, self.capture, self.replay, self.replay]
        kinds.append(lambda: self.place.nothing(self.random.choice(self.streams)))
        if len(self.place.worlds) > 1:
            kinds.append(self.close)
        for _ in range(count):
            self.random.choice(kinds)()
            self.place.check()

    def close(self) -> None:
        """Now and then a world is closed, and its graphs are replayed no more."""
        if len(self.place.worlds) > 1 and self.random.random() < 0.1:
            gone = self.random.choice(self.place.worlds)
            self.place.close(gone)
            self.graphs = [(graph, calls, worlds) for graph, calls, worlds in self.graphs if gone not in worlds]

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

    def made(self, inputs: list[Thing], out: Thing, kept: Thing | None, nodes: tuple[int, int | None]) -> None:
        node, copy = nodes
        for thing in inputs:
            self.touched(thing, node, writes=False)
        self.touched(out, node, writes=True)
        assert (kept is None) == (copy is None)
        if kept is not None and copy is not None:
            self.touched(inputs[0], copy, writes=False)
            self.touched(kept, copy, writes=True)

    def keeps(self, others: list[Thing], libraries: Sequence[str] = LIBRARIES) -> Thing | None:
        """An array for the rows that are gathered, now and then: none of the others."""
        free = [t for library in libraries for t in self.squares[library] if all(t is not other for other in others)]
        return self.random.choice(free) if free and self.random.random() < 0.3 else None

    def launch(self, inputs: list[Thing], out: Thing, kept: Thing | None, world: World | None = None, **options: Any) -> None:
        gathered, world = None if kept is None else kept.array, world or self.random.choice(self.place.worlds)
        self.place.call(inputs[0].array, inputs[1].array, world, out=out.array, gathered=gathered, **options)

    def call(self, world: World | None = None) -> None:
        (inputs, out), kept, world = self.operands(), None, world or self.random.choice(self.place.worlds)
        if self.random.random() < 0.3:  # a new result, that the library of the first operand goes on with
            out = Thing(inputs[0].library, self.place.call(inputs[0].array, inputs[1].array, world))
            self.squares[out.library][self.random.randrange(4)] = out
        else:
            kept = self.keeps([*inputs, out])
            self.launch(inputs, out, kept, world)
        self.made(inputs, out, kept, self.place.calls[-1])

    def named(self) -> None:
        inputs, out = self.operands()
        stream, kept = self.random.choice(self.streams), self.keeps([*inputs, out])
        self.launch(inputs, out, kept, stream=stream)
        self.made(inputs, out, kept, self.place.calls[-1])
        waits = {thing.library for thing in inputs}  # what is written of another library is not the program's part
        waits |= {out.library, *([kept.library] if kept else [])} & {inputs[0].library}
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
        calls: list[tuple[list[Thing], Thing, Thing | None]] = []
        worlds: list[World] = []
        for _ in range(self.random.randint(1, 4)):
            a, b, out = (self.random.choice(self.squares[library]) for _ in range(3))
            if out is a or out is b:
                continue
            where = fork if fork is not None and self.random.random() < 0.5 else None
            if where is not None:
                self.place.use(library, where)
            if self.random.random() < 0.2:
                self.place.nothing(where or stream)
            kept = self.keeps([a, b, out], [library])
            worlds.append(self.random.choice(self.place.worlds))
            self.launch([a, b], out, kept, worlds[-1])
            if self.random.random() < 0.2:
                self.place.nothing(where or stream)
            self.place.use(library, stream)
            calls.append(([a, b], out, kept))
            if self.random.random() < 0.3:
                self.gpu.work(stream, ("work",))
            if self.random.random() < 0.3:
                other = next(one for one in self.LIBRARIES if one != library)
                c, d, e = (self.random.choice(self.squares[other]) for _ in range(3))
                if e is not c and e is not d:
                    self.launch([c, d], e, None)
                    self.made([c, d], e, None, self.place.calls[-1])
        if fork is not None:
            self.gpu.order(fork, stream)
        self.place.use(library, before)
        self.graphs.append((self.gpu.end_capture(stream), calls, worlds))

    def replay(self) -> None:
        if not self.graphs:
            return
        graph, calls, _ = self.random.choice(self.graphs)
        before = len(self.place.calls)
        library = calls[0][1].library if calls else self.LIBRARIES[0]
        self.gpu.replay(graph, self.current(library))
        for (inputs, out, kept), nodes in zip(calls, self.place.calls[before:], strict=True):
            self.made(inputs, out, kept, nodes)


@pytest.mark.parametrize("worlds", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_any_program(seed: int, worlds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_model(monkeypatch, lambda place: Program(place, seed).steps(150), worlds)


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8, 108))
def test_many_programs(seed: int, worlds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_model(monkeypatch, lambda place: Program(place, seed).steps(300), worlds)


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

    def launched(self: LaunchQueue, capture: Any, stream: int) -> None:
        real(self, capture, stream)
        self._replayable = False

    patch.setattr(LaunchQueue, "_launched_in_capture", launched)


def _nothing_is_taken_for_a_launch(patch: pytest.MonkeyPatch) -> None:
    real = LaunchQueue._launched_in_capture

    def launched(self: LaunchQueue, capture: Any, stream: int) -> None:
        capture.before = None
        real(self, capture, stream)

    patch.setattr(LaunchQueue, "_launched_in_capture", launched)


def _record_stays_at_the_first_call(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gpu, "_cuGraphAddDependencies", lambda self, *arguments: 0)
    patch.setattr(Gpu, "_cuGraphRemoveDependencies", lambda self, *arguments: 0)


def _mates_in_eager_calls_only(patch: pytest.MonkeyPatch) -> None:
    real = LaunchQueue._order_in_capture

    def order(self: LaunchQueue, stream: int, number: int) -> Any:
        line, self._line = self._line, (self,)
        try:
            return real(self, stream, number)
        finally:
            self._line = line

    patch.setattr(LaunchQueue, "_order_in_capture", order)


def _mates_by_their_last_stream_only(patch: pytest.MonkeyPatch) -> None:
    """Replays of a mate are forgotten."""
    _never_replayable(patch)
    real = LaunchQueue._order

    def order(self: LaunchQueue, stream: int, own: bool) -> Any:
        self._replayable = True  # as far as the own ones go
        return real(self, stream, own)

    patch.setattr(LaunchQueue, "_order", order)


def _tails_are_destroyed(patch: pytest.MonkeyPatch) -> None:
    real = LaunchQueue.close

    def close(self: LaunchQueue) -> list[Any]:
        self._is_awaited = False
        return real(self)

    patch.setattr(LaunchQueue, "close", close)


REVERSALS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "operands are not waited for": _without(LaunchQueue, "follow"),
    "libraries do not wait for calls": _without(LaunchQueue, "lead"),
    "eager calls do not wait": _eager_wait_left_out,
    "graphs do not wait": _graph_wait_left_out,
    "graphs do not record": lambda patch: patch.setattr(Gpu, "_cuGraphAddEventRecordNode", lambda self, *arguments: 0),
    "what launches nothing is taken for a launch": _nothing_is_taken_for_a_launch,
    "graphs record too early": _record_stays_at_the_first_call,
    "streams of a capture are not ordered": lambda patch: patch.setattr(
        Gpu, "_cuStreamUpdateCaptureDependencies", lambda self, *arguments: 0
    ),
    "eager calls on the last stream do not wait for replays": _never_replayable,
    "the call runs on CuPy's stream": lambda patch: patch.setattr(
        gpu_arrays.GpuTorchLibrary, "stream", lambda self: self.device.cupy_library.stream()
    ),
    "what is kept is copied beside later calls": lambda patch: patch.setattr(
        ModelBackend, "proceed", lambda self, turn, action: action(turn[0])
    ),
    "crossings are taken for plain calls": _without(Crossing, "enter"),
    "crossings end without a word": _without(Crossing, "leave"),
}


OF_WORLDS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "worlds do not join": _without(ModelBackend, "join"),
    "graphs know nothing of other worlds": _mates_in_eager_calls_only,
    "replays of other worlds are forgotten": _mates_by_their_last_stream_only,
    "what graphs of other worlds wait for is destroyed": _tails_are_destroyed,
    "a world that is closed is still waited for": _without(LaunchQueue, "_leave"),
}


@pytest.mark.parametrize("reversal", [*REVERSALS, *OF_WORLDS])
def test_programs_find_planted_reversals(reversal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(place: Place, seed: int) -> bool:
        try:
            Program(place, seed).steps(150)
        except (AssertionError, KeyError):
            return True
        return False

    with monkeypatch.context() as patch:
        (REVERSALS | OF_WORLDS)[reversal](patch)
        worlds = 1 if reversal in REVERSALS else 3
        assert any(on_model(patch, functools.partial(found, seed=seed), worlds) for seed in range(20))
