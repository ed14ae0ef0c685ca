"""Arguments that are integers, of Python, of NumPy or of another library."""

from __future__ import annotations

import operator
from typing import Any

from mkernel.errors import ArgumentError

__all__ = ["MANY", "integer_of", "whole_number"]

MANY = 1 << 16  # more than there are of anything


def integer_of(value: Any) -> int | None:
    """The integer that a value is, of Python, of NumPy or another library; None: it is none, or a truth value, or an array of some."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_") or getattr(value, "shape", ()) != ():
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole_number(name: str, value: Any, least: int, most: int = MANY, otherwise: str = "") -> int:
    """An argument that is an integer, of Python or of NumPy, within limits. Raises ArgumentError. ``otherwise``: what it may be, too."""
    number = integer_of(value)
    if number is None or not least <= number <= most:
        wanted = "a positive integer" if least == 1 else f"an integer from {least} on"
        limit = f" up to {most}" if number is not None and number > most else ""
        raise ArgumentError(name, value, f"must be {wanted}{limit}{otherwise}")
    return number
