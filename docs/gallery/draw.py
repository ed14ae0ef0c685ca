"""``python docs/gallery/draw.py``: draws the timelines of docs/gallery.md, on target cpu, into this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("MKERNEL_CPU_SMS", "12")  # CTAs of a rank
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

import mkernel as mk  # noqa: E402

SEED = 7


def numbers(world: mk.World, *shape: int) -> Any:
    """Random numbers, others on every rank."""
    return np.random.default_rng([SEED, world.rank]).standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def traced(world: mk.World, call: Callable[[], object], before: Callable[[], object] = lambda: None) -> mk.Trace:
    """A trace of the second call, when all ranks are in step."""
    call()
    world.barrier()
    before()
    with mk.trace(world) as trace:
        call()
    return trace


def allgather_gemm(world: mk.World) -> mk.Trace:
    a, b = numbers(world, 2048 // world.size, 512), numbers(world, 512, 512)
    return traced(world, lambda: mk.allgather_gemm(a, b))


def late_rank(world: mk.World) -> mk.Trace:
    a, b = numbers(world, 2048 // world.size, 512), numbers(world, 512, 512)

    def rest() -> None:
        if world.rank == 3:
            world.backend.thread_ranks.hold(3, 1 << 40)  # its CTAs go on when nobody else can

    return traced(world, lambda: mk.allgather_gemm(a, b), rest)


def gemm_reduce_scatter(world: mk.World) -> mk.Trace:
    a, b = numbers(world, 1024, 2048 // world.size), numbers(world, 2048 // world.size, 1024)
    return traced(world, lambda: mk.gemm_reduce_scatter(a, b))


def moe_dispatch_gemm(world: mk.World) -> mk.Trace:
    experts, tokens = 2 * world.size, 384
    x, w = numbers(world, tokens, 512), numbers(world, 2, 512, 512)
    ids = np.random.default_rng([SEED, 1, world.rank]).permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :2].astype(np.int32)
    return traced(world, lambda: mk.moe_dispatch_gemm(x, ids, w))


def ring_attention(world: mk.World) -> mk.Trace:
    q, k, v = (numbers(world, 1, heads, 4096 // world.size, 64) for heads in (4, 1, 1))
    return traced(world, lambda: mk.ring_attention(q, k, v, causal=True, layout="zigzag"))


# file: (what runs, ranks of a node, whose picture, its title)
SCENES: dict[str, tuple[Callable[[mk.World], mk.Trace], int, int, str]] = {
    "allgather_gemm": (allgather_gemm, 4, 0, "allgather_gemm on one node of 4 ranks"),
    "allgather_gemm_2x2": (allgather_gemm, 2, 0, "allgather_gemm on 2 nodes x 2 ranks"),
    "late_rank": (late_rank, 4, 0, "allgather_gemm: rank 0, while rank 3 comes late"),
    "gemm_reduce_scatter_2x2": (gemm_reduce_scatter, 2, 0, "gemm_reduce_scatter on 2 nodes x 2 ranks"),
    "moe_dispatch_gemm": (moe_dispatch_gemm, 4, 0, "moe_dispatch_gemm on one node of 4 ranks"),
    "ring_attention": (ring_attention, 4, 0, "ring_attention, causal in zigzag order, on one node of 4 ranks"),
}


def main() -> None:
    """Draw the scenes that are named on the command line, or all."""
    for name in sys.argv[1:] or SCENES:
        scene, per_node, rank, title = SCENES[name]
        trace = mk.launch(scene, ranks=4, ranks_per_node=per_node, target="cpu", seed=SEED)[rank]
        trace.plot(HERE / f"{name}.svg", title=title)
        print(f"{name}: {(HERE / f'{name}.svg').stat().st_size >> 10} KiB\n{trace.summary()}")


if __name__ == "__main__":
    main()
