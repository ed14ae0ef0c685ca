"""Ring attention: who waits for whom, and who accesses which bytes (``kernels_src/attention/exchange.cuh``, ``ops/ring_attention.cuh``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mkernel.planner.proofs.areas import COUNTED, FLAGS, HEAP, Access, Area, Call
from mkernel.planner.proofs.ring_deal import Deal, Random, WorkStep, deal_in_turn, run
from mkernel.planner.proofs.ring_shares import chunks_read, tile_number
from mkernel.planner.proofs.wait_graph import Step, WaitGraph
from mkernel.planner.ring_attention import SEND_SLOTS, RingAttentionPlan, Segment
from mkernel.planner.ring_varlen import Packing

__all__ = ["RingAttentionCall", "call_of", "packed_call_of"]

_WORD = 8


def call_of(plan: RingAttentionPlan, rng: Random | None = None) -> Call:
    """One call of ``mk.ring_attention``. ``rng``: draws which CTAs are slow, and take few items; else they take them in turn."""
    return _call_of(plan, plan, rng)


def packed_call_of(packing: Packing, rng: Random) -> Call:
    """One call of ``mk.ring_attention_varlen``. CTAs cannot take items in turn there: those that get padding are ready at once."""
    return _call_of(packing.plan, packing, rng)


def _call_of(plan: RingAttentionPlan, work: RingAttentionPlan | Packing, rng: Random | None) -> Call:
    return RingAttentionCall(plan, work, run(RingAttentionCall(plan, work), rng) if rng is not None else None).call()


class Moved(NamedTuple):
    """A chunk that a CTA moves: of the source at a distance of nodes (0: its own rank)."""

    distance: int
    number: int


class RingAttentionCall:
    """The steps of a call, and what they access.

    Steps: ``("enter", rank)``; ``("take", rank, item)``: a CTA takes an item that is not its first; ``("begin", rank, cta, at)``: the own
    keys of a CTA's item have been read, or it begins where keys are read by position; ``("read", rank, cta, at, ring, number)``: a chunk
    has; ``("finish", rank, cta)``; ``("credit", rank, ring, number)``: the feeder of a ring is told how many chunks have been read;
    ``("forward", rank, cta)``: a CTA that pushes has said what it forwards first; ``("push", rank, cta, distance, number)``;
    ``("stage", rank, cta, number)`` and ``("put", rank, cta, number)``; ``("leave", rank, cta, item)`` and ``("merge", rank, cta, item)``:
    of sums of shares.
    """

    def __init__(self, plan: RingAttentionPlan, work: RingAttentionPlan | Packing, deal: Deal | None = None) -> None:
        self.plan, self.problem, self.work = plan, plan.problem, work
        self.topology = self.problem.topology
        self.ranks = range(self.topology.size)
        self.deal = deal or deal_in_turn(self.topology.size, plan.ctas, work.items)
        self.segments = list(work.segments())
        rings, others = self.problem.rings, self.topology.num_nodes > 1
        sent = frozenset({"put"}) if others else frozenset[str]()
        pushed = frozenset({"push"}) if self.plan.copying[0] else frozenset[str]()
        forwards = pushed if others else frozenset[str]()
        begun = frozenset({"begin", "finish"}) | (frozenset({"forward"}) if forwards else frozenset())
        self.window = Area("keys and values of other ranks", HEAP, 0, plan.window_bytes, pushed | sent, frozenset({"read"}) | forwards)
        self.sending = Area("keys and values to send", HEAP, plan.window_bytes, plan.send_bytes, frozenset({"stage"}), sent)
        self.progress = Area(
            "what CTAs have read", HEAP, plan.progress_offset, plan.progress_bytes, begun | {"read"} | forwards, frozenset({"credit"})
        )
        self.begun = Area("flags of CTAs", FLAGS, 0, _WORD * plan.readers if rings else 0, begun, frozenset({"credit"}))
        self.left = Area("sums of shares", HEAP, plan.partial_offset, plan.partial_bytes, frozenset({"leave"}), frozenset({"merge"}))
        flags = _WORD * (plan.flag_words - plan.readers)
        self.is_left = Area("flags of shares", FLAGS, _WORD * plan.readers, flags, frozenset({"leave"}), frozenset({"merge"}))
        self.counted = Area(
            "flags of chunks and credits",
            COUNTED,
            0,
            _WORD * plan.counted_words,
            pushed | sent | {"credit"},
            frozenset({"read"}) | pushed | sent,
        )
        # After which steps the next chunk of a reader of a ring is at least so: by rank and ring, for each reader, pairs in order.
        self.steps_of: dict[tuple[int, int], dict[int, list[tuple[int, list[Step]]]]] = {}

    def wait_graph(self) -> WaitGraph:
        """Who waits for whom."""
        graph = WaitGraph()
        for rank in self.ranks:
            graph.add(("enter", rank))
            self._computing_steps(graph, rank)
            self._pushing_steps(graph, rank)
            self._sending_steps(graph, rank)
        for rank in self.ranks:
            self._credits(graph, rank)
        return graph

    def call(self) -> Call:
        graph = self.wait_graph()
        accesses = tuple(access for step in graph for access in self.accesses(step))
        shared = (self.left, self.is_left) if self.plan.shares > 1 else ()
        return Call(graph, (self.window, self.sending, self.progress, self.begun, self.counted, *shared), accesses)

    def entered(self) -> list[Step]:
        return [("enter", rank) for rank in self.ranks]

    def _publish(self, rank: int, ring: int, reader: int, number: int, *steps: Step) -> None:
        self.steps_of.setdefault((rank, ring), {}).setdefault(reader, []).append((number, list(steps)))

    # ---- compute
    def _computing_steps(self, graph: WaitGraph, rank: int) -> None:
        work, ctas = self.work, self.plan.ctas
        for cta, items in enumerate(self.deal[rank]):
            steps: list[Step] = []
            newest = {work.segment(item).base: item for item in items}
            for at, item in enumerate(items):
                segment = work.segment(item)
                if item >= ctas:
                    steps.append(graph.add(("take", rank, item), [("take", rank, item - 1)] if item > ctas else []))
                for one in self.item_steps(rank, cta, at, item):
                    steps.append(graph.add(one.step, one.waits_for))
                    for ring, number in one.words.items():
                        self._say(rank, ring, cta, number, one.step, segment, is_newest=newest[segment.base] == item)
            steps.append(graph.add(("finish", rank, cta), self.entered()))
            for ring in range(self.problem.rings):
                self._publish(rank, ring, cta, work.total, steps[-1])
            if self.plan.shares > 1:
                steps += [self._end_share(graph, rank, cta, item) for item in items]
            graph.chain(steps)

    def _say(self, rank: int, ring: int, cta: int, number: int, step: Step, segment: Segment, *, is_newest: bool) -> None:
        """While items of a segment are left a CTA says no more than where that begins; nor before the last one of them that it gets."""
        self._publish(rank, ring, cta, min(number, segment.base), step)
        if number > segment.base and is_newest:
            taken = [("take", rank, segment.end - 1)] if segment.end > self.plan.ctas else []
            self._publish(rank, ring, cta, number, step, *taken)

    def item_steps(self, rank: int, cta: int, at: int, item: int) -> list[WorkStep]:
        """What a CTA does for its item number ``at``: nothing, where all rows are padding."""
        plan, work = self.plan, self.work
        if not work.holds(rank, item):
            return []
        base = work.segment(item).base
        after = base + self.problem.parts * work.chunks_of_part(item)
        seen = [work.reads(plan.source_of(rank, ring), rank, item) for ring in range(self.problem.rings)]
        words = {ring: base if chunks or self.problem.canonical else after for ring, chunks in enumerate(seen)}
        steps = [WorkStep(("begin", rank, cta, at), self.entered(), words)]
        if plan.shares > 1:
            self._read_share(rank, cta, item, steps)
            return steps
        for ring, chunk in self.reading_order(rank, item, seen):
            number = base + chunk
            words = {ring: after if chunk + 1 == seen[ring] else number + 1}
            steps.append(WorkStep(("read", rank, cta, at, ring, number), [*self.entered(), self.filling(rank, ring, number)], words))
        if self.problem.canonical:  # the end of the item frees all rings
            steps[-1].words.update(dict.fromkeys(range(self.problem.rings), after))
        return steps

    def _read_share(self, rank: int, cta: int, item: int, steps: list[WorkStep]) -> None:
        """The chunks of which a share has blocks. Before it waits for one it passes those before it; it is the CTA's only item."""
        base = self.work.segment(item).base
        for source, chunks in chunks_read(self.plan, rank, item).items():
            if source == rank:
                continue
            ring = self.plan.ring_of(rank, source)
            for number in (base + chunk for chunk in chunks):
                steps[-1].words.update(dict.fromkeys(range(ring), self.work.total) | {ring: number})
                waits = [*self.entered(), self.filling(rank, ring, number)]
                steps.append(WorkStep(("read", rank, cta, 0, ring, number), waits, {ring: number + 1}))

    def _end_share(self, graph: WaitGraph, rank: int, cta: int, item: int) -> Step:
        """The last share of a tile adds up the others, once they are left; its CTA has said before that it reads no more."""
        shares, share = self.plan.shares, item % self.plan.shares
        if share + 1 < shares:
            return graph.add(("leave", rank, cta, item), self.entered())
        # All items are of the first wave, in which CTAs have those of their own numbers.
        left = [("leave", rank, other, other) for other in range(item - share, item)]
        return graph.add(("merge", rank, cta, item), [*self.entered(), *left])

    def reading_order(self, rank: int, item: int, seen: list[int]) -> Iterator[tuple[int, int]]:
        """Rings and chunks that an item of ``rank`` reads, in order. ``seen``: how many of each ring."""
        if not self.problem.canonical:
            yield from ((ring, chunk) for ring, chunks in enumerate(seen) for chunk in range(chunks))
            return
        per_part = self.work.chunks_of_part(item)
        for part, source in self.problem.legs():
            if source != rank:
                ring = self.plan.ring_of(rank, source)
                yield from ((ring, chunk) for chunk in range(part * per_part, min(seen[ring], (part + 1) * per_part)))

    def filling(self, rank: int, ring: int, number: int) -> Step:
        """The step that brings a chunk to a ring."""
        plan, feeder = self.plan, self.plan.feeder_of(rank, ring)
        if self.topology.node(feeder) != self.topology.node(rank):
            cta = self.mover(number, plan.copying[1], self.topology.num_nodes - 1, self.node_distance(feeder, rank) - 1)
            return ("put", feeder, cta, number)
        mates = self.topology.ranks_per_node - 1
        cta = self.mover(number, plan.copying[0], mates, (rank - feeder) % self.topology.ranks_per_node - 1)
        return ("push", feeder, cta, self.node_distance(feeder, plan.source_of(rank, ring)), number)

    def node_distance(self, rank: int, other: int) -> int:
        return (self.topology.node(other) - self.topology.node(rank)) % self.topology.num_nodes

    @staticmethod
    def mover(number: int, ctas: int, flows: int, flow: int) -> int:
        """Which of the CTAs that serve a flow moves a chunk."""
        return flow + flows * (number % len(range(flow, ctas, flows)))

    def moved(self, rank: int, cta: int, ctas: int, flows: int, counts: list[list[int]]) -> Iterator[Moved]:
        """What a CTA of ``rank`` moves, in order. ``counts``: of each segment, chunks of each source."""
        for segment, of_sources in zip(self.segments, counts, strict=True):
            for distance, chunk in self.moving_order(rank, segment, of_sources):
                number = segment.base + chunk
                if self.mover(number, ctas, flows, cta % flows) == cta:
                    yield Moved(distance, number)

    def moving_order(self, rank: int, segment: Segment, counts: list[int]) -> Iterator[tuple[int, int]]:
        """Chunks of a segment that a flow of ``rank`` has, in order, each with its source."""
        if not self.problem.canonical or len(counts) == 1:
            yield from ((distance, chunk) for distance, chunks in enumerate(counts) for chunk in range(chunks))
            return
        per_part, local = self.work.chunks_of_part(segment.first), self.topology.local_rank(rank)
        for part, source in self.problem.legs():
            if self.topology.local_rank(source) == local:
                distance = self.node_distance(rank, source)
                yield from ((distance, chunk) for chunk in range(part * per_part, min(counts[distance], (part + 1) * per_part)))

    def credit_for(self, rank: int, ring: int, number: int) -> list[Step]:
        """What the feeder of a ring waits for before it writes a chunk."""
        plan = self.plan
        if number < plan.depth:
            return []
        needed = -(-(number - plan.depth + 1) // plan.credit_step) * plan.credit_step
        return [("credit", rank, ring, min(needed, self.work.total - plan.depth))]

    # ---- intra_comm
    def _pushing_steps(self, graph: WaitGraph, rank: int) -> None:
        plan, per_node, nodes = self.plan, self.topology.ranks_per_node, self.topology.num_nodes
        for cta in range(plan.copying[0]):
            mate = self.topology.rank(self.topology.node(rank), (self.topology.local_rank(rank) + 1 + cta % (per_node - 1)) % per_node)
            sources = [rank, *self.topology.rail_peers(rank)]
            counts = [[self.work.streamed(segment, source, mate) for source in sources] for segment in self.segments]
            moved = list(self.moved(rank, cta, plan.copying[0], per_node - 1, counts))
            steps: list[Step] = []
            if nodes > 1:
                steps.append(graph.add(("forward", rank, cta), self.entered()))
            for distance in range(1, nodes):
                first = next((one.number for one in moved if one.distance == distance), self.work.total)
                self._publish(rank, plan.ring_of(rank, sources[distance]), plan.ctas + cta, first, steps[0])
            for at, one in enumerate(moved):
                source = sources[one.distance]
                waits = [*self.entered(), *self.credit_for(mate, plan.ring_of(mate, source), one.number)]
                if one.distance:
                    waits.append(self.filling(rank, plan.ring_of(rank, source), one.number))
                steps.append(graph.add(("push", rank, cta, one.distance, one.number), waits))
                if one.distance:
                    following = next((later.number for later in moved[at + 1 :] if later.distance == one.distance), self.work.total)
                    self._publish(rank, plan.ring_of(rank, source), plan.ctas + cta, following, steps[-1])
            graph.chain(steps)

    # ---- inter_send
    def _sending_steps(self, graph: WaitGraph, rank: int) -> None:
        plan, peers = self.plan, self.topology.rail_peers(rank)
        for cta in range(plan.copying[1]):
            peer = peers[cta % len(peers)]
            counts = [[self.work.sent(segment, rank, self.topology.node(peer))] for segment in self.segments]
            steps: list[Step] = []
            for one in self.moved(rank, cta, plan.copying[1], len(peers), counts):
                steps.append(graph.add(("stage", rank, cta, one.number), self.entered()))
                credit = self.credit_for(peer, plan.ring_of(peer, rank), one.number)
                steps.append(graph.add(("put", rank, cta, one.number), [*self.entered(), *credit]))
            graph.chain(steps)

    # ---- credits
    def _credits(self, graph: WaitGraph, rank: int) -> None:
        for ring in range(self.problem.rings):
            steps: list[Step] = []
            for number, step, forwarded in self.credits_of(rank, ring):
                told = [*forwarded]
                for reader in range(self.plan.ctas):
                    told += [self.begins(rank, reader), *self.told(rank, ring, reader, number)]
                steps.append(graph.add(step, [*self.entered(), *told]))
            graph.chain(steps)

    def credits_of(self, rank: int, ring: int) -> Iterator[tuple[int, Step, list[Step]]]:
        """Credits of a ring, in order: what they say, their steps, and what they wait for of CTAs that forward."""
        plan = self.plan
        is_rail = self.topology.node(plan.feeder_of(rank, ring)) != self.topology.node(rank)
        number = 0
        while number < self.work.total - plan.depth:
            number = min(number + plan.credit_step, self.work.total - plan.depth)
            forwarded: list[Step] = []
            for reader in range(plan.ctas, plan.readers) if is_rail else ():
                forwarded += [self.begins(rank, reader), *self.told(rank, ring, reader, number)]
            yield number, ("credit", rank, ring, number), forwarded

    def told(self, rank: int, ring: int, reader: int, number: int) -> list[Step]:
        """The steps after which a reader has said that it reads nothing below a chunk."""
        return next(steps for at, steps in self.steps_of[rank, ring][reader] if at >= number)

    def begins(self, rank: int, reader: int) -> Step:
        """The step after which the progress of a reader is valid."""
        if reader >= self.plan.ctas:
            return ("forward", rank, reader - self.plan.ctas)
        held = (at for at, item in enumerate(self.deal[rank][reader]) if self.work.holds(rank, item))
        first = next(held, None)
        return ("finish", rank, reader) if first is None else ("begin", rank, reader, first)

    # ---- who accesses what
    def slot(self, step: Step, rank: int, ring: int, number: int, *, writes: bool) -> Iterator[Access]:
        """A chunk in a ring, and its flag."""
        plan, word = self.plan, self.plan.slot_word(ring, number % self.plan.depth)
        yield Access(step, rank, self.window, word * 2 * plan.plane_bytes, 2 * plan.plane_bytes, writes)
        yield Access(step, rank, self.counted, word * _WORD, _WORD, writes)

    def progress_word(self, step: Step, rank: int, ring: int, reader: int, *, writes: bool) -> Access:
        return Access(step, rank, self.progress, self.plan.progress_word(ring, reader) * _WORD, _WORD, writes)

    def credit_word(self, rank: int, ring: int) -> tuple[int, int]:
        """The rank that feeds a ring of ``rank``, and the word of its credits there."""
        plan, feeder = self.plan, self.plan.feeder_of(rank, ring)
        source = plan.source_of(rank, ring)
        if self.topology.node(feeder) != self.topology.node(rank):
            return feeder, plan.credit_word(self.node_distance(feeder, rank), 0)
        return feeder, plan.credit_word(self.node_distance(feeder, source), (rank - feeder) % self.topology.ranks_per_node)

    def accesses(self, step: Step) -> Iterator[Access]:
        """What a step reads and writes of what ranks share."""
        plan, (kind, rank, *rest) = self.plan, step
        assert isinstance(rank, int)
        match kind, rest:
            case (("begin" | "finish" | "forward"), [int(cta), *_]):
                yield from self._beginning_accesses(step, rank, cta)
            case "read", [int(cta), int(), int(ring), int(number)]:
                yield from self.slot(step, rank, ring, number, writes=False)
                yield self.progress_word(step, rank, ring, cta, writes=True)
            case "push", [int(cta), int(distance), int(number)]:
                yield from self._pushing_accesses(step, rank, cta, distance, number)
            case "stage", [int(cta), int(number)]:
                yield self._staged(step, rank, cta, number, writes=True)
            case (("leave" | "merge"), [int(), int(item)]):
                yield from self._shared_accesses(step, rank, item)
            case "put", [int(cta), int(number)]:
                peers = self.topology.rail_peers(rank)
                peer = peers[cta % len(peers)]
                yield self._staged(step, rank, cta, number, writes=False)
                yield from self._feeding(step, peer, plan.ring_of(peer, rank), number)
            case "credit", [int(ring), int()]:
                feeder, word = self.credit_word(rank, ring)
                for reader in range(plan.readers if self.topology.node(feeder) != self.topology.node(rank) else plan.ctas):
                    yield self.progress_word(step, rank, ring, reader, writes=False)
                    yield Access(step, rank, self.begun, reader * _WORD, _WORD, writes=False)
                yield Access(step, feeder, self.counted, word * _WORD, _WORD, writes=True)

    def _shared_accesses(self, step: Step, rank: int, item: int) -> Iterator[Access]:
        """Sums that a share leaves, or that the last one of its tile reads, and their flags."""
        plan, share = self.plan, item % self.plan.shares
        size, tile = self.problem.tile.partial_bytes, tile_number(plan, item)
        for one in [share] if step[0] == "leave" else range(plan.shares - 1):
            yield Access(step, rank, self.left, (tile * (plan.shares - 1) + one) * size, size, step[0] == "leave")
            yield Access(step, rank, self.is_left, (tile * plan.shares + one) * _WORD, _WORD, step[0] == "leave")

    def _beginning_accesses(self, step: Step, rank: int, cta: int) -> Iterator[Access]:
        """Words of progress of all rings that a CTA reads, and its flag, at its first such step."""
        rings: Iterable[int] = range(self.problem.rings)
        reader = cta
        if step[0] == "forward":
            rings = [self.plan.ring_of(rank, peer) for peer in self.topology.rail_peers(rank)]
            reader += self.plan.ctas
        for ring in rings:
            yield self.progress_word(step, rank, ring, reader, writes=True)
        if self.problem.rings and step == self.begins(rank, reader):
            yield Access(step, rank, self.begun, reader * _WORD, _WORD, writes=True)

    def _feeding(self, step: Step, rank: int, ring: int, number: int) -> Iterator[Access]:
        """Writing a chunk to a ring of ``rank``, after a look at the credit for it."""
        yield from self.slot(step, rank, ring, number, writes=True)
        if number >= self.plan.depth:
            feeder, word = self.credit_word(rank, ring)
            yield Access(step, feeder, self.counted, word * _WORD, _WORD, writes=False)

    def _pushing_accesses(self, step: Step, rank: int, cta: int, distance: int, number: int) -> Iterator[Access]:
        plan, per_node = self.plan, self.topology.ranks_per_node
        mate = self.topology.rank(self.topology.node(rank), (self.topology.local_rank(rank) + 1 + cta % (per_node - 1)) % per_node)
        source = rank if distance == 0 else self.topology.rail_peers(rank)[distance - 1]
        yield from self._feeding(step, mate, plan.ring_of(mate, source), number)
        if distance:
            ring = plan.ring_of(rank, source)
            yield from self.slot(step, rank, ring, number, writes=False)
            yield self.progress_word(step, rank, ring, plan.ctas + cta, writes=True)

    def _staged(self, step: Step, rank: int, cta: int, number: int, *, writes: bool) -> Access:
        """A chunk in one of the slots of its CTA, which takes them in turn."""
        peers = self.topology.rail_peers(rank)
        counts = [[self.work.sent(segment, rank, self.topology.node(peers[cta % len(peers)]))] for segment in self.segments]
        numbers = [one.number for one in self.moved(rank, cta, self.plan.copying[1], len(peers), counts)]
        slot = cta * SEND_SLOTS + numbers.index(number) % SEND_SLOTS
        return Access(step, rank, self.sending, slot * 2 * self.plan.plane_bytes, 2 * self.plan.plane_bytes, writes)
