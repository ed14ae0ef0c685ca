"""Gradients of the MoE ops: every element against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make test-torch`")

import mkernel as mk
import mkernel.torch as mkt
from tests.with_torch.matrices import place_of

WORLD: dict[str, Any] = {"target": "cpu", "heap_bytes": 1 << 25, "specialize": "none"}
H, F, TOPK, EXPERTS = 32, 24, 3, 3  # EXPERTS: of a rank
MOST = 48  # tokens of a rank


def draw(seed: int, ranks: int, tokens: list[int], transposed: bool) -> dict[str, list[Any]]:
    """What each rank has: tokens, their experts and weights, weights of experts, what is added, and the gradient of the result."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, np.float32)).bfloat16()

    def experts(inner: int, columns: int) -> torch.Tensor:
        scale = inner**-0.5
        return (normal(EXPERTS, columns, inner) * scale).transpose(1, 2) if transposed else normal(EXPERTS, inner, columns) * scale

    def ids(count: int) -> torch.Tensor:
        chosen = np.array([rng.permutation(EXPERTS * ranks)[:TOPK] for _ in range(count)]).reshape(count, TOPK)
        return torch.from_numpy(np.where(rng.random((count, TOPK)) < 0.1, -1, chosen).astype(np.int32))

    return {
        "x": [normal(count, H) for count in tokens],
        "ids": [ids(count) for count in tokens],
        "weights": [torch.from_numpy(rng.random((count, TOPK), np.float32)) for count in tokens],
        "up": [experts(H, 2 * F) for _ in range(ranks)],
        "down": [experts(F, H) for _ in range(ranks)],
        "add": [normal(count, H) for count in tokens],
        "gradient": [normal(count, H) for count in tokens],
    }


def reference(given: dict[str, list[Any]], rounded: bool) -> dict[str, list[torch.Tensor]]:
    """The layer on one rank, in float64, and its gradients; ``rounded``: with the roundings to bfloat16 between its products."""

    def round_(t: torch.Tensor) -> torch.Tensor:
        return t + (t.bfloat16().double() - t).detach() if rounded else t

    leaves = {name: [t.double().detach().requires_grad_() for t in given[name]] for name in ("x", "weights", "up", "down", "add")}
    up, down = torch.cat(leaves["up"]), torch.cat(leaves["down"])
    results = []
    for x, ids, weights, add, gradient in zip(leaves["x"], given["ids"], leaves["weights"], leaves["add"], given["gradient"], strict=True):
        y = add
        for choice in range(TOPK):
            for expert in range(len(up)):
                at = (ids[:, choice] == expert).nonzero()[:, 0]
                gate, lin = round_(x[at] @ up[expert]).chunk(2, 1)
                row = round_(round_(torch.nn.functional.silu(gate) * lin) @ down[expert])
                y = y.index_add(0, at, row * weights[at, choice, None])
        y.backward(gradient.double(), retain_graph=True)
        results.append(y.detach())
    return {"y": results, **{name: [t.grad for t in kept] for name, kept in leaves.items()}}


def _layer(world: Any, given: dict[str, list[Any]], expected: dict[str, list[Any]]) -> dict[str, float]:
    place = place_of(world)
    mine = {name: values[world.rank].to(place) for name, values in given.items()}
    leaves = {name: mine[name].detach().clone(memory_format=torch.preserve_format).requires_grad_() for name in expected if name != "y"}
    y = mkt.moe_layer(leaves["x"], mine["ids"], leaves["weights"], leaves["up"], leaves["down"], add=leaves["add"], max_tokens=MOST)
    with torch.no_grad():
        plain = mkt.moe_layer(mine["x"], mine["ids"], mine["weights"], mine["up"], mine["down"], add=mine["add"], max_tokens=MOST)
    y.backward(mine["gradient"])
    found = {"y": y, "plain": plain, **{name: leaf.grad for name, leaf in leaves.items()}}
    assert leaves["up"].grad.stride() == leaves["up"].stride()
    return {name: _error(value, expected["y" if name == "plain" else name][world.rank]) for name, value in found.items()}


