"""Grouped GEMM + combine: problem and plan. Pure Python; the device side is ``kernels_src/ops/moe_gemm_combine.cuh``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from mkernel.jit.spec import KernelSpec
from mkernel.planner import moe_combine
from mkernel.planner.gemm import BLOCK_M, GROUP_M, GemmPlan, GemmTile, fitting
from mkernel.planner.moe import rows_per_piece, whole_lines
from mkernel.planner.moe_combine import WARPS, CombineLayout, MoeCombineProblem, Scale, aligned
from mkernel.planner.specialize import Specialized, parse, remark
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology

__all__ = ["OP", "PARAMETER_BYTES", "MoeGemmCombinePlan", "MoeGemmCombineProblem", "make_plan"]

OP = "moe_gemm_combine"
PARAMETER_BYTES = 896  # sizeof(Parameters); ops/moe_gemm_combine.py mirrors the struct
SPECIALIZED = Specialized(["k"])  # as allgather_gemm; not measured
_COUNTER_BYTES, _SHARED_COUNTERS = 4, 16  # of an expert; of the rank
_TABLE_STEP = 1024  # bytes of shared memory
_WINDOWS = 8  # of experts: rows of all but the last one's are fetched while others are multiplied
_COMBINERS = 8  # CTAs whose bulk copies keep up with the others' products


@dataclasses.dataclass(frozen=True, slots=True)
class MoeGemmCombineProblem:
    """What the ranks agree on once: how rows are combined, and the product that makes them.

    ``k``: columns of ``a`` (F); the columns of a row (H) are ``n``.
    """

    combined: MoeCombineProblem
    k: int
    b_row_major: bool

    @property
    def topology(self) -> Topology:
        return self.combined.topology

    @property
    def n(self) -> int:
        return self.combined.columns

    @property
    def dtype(self) -> str:
        return self.combined.dtype

    def result_shape(self, rows: int) -> tuple[int, int]:
        return rows, self.n


@dataclasses.dataclass(frozen=True)
class MoeGemmCombinePlan(GemmPlan[MoeGemmCombineProblem]):
    """Every call of a problem: ``rows`` is always 0, because how many tokens there are is each rank's own."""

    scale: Scale
    specialize: frozenset[str] = SPECIALIZED

    op = OP
    group_m = GROUP_M
    packet_bytes = 0

    @functools.cached_property
    def spec(self) -> KernelSpec:
        combined = self.problem.combined
        of_combined = {"kTopK": combined.topk, "kWeighted": int(combined.weighted), "kCanonical": int(combined.canonical)}
        more = {
            "kSlices": 1,
            **of_combined,
            "kExperts": combined.experts,
            "kWarps": WARPS,
            "kRowsPerPiece": rows_per_piece(combined.row_bytes),
        }
        spec = self.spec_with(OP, PARAMETER_BYTES, more)
        return dataclasses.replace(spec, shared_bytes=spec.shared_bytes + table_bytes(combined.experts))

    @property
    def mates(self) -> int:
        """Ranks of a node."""
        return self.problem.topology.ranks_per_node

    # ---- areas of the workspace: counters of finished tiles, products, what is combined
    @property
    def counter_bytes(self) -> int:
        return self.finished_offset(self.problem.combined.experts)

    def finished_offset(self, expert: int) -> int:
        """Offset of the counter of an expert's finished tiles."""
        return _SHARED_COUNTERS + expert * _COUNTER_BYTES

    @property
    def rows_offset(self) -> int:
        return aligned(self.counter_bytes)

    @property
    def pitch(self) -> int:
        """Bytes from a product, or a row that is fetched, to the next one."""
        return whole_lines(self.problem.combined.row_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of all products of a rank."""
        return self.problem.combined.max_rows * self.pitch

    @property
    def windows(self) -> int:
        """Windows of experts: one where a call is small, or copies of rows would take more room than the rows."""
        combined = self.problem.combined
        rows = combined.max_tokens * combined.topk
        large = rows >= self.scale.window_rows and rows * combined.topology.num_nodes <= combined.max_rows
        return min(_WINDOWS, combined.experts) if large and self.mates > 1 else 1

    @property
    def fetched_offset(self) -> int:
        return aligned(self.rows_offset + self.row_bytes)

    @property
    def fetched_bytes(self) -> int:
        """Rows of all choices of the tokens that this rank sums up."""
        combined = self.problem.combined
        return combined.topology.num_nodes * combined.max_tokens * combined.topk * self.pitch if self.windows > 1 else 0

    @functools.cached_property
    def combining(self) -> CombineLayout:
        return CombineLayout.of(
            self.problem.combined, self.fetched_offset + self.fetched_bytes, self.expert_flag(self.mates, 0), self.scale
        )

    @property
    def put_bytes(self) -> int:
        """Bytes of a full put: sums of this node's rows."""
        return self.combining.chunk * self.combining.problem.row_bytes

    @property
    def workspace_bytes(self) -> int:
        return self.combining.end

    @property
    def staging_bytes(self) -> int:
        """A copy of the weights for the network, unless the caller's lie on the heap."""
        return self.combining.own_weight_bytes

    # ---- flags
    def expert_flag(self, holder: int, expert: int) -> int:
        """Flag of the products of an expert of local rank ``holder``. Before them is the flag of zeroed counters."""
        return 1 + holder * self.problem.combined.experts + expert

    @property
    def flag_words(self) -> int:
        return self.combining.first_flag + self.combining.flags

    def flag_name(self, rank: int, index: int) -> str:
        """What a flag tells ``rank``, for reports."""
        topology = self.problem.topology
        if index == 0:
            return "counters of tiles are zero"
        if index < self.combining.first_flag:
            holder, expert = divmod(index - 1, self.problem.combined.experts)
            return f"products of expert {expert} of rank {topology.rank(topology.node(rank), holder)}"
        if index == self.flag_words:
            return "rows of all but the last experts are fetched"
        return self.combining.flag_name(rank, index)

    def describe(self) -> str:
        c, split = self.problem.combined, self.split
        world = f"{c.topology.num_nodes}x{c.topology.ranks_per_node}"
        weights = "weighted" if c.weighted else "not weighted"
        layout = "row-major" if self.problem.b_row_major else "transposed"
        sms = f"{split.compute}/{split.intra_comm}/{split.inter_send}"
        return (  # the first line stands for the plan in messages: it tells any two apart
            f"{OP}: up to {c.max_rows} rows a (rows, {self.problem.k}), w ({c.experts}, {self.problem.k}, {c.columns}) {layout} {c.dtype}, "
            f"combined for up to {c.max_tokens} tokens, top-{c.topk}, {weights}, {world} ranks, {sms} SMs"
            f"{remark(self.specialize, SPECIALIZED)}\n"
            f"tiles of up to {BLOCK_M}x{self.tile.block_n}, {self.tile.stages} stages; node sums sent {self.combining.chunk} at a time\n"
            f"SMs: compute {split.compute}, intra_comm {split.intra_comm} combine, inter_send {split.inter_send}; "
            f"workspace {self.workspace_bytes} bytes, of which {self.row_bytes} for products, {self.fetched_bytes} for those fetched early"
        )


def make_plan(
    problem: MoeGemmCombineProblem,
    rows: int,
    sm_count: int,
    split: Split | None = None,
    tile: GemmTile | None = None,
    specialize: str | None = None,
) -> MoeGemmCombinePlan:
    """The plan of a call on a device with ``sm_count`` SMs. Raises SplitError."""
    senders = min(2, max(1, sm_count // 16)) if problem.topology.num_nodes > 1 else 0
    default = Split(intra_comm=min(_COMBINERS, max(1, sm_count // 4)), inter_send=senders, inter_reduce=0)
    chosen = (split or Split()).complete(default, sm_count)
    return MoeGemmCombinePlan(problem, rows, chosen, tile or choose_tile(problem), moe_combine.SCALE, parse(specialize, SPECIALIZED))


def choose_tile(problem: MoeGemmCombineProblem) -> GemmTile:
    """Tiles as wide as the columns need."""
    return fitting_tile(problem)(256 if problem.n > 128 else 128)


def fitting_tile(problem: MoeGemmCombineProblem) -> Callable[[int], GemmTile]:
    """Tiles of a width, with as many stages as shared memory has room for beside the table of experts."""
    return functools.partial(fitting, bytes_beside=table_bytes(problem.combined.experts))


def table_bytes(experts: int) -> int:
    """Shared memory of a table that says where the rows and tiles of each expert begin."""
    return -(-(2 * experts + 3) * 4 // _TABLE_STEP) * _TABLE_STEP
