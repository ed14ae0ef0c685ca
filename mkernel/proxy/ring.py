"""The consumer's side of the device-to-host command ring (``abi::Ring``), which has one reader and many producers on the device."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable

from mkernel.abi import RING_SLOTS, Command, Ring
from mkernel.transport.base import Put

__all__ = ["RING_BYTES", "LaunchCount", "RingReader", "destination"]

RING_BYTES = ctypes.sizeof(Ring)

_SLOTS_OFFSET: int = Ring.slots.offset
_SLOT_BYTES = ctypes.sizeof(Command)
_MASK = RING_SLOTS - 1
_LAUNCHED, _ENDED, _CAPTURED = (Ring.launched.offset >> 3, Ring.ended.offset >> 3, Ring.captured.offset >> 3)
_LAUNCHES = (1 << 32) - 1  # numbers of launches: 1 .. this, and again
_PAYLOAD_OFFSET: int = _SLOTS_OFFSET + Command.channel.offset
_PAYLOAD = struct.Struct("=IIQQQQQ")  # Command from `channel` to `signal_value`


def destination(ring: int, ticket: int) -> int | None:
    """The rank to which command ``ticket`` of the ring at address ``ring`` goes; None if its slot holds another command, or none."""
    slot = Ring.from_address(ring).slots[ticket & _MASK]
    return int(slot.dst_rank) if slot.ticket == ticket + 1 else None


class LaunchCount:
    """The host's side of what an engine knows of launches. ``ring``: its address."""

    def __init__(self, ring: int) -> None:
        self._ring = Ring.from_address(ring)
        self._number = 0

    def launch(self) -> int:
        """Announce a launch; returns its number, for ``World.launch``."""
        self._number = self._number % _LAUNCHES + 1
        self._ring.launched = self._number
        return self._number

    def capture(self) -> None:
        """Say that calls are captured in a graph."""
        self._ring.captured = 1


class RingReader:
    """Takes commands off the ring and returns their slots.

    Parameters
    ----------
    ring
        The ring, zeroed before any producer runs: a writable buffer of at least ``RING_BYTES``, or its address in this process.
    load, store
        Acquire load ``load(address) -> value`` and release store ``store(address, value)`` of a 64-bit word. By default both are plain
        accesses through a ``memoryview``, each of which is one aligned instruction. That is enough on x86-64. On AArch64 it is enough to
        load (see ``take``), but a plain store may overtake the copies before it: pass ``store``. Under ThreadSanitizer, which cannot see
        what Python does, pass both.

    Raises
    ------
    ValueError
        The buffer is too small, or not aligned to 8 bytes.
    """

    def __init__(
        self,
        ring: memoryview | bytearray | int,
        *,
        load: Callable[[int], int] | None = None,
        store: Callable[[int, int], object] | None = None,
    ) -> None:
        if isinstance(ring, int):
            self._bytes = memoryview((ctypes.c_char * RING_BYTES).from_address(ring)).cast("B")
        else:
            self._bytes = memoryview(ring).cast("B")[:RING_BYTES]
        if len(self._bytes) < RING_BYTES:
            raise ValueError(f"a ring has {RING_BYTES} bytes, got {len(self._bytes)}")
        self._words = self._bytes.cast("Q")
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        if address % 8:
            raise ValueError(f"ring at {address:#x}: must be 8-byte aligned")
        self._address = address
        self._load = load
        self._store = store
        self._taken = 0
        self._completed = 0
        self._early: set[int] = set()  # tickets that completed before one below them

    @property
    def address(self) -> int:
        """Where the ring is in this process."""
        return self._address

    @property
    def taken(self) -> int:
        """The number of commands taken so far, which is the ticket of the next one."""
        return self._taken

    @property
    def completed(self) -> int:
        """The number of commands that are complete with all before them, as published to the device."""
        return self._completed

    @property
    def in_flight(self) -> int:
        """The number of commands taken and not completed."""
        return self._taken - self._completed - len(self._early)

    @property
    def launching(self) -> bool:
        """Whether a call that the host has launched, and counted, has not ended."""
        return self._words[_LAUNCHED] != self._words[_ENDED]

    @property
    def captured(self) -> bool:
        """Whether calls have been captured in graphs, whose replays may issue commands at any time."""
        return self._words[_CAPTURED] != 0

    def waiting(self) -> bool:
        """Whether there is a command to take."""
        first = self._taken
        return self._words[(_SLOTS_OFFSET + (first & _MASK) * _SLOT_BYTES) >> 3] == first + 1

    def take(self, limit: int = 64) -> list[Put]:
        """The next commands, at most ``limit``, in ring order. Never blocks."""
        words, load, unpack, view = self._words, self._load, _PAYLOAD.unpack_from, self._bytes
        puts = []
        for ticket in range(self._taken, self._taken + limit):
            offset = _SLOTS_OFFSET + (ticket & _MASK) * _SLOT_BYTES
            seen = words[offset >> 3] if load is None else load(self._address + offset)
            if seen != ticket + 1:
                break
            # The payload's address depends on the ticket word: weakly ordered machines keep such loads in order.
            puts.append(Put(ticket, *unpack(view, _PAYLOAD_OFFSET + ((seen - 1) & _MASK) * _SLOT_BYTES)))
        self._taken += len(puts)
        return puts

    def complete(self, ticket: int) -> None:
        """Complete one command, in any order. Raises as ``complete_all`` does."""
        self.complete_all((ticket,))

    def complete_all(self, tickets: Iterable[int]) -> None:
        """Complete commands, in any order. One store tells the device how many are complete with all before them.

        Raises
        ------
        ValueError
            A ticket was never taken, or is completed twice: the transport has miscounted.
        """
        prefix, early = self._completed, self._early
        for ticket in tickets:
            if not prefix <= ticket < self._taken or ticket in early:
                raise ValueError(f"ticket {ticket} completed, but only {prefix} .. {self._taken - 1} are in flight")
            if ticket != prefix:
                early.add(ticket)
                continue
            prefix += 1
            while early and prefix in early:
                early.remove(prefix)
                prefix += 1
        if prefix != self._completed:
            self._completed = prefix
            if self._store is None:
                self._words[0] = prefix
            else:
                self._store(self._address, prefix)

    def close(self) -> None:
        """Release the views, so that the memory can be unmapped."""
        self._words.release()
        self._bytes.release()
