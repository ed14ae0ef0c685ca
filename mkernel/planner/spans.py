"""How many ranks' shards a plane of tiles holds in an AllGather+GEMM: the number whose predicted time is least."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from mkernel.planner.gemm import BLOCK_M, GemmTile, choose_tile
from mkernel.planner.topology import Topology

__all__ = ["Candidate", "candidates", "choose_span", "spans_of"]

_NEAR_SECONDS = 6e-6  # until the first chunk of a node mate can be read: entry, copy, flag
_FAR_SECONDS = 40e-6  # the same of another node's rank: staging, command, put, forwarding
_LINK_BYTES, _NETWORK_BYTES = 310e9, 50e9  # per second, that a rank sends to its node, and to other nodes
_MEMORY_BYTES = 4.2e12  # per second
_CACHE_BYTES = 40e6  # of B up to which a second reading finds it in L2
_GAIN = 0.97  # of the time with a shard per plane: prediction is no better than that


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A span, the tile that goes with it, and how long a call is predicted to take."""

    span: int
    tile: GemmTile
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Class:
    """Planes whose chunks come from equally far: here, the node, other nodes. Seconds until the first, and all of them, are there."""

    planes: int
    first: float
    all: float


def spans_of(topology: Topology) -> Iterator[int]:
    """Numbers of ranks whose shards can be one plane: some of a node's, or those of whole nodes."""
    size, per_node = topology.size, topology.ranks_per_node
    return (span for span in range(1, size + 1) if size % span == 0 and (per_node % span == 0 or span % per_node == 0))


def choose_span(topology: Topology, rows: int, n: int, k: int, sm_count: int, tail: float, tile: GemmTile | None = None) -> Candidate:
    """The candidate with the least predicted time; a shard per plane unless another is faster by more than predictions are off."""
    found = list(candidates(topology, rows, n, k, sm_count, tail, tile))
    best = min(found, key=lambda candidate: candidate.seconds)
    return best if best.seconds < _GAIN * found[0].seconds else found[0]


def candidates(
    topology: Topology, rows: int, n: int, k: int, sm_count: int, tail: float, tile: GemmTile | None = None
) -> Iterator[Candidate]:
    """All spans for shards of ``rows`` rows, ascending. ``tail``: of ``choose_tile``, with a shard per plane; ``tile``: if it is given."""
    for span in spans_of(topology):
        # Tiles that span shards wait at their beginning for all that they read, and for nothing at their end.
        tile_rows = math.ceil(span * rows / BLOCK_M) * (topology.size // span)
        chosen = tile or choose_tile(tile_rows, n, sm_count, tail if span == 1 else 0.0)
        yield Candidate(span, chosen, _seconds(topology, rows, n, k, sm_count, span, chosen))


def _seconds(topology: Topology, rows: int, n: int, k: int, sm_count: int, span: int, tile: GemmTile) -> float:
    """A class of planes is multiplied when its chunks are there, after the classes before it."""
    classes = [one for one in _classes(topology, rows, k, span) if one.planes]
    tiles_of_plane, b_bytes = math.ceil(span * rows / BLOCK_M) * math.ceil(n / tile.block_n), 2.0 * n * k
    seconds = 0.0
    for i, one in enumerate(classes):
        left = classes[i:]
        tiles = sum(other.planes for other in left) * tiles_of_plane
        waves = tiles / sm_count if tiles > 4 * sm_count else math.ceil(tiles / sm_count)
        readings = len(left) if b_bytes > _CACHE_BYTES else 1
        multiplying = max(waves * tile.seconds(k) / tile.relative_speed, readings * b_bytes / _MEMORY_BYTES)
        follows = span == 1  # the tiles of a shard follow its chunks
        seconds = max(seconds, (one.first if follows else one.all) + multiplying, one.all + tile.seconds(k))
    return seconds


def _classes(topology: Topology, rows: int, k: int, span: int) -> list[_Class]:
    size, per_node = topology.size, topology.ranks_per_node
    near_planes, bytes_of_shard = max(1, per_node // span), 2 * rows * k
    near = _NEAR_SECONDS, _NEAR_SECONDS + bytes_of_shard * (per_node - 1) / _LINK_BYTES
    far = _FAR_SECONDS, _FAR_SECONDS + bytes_of_shard * (topology.num_nodes - 1) / _NETWORK_BYTES
    own = (0.0, 0.0) if span == 1 else near if span <= per_node else far
    return [_Class(1, *own), _Class(near_planes - 1, *near), _Class(size // span - near_planes, *far)]
