"""Multiply a matrix whose rows are spread over the ranks. Run it with:  mpirun -n 4 python examples/allgather_gemm.py."""

from __future__ import annotations

import argparse

import ml_dtypes
import numpy as np

import mkernel as mk


def main() -> None:
    """Every rank holds M/W rows of A and its own columns of B; every rank gets A @ B for its columns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks-per-node", type=int, help="emulate several nodes on this host")
    parser.add_argument("--m", type=int, default=512)
    parser.add_argument("--n", type=int, default=256, help="columns of B on each rank")
    parser.add_argument("--k", type=int, default=512)
    options = parser.parse_args()

    with mk.init(ranks_per_node=options.ranks_per_node) as world:
        random = np.random.default_rng(world.rank)
        rows = options.m // world.size
        a = world.xp.asarray(random.standard_normal((rows, options.k), np.float32).astype(ml_dtypes.bfloat16))
        b = world.xp.asarray(random.standard_normal((options.k, options.n), np.float32).astype(ml_dtypes.bfloat16))

        c = mk.allgather_gemm(a, b)  # (M, N): the rows of all ranks, this rank's columns

        line = f"rank {world.rank} of {world.size} on {world.device}: c is {c.shape}, c[0, :3] = {c[0, :3].tolist()}"
        print(line + "\n", end="", flush=True)  # in one write: the ranks share an output


if __name__ == "__main__":
    main()
