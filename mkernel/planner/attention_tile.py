"""The tile of attention kernels (``kernels_src/attention``): rows of q, keys of a block, stages, and what they need of an SM."""

from __future__ import annotations

import dataclasses

from mkernel.planner.derived import derived
from mkernel.planner.gemm import SHARED_LIMIT

__all__ = ["AttentionTile"]

_ITEM = 2
_BARRIER_BYTES = 1024  # barriers and headers
_WARPGROUP = 128  # threads
_WARPGROUP_ROWS = 64  # of q


@dataclasses.dataclass(frozen=True)
class AttentionTile:
    """``key_block`` keys, or values, make a stage; each of ``warpgroups`` has 64 rows of a q tile.

    Attributes
    ----------
    stages
        Of K; and of V, if ``value_stages`` is 0.
    beside
        Bytes of shared memory that the kernel needs for something else.
    """

    head_dim: int
    key_block: int
    stages: int
    warpgroups: int
    value_stages: int = 0
    beside: int = 0

    @classmethod
    def of(cls, head_dim: int, causal: bool, beside: int = 0) -> AttentionTile:
        """The tile that is fastest for long sequences."""
        return cls(64, 192, 3, 2, 0, beside) if head_dim == 64 else cls(128, 128, 2, 2, 3, beside)

    @derived
    def q_rows(self) -> int:
        """Rows of a q tile."""
        return _WARPGROUP_ROWS * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a CTA: those of the consumer warpgroups and of the producer's."""
        return _WARPGROUP * (1 + self.warpgroups)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of q, the stages of K and of V, and o: all columns of it if there is room, else 64 at a time."""
        q = self.q_rows * self.head_dim * _ITEM
        others = q + (self.stages + (self.value_stages or self.stages)) * self.key_block * self.head_dim * _ITEM + _BARRIER_BYTES
        return others + (q if others + q + self.beside <= SHARED_LIMIT else self.q_rows * 64 * _ITEM)

    @derived
    def partial_bytes(self) -> int:
        """Bytes of the sums that one of several CTAs leaves of a q tile whose keys they share: ``AttentionShape::kPartialBytes``."""
        return self.q_rows * (self.head_dim + 8) * 4

    def constants(self) -> dict[str, int]:
        """``Config`` of ``AttentionShape``, but for the element type and the mask."""
        return {
            "kHeadDim": self.head_dim,
            "kKeyBlock": self.key_block,
            "kStages": self.stages,
            "kValueStages": self.value_stages or self.stages,
            "kQueryWarpgroups": self.warpgroups,
            "kBeside": self.beside,
        }
