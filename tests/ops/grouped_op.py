"""A grouped GEMM by itself, as an op: what the MoE kernels build on (``kernels_src/tile/grouped.cuh``), without communication."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.jit.spec import KernelSpec
from mkernel.ops.call import call
from mkernel.ops.op import Instance, Op, ResultSpec
from mkernel.planner.gemm import BLOCK_K, BLOCK_M, THREADS, GemmTile, digest_of
from mkernel.planner.specialize import ALL, constants_of
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology

if TYPE_CHECKING:
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World

__all__ = ["OP", "GroupedPlan", "GroupedProblem", "GroupedRows", "Parameters", "grouped_gemm"]

_NAME = "grouped"
_FOLDER = Path(__file__).resolve().parent / "kernels"
_ITEM = 2
_STAGES = {64: 4, 128: 3, 192: 2, 256: 3}  # few, so that they are used again and again
_LARGEST_TABLE = 2048


class Parameters(ctypes.Structure):
    """``Parameters`` of ``grouped.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("fields", abi.Fields),
        ("counts", ctypes.c_uint64),
        ("c", ctypes.c_uint64),
        ("copy", ctypes.c_uint64),
        ("flag_offset", ctypes.c_uint64),
        ("experts", ctypes.c_uint32),
        ("c_row_bytes", ctypes.c_uint32),
        ("group_m", ctypes.c_uint32),
        ("aligned", ctypes.c_uint32),
        ("clamp", ctypes.c_float),
        ("reserved", ctypes.c_uint32 * 11),
        ("a_map", abi.TensorMap),
        ("a_short_map", abi.TensorMap),
        ("b_map", abi.TensorMap),
        ("c_map", abi.TensorMap),
    ]


class GroupedRows(NamedTuple):
    """The results, packed by expert, and what a CTA has copied of them tile by tile as it was told that they are there."""

    c: Any
    copy: Any


@dataclasses.dataclass(frozen=True)
class GroupedProblem:
    """``n``: columns of the result. ``specialized``: whether N and K are compiled in."""

    topology: Topology
    n: int
    k: int
    experts: int
    dtype: str
    b_row_major: bool
    gated: bool = False
    aligned: bool = False
    clamp: float = 0.0
    block_n: int = 256
    enters: bool = True
    group_m: int = 2
    specialized: bool = False


