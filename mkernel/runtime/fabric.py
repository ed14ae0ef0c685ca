"""The network that SMs play for emulated nodes (``kernels_src/ops/fabric.cuh``): its kernel, launched beside each call of a world."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mkernel import abi
from mkernel.errors import ArgumentError, TransportError
from mkernel.jit.spec import KernelSpec
from mkernel.transport.base import Put
from mkernel.transport.emulated import check_put

if TYPE_CHECKING:
    from mkernel.runtime.backend import Backend

__all__ = ["SMS", "Fabric", "FabricLink", "Parameters", "Stamps", "own_ns", "spec_of"]

SMS = 4  # of a GPU that play its network
_LOOK_SECONDS = 0.02  # between two looks at what the kernel reports
_PROGRESS = 16  # kProgress
_STORAGE_BYTES = 16 * abi.MAX_RANKS + 16 + 8 * 256 + 4 * 32 + 24 * abi.RING_SLOTS  # Storage
# What the fabric itself takes from a command to its flag's being seen, which is part of the latency that is asked for.
# On GPUs measured: `python tests/gpu/fabric.py --own auto` (docs/fabric.md).
_OWN_NS = {"cpu": 0, "cuda": 2452}
_u64 = ctypes.c_uint64


@dataclasses.dataclass(frozen=True, slots=True)
class _Shape:
    ctas: int
    threads: int
    piece_bytes: int  # what one warp copies at a time


_SHAPES = {"cuda": _Shape(SMS, 512, 4096), "cpu": _Shape(2, 64, 1024)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FabricLink:
    """How fast it is and how it orders puts; see ``mkernel.transport.emulated.EmulatedTransport``."""

    gigabytes_per_second: float
    latency_us: float
    reorder_us: float = 0.0
    seed: int = 0


class _Report(ctypes.Structure):
    _fields_ = [("bad", _u64), ("reserved", _u64 * 7), ("command", abi.Command)]


class Parameters(ctypes.Structure):
    """``Parameters`` of ``kernels_src/ops/fabric.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("peers", _u64),
        ("progress", _u64),
        ("host_ring", _u64),
        ("report", _u64),
        ("heap_bytes", _u64),
        ("signal_bytes", _u64),
        ("femtoseconds_per_byte", _u64),
        ("latency_ns", _u64),
        ("reorder_ns", _u64),
        ("seed", _u64),
        ("stamps", _u64),
        ("padding", _u64 * 5),
    ]


class Stamps(ctypes.Structure):
    """``Stamps`` of ``kernels_src/ops/fabric.cuh``: when a lone put has reached each stage, in ns of the device's clock."""

    _fields_ = [(name, _u64) for name in ("seen", "due", "found", "copied", "published", "landed", "raised", "reserved")]


def spec_of(target: str, *, stamps: bool = False) -> KernelSpec:
    """The fabric's kernel for that target. With ``stamps`` it notes when each put reaches each stage."""
    shape = _SHAPES[target]
    constants = (("kPieceBytes", shape.piece_bytes), ("kStamps", int(stamps)))
    return KernelSpec("fabric", constants, shape.threads, _STORAGE_BYTES, ctypes.sizeof(Parameters))


def own_ns(target: str) -> int:
    """What the fabric takes itself of the latency that is asked for, as far as that is known."""
    return _OWN_NS[target]


