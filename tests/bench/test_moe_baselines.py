"""The steps that the MoE ops are compared with, with NumPy in place of torch and all ranks in one process."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from mkernel.bench.moe_baselines import MoeBaseline, Route, moe_baseline
from mkernel.bench.routings import KINDS, draw, tokens_of

RANKS, EXPERTS, TOPK, H, F = 3, 4, 3, 5, 7  # experts of each rank


def grouped(rows: Any, w: Any, offs: Any) -> Any:
    parts = np.split(rows, offs[:-1])
    return np.concatenate([part @ matrix for part, matrix in zip(parts, w, strict=True)])


TORCH = types.SimpleNamespace(_grouped_mm=grouped, einsum=np.einsum)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_go_to_their_experts_and_back(rng: np.random.Generator, kind: str) -> None:
    routed = draw(kind, tokens_of(31, RANKS), RANKS * EXPERTS, TOPK, 3, 1)
    routes = [Route.of(routed, EXPERTS, rank) for rank in range(RANKS)]
    x = [rng.standard_normal((len(of_rank.ids), H)) for of_rank in routed]
    w, down = rng.standard_normal((RANKS, EXPERTS, H, F)), rng.standard_normal((RANKS, EXPERTS, F, H))

    def exchanging(rank: int, everyone: list[Any], splits: list[list[int]]) -> Any:
        """An all-to-all, of which every rank's rows are known."""

        def exchange(rows: Any, sent: list[int], received: list[int]) -> Any:
            np.testing.assert_array_equal(rows, everyone[rank])
            assert sent == splits[rank]
            parts = [np.split(everyone[other], np.cumsum(splits[other])[:-1])[rank] for other in range(RANKS)]
            assert [len(part) for part in parts] == received
            return np.concatenate(parts)

        return exchange

    packed = [x[rank][routes[rank].tokens] for rank in range(RANKS)]
    rows = [
        MoeBaseline(TORCH, exchanging(rank, packed, [route.sent for route in routes])).dispatch(routes[rank], x[rank], w[rank])
        for rank in range(RANKS)
    ]
    made = [MoeBaseline(TORCH, None).multiply(routes[rank], rows[rank], down[rank]) for rank in range(RANKS)]  # type: ignore[arg-type]
    back = [made[rank][routes[rank].place] for rank in range(RANKS)]
    for rank, of_rank in enumerate(routed):
        steps = MoeBaseline(TORCH, exchanging(rank, back, [route.received for route in routes]))
        y = steps.combine(routes[rank], made[rank], of_rank.weights)
        expected = np.zeros((len(of_rank.ids), H))
        for token, (ids, weights) in enumerate(zip(of_rank.ids, of_rank.weights, strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                owner, local = divmod(int(expert), EXPERTS)
                expected[token] += weight * (x[rank][token] @ w[owner, local] @ down[owner, local])
        np.testing.assert_allclose(y, expected, atol=1e-9)


def test_rows_have_the_order_of_a_dispatch() -> None:
    """By expert, then source rank, then token: as ``d.source`` has them."""
    from mkernel.planner.topology import Topology
    from mkernel.tools.routing import reference_routing

    routed = draw("zipf", tokens_of(31, RANKS), RANKS * EXPERTS, TOPK, 3, 1)
    known = reference_routing([of_rank.ids for of_rank in routed], Topology(RANKS, RANKS), RANKS * EXPERTS, 16, 100)
    routes = [Route.of(routed, EXPERTS, rank) for rank in range(RANKS)]
    for rank, route in enumerate(routes):
        arrived = [
            (source, int(token))
            for source in range(RANKS)
            for token in np.split(routes[source].tokens, np.cumsum(routes[source].sent)[:-1])[rank]
        ]
        ordered = [arrived[i] for i in route.order]
        assert ordered == [(int(source), int(token)) for source, token, _ in known[rank].source[: len(ordered)]]
        assert route.ends.tolist() == known[rank].expert_offsets[1:].tolist()


def test_where_there_is_no_torch_there_is_no_baseline() -> None:
    assert moe_baseline(object(), lambda steps, torch: pytest.fail("not called")) == {}
