"""Fused calls over rc and srd, between cards that do everything as late, as split and as disordered as they may; planted bugs must show."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.bench.cases import ops
from mkernel.errors import ArgumentError, TransportError
from mkernel.ops.op import BUILT_IN, find
from mkernel.transport import emulated, rc, srd, striped
from tests.ops import standin
from tests.ops.body import Case, back_to_back, problems, topology
from tests.shared.worlds import found_wrong
from tests.transport.rc_bugs import EpochEarly, SignalBeforeData, SignalOnAnotherQueuePair
from tests.transport.standin import MOODS
from tests.virtual_time import sleep

ROWS = (0, 7, 129, 300)
CASES = [
    Case("bfloat16", 200, 72),
    Case("float16", 64, 136, False),
    Case("bfloat16", 136, 72, op="gemm_reduce_scatter"),
    Case("bfloat16", 136, 72, op="gemm_allreduce", algorithm="one_shot"),
    Case("bfloat16", 136, 72, op="gemm_allreduce", algorithm="two_shot"),
    Case("bfloat16", 200, 72),  # again: other plans have used its flags meanwhile
]


def open_rc(signal: str = "atomic", kind: type[rc.RcTransport] | None = None) -> Any:
    return lambda nic, wiring: rc.open_transport(nic, wiring, signal=signal, queue_pairs=2, kind=kind)


KINDS = {"atomic": (open_rc("atomic"), False), "imm": (open_rc("imm"), False), "srd": (srd.open_transport, True)}


def run(world: str, fn: Any, *args: Any, seed: int, transport: str = standin.NAME) -> list[Any]:
    shape = topology(world)
    return mk.launch(fn, shape.size, shape.ranks_per_node, "cpu", args, seed=seed, heap_bytes=32 << 20, transport=transport, timeout=20.0)


def calls(world: Any, seed: int) -> list[str]:
    return [problem for i, case in enumerate(CASES) for problem in problems(back_to_back(world, case, seed + i, 0.0, ROWS))]


def few_calls(world: Any, seed: int) -> list[str]:
    return [problem for case in (CASES[0], CASES[3]) for problem in problems(back_to_back(world, case, seed, 0.0, (7, 129)))]


@pytest.mark.cases(kind=tuple(KINDS), mood=("late", "split", "short_queues"), world=("2x2", "4x1"))
@pytest.mark.drawn(1)
def test_every_element(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, world: str, mood: str, kind: str) -> None:
    seed = request.config.getoption("--seed")
    opener, unordered = KINDS[kind]
    standin.join(monkeypatch, opener, topology(world).size, MOODS[mood], seed, srd=unordered)
    assert run(world, calls, seed, seed=seed) == [[]] * topology(world).size


def test_emulated_links_with_flags_in_host_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``tests/gpu/run_gpu.py signals`` does on GPUs."""
    monkeypatch.setenv("MKERNEL_EMULATED_HOST_SIGNALS", "1")
    seed = request.config.getoption("--seed")
    assert run("2x2", calls, seed, seed=seed, transport="emulated") == [[]] * 4


@pytest.mark.cases(op=(*(name for name in BUILT_IN if find(name).bench), "moe_layer"), world=("2x1", "2x2", "3x1"), reorder=(0, 40))
@pytest.mark.drawn(1)
def test_every_op_over_a_network_that_sms_play(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, op: str, world: str, reorder: int
) -> None:
    """In order as over rc, or in any order as over srd."""
    monkeypatch.setenv("MKERNEL_EMULATED_ENGINE", "sms")
    monkeypatch.setenv("MKERNEL_EMULATED_REORDER_US", str(reorder))
    monkeypatch.setenv("MKERNEL_CPU_SMS", "8")
    seed = int(rng.integers(1 << 30))
    sizes = tuple(ops()[op].demo_sizes("cpu", topology(world).size))
    assert found_wrong(op, world, str(rng.choice(("bfloat16", "float16"))), sizes[1:] or sizes, seed) is None, seed


@pytest.mark.slow
def test_a_rank_that_does_not_come_over_a_network_that_sms_play(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers' fabrics end with their calls, and the world with the rank's name."""
    monkeypatch.setenv("MKERNEL_EMULATED_ENGINE", "sms")

    def use(world: Any) -> None:
        for number in range(2):
            if (world.rank, number) == (1, 1):
                sleep(world, 60.0)
            few_calls(world, number)

    with pytest.raises(mk.TimeoutError, match="rank 1"):
        mk.launch(use, 2, 1, "cpu", heap_bytes=32 << 20, timeout=2.0, entry_timeout=5.0)


@pytest.mark.parametrize("variable", ["MKERNEL_EMULATED_LINKS", "MKERNEL_EMULATED_HOST_SIGNALS"])
def test_sms_play_one_plain_link(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv("MKERNEL_EMULATED_ENGINE", "sms")
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ArgumentError, match=f"does not go with {variable}"):
        run("2x1", few_calls, 0, seed=0, transport="emulated")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.drawn(1)
def test_two_unlike_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Bytes are spread over both, and one may fail while calls are under way."""
    monkeypatch.setenv("MKERNEL_EMULATED_LINKS", "40,10")
    monkeypatch.setattr(striped, "SMALLEST", 1 << 10)
    seed, opened = request.config.getoption("--seed"), list[striped.StripedTransport]()
    number, kind = itertools.count(), striped.StripedTransport
    faults = [
        emulated.Faults(seed=seed, reorder_us=20.0, ack_us=20.0, down_ns=200_000 if fails and link == 3 else None) for link in range(8)
    ]
    monkeypatch.setattr(emulated, "Faults", lambda: faults[next(number)])
    monkeypatch.setattr(emulated, "StripedTransport", lambda *args: opened.append(kind(*args)) or opened[-1])
    assert run("2x2", few_calls, seed, seed=seed, transport="emulated") == [[]] * 4
    assert sorted(len(transport.links) for transport in opened) == ([1, 2, 2, 2] if fails else [2, 2, 2, 2])


@pytest.mark.parametrize("bug", [SignalBeforeData, SignalOnAnotherQueuePair, EpochEarly], ids=lambda bug: bug.__name__)
@pytest.mark.drawn(1)
def test_a_planted_bug_shows(monkeypatch: pytest.MonkeyPatch, bug: type[rc.RcTransport]) -> None:
    found = []
    for seed in range(4):
        standin.join(monkeypatch, open_rc(kind=bug), 4, MOODS["slow"], seed)
        try:
            found += [problem for some in run("2x2", calls, seed, seed=seed) for problem in some]
        except mk.Error as error:
            found.append(str(error))
        if found:
            return
    raise AssertionError(f"{bug.__name__} was not noticed")


def test_a_lost_card_is_everybodys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = standin.join(monkeypatch, open_rc(), 4, MOODS["late"], 1)
    heard = {}

    def lose(world: Any) -> None:
        calls(world, 1)
        world.barrier()
        fabric.cut.add(3)
        try:
            calls(world, 2)
        except mk.Error as error:
            heard[world.rank] = error
            raise

    with pytest.raises(TransportError, match="IBV_WC_RETRY_EXC_ERR"):
        run("2x2", lose, seed=1)
    assert set(heard) == {0, 1, 2, 3}
    assert {type(error) for error in heard.values()} == {TransportError}
