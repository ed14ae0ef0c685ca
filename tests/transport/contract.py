"""What every transport must pass. One body; a harness per transport says how to reach its memory and how time passes.

A network is ranks that reach each other only through a transport, each behind its ring and its engine. ``turn`` lets a little happen and
says whether more may come; ``watcher`` is called at every moment at which memory may have changed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from mkernel.abi import RING_SLOTS

__all__ = ["CHECKS", "Network"]


class Issuer(Protocol):
    head: int

    @property
    def completed(self) -> int: ...

    def issue(
        self, channel: int, dst_rank: int, src_offset: int, dst_offset: int, size: int, signal_offset: int, signal_value: int
    ) -> int | None: ...


class Network(Protocol):
    watcher: Callable[[], None]

    @property
    def ranks(self) -> Sequence[int]: ...

    @property
    def producers(self) -> Sequence[Issuer]: ...

    def flag_offset(self, index: int) -> int: ...

    def flag(self, rank: int, index: int) -> int: ...

    def read(self, rank: int, offset: int, size: int) -> bytes: ...

    def write(self, rank: int, offset: int, data: bytes) -> None: ...

    def turn(self) -> bool: ...


CHANNELS = 3
MESSAGES = 150  # per rank
LONGEST = 1500  # bytes
SOURCE_SLOTS = 16  # few, so that source memory is reused all the time
SLOT_BYTES = 2048
TURNS = 1_000_000  # enough for any check: a transport that needs more is stuck


@dataclasses.dataclass
class _Message:
    source: int
    offset: int  # at the destination
    data: bytes
    value: int


class _Flow:
    """The puts of one source, destination and channel, and the flag that counts them."""

    def __init__(self, source: int, destination: int, channel: int) -> None:
        self.source, self.destination, self.channel = source, destination, channel
        self.flag = source * CHANNELS + channel
        self.messages: list[_Message] = []
        self.seen = 0  # messages whose signal was observed

    def check(self, network: Network) -> None:
        """Whatever the flag says now, the bytes of all puts up to it must be there."""
        value = network.flag(self.destination, self.flag)
        values = [0, *(message.value for message in self.messages)]
        assert value in values, f"{self.name}: flag is {value}, which was never sent"
        seen = values.index(value)
        assert seen >= self.seen, f"{self.name}: flag went back from put {self.seen} to {seen}"
        for index in range(self.seen, seen):
            message = self.messages[index]
            here = network.read(self.destination, message.offset, len(message.data))
            assert here == message.data, f"{self.name}: signal {value} is visible before the bytes of put {index}"
        self.seen = seen

    @property
    def name(self) -> str:
        return f"rank {self.source} to {self.destination}, channel {self.channel}"


def check_signal_never_before_data(network: Network, seed: int = 0) -> None:
    """Random puts on all channels between all ranks, sizes 0 included; sources overwritten as soon as their credit is back."""
    rng = random.Random(seed)
    flows = {
        (source, destination, channel): _Flow(source, destination, channel)
        for source in network.ranks
        for destination in network.ranks
        for channel in range(CHANNELS)
        if source != destination
    }

    def watch() -> None:
        for flow in flows.values():
            flow.check(network)

    look = _install(network, watch)
    next_offset = dict.fromkeys(network.ranks, SOURCE_SLOTS * SLOT_BYTES)
    todo = dict.fromkeys(network.ranks, MESSAGES)
    ended = dict.fromkeys(network.ranks, 0)
    for _ in range(TURNS):
        for rank in network.ranks:
            issuer = network.producers[rank]
            for ticket in range(ended[rank], issuer.completed):
                network.write(rank, ticket % SOURCE_SLOTS * SLOT_BYTES, rng.randbytes(SLOT_BYTES))
            ended[rank] = issuer.completed
            for _ in range(rng.randrange(4)):
                if todo[rank] and issuer.head - issuer.completed < SOURCE_SLOTS:
                    todo[rank] -= 1
                    _issue_random(network, rank, flows, next_offset, rng)
        more = network.turn()
        look()
        if not any(todo.values()) and all(issuer.completed == issuer.head for issuer in network.producers):
            break
        room = any(todo[rank] and network.producers[rank].head - ended[rank] < SOURCE_SLOTS for rank in network.ranks)
        assert more or room, "puts are in flight, but nothing will ever complete them"
    else:
        raise AssertionError(f"no end in {TURNS} turns")
    _settle(network, lambda: all(flow.seen == len(flow.messages) for flow in flows.values()), look)
    for flow in flows.values():
        assert flow.seen == len(flow.messages), f"{flow.name}: {flow.seen} of {len(flow.messages)} signals arrived"
        for index, message in enumerate(flow.messages):
            here = network.read(flow.destination, message.offset, len(message.data))
            assert here == message.data, f"{flow.name}: the bytes of put {index} changed later"


def _issue_random(
    network: Network, rank: int, flows: dict[tuple[int, int, int], _Flow], next_offset: dict[int, int], rng: random.Random
) -> None:
    flow = rng.choice([flow for flow in flows.values() if flow.source == rank])
    size = rng.choice((0, 1, 8, rng.randrange(LONGEST), LONGEST))
    issuer = network.producers[rank]
    source = issuer.head % SOURCE_SLOTS * SLOT_BYTES
    target = next_offset[flow.destination]
    next_offset[flow.destination] += size
    value = (flow.messages[-1].value if flow.messages else 0) + rng.randrange(1, 5)
    data = rng.randbytes(size)
    network.write(rank, source, data)
    flow.messages.append(_Message(rank, target, data, value))
    ticket = issuer.issue(flow.channel, flow.destination, source, target, size, network.flag_offset(flow.flag), value)
    assert ticket is not None


def check_wrap(network: Network, puts: int = 3 * RING_SLOTS + 5) -> None:
    """The ring wraps many times: every put's number lands before its signal, and its source slot is reused on its credit."""
    issuer, source, target = network.producers[0], 0, 1
    slots = 4 * RING_SLOTS  # at the destination: more than can be in flight
    first = RING_SLOTS * 8

    def watch() -> None:
        value = network.flag(target, 0)
        if value:
            here = int.from_bytes(network.read(target, first + (value - 1) % slots * 8, 8), "little")
            assert here >= value, f"signal {value} is visible, but its slot holds {here}"

    for _ in range(TURNS):
        while issuer.head < puts and issuer.head - issuer.completed < RING_SLOTS:
            number = issuer.head + 1
            network.write(source, (number - 1) % RING_SLOTS * 8, number.to_bytes(8, "little"))
            slot, place = (number - 1) % RING_SLOTS * 8, first + (number - 1) % slots * 8
            assert issuer.issue(0, target, slot, place, 8, network.flag_offset(0), number) == number - 1
        more = network.turn()
        watch()
        if issuer.completed == puts:
            break
        assert more, f"{issuer.completed} of {puts} puts completed, and nothing more will"
    else:
        raise AssertionError(f"no end in {TURNS} turns")
    _settle(network, lambda: network.flag(target, 0) >= puts, watch)
    assert network.flag(target, 0) == puts, f"the last signal is {network.flag(target, 0)}, not {puts}"
    last = range(max(puts - slots, 0), puts)
    got = [int.from_bytes(network.read(target, first + number % slots * 8, 8), "little") for number in last]
    wrong = [number for number, here in zip(last, got, strict=True) if here != number + 1]
    assert not wrong, f"the bytes of puts {wrong[:5]} ... were overwritten or never came"


