"""Worlds whose engines are processes: they start with the world, end with it, and what they fail of is every rank's failure."""

from __future__ import annotations

import os
import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mkernel.errors import ArgumentError, TransportError
from mkernel.planner.topology import Topology
from mkernel.runtime.failure import Failure, Kind
from mkernel.runtime.failure_watch import FailureWatch
from mkernel.runtime.launch import run
from mkernel.runtime.opening.engine import choose_transport
from mkernel.runtime.opening.placement import RankInfo, choose_network
from mkernel.runtime.options import Options
from mkernel.runtime.world import World
from tests.runtime.fake import FakeBackend
from tests.runtime.worlds import until_failed

DETAILS = {"peer": 3, "op": "write", "status": "IBV_WC_RETRY_EXC_ERR", "queue_pair": 77, "remedy": "look at it"}


def ranks(use: Callable[[World], Any], count: int = 2, per_node: int = 1, transport: str = "null", target: str = "cpu") -> list[Any]:
    options = Options(target=target, heap_bytes=1 << 16, ranks_per_node=per_node, transport=transport, timeout=10.0, entry_timeout=10.0)
    return run(use, count, options, make_backend=FakeBackend)


def engines() -> list[int]:
    """Processes of engines that this one has started and that are alive."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z" and b"mkernel.proxy" in command:
            found.append(int(status.parent.name))
    return found


def test_engines_live_as_long_as_their_world() -> None:
    def use(world: World) -> int:
        world.barrier()
        alive = len(engines())
        world.barrier()
        return alive

    assert ranks(use, 4, 2) == [4] * 4
    assert engines() == []


def test_one_node_has_no_engine() -> None:
    assert ranks(lambda world: (engines(), world._ring), 2, 2) == [([], None)] * 2


def test_the_end_of_an_engine_ends_the_world() -> None:
    caught: dict[int, BaseException] = {}

    def use(world: World) -> None:
        world.barrier()
        if world.rank == 0:
            os.kill(engines()[0], signal.SIGKILL)
        try:
            until_failed(world)
        except TransportError as error:
            caught[world.rank] = error
            raise

    with pytest.raises(TransportError, match="was killed by signal 9"):
        ranks(use)
    assert set(caught) == {0, 1}
    assert len({str(error) for error in caught.values()}) == 1
    assert engines() == []


def test_a_failure_of_the_network_is_told_in_full() -> None:
    caught = {}

    def use(world: World) -> None:
        world.barrier()
        if world.rank == 0:
            world.failures.on_transport_error(TransportError("the peer is gone", **DETAILS))  # type: ignore[arg-type]
        try:
            until_failed(world)
        except TransportError as error:
            caught[world.rank] = {name: getattr(error, name) for name in DETAILS}
            assert str(error) == "the peer is gone"
            raise

    with pytest.raises(TransportError):
        ranks(use)
    assert caught == {0: DETAILS, 1: DETAILS}


def test_whose_failure_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's, where there is one: rank 0 is one, too; else this rank's."""
    found: list[int] = []
    monkeypatch.setattr(FailureWatch, "fail", lambda self, failure: found.append(failure.rank))
    watch: Any = object.__new__(FailureWatch)
    watch._world = types.SimpleNamespace(rank=5)
    for peer in (0, 3, None):
        watch.on_transport_error(TransportError("gone", **DETAILS | {"peer": peer}))  # type: ignore[arg-type]
    assert found == [0, 3, 5]


def test_details_travel() -> None:
    failure = Failure(Kind.transport, "text", 3, details=DETAILS)
    assert Failure.decode(failure.encode()) == failure
    error = Failure.decode(failure.encode()).error()
    assert isinstance(error, TransportError)
    assert {name: getattr(error, name) for name in DETAILS} == DETAILS


def test_a_network_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mkernel.transport import devices

    monkeypatch.setattr(devices.find, "__defaults__", (tmp_path,))
    with pytest.raises(ArgumentError, match=r"'rc'.*rank 0: no RDMA device.*doctor"):
        ranks(lambda world: None, transport="rc")
    with pytest.raises(ArgumentError, match=r"'srd'.*rank 0: no EFA device.*doctor"):
        ranks(lambda world: None, transport="srd")
    assert engines() == []


