"""What ``mk.gemm_reduce_scatter`` and ``mk.gemm_allreduce`` share: from arrays to the parameters of a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.ops.arguments import MOST_EXTENT, check_extents, row_stride
from mkernel.ops.gemm import GemmOp, checked, held
from mkernel.ops.op import Instance, instance_of
from mkernel.ops.parameters import map_places, place_of
from mkernel.planner.choice import plan_reduce
from mkernel.planner.gemm import BLOCK_K
from mkernel.planner.reduce import PARAMETER_BYTES, PARTIALS, REDUCE_SCATTER, ReducePlan, ReduceProblem, sums_by_node

if TYPE_CHECKING:
    from mkernel.planner.split import Split
    from mkernel.runtime.arrays.views import TensorView
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
        ("group_tiles", ctypes.c_uint32),
        ("group_m", ctypes.c_uint32),
        ("chunk_shift", ctypes.c_uint32),
        ("load_rows", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 8),
        ("a_map", ctypes.c_ubyte * 128),
        ("b_map", ctypes.c_ubyte * 128),
        ("c_map", ctypes.c_ubyte * 128),
    ]


assert ctypes.sizeof(Parameters) == PARAMETER_BYTES
_AT, _VALUES = place_of(Parameters, "fields", "load_rows")
_A_MAP, _B_MAP, _C_MAP = map_places(Parameters, "a_map", "b_map", "c_map")


class ReduceOp(GemmOp[ReduceProblem]):
    """A product whose K is spread over the ranks."""

    parameters = Parameters

    def problem(self, world: World, a: TensorView, b: TensorView, partials: Any, algorithm: str | None = None) -> Instance[ReduceProblem]:
        """What operands that fit each other ask for: all rows of ``a``. Raises ArgumentError."""
        known, _ = checked(world, a, b, "K/W", "this rank's rows")
        m, n, k = a.shape[0], known.n, known.k
        if partials not in PARTIALS:
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
        self, problem: ReduceProblem, rows: int, sm_count: int, split: Split | None = None, *, specialize: str | None = None
    ) -> ReducePlan:
        return plan_reduce(problem, rows, sm_count, split, specialize=specialize)

    def mechanism(self, plan: Any) -> str:
        return "partial tiles" if plan.op == REDUCE_SCATTER else f"{plan.algorithm}{' in packets' if plan.packets else ''}"

    def travels(self, plan: Any) -> str:
        if plan.packets:
            return "packets"
        puts = f", puts of {plan.chunk_tiles}" if plan.problem.topology.num_nodes > 1 else ""
        return f"tiles{puts}{', owners in turn' if plan.interleaved else ''}"

    def bind(
        self,
        world: World,
        executable: Executable,
        instance: Instance[ReduceProblem],
        operands: Sequence[TensorView],
        results: Sequence[TensorView],
    ) -> Parameters:
        (problem, rows), (a, b), (c,) = instance, operands, results
        n, k, dtype = problem.n, problem.k, problem.dtype
        known, a_stride, c_stride = held(world, a, b), row_stride("a", a), row_stride("out", c)
        plan: ReducePlan = executable.plan
        extent = rows or 1  # a tensor map has no empty dimension; without rows there are no tiles
        a_address, c_address = (a.address, c.address) if rows else (b.address, b.address)
        planes = world.size if problem.op == REDUCE_SCATTER else 1
        tensor_map = world.backend.tensor_map
        offsets = [executable.scratch_offset + offset for offset in plan.offsets.values()]
        if plan.packets:
            offsets[0] = executable.packet_offset
        parameters = Parameters()
        memory = memoryview(parameters).cast("B")
        _VALUES.pack_into(memory, _AT, *plan.fields, *offsets, executable.flag_offset, *plan.arguments.values())
        a_strides, c_strides = (a_stride, extent * a_stride), (c_stride, extent * c_stride)
        memory[_A_MAP] = tensor_map(a_address, dtype, (k, extent, planes), a_strides, (BLOCK_K, plan.load_rows, 1))
        memory[_B_MAP] = known.map(world, plan.tile.block_n)
        memory[_C_MAP] = tensor_map(c_address, dtype, (n, extent, 1), c_strides, (64, 64, 1))
        return parameters
