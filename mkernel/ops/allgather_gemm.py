"""``mk.allgather_gemm``: from arrays to a launch."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any, ClassVar

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.ops.arguments import ITEM, MOST_EXTENT, check_extents, check_matrix, check_places, check_writable, row_stride
from mkernel.ops.call import call
from mkernel.ops.gemm import STORED_ROWS, GemmOp, Held, checked
from mkernel.ops.op import Instance, instance_of, register
from mkernel.ops.parameters import NO_MAP, place_of, surroundings
from mkernel.planner import pairs
from mkernel.planner.allgather_gemm import OP as OP_NAME
from mkernel.planner.allgather_gemm import PARAMETER_BYTES, AllGatherGemmPlan, AllGatherGemmProblem
from mkernel.planner.choice import plan_allgather_gemm
from mkernel.planner.gemm import BLOCK_K
from mkernel.planner.machine import Machine
from mkernel.runtime.backend import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mkernel.planner.split import Split
    from mkernel.planner.tiling import Tiling
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.backend import MatrixMaps
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["OP", "allgather_gemm"]


class Parameters(ctypes.Structure):
    """``Parameters`` of ``kernels_src/ops/allgather_gemm.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("fields", abi.Fields),
        ("a", ctypes.c_uint64),
        ("gather_offset", ctypes.c_uint64),
        ("send_offset", ctypes.c_uint64),
        ("flag_offset", ctypes.c_uint64),
        ("packet_offset", ctypes.c_uint64),
        ("ahead_offset", ctypes.c_uint64),
        ("rows", ctypes.c_uint32),
        ("whole_tiles", ctypes.c_uint32),
        ("group_m", ctypes.c_uint32),
        ("part_blocks", ctypes.c_uint32),
        ("chunk_shift", ctypes.c_uint32),
        ("part_shift", ctypes.c_uint32),
        ("piece_rows", ctypes.c_uint32),
        ("piece_units", ctypes.c_uint32),
        ("load_rows", ctypes.c_uint32),
        ("span", ctypes.c_uint32),
        ("shares", ctypes.c_uint32),
        ("last_row", ctypes.c_uint32),
        ("tail_rows", ctypes.c_uint32),
        ("block_rows", ctypes.c_uint32),
        ("stages", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("stage_send", ctypes.c_uint32),
        ("c_row_bytes", ctypes.c_uint32),
        ("keeps", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("c", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 3),
        ("a_map", ctypes.c_ubyte * 128),
        ("a_tail_map", ctypes.c_ubyte * 128),
        ("part_map", ctypes.c_ubyte * 128),
        ("gather_map", ctypes.c_ubyte * 128),
        ("gather_tail_map", ctypes.c_ubyte * 128),
        ("b_map", ctypes.c_ubyte * 128),
        ("b_slice_map", ctypes.c_ubyte * 128),
        ("c_map", ctypes.c_ubyte * 128),
        ("c_tail_map", ctypes.c_ubyte * 128),
    ]


assert ctypes.sizeof(Parameters) == PARAMETER_BYTES
_AT, _VALUES = place_of(Parameters, "fields", "c")
_BEFORE, _BETWEEN = surroundings(Parameters, _AT, _VALUES, *(name for name, *_ in Parameters._fields_ if name.endswith("_map")))


def allgather_gemm(
    a: Array,
    b: Array,
    *,
    gathered: Array | None = None,
    world: World | None = None,
    out: Array | None = None,
    split: Split | None = None,
    stream: Any = None,
) -> Array:
    """Gather the row shards of A from all ranks and multiply: ``c = concatenate(a of rank 0, 1, ...) @ b``, in one kernel.

    Parameters
    ----------
    a
        (M/W, K) bfloat16 or float16, contiguous: this rank's rows. M/W may be 0 and is the same on every rank. An array of ``world.empty``
        saves a staging copy when the world spans nodes.
    b
        (K, N), the dtype of ``a``: this rank's columns, row-major or the transpose view of a (N, K) array. K and N are multiples of 8.
    gathered
        (M, K), the dtype of ``a``, contiguous, no byte shared with another argument, to be filled with the rows of all ranks, for a
        backward pass. It costs one copy in the device's memory, after the kernel. None: not wanted; each rank chooses for itself.
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
    Collective: every rank calls it, in the same order, with the same number of rows, which may be another in every call. Asynchronous on
    target cuda: it never waits for the device or for peers, unless its kernel is not loaded yet (the first call of a problem, where
    ``mk.plan`` has not prepared it), which blocks the host of every rank. On target cpu it returns when the result is there. Capturable in
    a CUDA graph once prepared. No buffer of the caller is in use by other ranks after the kernel has ended.

    Raises
    ------
    ArgumentError
        Shapes, dtypes, alignment, device or split are wrong; the heap is too small. Nothing was launched.
    MismatchError, TimeoutError, PeerLostError, TransportError
        On this or a later call: the ranks disagree, or one does not answer.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     a = np.full((16, 64), world.rank + 1, ml_dtypes.bfloat16)  # this rank's rows of A
    ...     b = np.ones((64, 8), ml_dtypes.bfloat16)  # this rank's columns of B
    ...     c = mk.allgather_gemm(a, b)
    ...     return c.shape, float(c[0, 0]), float(c[16, 0])
    >>> mk.launch(rank, ranks=2, target="cpu")
    [((32, 8), 64.0, 128.0), ((32, 8), 64.0, 128.0)]

    The algorithm: every rank pushes its shard chunk by chunk into the gather buffers of its node while tiles of its own shard are computed;
    tiles of other shards follow as their chunks arrive (kernels_src/ops/allgather_gemm.cuh).
    """
    result: Array
    if gathered is None:
        result = call(OP, (a, b), (), world=world, out=out, split=split, stream=stream)
    else:
        result = call(_KEEPING, (a, b), (True,), world=world, out=out, split=split, stream=stream, kept=(gathered,))
    return result


class AllGatherGemm(GemmOp[AllGatherGemmProblem]):
    """``mk.allgather_gemm``."""

    name = OP_NAME
    gives = "its rows of A: (M/W, K); its columns of B: (K, N)"
    gets = "all rows of A times its columns: (M, N)"
    result_rule = "(M, N)"
    bench = "mkernel.bench.cases.allgather_gemm"
    beside = frozenset({"gathered"})
    tilings = frozenset(
        {"block_n", "span", "shares", "cluster", "packets", "cluster_n", "tile_rows", "cluster_k", "tiles_at_once", "block_m"}
    )
    modelled = True
    parameters = Parameters
    keeps = 0  # 1: shards of tagged packets are wanted in the gather buffer, too

    def instance(self, world: World, *operands: TensorView, **options: Any) -> Instance[AllGatherGemmProblem]:
        a, b = operands
        known, stride = checked(world, a, b, "K", "this rank's columns")
        rows, n, k = a.shape[0], known.n, known.k
        if stride != k * ITEM:
            raise ArgumentError("a.strides", a.strides, "a must be contiguous", "use xp.ascontiguousarray(a)")
        problem = known.problems.get(OP_NAME)
        if problem is None or rows * world.size >= MOST_EXTENT:
            check_extents(rows * world.size, n, k)
            made = AllGatherGemmProblem(world.topology, n, k, a.dtype, known.b_row_major, world.options.batch_invariant)
            problem = known.problems[OP_NAME] = made
        return instance_of((problem, rows))

    def make_plan(
        self,
        problem: AllGatherGemmProblem,
        rows: int,
        sm_count: int,
        split: Split | None = None,
        *,
        specialize: str | None = None,
        tiling: Tiling | None = None,
        machine: Machine | None = None,
    ) -> AllGatherGemmPlan:
        return plan_allgather_gemm(problem, rows, sm_count, split, specialize=specialize, tiling=tiling, machine=machine)

    def mechanism(self, plan: Any) -> str:
        shared = f", {plan.shares} share K{' in clusters' if plan.cluster_k > 1 else ''}" if plan.shares > 1 else ""
        return (
            ("packets" if plan.packets else "warps push" if plan.pushers else "CTAs push" if plan.split.intra_comm else "CTAs send")
            + shared
            + (", swapped" if plan.swapped else "")
            + (", narrow" if plan.narrow else ", wide" if plan.wide else ", in turn" if plan.tiles_at_once > 1 else "")
            + pairs.mechanism(plan.cluster, plan.cluster_n)
        )

    def travels(self, plan: Any) -> str:
        if plan.packets:
            return str(plan.packets_name)
        return f"{plan.chunk_rows} rows" + (f", 1/{plan.parts} of K" if plan.parts > 1 else "")

    def binder(self, world: World, problem: AllGatherGemmProblem, known: Held, a_stride: int, c_stride: int) -> _Binder:
        return _Binder(world, problem, known, c_stride, self.keeps)


class _Keeping(AllGatherGemm):
    """Calls whose shards are wanted in the gather buffer, too. Other ranks need not know."""

    options: ClassVar[dict[str, Any]] = {"keeps": False}
    keeps = 1

    def instance(self, world: World, *operands: TensorView, **options: Any) -> Instance[AllGatherGemmProblem]:
        return super().instance(world, *operands)

    def check_kept(
        self, instance: Instance[AllGatherGemmProblem], operands: Sequence[TensorView], results: Sequence[TensorView], kept: TensorView
    ) -> None:
        problem, rows = instance
        shape = rows * problem.topology.size, problem.k
        if check_matrix("gathered", kept, problem.dtype) != shape:
            raise ArgumentError("gathered.shape", kept.shape, f"must be (M, K) = {shape}")
        if row_stride("gathered", kept) != problem.k * ITEM:
            raise ArgumentError("gathered.strides", kept.strides, "gathered must be contiguous")
        check_writable("gathered", kept)
        check_places(("gathered", "a", "b", "out"), (kept, *operands, *results), ("gathered",))

    def keeping(self, world: World, executable: Executable, operands: Sequence[TensorView], kept: TensorView) -> Any:
        """Copies of this rank's rows from ``a``, of the others' from the heap, where each part of K is the gathered matrix of its own."""
        plan, a = executable.plan, operands[0]
        (rows, k), rank, parts = a.shape, world.rank, plan.parts
        row, part, before, after = k * ITEM, k // parts * ITEM, world.rank * rows, (world.size - 1 - world.rank) * rows
        heap = world.heap_address + executable.scratch_offset
        moves = [Rows(kept.address + before * row, row, a.address, row, row, rows)]
        for i, (first, count) in itertools.product(range(parts), ((0, before), ((rank + 1) * rows, after))):
            source = heap + (i * world.size * rows + first) * part
            moves.append(Rows(kept.address + first * row + i * part, row, source, part, part, count))
        found = [move for move in moves if move.rows]
        return world.backend.copying(found) if found else None


class _Binder:
    """As ``ops.gemm.Binder``. ``keeps``: that field of the parameters."""

    __slots__ = ("_c_maps", "_c_stride", "_far", "_k", "_keeps", "_known", "_problem", "_size", "_world")

    def __init__(self, world: World, problem: AllGatherGemmProblem, known: Held, c_stride: int, keeps: int) -> None:
        self._keeps = keeps
        self._world, self._problem, self._known, self._c_stride = world, problem, known, c_stride
        self._k, self._size, self._far = problem.k, world.size, world.num_nodes > 1
        self._c_maps: dict[int, MatrixMaps] = {}  # by their planes

    def parameters(self, executable: Executable, rows: int, a_address: int, b_address: int, c_address: int) -> Parameters:
        world, known, k, plan = self._world, self._known, self._k, executable.made_of
        sizes = executable.sizes or plan.sizes
        parts, planes, columns, sliced, cluster, shared, blocks, cut = plan.of_maps
        # Rows of A that a CTA loads of a tile: of any, and of those of the last row.
        of_tile = sizes.load_rows // plan.cluster_n, sizes.tail_rows // plan.cluster_n
        extent, plane_rows = rows or 1, sizes.plane_rows or 1  # a tensor map has no empty dimension;
        a, c = (a_address, c_address) if rows else (b_address, b_address)  # without rows there are no tiles
        offset = world.heap_offset(a_address, plan.shard_bytes_of(rows)) if self._far and rows else None
        values = _VALUES.pack(
            *plan.fields,
            a_address,
            executable.scratch_offset,
            executable.staging_offset if offset is None else offset,
            executable.flag_offset,
            executable.packet_offset,
            abi.AHEAD_OFFSET,
            *plan.arguments_of(rows, sizes),
            self._far and offset is None,
            self._c_stride if shared else 0,
            self._keeps,
            0,
            c if shared else 0,
        )
        a_maps = known.matrices(world, k, k * ITEM, 1)(a, extent, *of_tile)
        part_map = NO_MAP
        if parts > 1:
            units, step = k // BLOCK_K, k * ITEM
            rows_of_piece, units_of_piece = plan.piece_box
            box, strides = (BLOCK_K, units_of_piece, rows_of_piece), (BLOCK_K * ITEM, step)
            part_map = world.backend.tensor_map(a, known.dtype, (BLOCK_K, units, extent), strides, box, swizzled=False)
        if self._size == 1 or not rows:  # nothing is gathered
            gather_maps = a_maps
        elif executable.workspace_map is None:
            part_k, gather = k // parts, world.heap.address + executable.scratch_offset
            of_parts = known.matrices(world, part_k, part_k * ITEM, planes * parts)
            gather_maps = of_parts(gather, plane_rows, *of_tile)
            executable.workspace_map = gather_maps
        else:
            gather_maps = executable.workspace_map
        c_maps = self._c_maps.get(planes)
        if c_maps is None:
            c_maps = self._c_maps[planes] = known.matrices(world, self._problem.n, self._c_stride, planes)
        b_map = known.map(world, b_address, columns, cluster)
        slice_map = known.map(world, b_address, sliced) if sliced else NO_MAP
        beyond = sizes.block_rows // blocks % STORED_ROWS
        if cut:  # what of a last panel is the next tile's lies beyond the columns of a tile
            extents, strides = (columns, max(1, plan.tiles_n - 1), plane_rows), (columns * ITEM, self._c_stride)
            of_tiles = world.backend.tensor_map(c, known.dtype, extents, strides, (BLOCK_K, 1, STORED_ROWS))
            stored = of_tiles + c_maps(c, plane_rows, STORED_ROWS)
        else:
            stored = c_maps(c, plane_rows, STORED_ROWS, beyond) if beyond else c_maps(c, plane_rows, STORED_ROWS) + NO_MAP
        maps = a_maps, part_map, gather_maps, b_map, slice_map, stored
        return Parameters.from_buffer_copy(b"".join((_BEFORE, values, _BETWEEN, *maps)))


OP = register(AllGatherGemm())
_KEEPING = _Keeping()
