"""Nodes, target and devices from what the ranks tell: pure decisions."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mkernel.errors import ArgumentError
from mkernel.runtime import init
from mkernel.runtime.cuda import gpus as cuda_gpus
from mkernel.runtime.opening.placement import (
    Gpu,
    RankInfo,
    choose_device,
    choose_link,
    choose_network,
    choose_signals,
    choose_target,
    choose_topology,
    host_slot,
    require_equal,
)
from mkernel.runtime.opening.target import gpus_here
from mkernel.runtime.options import Options
from mkernel.runtime.ranks.bootstrap import SingleBootstrap


def gpus(count: int, capability: tuple[int, int] = (9, 0), host: str = "a", peers: bool = True) -> tuple[Gpu, ...]:
    return tuple(Gpu(i, f"{host}{i}", capability, tuple(p for p in range(count) if peers and p != i)) for i in range(count))


def infos(hosts: str, seen: tuple[Gpu, ...] = ()) -> list[RankInfo]:
    return [RankInfo(host, {}, seen) for host in hosts]


@pytest.mark.parametrize(
    ("hosts", "ranks_per_node", "expected"),
    [("a", None, (1, 1)), ("aaaa", None, (1, 4)), ("aaaa", 2, (2, 2)), ("aaaa", 1, (4, 1)), ("aabb", None, (2, 2)), ("aabb", 1, (4, 1))],
)
def test_topology(hosts: str, ranks_per_node: int | None, expected: tuple[int, int]) -> None:
    topology = choose_topology(infos(hosts), ranks_per_node)
    assert (topology.num_nodes, topology.ranks_per_node) == expected


@pytest.mark.parametrize(
    ("hosts", "ranks_per_node", "argument"),
    [("abab", None, "comm"), ("aab", None, "comm"), ("aaaa", 3, "ranks_per_node"), ("aabb", 4, "ranks_per_node")],
)
def test_topology_refuses(hosts: str, ranks_per_node: int | None, argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        choose_topology(infos(hosts), ranks_per_node)
    assert caught.value.argument == argument


def test_auto_is_cpu_without_gpus() -> None:
    assert choose_target(infos("aa"), "auto") == "cpu"
    with pytest.raises(ArgumentError, match="no rank sees a GPU"):
        choose_target(infos("aa"), "cuda")


def test_auto_is_cuda_with_a_gpu_each() -> None:
    assert choose_target(infos("aaaa", gpus(4)), "auto") == "cuda"
    assert choose_target(infos("aa", gpus(4)), "auto") == "cuda"
    assert choose_target(infos("aa", gpus(4)), "cpu") == "cpu"


def test_nodes_need_no_peer_access_to_each_other() -> None:
    two_hosts = [RankInfo("a", {}, gpus(1, host="a")), RankInfo("b", {}, gpus(1, host="b"))]
    assert choose_target(two_hosts, "auto") == "cuda"


@pytest.mark.parametrize(
    ("ranks", "rule"),
    [
        (infos("aa", gpus(1)), "ranks 0 and 1 are on one GPU"),
        (infos("aaa", gpus(2)), "number 2 of its host"),
        (infos("aa", gpus(2, capability=(8, 0))), "compute capability 8.0"),
        (infos("aa", gpus(2, capability=(10, 0))), "compute capability 10.0"),
        (infos("aa", gpus(2, peers=False)), "no peer access"),
        ([RankInfo("a", {}, gpus(1)), RankInfo("a", {})], "rank 1 sees no GPU"),
        ([RankInfo("a", {}, (Gpu(0, "x", (9, 0), ()),)), RankInfo("a", {}, (Gpu(0, "y", (9, 0), ()),))], "does not see the GPU of rank 1"),
        ([dataclasses.replace(info, gpu_problem="no driver") for info in infos("aa")], "no driver"),
    ],
)
def test_auto_never_falls_back_silently(ranks: list[RankInfo], rule: str) -> None:
    with pytest.raises(ArgumentError, match=rule) as caught:
        choose_target(ranks, "auto")
    assert "cpu" in caught.value.remedy


def test_unknown_target() -> None:
    with pytest.raises(ArgumentError, match="must be auto, cuda or cpu"):
        choose_target(infos("a"), "tpu")


def test_device_order() -> None:
    ranks = infos("aabb", gpus(2))
    assert [choose_device(ranks, rank).ordinal for rank in range(4)] == [0, 1, 0, 1]
    chosen = [dataclasses.replace(info, preferred=3 - rank) for rank, info in enumerate(infos("aaaa", gpus(4)))]
    assert [choose_device(chosen, rank).ordinal for rank in range(4)] == [3, 2, 1, 0], "a device made current is kept"


def test_ranks_of_any_world_are_where_their_processes_are(rng: np.random.Generator) -> None:
    """A world has any of a program's processes, as many of each host, which say in different ways on which GPU they are."""
    for _ in range(100):
        hosts, count = "abc"[: rng.integers(1, 4)], int(rng.integers(1, 9))
        each = int(rng.integers(1, count + 1))
        launched = bool(rng.random() < 0.5)
        members: list[RankInfo] = []
        own: list[int] = []
        for host in hosts:
            for number in map(int, rng.permutation(count)[:each]):
                tells = not launched or rng.random() < 0.5
                said = {"preferred": number if tells else None, "number": number if launched else None}
                members.append(RankInfo(host, {}, gpus(count, host=host), **said))
                own.append(number)
        assert [choose_device(members, rank).ordinal for rank in range(len(members))] == own
        assert choose_target(members, "auto") == "cuda"
        if launched:
            assert [host_slot(members, rank) for rank in range(len(members))] == own


