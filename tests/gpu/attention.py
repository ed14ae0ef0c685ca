"""Attention to a rank's own keys, against float64 and against cuDNN: ``python tests/gpu/attention.py`` on one GPU, with torch.

A row per shape: milliseconds of one call (median of ``--samples``, each after a pause on the device in which the host gets ahead),
TFLOP/s, the same of torch's scaled_dot_product_attention with its cuDNN backend, taken in turn, and their ratio (above 1: faster than
cuDNN). ``error`` is the largest error of the rows that are compared with float64 over its bound; exit status 1 where one is over 1.

``--shapes full causal gqa d64``: which of them, or ``BxHqxHkvxSxD`` with ``c`` after it for causal. ``--dtype float16``.
``--tile D,keys,stages,warpgroups`` tries another tile (a fifth number: stages of V, if not those of K). ``--target cpu`` goes through the
motions without a GPU and without torch.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# The checkout is on the path only from here on.
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

import mkernel as mk  # noqa: E402
from mkernel.planner.attention_tile import AttentionTile  # noqa: E402
from mkernel.tools.attention import reference, worst  # noqa: E402
from tests.ops.attention_op import AttentionRows, local_attention  # noqa: E402

LENGTHS = (1536, 3072, 6144, 12288)
PAUSE_CYCLES = 400_000
REST_SECONDS = 0.03
ROWS = 48  # compared with float64, of each of two heads


class Shape(NamedTuple):
    """One measurement."""

    batches: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        """Operations of both products. Causal: of the half that is seen."""
        return 4.0 * self.batches * self.heads * self.length**2 * self.head_dim / (2 if self.causal else 1)

    def __str__(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"B {self.batches} Hq {self.heads} Hkv {self.kv_heads} S {self.length} D {self.head_dim} {kind}"


GROUPS = {
    "full": [Shape(16, 16, 16, s, 128, False) for s in LENGTHS],
    "causal": [Shape(16, 16, 16, s, 128, True) for s in LENGTHS],
    "gqa": [Shape(4, 64, 8, s, 128, causal) for s in (3072, 12288) for causal in (False, True)],
    "d64": [Shape(16, 16, 16, s, 64, causal) for s in (3072, 12288) for causal in (False, True)],
}


def shapes_of(words: list[str]) -> list[Shape]:
    found = []
    for word in words or list(GROUPS):
        if word in GROUPS:
            found += GROUPS[word]
        else:
            found.append(Shape(*(int(part) for part in word.removesuffix("c").split("x")), word.endswith("c")))  # type: ignore[arg-type]
    return found


class Gpu:
    """Arrays and clocks of torch."""

    def __init__(self, dtype: str) -> None:
        import torch

        self.torch, self.dtype = torch, getattr(torch, dtype)
        torch.manual_seed(1)

    def random(self, *shape: int) -> Any:
        return self.torch.randn(*shape, dtype=self.dtype, device="cuda")

    def empty(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        return self.torch.full(shape, math.nan, dtype=dtype or self.dtype, device="cuda")

    def empty_lse(self, shape: tuple[int, ...]) -> Any:
        return self.empty(shape, self.torch.float32)

    def to_numpy(self, array: Any) -> Any:
        host = array.cpu()
        if host.dtype == self.torch.bfloat16:
            return host.contiguous().view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return host.numpy()

    def baseline(self, q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any] | str:
        """Torch's call, or why there is none."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def call() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

        try:
            call()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return call

    def milliseconds(self, calls: list[Callable[[], Any]], samples: int) -> list[float]:
        """Medians of calls that take turns."""
        import time

        times: list[list[float]] = [[] for _ in calls]
        for i in range(-3, samples):
            for call, found in zip(calls, times, strict=True):
                self.torch.cuda.synchronize()
                time.sleep(REST_SECONDS)
                begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.torch.cuda._sleep(PAUSE_CYCLES)
                begin.record()
                call()
                end.record()
                end.synchronize()
                if i >= 0:
                    found.append(begin.elapsed_time(end))
        return [statistics.median(found) for found in times]


class Cpu:
    """Arrays of NumPy; nothing is timed."""

    def __init__(self, dtype: str) -> None:
        self.dtype, self.rng = np.dtype(getattr(ml_dtypes, dtype, dtype)), np.random.default_rng(1)

    def random(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape).astype(self.dtype)

    def empty(self, shape: tuple[int, ...]) -> Any:
        return np.full(shape, np.nan, self.dtype)

    def empty_lse(self, shape: tuple[int, ...]) -> Any:
        return np.full(shape, np.nan, np.float32)

    def to_numpy(self, array: Any) -> Any:
        return array

    def baseline(self, *_: Any) -> str:
        return "no torch on target cpu"

    def milliseconds(self, calls: list[Callable[[], Any]], samples: int) -> list[float]:
        return [math.nan for _ in calls]


def error_of(device: Any, shape: Shape, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float, dtype: str) -> float:
    """The largest error over its bound, of some rows of two heads."""
    rng, largest = np.random.default_rng(), 0.0
    for _ in range(2):
        b, h = int(rng.integers(shape.batches)), int(rng.integers(shape.heads))
        g = h // (shape.heads // shape.kv_heads)
        rows = np.unique(np.concatenate([rng.integers(shape.length, size=ROWS), [0, shape.length - 1]]))
        queries, keys, values, found, sums = (
            device.to_numpy(array) for array in (q[b, h][rows], k[b, g], v[b, g], o[b, h][rows], lse[b, h][rows])
        )
        visible = np.arange(shape.length) <= rows[:, None] if shape.causal else None
        largest = max(largest, worst(np, found, sums, reference(np, queries, keys, values, scale, dtype, visible)))
    return largest if largest == largest else math.inf


def measure(device: Any, shape: Shape, dtype: str, tile: AttentionTile | None, samples: int) -> float:
    q = device.random(shape.batches, shape.heads, shape.length, shape.head_dim)
    k, v = (device.random(shape.batches, shape.kv_heads, shape.length, shape.head_dim) for _ in range(2))
    o, lse = device.empty(q.shape), device.empty_lse(q.shape[:3])
    scale = 1 / math.sqrt(shape.head_dim)

    def ours() -> Any:
        return local_attention(q, k, v, out=AttentionRows(o, lse), causal=shape.causal, scale=scale, tile=tile)

    ours()
    error = error_of(device, shape, q, k, v, o, lse, scale, dtype)
    other = device.baseline(q, k, v, shape.causal)
    times = device.milliseconds([ours] if isinstance(other, str) else [ours, other], samples)
    text = f"{shape!s:46} {times[0]:9.3f} ms {shape.flops / times[0] / 1e9:7.1f} TF"
    if isinstance(other, str):
        text += f"   cuDNN: {other}"
    else:
        text += f"   cuDNN {times[1]:9.3f} ms {shape.flops / times[1] / 1e9:7.1f} TF   ratio {times[1] / times[0]:.3f}"
    print(f"{text}   error {error:.3f}", flush=True)
    return error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--tile", help="D,keys,stages,warpgroups[,stages of V]")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--target", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    tile = AttentionTile(*map(int, options.tile.split(","))) if options.tile else None
    device = Cpu(options.dtype) if options.target == "cpu" else Gpu(options.dtype)
    errors = [0.0]
    with mk.init(target=options.target):
        for shape in shapes_of(options.shapes):
            if tile is None or tile.head_dim == shape.head_dim:
                errors.append(measure(device, shape, options.dtype, tile, options.samples))
    return 0 if max(errors) <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
