"""How one argument of a call is replaced by one that nobody would think of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import mkernel as mk
from tests.ops.body import topology

__all__ = ["WORLD", "changed_array", "one_of", "try_on_all_ranks"]

WORLD: dict[str, Any] = {"target": "cpu", "heap_bytes": 1 << 26, "specialize": "none", "timeout": 5.0, "entry_timeout": 20.0}


def one_of(rng: np.random.Generator, args: list[Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """A drawn argument: the list or the dictionary that has it, and where."""
    key = int(rng.integers(len(args) + len(options)))
    return (args, key) if key < len(args) else (options, list(options)[key - len(args)])


def changed_array(rng: np.random.Generator, where: Any, place: Any, kind: type, changes: Mapping[str, Callable[[Any], Any]]) -> str:
    """Change an array in one of several ways, mostly; what has been done, "" if nothing, or it is none."""
    if isinstance(where[place], kind) and rng.random() < 0.8:
        name = str(rng.choice(list(changes)))
        with contextlib.suppress(TypeError, ValueError, IndexError, RuntimeError):  # which that array does not have
            where[place] = changes[name](where[place])
            return f"{place}: {name}"
    return ""


def try_on_all_ranks(
    rng: np.random.Generator, world: str, tried: Callable[[Any, int], tuple[list[str], int]], rounds: int, calls: int
) -> None:
    """``tried`` says what was wrong on a rank, and how many of its calls were made; a seed gives all ranks the same ones."""
    shape, made = topology(world), 0
    for _ in range(rounds):
        seed = int(rng.integers(1 << 30))
        found = mk.launch(tried, shape.size, shape.ranks_per_node, args=(seed,), **WORLD)
        assert [wrong for wrong, _ in found] == [[]] * shape.size, seed
        made += found[0][1]
    assert 0 < made < rounds * calls, "some are taken, some are not"
