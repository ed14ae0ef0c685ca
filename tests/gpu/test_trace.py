"""Traces of several GPUs: their clocks agree, the slow rank is named, and recording costs little."""

from __future__ import annotations

import statistics
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mkernel as mk
from mkernel.runtime.cuda.gpus import available
from tests.ops.test_blame import least_slack

pytestmark = pytest.mark.gpu

ROWS, N, K = 8192, 2048, 8192
_SPIN = r"""
extern "C" __global__ void spin(long long ns) {
  long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < ns);
}
"""


def operands(world: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(world.rank)
    a = world.xp.asarray(rng.standard_normal((ROWS // world.size, K), np.float32).astype(ml_dtypes.bfloat16))
    return a, world.xp.asarray(rng.standard_normal((K, N), np.float32).astype(ml_dtypes.bfloat16))


def milliseconds(world: Any, call: Any, samples: int = 9) -> list[float]:
    return [world.backend.milliseconds(world.backend.stream(None), [call] * 12, 2) / 10 for _ in range(samples)]


def traced(world: Any, slow: int) -> tuple[mk.Trace, mk.Trace, float, float]:
    """A call in step; calls of which one rank makes each later by a tenth; ms of a call without and with a trace."""
    a, b = operands(world)
    out = mk.allgather_gemm(a, b)

    def call() -> None:
        mk.allgather_gemm(a, b, out=out)

    plain = statistics.median(milliseconds(world, call))
    spin = world.xp.RawKernel(_SPIN, "spin")
    spin((1,), (1,), (np.int64(0),))
    world.barrier()
    with mk.trace(world) as one:
        call()
    with mk.trace(world, capacity=1 << 14) as many:
        for _ in range(20):
            if world.rank == slow:
                spin((1,), (1,), (np.int64(plain * 1e5),))
            call()
    with mk.trace(world, capacity=1 << 16):
        recorded = statistics.median(milliseconds(world, call))
    return one, many, plain, recorded


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_slow_gpu_is_named(ranks: int, rng: np.random.Generator) -> None:
    if len(available()) < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    slow = int(rng.integers(ranks))
    try:
        found = mk.launch(traced, ranks, args=(slow,), heap_bytes=1 << 30)
    finally:
        mk.shutdown()
    one, many = mk.Traces(trace for trace, *_ in found), mk.Traces(trace for _, trace, *_ in found)
    print(many.summary())
    assert many.culprit() == slow
    assert 0 < one.clock_error_ns < 50_000
    assert least_slack(one)[0] >= -one.clock_error_ns
    for _, _, plain, recorded in found:
        print(f"{plain:.4f} ms, {recorded:.4f} ms with a trace")
        assert recorded <= 1.03 * plain
