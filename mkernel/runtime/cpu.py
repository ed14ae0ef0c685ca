"""Target cpu: a device whose CTAs the scheduler library (kernels_src/cpu) emulates, alone or with the other ranks of mk.launch."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import logging
import math
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from mkernel import env
from mkernel.errors import ArgumentError, CompileError, Error
from mkernel.jit import cpu as compiler
from mkernel.jit.spec import KernelSpec
from mkernel.memory.memfd import Mapping, MemfdSegment, SharedMemory, import_fd
from mkernel.memory.segment import Segment
from mkernel.runtime import dlpack
from mkernel.runtime.device import Device, Extents, HostMemory, Kernel, TensorView

__all__ = ["Cohort", "CpuDevice", "CpuKernel"]

_log = logging.getLogger("mkernel")

_ALIGNMENT = 256  # bytes, of everything allocated here
_NEVER = 2**64 - 1
_EVERY_CTA = 2**32 - 1  # mkcpu::kEveryCta
_BUDGET, _LAUNCH_DONE, _BLOCKED = 1, 2, 3  # mkcpu::Stop
_RUNNING, _SUCCEEDED = 0, 1  # mkcpu::Finished
_TENSOR_MAP = struct.Struct("=QQ3Q2Q3III52x")  # mkcpu::CpuTensorMap
_TENSOR_MAP_MAGIC = 0x70616D2D7570636D
_BOX_ROW_BYTES = 128
_TURNS = 1 << 22  # between two looks at signals, in process mode
_SLICE_NS = 50_000_000
_COHORT_TURNS = 4096  # between two steps of the engines
_IMPATIENT_SECONDS = 5.0  # a rank that stays in Python this long no longer holds up the others
_WAKING_SECONDS = 1.0  # how long a rank whose wait has ended may take to wake up


class _Library:
    """The scheduler library's functions (kernels_src/cpu/interface.h). Every call releases the GIL."""

    def __init__(self) -> None:
        # Global: kernels find the scheduler's functions there.
        _, library = compiler.open_library(compiler.core_library, ctypes.RTLD_GLOBAL)
        u64, u32, i32, p, text = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p
        self.create = self._function(library, "create", p, u64, ctypes.c_bool)
        self.destroy = self._function(library, "destroy", None, p)
        self.launch = self._function(library, "launch", u64, p, p, text, ctypes.c_size_t, u32, u32, u32, u32)
        self.hold = self._function(library, "hold", None, p, u64, u32, u32, u64)
        self.end_holds = self._function(library, "end_holds", ctypes.c_bool, p)
        self.run = self._function(library, "run", i32, p, u64, u64)
        self.finished = self._function(library, "finished", i32, p, u64)
        self.cancel = self._function(library, "cancel", None, p, u64)
        self.forget = self._function(library, "forget", None, p, u64)
        self.error = self._function(library, "error", ctypes.c_size_t, p, u64, p, ctypes.c_size_t)
        self.report = self._function(library, "report", ctypes.c_size_t, p, p, ctypes.c_size_t)
        self.now = self._function(library, "now", u64, p)
        self.advance_to = self._function(library, "advance_to", None, p, u64)
        self.next_deadline = self._function(library, "next_deadline", u64, p)
        self.poke = self._function(library, "poke", None, p)
        self.turns = self._function(library, "turns", u64, p)
        self.trace = self._function(library, "trace", u64, p)
        self.name = self._function(library, "name", None, p, u64, u64, text)
        self.copy = self._function(library, "copy", None, p, p, p, ctypes.c_size_t)
        self.put_begins = self._function(library, "put_begins", u64, p, p, p, ctypes.c_size_t, text)
        self.put_lands = self._function(library, "put_lands", None, p, u64)
        self.put_ends = self._function(library, "put_ends", None, p, u64)
        self.signal = self._function(library, "signal", None, p, u64)
        self.load = self._function(library, "load", u64, p)
        self.engine_acquire = self._function(library, "engine_acquire", None, p)

    @staticmethod
    def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = getattr(library, f"mkc_{name}")
        function.restype, function.argtypes = result, list(arguments)
        checked: Callable[..., Any] = function
        return checked


@functools.lru_cache(maxsize=1)
def _library() -> _Library:
    return _Library()


