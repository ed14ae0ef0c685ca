"""The ranks of mk.launch on one scheduler: order decided by the seed alone, virtual time, engines, deadlocks, failures."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

from mkernel import env
from mkernel.errors import Error
from mkernel.runtime.cpu.backend import CpuBackend, ThreadRanks
from mkernel.runtime.cpu.rank_states import WAKING_SECONDS
from tests.cpu_target.harness import CTAS, Faults, Passed, Ping, aligned, load, together

SECOND = 10**9


def ping(own: np.ndarray[Any, Any], peer: np.ndarray[Any, Any], result: np.ndarray[Any, Any], **changes: int) -> bytes:
    values = {"first": 1, "rounds": 10, "timeout_ns": SECOND, "abort": 0, "raises": 1} | changes
    return bytes(Ping(own=own.ctypes.data, peer=peer.ctypes.data, result=result.ctypes.data, **values))


class HostBarrier:
    """What the control channel does: a host wait that says when it has ended."""

    def __init__(self, thread_ranks: ThreadRanks, ranks: int) -> None:
        self.thread_ranks, self.ranks = thread_ranks, ranks
        self.condition = threading.Condition()
        self.waiting: list[int] = []
        self.generation = 0

    def wait(self, rank: int) -> None:
        with self.condition:
            generation = self.generation
            self.waiting.append(rank)
            if len(self.waiting) == self.ranks:
                self.generation += 1
                for other in self.waiting:
                    if other != rank:
                        self.thread_ranks.release(other)
                self.waiting.clear()
                self.condition.notify_all()
                return
        over = lambda: self.generation > generation  # noqa: E731
        with self.thread_ranks.blocked(rank, over), self.condition:
            assert self.condition.wait_for(over, 60)


def run_pings(seed: int, *, jitter: int | None = None, ranks: int = 4) -> tuple[int, int]:
    """Pairs of ranks play, with host barriers between the calls; the interleaving's hash and length."""
    sleeps = random.Random(jitter)
    kernel = load("ping", Ping, threads=32)
    flags, results = aligned((ranks, 8), np.uint64), aligned((ranks, 2), np.uint64)
    with ThreadRanks(ranks, seed) as thread_ranks:
        barrier = HostBarrier(thread_ranks, ranks)

        def rank(r: int) -> None:
            device = CpuBackend(r, thread_ranks)
            for call in range(3):
                if jitter is not None:
                    time.sleep(sleeps.random() * 0.01)
                device.launch(kernel, 0, 1, ping(flags[r], flags[r ^ 1], results[r], first=1 + 10 * call))
                assert results[r, 0] == 10
                barrier.wait(r)

        assert together(thread_ranks, ranks, rank) == [None] * ranks
        assert thread_ranks.report == ""
        return thread_ranks.trace, thread_ranks.turns


def test_same_seed_same_run_whatever_the_host_does() -> None:
    first = run_pings(5)
    for jitter in range(4):
        assert run_pings(5, jitter=jitter) == first
    assert len({run_pings(seed) for seed in range(4)}) == 4


def test_a_release_that_ends_no_wait_costs_nothing() -> None:
    """Whoever has news tells everybody; kernels wait for those only who go on because of it, also where the news came before the wait."""
    kernel = load("ping", Ping, threads=32)
    flags, results = aligned((2, 8), np.uint64), aligned((2, 2), np.uint64)
    with ThreadRanks(3, 0) as thread_ranks:
        ended = threading.Event()

        def rank(r: int) -> float:
            begin = time.monotonic()
            if r < 2:
                CpuBackend(r, thread_ranks).launch(kernel, 0, 1, ping(flags[r], flags[1 - r], results[r]))
                took = time.monotonic() - begin
                ended.set()
                thread_ranks.release(2)
                return took
            thread_ranks.release(2)  # it is not even waiting
            with thread_ranks.blocked(2, ended.is_set):
                thread_ranks.release(2)
                assert ended.wait(60)
            return 0.0

        took = [0.0] * 3

        def timed(r: int) -> None:
            took[r] = rank(r)

        assert together(thread_ranks, 3, timed) == [None] * 3
        assert thread_ranks.report == ""
    assert max(took) < WAKING_SECONDS / 2, took


