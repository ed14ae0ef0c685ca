"""Calls of the MoE layer whose routing is wrong on one rank, in every way to make the layer, where hosts may run ahead of their kernels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

import mkernel as mk
from mkernel.tools.routing import reference_routing
from tests.gpu.drawn import to_device, to_host
from tests.ops.layer_body import Layer
from tests.ops.moe_body import DTYPES, Model, draw_ids

__all__ = ["FAULTS", "MODEL", "WAYS", "Call", "Program", "rank", "running_ahead"]

MODEL = Model(24, 24, 2, 2, "bfloat16", True, True, True, 1, 9)
FAULTS = ("none such", "negative", "twice", "int64", "tokens", "rows")
WAYS = ("layer", "plan", "by hand", "rows by hand", "copies", "first")


@contextlib.contextmanager
def running_ahead(world: Any) -> Iterator[None]:
    """On target cpu: launches see and raise no error of a call; ``check``, ``synchronize`` and collectives do, as on a GPU."""
    launch, state = world.launch, world._state

    def blind(*arguments: Any) -> None:
        world._state = (0,)
        try:
            launch(*arguments)
        finally:
            world._state = state

    with mock.patch.object(world, "_synchronous", False), mock.patch.object(world, "launch", blind):
        yield


@dataclasses.dataclass
class Call:
    """One call of the layer on this rank. ``told``: rank, value and token of its error."""

    x: Any
    ids: Any
    weights: Any
    told: tuple[int, int, int | None] | None = None


class Program:
    """Calls of one layer, right and wrong; all ranks draw the same ones."""

    def __init__(self, world: Any, seed: int) -> None:
        self.world, self.rng = world, np.random.default_rng(seed)
        self.layer = Layer(MODEL.h, MODEL.f, MODEL.experts, MODEL.dtype, MODEL.row_major, MODEL.gated, seed)
        self.up, self.down = (to_device(world.xp, w) for w in self.layer.weights(world.rank))
        self.all_ids = draw_ids(self.rng, MODEL, world.size, "uniform", [int(n) for n in self.rng.integers(1, 10, world.size)])
        for ids in self.all_ids:
            ids[0] = -1  # so that more rows than these are possible
        self.max_rows = max(1, max(self.rows_of(self.all_ids)))

    def rows_of(self, all_ids: list[Any]) -> list[int]:
        everyone = np.concatenate([ids.ravel() for ids in all_ids])
        return [int((everyone[everyone >= 0] // MODEL.experts == rank).sum()) for rank in range(self.world.size)]

    def call(self, ids: Any) -> Call:
        own = np.random.default_rng([int(self.rng.integers(1 << 30)), self.world.rank])
        return Call(own.standard_normal((len(ids), MODEL.h)).astype(DTYPES[MODEL.dtype]), ids, own.random(ids.shape).astype(np.float32))

    def right(self) -> Call:
        return self.call(self.all_ids[self.world.rank])

    def wrong(self, fault: str) -> Call:
        """A call whose routing is wrong on one rank."""
        size, bad = self.world.size, int(self.rng.integers(self.world.size))
        all_ids, token = [ids.astype(np.int64) for ids in self.all_ids], int(self.rng.integers(len(self.all_ids[bad])))
        rank, value, said = bad, MODEL.experts * size, token
        if fault == "tokens":
            value, said = MODEL.max_tokens + int(self.rng.integers(1, 9)), None
            all_ids[bad] = np.resize(all_ids[bad], (value, MODEL.topk))
        elif fault == "rows":
            rows = self.rows_of(all_ids)
            rank = int(np.argmax(rows))
            all_ids[bad][:] = rank * MODEL.experts + np.arange(MODEL.topk)
            value, said = self.rows_of(all_ids)[rank], None
        else:
            value = {"none such": value, "negative": -2, "twice": 1, "int64": 2**40}[fault]
            all_ids[bad][token] = [value, value if fault == "twice" else -1]
        return dataclasses.replace(self.call(all_ids[self.world.rank]), told=(rank, min(value, 2**31 - 1), said))

    def make(self, call: Call, way: str) -> Any:
        """What the layer makes of the call, in one of the ways to make it."""
        options: dict[str, Any] = {"activation": "swiglu", "max_tokens": MODEL.max_tokens, "max_rows": self.max_rows, "world": self.world}
        arrays = x, ids, weights, *_ = self.arrays(call)
        if way == "plan":
            return mk.plan("moe_layer", *arrays, **options).run(*arrays)
        if way in ("layer", "first"):
            return mk.moe_layer(*arrays, **options)
        d = mk.moe_dispatch_gemm(x, ids, self.up, **options)
        routing = mk.Routing(*(array.copy() for array in d.routing)) if way == "copies" else d.routing
        if way == "rows by hand":
            return mk.moe_combine(d.y, routing, topk_weights=weights, world=self.world)
        return mk.moe_gemm_combine(d.y, self.down, routing, topk_weights=weights, world=self.world)

    def arrays(self, call: Call) -> list[Any]:
        """On the device, in the order of ``mk.moe_layer``."""
        return [*(to_device(self.world.xp, array) for array in (call.x, call.ids, call.weights)), self.up, self.down]

    def check(self, way: str) -> None:
        """A right call has the right result."""
        call = self.right()
        y = to_host(self.make(call, way))
        self.world.synchronize()
        if way != "rows by hand":
            values, bound = self.layer.reference(call.x, call.ids, call.weights, None)
            assert (np.abs(y.astype(np.float64) - values) <= bound).all()
            return
        known = reference_routing(self.all_ids, self.world.topology, MODEL.experts * self.world.size, MODEL.max_tokens, self.max_rows)
        assert np.isfinite(y.astype(np.float32)).all()
        assert not y[(known[self.world.rank].topk_ids < 0).all(1)].any()

    def refused(self, fault: str, way: str) -> int:
        """How many calls of this rank were skipped after the one that is refused."""
        call = self.wrong(fault)
        touch: Callable[[], None] = [self.world.check, self.world.synchronize, self.world.barrier][int(self.rng.integers(3))]
        try:
            self.make(call, way)
            if self.world.target == "cuda" and touch == self.world.check:  # which waits for nothing
                self.world.xp.cuda.Device().synchronize()
            touch()
        except mk.RoutingError as error:
            assert (error.rank, error.value) == call.told[:2]
            assert error.token == call.told[2]
            assert error.remedy
            return int(error.report.skipped)
        raise AssertionError(f"{fault}, {way}: the call was not refused")


def rank(world: Any, seed: int, ways: tuple[str, ...], faults: tuple[str, ...] = FAULTS) -> None:
    """The program of a rank: each fault in each way, and right calls between them."""
    calls, on_cpu = Program(world, seed), world.target == "cpu"
    with running_ahead(world) if on_cpu else contextlib.nullcontext():
        for way in ways:
            if way != "first":  # then nothing has been agreed on before the wrong call
                calls.check(way)
            for fault in faults:
                skipped = calls.refused(fault, way)
                if not on_cpu or (way == "copies" and fault == "tokens"):
                    assert skipped <= 1  # a host on a GPU may see the error first; a rank that has copied the ids waits for it
                elif way != "first":
                    assert skipped == 1, f"{way}, {fault}: the second kernel was launched, whatever the first one is about to report"
            calls.check(way)
    world.barrier()
