"""Combining: who waits for whom, and who accesses which bytes (``kernels_src/moe/combine.cuh``, ``kernels_src/ops/moe_combine.cuh``)."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

from mkernel.planner.moe import row_bits
from mkernel.planner.moe_combine import TOLD_BYTES, WARPS, CombineLayout, MoeCombinePlan
from mkernel.planner.proofs.areas import FLAGS, HEAP, STAGING, Access, Area, Call
from mkernel.planner.proofs.wait_graph import Step, WaitGraph
from mkernel.planner.topology import Topology

__all__ = ["CombineCall", "Routed", "call_of"]

_WORD = 8
_WEIGHT = 4


class Routed(Protocol):
    """What one rank knows of the routing (``mkernel/tools/routing.py``)."""

    @property
    def topk_ids(self) -> Any: ...
    @property
    def rows(self) -> Any: ...
    @property
    def experts(self) -> Any: ...
    @property
    def sums(self) -> Any: ...
    @property
    def listed(self) -> Any: ...
    @property
    def counts(self) -> Any: ...
    @property
    def expert_offsets(self) -> Any: ...


def call_of(plan: MoeCombinePlan, routing: Sequence[Routed], on_heap: Collection[int] = ()) -> Call:
    """One call of ``mk.moe_combine``; ``on_heap``: ranks whose rows lie on the symmetric heap. Weights never do."""
    return _MoeCombine(plan, routing, on_heap).call()


class CombineCall(abc.ABC):
    """The steps of any kernel that combines; how rows come to be there is the subclass's.

    Steps: ``("enter", rank)``; ``("weigh", rank)`` copies weights for the network, ``("post", rank, peer)`` puts them; ``("serve", rank,
    peer, group)`` makes sums for a rail peer, ``("put", rank, peer, chunk)`` puts them; ``("combine", rank, token)``.
    """

    def __init__(self, layout: CombineLayout, routing: Sequence[Routed], ctas: int, senders: int) -> None:
        self.layout, self.ctas, self.senders = layout, ctas, senders
        self.problem = layout.problem
        self.topology: Topology = self.problem.topology
        self.ranks = range(self.topology.size)
        self.rows_of: list[list[list[list[int]]]] = [_lists(one.rows) for one in routing]
        self.experts_of: list[list[list[list[int]]]] = [_lists(one.experts) for one in routing]
        self.places: list[list[list[int]]] = [_lists(one.sums) for one in routing]
        self.listed: list[list[list[int]]] = [_lists(one.listed) for one in routing]
        self.counts: list[list[list[int]]] = [_lists(one.counts) for one in routing]
        self.offsets: list[list[int]] = [_lists(one.expert_offsets) for one in routing]
        self.tokens = [len(_lists(one.topk_ids)) for one in routing]
        offsets, others = layout.offsets, layout.other_nodes
        self.sums = Area("node sums to send", HEAP, offsets["sum"], layout.sum_bytes, frozenset({"serve"}), frozenset({"put"}))
        self.arrived = Area("node sums arrived", HEAP, offsets["arrived"], layout.sum_bytes, frozenset({"put"}), frozenset({"combine"}))
        self.weights = Area("weights arrived", HEAP, offsets["weights"], layout.weight_bytes, frozenset({"post"}), frozenset({"serve"}))
        staged = frozenset({"weigh"}), frozenset({"post"})
        self.staging = Area("staged weights", STAGING, 0, layout.own_weight_bytes if others else 0, *staged)

    # ---- of the subclass
    @abc.abstractmethod
    def rows_ready(self, rank: int, row: int, expert: int) -> list[Step]:
        """What ``rank`` waits for before it reads a row of its node (as in ``routing.rows``), beside the entries of all ranks."""

    @abc.abstractmethod
    def row_accesses(self, step: Step, rank: int, row: int, expert: int) -> Iterator[Access]:
        """What a step of ``rank`` accesses in order to read a row."""

    @property
    @abc.abstractmethod
    def flags(self) -> Area: ...

    # ---- who waits for whom
    def entered(self) -> list[Step]:
        return [("enter", rank) for rank in self.ranks]

    def add_steps(self, graph: WaitGraph) -> None:
        for rank in self.ranks:
            graph.add(("enter", rank))
            if self.layout.other_nodes:
                self._sending_steps(graph, rank)
            for worker in range(self.workers):
                graph.chain(self.combining_steps(graph, rank, worker))

    @property
    def workers(self) -> int:
        """Among whom the items that a rank combines are divided: each does every so manieth."""
        return self.ctas * WARPS

    def _sending_steps(self, graph: WaitGraph, rank: int) -> None:
        chains: list[list[Step]] = [[] for _ in range(self.senders)]
        if self.problem.weighted:
            graph.add(("weigh", rank))
            for peer in self.topology.rail_peers(rank):
                if self.awaited(rank, peer):
                    chains[0].append(graph.add(("post", rank, peer), [*self.entered(), ("weigh", rank)]))
        peers = self.topology.rail_peers(rank)
        for item in range(self.layout.chunks * len(peers)):
            chunk, peer = item // len(peers), peers[item % len(peers)]
            places = self.places_of(rank, peer, chunk, self.layout.chunk)
            if places:
                groups = sorted({place // self.layout.group for place in places})
                made: list[Step] = [("serve", rank, peer, group) for group in groups]
                chains[item % self.senders].append(graph.add(("put", rank, peer, chunk), [*self.entered(), *made]))
        for chain in chains:
            graph.chain(chain)

    def combining_steps(self, graph: WaitGraph, rank: int, worker: int) -> Iterator[Step]:
        """What one warp does, in order: first what other nodes wait for."""
        peers = self.topology.rail_peers(rank)
        groups = max((-(-self.served(rank, peer) // self.layout.group) for peer in peers), default=0)
        for item in range(worker, groups * len(peers) + self.tokens[rank], self.workers):
            token = item - groups * len(peers)
            if token >= 0:
                sums: list[Step] = [("put", peer, rank, place // self.layout.chunk) for peer, place in self.node_sums(rank, token)]
                yield graph.add(("combine", rank, token), [*self.entered(), *self._rows_ready(rank, rank, token), *sums])
                continue
            group, peer = item // len(peers), peers[item % len(peers)]
            places = self.places_of(rank, peer, group, self.layout.group)
            if places:
                waits = self.entered() + (
                    [("post", other, rank) for other in peers if self.served(rank, other)] if self.problem.weighted else []
                )
                for place in places:
                    waits += self._rows_ready(rank, peer, self.served_token(rank, peer, place))
                yield graph.add(("serve", rank, peer, group), waits)

    def _rows_ready(self, rank: int, home: int, token: int) -> list[Step]:
        return [step for row, expert in self.chosen(rank, home, token) for step in self.rows_ready(rank, row, expert)]

    # ---- who accesses what
    def accesses(self, step: Step) -> Iterator[Access]:
        kind, rank, *rest = step
        assert isinstance(rank, int)
        layout, row_bytes = self.layout, self.problem.row_bytes
        match kind, rest:
            case "weigh", []:
                yield Access(step, rank, self.staging, 0, self.weight_bytes(rank), writes=True)
            case "post", [int(peer)]:
                distance = self.distance(peer, rank)
                yield Access(step, rank, self.staging, 0, self.weight_bytes(rank), writes=False)
                yield Access(step, peer, self.weights, self._of_distance(distance, 0) * self._weights, self.weight_bytes(rank), writes=True)
                yield self.flag(step, peer, layout.weights_flag(distance), writes=True)
            case "serve", [int(peer), int(group)]:
                yield from self._serving_accesses(step, rank, peer, group)
            case "put", [int(peer), int(chunk)]:
                there, back = self.distance(rank, peer), self.distance(peer, rank)
                for place in self.places_of(rank, peer, chunk, layout.chunk):
                    yield self.flag(step, rank, layout.sum_flag(there, place), writes=False)
                    yield Access(step, rank, self.sums, self._of_distance(there, place) * row_bytes, row_bytes, writes=False)
                    yield Access(step, peer, self.arrived, self._of_distance(back, place) * row_bytes, row_bytes, writes=True)
                yield self.flag(step, peer, layout.arrived_flag(back, chunk * layout.chunk), writes=True)
            case "combine", [int(token)]:
                for row, expert in self.chosen(rank, rank, token):
                    yield from self.row_accesses(step, rank, row, expert)
                for peer, place in self.node_sums(rank, token):
                    distance = self.distance(rank, peer)
                    yield self.flag(step, rank, layout.arrived_flag(distance, place), writes=False)
                    yield Access(step, rank, self.arrived, self._of_distance(distance, place) * row_bytes, row_bytes, writes=False)

    def _serving_accesses(self, step: Step, rank: int, peer: int, group: int) -> Iterator[Access]:
        layout, row_bytes = self.layout, self.problem.row_bytes
        distance = self.distance(rank, peer)
        for other in self.topology.rail_peers(rank) if self.problem.weighted else ():
            if self.served(rank, other):
                yield self.flag(step, rank, layout.weights_flag(self.distance(rank, other)), writes=False)
        for place in self.places_of(rank, peer, group, layout.group):
            token = self.served_token(rank, peer, place)
            if self.problem.weighted:
                yield Access(step, rank, self.weights, self._of_distance(distance, token) * self._weights, self._weights, writes=False)
            for row, expert in self.chosen(rank, peer, token):
                yield from self.row_accesses(step, rank, row, expert)
            yield Access(step, rank, self.sums, self._of_distance(distance, place) * row_bytes, row_bytes, writes=True)
        yield self.flag(step, rank, layout.sum_flag(distance, group * layout.group), writes=True)

    def flag(self, step: Step, rank: int, number: int, *, writes: bool) -> Access:
        return Access(step, rank, self.flags, number * _WORD, _WORD, writes)

    # ---- what the routing says
    def distance(self, rank: int, other: int) -> int:
        """From the node of ``rank`` to that of ``other``."""
        return (self.topology.node(other) - self.topology.node(rank)) % self.topology.num_nodes

    def served(self, rank: int, home: int) -> int:
        """Tokens of a rail peer that the node of ``rank`` has experts for."""
        return self.counts[rank][self.topology.node(home)][0]

    def awaited(self, rank: int, peer: int) -> int:
        """Tokens of ``rank`` that the node of a rail peer has experts for."""
        return self.counts[rank][self.topology.node(peer)][1]

    def places_of(self, rank: int, home: int, index: int, size: int) -> range:
        """Places in the list of ``home``'s tokens of group or chunk ``index``, of ``size`` each."""
        return range(index * size, min((index + 1) * size, self.served(rank, home)))

    def served_token(self, rank: int, home: int, place: int) -> int:
        return self.listed[rank][self.topology.node(home)][place]

    def chosen(self, rank: int, home: int, token: int) -> list[tuple[int, int]]:
        """Rows and experts of a token of ``home`` in the node of ``rank``."""
        node = self.topology.node(home)
        pairs = zip(self.rows_of[rank][node][token], self.experts_of[rank][node][token], strict=True)
        return [(row, expert) for row, expert in pairs if row >= 0]

    def node_sums(self, rank: int, token: int) -> list[tuple[int, int]]:
        """The rail peers that make a sum for a token, and its place in their lists."""
        places = ((peer, self.places[rank][self.topology.node(peer)][token]) for peer in self.topology.rail_peers(rank))
        return [(peer, place) for peer, place in places if place >= 0]

    def holder(self, rank: int, row: int) -> tuple[int, int]:
        """The rank that has a row, and its number there."""
        local, local_row = divmod(row, 1 << row_bits(self.topology))
        return self.topology.rank(self.topology.node(rank), local), local_row

    def weight_bytes(self, rank: int) -> int:
        return self.tokens[rank] * self._weights

    @property
    def _weights(self) -> int:
        """Bytes of the weights of a token."""
        return self.problem.topk * _WEIGHT

    def _of_distance(self, distance: int, token: int) -> int:
        return (distance - 1) * self.problem.max_tokens + token


