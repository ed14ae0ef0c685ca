"""Steps that all ranks take together when a world is opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mkernel.errors import AbortedError
from mkernel.runtime.ranks.bootstrap import Bootstrap
from mkernel.runtime.ranks.control import Failed

__all__ = ["together"]

T = TypeVar("T")


def together(bootstrap: Bootstrap, what: str, step: Callable[[], T]) -> T:
    """Take a step of ``init`` on every rank. Returns its result; if it fails on one rank, it raises on all."""
    result: T | None = None
    problem: Exception | None = None
    try:
        result = step()
    except Failed as failed:
        problem = failed.failure.error()
    except Exception as error:
        problem = error
    texts = bootstrap.allgather(b"" if problem is None else f"{type(problem).__name__}: {problem}".encode())
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text:
            raise AbortedError(f"rank {rank} could not open {what}: {text.decode(errors='replace')}")
    return result  # type: ignore[return-value]  # set: there was no problem
