"""The world over a device without kernels: memory, plans, launches, failures. Ranks are threads; both kinds of launch (see fake.py)."""

from __future__ import annotations

import dataclasses
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel import abi, env, errors
from mkernel.errors import AbortedError, ArgumentError, CompileError, Error, MismatchError, TransportError
from mkernel.plan.topology import Topology
from mkernel.runtime import current
from mkernel.runtime.assemble import HEAP_BYTES, _choose_transport, join
from mkernel.runtime.launch import launch, run
from mkernel.runtime.placement import Card
from mkernel.runtime.world import Options, World
from tests.runtime.fake import FakeDevice, FakePlan, Parameters

TARGETS = ["cpu", "cuda"]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No thread, descriptor or mapping of ours survives a test, however it ended."""
    gc.collect()
    threads, descriptors = set(threading.enumerate()), open_memory()
    yield
    gc.collect()
    deadline = time.monotonic() + 5.0
    while (left := [t for t in threading.enumerate() if t not in threads]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, left
    assert open_memory() == descriptors


def open_memory() -> tuple[int, int]:
    maps = Path("/proc/self/maps").read_text().count("memfd:mkernel")
    links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return maps, sum("memfd:mkernel" in link for link in links)


def ranks(fn: Callable[..., Any], count: int = 3, target: str = "cuda", args: tuple[Any, ...] = (), **options: Any) -> list[Any]:
    defaults = {"timeout": 600.0, "entry_timeout": 600.0, "heap_bytes": 1 << 20}  # longer than a test may take
    return run(fn, count, Options(target=target, **{**defaults, **options}), args, make_device=FakeDevice)


def call(world: World, plan: FakePlan | None = None, stream: Any = None, **parameters: int) -> None:
    plan = plan or FakePlan()
    world.launch(world.executable(plan, lambda: plan, stream), Parameters(**parameters), stream)


# ---- shape


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


def test_the_default_is_the_oldest_healthy_world(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (join(None, Options(target="cuda", heap_bytes=1 << 16), FakeDevice) for _ in range(2))
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


# ---- memory


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
        segment = w._heap.segment
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

    assert ranks(use, 3, target) == [[2048, 0]] * 3


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


# ---- plans and launches


def test_parameters_carry_the_world(target: str) -> None:
    plan = FakePlan(digest=0x123456789ABCDEF, workspace_bytes=5000, flag_words=3)

    def use(w: World) -> None:
        held = w.zeros(100, "uint8")
        call(w, plan)
        w.synchronize()
        given = w.backend.launches[-1][3].world
        assert (given.rank, given.size, given.node, given.num_nodes) == (w.rank, 4, w.rank // 2, 2)
        assert (given.local_rank, given.ranks_per_node, given.digest) == (w.rank % 2, 2, 0xABCDEF)
        assert given.heap_base + given.local_rank * given.heap_stride == w.heap_address
        assert given.signal_base + given.local_rank * given.signal_stride == w.signal_address
        assert given.ring != 0
        assert given.trace_capacity == 0
        assert (given.timeout_ns, given.entry_timeout_ns) == (5 * 10**9, 20 * 10**9)
        executable = w.executable(plan, lambda: pytest.fail("built twice"))
        assert executable.scratch_offset >= held.nbytes
        assert executable.flag_offset == abi.SIGNAL_FLAGS
        assert bytes(executable.world_header()) == bytes(given)

    ranks(use, 4, target, ranks_per_node=2, timeout=5.0, entry_timeout=20.0)


def test_one_node_has_no_ring() -> None:
    def use(w: World) -> int:
        call(w)
        w.synchronize()
        return int(w.backend.launches[-1][3].world.ring)

    assert ranks(use, 2) == [0, 0]


def test_calls_are_counted_and_repeat(target: str) -> None:
    def use(w: World) -> tuple[int, int]:
        for i in range(30):
            call(w, FakePlan(digest=i % 3), delay_ns=(w.rank == i % 3) * 200_000)
        w.barrier()
        return w.call_number, abi.ControlBlock.from_address(w._template.control).epoch

    assert ranks(use, 3, target) == [(30, 30)] * 3


def test_workspace_grows_and_old_plans_follow(target: str) -> None:
    def use(w: World) -> tuple[int, ...]:
        small, large = FakePlan(digest=1, workspace_bytes=1000), FakePlan(digest=2, workspace_bytes=100_000)
        first = w.executable(small, lambda: small)
        before = first.scratch_offset
        wall = w.empty(1000, "uint8")  # so that the workspace cannot grow in place
        second = w.executable(large, lambda: large)
        assert first.scratch_offset == second.scratch_offset
        at = w.heap_offset(wall.ctypes.data, 1)
        assert at is not None
        assert not second.scratch_offset <= at < second.scratch_offset + 100_000
        with pytest.raises(ArgumentError, match="too small"):
            w.executable("huge", lambda: FakePlan(digest=3, workspace_bytes=1 << 30))
        call(w, small)
        return before, first.scratch_offset

    results = ranks(use, 3, target)
    assert len(set(results)) == 1
    assert results[0][0] != results[0][1]


def test_too_many_flags() -> None:
    def use(w: World) -> None:
        fits = (abi.FLAG_BYTES - abi.SIGNAL_FLAGS) // 8
        w.executable(1, lambda: FakePlan(digest=1, flag_words=fits))
        with pytest.raises(ArgumentError) as caught:
            w.executable(2, lambda: FakePlan(digest=2, flag_words=fits + 1))
        assert caught.value.argument == "flag_words"
        call(w)

    ranks(use, 2)


def test_no_room_for_packets_where_flags_lie_in_host_memory() -> None:
    def use(w: World) -> None:
        w.executable(1, lambda: FakePlan(digest=1))
        with pytest.raises(ArgumentError, match="packet_bytes = 16: the signal segment has room for 0"):
            w.executable(2, lambda: FakePlan(digest=2, packet_bytes=16))

    with env.override(MKERNEL_EMULATED_HOST_SIGNALS=1):
        ranks(use, 2, ranks_per_node=1)


def test_more_ctas_than_fit() -> None:
    def use(w: World) -> None:
        with pytest.raises(ArgumentError, match="only 4 CTAs"):
            w.executable(1, lambda: FakePlan(grid=5))
        call(w)

    ranks(use, 2)


def test_a_compile_error_is_everybodys(target: str) -> None:
    def use(w: World) -> str:
        with pytest.raises(CompileError) as caught:
            w.executable("broken", lambda: FakePlan(name="broken_on_1"))
        call(w)  # the world stays usable
        return str(caught.value)

    messages = ranks(use, 3, target)
    assert "line 1: no" in messages[1]
    assert "on rank 1" in messages[0] == messages[2]


def test_an_error_while_planning_is_the_callers(target: str) -> None:
    def build() -> FakePlan:
        raise ArgumentError("k", 7, "must be even")

    def use(w: World) -> None:
        with pytest.raises(ArgumentError):
            w.executable("bad", build)
        call(w)

    ranks(use, 2, target)


def test_different_plans() -> None:
    with pytest.raises(MismatchError) as caught:
        ranks(lambda w: call(w, FakePlan(op="gemm", digest=5) if w.rank == 2 else FakePlan(op="sum", digest=6)))
    assert "gemm(digest 0x5)" in str(caught.value)
    assert "sum(digest 0x6)" in str(caught.value)
    assert "second line" not in str(caught.value)


@pytest.mark.parametrize("ahead", [1, 3, 40])
def test_a_rank_that_is_ahead_names_the_call_that_others_wait_for(ahead: int) -> None:
    """Rank 1 wants a barrier after one call; rank 0 has gone on. What it launched in the barrier's place is named, not what it did last."""

    def use(w: World) -> None:
        plans = [FakePlan(digest=number + 1) for number in range(ahead + 2)]
        executables = [w.executable(plan, lambda plan=plan: plan) for plan in plans]
        w.launch(executables[0], Parameters())
        if w.rank == 1:
            w.barrier()
        for executable in executables[1:]:
            w.launch(executable, Parameters())
        w.barrier()

    with pytest.raises(MismatchError) as caught:
        ranks(use, 2, timeout=10.0, entry_timeout=30.0)
    assert "a barrier" in str(caught.value)
    assert "rank 0 has launched null(digest 0x2) next" in str(caught.value)


