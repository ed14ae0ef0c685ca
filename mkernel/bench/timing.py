"""Timing on one rank: inputs, the delay in front of a timed region, the barrier between ranks, the clocks."""

from __future__ import annotations

import abc
import functools
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mkernel import env
from mkernel.bench.peers import gather, worst_reason
from mkernel.errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["LONGEST_COOLDOWN_MS", "COOLDOWN_MS", "Call", "CpuTiming", "CudaTiming", "Timing", "Taken", "open_timing", "require_speed"]

Call = Callable[[], Any]

L2_BYTES = 60 << 20  # H200
COOLDOWN_MS = 30.0  # before every sample, at least
LONGEST_COOLDOWN_MS = 300.0
_COOLDOWN_SHARE = 4  # times what the sample before took
BATCH = 20  # calls in the stream in mode back-to-back


class Taken(NamedTuple):
    """Samples of one contestant on this rank, how one was taken in words, and the index of the last call."""

    times: list[float]
    method: str
    last: int


class Timing(abc.ABC):
    """Inputs and clocks of one rank. Every method that times something is collective: all ranks call it alike."""

    xp: Any
    world: Any
    tunes = True  # its times say which split is faster

    def __init__(self, world: Any, dtype: str, cooldown_ms: float = 0.0) -> None:
        self.world, self.xp, self.dtype, self.cooldown_ms = world, world.xp, dtype, cooldown_ms

    @abc.abstractmethod
    def random(self, shape: tuple[int, ...], seed: int) -> Any:
        """An array of normal numbers in the bench's dtype. The same seed gives the same array on every rank."""

    def empty(self, shape: tuple[int, ...]) -> Any:
        return self.xp.empty(shape, dtype=self.numpy_dtype)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        import ml_dtypes
        import numpy

        return numpy.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else numpy.float16)

    def poison(self, array: Any) -> None:
        """Fill the array with NaN, so that an element that nobody writes is found."""
        array.view(self.xp.uint16)[...] = 0x7FFF

    def sets(self, set_bytes: int) -> int:
        """Number of input sets such that those not in use are larger than L2."""
        return max(2, min(64, math.ceil(1.5 * L2_BYTES / set_bytes) + 1))

    @abc.abstractmethod
    def synchronize(self) -> None: ...

    @abc.abstractmethod
    def isolated(self, calls: Sequence[Call], samples: int) -> Taken:
        """Milliseconds of ``samples`` calls, each alone after a barrier of all ranks. ``calls`` take turns."""

    @abc.abstractmethod
    def back_to_back(self, calls: Sequence[Call], samples: int) -> Taken:
        """Milliseconds per call of 20 calls in the stream without a barrier. ``calls`` take turns."""

    @abc.abstractmethod
    def replayed(self, calls: Sequence[Call], samples: int) -> Taken:
        """Milliseconds per call of ``BATCH`` calls that were captured in a CUDA graph, as servers run them. ``calls`` take turns."""

    def host(self, calls: Sequence[Call], samples: int) -> Taken:
        """Microseconds until the first of ``calls`` returns, with nothing in the queue."""
        call = calls[0]
        results = []
        for _ in range(samples):
            self.synchronize()
            begin = time.perf_counter_ns()
            call()
            results.append((time.perf_counter_ns() - begin) / 1e3)
        self.synchronize()
        return Taken(results, "host clock around one call, queue empty", 0)

    def warm_up(self, calls: Sequence[Call]) -> None:
        """Make every call twice, so that modules, handles and connections are ready before the clock starts."""
        for call in [*calls, *calls]:
            call()
        self.synchronize()

    def close(self) -> None:  # noqa: B027 (nothing to close is fine)
        """Release what the timing holds on the device."""


