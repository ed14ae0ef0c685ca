"""The engine's own process: what it is given, how it starts, works, fails and ends."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mkernel.abi import RING_SLOTS, Ring
from mkernel.errors import ArgumentError, TransportError
from mkernel.memory.memfd import MemfdSegment
from mkernel.proxy.process import EngineProcess, Layout, Memory, release_store
from mkernel.proxy.ring import RING_BYTES
from mkernel.proxy.spawn import scrubbed_environment
from mkernel.transport import Card
from tests.transport.harness import Producer

SECONDS = 20.0


class SharedProducer(Producer):
    """A ring that another process reads."""

    def __init__(self, fd: int = -1) -> None:
        self.fd = os.memfd_create("ring") if fd < 0 else fd
        os.ftruncate(self.fd, RING_BYTES)
        self.memory = mmap.mmap(self.fd, RING_BYTES)
        self.ring = Ring.from_buffer(self.memory)
        self.head = 0

    def close(self) -> None:
        os.close(self.fd)


@contextlib.contextmanager
def started(
    transport: str = "null", card: Card | None = None, ready: bool = True, **more: Any
) -> Iterator[tuple[EngineProcess, SharedProducer]]:
    producer = SharedProducer()
    with MemfdSegment(1 << 16, 0, 1) as heap, MemfdSegment(1 << 16, 0, 1) as signals, contextlib.closing(producer):
        layout = Layout(
            transport=transport,
            rank=0,
            peers=[1],
            heap=Memory(heap.fd, heap.size),
            signals=Memory(signals.fd, signals.size),
            ring=producer.fd,
            card=card,
            timeout=5.0,
            **more,
        )
        with contextlib.closing(EngineProcess(layout)) as engine:
            if ready:
                assert engine.step() is None
            yield engine, producer


@pytest.fixture(params=["python", "compiled"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which engine the process runs."""
    monkeypatch.setenv("MKERNEL_ENGINE", request.param)
    return str(request.param)


either = pytest.mark.parametrize(
    "kind", ["compiled", pytest.param("python", marks=pytest.mark.slow)], indirect=True
)  # where the time counts


def issue(producer: SharedProducer, count: int = 1, size: int = 1 << 18) -> None:
    for _ in range(count):
        assert producer.issue(producer.head % 4, 1, 0, 0, size, 1024, producer.head + 1) is not None


def wait_completed(producer: SharedProducer) -> None:
    deadline = time.monotonic() + SECONDS
    while producer.completed < producer.head:
        assert time.monotonic() < deadline, f"{producer.completed} of {producer.head} puts completed"
        os.sched_yield()


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + SECONDS
    while alive(pid):
        assert time.monotonic() < deadline, "the engine's process is still there"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.usefixtures("kind")
def test_puts_complete_over_several_laps() -> None:
    with started() as (engine, producer):
        errors: list[TransportError] = []
        engine.watch(errors.append)
        for _ in range(5):
            issue(producer, RING_SLOTS)
            engine.wake()
            wait_completed(producer)
        assert errors == []
    assert not alive(engine.pid)


@pytest.mark.usefixtures("kind")
def test_it_wakes_without_being_told() -> None:
    """Replayed graphs launch nothing that the host sees."""
    with started() as (_, producer):
        time.sleep(0.3)
        issue(producer)
        wait_completed(producer)


