"""Ranks that meet through a process group of torch.distributed. torch is found among the modules that the program has loaded."""

from __future__ import annotations

import sys
from typing import Any

from mkernel.errors import ArgumentError
from mkernel.runtime.ranks.bootstrap import Bootstrap

__all__ = ["TorchBootstrap", "is_process_group"]


class TorchBootstrap(Bootstrap):
    """Ranks are those of a ``torch.distributed.ProcessGroup``, in its order. It is used inside ``init`` only."""

    def __init__(self, group: Any) -> None:
        self._group, self._distributed = group, sys.modules["torch.distributed"]
        self.rank, self.size = int(group.rank()), int(group.size())
        self.process_group = str(getattr(group, "group_name", ""))
        if self.rank < 0:
            raise ArgumentError("comm", group, "is a process group that this process does not belong to")

    def allgather(self, data: bytes) -> list[bytes]:
        parts: list[Any] = [None] * self.size
        self._distributed.all_gather_object(parts, data, group=self._group)
        return parts

    def close(self) -> None:
        pass  # the group is the caller's


def is_process_group(comm: Any) -> bool:
    """Whether ``comm`` is a process group of torch."""
    distributed = sys.modules.get("torch.distributed")
    kind = getattr(distributed, "ProcessGroup", None)
    return kind is not None and isinstance(comm, kind)
