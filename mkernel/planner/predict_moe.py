"""How long a call of the MoE ops takes under uniform routing of a known number of tokens, by their plans.

Every token chooses its experts at random, so that an expert's rows are a Poisson number. Other routings take longer: the rank with most
rows decides, and nobody knows it beforehand.
"""

from __future__ import annotations

import math

from mkernel.planner.gemm import BLOCK_M, GemmTile, row_of_b
from mkernel.planner.machine import Machine
from mkernel.planner.moe import bands, rows_per_piece
from mkernel.planner.moe_combine import MoeCombinePlan
from mkernel.planner.moe_dispatch_gemm import MoeDispatchGemmPlan
from mkernel.planner.moe_gemm_combine import MoeGemmCombinePlan
from mkernel.planner.predict_network import Sent, entered, sent
from mkernel.planner.prediction import ITEM, Conditions, Prediction, blend, busy_of
from mkernel.planner.tile_cost import Around, Operands, TileCost, TileShape, tile_cost
from mkernel.planner.topology import Topology

__all__ = ["predict_moe_combine", "predict_moe_dispatch_gemm", "predict_moe_gemm_combine"]

# Seconds until rows have places, of few tokens, which each CTA counts by itself, and of others (docs/speed_log.md); and what every token
# adds to a call beside what is counted below: fitted to docs/benchmarks/moe_*.json.
_FEW_ROUTING, _ROUTING, _ROUTING_TOKEN = 12e-6, 19e-6, 3e-9
# What a CTA that copies rows takes for a piece, and to load or store a row beside its bytes; and bytes in a second (docs/speed_log.md).
_PIECE, _COPY, _COPY_RATE = 250e-9, 35e-9, 150e9
_FOUND = 40e-9  # more for a row of a combine: a warp looks for those of a window among all choices
_ID = 4  # bytes of a choice, and of its weight


def expected_tiles(rows: float) -> float:
    """Tiles of an expert that gets so many rows in the mean: tiles of ``BLOCK_M`` rows, the last one partly filled."""
    if rows <= 0:
        return 0.0
    tiles = 1 - math.exp(-rows)
    spread, edge = math.sqrt(rows), BLOCK_M
    while edge < rows + 6 * spread:
        tiles += 0.5 * math.erfc((edge + 0.5 - rows) / (spread * math.sqrt(2)))
        edge += BLOCK_M
    return tiles


def _product(
    machine: Machine, conditions: Conditions, topology: Topology, experts: int, rows: float, n: int, k: int, tile: GemmTile, ctas: float,
    a_row: int, b_row: int,
) -> tuple[float, float, float, TileCost]:  # fmt: skip
    """A grouped product of ``rows`` rows per expert: seconds of it, of its tensor work and of memory; and the cost of a tile."""
    tiles = experts * expected_tiles(rows) * math.ceil(n / tile.block_n)
    guess = 2.0 * tiles * BLOCK_M * tile.block_n * k / (machine.sm_flops * machine.sms)
    load_rows = int(min(BLOCK_M, max(64.0, rows)))
    speed, from_memory = machine.speed(busy_of(conditions, machine, guess)), rows <= BLOCK_M  # B of a tile that nobody else reads
    shape = TileShape(BLOCK_M, tile.block_n, load_rows, stages=tile.stages)
    around = Around(active=min(ctas, tiles) or machine.sms, from_memory=from_memory, beside=True)
    cost = tile_cost(machine, shape, Operands(n, k, a_row, b_row), around, speed)
    touched = experts * (1 - math.exp(-rows))
    memory = (touched * n * k + experts * rows * (n + k)) * ITEM / machine.memory
    turns = math.ceil(tiles / ctas) if tiles < 4 * ctas else tiles / ctas + 0.5
    return blend(turns * cost.seconds, memory), turns * cost.tensor, memory, cost


def _copied(row_bytes: int, stores: float) -> float:
    """Seconds that a CTA takes for a row that it loads once, and stores so many times."""
    return _PIECE / rows_per_piece(row_bytes) + (1 + stores) * (_COPY + row_bytes / _COPY_RATE)


def _overlapped(fetching: float, seconds: float, experts: int, chosen: float, fetch_share: float = 0.0, steps: int | None = None) -> float:
    """When products that take ``seconds`` on all SMs are done, of rows that come meanwhile, in order of their first expert here.

    ``chosen``: the share of tokens that choose an expert; ``fetch_share``: of SMs that fetch first, and then multiply; ``steps``: bands
    of experts by which rows are ordered (None: by experts).
    """
    end, here, steps = 0.0, 1 - (1 - chosen) ** experts, steps or experts
    for step in range(steps):
        come = fetching * (1 - (1 - chosen) ** (experts * (step + 1) / steps)) / here
        left = seconds * (steps - step) / steps
        # Those that still fetch do not multiply.
        end = max(end, come + left + fetch_share * min(fetching - come, left))
    return end


