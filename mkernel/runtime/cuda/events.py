"""Events of a GPU, and how the host waits for them: sleeping, with nothing locked."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from mkernel.memory.driver import call, check, driver, prompt

__all__ = ["happened", "new_event", "sleep_until"]

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_POLL_SECONDS = 20e-6, 200e-6  # shortest and longest sleep of a host wait


def new_event() -> Any:
    """A CUevent without timing, which counts as happened until it is recorded."""
    cuda = driver()
    return call(cuda.cuEventCreate(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING), "creating an event")


def happened(event: int) -> bool:
    """Whether everything before an event has ended. Raises DriverError when the context is lost."""
    status = prompt("cuEventQuery", ctypes.c_void_p)(event)
    if status == _NOT_READY:
        return False
    check(status, "waiting for the GPU")
    return True


def sleep_until(condition: Callable[[], bool]) -> None:
    """Sleep until a condition holds, interruptibly and without the GIL or any lock."""
    shortest, longest = _POLL_SECONDS
    pause = shortest
    while not condition():
        time.sleep(pause)
        pause = min(2 * pause, longest)
