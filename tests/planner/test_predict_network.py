"""What the network costs, whatever is sent: never less for more bytes, more nodes or a slower network, and never nothing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from mkernel.planner.machine import EMULATED, H200, RDMA, Network
from mkernel.planner.predict_network import entered, sent
from mkernel.planner.prediction import ALONE, BEHIND
from mkernel.planner.topology import Topology


def drawn(rng: np.random.Generator) -> tuple[Network, Topology, float, float]:
    """A network, a world of 1 to 8192 nodes, bytes to each node and of a put."""
    per_node = int(rng.choice([1, 2, 4, 8]))
    nodes = int(2 ** rng.uniform(0, 13))
    network = dataclasses.replace(
        RDMA if rng.integers(2) else EMULATED,
        bandwidth=float(10 ** rng.uniform(9, 11.5)),
        put=float(10 ** rng.uniform(-7, -4)),
        oversubscription=float(rng.choice([1, 1.5, 2, 8])),
        leaf_nodes=int(2 ** rng.integers(0, 8)),
        hop=float(rng.choice([0, 3e-7])),
        radix=int(rng.choice([4, 32, 64])),
    )
    return network, Topology(nodes * per_node, per_node), float(10 ** rng.uniform(0, 9)), float(10 ** rng.uniform(4, 7))


def slower(network: Network) -> list[Network]:
    worse: list[dict[str, Any]] = [
        {name: getattr(network, name) * 2} for name in ("latency", "put", "reaction", "issue", "oversubscription")
    ]
    worse += [{"bandwidth": network.bandwidth / 2}, {"leaf_nodes": max(1, network.leaf_nodes // 2)}, {"hop": network.hop + 1e-6}]
    return [dataclasses.replace(network, **values) for values in worse]


@pytest.mark.parametrize("turn", range(100))
def test_more_and_slower_never_take_less(rng: np.random.Generator, turn: int) -> None:
    network, world, count, put = drawn(rng)
    machine, larger = H200.with_network(network), Topology(2 * world.size, world.ranks_per_node)
    before = sent(machine, world, count, put)
    for after in (
        sent(machine, world, 2 * count, put),
        sent(machine, larger, count, put),
        sent(machine, world, count, put / 2),
        *(sent(machine.with_network(one), world, count, put) for one in slower(network)),
    ):
        assert all(math.isfinite(value) for value in after)
        assert all(one <= other for one, other in zip(before, after, strict=True)), (before, after)
    if world.num_nodes > 1:
        others = world.num_nodes - 1
        assert before.paced >= others * count / network.bandwidth * (1 - 1e-9), "the cards of a rank carry all that it sends"
        assert before.engine >= others * network.put, "a put to each"
        assert before.arrived >= max(before.paced, before.engine) + network.latency
    else:
        assert before == (0, 0, 0)


@pytest.mark.parametrize("turn", range(50))
def test_entering_takes_longer_the_more_there_are(rng: np.random.Generator, turn: int) -> None:
    network, world, _, _ = drawn(rng)
    machine, larger = H200.with_network(network), Topology(2 * world.size, world.ranks_per_node)
    for conditions in (ALONE, BEHIND):
        before = entered(machine, conditions, world)
        assert machine.entry <= before <= entered(machine, conditions, larger)
        assert before <= entered(machine, conditions, world, by_one_thread=True)
        assert all(before <= entered(machine.with_network(one), conditions, world) for one in slower(network))
        if world.num_nodes > 1:
            assert before >= (world.num_nodes - 1) * network.put + network.latency


def test_switches_above_the_leaves() -> None:
    network = Network(50e9, 4e-6, 1e-6, 0.0, 0.0, oversubscription=4.0, leaf_nodes=32, hop=1e-6, radix=64)
    full = dataclasses.replace(network, oversubscription=1.0)
    assert network.seconds(1e6, 32) == full.seconds(1e6, 32), "a leaf is not oversubscribed"
    assert network.seconds(1e6, 33) == full.seconds(1e6, 33), "one node beyond takes less of the uplinks than 32 peers of the cards"
    assert network.seconds(1e6, 64) == pytest.approx(32 * 4 / 63 * full.seconds(1e6, 64))
    assert network.seconds(1e6, 4096) == pytest.approx(4 * 4064 / 4095 * full.seconds(1e6, 4096))
    assert [round(network.delay(nodes) * 1e6) for nodes in (2, 64, 65, 2048, 2049)] == [4, 4, 6, 6, 8]
