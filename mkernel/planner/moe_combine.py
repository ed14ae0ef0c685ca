"""Combining the rows of experts: problem and plan. Pure Python; the device side is ``kernels_src/ops/moe_combine.cuh``.

``CombineLayout`` is what every kernel that combines has in common (``kernels_src/moe/combine.cuh``).
"""

from __future__ import annotations

import dataclasses
import functools
import math

from mkernel.jit.spec import KernelSpec
from mkernel.planner.derived import derived
from mkernel.planner.gemm import digest_of
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology

__all__ = ["ITEM", "OP", "TOLD_BYTES", "WARPS", "CombineLayout", "MoeCombinePlan", "MoeCombineProblem", "Scale", "make_plan"]

OP = "moe_combine"
PARAMETER_BYTES = 384  # sizeof(Parameters); ops/moe_combine.py mirrors the struct
ITEM = 2  # bytes of a value
WARPS = 12  # of a CTA: as many as a CTA that multiplies has
TOLD_BYTES = 16  # what a rank tells each of its node: where its rows are
_WEIGHT_BYTES = 4
_ALIGNMENT = 128  # of areas
_MOST_FLAGS = 8192  # of one kind, on a rank: of the 2^19 that there are


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """How finely work is divided.

    Attributes
    ----------
    put_bytes
        What a put of node sums should reach.
    copy_bytes
        What a CTA copies before it raises a flag: about as much as it has under way at once.
    window_rows
        Rows that a rank's tokens may have altogether, from which they are fetched before all experts are done.
    """

    put_bytes: int = 512 * 1024
    copy_bytes: int = 64 * 1024
    window_rows: int = 8192


SCALE = Scale()  # of all plans; tests make it smaller


@dataclasses.dataclass(frozen=True, slots=True)
class MoeCombineProblem:
    """What the ranks agree on once. How many tokens a rank has is not part of it.

    Attributes
    ----------
    columns
        H, of a row.
    topk
        Choices of a token.
    experts
        Of each rank.
    max_tokens, max_rows
        Bounds of the routing: tokens of any rank, and rows of the experts of any rank.
    weighted
        Whether rows are weighted.
    canonical
        Whether every node's rows of a token are added up and rounded first, also those of the token's own node.
    """

    topology: Topology
    columns: int
    dtype: str
    topk: int
    experts: int
    max_tokens: int
    max_rows: int
    weighted: bool
    canonical: bool = False

    @property
    def row_bytes(self) -> int:
        return self.columns * ITEM

    @property
    def constants(self) -> dict[str, int]:
        """What a kernel that combines is compiled for."""
        return {
            "kTopK": self.topk,
            "kWeighted": int(self.weighted),
            "kCanonical": int(self.canonical),
            "kFloat16": int(self.dtype == "float16"),
            "kNumNodes": self.topology.num_nodes,
            "kRanksPerNode": self.topology.ranks_per_node,
        }


