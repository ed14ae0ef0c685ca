"""How long a call of ring attention takes, by its plan: waves of items on the compute CTAs, keys through the links."""

from __future__ import annotations

import math

from mkernel.planner.attention_shares import exchange_seconds
from mkernel.planner.machine import Machine
from mkernel.planner.predict_network import Sent, entered, sent
from mkernel.planner.prediction import ALONE, ITEM, Conditions, Prediction, blend, busy_of
from mkernel.planner.ring_attention import RingAttentionPlan

__all__ = ["predict_ring_attention"]

_NARROW = 0.7  # of the speed of D 128, that D 64 reaches: the exponentials take as long as the products (docs/speed_log.md)


def predict_ring_attention(plan: RingAttentionPlan, machine: Machine, conditions: Conditions = ALONE) -> Prediction:
    """The time of a call."""
    problem, sizes, topology = plan.problem, plan.sizes, plan.problem.topology
    start = machine.start_hot if conditions.hot else machine.start
    if not plan.items:
        return Prediction(start, start=start)
    size, mates = topology.size, topology.ranks_per_node - 1
    keys = sizes.length * size * (0.5 if problem.causal else 1.0)
    flops = 4.0 * problem.tile.q_rows * keys * problem.head_dim / plan.shares
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
    waves = math.ceil(plan.items / plan.ctas)
    segments = plan.pairs + waves - waves // plan.period
    shard = 2 * sizes.length * problem.head_dim * ITEM * (0.5 if problem.causal else 1.0)  # K and V of a pair, of one source
    near = segments * shard * mates * topology.num_nodes
    link_rate = min(machine.link if mates > 1 else machine.link_pair, max(1, plan.copying[0]) * machine.cta_link)
    link = near / link_rate if mates else 0.0
    network = Sent(0.0, 0.0, 0.0)
    if topology.num_nodes > 1:
        network = sent(machine, topology, shard, plan.put_bytes)
        network = Sent(segments * network.paced, segments * network.engine, network.arrived - network.paced)
    carried = max(network.paced, network.engine)
    slowed = 1 + machine.beside * min(1.0, max(link, carried) / (turns * item))
    entry = entered(machine, conditions, topology)
    seconds = start + entry + machine.flag + blend(turns * item * slowed, link, carried)
    return Prediction(seconds, tensor, link=link, network=network.paced, start=start, engine=network.engine, entry=entry)
