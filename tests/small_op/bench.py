"""``allgather_rows`` as ``bench`` and ``demo`` know it: each rank has another number of rows, the first one none."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkernel.bench.cases.base import Case, LocalGemm, Op
from mkernel.errors import ArgumentError
from tests.small_op.op import GatheredRows, allgather_rows
from tests.small_op.plan import ITEM, OP_NAME, AllGatherRowsPlan, AllGatherRowsProblem, make_plan

if TYPE_CHECKING:
    from mkernel.bench.timing import Call, Timing
    from mkernel.planner.split import Split
    from mkernel.planner.topology import Topology

__all__ = ["OP", "AllGatherRowsCase"]

_SLACK = 1 << 20


class AllGatherRowsCase(Case):
    """``rows`` of all ranks together, of so many columns, in a result with room for a few more."""

    solo: LocalGemm | None = None

    def __init__(self, label: str, rows: int, columns: int, topology: Topology, dtype: str) -> None:
        self.label, self.shape, self.flops, self.operand_rows = label, {"T": rows, "H": columns}, 0.0, 1
        self.topology, self.rows, self.columns, self.max_rows = topology, rows, columns, rows + 3
        self.problem = AllGatherRowsProblem(topology, columns, dtype)
        others = sum(self.rows_of(rank) for rank in range(topology.ranks_per_node - 1)) * columns * ITEM
        self.link_bytes, self.network_bytes = others, (topology.num_nodes - 1) * self.rows_of(0) * columns * ITEM
        self.heap_bytes = make_plan(self.problem, self.max_rows, 132).workspace_bytes + _SLACK
        self.title = f"{OP_NAME}: {columns} columns, {dtype}, {topology.num_nodes}x{topology.ranks_per_node} ranks"

    def rows_of(self, rank: int) -> int:
        """More from rank to rank; together ``rows``."""
        steps = self.topology.size * (self.topology.size - 1) // 2
        if rank == self.topology.size - 1:
            return self.rows - sum(self.rows_of(other) for other in range(rank))
        return self.rows * rank // steps

    def plan(
        self, sm_count: int, split: Split | None = None, *, rows: int | None = None, specialize: str | None = None
    ) -> AllGatherRowsPlan:
        return make_plan(self.problem, self.max_rows if rows is None else rows, sm_count, split)

    def setup(self, timing: Timing, seed: int) -> None:
        self._timing, self._seed = timing, seed
        count = timing.sets(ITEM * self.columns * (self.rows_of(timing.world.rank) + self.max_rows))
        self._x = [self._operand(i, timing.world.rank) for i in range(count)]
        empty = functools.partial(timing.xp.empty, self.topology.size + 1, timing.xp.int32)
        self._out = [GatheredRows(timing.empty((self.max_rows, self.columns)), empty()) for _ in range(count)]
        for out in self.outputs():
            timing.poison(out)
        timing.synchronize()

    def _operand(self, index: int, rank: int) -> Any:
        return self._timing.random((self.rows_of(rank), self.columns), self._seed + 1_000_003 * index + rank)

    def fused(self, split: Any = None) -> list[Call]:
        call = functools.partial(allgather_rows, max_rows=self.max_rows, world=self._timing.world, split=split)
        return [functools.partial(call, x, out=out) for x, out in zip(self._x, self._out, strict=True)]

    def first_call(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        return OP_NAME, (self._x[0],), {"max_rows": self.max_rows}

    def outputs(self) -> list[Any]:
        return [out.rows for out in self._out]

    def worst(self, index: int, split: Any = None) -> float:
        """0 if every bit is what the ranks passed, else inf."""
        xp, out = self._timing.xp, self._out[index]
        first = [0]
        for rank in range(self.topology.size):
            first.append(first[-1] + self.rows_of(rank))
            own = out.rows[first[-2] : first[-1]].view(xp.uint16)
            if not bool((own == self._operand(index, rank).view(xp.uint16)).all()):
                return float("inf")
        return 0.0 if [int(offset) for offset in out.offsets] == first else float("inf")

    def baselines(self, libraries: Any) -> dict[str, Sequence[Call]]:
        return {}

    def alone(self, libraries: Any) -> Sequence[Call]:
        return ()


class _Op(Op):
    name = OP_NAME
    title = "T rows of all ranks, H columns (TxH)"
    sizes = ("1024x4096", "16384x4096")

    def demo_sizes(self, target: str, ranks: int) -> Sequence[str]:
        return ("300x64", "7x136") if target == "cpu" else ("16384x4096", "7x136")

    def case(self, size: str, topology: Topology, dtype: str, **options: str) -> AllGatherRowsCase:
        """``TxH``."""
        try:
            rows, columns = (int(part) for part in size.lower().split("x"))
        except ValueError:
            raise ArgumentError("--shapes", size, "must be TxH", "for example 1024x4096") from None
        if rows < 1 or columns < 8 or columns % 8:
            raise ArgumentError("--shapes", size, "T must be positive, H a positive multiple of 8")
        return AllGatherRowsCase(size.lower(), rows, columns, topology, dtype)


OP = _Op()
