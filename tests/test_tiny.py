"""mkernel on one page: every op once, and a failure that names itself.

No GPU, under 20 seconds: the place to begin reading, and what the pre-push hook runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.ops.op import names

W, M, N, K = 2, 64, 48, 128  # ranks; the whole product is (M, K) @ (K, N)

rng = np.random.default_rng(0)
A = rng.integers(-4, 5, (M, K)).astype(np.float16)  # small integers: float16 holds every sum exactly
B = rng.integers(-4, 5, (K, N)).astype(np.float16)
C = A.astype(np.float64) @ B.astype(np.float64)


def test_allgather_gemm() -> None:
    """Every rank gives its rows of A and its columns of B, and gets all rows of the product with its columns."""

    def rank(world: mk.World) -> Any:
        rows, columns = slice(world.rank * M // W, (world.rank + 1) * M // W), slice(world.rank * N // W, (world.rank + 1) * N // W)
        return mk.allgather_gemm(A[rows], B[:, columns].copy())

    results = mk.launch(rank, ranks=W, target="cpu")
    np.testing.assert_array_equal(np.concatenate(results, axis=1), C)


@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_allreduce"])
def test_reductions(op: str) -> None:
    """Every rank gives its columns of A and its rows of B, and gets its rows of the sum of all products, or the whole sum."""

    def rank(world: mk.World) -> Any:
        part = slice(world.rank * K // W, (world.rank + 1) * K // W)
        return getattr(mk, op)(A[:, part].copy(), B[part])

    results = mk.launch(rank, ranks=W, target="cpu")
    if op == "gemm_reduce_scatter":
        np.testing.assert_array_equal(np.concatenate(results), C)
    else:
        for result in results:
            np.testing.assert_array_equal(result, C)


def test_mixture_of_experts() -> None:
    """Every rank gives its tokens and the weights of its experts; each token comes back as the sum of what two experts make of it."""
    factors = np.array([1.0, 2.0, 4.0, 8.0])  # an expert each: it multiplies by that

    def rank(world: mk.World) -> Any:
        x, first = A[: 3 + world.rank], np.arange(3 + world.rank) % len(factors)
        ids = np.stack([first, (first + 1) % len(factors)], axis=1)
        own = factors[world.rank * len(factors) // W :][: len(factors) // W]
        w = (own[:, None, None] * np.eye(K)).astype(A.dtype)
        dispatched = mk.moe_dispatch_gemm(x, ids, w)
        y = mk.moe_combine(dispatched.y, dispatched.routing)
        z = mk.moe_gemm_combine(dispatched.y, 2 * w, dispatched.routing)  # twice as much again
        right = (x * factors[ids].sum(axis=1, keepdims=True)).astype(A.dtype)
        again = (x * 2 * (factors[ids] ** 2).sum(axis=1, keepdims=True)).astype(A.dtype)
        return np.array_equal(y, right) and np.array_equal(z, again)

    assert mk.launch(rank, ranks=W, target="cpu") == [True] * W


def test_ring_attention() -> None:
    def rank(world: mk.World) -> bool:
        q = np.zeros((1, 1, 4, 64), np.float16)
        v = np.full((1, 1, 4, 64), world.rank, np.float16)
        o, lse = mk.ring_attention(q, q, v)  # all keys weigh the same
        return bool((o == (W - 1) / 2).all() and np.allclose(lse, np.log(4 * W)))

    assert mk.launch(rank, ranks=W, target="cpu") == [True] * W


def test_ring_attention_varlen() -> None:
    def rank(world: mk.World) -> bool:
        q = np.zeros((5, 1, 64), np.float16)
        v = np.full((5, 1, 64), world.rank, np.float16)
        o, lse = mk.ring_attention_varlen(q, q, v, np.array([0, 4 * W, 5 * W], np.int32))
        return bool((o == (W - 1) / 2).all() and np.allclose(lse, np.log([4 * W] * 4 + [W])))

    assert mk.launch(rank, ranks=W, target="cpu") == [True] * W


def test_every_op_is_above() -> None:
    reductions, moe = {"gemm_reduce_scatter", "gemm_allreduce"}, {"moe_dispatch_gemm", "moe_combine", "moe_gemm_combine"}
    assert set(names()) == {"allgather_gemm", *reductions, *moe, "ring_attention", "ring_attention_varlen"}


def test_ranks_that_call_different_things_are_told_so() -> None:
    def rank(world: mk.World) -> Any:
        op = mk.allgather_gemm if world.rank == 0 else mk.gemm_allreduce
        return op(A, B)

    with pytest.raises(mk.MismatchError, match=r"(?s)allgather_gemm.*gemm_allreduce"):
        mk.launch(rank, ranks=W, target="cpu")
