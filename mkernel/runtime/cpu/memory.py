"""Memory of target cpu: segments that the ranks of one process address alike, and private memory aligned as a GPU's."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mkernel.memory.memfd import MemfdSegment

__all__ = ["ThreadSegment", "File", "SharedSegments", "aligned", "file_of"]

_ALIGNMENT = 256  # bytes, of everything allocated here
File = tuple[int, int]  # device and inode of a memfd
NameMemory = Callable[[int, int, str], object]  # address, size and its name for reports; a size of 0 takes the name away


class SharedSegments:
    """Lets the ranks of one process address a node's memory through one mapping, so that an address means the same word to all of them.

    Several mappings of one file would work as well, but ThreadSanitizer, the proxy-fence check and reports know addresses only.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.groups: dict[tuple[File, ...], _SegmentGroup] = {}

    def find(self, file: File) -> int | None:
        """Where the ranks of its node have mapped this file. Under the lock, which keeps it mapped."""
        for key, group in self.groups.items():
            if file in key:
                return group.owner._own_base + key.index(file) * group.owner.stride
        return None

    def keep(self, file: File) -> tuple[int, Callable[[], None]] | None:
        """Where the ranks of its node have mapped this file, and what gives it back: until then it stays mapped. None: nowhere."""
        with self.lock:
            for key, group in self.groups.items():
                if file in key:
                    group.members += 1
                    base = group.owner._own_base + key.index(file) * group.owner.stride
                    return base, functools.partial(self._give_back, key)
        return None

    def _give_back(self, key: tuple[File, ...]) -> None:
        with self.lock:
            group = self.groups[key]
            group.members -= 1
            if group.members == 0:
                self.groups.pop(key)
                group.owner._unmap_now()


class _SegmentGroup:
    def __init__(self, owner: ThreadSegment) -> None:
        self.owner = owner
        self.members = 0


class ThreadSegment(MemfdSegment):
    """A segment whose parts, once ``map_peers`` was called, are where the first rank of the node mapped them."""

    def __init__(self, shared: SharedSegments, name_memory: NameMemory, name: str, size: int, local_rank: int, ranks_per_node: int) -> None:
        """``shared``: the segments of the ranks' process; ``name``: of this one, in reports."""
        self._shared, self._name_memory, self._name = shared, name_memory, name
        self._group: _SegmentGroup | None = None
        self._own_base = 0
        self._key: tuple[File, ...] = ()
        super().__init__(size, local_rank, ranks_per_node)
        self._own_base = self.base

    def map_peers(self, fds: Sequence[int]) -> None:
        own = list(fds)
        if len(own) == self.ranks_per_node:
            own[self.local_rank] = self.fd
        key = tuple(map(file_of, own))
        with self._shared.lock:
            if self._group is not None:
                return
            group = self._shared.groups.get(key)
            if group is None:
                super().map_peers(fds)
                group = self._shared.groups[key] = _SegmentGroup(self)
            group.members += 1
            self._group, self._key, self.base = group, key, group.owner.base
        self._name_memory(self.address(), self.size, self._name)

    def close(self) -> None:
        if self._group is not None:
            self._name_memory(self.address(), 0, "")
        with self._shared.lock:
            group, self._group = self._group, None
            if group is not None:
                group.members -= 1
                self.base = self._own_base
                if group.members == 0:
                    self._shared.groups.pop(self._key)
                    group.owner._unmap_now()
                if group.owner is self:
                    return  # the last member unmaps it
            elif self._key and self._own_base:
                return  # already closed, still in use by others
        super().close()
        self._own_base = 0

    def _unmap_now(self) -> None:
        super().close()
        self._own_base = 0


def file_of(fd: int) -> File:
    state = os.fstat(fd)
    return state.st_dev, state.st_ino


def aligned(size: int) -> np.ndarray[Any, Any]:
    """Uninitialized bytes, aligned as device memory would be."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]
