"""What a transport promises. One test body (tests/transport/contract.py) holds every implementation to it."""

from __future__ import annotations

import abc
from typing import NamedTuple

__all__ = ["Put", "Transport"]


class Put(NamedTuple):
    """One put_signal, as read from the command ring. Offsets and sizes in bytes."""

    ticket: int  # sequence number of the command on this rank's ring, from 0
    channel: int
    dst_rank: int
    src_offset: int  # in this rank's data heap
    dst_offset: int  # in the destination's data heap
    bytes: int  # 0: signal only
    signal_offset: int  # in the destination's signal segment
    signal_value: int


class Transport(abc.ABC):
    """Carries puts from this rank to ranks of other nodes.

    The contract: when the receiver's device sees the signal, all bytes of that put and of earlier puts on the same channel (to the same
    rank) are visible to it. Nothing here blocks: ``post`` may refuse (returns False: try again after ``poll``), ``poll`` returns the
    tickets that completed since the last call, in any order. A failure raises ``mkernel.errors.TransportError`` (peer, op, status) and
    is final.
    """

    @abc.abstractmethod
    def post(self, put: Put) -> bool: ...

    @abc.abstractmethod
    def flush(self) -> None:
        """Hand everything posted so far to the hardware (one doorbell per batch)."""

    @abc.abstractmethod
    def poll(self) -> list[int]: ...

    @abc.abstractmethod
    def next_event_ns(self) -> int | None:
        """Time (of the engine's clock) at which ``poll`` may next return something; None: nothing in flight, 0: unknown, poll again."""

    @abc.abstractmethod
    def close(self) -> None: ...
