"""A feed-forward block split over the ranks, in two kernels. Run it with:  mpirun -n 4 python examples/tensor_parallel_mlp.py."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import ml_dtypes
import numpy as np

import mkernel as mk
from mkernel.tools.check import node_sums, worst_product, worst_sum

X, UP, DOWN = range(3)  # tokens, first and second weight


def gelu(xp: Any, x: Any) -> Any:
    """The activation, in its tanh form."""
    return 0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def part(matrix: int, rank: int, shape: tuple[int, int]) -> Any:
    """A rank's part of a matrix: random numbers that every other rank can make, too. Weights are scaled to keep sums small."""
    scale = 1 if matrix == X else 1 / math.sqrt(shape[0])
    return (np.random.default_rng([matrix, rank]).standard_normal(shape, np.float32) * scale).astype(ml_dtypes.bfloat16)


def worst(world: mk.World, x: Any, up: Any, activated: Any, y: Any) -> float:
    """The largest error of both products over what rounding allows, every element compared with float64; right if at most 1."""
    tokens, hidden, inner = *x.shape, activated.shape[1]
    all_x = np.concatenate([part(X, rank, (tokens, hidden)) for rank in range(world.size)])
    first = worst_product(np, on_host(up), all_x, part(UP, world.rank, (hidden, inner)))

    # A product with the identity moves numbers as they are: this gathers what every rank multiplied.
    rows = world.xp.ascontiguousarray(activated.T)
    gathered = on_host(mk.allgather_gemm(rows, world.xp.eye(len(activated), dtype=activated.dtype)))

    def operands(rank: int) -> tuple[Any, Any]:
        return gathered[rank * inner : (rank + 1) * inner].T, part(DOWN, rank, (inner, hidden))

    plan: Any = mk.plan("gemm_reduce_scatter", activated, world.xp.asarray(part(DOWN, world.rank, (inner, hidden)))).plan()
    return max(first, worst_sum(np, on_host(y), node_sums(plan, world.rank, operands)))


def on_host(array: Any) -> Any:
    """The array as one of NumPy."""
    return array if isinstance(array, np.ndarray) else array.get()


def main() -> int:
    """Every rank holds some tokens, some columns of the first weight and the same rows of the second; it gets its tokens' results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks-per-node", type=int, help="emulate several nodes on this host")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=1024)
    options = parser.parse_args()

    with mk.init(ranks_per_node=options.ranks_per_node) as world:
        tokens, hidden, inner = options.tokens // world.size, options.hidden, options.inner // world.size  # of this rank
        x = world.xp.asarray(part(X, world.rank, (tokens, hidden)))
        w_up = world.xp.asarray(part(UP, world.rank, (hidden, inner)))
        w_down = world.xp.asarray(part(DOWN, world.rank, (inner, hidden)))

        up = mk.allgather_gemm(x, w_up)  # (tokens of all ranks, inner / W)
        activated = gelu(world.xp, up.astype(np.float32)).astype(ml_dtypes.bfloat16)
        y = mk.gemm_reduce_scatter(activated, w_down)  # (tokens / W, hidden): the sum over all ranks, this rank's tokens

        error = worst(world, x, up, activated, y)
        right = error <= 1
        line = f"rank {world.rank} of {world.size} on {world.device}: y is {y.shape}, errors are at most {error:.2f} of their bound: "
        print(line + ("right" if right else "WRONG") + "\n", end="", flush=True)  # in one write: the ranks share an output
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
