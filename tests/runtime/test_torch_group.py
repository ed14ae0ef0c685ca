"""Meeting through a process group of torch, which a stand-in replaces; ``make test-torch`` has the real one."""

from __future__ import annotations

import sys
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mkernel.errors import ArgumentError
from mkernel.runtime.ranks.bootstrap import ThreadGroup
from mkernel.runtime.ranks.choice import choose


class ProcessGroup:
    """Ranks are threads. ``rank`` -1: of a process that is not in the group."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._rank, self.members = rank, group.bootstrap(max(rank, 0))

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.members.size


def _all_gather_object(parts: list[Any], data: Any, group: ProcessGroup) -> None:
    parts[:] = group.members.allgather(data)


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = types.SimpleNamespace(ProcessGroup=ProcessGroup, all_gather_object=_all_gather_object)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)


def test_ranks_are_those_of_the_group() -> None:
    def meet(rank: int) -> tuple[Any, ...]:
        bootstrap = choose(ProcessGroup(threads, rank))
        return bootstrap.rank, bootstrap.size, bootstrap.mpi, bootstrap.allgather(b"%d" % rank), bootstrap.shared_secret()

    threads = ThreadGroup(3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(meet, range(3)))
    assert [one[:4] for one in found] == [(rank, 3, False, [b"0", b"1", b"2"]) for rank in range(3)]
    assert len({one[4] for one in found}) == 1


def test_a_process_outside_of_the_group() -> None:
    with pytest.raises(ArgumentError, match="does not belong to"):
        choose(ProcessGroup(ThreadGroup(2), -1))


def test_what_is_no_communicator() -> None:
    with pytest.raises(ArgumentError, match="mpi4py communicator or a process group"):
        choose(object())
