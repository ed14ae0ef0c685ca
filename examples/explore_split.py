"""What does it change how many SMs move data? Tune one shape, and draw what every CTA does with two splits.

Run it with:  python examples/explore_split.py  (``mk.launch`` starts the ranks: the body of ``explore`` also works in a notebook, where the
results draw themselves).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ml_dtypes
import numpy as np

import mkernel as mk


def explore(world: mk.World, m: int, n: int, k: int) -> tuple[mk.TuneResult, dict[str, mk.Trace]]:
    """What the tuner measured, and a trace of one call with mkernel's own split and with the tuner's."""
    random = np.random.default_rng(world.rank)
    a = world.xp.asarray(random.standard_normal((m // world.size, k), np.float32).astype(ml_dtypes.bfloat16))
    b = world.xp.asarray(random.standard_normal((k, n), np.float32).astype(ml_dtypes.bfloat16))

    result = mk.tune("allgather_gemm", a, b, save=False)
    traces = {}
    for name, split in (("default", result.default), ("best", result.best)):
        with mk.trace(world) as traces[name]:
            mk.allgather_gemm(a, b, split=split)
    return result, traces


def main() -> None:
    """Print the table; write a picture of it, and one of rank 0's CTAs for each of the two splits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, help="emulate several nodes")
    parser.add_argument("--m", type=int, default=512)
    parser.add_argument("--n", type=int, default=256, help="columns of B on each rank")
    parser.add_argument("--k", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=Path(), help="where the pictures go")
    options = parser.parse_args()

    shape = (options.m, options.n, options.k)
    result, traces = mk.launch(explore, ranks=options.ranks, ranks_per_node=options.ranks_per_node, args=shape)[0]
    print(result)
    result.plot(options.folder / "splits.svg")
    for name, trace in traces.items():
        trace.plot(options.folder / f"{name}.svg", title=f"allgather_gemm, {name} split: {getattr(result, name)}")


if __name__ == "__main__":
    main()
