"""How many CTAs share the keys of a query tile of ring attention, where tiles are few: by the time that they are predicted to take."""

from __future__ import annotations

import math

from mkernel.planner.attention_tile import AttentionTile

__all__ = ["ATTENTION_FLOPS", "MOST_SHARES", "choose_shares", "exchange_seconds", "tile_seconds"]

MOST_SHARES = 8  # of the keys of a tile
ATTENTION_FLOPS = 4.5e12  # per second, of the attention loop on one SM
_SHARING_GAIN = 0.9  # shares must save so much of the time: more than predictions are off
# From when a share has been computed until it has come to the CTA that adds all up, and how much of them an SM stores or reads per second.
# Guesses, as in spans.py: they have not been measured.
_EXCHANGE_SECONDS, _EXCHANGE_BYTES = 2e-6, 100e9


def exchange_seconds(tile: AttentionTile, shares: int) -> float:
    """From when all shares of a tile have been computed until they are added up."""
    return _EXCHANGE_SECONDS + shares * tile.partial_bytes / _EXCHANGE_BYTES


def tile_seconds(tile: AttentionTile, keys: int, shares: int) -> float:
    """How long a tile takes that sees so many keys, if CTAs share them."""
    blocks = math.ceil(math.ceil(keys / tile.key_block) / shares)
    seconds = 4.0 * tile.q_rows * blocks * tile.key_block * tile.head_dim / ATTENTION_FLOPS
    return seconds + (exchange_seconds(tile, shares) if shares > 1 else 0.0)


def choose_shares(tile: AttentionTile, keys: int, tiles: int, ctas: int, wanted: int | None = None) -> int:
    """How many CTAs share the keys of a tile: those with the least predicted time, if that is much less than one takes.

    ``keys``: that a tile sees at most; ``tiles``: of all heads; ``wanted``: so many, where so many CTAs per tile are there.
    """
    most = min(wanted or MOST_SHARES, ctas // tiles)
    if most <= 1 or wanted is not None:
        return max(1, most)
    seconds, best = min((tile_seconds(tile, keys, shares), shares) for shares in range(1, most + 1))
    return best if seconds < _SHARING_GAIN * tile_seconds(tile, keys, 1) else 1