class CpuKernel(Kernel):
    """A kernel's shared object, loaded."""

    def __init__(self, spec: KernelSpec, path: Path, max_ctas: int, library: ctypes.CDLL | None = None) -> None:
        self.spec = spec
        self._max_ctas = max_ctas
        _library()  # the kernel's symbols are there
        self._library = library or ctypes.CDLL(str(path))
        threads, size = self._library.mkernel_threads(), self._library.mkernel_parameter_bytes()
        if (threads, size) != (spec.threads, spec.parameter_bytes):
            raise CompileError(
                f"{spec.name}: the kernel has {threads} threads and {size} bytes of parameters, "
                f"its plan says {spec.threads} and {spec.parameter_bytes}",
                path=str(path.with_suffix(".cpp")),
            )
        self.entry = ctypes.cast(self._library.mkernel_invoke, ctypes.c_void_p).value

    def max_ctas(self) -> int:
        return self._max_ctas


class _Scheduler:
    """One native scheduler; used by one thread at a time. Closed with its owner, or dropped with it."""

    def __init__(self, seed: int, *, virtual_time: bool) -> None:
        self.library = _library()
        self.handle = self.library.create(seed, virtual_time)
        if not self.handle:
            raise MemoryError("target cpu: no memory for a scheduler")
        self._destroy = weakref.finalize(self, self.library.destroy, self.handle)
        self._destroy.atexit = False

    def start(self, kernel: CpuKernel, grid: int, parameters: bytes, rank: int) -> int:
        spec = kernel.spec
        if len(parameters) != spec.parameter_bytes:
            raise ArgumentError("parameters", f"{len(parameters)} bytes", f"{spec.name} takes {spec.parameter_bytes}")
        shape = (grid, spec.threads, spec.shared_bytes)
        launch: int = self.library.launch(self.handle, kernel.entry, parameters, len(parameters), *shape, rank)
        if not launch:
            raise Error("target cpu cannot launch {}: {} CTAs of {} threads with {} bytes of shared memory each".format(spec.name, *shape))
        return launch

    def result(self, launch: int) -> Error | bool:
        """False: still running. True: succeeded. An Error: what it failed of. Afterwards the launch is forgotten."""
        state = self.library.finished(self.handle, launch)
        if state == _RUNNING:
            return False
        text = self._text(self.library.error, launch)
        self.library.forget(self.handle, launch)
        return True if state == _SUCCEEDED else Error(f"target cpu: {text}")

    def report(self) -> str:
        return self._text(self.library.report)

    def _text(self, function: Callable[..., int], *arguments: int) -> str:
        size = function(self.handle, *arguments, None, 0)
        buffer = ctypes.create_string_buffer(size + 1)
        function(self.handle, *arguments, buffer, size + 1)
        return buffer.value.decode(errors="replace")

    def close(self) -> None:
        self.handle = None
        self._destroy()


# ---- mk.launch


class _Launch:
    """A launch that a rank's thread waits for."""

    def __init__(self, rank: int, kernel: CpuKernel, grid: int, parameters: bytes, late: Sequence[tuple[int, int, int]]) -> None:
        self.rank, self.kernel, self.grid, self.parameters, self.late = rank, kernel, grid, parameters, late
        self.native = 0
        self.result: Error | bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Engine:
    rank: int
    step: Callable[[], bool]
    next_event_ns: Callable[[], int | None]
    on_error: Callable[[Exception], object] | None


