"""``mk.ring_attention`` on target cpu: every element against float64, in any world, for any sizes, through windows of one chunk."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.errors import ArgumentError
from mkernel.planner import ring_attention as planner
from mkernel.planner.ring_problem import LAYOUTS
from tests.ops import ring_body
from tests.ops.ring_body import DTYPES, TINY, WORLDS, Model, draw_model, draw_sizes, found_wrong

SHARED = planner.Scale(chunk_bytes=100_000, window_bytes=300_000, fewest=3)  # chunks of some key blocks, some slots


FULL, CAUSAL, ZIGZAG, DEALT = ("full", "contiguous"), ("causal", "contiguous"), ("causal", "zigzag"), ("full", "zigzag")
# A kernel takes seconds to compile: few of them in `make test`, which other tests use too.
FEW = [("1x4", ZIGZAG, 64, "bfloat16"), ("2x2", FULL, 128, "float16"), ("3x2", CAUSAL, 64, "float16"), ("2x2", ZIGZAG, 64, "bfloat16")]
MANY = [case for case in itertools.product(WORLDS, (FULL, CAUSAL, ZIGZAG, DEALT), (64, 128), ("bfloat16", "float16")) if case not in FEW]


@pytest.mark.parametrize("scale", [pytest.param(TINY, id="tiny"), pytest.param(SHARED, id="shared")])
@pytest.mark.parametrize(("world", "mask", "d", "dtype"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MANY)])
@pytest.mark.drawn(3)
def test_every_element(rng: np.random.Generator, world: str, mask: tuple[str, str], d: int, dtype: str, scale: planner.Scale) -> None:
    ranks = ring_body.topology(world).size
    model = draw_model(rng, d, mask[0] == "causal", mask[1], dtype)
    sizes = tuple(draw_sizes(rng, model, ranks, most) for most in (1 << 22, 1 << 18))
    assert found_wrong(world, model, int(rng.integers(1 << 30)), sizes, scale) is None


@pytest.mark.cases(world=WORLDS, mask=(FULL, CAUSAL, ZIGZAG, DEALT), d=(64, 128), shares=(2, 3, 8))
@pytest.mark.drawn(1)
def test_shared_keys(rng: np.random.Generator, world: str, mask: tuple[str, str], d: int, shares: int) -> None:
    """Where tiles are fewer than CTAs; also shares that have no block of a chunk, of a rank, or at all."""
    ranks = ring_body.topology(world)
    model = draw_model(rng, d, mask[0] == "causal", mask[1], str(rng.choice(list(DTYPES))))
    sizes = tuple(draw_sizes(rng, model, ranks.size, most) for most in (1 << 20, 1 << 18, 1 << 16))
    scale = dataclasses.replace((TINY, SHARED)[rng.integers(2)], shares=shares)
    tiles = max(batches * model.heads * 2 * -(-length // 128) for batches, length in sizes[1:])
    computing = min(60 // ranks.size, int(rng.integers(tiles, shares * tiles + 3)))
    with env.override(MKERNEL_CPU_SMS=ranks.ranks_per_node + ranks.num_nodes - 2 + computing):
        assert found_wrong(world, model, int(rng.integers(1 << 30)), sizes, scale) is None, (model, sizes)


@pytest.mark.parametrize(
    ("world", "layout"),
    [("2x2", "zigzag"), *(pytest.param(world, layout, marks=pytest.mark.slow) for world in ("1x2", "4x1") for layout in LAYOUTS)],
)
def test_edges_of_masks(rng: np.random.Generator, world: str, layout: str) -> None:
    """Rows that see one key, keys that end with a tile, tiles of one row; then nothing at all."""
    model = Model(2, 1, 64, "bfloat16", True, layout)
    sizes = ((1, 2), (1, 128), (2, 130), (0, 8), (1, 384), (3, 0), (1, 386))
    assert found_wrong(world, model, int(rng.integers(1 << 30)), sizes) is None


@pytest.mark.parametrize("layout", [pytest.param("contiguous", marks=pytest.mark.slow), "zigzag"])
def test_pairs_that_take_turns(rng: np.random.Generator, layout: str) -> None:
    """A rank that is alone: tiles of some pairs take turns, of the last ones fewer, and CTAs take them when they have time."""
    model, length = Model(4, 2, 64, "bfloat16", True, layout), int(2 * rng.integers(140, 200))
    sizes = ((3, length), (5, 130), (1, 2))
    for pairs in (1, 4, 5):
        scale = dataclasses.replace(TINY, together_bytes=pairs * 2 * length * 64 * 2)
        with env.override(MKERNEL_CPU_SMS=4):
            assert found_wrong("1x1", model, int(rng.integers(1 << 30)), sizes, scale) is None, (length, pairs)


def _first_row(world: Any) -> list[Any]:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 2, 4, 64)).astype(np.float16) for _ in range(3))
    o, lse = mk.ring_attention(q, k, v, causal=True)
    scores = (q[0, :, 0].astype(np.float64) * k[0, :, 0].astype(np.float64)).sum(1) / 8
    return [np.array_equal(o[0, :, 0], v[0, :, 0]), np.abs(lse[0, :, 0] - scores).max() < 1e-4]


def test_the_first_row_of_a_causal_sequence_sees_one_key() -> None:
    assert mk.launch(_first_row, 2, target="cpu")[0] == [True, True]


@pytest.mark.parametrize("world", ["2x2", pytest.param("1x4", marks=pytest.mark.slow)])
def test_the_same_bits_under_any_schedule(request: pytest.FixtureRequest, rng: np.random.Generator, world: str) -> None:
    """Ranks and CTAs that rest amid their copies, windows of any size, other splits: results do not depend on who is late."""
    seed, runs = int(rng.integers(1 << 30)), 50 if request.config.getoption("--full") else 3
    model = Model(2, 1, 64, "bfloat16", True, "zigzag")
    sizes = ((1, 260), (2, 70))
    ranks = ring_body.topology(world).size
    expected = ring_body.digests(world, model, seed, sizes, 0, None)
    for run in range(runs):
        late = (int(rng.integers(ranks)), int(rng.integers(4)), int(2 ** rng.uniform(0, 5)))
        options: dict[str, Any] = {
            "scale": (TINY, SHARED)[run % 2],
            "max_sms": 3 + ranks // ring_body.topology(world).num_nodes - 2 + run % 2,
        }
        assert ring_body.digests(world, model, seed, sizes, int(rng.integers(1 << 30)), late, **options) == expected, (run, late)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["1x1", "1x2", "2x2"])
def test_shared_keys_have_the_same_bits_under_any_schedule(rng: np.random.Generator, world: str) -> None:
    seed, ranks = int(rng.integers(1 << 30)), ring_body.topology(world).size
    model, sizes = Model(2, 1, 64, "bfloat16", True, "zigzag"), ((1, 260), (1, 70), (2, 20))
    scales = [dataclasses.replace(scale, shares=3) for scale in (TINY, SHARED)]
    with env.override(MKERNEL_CPU_SMS=16):
        expected = ring_body.digests(world, model, seed, sizes, 0, None, scale=scales[0])
        assert expected != ring_body.digests(world, model, seed, sizes, 0, None, scale=dataclasses.replace(TINY, shares=1))
        for run in range(12):
            late = (int(rng.integers(ranks)), int(rng.integers(14)), int(2 ** rng.uniform(0, 5)))
            schedule = int(rng.integers(1 << 30))
            assert ring_body.digests(world, model, seed, sizes, schedule, late, scale=scales[run % 2]) == expected, (run, late)


def _refuses(world: Any, cases: list[tuple[dict[str, Any], str]]) -> list[str]:
    wrong = []
    for changes, message in cases:
        shapes: dict[str, Any] = {"q": (1, 4, 8, 64), "k": (1, 2, 8, 64), "v": (1, 2, 8, 64)}
        arrays = {name: changes.get(name, np.zeros(shape, np.float16)) for name, shape in shapes.items()}
        options = {name: value for name, value in changes.items() if name not in shapes}
        try:
            mk.ring_attention(*arrays.values(), **options)
        except ArgumentError as error:
            if message not in str(error):
                wrong.append(f"{changes}: {error}")
        else:
            wrong.append(f"{changes}: accepted")
    o, _ = mk.ring_attention(*(np.ones(shape, np.float16) for shape in shapes.values()), causal=True)
    return [*wrong, *([] if (o == 1).all() else ["the world is not usable"])]


def test_what_does_not_fit_is_refused() -> None:
    def zeros(*shape: int, dtype: Any = np.float16) -> Any:
        return np.zeros(shape, dtype)

    flat = np.zeros(4 * 8 * 65 + 8, np.float16)
    odd = np.lib.stride_tricks.as_strided(flat, (1, 4, 8, 64), (4 * 8 * 130, 8 * 130, 130, 2))
    q = zeros(1, 4, 8, 64)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"q": zeros(4, 8, 64)}, "must be 4: (B, heads, S/W, D)"),
        ({"q": zeros(1, 4, 8, 64, dtype=np.float32)}, "q.dtype = float32"),
        ({"k": zeros(1, 2, 8, 64, dtype=np.float32)}, "k.dtype = float32"),
        ({"q": zeros(1, 4, 8, 96), "k": zeros(1, 2, 8, 96), "v": zeros(1, 2, 8, 96)}, "must be 64 or 128"),
        ({"k": zeros(1, 2, 9, 64)}, "both alike"),
        ({"k": zeros(1, 2, 9, 64), "v": zeros(1, 2, 9, 64)}, "both alike"),
        ({"k": zeros(1, 3, 8, 64), "v": zeros(1, 3, 8, 64)}, "Hkv must divide Hq = 4"),
        ({"causal": 1}, "must be True or False"),
        ({"layout": "striped"}, "must be one of contiguous, zigzag"),
        ({"scale": 0.0}, "must be a positive number"),
        ({"scale": float("nan")}, "must be a positive number"),
        (
            {"q": zeros(1, 4, 7, 64), "k": zeros(1, 2, 7, 64), "v": zeros(1, 2, 7, 64), "layout": "zigzag"},
            "must be even with layout zigzag",
        ),
        ({"q": odd}, "must be positive multiples of 16 bytes"),
        ({"q": zeros(1, 4, 8, 128)[..., ::2]}, "D must be contiguous"),
        ({"q": flat[1 : 1 + 4 * 8 * 64].reshape(1, 4, 8, 64)}, "must start at a multiple of 16 bytes"),
        ({"out": zeros(1, 4, 8, 64)}, "must be a tuple of 2 arrays: o, lse"),
        ({"out": (zeros(1, 4, 9, 64), zeros(1, 4, 8, dtype=np.float32))}, "out.o.shape"),
        ({"out": (zeros(1, 4, 8, 64), zeros(1, 4, 9, dtype=np.float32))}, "out.lse.shape"),
        ({"out": (zeros(1, 4, 8, 64), zeros(1, 4, 8))}, "must be float32"),
        ({"out": (zeros(1, 4, 8, 64), zeros(1, 4, 16, dtype=np.float32)[..., ::2])}, "must be contiguous"),
        ({"q": q, "out": (q, zeros(1, 4, 8, dtype=np.float32))}, "overlaps q"),
        ({"out": (np.broadcast_to(zeros(1, 1, 8, 64), (1, 4, 8, 64)), zeros(1, 4, 8, dtype=np.float32))}, "out.o.strides"),
        ({"split": mk.Split(compute=99)}, "SMs"),
    ]
    assert mk.launch(_refuses, 2, target="cpu", args=(cases,)) == [[], []]


def _disagree(world: Any, changes: dict[str, Any], shape: tuple[int, ...]) -> None:
    x = np.zeros((1, 2, 8, 64), np.float16)
    options: dict[str, Any] = {"causal": True}
    mk.ring_attention(x, x, x, **options)
    if world.rank == 1:
        options, x = options | changes, np.zeros(shape, np.float16)
    mk.ring_attention(x, x, x, **options)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [({}, (2, 2, 4, 64)), ({}, (17, 2, 8, 64)), ({}, (1, 2, 9, 64)), ({"causal": False}, (1, 2, 8, 64)), ({"scale": 2.0}, (1, 2, 8, 64))],
)
def test_ranks_that_disagree_are_told(changes: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Also of sizes whose code has the same low bits."""
    with pytest.raises(mk.MismatchError):
        mk.launch(_disagree, 2, target="cpu", args=(changes, shape), timeout=5.0, entry_timeout=5.0)


