"""Plans of ring_attention: no deadlock whatever the window, no slot is written too early, no two calls meet in memory."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mkernel.abi import COUNTED_WORDS
from mkernel.ops.ring_attention import OP
from mkernel.planner import ring_attention as planner
from mkernel.planner.attention_tile import AttentionTile
from mkernel.planner.proofs.areas import HEAP, Access, Call
from mkernel.planner.proofs.ring_attention import RingAttentionCall, call_of
from mkernel.planner.proofs.ring_deal import WorkStep, run
from mkernel.planner.proofs.ring_shares import chunks_read
from mkernel.planner.proofs.wait_graph import Step, WaitGraph
from mkernel.planner.ring_attention import RingAttentionPlan, Scale, Segment, make_plan
from mkernel.planner.ring_problem import LAYOUTS, RingAttentionProblem, Sizes
from mkernel.planner.split import Split, SplitError
from mkernel.planner.topology import Topology
from mkernel.tools.attention import positions
from tests.planner import test_areas
from tests.shared import proofs

WORLDS = {"1x1": (1, 1), "1x2": (2, 2), "1x4": (4, 4), "2x2": (4, 2), "4x1": (4, 1), "3x2": (6, 2)}
TINY = Scale(chunk_bytes=1, window_bytes=1, fewest=1)  # chunks of one key block, and one slot per ring


def plan_of(world: str, batches: int = 1, length: int = 300, *, heads: int = 2, kv_heads: int = 1, causal: bool = True,
            layout: str = "zigzag", split: Split | None = None, sms: int = 6, scale: Scale = TINY,
            canonical: bool = False) -> RingAttentionPlan:  # fmt: skip
    topology = Topology(*WORLDS[world])
    problem = RingAttentionProblem(topology, heads, kv_heads, 128, "float16", causal, layout, 0.125, canonical=canonical)
    return make_plan(problem, Sizes(batches, length).code, sms, split, scale)


def draw_plan(rng: np.random.Generator, world: str, most: int = 700) -> RingAttentionPlan:
    """Any sizes, masks and windows; CTAs that share flows, and that have no item."""
    kv_heads, layout = int(rng.integers(1, 4)), str(rng.choice(LAYOUTS))
    size, per_node = WORLDS[world]
    mates, others = per_node - 1, size // per_node - 1
    computing = int(rng.choice([rng.integers(1, 6), 8 * kv_heads * 2]))  # few, or enough to share the keys of some tiles
    split = Split(computing, mates and mates + int(rng.integers(3)), others and others + int(rng.integers(3)))
    return plan_of(
        world,
        int(rng.integers(1, 4)),
        2 * int(rng.integers(1, max(2, most // size))),
        heads=kv_heads * int(rng.integers(1, 4)),
        kv_heads=kv_heads,
        causal=bool(rng.integers(2)),
        layout=layout,
        split=split,
        sms=64,
        scale=Scale(
            int(rng.choice([1, 1, 200_000])), int(rng.choice([1, 600_000])), int(rng.choice([1, 1, 2, 3])), int(rng.choice([1, 2, 3, 8]))
        ),
        canonical=bool(rng.integers(2)),
    )


def draw(rng: np.random.Generator, world: str) -> Call:
    return call_of(draw_plan(rng, world, 300))


class Order:
    """What comes before what in a graph without circles."""

    def __init__(self, graph: WaitGraph) -> None:
        self.numbers = {step: number for number, step in enumerate(graph)}
        self.graph = graph
        self.known: dict[Step, int] = {}

    def before(self, step: Step) -> int:
        """The steps that have ended when this one has, itself too, as bits."""
        todo = [step]
        while todo:
            at = todo[-1]
            missing = [] if at in self.known else [one for one in self.graph.before(at) if one not in self.known]
            if missing:
                todo += missing
                continue
            todo.pop()
            if at not in self.known:
                bits = 1 << self.numbers[at]
                for one in self.graph.before(at):
                    bits |= self.known[one]
                self.known[at] = bits
        return self.known[step]

    def is_after(self, step: Step, earlier: Step) -> bool:
        return bool(self.before(step) >> self.numbers[earlier] & 1)


def number_of(access: Access) -> int:
    number = access.step[-1]
    assert isinstance(number, int)
    return number


def unordered_in(call: Call) -> list[tuple[Access, Access]]:
    """Accesses to the same slot of a window or of what is to be sent, of one call, that nothing orders."""
    order, slots = Order(call.graph), defaultdict(list)
    for access in call.accesses:
        if access.area.segment == HEAP and access.area.name.startswith("keys and values"):
            slots[access.rank, access.span].append(access)
    wrong = []
    for accesses in slots.values():
        accesses.sort(key=lambda access: (number_of(access), not access.writes))
        for at, later in enumerate(accesses):
            wrong += [
                (earlier, later)
                for earlier in accesses[:at]
                if (earlier.writes or later.writes) and not order.is_after(later.step, earlier.step)
            ]
    return wrong


@pytest.mark.parametrize("number", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 20))])
@pytest.mark.parametrize("world", WORLDS)
def test_proofs(rng: np.random.Generator, world: str, number: int) -> None:
    plan = draw_plan(rng, world)
    call = call_of(plan, rng)
    proofs.check_call(call)
    assert unordered_in(call) == [], plan


@pytest.mark.parametrize("world", WORLDS)
def test_calls_in_a_row(rng: np.random.Generator, world: str) -> None:
    call = draw(rng, world)
    proofs.check_order(call, draw(rng, world), "ring_attention twice")
    for how in test_areas.ops_of(world) if world in test_areas.WORLDS else ():
        other = test_areas.draw(rng, how, world)
        proofs.check_order(call, other, f"ring_attention, then {how}")
        proofs.check_order(other, call, f"{how}, then ring_attention")


def test_steps_that_do_not_wait_for_entries_are_found() -> None:
    """The proof can fail: of each kind of step that writes, one that waits for nothing meets the call before."""
    call = call_of(plan_of("2x2", 2, 600, causal=False))
    kinds = {str(access.step[0]) for access in call.accesses if access.writes} - {"finish"}
    assert kinds == {"begin", "read", "forward", "push", "stage", "put", "credit"}
    # What a CTA has read, and what it stages, only its own rank sees. A chunk that is read has waited for who brought it.
    for kind in kinds - {"begin", "forward", "stage", "read"}:
        with pytest.raises(AssertionError, match=r"ring_attention: .*, and then"):
            proofs.check_order(call, proofs.with_waits(call, kind, for_peer=False), "ring_attention")


def changed(call: Call, kind: str, lost: str) -> Call:
    """The call whose steps of a kind do not wait for those of another."""
    graph = WaitGraph()
    for step in call.graph:
        graph.add(step, [one for one in call.graph.before(step) if step[0] != kind or one[0] != lost])
    return Call(graph, call.areas, call.accesses)


@pytest.mark.parametrize(("kind", "lost"), [("push", "credit"), ("put", "credit"), ("read", "push"), ("push", "put"), ("credit", "push")])
def test_a_wait_that_is_missing_is_found(kind: str, lost: str) -> None:
    call = call_of(plan_of("2x2", 1, 600, causal=False, layout="contiguous"))
    assert unordered_in(call) == []
    assert unordered_in(changed(call, kind, lost))


def test_a_cta_that_frees_a_segment_of_which_items_are_left_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a CTA says no more than where a segment begins while items of it are left: it may get another one, and read the keys again."""
    scale = dataclasses.replace(TINY, fewest=4)
    plan = plan_of("1x2", 1, 300, causal=False, layout="contiguous", heads=3, split=Split(3, 1), scale=scale)
    assert (plan.items, plan.chunks, plan.depth) == (9, 3, 4)
    deal = [[[0, 3, 5, 8], [1, 4, 7], [2, 6]]] * 2  # CTA 0 gets two items of the second segment, CTA 2 none
    assert unordered_in(RingAttentionCall(plan, plan, deal).call()) == []

    def says_all(self: RingAttentionCall, rank: int, ring: int, cta: int, number: int, step: Step, *_: Any, **__: Any) -> None:
        self._publish(rank, ring, cta, number, step)

    monkeypatch.setattr(RingAttentionCall, "_say", says_all)
    assert unordered_in(RingAttentionCall(plan, plan, deal).call())


