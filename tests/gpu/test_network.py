"""What the network needs of a GPU: rings that another process maps, memory by dma-buf, its place on the PCI bus, engines as processes."""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import Error
from mkernel.runtime import cuda
from mkernel.runtime.cuda import CudaDevice

pytestmark = pytest.mark.gpu

SIZE = 1 << 16
SECONDS = 5.0


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice(0)
    yield device
    device.synchronize()
    device.close()


def copy(copier: Any, target: int, source: int, size: int) -> None:
    token = copier.start(target, source, size)
    deadline = time.monotonic() + SECONDS
    while not copier.done(token):
        assert time.monotonic() < deadline


def test_shared_host_memory(device: CudaDevice) -> None:
    """What the GPU writes another mapping of the descriptor sees, and the other way round."""
    memory = device.allocate_host(SIZE, shared=True)
    assert memory.fd >= 0
    assert bytes(memory.view) == bytes(SIZE)
    segment = device.segment(1 << 20, 0, 1)
    with mmap.mmap(memory.fd, SIZE) as other:
        copier = device.copier()
        data = np.random.default_rng(1).bytes(SIZE)
        other[:] = data
        copy(copier, segment.address(), memory.address, SIZE)
        assert device.read(segment.address(), SIZE) == data
        other[:] = bytes(SIZE)
        copy(copier, memory.address, segment.address(), SIZE)
        assert other[:] == data
        copier.close()
    segment.close()


def test_shared_memory_goes_with_the_device() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    device = CudaDevice(0)
    memory = device.allocate_host(SIZE, shared=True)
    memory.view.release()
    device.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.fd)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 8  # the driver keeps some of its own


def test_memory_by_dmabuf(device: CudaDevice) -> None:
    """A descriptor, once; or an error that says what this GPU or its driver lacks."""
    segment = device.segment(1 << 20, 0, 1)
    try:
        fd = segment.dmabuf()
    except Error as error:
        assert "RDMA" in str(error)
        pytest.skip(str(error))
    assert "dmabuf" in os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    assert segment.dmabuf() == fd
    segment.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_place_on_the_bus(device: CudaDevice) -> None:
    assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", device.pci_address)


def test_engines_are_processes() -> None:
    if len(cuda.available()) < 2:
        pytest.skip("needs 2 GPUs")

    def use(world: Any) -> tuple[bool, int]:
        world.barrier()
        return world._ring_memory.fd >= 0, world.num_nodes

    assert mk.launch(use, ranks=2, ranks_per_node=1, transport="null", target="cuda", heap_bytes=1 << 24) == [(True, 2)] * 2
