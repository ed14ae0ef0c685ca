"""Plans of ring_attention_varlen: any sequences are dealt right, no deadlock whatever the window, no slot is written too early."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mkernel.abi import COUNTED_WORDS
from mkernel.errors import CallReport
from mkernel.planner import ring_attention as planner
from mkernel.planner.proofs.areas import HEAP, Call
from mkernel.planner.proofs.ring_attention import packed_call_of
from mkernel.planner.ring_attention import Scale
from mkernel.planner.ring_problem import LAYOUTS, RingAttentionProblem
from mkernel.planner.ring_varlen import Packing, make_plan, sequence_error
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology
from tests.ops.varlen_body import Packed, held
from tests.planner import test_ring_attention as uniform
from tests.planner.test_ring_attention import WORLDS, unordered_in
from tests.shared import proofs


def packing_of(world: str, lengths: tuple[int, ...], *, heads: int = 2, kv_heads: int = 1, causal: bool = True, layout: str = "zigzag",
               split: Split | None = None, sms: int = 6, scale: Scale = uniform.TINY, spare: int = 0,
               canonical: bool = False) -> Packing:  # fmt: skip
    topology = Topology(*WORLDS[world])
    problem = RingAttentionProblem(topology, heads, kv_heads, 128, "float16", causal, layout, 0.125, packed=True, canonical=canonical)
    packed = Packed(lengths, spare)
    return Packing(make_plan(problem, packed.rows(WORLDS[world][0], problem.parts), sms, split, scale), packed.ends())


def draw_packing(rng: np.random.Generator, world: str, most: int = 900) -> Packing:
    """Any sequences, masks and windows; CTAs that share flows, and that have no item."""
    (size, per_node), kv_heads = WORLDS[world], int(rng.integers(1, 4))
    mates, others = per_node - 1, size // per_node - 1
    edges = [0, 1, 2 * size, 2 * size + 1, 128 * size + 1, most]
    lengths = [int(rng.choice(edges)) if rng.integers(2) else int(2 ** rng.uniform(0, np.log2(most))) for _ in range(rng.integers(0, 6))]
    return packing_of(
        world,
        tuple(lengths),
        heads=kv_heads * int(rng.integers(1, 4)),
        kv_heads=kv_heads,
        causal=bool(rng.integers(2)),
        layout=str(rng.choice(LAYOUTS)),
        split=Split(int(rng.integers(1, 6)), mates and mates + int(rng.integers(3)), others and others + int(rng.integers(3))),
        sms=16,
        scale=Scale(int(rng.choice([1, 1, 200_000])), int(rng.choice([1, 600_000])), int(rng.choice([1, 1, 2, 3]))),
        spare=int(rng.integers(3)),
        canonical=bool(rng.integers(2)),
    )


def nobody_reads(call: Call) -> list[Any]:
    """Chunks that come to a ring, and that nobody on its rank reads: its next one may be written while they are still on their way."""
    slots = [access for access in call.accesses if access.area.segment == HEAP and access.area.name == "keys and values of other ranks"]
    read = {(access.rank, access.span, uniform.number_of(access)) for access in slots if not access.writes}
    return [access for access in slots if access.writes and (access.rank, access.span, uniform.number_of(access)) not in read]


@pytest.mark.parametrize("number", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 30))])
@pytest.mark.parametrize("world", WORLDS)
def test_proofs(rng: np.random.Generator, world: str, number: int) -> None:
    packing = draw_packing(rng, world)
    call = packed_call_of(packing, rng)
    proofs.check_call(call)
    assert unordered_in(call) == [], packing
    assert nobody_reads(call) == [], packing


def test_chunks_that_nobody_reads_are_found(rng: np.random.Generator) -> None:
    """Streams to tiles of padding alone, as to other tiles: what was written late here took the place of the next chunk."""

    def to_the_first_item(self: Packing, segment: Any, source: int, reader: int) -> int:
        others = range(self.plan.problem.topology.size)
        return max(self.reads(source, other, segment.first) for other in others)

    packing = packing_of("2x2", (1, 700))
    assert nobody_reads(packed_call_of(packing, rng)) == []
    with mock.patch.object(Packing, "streamed", to_the_first_item):
        assert nobody_reads(packed_call_of(packing, rng)) != []


@pytest.mark.parametrize("world", WORLDS)
def test_calls_in_a_row(rng: np.random.Generator, world: str) -> None:
    """Also with calls of equal sequences, whose areas lie elsewhere."""
    calls = [*(packed_call_of(draw_packing(rng, world, most), rng) for most in (200, 300)), uniform.draw(rng, world)]
    for first, second in itertools.product(calls, repeat=2):
        proofs.check_order(first, second, "ring attention, packed or not, twice")


@pytest.mark.parametrize("world", WORLDS)
def test_every_item_once_and_every_key_that_it_sees(rng: np.random.Generator, world: str) -> None:
    packing = draw_packing(rng, world)
    plan, problem, size = packing.plan, packing.plan.problem, packing.plan.problem.topology.size
    ends = [segment.base + problem.parts * packing.sequence(segment.first).chunks_per_part for segment in packing.segments()]
    bases = [segment.base for segment in packing.segments()]
    assert all(end <= base for end, base in zip(ends, [*bases[1:], packing.total], strict=bool(bases))), "numbers of segments are apart"
    assert packing.total <= plan.total or plan.total == 0
    assert packing.rows <= plan.rows
    covered = {(rank, i): 0 for rank in range(size) for i in range(len(packing.ends) - 1)}
    for segment in packing.segments():
        s = packing.sequence(segment.first)
        places = [held(s.length, rank, size, problem.layout) for rank in range(size)]
        for reader, item in itertools.product(range(size), range(segment.first, segment.end)):
            part, row, rows = packing.tile_rows(reader, item)
            begin = part * s.part_rows + row
            tile = places[reader][begin : min(begin + problem.tile.q_rows, (part + 1) * s.part_rows)]
            assert rows == (tile < s.length).sum()
            covered[reader, packing.sequences.index(s)] += rows
            for source in range(size) if rows else ():
                last = tile[rows - 1] if problem.causal else s.length - 1
                seen = np.flatnonzero(places[source] <= last)
                chunks = {at // s.part_rows * s.chunks_per_part + at % s.part_rows // plan.chunk_rows for at in seen.tolist()}
                assert chunks == set(range(packing.reads(source, reader, item)))
    for (rank, i), rows in covered.items():
        length = packing.ends[i + 1] - packing.ends[i]
        assert rows == problem.q_heads * (held(length, rank, size, problem.layout) < length).sum()


@pytest.mark.parametrize("rows", [0, 1, 7, 4096, 131072, 1 << 22])
@pytest.mark.parametrize("world", ["1x4", "2x2"])
def test_the_window_does_not_grow(world: str, rows: int) -> None:
    for heads, kv_heads in ((64, 8), (8, 8), (32, 32)):
        problem = RingAttentionProblem(Topology(*WORLDS[world]), heads, kv_heads, 128, "bfloat16", True, "zigzag", 0.1, packed=True)
        plan = make_plan(problem, rows, 132)
        assert plan.window_bytes <= planner.SCALE.window_bytes
        assert plan.workspace_bytes < planner.SCALE.window_bytes + (8 << 20)
        assert plan.total < 1 << planner.COUNT_BITS
        assert plan.counted_words <= COUNTED_WORDS
        # The number of chunks suffices, whether there is one sequence or very many.
        for lengths in ((rows * 2,), (rows,) + (64,) * min(4000, rows // 64), (300,) * min(4000, rows // 80)):
            packed = Packed(lengths)
            assert packed.rows(4, 2) > rows or Packing(plan, packed.ends()).total <= plan.total


def test_what_calls_need_does_not_depend_on_rows_of_a_class() -> None:
    plans = [packing_of("2x2", (4 * rows,), scale=planner.SCALE).plan for rows in (513, 700, 1024)]
    assert len({(plan.workspace_bytes, plan.flag_words, plan.grid, plan.spec) for plan in plans}) == 1
    assert len({plan.digest for plan in plans}) == len({plan.describe().splitlines()[0] for plan in plans}) == 3


def test_errors_say_what_is_wrong() -> None:
    def said(code: int, *details: int) -> tuple[int | None, tuple[int, ...], str]:
        error = sequence_error(CallReport("ring_attention_varlen", "", 4, 0, code, tuple(value % (1 << 32) for value in details), 0))
        return error.sequence, error.value, str(error).partition(" (")[0].partition("cu_seqlens")[2]

    assert said(1, 0, -3, 0) == (0, (-3,), " begins with -3")
    assert said(2, 7, 5, -1) == (7, (5, -1), " decreases from 5 to -1 at sequence 7")
    assert said(3, 0, 70, 60) == (None, (70,), ": the sequences need 70 rows of each rank, q has 60")
    assert said(4, 0, 9, 1 << 24) == (None, (9,), ": 9 sequences have too many chunks of keys")


@pytest.mark.slow
@pytest.mark.parametrize("world", ["1x1", "1x2", "1x4", "2x2", "4x1", "8x8"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("causal", "layout"), [(False, "contiguous"), (True, "contiguous"), (True, "zigzag")])
@pytest.mark.parametrize("canonical", [False, True])
def test_kernels_for_the_gpu(caplog: pytest.LogCaptureFixture, world: str, d: int, causal: bool, layout: str, canonical: bool) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")
    from mkernel.jit import cuda

    nodes, per_node = map(int, world.split("x"))
    topology = Topology(nodes * per_node, per_node)
    problem = RingAttentionProblem(topology, 8, 2, d, "bfloat16", causal, layout, 0.1, packed=True, canonical=canonical)
    used: Any = cuda.resources(cuda.compile(make_plan(problem, 4096, 132).spec))
    assert used.local_bytes == 0, "spills"
    assert caplog.text == ""
