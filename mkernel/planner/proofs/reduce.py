"""The reductions: who accesses which bytes (``kernels_src/reduce`` and the kernels that include it)."""

from __future__ import annotations

from collections.abc import Iterator

from mkernel.planner.proofs.areas import FLAGS, HEAP, PACKETS, Access, Area, Call
from mkernel.planner.proofs.reduce_waits import item_of, wait_graph
from mkernel.planner.proofs.wait_graph import Step
from mkernel.planner.reduce import ReducePlan, Tile

__all__ = ["call_of", "wait_graph"]

_WORD = 8
# Of each area of the workspace: what it holds, who writes and who reads it.
_WORKSPACE = {
    "partial": ("partial tiles", {"tile", "send"}, {"tile", "sum", "send"}),
    "sum": ("node sums to send", {"sum"}, {"put"}),
    "arrived": ("node sums arrived", {"put"}, {"tile"}),
    "result": ("finished tiles", {"tile", "send"}, {"pull", "send"}),
}


def call_of(plan: ReducePlan) -> Call:
    """One call."""
    offsets = plan.offsets
    areas = {
        name: Area(what, HEAP, offsets[name], plan.areas[name], frozenset(writers), frozenset(readers))
        for name, (what, writers, readers) in _WORKSPACE.items()
    }
    everyone = frozenset({"tile", "send", "tell"} if plan.one_shot else {"tile", "sum", "put", "send", "pull"})
    areas["flags"] = Area("flags of tiles, sums and chunks", FLAGS, 0, plan.flag_words * _WORD, everyone, everyone)
    taking = frozenset({"partials", "packets", "tile"})
    exchanged = plan.exchanged_bytes(plan.rows, plan.tiles) if plan.packets else 0
    areas["packets"] = Area("packets", PACKETS, 0, exchanged, taking, taking)
    sharing = frozenset({"partials", "tile"})
    areas["shares"] = Area("packets of shares", PACKETS, exchanged, plan.packet_bytes - exchanged, sharing, sharing)
    graph = wait_graph(plan)
    accesses = _Accesses(plan, areas)
    return Call(graph, tuple(areas.values()), tuple(access for step in graph for access in accesses.of(step)))


