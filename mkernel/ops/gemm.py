"""What ops share that multiply two matrices into one."""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from mkernel.errors import ArgumentError
from mkernel.ops.arguments import (
    ITEM,
    MOST_EXTENT,
    check_aligned,
    check_matrix,
    check_operands,
    check_writable,
    layout_of,
    row_stride,
)
from mkernel.ops.call import BoundCall, bound_call, hold
from mkernel.ops.op import Instance, Op, ResultSpec
from mkernel.ops.schedule import choice_of, executable_of_class, table_of
from mkernel.planner.gemm import BLOCK_K, GemmProblem

if TYPE_CHECKING:
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.backend import MatrixMaps
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World

__all__ = ["STORED_ROWS", "Binder", "Form", "GemmOp", "Held", "checked", "held"]

STORED_ROWS = 64  # of a block of a result

_MAX_MAPS = 1024  # of operands b of one layout, such as the weights of many layers

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

    @abc.abstractmethod
    def binder(self, world: World, problem: Problem, known: Held, a_stride: int, c_stride: int) -> Binder:
        """What makes parameters of calls on operands that were checked; bytes between rows of a and of the result."""

    def bind(
        self,
        world: World,
        executable: Executable,
        instance: Instance[Problem],
        operands: Sequence[TensorView],
        results: Sequence[TensorView],
    ) -> ctypes.Structure:
        (a, b), (c,) = operands, results
        binder = self.binder(world, instance.problem, held(world, a, b), row_stride("a", a), row_stride("out", c))
        return binder.parameters(executable, instance.rows, a.address, b.address, c.address)

    def form_of(self, keys: Sequence[Any]) -> Hashable:
        _, options, a, b, split, c = keys
        if a is None or b is None:  # will be refused
            return None
        return self.name, options, split, a[1][1:], a[2:], b[1:], c[1][1:], c[2:]

    def form(
        self, world: World, instance: Instance[Problem], operands: Sequence[TensorView], results: Sequence[TensorView], split: Any
    ) -> Form | None:
        return Form(self, world, instance, operands, results[0], split) if instance.rows > 1 else None

    def tile(self, plan: Any) -> str:
        return f"{plan.block_rows}x{plan.columns}"

    def results(self, instance: Instance[Problem], operands: Sequence[TensorView]) -> Sequence[ResultSpec]:
        return [ResultSpec(instance.problem.result_shape(instance.rows), instance.problem.dtype)]

    def check_results(self, instance: Instance[Problem], operands: Sequence[TensorView], results: Sequence[TensorView]) -> None:
        (c,), problem = results, instance.problem
        shape = problem.result_shape(instance.rows)
        if c.shape != shape or c.dtype != problem.dtype or not c.writable or c.address % 16:  # one look for most calls
            if check_matrix("out", c, problem.dtype) != shape:
                raise ArgumentError("out.shape", c.shape, f"must be {self.result_rule} = {shape}")
            check_writable("out", c)
            if shape[0]:
                check_aligned("out", c)
        row_stride("out", c)


class Binder(Protocol):
    """Makes the parameters of calls whose arrays differ in rows and addresses."""

    def parameters(self, executable: Executable, rows: int, a_address: int, b_address: int, c_address: int) -> ctypes.Structure:
        """The parameters of a call; ``rows``: as plans count them."""


