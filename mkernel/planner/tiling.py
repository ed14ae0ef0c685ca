"""What the tiles of a GEMM cover, where a caller asks for it: to measure one choice of the planner against another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mkernel.planner.derived import hashed_once

__all__ = ["CLUSTER_K", "Tiling", "TilingError"]

CLUSTER_K = 2, 3, 4, 8  # CTAs of a cluster that may share K: of other numbers an H200 has room for fewer in all

_RADIX = 258  # more than any field can be, and one: so the digits of all fields have 24 bits
_FACTOR, _PACKETS_FACTOR, _CLUSTER_K_FACTOR, _AT_ONCE_FACTOR, _BLOCK_M_FACTOR = 0x5BD1E9, 0x3D4D51, 0x2C1B3D, 0x1A57D3, 0x4F6CDB  # odd


class TilingError(ValueError):
    """A tiling that an op cannot have in its world."""


@hashed_once
@dataclasses.dataclass(frozen=True)
class Tiling:
    """Fields that are None are the planner's choice.

    Attributes
    ----------
    block_n
        Columns of a tile: 64, 128, 192 or 256; of ``allgather_gemm`` in a world of one, of all K and operands that are not swapped, any
        multiple of 16 between 80 and 256, with ``cluster`` 4 of 32.
    span
        How many ranks' shards are one plane of tiles (1: no tile reaches over the end of a shard). Of ``gemm_reduce_scatter`` 1, or all
        ranks: its values then travel in packets.
    shares
        CTAs that share K of a tile.
    cluster
        CTAs that load columns of B together, for neighbours in M. 1, 2 or 4. A reduction without packets has 4, and neighbours in N, only
        in a world of one, and a reduce-scatter inside a node.
    packets
        1, what travels inside a node does so in packets, as far as there is room for them; 0, in chunks, or of reductions in tiles. Of
        ``allgather_gemm`` 2: in tagged ones.
    cluster_n
        CTAs that load rows of A together, for neighbours in N. 1, 2 or 4; times ``cluster`` at most 4.
    tile_rows
        Operands are swapped: tiles have 128 columns, or of ``allgather_gemm`` as many as ``block_n`` says, and are as high as so many rows
        of them need to be, at most 256 rows, or 192 and 160 with 192 and 256 columns; of reductions, in packets, 192.
    cluster_k
        CTAs of a cluster that share K of a tile, 1, 2, 3, 4 or 8: of ``allgather_gemm`` in a world of one. Then ``shares`` is the same.
    tiles_at_once
        2, with swapped operands: the consumer warpgroups have tiles in turn, each all of its own, with 128 columns and at most 160 rows. Of
        ``allgather_gemm`` in a world of one. Else 1.
    block_m
        Operands are swapped as with ``tile_rows``, and tiles have so many rows: 16, 32, 48, or a multiple of 8 from 64 on, of 16 in
        reductions, with 192 and 256 columns, and in turn, and of 8 ``cluster_n``. The kernel has no other height.
    """

    block_n: int | None = None
    span: int | None = None
    shares: int | None = None
    cluster: int | None = None
    packets: int | None = None
    cluster_n: int | None = None
    tile_rows: int | None = None
    cluster_k: int | None = None
    tiles_at_once: int | None = None
    block_m: int | None = None

    @classmethod
    def parse(cls, wanted: Mapping[str, int]) -> Tiling:
        """The fields of a mapping.

        Raises
        ------
        ValueError
            There is no such field, or it cannot have the value in any op or world.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        for name, value in wanted.items():
            if name not in names:
                raise ValueError(f"{name!r}: must be one of {', '.join(names)}")
            if isinstance(value, bool) or not isinstance(value, int) or not (name != "packets") <= value < _RADIX - 1:
                raise ValueError(f"{name} {value!r}: must be a positive number below {_RADIX - 1}")
        found = cls(**wanted)
        if found.block_n is not None and (found.block_n % 16 or not 64 <= found.block_n <= 256):
            raise ValueError(f"block_n {found.block_n}: must be a multiple of 16 from 64 to 256")
        if found.packets not in (None, 0, 1, 2):
            raise ValueError(f"packets {found.packets}: must be 0, 1 or 2")
        for name, ctas in (("cluster", found.cluster), ("cluster_n", found.cluster_n)):
            if ctas not in (None, 1, 2, 4) or (found.cluster or 1) * (found.cluster_n or 1) > 4:
                raise ValueError(f"{name} {ctas}: must be 1, 2 or 4, and of both 4 at most")
        if found.block_m is not None and (found.block_m % 8 or found.block_m < 16 or found.tile_rows is not None):
            raise ValueError(f"block_m {found.block_m}: must be a multiple of 8, at least 16, and without tile_rows")
        if found.cluster_k not in (None, 1, *CLUSTER_K):
            raise ValueError(f"cluster_k {found.cluster_k}: must be 1, 2, 3, 4 or 8")
        if found.tiles_at_once not in (None, 1, 2):
            raise ValueError(f"tiles_at_once {found.tiles_at_once}: must be 1 or 2")
        return found

    @property
    def fields(self) -> frozenset[str]:
        """Names of the fields that are not None."""
        return frozenset(name for name in (field.name for field in dataclasses.fields(self)) if getattr(self, name) is not None)

    @property
    def number(self) -> int:
        """24 bits that differ between tilings that differ in one field; 0: nothing is asked for."""
        digits = 0
        for value in (self.block_n, self.span, self.shares, self.cluster):
            digits = digits * _RADIX + (0 if value is None else value + 1)
        packets, cluster_n, tile_rows = (0 if value is None else value + 1 for value in (self.packets, self.cluster_n, self.tile_rows))
        last = self.cluster_k, self.tiles_at_once, self.block_m
        cluster_k, at_once, block_m = (0 if value is None else value + 1 for value in last)
        digits = digits * _FACTOR + (packets + 4 * cluster_n + 24 * tile_rows) * _PACKETS_FACTOR
        return digits + cluster_k * _CLUSTER_K_FACTOR + at_once * _AT_ONCE_FACTOR + block_m * _BLOCK_M_FACTOR & 0xFFFFFF

    @property
    def swaps(self) -> bool:
        """Whether operands are swapped."""
        return self.tile_rows is not None or self.block_m is not None