@pytest.mark.parametrize("world", ["1x2", "2x2"])
def test_ctas_that_are_slow_take_fewer_items(rng: np.random.Generator, world: str) -> None:
    """Runs under any schedule end, and in some of them a CTA takes several items of a segment."""
    plan = plan_of(world, 1, 300, causal=False, layout="contiguous", heads=3, scale=dataclasses.replace(TINY, fewest=4))
    deals = [run(RingAttentionCall(plan, plan), rng) for _ in range(5)]
    for deal in deals:
        assert all(sorted(item for items in of_rank for item in items) == list(range(plan.items)) for of_rank in deal)
    assert len({str(deal) for deal in deals}) > 1


def test_one_cta_for_two_flows_would_wait_for_itself() -> None:
    """Why each flow has a CTA of its own: receivers take their sources in different orders."""
    call = call_of(plan_of("1x4", 1, 600, causal=False, layout="contiguous"))
    proofs.check_no_deadlock(call.graph)
    graph = WaitGraph()
    for step in call.graph:
        graph.add(step, call.graph.before(step))
    for rank in range(4):
        graph.chain(sorted((step for step in call.graph if step[:2] == ("push", rank)), key=lambda step: (step[4], step[2])))
    assert graph.find_cycle() is not None


def test_another_order_of_remote_sources_on_each_rank_would_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why all ranks of a node take the sources of other nodes in the same order."""

    def own_rail_first(plan: RingAttentionPlan, rank: int, ring: int) -> int:
        topology, per_node = plan.problem.topology, plan.problem.topology.ranks_per_node
        if ring < per_node - 1:
            return topology.rank(topology.node(rank), (topology.local_rank(rank) + 1 + ring) % per_node)
        distance, local = divmod(ring - (per_node - 1), per_node)
        return topology.rank((topology.node(rank) + 1 + distance) % topology.num_nodes, (topology.local_rank(rank) + local) % per_node)

    def ring_of(plan: RingAttentionPlan, rank: int, source: int) -> int:
        return next(ring for ring in range(plan.problem.rings) if own_rail_first(plan, rank, ring) == source)

    monkeypatch.setattr(RingAttentionPlan, "source_of", own_rail_first)
    monkeypatch.setattr(RingAttentionPlan, "ring_of", ring_of)
    call = call_of(plan_of("2x2", 1, 600, causal=False, layout="contiguous"))
    assert call.graph.missing() == set()
    assert call.graph.find_cycle() is not None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flows_that_do_not_follow_the_keys_would_deadlock(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Why chunks are forwarded by position where keys are read so."""

    def own_first(self: RingAttentionCall, rank: int, segment: Segment, counts: list[int]) -> Iterator[tuple[int, int]]:
        return iter([(distance, chunk) for distance, chunks in enumerate(counts) for chunk in range(chunks)])

    plan = plan_of("2x2", 1, 600, causal=False, layout=layout, canonical=True)
    proofs.check_no_deadlock(call_of(plan).graph)
    monkeypatch.setattr(RingAttentionCall, "moving_order", own_first)
    assert call_of(plan).graph.find_cycle() is not None


