"""Plans and launches of a world over a device without kernels: what is prepared, counted, ordered, refused and traced."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from mkernel import abi, env
from mkernel.errors import ArgumentError, CompileError, MismatchError
from mkernel.runtime.prepared import check_of
from mkernel.runtime.world import World
from tests.runtime.fake import FakeBackend, FakePlan, Parameters
from tests.runtime.worlds import call, ranks

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_parameters_carry_the_world(target: str) -> None:
    plan = FakePlan(digest=0x123456789ABCDEF, workspace_bytes=5000, flag_words=3)

    def use(w: World) -> None:
        call(w, plan)
        w.synchronize()
        given = w.backend.launches[-1][3].world
        assert (given.rank, given.size, given.node, given.num_nodes) == (w.rank, 4, w.rank // 2, 2)
        assert (given.local_rank, given.ranks_per_node) == (w.rank % 2, 2)
        assert (given.problem, given.rows, given.schedule, given.check) == (1, 0, 0, check_of(1, 0, 0))
        assert given.heap_base + given.local_rank * given.heap_stride == w.heap_address
        assert given.signal_base + given.local_rank * given.signal_stride == w.signal_address
        assert given.ring != 0
        assert given.trace_capacity == 0
        assert (given.timeout_ns, given.entry_timeout_ns) == (5 * 10**9, 20 * 10**9)
        executable = w.executable(plan, lambda: pytest.fail("built twice"))
        assert executable.scratch_offset == 0
        assert executable.flag_offset == abi.SIGNAL_FLAGS
        header = executable.world_header()
        assert (header.launch, given.launch) == (0, 1), "each launch has its own number"
        header.launch = given.launch
        assert bytes(header) == bytes(given)

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
        return w.call_number, abi.ControlBlock.from_address(w.header.control).epoch

    assert ranks(use, 3, target) == [(30, 30)] * 3


def test_a_launch_that_is_interrupted_before_it_is_one_is_not_counted() -> None:
    """Something asks for attention once the launch has looked, and Ctrl-C comes while it attends."""

    def use(w: World) -> list[int]:
        call(w)
        order = w.backend.order

        def asks(*args: Any) -> Any:
            w.attention = True
            return order(*args)

        stopped = mock.patch.object(w.failures, "check", side_effect=KeyboardInterrupt)
        with mock.patch.object(w.backend, "order", asks), stopped, pytest.raises(KeyboardInterrupt):
            call(w)
        counts = [w.call_number]
        call(w)
        w.synchronize()
        return [*counts, w.call_number, abi.ControlBlock.from_address(w.header.control).epoch]

    assert ranks(use, 2) == [[1, 2, 2]] * 2


def test_the_workspace_grows_in_place_until_it_meets_the_arrays(target: str) -> None:
    def use(w: World) -> int:
        small, large = FakePlan(digest=1, workspace_bytes=1000), FakePlan(digest=2, workspace_bytes=100_000)
        first = w.executable(small, lambda: small)
        wall = w.empty(1000, "uint8")
        second = w.executable(large, lambda: large)
        assert first.scratch_offset == second.scratch_offset == 0
        at = w.heap_offset(wall.ctypes.data, 1)
        assert at is not None
        assert at >= 100_000
        whole = FakePlan(digest=3, workspace_bytes=at)
        w.executable(whole, lambda: whole)
        for size in (at + 1, 1 << 30):
            with pytest.raises(ArgumentError, match=f"{size} bytes needed") as caught:
                w.executable(size, lambda size=size: FakePlan(digest=4, workspace_bytes=size))  # type: ignore[misc]
            assert caught.value.argument == "heap_bytes"
        with pytest.raises(ArgumentError, match="too small"):
            w.empty(1000, "uint8")
        call(w, small)
        return at

    results = ranks(use, 3, target)
    assert len(set(results)) == 1


def test_a_staging_area_that_grows_leaves_the_old_one(target: str) -> None:
    """Calls under way and captured graphs read the old one; twice as much each time, so that growing step by step wastes little."""

    def use(w: World) -> list[int]:
        offsets, free = [], w.heap_bytes
        for i, size in enumerate((1000, 1001, 1500, 2000, 2001, 500_000, 500_001, 10)):
            plan = FakePlan(digest=i, staging_bytes=size)
            offsets.append(w.executable(plan, lambda plan=plan: plan).staging_offset)  # type: ignore[misc]
            assert offsets[-1] + size <= free or offsets[-1] in offsets[:-1]
            free = min(free, offsets[-1])
        return [offsets.index(offset) for offset in offsets]

    # 1000; 2000 for 1001, 1500 and 2000; 4000 for 2001; 500000; and, where there is no room for twice as much, what is needed.
    assert ranks(use, 2, target) == [[0, 1, 1, 1, 4, 5, 6, 6]] * 2


def test_too_many_flags() -> None:
    def use(w: World) -> None:
        fits = (abi.FLAG_BYTES - abi.SIGNAL_FLAGS) // 8 - abi.COUNTED_WORDS
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
        call(w, FakePlan(name="refused_on_1"))
        w.synchronize()

    with pytest.raises(RuntimeError, match="was refused") as caught:
        ranks(use, 3, target)
    assert any("rank 0: AbortedError: rank 1 failed in null: RuntimeError" in note for note in caught.value.__notes__)


def test_tracing(target: str) -> None:
    def use(w: World) -> None:
        executable = w.executable(FakePlan(), FakePlan)
        for capacity in (16, 32, 16):
            w.recorder.begin(capacity)
            with pytest.raises(ArgumentError):
                w.recorder.begin(8)
            w.launch(executable, Parameters())
            w.synchronize()
            given = w.backend.launches[-1][3].world
            assert given.trace_capacity == capacity
            record = abi.TraceRecord.from_address(given.trace + 24 * (capacity * (abi.TRACE_LANES * 1 + 2)))
            assert record.begin == 0, "cleared of the trace before"
            record.begin = 1
            records = w.recorder.end()
            assert records.shape == (4, abi.TRACE_LANES, capacity)
            assert records[1, 2, 0]["begin"] == 1
            w.launch(executable, Parameters())
            w.synchronize()
            assert w.backend.launches[-1][3].world.trace_capacity == 0
        with pytest.raises(ArgumentError):
            w.recorder.end()

    ranks(use, 2, target)


def test_a_trace_is_read_when_the_calls_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the world: a copy to the host does not wait for kernels on every stream."""
    done: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(FakeBackend, name)

        def method(self: FakeBackend, *args: Any) -> Any:
            done.append(name)
            return real(self, *args)

        return method

    def use(w: World) -> list[str]:
        w.recorder.begin(16)
        call(w)
        w.recorder.end()
        return done[done.index("launch") :][:3]

    for name in ("launch", "synchronize", "read"):
        monkeypatch.setattr(FakeBackend, name, noted(name))
    assert ranks(use, 1, "cuda") == [["launch", "synchronize", "read"]]


@pytest.mark.parametrize("host", [False, True])
def test_puts_travel_between_emulated_nodes(target: str, host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_EMULATED_HOST_SIGNALS", str(int(host)))

    def use(w: World) -> float:
        assert w._signals.mappable == (host or target == "cpu")
        source, destination = w.zeros(1000, "float32"), w.zeros(1000, "float32")
        source[:] = w.rank + 1
        w.barrier()
        peer = (w.rank + 2) % 4
        slot = abi.Ring.from_address(w._ring.host_address).slots[0]
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
        while abi.Ring.from_address(w._ring.host_address).completed != 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert abi.Ring.from_address(w._ring.host_address).completed == 1
        if target == "cuda":  # GPU memory is the copier's to write, host memory the engine's
            assert sum(copier.signals for copier in w.backend.copiers) == (0 if host else 1)
        w.barrier()
        return total

    assert ranks(use, 4, target, ranks_per_node=2) == [3000.0, 4000.0, 1000.0, 2000.0]
