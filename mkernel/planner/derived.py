"""Properties that are worked out once for each object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

__all__ = ["derived"]

Value = TypeVar("Value")


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