class Form:
    """Calls that are as one was that has been checked, in all but rows and addresses, with at least two rows.

    Types, row lengths, strides and devices of their arrays, and the shape of ``b``, are those of that call: all of that is in ``form_of``,
    and was checked. ``bind`` checks what depends on rows and addresses.
    """

    __slots__ = ("_a", "_b_bytes", "_binder", "_c", "_choice", "_op", "_table", "_world")

    def __init__(
        self, op: GemmOp[Any], world: World, instance: Instance[Any], operands: Sequence[TensorView], c: TensorView, split: Any
    ) -> None:
        (a, b), (problem, rows) = operands, instance
        a_stride, c_stride = row_stride("a", a), row_stride("out", c)
        self._op, self._world, self._choice = op, world, choice_of(split)
        self._table = table_of(world, problem, self._choice)
        self._binder = op.binder(world, problem, held(world, a, b), a_stride, c_stride)
        # Of each: how many of its rows go with one of a plan's, bytes between rows, and those of them that the last row has not.
        self._a = a.shape[0] // rows, a_stride, a_stride - a.shape[1] * ITEM
        self._c = c.shape[0] // rows, c_stride, c_stride - c.shape[1] * ITEM
        self._b_bytes = _end(b) - b.address

    def bind(self, keys: Sequence[Any]) -> BoundCall | None:
        """A call on arrays of this form, by what ``form_of`` takes.

        None: it must be checked, or its class of rows made ready, as any other call.
        """
        _, _, a, b, _, c = keys
        a_address, a_rows, b_address, c_address, c_rows = a[0], a[1][0], b[0], c[0], c[1][0]
        (a_factor, a_stride, a_gap), (c_factor, c_stride, c_gap) = self._a, self._c
        rows = c_rows // c_factor
        if rows < 2 or rows * a_factor != a_rows or rows * c_factor != c_rows or (a_address | b_address | c_address) % 16:
            return None
        c_end = c_address + c_rows * c_stride - c_gap
        a_end = a_address + a_rows * a_stride - a_gap
        if (c_address < a_end and a_address < c_end) or (c_address < b_address + self._b_bytes and b_address < c_end):
            return None  # there may still be no byte in common
        if a_rows >= MOST_EXTENT or c_rows >= MOST_EXTENT:
            return None
        table = self._table
        largest = table.ready.get(self._op.class_of(rows, self._choice.split))
        if largest is None:
            return None
        made = executable_of_class(self._world, table, largest, rows)
        return bound_call((made, self._binder.parameters(made, rows, a_address, b_address, c_address), None))


def _end(view: TensorView) -> int:
    """The address after a matrix's last byte; no stride is negative."""
    (rows, columns), (step, item) = view.shape, view.strides
    return view.address + (rows - 1) * step + (columns - 1) * item + ITEM


class Held:
    """What is known of operands ``b`` of one shape and layout that fit rows of K values of a type: it stays while ``a`` grows and shrinks.

    Attributes
    ----------
    n, k, b_row_major, dtype
        Of a problem.
    problems
        Those that such a ``b`` has been an operand of, by what they have beside: equal ones are the same object.
    """

    __slots__ = ("_maps", "_matrices", "_stride", "b_row_major", "dtype", "k", "n", "problems")

    def __init__(self, b: TensorView, n: int, k: int) -> None:
        self.n, self.k, self.dtype = n, k, b.dtype
        self.b_row_major, self._stride = layout_of("b", b)
        self.problems: dict[Hashable, Any] = {}
        self._maps: dict[tuple[int, int, int], bytes] = {}
        self._matrices: dict[tuple[int, int, int], MatrixMaps] = {}

    def map(self, world: World, b_address: int, columns: int, cluster: int = 1) -> bytes:
        """The tensor map of a ``b``; ``columns``: of a tile, and of a load where b's are contiguous; ``cluster``: CTAs with a part each."""
        key = b_address, columns, cluster
        made = self._maps.get(key)
        if made is None:
            n, k = self.n, self.k
            inner, outer, box = (n, k, BLOCK_K // cluster) if self.b_row_major else (k, n, columns // cluster)
            if len(self._maps) >= _MAX_MAPS:
                del self._maps[next(iter(self._maps))]  # the oldest
            made = self._maps[key] = self.matrices(world, inner, self._stride, 1)(b_address, outer, box)
        return made

    def matrices(self, world: World, columns: int, row_bytes: int, planes: int) -> MatrixMaps:
        """What makes tensor maps of matrices of the product."""
        key = columns, row_bytes, planes
        made = self._matrices.get(key)
        if made is None:
            made = self._matrices[key] = world.backend.matrix_maps(self.dtype, columns, row_bytes, planes)
        return made


def checked(world: World, a: TensorView, b: TensorView, k: str, what: str) -> tuple[Held, int]:
    """What is known of ``b``, and bytes between rows of ``a``. Both fit each other; its layout is checked only once. Raises ArgumentError.

    ``k``: the name of K; ``what``: what ``b`` holds of the whole B.
    """
    key = "b", a.shape[1:], a.dtype, b[1:]
    found = world.held.get(key)
    if found is None:
        _, n, inner, _ = check_operands(a, b, k, what)
        return hold(world, key, Held(b, n, inner)), row_stride("a", a)
    stride = row_stride("a", a)
    if a.address % 16 and a.shape[0]:
        check_aligned("a", a)
    check_aligned("b", b)
    return found, stride


def held(world: World, a: TensorView, b: TensorView) -> Held:
    """What is known of ``b``, an operand of a call that has been checked."""
    found: Held = world.held["b", a.shape[1:], a.dtype, b[1:]]
    return found
