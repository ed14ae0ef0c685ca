"""A worker process of ``mk.launch``: it keeps its world, and runs one function after the other in it."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from types import FrameType
from typing import Any

from mkernel.errors import AbortedError, ArgumentError, Error
from mkernel.proxy.spawn import die_with
from mkernel.runtime import current
from mkernel.runtime.failure import Failure
from mkernel.runtime.failure import Kind as FailureKind
from mkernel.runtime.init import open_world
from mkernel.runtime.ranks.bootstrap import Bootstrap
from mkernel.runtime.workers import relay
from mkernel.runtime.workers.messages import Inbox, Kind, Order, Report, Stop, frame
from mkernel.runtime.workers.pickling import dump_error, dump_result, load_call
from mkernel.runtime.world import World

__all__ = ["in_worker", "serve"]

_in_worker = False


def in_worker() -> bool:
    """Whether this process is a rank of ``mk.launch``."""
    return _in_worker


def serve(fd: int, parent: int) -> int:
    """Run the calls that come through a socket until the caller ends them or has gone. Returns the exit code."""
    global _in_worker
    _in_worker = True
    connection = socket.socket(fileno=fd)
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=connection.close)  # a child must not hide this process's death
    try:
        die_with(parent)
    except EOFError:
        return 0
    faulthandler.enable()
    _Worker(connection).run()
    return 0


class _Bootstrap(Bootstrap):
    """Ranks meet through the caller's process, which passes on what each of them says: there is no address to listen at."""

    def __init__(self, worker: _Worker, order: Order) -> None:
        self.rank, self.size = order.rank, order.size
        self._worker, self._call = worker, order.call
        self.answers: queue.SimpleQueue[list[bytes] | str] = queue.SimpleQueue()

    def allgather(self, data: bytes) -> list[bytes]:
        self._worker.send(Kind.gather, (self._call, data))
        answer = self.answers.get()
        if isinstance(answer, str):
            raise AbortedError(answer)
        return answer

    def close(self) -> None:
        pass