def cpu_ns(pid: int) -> int:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def sleeps(pid: int) -> int:
    """How often the process has gone to sleep."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])


@pytest.mark.usefixtures("kind")
def test_it_is_awake_while_a_call_is_under_way_and_cheap_when_none_is() -> None:
    with started(follows=True) as (engine, producer):
        producer.ring.launched = 1
        engine.wake()
        issue(producer)
        wait_completed(producer)
        time.sleep(0.05)
        before = sleeps(engine.pid)
        time.sleep(0.1)
        assert sleeps(engine.pid) - before <= 2, "it naps although a call is under way"
        producer.ring.ended = 1
        time.sleep(0.1)
        spent = []
        for _ in range(4):  # the least of them: others who use the machine only add to what a process takes
            before, begin = sleeps(engine.pid), cpu_ns(engine.pid)
            time.sleep(0.5)
            assert sleeps(engine.pid) - before >= 5
            spent.append(cpu_ns(engine.pid) - begin)
        assert min(spent) <= 0.02 * 0.5e9, f"at most 2 % of a CPU: {spent} ns in half a second"
        issue(producer)  # by a graph that nobody has told of
        wait_completed(producer)


def test_a_rank_with_thousands_of_descriptors() -> None:
    """Its engine inherits descriptors under their numbers, and ``select`` takes none from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"no more than {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    null = os.open(os.devnull, os.O_RDONLY)
    more = [os.dup(null) for _ in range(1100)]
    try:
        with started() as (engine, producer):
            errors: list[TransportError] = []
            engine.watch(errors.append)
            time.sleep(0.05)  # it naps, and so has looked at its descriptors
            issue(producer)
            wait_completed(producer)
            assert errors == []
    finally:
        for fd in (null, *more):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_cannot_be_killed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may hold it in the kernel: closing a world ends all the same."""
    with started() as (engine, _):
        real = engine._process
        waits: list[float | None] = []

        class Stuck:
            pid = real.pid

            def wait(self, timeout: float | None = None) -> int:
                waits.append(timeout)
                raise subprocess.TimeoutExpired("engine", timeout or 0)

            def kill(self) -> None: ...

        monkeypatch.setattr(engine, "_process", Stuck())
        engine.close(0.1)
        assert None not in waits
        real.wait(SECONDS)


def test_close_twice_and_at_once() -> None:
    with started(ready=False) as (engine, _):
        engine.close()
        engine.close()
        assert not alive(engine.pid)


def test_it_dies_with_its_rank() -> None:
    program = """
        import os, sys, time
        sys.path.insert(0, {root!r})
        from tests.proxy.test_process import started
        with started() as (engine, producer):
            print(engine.pid, flush=True)
            time.sleep(60)
    """
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program.format(root=root))], stdout=subprocess.PIPE, text=True, cwd=root
    ) as rank:
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        assert alive(pid)
        rank.kill()
    wait_gone(pid)


def test_it_outlives_the_thread_that_started_it() -> None:
    """The kernel's death signal is about the thread that made a process."""
    with contextlib.ExitStack() as stack:
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(stack.enter_context(started())))
        thread.start()
        thread.join()
        engine, producer = made[0]
        time.sleep(0.2)
        assert alive(engine.pid)
        issue(producer)
        wait_completed(producer)


def test_its_end_is_an_error() -> None:
    with started() as (engine, _):
        errors: list[TransportError] = []
        engine.watch(errors.append)
        os.kill(engine.pid, signal.SIGKILL)
        deadline = time.monotonic() + SECONDS
        while not errors and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "killed by signal 9" in str(errors[0])


def test_ctrl_c_is_for_the_rank() -> None:
    with started() as (engine, producer):
        os.kill(engine.pid, signal.SIGINT)
        issue(producer)
        wait_completed(producer)


_FAILS = {  # what fails in a process
    "python": """
        def poll(self):
            if self._posted:
                raise gone
            return []

        NullTransport.poll = poll
    """,
    "compiled": """
        def look(self, report, under_way):
            if report.taken:
                raise gone
            return ()

        NullSide.look = look
    """,
}


def test_a_failure_reaches_the_rank_with_its_fields(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begin = """
        from mkernel.errors import TransportError
        from mkernel.transport.null import NullSide, NullTransport

        gone = TransportError("gone", peer=1, op="write", status="IBV_WC_RETRY_EXC_ERR", queue_pair=7, remedy="look")
    """
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(begin) + textwrap.dedent(_FAILS[kind]))
    monkeypatch.syspath_prepend(str(tmp_path))
    with started() as (engine, producer):
        errors: list[TransportError] = []
        engine.watch(errors.append)
        issue(producer)
        deadline = time.monotonic() + SECONDS
        while not errors and time.monotonic() < deadline:
            time.sleep(0.01)
        (error,) = errors
        fields = (error.peer, error.op, error.status, error.queue_pair, error.remedy)
        assert fields == (1, "write", "IBV_WC_RETRY_EXC_ERR", 7, "look")
        assert kind == "compiled" or producer.completed == 0


def test_what_cannot_be_opened_is_an_error() -> None:
    with started("rc", Card("no-such-device", 1, 0), ready=False) as (engine, _), pytest.raises(TransportError, match="rank 0"):
        engine.step()
    with started("emulated", ready=False) as (engine, _), pytest.raises(ArgumentError, match="rank's own process"):
        engine.step()


