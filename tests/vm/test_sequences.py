"""Every op over real verbs: random sequences of calls between machines, and a machine or a card that is lost amid one."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

import mkernel as mk
from mkernel.ops.op import BUILT_IN
from mkernel.proxy.compiled import library
from tests.ops.body import topology
from tests.ops.sequence_body import KINDS, program, small_plans
from tests.shared.puts import Puts
from tests.vm.jobs import sequences
from tests.vm.machines import Machines, Round
from tests.vm.worlds import JOBS, jobs, texts, wait_until_calls_go_well

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(900)]  # the machines end sooner by themselves


@functools.cache
def on_the_host(world: str, seed: int, count: int, *kinds: str) -> list[dict[str, list[int]]]:
    """What each rank puts in the same sequence over an emulated network. This compiles its kernels: machines may not."""
    shape = topology(world)

    def run(world: Any) -> tuple[list[int], dict[str, list[int]]]:
        puts = Puts(world)
        return program(world, sequences.steps_of(shape, seed, count, *kinds)), sequences.counts(puts)

    library()  # of the engines
    with small_plans():
        found = mk.launch(run, shape.size, shape.ranks_per_node, "cpu", heap_bytes=sequences.HEAP, seed=seed, entry_timeout=60.0)
    assert not any(wrong for wrong, _ in found), f"wrong without any card: {found}"
    return [counts for _, counts in found]


def environment(seed: int, count: int, *kinds: str) -> dict[str, str]:
    return {"TEST_SEED": str(seed), "TEST_CALLS": str(count), "TEST_KINDS": ",".join(kinds)}


def carried(counts: dict[str, list[int]]) -> dict[str, tuple[int, int]]:
    """Calls and bytes of each op."""
    return {op: (calls, size) for op, (calls, _, _, size) in counts.items()}


HOW = {
    "compiled": {},
    "messages": {"MKERNEL_RC_SIGNAL": "imm"},
    "one queue pair": {"MKERNEL_RC_QUEUE_PAIRS": "1"},
    "python, messages": {"MKERNEL_ENGINE": "python", "MKERNEL_RC_SIGNAL": "imm"},
}


@pytest.mark.parametrize(
    ("world", "how"),
    [
        ("2x2", "compiled"),
        *(pytest.param("2x2", how, marks=pytest.mark.slow) for how in HOW if how != "compiled"),
        *(pytest.param("4x1", how, marks=pytest.mark.slow) for how in ("compiled", "messages")),
    ],
)
def test_sequences_of_every_op(machines: Machines, world: str, how: str, pytestconfig: pytest.Config) -> None:
    """18 calls, without --full one of each kind: every element, and the same bytes on the card as on emulated links."""
    seed, count = int(pytestconfig.getoption("--seed")), 18 if pytestconfig.getoption("--full") else len(KINDS)
    expected = on_the_host(world, seed, count)
    for op in BUILT_IN:
        assert sum(counts[op][3] for counts in expected) > 0, f"the sequence moves nothing with {op}"
    outcomes = machines.run(jobs("sequences.py", "calls", world, **environment(seed, count), **HOW[how]), timeout=540)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0 and not outcome.left, texts(outcomes)
        (line,) = outcome.lines
        assert (line["rank"], line["shape"], line["wrong"]) == (rank, world, []), texts(outcomes)
        assert carried(line["counts"]) == carried(expected[rank]), texts(outcomes)
        assert sum(line["packets"].values()) >= sum(size for *_, size in line["counts"].values()) / sequences.MTU, texts(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("engine", ["compiled", "python"])
def test_sequences_over_two_cards(machines: Machines, engine: str, cut: bool, pytestconfig: pytest.Config) -> None:
    """Even small puts are spread over both. The wire of one may be cut amid the calls, which costs bandwidth, and brings a warning."""
    seed, count = int(pytestconfig.getoption("--seed")), len(KINDS)
    expected = on_the_host("2x2", seed, count)
    cards = {"MKERNEL_NIC": "rxe0+rxe1,rxe0+rxe1", "MKERNEL_ENGINE": engine, "PYTHONPATH": str(JOBS / "faults"), "TEST_SMALLEST": "1024"}
    more = {"TEST_TIMEOUT": "80", "TEST_CUT": "2"} if cut else {}
    try:
        outcomes = machines.run(jobs("sequences.py", "calls", "2x2", **environment(seed, count), **cards, **more), timeout=540)
    finally:
        machines.restart()  # others expect one card, and its wire
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0 and not outcome.left, texts(outcomes)
        (line,) = outcome.lines
        assert (line["rank"], line["shape"], line["wrong"]) == (rank, "2x2", []), texts(outcomes)
        assert carried(line["counts"]) == carried(expected[rank]), texts(outcomes)
        assert set(line["packets"]) == {"rxe0", "rxe1"} and min(line["packets"].values()) > 0, texts(outcomes)
        assert cut == bool(re.search("rxe0.* has failed, and its puts go by .*rxe1", outcome.errors)), texts(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["layer", "attention"])
def test_bytes_that_do_not_travel_are_missed(machines: Machines, kind: str, pytestconfig: pytest.Config) -> None:
    """A planted fault: of rank 0's puts only the signals arrive. What the machines check depends on what comes over the card."""
    seed = int(pytestconfig.getoption("--seed"))
    on_the_host("2x1", seed, 4, kind)
    faults = {"TEST_FAULT": "empty:0", "PYTHONPATH": str(JOBS / "faults"), "MKERNEL_ENGINE": "python"}
    outcomes = machines.run(jobs("sequences.py", "finds", "2x1", **environment(seed, 4, kind), **faults), timeout=280)
    assert all(outcome.code == 0 and not outcome.left for outcome in outcomes), texts(outcomes)
    found = [line["found"] for outcome in outcomes for line in outcome.lines]
    if kind == "attention":  # rank 0's keys are missing from every result of rank 1
        assert found == [[], [kind] * 4], texts(outcomes)
    else:  # rank 1 knows no tokens of rank 0, which waits for their sums: it hears what never came, or the results are wrong
        assert any(found), texts(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "op", "kind", "flag"),
    [
        ("2x2", "moe_dispatch_gemm", "layer", "of the rows of rank"),
        ("2x2", "moe_gemm_combine", "layer", "of the sums of node"),
        ("2x2", "moe_combine", "dispatch and combine", "of the sums of node"),
        ("2x2", "ring_attention", "attention", "chunk of rank"),
        ("2x2", "ring_attention_varlen", "packed attention", "chunk of rank"),
        ("4x1", "ring_attention", "attention", "chunk of rank"),
    ],
)
def test_a_machine_goes_off_amid_a_call(machines: Machines, world: str, op: str, kind: str, flag: str, pytestconfig: pytest.Config) -> None:
    """It has issued puts of rows or keys that nobody has completed. The others hear of it, and nothing of theirs is left behind."""
    seed, shape = int(pytestconfig.getoption("--seed")), topology(world)
    on_the_host(world, seed, 2, kind)
    dying = shape.size - 1
    machine = dying // shape.ranks_per_node

    def meanwhile(running: Round) -> None:
        wait_until_calls_go_well(running, world)
        running.file(machine, "go").touch()

    faults = {"TEST_DIES": str(dying), "TEST_OP": op, "TEST_FLAG": flag}
    outcomes = machines.run(
        jobs("sequences.py", "goes_off", world, **environment(seed, 2, kind), **faults), timeout=400, meanwhile=meanwhile
    )
    lost = [rank for rank in range(shape.size) if rank // shape.ranks_per_node == machine]
    assert [rank for rank, outcome in enumerate(outcomes) if outcome.code is None] == lost, texts(outcomes)
    assert sequences.AMID in outcomes[dying].errors, texts(outcomes)  # else it went off for another reason
    for rank in sorted({*range(shape.size)} - {*lost}):
        outcome = outcomes[rank]
        assert outcome.code == 0 and not outcome.left, texts(outcomes)
        (line,) = outcome.lines
        assert line["good"] >= sequences.GOOD, texts(outcomes)
        assert line["error"] in ("PeerLostError", "TransportError", "TimeoutError"), texts(outcomes)
        assert any(f"rank {rank}" in line["message"] for rank in lost), texts(outcomes)