def test_seed_from_the_environment() -> None:
    with env.override(MKERNEL_CPU_SEED=11), ThreadRanks(1) as thread_ranks, ThreadRanks(1, 11) as same, ThreadRanks(1, 12) as other:
        kernel = load("faults", Faults, threads=128, shared=17408, kFault=0)
        memory = aligned(8192, np.uint8)
        for each in (thread_ranks, same, other):
            each_device = CpuBackend(0, each)
            each_device.launch(kernel, 0, 1, bytes(Faults(memory.ctypes.data, memory.ctypes.data + 4096, memory.ctypes.data)))
        assert thread_ranks.trace == same.trace != other.trace


def test_deadlock_is_reported_at_once_and_left_by_timeout() -> None:
    """Nobody raises the second flag: the report says who waits for it, and the kernel leaves as if its 600 s had passed."""
    kernel = load("ping", Ping, threads=32)
    flags, results = aligned((2, 8), np.uint64), aligned((2, 2), np.uint64)
    with ThreadRanks(2, 0) as thread_ranks:
        thread_ranks.name(flags.ctypes.data, flags.nbytes, "test flags")

        def rank(r: int) -> None:
            device = CpuBackend(r, thread_ranks)
            rounds = 3 if r == 0 else 2
            device.launch(kernel, 0, 1, ping(flags[r], flags[1 - r], results[r], rounds=rounds, timeout_ns=600 * SECOND))

        assert together(thread_ranks, 2, rank) == [None, None]
        assert "deadlock" in thread_ranks.report
        assert "rank 0, CTA 0, threads 0: flag test flags +0x0 >= 3 (now 2)" in thread_ranks.report
        assert "rank 1" not in thread_ranks.report
    assert results[0, 0] == 2
    assert results[0, 1] >= 600 * SECOND
    assert results[1, 0] == 2


def test_who_is_passed_over_for_long_is_no_deadlock() -> None:
    """Threads are taken at random: one that works must not be missed because those that only look at a word had all turns meanwhile."""
    kernel, flag = load("passed", Passed, threads=32), aligned(8, np.uint64)
    for seed in range(10):
        flag[0] = 0
        with ThreadRanks(1, seed) as thread_ranks:
            CpuBackend(0, thread_ranks).launch(kernel, 0, CTAS, bytes(Passed(flag.ctypes.data, 400)))
            assert thread_ranks.report == ""
        assert flag[0] == 1


def test_deadlock_without_deadline_fails_the_launch() -> None:
    good, bad = load("faults", Faults, threads=128, shared=17408, kFault=0), load("faults", Faults, threads=128, shared=17408, kFault=4)
    memory = aligned(8192, np.uint8)
    parameters = bytes(Faults(memory.ctypes.data, memory.ctypes.data + 4096, memory.ctypes.data))
    with ThreadRanks(1, 0) as thread_ranks:
        device = CpuBackend(0, thread_ranks)
        for _ in range(2):
            with pytest.raises(Error, match=r"deadlock at \d+ ns(.|\n)*rank 0, CTA 0, threads 0-127: mbarrier at shared"):
                device.launch(bad, 0, 1, parameters)
            device.launch(good, 0, 1, parameters)  # everything is reusable


def test_kernel_fault_fails_one_rank_only() -> None:
    good, bad = load("faults", Faults, threads=128, shared=17408, kFault=0), load("faults", Faults, threads=128, shared=17408, kFault=5)
    memory = [aligned(8192, np.uint8) for _ in range(3)]
    with ThreadRanks(3, 1) as thread_ranks:

        def rank(r: int) -> None:
            parameters = bytes(Faults(memory[r].ctypes.data, memory[r].ctypes.data + 4096, memory[r].ctypes.data))
            device = CpuBackend(r, thread_ranks)
            for _ in range(3):
                device.launch(bad if r == 1 else good, 0, 1, parameters)

        errors = together(thread_ranks, 3, rank)
        assert errors[0] is None
        assert errors[2] is None
        assert isinstance(errors[1], Error)
        assert "rank 1, CTA 0" in str(errors[1])


