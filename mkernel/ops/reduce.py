"""What ``mk.gemm_reduce_scatter`` and ``mk.gemm_allreduce`` share: from arrays to the parameters of a launch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.ops import arguments
from mkernel.ops.arguments import row_stride
from mkernel.ops.call import BoundCall, check_result, executable, map_of_b, set_map
from mkernel.plan.gemm import BLOCK_K
from mkernel.plan.reduce import PARAMETER_BYTES, PARTIALS, REDUCE_SCATTER, ReducePlan, ReduceProblem, make_plan

if TYPE_CHECKING:
    from mkernel.plan.split import Split
    from mkernel.runtime.device import TensorView
    from mkernel.runtime.world import World

__all__ = ["bind", "check_operands", "check_partials"]


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
    m, n, k, row_major = arguments.check_operands(a, b, "K/W", "this rank's rows")
    arguments.check_extents(m, n, k)
    return m, n, k, row_major


def bind(world: World, problem: ReduceProblem, a: TensorView, b: TensorView, c: TensorView, split: Split | None, stream: Any) -> BoundCall:
    """The parameters of one call over views of a, b and the result."""
    rows, n, k, dtype = problem.rows, problem.n, problem.k, problem.dtype
    c_stride = check_result(problem, a, b, c, "(M/W, N)" if problem.op == REDUCE_SCATTER else "(M, N)")
    a_stride = row_stride("a", a)
    chosen = executable(world, problem, make_plan, split, stream)
    plan: ReducePlan = chosen.plan
    extent = max(rows, 1)  # a tensor map has no empty dimension; without rows there are no tiles
    a_address, c_address = (a.address, c.address) if rows else (b.address, b.address)
    planes = world.size if problem.op == REDUCE_SCATTER else 1
    tensor_map = world.backend.tensor_map
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
    set_map(parameters, "b_map", map_of_b(world, problem, b, plan.tile.block_n))
    set_map(parameters, "c_map", tensor_map(c_address, dtype, (n, extent, 1), c_strides, (64, 64, 1)))
    return BoundCall(chosen, parameters, chosen.placement)
