"""Pairs of CTAs in the reductions (kernels_src/reduce, tile/pair.cuh): every element right, the bits of CTAs alone, and failures end."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.errors import ArgumentError
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER
from mkernel.planner.tiling import Tiling
from tests.ops.body import WORLDS, Case, checked_bits, random, topology
from tests.ops.test_allgather_gemm import ranks, seeds

_SMS = 8


@pytest.fixture(autouse=True)
def _sms() -> Any:
    with env.override(MKERNEL_CPU_SMS=_SMS):
        yield


def drawn_shape(rng: np.random.Generator, block_n: int) -> tuple[int, int]:
    """K and N of a rank: few steps of k, up to three columns of tiles, aligned or not."""
    k, n = 8 * rng.integers((1, 1), (25, 3 * block_n // 8))
    return int(k), int(n)


def drawn_rows(rng: np.random.Generator) -> tuple[int, ...]:
    """Rows of an owner, or, of an all-reduce, of all: tiles in odd and even number, a part of one, none."""
    odd, even = ((3, 2), (3, 4), (5, 2))[rng.integers(3)]
    return (*(int(128 * tiles - rng.integers(0, 127)) for tiles in (odd, even, 1)), 0)


def _valid(world: str, op: str, clusters: tuple[int, int], split: str, **_: Any) -> bool:
    """Not between nodes, nor where owners have runs of tiles, unless pairs in M; and splits of pairs are none of fours."""
    at = topology(world)
    own_rows = at.size == 1 or (op == REDUCE_SCATTER and at.num_nodes == 1 and 1 in clusters)
    return (own_rows or clusters == (2, 1)) and (split == "default" or max(clusters) == 2 > min(clusters))


@pytest.mark.cases(
    world=WORLDS,
    op=(REDUCE_SCATTER, ALLREDUCE),
    block_n=(64, 128, 192, 256),
    clusters=((2, 1), (1, 2), (2, 2), (1, 4), (4, 1)),
    split=("default", "pairs", "few pairs"),
    partials=("output", "float32"),
    dtype=("bfloat16", "float16"),
    row_major=(True, False),
    invariant=(False, True),
    valid=_valid,
)
@pytest.mark.drawn(6)
def test_every_element_and_the_bits_of_ctas_alone(
    request: pytest.FixtureRequest,
    world: str,
    op: str,
    block_n: int,
    clusters: tuple[int, int],
    split: str,
    partials: str,
    dtype: str,
    row_major: bool,
    invariant: bool,
) -> None:
    for seed in seeds(request):
        rng = np.random.default_rng([seed, 21])
        shape, rows = drawn_shape(rng, block_n), drawn_rows(rng)
        algorithm = "two_shot" if op == ALLREDUCE else None
        case = Case(
            dtype, *shape, row_major, split, op, partials, algorithm, Tiling(block_n, None, None, clusters[0], 0, clusters[1]), invariant
        )
        # With CTAs that pull, so that values do not travel in packets, which add in another order.
        alone = dataclasses.replace(case, tiling=Tiling(block_n, 1 if op == REDUCE_SCATTER else None, None, 1), split="pairs")
        of_pairs, of_ctas = (ranks(checked_bits, world, one, seed, rows, seed=seed, batch_invariant=invariant) for one in (case, alone))
        for rank, ((wrong, bits), (_, same)) in enumerate(zip(of_pairs, of_ctas, strict=True)):
            assert wrong == [], f"rank {rank}"
            if op == REDUCE_SCATTER or invariant:  # in an all-reduce, whose owners have whole pairs, else others may begin a sum
                assert bits == same, f"rank {rank}"
            else:
                assert bits == of_pairs[0][1], f"rank {rank} has other bits than rank 0"


@pytest.mark.cases(
    world=("1x2", "1x3", "1x4"),
    how=(REDUCE_SCATTER, "one_shot", "two_shot"),
    block_n=(64, 128),
    clusters=((2, 1), (1, 2), (2, 2), (1, 4), (4, 1)),
    dtype=("bfloat16", "float16"),
    row_major=(True, False),
    invariant=(False, True),
)
@pytest.mark.drawn(4)
def test_packets_of_clusters_and_of_ctas_alone_have_the_same_bits(
    request: pytest.FixtureRequest,
    world: str,
    how: str,
    block_n: int,
    clusters: tuple[int, int],
    dtype: str,
    row_major: bool,
    invariant: bool,
) -> None:
    for seed in seeds(request):
        rng = np.random.default_rng([seed, 22])
        shape, rows = drawn_shape(rng, block_n), drawn_rows(rng)
        op, algorithm = (how, None) if how == REDUCE_SCATTER else (ALLREDUCE, how)
        tiling = Tiling(block_n, None, 1, clusters[0], 1, clusters[1])
        case = Case(dtype, *shape, row_major, "default", op, "output", algorithm, tiling, invariant)
        alone = dataclasses.replace(case, tiling=Tiling(block_n, None, 1, 1, 1))
        of_clusters, of_ctas = (ranks(checked_bits, world, one, seed, rows, seed=seed, batch_invariant=invariant) for one in (case, alone))
        for rank, ((wrong, bits), (_, same)) in enumerate(zip(of_clusters, of_ctas, strict=True)):
            assert wrong == [], f"rank {rank}"
            assert bits == same, f"rank {rank}"


def test_what_does_not_go_with_pairs() -> None:
    def asked(world: Any, split: mk.Split | None, algorithm: str, named: str) -> str:
        a, b = random((8, 64), "float16", np.random.default_rng(0)), random((64, 8), "float16", np.random.default_rng(1))
        with pytest.raises(ArgumentError, match=named) as caught:
            mk.plan(ALLREDUCE, a, b, world=world, algorithm=algorithm, tiling={"cluster": 2, "packets": 0}, split=split)
        return str(caught.value)

    assert "even number" in ranks(asked, "1x2", mk.Split(intra_comm=3), "two_shot", "split", seed=1)[0]
    assert "no clusters of CTAs" in ranks(asked, "1x2", None, "one_shot", "tiling", seed=1)[0]
