"""moe_layer: tokens to their experts, SwiGLU of (H, 2 F), then (F, H), and back. Two kernels one after the other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkernel.bench.cases.moe import MoeCase, MoeOp
from mkernel.bench.moe_baselines import MoeBaseline, grouped_alone, moe_baseline
from mkernel.planner import moe_dispatch_gemm, moe_gemm_combine
from mkernel.planner.choose_moe import plan_moe_dispatch_gemm, plan_moe_gemm_combine
from mkernel.planner.moe_combine import MoeCombineProblem
from mkernel.planner.predict import predict
from mkernel.planner.prediction import ALONE, Conditions, Prediction
from mkernel.tools.check_moe import Rows, exact, product, rounded, swiglu

if TYPE_CHECKING:
    from mkernel.bench.baselines import TorchBaselines
    from mkernel.bench.timing import Call, Timing
    from mkernel.planner.machine import Machine
    from mkernel.planner.split import Split
    from mkernel.planner.topology import Topology
    from mkernel.runtime.plan import Plan

__all__ = ["OP", "MoeLayerCase"]

_ITEM = 2  # bytes of a 16-bit element
_SLACK = 16 << 20


class MoeLayerCase(MoeCase):
    """``plan`` and ``first_call`` are those of the first kernel, which a split is tuned for."""

    op = "moe_layer"

    def __init__(self, label: str, topology: Topology, dtype: str) -> None:
        super().__init__(label, topology, dtype)
        self.flops = 6.0 * self.rows * self.hidden * self.inner
        self.weight_bytes = self.touched_bytes(3)
        (out, across), (back, again) = self.dispatched_bytes(), self.combined_bytes()
        self.link_bytes, self.network_bytes = out + back, across + again
        sizes = topology, self.inner, self.hidden, dtype, True, self.experts, self.topk, self.max_tokens, self.max_rows
        self.problem = moe_dispatch_gemm.MoeDispatchGemmProblem(*sizes, alignment=1, weighted=False, gated=True, clamp=0.0)
        combined = MoeCombineProblem(topology, self.hidden, dtype, self.topk, self.experts, self.max_tokens, self.max_rows, weighted=True)
        self._second = moe_gemm_combine.MoeGemmCombineProblem(combined, self.inner, True)
        second = plan_moe_gemm_combine(self._second, 132)
        self.heap_bytes = max(self.plan(132).workspace_bytes, second.workspace_bytes) + _SLACK

    def plan(self, sm_count: int, split: Split | None = None, *, rows: int | None = None, specialize: str | None = None) -> Plan:
        return plan_moe_dispatch_gemm(self.problem, sm_count, split, specialize=specialize, machine=self.machine)

    def predicted(self, machine: Machine, conditions: Conditions = ALONE, split: Split | None = None) -> Prediction | None:
        """Times of both kernels, one after the other; ``split``: of the first."""
        tokens = self.shape["T"]
        first = predict(self.plan(machine.sms, split), machine, conditions, tokens)
        second = predict(
            plan_moe_gemm_combine(self._second, machine.sms, machine=self.machine), machine, conditions._replace(hot=True), tokens
        )
        return None if first is None or second is None else Prediction(*(one + other for one, other in zip(first, second, strict=True)))

    def setup(self, timing: Timing, seed: int) -> None:
        rank = timing.world.rank
        weights = 3 * self.experts * self.hidden * self.inner
        count = self.prepare(timing, seed, _ITEM * (weights + 2 * self.tokens[rank] * self.hidden))
        self._operands = [(self.x(i, rank), self.ids(i), self.weights(i), *self._experts(i, rank)) for i in range(count)]
        self._out = [timing.empty((self.tokens[rank], self.hidden)) for _ in range(count)]
        for out in self._out:
            timing.poison(out)
        timing.synchronize()

    def _experts(self, index: int, rank: int) -> tuple[Any, Any]:
        """(E/W, H, 2 F) and (E/W, F, H) of a rank."""
        return self.w(index, rank, self.hidden, 2 * self.inner), self.w(index, rank, self.inner, self.hidden, down=True)

    @property
    def _options(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "max_rows": self.max_rows}

    def fused(self, split: Any = None) -> list[Call]:
        import mkernel as mk

        call = functools.partial(mk.moe_layer, world=self._timing.world, split=split, **self._options)
        return [functools.partial(call, *operands, out=out) for operands, out in zip(self._operands, self._out, strict=True)]

    def first_call(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        x, ids, _, w, _ = self._operands[0]
        return "moe_dispatch_gemm", (x, ids, w, None), {"activation": "swiglu", **self._options}

    def outputs(self) -> list[Any]:
        return self._out

    def _reference(self, index: int) -> Rows:
        xp, x = self._timing.xp, self._operands[index][0]
        formed = functools.lru_cache(maxsize=1)(lambda owner: self._experts(index, owner))

        def made(owner: int, expert: int, tokens: Any, rows: Any) -> Rows:
            gate_up, down = formed(owner)
            hidden = rounded(xp, swiglu(xp, product(xp, exact(xp, x[tokens]), gate_up[expert])), self.dtype)
            return rounded(xp, product(xp, hidden, down[expert]), self.dtype)

        return self.combined(index, made).result()

    def _tensors(self, torch: TorchBaselines) -> list[tuple[Any, ...]]:
        """Route, x, both weights of experts, and weights of choices of each set."""
        sets = zip(self._operands, self.routes(torch, len(self._operands)), strict=True)
        return [(route, *map(torch.tensor, (x, up, down)), weights) for (x, _, _, up, down), (route, weights) in sets]

    def baselines(self, baselines: Any) -> dict[str, Sequence[Call]]:
        def make(steps: MoeBaseline, torch: TorchBaselines) -> list[Call]:
            def call(route: Any, x: Any, up: Any, down: Any, weights: Any) -> Any:
                hidden = steps.activate(steps.dispatch(route, x, up))
                return steps.combine(route, steps.multiply(route, hidden, down), weights)

            return [functools.partial(call, *one) for one in self._tensors(torch)]

        return moe_baseline(baselines, make)

    def alone(self, baselines: Any) -> Sequence[Call]:
        """Both grouped GEMMs, without the activation."""

        def make(steps: MoeBaseline, torch: TorchBaselines) -> list[Call]:
            def call(route: Any, rows: Any, hidden: Any, up: Any, down: Any) -> None:
                steps.multiply(route, rows, up)
                steps.multiply(route, hidden, down)

            inputs, hidden = (torch.tensor(self.expert_rows(0, self._timing.world.rank, n)) for n in (self.hidden, self.inner))
            return [
                functools.partial(call, route, inputs[: sum(route.received)], hidden[: sum(route.received)], up, down)
                for route, _, up, down, _ in self._tensors(torch)
            ]

        return grouped_alone(baselines, make)


class _Op(MoeOp):
    name = "moe_layer"
    kind = MoeLayerCase
    matrices = 3

    def demo_sizes(self, target: str, ranks: int) -> Sequence[str]:
        sizes = super().demo_sizes(target, ranks)
        return (f"90x136x72x{2 * ranks}x2:uniform", *sizes) if target == "cpu" else sizes


OP = _Op()
