"""A trace of all ranks finds the one that is slower than the others by a tenth."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mkernel as mk
from mkernel.abi import FlagKind, TraceKind

CALLS = 36  # of 12, a call in which another rank happens to lose more decided for 3 of 300 seeds
_TENTH = 10


def traced(world: Any, seed: int, slow: int, how: str) -> mk.Trace:
    """Calls in which one rank comes late by a tenth of a call, or rests a little after every copy, a tenth of a call in all."""
    rng = np.random.default_rng([seed, world.rank])
    a = rng.standard_normal((512 // world.size, 256), np.float32).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((256, 256), np.float32).astype(ml_dtypes.bfloat16)
    ranks = world.backend.thread_ranks
    mk.allgather_gemm(a, b)
    world.barrier()
    before = ranks.turns
    mk.allgather_gemm(a, b)
    world.barrier()
    tenth = (ranks.turns - before) // _TENTH
    with mk.trace(world) as trace:
        for _ in range(CALLS):
            if world.rank == slow:
                if how == "late":
                    ranks.hold(slow, tenth)
                else:
                    ranks.hold(slow, max(tenth // 10, 1), 1)  # a CTA issues some ten copies
            mk.allgather_gemm(a, b)
            world.barrier()
    return trace


def least_slack(traces: mk.Traces) -> tuple[int, int]:
    """Least ns from where a rank began to send a chunk to where another had it, in one allgather_gemm on one node; and the sender.

    It is negative by the error of the clocks at most.
    """
    sent = {}
    for trace in traces.traces:
        for event in trace.events[trace.events["kind"] == TraceKind.send]:
            sent[trace.rank, int(event["argument"])] = trace.start_ns + int(event["begin"])
    slack = []
    for trace in traces.traces:
        waits = trace.events[trace.events["kind"] == TraceKind.flag]
        taken_over = {(int(wait["cta"]), int(wait["begin"])) for wait in waits}  # one that ends there was cut: its flag came later
        for wait in waits[waits["flag"] == FlagKind.chunk]:
            if (int(wait["cta"]), int(wait["end"])) not in taken_over:
                sender = int(wait["peer"])
                slack.append((trace.start_ns + int(wait["end"]) - sent[sender, int(wait["argument"])], sender))
    assert slack, "nobody waited for anything"
    return min(slack)


def one_call(world: Any, seed: int) -> mk.Trace:
    """The trace of one call, which one rank makes late."""
    rng = np.random.default_rng([seed, world.rank])
    a = rng.standard_normal((512 // world.size, 256), np.float32).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((256, 256), np.float32).astype(ml_dtypes.bfloat16)
    with mk.trace(world) as trace:
        if world.rank == 1:
            world.backend.thread_ranks.hold(1, 1 << 40)
        mk.allgather_gemm(a, b)
    return trace


def test_nobody_has_waited_for_what_was_not_sent_yet(rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**31))
    traces = mk.Traces(mk.launch(one_call, ranks=4, target="cpu", args=(seed,), seed=seed))
    slack, sender = least_slack(traces)
    assert slack >= 0
    traces.traces[sender].start_ns += 1 << 40
    assert least_slack(traces)[0] < 0, "the check sees a clock that is wrong"


@pytest.mark.parametrize(
    ("how", "per_node"),
    [("late", 4), *(pytest.param(how, per_node, marks=pytest.mark.slow) for how, per_node in (("slow", 4), ("slow", 2)))],
)
def test_the_slow_rank_is_named(rng: np.random.Generator, how: str, per_node: int) -> None:
    slow, seed = int(rng.integers(4)), int(rng.integers(2**31))
    found = mk.launch(traced, ranks=4, ranks_per_node=per_node, target="cpu", args=(seed, slow, how), seed=seed)
    traces = mk.Traces(found)
    assert traces.culprit() == slow, traces.summary()
    assert traces.clock_error_ns == 0, "one scheduler's time"
    assert f"most was lost waiting for rank {slow}" in traces.summary()
