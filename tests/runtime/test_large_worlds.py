"""Worlds of many nodes: meeting, the control channel, agreement, the wiring of a network; without kernels. One thread per rank."""

from __future__ import annotations

import functools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.planner.topology import Topology
from mkernel.runtime.init import open_world
from mkernel.runtime.options import Options
from mkernel.runtime.ranks.bootstrap import SingleBootstrap
from mkernel.runtime.ranks.rendezvous import Meeting, SocketBootstrap
from mkernel.runtime.ranks.socket_control import SocketControl
from mkernel.runtime.world import World
from mkernel.transport import Wiring
from mkernel.transport.base import Put
from mkernel.transport.rc import open_transport
from tests.runtime.fake import FakeBackend
from tests.runtime.processes import free_port
from tests.runtime.worlds import call
from tests.transport.standin import MOODS, Fabric

SECONDS = 60.0  # of a processor, most that all ranks together may take: the rest is the business of whatever else runs here
WORLDS = [(8, 4), pytest.param((64, 8), marks=pytest.mark.slow)]  # nodes, ranks per node
_DESCRIPTORS = 24  # that a rank of this process holds at most while it joins


@pytest.fixture(params=WORLDS, ids=lambda world: "x".join(map(str, world)))
def shape(request: pytest.FixtureRequest) -> Iterator[Topology]:
    nodes, per_node = request.param
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS * nodes * per_node
    if most < wanted:
        pytest.skip(f"{wanted} descriptors are needed, and this process may have {most}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, wanted), most))
    yield Topology(nodes * per_node, per_node)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def on_hosts(monkeypatch: pytest.MonkeyPatch, shape: Topology) -> Callable[[int], None]:
    """Nodes are hosts: what each thread must call with its rank before it joins."""
    here = threading.local()
    monkeypatch.setattr("mkernel.runtime.opening.infos.host_identity", lambda: f"host {shape.node(here.rank)}")
    return lambda rank: setattr(here, "rank", rank)


def everybody(shape: Topology, rank: Callable[[int], Any]) -> list[Any]:
    """Results of all ranks."""
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            found[number] = rank(number)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(shape.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    return [found.get(number, "no end") for number in range(shape.size)]


def test_a_world_opens_in_time(monkeypatch: pytest.MonkeyPatch, shape: Topology) -> None:
    """All that ranks of processes do, but for kernels and engines: they meet at a socket, connect node by node, agree, and call."""
    told = on_hosts(monkeypatch, shape)
    wired: dict[int, list[int]] = {}

    def start_engine(parts: Any, *args: Any, **more: Any) -> Callable[[], None]:
        wired[parts.rank] = parts.topology.rail_peers(parts.rank)
        return lambda: None

    monkeypatch.setattr("mkernel.runtime.init.start_engine", start_engine)
    monkeypatch.setattr("mkernel.runtime.init.plan_network", functools.partial(_network))
    port, options = free_port(), Options(target="cpu", heap_bytes=1 << 20, timeout=300.0, entry_timeout=300.0)
    begin, opened, wall = time.process_time(), list[float](), time.monotonic()

    def rank(number: int) -> tuple[int, int, int]:
        told(number)
        bootstrap = SocketBootstrap(Meeting("127.0.0.1", port, number, shape.size, one_host=True))
        world: World = open_world(bootstrap, options, make_backend=FakeBackend)
        bootstrap.close()
        world.barrier()
        opened.append(time.process_time() - begin)
        call(world)
        world.barrier()
        world.close()
        return world.rank, world.size, world.topology.num_nodes

    found = everybody(shape, rank)
    assert found == [(number, shape.size, shape.num_nodes) for number in range(shape.size)]
    assert wired == {number: shape.rail_peers(number) for number in range(shape.size)}
    seconds = time.monotonic() - wall
    print(f"{shape}: open on all ranks after {max(opened):.1f} s of CPU; {seconds:.1f} s in all, by the clock")
    assert max(opened) < SECONDS


def _network(name: str, topology: Topology, *args: Any) -> Any:
    from mkernel.runtime.opening.engine import Network

    return Network("null", own_process=False, host_signals=False)


def test_a_network_connects_in_time(shape: Topology) -> None:
    """Every rank's queue pairs, made and connected from what all have told; then each puts to its whole rail."""
    fabric = Fabric(MOODS["prompt"])
    heaps = np.zeros((shape.size, 64), np.uint64)
    signals = np.zeros((shape.size, 2 * abi.MAX_RANKS), np.uint64)
    begin = time.process_time()

    def open_rank(rank: int) -> Any:
        wiring = Wiring(
            rank=rank,
            heap_address=heaps[rank].ctypes.data,
            heap_bytes=heaps[rank].nbytes,
            signal_bytes=signals[rank].nbytes,
            peers=dict.fromkeys(shape.rail_peers(rank), (0, 0)),
            copier=lambda: pytest.fail("rc copies nothing"),
            clock_ns=time.monotonic_ns,
            signal_address=signals[rank].ctypes.data,
        )
        return open_transport(fabric.nic(rank), wiring, signal="atomic", queue_pairs=4)

    transports = [open_rank(rank) for rank in range(shape.size)]
    addresses = [transport.address for transport in transports]
    for transport in transports:
        transport.connect(addresses)
    seconds = time.process_time() - begin
    assert all(len(transport._nic.pairs) == 4 * (shape.num_nodes - 1) for transport in transports)
    for rank in (0, shape.size // 2 + 1):
        heaps[rank] = rank + 1
        for number, peer in enumerate(shape.rail_peers(rank)):
            assert transports[rank].post(Put(number, 1 + number % 8, peer, 0, 0, heaps[rank].nbytes, 8 * rank, 5))
        transports[rank].flush()
        while fabric.step():
            transports[rank].poll()
        peers = shape.rail_peers(rank)
        assert (heaps[peers] == rank + 1).all() and (signals[peers, rank] == 5).all()
    for transport in transports:
        transport.close()
    print(f"{shape}: connected after {seconds:.1f} s of CPU")
    assert seconds < SECONDS


def test_many_requests_at_once_do_not_stop_rank_0() -> None:
    """Its reader wakes itself for each, and does not read meanwhile: a socket holds some 280 such bytes."""
    control = SocketControl(SingleBootstrap(), ["host"], 1.0)
    poking = threading.Thread(target=lambda: [control._poke() for _ in range(5000)], daemon=True)
    poking.start()
    poking.join(20)
    assert not poking.is_alive()
    control.close()


def test_more_ranks_than_flags_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abi, "MAX_RANKS", 3)
    with pytest.raises(ArgumentError, match="a world has at most 3 ranks"):
        mk.launch(lambda world: None, 4, 2, "cpu")
