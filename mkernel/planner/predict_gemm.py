"""How long a call of the fused GEMMs takes: AllGather+GEMM, GEMM+ReduceScatter and GEMM+AllReduce, by their plans.

One rank is followed, since all do the same: waves of tiles on its SMs, bytes through its links, in the order of the plan. Own tiles, those
of the node and those of other nodes are taken as a whole, or by groups of tiles where a plan has groups.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mkernel.planner.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem
from mkernel.planner.gemm import BLOCK_K, BLOCK_M, GROUP_M, row_of_b
from mkernel.planner.machine import Machine
from mkernel.planner.predict_network import Sent, entered, sent
from mkernel.planner.prediction import ALONE, ITEM, Conditions, Prediction, blend, busy_of
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReducePlan, ReduceProblem
from mkernel.planner.spans import EXCHANGE_BYTES, exchange_seconds
from mkernel.planner.tile_cost import IN_TURN, Around, Operands, TileCost, TileShape, end_of_tile, tile_cost

__all__ = ["predict_allgather_gemm", "predict_reduce"]

_FEW_WAVES = 4  # from here on, CTAs that finish early have taken others' tiles
_HALF_TILE = 0.57  # of a tile's time, that the halves of the last tiles take (docs/speed_log.md)
# Fitted (docs/speed_log.md): what tagged packets save, because no counter is waited for, and each round but the first of those in which
# consumers take rows.
_UNCOUNTED, _ROUND = 2.1e-6, 1.2e-6
# Fitted: from the last product until what comes after it has been done, beside what bytes take; the same of an all-reduce's results; and
# how much more it is for pairs of CTAs, which wait for each other.
_SUMMED, _GATHERED, _PAIR_TURN = 3.6e-6, 6.1e-6, 3.0e-6
_IN_STEP = 0.4  # fitted: of the time of links, that those who multiply and exchange wait between tiles, because all do at the same time
_FOUR_TURN = 1.2e-6  # fitted: how much later clusters of four take their next tiles, where each CTA exchanges packets
_IDLE = 0.8  # fitted: of the time in which CTAs wait for the first chunks, that they are late at the end (docs/speed_log.md)
_PAIR_START = 0.85e-6  # fitted: how much later CTAs of a cluster begin and end, where nothing else is waited for
# Fitted, of swapped operands: how much later they begin in a world of one, whose kernel has more code to fetch, and how many times as long
# sums of shares take.
_SWAPPED_START, _SWAPPED_SUMS = 0.6e-6, 1.15
_SWAPPED_SUMS_START = 1.8e-6  # the same of reductions in packets, alone
_AHEAD_BYTES = 64e3  # of B, at least, that a CTA loads before its first tile may begin (kernels_src/tile/load.cuh)
_READ_OF_ROWS, _READ_OF_PARTS = 0.93, 0.55  # fitted: what a CTA reads of its shard, of what it can write to peers (docs/speed_log.md)
_PACKETS_LINK = 1.4  # fitted: how many times the rate of warps that push packets go at
_EXCHANGED = 10e12  # fitted, between two GPUs: bytes of packets per second of all shares of K
# Fitted, of reductions whose values travel in packets: sums of shares of K, beside these bytes, at least, and longer for each share.
_SUMS_OF_SHARES, _SUM_OF_SHARE = 1.0e-6, 0.4e-6
# Fitted: sums of shares by the CTAs of a cluster (docs/speed_log.md, "K shared by the CTAs of a cluster"), for each tile, and bytes per
# second from each CTA, to all others and to one.
_SUM_IN_CLUSTER, _BETWEEN_SMS, _TO_ONE_SM = 0.9e-6, 25e9, 40e9
# Fitted, of swapped operands: how much longer the end of a tile takes where its CTA has another one, of what it takes otherwise.
_SWAPPED_BETWEEN = 0.8
_STEPS = 8  # groups of tiles that are followed one by one


class _Work(NamedTuple):
    """The product of a rank: its tiles, what one costs, all of it on so many CTAs, and the bytes of device memory."""

    tiles: int
    cost: TileCost
    seconds: float
    tensor: float
    load: float
    memory: float


def start_of(machine: Machine, conditions: Conditions, plan: AllGatherGemmPlan | ReducePlan | None = None) -> float:
    """What a call takes beside its work; at least, if no plan is given. A kernel may begin before the one before it has ended."""
    paired = plan is not None and _begin_together(plan)
    may_be_early = plan is None or plan.spec.early
    if conditions.hot:
        start = machine.start_early if may_be_early else machine.start_hot
    else:
        start = machine.start_lone if may_be_early else machine.start
    return start + (_PAIR_START if paired else 0.0) + _swapped_start(conditions, plan)


def _swapped_start(conditions: Conditions, plan: AllGatherGemmPlan | ReducePlan | None) -> float:
    if plan is None or not plan.swapped:
        return 0.0
    if isinstance(plan, ReducePlan):
        return 0.0 if conditions.hot else _SWAPPED_SUMS_START
    return _SWAPPED_START if plan.problem.topology.size == 1 else 0.0


def _begin_together(plan: AllGatherGemmPlan | ReducePlan) -> bool:
    """Whether CTAs are clusters, and nothing but the product is waited for at the end."""
    only = isinstance(plan, AllGatherGemmPlan) or plan.packets or plan.problem.topology.size == 1
    return plan.ctas_together > 1 and only


def waves(tiles: float, ctas: float) -> float:
    """Tiles one after the other that the busiest CTA takes."""
    return math.ceil(tiles / ctas - 1e-9) if tiles > 0 else 0.0


def joined(tiles: int, ctas: int, seconds: float, others: int, late: float) -> float:
    """When ``tiles`` of so many seconds each are done by ``ctas``, and by others that come ``late``. Who is free takes the next one."""
    turns = math.ceil(tiles / ctas)
    if not others or late >= turns * seconds:
        return turns * seconds
    before = (turns - 1) * ctas  # tiles of all turns but the last
    left = math.ceil((tiles - before) / others)  # of each of the others, if the last turn is to be theirs
    return min(turns * seconds, max((turns - 1) * seconds, late + left * seconds))


def _guess(machine: Machine, m: int, n: int, k: int) -> float:
    return 2.0 * m * n * k / (machine.sm_flops * machine.sms)


def _work(
    machine: Machine, conditions: Conditions, tile: TileShape, operands: Operands, m: int, shards: int, rows: int, ctas: float, passes: int,
    *, halved: bool = False, shares: int = 1, others: int = 0, late: float = 0.0, apart: bool = False, group_m: int = GROUP_M,
) -> _Work:  # fmt: skip
    """A product of ``m`` rows in shards of ``rows`` rows each; B is read from memory ``passes`` times if L2 does not hold it.

    ``shares``: CTAs that share K of a tile; ``others``: CTAs that come ``late``; ``apart``: as ``Around`` has it; ``group_m``: rows of
    tiles that follow each other.
    """
    n, k = operands.n, operands.k
    taken = math.ceil(rows / (tile.cluster * tile.rows)) * math.ceil(n / (tile.cluster_n * tile.columns))
    tiles = shards * taken * tile.ctas * shares
    speed = machine.speed(busy_of(conditions, machine, _guess(machine, m, n, k)))
    of_share = operands if shares == 1 else operands._replace(k=math.ceil(k / (shares * BLOCK_K)) * BLOCK_K)
    around = Around(
        active=min(tiles, ctas),
        together=min(group_m, math.ceil(rows / tile.rows)),
        there=math.ceil(rows / tile.rows) * math.ceil(n / tile.columns) / (taken * tile.ctas),
        from_memory=tiles <= ctas,
        apart=apart,
    )
    cost = tile_cost(machine, tile, of_share, around, speed)
    full = math.floor(tiles / ctas + 1e-9)
    rest = max(0.0, tiles - full * ctas)
    of_b = k * n * ITEM
    memory = (m * k * ITEM + m * n * ITEM + of_b * (passes if of_b > machine.l2_bytes / 2 else 1)) / machine.memory
    turns = max(full + _HALF_TILE, tiles / ctas) if halved else waves(tiles, ctas)  # tiles were halved for fewer CTAs, if some join
    whole, last = turns, TileCost(0.0, 0.0, 0.0)
    if not halved and rest >= 1e-6:  # the last tiles are fewer than there are CTAs
        whole, last = full, tile_cost(machine, tile, of_share, around._replace(active=rest), speed)
    tensor, load, work = (whole * of_one + of_last for of_one, of_last in zip(cost, last, strict=True))
    if others and not halved:
        work = min(work, joined(tiles, int(ctas), cost.seconds, others, late))
    end = end_of_tile(machine, tile, n)
    if tile.in_turn:
        work += (1 - IN_TURN) * end  # of the last tile
    elif tile.swapped:
        work += _SWAPPED_BETWEEN * max(0.0, turns - 1) * end
    seconds = blend(work, memory)
    return _Work(tiles, cost, seconds, min(tensor, work), min(load, work), memory)


def _tile_of(plan: AllGatherGemmPlan | ReducePlan) -> TileShape:
    load_rows, in_turn, sharing_k = plan.block_rows if plan.swapped else plan.load_rows, False, False
    if isinstance(plan, AllGatherGemmPlan):
        load_rows, in_turn, sharing_k = plan.load_rows, plan.tiles_at_once > 1, plan.cluster_k > 1
    stages = plan.stages_of(plan.load_rows)
    swapped, clusters = plan.swapped > 0, (plan.cluster, plan.cluster_n)
    alone = plan.problem.topology.size == 1  # between ranks what waits for it was fitted as if both warpgroups multiplied
    low = alone and not swapped and plan.load_rows <= BLOCK_M // 2 and (plan.may_be_low or plan.shares == 1)
    loaded = plan.tile.room if plan.tile.cut else 0
    return TileShape(plan.block_rows, plan.columns, load_rows, *clusters, stages, swapped, in_turn, sharing_k, low, loaded)


def _operands_of(problem: AllGatherGemmProblem | ReduceProblem) -> Operands:
    return Operands(problem.n, problem.k, problem.k, row_of_b(problem.n, problem.k, problem.b_row_major))


def predict_allgather_gemm(plan: AllGatherGemmPlan, machine: Machine, conditions: Conditions = ALONE) -> Prediction:
    """The time of a call. It ends when all SMs have had their tiles, or when the tiles of what comes last are done."""
    problem, topology = plan.problem, plan.problem.topology
    size, mates, nodes = topology.size, topology.ranks_per_node - 1, topology.num_nodes
    rows, n, k = plan.rows, problem.n, problem.k
    compute, intra = plan.split.compute or 1, plan.split.intra_comm or 0
    start = start_of(machine, conditions, plan)
    if rows == 0 or n == 0:
        return Prediction(start, start=start)
    tile_rows, tiles_n = plan.tile_rows, math.ceil(n / plan.columns)
    shard = rows * k * ITEM
    passes = min(plan.planes, math.ceil(plan.num_tiles / compute))
    entry = entered(machine, conditions, topology)
    begin, pushing, one_chunk = start + entry, 0.0, 0.0
    if mates and not plan.packets:
        # What has no CTA is pushed by a warp of each computing one. A chunk goes through one CTA.
        chunk = min(shard, plan.chunk_rows * k * ITEM) / plan.parts * mates
        most = machine.link if mates > 1 else machine.link_pair
        own_rate = machine.cta_link if intra else machine.warps_link * min(mates, 1.4) / compute
        turns = waves(plan.chunks, intra) if intra else max(1.0, shard * mates / chunk / compute)  # warps of all CTAs share what they reach
        # A CTA that has one peer reads as much as it writes, of several less.
        read = (_READ_OF_PARTS if plan.parts > 1 else _READ_OF_ROWS) * machine.cta_link
        reading = turns * chunk / read if intra and mates == 1 else 0.0
        pushing = max(blend(shard * mates / most, reading), turns * chunk / own_rate)
        one_chunk = chunk / own_rate
    few = plan.taken * plan.ctas_together * plan.shares <= _FEW_WAVES * compute  # also what pairs multiply beside zeros
    helped = compute if few else compute + intra / 2  # CTAs that have pushed compute
    work = _work(
        *(machine, conditions, _tile_of(plan), _operands_of(problem), rows * size, plan.planes, plan.plane_rows, helped, passes),
        halved=plan.whole_tiles < plan.num_tiles,
        shares=plan.sizes.shares,
        others=intra if few and plan.ctas_together == nodes == 1 else 0,
        late=entry + pushing,
        apart=size > 1 and not plan.packets,
        group_m=plan.group_m,
    )
    exchange = _sums_of_shares(plan)
    work = work._replace(seconds=work.seconds + exchange)
    t = work.cost.seconds
    if size == 1:
        return Prediction(start + work.seconds, work.tensor, work.load, work.memory, start=start)
    if plan.packets:
        return _gathered_in_packets(plan, machine, start, entry, work)
    forwarding = 0.0
    if mates:
        forwarding = shard * mates * (nodes - 1) / min(most, max(1, intra) * machine.cta_link)  # what comes from the rail peers
    # While the links carry what they can, tiles take longer.
    slowed = 1 + machine.beside * min(1.0, (pushing + forwarding) / work.seconds) * (0.5 if intra else 1.0)
    all_done = start + work.seconds * slowed
    if mates and not plan.some_follow:  # nothing begins before the chunks of all shards that a tile covers are there
        # Parts of K are multiplied while the next ones come; beside warps that push, loads take the longer for it (docs/speed_log.md).
        first = max(pushing / plan.parts, min(pushing, one_chunk)) if intra else pushing
        all_done = max(all_done, begin + machine.flag + max(pushing + work.seconds / plan.parts, first + work.seconds))
    elif mates:
        own, all_rows, levels = plan.fewest_own, tile_rows * plan.planes, math.ceil(rows / BLOCK_M)
        to_end = min(mates, all_rows - own) * tiles_n  # tiles that wait for the last chunks
        if plan.parts > 1:  # of the last group of rows, all is done but the parts of K that come last, together
            group = min(levels, plan.part_blocks * plan.chunk_rows // BLOCK_M or 1) * to_end
            together = min(1.0, max(1 / plan.parts, (intra or compute) / (plan.part_blocks * plan.parts)))
            rest = waves(group, compute) * t * together
        else:
            rest = waves(to_end * plan.sizes.shares, compute) * t + exchange
        all_done = max(all_done, begin + pushing + machine.flag + rest)
        # Own tiles are the first. Those of the others are taken by groups of rows, whose tiles begin, in the mean, when half of the
        # first group's rows have come, or their first parts of K.
        of_group = min(levels, max(1.0, plan.group_m / mates))
        first = max(min(pushing, one_chunk), pushing * (of_group + 1) / 2 / levels / plan.parts) + machine.flag
        behind = work.seconds * (1 - own / all_rows)
        all_done = max(all_done, begin + first + max(behind, t + exchange))
        taken = math.ceil(own / plan.cluster) * plan.cluster  # also rows that there are not keep their cluster busy
        idle = max(0.0, 1 - taken * tiles_n / compute)  # of the CTAs, until then
        all_done = max(all_done, begin + work.seconds * slowed + _IDLE * idle * first)
    network = Sent(0.0, 0.0, 0.0)
    if nodes > 1:
        network = sent(machine, topology, shard, plan.put_bytes)
        entry = entered(machine, conditions, topology, by_one_thread=True)  # a thread of each CTA that sends looks at all entries
        last_chunk = min(shard, plan.put_bytes) * mates / machine.cta_link  # one CTA forwards it
        last = waves(topology.ranks_per_node * tiles_n * max(1, plan.chunk_rows // BLOCK_M), compute) * t
        if plan.span > 1:
            last = work.seconds / plan.planes * (1 if plan.near_planes == plan.planes else plan.planes - plan.near_planes)
        here = max(start + entry + network.arrived + last_chunk, begin + pushing + forwarding)
        all_done = max(all_done, here + machine.flag + last)
    return Prediction(
        all_done, work.tensor, work.load, work.memory, pushing + forwarding, network.paced, start, network.engine, entry=entry
    )  # fmt: skip


def _sums_of_shares(plan: AllGatherGemmPlan) -> float:
    """Seconds, beside the product."""
    shares, size = plan.sizes.shares, plan.problem.topology.size
    if plan.cluster_k > 1:
        to_one = min(plan.plane_rows, BLOCK_M) * plan.columns * 4 / shares
        of_tile = _SUM_IN_CLUSTER + to_one * (shares - 1) / _BETWEEN_SMS + to_one / _TO_ONE_SM
        return waves(plan.taken * shares, plan.split.compute or 1) * of_tile
    if shares == 1:
        return 0.0
    rate = _EXCHANGED if size > 1 else EXCHANGE_BYTES
    exchange = exchange_seconds(plan.taken * shares * plan.ctas_together, plan.plane_rows, plan.columns, rate)
    return exchange * (_SWAPPED_SUMS if plan.swapped else 1.0)


def _gathered_in_packets(plan: AllGatherGemmPlan, machine: Machine, start: float, entry: float, work: _Work) -> Prediction:
    """Nothing is multiplied before all shards are there; B, of which memory brings its share meanwhile, is not waited for twice."""
    mates, shard = plan.problem.topology.size - 1, plan.rows * plan.problem.k * ITEM * (1 + plan.tagged)
    link = shard * mates / min(machine.link if mates > 1 else machine.link_pair, machine.warps_link * _PACKETS_LINK)
    of_tile = min(plan.plane_rows, BLOCK_M) * plan.problem.k / plan.sizes.shares * ITEM * 2  # bytes of tagged packets that a CTA reads
    taken = max(0.0, machine.flag - _UNCOUNTED) + (plan.rounds - 1) * _ROUND + of_tile / machine.sm_load if plan.tagged else machine.flag
    gathered = entry + link + taken
    ahead = min(gathered, _AHEAD_BYTES * machine.sms / machine.memory)
    tiles = work.tensor / work.cost.tensor * work.cost.seconds
    seconds = work.seconds - blend(tiles, work.memory) + blend(tiles, max(0.0, work.memory - ahead))
    return Prediction(start + gathered + seconds, work.tensor, work.load, work.memory, link, 0.0, start, entry=entry)


def predict_reduce(plan: ReducePlan, machine: Machine, conditions: Conditions = ALONE) -> Prediction:
    """The time of a call of gemm_reduce_scatter or gemm_allreduce."""
    problem, topology = plan.problem, plan.problem.topology
    size = topology.size
    start = start_of(machine, conditions, plan)
    if plan.rows == 0 or problem.n == 0:
        return Prediction(start, start=start)
    rows = plan.rows * plan.span  # that lie in tiles together,
    shards = size // plan.span if plan.op == REDUCE_SCATTER else 1  # so many times
    compute = plan.split.compute or 1
    work = _work(
        *(machine, conditions, _tile_of(plan), _operands_of(problem), rows * shards, shards, rows, compute),
        passes=min(shards, math.ceil(plan.tiles * shards / compute)),
        shares=plan.shares,
        apart=size > 1 and not plan.packets,
        group_m=plan.group_m,
    )
    if plan.shares > 1:
        ctas = plan.tiles * plan.shares
        if size > 1 and not plan.swapped:
            exchange = exchange_seconds(ctas, rows, plan.columns, _EXCHANGED, _SUMS_OF_SHARES) + plan.shares * _SUM_OF_SHARE
        else:  # what is added up by groups of rows takes longer
            exchange = exchange_seconds(ctas, rows, plan.columns) * (_SWAPPED_SUMS if plan.swapped else 1.0)
        work = work._replace(seconds=work.seconds + exchange)
    if size == 1:
        return Prediction(start + work.seconds, work.tensor, work.load, work.memory, start=start)
    if plan.packets:
        return _packets(plan, machine, start, work)._replace(entry=machine.entry)
    if plan.one_shot:
        return _one_shot(plan, machine, conditions, start, work)
    return _two_shot(plan, machine, conditions, start, work)


def _packets(plan: ReducePlan, machine: Machine, start: float, work: _Work) -> Prediction:
    """Partial values travel in packets, then, in two steps, finished ones; each step begins with the product of the slowest tile."""
    size = plan.problem.topology.size
    result = plan.rows * plan.span * plan.problem.n * ITEM
    most = machine.link if size > 2 else machine.link_pair
    steps = 1 if plan.one_shot or plan.op == REDUCE_SCATTER else 2
    sent = result * (size - 1) / (1 if plan.one_shot else size)
    link = steps * sent / most
    turns = max(1.0, waves(work.tiles, plan.split.compute or 1))
    # Nothing is sent before the first wave has ended, and what the last one has made when it has.
    # The threads that multiply exchange, too: each wave waits for the other ranks.
    seconds = start + max(work.seconds / turns + link, work.seconds + link / turns) + steps * turns * machine.flag
    seconds += _IN_STEP * link * (1 - 1 / turns)
    if plan.ctas_together > 2 and not plan.swapped:  # of which the last to have come goes on, too, before they take the next tiles
        seconds += turns * _FOUR_TURN
    return Prediction(seconds, work.tensor, work.load, work.memory, link, 0.0, start)


def _one_shot(plan: ReducePlan, machine: Machine, conditions: Conditions, start: float, work: _Work) -> Prediction:
    """Everyone sends its partial tiles to its node and its rail, wave by wave, and when all are multiplied adds all ranks'."""
    topology = plan.problem.topology
    result, mates = plan.tiles * plan.partial_bytes, topology.ranks_per_node - 1
    entry = entered(machine, conditions, topology)
    # Tiles go to the node mates, and those of the other rails, which have come to the mates, are read from there.
    filled = plan.rows / (plan.tile_rows * BLOCK_M)  # of tiles, by rows that there are: the others are left out
    link = result * filled * mates * topology.num_nodes / (machine.link if mates > 1 else machine.link_pair)
    turns = max(1.0, waves(plan.tiles, plan.split.compute or 1))
    adding = turns * topology.size * plan.partial_bytes / machine.add
    worked = work.seconds * (1 + machine.beside * min(1.0, link / work.seconds))
    network = sent(machine, topology, result, plan.put_bytes)
    first, multiplied = max(entry, worked / turns), max(entry, worked)  # when the first wave is done, and all
    last_sent = max(first + link, multiplied + link / turns)
    last = max(last_sent + machine.flag, multiplied + network.arrived) + adding / turns
    seconds = start + max(last, multiplied + adding)
    return Prediction(
        seconds, work.tensor, work.load, work.memory, link, network.paced, start, network.engine, adding, entry
    )  # fmt: skip