class Cohort:
    """The ranks of one ``mk.launch``: their kernels and engines run on one thread, in virtual time, in an order that the seed decides.

    A rank's own thread is running (in Python), inside a launch, waiting on the host (``blocked``), or finished. Kernels go on only while
    no rank is running, so that what they see of each other does not depend on the host's timing.

    Parameters
    ----------
    ranks
        Number of ranks, all of them running at first.
    seed
        Of the interleaving (default: ``MKERNEL_CPU_SEED``).

    Attributes
    ----------
    report
        Who waited for what when nothing could move any more; empty as long as that never happened.
    """

    def __init__(self, ranks: int, seed: int | None = None) -> None:
        self.report = ""
        self._scheduler = _Scheduler(env.CPU_SEED.get() if seed is None else seed, virtual_time=True)
        self._condition = threading.Condition()
        self._state = ["running"] * ranks
        self._wakes = [0] * ranks  # releases that came before the wait
        self._waking_since = [0.0] * ranks
        self._late: dict[int, list[tuple[int, int, int]]] = {}  # by rank, of its next launch: CTA, copies, turns
        self._pending: list[_Launch] = []
        self._active: list[_Launch] = []
        self._engines: list[_Engine] = []
        self._engine_lock = threading.RLock()  # an engine's failure may remove it
        self._poked = False
        self._noisy_since: float | None = None  # kernels have been waiting for a rank's thread since
        self._segments = _SharedSegments()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._broken = ""  # why nothing can run any more

    # ---- for rank threads
    @contextlib.contextmanager
    def blocked(self, rank: int) -> Iterator[None]:
        """Around every host wait of a rank's thread: the others' kernels go on meanwhile."""
        with self._condition:
            if self._wakes[rank]:
                self._wakes[rank] -= 1
                self._set(rank, "waking")
            else:
                self._set(rank, "waiting")
        try:
            yield
        finally:
            with self._condition:
                self._set(rank, "running")

    def release(self, rank: int) -> None:
        """The rank's host wait has ended, although its thread has yet to wake up: kernels wait for it. Called by whoever ends it."""
        with self._condition:
            if self._state[rank] == "waiting":
                self._set(rank, "waking")
            elif self._state[rank] == "running":
                self._wakes[rank] = 1

    def finish(self, rank: int) -> None:
        """The rank's thread has ended."""
        with self._condition:
            self._set(rank, "finished")

    def launch(self, rank: int, kernel: CpuKernel, grid: int, parameters: bytes) -> None:
        """Run a kernel as this rank; returns when it has ended. Raises Error when the emulator found a fault."""
        launch = _Launch(rank, kernel, grid, parameters, self._late.pop(rank, ()))
        with self._condition:
            if self._closing:
                raise Error("the cohort is closed")
            if self._broken:
                raise Error(self._broken)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="mkernel-cpu", daemon=True)
                self._thread.start()
            self._pending.append(launch)
            self._set(rank, "launched")
            try:
                self._condition.wait_for(lambda: launch.result is not False)
            finally:
                self._set(rank, "running")
        if isinstance(launch.result, Error):
            raise launch.result

    def hold(self, rank: int, turns: int, after: int = 0, cta: int | None = None) -> None:
        """The rank's next kernel, or one CTA of it, rests for so many turns, or until nobody else can go on.

        A CTA does whenever it has issued ``after`` asynchronous copies, in the midst of what it reads and writes; with 0 once, at its
        beginning. It is lateness that the seed repeats, where a sleeping thread would depend on the host's clock.
        """
        self._late.setdefault(rank, []).append((_EVERY_CTA if cta is None else cta, after, turns))

    # ---- for engines
    def add_engine(
        self,
        rank: int,
        step: Callable[[], bool],
        next_event_ns: Callable[[], int | None],
        on_error: Callable[[Exception], object] | None = None,
    ) -> Callable[[], None]:
        """Step an engine on the scheduler's thread, in virtual time (``now``). A step that raises is the last; ``on_error`` hears of it.

        Returns what removes the engine again; after that no step of it is running.
        """
        engine = _Engine(rank, step, next_event_ns, on_error)
        with self._engine_lock:
            self._engines.append(engine)
            self._engines.sort(key=lambda e: e.rank)

        def remove() -> None:
            with self._engine_lock:
                if engine in self._engines:
                    self._engines.remove(engine)

        return remove

    def now(self) -> int:
        """Virtual time, ns."""
        value: int = self._scheduler.library.now(self._scheduler.handle) if self._scheduler.handle else 0
        return value

    # ---- for everybody
    def poke(self) -> None:
        """Every thread of a kernel that waits for a system flag looks again (an abort was written)."""
        if self._scheduler.handle:
            self._scheduler.library.poke(self._scheduler.handle)

    def name(self, address: int, size: int, name: str) -> None:
        """Give memory a name for reports; a size of 0 takes it away."""
        with self._condition:
            if self._scheduler.handle:
                self._scheduler.library.name(self._scheduler.handle, address, size, name.encode())

    @property
    def turns(self) -> int:
        """Thread switches so far."""
        value: int = self._scheduler.library.turns(self._scheduler.handle)
        return value

    @property
    def trace(self) -> int:
        """Hash of the interleaving so far: equal for equal runs."""
        value: int = self._scheduler.library.trace(self._scheduler.handle)
        return value

    def close(self) -> None:
        """Stop everything. Launches under way raise. Safe to call twice."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- the scheduler's thread
    def _set(self, rank: int, state: str) -> None:
        self._state[rank] = state
        if state == "waking":
            self._waking_since[rank] = time.monotonic()
        self._condition.notify_all()

    def _quiet(self) -> bool:
        """No rank's thread is in Python."""
        late = time.monotonic() - _WAKING_SECONDS
        ranks = zip(self._state, self._waking_since, strict=True)
        return not any(state == "running" or (state == "waking" and since > late) for state, since in ranks)

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                self._slice()
        except BaseException as error:  # of any kind: ranks wait for this thread
            _log.exception("target cpu's scheduler failed")
            with self._condition:
                self._broken = f"target cpu's scheduler failed: {type(error).__name__}: {error}"
                launches, self._pending, self._active = [*self._pending, *self._active], [], []
                for launch in launches:
                    self._end(launch, Error(self._broken))

    def _wait_for_work(self) -> bool:
        """Until there is a kernel to run and no rank's thread is in Python (or has been for too long). False: the cohort closes."""
        with self._condition:
            while not self._closing:
                if not self._pending and not self._active:
                    self._noisy_since = None
                    self._condition.wait()
                elif self._quiet():
                    self._noisy_since = None
                    break
                else:
                    if self._noisy_since is None:
                        self._noisy_since = time.monotonic()
                    patience = self._noisy_since + _IMPATIENT_SECONDS - time.monotonic()
                    if patience <= 0:
                        break
                    self._condition.wait(min(patience, _WAKING_SECONDS))
            if self._closing:
                self._stop()
                return False
            self._submit()
            return True

    def _submit(self) -> None:
        pending, self._pending = sorted(self._pending, key=lambda launch: launch.rank), []
        for launch in pending:
            try:
                launch.native = self._scheduler.start(launch.kernel, launch.grid, launch.parameters, launch.rank)
            except Error as error:
                self._end(launch, error)
            else:
                for late in launch.late:
                    self._scheduler.library.hold(self._scheduler.handle, launch.native, *late)
                self._active.append(launch)

    def _end(self, launch: _Launch, result: Error | bool) -> None:
        launch.result = result
        self._set(launch.rank, "running")

    def _stop(self) -> None:
        for launch in (*self._pending, *self._active):
            if launch.native:
                self._scheduler.library.forget(self._scheduler.handle, launch.native)
            self._end(launch, Error("the cohort was closed while a kernel was running"))
        self._pending, self._active = [], []

    def _slice(self) -> None:
        """Engines, then kernels, for a while."""
        library, handle = self._scheduler.library, self._scheduler.handle
        moved, event = self._step_engines()
        until = _NEVER if not event else max(event, library.now(handle) + 1)
        stop = library.run(handle, _COHORT_TURNS if self._engines else _TURNS, until)
        if stop == _LAUNCH_DONE:
            with self._condition:
                for launch in list(self._active):
                    result = self._scheduler.result(launch.native)
                    if result is not False:
                        self._active.remove(launch)
                        self._end(launch, result)
        elif stop == _BLOCKED and not moved:
            self._advance()

    def _step_engines(self) -> tuple[bool, int | None]:
        """Whether any moved, and the time of the earliest event."""
        moved, first = False, None
        with self._engine_lock:
            if not self._engines:
                return False, None
            self._scheduler.library.engine_acquire(self._scheduler.handle)
            for engine in list(self._engines):
                try:
                    moved = engine.step() or moved
                    event = engine.next_event_ns()
                except Exception as error:
                    self._drop(engine, error)
                    moved = True
                    continue
                if event is not None and (first is None or event < first):
                    first = event
        return moved, first

    def _drop(self, engine: _Engine, error: Exception) -> None:
        if engine in self._engines:
            self._engines.remove(engine)
        if engine.on_error is None:
            self._fail_all(Error(f"the engine of rank {engine.rank} failed: {error}"))
        else:
            engine.on_error(error)

    def _advance(self) -> None:
        """Every thread of every kernel waits for the outside: let time pass until somebody can go on."""
        library, handle = self._scheduler.library, self._scheduler.handle
        moved, event = self._step_engines()
        if not self._poked:  # an abort may have been written
            self._poked = True
            library.poke(handle)
            return
        if moved:
            return
        self._poked = False
        now, deadline = library.now(handle), library.next_deadline(handle)
        if event is not None:
            library.advance_to(handle, min(max(event, now + 1000), deadline))
            return
        with self._condition:
            if not self._quiet():  # a rank has been in Python for long: virtual time follows the real one
                begin = time.monotonic_ns()
                self._condition.wait(0.01)
                library.advance_to(handle, min(now + time.monotonic_ns() - begin, deadline))
                return
            if self._pending:
                return
        if library.end_holds(handle):
            return
        with self._condition:  # names come from other threads
            report = f"deadlock at {now} ns: nothing can run, and nothing is under way\n{self._scheduler.report()}"
            self.report = self.report or report
        if deadline == _NEVER:
            self._fail_all(Error(f"target cpu: {report}"))
        else:
            library.advance_to(handle, deadline)

    def _fail_all(self, error: Error) -> None:
        with self._condition:
            for launch in self._active:
                self._scheduler.library.forget(self._scheduler.handle, launch.native)
                self._end(launch, Error(str(error)))
            self._active = []


