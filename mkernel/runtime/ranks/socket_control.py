"""The control channel between processes: in each host a star of sockets around its lowest rank, and those around rank 0 (TCP).

Nothing lies in the file system: the sockets of a host are abstract, and also carry the descriptors of the symmetric segments at ``init``.
At both ends of every connection stands a process that has proved that it belongs to the world (``handshake.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from mkernel import env
from mkernel.errors import Error, PeerLostError
from mkernel.runtime.failure import Failure, Kind
from mkernel.runtime.ranks import addresses
from mkernel.runtime.ranks.bootstrap import Bootstrap
from mkernel.runtime.ranks.control import Collector, Control, Failed, Listener, Request, Waiting, not_told
from mkernel.runtime.ranks.handshake import Caller, Door, knock

__all__ = ["SocketControl"]

_REQUEST, _RESULT, _PENDING, _FAILURE, _BYE = range(1, 6)
_FRAME = struct.Struct("!BI")  # kind, bytes that follow
_PART = struct.Struct("!I")
_FDS = struct.Struct("!II")  # rank, descriptors
_SEND_SECONDS = 10.0  # a peer that takes no bytes for so long is stopped or swamped, and is given up
_INCOMPLETE_SECONDS = 0.05  # rank 0 tells everyone who waits when a collective has been incomplete for so long

_log = logging.getLogger("mkernel")
_living: weakref.WeakSet[SocketControl] = weakref.WeakSet()


class _Link:
    """A connection to one neighbour."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer, self.socket = peer, connection
        self.inbox = bytearray()
        self.leaving = False  # it said goodbye, so that end of file is no loss
        self.broken = self.timed_out = False  # nothing can be sent any more; because it took nothing
        self._lock = threading.Lock()
        connection.settimeout(_SEND_SECONDS)

    def send(self, kind: int, body: bytes) -> None:
        """Send a frame if the peer is there; the reader sees a dead peer as end of file. After part of a frame nothing more can be sent."""
        with self._lock:
            if self.broken:
                return
            try:
                self.socket.sendall(_FRAME.pack(kind, len(body)) + body)
            except OSError as error:
                self.broken, self.timed_out = True, isinstance(error, TimeoutError)
                if self.timed_out:  # else it has ended already
                    with contextlib.suppress(OSError):
                        self.socket.shutdown(socket.SHUT_RDWR)  # the readers at both ends see the end

    def ending(self) -> str:
        """What an end of file means."""
        if self.timed_out:
            return f"it took no messages for {_SEND_SECONDS:g} s"
        return "its process ended without closing the world"

    def frames(self) -> Iterator[tuple[int, bytes]]:
        while len(self.inbox) >= _FRAME.size:
            kind, length = _FRAME.unpack_from(self.inbox)
            if len(self.inbox) < _FRAME.size + length:
                return
            body = bytes(self.inbox[_FRAME.size : _FRAME.size + length])
            del self.inbox[: _FRAME.size + length]
            yield kind, body


