"""Recoverable errors of calls, over a device whose kernels are Python (fake.py): raised on every rank, once, and the world goes on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mkernel import abi
from mkernel.errors import AbortedError, CallError, Error
from mkernel.errors import TimeoutError as WaitTimeoutError
from mkernel.runtime import call_errors
from mkernel.runtime.launch import run
from mkernel.runtime.options import Options
from mkernel.runtime.world import World
from tests.runtime import fake
from tests.runtime.fake import FakeBackend, FakePlan, Parameters, RefusedError, RefusingPlan, run_kernel

REFUSING, OTHER = RefusingPlan("refusing", 0x77), FakePlan("other", 0x99)


def ranks(use: Callable[..., Any], count: int = 3, target: str = "cuda", **options: Any) -> list[Any]:
    defaults = {"timeout": 20.0, "entry_timeout": 20.0, "heap_bytes": 1 << 20}
    return run(use, count, Options(target=target, **{**defaults, **options}), make_backend=FakeBackend)


def call(world: World, code: int = 0, plan: FakePlan = REFUSING, **parameters: int) -> None:
    world.launch(world.executable(plan, lambda: plan), Parameters(code=code, **parameters))


def epoch(world: World) -> int:
    """Number of finished calls."""
    world.wait_for_kernels()
    return abi.ControlBlock.from_address(world.header.control).epoch


# What a program may do next. Each notices what has been reported; the launches at moments that differ by rank.
TOUCHES: dict[str, Callable[[World], None]] = {
    "a call": lambda w: (w.wait_for_kernels(), call(w))[1],
    "check": lambda w: (w.wait_for_kernels(), w.check())[1],
    "synchronize": World.synchronize,
    "barrier": World.barrier,
    "an array": lambda w: w.empty(16, "uint8") and None,
    "an exchange": lambda w: (w.size == 1 and w.wait_for_kernels(), w.exchange("news", 1))[0] and None,  # one rank asks nobody
    "a first call": lambda w: call(w, plan=FakePlan("new", 0x55)),
}


@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("count", [1, 3])
def test_raised_on_every_rank_once_then_calls_run(touch: str, count: int) -> None:
    def use(w: World) -> tuple[Any, ...]:
        call(w)
        call(w, code=6)
        with pytest.raises(RefusedError, match="call 2 of refusing: code 6") as caught:
            TOUCHES[touch](w)
        w.check()
        w.barrier()
        call(w, plan=OTHER)
        call(w)
        w.barrier()
        error = caught.value
        return error.op, error.call, error.rank, error.code, error.details, error.report.title.split("(")[0], epoch(w)

    assert ranks(use, count) == [("refusing", 2, rank, 6, (6, 8, 9), "refusing", 4) for rank in range(count)]


@pytest.mark.parametrize("count", [1, 3])
def test_where_launches_are_synchronous_the_call_raises(count: int) -> None:
    def use(w: World) -> int:
        with pytest.raises(RefusedError) as caught:
            call(w, code=4)
        call(w)
        w.barrier()
        assert (caught.value.call, caught.value.skipped) == (1, 0)
        return epoch(w)

    assert ranks(use, count, "cpu") == [2] * count


def test_a_plan_without_an_error_of_its_own() -> None:
    def use(w: World) -> str:
        call(w, code=3, plan=OTHER)
        with pytest.raises(CallError) as caught:
            w.synchronize()
        assert type(caught.value) is CallError
        return str(caught.value)

    for rank, text in enumerate(ranks(use, 2)):
        assert text == f"rank {rank}: call 1 (other(digest 0x99)) was refused: code 3, (3, 8, 9)"


def ahead(w: World, seed: int, refused: int = 0) -> tuple[int, int]:
    """Three rounds of six launches at this rank's own pace; the third is refused. Returns the last refused, and the calls run."""
    pace, told = random.Random(f"{seed} {w.rank}"), 0
    w.barrier()
    for _ in range(3):
        try:
            for step in range(6):
                call(w, code=5 if step == 2 else 0, delay_ns=pace.choice([0, 0, 3_000_000]))
                if pace.random() < 0.4:
                    time.sleep(0.004)  # the host comes late, and finds the report before it has launched much more
                if pace.random() < 0.3:
                    w.check()
            w.synchronize()
        except RefusedError as error:
            told, refused = told + 1, error.call
    call(w)
    w.barrier()
    assert told == 3
    return refused, epoch(w)


def test_ranks_that_are_ahead_by_different_numbers_of_calls_stay_together(rng: np.random.Generator) -> None:
    seed = int(rng.integers(10**6))
    for each in range(seed, seed + 4):
        assert ranks(lambda w, each=each: ahead(w, each), 3) == [(9, 10)] * 3, f"seed {each}: three times three calls"


def test_calls_that_were_launched_later_are_counted() -> None:
    def use(w: World) -> int:
        call(w, code=5, delay_ns=50_000_000)
        for _ in range(w.rank + 1):  # nothing has been reported yet
            call(w, code=7)
        with pytest.raises(RefusedError, match="code 5") as caught:
            w.synchronize()
        assert f"({w.rank + 1} later calls of this rank were skipped)" in str(caught.value)
        w.barrier()
        return caught.value.skipped

    assert ranks(use, 3) == [1, 2, 3]


