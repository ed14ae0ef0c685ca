"""AllGather+GEMM: who waits for whom, and who accesses which bytes (``kernels_src/ops/allgather_gemm.cuh``)."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator

from mkernel import abi
from mkernel.planner.allgather_gemm import SHARE, SUM, AllGatherGemmPlan, Tile
from mkernel.planner.proofs.areas import AHEAD, FLAGS, HEAP, PACKETS, STAGING, Access, Area, Call
from mkernel.planner.proofs.wait_graph import Step, WaitGraph

__all__ = ["call_of", "taken", "wait_graph"]

_WORD = 8


def call_of(plan: AllGatherGemmPlan) -> Call:
    """One call, of operands in ordinary memory: with the staging copy of network sends."""
    arriving, reading = frozenset({"push", "put", "forward"}), frozenset({"tile", "forward"})
    if plan.packets:
        return _in_packets(plan)
    gather = Area("gathered shards", HEAP, 0, plan.workspace_bytes, arriving, reading)
    staging = Area("staged shard", STAGING, 0, plan.staging_bytes, frozenset({"stage"}), frozenset({"put"}))
    flags = Area("flags of chunks", FLAGS, 0, plan.flag_words * _WORD, arriving, reading)
    packets = Area("packets", PACKETS, 0, plan.packet_bytes, frozenset({"tile"}), frozenset({"tile"}))
    graph, topology = wait_graph(plan), plan.problem.topology
    if topology.num_nodes > 1:
        for rank in range(topology.size):
            for chunk in range(plan.chunks):  # waits for nothing
                graph.add(("stage", rank, chunk))
                for peer in topology.rail_peers(rank):
                    graph.add(("put", rank, chunk, peer), [("stage", rank, chunk)])
    areas = gather, staging, flags, packets
    return Call(graph, areas, tuple(_accesses(plan, list(graph), *areas)))


def _in_packets(plan: AllGatherGemmPlan) -> Call:
    """One call in which shards travel in packets. A rank's part of the packets ahead has a range for each source, its own unused.

    Where they are tagged, tiles read them: a share as if it read all of K.
    """
    taking, computing, graph = frozenset({"take"}), frozenset({"tile"}), wait_graph(plan)
    gather = Area("gathered shards", HEAP, 0, plan.workspace_bytes, computing if plan.tagged else taking, computing)
    sending, reading = (frozenset({"send"}), computing) if plan.tagged else (frozenset({"send", "take"}), taking)
    ahead = Area("packets of shards", AHEAD, abi.AHEAD_BYTES if plan.tagged else 0, plan.ahead_bytes, sending, reading)
    packets = Area("packets", PACKETS, 0, plan.packet_bytes, computing, computing)
    size, shard, row = plan.problem.topology.size, plan.shard_bytes, plan.problem.k * 2
    sent = plan.ahead_bytes // size  # of a shard
    accesses: list[Access] = []
    for rank in range(size):
        send, take, others = ("send", rank), ("take", rank), [other for other in range(size) if other != rank]
        accesses += [Access(send, peer, ahead, rank * sent, sent, writes=True) for peer in others]
        if not plan.tagged:
            accesses += [Access(take, rank, ahead, source * sent, sent, writes) for source in others for writes in (False, True)]
            accesses.append(Access(take, rank, gather, 0, size * shard, writes=True))
        tiles = list(plan.tiles(rank))
        numbers = _numbers(plan, tiles)
        for index, tile in enumerate(tiles):
            step, first = ("tile", rank, index), tile.m * plan.block_rows
            rows = min(plan.block_rows, plan.plane_rows - first)
            if plan.tagged and tile.kind != SUM:
                for source in plan.sources(tile):
                    begin, end = max(first, source * plan.rows), min(first + rows, (source + 1) * plan.rows)
                    if source != rank:
                        accesses.append(Access(step, rank, ahead, 2 * begin * row, 2 * (end - begin) * row, writes=False))
                if tile.n == 0 and tile.share == 0:  # for a caller who wants them
                    accesses.append(Access(step, rank, gather, first * row, rows * row, writes=True))
            elif plan.waits(rank, tile):
                accesses.append(Access(step, rank, gather, first * row, rows * row, writes=False))
            accesses += _shares(plan, step, rank, tile, numbers[plan.place_of(tile)], packets)
    return Call(graph, (gather, ahead, packets), tuple(accesses))


def _accesses(plan: AllGatherGemmPlan, steps: list[Step], gather: Area, staging: Area, flags: Area, packets: Area) -> Iterator[Access]:
    topology = plan.problem.topology
    tiles = [list(plan.tiles(rank)) for rank in range(topology.size)]
    numbers = [_numbers(plan, mine) for mine in tiles]
    chunks = dict(_chunks(plan))

    def data(step: Step, rank: int, source: int, chunk: int, *, writes: bool) -> Access:
        begin, size = chunks[chunk]
        return Access(step, rank, gather, source * plan.shard_bytes // plan.parts + begin, size, writes)

    def flag(step: Step, rank: int, source: int, chunk: int, *, writes: bool) -> Access:
        return Access(step, rank, flags, (source * plan.chunks + chunk) * _WORD, _WORD, writes)

    for step in steps:
        kind, rank, *rest = step
        assert isinstance(rank, int)
        near = [peer for peer in topology.node_ranks(topology.node(rank)) if peer != rank]
        match kind, rest:
            case "push", [int(chunk)]:
                for peer in [*near, rank] if plan.span > 1 else near:
                    yield data(step, peer, rank, chunk, writes=True)
                    yield flag(step, peer, rank, chunk, writes=True)
            case "stage", [int(chunk)]:
                yield Access(step, rank, staging, *chunks[chunk], writes=True)
            case "put", [int(chunk), int(peer)]:
                yield Access(step, rank, staging, *chunks[chunk], writes=False)
                yield data(step, peer, rank, chunk, writes=True)
                yield flag(step, peer, rank, chunk, writes=True)
            case "forward", [int(source), int(chunk)]:
                yield flag(step, rank, source, chunk, writes=False)
                yield data(step, rank, source, chunk, writes=False)
                for peer in near:
                    yield data(step, peer, source, chunk, writes=True)
                    yield flag(step, peer, source, chunk, writes=True)
            case "tile", [int(index)]:
                tile = tiles[rank][index]
                for source, chunk in plan.tile_chunks(tile) if plan.waits(rank, tile) else ():
                    yield flag(step, rank, source, chunk, writes=False)
                    yield data(step, rank, source, chunk, writes=False)
                yield from _shares(plan, step, rank, tile, numbers[rank][plan.place_of(tile)], packets)


def _numbers(plan: AllGatherGemmPlan, tiles: list[Tile]) -> dict[tuple[int, int, int], int]:
    """By plane, row and column of what a cluster takes: its number among the tiles whose K is shared; 0 of others."""
    places = dict.fromkeys(plan.place_of(tile) for tile in tiles if tile.kind)
    shared = {place: number for number, place in enumerate(places)}
    return collections.defaultdict(int, shared)


def _shares(plan: AllGatherGemmPlan, step: Step, rank: int, tile: Tile, number: int, packets: Area) -> Iterator[Access]:
    """Packets of shares of K: a sum takes those of all shares for its columns, and leaves zeros there. As if columns lay side by side."""
    if tile.kind == 0 or plan.cluster_k > 1:  # none travel through memory
        return
    of_thread, shares = plan.packets_of_thread, plan.sizes.shares
    together, in_cluster = plan.ctas_together, tile.m % plan.cluster * plan.cluster_n + tile.n % plan.cluster_n
    bytes_of_one, first_slot = plan.block_rows * plan.columns * 4 // of_thread, number * shares * together + in_cluster
    if tile.kind == SHARE:
        begin = (first_slot + tile.share * together) * of_thread
        yield Access(step, rank, packets, begin * bytes_of_one, of_thread * bytes_of_one, writes=True)
        return
    first, last = (of_thread * slice_ // shares for slice_ in (tile.share, tile.share + 1))
    for share, writes in itertools.product(range(shares if last > first else 0), (False, True)):
        begin = (first_slot + share * together) * of_thread + first
        yield Access(step, rank, packets, begin * bytes_of_one, (last - first) * bytes_of_one, writes=writes)


def _chunks(plan: AllGatherGemmPlan) -> Iterator[tuple[int, tuple[int, int]]]:
    """Number of a chunk, and where it lies from its shard's first byte on: begin and bytes (``chunk_offset`` and ``chunk_bytes``)."""
    rows, row_bytes, all_rows = plan.rows, plan.problem.k // plan.parts * 2, plan.rows * plan.problem.topology.size
    for block in range(plan.blocks):
        first = block * plan.chunk_rows
        for part in range(plan.parts):
            begin = (part * all_rows + first) * row_bytes
            yield plan.chunk_index(block, part), (begin, min(plan.chunk_rows, rows - first) * row_bytes)


