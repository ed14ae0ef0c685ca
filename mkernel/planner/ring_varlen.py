"""Ring attention over packed sequences: plan, errors, and how the device deals their work (``kernels_src/attention/sequences.cuh``).

A plan knows how many rows a rank has, not how they are divided: chunks and rings are those of the next larger power of two, and the device
works out items and chunk numbers from ``cu_seqlens``. ``Packing`` does the same in Python, for proofs and tests.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mkernel.errors import CallError, CallReport
from mkernel.planner.derived import derived
from mkernel.planner.ring_attention import COUNT_BITS, ITEM, RingAttentionPlan, Scale, Segment, scale_of_plans
from mkernel.planner.ring_problem import RingAttentionProblem, Sizes
from mkernel.planner.split import Split

__all__ = ["OP", "Packing", "RingAttentionVarlenPlan", "SequenceError", "make_plan"]

OP = "ring_attention_varlen"
_USUAL = 1 << 14  # sequences of a call, for which the numbers of chunks suffice

_BAD_START, _DECREASING, _TOO_MANY_ROWS, _TOO_MANY_CHUNKS = 1, 2, 3, 4  # SequenceFault of kernels_src/attention/sequences.cuh


class SequenceError(CallError):
    """The ``cu_seqlens`` of a call is wrong; nothing was moved. Raised on every rank, and the world stays usable.

    Attributes
    ----------
    sequence
        The first one whose end is before its beginning; 0 where the first one does not begin at 0; None where all do not fit.
    value
        Where it begins and, if that is before, where it ends; how many rows of a rank all need; or how many sequences there are.
    remedy
        What to do; part of the message.

    Examples
    --------
    >>> import numpy as np, mkernel as mk
    >>> def rank(world):
    ...     x = np.zeros((4, 1, 64), np.float16)
    ...     try:
    ...         mk.ring_attention_varlen(x, x, x, np.array([0, 5, 3], np.int32))
    ...     except mk.SequenceError as error:
    ...         return error.sequence, error.value
    >>> mk.launch(rank, ranks=2, target="cpu")
    [(1, (5, 3)), (1, (5, 3))]
    """

    def __init__(self, message: str, report: CallReport, remedy: str, sequence: int | None, value: tuple[int, ...]) -> None:
        super().__init__(f"{message} ({remedy})", report)
        self.sequence, self.value, self.remedy = sequence, value, remedy


def sequence_error(report: CallReport) -> SequenceError:
    """The exception for what the kernel reports."""
    first, second, third = (value - (value >> 31 << 32) if value < 1 << 32 else value for value in report.details)
    where = f"{report.op}, call {report.call}: cu_seqlens"
    if report.code == _BAD_START:
        return SequenceError(f"{where} begins with {second}", report, "it must begin with 0", 0, (second,))
    if report.code == _DECREASING:
        message = f"{where} decreases from {second} to {third} at sequence {first}"
        return SequenceError(message, report, "each number is where a sequence begins, and the one before it ends", first, (second, third))
    if report.code == _TOO_MANY_ROWS:
        message = f"{where}: the sequences need {second} rows of each rank, q has {third}"
        return SequenceError(message, report, "give q, k and v so many rows on every rank; lengths are those on all ranks", None, (second,))
    message = f"{where}: {second} sequences have too many chunks of keys"
    return SequenceError(message, report, "make several calls, of fewer sequences each", None, (second,))


class RingAttentionVarlenPlan(RingAttentionPlan):
    """As of one sequence that has all rows. ``rows``: of a rank's q, k and v."""

    op = OP
    agreed_data = "cu_seqlens"

    @derived
    def sizes(self) -> Sizes:
        return Sizes(1, 1 << (self.rows - 1).bit_length() if self.rows else 0)

    def _most_numbers(self, blocks: int) -> int:
        """An upper bound of the numbers of chunks in a ring, with chunks of so many key blocks, of any usual sequences."""
        problem, rows = self.problem, self.sizes.length
        parts, chunk_rows = problem.parts, blocks * problem.tile.key_block
        # A sequence of r rows has at most r / chunk_rows + parts chunks, kv_heads pairs, and begins in at most 1 + items / ctas waves,
        # of at most q_heads * (r / q_rows + parts) items. The sum of r**2 is at most rows**2.
        often = problem.kv_heads + 1 + problem.q_heads * parts / self.ctas
        more = problem.q_heads / (problem.tile.q_rows * self.ctas)
        return math.ceil((often + more * rows) * rows / chunk_rows + often * parts * min(rows, _USUAL) + more * rows * parts)

    @derived
    def chunk_blocks(self) -> int:
        most = max(1, self.scale.chunk_bytes // (2 * self.problem.tile.key_block * self.problem.head_dim * ITEM))
        while most < self.blocks and self._most_numbers(most) >= 1 << COUNT_BITS:
            most *= 2
        return max(1, math.ceil(self.blocks / max(1, math.ceil(self.blocks / most))))

    @derived
    def total(self) -> int:
        """Numbers of chunks in a ring, at most."""
        return self._most_numbers(self.chunk_blocks) if self.items else 0

    def call_error(self, report: CallReport) -> SequenceError:
        """The exception for a report of this plan's kernel."""
        return sequence_error(report)

    def describe(self) -> str:
        pushing, sending = self.copying
        return (
            f"{self.title(str(self.rows))}\n"
            f"tiles of {self.problem.tile.q_rows} query rows; chunks of at most {self.chunk_rows} keys, {self.depth} slots per source\n"
            f"SMs: compute {self.ctas}, intra_comm {pushing} push, inter_send {sending}; workspace {self.workspace_bytes} bytes, "
            f"of which {self.window_bytes} are for keys of other ranks"
        )


def make_plan(
    problem: RingAttentionProblem, rows: int, sm_count: int, split: Split | None = None, scale: Scale | None = None
) -> RingAttentionVarlenPlan:
    """The plan of a call of ``rows`` rows on each rank. Raises SplitError."""
    plan = RingAttentionVarlenPlan(problem, rows, sm_count, split or Split(), scale or scale_of_plans())
    assert plan.split.total <= sm_count
    return plan


class PackedSequence(NamedTuple):
    """``Sequence`` of ``kernels_src/attention/sequences.cuh``."""

    length: int
    part_rows: int
    tiles_per_part: int
    chunks_per_part: int
    items_per_pair: int
    first_item: int
    first_chunk: int
    first_row: int


@dataclasses.dataclass(frozen=True)
class Packing:
    """The work of a call of ``plan`` whose ``cu_seqlens`` is ``ends``: what a plan of a batch says of itself."""

    plan: RingAttentionVarlenPlan
    ends: Sequence[int]

    @functools.cached_property
    def sequences(self) -> list[PackedSequence]:
        plan, problem = self.plan, self.plan.problem
        found, item, chunk, row = [], 0, 0, 0
        for begin, end in itertools.pairwise(self.ends):
            part_rows = math.ceil((end - begin) / (problem.parts * problem.topology.size))
            tiles, chunks = math.ceil(part_rows / problem.tile.q_rows), math.ceil(part_rows / plan.chunk_rows)
            per_pair = problem.parts * tiles * problem.group
            found.append(PackedSequence(end - begin, part_rows, tiles, chunks, per_pair, item, chunk, row))
            items = per_pair * problem.kv_heads
            if items:
                waves = (item + items - 1) // plan.ctas - item // plan.ctas
                chunk += (problem.kv_heads + waves) * problem.parts * chunks
            item, row = item + items, row + problem.parts * part_rows
        found.append(PackedSequence(0, 0, 0, 0, 0, item, chunk, row))  # what is after all
        return found

    @property
    def items(self) -> int:
        return self.sequences[-1].first_item

    @property
    def total(self) -> int:
        return self.sequences[-1].first_chunk

    @property
    def rows(self) -> int:
        """Rows of a rank that are some sequence's."""
        return self.sequences[-1].first_row

    def sequence(self, item: int) -> PackedSequence:
        return next(s for s, after in itertools.pairwise(self.sequences) if s.first_item <= item < after.first_item)

    def tile_of(self, item: int) -> int:
        s = self.sequence(item)
        return self.plan.problem.parts * s.tiles_per_part - 1 - (item - s.first_item) % s.items_per_pair // self.plan.problem.group

    def segment(self, first: int) -> Segment:
        s, ctas = self.sequence(first), self.plan.ctas
        wave, pair = first // ctas, (first - s.first_item) // s.items_per_pair
        base = s.first_chunk + (pair + wave - s.first_item // ctas) * self.plan.problem.parts * s.chunks_per_part
        return Segment(wave, pair, first, min((wave + 1) * ctas, s.first_item + (pair + 1) * s.items_per_pair), base)

    def segments(self) -> Iterator[Segment]:
        first = 0
        while first < self.items:
            segment = self.segment(first)
            yield segment
            first = segment.end

    def tile_rows(self, rank: int, item: int) -> tuple[int, int, int]:
        """Part and first row in it of an item's tile, and its rows of ``rank`` that are not padding."""
        s, problem = self.sequence(item), self.plan.problem
        part, inside = divmod(self.tile_of(item), s.tiles_per_part)
        row = inside * problem.tile.q_rows
        end = min(s.part_rows, s.length - problem.part_position(rank, part, s.part_rows))
        return part, row, max(0, min(end - row, problem.tile.q_rows))

    def chunks_of_part(self, item: int) -> int:
        """Chunks of a part of a rank's keys that an item sees."""
        return self.sequence(item).chunks_per_part

    def holds(self, rank: int, item: int) -> bool:
        """Whether an item has rows of ``rank`` that are not padding."""
        return self.tile_rows(rank, item)[2] > 0

    def reads(self, source: int, reader: int, item: int) -> int:
        """Chunks of ``source``, its first ones, that an item of ``reader`` reads: none where all of its rows are padding."""
        s, problem = self.sequence(item), self.plan.problem
        part, row, rows = self.tile_rows(reader, item)
        if not rows:
            return 0
        last = problem.part_position(reader, part, s.part_rows) + row + rows - 1 if problem.causal else s.length - 1
        for part in reversed(range(problem.parts)):
            rows = last - problem.part_position(source, part, s.part_rows) + 1
            if rows > 0:
                return part * s.chunks_per_part + math.ceil(min(rows, s.part_rows) / self.plan.chunk_rows)
        return 0

    def streamed(self, segment: Segment, source: int, reader: int) -> int:
        """Chunks of ``source`` that come to ``reader`` in a segment: those that one of its items reads."""
        return max(self.reads(source, reader, item) for item in range(segment.first, segment.end))

    def sent(self, segment: Segment, source: int, node: int) -> int:
        """Chunks of ``source`` that are sent to another node in a segment."""
        return max(self.streamed(segment, source, reader) for reader in self.plan.problem.topology.node_ranks(node))
