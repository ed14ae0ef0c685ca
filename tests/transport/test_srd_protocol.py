"""The counting protocol of srd by itself: two ranks, a network that delivers in any order, and receivers that look late."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from mkernel.transport.counting import WINDOW, Incoming, Outgoing, ProtocolError, imm
from mkernel.transport.srd import SPARE, UPDATE
from tests.transport.compiled_bugs import Bug
from tests.transport.compiled_counting import halves
from tests.transport.srd_bugs import COUNTING_BUGS

CHANNELS = (0, 1, 7, 65535)


class Checked:
    """What must be true, counted apart from the protocol: per channel, which writes have landed and which signals are due."""

    def __init__(self) -> None:
        self.landed: dict[tuple[int, int], int] = {}  # (channel, number of the put) -> writes to come still
        self.released = dict.fromkeys(CHANNELS, 0)
        self.total = 0

    def sent(self, channel: int, number: int, writes: int) -> None:
        self.landed[channel, number] = writes

    def release(self, offset: int, value: int) -> None:
        """Signal ``value`` of the flag at ``offset``: one more than the last, and all its bytes are there."""
        channel = CHANNELS[offset // 8]
        assert value == self.released[channel] + 1, f"channel {channel}: signal {value} after {self.released[channel]}"
        left = self.landed.pop((channel, value - 1))
        assert left == 0, f"channel {channel}: signal {value} is visible, {left} writes are missing"
        self.released[channel] = value
        self.total += 1


class Side:
    """One rank: sends to the other, and receives from it."""

    def __init__(self, world: World, incoming: type, outgoing: type) -> None:
        self.world = world
        self.checked = Checked()
        self.out = outgoing(world.credits, world.window)
        self.incoming = incoming(self.checked.release, world.credits, world.window)
        self.wire: list[tuple[Any, ...]] = []  # on the way to this side
        self.queue: deque[tuple[Any, ...]] = deque()  # completions that nobody has looked at
        self.receives = world.credits + SPARE
        self.todo = world.puts
        self.numbers = dict.fromkeys(CHANNELS, 0)
        self.half: list[Any] | None = None  # the put under way: [channel, number, sequence, writes, writes sent]
        self.updating = False  # an update is not delivered
        self.other: Side = self

    def send(self) -> bool:
        rng, out = self.world.rng, self.out
        if self.half is None and self.todo and out.open:
            channel = CHANNELS[int(rng.random() * len(CHANNELS))]
            number = self.numbers[channel]
            self.numbers[channel] += 1
            self.todo -= 1
            writes = (0, 1, 1, 1, 2, 5)[int(rng.random() * 6)]
            self.other.checked.sent(channel, number, writes)
            self.half = [channel, number, out.begin(channel), writes, 0]
        half = self.half
        if half is None or out.room <= 0:
            return False
        out.spend()
        channel, number, sequence, writes, done = half
        if done < writes:
            half[4] += 1
            self.other.wire.append(("write", channel, number, imm(channel, sequence)))
        else:
            counts = self.incoming.tell()
            self.other.wire.append(("put", channel, sequence, writes, CHANNELS.index(channel) * 8, number + 1, *counts))
            self.half = None
        return True

    def update(self) -> None:
        if self.incoming.due and not self.updating:
            self.updating = True
            self.other.wire.append(("update", 0, 0, UPDATE, 0, 0, *self.incoming.tell()))

    def arrive(self) -> None:
        """Any message on the way, or now and then the one that has been on the way longest."""
        wire, rng = self.wire, self.world.rng
        index = 0 if rng.random() < self.world.fair else int(rng.random() * len(wire))
        message = wire[index]
        wire[index] = wire[-1]
        wire.pop()
        self.receives -= 1
        assert self.receives >= 0, "a message came, and no receive was posted"
        if message[0] == "write":
            self.checked.landed[message[1], message[2]] -= 1
        elif message[0] == "update":
            self.other.updating = False
        self.queue.append(message)

    def look(self) -> None:
        while self.queue:
            message = self.queue.popleft()
            self.receives += 1
            if message[0] == "write":
                self.incoming.write(message[3])
                continue
            self.out.update(*message[6:])
            if message[0] == "put":
                self.incoming.announce(*message[1:6])


class World:
    def __init__(
        self,
        puts: int,
        *,
        seed: int = 0,
        credits: int = 64,
        window: int = WINDOW,
        fair: float = 0.02,
        incoming: type = Incoming,
        outgoing: type = Outgoing,
        both: bool = True,
    ) -> None:
        self.rng, self.puts, self.credits, self.window, self.fair = random.Random(seed), puts, credits, window, fair
        self.sides = [Side(self, incoming, outgoing), Side(self, incoming, outgoing)]
        self.sides[0].other, self.sides[1].other = self.sides[1], self.sides[0]
        if not both:
            self.sides[1].todo = 0

    def run(self) -> None:
        random, sides = self.rng.random, self.sides
        idle = 0
        while any(side.todo or side.half or side.wire or side.queue for side in sides):
            moved = False
            for side in sides:
                for _ in range(int(random() * 32)):
                    if not side.send():
                        break
                    moved = True
                if side.wire:
                    moved = True
                    for _ in range(min(len(side.wire), 1 + int(random() * 32))):
                        side.arrive()
                if side.queue and random() < 0.3:
                    moved = True
                    side.look()
                side.update()
                moved = moved or bool(side.queue)
            idle = 0 if moved else idle + 1
            assert idle < 100, "both sides wait for each other"
        for side in sides:
            sent = side.other.numbers
            assert side.checked.released == sent, f"sent {sent}, released {side.checked.released}"


@pytest.fixture(params=["python", "compiled"])
def pair(request: pytest.FixtureRequest) -> dict[str, type]:
    """The halves, in either language, for a ``World``."""
    incoming, outgoing = (Incoming, Outgoing) if request.param == "python" else halves()
    return {"incoming": incoming, "outgoing": outgoing}


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["python", "compiled"], indirect=True)
def test_a_million_puts(pair: dict[str, type]) -> None:
    """Half a million each way: every channel's sequences wrap."""
    world = World(500_000, seed=1, **pair)
    world.run()
    assert all(number > 65536 for side in world.sides for number in side.numbers.values())
    assert sum(side.checked.total for side in world.sides) == 1_000_000


