"""moe_gemm_combine: rows of F columns, times each expert's (F, H), to the tokens of a drawn routing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkernel.bench.cases.moe import MoeCase, MoeOp
from mkernel.bench.moe_baselines import MoeBaseline, grouped_alone, moe_baseline
from mkernel.planner.choose_moe import plan_moe_gemm_combine
from mkernel.planner.moe_combine import MoeCombineProblem
from mkernel.planner.moe_gemm_combine import MoeGemmCombineProblem
from mkernel.tools.check_moe import Rows, exact, product, rounded

if TYPE_CHECKING:
    from mkernel.bench.baselines import TorchBaselines
    from mkernel.bench.timing import Call, Timing
    from mkernel.planner.split import Split
    from mkernel.planner.topology import Topology
    from mkernel.runtime.plan import Plan

__all__ = ["OP", "MoeGemmCombineCase"]

_ITEM = 2  # bytes of a 16-bit element
_SLACK = 16 << 20


class MoeGemmCombineCase(MoeCase):
    op = "moe_gemm_combine"

    def __init__(self, label: str, topology: Topology, dtype: str) -> None:
        super().__init__(label, topology, dtype)
        self.flops = 2.0 * self.rows * self.hidden * self.inner
        self.weight_bytes = self.touched_bytes(1)
        self.link_bytes, self.network_bytes = self.combined_bytes()
        combined = MoeCombineProblem(topology, self.hidden, dtype, self.topk, self.experts, self.max_tokens, self.max_rows, weighted=True)
        self.problem = MoeGemmCombineProblem(combined, self.inner, True)
        self.heap_bytes = self.plan(132).workspace_bytes + _SLACK

    def plan(self, sm_count: int, split: Split | None = None, *, rows: int | None = None, specialize: str | None = None) -> Plan:
        return plan_moe_gemm_combine(self.problem, sm_count, split, specialize=specialize, machine=self.machine)

    def setup(self, timing: Timing, seed: int) -> None:
        rank = timing.world.rank
        weights = self.experts * self.hidden * self.inner
        count = self.prepare(timing, seed, _ITEM * (weights + self.max_rows * self.inner + self.tokens[rank] * self.hidden))
        self._operands = [
            (self.expert_rows(i, rank, self.inner), self.w(i, rank, self.inner, self.hidden), self.routing(i)) for i in range(count)
        ]
        self._weights = [self.weights(i) for i in range(count)]
        self._out = [timing.empty((self.tokens[rank], self.hidden)) for _ in range(count)]
        for out in self._out:
            timing.poison(out)
        timing.synchronize()

    def fused(self, split: Any = None) -> list[Call]:
        import mkernel as mk

        call = functools.partial(mk.moe_gemm_combine, world=self._timing.world, split=split)
        sets = zip(self._operands, self._weights, self._out, strict=True)
        return [functools.partial(call, *operands, topk_weights=weights, out=out) for operands, weights, out in sets]

    def first_call(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        a, w, routing = self._operands[0]
        return self.op, (a, w, *routing, self._weights[0], None), {}

    def outputs(self) -> list[Any]:
        return self._out

    def _reference(self, index: int) -> Rows:
        xp = self._timing.xp

        @functools.lru_cache(maxsize=1)
        def formed(owner: int) -> tuple[Any, Any]:
            return self.expert_rows(index, owner, self.inner), self.w(index, owner, self.inner, self.hidden)

        def made(owner: int, expert: int, tokens: Any, rows: Any) -> Rows:
            a, w = formed(owner)
            return rounded(xp, product(xp, exact(xp, a[rows]), w[expert]), self.dtype)

        return self.combined(index, made).result()

    def _tensors(self, torch: TorchBaselines) -> list[tuple[Any, Any, Any, Any]]:
        """Route, rows, w and weights of each set."""
        sets = zip(self._operands, self.routes(torch, len(self._operands)), strict=True)
        return [(route, torch.tensor(a[: sum(route.received)]), torch.tensor(w), weights) for (a, w, _), (route, weights) in sets]

    def baselines(self, baselines: Any) -> dict[str, Sequence[Call]]:
        def make(steps: MoeBaseline, torch: TorchBaselines) -> list[Call]:
            def call(route: Any, a: Any, w: Any, weights: Any) -> Any:
                return steps.combine(route, steps.multiply(route, a, w), weights)

            return [functools.partial(call, *one) for one in self._tensors(torch)]

        return moe_baseline(baselines, make)

    def alone(self, baselines: Any) -> Sequence[Call]:
        return grouped_alone(baselines, lambda steps, torch: [functools.partial(steps.multiply, *one[:3]) for one in self._tensors(torch)])


class _Op(MoeOp):
    name = "moe_gemm_combine"
    kind = MoeGemmCombineCase


OP = _Op()
