"""Host time of a cached call without a GPU: ``python -m tests.runtime.host_path [--profile] [--calls 20000]``.

The whole path of a call runs as on a GPU, ``ctypes`` included, down to a driver library of a few lines of C whose functions return at
once. What is measured is mkernel's own share: on a GPU the driver's launch and event come on top. Arrays are stand-ins whose attributes
cost about what CuPy's and torch's cost. Everything runs in a process of its own, because the driver is replaced.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import gc
import itertools
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.runtime.fake import FakeBackend

CONTEXT = 7

ROWS = COLUMNS = 256
SOURCE = """
#include <stdint.h>
#include <string.h>
int cuCtxGetCurrent(void **context) { *context = (void *)7; return 0; }
int cuStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *number, void *graph, void *nodes, void *count)
{ *status = 0; return 0; }
int cuStreamGetId(void *stream, uint64_t *number) { *number = (uintptr_t)stream; return 0; }
int cuLaunchKernelEx(void *config, void *function, void *arguments, void *extra) { return 0; }
int cuTensorMapEncodeTiled(void *map, int kind, int rank, void *address, void *extents, void *strides, void *box, void *steps,
                           int interleave, int swizzle, int promotion, int fill)
{ memset(map, kind + rank + swizzle, 128); return 0; }
#define SUCCEEDS(name) int name(void) { return 0; }
SUCCEEDS(cuEventRecord) SUCCEEDS(cuEventQuery) SUCCEEDS(cuStreamWaitEvent) SUCCEEDS(cuStreamUpdateCaptureDependencies)
SUCCEEDS(cuGraphAddEventRecordNode) SUCCEEDS(cuGraphAddDependencies) SUCCEEDS(cuGraphRemoveDependencies) SUCCEEDS(cuStreamSynchronize)
SUCCEEDS(cuMemsetD8Async) SUCCEEDS(cuMemcpyDtoDAsync_v2) SUCCEEDS(cuMemcpy2DAsync_v2)
"""


def install_driver(folder: str) -> None:
    """Build the driver library and load it by the driver's name, so that whoever opens that name gets it."""
    source, library = Path(folder, "driver.c"), Path(folder, "libdriver.so")
    source.write_text(SOURCE)
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    ctypes.CDLL(str(library))
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = Bindings()  # type: ignore[attr-defined]
    sys.modules["cuda.bindings"] = bindings


class Bindings:
    """``cuda.bindings.driver``: every function succeeds."""

    def __init__(self) -> None:
        self._handles = itertools.count(0x1000, 16)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return Constants()
        if name in ("cuDeviceGetName", "cuDeviceGetPCIBusId"):
            return lambda *arguments: (0, b"stand-in")
        if name in ("cuEventCreate", "cuStreamCreate"):
            return lambda *arguments: (0, next(self._handles))
        if name == "cuDevicePrimaryCtxRetain":
            return lambda *arguments: (0, CONTEXT)
        return lambda *arguments: (0, 132)


class Constants:
    """An enumeration."""

    def __getattr__(self, name: str) -> int:
        return 16

    def __call__(self, value: int) -> Any:
        return types.SimpleNamespace(name=f"status {value}")


class Memory:
    """``cupy.cuda.MemoryPointer``."""

    __slots__ = ("device_id", "ptr")

    def __init__(self, address: int) -> None:
        self.ptr, self.device_id = address, 0


class CupyArray:
    """``cupy.ndarray``."""

    __slots__ = ("data", "dtype", "shape", "strides")

    def __init__(self, shape: tuple[int, ...], dtype: Any, address: int) -> None:
        self.shape, self.dtype, self.data = shape, dtype, Memory(address)
        self.strides = (shape[1] * 2, 2)


class Tensor:
    """``torch.Tensor``."""

    device, layout, requires_grad, dtype = "cuda:0", "strided", False, "bfloat16"

    def __init__(self, shape: tuple[int, ...], address: int) -> None:
        self.shape, self._address, self._stride = shape, address, (shape[1], 1)
        # As attributes: torch's methods are functions of C.
        self.data_ptr = types.MethodType(_address, self)
        self.stride = types.MethodType(_stride, self)
        self.get_device = int
        self.is_neg = self.is_conj = bool
        self.element_size = lambda: 2


