"""The counting protocol of transport srd, without a network: what either end of a direction between two ranks knows.

Compiled it is ``kernels_src/proxy/counting.hpp``.
"""

from __future__ import annotations

from collections.abc import Callable

from mkernel.transport.compiled import Rule

__all__ = ["CHANNELS", "SEQUENCES", "WINDOW", "Incoming", "Outgoing", "ProtocolError", "imm"]

SEQUENCE_BITS = 16
SEQUENCES = 1 << SEQUENCE_BITS
CHANNELS = 1 << (32 - SEQUENCE_BITS)
WINDOW = SEQUENCES // 8

_RULES = {
    Rule.released: "released {number} puts of {limit}",
    Rule.more: "channel {channel}, sequence {sequence}: more than {limit} writes",
    Rule.twice: "channel {channel}, sequence {sequence}: announced twice",
    Rule.fewer: "channel {channel}, sequence {sequence}: {number} writes came, {limit} announced",
    Rule.window: "channel {channel}: sequence {sequence} is outside the window that begins at {limit}",
    Rule.length: "a message of {number} bytes",
    Rule.flag_outside: "flag at {number} outside the signal segment (or not aligned)",
}


class ProtocolError(Exception):
    """The peer broke the protocol: a bug, or another version of mkernel."""

    @classmethod
    def of(cls, rule: Rule, *, channel: int = 0, sequence: int = 0, number: int = 0, limit: int = 0) -> ProtocolError:
        """Which rule, and the numbers that it has (``kernels_src/proxy/interface.hpp``)."""
        return cls(_RULES[rule].format(channel=channel, sequence=sequence, number=number, limit=limit))


def imm(channel: int, sequence: int) -> int:
    """The immediate of the writes of a put: 32 bits."""
    return channel << SEQUENCE_BITS | sequence


class Outgoing:
    """The sender's half of one direction between two ranks: numbers puts, and counts what the peer allows.

    Parameters
    ----------
    credits
        Receives that the peer had posted for messages when the connection was made.
    window
        The most puts that are not known to be released.
    """

    __slots__ = ("_begun", "_granted", "_next", "_released", "_sent", "_window")

    def __init__(self, credits: int, window: int = WINDOW) -> None:
        self._granted = credits
        self._window = window
        self._sent = self._begun = self._released = 0
        self._next: dict[int, int] = {}  # channel -> sequence of its next put

    @property
    def room(self) -> int:
        """How many messages may be sent now."""
        return self._granted - self._sent

    @property
    def open(self) -> bool:
        """Whether another put may begin."""
        return self._begun - self._released < self._window

    def begin(self, channel: int) -> int:
        """Begin a put; returns its sequence. Call it only while ``open``."""
        sequence = self._next.get(channel, 0)
        self._next[channel] = (sequence + 1) % SEQUENCES
        self._begun += 1
        return sequence

    def spend(self) -> None:
        """Count a message that is sent."""
        self._sent += 1

    def update(self, granted: int, released: int) -> None:
        """Take over the counts of a message of the peer, which may be older than those already known. Raises ProtocolError."""
        if released > self._begun or granted < 0:
            raise ProtocolError.of(Rule.released, number=released, limit=self._begun)
        if granted > self._granted:
            self._granted = granted
        if released > self._released:
            self._released = released


class _Channel:
    __slots__ = ("next", "waiting")

    def __init__(self) -> None:
        self.next = 0  # sequence of the next put to be released
        self.waiting: dict[int, list[int]] = {}  # sequence -> [writes received, writes announced or -1, signal offset, signal value]


class Incoming:
    """The receiver's half: counts messages, and releases the signals of each channel in order.

    Parameters
    ----------
    release
        ``release(signal_offset, signal_value)`` makes a signal visible.
    credits
        Receives posted for messages, without those for updates.
    window
        The most puts that the peer may have begun and not seen released.
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
        """Whether the peer must be told of credits and releases now, by an update if nothing else is sent."""
        more = self._credits + self._consumed - self._told_granted
        return 4 * more >= self._credits or 4 * (self._released - self._told_released) >= self._window

    def tell(self) -> tuple[int, int]:
        """The counts (granted, released) for a message that is sent now."""
        self._told_granted, self._told_released = self._credits + self._consumed, self._released
        return self._told_granted, self._told_released

    def write(self, imm: int) -> None:
        """Count a write whose bytes have come and whose receive is posted again. Raises ProtocolError."""
        self._consumed += 1
        channel, sequence = imm >> SEQUENCE_BITS, imm & (SEQUENCES - 1)
        state, put = self._put(channel, sequence)
        put[0] += 1
        if put[0] == put[1] and sequence == state.next:
            self._advance(state)
        elif put[0] > put[1] >= 0:
            raise ProtocolError.of(Rule.more, channel=channel, sequence=sequence, number=put[0], limit=put[1])

    def announce(self, channel: int, sequence: int, writes: int, signal_offset: int, signal_value: int) -> None:
        """Take an announcement that has come and whose receive is posted again. Raises ProtocolError."""
        self._consumed += 1
        state, put = self._put(channel, sequence)
        if put[1] >= 0:
            raise ProtocolError.of(Rule.twice, channel=channel, sequence=sequence)
        if put[0] > writes:
            raise ProtocolError.of(Rule.fewer, channel=channel, sequence=sequence, number=put[0], limit=writes)
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
                raise ProtocolError.of(Rule.window, channel=channel, sequence=sequence, limit=state.next)
            put = state.waiting[sequence] = [0, -1, 0, 0]
        return state, put

    def _advance(self, state: _Channel) -> None:
        waiting = state.waiting
        while (put := waiting.get(state.next)) is not None and put[0] == put[1]:
            self._release(put[2], put[3])
            del waiting[state.next]
            state.next = (state.next + 1) % SEQUENCES
            self._released += 1
