"""CTAs that share K of a tile in gemm_reduce_scatter and gemm_allreduce, on target cpu. See body.py for what a rank does."""

from __future__ import annotations

import pytest

from mkernel.planner.reduce import ReduceProblem, make_plan
from tests.ops.body import back_to_back, topology
from tests.ops.test_allgather_gemm import ranks, seeds
from tests.ops.test_reductions import PACKETS, case_of, check, shared
from tests.ops.test_reductions import _calls as calls_of
from tests.ops.test_reductions import _same as same_bits


# K of a share is one step, several, or has an end of its own; a tile's slices have as many columns as an exchange packet, fewer, or none.
@pytest.mark.cases(
    world=("1x2", "1x3", "1x4", "1x8"),
    how=("one_shot", *PACKETS),
    shape=((520, 136), (1032, 72), (2056, 8)),
    block_n=(64, 128),
    shares=(2, 3, 5, 8, 20),
    sms=(1, 4),
    dtype=("bfloat16", "float16"),
    row_major=(True, False),
    valid=lambda shape, shares, **_: shares <= -(-shape[0] // 64),
)
@pytest.mark.drawn(6)
def test_shares_of_k(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    world: str,
    how: str,
    shape: tuple[int, int],
    block_n: int,
    shares: int,
    sms: int,
    dtype: str,
    row_major: bool,
) -> None:
    """As many CTAs as share K, or one that does all shares and then all sums."""
    monkeypatch.setenv("MKERNEL_CPU_SMS", str(sms))
    case, rows = shared(case_of(how, dtype, *shape, row_major), block_n, shares), (1, 7, 17, 129)
    problem = ReduceProblem(case.op, topology(world), case.n, case.k, dtype, row_major, "output", case.algorithm)
    assert make_plan(problem, rows[-1], sms, tiling=case.tiling).shares == shares
    for seed in seeds(request):
        check(ranks(back_to_back, world, case, seed, 0.0, rows, seed=seed))


@pytest.mark.parametrize("how", [pytest.param("one_shot", marks=pytest.mark.slow), *PACKETS])
@pytest.mark.drawn(1)
def test_a_search_of_schedules_of_shares(request: pytest.FixtureRequest, how: str) -> None:
    """Ranks and CTAs come in any order: the same bits, and nobody waits for ever."""
    first, count = request.config.getoption("--seed"), 60 if request.config.getoption("--full") else 6
    case = shared(case_of(how, "bfloat16", 264, 136), 64, 3)
    same_bits(ranks(calls_of, "1x3", case, first, 0.0, (43, 7), 2, seed=seed) for seed in range(first, first + count))
