"""Several links of a rank as one: the bytes of a put are spread over them by rate, and a link that fails costs bandwidth, not the world.

A link is a transport of its own (a card, or an emulated one) to the same peers and the same memory. A put of many bytes becomes *parts*,
puts of some of its bytes on several links. Links know nothing of each other: nothing orders what one delivers before what another does.
Hence:

- Each channel to a peer has one link for its flags, its *home*. A flag is posted there once all parts that went by other links are
  complete, of its put and of all earlier ones of the channel. Parts that went by the home itself are before the flag on its channel there.
- So a completion must say that the bytes are in the peer's memory, not only that they have reached its card: by another way into that
  memory the flag might overtake them. That is so where a flag of the link itself comes after the bytes and completes after them: of
  ``rc``, in mode ``atomic`` only (the answer of an atomic follows the bytes through PCIe). A part therefore raises a flag that nobody
  waits for (``SignalHeader.scratch``).

When a link fails, what it has not completed goes by the others. Its puts may have arrived in part: they are written again, with the same
bytes, for their sources are still held. A flag may have been raised although its completion never came, so of the flags that were under
way only the newest value of each word is written again, when the bytes of all of them are there: a flag never goes back. One thing must
not happen: that the link carries on with the rest, to another peer or once its port is up again. An old value would follow a newer one, and
bytes of a source that is not held any more would be read. So the link is told to stop first (``Transport.abandon``).
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Sequence

from mkernel import abi
from mkernel.errors import TransportError
from mkernel.transport.base import Put, Transport

__all__ = ["LINK_FAULTS", "SMALLEST", "Link", "StripedTransport", "Way", "shares"]

_log = logging.getLogger("mkernel")

SMALLEST = 512 << 10  # bytes of a part: less than twice as much is not spread, for parts cost the engine time
UNIT = 256  # parts begin at multiples of this
_SCRATCH: int = abi.SignalHeader.scratch.offset
_CHANNELS = abi.SCRATCH_WORDS  # of a link: channels that are equal modulo this share one, which orders more than is asked for
# Errors that say that a way to the peer is gone. All others are bugs, or the peer's, and would come back on every link.
LINK_FAULTS = frozenset(
    (
        "IBV_WC_RETRY_EXC_ERR", "IBV_WC_RESP_TIMEOUT_ERR", "IBV_WC_WR_FLUSH_ERR", "IBV_WC_FATAL_ERR", "IBV_WC_GENERAL_ERR",
        "IBV_EVENT_PORT_ERR", "IBV_EVENT_DEVICE_FATAL", "IBV_EVENT_QP_FATAL", "EIO", "ENODEV", "link down",
    )
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """One link. ``name``: for messages; ``rate``: in any unit that is the same for all links, positive."""

    transport: Transport
    name: str
    rate: float


class _Job:
    """A put that is not complete."""

    __slots__ = ("bytes_left", "ended", "flagged", "merged", "parts", "put")

    def __init__(self, put: Put) -> None:
        self.put = put
        self.parts: set[_Part] = set()  # not complete
        self.bytes_left = put.bytes  # that travel with the flag
        self.flagged = False  # the flag is complete
        self.merged = False  # a newer value of the same word takes the flag's place
        self.ended = False  # its completion has been reported


class _Part:
    """What one link carries of a put: some bytes, or the flag with what bytes are left."""

    __slots__ = ("bytes", "flag", "flow", "job", "offset", "way")

    def __init__(self, flow: _Flow, job: _Job, way: Way, offset: int, size: int, *, flag: bool = False) -> None:
        self.flow, self.job, self.way, self.offset, self.bytes, self.flag = flow, job, way, offset, size, flag


class _Flow:
    """The puts of one channel to one rank, in order."""

    __slots__ = ("channel", "home", "rank", "sent", "waiting")

    def __init__(self, rank: int, channel: int, home: Way) -> None:
        self.rank, self.channel, self.home = rank, channel, home
        self.waiting: deque[_Job] = deque()  # their flags are not posted
        self.sent: dict[_Job, None] = {}  # their flags are posted and not complete


class Way:
    """A link, and what is on it."""

    __slots__ = ("backlog", "dirty", "flows", "flying", "link", "lost", "queues", "refused", "ticket")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.queues: dict[int, deque[_Part]] = {}  # by destination: not accepted yet
        self.refused: set[int] = set()  # destinations to which something is queued
        self.flying: dict[int, _Part] = {}  # by ticket
        self.ticket = self.backlog = self.flows = 0  # next number; bytes queued or under way; flows that have their home here
        self.dirty = self.lost = False


def shares(size: int, rates: Sequence[float], backlogs: Sequence[float]) -> list[int]:
    """How many of ``size`` bytes go by each link, so that all end at the same time; 0 or at least ``SMALLEST`` (or ``size``) by each.

    ``backlogs``: bytes that a link has still to carry.
    """
    use = list(range(len(rates)))
    while True:
        end = (size + sum(backlogs[i] for i in use)) / sum(rates[i] for i in use)
        parts = {i: end * rates[i] - backlogs[i] for i in use}
        least = min(use, key=parts.__getitem__)
        if len(use) == 1 or parts[least] >= SMALLEST:
            break
        use.remove(least)
    found, left = [0] * len(rates), size
    for i in use[1:]:
        found[i] = min(left, int(parts[i]) // UNIT * UNIT)
        left -= found[i]
    found[use[0]] = left
    return found


class StripedTransport(Transport):
    """The links as one transport.

    Parameters
    ----------
    rank
        This rank, for messages.
    links
        At least one, with equal peers and memory. Closed with the transport. Each must complete a put only when its bytes are in the peer's
        memory.

    Raises
    ------
    ValueError
        There is no link, or a rate is not positive.
    """

    def __init__(self, rank: int, links: Sequence[Link]) -> None:
        if not links or min(link.rate for link in links) <= 0:
            raise ValueError("there must be links, with positive rates")
        self._rank = rank
        self._all = [link.transport for link in links]  # receivers take no part in a put: ``arrived`` stays 0
        self._ways = [Way(link) for link in links]  # those that work
        self._flows: dict[tuple[int, int], _Flow] = {}
        self._done: list[int] = []
        self._number = 0  # value of the last scratch flag
        self._closed = False

    @property
    def ways(self) -> list[Way]:
        """The links that work, for what posts in place of this transport."""
        return list(self._ways)

    @property
    def links(self) -> list[str]:
        """The names of the links that work."""
        return [way.link.name for way in self._ways]

    # ---- the transport
    def post(self, put: Put) -> bool:
        """Accept a put: always, since the ring has room for so many only."""
        flow = self._flows.get((put.dst_rank, put.channel))
        if flow is None:
            flow = self._flows[put.dst_rank, put.channel] = _Flow(put.dst_rank, put.channel, self._choose_home())
        job = _Job(put)
        flow.waiting.append(job)
        if put.bytes >= 2 * SMALLEST and len(self._ways) > 1:
            sizes = shares(put.bytes, [way.link.rate for way in self._ways], [way.backlog for way in self._ways])
            job.bytes_left = offset = 0
            for way, size in zip(tuple(self._ways), sizes, strict=True):
                if size:
                    self._send(_Part(flow, job, way, offset, size))
                    offset += size
        self._release(flow)
        return True

    def flush(self) -> None:
        for way in tuple(self._ways):
            if way.dirty:
                way.dirty = False
                try:
                    way.link.transport.flush()
                except TransportError as error:
                    self._lose(way, error)
        if any(way.dirty for way in self._ways):  # what a failed link has left
            self.flush()

    def poll(self) -> list[int]:
        moved = False
        for way in tuple(self._ways):
            if way.lost:  # meanwhile, with another
                continue
            try:
                tickets = way.link.transport.poll()
            except TransportError as error:
                self._lose(way, error)
                moved = True
                continue
            for ticket in tickets:
                part = way.flying.pop(ticket, None)
                if part is None:  # the link has failed meanwhile, when something was posted
                    break
                self._complete(part)
            if way.refused:
                for rank in way.refused.copy():
                    self._pump(way, rank)
            moved = moved or bool(tickets)
        if moved:
            self.flush()
        done, self._done = self._done, []
        return done

    def next_event_ns(self) -> int | None:
        if self._done:
            return 0
        events = [event for way in self._ways if (event := way.link.transport.next_event_ns()) is not None]
        return min(events, default=None)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for transport in self._all:
                transport.close()

    # ---- parts and flags
    def _choose_home(self) -> Way:
        """The link that has fewest flows for its rate."""
        way = min(self._ways, key=lambda way: (way.flows + 1) / way.link.rate)
        way.flows += 1
        return way

    def _send(self, part: _Part) -> None:
        """Post a part on its link, behind all that the link has not accepted yet to the same rank."""
        if part.way.lost:  # while other parts of the put were posted
            part.way = self._emptiest(part.bytes)
        way, rank = part.way, part.flow.rank
        way.backlog += part.bytes
        if not part.flag:
            part.job.parts.add(part)
        queue = way.queues.get(rank)
        if queue is None:
            queue = way.queues[rank] = deque()
        queue.append(part)
        if rank not in way.refused:
            self._pump(way, rank)

    def _pump(self, way: Way, rank: int) -> None:
        """Post what is queued to a rank, as far as the link accepts it."""
        queue = way.queues.get(rank)
        while queue:
            try:
                accepted = way.link.transport.post(self._put(way, queue[0]))
            except TransportError as error:
                self._lose(way, error)
                return
            if not accepted:
                way.refused.add(rank)
                return
            way.flying[way.ticket] = queue.popleft()
            way.ticket += 1
            way.dirty = True
        way.refused.discard(rank)

    def _put(self, way: Way, part: _Part) -> Put:
        put, channel = part.job.put, part.flow.channel % _CHANNELS
        offset, value = put.signal_offset, put.signal_value
        if not part.flag:
            self._number += 1
            offset, value = _SCRATCH + 8 * channel, self._number
        source, target = put.src_offset + part.offset, put.dst_offset + part.offset
        return Put(way.ticket, channel, put.dst_rank, source, target, part.bytes, offset, value)

    def _release(self, flow: _Flow) -> None:
        """Post the flags whose bytes, and those of all earlier puts of the channel, are there or before them on the same link."""
        while flow.waiting:
            job = flow.waiting[0]
            if any(part.way is not flow.home for part in job.parts):
                return
            flow.waiting.popleft()
            if job.merged:
                job.flagged = True
                self._finish(job)
                continue
            flow.sent[job] = None
            self._send(_Part(flow, job, flow.home, job.put.bytes - job.bytes_left, job.bytes_left, flag=True))

    def _complete(self, part: _Part) -> None:
        part.way.backlog -= part.bytes
        job, flow = part.job, part.flow
        if part.flag:
            job.flagged = True
            for earlier in flow.sent:  # completions have no order: their flags have been raised, too, and must not be again
                if earlier is job:
                    break
                earlier.merged = earlier.merged or earlier.put.signal_offset == job.put.signal_offset
            del flow.sent[job]
        else:
            job.parts.discard(part)
            self._release(flow)
        self._finish(job)

    def _finish(self, job: _Job) -> None:
        if job.flagged and not job.parts and not job.ended:
            job.ended = True
            self._done.append(job.put.ticket)

    # ---- a link that fails
    def _lose(self, way: Way, error: TransportError) -> None:
        """Go on without a link. Raises its error where that is no help."""
        self.give_up(way, error)
        parts = [*way.flying.values(), *(part for queue in way.queues.values() for part in queue)]
        way.flying, way.queues, way.refused, way.dirty = {}, {}, set(), False
        for part in parts:
            if not part.flag:
                part.job.parts.discard(part)
                self._resend(part.flow, part.job, part.offset, part.bytes)
        for flow in self._flows.values():
            if flow.home is way:
                self._move(flow)
        for flow in self._flows.values():
            self._release(flow)

    def give_up(self, way: Way, error: TransportError) -> None:
        """Stop a link that has failed, and say so. Raises its error where the others are no help."""
        if error.status not in LINK_FAULTS or len(self._ways) == 1:
            raise error
        way.link.transport.abandon()
        self._ways.remove(way)
        way.lost = True
        left = " and ".join(self.links)
        _log.warning("rank %d: %s has failed, and its puts go by %s from now on: %s", self._rank, way.link.name, left, error)

    def _emptiest(self, size: int) -> Way:
        """The link by which so many bytes more are there first."""
        return min(self._ways, key=lambda way: (way.backlog + size) / way.link.rate)

    def _resend(self, flow: _Flow, job: _Job, offset: int, size: int) -> None:
        self._send(_Part(flow, job, self._emptiest(size), offset, size))

    def _move(self, flow: _Flow) -> None:
        """Give a flow another home. Of the flags under way only the newest value of each word is written again."""
        flow.home = self._choose_home()
        again = list(flow.sent)
        flow.sent.clear()
        newest = {job.put.signal_offset: job for job in again if not job.merged}
        for job in again:
            if newest.get(job.put.signal_offset) is not job:
                job.merged = True
                if job.bytes_left:
                    self._resend(flow, job, job.put.bytes - job.bytes_left, job.bytes_left)
                    job.bytes_left = 0
        flow.waiting.extendleft(reversed(again))