class _Accesses:
    def __init__(self, plan: ReducePlan, areas: dict[str, Area]) -> None:
        self.plan, self.areas, self.topology = plan, areas, plan.problem.topology
        ranks = range(self.topology.size)
        self.tiles = [[tile for tile in plan.tiles_of(rank) if plan.exists(tile.owner, tile.index)] for rank in ranks]

    def of(self, step: Step) -> Iterator[Access]:
        kind, rank, *rest = step
        assert isinstance(rank, int)
        if self.plan.packets:
            yield from self._packets(step, rank)
        elif self.plan.one_shot:
            yield from self._one_shot(step, rank)
        elif kind == "tile":
            (index,) = rest
            assert isinstance(index, int)
            yield from self._tile(step, rank, self.tiles[rank][index])
        elif kind == "sum":
            owner, index = rest
            assert isinstance(owner, int)
            assert isinstance(index, int)
            yield from self._sum(step, rank, owner, index)
        elif kind in ("put", "send"):
            peer, chunk = rest
            assert isinstance(peer, int)
            assert isinstance(chunk, int)
            yield from self._put(step, rank, peer, chunk) if kind == "put" else self._send(step, rank, peer, chunk)
        elif kind == "pull":
            owner, number = rest
            assert isinstance(owner, int)
            assert isinstance(number, int)
            yield from self._pull(step, rank, owner, number)

    # ---- numbers, as in the kernel
    def _distance(self, rank: int, other: int) -> int:
        """From the node of ``rank`` to that of ``other``."""
        return (self.topology.node(other) - self.topology.node(rank)) % self.topology.num_nodes

    def _partial(self, adder: int, owner: int, source: int, index: int) -> int:
        """Number of a partial tile at the rank that adds it up."""
        per_node = self.topology.ranks_per_node
        nodes, ranks = self._distance(adder, owner), (self.topology.local_rank(source) - self.topology.local_rank(adder)) % per_node
        block = ranks - 1 if nodes == 0 else per_node - 1 + (nodes - 1) * per_node + ranks
        return block * self.plan.tiles + index

    def _tile_at(self, step: Step, rank: int, area: str, number: int, *, writes: bool, count: int = 1) -> Access:
        size = self.plan.result_bytes if area == "result" else self.plan.partial_bytes
        return Access(step, rank, self.areas[area], number * size, count * size, writes)

    def _flag(self, step: Step, rank: int, number: int, *, writes: bool) -> Access:
        return Access(step, rank, self.areas["flags"], number * _WORD, _WORD, writes)

    def _sum_flag(self, nodes: int, index: int) -> int:
        return (self.topology.size - 1 + nodes - 1) * self.plan.tiles + index

    def _arrived_flag(self, nodes: int, chunk: int) -> int:
        others = self.topology.num_nodes - 1
        return (self.topology.size - 1 + others) * self.plan.tiles + (nodes - 1) * self.plan.num_chunks + chunk

    def _finished_flag(self, nodes: int, local_rank: int, index: int) -> int:
        others = self.topology.num_nodes - 1
        first = (self.topology.size - 1 + others) * self.plan.tiles + others * self.plan.num_chunks
        return first + (nodes * self.topology.ranks_per_node + local_rank) * self.plan.tiles + index

    def _chunk(self, owner: int, chunk: int) -> range:
        """The tiles of an owner's chunk."""
        first = chunk * self.plan.chunk_tiles
        count = sum(self.plan.exists(owner, i) for i in range(first, min(first + self.plan.chunk_tiles, self.plan.tiles)))
        return range(first, first + count)

    # ---- steps
    def _tile(self, step: Step, rank: int, tile: Tile) -> Iterator[Access]:
        topology, plan = self.topology, self.plan
        if tile.owner != rank:
            adder = topology.rank(topology.node(rank), topology.local_rank(tile.owner))
            number = self._partial(adder, tile.owner, rank, tile.index)
            yield self._tile_at(step, adder, "partial", number, writes=True)
            yield self._flag(step, adder, number, writes=True)
            return
        for source in topology.node_ranks(topology.node(rank)):
            if source != rank:
                number = self._partial(rank, rank, source, tile.index)
                yield self._flag(step, rank, number, writes=False)
                yield self._tile_at(step, rank, "partial", number, writes=False)
        for nodes in range(1, topology.num_nodes):
            yield self._flag(step, rank, self._arrived_flag(nodes, tile.index // plan.chunk_tiles), writes=False)
            yield self._tile_at(step, rank, "arrived", (nodes - 1) * plan.tiles + tile.index, writes=False)
        if self.areas["result"].bytes:
            yield self._tile_at(step, rank, "result", tile.index, writes=True)
            for peer in topology.node_ranks(topology.node(rank)):
                yield self._flag(step, peer, self._finished_flag(0, topology.local_rank(rank), tile.index), writes=True)

    def _sum(self, step: Step, rank: int, owner: int, index: int) -> Iterator[Access]:
        nodes = self._distance(rank, owner)
        for source in self.topology.node_ranks(self.topology.node(rank)):
            number = self._partial(rank, owner, source, index)
            yield self._flag(step, rank, number, writes=False)
            yield self._tile_at(step, rank, "partial", number, writes=False)
        yield self._tile_at(step, rank, "sum", (nodes - 1) * self.plan.tiles + index, writes=True)
        yield self._flag(step, rank, self._sum_flag(nodes, index), writes=True)

    def _put(self, step: Step, rank: int, peer: int, chunk: int) -> Iterator[Access]:
        nodes, back, tiles = self._distance(rank, peer), self._distance(peer, rank), self._chunk(peer, chunk)
        for index in tiles:
            yield self._flag(step, rank, self._sum_flag(nodes, index), writes=False)
        first = tiles.start
        yield self._tile_at(step, rank, "sum", (nodes - 1) * self.plan.tiles + first, writes=False, count=len(tiles))
        yield self._tile_at(step, peer, "arrived", (back - 1) * self.plan.tiles + first, writes=True, count=len(tiles))
        yield self._flag(step, peer, self._arrived_flag(back, chunk), writes=True)

    def _send(self, step: Step, rank: int, peer: int, chunk: int) -> Iterator[Access]:
        local, back, tiles = self.topology.local_rank(rank), self._distance(peer, rank), self._chunk(rank, chunk)
        for index in tiles:
            yield self._flag(step, rank, self._finished_flag(0, local, index), writes=False)
        yield self._tile_at(step, rank, "result", tiles.start, writes=False, count=len(tiles))
        yield self._tile_at(step, peer, "result", back * self.plan.tiles + tiles.start, writes=True, count=len(tiles))
        yield self._flag(step, peer, self._finished_flag(back, local, tiles.start), writes=True)

    def _pull(self, step: Step, rank: int, owner: int, number: int) -> Iterator[Access]:
        topology, nodes = self.topology, self._distance(rank, owner)
        holder = topology.rank(topology.node(rank), topology.local_rank(owner))  # the owner, or its rail peer in this node
        tiles = range(number, number + 1) if nodes == 0 else self._chunk(owner, number)
        flag = self._finished_flag(nodes, topology.local_rank(owner), tiles.start)
        yield self._flag(step, rank, flag, writes=False)
        yield self._tile_at(step, holder, "result", nodes * self.plan.tiles + tiles.start, writes=False, count=len(tiles))
        if nodes and holder == rank:
            for peer in topology.node_ranks(topology.node(rank)):
                if peer != rank:
                    yield self._flag(step, peer, flag, writes=True)

    def _one_shot(self, step: Step, rank: int) -> Iterator[Access]:
        """Slots by source rank and tile, on every rank."""
        kind, _, *rest = step
        topology, plan = self.topology, self.plan
        near = topology.node_ranks(topology.node(rank))
        if kind == "send":
            peer, chunk = rest
            assert isinstance(peer, int)
            assert isinstance(chunk, int)
            tiles = self._chunk(rank, chunk)
            first = rank * plan.tiles + tiles.start
            for i in tiles:
                yield self._flag(step, rank, rank * plan.tiles + i, writes=False)
            yield self._tile_at(step, rank, "partial", first, writes=False, count=len(tiles))
            yield self._tile_at(step, peer, "partial", first, writes=True, count=len(tiles))
            yield self._flag(step, peer, first, writes=True)
        elif kind == "tell":
            source, chunk = rest
            assert isinstance(source, int)
            assert isinstance(chunk, int)
            flag = source * plan.tiles + self._chunk(source, chunk).start
            yield self._flag(step, rank, flag, writes=False)
            for mate in near:
                if mate != rank:
                    yield self._flag(step, mate, flag, writes=True)
        elif kind == "tile":
            (index,) = rest
            assert isinstance(index, int)
            tile = self.tiles[rank][index]
            if not tile.is_sum:
                for mate in near:
                    yield self._tile_at(step, mate, "partial", rank * plan.tiles + tile.index, writes=True)
                    yield self._flag(step, mate, rank * plan.tiles + tile.index, writes=True)
                return
            for source in range(topology.size):
                first = tile.index if source in near else tile.index // plan.chunk_tiles * plan.chunk_tiles
                holder = rank if source in near else topology.rank(topology.node(rank), topology.local_rank(source))
                yield self._flag(step, rank, source * plan.tiles + first, writes=False)
                yield self._tile_at(step, holder, "partial", source * plan.tiles + tile.index, writes=False)

    def _packets(self, step: Step, rank: int) -> Iterator[Access]:
        """Whole ranges of packets: who sends writes to everybody, who takes leaves zeros."""
        area, (kind, _, number) = self.areas["packets"], step if len(step) == 3 else ("enter", rank, 0)
        assert isinstance(number, int)
        is_share = kind == "tile" and item_of(self.plan, self.tiles[rank][number]) is None
        if kind in ("partials", "packets"):
            for peer in range(self.topology.size):
                yield Access(step, peer, area, 0, area.bytes, writes=True)
        if kind in ("packets", "tile") and not is_share:
            yield Access(step, rank, area, 0, area.bytes, writes=True)
        if self.plan.shares == 1:
            return
        if is_share:
            yield self._share(step, rank, self.tiles[rank][number].index, self.tiles[rank][number].share, range(self.plan.shares))
        elif kind == "partials":  # takes its slice of what all shares have
            index, slice_ = divmod(number, self.plan.shares)
            for share in range(self.plan.shares):
                yield self._share(step, rank, index, share, range(slice_, slice_ + 1))

    def _share(self, step: Step, rank: int, index: int, share: int, slices: range) -> Access:
        """Packets of a share in some slices of a tile's columns. As if columns lay side by side."""
        plan, shares = self.plan, self.plan.shares
        of_thread = plan.tile.block_n // 8
        of_share = self.areas["shares"].bytes // (plan.tiles * shares)
        begin, end = (of_thread * slice_ // shares * (of_share // of_thread) for slice_ in (slices.start, slices.stop))
        return Access(step, rank, self.areas["shares"], (index * shares + share) * of_share + begin, end - begin, writes=True)
