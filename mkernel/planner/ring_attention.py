"""Ring attention: problem and plan. Pure Python; the device side is ``kernels_src/ops/ring_attention.cuh``.

An *item* is a tile of query rows of one head; a *pair* is a batch and a KV head. A CTA takes the next item when it has time for it.
As many items as CTAs compute on a rank are a *wave*; the part of a wave that belongs to one pair is a *segment*.
In each segment every rank streams the pair's keys and values of all other ranks, chunk by chunk, through a *ring* of slots per source rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from mkernel.abi import COUNTED_WORDS
from mkernel.jit.spec import KernelSpec
from mkernel.planner.attention_bytes import most_received
from mkernel.planner.attention_shares import ATTENTION_FLOPS, MOST_SHARES, choose_shares
from mkernel.planner.derived import derived
from mkernel.planner.gemm import SHARED_LIMIT, digest_of
from mkernel.planner.ring_problem import RingAttentionProblem, Scale, Sizes
from mkernel.planner.split import Split, SplitError

__all__ = ["COUNT_BITS", "ITEM", "OP", "RingAttentionPlan", "Scale", "Segment", "make_plan", "scale_of_plans"]

OP = "ring_attention"
PARAMETER_BYTES = 1472  # sizeof(Parameters); ops/ring_attention.py mirrors the struct
ITEM = 2  # bytes of a value
COPY_ROWS = 128  # of a box that is copied: 64 columns, 16 KiB
SEND_SLOTS = 2  # of each inter_send CTA, where chunks wait for the network
COUNT_BITS = 24  # of a counted flag (docs/memory_model.md): the others are the epoch

_ALIGNMENT = 128  # of areas
_WORD = 8
_COPY_SHARED_BYTES = (8 * 16 + 4) * 1024  # of a CTA that moves data: pieces, what is known of chunks, and mailboxes
_COPY_RATE = 40e9  # bytes per second of one copying CTA (docs/planner.md)
_MOST_COPYING = 9  # CTAs: more of them push no faster


SCALE = Scale()  # of all plans; tests make it smaller


def scale_of_plans() -> Scale:
    return SCALE


class Segment(NamedTuple):
    """The items of one wave that belong to one pair: items ``first`` to ``end - 1``."""

    wave: int
    pair: int
    first: int
    end: int
    base: int  # number of its first chunk, in every ring


@dataclasses.dataclass(frozen=True)
class RingAttentionPlan:
    """CTAs, chunks and buffers of one call. ``rows``: the code of its ``Sizes``; ``wanted``: the split that was asked for."""

    problem: RingAttentionProblem
    rows: int
    sm_count: int
    wanted: Split
    scale: Scale

    op = OP
    packet_bytes = 0
    staging_bytes = 0

    def of_rows(self, rows: int) -> Self:
        """The plan of a call of other sizes. Raises SplitError."""
        if rows == self.rows:
            return self
        plan = object.__new__(type(self))
        vars(plan).update(self._alike, rows=rows)
        assert plan.grid <= plan.sm_count
        return plan

    @derived
    def _alike(self) -> dict[str, Any]:
        """What plans of other sizes have in common with this one."""
        return {name: getattr(self, name) for name in ("problem", "sm_count", "wanted", "scale", "spec", "_splits")}

    @derived
    def digest(self) -> int:
        return digest_of(self)

    @derived
    def sizes(self) -> Sizes:
        return Sizes.of(self.rows)

    # ---- work
    @derived
    def part_rows(self) -> int:
        """Rows of a part of this rank's, or any rank's, rows."""
        return self.sizes.length // self.problem.parts

    @derived
    def tiles_per_part(self) -> int:
        return math.ceil(self.part_rows / self.problem.tile.q_rows)

    @derived
    def tiles(self) -> int:
        """Tiles of one query head."""
        return self.problem.parts * self.tiles_per_part

    @derived
    def shares(self) -> int:
        """CTAs that share the keys of a tile: several only where all of them work at once, each on one item."""
        if not self.problem.may_share or not self.query_tiles:
            return 1
        keys = self.sizes.length * self.problem.topology.size
        return choose_shares(self.problem.tile, keys, self.query_tiles, self.ctas, self.scale.shares)

    @derived
    def query_tiles(self) -> int:
        """Tiles of all heads of all batches."""
        return self.pairs * self.tiles * self.problem.group

    @derived
    def items_per_pair(self) -> int:
        return self.tiles * self.problem.group * self.shares

    @derived
    def pairs(self) -> int:
        return self.sizes.batches * self.problem.kv_heads

    @derived
    def pairs_together(self) -> int:
        """Pairs whose items take turns, tile by tile: with one rank no keys are streamed, and the longest items had better come first."""
        if self.problem.rings or not self.problem.causal or not self.pairs:
            return 1
        most = max(1, self.scale.together_bytes // (2 * max(1, self.sizes.length) * self.problem.head_dim * ITEM))
        return math.ceil(self.pairs / math.ceil(self.pairs / most))

    @derived
    def items(self) -> int:
        return self.pairs * self.items_per_pair

    @derived
    def split(self) -> Split:
        """SMs per role: as few that copy as bring the keys of a wave in the time that it computes."""
        topology, sms, copying = self.problem.topology, self.sm_count, 0
        mates = topology.ranks_per_node - 1
        if mates:
            per_flow = max(1, min(_MOST_COPYING // mates, sms // (8 * mates), self._sms_left // mates))
            if self.query_tiles:
                pairs = min(self.pairs, 1 + (sms - 1) / (self.tiles * self.problem.group))  # whose keys a wave streams
                moved = self.problem.rings * ITEM * 2 * self.problem.head_dim * pairs
                computed = 4 * self.problem.tile.q_rows * self.problem.head_dim * topology.size / ATTENTION_FLOPS
                per_flow = max(1, min(per_flow, math.ceil(1.5 * moved / computed / _COPY_RATE / mates)))
            copying = per_flow * mates
        if copying not in self._splits:
            self._splits[copying] = self._completed(copying)
        return self._splits[copying]

    @property
    def _sms_left(self) -> int:
        """SMs that the wanted split has room for beside those that it names, and those that send: what fits one size fits all."""
        sending = self.problem.topology.num_nodes - 1 if self.wanted.inter_send is None else self.wanted.inter_send
        return self.sm_count - (self.wanted.compute or 1) - sending

    @derived
    def _splits(self) -> dict[int, Split]:
        """Splits by the SMs that copy by default."""
        return {}

    def _completed(self, copying: int) -> Split:
        topology = self.problem.topology
        mates, others = topology.ranks_per_node - 1, topology.num_nodes - 1
        split = self.wanted.complete(Split(intra_comm=copying, inter_send=others, inter_reduce=0), self.sm_count)
        for role, needed in (("intra_comm", mates), ("inter_send", others)):
            if (getattr(split, role) or 0) < needed:
                raise SplitError(self.wanted, f"{role} needs an SM for each rank that it writes to", f"give it at least {needed}")
        return split

    @derived
    def ctas(self) -> int:
        """CTAs that compute."""
        return self.split.compute or 0

    @derived
    def copying(self) -> tuple[int, int]:
        """CTAs that push to node mates, and that send to other nodes."""
        return self.split.intra_comm or 0, self.split.inter_send or 0

    @derived
    def grid(self) -> int:
        return self.split.total

    def tile_of(self, item: int) -> int:
        """The tile of an item, in its head: the last rows first, which see most keys."""
        return self.tiles - 1 - item % self.items_per_pair // (self.problem.group * self.shares)

    @derived
    def period(self) -> int:
        """Every so many waves end where a pair ends."""
        return self.items_per_pair // math.gcd(self.items_per_pair, self.ctas) if self.items else 1

    def base(self, wave: int, pair: int) -> int:
        """Number of the first chunk of a segment, in every ring."""
        return (pair + wave - wave // self.period) * self.chunks

    def segment(self, first: int) -> Segment:
        """The segment that begins with an item."""
        wave, pair = first // self.ctas, first // self.items_per_pair
        end = min((wave + 1) * self.ctas, (pair + 1) * self.items_per_pair, self.items)
        return Segment(wave, pair, first, end, self.base(wave, pair))

    def segments(self) -> Iterator[Segment]:
        first = 0
        while first < self.items:
            segment = self.segment(first)
            yield segment
            first = segment.end

    @derived
    def total(self) -> int:
        """Numbers of chunks in a ring: of all segments, also of chunks that no row sees."""
        if not self.items:
            return 0
        wave, pair = (self.items - 1) // self.ctas, self.pairs - 1
        return self.base(wave, pair) + self.chunks

    # ---- chunks
    @derived
    def chunk_blocks(self) -> int:
        """Key blocks of a chunk."""
        tile, blocks = self.problem.tile, self.blocks
        most = max(1, self.scale.chunk_bytes // (2 * tile.key_block * self.problem.head_dim * ITEM))
        while True:
            chunks = max(1, math.ceil(blocks / most))
            segments = 0 if not self.items else self.pairs + self.items // self.ctas + 1
            if segments * chunks * self.problem.parts < 1 << COUNT_BITS or most >= blocks:
                return max(1, math.ceil(blocks / chunks))
            most *= 2

    @derived
    def blocks(self) -> int:
        """Key blocks of a part."""
        return math.ceil(self.part_rows / self.problem.tile.key_block)

    @derived
    def chunk_rows(self) -> int:
        return self.chunk_blocks * self.problem.tile.key_block

    @derived
    def chunks_per_part(self) -> int:
        return math.ceil(self.part_rows / self.chunk_rows)

    @derived
    def chunks(self) -> int:
        """Chunks of one pair's keys of one rank."""
        return self.problem.parts * self.chunks_per_part

    @derived
    def plane_bytes(self) -> int:
        """K, or V, of a full chunk."""
        return self.chunk_rows * self.problem.head_dim * ITEM

    @property
    def put_bytes(self) -> int:
        """Bytes of a put: a full chunk."""
        return 2 * self.plane_bytes

    @derived
    def depth(self) -> int:
        """Slots of a ring."""
        rings = self.problem.rings
        if not rings or not self.items:
            return 0
        wanted = max(self.scale.fewest, self.scale.window_bytes // (rings * 2 * self.plane_bytes))
        return max(1, min(wanted, self.total, (COUNTED_WORDS - rings) // rings))

    @property
    def credit_step(self) -> int:
        """Chunks that are given back at once."""
        return max(1, self.depth // 4)

    def last_position(self, rank: int, tile: int) -> int:
        """Global position of the last row of a tile of ``rank``."""
        part, inside = divmod(tile, self.tiles_per_part)
        rows = min((inside + 1) * self.problem.tile.q_rows, self.part_rows)
        return self.problem.part_position(rank, part, self.part_rows) + rows - 1

    def visible(self, source: int, reader: int, tile: int) -> int:
        """Chunks of ``source``, its first ones, of which a tile of ``reader`` sees a key."""
        if not self.problem.causal:
            return self.chunks
        position = self.last_position(reader, tile)
        for part in reversed(range(self.problem.parts)):
            rows = position - self.problem.part_position(source, part, self.part_rows) + 1
            if rows > 0:
                return part * self.chunks_per_part + math.ceil(min(rows, self.part_rows) / self.chunk_rows)
        return 0

    def node_reader(self, node: int, tile: int) -> int:
        """The rank of a node whose tile of this number sees most keys."""
        ranks = self.problem.topology.node_ranks(node)
        return ranks[0] if tile >= self.tiles_per_part else ranks[-1]

    def chunks_of_part(self, item: int) -> int:
        """Chunks of a part of a rank's keys that an item sees."""
        return self.chunks_per_part

    def holds(self, rank: int, item: int) -> bool:
        """Whether an item has rows of ``rank``: always, where nothing is padded."""
        return True

    def reads(self, source: int, reader: int, item: int) -> int:
        """Chunks of ``source``, its first ones, that an item of ``reader`` reads."""
        return self.visible(source, reader, self.tile_of(item))

    def streamed(self, segment: Segment, source: int, reader: int) -> int:
        """Chunks of ``source`` that ``reader`` streams in a segment: those that its first item sees, which sees most."""
        return self.visible(source, reader, self.tile_of(segment.first))

    def sent(self, segment: Segment, source: int, node: int) -> int:
        """Chunks of ``source`` that are sent to another node in a segment: those that any rank there streams."""
        return self.streamed(segment, source, self.node_reader(node, self.tile_of(segment.first)))

    # ---- rings: of the node's other ranks from the next one on, then of the other nodes from the next one on, local rank 0 first. All
    # ranks of a node take those of other nodes in the same order: who forwards a chunk and who gets it must not wait for each other.
    def source_of(self, rank: int, ring: int) -> int:
        topology = self.problem.topology
        node, per_node = topology.node(rank), topology.ranks_per_node
        if ring < per_node - 1:
            return topology.rank(node, (topology.local_rank(rank) + 1 + ring) % per_node)
        distance, local = divmod(ring - (per_node - 1), per_node)
        return topology.rank((node + 1 + distance) % topology.num_nodes, local)

    def ring_of(self, rank: int, source: int) -> int:
        """The ring of ``rank`` in which the keys of ``source`` come."""
        topology = self.problem.topology
        per_node, nodes = topology.ranks_per_node, topology.num_nodes
        distance = (topology.node(source) - topology.node(rank)) % nodes
        if distance == 0:
            return (source - rank) % per_node - 1
        return per_node - 1 + (distance - 1) * per_node + topology.local_rank(source)

    def feeder_of(self, rank: int, ring: int) -> int:
        """Who writes to a ring of ``rank``: the source, or the node mate on its rail."""
        topology, source = self.problem.topology, self.source_of(rank, ring)
        if topology.node(source) == topology.node(rank) or topology.local_rank(source) == topology.local_rank(rank):
            return source
        return topology.rank(topology.node(rank), topology.local_rank(source))

    # ---- flags of this rank, by number: CTAs that have begun; counted ones: chunks in slots, credits; and words of the workspace: progress
    @derived
    def readers(self) -> int:
        """CTAs that read rings: those that compute, then those that forward."""
        return self.ctas + self.copying[0]

    @property
    def flag_words(self) -> int:
        """Flags of readers that have begun, then of shares that are left to be added up."""
        return self.readers * (2 if self.problem.may_share else 1)

    def slot_word(self, ring: int, slot: int) -> int:
        """Counted flag of a slot: the chunk that is in it."""
        return ring * self.depth + slot

    def credit_word(self, distance: int, mate: int) -> int:
        """Counted flag of what ``mate`` (distance in the node, from 1 on) has read of the ring that this rank feeds.

        ``distance``: of the node whose keys they are; 0: this rank's own. ``mate`` 0: what the rail peer at that distance has read.
        """
        per_node, nodes = self.problem.topology.ranks_per_node, self.problem.topology.num_nodes
        first = self.problem.rings * self.depth
        return first + (distance * (per_node - 1) + mate - 1 if mate else nodes * (per_node - 1) + distance - 1)

    @property
    def counted_words(self) -> int:
        return self.problem.rings * (self.depth + 1)

    def progress_word(self, ring: int, reader: int) -> int:
        return ring * self.readers + reader

    def flag_name(self, rank: int, index: int) -> str:
        """What a flag tells ``rank``, for reports."""
        topology, rings = self.problem.topology, self.problem.rings
        if index < self.flag_words:
            return f"reader {index} has begun" if index < self.readers else f"item {index - self.readers} has been computed"
        index -= self.flag_words
        if index < rings * self.depth:
            ring, slot = divmod(index, self.depth)
            return f"chunk of rank {self.source_of(rank, ring)} in slot {slot}"
        index -= rings * self.depth
        mates = topology.ranks_per_node - 1
        if index < topology.num_nodes * mates:
            distance, mate = divmod(index, mates)
            local = (topology.local_rank(rank) + 1 + mate) % topology.ranks_per_node
            node = (topology.node(rank) + distance) % topology.num_nodes
            reader, source = topology.rank(topology.node(rank), local), topology.rank(node, topology.local_rank(rank))
            return f"what rank {reader} has read of the chunks of rank {source}"
        index -= topology.num_nodes * mates
        if index < topology.num_nodes - 1:
            return f"what node {topology.node(topology.rail_peers(rank)[index])} has read of this rank's chunks"
        ring, reader = divmod(index - (topology.num_nodes - 1), self.readers)
        return f"what reader {reader} has read of the chunks of rank {self.source_of(rank, ring)}"

    # ---- areas of the workspace
    @derived
    def window_bytes(self) -> int:
        return self.problem.rings * self.depth * 2 * self.plane_bytes

    @derived
    def send_bytes(self) -> int:
        return self.copying[1] * SEND_SLOTS * 2 * self.plane_bytes if self.items else 0

    @property
    def planes(self) -> int:
        """Planes of the window and of what is to be sent, which follows it: K and V of each slot."""
        return (self.window_bytes + self.send_bytes) // self.plane_bytes if self.items else 0

    @derived
    def progress_offset(self) -> int:
        return -(-(self.window_bytes + self.send_bytes) // _ALIGNMENT) * _ALIGNMENT

    @property
    def progress_bytes(self) -> int:
        return self.problem.rings * self.readers * _WORD

    @derived
    def partial_offset(self) -> int:
        return -(-(self.progress_offset + self.progress_bytes) // _ALIGNMENT) * _ALIGNMENT

    @derived
    def partial_bytes(self) -> int:
        """Room for the sums of shares, the same for all sizes: smaller calls have more shares."""
        if not self.problem.may_share or not self.items:
            return 0
        return (self.sm_count - self.sm_count // (self.scale.shares or MOST_SHARES)) * self.problem.tile.partial_bytes

    @property
    def workspace_bytes(self) -> int:
        return self.partial_offset + self.partial_bytes

    @derived
    def spec(self) -> KernelSpec:
        problem, tile = self.problem, self.problem.tile
        constants = tile.constants() | {
            "kFloat16": int(problem.dtype == "float16"),
            "kCausal": int(problem.causal),
            "kParts": problem.parts,
            "kPacked": int(problem.packed),
            "kCanonical": int(problem.canonical and problem.rings > 0),
            "kShares": int(problem.may_share),
            "kNumNodes": problem.topology.num_nodes,
            "kRanksPerNode": problem.topology.ranks_per_node,
        }
        shared = max(tile.shared_bytes, _COPY_SHARED_BYTES) + tile.beside  # a CTA does one or the other
        assert shared <= SHARED_LIMIT
        return KernelSpec(OP, tuple(constants.items()), tile.threads, shared, PARAMETER_BYTES)

    # ---- for people
    def title(self, sizes: str) -> str:
        """The first line of ``describe``, which stands for the plan in messages: it tells any two apart. ``sizes``: of the call."""
        p, (pushing, sending) = self.problem, self.copying
        world = f"{p.topology.num_nodes}x{p.topology.ranks_per_node}"
        return (
            f"{self.op}: {sizes} rows per rank, {p.q_heads} heads, {p.kv_heads} KV heads, D {p.head_dim} {p.dtype}, "
            f"{'causal' if p.causal else 'full'}, {p.layout}{p.order}, scale {p.scale:g}, {world} ranks, "
            f"{self.ctas}/{pushing}/{sending} SMs"
        )

    def describe(self) -> str:
        sizes, (pushing, sending) = self.sizes, self.copying
        waves = math.ceil(self.items / self.ctas)
        near, far = most_received(self)
        return (
            f"{self.title(f'B {sizes.batches}, {sizes.length}')}\n"
            f"tiles of {self.problem.tile.q_rows} query rows{f', keys shared by {self.shares} CTAs' if self.shares > 1 else ''}, "
            f"{self.items} items in {waves} waves; chunks of {self.chunk_rows} keys, "
            f"{self.total} per source, {self.depth} slots\n"
            f"SMs: compute {self.ctas}, intra_comm {pushing} push, inter_send {sending}; received at most {near} bytes inside the node, "
            f"{far} from other nodes; workspace {self.workspace_bytes} bytes, of which {self.window_bytes} are for keys of other ranks"
        )


def make_plan(
    problem: RingAttentionProblem, rows: int, sm_count: int, split: Split | None = None, scale: Scale | None = None
) -> RingAttentionPlan:
    """The plan of a call on a device with ``sm_count`` SMs; ``rows``: ``Sizes.code``. Raises SplitError."""
    plan = RingAttentionPlan(problem, rows, sm_count, split or Split(), scale or scale_of_plans())
    assert plan.split.total <= sm_count
    return plan