class _Worker:
    """The main thread runs the calls; a second one reads what the caller says, and ends the process when it says nothing any more."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._world: World | None = None
        self._stream: Any = None  # CuPy's current one when the world was opened
        self._bootstrap: _Bootstrap | None = None
        self._stop: Stop | None = None  # the last call that has come
        self._call = 0  # the call that runs, or ran last
        self._interruptible = False
        self._whole, self._postponed = 0, False
        self._main = threading.get_ident()

    def send(self, kind: Kind, body: Any) -> None:
        data = frame(kind, body)
        here = threading.get_ident() == self._main
        self._whole += here  # no interrupt in the middle of a frame
        try:
            with self._sending, contextlib.suppress(OSError):  # the reader sees the caller's end
                self._connection.sendall(data)
        finally:
            self._whole -= here
        if here and self._postponed:
            self._interrupt()

    def run(self) -> None:
        signal.signal(signal.SIGINT, self._interrupt)
        relay.capture(self.send)
        threading.Thread(target=self._read, name="mkernel-worker", daemon=True).start()
        while (order := self._orders.get()) is not None:
            report = self._carry_out(order)
            relay.flush()
            self.send(Kind.report, report)
            del order, report
            gc.collect()  # free arrays of the heap that are in reference cycles
        self._end_world()

    # ---- what the caller says (the reader's thread)
    def _read(self) -> None:
        inbox = Inbox()
        with contextlib.suppress(OSError):
            while part := self._connection.recv(1 << 20):
                for kind, body in inbox.feed(part):
                    self._handle(kind, body)
        os._exit(0)  # the caller has gone; nobody waits for what the main thread may be doing

    def _handle(self, kind: Kind, body: Any) -> None:
        if kind in (Kind.order, Kind.end):
            self._orders.put(body)
        elif kind == Kind.gathered:
            call, parts = body
            with self._lock:
                bootstrap = self._bootstrap if call == self._call else None
            if bootstrap is not None:
                bootstrap.answers.put(parts)
        elif kind == Kind.stop_call:
            self._stop_call(body)

    def _stop_call(self, stop: Stop) -> None:
        with self._lock:
            self._stop = stop
            world = self._world if stop.call == self._call else None
            bootstrap = self._bootstrap if stop.call == self._call else None
        if bootstrap is not None:
            bootstrap.answers.put(stop.reason)
        if world is not None:
            world.told(_failure(stop))
        if stop.raises:
            signal.pthread_kill(self._main, signal.SIGINT)  # wakes system calls too

    def _interrupt(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Handle SIGINT, which comes in the main thread between two instructions."""
        self._postponed = self._whole > 0 and self._interruptible
        if self._postponed or not self._interruptible:
            return
        stop = self._stop
        if stop is not None and not (stop.call == self._call and stop.raises):
            stop = None
        self._interruptible = False
        raise _reason(stop) if stop is not None else KeyboardInterrupt

    # ---- a call (the main thread)
    def _carry_out(self, order: Order) -> Report:
        try:
            with self._lock:
                self._call = order.call
                self._bootstrap = _Bootstrap(self, order)
            try:
                self._interruptible = True
                return self._in_world(order)
            finally:
                self._interruptible = False
        except BaseException as error:  # Ctrl-C between the last two steps
            self._interruptible = False
            return self._failed(order, error)

    def _in_world(self, order: Order) -> Report:
        try:
            world = self._open_world(order)
        except BaseException as error:
            self._interruptible = False
            return self._failed(order, error, opened=False)
        try:
            with current.thread_world(world, alone=True):
                fn, args = load_call(order.payload, order.rank)
                result = fn(world, *args)
            del fn, args
            self._rest(world)
        except BaseException as error:
            self._interruptible = False
            return self._failed(order, error)
        self._interruptible = False
        try:
            return Report(order.call, usable=True, result=dump_result(result, order.rank))
        except ArgumentError as error:
            return self._failed(order, error, usable=True)

    def _open_world(self, order: Order) -> World:
        self._become(order)
        if order.fresh_world:
            self._discard_world("another world takes its place")
        with self._lock:
            stop = self._stop
        if stop is not None and stop.call == order.call:
            raise _reason(stop)
        if self._world is not None:
            self._world.check()
            if self._stream is not None:  # because the function before may have changed it
                self._world.xp.cuda.Device(self._world.device).use()
                self._stream.use()
            return self._world
        assert self._bootstrap is not None
        gc.unfreeze()
        gc.collect()  # what is left of the world before
        world = open_world(self._bootstrap, order.options)
        gc.freeze()  # collecting after each call looks at that call's objects only: with CuPy loaded there are 10^5 others
        self._stream = world.xp.cuda.get_current_stream() if world.target == "cuda" else None
        with self._lock:
            self._world = world
            stop = self._stop
        if stop is not None and stop.call == order.call:
            world.told(_failure(stop))
            raise _reason(stop)
        return world

    def _become(self, order: Order) -> None:
        """Take over what the caller has changed in its process since the last call, and undo what the last function changed."""
        signal.signal(signal.SIGINT, self._interrupt)
        if os.environ != order.environment:
            os.environ.clear()
            os.environ.update(order.environment)
        sys.path[:] = order.path
        with contextlib.suppress(OSError):
            os.chdir(order.folder)
        relay.load_filters(order.warning_filters)
        logging.getLogger("mkernel").setLevel(order.log_level)

    def _rest(self, world: World) -> None:
        """End a call as closing the world would: all kernels of all ranks have ended, and none has failed."""
        world.synchronize()
        if world.target == "cuda":
            world.xp.cuda.Device(world.device).synchronize()  # results may be under way on any stream
        world.exchange("end of the function of mk.launch", None)
        world.check()

    def _failed(self, order: Order, error: BaseException, *, usable: bool = False, opened: bool = True) -> Report:
        kind = type(error)
        summary = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.") + f": {error}"
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # to the caller's function
        text = "".join(traceback.format_exception(kind, error, trace))
        if not usable:
            self._discard_world(f"{kind.__name__}: {error}", tell=True)
        traceback.clear_frames(error.__traceback__)  # arrays that lie in the heap
        return Report(order.call, usable=usable, error=dump_error(error), summary=summary, traceback=text, opened=opened)

    # ---- worlds
    def _discard_world(self, reason: str, *, tell: bool = False) -> None:
        """Close the world at once, without the others; ``tell`` them why."""
        with self._lock:
            world, self._world = self._world, None
        if world is None:
            return
        if tell:
            world.abort(reason)
        else:
            world.told(Failure(FailureKind.aborted, reason, world.rank))
        with contextlib.suppress(Error):
            world.close()

    def _end_world(self) -> None:
        """Close the world together with the others."""
        with self._lock:
            world, self._world = self._world, None
        if world is not None:
            with contextlib.suppress(Error):
                world.close()


def _failure(stop: Stop) -> Failure:
    return Failure(FailureKind.aborted, stop.reason, stop.origin)


def _reason(stop: Stop) -> BaseException:
    return KeyboardInterrupt(stop.reason) if stop.raises == "KeyboardInterrupt" else AbortedError(stop.reason)
