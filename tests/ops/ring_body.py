"""Drawn calls of ``ring_attention``, every element of every rank checked. What tests and planted bugs share."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

import mkernel as mk
from mkernel.planner import ring_attention as planner
from mkernel.tools.attention import positions, reference, worst
from mkernel.transport import emulated
from tests.ops.body import topology
from tests.shared.findings import errors_are_findings, wrong_of

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
WORLDS = ("1x1", "1x2", "1x4", "2x2", "4x1", "3x2")
TINY = planner.Scale(chunk_bytes=1, window_bytes=1, fewest=1)  # chunks of one key block, one slot per ring
_FAULTS = emulated.Faults


@dataclasses.dataclass(frozen=True)
class Model:
    """What the calls of one test have in common: one kernel's constants, and more.

    ``strided``: arrays are (B, S, H, D) transposed, with room between rows. ``given``: results are the caller's.
    """

    heads: int
    kv_heads: int
    d: int
    dtype: str
    causal: bool
    layout: str
    scale: float | None = None
    strided: bool = False
    given: bool = False

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if not self.strided:
            return np.empty(shape, dtype)
        batches, heads, rows, d = shape
        return np.full((batches, rows, heads + 1, d + 8), np.nan, dtype)[:, :, :heads, :d].transpose(0, 2, 1, 3)


PLANTED = Model(2, 1, 64, "bfloat16", True, "zigzag")  # of calls that a faulty kernel makes
PLANTED_SIZES = ((1, 776), (2, 140), (1, 2))  # some key blocks, the last one short; one
BY_POSITION_SIZES = ((5, 140), (1, 776))  # where keys are read by position: many sequences, so that items of several are worked on at once
SHARED_SIZES = ((1, 428), (1, 2))  # where CTAs share keys: the last share of a tile has not its last blocks
PLANTED_SCALES = {  # by workload
    "ring": TINY,
    "ring deep": planner.Scale(chunk_bytes=1, window_bytes=1, fewest=8),
    "ring shared": planner.Scale(chunk_bytes=1, window_bytes=1, fewest=1, shares=3),
    "ring of longer chunks": planner.Scale(chunk_bytes=150_000, window_bytes=1, fewest=1),
}


def draw_model(rng: np.random.Generator, d: int, causal: bool, layout: str, dtype: str) -> Model:
    kv_heads = int(rng.integers(1, 4))
    scale = None if rng.integers(2) else float(rng.uniform(0.01, 0.3))
    strided, given = bool(rng.integers(2)), bool(rng.integers(2))
    return Model(kv_heads * int(rng.integers(1, 4)), kv_heads, d, dtype, causal, layout, scale, strided, given)


def draw_sizes(rng: np.random.Generator, model: Model, ranks: int, most: int) -> tuple[int, int]:
    """B and S/W of a call that has at most about so many scores."""
    batches = int(rng.integers(1, 4))
    longest = max(2.0, (most / (batches * model.heads * ranks**2)) ** 0.5 * (64 / model.d))
    length = int(2 ** rng.uniform(0, np.log2(longest)))
    return batches, length + (length % 2 if model.layout == "zigzag" else 0)


def inputs(model: Model, seed: int, rank: int, call: int, batches: int, length: int) -> tuple[Any, Any, Any]:
    """q, k and v of a rank."""
    rng = np.random.default_rng([seed, rank, call])
    found = []
    for heads in (model.heads, model.kv_heads, model.kv_heads):
        array = model.array((batches, heads, length, model.d), DTYPES[model.dtype])
        array[...] = rng.standard_normal(array.shape)
        found.append(array)
    return found[0], found[1], found[2]


def errors(model: Model, ranks: int, rank: int, gathered: list[Any], o: Any, lse: Any) -> list[str]:
    """What is wrong with a rank's result. ``gathered``: q, k and v of every rank."""
    q = gathered[rank][0]
    held = [positions(q.shape[2], r, ranks, model.layout) for r in range(ranks)]
    visible = np.concatenate(held)[None] <= held[rank][:, None] if model.causal else None
    wrong = []
    scale = model.d**-0.5 if model.scale is None else model.scale
    for batch in range(q.shape[0]):
        for head in range(model.heads):
            of = head // (model.heads // model.kv_heads)
            k, v = (np.concatenate([gathered[r][i][batch, of] for r in range(ranks)]) for i in (1, 2))
            expected = reference(np, q[batch, head], k, v, scale, model.dtype, visible)
            found = worst(np, o[batch, head], lse[batch, head], expected)
            if not found <= 1:
                wrong.append(f"batch {batch}, head {head}: {found:g} of its bound")
    return wrong


