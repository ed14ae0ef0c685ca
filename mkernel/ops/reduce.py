"""What ``mk.gemm_reduce_scatter`` and ``mk.gemm_allreduce`` share: from arrays to the parameters of a launch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.ops.arguments import MOST_EXTENT, check_extents
from mkernel.ops.gemm import STORED_ROWS, GemmOp, Held, checked
from mkernel.ops.op import Instance, instance_of
from mkernel.ops.parameters import place_of, surroundings
from mkernel.planner import pairs
from mkernel.planner.choice import plan_reduce
from mkernel.planner.machine import Machine
from mkernel.planner.reduce import PARAMETER_BYTES, PARTIALS, REDUCE_SCATTER, ReducePlan, ReduceProblem, sums_by_node

if TYPE_CHECKING:
    from mkernel.planner.split import Split
    from mkernel.planner.tiling import Tiling
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.backend import MatrixMaps
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World

__all__ = ["ReduceOp"]


class Parameters(ctypes.Structure):
    """``Parameters`` of ``kernels_src/reduce/layout.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("fields", abi.Fields),
        ("partial_offset", ctypes.c_uint64),
        ("sum_offset", ctypes.c_uint64),
        ("arrived_offset", ctypes.c_uint64),
        ("result_offset", ctypes.c_uint64),
        ("flag_offset", ctypes.c_uint64),
        ("rows", ctypes.c_uint32),
        ("tiles", ctypes.c_uint32),
        ("taken", ctypes.c_uint32),
        ("group_taken", ctypes.c_uint32),
        ("group_m", ctypes.c_uint32),
        ("chunk_shift", ctypes.c_uint32),
        ("load_rows", ctypes.c_uint32),
        ("shares", ctypes.c_uint32),
        ("interleaved", ctypes.c_uint32),
        ("whole_pairs", ctypes.c_uint32),
        ("last_pairs", ctypes.c_uint32),
        ("last_row", ctypes.c_uint32),
        ("tail_rows", ctypes.c_uint32),
        ("block_rows", ctypes.c_uint32),
        ("stages", ctypes.c_uint32),
        ("c_row_bytes", ctypes.c_uint32),
        ("share_offset", ctypes.c_uint64),
        ("c", ctypes.c_uint64),
        ("reserved", ctypes.c_uint32 * 10),
        ("a_map", ctypes.c_ubyte * 128),
        ("a_tail_map", ctypes.c_ubyte * 128),
        ("b_map", ctypes.c_ubyte * 128),
        ("c_map", ctypes.c_ubyte * 128),
    ]


assert ctypes.sizeof(Parameters) == PARAMETER_BYTES
_AT, _VALUES = place_of(Parameters, "fields", "c")
_BEFORE, _BETWEEN = surroundings(Parameters, _AT, _VALUES, "a_map", "a_tail_map", "b_map", "c_map")