def predict_moe_dispatch_gemm(plan: MoeDispatchGemmPlan, machine: Machine, conditions: Conditions, tokens: int) -> Prediction:
    """The time of a call; ``tokens``: of all ranks."""
    problem, topology = plan.problem, plan.problem.topology
    size, intra = topology.size, plan.split.intra_comm or 1
    n = problem.n * (2 if problem.gated else 1)
    per_expert = tokens * problem.topk / problem.all_experts
    start = machine.start_hot if conditions.hot else machine.start
    if not tokens:
        return Prediction(start, start=start)
    compute = plan.split.compute or 1
    # A row crosses once to every rank of the node that has an expert of its token; every copy of it is stored into its slots.
    wanted = 1 - (1 - 1 / size) ** problem.topk
    link_bytes = tokens * (topology.ranks_per_node - 1) / size * wanted * problem.row_bytes * topology.num_nodes
    stores = problem.topk / size / wanted  # of a row, to each of its slots
    fetching = max(link_bytes / machine.link, tokens * wanted / intra * _copied(problem.row_bytes, stores))
    seconds, tensor, memory, cost = _product(
        *(machine, conditions, topology, problem.experts, per_expert, n, problem.k, plan.tile, compute + intra),
        a_row=problem.slot_bytes // ITEM,
        b_row=row_of_b(n, problem.k, problem.b_row_major),
    )
    # Every rank learns the choices of all tokens, over the network, too, and finds a place for each.
    told = sent(machine, topology, tokens / size * problem.topk * _ID * (2 if problem.weighted else 1), plan.put_bytes)
    entry = entered(machine, conditions, topology)
    few = tokens * problem.topk <= plan.counted_alone
    routing = told.arrived + (_FEW_ROUTING if few else _ROUTING) + tokens * _ROUTING_TOKEN
    begin = start + entry + routing
    end = begin + _overlapped(fetching, seconds, problem.experts, problem.topk / problem.all_experts, intra / (compute + intra))
    end = max(end, begin + fetching + cost.seconds)
    network = Sent(0.0, 0.0, 0.0)
    if topology.num_nodes > 1:
        network = _rows_sent(machine, topology, tokens, problem.topk, problem.row_bytes, plan.put_bytes)
        of_node = min(1.0, topology.ranks_per_node * problem.topk / problem.all_experts)
        ordered = _overlapped(network.arrived, seconds, problem.experts, of_node, steps=bands(topology, problem.experts))
        end = max(end, begin + ordered, begin + network.arrived + cost.seconds)
    network_time, engine = told.paced + network.paced, told.engine + network.engine
    return Prediction(end, tensor, 0.0, memory, link_bytes / machine.link, network_time, start, engine, entry=entry, routing=routing)


def predict_moe_gemm_combine(plan: MoeGemmCombinePlan, machine: Machine, conditions: Conditions, tokens: int) -> Prediction:
    """The time of a call; ``tokens``: of all ranks."""
    problem, topology = plan.problem, plan.problem.topology
    combined, size = problem.combined, topology.size
    start = machine.start_hot if conditions.hot else machine.start
    if not tokens:
        return Prediction(start, start=start)
    experts = combined.experts * size
    per_expert = tokens * combined.topk / experts
    compute, intra = plan.split.compute or 1, plan.split.intra_comm or 1
    seconds, tensor, memory, cost = _product(
        *(machine, conditions, topology, combined.experts, per_expert, problem.n, problem.k, plan.tile, compute),
        a_row=problem.k,
        b_row=row_of_b(problem.n, problem.k, problem.b_row_major),
    )
    rows = tokens * combined.topk / size
    link_bytes = rows * (topology.ranks_per_node - 1) / size * combined.row_bytes * topology.num_nodes
    # Rows of all but the last window are fetched while tiles are multiplied; all SMs then sum what a token's experts have made.
    link = link_bytes / machine.link
    fetching = max(link, link_bytes / combined.row_bytes / intra * (_copied(combined.row_bytes, 1) + _FOUND))
    share = 1 / plan.windows
    summing = rows * combined.row_bytes / min(machine.memory, machine.add * machine.sms)
    entry = entered(machine, conditions, topology)
    begin = start + entry
    fetched = seconds * share + fetching * (1 - share) + cost.seconds if plan.windows > 1 else 0.0
    end = begin + max(seconds, fetched) + link * share + summing + 2 * machine.flag
    network = Sent(0.0, 0.0, 0.0)
    if topology.num_nodes > 1:
        network = _rows_sent(machine, topology, tokens, combined.topk, combined.row_bytes, plan.put_bytes)
        end = max(end, begin + seconds * share + network.arrived + summing)
    return Prediction(end, tensor, 0.0, memory + summing, link, network.paced, start, network.engine, entry=entry)


def predict_moe_combine(plan: MoeCombinePlan, machine: Machine, conditions: Conditions, tokens: int) -> Prediction:
    """The time of a call; ``tokens``: of all ranks."""
    problem, topology = plan.problem, plan.problem.topology
    size, (combining, _) = topology.size, plan.roles
    start = machine.start_hot if conditions.hot else machine.start
    if not tokens:
        return Prediction(start, start=start)
    rows = tokens * problem.topk / size
    # Rows are staged for the node, come to their tokens' homes, and are summed there.
    count = rows * problem.row_bytes
    staged = 2 * count / machine.memory if plan.node_mates else 0.0
    link_bytes = count * plan.node_mates / size * topology.num_nodes
    link = link_bytes / min(machine.link if plan.node_mates > 1 else machine.link_pair, combining * machine.cta_link)
    memory = staged + (count + tokens / size * problem.row_bytes) / machine.memory
    entry = entered(machine, conditions, topology)
    end = start + entry + machine.flag + max(staged + link, memory)
    network = Sent(0.0, 0.0, 0.0)
    if topology.num_nodes > 1:
        network = _rows_sent(machine, topology, tokens, problem.topk, problem.row_bytes, plan.put_bytes)
        end = max(end, start + entry + staged + network.arrived)
    return Prediction(end, memory=memory, link=link, network=network.paced, start=start, engine=network.engine, entry=entry)


def _rows_sent(machine: Machine, topology: Topology, tokens: float, topk: int, row_bytes: int, put_bytes: float) -> Sent:
    """A rank's rows to, or from, every other node: one for each of its tokens that has any of its choices there."""
    rows = tokens / topology.size * (1 - (1 - 1 / topology.num_nodes) ** topk)
    return sent(machine, topology, rows * row_bytes, put_bytes)
