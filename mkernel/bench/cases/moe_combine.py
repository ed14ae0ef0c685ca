"""moe_combine: rows of experts, H columns, to the tokens of a drawn routing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkernel.bench.cases.moe import MoeCase, MoeOp
from mkernel.bench.moe_baselines import MoeBaseline, moe_baseline
from mkernel.planner.moe_combine import MoeCombineProblem, make_plan
from mkernel.tools.check_moe import Rows, exact

if TYPE_CHECKING:
    from mkernel.bench.baselines import TorchBaselines
    from mkernel.bench.timing import Call, Timing
    from mkernel.planner.split import Split
    from mkernel.planner.topology import Topology
    from mkernel.runtime.plan import Plan

__all__ = ["OP", "MoeCombineCase"]

_ITEM = 2  # bytes of a 16-bit element
_SLACK = 16 << 20


class MoeCombineCase(MoeCase):
    op = "moe_combine"

    def __init__(self, label: str, topology: Topology, dtype: str) -> None:
        super().__init__(label, topology, dtype)
        self.flops = 2.0 * self.max_tokens * self.topk * self.hidden
        self.link_bytes, self.network_bytes = self.combined_bytes()
        self.problem = MoeCombineProblem(
            topology, self.hidden, dtype, self.topk, self.experts, self.max_tokens, self.max_rows, weighted=True
        )
        self.heap_bytes = make_plan(self.problem, 0, 132).workspace_bytes + _SLACK

    def plan(self, sm_count: int, split: Split | None = None, *, rows: int | None = None, specialize: str | None = None) -> Plan:
        return make_plan(self.problem, 0, sm_count, split)

    def setup(self, timing: Timing, seed: int) -> None:
        rank = timing.world.rank
        count = self.prepare(timing, seed, _ITEM * self.hidden * (self.max_rows + self.tokens[rank]))
        self._rows = [self.expert_rows(i, rank, self.hidden) for i in range(count)]
        self._routing = [self.routing(i) for i in range(count)]
        self._weights = [self.weights(i) for i in range(count)]
        self._out = [timing.empty((self.tokens[rank], self.hidden)) for _ in range(count)]
        for out in self._out:
            timing.poison(out)
        timing.synchronize()

    def fused(self, split: Any = None) -> list[Call]:
        import mkernel as mk

        call = functools.partial(mk.moe_combine, world=self._timing.world, split=split)
        sets = zip(self._rows, self._routing, self._weights, self._out, strict=True)
        return [functools.partial(call, rows, routing, topk_weights=weights, out=out) for rows, routing, weights, out in sets]

    def first_call(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        return self.op, (self._rows[0], *self._routing[0], self._weights[0], None), {}

    def outputs(self) -> list[Any]:
        return self._out

    def _reference(self, index: int) -> Rows:
        xp, formed = self._timing.xp, functools.cache(lambda owner: self.expert_rows(index, owner, self.hidden))
        return self.combined(index, lambda owner, expert, tokens, rows: exact(xp, formed(owner)[rows])).result()

    def baselines(self, baselines: Any) -> dict[str, Sequence[Call]]:
        def make(steps: MoeBaseline, torch: TorchBaselines) -> list[Call]:
            sets = zip(self._rows, self.routes(torch, len(self._rows)), strict=True)
            return [functools.partial(steps.combine, route, torch.tensor(rows), weights) for rows, (route, weights) in sets]

        return moe_baseline(baselines, make)

    def alone(self, baselines: Any) -> Sequence[Call]:
        return ()


class _Op(MoeOp):
    name = "moe_combine"
    kind = MoeCombineCase


OP = _Op()
