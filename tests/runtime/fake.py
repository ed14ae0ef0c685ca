"""A device without kernels: memory is real (memfd), a "kernel" is a Python function that does what ``kernels_src/comm/sync.cuh`` does."""

from __future__ import annotations

import ctypes
import dataclasses
import queue
import threading
import time
from typing import Any

import numpy as np

from mkernel import abi
from mkernel.errors import ArgumentError, CallError, CallReport, CompileError
from mkernel.jit.spec import KernelSpec
from mkernel.memory.memfd import MemfdSegment, SharedMemory, import_fd
from mkernel.runtime.backend import Backend, HostMemory, Kernel, TensorView

MASK = (1 << abi.CHECK_BITS) - 1


class Parameters(ctypes.Structure):
    _fields_ = [("world", abi.World), ("silent_rank", ctypes.c_uint64), ("delay_ns", ctypes.c_uint64), ("code", ctypes.c_uint64)]


@dataclasses.dataclass(frozen=True)
class FakePlan:
    """Plans are told apart by ``digest``; ``name`` chooses the behaviour of the kernel."""

    op: str = "null"
    digest: int = 0x1234
    name: str = "enter"
    workspace_bytes: int = 0
    flag_words: int = 0
    packet_bytes: int = 0
    staging_bytes: int = 0
    grid: int = 4

    @property
    def spec(self) -> KernelSpec:
        return KernelSpec(self.name, (("kDigest", self.digest),), 128, 0, ctypes.sizeof(Parameters))

    def flag_name(self, rank: int, index: int) -> str:
        return f"flag {index}"

    def describe(self) -> str:
        return f"{self.op}(digest {self.digest:#x})\nsecond line"


class RefusedError(CallError):
    """What a ``RefusingPlan`` makes of a report."""


class RefusingPlan(FakePlan):
    """Its kernel reports ``Parameters.code``, unless that is 0."""

    def call_error(self, report: CallReport) -> CallError:
        return RefusedError(f"call {report.call} of {report.op}: code {report.code}", report)


class FakeKernel(Kernel):
    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

    def max_ctas(self) -> int:
        return 4


class MemoryCopier:
    signals = 0

    def start(self, dst: int, src: int, size: int) -> None:
        ctypes.memmove(dst, src, size)

    def done(self, token: object) -> bool:
        return True

    def signal(self, address: int, value: int) -> None:
        self.signals += 1
        ctypes.c_uint64.from_address(address).value = value

    def close(self) -> None:
        pass


class GpuSegment(MemfdSegment):
    """Stands for GPU memory: only a network card gets in, by another descriptor."""

    mappable = False

    def dmabuf(self) -> int:
        return self.fd


