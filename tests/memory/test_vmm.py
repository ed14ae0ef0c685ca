"""Segments in GPU memory under a driver that keeps books: what is reserved, mapped and held when, and that nothing is left."""
# ruff: noqa: N802 - the driver's names

from __future__ import annotations

import gc
import os
import types
from collections.abc import Iterator
from typing import Any

import pytest

from mkernel.memory import driver, vmm
from mkernel.memory.driver import DriverError
from mkernel.memory.vmm import VmmSegment, import_fd
from tests.memory.test_pinned import OK, Status

UNIT = 2 << 20
BASE = 1 << 40


class Names:
    """Enumerators by any name."""

    def __getattr__(self, name: str) -> str:
        return name


class Driver:
    """Allocations are numbers; a descriptor is that of an empty file, and says which allocation it is."""

    CUmemAllocationGranularity_flags = CUmemAllocationType = CUmemLocationType = CUmemAllocationHandleType = CUdevice_attribute = Names()
    CUmemAccess_flags = Names()

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}  # address -> allocation
        self.accessible: set[int] = set()
        self.handles: list[int] = []  # held
        self.files: dict[int, int] = {}  # inode -> allocation
        self.zeroed: list[tuple[int, int]] = []
        self.made = 0
        self.fails = ""

    def CUmemAllocationProp(self) -> Any:
        return types.SimpleNamespace(location=types.SimpleNamespace(), allocFlags=types.SimpleNamespace())

    def CUmemAccessDesc(self) -> Any:
        return types.SimpleNamespace(location=types.SimpleNamespace())

    def cuDeviceGetAttribute(self, name: str, ordinal: int) -> tuple[Any, ...]:
        return OK, 1

    def cuMemGetAllocationGranularity(self, properties: Any, flag: str) -> tuple[Any, ...]:
        return OK, UNIT

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        at = BASE + sum(self.reserved.values())
        self.reserved[at] = size
        return OK, at

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        assert not [at for at in self.mapped if address <= at < address + size]
        assert self.reserved.pop(address) == size
        return (OK,)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        if self.fails == "create":
            return Status(2), None
        self.made += 1
        self.handles.append(self.made)
        return OK, self.made

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        self.handles.remove(handle)
        return (OK,)

    def cuMemExportToShareableHandle(self, handle: int, kind: str, flags: int) -> tuple[Any, ...]:
        fd = os.memfd_create("allocation")
        self.files[os.fstat(fd).st_ino] = handle
        return OK, fd

    def cuMemImportFromShareableHandle(self, fd: int, kind: str) -> tuple[Any, ...]:
        handle = self.files[os.fstat(fd).st_ino]
        self.handles.append(handle)
        return OK, handle

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        assert handle in self.handles
        assert address not in self.mapped
        self.mapped[address] = handle
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        del self.mapped[address]
        self.accessible.discard(address)
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, descriptions: list[Any], count: int) -> tuple[Any, ...]:
        self.accessible.add(address)
        return (Status(2 if self.fails == "access" else 0),)

    @property
    def idle(self) -> bool:
        return not (self.reserved or self.mapped or self.accessible or self.handles)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    for module in (driver, vmm):
        monkeypatch.setattr(module, "driver", lambda: fake)
    monkeypatch.setattr(vmm, "_zero", lambda context, address, size: fake.zeroed.append((address, size)))
    yield fake
    assert fake.idle


def make(rank: int, ranks: int = 2, size: int = 3 << 20) -> VmmSegment:
    return VmmSegment(0, "context", size, rank, ranks)


def test_ranks_of_a_node(cuda: Driver) -> None:
    with make(0) as first, make(1) as second:
        assert (first.size, first.stride, len(cuda.reserved)) == (2 * UNIT, 2 * UNIT, 2)
        assert cuda.zeroed == [(first.address(), 2 * UNIT), (second.address(), 2 * UNIT)]
        for segment in (first, second):
            segment.map_peers([first.fd, second.fd])
        assert cuda.mapped[first.address(1)] == cuda.mapped[second.address()] != cuda.mapped[first.address()]
        assert cuda.accessible == {segment.address(rank) for segment in (first, second) for rank in range(2)}
        assert cuda.handles == [], "mappings and descriptors keep the memory"
        with pytest.raises(ValueError, match="1 descriptors for 2"):
            first.map_peers([first.fd])
        fd = first.fd
        first.close()
        first.close()
        assert first.closed
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        with pytest.raises(ValueError, match="is closed"):
            first.map_peers([second.fd, second.fd])


def test_a_part_of_another_node(cuda: Driver) -> None:
    with make(0, 1) as segment, import_fd(segment.fd, segment.size, 0) as mapping:
        assert cuda.mapped[mapping.address] == cuda.mapped[segment.address()]
        assert not mapping.closed
    assert mapping.closed


@pytest.mark.parametrize("step", ["create", "access"])
def test_what_fails_leaves_nothing(cuda: Driver, step: str) -> None:
    cuda.fails = step
    with pytest.raises(DriverError, match="SOMETHING"):
        make(0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_is_dropped_says_so(cuda: Driver) -> None:
    segment = make(0, 1)
    mapping = import_fd(segment.fd, segment.size, 0)
    undo = [*segment._undo, *mapping._undo]
    os.close(segment.fd)
    with pytest.warns(ResourceWarning, match=f"VmmMapping of {segment.size} bytes was not closed"):
        del mapping
        gc.collect()
    with pytest.warns(ResourceWarning, match="VmmSegment of 4194304 bytes was not closed"):
        del segment
        gc.collect()
    driver.unwind(undo)
