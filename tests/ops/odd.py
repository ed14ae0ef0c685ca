"""How one argument of a call is replaced by one that nobody would think of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["changed_array", "one_of"]


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