def test_every_launch_is_ordered_on_its_stream() -> None:
    """How is the device's part: tests/runtime/test_streams.py."""

    def use(w: World) -> list[Any]:
        for stream in (None, 5, 5, 6, None):
            call(w, stream=stream)
        w.barrier()
        assert [launch[1] for launch in w.backend.launches] == w.backend.orders
        return list(w.backend.orders)

    assert ranks(use, 2) == [[0, 5, 5, 6, 0]] * 2


def test_a_stream_that_cannot_be_ordered_does_not_count() -> None:
    """Whatever went wrong: nothing was launched, and the world goes on."""

    def use(w: World) -> int:
        call(w)
        if w.rank == 1:
            with pytest.raises(RuntimeError, match="the stream is gone"):
                call(w, stream="gone")
        assert w.call_number == 1
        call(w)
        w.barrier()
        return w.call_number

    assert ranks(use, 2) == [2, 2]


def test_a_plan_is_made_before_a_capture() -> None:
    def use(w: World) -> None:
        call(w, stream=5)
        w.backend.capturing_streams.add(6)
        with pytest.raises(ArgumentError, match=r"mk\.plan"):
            call(w, FakePlan(digest=9), stream=6)
        call(w, stream=6)

    ranks(use, 2)


def test_a_bad_stream_is_the_callers_mistake(target: str) -> None:
    """Found before anything is launched, so the world goes on, and no call was counted."""

    def use(w: World) -> int:
        call(w)
        with pytest.raises(ArgumentError):
            call(w, stream="bad")
        call(w)
        w.barrier()
        return w.call_number

    assert ranks(use, 2, target) == [2, 2]


