"""Attention in worlds of real GPUs: drawn calls, dense and packed, every element; calls again; graphs whose inputs change."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from tests.gpu.drawn import Attention, Packed, Ring, Size, flat, to_host, words
from tests.gpu.worlds import WORLDS, gpus_of

pytestmark = pytest.mark.gpu

LAYOUTS = [(False, "contiguous"), (True, "contiguous"), (True, "zigzag"), (False, "zigzag")]
CALLS, REPLAYS = 3, 3
SIZE = Size(tokens=0, columns=0, topk=0, scores=1 << 23)


def bits(results: Any) -> list[bytes]:
    return [to_host(array).tobytes() for array in flat(results)]


def one_family(family: Attention) -> list[str]:
    """A call twice, then captured and replayed with other inputs in the same arrays."""
    xp = family.xp
    arrays, others = family.arrays(0), family.arrays(1)
    first = bits(family.call(arrays))
    results = family.call(arrays)
    found = family.found(0, results)
    if bits(results) != first:
        found.append(f"{family}: other bits when called again")
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        family.call(arrays, results)
        graph = stream.end_capture()
    for number in range(1, REPLAYS + 1):
        for array, other in zip(arrays, others if number % 2 else family.arrays(0), strict=True):
            words(array)[...] = words(other)
        for array in flat(results):
            words(array)[...] = 7
        xp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        found += family.found(number % 2, results)
    return found


def every_kernel(world: Any, op: type[Attention], seed: int) -> list[str]:
    rng, found = np.random.default_rng(seed), []
    for number, ((causal, layout), d) in enumerate(itertools.product(LAYOUTS, (64, 128))):
        kernel = d, causal, layout, ("bfloat16", "float16")[number // 2 % 2]
        for _ in range(CALLS):
            found += one_family(op(world, rng, SIZE, kernel))
    world.barrier()
    return found


@pytest.mark.parametrize("op", [Ring, Packed])
@pytest.mark.parametrize("world", WORLDS)
def test_every_array(rng: np.random.Generator, world: str, op: type[Attention]) -> None:
    ranks, per_node = gpus_of(world)
    seed = int(rng.integers(1 << 30))
    found = mk.launch(every_kernel, ranks, per_node, "cuda", (op, seed), heap_bytes=1 << 30, timeout=20.0, entry_timeout=60.0)
    assert not any(found), (seed, found)
