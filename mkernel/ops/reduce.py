"""What ``mk.gemm_reduce_scatter`` and ``mk.gemm_allreduce`` share: from arrays to the parameters of a launch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.ops.arguments import (
    check_aligned,
    check_matrix,
    check_multiple,
    check_split,
    layout_of,
    row_stride,
    split_error,
)
from mkernel.ops.call import BoundCall, check_result, set_map
from mkernel.plan.gemm import BLOCK_K
from mkernel.plan.reduce import PARAMETER_BYTES, PARTIALS, REDUCE_SCATTER, ReducePlan, ReduceProblem, make_plan
from mkernel.plan.split import Split, SplitError

if TYPE_CHECKING:
    from mkernel.runtime.device import TensorView
    from mkernel.runtime.world import Executable, World

__all__ = ["bind", "check_operands", "check_partials", "executable"]


class Parameters(ctypes.Structure):
    """``Parameters`` of ``kernels_src/reduce.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("partial_offset", ctypes.c_uint64),
        ("sum_offset", ctypes.c_uint64),
        ("arrived_offset", ctypes.c_uint64),
        ("result_offset", ctypes.c_uint64),
        ("flag_offset", ctypes.c_uint64),
        ("rows", ctypes.c_uint32),
        ("tiles", ctypes.c_uint32),
        ("group_tiles", ctypes.c_uint32),
        ("group_m", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 6),
        ("a_map", ctypes.c_ubyte * 128),
        ("b_map", ctypes.c_ubyte * 128),
        ("c_map", ctypes.c_ubyte * 128),
    ]


assert ctypes.sizeof(Parameters) == PARAMETER_BYTES


def check_partials(partials: Any) -> str:
    if partials not in PARTIALS:
        raise ArgumentError("partials", partials, f"must be one of {', '.join(PARTIALS)}")
    return str(partials)


def check_operands(a: TensorView, b: TensorView) -> tuple[int, int, int, bool]:
    """(M, N, K of this rank, whether b is row-major) of operands that fit each other."""
    m, k = check_matrix("a", a)
    inner, n = check_matrix("b", b, a.dtype)
    if inner != k:
        raise ArgumentError("b.shape", b.shape, f"must be (K/W, N) with K/W = a.shape[1] = {k}", "b holds this rank's rows: (K/W, N)")
    check_multiple("K/W", k)
    check_multiple("N", n)
    row_stride("a", a)
    if m:
        check_aligned("a", a)
    check_aligned("b", b)
    if m >= 1 << 31 or n >= 1 << 31 or k >= 1 << 31:
        raise ArgumentError("shape", (m, n, k), "every extent must be below 2^31")
    return m, n, k, layout_of("b", b)[0]


def executable(world: World, problem: ReduceProblem, split: Split | None, stream: Any) -> Executable:
    check_split(split)

    def build() -> ReducePlan:
        try:
            return make_plan(problem, world.backend.sm_count, split)
        except SplitError as error:
            raise split_error(error) from None

    return world.executable((problem, split), build, stream)


def bind(world: World, problem: ReduceProblem, a: TensorView, b: TensorView, c: TensorView, split: Split | None, stream: Any) -> BoundCall:
    """The parameters of one call over views of a, b and the result."""
    rows, n, k, dtype = problem.rows, problem.n, problem.k, problem.dtype
    c_stride = check_result(problem, c, "(M/W, N)" if problem.op == REDUCE_SCATTER else "(M, N)")
    a_stride = row_stride("a", a)
    b_stride = layout_of("b", b)[1]
    chosen = executable(world, problem, split, stream)
    plan: ReducePlan = chosen.plan
    extent = max(rows, 1)  # a tensor map has no empty dimension; without rows there are no tiles
    a_address, c_address = (a.address, c.address) if rows else (b.address, b.address)
    planes = world.size if problem.op == REDUCE_SCATTER else 1
    tensor_map = world.backend.tensor_map
    inner, outer, box_n = (n, k, BLOCK_K) if problem.b_row_major else (k, n, plan.tile.block_n)
    offsets = {f"{area}_offset": chosen.scratch_offset + offset for area, offset in plan.offsets.items()}
    if plan.packets:
        offsets["partial_offset"] = chosen.packet_offset
    parameters = Parameters(
        flag_offset=chosen.flag_offset,
        rows=rows,
        tiles=plan.tiles,
        group_tiles=plan.group_tiles,
        group_m=plan.group_m,
        **offsets,
    )
    a_strides, c_strides = (a_stride, extent * a_stride), (c_stride, extent * c_stride)
    set_map(parameters, "a_map", tensor_map(a_address, dtype, (k, extent, planes), a_strides, (BLOCK_K, plan.load_rows, 1)))
    set_map(parameters, "b_map", tensor_map(b.address, dtype, (inner, outer, 1), (b_stride, b_stride * outer), (64, box_n, 1)))
    set_map(parameters, "c_map", tensor_map(c_address, dtype, (n, extent, 1), c_strides, (64, 64, 1)))
    return BoundCall(chosen, parameters, chosen.scratch_offset)