def test_a_refused_launch_ends_the_world(target: str) -> None:
    def use(w: World) -> None:
        call(w, FakePlan(name="refused") if w.rank == 1 else FakePlan())
        w.synchronize()

    with pytest.raises(RuntimeError, match="was refused") as caught:
        ranks(use, 3, target)
    assert any("rank 0: AbortedError: rank 1 failed in null: RuntimeError" in note for note in caught.value.__notes__)


def test_tracing(target: str) -> None:
    def use(w: World) -> None:
        executable = w.executable(FakePlan(), FakePlan)
        for capacity in (16, 32, 16):
            w.trace_begin(capacity)
            with pytest.raises(ArgumentError):
                w.trace_begin(8)
            w.launch(executable, Parameters())
            w.synchronize()
            given = w.backend.launches[-1][3].world
            assert given.trace_capacity == capacity
            record = abi.TraceRecord.from_address(given.trace + 24 * (capacity * (abi.TRACE_LANES * 1 + 2)))
            assert record.begin == 0, "cleared of the trace before"
            record.begin = 1
            records = w.trace_end()
            assert records.shape == (4, abi.TRACE_LANES, capacity)
            assert records[1, 2, 0]["begin"] == 1
            w.launch(executable, Parameters())
            w.synchronize()
            assert w.backend.launches[-1][3].world.trace_capacity == 0
        with pytest.raises(ArgumentError):
            w.trace_end()

    ranks(use, 2, target)


# ---- failing


def surfaced(action: Callable[[], Any]) -> Error:
    with pytest.raises(Error) as caught:
        action()
    return caught.value