def _error(made: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error over the largest value, in units of bfloat16."""
    if not made.numel():
        return 0.0
    return float((made.detach().cpu().double() - exact).abs().max() / exact.abs().max()) * 256


@pytest.mark.parametrize("transposed", [False, True], ids=["row-major", "transposed"])
@pytest.mark.parametrize(("ranks", "per_node"), [(2, None), (4, 2)])
def test_layer(ranks: int, per_node: int | None, transposed: bool, rng: np.random.Generator) -> None:
    tokens = [int(n) for n in rng.integers(16, MOST, ranks - 1)] + [0]
    given = draw(int(rng.integers(1 << 30)), ranks, tokens, transposed)
    for errors in mk.launch(_layer, ranks, per_node, args=(given, reference(given, rounded=True)), **WORLD):
        assert max(errors.values()) <= 4, errors
        assert max(errors["add"], errors["weights"]) <= 2, errors


def test_rows_of_other_slots_are_seen(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    from mkernel.torch import moe

    monkeypatch.setattr(moe, "_slots_of", lambda offsets, rows, slots: torch.arange(rows).clamp(max=slots - 1))
    given = draw(int(rng.integers(1 << 30)), 2, [40, 40], False)
    for errors in mk.launch(_layer, 2, args=(given, reference(given, rounded=True)), **WORLD):
        assert min(errors[name] for name in ("up", "down")) > 4
        assert max(errors[name] for name in ("y", "x", "weights")) <= 4


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1.0), ("float16", 1.0), ("float16", 2.0**-18), ("float16", 2.0**13)])
def test_combine(dtype: str, scale: float, rng: np.random.Generator) -> None:
    """Rows that were not multiplied: they come back with their weights, and gradients of any size go to them."""
    tokens, kind = [20, 33], getattr(torch, dtype)
    given = draw(int(rng.integers(1 << 30)), 2, tokens, False)
    given["x"] = [t.to(kind) for t in given["x"]]
    given["gradient"] = [(t * scale).to(kind) for t in given["gradient"]]

    def rank(world: Any) -> dict[str, float]:
        mine = {name: values[world.rank] for name, values in given.items()}
        x, weights = mine["x"].clone().requires_grad_(), mine["weights"].clone().requires_grad_()
        identity = torch.eye(H, dtype=kind).expand(EXPERTS, H, H).contiguous()
        d = mkt.moe_dispatch_gemm(x, mine["ids"], identity, max_tokens=MOST)
        y = mkt.moe_combine(d.y, d.routing, topk_weights=weights)
        y.backward(mine["gradient"])
        known = (mine["ids"] >= 0).double()
        factor = (known * mine["weights"].double()).sum(1, keepdim=True)
        exact_weights = known * (mine["x"].double() * mine["gradient"].double()).sum(1, keepdim=True)
        pairs = {
            "y": (y, mine["x"].double() * factor),
            "x": (x.grad, mine["gradient"].double() * factor),
            "weights": (weights.grad, exact_weights),
        }
        return {name: _error(*pair) for name, pair in pairs.items()}

    for errors in mk.launch(rank, 2, **WORLD):
        assert errors["y"] <= 2, errors
        assert errors["x"] <= 2 or scale != 1, "float16 has no numbers as small or as large"
        assert errors["weights"] <= 2**-6, "products go back in pieces that add up to float32"


def test_opcheck() -> None:
    def rank(world: Any) -> None:
        from mkernel.torch import moe

        given = {name: values[0] for name, values in draw(0, 1, [24], False).items()}
        x, up, down = (given[name].clone().requires_grad_() for name in ("x", "up", "down"))
        most = 24 * TOPK
        more = (24, most, True, world.name)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # rows that there are not differ from run to run
        torch.library.opcheck(moe._dispatch.op, (x, given["ids"], up, None, *more), test_utils=checks)
        d = mkt.moe_dispatch_gemm(x.detach(), given["ids"], up.detach(), max_tokens=24, max_rows=most)
        a = d.y.detach()[:, :F].contiguous().requires_grad_()
        torch.library.opcheck(moe._gemm_combine.op, (a, down, *d.routing, given["weights"], None, world.name), test_utils=checks)
        torch.library.opcheck(moe._combine.op, (given["x"].repeat(3, 1), *d.routing, None, given["add"], world.name), test_utils=checks)
        arguments = given["x"], given["ids"], given["weights"], up.detach(), down.detach(), None, 24, most, world.name
        torch.library.opcheck(moe._layer.op, arguments, test_utils=checks)
        torch.library.opcheck(moe._grouped.op, (d.y, a.detach(), d.expert_offsets), test_utils=checks)

    mk.launch(rank, 1, **WORLD)