def wait_graph(plan: AllGatherGemmPlan) -> WaitGraph:
    """Who waits for whom in one call, on all ranks (the roles of ``kernels_src/ops/allgather_gemm.cuh``).

    Steps: ``("enter", rank)``, ``("push", rank, chunk)`` to the node (where tiles span shards to the rank itself, too),
    ``("put", rank, chunk, peer)``, ``("forward", rank, source, chunk)`` to the node, ``("tile", rank, index)``. A rank's
    tiles are one chain, as if a single CTA computed: with more CTAs a tile waits for fewer. Where shards travel in packets: ``("send",
    rank)`` to all others, which waits for nothing in this call, and, if they are not tagged, ``("take", rank)``, of all CTAs together.
    """
    graph, topology = WaitGraph(), plan.problem.topology
    for rank in range(topology.size):
        graph.add(("enter", rank))
        entered: list[Step] = [("enter", other) for other in range(topology.size)]
        if plan.packets:
            graph.add(("send", rank))
            if not plan.tagged:
                graph.add(("take", rank), [*entered, *(("send", other) for other in range(topology.size))])
        elif topology.ranks_per_node > 1 or plan.span > 1:
            _intra_comm_steps(graph, plan, rank, entered)
        if topology.num_nodes > 1:
            _inter_send_steps(graph, plan, rank, entered)
        tiles: list[Step] = []
        for together in taken(plan, plan.tiles(rank)):  # a cluster waits for the inputs of all its CTAs
            waiting = [tile for tile in together if plan.waits(rank, tile) or (plan.tagged and tile.kind != SUM)]
            for _ in together:
                tiles.append(("tile", rank, len(tiles)))
                graph.add(tiles[-1], [*entered, *_arrivals(plan, rank, waiting)])
        graph.chain(tiles)
    return graph


