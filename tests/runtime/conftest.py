"""Fixtures of the runtime's tests."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from tests.runtime.worlds import open_memory


@pytest.fixture(params=["cpu", "cuda"])
def target(request: pytest.FixtureRequest) -> str:
    """Both kinds of launch that the device without kernels has: at once, and asynchronous."""
    return str(request.param)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No thread, descriptor or mapping of ours survives a test, however it ended."""
    gc.collect()
    threads, descriptors = set(threading.enumerate()), open_memory()
    yield
    gc.collect()
    deadline = time.monotonic() + 5.0
    while (left := [t for t in threading.enumerate() if t not in threads]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, left
    assert open_memory() == descriptors