def _planned(world: Any) -> list[Any]:
    x = np.zeros((1, 2, 8, 64), np.float16)
    plan = mk.plan("ring_attention", x, x, x, max_rows=600, causal=True)
    before = world.problems.collectives
    shapes = [plan.run(*[np.zeros((batches, 2, rows, 64), np.float16)] * 3).o.shape for batches, rows in ((1, 600), (3, 200), (2, 1))]
    with pytest.raises(ArgumentError, match="at most 600"):
        plan.run(*[np.zeros((2, 2, 301, 64), np.float16)] * 3)
    return [shapes, world.problems.collectives - before, plan.describe(600).splitlines()[0], plan.workspace_bytes > 0, repr(plan)]


def test_a_plan_is_good_for_all_sizes_up_to_its_rows() -> None:
    """Rows of all batches together."""
    for shapes, collectives, title, has_workspace, text in mk.launch(_planned, 2, target="cpu"):
        assert shapes == [(1, 2, 600, 64), (3, 2, 200, 64), (2, 2, 1, 64)]
        assert collectives == 0
        assert title.startswith("ring_attention: B 1, 600 rows per rank, 2 heads, 2 KV heads, D 64 float16, causal, contiguous")
        assert has_workspace
        assert "up to 600 rows" in text


def _on_heap(world: Any) -> bool:
    rng = np.random.default_rng(world.rank)
    dtype, options = DTYPES["bfloat16"], {"causal": True, "layout": "zigzag"}
    arrays = [world.empty((1, 2, 40, 64), dtype) for _ in range(3)]
    for array in arrays:
        array[...] = rng.standard_normal(array.shape)
    out = world.empty((1, 2, 40, 64), dtype), world.empty((1, 2, 40), np.float32)
    elsewhere = mk.ring_attention(*(array.copy() for array in arrays), **options)
    mk.ring_attention(*arrays, **options, out=out)
    return np.array_equal(out[0], elsewhere.o) and np.array_equal(out[1], elsewhere.lse)


def test_arrays_on_the_heap_give_the_same() -> None:
    assert mk.launch(_on_heap, 4, 2, target="cpu") == [True] * 4
