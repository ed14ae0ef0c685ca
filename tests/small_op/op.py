"""``allgather_rows``: from arrays to a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.ops.arguments import check_aligned, check_extents, check_matrix, check_writable, row_stride
from mkernel.ops.call import call
from mkernel.ops.op import Instance, Op, ResultSpec, register
from tests.small_op.plan import ITEM, OP_NAME, PARAMETER_BYTES, AllGatherRowsPlan, AllGatherRowsProblem, make_plan

if TYPE_CHECKING:
    from mkernel.planner.split import Split
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World

__all__ = ["OP", "GatheredRows", "allgather_rows"]

_MOST_ROWS = 1 << 22  # of one rank: kernels add up those of 512 ranks in 32 bits


class Parameters(ctypes.Structure):
    """``Parameters`` of ``allgather_rows.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("x", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("offsets", ctypes.c_uint64),
        ("counts_offset", ctypes.c_uint64),
        ("rows_offset", ctypes.c_uint64),
        ("flag_offset", ctypes.c_uint64),
        ("rows", ctypes.c_uint32),
        ("max_rows", ctypes.c_uint32),
        ("row_bytes", ctypes.c_uint32),
        ("chunk_rows", ctypes.c_uint32),
    ]


assert ctypes.sizeof(Parameters) == PARAMETER_BYTES


class GatheredRows(NamedTuple):
    """The rows of all ranks, packed: those of rank r are ``rows[offsets[r]:offsets[r + 1]]``. What follows ``offsets[-1]`` is undefined."""

    rows: Any
    offsets: Any


def allgather_rows(
    x: Any, *, max_rows: int, world: World | None = None, out: Any = None, split: Split | None = None, stream: Any = None
) -> GatheredRows:
    """Gather the rows of all ranks, of which each may have another number, in one kernel.

    Parameters
    ----------
    x
        (T, H) bfloat16 or float16, contiguous: this rank's rows. T may be 0 and may differ by rank; H is a multiple of 8.
    max_rows
        Room for the rows of all ranks together; the same on every rank.
    out
        A GatheredRows, or a pair, of arrays to fill: (max_rows, H) of the dtype of ``x``, contiguous, and (W + 1) int32.

    Returns
    -------
    GatheredRows
        ``rows`` (max_rows, H), those of rank 0, then rank 1 ..., and ``offsets`` (W + 1) int32. Bitwise what the ranks passed.

    Notes
    -----
    Collective: every rank calls it, in the same order, with the same ``max_rows``. Asynchronous on target cuda; capturable once prepared.

    Raises
    ------
    ArgumentError
        Shapes, dtypes or alignment are wrong; the heap is too small. Nothing was launched.
    RowsError
        On every rank, by this or a later call: together the ranks have more than ``max_rows`` rows. The world stays usable.
    """
    result: GatheredRows = call(OP, (x,), (max_rows,), world=world, out=out, split=split, stream=stream)
    return result


class AllGatherRows(Op[AllGatherRowsProblem]):
    """The op of ``allgather_rows``."""

    name = OP_NAME
    bench = "tests.small_op.bench"
    gives = "its rows, as many as it has: (T, H)"
    gets = "the rows of all ranks, packed by rank: (max_rows, H), and where each rank's begin"
    operands = ("x",)
    options: ClassVar[Mapping[str, Any]] = {"max_rows": None}
    result = GatheredRows
    tunable = ("intra_comm",)
    parameters = Parameters

    # ---- problem and plan
    def instance(self, world: World, *operands: TensorView, **options: Any) -> Instance[AllGatherRowsProblem]:
        (x,), max_rows = operands, options["max_rows"]
        rows, columns = check_matrix("x", x)
        if columns <= 0 or columns % 8:
            raise ArgumentError("H", columns, "must be a positive multiple of 8", "pad it with zeros")
        if rows and row_stride("x", x) != columns * ITEM:
            raise ArgumentError("x.strides", x.strides, "x must be contiguous", "use xp.ascontiguousarray(x)")
        if rows:
            check_aligned("x", x)
        if rows >= _MOST_ROWS:
            raise ArgumentError("x.shape", x.shape, f"must have fewer than {_MOST_ROWS} rows")
        if isinstance(max_rows, bool) or not isinstance(max_rows, (int, np.integer)) or max_rows < 1:
            raise ArgumentError("max_rows", max_rows, "must be a positive integer, the same on every rank")
        check_extents(int(max_rows), columns)
        return Instance(AllGatherRowsProblem(world.topology, columns, x.dtype), int(max_rows))

    def make_plan(
        self, problem: AllGatherRowsProblem, rows: int, sm_count: int, split: Split | None = None, *, specialize: str | None = None
    ) -> AllGatherRowsPlan:
        return make_plan(problem, rows, sm_count, split)

    # ---- one call
    def results(self, instance: Instance[AllGatherRowsProblem], operands: Sequence[TensorView]) -> Sequence[ResultSpec]:
        problem, max_rows = instance
        return ResultSpec((max_rows, problem.columns), problem.dtype), ResultSpec((problem.topology.size + 1,), "int32")

    def check_results(
        self, instance: Instance[AllGatherRowsProblem], operands: Sequence[TensorView], results: Sequence[TensorView]
    ) -> None:
        rows, offsets = results
        for name, view, (shape, dtype) in zip(("out.rows", "out.offsets"), results, self.results(instance, operands), strict=True):
            if view.shape != shape or view.dtype != dtype:
                raise ArgumentError(name, f"{view.shape} {view.dtype}", f"must be {shape} {dtype}")
            check_writable(name, view)
        check_aligned("out.rows", rows)
        if row_stride("out.rows", rows) != instance.problem.columns * ITEM or (offsets.shape[0] > 1 and offsets.strides != (4,)):
            raise ArgumentError("out.strides", (rows.strides, offsets.strides), "both arrays must be contiguous")

    def bind(
        self,
        world: World,
        executable: Executable,
        instance: Instance[AllGatherRowsProblem],
        operands: Sequence[TensorView],
        results: Sequence[TensorView],
    ) -> Parameters:
        (x,), (rows, offsets), plan = operands, results, executable.plan
        return Parameters(
            x=x.address,
            out=rows.address,
            offsets=offsets.address,
            counts_offset=executable.scratch_offset,
            rows_offset=executable.scratch_offset + plan.rows_offset,
            flag_offset=executable.flag_offset,
            rows=x.shape[0],
            max_rows=plan.max_rows,
            row_bytes=plan.row_bytes,
            chunk_rows=plan.chunk_rows,
        )


OP = register(AllGatherRows())
