"""Calls that combine, on target cpu: drawn routings, and every element of every result against float64.

``python tests/ops/combine_body.py <world> <inner> <seed>``: few and small ones. Exits with 0 if all is right.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ml_dtypes
import numpy as np

import mkernel as mk
from mkernel.planner.topology import Topology
from mkernel.tools.routing import RankRouting, reference_routing

__all__ = ["DTYPES", "KINDS", "WORLDS", "Drawn", "bound", "draw_ids", "program", "routing_of"]

WORLDS = {
    "1x1": (1, 1),
    "1x2": (2, 2),
    "1x4": (4, 4),
    "2x2": (4, 2),
    "3x2": (6, 2),
    "4x1": (4, 1),
}  # nodes x ranks per node -> ranks, per node
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
KINDS = ("uniform", "one expert", "one rank", "holes", "nothing", "ragged")
_ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # half a unit in the last place, relative
_TINY = 2.0**-24  # the smallest float16


def draw_ids(rng: np.random.Generator, kind: str, ranks: int, experts: int, topk: int, max_tokens: int) -> list[Any]:
    """The choices (T, k) of each rank, -1 where there is none; no token has an expert twice."""
    found = []
    for rank in range(ranks):
        tokens = max_tokens if kind == "one expert" and rank == 0 else int(rng.integers(0, max_tokens + 1))
        if kind == "ragged" and rng.random() < 0.5:
            tokens = 0
        pool = range(experts * ranks) if kind != "one rank" else range(experts * (ranks - 1), experts * ranks)
        ids = np.full((tokens, topk), -1, np.int32)
        for token in range(tokens):
            number = min(topk, len(pool))
            ids[token, rng.permutation(topk)[:number]] = rng.choice(pool, number, replace=False)
        if kind == "one expert":
            ids[:] = -1
            ids[np.arange(tokens), rng.integers(0, topk, tokens)] = experts * ranks - 1
        if kind == "nothing":
            ids[:] = -1
        if kind in ("holes", "ragged"):
            ids[rng.random(ids.shape) < 0.4] = -1
        found.append(ids)
    return found


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What all ranks pass in the calls of one launch: one problem, and the kind of routing of each call."""

    world: str
    columns: int
    dtype: str
    topk: int
    experts: int  # of a rank
    max_tokens: int
    weighted: bool
    kinds: tuple[str, ...]
    seed: int
    inner: int = 0  # columns of what is multiplied by the experts' weights (moe_gemm_combine); 0: rows are combined as they are
    row_major: bool = True  # these weights

    @classmethod
    def draw(
        cls, rng: np.random.Generator, world: str, topk: int, dtype: str, *, weighted: bool = True, calls: int = 5, **more: Any
    ) -> Drawn:
        kinds = tuple(str(kind) for kind in rng.choice(KINDS, calls))
        columns, experts, max_tokens = 8 * int(rng.integers(1, 90)), int(rng.integers(1, 5)), int(rng.integers(1, 30))
        return cls(world, columns, dtype, topk, experts, max_tokens, weighted, kinds, int(rng.integers(1 << 30)), **more)

    @property
    def topology(self) -> Topology:
        nodes, per_node = map(int, self.world.split("x"))
        return Topology(nodes * per_node, per_node)

    @property
    def max_rows(self) -> int:
        return self.topology.size * self.max_tokens * min(self.topk, self.experts) + 8 * self.experts

    def call(self, number: int) -> Inputs:
        """What call ``number`` is made of, the same on every rank."""
        rng = np.random.default_rng((self.seed, number))
        size = self.topology.size
        ids = draw_ids(rng, self.kinds[number], size, self.experts, self.topk, self.max_tokens)
        alignment = int(rng.choice([1, 8]))
        known = reference_routing(ids, self.topology, self.experts * size, self.max_tokens, self.max_rows, alignment)
        return Inputs(self, ids, known, rng)


