"""The reductions: who waits for whom (``kernels_src/reduce`` and the kernels that include it)."""

from __future__ import annotations

import itertools

from mkernel.planner.proofs.wait_graph import Step, WaitGraph
from mkernel.planner.reduce import REDUCE_SCATTER, ReducePlan, Tile

__all__ = ["item_of", "wait_graph"]


def wait_graph(plan: ReducePlan) -> WaitGraph:
    """Who waits for whom in one call, on all ranks (the roles of ``kernels_src/reduce``).

    Steps: ``("enter", rank)``, ``("tile", rank, index in tiles_of)``, ``("sum", rank, owner, tile)``, ``("put", rank, owner, chunk)`` of
    sums, ``("send", rank, peer, chunk)`` of finished or partial tiles, ``("tell", rank, peer, chunk)`` the node of the latter,
    ``("pull", rank, owner, tile or chunk)``, and of packets ``("partials", rank, item)``, ``("packets", rank, item)`` (``item_of``). A
    rank's tiles are one chain, as if a single CTA computed: with more CTAs a tile waits for fewer.
    """
    graph, topology = WaitGraph(), plan.problem.topology
    steps, cluster = _Steps(plan), plan.ctas_together
    for rank in range(topology.size):
        graph.add(("enter", rank))
        entered: list[Step] = [("enter", other) for other in range(topology.size)]
        for i, together in enumerate(steps.together[rank]):
            graph.add(("tile", rank, i), [*entered, *(step for tile in together for step in steps.inputs(rank, tile))])
        if plan.packets:
            _packet_steps(graph, plan, rank, entered)
        graph.chain(("tile", rank, i) for i in range(len(steps.tiles[rank])))
        for cta in range(plan.split.inter_reduce or 0):
            mine = list(plan.taken_sums_of(rank))[cta // cluster :: (plan.split.inter_reduce or 0) // cluster]
            sums = [tile for taken in mine for tile in taken if plan.cta_of(tile) == cta % cluster and plan.exists(tile.owner, tile.index)]
            of_pair = {tile: taken for taken in mine for tile in taken}
            for tile in sums:
                inputs = [step for one in of_pair[tile] for step in steps.inputs(rank, one)]
                graph.add(("sum", rank, tile.owner, tile.index), [*entered, *inputs])
            graph.chain(("sum", rank, tile.owner, tile.index) for tile in sums)
        for cta in range(plan.split.inter_send or 0):
            for sends in steps.sends(rank, cta):
                for step, before in sends:
                    graph.add(step, [*entered, *before])
                graph.chain(step for step, _ in sends)
        for cta in range(plan.split.intra_comm or 0):
            pulls = steps.pulls(rank, cta)
            for step, before in pulls:
                graph.add(step, [*entered, *before])
            graph.chain(step for step, _ in pulls)
    return graph


def _packet_steps(graph: WaitGraph, plan: ReducePlan, rank: int, entered: list[Step]) -> None:
    """A tile's packets are sent, then (two-shot) sums of everyone's sent back, and then the tile is done; one tile after the other.

    Where CTAs share K, what is sent is a slice, once all shares of the tile are multiplied. A cluster's tiles are multiplied, and sent, at
    the same time: each when what the cluster took before is done.
    """
    gives_back, taken = plan.op != REDUCE_SCATTER and not plan.one_shot, list(plan.taken_of(rank))
    tiles = list(itertools.chain.from_iterable(taken))
    ends = itertools.accumulate(map(len, taken), initial=0)
    done = [end for end, together in zip(ends, taken, strict=False) for _ in together]  # tiles before those that are taken together
    for i, tile in enumerate(tiles):
        item = item_of(plan, tile)
        if item is None:
            continue
        shares: list[Step] = [
            ("tile", rank, j) for j, one in enumerate(tiles) if tile.is_sum and not one.is_sum and one.index == tile.index
        ]
        sent: list[Step] = [("partials", source, item) for source in range(plan.problem.topology.size)]
        graph.add(("partials", rank, item), [*entered, *shares, *([("tile", rank, done[i] - 1)] if done[i] > 0 else [])])
        graph.add(("packets", rank, item), sent if gives_back else [("partials", rank, item)])


def item_of(plan: ReducePlan, tile: Tile) -> int | None:
    """The number of what the ranks exchange in packets: a tile, or a slice of its sum; None: a share of K, which they do not."""
    return None if plan.shares > 1 and not tile.is_sum else tile.index * plan.shares + tile.share


class _Steps:
    """Which step raises which flag."""

    def __init__(self, plan: ReducePlan) -> None:
        self.plan, self.topology = plan, plan.problem.topology
        ranks = range(self.topology.size)
        self.tiles = [[tile for tile in plan.tiles_of(rank) if plan.exists(tile.owner, tile.index)] for rank in ranks]
        # Of each the tiles that a cluster takes with it, and waits for together.
        taken = [[one for one in plan.taken_of(rank) if one and plan.exists(one[0].owner, one[0].index)] for rank in ranks]
        self.together = [[one for one in of_rank for _ in one] for of_rank in taken]
        self._position = {(rank, tile.owner, tile.index, tile.is_sum): i for rank in ranks for i, tile in enumerate(self.tiles[rank])}

    def computed(self, rank: int, owner: int, index: int) -> Step:
        return ("tile", rank, self._position[rank, owner, index, False])

    def chunk(self, chunk: int, owner: int) -> list[int]:
        """Its tiles."""
        begin = chunk * self.plan.chunk_tiles
        return [i for i in range(begin, min(begin + self.plan.chunk_tiles, self.plan.tiles)) if self.plan.exists(owner, i)]

    def inputs(self, rank: int, tile: Tile) -> list[Step]:
        """What a tile of ``rank`` adds."""
        topology, chunk = self.topology, tile.index // self.plan.chunk_tiles
        node = topology.node(rank)
        if self.plan.packets:
            item = item_of(self.plan, tile)
            return [] if item is None else [("packets", source, item) for source in range(topology.size)]
        if self.plan.one_shot:
            if not tile.is_sum:
                return []
            near: list[Step] = [self.computed(source, source, tile.index) for source in topology.node_ranks(node)]
            return near + [self._arrived(rank, source, chunk) for source in range(topology.size) if topology.node(source) != node]
        if tile.is_sum:
            return [self.computed(source, tile.owner, tile.index) for source in topology.node_ranks(node)]
        if tile.owner != rank:
            return []
        sent = [self.computed(source, rank, tile.index) for source in topology.node_ranks(node) if source != rank]
        return [*sent, *(("put", peer, rank, chunk) for peer in topology.rail_peers(rank))]

    def _arrived(self, rank: int, source: int, chunk: int) -> Step:
        """What tells ``rank`` of a chunk of another node's rank: its put, or the node mate that has received it."""
        holder = self.topology.rank(self.topology.node(rank), self.topology.local_rank(source))
        return ("send", source, rank, chunk) if holder == rank else ("tell", holder, source, chunk)

    def sends(self, rank: int, cta: int) -> list[list[tuple[Step, list[Step]]]]:
        """The sends of each thread of an inter_send CTA, in order."""
        plan, topology, stride = self.plan, self.topology, self.plan.split.inter_send or 1
        peers, puts = topology.rail_peers(rank), list[tuple[Step, list[Step]]]()
        if plan.one_shot:
            told: list[tuple[Step, list[Step]]] = []
            for chunk in range(cta, plan.num_chunks, stride):
                ready = [self.computed(rank, rank, index) for index in self.chunk(chunk, rank)]
                puts += [(("send", rank, peer, chunk), ready) for peer in peers]
                told += [(("tell", rank, peer, chunk), [("send", peer, rank, chunk)]) for peer in peers]
            return [puts, told] if topology.ranks_per_node > 1 else [puts]
        items = [(chunk, peer) for chunk in range(plan.num_chunks) for peer in peers][cta::stride]
        for chunk, peer in items:
            if tiles := self.chunk(chunk, peer):
                puts.append((("put", rank, peer, chunk), [("sum", rank, peer, index) for index in tiles]))
        if plan.op == REDUCE_SCATTER:
            return [puts]
        results: list[tuple[Step, list[Step]]] = []
        for chunk, peer in items:
            if tiles := self.chunk(chunk, rank):
                results.append((("send", rank, peer, chunk), [self.computed(rank, rank, index) for index in tiles]))
        return [puts, results]

    def pulls(self, rank: int, cta: int) -> list[tuple[Step, list[Step]]]:
        """What an intra_comm CTA pulls, in order."""
        plan, topology, stride = self.plan, self.topology, self.plan.split.intra_comm or 1
        node, local, per_node = topology.node(rank), topology.local_rank(rank), topology.ranks_per_node
        items: list[tuple[Step, list[Step]] | None] = []
        for index in range(plan.tiles):
            for owner in (topology.rank(node, (local + i) % per_node) for i in range(1, per_node)):
                there = plan.exists(owner, index)
                items.append((("pull", rank, owner, index), [self.computed(owner, owner, index)]) if there else None)
        for chunk in range(plan.num_chunks):
            for distance in range(1, topology.num_nodes):
                for i in range(per_node):
                    owner = topology.rank((node + distance) % topology.num_nodes, (local + i) % per_node)
                    proxy = topology.rank(node, topology.local_rank(owner))
                    source: Step = ("send", owner, rank, chunk) if proxy == rank else ("pull", proxy, owner, chunk)
                    items.append((("pull", rank, owner, chunk), [source]) if self.chunk(chunk, owner) else None)
        return [item for item in items[cta::stride] if item is not None]