def check_full_ring(network: Network) -> None:
    """A full ring gives no slot away before a completion; afterwards it gives exactly as many as completed."""
    issuer = network.producers[0]
    for lap in range(2):
        for number in range(lap * RING_SLOTS, (lap + 1) * RING_SLOTS):
            channel = number % CHANNELS
            assert issuer.issue(channel, 1, 0, 0, 8, network.flag_offset(channel), number + 1) == number
        refused = issuer.issue(0, 1, 0, 0, 8, network.flag_offset(0), 1 << 40)
        assert refused is None, "a 1025th command fits into 1024 slots"
        before = issuer.completed
        _run(network, lambda before=before: issuer.completed > before)
        assert issuer.completed <= (lap + 1) * RING_SLOTS, "more credits than commands"
        _run(network, lambda lap=lap: issuer.completed >= (lap + 1) * RING_SLOTS)
        assert issuer.completed == (lap + 1) * RING_SLOTS, "more credits than commands"
    last = {number % CHANNELS: number + 1 for number in range(2 * RING_SLOTS)}
    _settle(network, lambda: all(network.flag(1, channel) >= last[channel] for channel in range(CHANNELS)))
    flags = {channel: network.flag(1, channel) for channel in range(CHANNELS)}
    assert flags == last, f"flags by channel are {flags}, not {last}"


def check_signal_only(network: Network) -> None:
    """Puts of no bytes are signals in the order of their channel, behind the data of earlier puts."""
    issuer = network.producers[0]
    network.write(0, 0, b"x" * 4096)

    def watch() -> None:
        if network.flag(1, 0) >= 1:
            assert network.read(1, 0, 4096) == b"x" * 4096, "a signal without data overtook the data before it on its channel"

    look = _install(network, watch)
    issuer.issue(0, 1, 0, 0, 4096, network.flag_offset(1), 1)
    issuer.issue(0, 1, 0, 0, 0, network.flag_offset(0), 1)
    issuer.issue(0, 1, 0, 0, 0, network.flag_offset(0), 2)
    _run(network, lambda: issuer.completed == 3, look)
    _settle(network, lambda: network.flag(1, 0) >= 2 and network.flag(1, 1) >= 1, look)
    assert [network.flag(1, 0), network.flag(1, 1)] == [2, 1]


def _install(network: Network, watch: Callable[[], None]) -> Callable[[], None]:
    """Watch every change of memory; the returned function looks once more and raises the first violation.

    The violation is kept, not raised, at the change itself: there the transport would see it and call it a failure of its own.
    """
    violations: list[AssertionError] = []

    def keep() -> None:
        try:
            watch()
        except AssertionError as violation:
            violations.append(violation)

    def look() -> None:
        if violations:
            raise violations[0]
        watch()

    network.watcher = keep
    return look


def _run(network: Network, ended: Callable[[], bool], look: Callable[[], None] = lambda: None) -> None:
    for _ in range(TURNS):
        if ended():
            return
        assert network.turn(), "commands are in flight, but nothing will ever complete them"
        look()
    raise AssertionError(f"no end in {TURNS} turns")


def _settle(network: Network, arrived: Callable[[], bool], look: Callable[[], None] = lambda: None) -> None:
    """Wait for signals that may trail the completions (a completion only says that the source may be reused)."""
    for _ in range(TURNS):
        look()
        if arrived() or not network.turn():
            return


CHECKS: dict[str, Callable[..., None]] = {
    "signal_never_before_data": check_signal_never_before_data,
    "wrap": check_wrap,
    "full_ring": check_full_ring,
    "signal_only": check_signal_only,
}
