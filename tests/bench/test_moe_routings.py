"""Routings of the benchmarks: every rank draws the same, tokens choose different experts, and sizes are read as they are written."""

from __future__ import annotations

import numpy as np
import pytest

from mkernel.bench.routings import KINDS, MODELS, Size, draw, drawn_sizes, expand, parse, rows_of, tokens_of
from mkernel.errors import ArgumentError
from mkernel.planner.topology import Topology

FOUR = Topology(4, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("experts", "topk"), [(4, 1), (4, 4), (8, 2), (256, 8), (17, 16)])
def test_tokens_choose_different_experts_with_weights_of_sum_one(rng: np.random.Generator, kind: str, experts: int, topk: int) -> None:
    tokens = [0, *(int(n) for n in rng.integers(1, 200, 3))]
    routed = draw(kind, tokens, experts, topk, int(rng.integers(1 << 30)), 3)
    for count, of_rank in zip(tokens, routed, strict=True):
        assert of_rank.ids.shape == of_rank.weights.shape == (count, topk)
        assert (of_rank.ids.dtype, of_rank.weights.dtype) == (np.int32, np.float32)
        assert not count or (of_rank.ids.min() >= 0 and of_rank.ids.max() < experts)
        assert all(len(set(row)) == topk for row in of_rank.ids.tolist())
        assert (of_rank.weights > 0).all()
        np.testing.assert_allclose(of_rank.weights.sum(axis=1, dtype=np.float64), 1.0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_arguments_give_the_same_routing_and_others_another(kind: str) -> None:
    def bits(seed: int, call: int) -> list[bytes]:
        return [part.tobytes() for of_rank in draw(kind, [30, 31], 16, 3, seed, call) for part in (of_rank.ids, of_rank.weights)]

    assert bits(1, 2) == bits(1, 2)
    different = [bits(1, 2), bits(1, 3), bits(2, 2)]
    assert all(one[i] != other[i] for i in range(4) for one in different for other in different if one is not other)
    assert bits(1, 2)[:2] != bits(1, 2)[2:], "ranks differ"


def shares(kind: str, seed: int, call: int) -> np.ndarray:
    """How the experts' shares of 40000 choices are, the most popular one first."""
    rows = rows_of(draw(kind, [5000] * 4, 64, 2, seed, call), 64).ravel()
    assert rows.sum() == 40_000
    return np.sort(rows)[::-1] / 40_000


def test_how_popular_experts_are() -> None:
    uniform, zipf, hot = (shares(kind, 7, 0) for kind in ("uniform", "zipf", "hot"))
    assert uniform[0] < 1.3 / 64
    assert uniform[-1] > 0.7 / 64
    assert hot[0] == 0.5, "the first choice of every token"
    assert hot[1] < 1.4 * 0.5 / 63
    assert 0.1 < zipf[0] < 0.4
    assert zipf[0] > 1.4 * zipf[1] > 1.9 * zipf[3]


def test_a_mixture_changes_from_call_to_call_and_the_others_keep_their_experts() -> None:
    found = {round(float(shares("mixture", 3, call)[0]), 1) for call in range(12)}
    assert len(found) > 1, "uniform in some, Zipf's in others"
    for kind, same in (("hot", True), ("zipf", True)):
        first = {int(rows_of(draw(kind, [2000] * 4, 64, 2, 5, call), 64).argmax()) for call in range(4)}
        assert (len(first) == 1) is same


def test_tokens_are_split_evenly_but_for_one() -> None:
    assert tokens_of(10, 4) == [3, 3, 2, 2]
    assert tokens_of(3, 4) == [1, 1, 1, 0]
    for tokens in (0, 4, 65535, 65536):
        assert sum(tokens_of(tokens, 4)) == tokens


def test_rows_go_to_the_rank_that_has_the_expert() -> None:
    routed = draw("uniform", [50, 60], 6, 2, 1, 0)
    rows = rows_of(routed, 6)
    assert rows.shape == (2, 3)
    for expert in range(6):
        assert rows[expert // 3, expert % 3] == sum(int((of_rank.ids == expert).sum()) for of_rank in routed)


def test_sizes_by_name_and_by_numbers() -> None:
    assert parse("8192", FOUR) == Size(8192, MODELS["deepseek-v3"], "uniform")
    assert parse("64:Qwen3-235b", FOUR) == Size(64, MODELS["qwen3-235b"], "uniform")
    assert parse("64:mixtral-8x7b:zipf", FOUR) == Size(64, MODELS["mixtral-8x7b"], "zipf")
    assert parse("7x64x72x8x3:hot", FOUR) == parse(str(parse("7x64x72x8x3:hot", FOUR)), FOUR)
    assert parse("7x64x72x8x3", FOUR).kind == "uniform"
    for text in (
        "x",
        "8:gpt",
        "8:mixtral-8x7b:cold",
        "8x8",
        "0",
        "8x60x64x8x2:hot",
        "8x64x64x6x2:hot",
        "8x64x64x8x9:hot",
        "8x64x64x8x2:a:b",
    ):
        with pytest.raises(ArgumentError, match="--shapes"):
            parse(text, FOUR)


@pytest.mark.parametrize("matrices", [1, 3])
@pytest.mark.parametrize("topology", [Topology(1, 1), FOUR, Topology(6, 2)])
def test_random_sizes_fit(topology: Topology, matrices: int) -> None:
    sizes = expand("random:60:7", topology, matrices)
    assert sizes == tuple(drawn_sizes(60, 7, topology, matrices)) != tuple(drawn_sizes(60, 8, topology, matrices))
    drawn = [parse(text, topology) for text in sizes]
    assert {size.kind for size in drawn} == {"uniform", "zipf", "hot"}
    for size in drawn:
        model, experts = size.model, size.model.experts // topology.size
        assert experts * model.hidden * model.inner * matrices * 2 <= 16 << 30
        assert size.tokens * min(model.topk, experts) * max(model.hidden, model.inner) * 2 <= 4 << 30
        assert 4 <= size.tokens <= 65536
        assert 1016 <= model.hidden <= 8192
        assert 1 <= model.topk <= 8
    assert expand("8192", topology, matrices) == ("8192",)
    for text in ("random:60", "random:0:1", "random:x:1"):
        with pytest.raises(ArgumentError, match="random:N:SEED"):
            expand(text, topology, matrices)
