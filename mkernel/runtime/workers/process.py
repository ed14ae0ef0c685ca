"""A worker process, as its pool sees it: the socket, what it prints, and how it ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from mkernel.proxy.spawn import how_it_ended, spawn
from mkernel.runtime.workers.messages import Inbox, Kind, frame
from mkernel.runtime.workers.relay import Lines

__all__ = ["WorkerProcess"]

_END_SECONDS = 5.0  # how long a process may live after its socket has ended


class WorkerProcess:
    """One rank's process. Used by the pool's thread only; nothing here blocks but ``reap``.

    Attributes
    ----------
    busy
        It has been given a call, and has not reported yet.
    """

    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self.rank = rank
        self.busy = False
        self._inbox = Inbox()
        self._outbox: deque[memoryview] = deque()
        self._gone = False
        self._received = 0  # bytes
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            mine, other = socket.socketpair()
            undo.callback(mine.close)
            theirs.callback(other.close)
            ends = []
            self.lines: list[Lines] = []
            for name in ("stdout", "stderr"):
                reader, writer = os.pipe()
                self.lines.append(Lines(reader, name))
                undo.callback(self.lines[-1].close)
                theirs.callback(os.close, writer)
                ends.append(writer)
            arguments = [str(other.fileno()), str(os.getpid())]
            self._process: subprocess.Popen[bytes] = spawn(
                "mkernel.runtime.workers", arguments, environment, [other.fileno()], own_session=True, stdout=ends[0], stderr=ends[1]
            )
            undo.pop_all()
        mine.setblocking(False)
        self._socket = mine

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is there and can be talked to."""
        return not self._gone and self._process.poll() is None

    # ---- talking
    def send(self, kind: Kind, body: Any) -> None:
        """Put a message into the outbox; ``write`` sends it."""
        self._outbox.append(memoryview(frame(kind, body)))

    def files(self, *, listen: bool) -> Iterator[tuple[int, int]]:
        """Descriptors and the events to wait for. ``listen``: also to what it prints."""
        if not self._gone:
            yield self._socket.fileno(), select.POLLIN | (select.POLLOUT if self._outbox else 0)
        if listen:
            for lines in self.lines:
                if lines.fd >= 0 and not lines.ended:
                    yield lines.fd, select.POLLIN

    def write(self) -> None:
        """Send of the outbox what the socket takes."""
        try:
            while self._outbox:
                part = self._outbox.popleft()
                sent = self._socket.send(part)
                if sent < len(part):
                    self._outbox.appendleft(part[sent:])
        except BlockingIOError:
            self._outbox.appendleft(part)
        except OSError:
            self._outbox.clear()  # the process has gone, which reading will report

    def read(self) -> Iterator[tuple[Kind, Any]]:
        """The messages that have come."""
        try:
            part = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._gone = self._gone or not part
        self._received += len(part)
        yield from self._inbox.feed(part)

    def rest(self) -> Iterator[tuple[Kind, Any]]:
        """The messages that a process has left behind."""
        self._gone = False
        size = -1
        while not self._gone and size != (size := self._received):
            yield from self.read()
        self._gone = True

    # ---- ending
    def kill(self) -> None:
        """End the process, and those that it has started in its session."""
        self._gone = True
        if self._process.poll() is None:  # else the number may belong to another process by now
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def reap(self) -> str:
        """Wait for the end of a process that has gone, and kill it if it stays; how it ended, in words. Its pipes stay to be read."""
        self._gone = True
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self._socket.close()
        return how_it_ended(code)

    def forget(self) -> None:
        """Close this process's ends silently: in a forked child, and after ``reap``."""
        self._gone = True
        self._socket.close()
        for lines in self.lines:
            lines.close()