def taken(plan: AllGatherGemmPlan, tiles: Iterable[Tile]) -> Iterator[list[Tile]]:
    """Tiles that the CTAs of a cluster take together."""
    for _, together in itertools.groupby(tiles, lambda tile: (plan.place_of(tile), tile.slice, tile.kind, tile.share)):
        yield list(together)


def _arrivals(plan: AllGatherGemmPlan, rank: int, tiles: list[Tile]) -> list[Step]:
    """What brings the inputs of tiles that wait."""
    if plan.tagged:
        return [("send", source) for tile in tiles for source in plan.sources(tile)]
    if plan.packets:
        return [("take", rank)] if tiles else []
    chunks = dict.fromkeys(chunk for tile in tiles for chunk in plan.tile_chunks(tile))
    return [_arrival(plan, rank, source, chunk) for source, chunk in chunks]


def _arrival(plan: AllGatherGemmPlan, reader: int, source: int, chunk: int) -> Step:
    """The step that raises ``reader``'s flag for a chunk."""
    topology, writer = plan.problem.topology, plan.chunk_writer(reader, source)
    if writer != source:
        return ("forward", writer, source, chunk)
    return ("push", source, chunk) if topology.node(reader) == topology.node(source) else ("put", source, chunk, reader)


def _intra_comm_steps(graph: WaitGraph, plan: AllGatherGemmPlan, rank: int, entered: list[Step]) -> None:
    ctas, topology = plan.split.intra_comm or plan.pushers, plan.problem.topology
    peers = topology.rail_peers(rank) if topology.ranks_per_node > 1 else []
    for cta in range(ctas):
        own: list[Step] = [("push", rank, chunk) for chunk in range(cta, plan.chunks, ctas)]
        items = [divmod(item, len(peers)) for item in range(cta, plan.chunks * len(peers), ctas)] if peers else []
        forwarded: list[Step] = [("forward", rank, peers[peer], chunk) for chunk, peer in items]
        for step in own:
            graph.add(step, entered)
        for step, (chunk, peer) in zip(forwarded, items, strict=True):
            graph.add(step, [*entered, ("put", peers[peer], chunk, rank)])
        graph.chain([*own, *forwarded])


def _inter_send_steps(graph: WaitGraph, plan: AllGatherGemmPlan, rank: int, entered: list[Step]) -> None:
    ctas = plan.split.inter_send or 0
    for cta in range(ctas):
        puts: list[Step] = []
        for chunk in range(cta, plan.chunks, ctas):
            for peer in plan.problem.topology.rail_peers(rank):
                puts.append(graph.add(("put", rank, chunk, peer), entered))
        graph.chain(puts)