def test_auto_needs_a_network_that_all_ranks_have() -> None:
    def infos(*networks: dict[str, str]) -> list[RankInfo]:
        return [RankInfo(f"host{i}", {}, networks=dict(network)) for i, network in enumerate(networks)]

    both, only_rc, none = {"rc": "", "srd": ""}, {"rc": "", "srd": "no EFA device"}, {"rc": "no port is up", "srd": "no EFA device"}
    assert choose_network(infos(both, both)) == "rc"
    assert choose_network(infos(both, only_rc)) == "rc"
    with pytest.raises(ArgumentError, match=r"rc: rank 1: no port is up; srd: rank 1: no EFA device.*doctor"):
        choose_network(infos(both, none))


KINDS = [
    ("srd", {}, True),
    ("rc", {}, False),
    ("rc", {"MKERNEL_RC_SIGNAL": "atomic"}, False),
    ("rc", {"MKERNEL_RC_SIGNAL": "write"}, False),
    ("rc", {"MKERNEL_RC_SIGNAL": "imm"}, True),
    ("null", {}, False),
    ("null", {"MKERNEL_RC_SIGNAL": "imm", "MKERNEL_EMULATED_HOST_SIGNALS": "1"}, False),
]


@pytest.mark.parametrize(("transport", "switches", "host"), KINDS)
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_engines_get_the_memory_they_can_write(
    monkeypatch: pytest.MonkeyPatch, target: str, transport: str, switches: dict[str, str], host: bool
) -> None:
    """Heap and flags: a descriptor to map, or one for the card only (none without a card)."""
    from mkernel.proxy import process
    from mkernel.runtime.opening import infos
    from mkernel.transport import devices

    class Engine:
        def __init__(self, layout: process.Layout) -> None:
            self.layout = layout

        def step(self) -> None:
            return None

        def watch(self, on_error: object) -> None:
            pass

        wake = close = step

    def use(world: World) -> tuple[process.Layout, int, int]:
        engine = world._stop_engine.__self__  # type: ignore[union-attr]
        return engine.layout, world.heap.segment.fd, world._signals.fd

    for name, value in switches.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process, "EngineProcess", Engine)
    monkeypatch.setattr(infos, "networks_here", lambda: {"rc": "", "srd": ""})
    monkeypatch.setattr(devices, "cards_for", lambda *args, **more: ())
    gpu = target == "cuda"
    for rank, (layout, heap, signals) in enumerate(ranks(use, 4, 2, transport, target)):
        assert list(layout.peers) == [(rank + 2) % 4], "ranks put to their rail"
        assert layout.heap.dmabuf == gpu
        assert layout.signals.dmabuf == (gpu and not host)
        card = transport != "null"
        assert layout.heap.fd == (heap if card or not gpu else -1)
        assert layout.signals.fd == (signals if card or host or not gpu else -1)


def test_virtual_time_knows_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkernel.runtime.opening import infos

    monkeypatch.setattr(infos, "networks_here", lambda: {"rc": "", "srd": ""})
    import mkernel as mk

    with pytest.raises(ArgumentError, match="virtual time"):
        mk.launch(lambda world: None, ranks=2, ranks_per_node=1, target="cpu", transport="rc")


@pytest.mark.parametrize(
    ("name", "per_node", "hosts", "expected"),
    [
        ("auto", 4, "aaaa", ""),
        ("emulated", 4, "aaaa", ""),
        ("auto", 2, "aaaa", "emulated"),
        ("null", 2, "aabb", "null"),
        ("auto", 2, "aabb", "rc"),
        ("auto", 2, "ccss", "srd"),
        ("auto", 2, "aass", None),
        ("auto", 2, "eeff", None),
        ("emulated", 2, "aabb", None),
        ("rc", 4, "eeee", ""),
        ("rc", 2, "aaaa", "rc"),
        ("rc", 2, "aass", None),
        ("srd", 2, "ccss", "srd"),
        ("pigeon", 4, "aaaa", None),
    ],
)
def test_choice_of_transport(name: str, per_node: int, hosts: str, expected: str | None) -> None:
    networks = {"a": "rc", "b": "rc srd", "c": "srd", "s": "srd"}  # what hosts have; e and f have none
    infos = [
        RankInfo(host, {}, networks={kind: "" if kind in networks.get(host, "").split() else "no device" for kind in ("rc", "srd")})
        for host in hosts
    ]
    if expected is None:
        with pytest.raises(ArgumentError, match="transport"):
            choose_transport(name, Topology(4, per_node), infos)
    else:
        assert choose_transport(name, Topology(4, per_node), infos) == expected
