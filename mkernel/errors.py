"""Every exception mkernel raises on purpose."""

from __future__ import annotations

import builtins
import dataclasses
import pickle
from typing import Any

__all__ = [
    "AbortedError",
    "ArgumentError",
    "CallError",
    "CallReport",
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
    """Base of all mkernel errors. Every one can be pickled, whatever its attributes are: ranks of ``mk.launch`` are processes on GPUs.

    Examples
    --------
    >>> import mkernel as mk
    >>> try:
    ...     mk.launch(lambda world: world.empty((1 << 40,), "float16"), ranks=1, target="cpu")
    ... except mk.Error as error:  # whatever mkernel raises on purpose
    ...     print(type(error).__name__, isinstance(error, ValueError))
    ArgumentError True
    """

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
    """A bad argument, found before anything was launched; the world stays usable.

    Attributes
    ----------
    argument, value
        Name and value of the argument.
    rule, remedy
        What it must be, and what to do; parts of the message.

    Examples
    --------
    >>> import mkernel as mk
    >>> mk.launch(print, ranks=0)
    Traceback (most recent call last):
    mkernel.errors.ArgumentError: ranks = 0: must be a positive integer
    """

    def __init__(self, argument: str, value: object, rule: str, remedy: str = "") -> None:
        self.argument, self.value, self.rule, self.remedy = argument, value, rule, remedy
        super().__init__(f"{argument} = {value}: {rule}" + (f" ({remedy})" if remedy else ""))


class MismatchError(Error):
    """The ranks of a world called different operations, or the same with different shapes, dtypes or options.

    Raised on every rank, and fatal for the world. The message says which rank asked for what.

    Examples
    --------
    >>> import mkernel as mk
    >>> try:
    ...     mk.launch(lambda world: world.empty((1 + world.rank, 8), "float16"), ranks=2, target="cpu")
    ... except mk.MismatchError as error:
    ...     print(error)
    the ranks disagree: rank 0 asked for an array of 16 bytes: [1, 8] float16, on a heap with 0 bytes taken, 0 of workspace
    after 0 calls; rank 1 asked for an array of 32 bytes: ...
    """


class CompileError(Error):
    """A kernel did not compile, or cannot be loaded. ``log`` is the compiler's output, ``path`` the generated source.

    Examples
    --------
    >>> import os
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     return mk.allgather_gemm(np.ones((16, 1016), ml_dtypes.bfloat16), np.ones((1016, 8), ml_dtypes.bfloat16))
    >>> os.environ.update(MKERNEL_NO_COMPILE="1")  # only kernels that have been compiled before may run
    >>> try:
    ...     mk.launch(rank, ranks=2, target="cpu")
    ... except mk.CompileError as error:
    ...     print("in CI:", error)
    in CI: ... is not in the cache ..., and compiling is switched off (MKERNEL_NO_COMPILE)
    >>> _ = os.environ.pop("MKERNEL_NO_COMPILE")
    """

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

    Examples
    --------
    >>> import mkernel as mk
    >>> try:
    ...     raise mk.TransportError("rank 0: a put to rank 2 failed", peer=2, op="put", status="IBV_WC_RETRY_EXC_ERR")
    ... except mk.TransportError as error:
    ...     print(error.peer, error.status)
    2 IBV_WC_RETRY_EXC_ERR
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


@dataclasses.dataclass(frozen=True, slots=True)
class CallReport:
    """What a kernel reported of a call that its op refuses (abi::CallReport).

    Attributes
    ----------
    op
        Name of the op.
    title
        One line that tells the call from others: the op and its sizes.
    call
        Number of the call in its world, from 1, replays of graphs included; the same on every rank.
    rank
        The rank that reports; every rank does.
    code, details
        What is wrong, in numbers of the op.
    skipped
        Calls of this rank, launched after that one and before the error was raised, that did not take place.
    """

    op: str
    title: str
    call: int
    rank: int
    code: int
    details: tuple[int, ...]
    skipped: int


class CallError(Error):
    """An op refused a call inside its kernel: what the ranks passed does not go together. The world stays usable.

    Raised once on every rank, where mkernel is used next: by a call, ``check``, ``synchronize``, ``barrier``, or ``close`` after closing.
    On target cpu the refused call itself raises it. Its result is undefined. Calls that were launched after it, replays of graphs
    included, are skipped; on target cuda a call that raises the error of an earlier one has not been launched.

    Attributes
    ----------
    report
        What the kernel reported. ``op``, ``call``, ``rank``, ``code``, ``details`` and ``skipped`` are its fields.

    Examples
    --------
    >>> import mkernel as mk
    >>> from mkernel.errors import CallReport
    >>> try:
    ...     raise mk.CallError("rank 1 passes too many rows", CallReport("an_op", "an_op: x (64, 8)", 12, 0, 1, (1, 80), 2))
    ... except mk.CallError as error:  # on every rank; the world stays usable
    ...     print(f"call {error.call}: {error}")
    call 12: rank 1 passes too many rows (2 later calls of this rank were skipped)
    """

    def __init__(self, message: str, report: CallReport) -> None:
        self.report = report
        self.op, self.call, self.rank = report.op, report.call, report.rank
        self.code, self.details, self.skipped = report.code, report.details, report.skipped
        super().__init__(message + (f" ({report.skipped} later calls of this rank were skipped)" if report.skipped else ""))


class TimeoutError(Error, builtins.TimeoutError):
    """A wait inside a kernel, or on the host, passed its deadline. ``record`` says who waited for what (None for host waits).

    Examples
    --------
    >>> import mkernel as mk
    >>> try:
    ...     raise mk.TimeoutError("rank 0, compute CTA 3 waited 30.0 s for ...")
    ... except mk.TimeoutError as error:
    ...     print(error.record, isinstance(error, TimeoutError))  # Python's own, too
    None True
    """

    def __init__(self, message: str, record: FailureRecord | None = None) -> None:
        self.record = record
        super().__init__(message)


class PeerLostError(Error):
    """A rank's process has gone. ``rank`` is its number, where that is known.

    Examples
    --------
    >>> import mkernel as mk
    >>> try:
    ...     raise mk.PeerLostError("rank 3 was killed by signal 9 (SIGKILL)", 3)
    ... except mk.PeerLostError as error:  # on every other rank; a new mk.init works
    ...     print(error.rank)
    3
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)


class AbortedError(Error):
    """Another rank (or this one's ``world.abort``) gave the world up; the message carries its reason.

    Examples
    --------
    >>> import mkernel as mk
    >>> def rank(world):
    ...     if world.rank == 0:
    ...         world.abort("no more data")
    ...     world.barrier()
    >>> try:
    ...     mk.launch(rank, ranks=2, target="cpu")
    ... except mk.AbortedError as error:
    ...     print(error)
    rank 0 aborted: no more data
    """
