"""The tile configuration of the GEMM main loop (``kernels_src/gemm.cuh``): which tile, how many stages, how much shared memory."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["BLOCK_K", "BLOCK_M", "THREADS", "GemmTile", "choose_load_rows", "choose_tile"]

BLOCK_M = 128
BLOCK_K = 64
THREADS = 384
SHARED_LIMIT = 232448  # dynamic shared memory of one CTA on sm_90
_RESULT_BYTES = 2 * 2 * 64 * 128  # staging of results: two buffers of 64 rows x 128 bytes per consumer warpgroup
_BARRIER_BYTES = 2048  # barriers and the tile queue, with padding to 1 KiB
_PIECES_BYTES = 8 * 16 * 1024  # the copy ring of the communication roles shares the memory of the stages (kernels_src/copy.cuh)

_LOAD_ROWS = (16, 32, 64)  # of a tile of A that need not be loaded whole: filling rows that are not there with zeros takes TMA long

# Throughput of one SM against the 128 x 256 tile, measured (docs/benchmarks.md).
_RELATIVE_SPEED = {256: 1.0, 192: 0.97, 128: 0.88, 64: 0.58}


@dataclasses.dataclass(frozen=True, slots=True)
class GemmTile:
    """A tile of ``BLOCK_M x block_n`` with ``stages`` stages of ``BLOCK_K``; 16-bit elements."""

    block_n: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        stages = self.stages * (BLOCK_M + self.block_n) * BLOCK_K * 2
        return max(stages + _RESULT_BYTES, _PIECES_BYTES) + _BARRIER_BYTES

    @classmethod
    def deepest(cls, block_n: int) -> GemmTile:
        """With as many stages as fit, at most 8."""
        stage = (BLOCK_M + block_n) * BLOCK_K * 2
        return cls(block_n, min(8, (SHARED_LIMIT - _RESULT_BYTES - _BARRIER_BYTES) // stage))


def choose_load_rows(rows: int) -> int:
    """How many rows of a tile of A to load where the matrix has ``rows``."""
    return next((load for load in _LOAD_ROWS if rows <= load), BLOCK_M)


def choose_tile(tile_rows: int, n: int, sm_count: int, tail: float = 0.0) -> GemmTile:
    """The tile width that finishes ``tile_rows`` rows of tiles over ``n`` columns soonest, by counting waves.

    ``tail``: tiles' time that the end of a call costs, where tiles wait for data that comes until the end.
    """

    def cost(block_n: int) -> tuple[float, int]:
        tiles = tile_rows * math.ceil(n / block_n)
        waves = tiles / sm_count if tiles > 4 * sm_count else math.ceil(tiles / sm_count)
        return (waves + tail) * block_n / _RELATIVE_SPEED[block_n], -block_n

    return GemmTile.deepest(min(_RELATIVE_SPEED, key=cost))