class Fabric:
    """One rank's fabric. Compiles and loads its kernel: nothing may be spinning on the device.

    Parameters
    ----------
    backend
        The rank's device.
    header
        What the rank's kernels know of their rank; its ring is device memory.
    peers
        By rank, the addresses of its (data heap, signal segment) for this rank's kernels. A put to any other rank is an error.
    host_ring
        Address, for device and host, of a ring in host memory: there the host counts launches.
    heap_bytes, signal_bytes
        Sizes of every rank's segments.
    link
        Bandwidth, latency and order.
    own_ns
        What it takes itself of the latency; None: what is known of the target.
    stamps
        Whether it notes when each put reaches each stage.

    Attributes
    ----------
    stamps
        Address of its ``Stamps``, one for each slot of the ring; 0: it notes none.
    """

    def __init__(
        self,
        backend: Backend,
        header: abi.World,
        peers: Mapping[int, tuple[int, int]],
        host_ring: int,
        heap_bytes: int,
        signal_bytes: int,
        link: FabricLink,
        *,
        own_ns: int | None = None,
        stamps: bool = False,
    ) -> None:
        shape = _SHAPES[backend.target]
        self._backend, self._peers, self._rank = backend, dict(peers), header.rank
        self._sizes = heap_bytes, signal_bytes
        self._kernel, self._ctas = backend.load(spec_of(backend.target, stamps=stamps)), shape.ctas
        table = (_u64 * (2 * header.size))()
        for rank, (heap, signals) in peers.items():
            table[2 * rank], table[2 * rank + 1] = heap, signals
        table_address = backend.allocate(ctypes.sizeof(table))
        backend.write(table_address, bytes(table))
        report = backend.allocate_host(ctypes.sizeof(_Report))
        self._report_memory = report
        self._report = _Report.from_address(report.host_address)
        rate = link.gigabytes_per_second
        own = _OWN_NS[backend.target] if own_ns is None else own_ns
        self.stamps = backend.allocate(ctypes.sizeof(Stamps) * abi.RING_SLOTS) if stamps else 0
        self._parameters = Parameters(
            world=header,
            peers=table_address,
            progress=backend.allocate(8 * (_PROGRESS + shape.ctas * shape.threads // 32)),
            host_ring=host_ring,
            report=report.address,
            heap_bytes=heap_bytes,
            signal_bytes=signal_bytes,
            femtoseconds_per_byte=round(1e6 / rate) if rate else 0,
            latency_ns=max(round(link.latency_us * 1e3) - own, 0),
            reorder_ns=round(link.reorder_us * 1e3),
            seed=(link.seed << 8) + header.rank,
            stamps=self.stamps,
        )
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def admit(self, captured: bool) -> None:
        """Raise ArgumentError for a call that it could not serve: one that is captured in a graph."""
        if captured:
            rule = "is being captured in a graph, whose replays no fabric of SMs would serve"
            raise ArgumentError("stream", "of the call", rule, "set MKERNEL_EMULATED_ENGINE=host, or make the call outside the capture")

    def serve(self, turn: Any, launch: int) -> None:
        """Launch it beside the next launch, whose number is ``launch``. ``turn``: what ``Backend.order`` has returned for that one."""
        self._parameters.world.launch = launch
        self._backend.accompany(self._kernel, turn, self._ctas, self._parameters)

    def check(self) -> None:
        """Raise what its kernel has reported: a put that cannot be carried out. Raises TransportError."""
        if not self._report.bad:
            return
        command = self._report.command
        put = Put(command.ticket - 1, *(getattr(command, name) for name in Put._fields[1:]))
        check_put(put, self._rank, self._peers, *self._sizes)
        raise TransportError(f"the fabric of rank {self._rank} has stopped at put {put.ticket}", peer=put.dst_rank, op="put_signal")

    def watch(self, on_error: Callable[[TransportError], object]) -> None:
        """Look at its report again and again, on a thread of its own; ``on_error`` hears of it."""
        self._thread = threading.Thread(target=self._watch, args=(on_error,), name=f"mkernel-fabric-{self._rank}", daemon=True)
        self._thread.start()

    def _watch(self, on_error: Callable[[TransportError], object]) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            try:
                self.check()
            except TransportError as error:
                on_error(error)
                return

    def close(self) -> None:
        """Look no more. Its kernels have ended, or end with those of the world. Safe to call twice."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._report = _Report()  # the memory behind it goes
