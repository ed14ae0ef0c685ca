"""MoE dispatch + GEMM: problem and plan. Pure Python; the device side is ``kernels_src/ops/moe_dispatch_gemm.cuh``."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from mkernel.errors import CallReport
from mkernel.jit.spec import KernelSpec
from mkernel.planner.gemm import BLOCK_K, BLOCK_M, GemmPlan, GemmTile, fitting
from mkernel.planner.moe import SEGMENT_ROWS, STAGED_ROWS, RoutingError, columns, routing_error, rows_per_piece, slot_blocks, whole_lines
from mkernel.planner.specialize import Specialized, parse, remark
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology

__all__ = ["ITEM", "OP", "PARAMETER_BYTES", "Areas", "MoeDispatchGemmPlan", "MoeDispatchGemmProblem", "make_plan"]

OP = "moe_dispatch_gemm"
ITEM = 2  # bytes of a value
SPECIALIZED = Specialized(["k"])  # as allgather_gemm; not measured
PARAMETER_BYTES = 896
PUT_BYTES = 512 * 1024  # what a put should reach
COUNTED_ALONE = 1024  # choices of all ranks, at most, that each CTA counts: to read 4 KiB takes no longer than to meet the others
_GROUP_M = 16
_HEADER = 16  # bytes of a record before the ids
_ALIGNMENT = 1024  # of areas
_MAX_SHARED = 1024  # bytes of barriers and table that a tile's own kilobyte has no room for


@dataclasses.dataclass(frozen=True, slots=True)
class MoeDispatchGemmProblem:
    """What the ranks agree on once. A rank's number of tokens is no part of it.

    ``n``, ``k``: columns of y and of x; ``experts``: of a rank; ``gated``: y is SwiGLU of 2 n columns of the product, within ``clamp``.
    """

    topology: Topology
    n: int
    k: int
    dtype: str
    b_row_major: bool
    experts: int
    topk: int
    max_tokens: int
    max_rows: int
    alignment: int
    weighted: bool
    gated: bool
    clamp: float

    def result_shape(self, rows: int) -> tuple[int, int]:
        return self.max_rows, self.n

    @property
    def all_experts(self) -> int:
        return self.experts * self.topology.size

    @property
    def row_bytes(self) -> int:
        return self.k * ITEM

    @property
    def slot_bytes(self) -> int:
        """From a slot to the next one."""
        return whole_lines(self.row_bytes)

    @property
    def blocks(self) -> int:
        return slot_blocks(self.max_rows, self.experts)


@dataclasses.dataclass(frozen=True)
class Areas:
    """Bytes from the start of the workspace."""

    records: int
    staged: int
    sending: int
    arrived: int
    tables: int
    slots: int
    end: int


@dataclasses.dataclass(frozen=True)
class MoeDispatchGemmPlan(GemmPlan[MoeDispatchGemmProblem]):
    """Every call of a problem, whatever its tokens."""

    put_rows: int
    counted_alone: int
    specialize: frozenset[str] = SPECIALIZED

    op = OP
    group_m = _GROUP_M

    @functools.cached_property
    def spec(self) -> KernelSpec:
        problem = self.problem
        constants = {
            "kSlices": 1,
            "kTopK": problem.topk,
            "kExperts": problem.experts,
            "kWeighted": int(problem.weighted),
            "kGated": int(problem.gated),
            "kRowsPerPiece": rows_per_piece(problem.row_bytes),
        }
        spec = self.spec_with(OP, PARAMETER_BYTES, constants)
        return dataclasses.replace(spec, shared_bytes=spec.shared_bytes + table_bytes(problem.experts))

    @functools.cached_property
    def areas(self) -> Areas:
        problem, topology = self.problem, self.problem.topology
        others, rows = topology.num_nodes - 1, problem.max_tokens * problem.row_bytes
        sizes = (
            topology.num_nodes * self.record_bytes,
            problem.max_tokens * problem.slot_bytes if topology.ranks_per_node > 1 else 0,
            others * rows,
            others * rows,
            self.table_bytes,
            problem.blocks * SEGMENT_ROWS * problem.slot_bytes,
        )
        ends = [0]
        for size in sizes:
            ends.append(math.ceil((ends[-1] + size) / _ALIGNMENT) * _ALIGNMENT)
        return Areas(*ends)

    @property
    def record_bytes(self) -> int:
        """Bytes of what a rank tells of itself: its number of tokens, their ids and weights."""
        problem = self.problem
        ids = math.ceil(problem.max_tokens * problem.topk * 4 / 16) * 16
        return math.ceil((_HEADER + ids * (2 if problem.weighted else 1)) / 128) * 128

    @property
    def table_bytes(self) -> int:
        """Bytes of ``Tables`` of ``kernels_src/moe/routing.cuh``."""
        problem = self.problem
        tokens, others = problem.topology.size * problem.max_tokens, problem.topology.num_nodes - 1
        blocks = math.ceil(problem.blocks / 2) * 2
        counted = self.grid * (columns(problem.topology, problem.experts) + 2)
        return 8 * blocks + 16 * tokens + 4 * (2 * tokens * problem.topk + others * problem.max_tokens + counted)

    @property
    def workspace_bytes(self) -> int:
        return self.areas.end

    @property
    def packet_bytes(self) -> int:
        return 0

    @property
    def put_bytes(self) -> int:
        """Bytes of a full put."""
        return self.put_rows * self.problem.row_bytes

    @property
    def max_chunks(self) -> int:
        """Chunks of the rows of one rank, at most."""
        return math.ceil(self.problem.max_tokens / min(self.put_rows, STAGED_ROWS))

    @property
    def flag_words(self) -> int:
        topology = self.problem.topology
        return topology.size * (1 + self.max_chunks) + 2 + topology.ranks_per_node * (self.split.intra_comm or 0)

    def flag_name(self, rank: int, index: int) -> str:
        topology, movers = self.problem.topology, self.split.intra_comm or 0
        barriers = topology.size * (1 + self.max_chunks)
        if index < topology.size:
            return f"the routing of rank {index}"
        if index < barriers:
            source, chunk = divmod(index - topology.size, self.max_chunks)
            return f"chunk {chunk} of the rows of rank {source}"
        if index < barriers + 2:
            return ("tokens are counted", "tokens have their places")[index - barriers]
        if index < self.flag_words:
            local, cta = divmod(index - barriers - 2, movers)
            return f"rows are fetched by CTA {cta} of rank {topology.rank(topology.node(rank), local)}"
        return f"rows of block {index - self.flag_words} of slots"

    def describe(self) -> str:
        problem, split, topology = self.problem, self.split, self.problem.topology
        more = [
            "transposed weights" if not problem.b_row_major else "",
            ("SwiGLU" + (f" within {problem.clamp:g}" if problem.clamp else "")) if problem.gated else "",
            f"alignment {problem.alignment}" if problem.alignment > 1 else "",
            "weights travel along" if problem.weighted else "",
        ]
        columns_of_w = f"{problem.n}{' x 2' if problem.gated else ''}"
        return (
            f"{OP}: up to {problem.max_tokens} tokens of a rank, {problem.max_rows} rows, x (T, {problem.k}), {problem.topk} of "
            f"{problem.all_experts} experts, w ({problem.experts}, {problem.k}, {columns_of_w}) {problem.dtype}, "
            f"{', '.join([*filter(None, more), f'{topology.num_nodes}x{topology.ranks_per_node} ranks'])}\n"
            f"tiles of up to {BLOCK_M} x {self.tile.block_n}, {self.tile.stages} stages, {split}{remark(self.specialize, SPECIALIZED)}\n"
            f"workspace {self.workspace_bytes} bytes, {problem.max_rows * problem.n * ITEM} of y; puts of {self.put_rows} rows"
        )

    def call_error(self, report: CallReport) -> RoutingError:
        return routing_error(report, self.problem.all_experts)


def table_bytes(experts: int) -> int:
    """Shared memory beside what a GEMM needs: barriers of copies, and where the rows of each expert begin."""
    return max(0, math.ceil((512 + 8 * (experts + 2)) / _MAX_SHARED) * _MAX_SHARED - _MAX_SHARED)


def choose_tile(problem: MoeDispatchGemmProblem) -> GemmTile:
    """The widest tile that fits the columns."""
    return fitting_tile(problem)(256 if problem.gated or problem.n > 128 else 128)


def fitting_tile(problem: MoeDispatchGemmProblem) -> Callable[[int], GemmTile]:
    """Tiles of a width, with as many stages as shared memory has room for beside barriers and table."""
    return functools.partial(fitting, bytes_beside=table_bytes(problem.experts))


def make_plan(
    problem: MoeDispatchGemmProblem, sm_count: int, split: Split | None = None, tile: GemmTile | None = None, specialize: str | None = None
) -> MoeDispatchGemmPlan:
    """The plan of all calls of a problem. Raises SplitError."""
    senders = 0 if problem.topology.num_nodes == 1 else 1 if sm_count < 32 else 2
    default = Split(intra_comm=max(1, min(16, sm_count // 4)), inter_send=senders, inter_reduce=0)
    chosen = (split or Split()).complete(default, sm_count)
    put_rows = max(1, math.ceil(PUT_BYTES / problem.row_bytes))
    return MoeDispatchGemmPlan(problem, 0, chosen, tile or choose_tile(problem), put_rows, COUNTED_ALONE, parse(specialize, SPECIALIZED))


assert BLOCK_K == SEGMENT_ROWS
