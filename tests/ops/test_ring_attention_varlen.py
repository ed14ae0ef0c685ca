"""``mk.ring_attention_varlen`` on target cpu: every element against float64, any sequences in any world, through windows of one chunk."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError, MismatchError
from mkernel.planner import ring_attention as planner
from tests.ops import ring_body, varlen_body
from tests.ops.ring_body import TINY, WORLDS, Model, draw_model
from tests.ops.varlen_body import Packed, draw_packed, found_wrong

SHARED = planner.Scale(chunk_bytes=100_000, window_bytes=300_000, fewest=3)  # chunks of some key blocks, some slots
FULL, CAUSAL, ZIGZAG, DEALT = ("full", "contiguous"), ("causal", "contiguous"), ("causal", "zigzag"), ("full", "zigzag")
# A kernel takes seconds to compile: few of them in `make test`, which other tests use too.
FEW = [("2x2", ZIGZAG, 64, "bfloat16")]
MANY = [case for case in itertools.product(WORLDS, (FULL, CAUSAL, ZIGZAG, DEALT), (64, 128), ("bfloat16", "float16")) if case not in FEW]


@pytest.mark.parametrize("scale", [pytest.param(TINY, id="tiny"), pytest.param(SHARED, id="shared")])
@pytest.mark.parametrize(("world", "mask", "d", "dtype"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MANY)])
def test_every_element(rng: np.random.Generator, world: str, mask: tuple[str, str], d: int, dtype: str, scale: planner.Scale) -> None:
    """Calls in a row whose cu_seqlens lies in the same memory."""
    ranks = ring_body.topology(world).size
    model = draw_model(rng, d, mask[0] == "causal", mask[1], dtype)
    calls = tuple(draw_packed(rng, model, ranks, most) for most in (1 << 21, 1 << 17, 1 << 19))
    assert found_wrong(world, model, int(rng.integers(1 << 30)), calls, scale) is None, (model, calls)


@pytest.mark.parametrize(
    ("world", "mask"),
    [
        ("2x2", ZIGZAG),
        *(pytest.param(world, mask, marks=pytest.mark.slow) for world in ("1x1", "1x2", "4x1") for mask in (FULL, CAUSAL, ZIGZAG, DEALT)),
    ],
)
def test_edges(rng: np.random.Generator, world: str, mask: tuple[str, str]) -> None:
    """Nothing at all; only padding; sequences that leave ranks without rows; tiles of padding alone; more sequences than groups of them."""
    w = ring_body.topology(world).size
    calls = [Packed(()), Packed((), 5), Packed((0, 0), 2), Packed((1,)), Packed((0, 1, 0)), Packed((2 * w,)), Packed((2 * w + 1,) * 3)]
    calls += [Packed((256 * w + 1, 2)), Packed((1,) * 40 + (700,) + (1,) * 20, 1)]
    model = Model(2, 1, 64, "bfloat16", mask[0] == "causal", mask[1])
    assert found_wrong(world, model, int(rng.integers(1 << 30)), tuple(calls)) is None


@pytest.mark.slow
@pytest.mark.parametrize("world", ["1x2", "2x2"])
def test_more_sequences_than_groups(rng: np.random.Generator, world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (*rng.integers(0, 4, 1100).tolist(), 600)
    monkeypatch.setattr(varlen_body, "ROOM", 2000)
    assert found_wrong(world, Model(1, 1, 64, "bfloat16", True, "zigzag"), int(rng.integers(1 << 30)), (Packed(lengths, 1),)) is None


@pytest.mark.slow
@pytest.mark.parametrize("world", ["2x2", "1x4"])
def test_the_same_bits_under_any_schedule(rng: np.random.Generator, world: str) -> None:
    """Windows of any size, other splits and schedules: results do not depend on who is late."""
    seed = int(rng.integers(1 << 30))
    model, calls = Model(2, 1, 64, "bfloat16", True, "zigzag"), (Packed((7, 900, 30)), Packed((300, 5), 2))
    expected = varlen_body.digests(world, model, seed, calls, 0)
    for run in range(8):
        options: dict[str, Any] = {"scale": (TINY, SHARED)[run % 2], "max_sms": 5 + run % 2}
        assert varlen_body.digests(world, model, seed, calls, int(rng.integers(1 << 30)), **options) == expected, run


# ---- what is wrong with cu_seqlens
def _is_refused(world: Any, seed: int) -> list[Any]:
    """Calls with wrong numbers among right ones, by ranks that run ahead."""
    model, found = Model(1, 1, 64, "float16", False, "contiguous"), []
    right = Packed((world.size, 5), 1)
    rows = right.rows(world.size, 1)
    for call, ends in enumerate(([1, 2], [0, 5, 3, 9], [0, 1 << 30], [0, -4], [-3], [0, *[2**31 - 1] * 9])):
        q = np.ones((rows, 1, 64), np.float16)
        try:
            for _ in range(1 + world.rank % 2):
                mk.ring_attention_varlen(q, q, q, np.array(ends, np.int32))
            world.check()
        except mk.SequenceError as error:
            found.append((error.sequence, error.value))
        else:
            found.append("accepted")
        arrays = varlen_body.whole(model, seed, call, right)
        mine = varlen_body.inputs(model, arrays, right, world.rank, world.size)
        result = varlen_body.one_call(model, mine, np.array(right.ends(), np.int32))
        found += varlen_body.errors(model, arrays, right, world.rank, world.size, *result)
    return found


@pytest.mark.parametrize("world", ["1x2", pytest.param("2x2", marks=pytest.mark.slow), pytest.param("1x1", marks=pytest.mark.slow)])
def test_wrong_numbers_are_refused_and_the_world_stays_usable(rng: np.random.Generator, world: str) -> None:
    ranks = ring_body.topology(world).size
    expected = [(0, (1,)), (1, (5, 3)), (None, ((1 << 30) // ranks,)), (0, (0, -4)), (0, (-3,)), (None, (-(-(2**31 - 1) // ranks),))]
    found = ring_body.launch(_is_refused, world, int(rng.integers(1 << 30)), (int(rng.integers(1 << 30)),))
    assert found == [expected] * ranks


def _differ(world: Any, ends: tuple[list[int], list[int]]) -> None:
    x = np.ones((40, 1, 64), np.float16)
    mk.ring_attention_varlen(x, x, x, np.array(ends[world.rank == world.size - 1], np.int32))
    world.check()


@pytest.mark.parametrize("ends", [([0, 9, 12], [0, 8, 12]), ([0, 9], [0, 9, 9]), ([0, 9], [0, -2]), ([0], [1])])
def test_ranks_that_were_given_other_numbers_find_out(ends: tuple[list[int], list[int]]) -> None:
    with pytest.raises(MismatchError, match="with another plan, or other cu_seqlens"):
        mk.launch(_differ, 2, target="cpu", args=(ends,))


def _refuses(world: Any, cases: list[tuple[dict[str, Any], str]]) -> list[str]:
    wrong = []
    for changes, message in cases:
        arrays = {name: changes.get(name, np.zeros((8, heads, 64), np.float16)) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
        ends = changes.get("ends", np.array([0, 8], np.int32))
        options = {name: value for name, value in changes.items() if name not in (*arrays, "ends")}
        try:
            mk.ring_attention_varlen(*arrays.values(), ends, **options)
        except ArgumentError as error:
            if message not in str(error):
                wrong.append(f"{changes}: {error}")
        else:
            wrong.append(f"{changes}: accepted")
    return wrong


def test_what_does_not_fit_is_refused() -> None:
    def zeros(*shape: int, dtype: Any = np.float16) -> Any:
        return np.zeros(shape, dtype)

    q = zeros(8, 4, 64)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"q": zeros(1, 4, 8, 64)}, "must be 3: (rows, heads, D)"),
        ({"q": zeros(8, 4, 96), "k": zeros(8, 2, 96), "v": zeros(8, 2, 96)}, "must be 64 or 128"),
        ({"k": zeros(9, 2, 64), "v": zeros(9, 2, 64)}, "both alike"),
        ({"k": zeros(8, 3, 64), "v": zeros(8, 3, 64)}, "Hkv must divide Hq = 4"),
        ({"layout": "striped"}, "must be one of contiguous, zigzag"),
        ({"ends": np.array([0, 8])}, "cu_seqlens.dtype = int64"),
        ({"ends": np.array([[0, 8]], np.int32)}, "cu_seqlens.shape"),
        ({"ends": np.zeros(0, np.int32)}, "cu_seqlens.shape"),
        ({"ends": np.array([0, 4, 8, 8], np.int32)[::2]}, "must be contiguous"),
        ({"out": zeros(8, 4, 64)}, "must be a tuple of 2 arrays: o, lse"),
        ({"out": (zeros(9, 4, 64), zeros(4, 8, dtype=np.float32))}, "out.o.shape"),
        ({"out": (zeros(8, 4, 64), zeros(8, 4, dtype=np.float32))}, "out.lse.shape"),
        ({"out": (zeros(8, 4, 64), zeros(4, 16, dtype=np.float32)[:, ::2])}, "must be contiguous"),
        ({"q": q, "out": (q, zeros(4, 8, dtype=np.float32))}, "overlaps q"),
    ]
    assert mk.launch(_refuses, 1, target="cpu", args=(cases,)) == [[]]


def _planned(world: Any) -> list[Any]:
    """Calls of up to so many rows, with new sizes and new numbers: nothing is compiled, agreed on or allocated."""
    x, ends = np.ones((600, 1, 64), np.float16), np.array([0, 1100], np.int32)
    plan = mk.plan("ring_attention_varlen", x, x, x, ends, max_rows=600, world=world)
    before, found = world.heap_bytes, []
    for rows in (600, 513, 300, 7):
        mine = np.ones((rows, 1, 64), np.float16)
        ends = np.array([0, rows, 2 * rows - 2], np.int32)
        o, _ = mk.ring_attention_varlen(mine, mine, mine, ends)
        valid = (rows + 1 - world.rank) // 2 + (rows - 1 - world.rank) // 2
        found.append(int((np.asarray(o)[:, 0, 0] == 1).sum()) == valid)
    return [*found, world.heap_bytes == before, plan.describe(600).splitlines()[0]]


def test_a_plan_is_good_for_fewer_rows() -> None:
    for *right, title in mk.launch(_planned, 2, target="cpu"):
        assert right == [True] * 5
        assert title.startswith("ring_attention_varlen: 600 rows per rank, 1 heads, 1 KV heads, D 64 float16, full, contiguous")
