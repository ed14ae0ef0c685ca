"""What torch.autocast is enabled for in a backward pass, as where ``backward()`` is called within the block, does not change gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make test-torch`")

import mkernel as mk
import mkernel.torch as mkt
from tests.with_torch.matrices import place_of

ROWS, K, N, D = 6, 16, 24, 64
IDS = torch.tensor([[0, 1]] * ROWS, dtype=torch.int32)


def _moe(x: Any, up: Any, down: Any, weights: Any) -> Any:
    d = mkt.moe_dispatch_gemm(x, IDS.to(x.device), up, max_tokens=ROWS)
    return mkt.moe_gemm_combine(d.y.tanh(), down, d.routing, topk_weights=weights)


OPS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "allgather_gemm": (mkt.allgather_gemm, ((ROWS, K), (K, N))),
    "gathered again": (lambda a, b: mkt.allgather_gemm(a, b, gather_again=True), ((ROWS, K), (K, N))),
    "gemm_reduce_scatter": (mkt.gemm_reduce_scatter, ((ROWS, K), (K, N))),
    "gemm_allreduce": (mkt.gemm_allreduce, ((ROWS, K), (K, N))),
    "replicated_gemm": (mkt.replicated_gemm, ((ROWS, K), (K, N))),
    "shared": (mkt.shared, ((ROWS, K),)),
    "ring_attention": (lambda q, k, v: mkt.ring_attention(q, k, v).o, ((1, 2, ROWS, D), (1, 1, ROWS, D), (1, 1, ROWS, D))),
    "moe": (_moe, ((ROWS, K), (1, K, N), (1, N, K), (ROWS, 2))),
}


def _differ(world: Any, name: str) -> list[str]:
    """Under which dtypes of autocast the gradients have other bits than without it."""
    function, shapes = OPS[name]
    place = place_of(world)
    made = torch.Generator().manual_seed(world.rank)
    leaves = [torch.randn(shape, generator=made).to(torch.float32 if shape == (ROWS, 2) else torch.bfloat16) for shape in shapes]
    leaves = [leaf.to(place).requires_grad_() for leaf in leaves]
    result = function(*leaves)
    gradient = torch.randn(result.shape, generator=made).to(place, result.dtype)
    kind = torch.device(place).type
    without = torch.autograd.grad(result, leaves, gradient, retain_graph=True)
    differ = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(kind, dtype):
            found = torch.autograd.grad(result, leaves, gradient, retain_graph=True)
        differ += [] if all(torch.equal(a, b) for a, b in zip(found, without, strict=True)) else [str(dtype)]
    return differ


@pytest.mark.parametrize("name", OPS)
def test_gradients_are_those_without(name: str) -> None:
    assert mk.launch(_differ, 2, None, "cpu", (name,), heap_bytes=1 << 24, specialize="none") == [[], []]
