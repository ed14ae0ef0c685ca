"""Small facts exchanged between the ranks of a run, over the world's own control channel (bench needs no MPI of its own)."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["gather", "worst_reason"]

_TIMEOUT = 120.0  # seconds; float64 references of the largest shapes and library start-up differ between ranks


def gather(world: Any, value: Any) -> list[Any]:
    """``value`` (JSON) of every rank, in rank order. Collective, blocking."""
    data = json.dumps(value).encode()
    # The world offers users no exchange of data; the benchmark is part of the project and borrows the one its own collectives use.
    by_rank = [data] if world.size == 1 else world._collective("bench", "an exchange of the benchmark", data, _TIMEOUT)
    return [json.loads(raw) for raw in by_rank]


def worst_reason(world: Any, reason: str) -> str:
    """The first reason any rank has, "" if none: so that all ranks leave out the same baseline. Collective."""
    for rank, text in enumerate(gather(world, reason)):
        if text:
            return f"rank {rank}: {text}"
    return ""
