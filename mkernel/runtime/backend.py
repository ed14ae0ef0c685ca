"""What the runtime needs from a target. ``cuda/`` and ``cpu/`` implement it; everything above is identical for both."""

from __future__ import annotations

import abc
import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from mkernel.runtime.arrays.libraries import Libraries, Library, TorchLibrary
from mkernel.runtime.arrays.views import TensorView
from mkernel.runtime.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from mkernel.jit.spec import KernelSpec
    from mkernel.memory.segment import Segment

__all__ = ["Backend", "Copier", "Extents", "HostMemory", "Kernel", "MatrixMaps", "Rows", "Strides", "TensorView"]

# Of a tensor map with three or four dimensions: its extents or those of its box, innermost first; bytes from one index to the next, of all
# dimensions but the innermost.
Extents = tuple[int, int, int] | tuple[int, int, int, int]
MatrixMaps = Callable[..., bytes]  # (address, rows, *rows of loads or stores) -> their tensor maps, one behind the other
Strides = tuple[int, int] | tuple[int, int, int]


@dataclasses.dataclass(slots=True)
class HostMemory:
    """Host memory that the device can address (pinned on cuda). ``view`` is writable, zeroed at first."""

    view: memoryview
    address: int  # as the device sees it
    host_address: int
    fd: int = -1  # descriptor of shared memory, which another process can map; the device owns it


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """``rows`` rows of ``bytes`` bytes to be copied within a device's memory. Pitches are bytes from one row to the next."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    bytes: int
    rows: int

    @property
    def is_whole(self) -> bool:
        """Whether there are no gaps between the rows, here or there."""
        return self.rows == 1 or self.target_pitch == self.source_pitch == self.bytes


class Copier(Protocol):
    """Moves bytes between segments mapped in this process, beside running kernels. Used by one engine thread."""

    def start(self, dst: int, src: int, size: int) -> Any:
        """Begin a copy. Returns a token for ``done``."""

    def done(self, token: Any) -> bool:
        """Whether that copy has ended, with its bytes visible to whoever sees a later ``signal``. Never blocks."""

    def signal(self, address: int, value: int) -> None:
        """Write a 64-bit flag, after all copies reported done (release)."""

    def close(self) -> None: ...


class Kernel(abc.ABC):
    """A loaded kernel."""

    @abc.abstractmethod
    def max_ctas(self) -> int:
        """CTAs that are co-resident on this device: the largest grid that may be launched, but for ``KernelSpec.clusters_are_apart``."""


class Backend(abc.ABC):
    """One rank's device: memory, streams, modules, launches. All methods may be called from any thread of the process."""

    target: str  # "cuda" or "cpu"
    name: str
    sm_count: int
    xp: Any  # cupy or numpy
    compiles_ahead: bool = False  # kernels compile so fast that all kernels of a problem are compiled before they are needed
    pci_address: str = ""  # "0000:1b:00.0"; empty on cpu

    # ---- memory
    @abc.abstractmethod
    def segment(self, size: int, local_rank: int, ranks_per_node: int, *, host: bool = False) -> Segment:
        """A symmetric segment (rounded up to the granularity). ``host``: in host memory, which engines write and kernels address."""

    @abc.abstractmethod
    def import_segment(self, fd: int, size: int, *, host: bool = False) -> int:
        """Map one rank's part of a segment of another (emulated) node, for the engine's use. Freed with the device. Returns its address."""

    def kernel_address(self, address: int) -> int:
        """Where this rank's kernels address what ``import_segment`` has mapped at ``address``. It stays there as long as the device."""
        return address

    @abc.abstractmethod
    def copier(self) -> Copier:
        """What moves bytes between mapped segments for the emulated transport. It never waits for a kernel, or for anyone who does."""

    @abc.abstractmethod
    def allocate(self, size: int) -> int:
        """Private device memory, zeroed; freed with the device. Returns its address."""

    @abc.abstractmethod
    def clear(self, address: int, size: int) -> None:
        """Zero private device memory, which no kernel may be using. Returns when it is done."""

    @abc.abstractmethod
    def write(self, address: int, data: bytes) -> None:
        """Write to private device memory, which no kernel may be using. Returns when it is done."""

    @abc.abstractmethod
    def allocate_host(self, size: int, *, shared: bool = False) -> HostMemory:
        """Host memory that the device can address. ``shared``: another process can map it, by its ``fd``."""

    @abc.abstractmethod
    def read(self, address: int, size: int) -> bytes:
        """Copy device memory to the host (synchronizes; for traces and tests)."""

    def clock(self) -> Clock:
        """How the clock that kernels read differs from the host's. Of target cpu: not at all. May wait for running kernels."""
        return Clock(0, 0)

    # ---- arrays
    @abc.abstractmethod
    def view(self, array: Any) -> TensorView:
        """Address, shape, strides and dtype of anything that speaks DLPack or an array interface, without a copy.

        Raises ArgumentError when the array is not on this device (or not an array at all).
        """

    def key(self, array: Any) -> Hashable:
        """Arrays of equal keys have equal views. Cheaper than a view, for calls that are repeated; raises what ``view`` raises."""
        return self.view(array)

    @functools.cached_property
    def libraries(self) -> Libraries:
        """The library of arrays by their type."""
        return Libraries(self, Library(self))

    def torch_library(self, torch: Any) -> TorchLibrary:
        """Torch's tensors on this device."""
        return TorchLibrary(self, torch, "cpu")

    @abc.abstractmethod
    def wrap(self, address: int, shape: Sequence[int], dtype: str, owner: object) -> Any:
        """An ``xp`` array over existing memory, keeping ``owner`` alive."""

    @abc.abstractmethod
    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """A new ``xp`` array in ordinary memory, on the current stream of ``xp``."""

    # ---- kernels
    @abc.abstractmethod
    def compile(self, spec: KernelSpec) -> None:
        """Compile a kernel into the cache, for ``load``. May be called beside running kernels. Raises CompileError."""

    @abc.abstractmethod
    def load(self, spec: KernelSpec) -> Kernel:
        """Compile (or find in the cache) and load. Raises CompileError. Nothing may be spinning on this device."""

    @abc.abstractmethod
    def tensor_map(self, address: int, dtype: str, shape: Extents, strides: Strides, box: Extents, swizzled: bool = True) -> bytes:
        """A 128-byte tensor map: three or four dimensions, innermost (contiguous) first, ``strides`` in bytes of all but the first.

        The box's inner extent is 64 16-bit elements, in shared memory with the 128-byte swizzle or, if not ``swizzled``, one after the
        other. Out-of-bounds elements read as zero and are not written.
        """

    def matrix_maps(self, dtype: str, columns: int, row_bytes: int, planes: int) -> MatrixMaps:
        """What makes ``tensor_map`` of matrices of so many columns, ``planes`` of them one after the other.

        Made from an address, rows, and the rows of one or several loads or stores, of 64 columns each: as many maps, one behind the
        other.

        Used by one thread at a time.
        """

        def make(address: int, rows: int, *boxes: int) -> bytes:
            shape, strides = (columns, rows, planes), (row_bytes, rows * row_bytes)
            return b"".join([self.tensor_map(address, dtype, shape, strides, (64, box, 1)) for box in boxes])

        return make

    # ---- streams
    @abc.abstractmethod
    def stream(self, stream: Any) -> Any:
        """Resolve a user's ``stream=`` (None, int or an object with ``__cuda_stream__``); what is resolved resolves to itself.

        None: the current stream of ``xp``. Hashable, comparable.
        """

    @abc.abstractmethod
    def capturing(self, stream: Any) -> bool:
        """Whether a CUDA graph is being captured on this stream (never on cpu)."""

    def order(self, stream: Any) -> Any:
        """Make what is launched next on ``stream`` (as ``stream()`` has resolved it) run after everything launched before.

        Returns what ``launch`` takes; nothing else is launched in between. Raises what stands in the way before anything is launched.
        """
        return stream

    def join(self, ctas: int) -> None:  # noqa: B027 (where a launch returns when its kernel has ended, there is nothing to order)
        """Say that this world's kernels hold up to ``ctas`` SMs while they wait for other ranks.

        Where all worlds of the process that have said so of one GPU need more SMs than it has, ``order`` is among all of their launches.
        """

    def captures(self, turn: Any) -> bool:
        """Whether what ``order`` has returned belongs to a graph that is being captured (never on cpu)."""
        return False

    @abc.abstractmethod
    def launch(self, kernel: Kernel, turn: Any, grid: int, parameters: bytes | bytearray | memoryview | ctypes.Structure) -> None:
        """Launch ``grid`` CTAs with one parameter struct, which may be changed afterwards. ``turn``: what ``order`` has returned.

        cuda: asynchronous. cpu: returns when the kernel has ended (releases the GIL).
        """

    @abc.abstractmethod
    def accompany(self, kernel: Kernel, turn: Any, grid: int, parameters: bytes | ctypes.Structure) -> None:
        """Launch a kernel that runs beside the next ``launch``, whose ``turn`` this is, and ends by itself soon after that.

        It starts once everything before that launch has ended on its stream, and needs room beside it. Nothing waits for it but
        ``synchronize``; on cpu that ``launch``.
        """

    def proceed(self, turn: Any, action: Callable[[Any], None]) -> None:
        """Do ``action``, which enqueues something on the stream of the launch that was just made (``turn``), before any later launch."""
        action(None)

    def after(self, stream: Any, action: Callable[[], object]) -> None:
        """Do ``action``, which reads on ``stream`` what the last launch there has left on the heap, before any later launch."""
        action()

    def copying(self, moves: Sequence[Rows]) -> Callable[[Any], None]:
        """What copies rows within this device's memory, in order, on the stream that it is given; for copies that come again."""

        def copy(stream: Any) -> None:
            for move in moves:
                width, rows = (move.bytes * move.rows, 1) if move.is_whole else (move.bytes, move.rows)
                for row in range(rows):
                    ctypes.memmove(move.target + row * move.target_pitch, move.source + row * move.source_pitch, width)

        return copy

    def release(self) -> None:  # noqa: B027 (where launches are synchronous, nothing is kept)
        """Let go of memory that was kept for launches which have ended. Never blocks."""

    @abc.abstractmethod
    def milliseconds(self, stream: Any, calls: Sequence[Callable[[], object]], untimed: int) -> float:
        """Make these calls, which use ``stream``, and wait for them. Returns their milliseconds, without the first ``untimed`` calls."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until everything launched has ended (sleeping, not spinning)."""

    @abc.abstractmethod
    def close(self) -> None: ...
