"""``mk.launch`` in worker processes, from the caller's side: one call after the other, and ``mk.shutdown``."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mkernel import env
from mkernel.errors import AbortedError, Error, PeerLostError
from mkernel.proxy.spawn import scrubbed_environment
from mkernel.runtime import logs
from mkernel.runtime.options import Options
from mkernel.runtime.workers import relay
from mkernel.runtime.workers.messages import Order, Report
from mkernel.runtime.workers.pickling import dump_call, load_error, load_result
from mkernel.runtime.workers.pool import Call, Pool
from mkernel.runtime.workers.serve import in_worker

__all__ = ["run_in_workers", "shutdown"]

_EXIT_SECONDS = 15.0  # longer than the pool gives its processes to end
_RESTART_PREFIXES = ("MKERNEL_", "CUDA_")  # variables that a process reads once, or that its world was made with
_FREE_NAMES = {"MKERNEL_IDLE_LIMIT", "MKERNEL_LOG"}  # variables of the caller alone

_turn = threading.Lock()  # one call at a time
_turn_owner = 0  # the thread whose call it is
_pool: Pool | None = None
_installed = False


class RemoteTraceback(Exception):  # noqa: N818 - it stands as the cause of an exception, never by itself
    """The traceback of an exception that was raised in a worker process, as text."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def run_in_workers(
    fn: Callable[..., Any],
    ranks: int,
    options: Options,
    args: tuple[Any, ...] = (),
    *,
    clock: Callable[[], float] = time.monotonic,
) -> list[Any]:
    """Call ``fn(world, *args)`` for every rank, in processes that stay for the next call. Returns the results, by rank.

    Calls of several threads take turns. ``clock`` is what a new pool measures its idle limit with (tests).

    Raises
    ------
    Exception
        What the first rank to fail raised, with its traceback as the cause and the others' failures as notes.
    PeerLostError
        A rank's process died.
    ArgumentError
        The function, an argument or a result cannot be pickled.
    Error
        cloudpickle is missing; or the caller is itself a rank of ``mk.launch``, or inside another call of it on this thread.
    """
    if in_worker():
        raise Error("mk.launch on GPUs inside a function of mk.launch: a rank cannot start ranks; call mkernel's operations there")
    logs.set_up()
    payload = dump_call(fn, args)
    idle_limit = env.IDLE_LIMIT.get()

    def orders(number: int) -> list[Order]:
        common: dict[str, Any] = {
            "call": number,
            "size": ranks,
            "options": options,
            "fresh_world": False,
            "payload": payload,
            "environment": _environment(),
            "folder": _folder(),
            "path": list(sys.path),
            "warning_filters": relay.dump_filters(),
            "log_level": logging.getLogger("mkernel").getEffectiveLevel(),
        }
        return [Order(rank=rank, **common) for rank in range(ranks)]

    with _my_turn():
        while (call := _follow(_pool_for(ranks, options, clock), orders, idle_limit)) is None:
            _end_pool()  # its idle limit has just passed
        return _outcome(call, ranks)


def shutdown() -> None:
    """End the worker processes that ``mk.launch`` keeps on GPUs, and free their memory; the next ``mk.launch`` starts new ones.

    Does nothing where there are none. Blocks until they have ended, at most some seconds; a call that another thread is in ends first.

    Examples
    --------
    >>> import mkernel as mk
    >>> mk.launch(lambda world: world.size, ranks=2)
    [2, 2]
    >>> mk.shutdown()  # frees the GPUs, where there are any
    """
    if in_worker():
        return
    with _my_turn():
        _end_pool()


@contextlib.contextmanager
def _my_turn() -> Iterator[None]:
    global _turn_owner
    if _turn_owner == threading.get_ident():
        raise Error("mk.launch or mk.shutdown was called inside another call of mk.launch on the same thread")
    with _turn:
        _turn_owner = threading.get_ident()
        try:
            yield
        finally:
            _turn_owner = 0


