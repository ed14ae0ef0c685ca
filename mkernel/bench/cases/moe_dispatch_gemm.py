"""moe_dispatch_gemm: tokens of H columns to the experts of a drawn routing, each of which multiplies them by (H, F)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mkernel.bench.cases.moe import DRAWN, MoeCase, MoeOp
from mkernel.bench.moe_baselines import MoeBaseline, grouped_alone, moe_baseline
from mkernel.planner.choose_moe import plan_moe_dispatch_gemm
from mkernel.planner.moe_dispatch_gemm import MoeDispatchGemmProblem
from mkernel.tools.check_moe import Rows, exact, product, rounded, worst_rows

if TYPE_CHECKING:
    from mkernel.bench.baselines import TorchBaselines
    from mkernel.bench.timing import Call, Timing
    from mkernel.planner.split import Split
    from mkernel.planner.topology import Topology
    from mkernel.runtime.plan import Plan

__all__ = ["OP", "MoeDispatchGemmCase"]

_ITEM = 2  # bytes of a 16-bit element
_SLACK = 16 << 20


class MoeDispatchGemmCase(MoeCase):
    op = "moe_dispatch_gemm"

    def __init__(self, label: str, topology: Topology, dtype: str) -> None:
        super().__init__(label, topology, dtype)
        self.flops = 2.0 * self.rows * self.hidden * self.inner
        self.weight_bytes = self.touched_bytes(1)
        self.link_bytes, self.network_bytes = self.dispatched_bytes()
        self.problem = MoeDispatchGemmProblem(
            *(topology, self.inner, self.hidden, dtype, True, self.experts, self.topk, self.max_tokens, self.max_rows),
            alignment=1, weighted=True, gated=False, clamp=0.0,
        )  # fmt: skip
        self.heap_bytes = self.plan(132).workspace_bytes + _SLACK

    def plan(self, sm_count: int, split: Split | None = None, *, rows: int | None = None, specialize: str | None = None) -> Plan:
        return plan_moe_dispatch_gemm(self.problem, sm_count, split, specialize=specialize, machine=self.machine)

    def setup(self, timing: Timing, seed: int) -> None:
        rank = timing.world.rank
        weights = self.experts * self.hidden * self.inner
        count = self.prepare(timing, seed, _ITEM * (weights + self.tokens[rank] * self.hidden + self.max_rows * self.inner))
        self._operands = [(self.x(i, rank), self.ids(i), self.w(i, rank, self.hidden, self.inner)) for i in range(count)]
        self._weights = [self.weights(i) for i in range(count)]
        self._out = [self._empty() for _ in range(count)]
        for y in self.outputs():
            timing.poison(y)
        timing.synchronize()

    def _empty(self) -> Any:
        """The arrays of a result."""
        import mkernel as mk

        xp, nodes, rank = self._timing.xp, self.topology.num_nodes, self._timing.world.rank
        of_tokens, of_choices = (nodes, self.max_tokens), (nodes, self.max_tokens, self.topk)
        shapes = (self.tokens[rank], self.topk), of_choices, of_choices, of_tokens, of_tokens, (nodes, 2), (self.experts + 1,)
        routing = mk.Routing(*(xp.empty(shape, xp.int32) for shape in shapes))
        y, source = self._timing.empty((self.max_rows, self.inner)), xp.empty((self.max_rows, 3), xp.int32)
        return mk.Dispatched(y, routing.expert_offsets, source, xp.empty(self.max_rows, xp.float32), routing)

    @property
    def _options(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "max_rows": self.max_rows}

    def fused(self, split: Any = None) -> list[Call]:
        import mkernel as mk

        call = functools.partial(mk.moe_dispatch_gemm, world=self._timing.world, split=split, **self._options)
        sets = zip(self._operands, self._weights, self._out, strict=True)
        return [functools.partial(call, *operands, topk_weights=weights, out=out) for operands, weights, out in sets]

    def first_call(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        return self.op, (*self._operands[0], self._weights[0]), self._options

    def outputs(self) -> list[Any]:
        return [out.y for out in self._out]

    def written(self) -> list[Any]:
        """Rows of the rank's experts; ``y`` has room for more."""
        return [out.y[: int(out.expert_offsets[-1])] for out in self._out]

    def worst(self, index: int, split: Any = None) -> float:
        """Also inf where rows are not where they should be, or have another weight."""
        xp, rank, out = self._timing.xp, self._timing.world.rank, self._out[index]
        known = self.known(index % DRAWN)[rank]
        source = known.source[: known.expert_offsets[-1]]
        weights = [routed.weights for routed in self.routed(index % DRAWN)]
        of_rows = np.array([weights[r][t, k] for r, t, k in source], np.float32)
        told = (out.source[: len(source)], source), (out.expert_offsets, known.expert_offsets), (out.row_weight[: len(source)], of_rows)
        if not all(bool((found == xp.asarray(expected)).all()) for found, expected in told):
            return float("inf")
        made, worst = self.reference(index), 0.0
        for begin, end in pairwise(int(row) for row in known.expert_offsets):
            worst = max(worst, worst_rows(xp, out.y[begin:end], made[begin:end]))
        return worst

    def _reference(self, index: int) -> Rows:
        xp, known, (_, _, w) = self._timing.xp, self.known(index % DRAWN)[self._timing.world.rank], self._operands[index]
        source = known.source[: known.expert_offsets[-1]]
        x = [self.x(index, other) for other in range(self.topology.size)]
        first = np.cumsum([0, *self.tokens])
        gathered = xp.concatenate([part.view(xp.uint16) for part in x]).view(self._timing.numpy_dtype)
        made = Rows(*(xp.empty((len(source), self.inner), dtype=xp.float64) for _ in range(3)))
        for expert in range(self.experts):
            rows = slice(*(int(row) for row in known.expert_offsets[expert : expert + 2]))
            of_expert = gathered[xp.asarray(first[source[rows, 0]] + source[rows, 1])]
            of_rows = rounded(xp, product(xp, exact(xp, of_expert), w[expert]), self.dtype)
            made.value[rows], made.off[rows], made.square[rows] = of_rows.value, of_rows.off, of_rows.square
        return made

    def _tensors(self, torch: TorchBaselines) -> list[tuple[Any, Any, Any]]:
        """Route, x and w of each set."""
        sets = zip(self._operands, self.routes(torch, len(self._operands)), strict=True)
        return [(route, torch.tensor(x), torch.tensor(w)) for (x, _, w), (route, _) in sets]

    def baselines(self, baselines: Any) -> dict[str, Sequence[Call]]:
        return moe_baseline(baselines, lambda steps, torch: [functools.partial(steps.dispatch, *one) for one in self._tensors(torch)])

    def alone(self, baselines: Any) -> Sequence[Call]:
        def make(steps: MoeBaseline, torch: TorchBaselines) -> list[Call]:
            rows = torch.tensor(self.expert_rows(0, self._timing.world.rank, self.hidden))
            return [functools.partial(steps.multiply, route, rows[: sum(route.received)], w) for route, _, w in self._tensors(torch)]

        return grouped_alone(baselines, make)


class _Op(MoeOp):
    name = "moe_dispatch_gemm"
    kind = MoeDispatchGemmCase


OP = _Op()
