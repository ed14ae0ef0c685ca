"""Every exception mkernel raises on purpose."""

from __future__ import annotations

import builtins
import dataclasses
import pickle
from typing import Any

__all__ = [
    "AbortedError",
    "ArgumentError",
    "CompileError",
    "Error",
    "FailureRecord",
    "MismatchError",
    "PeerLostError",
    "TimeoutError",
    "TransportError",
]


_HEAP_TYPE = 1 << 9  # in type.__flags__: made by a class statement


class Error(Exception):
    """Base of all mkernel errors. Every one can be pickled, whatever its attributes are: ranks of ``mk.launch`` are processes on GPUs."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, {name: _portable(value) for name, value in self.__dict__.items()})


def _rebuild(kind: type[Error], args: tuple[Any, ...], state: dict[str, Any]) -> Error:
    """An error as it was, without calling its ``__init__``, whose arguments are not those of the message."""
    builtin: Any = kind
    while builtin.__flags__ & _HEAP_TYPE:  # of the bases that lie in C the one that lays out the object, e.g. OSError's
        builtin = builtin.__base__
    error: Error = builtin.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _portable(value: Any) -> Any:
    """``value``, or its text where it cannot be pickled (a stream, a world)."""
    try:
        pickle.dumps(value)
    except Exception:
        return str(value)
    return value


class ArgumentError(Error, ValueError):
    """A bad argument, found before anything was launched; the world stays usable."""

    def __init__(self, argument: str, value: object, rule: str, remedy: str = "") -> None:
        self.argument, self.value, self.rule, self.remedy = argument, value, rule, remedy
        super().__init__(f"{argument} = {value}: {rule}" + (f" ({remedy})" if remedy else ""))


class MismatchError(Error):
    """The ranks of a world called different operations, or the same with different shapes, dtypes or options."""


class CompileError(Error):
    """A kernel did not compile. ``log`` is the compiler's output, ``path`` the generated source."""

    def __init__(self, message: str, *, log: str = "", path: str = "") -> None:
        self.log, self.path = log, path
        super().__init__(message + (f"\nsource: {path}" if path else "") + (f"\n{log}" if log else ""))


class TransportError(Error):
    """The network failed; fatal for the world.

    Attributes
    ----------
    peer
        The rank at the other end; None where there is none.
    op, status
        What was being done, and how it ended (``IBV_WC_RETRY_EXC_ERR``, ``ENOMEM`` ...).
    queue_pair
        Number of the queue pair on this side, with RDMA.
    remedy
        What may be done about it; also part of the message.
    """

    def __init__(
        self, message: str, *, peer: int | None = None, op: str = "", status: str = "", queue_pair: int | None = None, remedy: str = ""
    ) -> None:
        self.peer, self.op, self.status, self.queue_pair, self.remedy = peer, op, status, queue_pair, remedy
        super().__init__(message)


@dataclasses.dataclass(frozen=True, slots=True)
class FailureRecord:
    """What a kernel reported when a wait failed (abi::HostBlock)."""

    state: int
    rank: int
    role: str
    cta: int
    flag: str
    peer: int
    epoch: int
    expected: int
    seen: int


class TimeoutError(Error, builtins.TimeoutError):
    """A wait inside a kernel, or on the host, passed its deadline. ``record`` says who waited for what (None for host waits)."""

    def __init__(self, message: str, record: FailureRecord | None = None) -> None:
        self.record = record
        super().__init__(message)


class PeerLostError(Error):
    """A rank's process has gone."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)


class AbortedError(Error):
    """Another rank (or this one's ``world.abort``) gave the world up; the message carries its reason."""
