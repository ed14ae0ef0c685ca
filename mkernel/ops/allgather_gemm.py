"""``mk.allgather_gemm``: from arrays to a launch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.ops.arguments import ITEM, check_extents, check_operands, row_stride
from mkernel.ops.call import BoundCall, check_result, executable, map_of_b, matmul_call, set_map
from mkernel.plan.allgather_gemm import OP, PARAMETER_BYTES, AllGatherGemmPlan, AllGatherGemmProblem, make_plan
from mkernel.plan.gemm import BLOCK_K

if TYPE_CHECKING:
    from mkernel.plan.split import Split
    from mkernel.runtime.device import TensorView
    from mkernel.runtime.world import World

__all__ = ["allgather_gemm", "make_plan", "problem_of"]


class Parameters(ctypes.Structure):
    """``Parameters`` of ``kernels_src/allgather_gemm.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("a", ctypes.c_uint64),
        ("gather_offset", ctypes.c_uint64),
        ("send_offset", ctypes.c_uint64),
        ("flag_offset", ctypes.c_uint64),
        ("rows", ctypes.c_uint32),
        ("stage_send", ctypes.c_uint32),
        ("whole_tiles", ctypes.c_uint32),
        ("group_m", ctypes.c_uint32),
        ("part_blocks", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 7),
        ("a_map", ctypes.c_ubyte * 128),
        ("part_map", ctypes.c_ubyte * 128),
        ("gather_map", ctypes.c_ubyte * 128),
        ("b_map", ctypes.c_ubyte * 128),
        ("c_map", ctypes.c_ubyte * 128),
    ]


assert ctypes.sizeof(Parameters) == PARAMETER_BYTES


def allgather_gemm(a: Any, b: Any, *, world: World | None = None, out: Any = None, split: Split | None = None, stream: Any = None) -> Any:
    """Gather the row shards of A from all ranks and multiply: ``c = concatenate(a of rank 0, 1, ...) @ b``, in one kernel.

    Parameters
    ----------
    a
        (M/W, K) bfloat16 or float16, contiguous: this rank's rows. M/W may be 0 and is the same on every rank. An array of ``world.empty``
        saves a staging copy when the world spans nodes.
    b
        (K, N), the dtype of ``a``: this rank's columns, row-major or the transpose view of a (N, K) array. K and N are multiples of 8.
    out
        (M, N), the dtype of ``a``, rows contiguous, no byte shared with ``a`` or ``b``; returned as given. None: a new array of
        the library of ``a`` (torch or CuPy; NumPy on target cpu), in memory of ``stream``. CuPy needs it in a capture.
    split
        SMs per role (``mk.Split``). None, or a role left at None: what ``mk.tune`` found, else mkernel's choice.
    stream
        Anything with ``__cuda_stream__``. None: the current stream of the library of ``a``. Calls of a world run in call order on
        whatever streams; docs/streams.md states what else is ordered.

    Returns
    -------
    c
        (M, N), accumulated in float32 and rounded once. Bitwise the same on every run.

    Notes
    -----
    Collective: every rank calls it, in the same order. Asynchronous on target cuda (it never waits for the host or for peers, except on
    the first use of a plan, which compiles); on target cpu it returns when the result is there. Capturable in a CUDA graph once planned
    (``mk.plan``). No buffer of the caller is in use by other ranks after the kernel has ended.

    Raises
    ------
    ArgumentError
        Shapes, dtypes, alignment, device or split are wrong; the heap is too small. Nothing was launched.
    MismatchError, TimeoutError, PeerLostError, TransportError
        On this or a later call: the ranks disagree, or one does not answer.

    The algorithm: every rank pushes its shard chunk by chunk into the gather buffers of its node while tiles of its own shard are computed;
    tiles of other shards follow as their chunks arrive (kernels_src/allgather_gemm.cuh).
    """
    return matmul_call(OP, a, b, (), world, out, split, stream, problem_of, _bind)


def problem_of(world: World, a: TensorView, b: TensorView) -> AllGatherGemmProblem:
    """What these operands ask for."""
    rows, n, k, b_row_major = check_operands(a, b, "K", "this rank's columns")
    if row_stride("a", a) != k * ITEM:
        raise ArgumentError("a.strides", a.strides, "a must be contiguous", "use xp.ascontiguousarray(a)")
    check_extents(rows * world.size, n, k)
    return AllGatherGemmProblem(world.topology, rows, n, k, a.dtype, b_row_major)


def _bind(
    world: World, problem: AllGatherGemmProblem, a: TensorView, b: TensorView, c: TensorView, split: Split | None, stream: Any
) -> BoundCall:
    rows, n, k, size, dtype = problem.rows, problem.n, problem.k, world.size, problem.dtype
    c_stride = check_result(problem, a, b, c, "(M, N)")
    chosen = executable(world, problem, make_plan, split, stream)
    plan: AllGatherGemmPlan = chosen.plan
    heap = world.heap_address
    offset = world.heap_offset(a.address, plan.plane_bytes) if rows else None
    staged = world.num_nodes > 1 and offset is None
    extent = max(rows, 1)  # a tensor map has no empty dimension; without rows there are no tiles
    a_address, c_address = (a.address, c.address) if rows else (b.address, b.address)
    gather = heap + chosen.scratch_offset if size > 1 and rows else b.address
    tensor_map = world.backend.tensor_map
    a_box, plane = (BLOCK_K, plan.load_rows, 1), extent * k * ITEM
    parameters = Parameters(
        a=a.address,
        gather_offset=chosen.scratch_offset,
        send_offset=chosen.staging_offset if offset is None else offset,
        flag_offset=chosen.flag_offset,
        rows=rows,
        stage_send=int(staged),
        whole_tiles=plan.whole_tiles,
        group_m=plan.group_m,
        part_blocks=plan.part_blocks,
    )
    set_map(parameters, "a_map", tensor_map(a_address, dtype, (k, extent, 1), (k * ITEM, plane), a_box))
    if plan.parts > 1:
        piece = (BLOCK_K, plan.piece_box[1], plan.piece_box[0])
        part_map = tensor_map(a_address, dtype, (BLOCK_K, k // BLOCK_K, extent), (BLOCK_K * ITEM, k * ITEM), piece, swizzled=False)
        set_map(parameters, "part_map", part_map)
    part_k = k // plan.parts
    gather_strides = (part_k * ITEM, extent * part_k * ITEM)
    set_map(parameters, "gather_map", tensor_map(gather, dtype, (part_k, extent, size * plan.parts), gather_strides, a_box))
    set_map(parameters, "b_map", map_of_b(world, problem, b, plan.b_columns))
    set_map(parameters, "c_map", tensor_map(c_address, dtype, (n, extent, size), (c_stride, extent * c_stride), (64, 64, 1)))
    return BoundCall(chosen, parameters, chosen.placement)
