"""Plans of ``allgather_rows``: what the ranks agree on, and what one call does."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from mkernel.errors import CallError, CallReport
from mkernel.jit.spec import KernelSpec
from mkernel.planner.gemm import digest_of
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology

__all__ = [
    "COUNT_BYTES",
    "ITEM",
    "OP_NAME",
    "PARAMETER_BYTES",
    "WARPS",
    "AllGatherRowsPlan",
    "AllGatherRowsProblem",
    "RowsError",
    "make_plan",
]

OP_NAME = "allgather_rows"
PARAMETER_BYTES = 192
CHUNK_BYTES = 512 * 1024  # of one put
ITEM = 2  # bytes of a value
COUNT_BYTES = 16
WARPS = 8  # of a CTA, each of which moves chunks of its own
FOLDER = Path(__file__).resolve().parent  # where the kernel's header is
_MOVERS = 8  # CTAs that saturate NVLink by ordinary copies


class RowsError(CallError):
    """The ranks together passed more rows than ``max_rows``; nothing was moved.

    Attributes
    ----------
    rows, max_rows
        How many there are, and how many there is room for.
    largest
        A rank that has most of them, and how many.
    """

    def __init__(self, message: str, report: CallReport) -> None:
        self.rows, self.max_rows, packed = report.details
        self.largest = packed >> 32, packed & 0xFFFFFFFF
        super().__init__(message, report)


@dataclasses.dataclass(frozen=True)
class AllGatherRowsProblem:
    """Rows of so many columns. Neither a rank's number of rows nor ``max_rows`` is part of it."""

    topology: Topology
    columns: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class AllGatherRowsPlan:
    """A call with room for ``max_rows`` rows."""

    problem: AllGatherRowsProblem
    max_rows: int
    split: Split
    chunk_rows: int

    op = OP_NAME
    packet_bytes = staging_bytes = 0

    @property
    def row_bytes(self) -> int:
        return self.problem.columns * ITEM

    @property
    def digest(self) -> int:
        return digest_of(self)

    @property
    def roles(self) -> tuple[int, int]:
        """CTAs that move rows inside the node, and that send them to other nodes."""
        return self.split.intra_comm or 0, self.split.inter_send or 0

    @property
    def grid(self) -> int:
        return sum(self.roles)

    @property
    def spec(self) -> KernelSpec:
        topology, (movers, senders) = self.problem.topology, self.roles
        constants = {
            "kIntraComm": movers,
            "kInterSend": senders,
            "kNumNodes": topology.num_nodes,
            "kRanksPerNode": topology.ranks_per_node,
        }
        shared = WARPS * (topology.size + 1) * 4
        return KernelSpec(OP_NAME, tuple(constants.items()), WARPS * 32, shared, PARAMETER_BYTES, FOLDER)

    @property
    def rows_offset(self) -> int:
        """Bytes from the start of the workspace to the rows; before them lie the counts."""
        return -(-self.problem.topology.size * COUNT_BYTES // 128) * 128

    @property
    def workspace_bytes(self) -> int:
        return self.rows_offset + self.max_rows * self.row_bytes

    @property
    def max_chunks(self) -> int:
        return math.ceil(self.max_rows / self.chunk_rows)

    @property
    def flag_words(self) -> int:
        return self.problem.topology.size * (1 + self.max_chunks)

    def of_rows(self, rows: int) -> AllGatherRowsPlan:
        """The same choices with room for another number of rows."""
        return dataclasses.replace(self, max_rows=rows)

    def flag_name(self, rank: int, index: int) -> str:
        size = self.problem.topology.size
        if index < size:
            return f"how many rows rank {index} has"
        source, chunk = divmod(index - size, self.max_chunks)
        return f"chunk {chunk} of the rows of rank {source}"

    def describe(self) -> str:
        problem, (movers, senders) = self.problem, self.roles
        return (
            f"{OP_NAME}: up to {self.max_rows} rows of {problem.columns} {problem.dtype} on {problem.topology.size} ranks\n"
            f"chunks of {self.chunk_rows} rows, {movers} CTAs move them, {senders} send them to other nodes"
        )

    def call_error(self, report: CallReport) -> RowsError:
        rows, room, packed = report.details
        most = f"rank {packed >> 32} has most, {packed & 0xFFFFFFFF}"
        return RowsError(f"allgather_rows, call {report.call}: the ranks have {rows} rows ({most}), but max_rows is {room}", report)


def make_plan(problem: AllGatherRowsProblem, rows: int, sm_count: int, split: Split | None = None, **_: object) -> AllGatherRowsPlan:
    """The plan of calls with room for ``rows`` rows. Raises SplitError."""
    senders = 1 if problem.topology.num_nodes > 1 else 0
    default = Split(intra_comm=max(1, min(_MOVERS, sm_count - senders - 1)), inter_send=senders, inter_reduce=0)
    chosen = (split or Split()).complete(default, sm_count)
    return AllGatherRowsPlan(problem, rows, chosen, max(1, CHUNK_BYTES // (problem.columns * ITEM)))
