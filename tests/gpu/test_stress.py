"""The checks of run_gpu.py of attention and the MoE ops, in worlds of mk.launch: on GPUs, and as motions on target cpu."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from tests.gpu import checks, drawn
from tests.gpu.under_test import Bench
from tests.gpu.worlds import WORLDS, gpus_of
from tests.ops.body import topology

CHEAP = "moe_dispatch_gemm"  # on target cpu, and goes through all checks
CHECKS = (checks.covering, checks.back_to_back, checks.graph, checks.reproducible, checks.refused)


def every_check(world: Any, op: str, numbers: dict[str, int]) -> list[str]:
    """What was seen, a line each."""
    here = drawn.in_pieces("cuda") if world.target == "cuda" else contextlib.nullcontext()  # ranks that are threads share a planner
    with here:
        bench = Bench(world, argparse.Namespace(partials="output", **numbers))
        bench.op = op
        found = [check(bench) for check in CHECKS]
        bench.close()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("op", drawn.FAMILIES)
@pytest.mark.parametrize("world", WORLDS)
def test_on_gpus(rng: np.random.Generator, world: str, op: str) -> None:
    numbers = {"seed": int(rng.integers(1 << 30)), "families": 1, "calls": 60, "runs": 50, "replays": 60}
    options = {"heap_bytes": 512 << 20, "timeout": 20.0, "entry_timeout": 60.0}
    mk.launch(every_check, *gpus_of(world), "cuda", (op, numbers), **options)


@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.slow) for op in drawn.FAMILIES if op != CHEAP] + [CHEAP])
@pytest.mark.parametrize("world", ["1x2", pytest.param("2x2", marks=pytest.mark.slow)])
def test_on_target_cpu(rng: np.random.Generator, world: str, op: str) -> None:
    seed, shape = int(rng.integers(1 << 30)), topology(world)
    numbers = {"seed": seed, "families": 0, "calls": 3, "runs": 1, "replays": 2}
    options = {"heap_bytes": 64 << 20, "timeout": 5.0, "entry_timeout": 60.0, "seed": seed}
    with drawn.in_pieces("cpu"):
        found = mk.launch(every_check, shape.size, shape.ranks_per_node, "cpu", (op, numbers), **options)
    assert found[0][2].startswith("2 replays of 3 calls")
    assert op != CHEAP or int(found[0][4].split()[0]) >= 3, found
