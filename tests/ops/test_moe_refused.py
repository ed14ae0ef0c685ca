"""Bad routing where hosts run ahead of their kernels: two kernels are launched for it before the first one's error is there.

On target cpu a launch ends before the host goes on, and raises what it has reported. Here it raises nothing, as on a GPU: the error stays
where the kernel has put it until the world is used next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import AbortedError, ArgumentError
from mkernel.ops import moe_combine, moe_dispatch_gemm, prepared_layer
from tests.ops.body import topology
from tests.ops.moe_body import small_puts
from tests.ops.refused_body import MODEL, WAYS, Program, rank, running_ahead


def run(world: str, seed: int, *arguments: Any) -> None:
    shape = topology(world)
    options: dict[str, Any] = {"seed": seed, "heap_bytes": 16 << 20, "timeout": 5.0, "entry_timeout": 10.0}
    with small_puts(seed):
        mk.launch(rank, shape.size, shape.ranks_per_node, "cpu", (seed, *arguments), **options)


@pytest.mark.parametrize("world", ["1x2", *(pytest.param(w, marks=pytest.mark.slow) for w in ("1x1", "2x2", "3x1"))])
def test_every_rank_is_told_and_the_world_goes_on(rng: np.random.Generator, world: str) -> None:
    seed, ways = int(rng.integers(1 << 30)), ("first", *rng.permutation([way for way in WAYS if way != "first"]))
    run(world, seed, tuple(map(str, ways)))


def _old_check(world: Any, ids: Any, max_tokens: int) -> None:
    raise ArgumentError("routing.topk_ids.shape", ids.shape, f"T must be at most max_tokens = {max_tokens}")


# What was there before; and each part of what is there now left out. With the way to call that shows it.
PLANTED: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "the host checks for itself: layer": ("layer", lambda patch: patch.setattr(moe_combine, "_check_refused", _old_check)),
    "the host checks for itself: by hand": ("by hand", lambda patch: patch.setattr(moe_combine, "_check_refused", _old_check)),
    "nobody notes": ("layer", lambda patch: patch.setattr(moe_dispatch_gemm, "note_refused", lambda *_: None)),
    "a plan does not note": ("plan", lambda patch: patch.setattr(prepared_layer, "note_refused", lambda *_: None)),
    "copies are not waited for": ("copies", lambda patch: patch.setattr("mkernel.runtime.world.World.synchronize", lambda self: None)),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, bug: str) -> None:
    way, plant = PLANTED[bug]
    plant(monkeypatch)
    with pytest.raises((ArgumentError, AbortedError, AssertionError), match=r"max_tokens = 9|second kernel was launched"):
        run("1x2", int(rng.integers(1 << 30)), (way,), ("tokens",))


def test_what_was_refused_is_no_routing_once_its_error_was_raised() -> None:
    """The arrays of a refused dispatch hold nothing: nobody may multiply by them later, in a call that is known or a new one."""

    def use(world: Any) -> None:
        calls = Program(world, 1)
        calls.check("by hand")
        call = calls.wrong("tokens")
        x, ids, weights, *_ = calls.arrays(call)
        with running_ahead(world):
            d = mk.moe_dispatch_gemm(x, ids, calls.up, activation="swiglu", max_tokens=MODEL.max_tokens, max_rows=calls.max_rows)
            mk.moe_gemm_combine(d.y, calls.down, d.routing, topk_weights=weights)
            with pytest.raises(mk.RoutingError):
                world.check()
            for _ in range(2):
                with pytest.raises(ArgumentError, match="max_tokens = 9"):
                    mk.moe_gemm_combine(d.y, calls.down, d.routing, topk_weights=weights)
        calls.check("layer")

    mk.launch(use, 1, target="cpu", heap_bytes=16 << 20)


def test_too_many_tokens_of_a_routing_that_was_not_refused_are_an_argument_error() -> None:
    def use(world: Any) -> None:
        calls = Program(world, 1)
        call = calls.right()
        d = mk.moe_dispatch_gemm(call.x, call.ids, calls.up, activation="swiglu", max_tokens=MODEL.max_tokens, max_rows=calls.max_rows)
        routing = d.routing._replace(topk_ids=np.zeros((10, MODEL.topk), np.int32))
        with running_ahead(world), pytest.raises(ArgumentError, match="max_tokens = 9"):
            mk.moe_gemm_combine(d.y, calls.down, routing)
        calls.check("layer")

    mk.launch(use, 1, target="cpu", heap_bytes=16 << 20)