@pytest.mark.parametrize("numbers", [(None, 3), (3, 3), (0, None), (2, 5)])
def test_numbers_that_do_not_say_where_ranks_are(numbers: tuple[int | None, ...]) -> None:
    """Not all are told, or the same twice (the launcher's own, say), or others than GPUs have (some processes have none)."""
    members = [dataclasses.replace(info, number=number) for info, number in zip(infos("aa", gpus(4)), numbers, strict=True)]
    assert [choose_device(members, rank).ordinal for rank in range(2)] == [0, 1]


class _Library:
    """CuPy or torch, as far as they are asked for their device."""

    def __init__(self, ordinal: int, used: bool = True) -> None:
        self.cuda = self
        self.runtime = self
        self.getDevice = self.current_device = lambda: ordinal
        self.is_initialized = lambda: used


@pytest.mark.parametrize(
    ("driver", "libraries", "in_use", "expected"),
    [
        (None, {}, None, None),
        (None, {}, 0, 0),
        (None, {}, 2, 2),
        (0, {"cupy": _Library(0), "torch": _Library(0)}, None, None),
        (0, {"cupy": _Library(0), "torch": _Library(0)}, 1, 1),
        (3, {}, None, 3),
        (3, {"cupy": _Library(0)}, 1, 3),
        (None, {"cupy": _Library(2)}, None, 2),
        (None, {"torch": _Library(2)}, None, 2),
        (None, {"torch": _Library(2, used=False)}, None, None),
        (0, {"cupy": _Library(0), "torch": _Library(1)}, None, 1),
    ],
)
def test_what_a_process_has_chosen(
    monkeypatch: pytest.MonkeyPatch, driver: int | None, libraries: dict[str, _Library], in_use: int | None, expected: int | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cuda_gpus, "available", lambda: [cuda_gpus.Gpu(n, f"gpu {n}", "H200", (9, 0), 1, ()) for n in range(4)])
    monkeypatch.setattr(cuda_gpus, "current_ordinal", lambda: driver)
    for name in ("cupy", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        if name in libraries:
            monkeypatch.setitem(sys.modules, name, libraries[name])
    seen, problem, chosen = gpus_here(in_use)
    assert (len(seen), problem, chosen) == (4, "", expected)


def test_a_process_stays_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its next world, too; worlds on target cpu, and of the process that this one was forked from, say nothing."""

    class ToldError(Exception):
        pass

    def tell(*args: object, in_use: int | None, **options: object) -> None:
        raise ToldError(in_use)

    worlds = [SimpleNamespace(device=device, foreign=foreign) for device, foreign in (("cpu", ""), (2, "forked"), (1, ""), (3, ""))]
    monkeypatch.setattr(init, "exchange_infos", tell)
    for there, expected in ((worlds, "1"), (worlds[:2], "None"), ([], "None")):
        monkeypatch.setattr(init.current, "opened", lambda there=there: tuple(there))
        with pytest.raises(ToldError, match=expected):
            init.open_world(SingleBootstrap(), Options.resolve(target="cpu"))


def test_shared_gpus() -> None:
    """Only where asked for. Two nodes of two ranks on two GPUs: no two on one GPU are of one node, or of one rail."""

    def sharing(hosts: str, count: int) -> list[RankInfo]:
        return [dataclasses.replace(info, shares=True) for info in infos(hosts, gpus(count))]

    ranks = sharing("aaaa", 2)
    assert choose_target(ranks, "auto") == "cuda"
    assert [choose_device(ranks, rank).ordinal for rank in range(4)] == [0, 1, 1, 0]
    assert [choose_device(sharing("aaaaa", 4), rank).ordinal for rank in range(5)] == [0, 1, 2, 3, 1]
    assert choose_target(sharing("aaaa", 1), "cuda") == "cuda"
    with pytest.raises(ArgumentError, match="rank 1 shares GPUs, or rank 0 does"):
        choose_target([*sharing("a", 2), *infos("a", gpus(2))][::-1], "cuda")


def test_options_must_agree() -> None:
    same = [RankInfo("a", {"timeout": 1.0}), RankInfo("a", {"timeout": 1.0})]
    require_equal(same)
    with pytest.raises(ArgumentError, match="rank 1 differs"):
        require_equal([same[0], RankInfo("a", {"timeout": 2.0})])


def test_where_flags_lie_must_agree() -> None:
    imm, atomic = RankInfo("a", {}, host_signals=["rc", "srd"]), RankInfo("a", {}, host_signals=["srd"])
    assert choose_signals([imm, imm], "rc")
    assert not choose_signals([atomic, atomic], "rc")
    assert choose_signals([imm, atomic], "srd")
    assert not choose_signals([imm, atomic], ""), "one node"
    with pytest.raises(ArgumentError, match=r"'rc'.*rank 2 raises flags otherwise than rank 0.*MKERNEL_RC_SIGNAL"):
        choose_signals([imm, imm, atomic], "rc")


def test_cards_travel_as_json() -> None:
    import json

    info = RankInfo("a", {"heap_bytes": None}, gpus(2), "", 1, {"rc": ""}, ["srd"], True)
    assert RankInfo.from_json(json.loads(json.dumps(info.to_json()))) == info


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ([{}, {}], None),
        ([{"Ethernet": 100.0}, {"Ethernet": 400.0}], "Ethernet"),
        ([{"Ethernet": 400.0, "InfiniBand": 400.0}, {"InfiniBand": 400.0, "Ethernet": 400.0}], "InfiniBand"),
        ([{"Ethernet": 800.0, "InfiniBand": 200.0}, {"InfiniBand": 400.0, "Ethernet": 400.0}], "Ethernet"),
        ([{"Ethernet": 800.0, "InfiniBand": 200.0}, {"InfiniBand": 400.0}], "InfiniBand"),
    ],
)
def test_one_link_layer(links: list[dict[str, float]], expected: str | None) -> None:
    infos = [RankInfo(f"host{i}", {}, networks={"rc": "", "srd": "no device"}, links=some) for i, some in enumerate(links)]
    assert choose_link(infos) == expected
    assert choose_network(infos) == "rc"


def test_no_link_layer_in_common() -> None:
    infos = [RankInfo(f"host{i}", {}, networks={"rc": ""}, links={link: 400.0}) for i, link in enumerate(("InfiniBand", "Ethernet"))]
    with pytest.raises(ArgumentError, match=r"no link layer in common \(rank 0: InfiniBand; rank 1: Ethernet\).*MKERNEL_NIC"):
        choose_link(infos)
    with pytest.raises(ArgumentError, match=r"rc: the ranks' cards have no link layer in common"):
        choose_network(infos)
