"""RDMA over SRD queue pairs (AWS EFA): reliable, exactly once, in no order. The receiver counts, and raises the signals itself.

A put travels as RDMA writes with an immediate (channel, sequence) that carry its bytes, and one SEND that announces it: sequence, number of
writes, signal. The receiver's engine counts what has come for each sequence, and stores a signal once its put is whole and all earlier puts
of its channel have been released. Nothing on the wire is assumed to keep order, the announcement included.

Both kinds of message consume a receive of the peer. The sender spends credits for them; the receiver returns credits, and says how many
puts it has released, in every announcement that goes the other way, and in updates of their own when there is nothing to announce.

- Puts to one peer that are not known to be released stay below ``WINDOW``, below half of the sequence space: sequences may wrap.
- An update needs no credit; ``SPARE`` receives are kept for them. At most one update is not known to be delivered, so they arrive in the
  order of sending, and only that one can be overtaken by the numbers it carries. Each raises the credits by a quarter of them all, or the
  releases by a quarter of the window, and the peer cannot use more than it has seen: 4 + 4 + 1 can be waiting at most.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["SPARE", "UPDATE", "WINDOW", "Announcement", "Incoming", "Outgoing", "ProtocolError", "imm"]

SEQUENCE_BITS = 16
SEQUENCES = 1 << SEQUENCE_BITS
CHANNELS = 1 << (32 - SEQUENCE_BITS)
WINDOW = SEQUENCES // 8
SPARE = 9  # receives for updates

ANNOUNCEMENT = struct.Struct("<HHIQQQQ")


class ProtocolError(Exception):
    """The peer sent what it may not send: a bug, or another version of mkernel."""


class Announcement(NamedTuple):
    """What a SEND carries. Counts are cumulative and may arrive out of order: the greatest is true."""

    channel: int
    sequence: int
    writes: int  # that carry the put's bytes; UPDATE: no put, only the counts
    signal_offset: int
    signal_value: int
    granted: int  # messages that the receiver of this has been allowed to send, ever
    released: int  # of its puts


UPDATE = 0xFFFFFFFF


def imm(channel: int, sequence: int) -> int:
    """The immediate of a put's writes."""
    return channel << SEQUENCE_BITS | sequence


class Outgoing:
    """The sender's half of one direction between two ranks: numbers puts, and stays inside what the peer allows.

    Parameters
    ----------
    credits
        Receives that the peer had posted for messages when the connection was made.
    """

    __slots__ = ("_begun", "_granted", "_next", "_released", "_sent", "_window")

    def __init__(self, credits: int, window: int = WINDOW) -> None:
        self._granted = credits
        self._window = window
        self._sent = self._begun = self._released = 0
        self._next: dict[int, int] = {}  # channel -> sequence of its next put

    @property
    def room(self) -> int:
        """Messages that may be sent now."""
        return self._granted - self._sent

    @property
    def open(self) -> bool:
        """Whether another put may begin."""
        return self._begun - self._released < self._window

    def begin(self, channel: int) -> int:
        """The sequence of a new put, which must be ``open`` to it."""
        sequence = self._next.get(channel, 0)
        self._next[channel] = (sequence + 1) % SEQUENCES
        self._begun += 1
        return sequence

    def spend(self) -> None:
        """A message goes out."""
        self._sent += 1

    def update(self, granted: int, released: int) -> None:
        """What the peer last said, or said earlier."""
        if released > self._begun or granted < 0:
            raise ProtocolError(f"released {released} puts of {self._begun}")
        if granted > self._granted:
            self._granted = granted
        if released > self._released:
            self._released = released


class _Channel:
    __slots__ = ("next", "waiting")

    def __init__(self) -> None:
        self.next = 0  # sequence of the next put to be released
        self.waiting: dict[int, list[int]] = {}  # sequence -> [writes come, writes to come or -1, signal offset, signal value]


class Incoming:
    """The receiver's half: counts messages, and releases signals in the order of their channels.

    Parameters
    ----------
    release
        ``release(signal_offset, signal_value)`` makes a signal visible.
    credits
        Receives posted for messages; those for updates come on top.
    """

    __slots__ = ("_channels", "_consumed", "_credits", "_release", "_released", "_told_granted", "_told_released", "_window")

    def __init__(self, release: Callable[[int, int], object], credits: int, window: int = WINDOW) -> None:
        self._release = release
        self._credits = credits
        self._window = window
        self._channels: dict[int, _Channel] = {}
        self._consumed = self._released = 0
        self._told_granted, self._told_released = credits, 0

    @property
    def due(self) -> bool:
        """Whether the peer should be told of credits and releases now, if need be by an update."""
        more = self._credits + self._consumed - self._told_granted
        return 4 * more >= self._credits or 4 * (self._released - self._told_released) >= self._window

    def tell(self) -> tuple[int, int]:
        """(granted, released), about to be sent."""
        self._told_granted, self._told_released = self._credits + self._consumed, self._released
        return self._told_granted, self._told_released

    def write(self, imm: int) -> None:
        """The bytes of a write have come, and its receive is posted again."""
        self._consumed += 1
        channel, sequence = imm >> SEQUENCE_BITS, imm & (SEQUENCES - 1)
        state, put = self._put(channel, sequence)
        put[0] += 1
        if put[0] == put[1] and sequence == state.next:
            self._advance(state)
        elif put[0] > put[1] >= 0:
            raise ProtocolError(f"channel {channel}, sequence {sequence}: more than {put[1]} writes")

    def announce(self, channel: int, sequence: int, writes: int, signal_offset: int, signal_value: int) -> None:
        """An announcement has come, and its receive is posted again."""
        self._consumed += 1
        state, put = self._put(channel, sequence)
        if put[1] >= 0:
            raise ProtocolError(f"channel {channel}, sequence {sequence}: announced twice")
        if put[0] > writes:
            raise ProtocolError(f"channel {channel}, sequence {sequence}: {put[0]} writes came, {writes} announced")
        put[1], put[2], put[3] = writes, signal_offset, signal_value
        if put[0] == writes and sequence == state.next:
            self._advance(state)

    def _put(self, channel: int, sequence: int) -> tuple[_Channel, list[int]]:
        state = self._channels.get(channel)
        if state is None:
            state = self._channels[channel] = _Channel()
        put = state.waiting.get(sequence)
        if put is None:
            if (sequence - state.next) % SEQUENCES >= self._window:
                raise ProtocolError(f"channel {channel}: sequence {sequence} is outside the window that begins at {state.next}")
            put = state.waiting[sequence] = [0, -1, 0, 0]
        return state, put

    def _advance(self, state: _Channel) -> None:
        waiting = state.waiting
        while (put := waiting.get(state.next)) is not None and put[0] == put[1]:
            self._release(put[2], put[3])
            del waiting[state.next]
            state.next = (state.next + 1) % SEQUENCES
            self._released += 1