def until_failed(world: World) -> None:
    """Make public calls until the failure surfaces."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        world.check()
        time.sleep(0.005)
    raise AssertionError("no failure surfaced")


def test_a_rank_that_stays_away(target: str, caplog: pytest.LogCaptureFixture) -> None:
    caught: dict[int, errors.Error] = {}

    def use(w: World) -> None:
        call(w)
        w.barrier()
        if w.rank != 1:
            caught[w.rank] = surfaced(lambda: (call(w), w.barrier()))
            assert surfaced(w.check).args == caught[w.rank].args, "it stays"
            assert surfaced(lambda: w.empty(1, "int8")).args == caught[w.rank].args
            w.close()  # surfaced already: closes in silence
            assert "closed" in str(surfaced(w.check))
        else:
            caught[w.rank] = surfaced(lambda: until_failed(w))

    with caplog.at_level(logging.ERROR, "mkernel"):
        ranks(use, 3, target, entry_timeout=0.5)
    for error in caught.values():
        assert isinstance(error, errors.TimeoutError)
        assert error.record is not None
        assert (error.record.peer, error.record.epoch, error.record.role, error.record.cta) == (1, 2, "compute", 3)
        assert str(error).endswith("CTA 3 waited 0.5 s for rank 1, which never entered call 2")
    logged = [record for record in caplog.records if record.name == "mkernel"]
    assert 1 <= len(logged) <= 2, "by the ranks it happened on, once each"


def test_another_plan_in_the_same_call(target: str) -> None:
    """Both plans are known everywhere: only the entry flags can tell."""
    a, b = FakePlan(op="sum", digest=1), FakePlan(op="gemm", digest=2)
    caught = {}

    def use(w: World) -> None:
        call(w, a)
        call(w, b)
        w.barrier()
        caught[w.rank] = surfaced(lambda: (call(w, b if w.rank == 1 else a), w.barrier()))

    ranks(use, 3, target)
    for error in caught.values():
        assert isinstance(error, MismatchError)
        assert "call 3" in str(error)
        assert "gemm(digest 0x2)" in str(error)
        assert "sum(digest 0x1)" in str(error)


def test_a_new_plan_against_a_cached_one() -> None:
    caught = {}

    def use(w: World) -> None:
        call(w)
        w.barrier()
        plan = FakePlan(op="new", digest=99) if w.rank == 1 else FakePlan()
        caught[w.rank] = surfaced(lambda: (call(w, plan), w.barrier()))

    ranks(use, 3, "cuda")
    for error in caught.values():
        assert isinstance(error, MismatchError)
        assert "rank 1 asked for new(digest 0x63) after 1 calls" in str(error)
        assert "has launched null(digest 0x1234)" in str(error)


def test_late_agreement_is_no_mismatch() -> None:
    """Waiting in an agreement while others still make the calls before it is fine."""

    def use(w: World) -> None:
        call(w)
        w.barrier()
        for turn in range(20):
            call(w, delay_ns=(w.rank == turn % 3) * 2_000_000)
            call(w, FakePlan(digest=turn + 100))

    ranks(use, 3, "cuda")


def test_abort_reaches_everyone(target: str) -> None:
    caught = {}

    def use(w: World) -> None:
        w.barrier()
        if w.rank == 2:
            w.abort("the input is bad")
        caught[w.rank] = surfaced(w.barrier)
        assert w._block.abort == 1, "kernels are asked to leave"
        w.close()

    ranks(use, 3, target)
    assert {type(e) for e in caught.values()} == {AbortedError}
    assert {str(e) for e in caught.values()} == {"rank 2 aborted: the input is bad"}


def test_close_reports_what_nobody_saw(target: str) -> None:
    def use(w: World) -> None:
        w.abort("unseen") if w.rank == 0 else surfaced(lambda: until_failed(w))
        if w.rank == 0:
            assert "unseen" in str(surfaced(w.close))
        w.close()
        assert w.backend.closed

    ranks(use, 2, target)


def test_leaving_with_an_exception_aborts(target: str) -> None:
    def use(w: World) -> None:
        if w.rank == 1:
            raise KeyError("mine")
        w.barrier()

    with pytest.raises(KeyError, match="mine") as caught:
        ranks(use, 3, target)
    assert caught.value.__notes__[0] == "raised on rank 1 of mk.launch"
    assert sum("AbortedError: rank 1 aborted: KeyError: 'mine'" in note for note in caught.value.__notes__) == 2


def test_the_root_cause_is_raised_though_it_comes_last() -> None:
    def use(w: World) -> None:
        if w.rank == 1:
            try:
                raise ZeroDivisionError("root")
            finally:
                w.abort("echo first")
                time.sleep(0.3)
        w.barrier()

    with pytest.raises(ZeroDivisionError, match="root"):
        ranks(use, 3)


def test_the_engine_fails(target: str) -> None:
    """A transport error on one rank is everybody's, and names the peer."""
    caught = {}

    def use(w: World) -> None:
        w.barrier()
        if w.rank == 0:
            slot = abi.Ring.from_address(w._ring_memory.host_address).slots[0]
            slot.dst_rank, slot.bytes = 3, 1 << 40
            slot.ticket = 1
        if target == "cpu" and w.rank == 0:
            time.sleep(0.2)
        caught[w.rank] = surfaced(lambda: until_failed(w))

    ranks(use, 4, target, ranks_per_node=2)
    assert {type(e) for e in caught.values()} == {TransportError}
    assert {e.peer for e in caught.values()} == {3}  # type: ignore[attr-defined]


