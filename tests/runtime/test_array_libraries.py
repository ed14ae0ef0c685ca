"""Whose stream a call runs on, whose memory its result is, and what it waits for, over a model of a GPU (gpu_model.py)."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError
from mkernel.ops import call
from mkernel.runtime.arrays.libraries import Crossing
from tests.runtime.gpu_libraries import DTYPES, CupyArray, Tensor
from tests.runtime.gpu_model import LEGACY
from tests.runtime.place import K, M, N, Place, on_model


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
        place.world.failures.stop()  # its watchdog lets go, too
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


def test_libraries_on_one_stream_need_no_ordering(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(place: Place) -> None:
        crossings = list[object]()
        monkeypatch.setattr(call, "Crossing", lambda *arguments: crossings.append(arguments) or Crossing(*arguments))
        stream = place.gpu.stream()
        for library in ("torch", "cupy"):
            place.use(library, stream)
        b = place.array("cupy", (K, N))
        made = place.work(stream)
        assert type(place.call(place.array("torch"), b)) is Tensor
        assert crossings == []
        assert place.gpu.ordered(made, place.last)
        assert place.gpu.ordered(place.last, place.work(stream))
        place.use("cupy", place.gpu.stream())
        place.call(place.array("torch"), b)
        assert len(crossings) == 1

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