def test_replays_report_as_well() -> None:
    """What a graph launches is not counted by the host; its kernel says which call it was."""

    def use(w: World) -> list[int]:
        call(w)
        w.barrier()
        captured = Parameters.from_buffer_copy(w.backend.launches[-1][3])
        captured.code, calls = 2, list[int]()
        for _ in range(3):
            w.backend.work.put(lambda: run_kernel(captured))
            w.backend.work.put(lambda: run_kernel(captured))
            with pytest.raises(RefusedError, match="of refusing") as caught:
                w.synchronize()
            calls.append(caught.value.call)
            assert caught.value.skipped == 1
        call(w)
        w.barrier()
        return [*calls, epoch(w)]

    assert ranks(use, 2) == [[2, 3, 4, 5]] * 2


def test_a_failure_of_the_world_is_what_is_raised() -> None:
    """A rank fails before the report is taken; on the others it is told by the control channel, or by their own kernels."""

    def use(w: World) -> str:
        call(w, code=5)
        w.wait_for_kernels()
        if w.rank == 1:
            w.abort("enough")
        while w.failure is None:
            time.sleep(0.001)
        with pytest.raises(AbortedError, match="enough"):
            w.check()
        with pytest.raises(AbortedError, match="enough"):
            call(w)
        return "failed"

    with pytest.raises(AbortedError, match="enough"):
        ranks(lambda w: (use(w), w.check()), 3)


def test_a_failure_after_the_error_is_raised_too() -> None:
    def use(w: World) -> None:
        call(w, code=5)
        with pytest.raises(RefusedError):
            w.synchronize()
        call(w, silent_rank=2)  # rank 1 does not enter
        with pytest.raises(WaitTimeoutError, match="never entered call 2"):
            w.barrier()
        raise RuntimeError("seen")

    with pytest.raises(RuntimeError, match="seen"):
        ranks(use, 2, entry_timeout=0.3)


def test_a_failed_wait_beside_the_report_wins() -> None:
    def use(w: World) -> None:
        call(w, code=5)
        w.wait_for_kernels()
        block = abi.HostBlock.from_address(w.header.host)
        block.peer, block.epoch = 1 - w.rank, 1
        block.state = abi.State.timed_out
        with pytest.raises(WaitTimeoutError):
            w.synchronize()
        raise RuntimeError("seen")

    with pytest.raises(RuntimeError, match="seen"):
        ranks(use, 2)


def test_closing_raises_what_nobody_has_seen_after_closing(caplog: pytest.LogCaptureFixture) -> None:
    def use(w: World) -> bool:
        call(w, code=5)
        with pytest.raises(RefusedError, match="code 5"):
            w.close()
        w.close()
        assert "code 5" in caplog.text, "at the end of a process nobody catches it"
        return w.closed and w.backend.closed

    assert ranks(use, 2) == [True, True]


def test_the_watchdog_does_not_end_the_world() -> None:
    def use(w: World) -> None:
        call(w, code=5)
        w.wait_for_kernels()
        time.sleep(0.1)  # several looks
        assert w.failure is None
        with pytest.raises(RefusedError):
            w.check()
        w.barrier()

    ranks(use, 2)


def test_one_error_is_enough_for_one_launch() -> None:
    """The path of a launch looks at one word for both kinds of news."""
    assert (abi.HostBlock.state.offset, abi.HostBlock.reported.offset) == (0, 4)


# ---- planted bugs: each of the checks above can fail


def _planted(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    taken = call_errors.CallErrors.take
    if bug == "the report is not cleared":

        def stays(self: Any) -> CallError | None:
            code = self._block.reported
            error = taken(self)
            self._block.reported = code
            return error

        monkeypatch.setattr(call_errors.CallErrors, "take", stays)
    elif bug == "one rank says nothing":
        monkeypatch.setattr(call_errors.CallErrors, "take", lambda self: None if self._world.rank == 1 else taken(self))
    elif bug == "calls stay skipped":
        monkeypatch.setattr(FakeBackend, "write", lambda self, address, data: None)
    elif bug == "positions are not compared anew":
        monkeypatch.setattr(call_errors.CallErrors, "position", lambda self, calls: calls)
    else:
        assert bug == "later calls are not skipped"
        monkeypatch.setattr(fake.abi, "HALTED", 0)


BUGS = {
    "the report is not cleared": lambda: test_raised_on_every_rank_once_then_calls_run("synchronize", 3),
    "one rank says nothing": lambda: test_raised_on_every_rank_once_then_calls_run("synchronize", 3),
    "calls stay skipped": lambda: test_raised_on_every_rank_once_then_calls_run("synchronize", 1),
    "positions are not compared anew": lambda: test_positions(),
    "later calls are not skipped": lambda: test_calls_that_were_launched_later_are_counted(),
}


def test_positions() -> None:
    """A rank that has launched more calls, which were skipped, is not said to have passed an agreement that others ask for afterwards."""

    def use(w: World) -> None:
        call(w, code=5, delay_ns=50_000_000)
        for _ in range(3 * w.rank):
            call(w)
        with pytest.raises(RefusedError):
            w.synchronize()
        time.sleep(0.05 * w.rank)  # rank 0 asks first
        w.check()
        call(w)
        call(w, plan=FakePlan("agreed on late", 0x31))
        w.barrier()

    ranks(use, 2)


@pytest.mark.parametrize("bug", BUGS)
def test_planted(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    _planted(monkeypatch, bug)
    with pytest.raises((AssertionError, Error, pytest.fail.Exception)):
        BUGS[bug]()
