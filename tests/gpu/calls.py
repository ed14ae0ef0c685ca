"""Launches of a kernel that waits for a flag, for tests of what runs beside it and after it."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np

from mkernel import abi
from mkernel.jit.spec import KernelSpec
from mkernel.runtime.cuda.backend import CudaBackend

__all__ = ["SECONDS", "THREADS", "Calls", "WaitParameters", "wait_spec"]

THREADS = 64
SECONDS = 5.0  # kernels that wait give up after this


class WaitParameters(ctypes.Structure):
    _fields_ = [
        ("world", abi.World),
        ("flag", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("data", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("padding", ctypes.c_char * 32),
    ]


def wait_spec(wait: int) -> KernelSpec:
    return KernelSpec("wait_then_add", (("kWait", wait),), THREADS, 0, ctypes.sizeof(WaitParameters))


class Calls:
    """Launches of wait_then_add on device memory; ``flag`` and ``data`` are in a segment, as in a world."""

    def __init__(self, device: CudaBackend, wait: int, ctas: int = 4) -> None:
        self.device, self.ctas = device, ctas
        self.segment = device.segment(1 << 20, 0, 1)
        self.flag, self.data = self.segment.address(), self.segment.address() + 4096
        self.kernel = device.load(wait_spec(wait))
        # Allocated now: allocating beside a kernel that waits may wait for it.
        self.size = 4 * THREADS * ctas
        self.out = device.allocate(self.size)
        self.memory = device.allocate_host(4 * THREADS)
        self.expected = np.zeros((ctas, THREADS), np.uint32)

    def parameters(self, value: int = 1) -> bytes:
        world = abi.World(timeout_ns=int(SECONDS * 1e9))
        return bytes(WaitParameters(world, self.flag, value, self.data, self.out))

    def launch(self, stream: Any, value: int = 1) -> None:
        self.device.launch(self.kernel, self.device.order(stream), self.ctas, self.parameters(value))

    def write(self, copier: Any, factor: int = 7) -> None:
        """New data, from pinned memory."""
        numbers = np.arange(THREADS, dtype=np.uint32) * factor
        self.memory.view[:] = numbers.tobytes()
        self.expected = numbers + np.arange(self.ctas, dtype=np.uint32)[:, None]
        token = copier.start(self.data, self.memory.address, 4 * THREADS)
        deadline = time.monotonic() + SECONDS / 2
        while not copier.done(token):
            assert time.monotonic() < deadline, "a copy does not run beside the kernel"

    def check(self) -> None:
        """The results are there; the next ones must come anew."""
        result = np.frombuffer(self.device.read(self.out, self.size), np.uint32).reshape(self.ctas, THREADS)
        assert (result == self.expected).all()
        self.device.wrap(self.out, (self.size,), "uint8", self).fill(0xFF)
        self.device.xp.cuda.get_current_stream().synchronize()

    def close(self) -> None:
        self.device.synchronize()
        self.segment.close()
