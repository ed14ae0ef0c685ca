"""``batch_invariant`` attention: the bits of a sequence depend on its rows and on how many chunks it is dealt in, and on nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.planner import ring_attention as planner
from mkernel.planner.attention_tile import AttentionTile
from tests.ops import ring_body, varlen_body
from tests.ops.planted_bug import Bug
from tests.ops.ring_body import DTYPES, TINY, Model, topology
from tests.ops.varlen_body import Packed
from tests.shared.findings import errors_are_findings

SHARED = planner.Scale(chunk_bytes=100_000, window_bytes=300_000, fewest=3)
# Worlds and layouts that deal a sequence in so many chunks, which their ranks hold in one way or another.
DEALT = {
    2: (("1x1", "zigzag"), ("1x2", "contiguous"), ("2x1", "contiguous")),
    4: (("1x2", "zigzag"), ("1x4", "contiguous"), ("2x2", "contiguous"), ("2x1", "zigzag"), ("4x1", "contiguous")),
    6: (("1x3", "zigzag"), ("3x2", "contiguous"), ("3x1", "zigzag")),
    8: (("2x2", "zigzag"), ("1x4", "zigzag"), ("4x1", "zigzag"), ("1x8", "contiguous"), ("4x2", "contiguous")),
    12: (("3x2", "zigzag"), ("6x1", "zigzag")),
}
_OTHER_BITS, _NO_SUM = "other bits than before", "rows without a sum"


class Attended(NamedTuple):
    """What all ranks together got for a sequence: the bits of o and lse, and whether each row has its sum."""

    bits: bytes
    is_complete: bool


@dataclasses.dataclass(frozen=True)
class Pool:
    """Sequences that batches are made of."""

    model: Model  # its layout counts for nothing
    lengths: tuple[int, ...]
    seed: int

    def arrays(self, sequence: int) -> list[Any]:
        """q, k and v: (rows, heads, D)."""
        model, rng = self.model, np.random.default_rng([self.seed, sequence])
        heads = (model.heads, model.kv_heads, model.kv_heads)
        return [rng.standard_normal((self.lengths[sequence], h, model.d)).astype(DTYPES[model.dtype]) for h in heads]


@dataclasses.dataclass(frozen=True)
class Run:
    """Calls of one world: each is of some sequences of the pool, in their order, with so many rows of padding behind them."""

    world: str
    layout: str
    packed: bool
    batches: tuple[tuple[int, ...], ...]
    spare: int = 0
    scale: planner.Scale = TINY
    more_sms: int = 0


def _one(world: Any, pool: Pool, run: Run, batch: tuple[int, ...]) -> list[tuple[int, Any, Any, Any]]:
    """What this rank gets of each sequence: the number of the sequence, positions, o (rows, Hq, D), lse (rows, Hq)."""
    model = dataclasses.replace(pool.model, layout=run.layout)
    options: dict[str, Any] = {"causal": model.causal, "layout": model.layout}
    each = [pool.arrays(sequence) for sequence in batch]
    held = [varlen_body.held(pool.lengths[sequence], world.rank, world.size, run.layout) for sequence in batch]
    if not run.packed:
        q, k, v = (np.stack([arrays[i][at].transpose(1, 0, 2) for arrays, at in zip(each, held, strict=True)]) for i in range(3))
        o, lse = mk.ring_attention(q, k, v, **options)
        return [(sequence, held[i], o[i].transpose(1, 0, 2), lse[i].T) for i, sequence in enumerate(batch)]
    packed = Packed(tuple(pool.lengths[sequence] for sequence in batch), run.spare)
    whole = [np.concatenate([arrays[i] for arrays in each]) for i in range(3)]
    mine = varlen_body.inputs(model, whole, packed, world.rank, world.size)
    o, lse = mk.ring_attention_varlen(*mine, np.array(packed.ends(), np.int32), **options)
    found, first = [], 0
    for sequence, at in zip(batch, held, strict=True):
        valid = np.flatnonzero(at < pool.lengths[sequence])
        found.append((sequence, at[valid], o[first + valid], lse.T[first + valid]))
        first += len(at)
    return found


def _rank(world: Any, pool: Pool, run: Run) -> list[list[tuple[int, Any, Any, Any]]]:
    return [_one(world, pool, run, batch) for batch in run.batches]


def results(pool: Pool, run: Run, **options: Any) -> list[dict[int, Attended]]:
    """What each call gave for its sequences, by their numbers in the pool."""
    shape, model = topology(run.world), pool.model
    sms = shape.ranks_per_node + shape.num_nodes - 1 + run.more_sms  # one for each flow, and those that compute
    with env.override(MKERNEL_CPU_SMS=sms):
        told = ring_body.launch(_rank, run.world, pool.seed, (pool, run), run.scale, **options)
    found = []
    for number, batch in enumerate(run.batches):
        attended: dict[int, Attended] = {}
        for slot, sequence in enumerate(batch):
            length = pool.lengths[sequence]
            o, lse = np.zeros((length, model.heads, model.d), np.uint16), np.full((length, model.heads), np.nan, np.float32)
            for of_rank in told:
                named, at, rows, sums = of_rank[number][slot]
                assert named == sequence
                o[at], lse[at] = np.ascontiguousarray(rows).view(np.uint16), sums
            attended[sequence] = Attended(o.tobytes() + lse.tobytes(), bool(np.all(np.isfinite(lse))))
        found.append(attended)
    return found


def found_different(pool: Pool, runs: list[Run], **options: Any) -> str | None:
    """Which sequence has rows without a sum, or other bits than before, and where."""
    known: dict[int, bytes] = {}
    for run in runs:
        for number, attended in enumerate(results(pool, run, **options)):
            for sequence, (bits, is_complete) in attended.items():
                where = f"sequence {sequence} of {pool.lengths[sequence]} rows: call {number} of {run}"
                if not is_complete:
                    return f"{_NO_SUM}: {where}"
                if known.setdefault(sequence, bits) != bits:
                    return f"{_OTHER_BITS}: {where}"
    assert len(known) == len(pool.lengths)
    return None


def draw_pool(rng: np.random.Generator, chunks: int, packed: bool, d: int = 64, causal: bool | None = None) -> Pool:
    """Sequences of any lengths; where they are not packed, of one length that so many equal chunks have."""
    most = 600 if d == 64 else 400  # chunks of some key blocks, where there are few
    kv_heads = int(rng.integers(1, 3))
    causal = bool(rng.integers(2)) if causal is None else causal
    model = Model(kv_heads * int(rng.integers(1, 3)), kv_heads, d, str(rng.choice(list(DTYPES))), causal, "")
    longest = int(rng.integers(most // 2, most)) // chunks * chunks
    lengths = (longest, *(int(2 ** rng.uniform(0, np.log2(most))) for _ in range(4))) if packed else (longest,) * 3
    return Pool(model, lengths, int(rng.integers(1 << 30)))


def draw_batches(rng: np.random.Generator, pool: Pool) -> tuple[tuple[int, ...], ...]:
    """All sequences, each of two alone, and some in any order."""
    count = len(pool.lengths)
    some = [rng.permutation(count)[: int(size)].tolist() for size in (rng.integers(1, count + 1), count)]
    return (tuple(range(count)), (0,), (int(rng.integers(count)),), *map(tuple, some))


def draw_run(rng: np.random.Generator, pool: Pool, world: str, layout: str, packed: bool) -> Run:
    """With any window and any number of CTAs that compute."""
    spare, scale = int(rng.choice([0, 1, 37])) if packed else 0, (TINY, SHARED)[rng.integers(2)]
    return Run(world, layout, packed, draw_batches(rng, pool), spare, scale, int(rng.integers(3)))


@pytest.mark.cases(
    chunks=tuple(DEALT),
    which=range(5),
    packed=(True, False),
    d=(64, 128),
    causal=(True, False),
    valid=lambda chunks, which, packed, d, causal: which < len(DEALT[chunks]),
)
@pytest.mark.drawn(1)
def test_what_is_beside_a_sequence(rng: np.random.Generator, chunks: int, which: int, packed: bool, d: int, causal: bool) -> None:
    """Other sequences, their number and order, where a sequence lies, CTAs and windows."""
    pool, (world, layout) = draw_pool(rng, chunks, packed, d, causal), DEALT[chunks][which]
    found = found_different(pool, [draw_run(rng, pool, world, layout, packed) for _ in range(2)], batch_invariant=True)
    assert found is None, found


@pytest.mark.cases(chunks=tuple(DEALT), packed=(True, False), causal=(True, False))
@pytest.mark.drawn(1)
def test_who_holds_the_keys(rng: np.random.Generator, chunks: int, packed: bool, causal: bool) -> None:
    """Keys are taken by position: ranks, nodes and the layout only tell how many chunks there are."""
    pool = draw_pool(rng, chunks, packed, causal=causal)
    worlds = [DEALT[chunks][i] for i in rng.permutation(len(DEALT[chunks]))[:2]]
    found = found_different(pool, [draw_run(rng, pool, *world, packed) for world in worlds], batch_invariant=True)
    assert found is None, found


@pytest.mark.slow
@pytest.mark.parametrize("chunks", DEALT)
def test_packed_or_not(rng: np.random.Generator, chunks: int) -> None:
    pool = draw_pool(rng, chunks, packed=False)
    runs = [draw_run(rng, pool, *world, packed) for world in DEALT[chunks] for packed in (False, True)]
    found = found_different(pool, runs, batch_invariant=True)
    assert found is None, found


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_of_whole_blocks(rng: np.random.Generator, packed: bool) -> None:
    """Blocks of keys are then the same in any number of chunks."""
    pool = draw_pool(rng, 2, packed=False)
    tile = AttentionTile.of(pool.model.d, pool.model.causal)
    pool = dataclasses.replace(pool, lengths=(8 * tile.key_block,) * 2)
    runs = [draw_run(rng, pool, *DEALT[chunks][0], packed) for chunks in (2, 4, 8)]
    found = found_different(pool, runs, batch_invariant=True)
    assert found is None, found


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [2, 4, 6])
@pytest.mark.parametrize("packed", [False, True])
def test_by_default_a_rank_takes_its_own_keys_first(rng: np.random.Generator, chunks: int, packed: bool) -> None:
    """Else the tests above would find nothing."""
    pool = draw_pool(rng, chunks, packed, causal=False)
    runs = [draw_run(rng, pool, *DEALT[chunks][i], packed) for i in (0, 1)]
    found = found_different(pool, runs, batch_invariant=False)
    assert found is not None
    assert found.startswith(_OTHER_BITS), found


def test_a_row_without_a_sum_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not taken for bits that may be anything, nor for an error of the test."""
    attend = mk.ring_attention

    def lose_a_sum(*arrays: Any, **options: Any) -> Any:
        found = attend(*arrays, **options)
        found.lse[0, 0, -1] = -np.inf
        return found

    pool = Pool(Model(1, 1, 64, "float16", False, ""), (8,), 1)
    runs = [Run("1x1", "contiguous", False, ((0,),))]
    assert found_different(pool, runs) is None
    monkeypatch.setattr(mk, "ring_attention", lose_a_sum)
    found = found_different(pool, runs)
    assert found is not None
    assert found.startswith(_NO_SUM), found


