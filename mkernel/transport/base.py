"""What a transport promises. One test body (tests/transport/contract.py) holds every implementation to it."""

from __future__ import annotations

import abc
from typing import NamedTuple

__all__ = ["Put", "Transport"]


class Put(NamedTuple):
    """One put_signal, as read from the command ring. Offsets and sizes are in bytes."""

    ticket: int  # sequence number of the command on this rank's ring, from 0
    channel: int
    dst_rank: int
    src_offset: int  # in this rank's data heap
    dst_offset: int  # in the destination's data heap
    bytes: int  # 0: a signal without data
    signal_offset: int  # in the destination's signal segment
    signal_value: int


class Transport(abc.ABC):
    """Carries puts from this rank to ranks of other nodes.

    The contract: when the receiver's device sees the signal, all bytes of that put and of earlier puts on the same channel (to the same
    rank) are visible to it. Nothing here blocks. A failure raises ``mkernel.errors.TransportError`` (peer, op, status) and is final.

    Attributes
    ----------
    arrived
        Messages of peers that ``poll`` has handled so far, where receivers take part in a put. An engine that sees it grow stays awake.
    """

    arrived: int = 0

    @abc.abstractmethod
    def post(self, put: Put) -> bool:
        """Accept a put, or refuse it for now (False): try again after ``poll``. Raises TransportError."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Hand everything posted so far to the hardware, with one doorbell per batch. Raises TransportError."""

    @abc.abstractmethod
    def poll(self) -> list[int]:
        """The tickets of puts that completed since the last call, in any order. Raises TransportError."""

    @abc.abstractmethod
    def next_event_ns(self) -> int | None:
        """When ``poll`` may next return something, on the engine's clock. 0: unknown, poll again. None: nothing is in flight."""

    def abandon(self) -> None:  # noqa: B027
        """Stop what is under way: when this returns, none of it changes a peer's memory any more. For a transport that has failed.

        One whose failure stops everything by itself has nothing to do.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close everything that the transport holds. Puts in flight are abandoned."""
