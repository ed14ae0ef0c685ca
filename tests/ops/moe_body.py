"""Drawn calls of ``moe_dispatch_gemm``, every array of every rank checked. What tests and planted bugs share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

import mkernel as mk
from mkernel.planner import moe_dispatch_gemm as planner
from mkernel.planner.moe import most_rows
from mkernel.planner.topology import Topology
from mkernel.tools.routing import RankRouting, reference_routing
from mkernel.transport import emulated
from tests.ops.body import topology
from tests.shared.findings import errors_are_findings, wrong_of

ROUTINGS = ("uniform", "one expert", "one rank", "some", "nothing", "skewed")
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_FAULTS = emulated.Faults
PLANTED_KINDS = ("uniform", "one rank")


@dataclasses.dataclass(frozen=True)
class Model:
    """What the calls of one test have in common. ``experts``: of a rank; ``f``: columns of y."""

    h: int
    f: int
    experts: int
    topk: int
    dtype: str
    row_major: bool
    gated: bool
    weighted: bool
    alignment: int
    max_tokens: int


_FROM_HEAP = Model(2048, 8, 2, 2, "float16", True, False, False, 1, 16)
PLANTED = Model(264, 8, 2, 2, "float16", True, False, True, 1, 70)  # of calls that a faulty kernel makes


def draw_model(rng: np.random.Generator, size: int) -> Model:
    experts = int(rng.integers(1, 6))
    return Model(
        h=8 * int(rng.integers(1, 20)),
        f=8 * int(rng.integers(1, 40)),
        experts=experts,
        topk=int(rng.integers(1, min(16, experts * size) + 1)),
        dtype=str(rng.choice(list(DTYPES))),
        row_major=bool(rng.integers(2)),
        gated=bool(rng.integers(2)),
        weighted=bool(rng.integers(2)),
        alignment=int(rng.choice([1, 1, 8, 24])),
        max_tokens=int(rng.choice([5, 40, 150])),
    )


def draw_ids(rng: np.random.Generator, model: Model, size: int, kind: str, given: Sequence[int] | None = None) -> list[Any]:
    """(T, k) of every rank. ``given``: T of each, else drawn."""
    everything = model.experts * size
    found = []
    for rank in range(size):
        tokens = int(rng.integers(0, model.max_tokens + 1)) * int(rng.integers(4) > 0) if given is None else given[rank]
        ids = np.empty((tokens, model.topk), rng.choice([np.int32, np.int64]))
        for token in range(tokens):
            chosen = rng.permutation(everything)[: model.topk]
            if kind == "skewed":
                chosen = np.argsort(rng.random(everything) * (1 + np.arange(everything)) ** 2)[: model.topk]
            if kind == "one rank":
                own = rng.permutation(model.experts)[: model.topk]
                chosen = np.concatenate([own, np.full(model.topk - len(own), -1)])
            if kind == "one expert":
                chosen = np.full(model.topk, -1)
                chosen[rng.integers(model.topk)] = everything - 1
            if kind == "some":
                chosen = np.where(rng.random(model.topk) < 0.5, chosen, -1)
            if kind == "nothing":
                chosen = np.full(model.topk, -1)
            ids[token] = chosen
        found.append(ids)
    return found


def inputs(model: Model, seed: int, rank: int, call: int, tokens: int) -> tuple[Any, Any, Any]:
    """x, w and weights of a rank; w is the same in every call. Products are around 1, so that none leaves float16."""
    rng = np.random.default_rng([seed, rank, call, 1])  # zeros at the end of a seed would make no difference
    x = (rng.standard_normal((tokens, model.h)) / np.sqrt(model.h)).astype(DTYPES[model.dtype])
    fixed = np.random.default_rng([seed, rank, 2])
    columns = model.f * (2 if model.gated else 1)
    shape = (model.experts, model.h, columns) if model.row_major else (model.experts, columns, model.h)
    w = fixed.standard_normal(shape).astype(DTYPES[model.dtype])
    weights = rng.random((tokens, model.topk)).astype(np.float32)
    return x, w if model.row_major else w.transpose(0, 2, 1), weights


def expected(model: Model, rows: Any, w: Any) -> tuple[Any, Any]:
    """What the rows of an expert should become, and how far off a value may be: float32 sums, one rounding."""
    a, b = rows.astype(np.float64), w.astype(np.float64)
    unit = 2.0**-8 if model.dtype == "bfloat16" else 2.0**-11
    product, size = a @ b, np.abs(a) @ np.abs(b)
    error = size * (model.h + 8) * 2.0**-23
    if model.gated:
        gate, up = product[:, : model.f], product[:, model.f :]
        gate_error, up_error = error[:, : model.f], error[:, model.f :]
        silu = gate / (1 + np.exp(-gate))
        product = silu * up
        error = 1.1 * gate_error * (np.abs(up) + up_error) + np.abs(silu) * up_error + np.abs(product) * (np.abs(gate) + 16) * 2.0**-23
    return product, error + (np.abs(product) + error) * unit + 2.0**-24


def check(model: Model, size: int, rank: int, known: RankRouting, gathered: list[tuple[Any, Any]], w: Any, d: mk.Dispatched) -> list[str]:
    """What is wrong with a rank's result. ``gathered``: x and weights of every rank."""
    wrong = []
    offsets = np.asarray(d.expert_offsets)
    routing = d.routing
    for name in ("topk_ids", "rows", "experts", "sums", "listed", "counts", "expert_offsets"):
        if not np.array_equal(getattr(routing, name), getattr(known, name)):
            wrong.append(f"routing.{name}: {getattr(routing, name).tolist()} instead of {getattr(known, name).tolist()}")
    if wrong:
        return wrong
    source, y = np.asarray(d.source)[: offsets[-1]], np.asarray(d.y)
    if not np.array_equal(source, known.source[: offsets[-1]]):
        wrong.append("source")
        return wrong
    for e in range(model.experts):
        of_e = source[offsets[e] : offsets[e + 1]]
        valid = np.flatnonzero(of_e[:, 0] >= 0)
        if not len(valid):
            continue
        a = np.stack([gathered[r][0][t] for r, t, _ in of_e[valid]])
        values, bound = expected(model, a, w[e])
        got = y[offsets[e] + valid].astype(np.float64)
        bad = ~(np.abs(got - values) <= bound)
        if bad.any():
            wrong.append(f"expert {e}: {bad.sum()} of {bad.size} elements of y, first at {np.argwhere(bad)[0].tolist()}")
        if model.weighted:
            weights = np.array([gathered[r][1][t, k] for r, t, k in of_e[valid]], np.float32)
            if not np.array_equal(np.asarray(d.row_weight)[offsets[e] + valid], weights):
                wrong.append(f"expert {e}: row_weight")
    return wrong


