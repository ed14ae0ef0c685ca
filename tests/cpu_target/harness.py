"""Small kernels of this folder on target cpu, without a world."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mkernel import abi
from mkernel.jit import cpu as compiler
from mkernel.jit.spec import KernelSpec
from mkernel.runtime.cpu.backend import CpuBackend, CpuKernel, ThreadRanks

KERNELS = Path(__file__).parent / "kernels"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CTAS = 16


def load(
    name: str,
    parameters: type[ctypes.Structure],
    *,
    threads: int,
    shared: int = 2048,
    cluster: int = 1,
    ctas: int = CTAS,
    early: bool = False,
    apart: bool = False,
    **constants: int,
) -> CpuKernel:
    sizes = threads, shared, ctypes.sizeof(parameters)
    spec = KernelSpec(name, tuple(constants.items()), *sizes, cluster=cluster, early=early, clusters_are_apart=apart)
    return CpuKernel(spec, compiler.compile(spec, include=(KERNELS,)), ctas)


def structure(*names: str, maps: tuple[str, ...] = (), words: int | None = None) -> type[ctypes.Structure]:
    """Tensor maps, then 64-bit words; ``words`` pads them to that many."""
    fields: list[tuple[str, Any]] = [(name, abi.TensorMap) for name in maps]
    fields += [(name, ctypes.c_uint64) for name in names]
    if words is not None:
        fields.append(("reserved", ctypes.c_uint64 * (words - len(names))))
    return type("Parameters", (ctypes.Structure,), {"_fields_": fields})


Primitives = structure("out", "words", "flags")
Numbers = structure("packed", "floats", "out")
Nans = structure("wrong")
GemmTile = structure("steps", "tiles_m", maps=("a", "b", "c"), words=8)
Box = structure("out", "x", "y", "z", "w", maps=("source",), words=8)
Faults = structure("in_", "out", "flag", words=8)
Relay = structure("in_", "middle", "out", "flag", "pieces", "expected", words=8)
Ping = structure("own", "peer", "first", "rounds", "timeout_ns", "result", "abort", "raises")
Race = structure("data", "flag", words=8)
Passed = structure("flag", "steps")


def aligned(shape: int | tuple[int, ...], dtype: Any, fill: Any = 0) -> np.ndarray[Any, Any]:
    """A filled array with a 256-byte aligned base."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape))
    memory = np.empty(count * dtype.itemsize + 256, np.uint8)
    start = -memory.ctypes.data % 256
    array = memory[start : start + count * dtype.itemsize].view(dtype).reshape(shape)
    array[...] = fill
    return array


def map_of(device: CpuBackend, array: np.ndarray[Any, Any], box: tuple[int, int]) -> abi.TensorMap:
    """The map of a row-major matrix; ``box`` is (columns, rows)."""
    rows, columns = array.shape
    pitch = array.strides[0]
    name = array.dtype.name
    return abi.TensorMap.from_buffer_copy(device.tensor_map(array.ctypes.data, name, (columns, rows, 1), (pitch, rows * pitch), (*box, 1)))


def together(thread_ranks: ThreadRanks, ranks: int, function: Callable[[int], object]) -> list[BaseException | None]:
    """``function(rank)`` in one thread per rank of the thread ranks; what each raised."""
    errors: list[BaseException | None] = [None] * ranks

    def run(rank: int) -> None:
        try:
            function(rank)
        except BaseException as error:
            errors[rank] = error
        finally:
            thread_ranks.finish(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return errors
