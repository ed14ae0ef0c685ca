"""How long a call of ring attention takes, by its plan: waves of items on the compute CTAs, keys through the links."""

from __future__ import annotations

import math

from mkernel.planner.attention_bytes import most_received
from mkernel.planner.attention_shares import exchange_seconds
from mkernel.planner.machine import Machine
from mkernel.planner.predict_network import Sent, entered, sent
from mkernel.planner.prediction import ALONE, ITEM, Conditions, Prediction, blend, busy_of
from mkernel.planner.ring_attention import RingAttentionPlan

__all__ = ["keys_of_item", "predict_ring_attention"]

_NARROW = 0.7  # of the speed of D 128, that D 64 reaches: the exponentials take as long as the products (docs/speed_log.md)


def keys_of_item(plan: RingAttentionPlan) -> float:
    """Keys that an item multiplies, in the mean: whole blocks of each part of the sequence that a rank holds; with a mask, of what it sees.

    Of packed sequences as if they were one.
    """
    problem, size, block, rows = plan.problem, plan.problem.topology.size, plan.problem.tile.key_block, plan.problem.tile.q_rows

    def whole(keys: float) -> int:
        return math.ceil(keys / block) * block

    if not problem.causal:
        return whole(plan.sizes.length) * size
    parts = problem.parts
    part = plan.sizes.length / parts
    tiles = math.ceil(part / rows)
    own = sum(whole(min((tile + 1) * rows, part)) for tile in range(tiles)) / tiles
    return (parts * size - 1) / 2 * whole(part) + own


def predict_ring_attention(plan: RingAttentionPlan, machine: Machine, conditions: Conditions = ALONE) -> Prediction:
    """The time of a call."""
    problem, sizes, topology = plan.problem, plan.sizes, plan.problem.topology
    start = machine.start_hot if conditions.hot else machine.start
    if not plan.items:
        return Prediction(start, start=start)
    size, mates = topology.size, topology.ranks_per_node - 1
    flops = 4.0 * problem.tile.q_rows * keys_of_item(plan) * problem.head_dim / plan.shares
    rate = machine.attention_flops * (1.0 if problem.head_dim > 64 else _NARROW)
    guess = plan.items * flops / (rate * machine.sms)
    rate *= machine.speed(busy_of(conditions, machine, guess))
    # Causal items differ in length, and the longest are dealt first: what is left at the end is half an item.
    turns = math.ceil(plan.items / plan.ctas) if not problem.causal else plan.items / plan.ctas + 0.5
    item = flops / rate + machine.attention_item
    if plan.shares > 1:
        item += exchange_seconds(problem.tile, plan.shares)
    tensor = turns * flops / rate
    if size == 1:
        return Prediction(start + turns * item, tensor, start=start)
    near, far = most_received(plan)
    link_rate = min(machine.link if mates > 1 else machine.link_pair, max(1, plan.copying[0]) * machine.cta_link)
    link, network = near / link_rate, Sent(0.0, 0.0, 0.0)
    if far:
        shard = 2 * sizes.length * problem.head_dim * ITEM  # K and V of a pair, of one source
        network, shards = sent(machine, topology, shard, plan.put_bytes), far / shard / (topology.num_nodes - 1)
        network = Sent(shards * network.paced, shards * network.engine, network.arrived - network.paced)
    carried = max(network.paced, network.engine)
    slowed = 1 + machine.beside * min(1.0, max(link, carried) / (turns * item))
    entry = entered(machine, conditions, topology)
    seconds = start + entry + machine.flag + blend(turns * item * slowed, link, carried)
    return Prediction(seconds, tensor, link=link, network=network.paced, start=start, engine=network.engine, entry=entry)
