"""The MoE layer in float64, with how far off each element may be."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from tests.ops.moe_body import DTYPES, Model, expected


@dataclasses.dataclass(frozen=True)
class Layer:
    """What the calls of one test have in common."""

    h: int
    f: int
    experts: int  # of a rank
    dtype: str
    row_major: bool
    gated: bool
    seed: int

    def weights(self, rank: int) -> tuple[Any, Any]:
        """(E/W, H, F or 2 F) and (E/W, F, H). Not to be written to."""
        return _weights(self, rank)

    def reference(self, x: Any, ids: Any, weights: Any, add: Any) -> tuple[Any, Any]:
        """The result of a rank, and how far off a value may be: every rounding counts."""
        unit = 2.0**-8 if self.dtype == "bfloat16" else 2.0**-11
        model = Model(self.h, self.f, self.experts, ids.shape[1], self.dtype, self.row_major, self.gated, True, 1, len(x))
        y = np.zeros((len(x), self.h)) if add is None else add.astype(np.float64)
        bound = np.zeros_like(y)
        size = np.abs(y)
        for expert in np.unique(ids[ids >= 0]):
            tokens, choices = np.nonzero(ids == expert)  # no token has an expert twice
            rank, own = divmod(int(expert), self.experts)
            up, down = self.weights(rank)
            hidden, error = expected(model, x[tokens], up[own])
            b = down[own].astype(np.float64)
            rows = hidden @ b
            rows_size = np.abs(hidden) @ np.abs(b)
            rows_error = error @ np.abs(b)
            rows_error += (rows_size + rows_error) * (self.f + 8) * 2.0**-23
            rows_error += (np.abs(rows) + rows_error) * unit + 2.0**-24
            weight = weights[tokens, choices].astype(np.float64)[:, None]
            y[tokens] += weight * rows
            bound[tokens] += np.abs(weight) * rows_error
            size[tokens] += np.abs(weight) * (np.abs(rows) + rows_error)
        nodes = unit * size  # sums of other nodes are rounded
        return y, bound + nodes + size * 32 * 2.0**-23 + (np.abs(y) + bound + nodes) * unit + 2.0**-24


@functools.lru_cache(maxsize=8)
def _weights(layer: Layer, rank: int) -> tuple[Any, Any]:
    rng = np.random.default_rng([layer.seed, rank])

    def draw(rows: int, columns: int) -> Any:
        shape = (layer.experts, rows, columns) if layer.row_major else (layer.experts, columns, rows)
        w = (rng.standard_normal(shape) / np.sqrt(rows)).astype(DTYPES[layer.dtype])
        return w if layer.row_major else w.transpose(0, 2, 1)

    return draw(layer.h, layer.f * (2 if layer.gated else 1)), draw(layer.f, layer.h)
