"""A mixture-of-experts layer, its experts split over the ranks. Run it with:  mpirun -n 4 python examples/moe_layer.py."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import ml_dtypes
import numpy as np

import mkernel as mk
from mkernel.tools.check_moe import Combined, exact, product, rounded, swiglu, worst_rows

X, ROUTER, GATE_UP, DOWN = range(4)  # tokens, weights of the router, both weights of an expert


def part(matrix: int, which: int, shape: tuple[int, int]) -> Any:
    """A rank's tokens, the router or an expert: random numbers that every rank can make. Weights are scaled to keep sums small."""
    scale = 1 if matrix == X else 1 / math.sqrt(shape[0])
    return (np.random.default_rng([matrix, which]).standard_normal(shape, np.float32) * scale).astype(ml_dtypes.bfloat16)


def route(xp: Any, x: Any, router: Any, topk: int) -> tuple[Any, Any]:
    """The ``topk`` experts with the highest scores of each token, and the softmax of these scores: (T, k) int32 and float32."""
    scores = x.astype(np.float32) @ router.astype(np.float32)
    ids = xp.argsort(-scores, axis=1)[:, :topk]
    chosen = xp.exp(xp.take_along_axis(scores, ids, axis=1))  # scores are small: nothing overflows
    return ids.astype(np.int32), (chosen / chosen.sum(axis=1, keepdims=True)).astype(np.float32)


def worst(world: mk.World, options: argparse.Namespace, x: Any, ids: Any, weights: Any, y: Any) -> float:
    """The largest error of ``y`` over what rounding allows, every element compared with float64; right if at most 1.

    The reference is dense: every expert of the world is applied to every token of this rank, with weight 0 where it was not chosen.
    """
    hidden, inner, topology = options.hidden, options.inner, world.topology
    sums = Combined(np, len(x), hidden, "bfloat16")
    for node in range(world.num_nodes):
        sums.begin_node()
        for owner in topology.node_ranks(node):
            for expert in range(owner * options.experts, (owner + 1) * options.experts):
                up = product(np, exact(np, x), part(GATE_UP, expert, (hidden, 2 * inner)))
                down = product(np, rounded(np, swiglu(np, up), "bfloat16"), part(DOWN, expert, (inner, hidden)))
                share = np.where(ids == expert, weights, 0).sum(axis=1)
                sums.add(np.arange(len(x)), share, rounded(np, down, "bfloat16"))
        sums.end_node(own=node == world.node, additions=options.topk)
    return worst_rows(np, y, sums.result())


def on_host(array: Any) -> Any:
    """The array as one of NumPy."""
    return array if isinstance(array, np.ndarray) else array.get()


def main() -> int:
    """Every rank holds some tokens and some experts, and gets the layer's result for its tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks-per-node", type=int, help="emulate several nodes on this host")
    parser.add_argument("--tokens", type=int, default=200, help="of all ranks")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=128)
    parser.add_argument("--experts", type=int, default=2, help="of each rank")
    parser.add_argument("--topk", type=int, default=2)
    options = parser.parse_args()

    with mk.init(ranks_per_node=options.ranks_per_node) as world:
        rank, size, xp = world.rank, world.size, world.xp
        tokens = (options.tokens + rank) // size  # need not be the same everywhere
        x = xp.asarray(part(X, rank, (tokens, options.hidden)))
        router = xp.asarray(part(ROUTER, 0, (options.hidden, options.experts * size)))
        mine = range(rank * options.experts, (rank + 1) * options.experts)
        gate_up = xp.asarray(np.stack([part(GATE_UP, expert, (options.hidden, 2 * options.inner)) for expert in mine]))
        down = xp.asarray(np.stack([part(DOWN, expert, (options.inner, options.hidden)) for expert in mine]))

        ids, weights = route(xp, x, router, options.topk)
        y = mk.moe_layer(x, ids, weights, gate_up, down)  # (tokens, hidden)

        error = worst(world, options, on_host(x), on_host(ids), on_host(weights), on_host(y))
        right = error <= 1
        line = f"rank {rank} of {size} on {world.device}: y is {y.shape}, errors are at most {error:.2f} of their bound: "
        print(line + ("right" if right else "WRONG") + "\n", end="", flush=True)  # in one write: the ranks share an output
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
