"""The symmetric segments of one rank: memory that the ranks of its node can address."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType
from typing import Self

__all__ = ["Segment"]


class Segment(abc.ABC):
    """``size`` bytes of this rank, mapped on every rank of the node at ``base + local_rank * stride``.

    Life cycle: construct (allocates this rank's part, zeroed), send ``fd`` to the other ranks of the node, ``map_peers`` with theirs,
    use, ``close`` (unmaps and frees, safe to call twice). A context manager.
    """

    size: int  # bytes of every rank's part, a multiple of the allocation granularity
    stride: int  # bytes between two local ranks in this process's address space
    base: int  # address of local rank 0's part
    local_rank: int
    mappable: bool  # any process can map ``fd`` and read and write there; else network cards get in by ``dmabuf``

    @property
    @abc.abstractmethod
    def fd(self) -> int:
        """File descriptor that another process can map; owned by the segment. Also used by engines (emulated transport)."""

    def dmabuf(self) -> int:
        """Descriptor by which a network card reaches memory that is not ``mappable``; owned by the segment. Else -1."""
        return -1

    @abc.abstractmethod
    def map_peers(self, fds: Sequence[int]) -> None:
        """Map the parts of all local ranks, in local-rank order. The entry of this rank is ignored. The fds stay the caller's."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def address(self, local_rank: int | None = None) -> int:
        """Address of a local rank's part (None: this rank's)."""
        return self.base + (self.local_rank if local_rank is None else local_rank) * self.stride

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
