"""The MoE ops on real GPUs: every element in worlds of every shape, and graphs whose routing changes between replays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mkernel as mk
from tests.gpu.worlds import WORLDS, gpus_of
from tests.ops.moe_body import ROUTINGS, Model, found_wrong
from tests.ops.refused_body import MODEL, WAYS, Program, rank

pytestmark = pytest.mark.gpu

MODELS = [
    Model(512, 264, 4, 3, "float16", True, False, True, 1, 700),
    Model(7168, 256, 8, 8, "float16", False, True, True, 1, 300),
    Model(1032, 2048, 2, 2, "float16", True, True, False, 24, 2000),
]
REPLAYS = 20


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.h}-{model.f}")
@pytest.mark.parametrize("world", WORLDS)
def test_every_array(rng: np.random.Generator, world: str, model: Model) -> None:
    gpus_of(world)
    seed = int(rng.integers(1 << 30))
    assert found_wrong(world, model, seed, ROUTINGS, "cuda", heap_bytes=2 << 30, max_sms=None) is None, f"seed {seed}"


def replayed(world: Any, tokens: int) -> list[str]:
    """A layer of experts that multiply by their number + 1, captured once; each replay has other routing and weights."""
    xp, experts, h = world.xp, 2, 256
    rng, everything = np.random.default_rng(world.rank), experts * world.size
    x = xp.asarray(rng.integers(-4, 5, (tokens, h)).astype(np.float16))
    ids, weights = xp.zeros((tokens, 2), xp.int32), xp.zeros((tokens, 2), xp.float32)
    eye, own = np.eye(h, dtype=np.float16), world.rank * experts + 1 + np.arange(experts)
    up, down = xp.asarray(np.broadcast_to(eye, (experts, h, h)).copy()), xp.asarray((own[:, None, None] * eye).astype(np.float16))
    out, wrong = xp.empty_like(x), []

    def layer() -> None:
        mk.moe_layer(x, ids, weights, up, down, activation=None, max_tokens=tokens, out=out)

    def draw() -> Any:
        ids[:] = xp.asarray(np.stack([rng.permutation(everything)[:2] for _ in range(tokens)]).astype(np.int32))
        weights[:] = xp.asarray(rng.integers(0, 3, (tokens, 2)).astype(np.float32))
        xp.cuda.Device().synchronize()
        return x.get() * (weights.get() * (ids.get() + 1)).sum(1, keepdims=True)

    expected = draw()
    layer()
    xp.cuda.Device().synchronize()
    if not np.array_equal(out.get(), expected):
        wrong.append("eager")
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        layer()
        graph = stream.end_capture()
    for number in range(REPLAYS):
        expected = draw()
        out[:] = xp.nan
        xp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        if not np.array_equal(out.get(), expected):
            wrong.append(f"replay {number}")
    world.barrier()
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_routing_changes_between_replays(world: str) -> None:
    ranks, per_node = gpus_of(world)
    options = {"heap_bytes": 1 << 30, "timeout": 5.0}
    assert mk.launch(replayed, ranks, per_node, "cuda", (100,), **options) == [[]] * ranks


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_is_told_of_bad_routing_and_the_world_goes_on(rng: np.random.Generator, world: str) -> None:
    ranks, per_node = gpus_of(world)
    seed, ways = int(rng.integers(1 << 30)), ("first", *rng.permutation([way for way in WAYS if way != "first"]))
    options = {"heap_bytes": 64 << 20, "timeout": 20.0, "entry_timeout": 60.0}
    mk.launch(rank, ranks, per_node, "cuda", (seed, tuple(map(str, ways))), **options)


def refused_replays(world: Any, seed: int) -> None:
    """A layer that one rank captures with too many tokens: every replay is refused on every rank, whatever else the graph launches."""
    calls, xp = Program(world, seed), world.xp
    calls.check("layer")
    for fault in ("tokens", "none such"):
        call = calls.wrong(fault)
        arrays = calls.arrays(call)
        plan = mk.plan("moe_layer", *arrays, activation="swiglu", max_tokens=MODEL.max_tokens, max_rows=calls.max_rows)
        out, stream = xp.empty_like(arrays[0]), xp.cuda.Stream(non_blocking=True)
        xp.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            plan.run(*arrays, out=out)
            graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
            with pytest.raises(mk.RoutingError) as caught:
                world.synchronize()
            assert (caught.value.rank, caught.value.value, caught.value.token) == call.told
            assert caught.value.report.skipped == 1
            calls.check("layer")
    world.barrier()


@pytest.mark.parametrize("world", WORLDS)
def test_every_replay_of_bad_routing_is_refused(rng: np.random.Generator, world: str) -> None:
    ranks, per_node = gpus_of(world)
    options = {"heap_bytes": 64 << 20, "timeout": 20.0, "entry_timeout": 60.0}
    mk.launch(refused_replays, ranks, per_node, "cuda", (int(rng.integers(1 << 30)),), **options)
