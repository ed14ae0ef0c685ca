"""What tiles of a fused GEMM cover, by predicted time: how many ranks' shards, and how many CTAs share their K."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mkernel.planner.gemm import BLOCK_K, BLOCK_M, GemmTile, choose_tile
from mkernel.planner.topology import Topology

__all__ = [
    "EXCHANGE_BYTES",
    "FEWEST_STEPS",
    "Candidate",
    "Covering",
    "Product",
    "candidates",
    "choose",
    "choose_shares",
    "exchange_seconds",
    "most_shares",
    "spans_of",
]

_NEAR_SECONDS = 6e-6  # until the first chunk of a node mate can be read: entry, copy, flag
_FAR_SECONDS = 40e-6  # the same of another node's rank: staging, command, put, forwarding
_LINK_BYTES, _NETWORK_BYTES = 310e9, 50e9  # per second, that a rank sends to its node, and to other nodes
_MEMORY_BYTES = 4.2e12  # per second
_CACHE_BYTES = 40e6  # of B up to which a second reading finds it in L2
_GAIN = 0.97  # of the time with a shard per plane: prediction is no better than that;
_SHARING_GAIN = 0.9  # and of the time without shares, which need another kernel
_MOST_SHARES = 8  # of K
FEWEST_STEPS = 4  # k steps of a share
_EXCHANGE_SECONDS, EXCHANGE_BYTES = 2e-6, 5e12  # fitted (docs/model.md): what sums take, and L2 for the packets of all shares
_WARP_ROWS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """What a rank multiplies, on so many SMs: the shards of all ranks, of ``rows`` rows and ``k`` columns each, by ``n`` columns."""

    topology: Topology
    rows: int
    n: int
    k: int
    sm_count: int


class Covering(NamedTuple):
    """A span, the tile that goes with it, and CTAs that share K of a tile."""

    span: int
    tile: GemmTile
    shares: int


class Candidate(NamedTuple):
    """A covering, and how long a call is predicted to take."""

    span: int
    tile: GemmTile
    shares: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Class:
    """Planes whose chunks come from equally far: here, the node, other nodes. Seconds until the first, and all of them, are there."""

    planes: int
    first: float
    all: float


@functools.cache
def spans_of(topology: Topology) -> tuple[int, ...]:
    """Numbers of ranks whose shards can be one plane: some of a node's, or those of whole nodes. Ascending."""
    size, per_node = topology.size, topology.ranks_per_node
    return tuple(span for span in range(1, size + 1) if size % span == 0 and (per_node % span == 0 or span % per_node == 0))


def choose(
    product: Product, tail: float, tile: GemmTile | None = None, span: int | None = None, shares: int | None = None
) -> Covering | None:
    """The candidate with the least predicted time: a shard per plane, and no shares, unless that saves more than predictions are off.

    ``tile``, ``span``, ``shares``: where they are given. None: there is no such candidate.
    """
    possible = list(_coverings(product, tail, tile, span, shares))
    if len(possible) <= 1:
        return possible[0] if possible else None
    found = [_predicted(product, one) for one in possible]
    whole = [candidate for candidate in found if candidate.shares == 1] or found[:1]
    best = min(whole, key=lambda candidate: candidate.seconds)
    best = best if best.seconds < _GAIN * whole[0].seconds else whole[0]
    shared = min(found, key=lambda candidate: candidate.seconds)
    best = shared if shared.seconds < _SHARING_GAIN * best.seconds or shares not in (None, 1) else best
    return Covering(best.span, best.tile, best.shares)


def candidates(
    product: Product, tail: float, tile: GemmTile | None = None, span: int | None = None, shares: int | None = None
) -> Iterator[Candidate]:
    """What tiles can cover: spans ascending, of each without shares first.

    ``tail``: of ``choose_tile``, with a shard per plane. K is shared inside one node only, and where all shares are worked on at once.
    """
    return (_predicted(product, one) for one in _coverings(product, tail, tile, span, shares))


def choose_shares(product: Product, whole: GemmTile, tiles: Iterable[GemmTile], shares: int | None = None) -> Candidate | None:
    """One of ``tiles`` and a number of shares of K, of a product of one rank, by predicted time; ``shares``: where it is given.

    None: tiles like ``whole`` take little longer, or K has not so many steps.
    """
    shared = [one for tile in tiles for one in _shared(product, tile, shares)]
    best = min(shared, key=lambda one: one.seconds, default=None)
    if best is None or shares is not None:
        return best
    return best if best.seconds < _SHARING_GAIN * _seconds(product, 1, whole) else None