@dataclasses.dataclass(frozen=True)
class GroupedPlan:
    """Up to ``rows`` rows."""

    problem: GroupedProblem
    rows: int
    split: Split
    stages: int
    max_experts: int

    op = _NAME
    packet_bytes = staging_bytes = workspace_bytes = 0

    @property
    def digest(self) -> int:
        return digest_of(self)

    @property
    def grid(self) -> int:
        return self.split.total

    @property
    def spec(self) -> KernelSpec:
        problem = self.problem
        fields = {"kN": problem.n, "kK": problem.k, "kIntraComm": self.split.intra_comm or 0, "kInterSend": 0, "kInterReduce": 0}
        constants = constants_of(fields, ALL if problem.specialized else frozenset({"split"})) | {
            "kBlockN": problem.block_n,
            "kStages": self.stages,
            "kResultBuffers": 2,
            "kFloat16": int(problem.dtype == "float16"),
            "kBRowMajor": int(problem.b_row_major),
            "kNumNodes": problem.topology.num_nodes,
            "kRanksPerNode": problem.topology.ranks_per_node,
            "kSlices": 1,
            "kGated": int(problem.gated),
            "kMaxExperts": self.max_experts,
            "kEnters": int(problem.enters),
        }
        table = -(-(2 * self.max_experts + 3) * 4 // 1024) * 1024
        shared = GemmTile(problem.block_n, self.stages).shared_bytes + table
        return KernelSpec(_NAME, tuple(constants.items()), THREADS, shared, ctypes.sizeof(Parameters), _FOLDER)

    @property
    def flag_words(self) -> int:
        width = self.problem.block_n // 2 if self.problem.gated else self.problem.block_n
        return (self.rows // BLOCK_M + self.problem.experts) * math.ceil(self.problem.n / width)

    def of_rows(self, rows: int) -> GroupedPlan:
        return dataclasses.replace(self, rows=rows)

    def flag_name(self, rank: int, index: int) -> str:
        return f"tile {index}"

    def describe(self) -> str:
        return f"{_NAME}: {self.problem}, up to {self.rows} rows, {self.stages} stages, {self.split}"


class GroupedGemm(Op[GroupedProblem]):
    """The op of ``grouped_gemm``."""

    name = _NAME
    gives = "rows by expert, weights of the experts, rows of each"
    gets = "the products"
    operands = ("a", "w", "counts")
    options: ClassVar[Mapping[str, Any]] = {"gated": False, "aligned": False, "clamp": 0.0, "block_n": 256, "enters": True, "group_m": 2}
    result = GroupedRows
    parameters = Parameters

    def instance(self, world: World, *operands: TensorView, **options: Any) -> Instance[GroupedProblem]:
        a, w, counts = operands
        experts, k, columns = w.shape
        if a.shape[1] != k or counts.shape != (experts,) or counts.dtype != "int32":
            raise ArgumentError("shapes", (a.shape, w.shape, counts.shape), "do not fit each other")
        n = columns // 2 if options["gated"] else columns
        row_major = w.strides[2] == _ITEM
        return Instance(GroupedProblem(world.topology, n, k, experts, a.dtype, row_major, **options), a.shape[0])

    def make_plan(
        self, problem: GroupedProblem, rows: int, sm_count: int, split: Split | None = None, *, specialize: str | None = None
    ) -> GroupedPlan:
        chosen = (split or Split()).complete(Split(intra_comm=1, inter_send=0, inter_reduce=0), sm_count)
        return GroupedPlan(problem, rows, chosen, _STAGES[problem.block_n], 8 if problem.experts <= 8 else _LARGEST_TABLE)

    def results(self, instance: Instance[GroupedProblem], operands: Sequence[TensorView]) -> Sequence[ResultSpec]:
        problem, rows = instance
        return [ResultSpec((rows, problem.n), problem.dtype)] * 2

    def check_results(self, instance: Instance[GroupedProblem], operands: Sequence[TensorView], results: Sequence[TensorView]) -> None:
        """``out`` may have fewer rows than ``a``, which has those between experts, too."""

    def bind(
        self,
        world: World,
        executable: Executable,
        instance: Instance[GroupedProblem],
        operands: Sequence[TensorView],
        results: Sequence[TensorView],
    ) -> Parameters:
        problem, (a, w, counts), (c, copy) = instance.problem, operands, results
        plan: GroupedPlan = executable.plan
        tensor_map, dtype = world.backend.tensor_map, problem.dtype
        rows, columns = max(a.shape[0], 1), w.shape[2]
        a_strides = (a.strides[0], rows * a.strides[0])
        inner, outer, stride = (columns, problem.k, w.strides[1]) if problem.b_row_major else (problem.k, columns, w.strides[2])
        box = BLOCK_K if problem.b_row_major or problem.gated else problem.block_n
        maps = {
            "a_map": tensor_map(a.address, dtype, (problem.k, rows, 1), a_strides, (BLOCK_K, BLOCK_M, 1)),
            "a_short_map": tensor_map(a.address, dtype, (problem.k, rows, 1), a_strides, (BLOCK_K, 64, 1)),
            "b_map": tensor_map(w.address, dtype, (inner, outer, problem.experts), (stride, w.strides[0]), (64, box, 1)),
            "c_map": tensor_map(c.address, dtype, (problem.n, c.shape[0], 1), (c.strides[0], c.shape[0] * c.strides[0]), (64, 64, 1)),
        }
        return Parameters(
            fields=abi.Fields(problem.n, problem.k, plan.split.intra_comm or 0, 0, 0),
            counts=counts.address,
            c=c.address,
            copy=copy.address,
            flag_offset=executable.flag_offset,
            experts=problem.experts,
            c_row_bytes=c.strides[0],
            group_m=problem.group_m,
            aligned=int(problem.aligned),
            clamp=problem.clamp,
            **{name: abi.TensorMap.from_buffer_copy(raw) for name, raw in maps.items()},
        )


OP = GroupedGemm()


def grouped_gemm(a: Any, w: Any, counts: Any, *, out: GroupedRows, split: Split | None = None, **options: Any) -> GroupedRows:
    """``a`` (rows, K) sorted by expert, ``w`` (E, K, N), gated (E, K, 2 N), ``counts`` (E) int32: rows of each expert, read on the device.

    ``aligned``: every expert's rows in ``a`` begin at a multiple of 64, else they are packed, as the results are. ``out``: a matrix with a
    multiple of 16 bytes between rows, and one without gaps.
    """
    result: GroupedRows = call(OP, (a, w, counts), OP.option_values(options), world=None, out=out, split=split, stream=None)
    return result
