"""The symmetric segments of one rank: memory that the ranks of its node can address; and what all holders of memory have in common."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Self

__all__ = ["Holder", "Segment"]


class Holder(abc.ABC):
    """Holds ``size`` bytes until ``close``, which is safe to call twice. A context manager; dropped without being closed, it warns."""

    size: int

    @property
    @abc.abstractmethod
    def closed(self) -> bool:
        """Whether nothing is held; true also for an object whose constructor failed."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not self.closed:
            warnings.warn(f"{type(self).__name__} of {self.size} bytes was not closed", ResourceWarning, stacklevel=2, source=self)


class Segment(Holder):
    """``size`` bytes of this rank, mapped on every rank of the node at ``base + local_rank * stride``.

    Life cycle: construct (allocates this rank's part, zeroed), send ``fd`` to the other ranks of the node, ``map_peers`` with theirs,
    use, ``close`` (unmaps and frees).
    """

    size: int  # bytes of every rank's part, a multiple of the allocation granularity
    stride: int  # bytes between two local ranks in this process's address space
    base: int  # address of local rank 0's part
    local_rank: int
    ranks_per_node: int
    mappable: bool  # any process can map ``fd``; else network cards reach the memory by ``dmabuf``

    _fd: int

    @property
    def fd(self) -> int:
        """File descriptor that another process can map; owned by the segment. Also used by engines (emulated transport)."""
        return self._fd

    def dmabuf(self) -> int:
        """Descriptor by which a network card reaches memory that is not ``mappable``; owned by the segment. Else -1."""
        return -1

    @property
    def closed(self) -> bool:
        return getattr(self, "_fd", -1) < 0

    def map_peers(self, fds: Sequence[int]) -> None:
        """Map the parts of all local ranks, in local-rank order. The entry of this rank is ignored. The fds stay the caller's."""
        if self.closed:
            raise ValueError("the segment is closed")
        if len(fds) != self.ranks_per_node:
            raise ValueError(f"{len(fds)} descriptors for {self.ranks_per_node} local ranks")
        for peer, fd in enumerate(fds):
            if peer != self.local_rank:
                self._map_part(peer, fd)

    @abc.abstractmethod
    def _map_part(self, local_rank: int, fd: int) -> None:
        """Map one local rank's part at its address."""

    def address(self, local_rank: int | None = None) -> int:
        """Address of a local rank's part (None: this rank's)."""
        return self.base + (self.local_rank if local_rank is None else local_rank) * self.stride
