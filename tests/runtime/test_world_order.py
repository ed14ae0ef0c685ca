"""What a world does before something else: let kernels end before it loads or reads, clear before it hands out, report once."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from typing import Any

import pytest

from mkernel import abi
from mkernel.errors import AbortedError, CompileError
from mkernel.errors import TimeoutError as WaitTimeoutError
from mkernel.runtime.launch import run
from mkernel.runtime.options import Options
from mkernel.runtime.world import World
from tests.runtime.fake import FakeBackend, FakePlan, Parameters


class Slow(FakeBackend):
    """Launches run late. What touches memory does not wait for them by itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.may_run = threading.Event()
        self.synchronized = True
        self.beside: list[str] = []  # what was done while a kernel ran

    def launch(self, kernel: Any, stream: Any, grid: int, parameters: Any) -> None:
        given = Parameters.from_buffer_copy(parameters)
        self.synchronized = False

        def traced() -> None:
            self.may_run.wait(20.0)
            if given.world.trace:
                abi.TraceRecord.from_address(given.world.trace).begin = 7

        self.work.put(traced)
        super().launch(kernel, stream, grid, parameters)

    def synchronize(self) -> None:
        self.may_run.set()
        super().synchronize()
        self.synchronized = True
        self.may_run.clear()

    def load(self, spec: Any) -> Any:
        if not self.synchronized:
            self.beside.append(spec.name)
        return super().load(spec)

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)


def ranks(use: Any, count: int = 2, device: Any = Slow, **options: Any) -> list[Any]:
    defaults = {"target": "cuda", "timeout": 5.0, "entry_timeout": 20.0, "heap_bytes": 1 << 20}
    return run(use, count, Options(**{**defaults, **options}), make_backend=device)


def call(world: World, plan: FakePlan, **parameters: int) -> None:
    world.launch(world.executable(plan, lambda: plan), Parameters(**parameters))


def test_nothing_is_loaded_beside_a_kernel() -> None:
    def use(w: World) -> list[str]:
        for digest in range(3):
            call(w, FakePlan(digest=digest))
        return list(w.backend.beside)

    assert ranks(use) == [[]] * 2


def test_a_trace_is_read_when_the_kernels_have_ended() -> None:
    def use(w: World) -> int:
        executable = w.executable("null", FakePlan)
        w.recorder.begin(16)
        w.launch(executable, Parameters())
        return int(w.recorder.end()[0, 0, 0]["begin"])

    assert ranks(use) == [7] * 2


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_zeros_are_zero_where_something_else_was(target: str) -> None:
    def use(w: World) -> bool:
        before = w.empty(1000, "uint8")
        before[:] = 0xA5
        at = before.ctypes.data
        del before
        after = w.zeros(1000, "uint8")
        assert after.ctypes.data == at, "the same memory, or the test shows nothing"
        return bool(after.any())

    assert ranks(use, device=FakeBackend, target=target) == [False] * 2


def test_a_failure_is_noticed_without_a_call() -> None:
    """The watchdog: a rank that computes something else for long hears of it, logs it and tells the others."""

    def use(w: World) -> tuple[str, type[BaseException]]:
        executable = w.executable("null", FakePlan)
        w.barrier()
        if w.rank == 0:
            w.launch(executable, Parameters())
        end = time.monotonic() + 60.0
        while w.failure is None and time.monotonic() < end:  # no call of the world
            time.sleep(0.005)
        assert w.failure is not None
        kind = w.failure.kind
        with pytest.raises(WaitTimeoutError, match="never entered call 1") as caught:
            w.check()
        return kind, caught.type

    assert ranks(use, device=FakeBackend, entry_timeout=0.3) == [("timeout", WaitTimeoutError)] * 2


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_failed_launch_is_raised_once(target: str) -> None:
    def use(w: World) -> None:
        executable = w.executable("refused", lambda: FakePlan(name="refused_on_1"))
        if w.rank == 1:
            with pytest.raises(RuntimeError, match="was refused"):
                w.launch(executable, Parameters())
            w.close()  # says nothing: the caller has seen it
        else:
            with pytest.raises(AbortedError, match="rank 1 failed in null: RuntimeError"):
                until_failed(w)

    ranks(use, device=FakeBackend, target=target)


def until_failed(world: World) -> None:
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        world.check()
        time.sleep(0.005)


@pytest.mark.parametrize("error", [RuntimeError("an earlier kernel was broken"), RuntimeError()])
@pytest.mark.parametrize("where", ["synchronize", "load"])
def test_what_fails_before_a_kernel_is_loaded_is_told_to_all(where: str, error: RuntimeError) -> None:
    """Also an error without a text."""

    class Broken(FakeBackend):
        def synchronize(self) -> None:
            if where == "synchronize" and self.rank == 1 and getattr(self, "broken", False):
                raise error
            super().synchronize()

        def load(self, spec: Any) -> Any:
            if where == "load" and self.rank == 1:
                raise error
            return super().load(spec)

    def use(w: World) -> str:
        w.backend.broken = True
        with pytest.raises(RuntimeError if w.rank == 1 else CompileError) as caught:
            w.executable("null", FakePlan)
        w.backend.broken = False
        return str(caught.value)

    messages = ranks(use, 3, Broken, entry_timeout=20.0)
    assert messages[1] == str(error)
    for rank in (0, 2):
        assert messages[rank].startswith("null(digest 0x1234) could not be loaded on rank 1")
        assert f"RuntimeError: {error}" in messages[rank]


class Compiling(FakeBackend):
    """Notes where each kernel is compiled, and how many are at the same time."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cpus: list[set[int]] = []
        self.together = 0
        self.met = threading.Barrier(2)

    def compile(self, spec: Any) -> None:
        self.cpus.append(os.sched_getaffinity(0))
        with contextlib.suppress(threading.BrokenBarrierError):
            self.met.wait(2.0)
            self.together += 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("bound", [1, 2])
def test_kernels_are_compiled_beside_each_other_on_a_rank_that_is_bound(bound: int) -> None:
    """Open MPI binds each of two ranks to one CPU, where eight kernels took 5 s."""
    own = set(sorted(os.sched_getaffinity(0))[:bound])

    def use(w: World) -> Compiling:
        os.sched_setaffinity(0, own)  # of this thread, and of those that it starts
        specs = [FakePlan(digest=digest).spec for digest in range(4)]
        w.problems._load("kernels", specs, dict.fromkeys(specs, 1))
        assert os.sched_getaffinity(0) == own, "the rank's own thread stays where it is"
        assert isinstance(w.backend, Compiling)
        return w.backend

    (backend,) = ranks(use, 1, Compiling)
    assert backend.together == 4
    assert all(cpus == own if bound > 1 else len(cpus) > 1 for cpus in backend.cpus)