def test_plans_tell() -> None:
    def told(world: Any) -> str:
        x = np.ones((1, 1, 8, 64), np.float16)
        return str(mk.plan("ring_attention", x, x, x).describe().splitlines()[0])

    by_option = [mk.launch(told, 1, target="cpu", batch_invariant=option)[0] for option in (False, True)]
    assert ["keys by position" in text for text in by_option] == [False, True]


def test_no_ctas_share_keys() -> None:
    """By default they do where tiles are few, and then sums depend on how many sequences there are."""

    def shares(world: Any) -> int:
        x = np.ones((1, 1, 4096, 64), np.float16)
        return int(mk.plan("ring_attention", x, x, x).plan().shares)

    with env.override(MKERNEL_CPU_SMS=128):
        by_option = [mk.launch(shares, 1, target="cpu", batch_invariant=option) for option in (False, True)]
    assert by_option[0][0] > 1
    assert by_option[1] == [1]


_OP = "ops/ring_attention.cuh"
_ROTATED = "const uint32_t rank = there_and_back(leg, kWorldSize);"
PLANTED = [  # of two chunks: ranks 0 and 1, and the halves that one rank has
    Bug("own keys first", _OP, _ROTATED, "const uint32_t rank = kParts > 1 ? there_and_back(leg, kWorldSize) : (p_.world.rank + leg) % 2;"),
    Bug("the second halves by rank", _OP, _ROTATED, "const uint32_t rank = leg % kWorldSize;", slow=True),
    Bug(
        "blocks of own keys begin where a sequence lies",
        _OP,
        "block.rows = smaller(kKeyBlock, (kPacked ? at_.seen : s.part_rows) - row);",
        "const uint32_t cut = kPacked && stage == 0 && row == 0 ? s.first_row % kKeyBlock : 0;\n"
        "    block.rows = smaller(kKeyBlock - cut, (kPacked ? at_.seen : s.part_rows) - row);",
        also=(("    pass_block();\n    at_.turn", "    pass_block();\n    at_.row -= cut;\n    at_.turn"),),
        slow=True,
    ),
]


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.slow] if bug.slow else [], id=bug.name) for bug in PLANTED])
def test_planted(rng: np.random.Generator, tmp_path: Path, bug: Bug) -> None:
    if "halves" in bug.name:
        pool, worlds, packed = draw_pool(rng, 4, packed=False, causal=False), [("1x2", "zigzag"), ("1x4", "contiguous")], False
    else:
        pool, worlds, packed = draw_pool(rng, 2, packed=True, causal=False), [("1x1", "zigzag"), ("1x2", "contiguous")], True
    runs = [draw_run(rng, pool, *world, packed) for world in worlds]
    assert found_different(pool, runs, batch_invariant=True) is None
    with bug.in_force(tmp_path / "kernels_src"):  # an error, too: who counts on the order of keys gives credits too early
        assert errors_are_findings(found_different)(pool, runs, batch_invariant=True) is not None
