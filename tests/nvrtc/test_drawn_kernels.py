"""Kernels of any op, world and options, as somebody may ask for them, compiled for sm_90a: none needs local memory."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")

from mkernel.planner import allgather_gemm, choice, moe_combine, moe_dispatch_gemm, moe_gemm_combine, ring_attention, ring_varlen
from mkernel.planner.allgather_gemm import AllGatherGemmProblem
from mkernel.planner.moe_combine import MoeCombineProblem
from mkernel.planner.moe_dispatch_gemm import MoeDispatchGemmProblem
from mkernel.planner.moe_gemm_combine import MoeGemmCombineProblem
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReduceProblem
from mkernel.planner.ring_problem import LAYOUTS, RingAttentionProblem, Sizes
from mkernel.planner.split import Split, SplitError
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.planner.topology import Topology
from tests.nvrtc.test_kernels import fits

WORLDS = (  # nodes, ranks of each
    *((1, 1), (1, 2), (1, 4), (1, 8)),
    *((2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 4), (4, 8), (8, 8)),
)
OPS = (allgather_gemm.OP, REDUCE_SCATTER, ALLREDUCE, "moe_dispatch_gemm", "moe_combine", "moe_gemm_combine", "ring_attention", "varlen")
_SMS = 132
_SECONDS = 12.0  # of compilations, when there has been one of each op


def draw_tiling(rng: np.random.Generator) -> Tiling:
    """Any that can be written."""
    drawn = {
        "block_n": (64, 80, 128, 176, 192, 240, 256),
        "span": (1, 2, 4, 8),
        "shares": (1, 1, 2, 3, 5, 8),
        "cluster": (1, 2, 4),
        "packets": (0, 1, 1, 2),
        "cluster_n": (1, 2, 4),
        "tile_rows": (1, 2, 5, 9),
        "cluster_k": (1, 2, 3, 4, 8),
        "tiles_at_once": (1, 2),
        "block_m": (48, 72, 136, 144, 192, 248),
    }
    while True:
        with contextlib.suppress(ValueError):
            return Tiling.parse({name: int(rng.choice(values)) for name, values in drawn.items() if rng.random() < 0.4})


def perhaps_tiled(rng: np.random.Generator, split: Split | None, make: Callable[..., Any]) -> Any:
    """The plan that is chosen, or of every second one with a drawn tiling that it can have."""
    for _ in range(30 if rng.random() < 0.5 else 0):
        with contextlib.suppress(TilingError, SplitError):
            return make(split, tiling=draw_tiling(rng))
    return make(split)


def draw_plan(rng: np.random.Generator, op: str) -> Any:
    """A plan of numbers that its kernel depends on, and of others that it should not."""
    nodes, ranks = WORLDS[rng.integers(len(WORLDS))]
    topology, dtype = Topology(nodes * ranks, ranks), str(rng.choice(("bfloat16", "float16")))
    n, k = (8 * int(2 ** rng.uniform(3, 11)) for _ in range(2))
    one, two, three = (bool(one) for one in rng.integers(2, size=3))
    rows, specialize = int(2 ** rng.uniform(0, 13)), str(rng.choice(("default", "none", "all")))
    split = Split(compute=int(rng.integers(1, 100))) if rng.random() < 0.3 else None
    if op == allgather_gemm.OP:
        gather = AllGatherGemmProblem(topology, n, k, dtype, one, canonical=two)
        return perhaps_tiled(rng, split, functools.partial(choice.plan_allgather_gemm, gather, rows, _SMS, specialize=specialize))
    if op in (REDUCE_SCATTER, ALLREDUCE):
        partials = "float32" if two and not three else "output"
        summed = ReduceProblem(op, topology, n, k, dtype, one, partials, canonical=three)
        return perhaps_tiled(rng, split, functools.partial(choice.plan_reduce, summed, rows, _SMS, specialize=specialize))
    topk, experts, tokens = int(rng.integers(1, 17)), int(2 ** rng.uniform(0, 6)), int(2 ** rng.uniform(2, 12))
    if op == "moe_dispatch_gemm":
        alignment, clamp = int(rng.choice((1, 8, 64))), float(rng.choice((0.0, 7.0)))
        dispatched = MoeDispatchGemmProblem(
            topology, n, k, dtype, one, experts, topk, tokens, tokens * topk + 64 * experts, alignment, two, three, clamp
        )
        return moe_dispatch_gemm.make_plan(dispatched, _SMS)
    combined = MoeCombineProblem(topology, n, dtype, topk, experts, tokens, tokens * topk, one, two)
    if op == "moe_combine":
        return moe_combine.make_plan(combined, 0, _SMS)
    if op == "moe_gemm_combine":
        return moe_gemm_combine.make_plan(MoeGemmCombineProblem(combined, k, three), 0, _SMS)
    heads = int(2 ** rng.integers(0, 4))
    layout = str(rng.choice(LAYOUTS)) if one else "contiguous"
    attention = RingAttentionProblem(
        topology, heads * int(2 ** rng.integers(0, 4)), heads, int(rng.choice((64, 128))), dtype, one, layout, 0.1, op == "varlen", two
    )
    if op == "varlen":
        return ring_varlen.make_plan(attention, rows, _SMS)
    return ring_attention.make_plan(attention, Sizes(int(2 ** rng.integers(0, 4)), rows).code, _SMS)


@pytest.mark.parametrize("number", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 12))])
def test_no_kernel_needs_local_memory(rng: np.random.Generator, caplog: pytest.LogCaptureFixture, number: int) -> None:
    """Two of each op, or one where these take long."""
    begin, seen = time.monotonic(), set()
    for op in OPS * 2:
        plan = draw_plan(rng, op)
        if plan.spec not in seen:
            seen.add(plan.spec)
            print(plan.describe())
            fits(caplog, plan.spec)
        if len(seen) >= len(OPS) and time.monotonic() - begin > _SECONDS:
            break


def test_kernels_that_needed_local_memory(caplog: pytest.LogCaptureFixture) -> None:
    """One word of the warp that loads; the epoch, in uniform registers until consumers had none left for it; 16 rows with weights.

    And one k step, compiled in, which made a tile straight code with no registers for wgmma.
    """
    attention = RingAttentionProblem(Topology(4, 1), 8, 2, 64, "bfloat16", False, "contiguous", 0.1, packed=True)
    fits(caplog, ring_varlen.make_plan(attention, 4096, _SMS).spec)
    dispatch = MoeDispatchGemmProblem(Topology(8, 4), 144, 7200, "bfloat16", True, 24, 9, 461, 5685, 8, False, True, 7.0)
    fits(caplog, moe_dispatch_gemm.make_plan(dispatch, _SMS).spec)
    combined = MoeCombineProblem(Topology(32, 8), 312, "float16", 16, 2, 387, 6192, True)
    fits(caplog, moe_gemm_combine.make_plan(MoeGemmCombineProblem(combined, 8680, False), 0, _SMS).spec)
    one_step = MoeCombineProblem(Topology(4, 1), 192, "bfloat16", 8, 14, 24, 192, True)
    fits(caplog, moe_gemm_combine.make_plan(MoeGemmCombineProblem(one_step, 64, True), 0, _SMS).spec)
