"""The MoE layer against a dense reference in float64, in worlds of every shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError
from mkernel.transport import emulated
from tests.ops.body import topology
from tests.ops.layer_body import Layer
from tests.ops.moe_body import DTYPES, ROUTINGS, draw_ids, draw_model, small_puts

HEAP = 64 << 20


@pytest.fixture(autouse=True)
def _many_puts() -> Iterator[None]:
    with small_puts(7):
        yield


def rank(world: Any, layer: Layer, model: Any, kinds: tuple[str, ...]) -> list[str]:
    wrong, rng = [], np.random.default_rng(layer.seed)
    up, down = layer.weights(world.rank)
    for call, kind in enumerate(kinds):
        ids = draw_ids(rng, model, world.size, kind)
        own = np.random.default_rng([layer.seed, world.rank, call, 1])
        mine = ids[world.rank]
        x = own.standard_normal((len(mine), layer.h)).astype(DTYPES[layer.dtype])
        weights, counts = own.random(mine.shape).astype(np.float32), np.full(layer.experts * world.size, -1, np.int32)
        add = own.standard_normal(x.shape).astype(x.dtype) if call % 2 else None
        out = np.full_like(x, np.nan) if call % 3 else None
        options = {"activation": "swiglu" if layer.gated else None, "max_tokens": model.max_tokens}
        y = mk.moe_layer(x, mine, weights, up, down, add=add, out=out, expert_counts=counts, **options)
        if out is not None and y is not out:
            wrong.append(f"call {call}: out is not returned")
        values, bound = layer.reference(x, mine, weights, add)
        bad = ~(np.abs(y.astype(np.float64) - values) <= bound)
        if bad.any():
            wrong.append(f"call {call} ({kind}): {bad.sum()} of {bad.size} elements, the first at {np.argwhere(bad)[0].tolist()}")
        everyone = np.concatenate([of_rank.ravel() for of_rank in ids])
        if counts.tolist() != np.bincount(everyone[everyone >= 0], minlength=len(counts)).tolist():
            wrong.append(f"call {call}: expert_counts {counts.tolist()}")
    if len(world.kept) != 1:
        wrong.append(f"{len(world.kept)} sets of arrays between the kernels, for calls that differ in their tokens alone")
    return wrong


@pytest.mark.parametrize("world", ["1x1", "1x2", "2x2", *(pytest.param(w, marks=pytest.mark.slow) for w in ("1x4", "4x1", "3x2"))])
@pytest.mark.drawn(1)
def test_every_element(rng: np.random.Generator, world: str) -> None:
    shape = topology(world)
    model = dataclasses.replace(draw_model(rng, shape.size), max_tokens=40, alignment=1)
    seed = int(rng.integers(1 << 30))
    layer = Layer(model.h, model.f, model.experts, model.dtype, model.row_major, model.gated, seed)
    options = {"seed": seed, "heap_bytes": HEAP, "timeout": 5.0, "entry_timeout": 60.0}
    kinds = tuple(rng.permutation(ROUTINGS)[:4])
    found = mk.launch(rank, shape.size, shape.ranks_per_node, "cpu", (layer, model, kinds), **options)
    assert found == [[]] * shape.size, f"{layer}, {model}"


def bits(world: Any, layer: Layer, model: Any) -> list[bytes]:
    rng, found = np.random.default_rng(layer.seed), []
    up, down = layer.weights(world.rank)
    for call, kind in enumerate(("uniform", "skewed")):
        ids = draw_ids(rng, model, world.size, kind)[world.rank]
        own = np.random.default_rng([layer.seed, world.rank, call, 2])
        x = own.standard_normal((len(ids), layer.h)).astype(DTYPES[layer.dtype])
        weights = own.random(ids.shape).astype(np.float32)
        found.append(mk.moe_layer(x, ids, weights, up, down, max_tokens=model.max_tokens).tobytes())
    return found


@pytest.mark.parametrize("runs", [6, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", ["1x2", "2x2"])
@pytest.mark.drawn(1)
def test_the_same_bits_under_any_schedule(rng: np.random.Generator, world: str, runs: int) -> None:
    """Also with a network that delays and reorders, other in every run."""
    shape = topology(world)
    model = dataclasses.replace(draw_model(rng, shape.size), max_tokens=30, alignment=1, gated=True)
    seed = int(rng.integers(1 << 30))
    layer = Layer(model.h, model.f, model.experts, model.dtype, model.row_major, True, seed)
    found = set()
    for schedule in range(runs):
        faults = dataclasses.replace(emulated.Faults(), seed=schedule, delay_us=5.0 * schedule, reorder_us=5.0 * schedule)
        options = {"seed": seed + schedule, "heap_bytes": HEAP, "timeout": 5.0, "entry_timeout": 60.0}
        with mock.patch.object(emulated, "Faults", lambda faults=faults: faults):
            result = mk.launch(bits, shape.size, shape.ranks_per_node, "cpu", (layer, model), **options)
        found.add(tuple(map(tuple, result)))
    assert len(found) == 1, f"{layer}, {model}"


def planned(world: Any, layer: Layer, model: Any) -> list[Any]:
    """Results of a plan beside those of calls, and what was agreed on after the plan was made."""
    rng, found = np.random.default_rng(layer.seed), []
    up, down = layer.weights(world.rank)
    options: dict[str, Any] = {"activation": "swiglu" if layer.gated else None, "max_tokens": model.max_tokens}
    for call, kind in enumerate(("uniform", "skewed")):
        everyone = draw_ids(rng, model, world.size, kind)
        ids, routed = everyone[world.rank], sum(int((ids >= 0).sum()) for ids in everyone)
        own = np.random.default_rng([layer.seed, world.rank, call, 3])
        x = own.standard_normal((len(ids), layer.h)).astype(DTYPES[layer.dtype])
        weights = own.random(ids.shape).astype(np.float32)
        add = x[::-1].copy() if call else None
        plan = mk.plan("moe_layer", x, ids, weights, up, down, add, **options)
        agreed, counts = world.problems.collectives, np.zeros(layer.experts * world.size, np.int32)
        y = plan.run(x, ids, weights, up, down, add, counts)
        found.append(world.problems.collectives - agreed)
        again = mk.moe_layer(x, ids, weights, up, down, add=add, **options)
        found.append(y.tobytes() == again.tobytes() and int(counts.sum()) == routed)
        text = plan.describe()
        found.append(text.startswith("moe_dispatch_gemm") and "\nmoe_gemm_combine" in text and plan.workspace_bytes > 0)
    return found


@pytest.mark.parametrize("world", ["1x2", "2x2"])
@pytest.mark.drawn(1)
def test_a_prepared_layer_agrees_on_nothing_more(rng: np.random.Generator, world: str) -> None:
    shape = topology(world)
    model = dataclasses.replace(draw_model(rng, shape.size), max_tokens=30, alignment=1)
    seed = int(rng.integers(1 << 30))
    layer = Layer(model.h, model.f, model.experts, model.dtype, model.row_major, model.gated, seed)
    options = {"seed": seed, "heap_bytes": HEAP, "timeout": 5.0, "entry_timeout": 60.0}
    found = mk.launch(planned, shape.size, shape.ranks_per_node, "cpu", (layer, model), **options)
    assert found == [[0, True, True] * 2] * shape.size, f"{layer}, {model}"


def test_a_plan_of_the_layer_says_what_is_wrong() -> None:
    def use(world: Any) -> None:
        x, up, down = np.ones((3, 16), np.float16), np.ones((1, 16, 16), np.float16), np.ones((1, 8, 16), np.float16)
        ids, weights = np.zeros((3, 1), np.int32), np.ones((3, 1), np.float32)
        with pytest.raises(ArgumentError, match="takes x, topk_ids"):
            mk.plan("moe_layer", x, ids, weights, up)
        with pytest.raises(ArgumentError, match="w_down"):
            mk.plan("moe_layer", x, ids, weights, up, np.ones((1, 16, 16), np.float16))
        with pytest.raises(TypeError, match="alignment"):
            mk.plan("moe_layer", x, ids, weights, up, down, alignment=2)

    mk.launch(use, 1, target="cpu", heap_bytes=HEAP)


def _spoiled(array: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The array in ways that no op takes."""
    apart, odd = np.repeat(array, 2, -1)[..., ::2], np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    return {"of another dtype": array.astype(np.float64), "longer": np.concatenate([array, array]), "with gaps": apart, "odd": odd}


