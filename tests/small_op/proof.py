"""``allgather_rows``: who waits for whom, and who accesses which bytes (``allgather_rows.cuh``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mkernel.planner.proofs.areas import FLAGS, HEAP, Access, Area, Call
from mkernel.planner.proofs.wait_graph import Step, WaitGraph
from tests.small_op.plan import COUNT_BYTES, WARPS, AllGatherRowsPlan

__all__ = ["call_of"]

_WORD = 8


def call_of(plan: AllGatherRowsPlan, counts: Sequence[int] | None = None) -> Call:
    """One call in which rank r has ``counts[r]`` rows (None: all have equally many, as many as there is room for).

    Steps: ``("enter", rank)``; ``("tell", rank)`` its count to the node, ``("post", rank, peer)`` to one of its rail, ``("hand", rank,
    source)`` that of a rail peer to the node, ``("pack", rank)``; ``("share", rank, chunk)`` of its own rows, ``("put", rank, chunk,
    peer)``, ``("take", rank, source, chunk)``.
    """
    size = plan.problem.topology.size
    return _Call(plan, [plan.max_rows // size] * size if counts is None else counts).call()


class _Call:
    def __init__(self, plan: AllGatherRowsPlan, counts: Sequence[int]) -> None:
        self.plan, self.topology, self.counts = plan, plan.problem.topology, counts
        size = self.topology.size
        assert sum(counts) <= plan.max_rows, "what is refused moves nothing"
        self.first = [sum(counts[:rank]) for rank in range(size)]
        written, read = frozenset({"share", "put"}), frozenset({"put", "take"})
        self.told = Area("counts", HEAP, 0, size * COUNT_BYTES, frozenset({"tell", "post", "hand"}), frozenset({"pack", "post", "hand"}))
        self.rows = Area("rows", HEAP, plan.rows_offset, plan.max_rows * plan.row_bytes, written, read)
        raising = written | {"tell", "post", "hand", "take"}
        self.flags = Area("flags of counts and chunks", FLAGS, 0, plan.flag_words * _WORD, raising, read | {"hand", "pack"})

    def call(self) -> Call:
        graph = self.graph()
        return Call(graph, (self.told, self.rows, self.flags), tuple(access for step in graph for access in self.accesses(step)))

    # ---- who waits for whom
    def graph(self) -> WaitGraph:
        graph, ranks = WaitGraph(), range(self.topology.size)
        for rank in ranks:
            graph.add(("enter", rank))
            graph.add(("tell", rank), [("enter", other) for other in ranks])
            for peer in self.topology.rail_peers(rank):
                graph.add(("post", rank, peer), [("tell", rank)])
                graph.add(("hand", rank, peer), [("tell", rank), ("post", peer, rank)])
            graph.add(("pack", rank), [self.told_by(rank, one) for one in ranks])
            sent: list[Step] = []
            for chunk in range(self.chunks(rank)):
                for peer in self.topology.rail_peers(rank):
                    sent.append(graph.add(("put", rank, chunk, peer), [("pack", rank), ("share", rank, chunk)]))
            graph.chain(sent)  # one CTA; with more of them a put waits for fewer
            for worker in range(self.plan.roles[0] * WARPS):
                graph.chain(self.worker(graph, rank, worker))
        return graph

    def worker(self, graph: WaitGraph, rank: int, worker: int) -> Iterator[Step]:
        """What one warp of a rank does, in order."""
        workers = self.plan.roles[0] * WARPS
        for chunk in range(worker, self.chunks(rank), workers):
            yield graph.add(("share", rank, chunk), [("pack", rank)])
        for distance in range(1, self.topology.size):
            source = self.rank_at(rank, distance)
            for chunk in range(worker, self.chunks(source), workers):
                yield graph.add(("take", rank, source, chunk), [("pack", rank), self.arrival(rank, source, chunk)])

    def told_by(self, rank: int, source: int) -> Step:
        """The step that tells ``rank`` the count of ``source``."""
        if self.near(rank, source):
            return ("tell", source)
        holder = self.holder(rank, source)
        return ("post", source, rank) if holder == rank else ("hand", holder, source)

    def arrival(self, rank: int, source: int, chunk: int) -> Step:
        """The step that raises ``rank``'s flag for a chunk."""
        if self.near(rank, source):
            return ("share", source, chunk)
        holder = self.holder(rank, source)
        return ("put", source, chunk, rank) if holder == rank else ("take", holder, source, chunk)

    # ---- who accesses what
    def accesses(self, step: Step) -> Iterator[Access]:
        kind, rank, *rest = step
        assert isinstance(rank, int)
        node = self.topology.node_ranks(self.topology.node(rank))
        mates = [peer for peer in node if peer != rank]
        match kind, rest:
            case "tell", []:
                for peer in node:
                    yield self.count(step, peer, rank, writes=True)
                    yield self.flag(step, peer, rank, writes=True)
            case "post", [int(peer)]:
                yield self.count(step, rank, rank, writes=False)
                yield self.count(step, peer, rank, writes=True)
                yield self.flag(step, peer, rank, writes=True)
            case "hand", [int(source)]:
                yield from self.handing(step, rank, source, mates)
            case "pack", []:
                for source in range(self.topology.size):
                    yield self.flag(step, rank, source, writes=False)
                    yield self.count(step, rank, source, writes=False)
            case "share", [int(chunk)]:
                yield self.data(step, rank, rank, chunk, writes=True)
                for peer in node:
                    yield self.flag(step, peer, self.chunk_flag(rank, chunk), writes=True)
            case "put", [int(chunk), int(peer)]:
                yield self.flag(step, rank, self.chunk_flag(rank, chunk), writes=False)
                yield self.data(step, rank, rank, chunk, writes=False)
                yield self.data(step, peer, rank, chunk, writes=True)
                yield self.flag(step, peer, self.chunk_flag(rank, chunk), writes=True)
            case "take", [int(source), int(chunk)]:
                holder, number = self.holder(rank, source), self.chunk_flag(source, chunk)
                yield self.flag(step, rank, number, writes=False)
                yield self.data(step, holder, source, chunk, writes=False)
                for mate in mates if holder == rank else []:
                    yield self.flag(step, mate, number, writes=True)

    def handing(self, step: Step, rank: int, source: int, mates: Sequence[int]) -> Iterator[Access]:
        yield self.flag(step, rank, source, writes=False)
        yield self.count(step, rank, source, writes=False)
        for mate in mates:
            yield self.count(step, mate, source, writes=True)
            yield self.flag(step, mate, source, writes=True)

    def count(self, step: Step, rank: int, of: int, *, writes: bool) -> Access:
        return Access(step, rank, self.told, of * COUNT_BYTES, COUNT_BYTES, writes)

    def flag(self, step: Step, rank: int, number: int, *, writes: bool) -> Access:
        return Access(step, rank, self.flags, number * _WORD, _WORD, writes)

    def data(self, step: Step, rank: int, source: int, chunk: int, *, writes: bool) -> Access:
        row = chunk * self.plan.chunk_rows
        begin, rows = self.first[source] + row, min(self.plan.chunk_rows, self.counts[source] - row)
        return Access(step, rank, self.rows, begin * self.plan.row_bytes, rows * self.plan.row_bytes, writes)

    # ---- where things are
    def chunks(self, rank: int) -> int:
        return -(-self.counts[rank] // self.plan.chunk_rows)

    def chunk_flag(self, rank: int, chunk: int) -> int:
        return self.topology.size + rank * self.plan.max_chunks + chunk

    def near(self, rank: int, other: int) -> bool:
        return self.topology.node(rank) == self.topology.node(other)

    def holder(self, rank: int, source: int) -> int:
        """The rank of this node that has the rows of ``source`` in its heap: itself, or the one on its rail."""
        per_node = self.topology.ranks_per_node
        return self.topology.node(rank) * per_node + source % per_node

    def rank_at(self, rank: int, distance: int) -> int:
        topology, per_node = self.topology, self.topology.ranks_per_node
        node = (topology.node(rank) + distance // per_node) % topology.num_nodes
        return node * per_node + (topology.local_rank(rank) + distance % per_node) % per_node
