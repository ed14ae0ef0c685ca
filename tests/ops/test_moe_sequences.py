"""Random sequences of MoE ops, GEMM ops and attention on overlapping areas: every element; of sums in integers that float16 holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.errors import CompileError
from mkernel.transport import emulated
from tests.ops.body import topology
from tests.ops.planted_bug import Bug
from tests.ops.sequence_body import draw, program, small_plans

CALLS = 10


def found_wrong(world: str, rng: np.random.Generator) -> str | None:
    shape, seed = topology(world), int(rng.integers(1 << 30))
    steps = draw(rng, shape.size, CALLS)
    faults = dataclasses.replace(emulated.Faults(), seed=seed, delay_us=float(rng.integers(100)), reorder_us=20.0, ack_us=20.0)
    options = {"seed": seed, "heap_bytes": 64 << 20, "timeout": 5.0, "entry_timeout": 60.0, "specialize": "none"}
    engine = {"MKERNEL_EMULATED_ENGINE": "sms", "MKERNEL_EMULATED_REORDER_US": 20.0, "MKERNEL_CPU_SEED": seed}
    if shape.num_nodes == 1 or rng.random() < 0.6:
        engine = {"MKERNEL_EMULATED_ENGINE": "host"}
    machine = env.override(MKERNEL_CPU_SMS=int(rng.choice([4, 6, 8])), MKERNEL_PLANNER=str(rng.choice(["rules", "model"])), **engine)
    with machine, mock.patch.object(emulated, "Faults", lambda: faults), small_plans():
        found = mk.launch(program, shape.size, shape.ranks_per_node, "cpu", (steps,), **options)
    return None if not any(found) else f"{found}: {steps}"


@pytest.mark.parametrize("number", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 12))])
@pytest.mark.parametrize("world", ["1x2", "2x2", pytest.param("3x2", marks=pytest.mark.slow)])
def test_sequences(rng: np.random.Generator, world: str, number: int) -> None:
    assert found_wrong(world, rng) is None


_ENTERS = "(const Call& call, uint32_t i) const { return wait_entered(call, (call.world.rank + 1 + i) % call.world.size); }"
_REVERSAL = Bug(
    "node mates are not waited for",
    "comm/sync.cuh",
    _ENTERS,
    "(const Call& call, uint32_t i) const {\n"
    "    const uint32_t peer = (call.world.rank + 1 + i) % call.world.size;\n"
    "    return peer / call.world.ranks_per_node == call.world.node || wait_entered(call, peer);\n"
    "  }",
)


@pytest.mark.slow
def test_a_planted_reversal_is_found(tmp_path: Path) -> None:
    """The same seeds in every run; two of eight find it."""
    with _REVERSAL.in_force(tmp_path / "kernels_src"):
        for seed in range(24):
            try:
                if found_wrong("1x2", np.random.default_rng(seed)) is not None:
                    return
            except CompileError:
                raise
            except mk.Error:
                return
    pytest.fail("no sequence fails")