def test_abort_word_is_seen_after_poke() -> None:
    kernel = load("ping", Ping, threads=32)
    flags, result, abort = aligned((2, 8), np.uint64), aligned(2, np.uint64), aligned(1, np.uint64)
    with ThreadRanks(2, 0) as thread_ranks:

        def rank(r: int) -> None:
            device = CpuBackend(r, thread_ranks)
            if r == 0:
                device.launch(kernel, 0, 1, ping(flags[0], flags[1], result, timeout_ns=3600 * SECOND, abort=abort.ctypes.data))
            else:
                time.sleep(0.2)  # in Python: rank 0's kernel is waited for, nothing is a deadlock yet
                abort[0] = 1
                thread_ranks.poke()

        assert together(thread_ranks, 2, rank) == [None, None]
    assert result[0] == 0
    assert result[1] < 3600 * SECOND


def test_rank_that_stays_in_python_delays_the_others_by_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's deadline then passes in real time."""
    monkeypatch.setattr("mkernel.runtime.cpu.thread_ranks._IMPATIENT_SECONDS", 0.2)
    kernel = load("ping", Ping, threads=32)
    flags, result = aligned((2, 8), np.uint64), aligned(2, np.uint64)
    with ThreadRanks(2, 0) as thread_ranks:
        left = []

        def rank(r: int) -> None:
            if r == 0:
                CpuBackend(r, thread_ranks).launch(kernel, 0, 1, ping(flags[0], flags[1], result, timeout_ns=SECOND // 2))
                left.append(time.monotonic())
            else:
                while not left:  # in Python, until rank 0's kernel has given up
                    time.sleep(0.01)

        begin = time.monotonic()
        assert together(thread_ranks, 2, rank) == [None, None]
        assert thread_ranks.report == ""
    assert left[0] - begin >= 0.5
    assert result[0] == 0


class Echo:
    """An engine: answers each ping after a flight of `latency` ns of virtual time."""

    def __init__(
        self, device: CpuBackend, thread_ranks: ThreadRanks, seen: np.ndarray[Any, Any], answer: np.ndarray[Any, Any], latency: int
    ) -> None:
        self.copier, self.thread_ranks, self.seen, self.answer, self.latency = device.copier(), thread_ranks, seen, answer, latency
        self.done, self.due = 0, None

    def step(self) -> bool:
        if self.due is None and self.seen[0] > self.done:
            self.due = self.thread_ranks.now() + self.latency
            return True
        if self.due is not None and self.thread_ranks.now() >= self.due:
            self.done, self.due = int(self.seen[0]), None
            self.copier.signal(self.answer.ctypes.data, self.done)
            return True
        return False

    def next_event_ns(self) -> int | None:
        return self.due


def test_engine_in_virtual_time() -> None:
    """1000 round trips of a second each: a test may take 300."""
    kernel = load("ping", Ping, threads=32)
    flags, result = aligned((2, 8), np.uint64), aligned(2, np.uint64)
    with ThreadRanks(1, 0) as thread_ranks:
        device = CpuBackend(0, thread_ranks)
        echo = Echo(device, thread_ranks, flags[1], flags[0], SECOND)
        remove = thread_ranks.add_engine(0, echo.step, echo.next_event_ns)
        device.launch(kernel, 0, 1, ping(flags[0], flags[1], result, rounds=1000, timeout_ns=10_000 * SECOND))
        assert result[0] == 1000
        assert 1000 * SECOND <= result[1] < 1001 * SECOND
        remove()
        device.launch(kernel, 0, 1, ping(flags[0], flags[1], result, first=1001, rounds=1, timeout_ns=SECOND))
        assert result[0] == 0
        assert "deadlock" in thread_ranks.report


def test_engine_failure() -> None:
    kernel = load("ping", Ping, threads=32)
    flags, result = aligned((2, 8), np.uint64), aligned(2, np.uint64)

    def broken() -> bool:
        raise RuntimeError("the network is on fire")

    with ThreadRanks(1, 0) as thread_ranks:
        device = CpuBackend(0, thread_ranks)
        heard: list[Exception] = []
        thread_ranks.add_engine(0, broken, lambda: None, heard.append)
        device.launch(kernel, 0, 1, ping(flags[0], flags[1], result, timeout_ns=SECOND))
        assert [str(error) for error in heard] == ["the network is on fire"]
        thread_ranks.add_engine(0, broken, lambda: None)
        with pytest.raises(Error, match=r"engine of rank 0 failed: .*on fire"):
            device.launch(kernel, 0, 1, ping(flags[0], flags[1], result, timeout_ns=SECOND))


def test_close_ends_launches() -> None:
    kernel = load("ping", Ping, threads=32)
    flags, result = aligned((2, 8), np.uint64), aligned(2, np.uint64)
    thread_ranks = ThreadRanks(2, 0)
    outcome: list[BaseException] = []

    def rank0() -> None:
        try:
            CpuBackend(0, thread_ranks).launch(kernel, 0, 1, ping(flags[0], flags[1], result, timeout_ns=2**62))
        except Error as error:
            outcome.append(error)

    thread = threading.Thread(target=rank0)
    thread.start()
    time.sleep(0.1)
    thread_ranks.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "closed" in str(outcome[0])
    with pytest.raises(Error, match="closed"):
        CpuBackend(0, thread_ranks).launch(kernel, 0, 1, ping(flags[0], flags[1], result))


def test_segments_share_one_mapping() -> None:
    with ThreadRanks(4, 0) as thread_ranks:
        devices = [CpuBackend(rank, thread_ranks) for rank in range(4)]
        segments = [devices[rank].segment(4096, rank % 2, 2) for rank in range(4)]
        for rank, segment in enumerate(segments):
            node = rank // 2 * 2
            segment.map_peers([segments[node].fd, segments[node + 1].fd])
        assert segments[0].base == segments[1].base != segments[2].base == segments[3].base
        words = [(np.frombuffer((np.ctypeslib.ctypes.c_char * 4096).from_address(s.address()), np.uint64)) for s in segments]
        peer = np.frombuffer((np.ctypeslib.ctypes.c_char * 4096).from_address(segments[0].address(1)), np.uint64)
        words[1][3] = 5
        assert peer[3] == 5
        # An engine of node 1 reaches node 0 through a mapping of its own, and its signals arrive at the shared one.
        imported = devices[2].import_segment(segments[1].fd, segments[1].size)
        assert imported != segments[1].address()
        copier = devices[2].copier()
        copier.signal(imported + 16, 9)
        source = aligned(16, np.uint8, 3)
        copier.start(imported + 32, source.ctypes.data, 16)
        assert words[1][2] == 9
        assert words[1][4] == 0x0303030303030303
        del words, peer
        segments[0].close()  # the owner of the mapping first: the others still use it
        again = np.frombuffer((np.ctypeslib.ctypes.c_char * 4096).from_address(segments[1].address()), np.uint64)
        assert again[3] == 5
        del again
        copier.signal(imported + 16, 10)
        for segment in reversed(segments):
            segment.close()
            segment.close()
        copier.signal(imported + 16, 11)  # the file lives as long as somebody has it mapped
        for device in devices:
            device.close()


@pytest.mark.parametrize("seed", range(3))
def test_of_held_ranks_the_one_with_the_longest_hold_goes_on_last(seed: int) -> None:
    """Though no hold lasts as long as it says: nobody else could go on."""
    kernel = load("ping", Ping, threads=32)
    flags, results = aligned((4, 8), np.uint64), aligned((4, 2), np.uint64)
    ended: list[int] = []
    with ThreadRanks(4, seed) as thread_ranks:
        order = random.Random(seed).sample(range(4), 4)

        def rank(r: int) -> None:
            thread_ranks.hold(r, (1 << 40) + 100 * order.index(r))  # a launch is a turn
            CpuBackend(r, thread_ranks).launch(kernel, 0, 1, ping(flags[r], flags[r], results[r], rounds=0))
            ended.append(r)

        assert together(thread_ranks, 4, rank) == [None] * 4
        assert thread_ranks.turns < 1 << 30
    assert ended == order