def test_exchange(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
            from mkernel.transport import null

            def create(wiring):
                got = wiring.exchange(bytes(range(256)) + b"of rank %d" % wiring.rank)
                assert got == [b"first", bytes(range(256))], got
                assert wiring.exchange(b"") == [b"", b""]
                return null.NullTransport()

            null.create = create
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with started(ready=False) as (engine, producer):
        assert engine.step() == bytes(range(256)) + b"of rank 0"
        engine.give([b"first", bytes(range(256))])
        assert engine.step() == b""
        engine.give([b"", b""])
        assert engine.step() is None
        issue(producer)
        wait_completed(producer)


def test_the_process_knows_no_launcher_no_gpu_no_mpi() -> None:
    given = {
        "OMPI_COMM_WORLD_RANK": "0",
        "PMI_FD": "7",
        "PMIX_RANK": "1",
        "SLURM_PROCID": "1",
        "RANK": "3",
        "MKERNEL_RANK": "1",
        "MKERNEL_RENDEZVOUS": "h:1",
        "MKERNEL_SECRET": "x" * 32,
        "MKERNEL_LISTEN": "10.0.0.1",
        "MKERNEL_RC_SIGNAL": "imm",
        "HOME": "/root",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert scrubbed_environment(given, gpus=True)["CUDA_VISIBLE_DEVICES"] == "0"
    kept = scrubbed_environment(given, gpus=False)
    assert set(kept) == {"MKERNEL_RC_SIGNAL", "HOME", "PYTHONPATH", "CUDA_VISIBLE_DEVICES"}
    assert kept["CUDA_VISIBLE_DEVICES"] == ""
    with started() as (engine, _):
        maps = Path(f"/proc/{engine.pid}/maps").read_text()
        environment = Path(f"/proc/{engine.pid}/environ").read_text()
        assert not any(name in maps for name in ("libcuda", "libmpi", "numpy", "cupy"))
        assert "PMI" not in environment
        names = [os.readlink(entry) for entry in Path(f"/proc/{engine.pid}/fd").iterdir()]  # noqa: PTH115
        assert sum("memfd" in name for name in names) == 3


def test_release_store() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    word = Ring.from_buffer(bytearray(RING_BYTES))
    import ctypes

    release_store()(ctypes.addressof(word), 0x1122334455667788)
    assert word.completed == 0x1122334455667788
    memory.close()


_DEVICE = """
import os, sys, time
from tests.proxy.test_process import SharedProducer
producer = SharedProducer(int(sys.argv[1]))
burst, puts = int(sys.argv[2]), int(sys.argv[3])
times = []
while producer.head < puts:
    begin = time.perf_counter_ns()
    for _ in range(burst):
        assert producer.issue(producer.head % 4, 1, 0, 0, 1 << 18, 1024, producer.head + 1) is not None
    while producer.completed < producer.head:
        os.sched_yield()
    times.append((time.perf_counter_ns() - begin) / burst / 1e3)
print(sorted(times)[len(times) // 2])
"""


@either
@pytest.mark.parametrize("pause", [0.006, *(pytest.param(pause, marks=pytest.mark.slow) for pause in (0.0005, 0.05))])
@pytest.mark.parametrize("follows", [True, False], ids=["a call is launched", "unannounced"])
def test_command_to_credit_after_a_pause(kind: str, pause: float, follows: bool) -> None:
    """Prints how long a put takes after a pause (``-s``): 20 us after its launch was announced, or unannounced as of a replayed graph.

    Asserts only that the work was done, because machines differ.
    """
    times = []
    with started(follows=follows) as (engine, producer):
        words = memoryview(producer.memory).cast("B").cast("Q")
        for number in range(1, 41):
            time.sleep(pause)
            slot = Ring.slots.offset // 8 + (number - 1) * 8
            words[slot + 1] = 1 << 32  # channel 0, rank 1
            if follows:
                words[1] = number
                engine.wake()
                ready = time.perf_counter_ns() + 20_000
                while time.perf_counter_ns() < ready:
                    pass
            begin = time.perf_counter_ns()
            words[slot] = number
            while words[0] < number:
                pass
            times.append((time.perf_counter_ns() - begin) / 1e3)
            words[2] = number
        words.release()
    assert len(times) == 40
    times.sort()
    how = "of a launched call" if follows else "unannounced"
    pauses = f"{pause * 1e3:g} ms after the last put"
    print(f"own process, {kind}, null transport, {pauses}, {how}: median {times[20]:.1f} us, most {times[-1]:.1f}")


@either
@pytest.mark.parametrize("hog", [False, True], ids=["free", "hogged"])
@pytest.mark.parametrize("burst", [1, RING_SLOTS], ids=["alone", "batched"])
def test_cost_per_put(kind: str, burst: int, hog: bool) -> None:
    """Prints the cost of a put (``-s``) as a process in the place of the device sees it, with the rank's interpreter free or busy.

    Asserts only that the work was done, because machines differ.
    """
    puts = 20 * RING_SLOTS if burst > 1 else 500
    with started() as (_, producer):
        command = [sys.executable, "-c", _DEVICE, str(producer.fd), str(burst), str(puts)]
        root = str(Path(__file__).parents[2])
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, pass_fds=[producer.fd]) as device:
            while hog and device.poll() is None:
                sum(range(100_000))  # keeps this rank's interpreter
            assert device.stdout is not None
            median = float(device.stdout.read())
        assert producer.completed == puts
        rank = "busy" if hog else "idle"
        print(f"own process, {kind}, null transport, 256 KiB puts, {burst} at once, rank {rank}: {median:.2f} us per put")