def _pool_for(ranks: int, options: Options, clock: Callable[[], float]) -> Pool:
    """The pool whose processes fit, or a new one in place of one that does not."""
    global _pool
    environment = _environment()
    fixed = {name: value for name, value in environment.items() if name.startswith(_RESTART_PREFIXES) and name not in _FREE_NAMES}
    key = (ranks, options, fixed, sys.executable)
    if _pool is not None and (_pool.key != key or not _pool.is_alive()):
        _end_pool()
    if _pool is None:
        _install()
        pool = Pool(ranks, key, scrubbed_environment(os.environ, gpus=True), clock=clock)
        pool.start()
        _pool = pool
    return _pool


def _end_pool() -> None:
    global _pool
    if _pool is not None:
        _pool.end()
        _pool.join()
        _pool = None


def _environment() -> dict[str, str]:
    """The caller's environment, as its ranks may see it."""
    kept = scrubbed_environment(os.environ, gpus=True)
    del kept["PYTHONPATH"]  # sys.path travels by itself
    if "PYTHONPATH" in os.environ:
        kept["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return kept


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:  # it was removed
        return "/"


# ---- a call
def _follow(pool: Pool, orders: Callable[[int], list[Order]], idle_limit: float) -> Call | None:
    """Begin a call, and show what its ranks say until it is over. None if the pool has just ended."""
    problem: Exception | None = None
    call: Call | None = None
    try:
        call = pool.begin(orders, idle_limit)
        if call is None:
            return None
        while (show := call.shows.get()) is not None:
            try:
                show()
            except Warning as warning:  # an error by the caller's filters
                problem = problem or warning
    except BaseException as interrupt:
        if call is not None:
            _abandon(pool, call, f"{type(interrupt).__name__} in the caller of mk.launch")
        raise
    if problem is not None and call.error is None and not call.failures:
        raise problem
    return call


def _abandon(pool: Pool, call: Call, reason: str) -> None:
    """Interrupt the ranks after Ctrl-C. A second Ctrl-C does not wait for them."""
    pool.interrupt(call, reason)
    try:
        while not (call.finished.is_set() and call.shows.empty()):
            with contextlib.suppress(queue.Empty, Exception):
                show = call.shows.get(timeout=0.1)
                if show is not None:
                    show()
    except BaseException:
        pool.kill(call)
        call.finished.wait(_EXIT_SECONDS)


def _outcome(call: Call, ranks: int) -> list[Any]:
    if call.error is not None:
        raise call.error
    if call.failures:
        raise _explain([(rank, _exception(what)) for rank, what in call.failures])
    return [load_result(call.results[rank], rank) for rank in range(ranks)]


def _exception(what: Report | BaseException) -> BaseException:
    if isinstance(what, BaseException):
        return what
    error = load_error(what.error, what.summary)
    error.__cause__ = RemoteTraceback(what.traceback)
    return error


def _explain(failures: list[tuple[int, BaseException]]) -> BaseException:
    """The first failure that is not only the echo of another rank's failure, with the others as its notes."""
    dead = {rank for rank, error in failures if isinstance(error, PeerLostError) and error.__cause__ is None}

    def echo(rank: int, error: BaseException) -> bool:
        return isinstance(error, AbortedError) or (isinstance(error, PeerLostError) and rank not in dead and error.rank in dead)

    rank, error = next((item for item in failures if not echo(*item)), failures[0])
    error.add_note(f"raised on rank {rank} of mk.launch")
    for other, failure in failures:
        if failure is not error:
            error.add_note(f"rank {other}: {type(failure).__name__}: {failure}")
    return error


# ---- the process
def _install() -> None:
    global _installed
    if not _installed:
        _installed = True
        atexit.register(_at_exit, os.getpid())
        os.register_at_fork(after_in_child=_in_child)


def _at_exit(pid: int) -> None:
    if os.getpid() == pid and _pool is not None:
        _pool.end()
        _pool.join(_EXIT_SECONDS)  # what is left then dies with this process


def _in_child() -> None:
    """Forget the pool in a forked child, which has neither its thread nor its processes."""
    global _pool, _turn, _turn_owner
    if _pool is not None:
        _pool.forget()
    _pool, _turn, _turn_owner = None, threading.Lock(), 0
