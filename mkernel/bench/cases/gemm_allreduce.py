"""gemm_allreduce: M = N = S, K = S/W per rank, and the few rows of decoding; each rank gets the whole sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mkernel.bench.cases.base import Op
from mkernel.bench.cases.reduce import ReduceCase, parse_size
from mkernel.plan.reduce import ALLREDUCE, ReduceProblem, choose_algorithm

if TYPE_CHECKING:
    from mkernel.bench.lab import Call
    from mkernel.plan.topology import Topology

__all__ = ["OP"]

_LARGE = ("2048", "4096", "8192", "16384", "32768")
_SMALL = tuple(f"{m}x8192x8192" for m in (1, 8, 32, 128, 256))


class _GemmAllreduce(ReduceCase):
    def __init__(self, label: str, m: int, whole_k: int, problem: ReduceProblem, options: dict[str, str]) -> None:
        super().__init__(label, m, whole_k, problem, options)
        # After the reduce-scatter every finished shard but the own one comes the same ways: what any algorithm without multicast moves.
        self.link_bytes *= 2
        self.network_bytes *= 2

    def fused(self, split: Any = None) -> list[Call]:
        import mkernel as mk

        return self._calls(mk.gemm_allreduce, split)

    def baselines(self, libraries: Any) -> dict[str, Sequence[Call]]:
        calls: dict[str, Sequence[Call]] = libraries.gemm_allreduce(*self._sets(self._c))
        return calls


class _Op(Op):
    name = ALLREDUCE
    title = "M = N = S or M x N x K, K/W per rank"
    sizes = (*_LARGE, *_SMALL)
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {"large": _LARGE, "small": _SMALL}
    options = ("partials", "algorithm")

    def case(self, size: str, topology: Topology, dtype: str, **options: str) -> _GemmAllreduce:
        """``S``, or ``MxNxK`` with K of all ranks."""
        m, n, k = parse_size(size, topology)
        algorithm = options.get("algorithm") or choose_algorithm(topology, m, n)
        problem = ReduceProblem(ALLREDUCE, topology, m, n, k // topology.size, dtype, True, options.get("partials", "output"), algorithm)
        return _GemmAllreduce(size.lower(), m, k, problem, options)


OP = _Op()