@pytest.mark.parametrize("credits", [4, 16, 300])
@pytest.mark.parametrize("both", [False, True], ids=["one_way", "both_ways"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.drawn(8)
def test_few_credits_and_small_windows(credits: int, both: bool, seed: int, pair: dict[str, type]) -> None:
    World(3000, seed=seed, credits=credits, window=8, both=both, **pair).run()
    World(3000, seed=seed, credits=credits, both=both, fair=0.0, **pair).run()


class _SignalBeforeData(Incoming):
    def announce(self, channel: int, sequence: int, writes: int, signal_offset: int, signal_value: int) -> None:
        super().announce(channel, sequence, 0 if writes == 1 else writes, signal_offset, signal_value)


class _Early(Incoming):
    """One signal too far: a flag of the epoch before its time."""

    def announce(self, channel: int, sequence: int, writes: int, signal_offset: int, signal_value: int) -> None:
        super().announce(channel, sequence, writes, signal_offset, signal_value + 1)


class _OwnCount(Incoming):
    """The receiver's own count in place of the sender's value."""

    def announce(self, channel: int, sequence: int, writes: int, signal_offset: int, signal_value: int) -> None:
        super().announce(channel, sequence, writes, signal_offset, self._released + 1)


class _NoOrder(Incoming):
    def _advance(self, state: Any) -> None:
        state.next = min((s for s, put in state.waiting.items() if put[0] == put[1]), default=state.next)
        super()._advance(state)

    def announce(self, channel: int, sequence: int, writes: int, signal_offset: int, signal_value: int) -> None:
        super().announce(channel, sequence, writes, signal_offset, signal_value)
        self._advance(self._channels[channel])


class _NoWrap(Outgoing):
    """Sequences that begin again one too early."""

    def begin(self, channel: int) -> int:
        sequence = super().begin(channel)
        if sequence == 65535:
            self._next[channel] = 1
        return sequence


class _Overspends(Outgoing):
    @property
    def room(self) -> int:
        return super().room + SPARE + 1


class _NoWindow(Outgoing):
    @property
    def open(self) -> bool:
        return True


class _NeverTells(Incoming):
    @property
    def due(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("found", "planted"),
    [
        ("writes are missing|more than 0 writes|1 writes came, 0|outside the window", {"incoming": _SignalBeforeData}),
        ("signal 2 after 0", {"incoming": _Early}),
        ("signal [0-9]+ after", {"incoming": _OwnCount}),
        ("signal [0-9]+ after|writes are missing", {"incoming": _NoOrder}),
        ("wait for each other", {"incoming": _NeverTells, "both": False}),
        ("no receive was posted", {"outgoing": _Overspends}),
        ("outside the window", {"outgoing": _NoWindow, "window": 8}),
        ("outside the window|announced twice|wait for each other", {"outgoing": _NoWrap, "puts": 300_000}),
    ],
    ids=lambda planted: next(value.__name__ for value in planted.values() if isinstance(value, type)) if isinstance(planted, dict) else "",
)
def test_planted_bugs_are_found(found: str, planted: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, ProtocolError), match=found):
        World(planted.pop("puts", 5000), **planted).run()


@pytest.mark.parametrize("bug", COUNTING_BUGS, ids=lambda bug: bug.name)
@pytest.mark.drawn(1)
def test_planted_bugs_of_the_compiled_halves_are_found(bug: Bug) -> None:
    incoming, outgoing = halves(bug)
    with pytest.raises((AssertionError, ProtocolError), match=bug.message):
        World(5000, incoming=incoming, outgoing=outgoing, window=8 if bug.name == "no_window" else WINDOW, both=False).run()


def test_what_a_peer_may_not_send_is_refused(pair: dict[str, type]) -> None:
    released: list[tuple[int, int]] = []
    incoming = pair["incoming"](lambda offset, value: released.append((offset, value)), 16)
    incoming.announce(1, 0, 1, 8, 5)
    with pytest.raises(ProtocolError, match="announced twice"):
        incoming.announce(1, 0, 1, 8, 5)
    incoming.write(imm(1, 0))
    assert released == [(8, 5)]
    with pytest.raises(ProtocolError, match="outside the window"):
        incoming.write(imm(1, 0))  # once more, after its release
    incoming.write(imm(2, 0))
    incoming.write(imm(2, 0))
    with pytest.raises(ProtocolError, match="2 writes came, 1 announced"):
        incoming.announce(2, 0, 1, 8, 5)
    with pytest.raises(ProtocolError, match="released 1 puts of 0"):
        pair["outgoing"](16).update(16, 1)
