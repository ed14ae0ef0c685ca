"""The world over a device without kernels: its numbers, its memory, and how worlds come and go. Ranks are threads (fake.py)."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from mkernel.errors import AbortedError, ArgumentError, Error, MismatchError
from mkernel.runtime import current
from mkernel.runtime.init import join
from mkernel.runtime.opening.memory import HEAP_BYTES
from mkernel.runtime.options import Options
from mkernel.runtime.world import World
from tests.runtime.fake import FakeBackend, FakePlan
from tests.runtime.worlds import call, open_memory, ranks

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize(("count", "per_node", "nodes"), [(1, None, 1), (4, None, 1), (4, 2, 2), (4, 1, 4)])
def test_numbers(target: str, count: int, per_node: int | None, nodes: int) -> None:
    def look(w: World) -> tuple[Any, ...]:
        return w.rank, w.size, w.node, w.num_nodes, w.local_rank, w.ranks_per_node, w.target, w.device, w.xp

    per = per_node or count
    device = "cpu" if target == "cpu" else 0
    expected = [(r, count, r // per, nodes, r % per, per, target, device, np) for r in range(count)]
    assert ranks(look, count, target, ranks_per_node=per_node) == expected


def test_current_world_is_the_threads_own() -> None:
    assert ranks(lambda w: current.current() is w and current.current(w) is w) == [True] * 3
    with pytest.raises(ArgumentError, match=r"mk\.init\(\)"):
        current.current()


@pytest.mark.parametrize("count", [1, 2])
def test_other_threads_of_a_rank_have_its_world_where_there_is_one(count: int) -> None:
    """Torch recomputes and differentiates on threads of its own."""

    def elsewhere(w: World) -> bool:
        found: list[Any] = []

        def ask() -> None:
            try:
                found.append(current.current())
            except ArgumentError:
                found.append(None)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return found == [w if count == 1 else None]

    assert ranks(elsewhere, count) == [True] * count
    with pytest.raises(ArgumentError):
        current.current()


def test_the_default_is_the_oldest_healthy_world(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (join(None, Options(target="cuda", heap_bytes=1 << 16), FakeBackend) for _ in range(2))
    assert current.current() is first
    assert current.current(second) is second
    first.abort("test")
    assert current.current() is second
    second.close()
    assert current.current() is first, "a failed world is better than none: the call says why it failed"
    with pytest.raises(AbortedError):
        first.close()
    with pytest.raises(ArgumentError):
        current.current()


def test_arrays_lie_at_equal_offsets_and_peers_see_them(target: str) -> None:
    def use(w: World) -> list[float]:
        first, second = w.zeros((3, 5), "float32"), w.empty((), np.int64)
        assert first.shape == (3, 5)
        assert not first.any()
        assert second.shape == ()
        offset = w.heap_offset(first.ctypes.data, first.nbytes)
        assert offset is not None
        assert w.heap_offset(second.ctypes.data, 8) not in (None, offset)
        assert w.heap_offset(np.zeros(1).ctypes.data, 8) is None
        assert w.heap_offset(w.heap_address + w.heap_bytes - 8, 16) is None, "it ends outside"
        first[:] = w.rank + 1
        w.barrier()
        segment = w.heap.segment
        seen = [float(w.backend.wrap(segment.address(p) + offset, (15,), "float32", None).sum()) for p in range(w.ranks_per_node)]
        w.barrier()
        return seen

    assert ranks(use, 4, target, ranks_per_node=2) == [[15.0, 30.0]] * 2 + [[45.0, 60.0]] * 2


def test_dropped_arrays_are_used_again_only_when_all_ranks_dropped_them(target: str) -> None:
    def use(w: World) -> list[int | None]:
        offsets = []
        held = [w.empty(1000, "uint8"), w.empty(1000, "uint8")]
        if w.rank == 0:
            del held[0]  # the others keep theirs
        third = w.empty(1000, "uint8")
        offsets.append(w.heap_offset(third.ctypes.data, 1))
        if w.rank != 0:
            del held[0]
        fourth = w.empty(1000, "uint8")
        offsets.append(w.heap_offset(fourth.ctypes.data, 1))
        return offsets

    end = 1 << 20  # arrays come from the end of the heap
    assert ranks(use, 3, target) == [[end - 3072, end - 1024]] * 3


def test_heap_too_small_says_how_much(target: str) -> None:
    def use(w: World) -> tuple[str, int]:
        small = w.empty(1 << 18, "uint8")
        with pytest.raises(ArgumentError) as caught:
            w.empty((3, 1 << 18), "float32")
        assert w.empty(10, "uint8").size == 10, "the world stays usable"
        del small
        return caught.value.argument, int(caught.value.remedy.split("=")[1].rstrip(")"))

    for argument, needed in ranks(use, 2, target):
        assert argument == "heap_bytes"
        assert (
            ranks(lambda w: (w.empty(1 << 18, "uint8"), w.empty((3, 1 << 18), "float32")) is not None, 2, target, heap_bytes=needed)
            == [True] * 2
        )


def test_arrays_outlive_their_world(target: str) -> None:
    """An array that the program still holds keeps its memory; it is unmapped when it is dropped."""
    results = ranks(lambda w: w.zeros(4, "int32") + 0 if w.rank else w.zeros(4, "int32"), 2, target)
    results[0][:] = 7
    assert results[0].tolist() == [7] * 4
    assert open_memory()[0] > 0
    results.clear()
    gc.collect()
    assert open_memory()[0] == 0


def test_disagreeing_sizes() -> None:
    with pytest.raises(MismatchError, match="an array of 20 bytes") as caught:
        ranks(lambda w: w.empty(5 + (w.rank == 1), "float32"))
    assert "24 bytes" in str(caught.value)


@pytest.mark.parametrize("grow", [lambda w: w.heap.reserve(4096), lambda w: w.heap.allocate(4096)], ids=["workspace", "staging"])
def test_heaps_that_have_come_apart(grow: Any) -> None:
    """Arrays would lie at other offsets: whatever made the ranks differ, nobody is given one."""

    def use(w: World) -> None:
        w.empty(5, "float32")
        if w.rank == 1:
            grow(w)
        w.empty(5, "float32")

    with pytest.raises(MismatchError, match=r"an array of 20 bytes: .*on a heap with .* of workspace"):
        ranks(use)


def test_a_call_between_the_last_word_of_close_and_the_end() -> None:
    """It finds the world closed: what it needs is no longer there."""

    def use(w: World) -> list[str]:
        call(w)
        lock, said, depth = w.lock, list[str](), 0

        def late() -> None:
            with pytest.raises(Error) as caught:
                call(w)
            said.append(str(caught.value))

        class Lock:
            """When ``close`` gives it away, another thread calls at once."""

            def __enter__(self) -> None:
                nonlocal depth
                lock.acquire()
                depth += 1

            def __exit__(self, *exc: object) -> None:
                nonlocal depth
                depth -= 1
                lock.release()
                if depth == 0 and not said:
                    said.append("")
                    thread = threading.Thread(target=late)
                    thread.start()
                    thread.join()

        w.lock = Lock()  # type: ignore[assignment]
        w.close()
        w.lock = lock
        return said

    assert ranks(use, 1) == [["", "the world is closed: mk.init() makes a new one"]]


@pytest.mark.parametrize(("shape", "dtype", "argument"), [((2, -1), "int8", "shape"), (3, "float7", "dtype"), (3, object, "dtype")])
def test_bad_arrays(shape: Any, dtype: Any, argument: str) -> None:
    def use(w: World) -> str:
        with pytest.raises(ArgumentError) as caught:
            w.empty(shape, dtype)
        return caught.value.argument

    assert ranks(use, 2) == [argument] * 2


def test_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def use(w: World) -> tuple[str, ...]:
        return tuple(
            w.zeros((2, 3), dtype).dtype.name for dtype in ("bfloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), np.float16)
        )

    assert ranks(use, 1) == [("bfloat16", "bfloat16", "bfloat16", "float16")]


def test_worlds_do_not_pile_up() -> None:
    kept: list[weakref.ref[World]] = []
    ranks(lambda w: kept.append(weakref.ref(w)))
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_many_worlds_one_after_the_other(target: str) -> None:
    for _ in range(10):
        ranks(call, 3, target)


def test_worlds_side_by_side() -> None:
    def outer(w: World) -> list[int]:
        return ranks(lambda inner: (call(inner), inner.size)[1], 2)

    assert ranks(outer, 3) == [[2, 2]] * 3


def test_plans_need_only_what_the_protocol_says() -> None:
    fields = {field.name for field in dataclasses.fields(FakePlan)}
    assert {"op", "digest", "grid", "workspace_bytes", "flag_words"} <= fields


@pytest.mark.parametrize("something", [4, "world", object()])
def test_something_else_is_no_world(something: object) -> None:
    with pytest.raises(ArgumentError, match="must be a World"):
        current.current(something)  # type: ignore[arg-type]


def test_default_heap() -> None:
    assert ranks(lambda w: w.heap_bytes, 1, "cpu", heap_bytes=None) == [HEAP_BYTES["cpu"]]
