"""What the ranks agree on before they attend to a sequence together: the problem, once, and the sizes of each call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from mkernel.planner.attention_tile import AttentionTile
from mkernel.planner.derived import derived, hashed_once
from mkernel.planner.topology import Topology

__all__ = ["LAYOUTS", "MOST_RANKS", "RingAttentionProblem", "Scale", "Sizes"]

LAYOUTS = ("contiguous", "zigzag")
MOST_RANKS = 253  # kernels name a ring of them in 8 bits, beside what is no ring's (``kAllKeys`` in ops/ring_attention.cuh)
_KEYS_SHARED_BYTES = 1024, 2048  # where the keys of a tile are gone through, of up to 128 ranks and of more
_TABLES_SHARED_BYTES = 4096  # of packed sequences


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """How finely keys travel.

    Attributes
    ----------
    chunk_bytes
        What K and V of a chunk may have together.
    window_bytes
        What the rings of a rank may have together, as long as each has ``fewest`` slots.
    together_bytes
        What K and V may have together of the pairs whose items take turns, on a rank that is alone: they should stay in the L2 cache.
    shares
        CTAs that share the keys of a query tile, where the tiles are few enough for that; None: as many as pay.
    """

    chunk_bytes: int = 512 * 1024
    window_bytes: int = 64 << 20
    fewest: int = 2
    together_bytes: int = 16 << 20
    shares: int | None = None


class Sizes(NamedTuple):
    """What changes from call to call: B, and the rows of q, k and v that a rank holds, S / W.

    A plan counts both as one number, ``code``: ranks agree on it in every call, and it is 0 where there is nothing to do.
    """

    batches: int
    length: int

    @property
    def code(self) -> int:
        bits = self.length.bit_length()
        if not self.batches or not bits:
            return 0
        return ((self.batches << (bits - 1) | self.length - (1 << (bits - 1))) << 5) | bits

    @classmethod
    def of(cls, code: int) -> Sizes:
        """The sizes of a code."""
        bits, rest = code & 31, code >> 5
        if not bits:
            return cls(0, 0)
        return cls(rest >> (bits - 1), (1 << (bits - 1)) | rest & ((1 << (bits - 1)) - 1))


@hashed_once
@dataclasses.dataclass(frozen=True)
class RingAttentionProblem:
    """What the ranks agree on once. B and the rows of a rank are each call's (``Sizes``).

    Attributes
    ----------
    q_heads, kv_heads, head_dim
        Hq, Hkv and D.
    layout
        Which rows of a sequence a rank holds: one of ``LAYOUTS``.
    scale
        What scores are multiplied by.
    packed
        Whether sequences follow each other in the rows of a rank, of lengths that only the device knows; else they are a batch, all alike.
    canonical
        Whether keys are taken by position, whoever has them; else a rank's own first.
    """

    topology: Topology
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    causal: bool
    layout: str
    scale: float
    packed: bool = False
    canonical: bool = False

    @derived
    def parts(self) -> int:
        """Runs of consecutive positions that a rank holds."""
        return 2 if self.layout == "zigzag" else 1

    @derived
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @derived
    def tile(self) -> AttentionTile:
        keys = _KEYS_SHARED_BYTES[self.topology.size > 128]
        return AttentionTile.of(self.head_dim, self.causal, keys + (_TABLES_SHARED_BYTES if self.packed else 0))

    @property
    def order(self) -> str:
        """In which order keys are taken, for descriptions, if it is not the usual one."""
        return ", keys by position" if self.canonical else ""

    @derived
    def may_share(self) -> bool:
        """Whether several CTAs may share the keys of a tile: not where bits must not depend on how many tiles there are."""
        return not self.packed and not self.canonical

    @derived
    def rings(self) -> int:
        """Sources whose keys a rank streams."""
        return self.topology.size - 1

    def legs(self) -> Iterator[tuple[int, int]]:
        """All keys by position: parts, each with the rank that holds it."""
        for part in range(self.parts):
            for i in range(self.topology.size):
                yield part, self.topology.size - 1 - i if part else i

    def part_position(self, rank: int, part: int, part_rows: int) -> int:
        """Global position of the first row of a part that ``rank`` holds."""
        return (rank if part == 0 else 2 * self.topology.size - 1 - rank) * part_rows