@dataclasses.dataclass(frozen=True)
class CombineLayout:
    """Where node sums and weights are, and which flags tell of them: ``Combining`` in the kernel.

    Attributes
    ----------
    offset, first_flag
        Where the areas begin in the workspace, and the flags among the op's.
    group
        Node sums that a warp makes before it raises a flag.
    chunk
        Node sums of one put.
    """

    problem: MoeCombineProblem
    offset: int
    first_flag: int
    group: int
    chunk: int

    @classmethod
    def of(cls, problem: MoeCombineProblem, offset: int, first_flag: int, scale: Scale) -> CombineLayout:
        """The layout of a problem, behind so many bytes and flags of the op's own."""
        others = problem.topology.num_nodes - 1
        group = _power_of_two(-(-problem.max_tokens * others // _MOST_FLAGS))
        chunk = max(group, min(_power_of_two(-(-scale.put_bytes // problem.row_bytes)), _power_of_two(problem.max_tokens)))
        return cls(problem, aligned(offset), first_flag, group, chunk)

    @property
    def other_nodes(self) -> int:
        return self.problem.topology.num_nodes - 1

    @property
    def groups(self) -> int:
        """Groups of the tokens of one rank, at most: each has a flag."""
        return math.ceil(self.problem.max_tokens / self.group)

    @property
    def chunks(self) -> int:
        """Chunks of the tokens of one rank, at most: each is a put."""
        return math.ceil(self.problem.max_tokens / self.chunk)

    # ---- areas, in the order in which they follow each other
    @property
    def sum_bytes(self) -> int:
        """Node sums of this node's rows, and as many of the other nodes'."""
        return self.other_nodes * self.problem.max_tokens * self.problem.row_bytes

    @property
    def weight_bytes(self) -> int:
        """Weights of the rail peers' tokens."""
        return self.other_nodes * self.own_weight_bytes

    @property
    def own_weight_bytes(self) -> int:
        """Weights of this rank's tokens, where other nodes need them."""
        problem = self.problem
        return problem.max_tokens * problem.topk * _WEIGHT_BYTES if problem.weighted and self.other_nodes else 0

    @derived
    def offsets(self) -> dict[str, int]:
        """Where each area begins in the workspace."""
        sums = self.offset
        arrived = aligned(sums + self.sum_bytes)
        return {"sum": sums, "arrived": arrived, "weights": aligned(arrived + self.sum_bytes)}

    @property
    def end(self) -> int:
        """The workspace up to the end of these areas."""
        return self.offsets["weights"] + self.weight_bytes if self.other_nodes else self.offset

    # ---- flags; `distance`: of the other node, from 1 on
    @property
    def flags(self) -> int:
        return self.other_nodes * (self.groups + self.chunks + 1)

    def sum_flag(self, distance: int, place: int) -> int:
        """Flag of the sum for the token at ``place`` in the list of the node at ``distance``."""
        return self.first_flag + (distance - 1) * self.groups + place // self.group

    def arrived_flag(self, distance: int, place: int) -> int:
        return self.first_flag + self.other_nodes * self.groups + (distance - 1) * self.chunks + place // self.chunk

    def weights_flag(self, distance: int) -> int:
        return self.first_flag + self.other_nodes * (self.groups + self.chunks) + distance - 1

    def flag_name(self, rank: int, index: int) -> str:
        """What flag ``index``, one of these, tells ``rank``."""
        topology, number = self.problem.topology, index - self.first_flag
        sums = self.other_nodes * self.groups
        if number < sums:
            distance, group = divmod(number, self.groups)
            tokens = f"{group * self.group} to {(group + 1) * self.group - 1}"
            return f"sums of tokens {tokens} in the list of rank {topology.rail_peers(rank)[distance]}"
        if number < sums + self.other_nodes * self.chunks:
            distance, chunk = divmod(number - sums, self.chunks)
            return f"chunk {chunk} of the sums of node {topology.node(topology.rail_peers(rank)[distance])}"
        return f"weights of rank {topology.rail_peers(rank)[number - sums - self.other_nodes * self.chunks]}"


@dataclasses.dataclass(frozen=True)
class MoeCombinePlan:
    """CTAs, chunks and buffers of a call. ``rows`` is always 0: how many tokens there are is each rank's own."""

    problem: MoeCombineProblem
    rows: int
    split: Split
    scale: Scale

    op = OP
    packet_bytes = 0

    def of_rows(self, rows: int) -> MoeCombinePlan:
        """The plan itself, but for what it says of rows."""
        return self if rows == self.rows else dataclasses.replace(self, rows=rows)

    @functools.cached_property
    def digest(self) -> int:
        return digest_of(self)

    @property
    def roles(self) -> tuple[int, int]:
        """CTAs that combine, and that send to other nodes. None computes."""
        return self.split.intra_comm or 0, self.split.inter_send or 0

    @property
    def grid(self) -> int:
        return sum(self.roles)

    @functools.cached_property
    def spec(self) -> KernelSpec:
        shared = 128 + 16 * self.problem.topology.ranks_per_node
        constants = tuple((self.problem.constants | {"kWarps": WARPS}).items())
        return KernelSpec(OP, constants, 32 * WARPS, shared, PARAMETER_BYTES)

    # ---- rows that are staged for the node: told by each rank where, then copies
    @property
    def node_mates(self) -> int:
        return self.problem.topology.ranks_per_node - 1

    @property
    def staged_offset(self) -> int:
        return aligned(TOLD_BYTES * (self.node_mates + 1)) if self.node_mates else 0

    @property
    def staged_bytes(self) -> int:
        return self.problem.max_rows * self.problem.row_bytes if self.node_mates else 0

    @property
    def row_chunk(self) -> int:
        """Rows of a chunk of the copies."""
        problem = self.problem
        wanted = max(1, self.scale.copy_bytes // problem.row_bytes)
        return max(1 << (wanted.bit_length() - 1), _power_of_two(-(-problem.max_rows * (self.node_mates + 1) // _MOST_FLAGS)))

    @property
    def row_chunks(self) -> int:
        return math.ceil(self.problem.max_rows / self.row_chunk)

    def row_flag(self, holder: int, chunk: int) -> int:
        """Flag of a chunk of the rows of local rank ``holder``."""
        return self.node_mates + 1 + holder * self.row_chunks + chunk

    def done_flag(self, reader: int, cta: int) -> int:
        """Flag of a CTA of local rank ``reader`` that has read all that it reads."""
        return self.row_flag(self.node_mates + 1, 0) + reader * self.roles[0] + cta

    @functools.cached_property
    def combining(self) -> CombineLayout:
        return CombineLayout.of(self.problem, self.staged_offset + self.staged_bytes, self.done_flag(self.node_mates + 1, 0), self.scale)

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

    @property
    def flag_words(self) -> int:
        return self.combining.first_flag + self.combining.flags

    def flag_name(self, rank: int, index: int) -> str:
        """What a flag tells ``rank``, for reports."""
        topology = self.problem.topology
        mates = topology.node_ranks(topology.node(rank))
        if index < len(mates):
            return f"where the rows of rank {mates[index]} are"
        if index < self.done_flag(0, 0):
            holder, chunk = divmod(index - len(mates), self.row_chunks)
            begin = chunk * self.row_chunk
            return f"rows {begin} to {min(begin + self.row_chunk, self.problem.max_rows) - 1} of rank {mates[holder]}"
        if index < self.combining.first_flag:
            reader, cta = divmod(index - self.done_flag(0, 0), self.roles[0])
            return f"CTA {cta} of rank {mates[reader]} has read what it reads"
        return self.combining.flag_name(rank, index)

    def describe(self) -> str:
        p, (combining, sending) = self.problem, self.roles
        world = f"{p.topology.num_nodes}x{p.topology.ranks_per_node}"
        weights = "weighted" if p.weighted else "not weighted"
        return (  # the first line stands for the plan in messages: it tells any two apart
            f"{OP}: up to {p.max_tokens} tokens of {p.columns} {p.dtype}, top-{p.topk}, {weights}, of up to {p.max_rows} rows of "
            f"{p.experts} experts per rank, {world} ranks, {combining}/{sending} SMs\n"
            f"rows staged {self.row_chunk} at a time, node sums sent {self.combining.chunk} at a time\n"
            f"SMs: intra_comm {combining} combine, inter_send {sending}; "
            f"workspace {self.workspace_bytes} bytes, of which {self.staged_bytes} for copies of rows that are not on the heap"
        )


def make_plan(
    problem: MoeCombineProblem, rows: int, sm_count: int, split: Split | None = None, scale: Scale | None = None
) -> MoeCombinePlan:
    """The plan of a call on a device with ``sm_count`` SMs. Raises SplitError."""
    senders = min(2, max(1, sm_count // 16)) if problem.topology.num_nodes > 1 else 0
    default = Split(intra_comm=max(1, sm_count - senders - 1), inter_send=senders, inter_reduce=0)
    return MoeCombinePlan(problem, rows, (split or Split()).complete(default, sm_count), scale or SCALE)


def aligned(offset: int) -> int:
    """The next place where an area may begin."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _power_of_two(value: int) -> int:
    """The smallest that is at least ``value``."""
    return 1 << max(0, value - 1).bit_length()
