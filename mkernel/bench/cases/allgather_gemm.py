"""allgather_gemm: M = K = S, N = S/W per rank; each rank holds M/W rows of A and all of its own columns of B."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkernel.bench.cases.base import Case, LocalGemm, Op, b_title, is_row_major, random_b, up
from mkernel.bench.shapes import expand
from mkernel.errors import ArgumentError
from mkernel.planner.allgather_gemm import AllGatherGemmProblem
from mkernel.planner.choice import plan_allgather_gemm
from mkernel.tools.check import worst_product

if TYPE_CHECKING:
    from mkernel.bench.timing import Call, Timing
    from mkernel.planner.split import Split
    from mkernel.planner.topology import Topology
    from mkernel.runtime.plan import Plan

__all__ = ["OP", "AllgatherGemm"]

_ITEM = 2  # bytes of a 16-bit element
_SLACK = 64 << 20  # room on the heap beside the gather buffer


class AllgatherGemm(Case):
    def __init__(self, label: str, m: int, n: int, k: int, topology: Topology, dtype: str, row_major: bool) -> None:
        self.label, self.shape = label, {"M": m, "N": n, "K": k}
        self.m, self.n, self.k, self.rows = m, n, k, m // topology.size
        self.problem = AllGatherGemmProblem(topology, n, k, dtype, row_major)
        shard = self.rows * k * _ITEM
        self.solo = LocalGemm(m, n, k)
        self.flops = self.solo.flops
        # Of the W shards one is here, one per other node comes over the network, the rest over NVLink (forwarded by the rail peers).
        self.network_bytes = (topology.num_nodes - 1) * shard
        self.link_bytes = (topology.size - topology.num_nodes) * shard
        self.heap_bytes = m * k * _ITEM + _SLACK
        self.operand_rows = 1
        self.title = f"{OP.name}: {b_title(k, n, row_major)}, {dtype}, {topology.num_nodes}x{topology.ranks_per_node} ranks"

    def plan(self, sm_count: int, split: Split | None = None, *, rows: int | None = None, specialize: str | None = None) -> Plan:
        rows = self.rows if rows is None else rows
        return plan_allgather_gemm(self.problem, rows, sm_count, split, specialize=specialize, tiling=self.tiling, machine=self.machine)

    def setup(self, timing: Timing, seed: int) -> None:
        rank, size = timing.world.rank, timing.world.size
        self._timing, self._seed = timing, seed
        count = timing.sets(_ITEM * (self.rows * self.k + self.k * self.n + self.m * self.n))
        self._a = [timing.random((self.rows, self.k), self._a_seed(i, rank)) for i in range(count)]
        layout = self.problem.b_row_major
        self._b = [random_b(timing, self.k, self.n, seed + 1_000_003 * i + size + rank, layout) for i in range(count)]
        self._c = [timing.empty((self.m, self.n)) for _ in range(count)]
        for c in self._c:
            timing.poison(c)
        timing.synchronize()

    def _a_seed(self, index: int, rank: int) -> int:
        return self._seed + 1_000_003 * index + rank

    def gathered(self, index: int) -> Any:
        """All of A of one set, written again here from the seeds: no communication is trusted for the reference."""
        shards = [self._timing.random((self.rows, self.k), self._a_seed(index, rank)) for rank in range(self._timing.world.size)]
        bits = self._timing.xp.concatenate([shard.view(self._timing.xp.uint16) for shard in shards])
        return bits.view(self._timing.numpy_dtype)

    def fused(self, split: Any = None) -> list[Call]:
        import mkernel as mk

        call = functools.partial(mk.allgather_gemm, world=self._timing.world, split=split)
        return [functools.partial(call, a, b, out=c) for a, b, c in zip(self._a, self._b, self._c, strict=True)]

    def first_call(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        return "allgather_gemm", (self._a[0], self._b[0]), {}

    def outputs(self) -> list[Any]:
        return self._c

    def worst(self, index: int, split: Any = None) -> float:
        return worst_product(self._timing.xp, self._c[index], self.gathered(index), self._b[index])

    def baselines(self, baselines: Any) -> dict[str, Sequence[Call]]:
        calls: dict[str, Sequence[Call]] = baselines.allgather_gemm(self._a, self._b, self._c)
        return calls

    def alone(self, baselines: Any) -> Sequence[Call]:
        count = min(len(self._a), self._timing.sets(_ITEM * (self.m * self.k + self.k * self.n + self.m * self.n)))
        calls: Sequence[Call] = baselines.matmul([(self.gathered(i), self._b[i], self._c[i]) for i in range(count)])
        return calls


class _Op(Op):
    name = "allgather_gemm"
    title = "M = K = S, N = S/W per rank"
    sizes = ("2048", "4096", "8192", "16384", "32768")
    options = ("b",)

    def expand(self, text: str, topology: Topology) -> Sequence[str]:
        return expand(text, topology, splits_k=False)

    def demo_sizes(self, target: str, ranks: int) -> Sequence[str]:
        sizes = ((512, 512, 512), (200, 288, 136)) if target == "cpu" else ((4096, 4096, 4096), (1000, 1048, 1032))
        return [f"{up(m, ranks)}x{up(n, 8 * ranks) // ranks}x{k}" for m, n, k in sizes]

    def case(self, size: str, topology: Topology, dtype: str, **options: str) -> AllgatherGemm:
        """``S``, or ``MxNxK`` with N the columns of one rank."""
        try:
            numbers = [int(part) for part in size.lower().split("x")]
            m, n, k = numbers if len(numbers) == 3 else (numbers[0], numbers[0] // topology.size, numbers[0])
        except ValueError:
            raise ArgumentError("--shapes", size, "must be S or MxNxK", "for example 8192 or 8192x2048x8192") from None
        if m % topology.size or n % 8 or k % 8 or min(m, n, k) < 1:
            rule = f"M must be a multiple of {topology.size} (ranks), N and K of 8, all positive"
            raise ArgumentError("--shapes", f"{m}x{n}x{k}", rule)
        return AllgatherGemm(size.lower(), m, n, k, topology, dtype, is_row_major(options))


OP = _Op()
