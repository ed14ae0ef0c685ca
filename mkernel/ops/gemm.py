"""What ops share that multiply two matrices into one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mkernel.errors import ArgumentError
from mkernel.ops.arguments import ITEM, check_aligned, check_apart, check_matrix, check_operands, check_writable, layout_of, row_stride
from mkernel.ops.call import hold
from mkernel.ops.op import Instance, Op, ResultSpec
from mkernel.planner.gemm import BLOCK_K, BLOCK_M, GemmProblem

if TYPE_CHECKING:
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.world import World

__all__ = ["GemmOp", "Held", "checked", "held"]

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
        (a, b), (c,), problem = operands, results, instance.problem
        shape = problem.result_shape(instance.rows)
        if c.shape != shape or c.dtype != problem.dtype or not c.writable or c.address % 16:  # one look for most calls
            if check_matrix("out", c, problem.dtype) != shape:
                raise ArgumentError("out.shape", c.shape, f"must be {self.result_rule} = {shape}")
            check_writable("out", c)
            if shape[0]:
                check_aligned("out", c)
        begin, end = c.address, c.address + (shape[0] - 1) * row_stride("out", c) + shape[1] * ITEM
        for other in (a, b):
            (rows, columns), (step, item), first = other.shape, other.strides, other.address  # no stride is negative
            if begin < first + (rows - 1) * step + (columns - 1) * item + ITEM and first < end:  # there may still be no byte in common
                check_apart("out", c, {"a": a, "b": b})


class Held:
    """What is known of an operand ``b`` that fits rows of K values of a type: it stays while ``a`` grows and shrinks.

    Attributes
    ----------
    n, k, b_row_major
        Of a problem.
    problems
        Those that ``b`` has been an operand of, by what they have beside: equal ones are the same object.
    """

    __slots__ = ("_b", "_maps", "_stride", "b_row_major", "k", "n", "problems")

    def __init__(self, b: TensorView, n: int, k: int) -> None:
        self.n, self.k, self._b = n, k, b
        self.b_row_major, self._stride = layout_of("b", b)
        self.problems: dict[Hashable, Any] = {}
        self._maps: dict[tuple[int, int], bytes] = {}

    def map(self, world: World, columns: int, cluster: int = 1) -> bytes:
        """The tensor map of ``b``; ``columns``: of a tile, and of a load where b's are contiguous; ``cluster``: CTAs with a part each."""
        made = self._maps.get((columns, cluster))
        if made is None:
            n, k, stride = self.n, self.k, self._stride
            inner, outer, box = (n, k, BLOCK_K // cluster) if self.b_row_major else (k, n, columns // cluster)
            shape, strides = (inner, outer, 1), (stride, stride * outer)
            made = self._maps[columns, cluster] = world.backend.tensor_map(self._b.address, self._b.dtype, shape, strides, (64, box, 1))
        return made


def checked(world: World, a: TensorView, b: TensorView, k: str, what: str) -> tuple[Held, int]:
    """What is known of ``b``, and bytes between rows of ``a``. Both fit each other; ``b`` is checked only once. Raises ArgumentError.

    ``k``: the name of K; ``what``: what ``b`` holds of the whole B.
    """
    key = "b", a.shape[1:], a.dtype, b
    found = world.held.get(key)
    if found is None:
        _, n, inner, _ = check_operands(a, b, k, what)
        return hold(world, key, Held(b, n, inner)), row_stride("a", a)
    stride = row_stride("a", a)
    if a.address % 16 and a.shape[0]:
        check_aligned("a", a)
    return found, stride


def held(world: World, a: TensorView, b: TensorView) -> Held:
    """What is known of ``b``, an operand of a call that has been checked."""
    found: Held = world.held["b", a.shape[1:], a.dtype, b]
    return found