def dispatch(model: Model, seed: int, world: Any, call: int, ids: Any, **options: Any) -> mk.Dispatched:
    """One call on any target; the result's arrays are on the host."""
    x, w, weights = inputs(model, seed, world.rank, call, len(ids))
    x, ids, weights = map(world.xp.asarray, (x, ids, weights))
    w = world.xp.asarray(w) if model.row_major else world.xp.asarray(w.transpose(0, 2, 1)).transpose(0, 2, 1)
    given: dict[str, Any] = {"activation": "swiglu" if model.gated else None, "max_tokens": model.max_tokens, "alignment": model.alignment}
    d = mk.moe_dispatch_gemm(x, ids, w, topk_weights=weights if model.weighted else None, **{**given, **options})
    on_host = [None if array is None else array.get() if hasattr(array, "get") else array for array in (*d[:4], *d.routing)]
    return mk.Dispatched(*on_host[:4], mk.Routing(*on_host[4:]))


def _rank(world: Any, model: Model, seed: int, kinds: tuple[str, ...]) -> list[str]:
    rng, wrong = np.random.default_rng(seed), []
    shape = Topology(world.size, world.ranks_per_node)
    max_rows = most_rows(shape.size, model.max_tokens, model.topk, model.experts, model.alignment)
    for call, kind in enumerate(kinds):
        ids = draw_ids(rng, model, world.size, kind)
        d = dispatch(model, seed, world, call, ids[world.rank])
        known = reference_routing(ids, shape, model.experts * world.size, model.max_tokens, max_rows, model.alignment)[world.rank]
        gathered = [inputs(model, seed, r, call, len(ids[r]))[::2] for r in range(world.size)]
        found = check(model, world.size, world.rank, known, gathered, inputs(model, seed, world.rank, call, 0)[1], d)
        wrong += [f"rank {world.rank}, call {call} ({kind}): {text}" for text in found]
    return wrong