class FakeBackend(Backend):
    """``target="cuda"``: launches return at once and run on a worker thread, in order. ``"cpu"``: launches run to their end."""

    def __init__(self, target: str, device: int | str, rank: int) -> None:
        self.target, self.name, self.sm_count, self.xp = target, "fake", 4, np
        self.rank = rank
        self.blocks: list[Any] = []
        self.mappings: list[Any] = []
        self.copiers: list[MemoryCopier] = []
        self.launches: list[tuple[Any, ...]] = []
        self.orders: list[Any] = []
        self.capturing_streams: set[Any] = set()
        self.closed = False
        self.broken_specs: set[int] = set()
        self.work: queue.Queue[Any] = queue.Queue()
        if target == "cuda":
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (item := self.work.get()) is not None:
            item()
            self.work.task_done()

    # ---- memory
    def segment(self, size: int, local_rank: int, ranks_per_node: int, *, host: bool = False) -> MemfdSegment:
        return (MemfdSegment if host or self.target == "cpu" else GpuSegment)(size, local_rank, ranks_per_node)

    def import_segment(self, fd: int, size: int, *, host: bool = False) -> int:
        self.mappings.append(import_fd(fd, size))
        return self.mappings[-1].address

    def copier(self) -> MemoryCopier:
        self.copiers.append(MemoryCopier())
        return self.copiers[-1]

    def allocate(self, size: int) -> int:
        self.blocks.append(ctypes.create_string_buffer(size + 64))
        return -(-ctypes.addressof(self.blocks[-1]) // 64) * 64

    def clear(self, address: int, size: int) -> None:
        ctypes.memset(address, 0, size)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def allocate_host(self, size: int, *, shared: bool = False) -> HostMemory:
        fd = -1
        if shared:
            memory = SharedMemory(size)
            self.mappings.append(memory)
            address, fd = memory.address, memory.fd
        else:
            address = self.allocate(size)
        return HostMemory(memoryview((ctypes.c_char * size).from_address(address)).cast("B"), address, address, fd)

    def read(self, address: int, size: int) -> bytes:
        self.synchronize()
        return ctypes.string_at(address, size)

    # ---- arrays
    def view(self, array: Any) -> TensorView:
        return TensorView(array.ctypes.data, array.shape, array.strides, array.dtype.name)

    def wrap(self, address: int, shape: Any, dtype: str, owner: object) -> Any:
        count = int(np.prod(shape, dtype=np.int64))
        if not count:
            return np.empty(shape, dtype)
        memory = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return np.frombuffer(memory, dtype).reshape(shape)

    def empty(self, shape: Any, dtype: str) -> Any:
        return np.empty(shape, dtype)

    # ---- kernels
    def compile(self, spec: KernelSpec) -> None: ...

    def load(self, spec: KernelSpec) -> FakeKernel:
        if spec.name == f"broken_on_{self.rank}":
            raise CompileError("broken", log="line 1: no", path="/nowhere")
        return FakeKernel(spec)

    def tensor_map(self, *args: Any, **kwargs: Any) -> bytes:
        return bytes(128)

    def stream(self, stream: Any) -> Any:
        if stream == "bad":
            raise ArgumentError("stream", stream, "is no stream")
        return 0 if stream is None else stream

    def capturing(self, stream: Any) -> bool:
        return stream in self.capturing_streams

    def order(self, stream: Any) -> Any:
        if stream == "gone":
            raise RuntimeError("the stream is gone")
        self.orders.append(stream)
        return stream

    def milliseconds(self, stream: Any, calls: Any, untimed: int) -> float:
        for one in calls:
            one()
        return 1.0

    def launch(self, kernel: Kernel, turn: Any, grid: int, parameters: Any) -> None:
        assert isinstance(kernel, FakeKernel)
        if kernel.spec.name == f"refused_on_{self.rank}":
            raise RuntimeError("the launch was refused")
        given = Parameters.from_buffer_copy(parameters)
        self.launches.append((kernel.spec.name, turn, grid, given))
        if self.target == "cuda":
            self.work.put(lambda: run_kernel(given))
        else:
            run_kernel(given)

    def accompany(self, kernel: Kernel, turn: Any, grid: int, parameters: Any) -> None:
        raise NotImplementedError("its kernels are functions: nothing plays a network beside them")

    def synchronize(self) -> None:
        self.work.join()

    def close(self) -> None:
        self.closed = True
        self.work.put(None)
        for mapping in self.mappings:
            mapping.close()
        self.mappings.clear()


def _word(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address)


def run_kernel(given: Parameters) -> None:
    """Enter, wait for every rank of the node to enter, leave: the protocol of sync.cuh."""
    world = given.world
    control = abi.ControlBlock.from_address(world.control)
    if control.failed:
        return
    epoch = control.epoch + 1
    if epoch & abi.HALTED:  # skipped
        control.epoch = epoch
        return
    time.sleep(given.delay_ns * 1e-9)
    offset = ((epoch & 1) * abi.MAX_RANKS) * 8
    if given.silent_rank != world.rank + 1:
        for peer in range(world.ranks_per_node):
            _word(world.signal_base + peer * world.signal_stride + offset + 8 * world.rank).value = epoch << abi.CHECK_BITS | world.check
    first = world.node * world.ranks_per_node
    for peer in range(first, first + world.ranks_per_node):
        if peer != world.rank and not _wait_entered(world, control, epoch, peer, offset):
            return
    if given.code:  # refused
        block = abi.HostBlock.from_address(world.host)
        block.report = abi.CallReport(epoch, world.problem, world.rows, world.schedule, 0, (given.code, 8, 9))
        block.reported = given.code
        epoch |= abi.HALTED
    control.epoch = epoch


def _wait_entered(world: Any, control: Any, epoch: int, peer: int, offset: int) -> bool:
    mine = world.signal_base + world.local_rank * world.signal_stride
    flag, expected = _word(mine + offset + 8 * peer), epoch << abi.CHECK_BITS | world.check
    deadline = time.monotonic() + world.entry_timeout_ns * 1e-9
    while True:
        seen = flag.value
        if seen >> abi.CHECK_BITS >= epoch:
            return seen == expected or _fail(world, control, abi.State.mismatch, epoch, peer, expected, seen)
        if abi.SignalHeader.from_address(mine).abort or abi.HostBlock.from_address(world.host).abort:
            return _fail(world, control, abi.State.aborted, epoch, peer, expected, seen)
        if time.monotonic() > deadline:
            return _fail(world, control, abi.State.timed_out, epoch, peer, expected, seen)
        time.sleep(0.0005)


def _fail(world: Any, control: Any, state: int, epoch: int, peer: int, expected: int, seen: int) -> bool:
    control.failed = state
    block = abi.HostBlock.from_address(world.host)
    block.rank, block.role, block.cta = world.rank, abi.Role.compute, 3
    block.flag_kind, block.flag_index, block.peer = abi.FlagKind.entry, peer, peer
    block.epoch, block.expected, block.seen = epoch, expected, seen
    block.problem, block.rows, block.schedule = world.problem, world.rows, world.schedule
    block.state = state
    for local in range(world.ranks_per_node):
        abi.SignalHeader.from_address(world.signal_base + local * world.signal_stride).abort = world.rank + 1
    return False