def _address(tensor: Tensor) -> int:
    return tensor._address


def _stride(tensor: Tensor) -> tuple[int, ...]:
    return tensor._stride


class Arrays:
    """Addresses that no other array has."""

    def __init__(self) -> None:
        self._addresses = itertools.count(0x7F0000000000, 16384 * COLUMNS * 2)

    def cupy(self, rows: int = ROWS) -> CupyArray:
        return CupyArray((rows, COLUMNS), np.dtype(ml_dtypes.bfloat16), next(self._addresses))

    def torch(self) -> Tensor:
        return Tensor((ROWS, COLUMNS), next(self._addresses))

    @staticmethod
    def pooled(make: Callable[[], Any]) -> Callable[..., Any]:
        """A library's ``empty``, whose pool gives the same memory again and again."""
        pool = itertools.cycle([make() for _ in range(4)])
        return lambda *arguments, **options: next(pool)


class Ordinal:
    """``cupy.cuda.Device``."""

    def __init__(self, ordinal: int) -> None: ...

    def use(self) -> None: ...


def install_libraries(arrays: Arrays) -> Any:
    """Modules ``cupy`` and ``torch``; what both have as their current stream."""
    now = types.SimpleNamespace(ptr=0)
    cupy, torch = types.ModuleType("cupy"), types.ModuleType("torch")
    runtime = types.SimpleNamespace(getDevice=int, pointerGetAttributes=None)
    cupy.cuda = types.SimpleNamespace(get_current_stream=lambda ordinal: now, Device=Ordinal, runtime=runtime)  # type: ignore[attr-defined]
    cupy.ndarray, cupy.dtype, cupy.empty = CupyArray, np.dtype, arrays.pooled(arrays.cupy)  # type: ignore[attr-defined]
    for name in ("bfloat16", "float16", "float32", "float64", "int32", "int64", "strided"):
        setattr(torch, name, name)
    torch.Tensor, torch.device, torch.empty = Tensor, str, arrays.pooled(arrays.torch)  # type: ignore[attr-defined,assignment]
    torch._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: now.ptr)  # type: ignore[attr-defined]
    sys.modules.update(cupy=cupy, torch=torch)
    return now


def make_backend(target: str, device: int | str, rank: int) -> Any:
    """The real device of target cuda, whose memory is the host's and whose kernels are none."""
    from mkernel.runtime.cuda.backend import CudaBackend
    from mkernel.runtime.cuda.kernel import Config, CudaKernel

    class HostDevice(CudaBackend):
        segment, import_segment, copier = FakeBackend.segment, FakeBackend.import_segment, FakeBackend.copier  # type: ignore[assignment]
        allocate, clear, allocate_host = FakeBackend.allocate, FakeBackend.clear, FakeBackend.allocate_host  # type: ignore[assignment]

        def __init__(self) -> None:
            super().__init__(0)
            self.blocks, self.mappings, self.copiers = list[Any](), list[Any](), list[Any]()

        def compile(self, spec: Any) -> None: ...

        def load(self, spec: Any) -> CudaKernel:
            kernel = object.__new__(CudaKernel)
            kernel.spec, kernel.function, kernel.argument_list = spec, 1, (ctypes.c_void_p * 1)()
            kernel.config, kernel._max_ctas = Config((1, 1, 1), (spec.threads, 1, 1), 0, None, None, 0), 132
            return kernel

    return HostDevice()


