"""What ops share that multiply two matrices into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mkernel.errors import ArgumentError
from mkernel.ops.arguments import check_aligned, check_apart, check_matrix, check_writable, layout_of, row_stride
from mkernel.ops.op import Instance, Op, ResultSpec
from mkernel.planner.gemm import BLOCK_K, BLOCK_M, GemmProblem

if TYPE_CHECKING:
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.world import World

__all__ = ["GemmOp", "map_of_b"]

Problem = TypeVar("Problem", bound=GemmProblem)


class GemmOp(Op[Problem]):
    """c = a @ b, where ``a`` or the product is spread over the ranks.

    Attributes
    ----------
    result_rule
        Shape of the result in the op's own letters, for messages.
    """

    operands: ClassVar[tuple[str, ...]] = ("a", "b")
    result_rule: ClassVar[str]

    def tile(self, plan: Any) -> str:
        return f"{BLOCK_M}x{plan.tile.block_n}"

    def results(self, instance: Instance[Problem], operands: Sequence[TensorView]) -> Sequence[ResultSpec]:
        return [ResultSpec(instance.problem.result_shape(instance.rows), instance.problem.dtype)]

    def check_results(self, instance: Instance[Problem], operands: Sequence[TensorView], results: Sequence[TensorView]) -> None:
        (a, b), (c,) = operands, results
        ((shape, dtype),) = self.results(instance, operands)
        if check_matrix("out", c, dtype) != shape:
            raise ArgumentError("out.shape", c.shape, f"must be {self.result_rule} = {shape}")
        check_writable("out", c)
        if shape[0]:
            check_aligned("out", c)
        row_stride("out", c)
        check_apart("out", c, {"a": a, "b": b})


def map_of_b(world: World, problem: Any, b: TensorView, columns: int) -> bytes:
    """The tensor map of ``b`` in either layout; ``columns``: of one load where its columns are contiguous."""
    n, k = problem.n, problem.k
    inner, outer, box = (n, k, BLOCK_K) if problem.b_row_major else (k, n, columns)
    stride = layout_of("b", b)[1]
    return world.backend.tensor_map(b.address, problem.dtype, (inner, outer, 1), (stride, stride * outer), (64, box, 1))