def _last_own(taken: int, group: int, ctas: int) -> int:
    """How many of the last ``ctas`` tiles are own ones: in the order, own tiles of a group follow others' of the next group.

    The last group counts as a whole one, so that fewer tiles are no more at the end.
    """
    own, left = 0, ctas
    while left > 0 and own < taken:
        size = group if own else 2 * group  # the last two groups' follow each other
        own += min(left, size)
        left -= size + group  # others' of the next group
    return min(own, taken)


def _two_shot(plan: ReducePlan, machine: Machine, conditions: Conditions, start: float, work: _Work) -> Prediction:
    """Group by group: others' tiles are multiplied and sent, then own ones, which wait for what the others have sent of the group before.

    An all-reduce's results are pulled over the same links.
    """
    topology = plan.problem.topology
    size, nodes, mates = topology.size, topology.num_nodes, topology.ranks_per_node - 1
    compute, gathers = plan.split.compute or 1, plan.op == ALLREDUCE
    # A rank's links carry, in each direction, a partial tile of every other owner of its node, and of every foreign one to its rail peer;
    # in an all-reduce then its own results to each.
    # Of tiles, by rows that there are: over NVLink the others are left out. Where an owner has one tile, that of most is whole.
    filled = plan.rows / (plan.tile_rows * BLOCK_M) if plan.tiles > 1 else 1.0
    near = mates * nodes * plan.tiles * plan.partial_bytes * filled
    back = mates * nodes * plan.tiles * plan.result_bytes if gathers else 0.0
    link_rate = machine.link if mates > 1 else machine.link_pair
    pull_rate = min(link_rate, (plan.split.intra_comm or 1) * machine.cta_link)
    own_share = 1 / size
    loaded = min(1.0, (near + back) / link_rate / work.seconds) if mates else 0.0
    slowed = work.seconds * (1 + machine.beside * loaded) / _STEPS
    added = topology.ranks_per_node + nodes - 1  # partial tiles of the own node, and sums of the others
    add = waves(plan.tiles, compute) * added * plan.partial_bytes / machine.add / _STEPS
    t = work.cost.seconds
    lag = math.ceil(_STEPS / math.ceil(plan.taken / plan.group_tiles))  # own tiles follow those of others of the next group
    entry = entered(machine, conditions, topology)
    worked = summed = start  # products of the computing CTAs, sums of own tiles
    link = start + max(entry, t if mates else 0.0)  # nothing leaves before the first tile is done
    pulled, arrived = 0.0, []
    others, own, sending, pulling = slowed * (1 - own_share), slowed * own_share, near / _STEPS / link_rate, back / _STEPS / pull_rate
    for step in range(_STEPS + lag):
        if step < _STEPS:
            worked += others
            link = max(link + sending, worked)
            arrived.append(link + machine.flag)
        if step >= lag:
            worked += own
            summed = max(worked, summed, arrived[step - lag]) + add
            worked = max(worked, summed - t)  # a CTA has one product ahead of its sums
            if gathers and mates:
                # Results go over the same links as partial tiles.
                pulled = max(pulled, summed, link if step >= _STEPS else 0.0) + pulling
    # Own tiles that are done at the same time, in the end.
    last = _last_own(plan.taken, plan.group_tiles, compute // plan.ctas_together) / plan.taken
    end = max(summed, pulled + machine.flag, summed + back * last / pull_rate + machine.flag) if gathers else summed
    end += (
        plan.partial_bytes / machine.cta_link + _SUMMED + (_GATHERED if gathers else 0.0) + (_PAIR_TURN if plan.ctas_together > 1 else 0.0)
    )
    links = (near + back) / link_rate if mates else 0.0
    end = max(end, start + entry + links)  # both share the links
    network, adding = Sent(0.0, 0.0, 0.0), 0.0
    if nodes > 1:
        network = sent(machine, topology, plan.tiles * plan.partial_bytes, plan.put_bytes)
        # The node's partial tiles of every foreign owner on the rail are added up by CTAs of their own.
        adders, one_sum = plan.split.inter_reduce or 1, topology.ranks_per_node * plan.partial_bytes / machine.add
        adding = (nodes - 1) * plan.tiles * one_sum / adders
        # The first put waits for its tiles' sums, of which each CTA makes some one after the other.
        first = start + entry + slowed + waves(min(plan.chunk_tiles, plan.tiles), adders) * one_sum
        end = max(end, first + max(network.arrived, adding) + add + t)
        if gathers:
            again = sent(machine, topology, plan.tiles * plan.result_bytes, plan.put_bytes)
            end = max(end, first + max(network.arrived, adding) + again.arrived + add + t)
            network = Sent(network.paced + again.paced, network.engine + again.engine, 0.0)
    return Prediction(
        end, work.tensor, work.load, work.memory, links, network.paced, start, network.engine, adding, entry
    )  # fmt: skip
