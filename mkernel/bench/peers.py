"""Small facts that the ranks of a run exchange, over the world's own control channel: bench needs no MPI."""

from __future__ import annotations

import secrets
from typing import Any

__all__ = ["fresh_seed", "gather", "worst_reason"]

_TIMEOUT = 120.0  # seconds; float64 references of the largest shapes and library start-up differ between ranks


def gather(world: Any, value: Any) -> list[Any]:
    """``value`` (JSON) of every rank, in rank order. Collective, blocking."""
    by_rank: list[Any] = world.exchange("facts of the benchmark", value, _TIMEOUT)
    return by_rank


def fresh_seed(world: Any) -> int:
    """A seed that differs in every run and is the same on every rank. Collective."""
    return int(gather(world, secrets.randbits(40))[0])


def worst_reason(world: Any, reason: str) -> str:
    """The first reason that any rank has, "" if none, so that all ranks leave out the same baseline. Collective."""
    for rank, text in enumerate(gather(world, reason)):
        if text:
            return f"rank {rank}: {text}"
    return ""
