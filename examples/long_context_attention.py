"""Causal attention over a sequence that is spread in zigzag. Run it with:  mpirun -n 4 python examples/long_context_attention.py.

Every rank makes the whole sequence, takes its rows of it, and compares some of its results with plain attention in float64. A program would
only have its own rows.
"""

import argparse
import sys

import ml_dtypes
import numpy as np

import mkernel as mk

HEADS, KV_HEADS, D = 8, 2, 64


def far_off(world: mk.World, arguments: argparse.Namespace) -> float:
    """The largest error of the sampled rows, over its bound."""
    q, k, v = (
        np.random.default_rng(seed).standard_normal((1, heads, arguments.rows, D)).astype(ml_dtypes.bfloat16)
        for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    mine = (mk.zigzag_shard(x, 2, rank=world.rank, ranks=world.size) for x in (q, k, v))
    o, lse = mk.ring_attention(*map(world.xp.asarray, mine), causal=True, layout="zigzag")
    o, lse = (x.get() if hasattr(x, "get") else x for x in (o, lse))

    places = mk.zigzag_shard(np.arange(arguments.rows), 0, rank=world.rank, ranks=world.size)  # of this rank's rows in the sequence
    found = [0.0]
    for head in range(HEADS):
        keys, values = (x[0, head // (HEADS // KV_HEADS)].astype(np.float64) for x in (k, v))
        for at in np.linspace(0, len(places) - 1, arguments.samples, dtype=int):
            seen = slice(0, places[at] + 1)
            scores = keys[seen] @ q[0, head, places[at]].astype(np.float64) / np.sqrt(D)
            weights = np.exp(scores - scores.max())
            right = weights @ values[seen] / weights.sum()
            # Weights and result are rounded to bfloat16.
            bound = 2.0**-8 * (np.abs(right) + weights @ np.abs(values[seen]) / weights.sum()) + 1e-5
            found.append(float((np.abs(o[0, head, at].astype(np.float64) - right) / bound).max()))
            found.append(float(abs(lse[0, head, at] - np.log(weights.sum()) - scores.max()) / 1e-3))
    return float(np.max(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=768, help="of the sequence: a multiple of twice the ranks (default 768)")
    parser.add_argument("--samples", type=int, default=9, help="rows of each head that are checked (default 9)")
    parser.add_argument("--ranks-per-node", type=int, help="split one host into emulated nodes")
    arguments = parser.parse_args()
    with mk.init(ranks_per_node=arguments.ranks_per_node) as world:
        worst = far_off(world, arguments)
        verdict = "right" if worst <= 1 else "WRONG"
        line = f"rank {world.rank} of {world.size} on {world.device}: o is {(1, HEADS, arguments.rows // world.size, D)}: {verdict}"
        print(line + "\n", end="", flush=True)  # in one write: the ranks share an output
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
