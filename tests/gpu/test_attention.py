"""Attention in worlds of real GPUs: drawn calls, dense and packed, every element; calls again; graphs whose inputs change."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import mkernel as mk
from mkernel.runtime.cuda.gpus import available
from tests.ops import ring_body, varlen_body
from tests.ops.ring_body import Model, draw_model, draw_sizes
from tests.ops.varlen_body import draw_packed

pytestmark = pytest.mark.gpu

WORLDS = ["1x1", "1x2", "2x1", "1x4", "2x2"]
LAYOUTS = [(False, "contiguous"), (True, "contiguous"), (True, "zigzag"), (False, "zigzag")]
CALLS, REPLAYS = 3, 4


class Case(NamedTuple):
    """A call's arrays on this rank, what it makes of them, and what is wrong with its results."""

    title: str
    host: list[Any]
    call: Callable[[list[Any], Any], Any]
    wrong: Callable[[Any, Any], list[str]]


def ring(model: Model, rng: np.random.Generator, world: Any, call: int, seed: int) -> Case:
    sizes = draw_sizes(rng, model, world.size, 1 << 23)
    gathered = [ring_body.inputs(model, seed, rank, call, *sizes) for rank in range(world.size)]

    def calls(arrays: list[Any], out: Any) -> Any:
        return mk.ring_attention(*arrays, causal=model.causal, scale=model.scale, layout=model.layout, out=out)

    def wrong(o: Any, lse: Any) -> list[str]:
        return ring_body.errors(model, world.size, world.rank, gathered, o, lse)

    return Case(f"B {sizes[0]}, {sizes[1]} rows", list(gathered[world.rank]), calls, wrong)


def packed(model: Model, rng: np.random.Generator, world: Any, call: int, seed: int) -> Case:
    drawn = draw_packed(rng, model, world.size, 1 << 23)
    arrays = varlen_body.whole(model, seed, call, drawn)
    ends = np.array(drawn.ends(), np.int32)

    def calls(given: list[Any], out: Any) -> Any:
        q, k, v, sums = given
        return mk.ring_attention_varlen(q, k, v, sums, causal=model.causal, scale=model.scale, layout=model.layout, out=out)

    def wrong(o: Any, lse: Any) -> list[str]:
        return varlen_body.errors(model, arrays, drawn, world.rank, world.size, o, lse)

    return Case(str(drawn), [*varlen_body.inputs(model, arrays, drawn, world.rank, world.size), ends], calls, wrong)


def copied(xp: Any, array: Any) -> Any:
    """A host array's copy on the GPU, rows as far from each other as the host's."""
    if array.dtype == np.int32:
        return xp.asarray(array)
    whole = array if array.base is None or array.base.dtype != array.dtype else array.base
    on_gpu = xp.asarray(np.ascontiguousarray(whole).view(np.uint16)).view(array.dtype)
    if whole is array:
        return on_gpu
    return xp.lib.stride_tricks.as_strided(on_gpu, array.shape, array.strides)


def on_host(array: Any) -> Any:
    if array.dtype.itemsize == 2:
        return array.view(np.uint16).get().view(array.dtype)
    return array.get()


def same(before: list[Any], now: Any) -> bool:
    """Whether results are bit for bit what they were."""
    return all(array.tobytes() == on_host(other).tobytes() for array, other in zip(before, now, strict=True))


def one_model(world: Any, d: int, dtype: str, causal: bool, layout: str, make: Any, seed: int) -> list[str]:
    """Calls of one kernel: each twice, then captured and replayed with other values in the same arrays."""
    rng, xp, found = np.random.default_rng(seed), world.xp, []
    for call in range(CALLS):
        model = draw_model(rng, d, causal, layout, dtype)
        case = make(model, rng, world, call, seed)
        arrays = [copied(xp, array) for array in case.host]
        first = [on_host(array) for array in case.call(arrays, None)]
        again = case.call(arrays, None)
        title = f"rank {world.rank}, {model}, {case.title}"
        found += [f"{title}: {text}" for text in case.wrong(*first)]
        if not same(first, again):
            found.append(f"{title}: other bits when called again")
        stream = xp.cuda.Stream(non_blocking=True)
        xp.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            case.call(arrays, again)
            graph = stream.end_capture()
        for replay in range(REPLAYS):  # q has the other sign in every other one
            for array in again:
                array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)[...] = 7
            arrays[0].view(np.uint16)[...] ^= np.uint16(0x8000)
            xp.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            if same(first, again) != bool(replay % 2 or not np.isfinite(first[1]).any()):
                found.append(f"{title}: replay {replay}")
    world.barrier()
    return found


@pytest.mark.parametrize("make", [ring, packed])
@pytest.mark.parametrize("world", WORLDS)
def test_every_array(rng: np.random.Generator, world: str, make: Any) -> None:
    nodes, per_node = map(int, world.split("x"))
    if nodes * per_node > max(len(available()), 2 * bool(os.environ.get("MKERNEL_SHARE_GPUS"))):
        pytest.skip(f"{nodes * per_node} GPUs needed")
    seed = int(rng.integers(1 << 30))
    found = mk.launch(_all, nodes * per_node, per_node, "cuda", (make, seed), heap_bytes=1 << 30, timeout=5.0, entry_timeout=60.0)
    assert not any(found), (seed, found)


def _all(world: Any, make: Any, seed: int) -> list[str]:
    found = []
    for number, ((causal, layout), d) in enumerate(itertools.product(LAYOUTS, (64, 128))):
        dtype = ("bfloat16", "float16")[number // 2 % 2]
        found += one_model(world, d, dtype, causal, layout, make, seed + number)
    return found