@pytest.mark.parametrize("host", [False, True])
def test_puts_travel_between_emulated_nodes(target: str, host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_EMULATED_HOST_SIGNALS", str(int(host)))

    def use(w: World) -> float:
        assert w._signals.mappable == (host or target == "cpu")
        source, destination = w.zeros(1000, "float32"), w.zeros(1000, "float32")
        source[:] = w.rank + 1
        w.barrier()
        peer = (w.rank + 2) % 4
        slot = abi.Ring.from_address(w._ring_memory.host_address).slots[0]
        slot.channel, slot.dst_rank, slot.bytes = 0, peer, source.nbytes
        slot.src_offset, slot.dst_offset = w.heap_offset(source.ctypes.data, 1), w.heap_offset(destination.ctypes.data, 1)
        slot.signal_offset, slot.signal_value = abi.SIGNAL_FLAGS, 77
        slot.ticket = 1
        flag = w.backend.wrap(w.signal_address + abi.SIGNAL_FLAGS, (1,), "uint64", None)
        deadline = time.monotonic() + 5.0
        while flag[0] != 77 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert flag[0] == 77
        total = float(destination.sum())
        while abi.Ring.from_address(w._ring_memory.host_address).completed != 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert abi.Ring.from_address(w._ring_memory.host_address).completed == 1
        if target == "cuda":  # GPU memory is the copier's to write, host memory the engine's
            assert sum(copier.signals for copier in w.backend.copiers) == (0 if host else 1)
        w.barrier()
        return total

    assert ranks(use, 4, target, ranks_per_node=2) == [3000.0, 4000.0, 1000.0, 2000.0]


def test_init_fails_on_all_ranks_alike() -> None:
    class Broken(FakeDevice):
        def segment(self, *args: Any, **options: Any) -> Any:
            if self.rank == 1:
                raise OSError("no memory")
            return super().segment(*args, **options)

    with pytest.raises(OSError, match="no memory") as caught:
        run(lambda w: None, 3, Options(target="cuda", heap_bytes=1 << 16), make_device=Broken)
    assert sum("rank 1 could not open its device and memory: OSError: no memory" in note for note in caught.value.__notes__) == 2


@pytest.mark.parametrize(
    ("name", "per_node", "hosts", "expected"),
    [
        ("auto", 4, "aaaa", ""),
        ("emulated", 4, "aaaa", ""),
        ("auto", 2, "aaaa", "emulated"),
        ("null", 2, "aabb", "null"),
        ("auto", 2, "aabb", "rc"),
        ("auto", 2, "ccss", "srd"),
        ("auto", 2, "aass", None),
        ("auto", 2, "eeff", None),
        ("emulated", 2, "aabb", None),
        ("rc", 4, "eeee", ""),
        ("rc", 2, "aaaa", "rc"),
        ("rc", 2, "aass", None),
        ("srd", 2, "ccss", "srd"),
        ("pigeon", 4, "aaaa", None),
    ],
)
def test_choice_of_transport(name: str, per_node: int, hosts: str, expected: str | None) -> None:
    networks = {"a": "rc", "b": "rc srd", "c": "srd", "s": "srd"}  # what hosts have; e and f have none
    cards = [
        Card(host, {}, networks={kind: "" if kind in networks.get(host, "").split() else "no device" for kind in ("rc", "srd")})
        for host in hosts
    ]
    if expected is None:
        with pytest.raises(ArgumentError, match="transport"):
            _choose_transport(name, Topology(4, per_node), cards)
    else:
        assert _choose_transport(name, Topology(4, per_node), cards) == expected


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"timeout": 0}, "timeout"),
        ({"entry_timeout": -1.0}, "entry_timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"heap_bytes": 0}, "heap_bytes"),
        ({"ranks_per_node": 2.0}, "ranks_per_node"),
        ({"ranks_per_node": 2}, "ranks_per_node"),
        ({"transport": "carrier pigeon"}, "transport"),
        ({"transport": "rc", "ranks_per_node": 1}, "transport"),
        ({"target": "tpu"}, "target"),
        ({"colour": "red"}, "init_options"),
    ],
)
def test_bad_options(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        launch(lambda w: None, ranks=3, **{"target": "cpu", **options})
    assert caught.value.argument == argument


@pytest.mark.parametrize("count", [0, -1, True, 2.0])
def test_bad_rank_counts(count: Any) -> None:
    with pytest.raises(ArgumentError):
        launch(lambda w: None, ranks=count, target="cpu")


def test_the_environment_completes_options() -> None:
    with env.override(MKERNEL_TIMEOUT="3", MKERNEL_HEAP_BYTES="1M", MKERNEL_RANKS_PER_NODE="2"):
        assert Options.resolve() == Options(timeout=3.0, heap_bytes=1 << 20, ranks_per_node=2)
        assert Options.resolve(timeout=4.0, heap_bytes=5).timeout == 4.0, "arguments go first"
    assert Options.resolve() == Options()


def test_default_heap() -> None:
    assert ranks(lambda w: w.heap_bytes, 1, "cpu", heap_bytes=None) == [HEAP_BYTES["cpu"]]


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
