"""Properties that are worked out once for each object."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

__all__ = ["changed", "derived", "hashed_once"]

Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=type)


class derived(Generic[Value]):  # noqa: N801 (used as property is)
    """``functools.cached_property`` without its lock (of Python 3.11), which costs more than most of what plans work out.

    Two threads may work out the same value; either is right. The value lies in the object's ``__dict__`` under the property's name.
    """

    def __init__(self, function: Callable[[Any], Value]) -> None:
        self._function, self._name, self.__doc__ = function, function.__name__, function.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> Self | Value:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._function(instance)
        return value


Plain = TypeVar("Plain")


@functools.cache
def _names_of(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def changed(instance: Plain, **changes: Any) -> Plain:
    """``dataclasses.replace``, in a fifth of its time, for a frozen dataclass without slots and without ``__post_init__``."""
    kind: Any = type(instance)
    names, known, made = _names_of(kind), vars(instance), object.__new__(type(instance))
    vars(made).update({name: known[name] for name in names}, **changes)
    assert len(vars(made)) == len(names), "fields only"
    return made


def hashed_once(kind: Kind) -> Kind:
    """A frozen dataclass without slots whose objects remember their hash, and their derived properties, in this process only."""
    work_out: Callable[[Any], int] = vars(kind)["__hash__"]
    names = [field.name for field in dataclasses.fields(kind)]

    def remembered(self: Any) -> int:
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = work_out(self)
        return known

    def fields(self: Any) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in names}

    kind.__hash__, kind.__getstate__ = remembered, fields  # type: ignore[assignment]
    return kind