class _MoeCombine(CombineCall):
    """``mk.moe_combine``.

    Steps beside those of CombineCall: ``("tell", rank)`` where its rows are, ``("find", rank)`` those of its node; ``("stage", rank,
    chunk)``; ``("done", rank, cta)`` with other ranks' rows, ``("keep", rank, cta)`` its own until others are done.
    """

    def __init__(self, plan: MoeCombinePlan, routing: Sequence[Routed], on_heap: Collection[int]) -> None:
        super().__init__(plan.combining, routing, *plan.roles)
        self.plan, self.on_heap, reading = plan, on_heap, frozenset({"serve", "combine"})
        mates = plan.node_mates
        told_bytes = TOLD_BYTES * (mates + 1) if mates else 0
        self.told = Area("where rows are", HEAP, 0, told_bytes, frozenset({"tell"}), frozenset({"find"}))
        self.staged = Area("staged rows", HEAP, plan.staged_offset, plan.staged_bytes, frozenset({"stage"}), reading)
        raising = frozenset({"tell", "stage", "done", "serve", "put", "post"})
        words = plan.flag_words * _WORD
        self._flags = Area("flags of rows, sums and chunks", FLAGS, 0, words, raising, reading | {"find", "keep", "put"})

    @property
    def flags(self) -> Area:
        return self._flags

    def call(self) -> Call:
        graph = WaitGraph()
        self.add_steps(graph)
        areas = (self.told, self.staged, self.sums, self.arrived, self.weights, self.staging, self.flags)
        accesses = (access for step in graph for access in (*self.accesses(step), *self._own_accesses(step)))
        return Call(graph, areas, tuple(accesses))

    # ---- who waits for whom
    def add_steps(self, graph: WaitGraph) -> None:
        super().add_steps(graph)
        for rank in self.ranks:  # every CTA, also of a rank that has nothing to combine
            graph.add(("open", rank), self.entered())
        for rank in self.ranks if self.plan.node_mates else ():
            graph.add(("tell", rank), self.entered())
            graph.add(("find", rank), [*self.entered(), *(("tell", mate) for mate in self.mates(rank))])
            for cta in range(self.ctas):
                graph.chain(graph.add(("stage", rank, chunk), self.entered()) for chunk in self.staged_chunks(rank)[cta :: self.ctas])
                read = [step for warp in range(WARPS) for step in self.combining_steps(WaitGraph(), rank, cta * WARPS + warp)]
                graph.add(("done", rank, cta), [("find", rank), *read])
                own: list[Step] = [("done", rank, cta)]
                others: list[Step] = [("done", mate, cta) for mate in self.mates(rank)] if rank in self.on_heap else []
                graph.add(("keep", rank, cta), own + others)

    def combining_steps(self, graph: WaitGraph, rank: int, worker: int) -> Iterator[Step]:
        chunks = self.staged_chunks(rank)[worker // WARPS :: self.ctas] if self.plan.node_mates else []
        before: list[Step] = [("stage", rank, chunk) for chunk in chunks]  # of the same CTA
        for step in super().combining_steps(graph, rank, worker):
            yield graph.add(step, [("find", rank), *before] if self.plan.node_mates else [])

    def rows_ready(self, rank: int, row: int, expert: int) -> list[Step]:
        holder, local_row = self.holder(rank, row)
        if holder == rank or holder in self.on_heap:
            return []
        return [("stage", holder, local_row // self.plan.row_chunk)]

    # ---- who accesses what
    def _own_accesses(self, step: Step) -> Iterator[Access]:
        kind, rank, *rest = step
        assert isinstance(rank, int)
        local, plan, row_bytes = self.topology.local_rank(rank), self.plan, self.problem.row_bytes
        match kind, rest:
            case "tell", []:
                for mate in self.mates(rank):
                    yield Access(step, mate, self.told, local * TOLD_BYTES, TOLD_BYTES, writes=True)
                    yield self.flag(step, mate, local, writes=True)
            case "find", []:
                for mate in self.mates(rank):
                    at = self.topology.local_rank(mate)
                    yield Access(step, rank, self.told, at * TOLD_BYTES, TOLD_BYTES, writes=False)
                    yield self.flag(step, rank, at, writes=False)
            case "stage", [int(chunk)]:
                begin, end = chunk * plan.row_chunk, min((chunk + 1) * plan.row_chunk, self.offsets[rank][-1])
                yield Access(step, rank, self.staged, begin * row_bytes, (end - begin) * row_bytes, writes=True)
                for mate in self.mates(rank):
                    yield self.flag(step, mate, plan.row_flag(local, chunk), writes=True)
            case "done", [int(cta)]:
                for mate in self.mates(rank):
                    if mate in self.on_heap:
                        yield self.flag(step, mate, plan.done_flag(local, cta), writes=True)
            case "keep", [int(cta)]:
                for mate in self.mates(rank) if rank in self.on_heap else ():
                    yield self.flag(step, rank, plan.done_flag(self.topology.local_rank(mate), cta), writes=False)

    def row_accesses(self, step: Step, rank: int, row: int, expert: int) -> Iterator[Access]:
        holder, local_row = self.holder(rank, row)
        if holder != rank and holder not in self.on_heap:
            number = self.plan.row_flag(self.topology.local_rank(holder), local_row // self.plan.row_chunk)
            yield self.flag(step, rank, number, writes=False)
            yield Access(step, holder, self.staged, local_row * self.problem.row_bytes, self.problem.row_bytes, writes=False)

    # ---- where things are
    def mates(self, rank: int) -> list[int]:
        return [mate for mate in self.topology.node_ranks(self.topology.node(rank)) if mate != rank]

    def staged_chunks(self, rank: int) -> list[int]:
        return [] if rank in self.on_heap else list(range(-(-self.offsets[rank][-1] // self.plan.row_chunk)))


def _lists(array: Any) -> Any:
    return array.tolist()
