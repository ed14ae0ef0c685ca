"""Symmetric segments in ordinary memory (target cpu): one memfd per rank, all ranks of a node in one address reservation."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from mkernel.memory.segment import Holder, Segment

__all__ = ["GRANULARITY", "Mapping", "MemfdSegment", "SharedMemory", "import_fd"]

GRANULARITY = 64 * 1024  # largest page size of supported hosts (AArch64), so that sizes agree between machines

_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class MemfdSegment(Segment):
    """``size`` bytes (rounded up to 64 KiB), zeroed, shared through a memfd.

    Works between threads of one process and between processes: what the other ranks need is the ``fd``.

    Parameters
    ----------
    size
        Bytes of every rank's part; the same on all ranks of the node.
    local_rank, ranks_per_node
        This rank's place in the node.

    Raises
    ------
    OSError
        The host is out of address space, descriptors or memory.
    """

    mappable = True

    def __init__(self, size: int, local_rank: int, ranks_per_node: int) -> None:
        self._fd = -1
        self._reserved = 0
        self.base = 0
        if size < 0 or not 0 <= local_rank < ranks_per_node:
            raise ValueError(f"segment of {size} bytes for local rank {local_rank} of {ranks_per_node}")
        self.size = self.stride = _round_up(max(size, 1))
        self.local_rank = local_rank
        self.ranks_per_node = ranks_per_node
        try:
            self._fd = _create(self.size)
            self.base = _map(None, self.stride * ranks_per_node, _PROT_NONE, _RESERVE, -1)
            self._reserved = self.stride * ranks_per_node
            self._map_part(local_rank, self._fd)
        except BaseException:
            self.close()
            raise

    def _map_part(self, local_rank: int, fd: int) -> None:
        _check_size(fd, self.size, f"local rank {local_rank}")
        _map(self.address(local_rank), self.size, _PROT_READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)

    def close(self) -> None:
        if self._reserved:
            _unmap(self.base, self._reserved)
            self._reserved = self.base = 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Mapping(Holder):
    """One rank's part of a segment of another node, mapped for the engine."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size

    @property
    def closed(self) -> bool:
        return not getattr(self, "address", 0)

    def close(self) -> None:
        if self.address:
            _unmap(self.address, self.size)
            self.address = 0


class SharedMemory(Holder):
    """``size`` bytes, zeroed, that another process can map by ``fd``."""

    def __init__(self, size: int) -> None:
        self.size = _round_up(max(size, 1))
        self.fd = _create(self.size)
        try:
            self.address = _map(None, self.size, _PROT_READ_WRITE, mmap.MAP_SHARED, self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def closed(self) -> bool:
        return not getattr(self, "address", 0)

    def close(self) -> None:
        if self.address:
            _unmap(self.address, self.size)
            os.close(self.fd)
            self.address = 0


def import_fd(fd: int, size: int) -> Mapping:
    """Map ``size`` bytes of another rank's segment. The fd stays the caller's and may be closed afterwards."""
    size = _round_up(max(size, 1))
    _check_size(fd, size, f"descriptor {fd}")
    return Mapping(_map(None, size, _PROT_READ_WRITE, mmap.MAP_SHARED, fd), size)


def _round_up(size: int) -> int:
    return -(-size // GRANULARITY) * GRANULARITY


def _create(size: int) -> int:
    fd = os.memfd_create("mkernel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        # The size is sealed: a peer that truncated the file would kill this process with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_size(fd: int, size: int, what: str) -> None:
    """Refuse a file that is too short: touching a mapping beyond its end would raise SIGBUS."""
    have = os.fstat(fd).st_size
    if have < size:
        raise ValueError(f"the segment of {what} has {have} bytes, {size} expected: sizes must be equal on all ranks")


def _map(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    result: int | None = _libc.mmap(address, size, protection, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size} bytes: {os.strerror(code)}")
    return result


def _unmap(address: int, size: int) -> None:
    if _libc.munmap(address, size):
        code = ctypes.get_errno()
        raise OSError(code, f"munmap of {size} bytes: {os.strerror(code)}")