def test_a_cta_that_waits_before_it_says_where_it_begins_would_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a CTA says where it begins before it waits: another one reads chunks that come before its own first one."""
    plan = plan_of("1x2", 2, 140, causal=False, layout="contiguous", canonical=True)

    def after_the_first_read(self: RingAttentionCall, rank: int, reader: int) -> Step:
        return next((step for step in self.steps if step[:3] == ("read", rank, reader)), ("finish", rank, reader))

    steps = list(call_of(plan).graph)
    monkeypatch.setattr(RingAttentionCall, "steps", steps, raising=False)
    monkeypatch.setattr(RingAttentionCall, "begins", after_the_first_read)
    assert call_of(plan).graph.find_cycle() is not None


@pytest.mark.parametrize("causal", [False, True])
def test_shares_that_do_not_pass_chunks_would_deadlock(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """A share says before it waits what it will not read, and who adds up the shares says so before that."""
    scale = dataclasses.replace(TINY, shares=3)
    three_blocks = 2 * AttentionTile.of(128, causal).key_block + 4
    plan = plan_of("1x4", 1, three_blocks, causal=causal, layout="contiguous", sms=32, scale=scale)
    assert (plan.shares, plan.chunks) == (3, 3)
    proofs.check_no_deadlock(call_of(plan).graph)

    def read(self: RingAttentionCall, rank: int, cta: int, item: int, steps: list[WorkStep]) -> None:
        base = self.work.segment(item).base
        for source, chunks in chunks_read(self.plan, rank, item).items():
            for chunk in chunks if source != rank else ():
                at = self.plan.ring_of(rank, source)
                waits = [*self.entered(), self.filling(rank, at, base + chunk)]
                steps.append(WorkStep(("read", rank, cta, 0, at, base + chunk), waits, {at: base + chunk + 1}))

    with monkeypatch.context() as patch:
        patch.setattr(RingAttentionCall, "_read_share", read)
        assert call_of(plan).graph.find_cycle() is not None
    graph = WaitGraph()
    call = call_of(plan)
    for step in call.graph:  # the last thing that a CTA does is to say that it reads no more
        merges = [
            ("merge", step[1], step[2], other[3]) for other in call.graph if step[0] == "finish" and other[:3] == ("merge", *step[1:3])
        ]
        graph.add(step, [*(one for one in call.graph.before(step) if (step[0], one[0]) != ("merge", "finish")), *merges])
    assert (graph.find_cycle() is not None) is causal


@pytest.mark.parametrize(("batches", "length", "heads", "expected"), [(1, 4096, 2, 2), (1, 4096, 8, 1), (64, 4096, 8, 1), (1, 8, 2, 1)])
def test_how_many_ctas_share_keys(batches: int, length: int, heads: int, expected: int) -> None:
    """None where all SMs have a tile, or a tile has few keys."""
    plan = plan_of("1x4", batches, length, heads=heads, sms=132, scale=planner.SCALE)
    assert plan.shares == expected, plan.describe()
    assert ("keys shared by" in plan.describe()) == (expected > 1)
    assert plan.items == plan.query_tiles * expected
    assert plan.query_tiles * plan.shares <= plan.ctas or plan.shares == 1


@pytest.mark.parametrize(
    ("world", "batches", "length", "mebibytes", "expected"),
    [("1x1", 1, 4096, 16, 8), ("1x1", 3, 4096, 16, 8), ("1x1", 1, 4096, 10, 4), ("1x1", 1, 4096, 0, 1), ("1x2", 1, 4096, 16, 1)],
)
def test_how_many_pairs_take_turns(world: str, batches: int, length: int, mebibytes: int, expected: int) -> None:
    """As many as have so few bytes together, in groups of about the same size; one where keys of other ranks are streamed."""
    scale = dataclasses.replace(planner.SCALE, together_bytes=mebibytes << 20)
    plan = plan_of(world, batches, length, heads=64, kv_heads=8, scale=scale, sms=132)
    assert plan.pairs_together == expected
    assert plan_of(world, batches, length, heads=64, kv_heads=8, scale=scale, causal=False, sms=132).pairs_together == 1


def test_shares_have_all_blocks_once(rng: np.random.Generator) -> None:
    plan = plan_of("2x2", 1, 2 * int(rng.integers(60, 260)), sms=64, scale=dataclasses.replace(TINY, shares=3))
    assert plan.shares == 3
    for rank in range(4):
        for first in range(0, plan.items, 3):
            found = [chunks_read(plan, rank, item) for item in range(first, first + 3)]
            for source in range(4):
                chunks = sorted(chunk for of_share in found for chunk in of_share[source])
                assert chunks == list(range(plan.reads(source, rank, first))), "chunks of one block"


@pytest.mark.parametrize("world", WORLDS)
def test_every_item_once_and_every_key_that_it_sees(rng: np.random.Generator, world: str) -> None:
    plan = draw_plan(rng, world)
    problem, length = plan.problem, plan.sizes.length
    size, rows = problem.topology.size, plan.problem.tile.q_rows
    segments = list(plan.segments())
    bases = [segment.base for segment in segments]
    assert bases == [plan.chunks * at for at in range(len(segments))], "numbered one after the other"
    assert plan.total == plan.chunks * len(segments)
    held = [positions(length, rank, size, problem.layout) for rank in range(size)]
    for segment in segments:
        for reader in range(size):
            last = []
            for item in range(segment.first, segment.end):
                part, inside = divmod(plan.tile_of(item), plan.tiles_per_part)
                begin = part * plan.part_rows + inside * rows
                last.append(int(held[reader][begin : min(begin + rows, (part + 1) * plan.part_rows)][-1]))
                assert last[-1] == plan.last_position(reader, plan.tile_of(item))
            for source in range(size):
                seen = np.flatnonzero(held[source] <= max(last)) if problem.causal else np.arange(length)
                chunks = {
                    part * plan.chunks_per_part + row // plan.chunk_rows for part, row in (divmod(int(i), plan.part_rows) for i in seen)
                }
                assert chunks == set(range(plan.streamed(segment, source, reader)))
                assert plan.sent(segment, source, problem.topology.node(reader)) >= len(chunks)


@pytest.mark.parametrize("world", WORLDS)
def test_rings_and_flags(world: str) -> None:
    plan = plan_of(world, 2, 600)
    for rank in range(plan.problem.topology.size):
        rings = range(plan.problem.rings)
        assert [plan.ring_of(rank, plan.source_of(rank, ring)) for ring in rings] == list(rings)
        total = plan.flag_words + plan.counted_words + plan.problem.rings * plan.readers
        names = [plan.flag_name(rank, index) for index in range(total)]
        assert len(set(names)) == len(names)


def test_names_say_who_tells_what() -> None:
    plan = plan_of("2x2", 2, 600)
    words = plan.flag_words
    assert plan.flag_name(1, 2) == "reader 2 has begun"
    assert plan.flag_name(1, words + plan.slot_word(1, 0)) == "chunk of rank 2 in slot 0"
    assert plan.flag_name(1, words + plan.credit_word(0, 1)) == "what rank 0 has read of the chunks of rank 1"
    assert plan.flag_name(1, words + plan.credit_word(1, 1)) == "what rank 0 has read of the chunks of rank 3"
    assert plan.flag_name(1, words + plan.credit_word(1, 0)) == "what node 1 has read of this rank's chunks"
    assert plan.flag_name(1, words + plan.counted_words + plan.progress_word(2, 1)) == "what reader 1 has read of the chunks of rank 3"


def test_sizes_are_one_number(rng: np.random.Generator) -> None:
    codes = set()
    for _ in range(300):
        sizes = Sizes(int(2 ** rng.uniform(0, 12)), int(2 ** rng.uniform(0, 14)))
        assert Sizes.of(sizes.code) == sizes
        assert sizes.code < 1 << 31
        codes.add((sizes, sizes.code))
    assert len({code for _, code in codes}) == len(codes)
    assert Sizes(0, 5).code == Sizes(3, 0).code == 0


@pytest.mark.parametrize("length", [4096, 65536, 1 << 20])
@pytest.mark.parametrize("world", ["1x4", "2x2"])
def test_the_window_does_not_grow(world: str, length: int) -> None:
    for batches, heads, kv_heads in ((1, 64, 8), (1, 8, 8), (4, 32, 32)):
        problem = RingAttentionProblem(Topology(*WORLDS[world]), heads, kv_heads, 128, "bfloat16", True, "zigzag", 0.1)
        plan = make_plan(problem, Sizes(batches, length).code, 132)
        assert plan.window_bytes <= planner.SCALE.window_bytes
        assert plan.workspace_bytes < planner.SCALE.window_bytes + (8 << 20)
        assert plan.total < 1 << planner.COUNT_BITS
        assert plan.counted_words <= COUNTED_WORDS


def test_copying_takes_few_sms_where_there_is_much_to_compute() -> None:
    def copying(length: int, heads: int) -> int:
        problem = RingAttentionProblem(Topology(4, 4), heads, heads, 128, "bfloat16", False, "contiguous", 0.1)
        return make_plan(problem, Sizes(1, length).code, 132).copying[0]

    assert copying(65536, 8) == 3
    assert copying(512, 16) == 9


def test_splits_that_starve_a_flow_are_refused() -> None:
    with pytest.raises(SplitError, match="intra_comm needs an SM for each rank"):
        plan_of("1x4", split=Split(intra_comm=2), sms=16)
    with pytest.raises(SplitError, match="inter_send needs an SM for each rank"):
        plan_of("4x1", split=Split(inter_send=2), sms=16)


def test_plans_differ_in_their_first_line() -> None:
    plans = [plan_of("2x2"), plan_of("2x2", 2), plan_of("2x2", 1, 302), plan_of("2x2", heads=4), plan_of("2x2", kv_heads=2)]
    plans += [plan_of("2x2", causal=False), plan_of("2x2", layout="contiguous"), plan_of("4x1"), plan_of("1x4")]
    plans.append(dataclasses.replace(plans[0], problem=dataclasses.replace(plans[0].problem, scale=0.5)))
    assert len({plan.describe().splitlines()[0] for plan in plans}) == len({plan.digest for plan in plans}) == len(plans)
    assert plans[0].of_rows(plans[1].rows).digest == plans[1].digest
    assert plans[0].spec == plans[1].spec, "one kernel for all sizes"


def test_docs_list_the_areas() -> None:
    text = (test_areas.Path(__file__).parents[2] / "docs" / "memory_model.md").read_text()
    plans = plan_of("2x2", 2, 600), plan_of("2x2", 1, 300, sms=64, scale=dataclasses.replace(TINY, shares=3))
    areas = [area for plan in plans for area in call_of(plan).areas]
    rows = [test_areas.row("gemm", area).replace("| gemm |", "| ring_attention |") for area in areas]
    assert [row for row in rows if row not in text] == []


@pytest.mark.parametrize(
    ("world", "d", "causal", "layout", "canonical"),
    [
        ("1x4", 128, True, "zigzag", False),
        ("2x2", 64, False, "contiguous", True),
        *(
            pytest.param(world, d, causal, layout, canonical, marks=pytest.mark.slow)
            for world in ("1x1", "1x2", "1x4", "2x2", "4x1", "8x8")
            for d in (64, 128)
            for causal, layout in ((False, "contiguous"), (True, "contiguous"), (True, "zigzag"))
            for canonical in (False, True)
        ),
    ],
)
def test_kernels_for_the_gpu(caplog: pytest.LogCaptureFixture, world: str, d: int, causal: bool, layout: str, canonical: bool) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")
    from mkernel.jit import cuda

    nodes, per_node = map(int, world.split("x"))
    problem = RingAttentionProblem(Topology(nodes * per_node, per_node), 8, 2, d, "bfloat16", causal, layout, 0.1, canonical=canonical)
    used: Any = cuda.resources(cuda.compile(OP.make_plan(problem, Sizes(1, 4096).code, 132).spec))
    assert used.local_bytes == 0, "spills"
    assert caplog.text == ""