@contextlib.contextmanager
def small_puts(seed: int, put_bytes: int = 256) -> Iterator[None]:
    """A few rows are several puts, which a slow network brings in any order; and CTAs count few tokens each by itself, or not."""
    faults = _FAULTS(seed=seed, delay_us=20.0, reorder_us=20.0)
    alone = (0, 60, planner.COUNTED_ALONE)[seed % 3]
    with (
        mock.patch.object(emulated, "Faults", lambda: faults),
        mock.patch.multiple(planner, PUT_BYTES=put_bytes, COUNTED_ALONE=alone),
    ):
        yield


@contextlib.contextmanager
def narrow_tiles() -> Iterator[None]:
    """Tiles whose halves are no whole panels: those of few rows are multiplied whole."""
    with mock.patch.object(planner, "choose_tile", lambda problem: planner.fitting_tile(problem)(128 if problem.gated else 64)):
        yield


@errors_are_findings
def found_wrong(
    world: str, model: Model, seed: int, kinds: tuple[str, ...] = ROUTINGS, target: str = "cpu", put_bytes: int = 256, **options: Any
) -> str | None:
    """What is wrong with calls of these routings, one after the other."""
    shape = topology(world)
    defaults: dict[str, Any] = {"heap_bytes": 64 << 20, "timeout": 5.0, "entry_timeout": 60.0}
    if target == "cpu":
        defaults["seed"] = seed
    with small_puts(seed, put_bytes):
        return wrong_of(mk.launch(_rank, shape.size, shape.ranks_per_node, target, (model, seed, kinds), **{**defaults, **options}))


def _overwriting(world: Any, ids: list[Any]) -> list[str]:
    model, own = _FROM_HEAP, ids[world.rank]
    x, w, found = world.empty((model.max_tokens, model.h), np.float16), np.ones((model.experts, model.h, model.f), np.float16), []
    for call in range(2 * world.size):
        x[:] = world.rank + call
        if world.rank == call % world.size:  # its first CTA rests amid its copies, longer than the others take
            world.backend.thread_ranks.hold(world.rank, 2_000_000, 1, 0)
        d = mk.moe_dispatch_gemm(x[: len(own)], own, w, max_tokens=model.max_tokens)
        x[:] = np.nan
        if not (d.y[: d.rows()] == model.h * (d.source[: d.rows(), :1] + call)).all():
            found.append(f"rank {world.rank}, call {call}")
    return found


def found_overwritten(world: str, seed: int) -> str | None:
    """What is wrong with calls whose x lies on the heap, where other ranks read it, and is overwritten as soon as they have ended."""
    shape = topology(world)
    ids = draw_ids(np.random.default_rng(seed), _FROM_HEAP, shape.size, "uniform")
    options: dict[str, Any] = {"heap_bytes": 64 << 20, "timeout": 5.0, "entry_timeout": 60.0, "seed": seed}
    found = mk.launch(_overwriting, shape.size, shape.ranks_per_node, "cpu", (ids,), **options)
    wrong = [text for of_rank in found for text in of_rank]
    return "wrong: " + "; ".join(wrong) if wrong else None
