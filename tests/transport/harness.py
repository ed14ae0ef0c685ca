"""A network of ranks in this process, in virtual time, with a copier that does everything at the latest legal moment."""

from __future__ import annotations

import abc
import ctypes
import random
from collections.abc import Callable
from typing import Self

from mkernel.abi import RING_SLOTS, SIGNAL_FLAGS, Command, Ring
from mkernel.memory.memfd import MemfdSegment
from mkernel.proxy.engine import Engine
from mkernel.proxy.ring import RING_BYTES, RingReader
from mkernel.transport.base import Transport
from mkernel.transport.emulated import EmulatedTransport, Faults

__all__ = ["EmulatedNetwork", "LateCopier", "LocalNetwork", "Producer", "VirtualClock"]


class VirtualClock:
    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


class LateCopier:
    """A copy lands only when ``done`` says so, after a random number of looks, in two halves: nobody may use it before."""

    def __init__(self, seed: int = 0, on_change: Callable[[], None] = lambda: None) -> None:
        self._random = random.Random(seed)
        self._on_change = on_change
        self.closed = False

    def start(self, dst: int, src: int, size: int) -> list[int]:
        return [self._random.randrange(3), dst, src, size]

    def done(self, token: object) -> bool:
        assert isinstance(token, list)
        looks, dst, src, size = token
        if looks < 0:
            return True
        token[0] -= 1
        half = size // 2
        if looks == 1:
            ctypes.memmove(dst, src, half)
        elif looks == 0:
            ctypes.memmove(dst, src, size)
        self._on_change()
        return looks == 0

    def signal(self, address: int, value: int) -> None:
        ctypes.c_uint64.from_address(address).value = value
        self._on_change()

    def close(self) -> None:
        self.closed = True


class Producer:
    """The device's side of a ring: ``issue`` refuses when the ring is full."""

    def __init__(self) -> None:
        self.buffer = bytearray(RING_BYTES)
        self.ring = Ring.from_buffer(self.buffer)
        self.head = 0

    @property
    def completed(self) -> int:
        return int(self.ring.completed)

    def issue(
        self, channel: int, dst_rank: int, src_offset: int, dst_offset: int, size: int, signal_offset: int, signal_value: int
    ) -> int | None:
        """The ticket of the put, None when there is no free slot."""
        ticket = self.head
        if ticket - self.completed >= RING_SLOTS:
            return None
        slot: Command = self.ring.slots[ticket % RING_SLOTS]
        slot.channel, slot.dst_rank = channel, dst_rank
        slot.src_offset, slot.dst_offset, slot.bytes = src_offset, dst_offset, size
        slot.signal_offset, slot.signal_value = signal_offset, signal_value
        slot.ticket = ticket + 1
        self.head = ticket + 1
        return ticket


class LocalNetwork(abc.ABC):
    """``ranks`` ranks of this process, each its own node behind a ring: their memory, and their engines once a transport is open."""

    def __init__(self, ranks: int, heap_bytes: int, seed: int) -> None:
        self.ranks = range(ranks)
        self.clock = VirtualClock()
        self.watcher: Callable[[], None] = lambda: None
        self.random = random.Random(seed)
        self.heaps = [MemfdSegment(heap_bytes, 0, 1) for _ in self.ranks]
        self.signals = [MemfdSegment(1 << 16, 0, 1) for _ in self.ranks]
        self.producers = [Producer() for _ in self.ranks]
        self.engines: list[Engine] = []

    def start(self, rank: int, transport: Transport) -> None:
        """Put an engine between a rank's ring and its transport. By rank."""
        self.engines.append(Engine(RingReader(self.producers[rank].buffer), transport, self.clock))

    def flag_offset(self, index: int) -> int:
        return SIGNAL_FLAGS + 8 * index

    def flag(self, rank: int, index: int) -> int:
        return ctypes.c_uint64.from_address(self.signals[rank].address() + self.flag_offset(index)).value

    def read(self, rank: int, offset: int, size: int) -> bytes:
        return ctypes.string_at(self.heaps[rank].address() + offset, size)

    def write(self, rank: int, offset: int, data: bytes) -> None:
        ctypes.memmove(self.heaps[rank].address() + offset, data, len(data))

    def step_engines(self) -> bool:
        """All of them once, in random order. Whether any moved."""
        order = list(self.engines)
        self.random.shuffle(order)
        moved = [engine.step() for engine in order]  # all of them, not up to the first that moves
        return any(moved)

    @abc.abstractmethod
    def turn(self) -> bool:
        """Let a little happen. False: nothing will ever happen again."""

    def settle(self) -> None:
        """Let everything happen that still will."""
        while self.turn():
            pass

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for segment in [*self.heaps, *self.signals]:
            segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class EmulatedNetwork(LocalNetwork):
    """Ranks joined by emulated transports, in virtual time."""

    def __init__(
        self,
        ranks: int = 3,
        *,
        heap_bytes: int = 1 << 20,
        transport: type[EmulatedTransport] = EmulatedTransport,
        faults: Faults | None = None,
        gigabytes_per_second: float = 50.0,
        latency_us: float = 5.0,
        seed: int = 0,
    ) -> None:
        super().__init__(ranks, heap_bytes, seed)
        for rank in self.ranks:
            peers = {peer: (self.heaps[peer].address(), self.signals[peer].address()) for peer in self.ranks if peer != rank}
            opened = transport(
                rank,
                self.heaps[rank].address(),
                peers,
                LateCopier(seed + rank, lambda: self.watcher()),
                self.clock,
                gigabytes_per_second,
                latency_us,
                faults,
                heap_bytes=self.heaps[rank].size,
                signal_bytes=self.signals[rank].size,
            )
            self.start(rank, opened)

    def turn(self) -> bool:
        """Step the engines. When none moves, go to the next event."""
        if self.step_engines():
            return True
        events = [event for event in (engine.next_event_ns() for engine in self.engines) if event is not None]
        if not events:
            return False
        self.clock.now = max(self.clock.now, min(events))
        return True
