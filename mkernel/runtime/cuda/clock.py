"""The clock of a GPU (globaltimer), compared with the host's by a kernel that tells it when asked."""

from __future__ import annotations

import ctypes
import logging
import time
from typing import TYPE_CHECKING

from mkernel.errors import Error
from mkernel.runtime.clock import BYTES, SPEC, Clock, Parameters, ask, fit

if TYPE_CHECKING:
    from mkernel.runtime.backend import Backend, HostMemory, Kernel

__all__ = ["ClockReader"]

_UNKNOWN_NS = 1_000_000_000  # the driver sets globaltimer by the time of day, but says nowhere how closely


class ClockReader:
    """Reads the clock of one device. Its kernel is compiled and loaded at the first reading, when none of this rank's kernels waits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ready: tuple[Kernel, HostMemory] | None = None

    def read(self) -> Clock:
        """Compare the clocks, in about a millisecond. Where that fails, there is a warning, and the error is a second."""
        try:
            return self._read()
        except (Error, ValueError) as error:
            logging.getLogger("mkernel").warning("trace: the GPU's clock cannot be compared with the host's: %s", error)
            return Clock(time.monotonic_ns() - time.time_ns(), _UNKNOWN_NS)

    def _read(self) -> Clock:
        backend = self._backend
        if self._ready is None:
            self._ready = backend.load(SPEC), backend.allocate_host(BYTES)
        kernel, memory = self._ready
        ctypes.memset(memory.host_address, 0, BYTES)
        backend.launch(kernel, backend.order(backend.stream(None)), 1, Parameters.of(memory.address))
        readings = ask(memory.view[:BYTES].cast("Q"))
        backend.synchronize()
        return fit(readings)