def test_what_either_kernel_would_refuse_is_refused_before_one_runs() -> None:
    """Every array in every bad way, before a first call that is right, and after it, when the other arrays are known."""

    def use(world: Any) -> None:
        good = {
            "x": np.ones((3, 16), np.float16),
            "topk_ids": np.zeros((3, 1), np.int32),
            "topk_weights": np.ones((3, 1), np.float32),
            "w_gate_up": np.ones((2, 16, 16), np.float16),
            "w_down": np.ones((2, 8, 16), np.float16),
            "add": np.ones((3, 16), np.float16),
            "expert_counts": np.zeros(2, np.int32),
            "out": np.zeros((3, 16), np.float16),
        }
        read_only = np.broadcast_to(np.float16(0), (3, 16))
        shared = good["x"].reshape(-1)
        bad: list[tuple[str, dict[str, Any]]] = [
            (f"{name} {how}", {name: array}) for name in good for how, array in _spoiled(good[name]).items()
        ]
        bad += [(f"out is {name}", {name: good[name], "out": good[name]}) for name in ("x", "add")]
        bad += [("out is w_down", {"w_down": (down := np.ones((2, 8, 16), np.float16)), "out": down[0, :3]})]
        bad += [
            ("out read-only", {"out": read_only}),
            ("counts in x", {"x": shared.reshape(3, 16), "expert_counts": shared[:4].view(np.int32)}),
        ]
        bad += [("no x", {"x": None}), ("clamp", {"clamp": 1e-50})]
        for _ in range(2):
            calls = world.call_number
            for what, change in bad:
                with pytest.raises(ArgumentError):
                    mk.moe_layer(**good | change)
                    pytest.fail(what)
                assert world.call_number == calls, what
            mk.moe_layer(**good)
            assert world.call_number == calls + 2

    mk.launch(use, 1, target="cpu", heap_bytes=HEAP)


@pytest.mark.parametrize("first", [False, True])
def test_layers_that_differ_in_the_layout_of_their_weights_only(first: bool) -> None:
    """Each has agreed on a number of tokens of its own."""

    def use(world: Any) -> None:
        for tokens, transposed in ((10, first), (100, not first), (7, first)):
            x, up = np.ones((tokens, 64), np.float16), np.full((1, 64, 128), 1 / 64, np.float16)
            if transposed:
                up = np.ascontiguousarray(up.transpose(0, 2, 1)).transpose(0, 2, 1)
            ids, weights, down = np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32), np.full((1, 64, 64), 1 / 64, np.float16)
            y = mk.moe_layer(x, ids, weights, up, down)
            assert y.shape == (tokens, 64)
            assert np.allclose(y.astype(float), 1 / (1 + np.exp(-1)), atol=1e-3)

    mk.launch(use, 1, target="cpu", heap_bytes=HEAP)
