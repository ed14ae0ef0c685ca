"""MoE dispatch + GEMM in worlds of every shape: every array of every rank, bad routing, other ops beside it, planted bugs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError, MismatchError
from mkernel.ops.moe_dispatch_gemm import Parameters
from mkernel.ops.moe_slots import slots_after
from mkernel.planner import moe_dispatch_gemm as planner
from mkernel.planner.moe import SEGMENT_ROWS, bands, columns, row_bits
from mkernel.planner.moe_dispatch_gemm import MoeDispatchGemmPlan, MoeDispatchGemmProblem, make_plan
from mkernel.planner.topology import Topology
from mkernel.transport import emulated
from tests.ops.moe_body import ROUTINGS, Model, dispatch, draw_ids, draw_model, found_overwritten, found_wrong, inputs, small_puts
from tests.shared.mirrors import errors_of_mirror

WORLDS = ("1x1", "1x2", "1x4", "2x2", "4x1", "3x2")
SMALL = Model(24, 40, 2, 2, "bfloat16", True, False, True, 1, 16)
HEAP = 64 << 20


@pytest.fixture(autouse=True)
def _many_puts() -> Iterator[None]:
    with small_puts(5):
        yield


@pytest.mark.parametrize("world", WORLDS)
def test_every_array(rng: np.random.Generator, world: str) -> None:
    nodes, per_node = map(int, world.split("x"))
    model, seed = draw_model(rng, nodes * per_node), int(rng.integers(1 << 30))
    assert found_wrong(world, model, seed, tuple(rng.permutation(ROUTINGS))) is None, f"{model}, seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("world", WORLDS)
def test_more(rng: np.random.Generator, world: str, number: int) -> None:
    test_every_array(rng, world)


def test_rows_longer_than_a_piece(rng: np.random.Generator) -> None:
    model = dataclasses.replace(SMALL, h=8200 + 8 * int(rng.integers(9)), f=8, experts=1)
    assert found_wrong("1x2", model, int(rng.integers(1 << 30)), ("uniform", "some")) is None


@pytest.mark.parametrize("world", ["1x2", "2x2"])
def test_as_many_rows_in_a_piece_as_fit(rng: np.random.Generator, world: str) -> None:
    """H of any length, so that one to eight rows are copied at once; the last piece of a batch may have fewer."""
    model = dataclasses.replace(SMALL, h=8 * int(2 ** rng.uniform(5, 10)), f=8, max_tokens=int(rng.integers(1, 80)))
    seed = int(rng.integers(1 << 30))
    assert found_wrong(world, model, seed, tuple(rng.permutation(ROUTINGS)[:3])) is None, f"{model}, seed {seed}"


@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_tiles_of_any_width(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, width: int) -> None:
    """As the model may choose them on GPUs. No tile loads slots of the next expert, which may be written meanwhile."""
    monkeypatch.setattr(planner, "choose_tile", lambda problem: planner.fitting_tile(problem)(width))
    model = draw_model(rng, 2)
    model = dataclasses.replace(model, gated=model.gated and width % 128 == 0)
    seed = int(rng.integers(1 << 30))
    assert found_wrong("1x2", model, seed, tuple(rng.permutation(ROUTINGS)[:3])) is None, f"{model}, seed {seed}"


def test_arrays_on_the_heap_and_of_the_caller(rng: np.random.Generator) -> None:
    """Rows of x that lie on the heap are not staged; arrays that the caller gives are filled, and nothing beside them."""
    seed, model = int(rng.integers(1 << 30)), dataclasses.replace(SMALL, f=48, gated=True)
    ids = draw_ids(rng, model, 2, "uniform")

    def use(world: Any) -> bool:
        plain = dispatch(model, seed, world, 0, ids[world.rank])
        on_heap = world.empty((model.max_tokens, model.h), ml_dtypes.bfloat16)[: len(ids[world.rank])]
        on_heap[:], w, weights = inputs(model, seed, world.rank, 0, len(on_heap))
        rows = plain.y.shape[0]
        memory = np.full((rows, 64), np.nan, ml_dtypes.bfloat16)  # y: columns 8 to 55
        arrays = [np.full_like(array, -9) for array in (plain.expert_offsets, plain.source, plain.row_weight, *plain.routing[:6])]
        out = mk.Dispatched(memory[:, 8:56], *arrays[:3], mk.Routing(*arrays[3:], arrays[0]))
        options = {"activation": "swiglu", "max_tokens": model.max_tokens}
        counts = np.full(4, -1, np.int32)
        given = {"topk_weights": weights, "expert_counts": counts, "routing": plain.routing, "out": out}
        d = mk.moe_dispatch_gemm(on_heap, None, w, **given, **options)
        last = plain.rows()
        untouched = np.isnan(memory.astype(np.float32))
        return (
            d.rows() == last
            and counts.tolist() == np.bincount(np.concatenate(ids).ravel(), minlength=4).tolist()
            and np.array_equal(d.y[:last].view(np.uint16), plain.y[:last].view(np.uint16))
            and np.array_equal(d.source[:last], plain.source[:last])
            and all(map(np.array_equal, d.routing, plain.routing))
            and bool(untouched[last:].all() and untouched[:, :8].all() and untouched[:, 56:].all())
        )

    assert mk.launch(use, 2, target="cpu", heap_bytes=HEAP) == [True, True]


@pytest.mark.parametrize("world", ["1x1", "1x2", "2x2"])
def test_rows_that_experts_got(rng: np.random.Generator, world: str) -> None:
    """They can be read behind the call, of any length: gradients of weights need them (mkernel.torch)."""
    seed, (nodes, per_node) = int(rng.integers(1 << 30)), map(int, world.split("x"))
    model = dataclasses.replace(SMALL, h=8 * int(rng.integers(1, 40)))
    ids = draw_ids(rng, model, nodes * per_node, "uniform")
    most = model.max_tokens * nodes * per_node * ids[0].shape[1]

    def use(world: Any) -> int:
        tokens = [inputs(model, seed, rank, 0, len(own))[0] for rank, own in enumerate(ids)]
        x, w, _ = inputs(model, seed, world.rank, 0, len(ids[world.rank]))
        d = mk.moe_dispatch_gemm(x, ids[world.rank], w, max_tokens=model.max_tokens, max_rows=most)
        slots = slots_after(world, (x, ids[world.rank], w, None, None), model.max_tokens, most, None)
        slot = wrong = 0
        for begin, end in itertools.pairwise(d.expert_offsets):
            for row in range(begin, end):
                rank, token, _ = d.source[row]
                wrong += not np.array_equal(slots[slot + row - begin], tokens[rank][token].view(np.int16))
            slot += -(-int(end - begin) // SEGMENT_ROWS) * SEGMENT_ROWS
        return wrong

    assert mk.launch(use, nodes * per_node, per_node, target="cpu", heap_bytes=HEAP) == [0] * (nodes * per_node), model


@pytest.mark.parametrize("world", ["1x2", "2x2"])
def test_x_is_the_callers_again_when_the_call_ends(rng: np.random.Generator, world: str) -> None:
    assert found_overwritten(world, seed := int(rng.integers(1 << 30))) is None, f"seed {seed}"


# ---- what is wrong with a routing
def refused(world: Any, fault: str, bad: int, seed: int) -> list[Any]:
    """A right call, one that is refused, and the right one again, with nothing between them."""
    told: list[Any] = []
    for call in range(3):
        ids = draw_ids(np.random.default_rng(seed), SMALL, world.size, "uniform")
        ids = [np.concatenate([of_rank, [[0, 1]]])[-16:] for of_rank in ids]
        options, token = {}, len(ids[bad]) - 1
        if call == 1 and fault == "rows":
            options["max_rows"] = 1
        elif call == 1:
            if fault == "tokens":
                ids[bad] = np.tile(ids[bad], (17, 1))[:17]
            else:
                ids[bad][token] = {"none such": [0, 2 * world.size], "negative": [-2, 0], "twice": [1, 1], "int64": [0, 2**40]}[fault]
        try:
            d = dispatch(SMALL, seed, world, 0, ids[world.rank], **options)
            told.append((d.rows(), d.y[: d.rows()].view(np.uint16).tolist()))
        except mk.RoutingError as error:
            told.append((error.rank, error.token, error.value))
            assert error.report.rank == world.rank
            assert error.token is None or error.token == token
    assert told[0] == told[2], "the world goes on"
    return [told[1]]


@pytest.mark.parametrize(
    ("fault", "value"), [("none such", 8), ("negative", -2), ("twice", 1), ("int64", 2**31 - 1), ("tokens", 17), ("rows", None)]
)
@pytest.mark.parametrize("world", ["2x2", pytest.param("1x4", marks=pytest.mark.slow), pytest.param("4x1", marks=pytest.mark.slow)])
def test_bad_routing_is_told_on_every_rank_and_the_world_goes_on(
    rng: np.random.Generator, world: str, fault: str, value: int | None
) -> None:
    bad, seed = int(rng.integers(4)), int(rng.integers(1 << 30))
    nodes, per_node = map(int, world.split("x"))
    found = mk.launch(
        refused, nodes * per_node, per_node, "cpu", (fault, bad, seed), seed=seed, heap_bytes=HEAP, timeout=5.0, entry_timeout=60.0
    )
    assert all(told == found[0] for told in found), found
    ((rank, token, told),) = found[0]
    if fault == "rows":
        assert told > 1
        assert token is None
    else:
        assert (rank, told) == (bad, value)


def test_ranks_with_other_numbers_of_experts_disagree() -> None:
    def use(world: Any) -> None:
        w = np.ones((1 + world.rank, 24, 8), np.float16)
        mk.moe_dispatch_gemm(np.ones((2, 24), np.float16), np.zeros((2, 1), np.int32), w, max_tokens=8)

    with pytest.raises(MismatchError):
        mk.launch(use, 2, target="cpu", heap_bytes=HEAP)


def test_the_first_call_agrees_on_max_tokens() -> None:
    def use(world: Any) -> tuple[int, int]:
        x, w = np.ones((70 * world.rank, 24), np.float16), np.ones((1, 24, 8), np.float16)
        d = mk.moe_dispatch_gemm(x, np.zeros((len(x), 1), np.int64), w)
        collectives = world.problems.collectives
        mk.moe_dispatch_gemm(x[:3], np.zeros((len(x[:3]), 1), np.int64), w)
        assert world.problems.collectives == collectives
        return d.routing.rows.shape[1], d.rows()

    assert mk.launch(use, 2, target="cpu", heap_bytes=HEAP) == [(128, 70), (128, 0)]


def test_a_prepared_plan() -> None:
    def use(world: Any) -> tuple[Any, ...]:
        x, ids, w = np.ones((3, 24), np.float16), np.zeros((3, 1), np.int32), np.ones((1, 24, 8), np.float16)
        plan = mk.plan("moe_dispatch_gemm", x, ids, w, max_tokens=8, max_rows=16)
        collectives = world.problems.collectives
        found = plan.run(x, ids, w).rows(), plan.run(x[:0], ids[:0], w).rows()
        assert world.problems.collectives == collectives
        return *found, plan.describe().split(",")[0]

    told = "moe_dispatch_gemm: up to 8 tokens of a rank"
    assert mk.launch(use, 2, target="cpu", heap_bytes=HEAP) == [(6, 0, told), (0, 0, told)]


def test_tuned() -> None:
    def use(world: Any) -> int:
        x, ids, w = np.ones((3, 24), np.float16), np.zeros((3, 1), np.int32), np.ones((1, 24, 8), np.float16)
        return mk.tune("moe_dispatch_gemm", x, ids, w, max_tokens=8, samples=1).best.total

    assert mk.launch(use, 2, target="cpu", heap_bytes=HEAP, max_sms=2) == [2, 2]


BAD = {
    "H": (((3, 12), (3, 1), (1, 12, 8)), {}, "H = 12"),
    "F": (((3, 16), (3, 1), (1, 16, 12)), {}, "columns of w"),
    "T": (((3, 16), (2, 1), (1, 16, 8)), {}, r"topk_ids\.shape"),
    "k": (((3, 16), (3, 17), (1, 16, 8)), {}, "1 to 16 choices"),
    "experts": (((3, 16), (3, 1), (0, 16, 8)), {}, "at least one expert"),
    "rank of w": (((3, 16), (3, 1), (16, 8)), {}, r"w\.shape"),
    "activation": (((3, 16), (3, 1), (1, 16, 16)), {"activation": "gelu"}, "activation = 'gelu'"),
    "clamp": (((3, 16), (3, 1), (1, 16, 16)), {"clamp": 3.0}, "clamp = 3"),
    "odd": (((3, 16), (3, 1), (1, 16, 24)), {"activation": "swiglu"}, "2 F"),
    "alignment": (((3, 16), (3, 1), (1, 16, 8)), {"alignment": 0}, "alignment = 0"),
    "a sum of more than 32 bits": (
        ((3, 16), (3, 1), (64, 16, 8)),
        {"alignment": 1 << 26, "max_rows": 64},
        "alignment = 67108864: times 64",
    ),
    "many experts": (((3, 8), (3, 1), (4096, 8, 8)), {}, "at most 4095 experts"),
    "clamp that is 0 in float32": (((3, 16), (3, 1), (1, 16, 16)), {"activation": "swiglu", "clamp": 1e-50}, "clamp = 1e-50"),
    "max_tokens": (((3, 16), (3, 1), (1, 16, 8)), {"max_tokens": -1}, "max_tokens = -1"),
    "8 GiB": (((3, 4096), (3, 1), (1, 4096, 8)), {"max_tokens": 1 << 21}, r"more than 8589934592.*4194304 is twice"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments(what: str) -> None:
    (x, ids, w), options, message = BAD[what]

    def use(world: Any) -> None:
        with pytest.raises(ArgumentError, match=message):
            mk.moe_dispatch_gemm(np.zeros(x, np.float16), np.zeros(ids, np.int32), np.zeros(w, np.float16), **{"max_tokens": 8, **options})

    mk.launch(use, 1, target="cpu", heap_bytes=HEAP)


def test_the_same_way_again_into_the_same_arrays() -> None:
    """Also by a plain tuple of the routing. An out of whose two expert_offsets only one would be filled is refused."""

    def use(world: Any) -> None:
        x, w = np.full((8, 64), 1 + world.rank, np.float16), np.full((1, 64, 64), 1 / 64, np.float16)
        first = mk.moe_dispatch_gemm(x, np.full((8, 1), 1 - world.rank, np.int32), w)
        for routing in (first.routing, tuple(first.routing)):
            first.y[...] = np.nan
            again = mk.moe_dispatch_gemm(x, None, w, routing=routing, out=first)
            assert (again.y[: again.rows()] == 2 - world.rank).all()
            assert again.rows() == 8
        for bad, message in (({"routing": first.routing[:3]}, "routing"), ({}, "topk_ids = NoneType")):
            with pytest.raises(ArgumentError, match=message):
                mk.moe_dispatch_gemm(x, None, w, **bad)
        copied = first._replace(routing=first.routing._replace(expert_offsets=first.expert_offsets.copy()))
        with pytest.raises(ArgumentError, match=r"out\.routing\.expert_offsets = another array"):
            mk.moe_dispatch_gemm(x, first.routing.topk_ids, w, out=copied)

    mk.launch(use, 2, target="cpu", heap_bytes=HEAP)


LOST_ROWS = r"chunk \d+ of the rows of rank|put \d+, to rank \d+, is not complete"


@pytest.mark.parametrize(("put", "what"), [(1, "routing of rank"), (2, LOST_ROWS), (3, LOST_ROWS)])
def test_what_the_network_loses_is_named(put: int, what: str) -> None:
    """Put 0 of a rank is its entry, 1 brings its routing, the others rows. All threads of all ranks leave.

    Who waits for rows and who has sent them begin to wait at about the same time: either may be the first to give up.
    """
    faults = dataclasses.replace(emulated.Faults(), drop=frozenset({put}))
    ids = np.tile(np.arange(8, dtype=np.int32).reshape(4, 2), (4, 1))

    def use(world: Any) -> None:
        for _ in range(3):
            dispatch(SMALL, 3, world, 0, ids)

    with mock.patch.object(emulated, "Faults", lambda: faults), pytest.raises(mk.TimeoutError, match=what):
        mk.launch(use, 4, 2, "cpu", heap_bytes=HEAP, timeout=0.5, entry_timeout=5.0)


# ---- beside other ops, whose workspace lies where rows and tables do
def mixed(world: Any, seed: int) -> list[str]:
    rng, found = np.random.default_rng(seed), []
    a, b = np.full((24, 64), world.rank + 1, np.float16), np.full((64, 16), 0.125, np.float16)
    for call in range(4):
        ids = draw_ids(rng, SMALL, world.size, str(rng.choice(ROUTINGS)))[world.rank]
        if call == 2 and len(ids):
            ids[0] = 99
        try:
            d = dispatch(SMALL, seed, world, 0, ids)
            again = dispatch(SMALL, seed, world, 0, ids)
            if not np.array_equal(d.y[: d.rows()].view(np.uint16), again.y[: d.rows()].view(np.uint16)):
                found.append(f"{call}: not the same bits again")
        except mk.RoutingError:
            pass
        if not (mk.allgather_gemm(a, b) == np.repeat(np.arange(1, world.size + 1), 24)[:, None] * 8).all():
            found.append(f"{call}: allgather_gemm")
        reduced = mk.gemm_allreduce(a, b, algorithm="two_shot")
        if not (reduced == 8 * sum(range(1, world.size + 1))).all():
            found.append(f"{call}: gemm_allreduce")
    return found


@pytest.mark.parametrize("world", ["1x2", "2x2"])
def test_between_other_ops(rng: np.random.Generator, world: str) -> None:
    seed, (nodes, per_node) = int(rng.integers(1 << 30)), map(int, world.split("x"))
    options = {"seed": seed, "heap_bytes": HEAP, "timeout": 5.0, "entry_timeout": 60.0}
    assert mk.launch(mixed, nodes * per_node, per_node, "cpu", (seed,), **options) == [[]] * (nodes * per_node), f"seed {seed}"


# ---- the mirror, the GPU's compiler, names
def plan_of(world: str, sms: int = 132, **changes: Any) -> MoeDispatchGemmPlan:
    nodes, per_node = map(int, world.split("x"))
    topology = Topology(nodes * per_node, per_node)
    problem = MoeDispatchGemmProblem(topology, 2048, 7168, "bfloat16", True, 8, 8, 512, 8192, 1, True, False, 0.0)
    return make_plan(dataclasses.replace(problem, **changes), sms)


@pytest.mark.parametrize(("world", "experts"), [("1x1", 8), ("2x2", 8), ("2x2", 3), ("2x8", 32), ("8x8", 32), ("32x8", 2)])
def test_the_mirror_says_what_the_header_says(world: str, experts: int) -> None:
    """Parameters, and what tables of the heap have room for: columns, of which a list has fewer in large worlds."""
    plan = plan_of(world, experts=experts)
    world = plan.problem.topology
    counted = {
        "mkernel::kColumns": columns(world, experts), "mkernel::kBands": bands(world, experts), "mkernel::kRowBits": row_bits(world)
    }  # fmt: skip
    assert errors_of_mirror(plan.spec, Parameters, constants=counted) == ""


@pytest.mark.parametrize(("world", "changes"), [("1x4", {}), ("2x2", {"gated": True, "b_row_major": False}), ("1x1", {"experts": 256})])
def test_it_compiles_for_the_gpu(world: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")
    from mkernel.jit import cuda

    used = cuda.resources(cuda.compile(plan_of(world, **changes).spec))
    assert used.local_bytes == 0, "spills"
    assert used.registers <= 168
    assert caplog.text == ""


def test_flags_have_names() -> None:
    plan = plan_of("2x2")
    names = [plan.flag_name(0, index) for index in range(plan.flag_words + 3)]
    assert len(set(names)) == len(names)
    assert names[2] == "the routing of rank 2"
    assert names[-4:] == ["rows are fetched by CTA 15 of rank 1", *(f"rows of block {block} of slots" for block in range(3))]
