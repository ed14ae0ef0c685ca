"""K of a tile shared by the CTAs of a cluster, in a world of one, on target cpu (kernels_src/tile/cluster_sums.cuh)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mkernel import env
from mkernel.planner.allgather_gemm import AllGatherGemmProblem, make_plan
from mkernel.planner.tiling import CLUSTER_K, Tiling, TilingError
from mkernel.planner.topology import Topology
from tests.ops import packets_body
from tests.ops.body import Case, checked_bits
from tests.ops.test_allgather_gemm import ranks, seeds

_SMS = (4, 8, 24)


@pytest.mark.cases(
    ctas=CLUSTER_K,
    block_n=(64, 128),
    shape=((136, 8), (520, 136), (584, 392), (1032, 264), (2056, 72)),
    sms=_SMS,
    dtype=("bfloat16", "float16"),
    row_major=(True, False),
    valid=lambda ctas, shape, sms, **_: ctas <= min(sms, -(-shape[0] // 64)),
)
@pytest.mark.drawn(6)
def test_every_element_and_the_bits_of_shares_in_packets(
    request: pytest.FixtureRequest, ctas: int, block_n: int, shape: tuple[int, int], sms: int, dtype: str, row_major: bool
) -> None:
    """As many tiles as clusters, or several for each; warps of the last rows have none."""
    rows = tuple(int(rows) for rows in np.random.default_rng(request.config.getoption("--seed")).integers(1, 700, 4))
    case = Case(dtype, *shape, row_major, tiling=Tiling(block_n, cluster_k=ctas))
    in_packets = dataclasses.replace(case, tiling=Tiling(block_n, shares=ctas))
    with env.override(MKERNEL_CPU_SMS=sms):
        for seed in seeds(request):
            (found,), (same,) = (ranks(checked_bits, "1x1", one, seed, (*rows, 0, 128), seed=seed) for one in (case, in_packets))
            assert found[0] == same[0] == []
            assert found[1] == same[1]


def test_calls_that_are_skipped(request: pytest.FixtureRequest) -> None:
    with env.override(MKERNEL_CPU_SMS=2):
        for seed in seeds(request):
            assert packets_body.found_wrong("1x1", packets_body.IN_CLUSTERS, seed) is None


@pytest.mark.parametrize(
    ("world", "tiling"),
    [
        ((2, 2), Tiling(cluster_k=2)),
        ((1, 1), Tiling(192, cluster_k=2)),
        ((1, 1), Tiling(cluster=2, cluster_k=2)),
        ((1, 1), Tiling(cluster_k=2, shares=3)),
        ((1, 1), Tiling(cluster_k=2, tile_rows=2)),
        ((1, 1), Tiling(cluster_k=8)),  # three k steps
    ],
)
def test_what_cannot_be(world: tuple[int, int], tiling: Tiling) -> None:
    with pytest.raises(TilingError):
        make_plan(AllGatherGemmProblem(Topology(*world), 264, 136, "bfloat16", False), 100, 132, tiling=tiling)


def test_batch_invariant_sums_are_not_shared() -> None:
    with pytest.raises(TilingError):
        make_plan(AllGatherGemmProblem(Topology(1, 1), 264, 520, "bfloat16", False, True), 100, 132, tiling=Tiling(cluster_k=2))
