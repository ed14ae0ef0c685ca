"""Variants of the attention tile, measured side by side: ``python tests/gpu/attention_variants.py`` on one GPU, with torch.

First attention to a rank's own keys by itself (``local_attention``), every variant of a shape in turn with cuDNN; for each the ratio of
cuDNN's time to its own (above 1: faster than cuDNN), the largest error over its bound of the rows that are compared with float64, and
whether a second call gave the same bits. Then ``mk.ring_attention`` in a world of one, with the tiles that it uses. Exit status 1 where
an error is over its bound or bits differ. ``--target cpu --shrink 64`` goes through the motions without a GPU and without torch.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# The checkout is on the path only from here on.
import mkernel as mk  # noqa: E402
from mkernel.jit import cuda  # noqa: E402
from mkernel.planner.attention_tile import AttentionTile  # noqa: E402
from mkernel.planner.ring_attention import make_plan  # noqa: E402
from mkernel.planner.ring_problem import RingAttentionProblem, Sizes  # noqa: E402
from mkernel.planner.split import Split  # noqa: E402
from mkernel.planner.topology import Topology  # noqa: E402
from tests.gpu.attention import Cpu, Gpu, Shape, error_of  # noqa: E402
from tests.ops.attention_op import AttentionPlan, AttentionProblem, AttentionRows, local_attention  # noqa: E402

# The default first. The others were faster by themselves, or the default once (docs/speed_log.md).
TILES = {
    64: [AttentionTile.of(64, True), AttentionTile(64, 128, 4, 2), AttentionTile(64, 128, 3, 3)],
    128: [AttentionTile.of(128, True), AttentionTile(128, 128, 2, 2)],
}
SHAPES = [
    Shape(1, 64, 8, 8192, 128, True),
    Shape(16, 16, 16, 1536, 128, False),
    Shape(4, 16, 16, 8192, 64, False),
    Shape(1, 64, 8, 8192, 64, True),
]
RING_SHAPES = [
    Shape(16, 16, 16, 1536, 128, False),
    Shape(16, 16, 16, 6144, 128, False),
    Shape(16, 16, 16, 6144, 128, True),
    Shape(1, 64, 8, 8192, 128, False),
    Shape(1, 64, 8, 8192, 128, True),
    Shape(4, 16, 16, 8192, 64, False),
    Shape(4, 16, 16, 8192, 64, True),
    Shape(1, 64, 8, 8192, 64, True),
]
_ABOUT = 8  # samples


def text_of(tile: AttentionTile) -> str:
    return f"{tile.key_block} keys, stages {tile.stages}+{tile.value_stages or tile.stages}, {tile.warpgroups} wg"


# ---- kernels are compiled beforehand, by several processes
def _specs(sm_count: int) -> Iterator[Any]:
    for shape in dict.fromkeys((shape.head_dim, shape.causal) for shape in SHAPES):
        for tile in TILES[shape[0]]:
            problem = AttentionProblem(Topology(1, 1), shape[0], "bfloat16", shape[1], tile=tile)
            yield AttentionPlan(problem, 1, Split(sm_count, 0, 0, 0)).spec
    for shape in RING_SHAPES:
        heads = shape.heads, shape.kv_heads
        ring = RingAttentionProblem(Topology(1, 1), *heads, shape.head_dim, "bfloat16", shape.causal, "contiguous", 1.0)
        yield make_plan(ring, Sizes(shape.batches, shape.length).code, sm_count).spec


def _compile(spec: Any) -> str:
    used = cuda.resources(cuda.compile(spec))
    return f"{used.local_bytes} bytes of local memory" if used.local_bytes else ""


def compile_all() -> None:
    specs = list({repr(spec): spec for spec in _specs(132)}.values())
    with multiprocessing.get_context("spawn").Pool(min(len(specs), os.cpu_count() or 1)) as pool:
        for spec, wrong in zip(specs, pool.map(_compile, specs, chunksize=1), strict=True):
            if wrong:
                print(f"{dict(spec.constants)}: {wrong}", flush=True)


# ---- one shape
def measure(device: Any, shape: Shape, calls: dict[str, Callable[..., Any]], samples: int) -> bool:
    """Prints a row per way to call; returns whether all were right. A call takes (q, k, v, out, scale)."""
    q = device.random(shape.batches, shape.heads, shape.length, shape.head_dim)
    k, v = (device.random(shape.batches, shape.kv_heads, shape.length, shape.head_dim) for _ in range(2))
    scale, right, bound = 1 / math.sqrt(shape.head_dim), True, []
    errors = []
    for call in calls.values():
        results = []
        for _ in range(2):
            o, lse = device.empty(q.shape), device.empty_lse(q.shape[:3])
            call(q, k, v, (o, lse), scale)
            results.append((o, lse))
        same = all(bool((a == b).all()) for a, b in zip(*results, strict=True))
        errors.append((error_of(device, shape, q, k, v, o, lse, scale, "bfloat16"), same))
        right = right and errors[-1][0] <= 1 and same
        bound.append(lambda call=call, out=(o, lse): call(q, k, v, out, scale))
    other = device.baseline(q, k, v, shape.causal)
    found = device.milliseconds([*bound, *([] if isinstance(other, str) else [other])], samples)
    cudnn = math.nan if isinstance(other, str) else found[-1]
    print(f"{shape!s}   cuDNN {cudnn:.3f} ms {shape.flops / cudnn / 1e9:.0f} TF", flush=True)
    for name, ms, (error, same) in zip(calls, found, errors, strict=False):
        bits = "" if same else "   BITS DIFFER"
        print(f"  {name:64} {ms:8.3f} ms {shape.flops / ms / 1e9:6.0f} TF   ratio {cudnn / ms:.3f}   error {error:.3f}{bits}", flush=True)
    return right


def _local(tile: AttentionTile, causal: bool) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any, out: Any, scale: float) -> Any:
        return local_attention(q, k, v, out=AttentionRows(*out), causal=causal, scale=scale, tile=tile)

    return call


def _ring(causal: bool) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any, out: Any, scale: float) -> Any:
        return mk.ring_attention(q, k, v, causal=causal, scale=scale, out=out)

    return call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=_ABOUT)
    parser.add_argument("--target", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shrink", type=int, default=1, help="divides lengths")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), help="this one only")
    options = parser.parse_args()
    device = Cpu("bfloat16") if options.target == "cpu" else Gpu("bfloat16")
    if options.target == "cuda":
        compile_all()

    def chosen(shapes: Iterable[Shape]) -> list[Shape]:
        wanted = [shape for shape in shapes if options.head_dim in (None, shape.head_dim)]
        return [shape._replace(length=shape.length // options.shrink) for shape in wanted]

    right = True
    with mk.init(target=options.target):
        for shape in chosen(SHAPES):
            right &= measure(device, shape, {text_of(tile): _local(tile, shape.causal) for tile in TILES[shape.head_dim]}, options.samples)
        for shape in chosen(RING_SHAPES):
            name = f"ring_attention, {text_of(AttentionTile.of(shape.head_dim, shape.causal))}"
            right &= measure(device, shape, {name: _ring(shape.causal)}, options.samples)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