def _shared(product: Product, tile: GemmTile, shares: int | None) -> Iterator[Candidate]:
    most = min(_MOST_SHARES, most_shares(product.rows, product.n, product.k, tile.block_n, product.sm_count))
    for number in range(2, most + 1) if shares is None else (shares,):
        yield from candidates(product, 0.0, tile, 1, number)


def most_shares(rows: int, n: int, k: int, block_n: int, sm_count: int) -> int:
    """In how many shares K of all tiles of a product can be worked on at once, none shorter than is worth it; 0 or 1: in no shares."""
    tiles = math.ceil(rows / BLOCK_M) * math.ceil(n / block_n)
    return min(sm_count // max(1, tiles), math.ceil(k / BLOCK_K) // FEWEST_STEPS)


def _predicted(product: Product, one: Covering) -> Candidate:
    return Candidate(*one, _seconds(product, *one))


def _coverings(product: Product, tail: float, tile: GemmTile | None, span: int | None, shares: int | None) -> Iterator[Covering]:
    topology, n, k, sm_count = product.topology, product.n, product.k, product.sm_count
    for one in spans_of(topology) if span is None else (span,) * (span in spans_of(topology)):
        # Tiles that span shards wait at their beginning for all that they read, and for nothing at their end.
        tile_rows = math.ceil(one * product.rows / BLOCK_M) * (topology.size // one)
        if shares in (None, 1):
            yield Covering(one, tile or choose_tile(tile_rows, n, sm_count, tail if one == 1 else 0.0), 1)
        if topology.num_nodes > 1 or shares == 1 or (shares is None and tile is not None) or not product.rows:
            continue
        for shared in (GemmTile.deepest(64), GemmTile.deepest(128)) if tile is None else (tile,):
            if shares is None:
                numbers = range(2, min(_MOST_SHARES, most_shares(tile_rows * BLOCK_M, n, k, shared.block_n, sm_count)) + 1)
            else:
                numbers = range(shares, shares + (shares <= math.ceil(k / BLOCK_K)))
            for number in numbers:
                yield Covering(one, shared, number)


def _seconds(product: Product, span: int, tile: GemmTile, shares: int = 1) -> float:
    """Time of a call: a class of planes is multiplied when its chunks are there, after the classes before it."""
    rows, n, k, sm_count = product.rows, product.n, product.k, product.sm_count
    classes = [one for one in _classes(product, span) if one.planes]
    tiles_of_plane, b_bytes = math.ceil(span * rows / BLOCK_M) * math.ceil(n / tile.block_n) * shares, 2.0 * n * k
    of_tile = tile.seconds(k) / tile.relative_speed / shares
    ctas = tiles_of_plane * (product.topology.size // span)
    exchange = exchange_seconds(ctas, span * rows, tile.block_n) if shares > 1 else 0.0
    seconds = 0.0
    for i, one in enumerate(classes):
        left = classes[i:]
        tiles = sum(other.planes for other in left) * tiles_of_plane
        waves = tiles / sm_count if tiles > 4 * sm_count else math.ceil(tiles / sm_count)
        readings = len(left) if b_bytes > _CACHE_BYTES else 1
        multiplying = max(waves * of_tile, readings * b_bytes / _MEMORY_BYTES) + exchange
        follows = span == 1  # the tiles of a shard follow its chunks
        seconds = max(seconds, (one.first if follows else one.all) + multiplying, one.all + of_tile + exchange)
    return seconds


def exchange_seconds(ctas: int, rows: int, block_n: int, rate: float = EXCHANGE_BYTES, least: float = _EXCHANGE_SECONDS) -> float:
    """From when ``ctas`` shares of tiles of ``rows`` rows, at most, have been multiplied until they are added up.

    Packets of float32 are written, read and written again, so many bytes (``rate``) a second, which comes on top of ``least`` seconds.
    """
    taken = min(BLOCK_M, math.ceil(rows / _WARP_ROWS) * _WARP_ROWS)
    return least + 3 * 4 * ctas * taken * block_n / rate


def _classes(product: Product, span: int) -> list[_Class]:
    topology, size, per_node = product.topology, product.topology.size, product.topology.ranks_per_node
    near_planes, bytes_of_shard = max(1, per_node // span), 2 * product.rows * product.k
    near = _NEAR_SECONDS, _NEAR_SECONDS + bytes_of_shard * (per_node - 1) / _LINK_BYTES
    far = _FAR_SECONDS, _FAR_SECONDS + bytes_of_shard * (topology.num_nodes - 1) / _NETWORK_BYTES
    own = (0.0, 0.0) if span == 1 else near if span <= per_node else far
    return [_Class(1, *own), _Class(near_planes - 1, *near), _Class(size // span - near_planes, *far)]