def measure(call: Callable[[], object], world: Any, calls: int, rounds: int = 9) -> tuple[float, float]:
    """Microseconds of one call: the fastest round, and the median of the rounds."""
    found = []
    gc.disable()
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        for _ in range(calls // rounds):
            call()
        found.append((time.perf_counter_ns() - begin) / 1e3 / (calls // rounds))
    gc.enable()
    world.synchronize()
    return min(found), statistics.median(found)


def programs(world: Any, arrays: Arrays, now: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is measured."""
    import mkernel as mk

    for name, make in (("CuPy", arrays.cupy), ("torch", arrays.torch)):
        a, b, c = make(), make(), make()
        for stream, what in ((0, "the legacy stream"), (0x5000, "a stream")):
            now.ptr = stream
            yield f"{name}, out given, {what}", lambda a=a, b=b, c=c: mk.allgather_gemm(a, b, out=c, world=world)
        yield f"{name}, out new, a stream", lambda a=a, b=b: mk.allgather_gemm(a, b, world=world)
        kept = make()
        yield f"{name}, gathered, a stream", lambda a=a, b=b, c=c, g=kept: mk.allgather_gemm(a, b, out=c, gathered=g, world=world)
        yield f"{name}, out given, stream given", lambda a=a, b=b, c=c: mk.allgather_gemm(a, b, out=c, world=world, stream=0x5000)
        prepared = mk.plan("allgather_gemm", a, b, world=world)
        yield f"{name}, plan.run", lambda a=a, b=b, c=c, run=prepared.run: run(a, b, out=c)


def pieces(world: Any, arrays: Arrays) -> Iterator[tuple[str, Callable[[], object]]]:
    """Parts of a call by themselves."""
    import mkernel as mk

    backend = world.backend
    a, b, c = arrays.cupy(), arrays.cupy(), arrays.cupy()
    mk.allgather_gemm(a, b, out=c, world=world)
    bound = next(bound for bound in reversed(world.bound_calls.values()) if hasattr(bound, "executable"))
    library = backend.libraries[type(a)]
    yield "a key", lambda: library.key(a)
    yield "the stream", library.stream
    yield "World.launch", lambda: world.launch(bound.executable, bound.parameters, 0x5000)
    yield "order", lambda: backend.order(0x5000)
    turn = backend.order(0x5000)
    yield "the device's launch", lambda: backend.launch(bound.executable.kernel, turn, 1, bound.parameters)
    maps = itertools.count(0x7E0000000000, 128)
    yield "a new tensor map", lambda: backend.tensor_map(next(maps), "bfloat16", (256, 256, 1), (512, 512 * 256), (64, 128, 1))
    yield "a known tensor map", lambda: backend.tensor_map(0x7E0000000000, "bfloat16", (256, 256, 1), (512, 512 * 256), (64, 128, 1))
    yield "a new binding", lambda: mk.allgather_gemm(arrays.cupy(), b, out=c, world=world)
    numbers = itertools.cycle(range(1, 16384))

    def new_size() -> None:
        rows = next(numbers)
        world.executables.clear()
        mk.allgather_gemm(arrays.cupy(rows), b, out=arrays.cupy(rows), world=world)

    yield "a new size", new_size


def main() -> int:
    """Print microseconds per call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="where the time of those goes that --only names")
    parser.add_argument("--only", default="", help="programs whose names begin so")
    parser.add_argument("--calls", type=int, default=20000, help="of each program")
    arguments = parser.parse_args()
    arrays = Arrays()
    now = install_libraries(arrays)
    with tempfile.TemporaryDirectory() as folder:
        install_driver(folder)

        from mkernel.runtime.launch import run
        from mkernel.runtime.options import Options

        def use(world: Any) -> None:
            for name, call in itertools.chain(programs(world, arrays, now), pieces(world, arrays)):
                if not name.startswith(arguments.only):
                    continue
                for _ in range(100):
                    call()
                fastest, median = measure(call, world, arguments.calls)
                print(f"{name:36} {fastest:6.2f} us (median of rounds {median:.2f})", flush=True)
                if arguments.profile:
                    profile = cProfile.Profile()
                    profile.runcall(lambda call=call: [call() for _ in range(arguments.calls)])
                    pstats.Stats(profile).sort_stats("tottime").print_stats(25)
                    break

        run(use, 1, Options(target="cuda", heap_bytes=1 << 24), make_backend=make_backend)
    return 0


if __name__ == "__main__":
    sys.exit(main())