class SocketControl(Control):
    """Ranks are processes.

    Parameters
    ----------
    bootstrap
        Used once, to tell addresses. Collective.
    hosts
        By rank: equal names share a host (``bootstrap.host_identity``).
    timeout
        Seconds until all are connected.
    """

    def __init__(self, bootstrap: Bootstrap, hosts: Sequence[str], timeout: float, waiting: Waiting = not_told) -> None:
        super().__init__(bootstrap.rank, bootstrap.size, waiting)
        self._host_ranks = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        self._leader = self._host_ranks[0]
        self._links: dict[int, _Link] = {}
        self._condition = threading.Condition()
        self._results: dict[int, list[bytes]] = {}
        self._arrived: list[int] = []  # ranks that wait, as rank 0 last told
        self._collector = Collector(self.size)
        self._collector_lock = threading.RLock()
        self._told: tuple[int, ...] = ()
        self._awaited = 0  # sequence of the collective this rank sleeps in; 0: none
        self._passed_on = False  # the failure has been: a wait may end with it
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._reader = threading.Thread(target=self._read_all, name="mkernel-control", daemon=True)
        _living.add(self)
        try:
            self._connect(bootstrap, hosts, timeout)
        except BaseException:
            self.close()
            raise

    # ---- connecting
    def _connect(self, bootstrap: Bootstrap, hosts: Sequence[str], timeout: float) -> None:
        own = Caller("control", self.rank, self.size, bootstrap.shared_secret())
        members = self._host_ranks[1:] if self.rank == self._leader else []
        leaders = sorted({list(hosts).index(host) for host in hosts})
        with contextlib.ExitStack() as stack:
            local = stack.enter_context(addresses.listen_local()) if members else None
            mine = {"local": local.getsockname().decode("latin1") if local else "", "addresses": addresses.own_addresses()}
            told = [json.loads(part) for part in bootstrap.allgather(json.dumps(mine).encode())]
            listeners: dict[socket.socket, list[int]] = {local: members} if local else {}
            root: list[tuple[str, int]] = []
            if len(leaders) > 1:
                remote, root = self._listen(bootstrap, [address for leader in leaders[1:] for address in told[leader]["addresses"]])
                for listener in remote:
                    stack.enter_context(listener)
                    listeners[listener] = leaders[1:]
            deadline = time.monotonic() + timeout
            if self.rank != self._leader:
                name = told[self._leader]["local"].encode("latin1")
                self._link(self._leader, knock([name], own, deadline, f"the socket of rank {self._leader}"))
            elif self.rank != 0:
                where = "the control channel of rank 0, " + ", ".join(f"{host}:{port}" for host, port in root)
                self._link(0, knock(root, own, deadline, where))
            if listeners:
                for rank, connection in Door(listeners, own, "the control channel").admit(deadline).items():
                    self._link(rank, connection)

    def _listen(self, bootstrap: Bootstrap, others: Sequence[str]) -> tuple[list[socket.socket], list[tuple[str, int]]]:
        """Rank 0's sockets for other hosts; and where they are, for all. Collective."""
        listeners: list[socket.socket] = []
        told: dict[str, object] = {"problem": "", "at": []}
        if self.rank == 0:
            named = env.LISTEN.get() or bootstrap.root_address
            try:  # the others wait for what comes of it
                for host in [named] if named else addresses.facing(others):
                    listeners += addresses.listen(host, 0, source="MKERNEL_LISTEN")
                told["at"] = [(host, s.getsockname()[1]) for s in listeners for host in _reachable(str(s.getsockname()[0]))]
            except Error as error:
                told["problem"] = str(error)
        (first, *_) = bootstrap.allgather(json.dumps(told).encode())
        told = json.loads(first)
        if told["problem"] or not told["at"]:
            for listener in listeners:
                listener.close()
            raise Error(f"rank 0 cannot listen for the other hosts: {told['problem'] or 'no address of it faces them; set MKERNEL_LISTEN'}")
        return listeners, [(host, port) for host, port in told["at"]]  # type: ignore[attr-defined]  # as it was put in

    def _link(self, peer: int, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX:
            addresses.tune(connection)
        self._links[peer] = _Link(peer, connection)

    # ---- descriptors
    @contextlib.contextmanager
    def exchange_fds(self, fds: Sequence[int], timeout: float) -> Iterator[dict[int, list[int]]]:
        table = {self.rank: list(fds)}
        try:
            if self.rank == self._leader:
                for rank in self._host_ranks[1:]:
                    self._receive_fds(rank, len(fds), timeout, table)
                for rank in self._host_ranks[1:]:
                    for owner in self._host_ranks:
                        self._send_fds(rank, owner, table[owner])
            else:
                self._send_fds(self._leader, self.rank, fds)
                for _ in self._host_ranks:
                    self._receive_fds(self._leader, len(fds), timeout, table)
            yield table
        finally:
            for owner, received in table.items():
                if owner != self.rank:
                    for fd in received:
                        os.close(fd)

    def _send_fds(self, to: int, owner: int, fds: Sequence[int]) -> None:
        try:
            socket.send_fds(self._links[to].socket, [_FDS.pack(owner, len(fds))], list(fds))
        except OSError as error:
            raise PeerLostError(f"rank {to} went away during init ({error})", to) from error

    def _receive_fds(self, source: int, count: int, timeout: float, table: dict[int, list[int]]) -> None:
        link = self._links[source].socket
        link.settimeout(timeout)
        try:
            header, fds, _, _ = socket.recv_fds(link, _FDS.size, count)
        except OSError as error:
            raise PeerLostError(f"rank {source} sent no descriptors during init ({error})", source) from error
        finally:
            link.settimeout(_SEND_SECONDS)
        if len(header) < _FDS.size or len(fds) != count:
            for fd in fds:
                os.close(fd)
            raise PeerLostError(f"rank {source} went away during init", source)
        owner, _ = _FDS.unpack(header)
        if owner == self.rank:  # our own, back from the leader
            for fd in fds:
                os.close(fd)
        else:
            table[owner] = fds

    # ---- collectives
    def start(self, listener: Listener) -> None:
        self._listener = listener
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        for link in self._links.values():
            self._selector.register(link.socket, selectors.EVENT_READ, link)
        self._reader.start()

    def collective(self, key: str, what: str, *, call: int, timeout: float, data: bytes = b"", last: str = "") -> list[bytes]:
        with self._condition:
            if self.failure is not None:
                self._condition.wait_for(lambda: self._passed_on, timeout)
                raise Failed(self.failure)
            self.started += 1
            sequence = self._awaited = self.started
            self._arrived = []
        request = Request(self.rank, sequence, call, key, what, data, last)
        if self.rank == 0:
            self._arrive(request)
        else:
            self._upward.send(_REQUEST, _pack_request(request))
        over = lambda: sequence in self._results or self._passed_on  # noqa: E731
        with self._waiting(over), self._condition:
            self._condition.wait_for(over, timeout)
        with self._condition:
            self._awaited = 0
            if sequence in self._results:
                return self._results.pop(sequence)
            failure = self.failure
        if failure is None:
            failure = self._timed_out(what, timeout, self._arrived)
            self.abort(failure)
        raise Failed(failure)

    @property
    def _upward(self) -> _Link:
        return self._links[0 if self.rank == self._leader else self._leader]

    @property
    def _downward(self) -> list[_Link]:
        links = list(self._links.values())
        return links if self.rank == 0 else [link for link in links if link is not self._upward]

    def _arrive(self, request: Request) -> None:
        """On rank 0: count an arrival; send the result down when it was the last."""
        with self._collector_lock:
            outcome = self._collector.arrive(request)
            self._told = ()
        if isinstance(outcome, Failure):
            self._learn(outcome, None)
        elif outcome is not None:
            self._deliver(request.sequence, b"".join(_PART.pack(len(part)) + part for part in outcome))
        else:
            self._poke()  # the reader starts its clock

    def _deliver(self, sequence: int, packed: bytes) -> None:
        body = struct.pack("!Q", sequence) + packed
        for link in self._downward:  # before this rank goes on, and perhaps closes
            link.send(_RESULT, body)
        with self._condition:
            self._results[sequence] = _unpack_parts(packed)
            self._condition.notify_all()

    # ---- failures
    def abort(self, failure: Failure) -> None:
        self._learn(failure, None, tell=False)

    def _learn(self, failure: Failure, source: _Link | None, *, tell: bool = True) -> None:
        """Remember a failure and pass it on. Links form a tree, so everybody hears it once.

        Waits of this rank end after that: its goodbye, or the end of its process, must not be what the others hear first.
        """
        with self._condition:
            if not failure.replaces(self.failure):
                return
            self.failure = failure = failure.joined(self.failure)
        try:
            body = failure.encode()
            for link in list(self._links.values()):
                if link is not source and not link.leaving:
                    link.send(_FAILURE, body)
            if tell and self._listener is not None:
                self._listener.on_failure(failure)
        finally:
            with self._condition:
                self._passed_on = True
                self._condition.notify_all()

    # ---- the reader thread
    def _read_all(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # of any kind, because a thread that ends in silence leaves everybody waiting
            if self._closing:
                return
            _log.exception("rank %d: the control channel failed", self.rank)
            text = f"the control channel of rank {self.rank} failed: {type(error).__name__}: {error}"
            self._learn(Failure(Kind.aborted, text, self.rank), None)

    def _serve(self) -> None:
        waiting_since = 0.0
        while not self._closing:
            incomplete = self.rank == 0 and bool(self._collector.arrived) and self.failure is None
            events = self._selector.select(_INCOMPLETE_SECONDS if incomplete else None)
            for key, _ in events:
                if key.data is None:
                    with contextlib.suppress(OSError):
                        self._wake_reader.recv(4096)
                else:
                    self._read(key.data)
            if not incomplete:
                waiting_since = time.monotonic()
            elif time.monotonic() - waiting_since >= _INCOMPLETE_SECONDS:
                self._tell_who_waits()

    def _read(self, link: _Link) -> None:
        try:
            part = link.socket.recv(1 << 16)
        except OSError:
            part = b""
        link.inbox += part
        for kind, body in link.frames():
            self._handle(link, kind, body)
        if not part:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(link.socket)
            if not link.leaving and not self._closing:
                self._learn(Failure(Kind.lost, f"rank {link.peer} has gone: {link.ending()}", link.peer), link)

    def _handle(self, link: _Link, kind: int, body: bytes) -> None:
        if kind == _REQUEST:
            if self.rank == 0:
                self._arrive(_unpack_request(body))
            else:
                self._upward.send(_REQUEST, body)
        elif kind == _RESULT:
            self._deliver(struct.unpack_from("!Q", body)[0], body[8:])
        elif kind == _PENDING:
            self._pending([Request(**fields) for fields in json.loads(body)], body)
        elif kind == _FAILURE:
            self._learn(Failure.decode(body), link)
        elif kind == _BYE:
            (rank,) = struct.unpack("!I", body)
            link.leaving = link.leaving or rank == link.peer
            self._departed(rank, link, body)
        else:
            raise ValueError(f"rank {link.peer} sent a message of unknown kind {kind}")

    def _departed(self, rank: int, link: _Link, body: bytes) -> None:
        if self.rank == 0:
            with self._collector_lock:
                failure = self._collector.depart(rank)
            if failure is not None:
                self._learn(failure, None)
        elif link is self._upward:
            with self._condition:
                stranded = self._awaited != 0 and self._awaited not in self._results
            if stranded:
                self._learn(Failure(Kind.aborted, f"rank {rank} has closed its world while rank {self.rank} waited", rank), link)
        else:
            self._upward.send(_BYE, body)

    def _tell_who_waits(self) -> None:
        with self._collector_lock:
            requests = [dataclasses.replace(r, data=b"") for r in self._collector.arrived.values()]
            ranks = tuple(request.rank for request in requests)
            if not requests or ranks == self._told:
                return
            self._told = ranks
        body = json.dumps([{k: v for k, v in dataclasses.asdict(r).items() if k != "data"} for r in requests]).encode()
        self._pending(requests, body)

    def _pending(self, requests: list[Request], body: bytes) -> None:
        for link in self._downward:
            link.send(_PENDING, body)
        self._arrived = [request.rank for request in requests]
        failure = self._listener.on_pending(requests) if self._listener is not None else None
        if failure is not None:
            self._learn(failure, None)

    def _poke(self) -> None:
        """Wake the reader. Never blocks: the reader itself pokes, once per request, and bytes that are waiting wake it anyway."""
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")

    # ---- the end
    def close(self) -> None:
        if self._closing:
            return
        if self._reader is not threading.current_thread():
            with self._condition:  # the reason must be sent before the goodbye
                self._condition.wait_for(lambda: self.failure is None or self._passed_on, _SEND_SECONDS)
        for link in self._links.values():
            link.send(_BYE, struct.pack("!I", self.rank))
        self._closing = True
        self._poke()
        if self._reader.ident is not None and self._reader is not threading.current_thread():
            self._reader.join(_SEND_SECONDS)
        self._drop()

    def _drop(self) -> None:
        """Close the sockets without a word (also what a forked child does with its copies)."""
        self._closing = True
        for link in self._links.values():
            link.socket.close()
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()


def _drop_in_child() -> None:
    for control in list(_living):  # a forked child that kept the sockets open would hide this process's death
        control._drop()


os.register_at_fork(after_in_child=_drop_in_child)


def _reachable(address: str) -> list[str]:
    """Addresses by which other hosts may reach a socket that listens at ``address``."""
    return addresses.own_addresses() if addresses.any_address(address) else [address]


def _pack_request(request: Request) -> bytes:
    head = json.dumps([request.rank, request.sequence, request.call, request.key, request.what, request.last]).encode()
    return _PART.pack(len(head)) + head + request.data


def _unpack_request(body: bytes) -> Request:
    (length,) = _PART.unpack_from(body)
    rank, sequence, call, key, what, last = json.loads(body[_PART.size : _PART.size + length])
    return Request(rank, sequence, call, key, what, body[_PART.size + length :], last)


def _unpack_parts(packed: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(packed):
        (length,) = _PART.unpack_from(packed, at)
        at += _PART.size
        parts.append(packed[at : at + length])
        at += length
    return parts
