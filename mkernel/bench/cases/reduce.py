"""What the cases of gemm_reduce_scatter and gemm_allreduce share: C = A @ B with K split over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mkernel.bench.cases.base import Case, LocalGemm, b_title, random_b
from mkernel.errors import ArgumentError
from mkernel.planner.choice import plan_reduce
from mkernel.planner.reduce import REDUCE_SCATTER, ReducePlan, ReduceProblem
from mkernel.planner.topology import Topology
from mkernel.tools.check import node_sums, worst_sum

if TYPE_CHECKING:
    from mkernel.bench.timing import Call, Timing
    from mkernel.planner.split import Split

__all__ = ["ITEM", "ReduceCase", "parse_size"]

ITEM = 2  # bytes of a 16-bit element
_SLACK = 64 << 20  # room on the heap beside the partial tiles, and for the padding of other tiles than those of an H200
_SMS = 132


class ReduceCase(Case):
    """``problem`` is what every rank asks for, ``rows`` those of a rank's result; ``m`` rows and K = ``whole_k`` are of all ranks."""

    def __init__(self, label: str, m: int, whole_k: int, problem: ReduceProblem, options: dict[str, str]) -> None:
        self.rows = m // problem.topology.size if problem.op == REDUCE_SCATTER else m
        self.label, self.shape = label, {"M": m, "N": problem.n, "K": whole_k}
        self.m, self.n, self.k = m, problem.n, problem.k
        self.problem, self.options = problem, {name: value for name, value in options.items() if name != "b"}  # those of the op
        self.solo = LocalGemm(m, problem.n, problem.k)
        self.flops = self.solo.flops
        # Shards of the sum come from the node's other ranks over NVLink, for the own rank and its rail peers, whose node sums it makes, and
        # from those peers over the network.
        topology, shard = problem.topology, m * problem.n * ITEM // problem.topology.size
        self.link_bytes = topology.num_nodes * (topology.ranks_per_node - 1) * shard
        self.network_bytes = (topology.num_nodes - 1) * shard
        self.operand_rows = topology.size if problem.op == REDUCE_SCATTER else 1
        world = f"{topology.num_nodes}x{topology.ranks_per_node}"
        b = b_title(problem.k, problem.n, problem.b_row_major)
        self.title = f"{problem.op}: {b}, {problem.dtype}, partials {problem.partials}, {world} ranks"

    @functools.cached_property
    def heap_bytes(self) -> int:  # type: ignore[override]  # when asked for: it chooses kernels for all numbers of rows
        return self.plan(_SMS).workspace_bytes + _SLACK

    def plan(self, sm_count: int, split: Split | None = None, *, rows: int | None = None, specialize: str | None = None) -> ReducePlan:
        rows = self.rows if rows is None else rows
        return plan_reduce(self.problem, rows, sm_count, split, specialize=specialize, tiling=self.tiling, machine=self.machine)

    def setup(self, timing: Timing, seed: int) -> None:
        self._timing, self._seed = timing, seed
        count = timing.sets(ITEM * (self.m * self.k + self.k * self.n + self.rows * self.n))
        self._inputs = [self._operands(i, timing.world.rank) for i in range(count)]
        self._c = [timing.empty((self.rows, self.n)) for _ in range(count)]
        for c in self._c:
            timing.poison(c)
        timing.synchronize()

    def _operands(self, index: int, rank: int) -> tuple[Any, Any]:
        """A and B of one rank in one set: written again from the seeds for the reference, which trusts no communication."""
        timing, seed = self._timing, self._seed + 1_000_003 * index + 2 * rank
        return timing.random((self.m, self.k), seed), random_b(timing, self.k, self.n, seed + 1, self.problem.b_row_major)

    def _calls(self, op: Callable[..., Any], split: Any) -> list[Call]:
        call = functools.partial(op, world=self._timing.world, split=split, **self.options)
        return [functools.partial(call, a, b, out=c) for (a, b), c in zip(self._inputs, self._c, strict=True)]

    def first_call(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        return self.problem.op, self._inputs[0], dict(self.options)

    def outputs(self) -> list[Any]:
        return self._c

    def worst(self, index: int, split: Any = None) -> float:
        world = self._timing.world
        plan = self.plan(world.backend.sm_count, split)  # the roles that a split names may ask for another algorithm, with other roundings
        nodes = node_sums(plan, world.rank, lambda rank: self._operands(index, rank))
        return worst_sum(self._timing.xp, self._c[index], nodes)

    def _sets(self, outputs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Inputs and outputs as the libraries take them: lists of a, of b, of c."""
        a, b = (list(operands) for operands in zip(*self._inputs, strict=True))
        return a[: len(outputs)], b[: len(outputs)], list(outputs)

    def alone(self, baselines: Any) -> Sequence[Call]:
        count = min(len(self._c), self._timing.sets(ITEM * (self.m * self.k + self.k * self.n + self.m * self.n)))
        products = [self._timing.empty((self.m, self.n)) for _ in range(count)]
        calls: Sequence[Call] = baselines.matmul(list(zip(*self._sets(products), strict=True)))
        return calls


def parse_size(size: str, topology: Topology) -> tuple[int, int, int]:
    """``S``, or ``MxNxK``, all of the whole problem."""
    try:
        numbers = [int(part) for part in size.lower().split("x")]
        m, n, k = numbers if len(numbers) == 3 else (*numbers, *numbers, *numbers)
    except ValueError:
        raise ArgumentError("--shapes", size, "must be S or MxNxK", "for example 8192 or 1x8192x8192") from None
    if n % 8 or k % (8 * topology.size) or min(m, n, k) < 1:
        rule = f"N must be a multiple of 8, K of {8 * topology.size} (8 on each of {topology.size} ranks), all positive"
        raise ArgumentError("--shapes", f"{m}x{n}x{k}", rule)
    return m, n, k
