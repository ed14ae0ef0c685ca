"""Segments in pinned host memory, under a driver that keeps books: what is pinned when, in which context, and that nothing is left."""
# ruff: noqa: N802 - the driver's names

from __future__ import annotations

import ctypes
import types
from pathlib import Path
from typing import Any

import pytest

from mkernel.errors import Error
from mkernel.memory import driver, pinned
from mkernel.memory.driver import DriverError
from mkernel.memory.memfd import GRANULARITY, import_fd
from mkernel.memory.pinned import PinnedSegment
from mkernel.memory.segment import Segment

CONTEXT = "the context"
HOST_POINTERS, HOST_PAGE_TABLES = "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES"


class Status(int):
    name = "CUDA_ERROR_SOMETHING"


OK = Status(0)


class Driver:
    """The functions that pinning calls. ``pinned``: address -> bytes."""

    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUstreamCaptureMode = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUdevice_attribute = types.SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in (HOST_POINTERS, HOST_PAGE_TABLES)})

    def __init__(self) -> None:
        self.attributes = {HOST_POINTERS: 1, HOST_PAGE_TABLES: 0}
        self.pinned: dict[int, int] = {}
        self.room = 100
        self.contexts: list[str] = []
        self.gone = False

    def cuDeviceGetAttribute(self, name: str, ordinal: int) -> tuple[Any, ...]:
        assert ordinal == 3
        return OK, self.attributes[name]

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:
        if self.gone:
            return (Status(4),)
        self.contexts.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return OK, self.contexts.pop()

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[Any, ...]:
        return OK, mode

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[Any, ...]:
        assert self.contexts == [CONTEXT]
        assert flags == 3
        assert not any(address < start + held and start < address + size for start, held in self.pinned.items())
        if len(self.pinned) == self.room:
            return (Status(304),)
        assert is_mapped(address)
        self.pinned[address] = size
        return (OK,)

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        assert self.contexts == [CONTEXT]
        assert is_mapped(address)
        del self.pinned[address]
        return (OK,)


def is_mapped(address: int) -> bool:
    return any(line.startswith(f"{address:x}-") and "memfd:mkernel" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    for module in (driver, pinned):
        monkeypatch.setattr(module, "driver", lambda: fake)
    return fake


def make(rank: int, ranks: int = 2, size: int = GRANULARITY) -> PinnedSegment:
    return PinnedSegment(3, CONTEXT, size, rank, ranks)


def word(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:mkernel")


def test_every_part_is_pinned_where_it_is_mapped(cuda: Driver) -> None:
    segments = [make(rank, size=GRANULARITY + 1) for rank in range(2)]
    assert set(cuda.pinned) == {segment.address() for segment in segments}
    for segment in segments:
        assert isinstance(segment, Segment)
        assert segment.mappable
        assert segment.dmabuf() == -1
        segment.map_peers([other.fd for other in segments])
    assert cuda.pinned == {segment.address(rank): 2 * GRANULARITY for segment in segments for rank in range(2)}
    with import_fd(segments[1].fd, segments[1].size) as engine:  # as an engine's process maps it
        word(engine.address + 64).value = 7
        assert [word(segment.address(1) + 64).value for segment in segments] == [7, 7]
    for segment in segments:
        segment.close()


def test_close_unpins_before_it_unmaps(cuda: Driver) -> None:
    before = mappings()
    segments = [make(rank) for rank in range(2)]
    segments[0].map_peers([other.fd for other in segments])
    for segment in segments:
        segment.close()
        segment.close()
    assert cuda.pinned == {}
    assert cuda.contexts == []
    assert mappings() == before


@pytest.mark.parametrize("room", [0, 1])
def test_memory_that_cannot_be_pinned(cuda: Driver, room: int) -> None:
    cuda.room = room
    before = mappings()

    def use() -> None:
        with make(0) as segment, make(1) as other:
            segment.map_peers([segment.fd, other.fd])

    with pytest.raises(DriverError, match="pinning 65536 bytes"):
        use()
    assert cuda.pinned == {}
    assert mappings() == before


def test_the_driver_has_gone_before(cuda: Driver) -> None:
    """At the end of a process: nothing to unpin, and the memory goes."""
    segment, before = make(0), mappings()
    cuda.gone = True
    segment.close()
    assert mappings() == before - 1


@pytest.mark.parametrize(("attribute", "value", "text"), [(HOST_POINTERS, 0, "does not address host memory"), (HOST_PAGE_TABLES, 1, "C2C")])
def test_gpus_that_cannot(cuda: Driver, attribute: str, value: int, text: str) -> None:
    cuda.attributes[attribute] = value
    with pytest.raises(Error, match=rf"GPU 3 .*{text}.*MKERNEL_RC_SIGNAL=atomic"):
        make(0)
    assert cuda.pinned == {}


def test_forgetting_to_close_warns(cuda: Driver) -> None:
    segment = make(0)
    with pytest.warns(ResourceWarning, match="PinnedSegment of 65536 bytes was not closed"):
        segment.__del__()
    assert cuda.pinned  # only a warning: kernels may still look there
    segment.close()


def test_the_driver_has_what_is_asked_for() -> None:
    """The names, in the bindings: they need no GPU."""
    bindings = pytest.importorskip("cuda.bindings.driver")
    for name in [name for name in vars(Driver) if name.startswith(("cu", "CU_"))]:
        assert hasattr(bindings, name), name
    for name in vars(Driver.CUdevice_attribute):
        assert hasattr(bindings.CUdevice_attribute, name), name
    assert (bindings.CU_MEMHOSTREGISTER_PORTABLE, bindings.CU_MEMHOSTREGISTER_DEVICEMAP) == (1, 2)
