"""Worlds of ``mk.launch`` whose nodes are joined by cards of this process (tests/transport/standin.py), in virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from mkernel import transport
from mkernel.transport import Entry, Wiring
from mkernel.transport.base import Put, Transport
from tests.transport.standin import Fabric, Mood, StandinNic

__all__ = ["NAME", "create", "join"]

NAME = "standin"


class _Meeting:
    """The ranks of one world, until all are there."""

    def __init__(self, open: Callable[[StandinNic, Wiring], Any], size: int, mood: Mood, seed: int, srd: bool) -> None:
        self.open, self.size, self.srd = open, size, srd
        self.fabric = Fabric(mood, seed)
        self.lock = threading.Lock()
        self.members: dict[int, Any] = {}

    def enter(self, wiring: Wiring) -> Any:
        with self.lock:
            self.members[wiring.rank] = self.open(self.fabric.nic(wiring.rank, srd=self.srd), wiring)
            if len(self.members) == self.size:  # before any rank launches: init ends with all of them
                addresses = [self.members[rank].address for rank in range(self.size)]
                for member in self.members.values():
                    member.connect(addresses)
            return self.members[wiring.rank]


class _Stepping(Transport):
    """Lets the network move whenever an engine polls."""

    def __init__(self, inner: Any, fabric: Fabric) -> None:
        self.inner, self.fabric = inner, fabric

    def post(self, put: Put) -> bool:
        return bool(self.inner.post(put))

    def flush(self) -> None:
        self.inner.flush()

    def poll(self) -> list[int]:
        self.fabric.step()
        tickets: list[int] = self.inner.poll()
        return tickets

    def next_event_ns(self) -> int | None:
        return 0 if self.fabric.busy else self.inner.next_event_ns()

    def close(self) -> None:
        self.inner.close()


_meeting: _Meeting | None = None


def create(wiring: Wiring) -> Transport:
    assert _meeting is not None
    return _Stepping(_meeting.enter(wiring), _meeting.fabric)


def join(
    monkeypatch: pytest.MonkeyPatch, open: Callable[[StandinNic, Wiring], Any], size: int, mood: Mood, seed: int, *, srd: bool = False
) -> Fabric:
    """The next world with ``transport=NAME`` has these cards."""
    global _meeting
    _meeting = _Meeting(open, size, mood, seed, srd)
    monkeypatch.setitem(transport.TRANSPORTS, NAME, Entry("tests.ops.standin:create"))
    return _meeting.fabric