_File = tuple[int, int]  # device and inode of a memfd


class _SharedSegments:
    """Lets the ranks of one process address a node's memory through one mapping, so that an address means the same word to all of them.

    Several mappings of one file would work as well, but ThreadSanitizer, the proxy-fence check and reports know addresses only.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.groups: dict[tuple[_File, ...], _SegmentGroup] = {}

    def find(self, file: _File) -> int | None:
        """Where the ranks of its node have mapped this file. Under the lock, which keeps it mapped."""
        for key, group in self.groups.items():
            if file in key:
                return group.owner._own_base + key.index(file) * group.owner.stride
        return None


class _SegmentGroup:
    def __init__(self, owner: CohortSegment) -> None:
        self.owner = owner
        self.members = 0


class CohortSegment(MemfdSegment):
    """A segment whose parts, once ``map_peers`` was called, are where the first rank of the node mapped them."""

    def __init__(self, cohort: Cohort, name: str, size: int, local_rank: int, ranks_per_node: int) -> None:
        self._cohort, self._name = cohort, name
        self._shared = cohort._segments
        self._group: _SegmentGroup | None = None
        self._own_base = 0
        self._key: tuple[_File, ...] = ()
        super().__init__(size, local_rank, ranks_per_node)
        self._own_base = self.base

    def map_peers(self, fds: Sequence[int]) -> None:
        own = list(fds)
        if len(own) == self.ranks_per_node:
            own[self.local_rank] = self.fd
        key = tuple(map(_file, own))
        with self._shared.lock:
            if self._group is not None:
                return
            group = self._shared.groups.get(key)
            if group is None:
                super().map_peers(fds)
                group = self._shared.groups[key] = _SegmentGroup(self)
            group.members += 1
            self._group, self._key, self.base = group, key, group.owner.base
        self._cohort.name(self.address(), self.size, self._name)

    def close(self) -> None:
        if self._group is not None:
            self._cohort.name(self.address(), 0, "")
        with self._shared.lock:
            group, self._group = self._group, None
            if group is not None:
                group.members -= 1
                self.base = self._own_base
                if group.members == 0:
                    self._shared.groups.pop(self._key)
                    group.owner._unmap_now()
                if group.owner is self:
                    return  # the last member unmaps it
            elif self._key and self._own_base:
                return  # already closed, still in use by others
        super().close()
        self._own_base = 0

    def _unmap_now(self) -> None:
        super().close()
        self._own_base = 0


def _file(fd: int) -> _File:
    state = os.fstat(fd)
    return state.st_dev, state.st_ino


# ---- the device


class CpuDevice(Device):
    """A GPU's stand-in for one rank. See ``Device``; launches return when the kernel has ended.

    Parameters
    ----------
    rank
        For messages; with a cohort, the rank's number there.
    cohort
        The ranks of this process; None: this process is one rank, and time is real.
    seed
        Of the interleaving without a cohort (default: ``MKERNEL_CPU_SEED`` + rank).
    sm_count
        CTAs at once (default: ``MKERNEL_CPU_SMS``).
    """

    def __init__(self, rank: int = 0, cohort: Cohort | None = None, *, seed: int | None = None, sm_count: int | None = None) -> None:
        self.target = "cpu"
        self.sm_count = env.CPU_SMS.get() if sm_count is None else sm_count
        self.name = f"cpu ({self.sm_count} emulated SMs)"
        self.xp = np
        self.rank, self.cohort = rank, cohort
        self._library = _library()
        self._seed = env.CPU_SEED.get() + rank if seed is None else seed
        self._own: _Scheduler | None = None
        self._segments = 0
        self._lock = threading.Lock()
        self._memory: list[np.ndarray[Any, Any]] = []
        self._imported: list[tuple[Mapping, _File]] = []
        self._shared: list[SharedMemory] = []

    # ---- memory
    def segment(self, size: int, local_rank: int, ranks_per_node: int, *, host: bool = False) -> Segment:
        if self.cohort is not None:
            self._segments += 1
            name = f"rank {self.rank}, segment {self._segments} ({size >> 10} KiB)"
            return CohortSegment(self.cohort, name, size, local_rank, ranks_per_node)
        return MemfdSegment(size, local_rank, ranks_per_node)

    def import_segment(self, fd: int, size: int, *, host: bool = False) -> int:
        mapping = import_fd(fd, size)
        self._imported.append((mapping, _file(fd)))
        return mapping.address

    def copier(self) -> CpuCopier:
        return CpuCopier(self._library, self.cohort, self._imported)

    def allocate(self, size: int) -> int:
        return self._allocate(size).ctypes.data

    def clear(self, address: int, size: int) -> None:
        ctypes.memset(address, 0, size)

    def allocate_host(self, size: int, *, shared: bool = False) -> HostMemory:
        if shared:
            memory = SharedMemory(size)
            self._shared.append(memory)
            view = memoryview((ctypes.c_char * size).from_address(memory.address)).cast("B")
            return HostMemory(view, memory.address, memory.address, memory.fd)
        array = self._allocate(size)
        return HostMemory(array.data, array.ctypes.data, array.ctypes.data)

    def _allocate(self, size: int) -> np.ndarray[Any, Any]:
        array = _aligned(size)
        array[:] = 0
        self._memory.append(array)
        return array

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    # ---- arrays
    def view(self, array: Any) -> TensorView:
        return dlpack.host_view(array)

    def wrap(self, address: int, shape: Sequence[int], dtype: str, owner: object) -> Any:
        kind = dlpack.numpy_dtype(dtype)
        count = math.prod(shape)
        if count == 0:
            return np.empty(tuple(shape), kind)
        memory = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]  # lives as long as any array over the memory
        return np.frombuffer(memory, dtype=kind).reshape(tuple(shape))  # type: ignore[call-overload]

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        kind = dlpack.numpy_dtype(dtype)
        return _aligned(math.prod(shape) * kind.itemsize).view(kind).reshape(tuple(shape))

    # ---- kernels
    def compile(self, spec: KernelSpec) -> None:
        compiler.compile(spec)

    def load(self, spec: KernelSpec) -> CpuKernel:
        _library()  # first: a kernel's own library is looked up in it
        path, library = compiler.open_library(functools.partial(compiler.compile, spec))
        return CpuKernel(spec, path, self.sm_count, library)

    def tensor_map(self, address: int, dtype: str, shape: Extents, strides: tuple[int, int], box: Extents, swizzled: bool = True) -> bytes:
        size = dlpack.numpy_dtype(dtype).itemsize
        for name, value, ok, rule in (
            ("address", address, address % 16 == 0, "must be 16-byte aligned"),
            ("strides", strides, not any(stride % 16 for stride in strides), "must be multiples of 16 bytes"),
            ("box", box, box[0] * size == _BOX_ROW_BYTES, f"its rows must have {_BOX_ROW_BYTES} bytes"),
            ("box", box, all(0 < extent <= 256 for extent in box), "must be 1 to 256 in each dimension"),
            ("shape", shape, all(0 <= extent < 2**32 for extent in shape), "must fit 32 bits"),
        ):
            if not ok:
                raise ArgumentError(f"tensor map {name}", value, rule)
        return _TENSOR_MAP.pack(_TENSOR_MAP_MAGIC, address, *shape, *strides, *box, size, swizzled)

    # ---- streams
    def stream(self, stream: Any) -> Any:
        if stream is not None:
            raise ArgumentError("stream", stream, "target cpu has no streams", "leave it out")
        return None

    def capturing(self, stream: Any) -> bool:
        return False

    def milliseconds(self, stream: Any, calls: Sequence[Callable[[], object]], untimed: int) -> float:
        begin = time.perf_counter()
        for i, one in enumerate(calls):
            if i == untimed:
                begin = time.perf_counter()
            one()
        return (time.perf_counter() - begin) * 1e3

    def launch(self, kernel: Kernel, turn: Any, grid: int, parameters: bytes | bytearray | memoryview | ctypes.Structure) -> None:
        assert isinstance(kernel, CpuKernel)
        if not 0 < grid <= kernel.max_ctas():
            raise ArgumentError("grid", grid, f"must be 1 to {kernel.max_ctas()}: that many CTAs run at once", "raise MKERNEL_CPU_SMS")
        if self.cohort is not None:
            self.cohort.launch(self.rank, kernel, grid, bytes(parameters))
        else:
            with self._lock:
                self._run(kernel, grid, bytes(parameters))

    def _run(self, kernel: CpuKernel, grid: int, parameters: bytes) -> None:
        """On this thread, in real time; comes back to Python now and then, for its signals."""
        if self._own is None:
            self._own = _Scheduler(self._seed, virtual_time=False)
        scheduler, library = self._own, self._library
        launch = scheduler.start(kernel, grid, parameters, self.rank)
        try:
            while (result := scheduler.result(launch)) is False:
                if library.run(scheduler.handle, _TURNS, library.now(scheduler.handle) + _SLICE_NS) == _BLOCKED:
                    raise Error(f"target cpu: deadlock: nothing can run, and nothing is under way\n{scheduler.report()}")
        finally:
            library.forget(scheduler.handle, launch)  # on success it is gone already
        if isinstance(result, Error):
            raise result

    @property
    def trace(self) -> int:
        """Hash of the interleaving of all launches so far (without a cohort)."""
        value: int = self._library.trace(self._own.handle) if self._own is not None else 0
        return value

    def synchronize(self) -> None:
        """Calls are synchronous: nothing to wait for."""

    def close(self) -> None:
        with self._lock:
            if self._own is not None:
                self._own.close()
                self._own = None
            for mapping, _ in self._imported:
                mapping.close()
            self._imported.clear()
            for memory in self._shared:
                memory.close()
            self._shared.clear()
            self._memory.clear()


class _Watched:
    """A put that the emulator knows of, so that it finds who reads or writes the same bytes meanwhile."""

    def __init__(self, scheduler: _Scheduler, dst: int, src: int, size: int, name: str) -> None:
        self._scheduler = scheduler
        self._put = scheduler.library.put_begins(scheduler.handle, dst, src, size, name.encode())

    def landed(self) -> None:
        """The signal is written: its bytes are there."""
        self._scheduler.library.put_lands(self._scheduler.handle, self._put)

    def ended(self) -> None:
        """It is complete: its source may change."""
        if self._scheduler.handle:
            self._scheduler.library.put_ends(self._scheduler.handle, self._put)


class CpuCopier:
    """Copies at once; see ``mkernel.runtime.device.Copier``. With a cohort it works on the cohort's thread, where engines are stepped."""

    def __init__(self, library: _Library, cohort: Cohort | None, imported: Sequence[tuple[Mapping, _File]]) -> None:
        self._library, self._cohort, self._imported = library, cohort, imported

    def start(self, dst: int, src: int, size: int) -> None:
        with self._addressed(dst) as address:
            self._library.copy(None if self._cohort is None else self._cohort._scheduler.handle, address, src, size)

    def done(self, token: object) -> bool:
        return True

    def watch(self, dst: int, src: int, size: int, name: str) -> _Watched | None:
        """Tell the emulator of a put under way, from when it was posted; None where there is no emulator that sees all ranks."""
        if self._cohort is None:
            return None
        with self._addressed(dst) as address:
            return _Watched(self._cohort._scheduler, address, src, size, name)

    def signal(self, address: int, value: int) -> None:
        with self._addressed(address) as flag:
            self._library.signal(flag, value)

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def _addressed(self, address: int) -> Iterator[int]:
        """An address in an imported segment, as the ranks of that node spell it."""
        if self._cohort is None:
            yield address
            return
        segments = self._cohort._segments
        with segments.lock:
            for mapping, file in self._imported:
                if mapping.address <= address < mapping.address + mapping.size:
                    base = segments.find(file)
                    yield address if base is None else base + address - mapping.address
                    return
            yield address


def _aligned(size: int) -> np.ndarray[Any, Any]:
    """Uninitialized bytes, aligned as device memory would be."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]
