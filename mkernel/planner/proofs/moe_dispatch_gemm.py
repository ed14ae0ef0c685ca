"""MoE dispatch: who waits for whom, and who accesses which bytes (``kernels_src/moe``, ``kernels_src/ops/moe_dispatch_gemm.cuh``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from mkernel.planner.moe import SEGMENT_ROWS, STAGED_ROWS
from mkernel.planner.moe_dispatch_gemm import MoeDispatchGemmPlan
from mkernel.planner.proofs.areas import FLAGS, HEAP, Access, Area, Call
from mkernel.planner.proofs.wait_graph import Step, WaitGraph

__all__ = ["call_of"]

_WORD = 8
_RAISING = frozenset({"done", "hand", "post", "put", "relay", "route", "stage", "tell"})
_WAITING = frozenset({"hand", "keep", "pull", "relay", "route"})


def call_of(plan: MoeDispatchGemmPlan, ids: Sequence[Any], on_heap: Collection[int] = ()) -> Call:
    """One call in which rank r passes ``ids[r]`` (T, k), which are right; ``on_heap``: ranks whose x lies on the symmetric heap.

    Steps: ``("enter", rank)``; ``("tell", rank)`` its routing to the node, ``("post", rank, peer)`` to a rail peer, ``("relay", rank,
    peer)`` that peer's to the node; ``("stage", rank, chunk)``; ``("route", rank)`` places all tokens; ``("put", rank, peer, chunk)`` packs
    rows and puts them, ``("hand", rank, peer, chunk)`` tells the node of a peer's; ``("pull", rank, item)`` fetches a row, ``("tile", rank,
    expert)`` reads those of an expert; ``("done", rank, cta)`` says that a CTA has fetched its rows, ``("keep", rank, cta)`` waits for it.
    """
    return _Call(plan, ids, on_heap).call()


class _Call:
    def __init__(self, plan: MoeDispatchGemmPlan, ids: Sequence[Any], on_heap: Collection[int]) -> None:
        self.plan, self.problem, self.topology = plan, plan.problem, plan.problem.topology
        self.ids: list[list[list[int]]] = [of_rank.tolist() for of_rank in ids]
        self.on_heap, self.ranks = on_heap, range(self.topology.size)
        self.movers, self.senders = plan.split.intra_comm or 0, plan.split.inter_send or 0
        areas, nodes = plan.areas, self.topology.num_nodes
        rows, staged = (self.problem.max_tokens * each for each in (self.problem.row_bytes, self.problem.slot_bytes))
        self.records = _area("routing of ranks", areas.records, nodes * plan.record_bytes, {"tell", "post"}, {"post", "route"})
        self.staged = _area("staged tokens", areas.staged, staged if self.topology.ranks_per_node > 1 else 0, {"stage"}, {"pull"})
        self.sending = _area("rows to send", areas.sending, (nodes - 1) * rows, {"put"}, {"put"})
        self.arrived = _area("rows arrived", areas.arrived, (nodes - 1) * rows, {"put"}, {"pull"})
        self.tables = _area("where tokens go", areas.tables, plan.table_bytes, {"route", "pull"}, {"put", "pull", "tile"})
        slots = self.problem.blocks * SEGMENT_ROWS * self.problem.slot_bytes
        self.slots = _area("rows by expert", areas.slots, slots, {"pull"}, {"tile"})
        self.flags = Area("flags of routing, rows and CTAs", FLAGS, 0, plan.flag_words * _WORD, _RAISING, _WAITING)
        self.listed = {(rank, node): self.tokens_for(rank, node) for rank in self.ranks for node in range(nodes)}
        self.items = [self.items_of(rank) for rank in self.ranks]

    def call(self) -> Call:
        graph = self.graph()
        areas = (self.records, self.staged, self.sending, self.arrived, self.tables, self.slots, self.flags)
        return Call(graph, areas, tuple(access for step in graph for access in self.accesses(step)))

    # ---- what the routing means
    def tokens_for(self, rank: int, node: int) -> list[int]:
        """Tokens of a rank for which a node has experts, in order."""
        first, number = node * self.topology.ranks_per_node * self.problem.experts, self.topology.ranks_per_node * self.problem.experts
        return [token for token, ids in enumerate(self.ids[rank]) if any(first <= e < first + number for e in ids)]

    def experts_on(self, rank: int, ids: Sequence[int]) -> list[int]:
        return sorted(e - rank * self.problem.experts for e in ids if 0 <= e - rank * self.problem.experts < self.problem.experts)

    def items_of(self, rank: int) -> list[tuple[int, int]]:
        """(source, token) of the rows that a rank fetches, in order: by first expert, the sources in turn."""
        by_expert: list[list[tuple[int, int]]] = [[] for _ in range(self.problem.experts)]
        for source in self.ranks:
            for token, ids in enumerate(self.ids[source]):
                if experts := self.experts_on(rank, ids):
                    by_expert[experts[0]].append((source, token))
        found = []
        for tokens in by_expert:
            each, more = divmod(len(tokens), self.topology.size)
            parts, begin = [], 0
            for part in self.ranks:
                end = begin + each + (part < more)
                parts.append(tokens[begin:end])
                begin = end
            found += [part[i] for i in range(each + 1) for part in parts if i < len(part)]
        return found

    def chunk_of(self, rank: int, source: int, token: int) -> int | None:
        """The chunk of ``source``'s rows that ``rank`` waits for before it reads this token; None: it waits for nothing."""
        if self.near(rank, source):
            return None if source == rank or source in self.on_heap else token // STAGED_ROWS
        return self.listed[source, self.topology.node(rank)].index(token) // self.plan.put_rows

    def chunks(self, source: int, node: int) -> int:
        return -(-len(self.listed[source, node]) // self.plan.put_rows)

    # ---- who waits for whom
    def graph(self) -> WaitGraph:
        graph, entered = WaitGraph(), [("enter", rank) for rank in self.ranks]
        for rank in self.ranks:
            graph.add(("enter", rank))
            graph.add(("tell", rank), entered)
            for peer in self.topology.rail_peers(rank):
                graph.add(("post", rank, peer), [("tell", rank)])
                graph.add(("relay", rank, peer), [("post", peer, rank)])
            for chunk in range(self.staged_chunks(rank)):
                graph.add(("stage", rank, chunk), entered)
            graph.add(("route", rank), [self.told(rank, source) for source in self.ranks])
            for chain in (*self.putting(graph, rank), self.handing(graph, rank)):
                graph.chain(chain)
            for cta in range(self.movers):
                graph.chain(self.mover(graph, rank, cta))
            for expert in range(self.problem.experts):
                reads = [("pull", rank, i) for i, (s, t) in enumerate(self.items[rank]) if expert in self.experts_on(rank, self.ids[s][t])]
                graph.add(("tile", rank, expert), [("route", rank), *reads])
        return graph

    def putting(self, graph: WaitGraph, rank: int) -> list[list[Step]]:
        """What each inter_send CTA puts, in order."""
        chains: list[list[Step]] = [[] for _ in range(self.senders)]
        peers = self.topology.rail_peers(rank)
        for chunk in range(max((self.chunks(rank, self.topology.node(peer)) for peer in peers), default=0)):
            for number, peer in enumerate(peers):
                if chunk < self.chunks(rank, self.topology.node(peer)):
                    sender = (chunk * len(peers) + number) % self.senders
                    chains[sender].append(graph.add(("put", rank, peer, chunk), [("route", rank)]))
        return chains

    def handing(self, graph: WaitGraph, rank: int) -> list[Step]:
        """What one warp of a rank tells its node, in order."""
        node, peers = self.topology.node(rank), self.topology.rail_peers(rank)
        if self.topology.ranks_per_node == 1:
            return []
        return [
            graph.add(("hand", rank, peer, chunk), [("route", rank), ("put", peer, rank, chunk)])
            for chunk in range(max((self.chunks(peer, node) for peer in peers), default=0))
            for peer in peers
            if chunk < self.chunks(peer, node)
        ]

    def mover(self, graph: WaitGraph, rank: int, cta: int) -> Iterator[Step]:
        """What an intra_comm CTA does, in order."""
        for number in range(cta, len(self.items[rank]), self.movers):
            source, token = self.items[rank][number]
            chunk = self.chunk_of(rank, source, token)
            yield graph.add(("pull", rank, number), [("route", rank), *([] if chunk is None else [self.brought(rank, source, chunk)])])
        yield graph.add(("done", rank, cta), [("route", rank)])
        if rank in self.on_heap:
            yield graph.add(("keep", rank, cta), [("done", mate, cta) for mate in self.mates(rank)])

    def told(self, rank: int, source: int) -> Step:
        """The step that raises ``rank``'s flag for a routing."""
        if self.near(rank, source):
            return ("tell", source)
        return ("post", source, rank) if self.holder(rank, source) == rank else ("relay", self.holder(rank, source), source)

    def brought(self, rank: int, source: int, chunk: int) -> Step:
        """The step that raises ``rank``'s flag for a chunk of rows."""
        if self.near(rank, source):
            return ("stage", source, chunk)
        holder = self.holder(rank, source)
        return ("put", source, rank, chunk) if holder == rank else ("hand", holder, source, chunk)

    # ---- who accesses what
    def accesses(self, step: Step) -> Iterator[Access]:
        kind, rank, *numbers = step
        assert isinstance(rank, int)
        of_kind = getattr(self, f"_{kind}", None)  # a function below for each kind that accesses anything
        yield from of_kind(step, rank, *numbers) if of_kind is not None else ()

    def _tell(self, step: Step, rank: int) -> Iterator[Access]:
        yield self.record(step, rank, rank, writes=True)
        yield from self.flags_of((rank, *self.mates(rank)), step, rank)

    def _post(self, step: Step, rank: int, peer: int) -> Iterator[Access]:
        yield self.record(step, rank, rank, writes=False)
        yield self.record(step, peer, rank, writes=True)
        yield self.flag(step, peer, rank, writes=True)

    def _relay(self, step: Step, rank: int, peer: int) -> Iterator[Access]:
        yield self.flag(step, rank, peer, writes=False)
        yield from self.flags_of(self.mates(rank), step, peer)

    def _stage(self, step: Step, rank: int, chunk: int) -> Iterator[Access]:
        yield self.rows(step, rank, self.staged, chunk * STAGED_ROWS, STAGED_ROWS, len(self.ids[rank]), writes=True)
        yield from self.flags_of(self.mates(rank), step, self.chunk_flag(rank, chunk))

    def _route(self, step: Step, rank: int) -> Iterator[Access]:
        for source in self.ranks:
            yield self.flag(step, rank, source, writes=False)
            yield self.record(step, self.holder(rank, source), source, writes=False)
        yield Access(step, rank, self.tables, 0, self.tables.bytes, True)

    def _put(self, step: Step, rank: int, peer: int, chunk: int) -> Iterator[Access]:
        there = self.topology.node(peer)
        yield Access(step, rank, self.tables, 0, self.tables.bytes, False)
        for writes in (True, False):
            yield self.sent_rows(step, rank, self.sending, self.distance(rank, peer), rank, there, chunk, writes=writes)
        yield self.sent_rows(step, peer, self.arrived, self.distance(peer, rank), rank, there, chunk, writes=True)
        yield self.flag(step, peer, self.chunk_flag(rank, chunk), writes=True)

    def _hand(self, step: Step, rank: int, peer: int, chunk: int) -> Iterator[Access]:
        yield self.flag(step, rank, self.chunk_flag(peer, chunk), writes=False)
        yield from self.flags_of(self.mates(rank), step, self.chunk_flag(peer, chunk))

    def _tile(self, step: Step, rank: int, expert: int) -> Iterator[Access]:
        yield Access(step, rank, self.slots, *self.segment(rank, expert), False)

    def _done(self, step: Step, rank: int, cta: int) -> Iterator[Access]:
        yield from self.flags_of(self.mates(rank), step, self.fetched_flag(rank, cta))

    def _keep(self, step: Step, rank: int, cta: int) -> Iterator[Access]:
        for mate in self.mates(rank):
            yield self.flag(step, rank, self.fetched_flag(mate, cta), writes=False)

    def _pull(self, step: Step, rank: int, number: int) -> Iterator[Access]:
        source, token = self.items[rank][number]
        chunk = self.chunk_of(rank, source, token)
        if chunk is not None:
            yield self.flag(step, rank, self.chunk_flag(source, chunk), writes=False)
            holder = self.holder(rank, source)
            if self.near(rank, source):
                yield self.rows(step, holder, self.staged, token, 1, len(self.ids[source]), writes=False)
            else:
                at, row = self.distance(holder, source), self.problem.row_bytes
                place = self.listed[source, self.topology.node(rank)].index(token)
                yield Access(step, holder, self.arrived, ((at - 1) * self.problem.max_tokens + place) * row, row, False)
        yield Access(step, rank, self.tables, 0, self.tables.bytes, True)  # counters of what has arrived
        for expert in self.experts_on(rank, self.ids[source][token]):
            yield Access(step, rank, self.slots, *self.segment(rank, expert), True)

    def segment(self, rank: int, expert: int) -> tuple[int, int]:
        """Begin and bytes of an expert's slots."""
        number = self.problem.experts
        rows = [sum(rank * number + e in ids for of_rank in self.ids for ids in of_rank) for e in range(number)]
        blocks = [-(-(-(-count // self.problem.alignment) * self.problem.alignment) // SEGMENT_ROWS) for count in rows]
        size = SEGMENT_ROWS * self.problem.slot_bytes
        return sum(blocks[:expert]) * size, blocks[expert] * size

    def rows(self, step: Step, rank: int, area: Area, first: int, number: int, of: int, *, writes: bool) -> Access:
        pitch, last = self.problem.slot_bytes, min(number, of - first) - 1
        return Access(step, rank, area, first * pitch, last * pitch + self.problem.row_bytes, writes)

    def sent_rows(self, step: Step, rank: int, area: Area, at: int, source: int, node: int, chunk: int, *, writes: bool) -> Access:
        first, size = chunk * self.plan.put_rows, self.problem.row_bytes
        number = min(self.plan.put_rows, len(self.listed[source, node]) - first)
        return Access(step, rank, area, ((at - 1) * self.problem.max_tokens + first) * size, number * size, writes)

    def record(self, step: Step, rank: int, of: int, *, writes: bool) -> Access:
        size = self.plan.record_bytes
        return Access(step, rank, self.records, self.topology.node(of) * size, size, writes)

    def flags_of(self, ranks: Collection[int], step: Step, number: int) -> Iterator[Access]:
        return (self.flag(step, rank, number, writes=True) for rank in ranks)

    def flag(self, step: Step, rank: int, number: int, *, writes: bool) -> Access:
        return Access(step, rank, self.flags, number * _WORD, _WORD, writes)

    def chunk_flag(self, rank: int, chunk: int) -> int:
        return self.topology.size + rank * self.plan.max_chunks + chunk

    def fetched_flag(self, rank: int, cta: int) -> int:
        return self.topology.size * (1 + self.plan.max_chunks) + 2 + self.topology.local_rank(rank) * self.movers + cta

    # ---- where things are
    def staged_chunks(self, rank: int) -> int:
        alone = self.topology.ranks_per_node == 1
        return 0 if alone or rank in self.on_heap else -(-len(self.ids[rank]) // STAGED_ROWS)

    def near(self, rank: int, other: int) -> bool:
        return self.topology.node(rank) == self.topology.node(other)

    def mates(self, rank: int) -> list[int]:
        return [mate for mate in self.topology.node_ranks(self.topology.node(rank)) if mate != rank]

    def holder(self, rank: int, source: int) -> int:
        """The rank of this node that has what ``source`` sends it: itself, or the one on its rail."""
        return self.topology.rank(self.topology.node(rank), self.topology.local_rank(source))

    def distance(self, rank: int, other: int) -> int:
        """How many nodes on ``other`` is."""
        return (self.topology.node(other) - self.topology.node(rank)) % self.topology.num_nodes


def _area(name: str, offset: int, size: int, writers: set[str], readers: set[str]) -> Area:
    return Area(name, HEAP, offset, size, frozenset(writers), frozenset(readers))