def one_call(model: Model, arrays: tuple[Any, Any, Any], split: mk.Split | None = None) -> Any:
    """One call, whose arrays are overwritten once it has ended: nobody may read them any longer."""
    q, k, v = arrays
    out = None
    if model.given:
        out = model.array(q.shape, q.dtype), np.full(q.shape[:3], np.nan, np.float32)
        out[0][...] = np.nan
    before = [array.copy() for array in arrays]
    found = mk.ring_attention(q, k, v, causal=model.causal, scale=model.scale, layout=model.layout, out=out, split=split)
    assert all(np.array_equal(array, copy) for array, copy in zip(arrays, before, strict=True)), "inputs are only read"
    assert out is None or (found.o is out[0] and found.lse is out[1])
    for array in arrays:
        array[...] = np.nan
    return found


def _rank(world: Any, model: Model, seed: int, sizes: tuple[tuple[int, int], ...]) -> list[str]:
    wrong = []
    for call, (batches, length) in enumerate(sizes):
        gathered = [inputs(model, seed, r, call, batches, length) for r in range(world.size)]
        found = one_call(model, inputs(model, seed, world.rank, call, batches, length))
        for text in errors(model, world.size, world.rank, gathered, *found):
            wrong.append(f"rank {world.rank}, call {call} (B {batches}, {length} rows): {text}")
    return wrong


def launch(function: Any, world: str, seed: int, arguments: tuple[Any, ...], scale: planner.Scale = TINY, **options: Any) -> list[Any]:
    """``function`` on all ranks, with a small window and a network that delays and reorders."""
    shape, faults = topology(world), _FAULTS(seed=seed, delay_us=20.0, reorder_us=20.0)
    defaults: dict[str, Any] = {"heap_bytes": 64 << 20, "timeout": 5.0, "entry_timeout": 60.0, "seed": seed}
    with mock.patch.object(emulated, "Faults", lambda: faults), mock.patch.object(planner, "SCALE", scale):
        return mk.launch(function, shape.size, shape.ranks_per_node, "cpu", arguments, **{**defaults, **options})


@errors_are_findings
def found_wrong(
    world: str, model: Model, seed: int, sizes: tuple[tuple[int, int], ...], scale: planner.Scale = TINY, **options: Any
) -> str | None:
    """What is wrong with calls of these sizes, B and S/W, one after the other."""
    return wrong_of(launch(_rank, world, seed, (model, seed, sizes), scale, **options))


def _digests(world: Any, model: Model, seed: int, sizes: tuple[tuple[int, int], ...], late: tuple[int, int, int] | None) -> list[str]:
    digests = []
    for call, (batches, length) in enumerate(sizes):
        if late is not None and late[0] == world.rank:
            world.backend.thread_ranks.hold(world.rank, 2_000_000 + call, late[2], late[1])
        o, lse = one_call(model, inputs(model, seed, world.rank, call, batches, length))
        digests.append(hashlib.sha256(np.ascontiguousarray(o).tobytes() + lse.tobytes()).hexdigest())
    return digests


def digests(
    world: str,
    model: Model,
    seed: int,
    sizes: tuple[tuple[int, int], ...],
    schedule: int,
    late: tuple[int, int, int] | None,
    **options: Any,
) -> list[list[str]]:
    """Digests of the results, by rank and call. ``late``: a rank, one of its CTAs, and after how many copies it rests."""
    return launch(_digests, world, schedule, (model, seed, sizes, late), **options)