class Inputs:
    """The arrays of one call, of all ranks."""

    def __init__(self, drawn: Drawn, ids: list[Any], known: list[RankRouting], rng: np.random.Generator) -> None:
        self.drawn, self.ids, self.known = drawn, ids, known
        dtype, size = DTYPES[drawn.dtype], drawn.topology.size
        self.rows, self.experts = [], []
        for rank in range(size):
            rows = rng.standard_normal((drawn.max_rows, drawn.inner or drawn.columns)).astype(dtype)
            rows[known[rank].source[:, 0] < 0] = np.nan  # what belongs to no token must not be used
            self.rows.append(rows)
            self.experts.append((rng.standard_normal((drawn.experts, drawn.inner, drawn.columns)) / 4).astype(dtype))
        self.weights = [rng.standard_normal(each.shape).astype(np.float32) for each in ids]
        self.adds = [rng.standard_normal((len(each), drawn.columns)).astype(dtype) if rng.random() < 0.5 else None for each in ids]
        self.on_heap = rng.random(size) < 0.5
        self.weights_on_heap = rng.random(size) < 0.5
        self.given = rng.random(size) < 0.5

    def combined(self, owner: int) -> tuple[Any, Any]:
        """In float64, the rows of a rank that are combined, and how far each element may be off."""
        rows = self.rows[owner].astype(np.float64)
        if not self.drawn.inner:
            return rows, np.zeros_like(rows)
        offsets, experts = self.known[owner].expert_offsets, self.experts[owner].astype(np.float64)
        exact, magnitude = (np.full((len(rows), self.drawn.columns), np.nan) for _ in range(2))
        for expert, (begin, end) in enumerate(itertools.pairwise(offsets)):
            exact[begin:end] = rows[begin:end] @ experts[expert]
            magnitude[begin:end] = abs(rows[begin:end]) @ abs(experts[expert])
        unit, single = _ROUNDING[self.drawn.dtype], 2.0**-24 * 2 * self.drawn.inner * magnitude
        return exact, unit * (abs(exact) + single) + single + _TINY

    def terms(self, rank: int) -> tuple[Any, Any, Any, Any]:
        """In float64, of each element of a rank's result: its value, how far rows may be off, the sum of all magnitudes, and that of the
        other nodes' sums.
        """  # noqa: D205
        drawn, topology = self.drawn, self.drawn.topology
        value = np.zeros((len(self.ids[rank]), drawn.columns))
        off, magnitude, sums = np.zeros_like(value), np.zeros_like(value), np.zeros((topology.num_nodes, *value.shape))
        for owner in range(topology.size):
            of_owner, off_by = self.combined(owner)
            for row in np.flatnonzero(self.known[owner].source[:, 0] == rank):
                _, token, choice = self.known[owner].source[row]
                weight = float(self.weights[rank][token, choice]) if drawn.weighted else 1.0
                term = weight * of_owner[row]
                value[token] += term
                off[token] += abs(weight) * off_by[row]
                magnitude[token] += abs(term)
                sums[topology.node(owner), token] += term
        add = self.adds[rank]
        if add is not None:
            value += add.astype(np.float64)
            magnitude += abs(add.astype(np.float64))
        sums[topology.node(rank)] = 0
        return value, off, magnitude + off, abs(sums).sum(0) + off

    def worst(self, rank: int, result: Any) -> float:
        """The largest error of a rank's result in units of its bound; NaN counts as infinite."""
        value, off, magnitude, sums = self.terms(rank)
        if result.shape != value.shape:
            return float("inf")
        error = abs(result.astype(np.float64) - value) / bound(self.drawn, value, off, magnitude, sums)
        return float(np.nan_to_num(error, nan=np.inf).max(initial=0.0))


def bound(drawn: Drawn, value: Any, off: Any, magnitude: Any, sums: Any) -> Any:
    """What float32 sums of rows that are off, node sums that are rounded once, and one last rounding may differ by from exact ones."""
    unit, nodes = _ROUNDING[drawn.dtype], drawn.topology.num_nodes
    single = 2.0**-24 * 2 * (drawn.topk + nodes + 2) * magnitude
    rounded = off + unit * (sums + single) + _TINY * nodes
    return (unit * (abs(value) + rounded) + rounded + single) * 1.01 + _TINY


def routing_of(known: RankRouting) -> mk.Routing:
    """A copy: kernels of one call must not see what another call's routing was."""
    return mk.Routing(*(np.ascontiguousarray(getattr(known, name)).copy() for name in mk.Routing._fields))


def program(world: Any, drawn: Drawn) -> list[str]:
    """Calls one after the other, without a barrier. Arrays are poisoned as soon as a call has returned; returns what is wrong."""
    dtype, results, shape = DTYPES[drawn.dtype], [], (drawn.max_rows, drawn.inner or drawn.columns)
    shared, shared_weights = world.empty(shape, dtype), world.empty((drawn.max_tokens, drawn.topk), np.float32)
    for number in range(len(drawn.kinds)):
        inputs = drawn.call(number)
        rank = world.rank
        tokens = len(inputs.ids[rank])
        rows = shared if inputs.on_heap[rank] else np.empty((shape[0], shape[1] + 8 * bool(drawn.inner)), dtype)[:, : shape[1]]
        rows[:] = inputs.rows[rank]
        routing = routing_of(inputs.known[rank])
        weights = None
        if drawn.weighted:
            weights = shared_weights[:tokens] if inputs.weights_on_heap[rank] else np.empty((tokens, drawn.topk), np.float32)
            weights[:] = inputs.weights[rank]
        out = np.full((tokens, drawn.columns + 16), np.nan, dtype)[:, 8:-8] if inputs.given[rank] else None
        options = {"topk_weights": weights, "add": inputs.adds[rank], "out": out}
        arrays: tuple[Any, ...] = (rows,)
        if drawn.inner:
            experts = inputs.experts[rank]
            arrays = rows, experts if drawn.row_major else np.ascontiguousarray(experts.swapaxes(1, 2)).swapaxes(1, 2)
        y = mk.moe_gemm_combine(*arrays, routing, **options) if drawn.inner else mk.moe_combine(*arrays, routing, **options)
        assert out is None or y is out
        for array in (*arrays, *routing, *(() if weights is None else (weights,))):
            array[...] = -1  # its owner may do this as soon as the call has ended
        assert out is None or np.isnan(out.base[:, :8].astype(np.float32)).all(), "beside out"
        results.append(y)
    wrong = []
    for number, y in enumerate(results):
        worst = drawn.call(number).worst(world.rank, y)
        if not worst <= 1:
            wrong.append(f"call {number} ({drawn.kinds[number]}): {worst:g} of the bound")
    return wrong


def main(world: str, inner: str, seed: str) -> int:
    from mkernel.planner import moe_combine as planner

    planner.SCALE = planner.Scale(put_bytes=512, copy_bytes=512, window_rows=0)
    drawn = Drawn(world, 40, "float16", 2, 2, 9, True, ("uniform", "holes"), int(seed), int(inner))
    options: dict[str, Any] = {"heap_bytes": 1 << 20, "timeout": 100.0, "entry_timeout": 100.0}
    return int(any(mk.launch(program, *WORLDS[world], "cpu", (drawn,), seed=drawn.seed, **options)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
