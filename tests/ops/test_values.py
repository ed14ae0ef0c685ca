"""What is not finite stays where it belongs: with its token, its expert, its sequence. All other results keep their bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from tests.ops import varlen_body
from tests.ops.body import topology
from tests.ops.moe_body import DTYPES
from tests.ops.planted_bug import Bug

WORLD: dict[str, Any] = {"target": "cpu", "heap_bytes": 1 << 27, "specialize": "none"}
WORLDS = ["1x1", "1x2", "1x4", "2x2"]
NOT_FINITE = np.nan, np.inf, -np.inf


def launch(function: Any, world: str, *args: Any) -> list[Any]:
    shape = topology(world)
    return mk.launch(function, shape.size, shape.ranks_per_node, args=args, **WORLD)


def _layer(world: Any, seed: int, of: str) -> list[str]:
    """Two calls of a layer, of which one has a token, or an expert's factors, that are not finite."""
    rng, size = np.random.default_rng(seed), world.size
    tokens, h, f, experts = int(rng.integers(1, 70)), 64, 32, int(rng.integers(1, 4))
    topk, dtype = int(rng.integers(1, min(4, experts * size) + 1)), DTYPES[str(rng.choice(["bfloat16", "float16"]))]
    x = rng.standard_normal((size, tokens, h)).astype(dtype)
    ids = np.array([[rng.permutation(experts * size)[:topk] for _ in range(tokens)] for _ in range(size)], np.int32)
    weights = rng.random((size, tokens, topk)).astype(np.float32)
    up, down = ((rng.standard_normal((size, experts, *shape)) * 0.1).astype(dtype) for shape in ((h, 2 * f), (f, h)))
    rank, token, expert, value = (
        int(rng.integers(size)),
        int(rng.integers(tokens)),
        int(rng.integers(experts * size)),
        rng.choice(NOT_FINITE),
    )
    results = []
    for spoiled in (False, True):
        if spoiled and of == "token":
            x[rank, token] = value
        elif spoiled:
            up[expert // experts, expert % experts] = value
        mine = (array[world.rank].copy() for array in (x, ids, weights, up, down))
        results.append(np.array(mk.moe_layer(*mine, max_tokens=tokens + 3)))
    touched = (ids[world.rank] == expert).any(1)
    if of == "token":
        touched = np.arange(tokens) == (token if world.rank == rank else -1)
    before, after = (result.view(np.uint16) for result in results)
    wrong = [] if (before == after)[~touched].all() else [f"other tokens than the {of}'s have changed"]
    return wrong if not np.isfinite(results[1][touched].astype(np.float32)).all(1).any() else [*wrong, f"the {of}'s tokens are finite"]


@pytest.mark.parametrize("of", ["token", "expert"])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.drawn(4)
def test_a_layer(rng: np.random.Generator, world: str, of: str) -> None:
    for seed in rng.integers(1 << 30, size=3):
        assert launch(_layer, world, int(seed), of) == [[]] * topology(world).size, seed


def _packed(world: Any, seed: int) -> list[str]:
    """Two calls on packed sequences, one of which is then not finite, in its keys, in its values or in all."""
    rng = np.random.default_rng(seed)
    causal = bool(rng.random() < 0.6)
    model = dataclasses.replace(varlen_body.PLANTED, causal=causal, layout="zigzag" if causal and rng.random() < 0.5 else "contiguous")
    packed = varlen_body.Packed(tuple(int(n) for n in rng.integers(1, 200, rng.integers(2, 6))), 0)
    spoiled, value = int(rng.integers(len(packed.lengths))), rng.choice(NOT_FINITE)
    arrays, which = varlen_body.whole(model, seed, 0, packed), [(2,), (1,), (1, 2), (0, 1, 2)][int(rng.integers(4))]
    ends = packed.ends()
    at = varlen_body.places(model, packed, world.rank, world.size)
    others = (at >= 0) & ~((at >= ends[spoiled]) & (at < ends[spoiled + 1]))
    results = []
    for again in (False, True):
        for array in which if again else ():
            arrays[array][ends[spoiled] : ends[spoiled + 1]] = value
        mine = varlen_body.inputs(model, arrays, packed, world.rank, world.size)
        o, lse = mk.ring_attention_varlen(*mine, np.array(ends, np.int32), causal=causal, layout=model.layout)
        results.append((np.array(o)[others].view(np.uint16), np.array(lse)[:, others]))
    (o, lse), (other_o, other_lse) = results
    return [] if np.array_equal(o, other_o) and np.array_equal(lse, other_lse) else [f"{packed}: sequence {spoiled} changes others"]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.drawn(2)
def test_packed_sequences(rng: np.random.Generator, world: str) -> None:
    for seed in rng.integers(1 << 30, size=4):
        assert launch(_packed, world, int(seed)) == [[]] * topology(world).size, seed


_KEPT = Bug("values that belong to nobody are kept", "attention/load.cuh", "block.is_padded && block.rows < Shape::kKeyBlock", "false")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("world", ["1x1", "1x2"])
def test_values_of_others_are_seen(rng: np.random.Generator, world: str, tmp_path: Path) -> None:
    with _KEPT.in_force(tmp_path / "kernels_src"):
        assert any(launch(_packed, world, int(seed)) != [[]] * topology(world).size for seed in rng.integers(1 << 30, size=60))