class ReduceOp(GemmOp[ReduceProblem]):
    """A product whose K is spread over the ranks."""

    tilings = frozenset({"block_n", "shares", "cluster", "packets", "cluster_n", "tile_rows", "block_m"})
    modelled = True
    parameters = Parameters

    def problem(self, world: World, a: TensorView, b: TensorView, partials: Any, algorithm: str | None = None) -> Instance[ReduceProblem]:
        """What operands that fit each other ask for: all rows of ``a``. Raises ArgumentError."""
        known, _ = checked(world, a, b, "K/W", "this rank's rows")
        m, n, k = a.shape[0], known.n, known.k
        if not isinstance(partials, str) or partials not in PARTIALS:
            raise ArgumentError("partials", partials, f"must be one of {', '.join(PARTIALS)}")
        asked = self.name, partials, algorithm
        problem: ReduceProblem | None = known.problems.get(asked)
        if problem is not None and m < MOST_EXTENT:
            return instance_of((problem, m))
        check_extents(m, n, k)
        topology, canonical = world.topology, world.options.batch_invariant
        if canonical and not sums_by_node(algorithm, topology):
            raise ArgumentError(
                "algorithm", algorithm, "adds no sums by node, as batch_invariant wants", "leave it to mkernel, or pass two_shot"
            )
        made = ReduceProblem(self.name, topology, n, k, a.dtype, known.b_row_major, str(partials), algorithm, canonical)
        known.problems[asked] = made
        return Instance(made, m)

    def make_plan(
        self,
        problem: ReduceProblem,
        rows: int,
        sm_count: int,
        split: Split | None = None,
        *,
        specialize: str | None = None,
        tiling: Tiling | None = None,
        machine: Machine | None = None,
    ) -> ReducePlan:
        return plan_reduce(problem, rows, sm_count, split, specialize=specialize, tiling=tiling, machine=machine)

    def mechanism(self, plan: Any) -> str:
        shared = f", {plan.shares} share K" if plan.shares > 1 else pairs.mechanism(plan.cluster, plan.cluster_n) if plan.packets else ""
        shared += ", swapped" if plan.swapped else ""
        if plan.op == REDUCE_SCATTER:
            return f"packets{shared}" if plan.packets else "partial tiles"
        return f"{plan.algorithm}{' in packets' if plan.packets else ''}{shared}"

    def travels(self, plan: Any) -> str:
        if plan.packets:
            return "packets"
        puts = f", puts of {plan.chunk_tiles}" if plan.problem.topology.num_nodes > 1 else ""
        return f"tiles{puts}{', owners in turn' if plan.interleaved else ''}{pairs.mechanism(plan.cluster, plan.cluster_n)}"

    def binder(self, world: World, problem: ReduceProblem, known: Held, a_stride: int, c_stride: int) -> _Binder:
        return _Binder(world, problem, known, a_stride, c_stride)


class _Binder:
    """As ``ops.gemm.Binder``."""

    __slots__ = ("_a_maps", "_c_maps", "_c_stride", "_known", "_of_a", "_owners", "_world")

    def __init__(self, world: World, problem: ReduceProblem, known: Held, a_stride: int, c_stride: int) -> None:
        self._world, self._known, self._c_stride = world, known, c_stride
        self._of_a, self._owners = (problem.k, a_stride), world.size if problem.op == REDUCE_SCATTER else 1
        self._a_maps: dict[int, MatrixMaps] = {}  # by owners whose rows are one plane
        self._c_maps = known.matrices(world, problem.n, c_stride, 1)

    def parameters(self, executable: Executable, rows: int, a_address: int, b_address: int, c_address: int) -> Parameters:
        world, known, plan = self._world, self._known, executable.made_of
        sizes = executable.sizes or plan.sizes_of(rows)
        columns, span, packets, stores_rows, cluster = plan.of_maps
        tiles, start = sizes.tiles, executable.scratch_offset
        partial, summed, arrived, result = plan.ends_of_tile
        values = _VALUES.pack(
            *plan.fields,
            executable.packet_offset if packets else start + partial * tiles,
            start + summed * tiles,
            start + arrived * tiles,
            start + result * tiles,
            executable.flag_offset,
            *plan.arguments_of(rows, sizes),
            *((self._c_stride, executable.packet_offset + sizes.exchanged, c_address) if stores_rows else (0, 0, 0)),
        )
        a_maps = self._a_maps.get(span)
        if a_maps is None:
            a_maps = self._a_maps[span] = known.matrices(world, *self._of_a, self._owners // span)
        extent = rows or 1  # a tensor map has no empty dimension; without rows there are no tiles
        a, c = (a_address, c_address) if rows else (b_address, b_address)
        tail, ctas = sizes.tail_rows, plan.cluster_n  # that share rows of A
        of_a = a_maps(a, extent * span, (sizes.block_rows if sizes.last_row else tail) // ctas, tail // ctas)
        maps = of_a, known.map(world, b_address, columns, cluster), self._c_maps(c, extent, STORED_ROWS)
        return Parameters.from_buffer_copy(b"".join((_BEFORE, values, _BETWEEN, *maps)))
