"""``python puts.py <transport> <small> <large>``: pipelined puts from each machine to the next, all contents verified.

``small`` puts of 8 to 256 bytes, then ``large`` ones of log-uniform size up to 4 MiB. Sender and receiver derive both lists and the random
pool that the bytes come from from the same seed. The receiver checks each put the moment its flag says so, and tells the sender how far it
is with a flag of its own, so that no destination is overwritten before it was looked at.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time

from node import MACHINE, MACHINES, QUIET, Node, Wires, counters

POOL = 8 << 20  # bytes at the beginning of each heap, the same everywhere
SPACE = 24 << 20  # behind it, where puts land; used round and round
WINDOW = 900  # puts under way: below the ring's size
CHANNELS = 3


class Puts:
    """The list of one sender: what comes from where in the pool, and where it lands."""

    def __init__(self, sender: int, small: int, large: int, seed: int) -> None:
        rng = random.Random(seed * 1000 + sender)
        sizes = [rng.randrange(8, 257) for _ in range(small)]
        budget = (512 << 20) // MACHINES  # of all machines together
        for _ in range(large):
            size = min(int(math.exp(rng.uniform(math.log(8), math.log(4 << 20)))), budget)
            budget -= size
            sizes.append(size)
        self.puts: list[tuple[int, int, int, int]] = []  # source, target, size, the put that must have been checked before
        place, laps = 0, 0
        ends: list[tuple[int, int]] = []  # (bytes of space used up to its end, number), in order
        oldest = 0
        for number, size in enumerate(sizes):
            if place + size > SPACE:
                laps, place = laps + 1, 0
            used = laps * SPACE + place
            while oldest < number and ends[oldest][0] <= used + size - SPACE:
                oldest += 1
            source = rng.randrange(POOL - size + 1)
            self.puts.append((source, POOL + place, size, oldest))
            place += -(-size // 8) * 8
            ends.append((used, number))

    @property
    def bytes(self) -> int:
        return sum(put[2] for put in self.puts)


def main(transport: str, small: int, large: int, seed: int) -> None:
    wires = Wires()
    node = Node(wires, transport, POOL + SPACE)
    pool = random.Random(seed).randbytes(POOL)
    node.heap[:POOL] = pool
    wires.exchange(b"")
    to, source = (MACHINE + 1) % MACHINES, (MACHINE - 1) % MACHINES
    mine, theirs = Puts(MACHINE, small, large, seed), Puts(source, small, large, seed)
    sent = checked = told = 0
    heap, flags = node.heap, [0] * CHANNELS
    issuer = node.producer
    begin = moved = time.monotonic()
    while sent < len(mine.puts) or checked < len(theirs.puts) or told < checked or issuer.completed < issuer.head:
        before = sent, checked, told, issuer.completed
        acknowledged = node.flag(CHANNELS)
        while sent < len(mine.puts) and issuer.head - issuer.completed < WINDOW:
            where, target, size, after = mine.puts[sent]
            if after > acknowledged or sent - acknowledged >= WINDOW:
                break
            channel = sent % CHANNELS
            node.issue(channel, to, where, target, size, channel, sent // CHANNELS + 1)
            sent += 1
        node.engine.step()
        for channel in range(CHANNELS):
            flags[channel] = node.flag(channel)
        while checked < len(theirs.puts) and flags[checked % CHANNELS] > checked // CHANNELS:
            where, target, size, _ = theirs.puts[checked]
            here = heap[target : target + size]
            assert here == memoryview(pool)[where : where + size], f"put {checked} of {size} bytes: its flag is up, its bytes are not there"
            here[:] = bytes(size)  # what comes next may not find it there
            checked += 1
        if checked - told >= WINDOW // 4 or (checked > told and before == (sent, checked, told, issuer.completed)):
            node.issue(CHANNELS, source, 0, 0, 0, CHANNELS, checked)
            told = checked
        now = time.monotonic()
        if before != (sent, checked, told, issuer.completed):
            moved = now
        else:
            time.sleep(0)  # the software card needs the processor too
        assert now - moved < QUIET, (
            f"stuck: {sent} sent, {acknowledged} acknowledged, {checked} checked, {issuer.completed} completed; {counters()}"
        )
    seconds = time.monotonic() - begin
    wires.exchange(b"")
    assert max(flags) == -(-len(theirs.puts) // CHANNELS)
    print(json.dumps({"rank": MACHINE, "puts": checked, "bytes": theirs.bytes, "seconds": round(seconds, 1)}))
    node.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