class CudaTiming(Timing):
    """CUDA events around calls that were enqueued behind a delay kernel.

    The GPUs rest before every sample (before the first, where calls are timed one by one). A GPU that has just worked at its power limit is
    slower for some tens of milliseconds, so a time without rest would tell what was measured before (docs/benchmarks.md). With
    ``cooldown_ms`` 0 samples follow each other at once.
    """

    LONGEST_HOLD_NS = 100_000_000

    def __init__(self, world: Any, dtype: str, cooldown_ms: float = 0.0) -> None:
        super().__init__(world, dtype, cooldown_ms)
        self.xp.cuda.Device(world.device).use()
        self.stream = self.xp.cuda.Stream(non_blocking=True)
        self.stream.use()  # mkernel's default (CuPy's current stream) is then this one, and torch's too
        module = self.xp.RawModule(code=(Path(__file__).parent / "kernels.cu").read_text(), options=("--std=c++17",))
        self._hold, self._wake, self._meet, self._fill = (module.get_function(name) for name in ("hold", "wake", "meet", "fill"))
        self._start_measurement(1)
        self._meeting = _Meeting(world, self.xp)

    def random(self, shape: tuple[int, ...], seed: int) -> Any:
        array = self.empty(shape)
        bits = array.view(self.xp.uint16)
        if array.size:
            arguments = (bits, self.xp.uint64(array.size), self.xp.uint64(seed), self.xp.uint32(self.dtype == "float16"))
            self._fill((1056,), (256,), arguments)
        return array

    def delay(self, ns: int) -> None:
        """Keep the stream busy for so many nanoseconds."""
        self._hold((1,), (1,), (self.xp.uint64(ns),))

    def synchronize(self) -> None:
        self.stream.synchronize()
        self._meeting.check()

    def isolated(self, calls: Sequence[Call], samples: int) -> Taken:
        self._start_measurement(1)
        results = [self._behind_delay([calls[i % len(calls)]])[0] for i in range(samples)]
        method = self._method("CUDA events around one call, device-side barrier of all ranks before it")
        return Taken(results, method, (samples - 1) % len(calls))

    def back_to_back(self, calls: Sequence[Call], samples: int) -> Taken:
        self._start_measurement(BATCH)
        batch, last = [calls[i % len(calls)] for i in range(BATCH)], (BATCH - 1) % len(calls)
        once = max(gather(self.world, self._behind_delay(batch[:1])[0]))
        if once >= 0.5 and samples <= BATCH:  # an event between long calls costs nothing, and one batch is enough
            times = self._behind_delay(batch, events_between=True)
            return Taken(times, self._method(f"CUDA events between {BATCH} calls, no barrier"), last)
        results = [self._behind_delay(batch)[0] / BATCH for _ in range(samples)]
        return Taken(results, self._method(f"CUDA events around {BATCH} calls / {BATCH}, no barrier"), last)

    def replayed(self, calls: Sequence[Call], samples: int) -> Taken:
        self.stream.begin_capture(self.xp.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            for i in range(BATCH):
                calls[i % len(calls)]()
        finally:
            graph = self.stream.end_capture()
        replay = functools.partial(graph.launch, self.stream)
        self._start_measurement(1)
        self._behind_delay([replay])  # the first launch uploads the graph
        results = [self._behind_delay([replay])[0] / BATCH for _ in range(samples)]
        return Taken(results, self._method(f"CUDA events around a graph of {BATCH} calls / {BATCH}"), (BATCH - 1) % len(calls))

    def _start_measurement(self, calls: int) -> None:
        """Begin samples of so many calls. The delay grows until the host has enqueued all of them before it ends."""
        self._hold_ns, self._exposed, self._last_ms = 200_000 * (calls + 1), False, 0.0

    def _method(self, text: str) -> str:
        rest = f"; at least {self.cooldown_ms:g} ms of rest before each sample" if self.cooldown_ms else ""
        hidden = "host launch time NOT hidden: enqueueing waits for the device" if self._exposed else "behind a delay kernel"
        return f"{text}; {hidden}{rest}"

    def _cool_down(self) -> None:
        if self.cooldown_ms:
            time.sleep(max(self.cooldown_ms, min(_COOLDOWN_SHARE * self._last_ms, LONGEST_COOLDOWN_MS)) / 1e3)

    def _behind_delay(self, calls: Sequence[Call], events_between: bool = False) -> list[float]:
        """Milliseconds of the calls, as one interval or one by one. All ranks repeat until no rank's host was late."""
        while True:
            self.synchronize()
            self._cool_down()
            self.world.barrier()
            events = [self.xp.cuda.Event() for _ in range(len(calls) + 1 if events_between else 2)]
            released = self.xp.cuda.Event()
            self.delay(self._hold_ns)
            released.record(self.stream)
            self._meet_all()
            events[0].record(self.stream)
            for i, call in enumerate(calls):
                call()
                if events_between or i == len(calls) - 1:
                    events[i + 1 if events_between else 1].record(self.stream)
            late = bool(released.done)
            self.synchronize()
            times = [float(self.xp.cuda.get_elapsed_time(begin, end)) for begin, end in pairwise(events)]
            self._last_ms = sum(times)
            if self._exposed or not any(gather(self.world, late)):
                return times
            self._hold_ns *= 2
            # Some calls wait for the device themselves (a bounded number of launches in flight); no delay is long enough for them.
            self._exposed = self._hold_ns > self.LONGEST_HOLD_NS

    def _meet_all(self) -> None:
        if self.world.size > 1:
            if self.cooldown_ms:
                self._wake((_WAKE_CTAS,), (_WAKE_THREADS,), self._meeting.wake_arguments())
            self._meet((1,), (64,), self._meeting.next_arguments())

    def close(self) -> None:
        self.stream.synchronize()
        self._meeting.close()


_FLAG_BYTES = 4096
_WAKE_CTAS, _WAKE_THREADS = 16, 256
_WAKE_BYTES = _WAKE_CTAS * _WAKE_THREADS * 16  # that a rank writes to each other one, so that no NVLink is asleep


class _Meeting:
    """The device-side barrier. Its flags are device memory of every rank, opened by all others through CUDA IPC."""

    LIMIT_NS = 60_000_000_000

    def __init__(self, world: Any, xp: Any) -> None:
        self._world, self._runtime, self._epoch = world, xp.cuda.runtime, 0
        self._opened: list[int] = []
        size = _FLAG_BYTES + world.size * _WAKE_BYTES
        self._own = int(self._runtime.malloc(size))
        self._runtime.memset(self._own, 0, size)
        xp.cuda.Device().synchronize()
        addresses = self._open() if world.size > 1 else [self._own]
        self._addresses = xp.asarray(addresses, dtype=xp.uint64)
        self._uint32, self._uint64 = xp.uint32, xp.uint64

    def _open(self) -> list[int]:
        """Addresses of every rank's flags in this process. Collective."""
        world = self._world
        handles = [bytes.fromhex(text) for text in gather(world, bytes(self._runtime.ipcGetMemHandle(self._own)).hex())]
        addresses, reason = [self._own] * world.size, ""
        for rank, handle in enumerate(handles):
            if rank == world.rank:  # one's own memory cannot be opened again
                continue
            try:
                addresses[rank] = int(self._runtime.ipcOpenMemHandle(handle, self._runtime.cudaIpcMemLazyEnablePeerAccess))
                self._opened.append(addresses[rank])
            except self._runtime.CUDARuntimeError as error:
                reason = f"rank {rank}'s barrier flags cannot be opened: {error}"
                break
        if reason := worst_reason(world, reason):
            raise RuntimeError(f"{reason} (the device-side barrier of the benchmark needs CUDA IPC between the GPUs)")
        return addresses

    def next_arguments(self) -> tuple[Any, ...]:
        self._epoch += 1
        u32, u64 = self._uint32, self._uint64
        return self._addresses, u32(self._world.rank), u32(self._world.size), u64(self._epoch), u64(self.LIMIT_NS)

    def wake_arguments(self) -> tuple[Any, ...]:
        u32 = self._uint32
        return self._addresses, u32(self._world.rank), u32(self._world.size), u32(_FLAG_BYTES)

    def check(self) -> None:
        """Raise RuntimeError if a barrier gave up. The stream must be idle."""
        if self._world.size == 1 or not self._own:
            return
        word = bytearray(8)
        address = self._own + 8 * self._world.size
        self._runtime.memcpy(_address_of(word), address, 8, self._runtime.memcpyDeviceToHost)
        if any(word):
            raise RuntimeError(f"rank {self._world.rank}: the device-side barrier waited {self.LIMIT_NS // 10**9} s for another rank")

    def close(self) -> None:
        for address in self._opened:
            self._runtime.ipcCloseMemHandle(address)
        self._opened.clear()
        if self._own:
            self._world.barrier()  # a peer may still have it open
            self._runtime.free(self._own)
            self._own = 0


def _address_of(buffer: bytearray) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class CpuTiming(Timing):
    """Timing by the host's clock, for tests of the bench itself: speeds of target cpu mean nothing."""

    tunes = False

    def random(self, shape: tuple[int, ...], seed: int) -> Any:
        return self.xp.random.default_rng(seed).standard_normal(shape, dtype=self.xp.float32).astype(self.numpy_dtype)

    def sets(self, set_bytes: int) -> int:
        return 2

    def synchronize(self) -> None:
        pass

    def isolated(self, calls: Sequence[Call], samples: int) -> Taken:
        results = []
        for i in range(samples):
            self.world.barrier()
            results.append(self._time([calls[i % len(calls)]]))
        return Taken(results, "host clock around one call", (samples - 1) % len(calls))

    def back_to_back(self, calls: Sequence[Call], samples: int) -> Taken:
        times = [self._time(calls) / len(calls) for _ in range(samples)]
        return Taken(times, f"host clock around {len(calls)} calls", len(calls) - 1)

    def replayed(self, calls: Sequence[Call], samples: int) -> Taken:
        return self.back_to_back(calls, samples)  # there are no graphs

    @staticmethod
    def _time(calls: Sequence[Call]) -> float:
        begin = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - begin) * 1e3


def require_speed(world: Any, allow_cpu: bool) -> None:
    """Raise ArgumentError where times would mean nothing."""
    if world.target != "cuda" and not allow_cpu:
        raise ArgumentError("target", world.target, "speeds of target cpu mean nothing", "run on sm_90 GPUs, one per rank")
    if world.target == "cuda" and env.SHARE_GPUS.get():
        raise ArgumentError("MKERNEL_SHARE_GPUS", 1, "ranks that take turns on a GPU have no speed of their own", "run one rank per GPU")


def open_timing(world: Any, dtype: str, cooldown_ms: float = 0.0) -> Timing:
    """The timing of a world's target. Collective."""
    return (CudaTiming if world.target == "cuda" else CpuTiming)(world, dtype, cooldown_ms)
