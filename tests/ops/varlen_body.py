"""Drawn calls of ``ring_attention_varlen``, every element of every rank checked. What tests and planted bugs share."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

import mkernel as mk
from mkernel.planner import ring_attention as planner
from mkernel.tools.attention import reference, worst
from tests.ops.ring_body import DTYPES, TINY, Model, launch
from tests.shared.findings import errors_are_findings, wrong_of


class Packed(NamedTuple):
    """The sequences of a call, by their lengths, and how many rows a rank has behind them."""

    lengths: tuple[int, ...]
    spare: int = 0

    def rows(self, ranks: int, parts: int) -> int:
        """Rows of a rank."""
        return sum(parts * math.ceil(length / (parts * ranks)) for length in self.lengths) + self.spare

    def ends(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]


ROOM = 64  # numbers
PLANTED = Model(2, 1, 64, "bfloat16", True, "zigzag")  # of calls that a faulty kernel makes
PLANTED_CALLS = (Packed((9, 700, 0, 1, 300), 3), Packed((40, 1600, 2), 0))


def draw_packed(rng: np.random.Generator, model: Model, ranks: int, most: int) -> Packed:
    """Sequences that have at most about so many scores, short ones and at times a long one, in any order."""
    longest = int((most / model.heads) ** 0.5 * (64 / model.d) * 0.7)
    edges = [0, 1, 2 * ranks, 2 * ranks + 1, 2 * ranks - 1, 128 * ranks, 256 * ranks + 1]
    lengths = [int(rng.choice(edges)) for _ in range(rng.integers(1, 5))]
    lengths += [int(2 ** rng.uniform(0, np.log2(longest) - 1.5)) for _ in range(rng.integers(0, 6))]
    lengths = [min(length, longest) for length in lengths]
    if rng.integers(2):
        lengths.append(longest)
    return Packed(tuple(int(x) for x in rng.permutation(lengths)), int(rng.choice([0, 0, 1, 37])))


def held(length: int, rank: int, ranks: int, layout: str) -> Any:
    """Positions in a sequence of the rows that a rank holds of it; those of padding are not below ``length``."""
    parts = 2 if layout == "zigzag" else 1
    rows = math.ceil(length / (parts * ranks))
    chunks = (rank, 2 * ranks - 1 - rank)[:parts]
    return np.concatenate([chunk * rows + np.arange(rows) for chunk in chunks])


def whole(model: Model, seed: int, call: int, packed: Packed) -> list[Any]:
    """q, k and v of all ranks: (rows of all sequences, heads, D)."""
    rng = np.random.default_rng([seed, call])
    heads = (model.heads, model.kv_heads, model.kv_heads)
    return [rng.standard_normal((sum(packed.lengths), h, model.d)).astype(DTYPES[model.dtype]) for h in heads]


def places(model: Model, packed: Packed, rank: int, ranks: int) -> Any:
    """The row of the whole that each row of a rank is; -1: it is padding."""
    found = [np.zeros(0, np.int64)]
    for begin, length in zip(packed.ends(), packed.lengths, strict=False):
        at = held(length, rank, ranks, model.layout)
        found.append(np.where(at < length, begin + at, -1))
    return np.concatenate([*found, np.full(packed.spare, -1)]).astype(np.int64)


def room(model: Model, rows: int, heads: int, dtype: Any) -> Any:
    if not model.strided:
        return np.full((rows, heads, model.d), np.nan, dtype)
    return np.full((rows, heads + 1, model.d + 8), np.nan, dtype)[:, :heads, : model.d]


def inputs(model: Model, arrays: list[Any], packed: Packed, rank: int, ranks: int) -> list[Any]:
    """q, k and v of a rank; NaN in rows of padding."""
    at, found = places(model, packed, rank, ranks), []
    for array in arrays:
        mine = room(model, len(at), array.shape[1], array.dtype)
        mine[at >= 0] = array[at[at >= 0]]
        found.append(mine)
    return found


def one_call(model: Model, arrays: list[Any], ends: Any, split: mk.Split | None = None) -> Any:
    """One call, whose arrays are overwritten once it has ended: nobody may read them any longer."""
    q, k, v = arrays
    out = None
    if model.given:
        out = room(model, q.shape[0], model.heads, q.dtype), np.full((model.heads, q.shape[0]), np.nan, np.float32)
    before = [array.copy() for array in (*arrays, ends)]
    how: dict[str, Any] = {"causal": model.causal, "scale": model.scale, "layout": model.layout, "split": split}
    found = mk.ring_attention_varlen(q, k, v, ends, out=out, **how)
    for array, copy in zip((*arrays, ends), before, strict=True):
        assert np.array_equal(array, copy, equal_nan=array.dtype != np.int32), "inputs are only read"
    assert out is None or (found.o is out[0] and found.lse is out[1])
    for array in arrays:
        array[...] = np.nan
    ends[...] = -7
    return found


def errors(model: Model, arrays: list[Any], packed: Packed, rank: int, ranks: int, o: Any, lse: Any) -> list[str]:
    """What is wrong with a rank's result."""
    q, k, v = arrays
    at, wrong = places(model, packed, rank, ranks), []
    padding = at < 0
    if not (np.all(np.asarray(o[padding]).view(np.uint16) == 0) and np.all(lse[:, padding] == -np.inf)):
        wrong.append("rows of padding")
    scale = model.d**-0.5 if model.scale is None else model.scale
    for i, (begin, end) in enumerate(itertools.pairwise(packed.ends())):
        mine = np.flatnonzero((at >= begin) & (at < end))
        visible = np.arange(begin, end)[None] <= at[mine][:, None] if model.causal else None
        for head in range(model.heads):
            of = head // (model.heads // model.kv_heads)
            expected = reference(np, q[at[mine], head], k[begin:end, of], v[begin:end, of], scale, model.dtype, visible)
            found = worst(np, o[mine, head], lse[head, mine], expected)
            if not found <= 1:
                wrong.append(f"sequence {i} of {end - begin} rows, head {head}: {found:g} of its bound")
    return wrong


def _rank(world: Any, model: Model, seed: int, calls: tuple[Packed, ...]) -> list[str]:
    wrong = []
    memory = np.zeros(ROOM, np.int32)  # where cu_seqlens of every call lies
    for call, packed in enumerate(calls):
        arrays = whole(model, seed, call, packed)
        ends = memory[: len(packed.lengths) + 1]
        ends[...] = packed.ends()
        found = one_call(model, inputs(model, arrays, packed, world.rank, world.size), ends)
        for text in errors(model, arrays, packed, world.rank, world.size, *found):
            wrong.append(f"rank {world.rank}, call {call} ({packed}): {text}")
    return wrong


@errors_are_findings
def found_wrong(world: str, model: Model, seed: int, calls: tuple[Packed, ...], scale: planner.Scale = TINY, **options: Any) -> str | None:
    """What is wrong with these calls, one after the other."""
    return wrong_of(launch(_rank, world, seed, (model, seed, calls), scale, **options))


def _digests(world: Any, model: Model, seed: int, calls: tuple[Packed, ...]) -> list[str]:
    digests = []
    for call, packed in enumerate(calls):
        arrays = inputs(model, whole(model, seed, call, packed), packed, world.rank, world.size)
        o, lse = one_call(model, arrays, np.array(packed.ends(), np.int32))
        digests.append(hashlib.sha256(np.ascontiguousarray(o).tobytes() + lse.tobytes()).hexdigest())
    return digests


def digests(world: str, model: Model, seed: int, calls: tuple[Packed, ...], schedule: int, **options: Any) -> list[list[str]]:
    """Digests of the results, by rank and call."""
    return launch(_digests, world, schedule, (dataclasses.replace(model, given=False), seed, calls), **options)
