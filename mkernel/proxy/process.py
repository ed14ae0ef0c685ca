"""The engine as a process of its own, which neither a busy rank nor its GIL can hold up.

Both ends are here. The rank's end (``EngineProcess``) gives the process descriptors, offsets and numbers, nothing else; they talk in JSON
over a socket pair. The process's end (``serve``) knows neither CUDA nor MPI, and dies with the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import gc
import json
import logging
import mmap
import os
import platform
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from mkernel.errors import ArgumentError, Error, TransportError
from mkernel.proxy.compiled import open_engine
from mkernel.proxy.cpus import choose_cpus
from mkernel.proxy.engine import Engine, pace_of
from mkernel.proxy.naps import Naps
from mkernel.proxy.pace import GRAPH_SPIN_NS, SPIN_NS, Pace
from mkernel.proxy.ring import RING_BYTES, RingReader
from mkernel.proxy.spawn import die_with, how_it_ended, scrubbed_environment, spawn
from mkernel.transport import Card, Wiring, create

__all__ = ["EngineProcess", "Layout", "Memory", "release_store", "serve"]

_log = logging.getLogger("mkernel")

_LENGTH = struct.Struct("=I")
_START_SECONDS = 120.0  # the longest start: pinning a large heap takes time
_CLOSE_SECONDS = 10.0  # the longest end, before the process is killed
_LISTEN_NS = 4_000_000  # the longest time for which the process does not listen to its rank
_KILL_SECONDS = 5.0  # the longest end of a killed process: a driver may hold it in the kernel


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """A segment: a descriptor that can be mapped, or a dma-buf."""

    fd: int
    size: int  # bytes
    dmabuf: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Everything that the process is given."""

    transport: str  # its name
    rank: int
    peers: Sequence[int]  # ranks on its rail, of the other nodes
    heap: Memory
    signals: Memory
    ring: int  # descriptor of the command ring
    card: Card | None  # for transports that need one
    more_cards: Sequence[Card] = ()  # over which puts are spread, too
    timeout: float  # seconds after which a wait inside a call ends
    spin_ns: int = SPIN_NS  # how long the engine spins after the last put
    follows: bool = False  # it spins as long as calls are under way, too
    graph_spin_ns: int = GRAPH_SPIN_NS  # how long it then spins where calls have been captured in graphs

    def encode(self, **more: int) -> bytes:
        """The layout and ``more`` as JSON."""
        return json.dumps(dataclasses.asdict(self) | more).encode()

    @classmethod
    def decode(cls, text: bytes) -> tuple[Layout, dict[str, int]]:
        """The inverse of ``encode``: the layout and ``more``."""
        fields: dict[str, Any] = json.loads(text)
        more = {name: int(fields.pop(name)) for name in ("wake", "parent")}
        fields["heap"], fields["signals"] = Memory(**fields["heap"]), Memory(**fields["signals"])
        if fields["card"] is not None:
            fields["card"] = Card(**fields["card"])
        fields["more_cards"] = tuple(Card(**card) for card in fields["more_cards"])
        return cls(**fields), more


class _Channel:
    """Messages over a stream socket: JSON objects. Byte strings inside them travel as Latin-1 text."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._inbox = bytearray()

    def send(self, **message: Any) -> None:
        body = json.dumps(message).encode()
        self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> dict[str, Any]:
        """Wait for the next message. Raises EOFError if the other end has gone."""
        while (message := self.take()) is None:
            self.fill()
        return message

    def fill(self) -> None:
        try:
            part = self.socket.recv(1 << 20)
        except ConnectionResetError:
            part = b""
        if not part:
            raise EOFError
        self._inbox += part

    def take(self) -> dict[str, Any] | None:
        if len(self._inbox) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._inbox)
        end = _LENGTH.size + length
        if len(self._inbox) < end:
            return None
        message: dict[str, Any] = json.loads(self._inbox[_LENGTH.size : end])
        del self._inbox[:end]
        return message


# ---- the rank's end
class EngineProcess:
    """Starts the process and talks to it. Answer ``step`` by ``give`` until it returns None; then ``watch``, and at last ``close``.

    Parameters
    ----------
    layout
        What the process works on. Its descriptors remain the caller's, who may close them once ``step`` has returned None.
    """

    def __init__(self, layout: Layout) -> None:
        self.rank = layout.rank
        mine, theirs = socket.socketpair()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._channel = _Channel(mine)
        self._lock = threading.Lock()
        self._closing = False
        self._watcher: threading.Thread | None = None
        try:
            with theirs:
                fds = {theirs.fileno(), self._wake, layout.heap.fd, layout.signals.fd, layout.ring}
                self._process = spawn("mkernel.proxy", [str(theirs.fileno())], scrubbed_environment(os.environ, gpus=False), fds)
            mine.sendall(_framed(layout.encode(wake=self._wake, parent=os.getpid())))
        except BaseException:
            mine.close()
            os.close(self._wake)
            raise

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def step(self) -> bytes | None:
        """Wait for the process. Returns bytes that it wants to exchange with the processes of all ranks, or None once its engine runs.

        Raises
        ------
        TransportError, ArgumentError
            The error that the process met, or that it ended or did not start in time.
        """
        self._channel.socket.settimeout(_START_SECONDS)
        try:
            message = self._channel.receive()
        except EOFError:
            raise self._ended() from None
        except TimeoutError:
            text = f"the engine process of rank {self.rank} did not start within {_START_SECONDS:g} s"
            raise TransportError(text, op="start", status="timeout") from None
        if "error" in message:
            raise _error(message["error"])
        if "exchange" in message:
            return str(message["exchange"]).encode("latin1")
        return None

    def give(self, parts: Sequence[bytes]) -> None:
        """Answer ``step`` with the bytes of all ranks, by rank."""
        self._channel.send(parts=[part.decode("latin1") for part in parts])

    def watch(self, on_error: Callable[[TransportError], object]) -> None:
        """Call ``on_error`` once, on a thread of its own, if the engine fails or the process ends."""
        self._channel.socket.settimeout(None)
        self._watcher = threading.Thread(target=self._watch, args=(on_error,), name=f"mkernel-engine-{self.rank}", daemon=True)
        self._watcher.start()

    def _watch(self, on_error: Callable[[TransportError], object]) -> None:
        try:
            error: Error = _error(self._channel.receive()["error"])  # a running engine says nothing else
        except (EOFError, OSError):
            error = self._ended()
        except BaseException as unexpected:  # whatever it is: nobody else listens to the engine
            _log.exception("rank %d cannot understand its engine process", self.rank)
            text = f"a message of rank {self.rank}'s engine process cannot be understood: {type(unexpected).__name__}: {unexpected}"
            error = TransportError(text, op="engine", status=type(unexpected).__name__)
        if not self._closing:
            _log.error("engine stopped: %s", error)
            on_error(error if isinstance(error, TransportError) else TransportError(str(error), status=type(error).__name__))

    def wake(self) -> None:
        """Let the engine spin again: commands are about to come."""
        with contextlib.suppress(BlockingIOError):  # the counter is full, so the engine is woken anyway
            os.eventfd_write(self._wake, 1)

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Ask the process to end, and kill it after ``timeout`` seconds. Safe to call twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        with contextlib.suppress(OSError):
            self._channel.send(stop=True)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            _log.error("the engine process of rank %d did not stop within %g s: killed", self.rank, timeout)
            self._process.kill()
            try:
                self._process.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                _log.error("the engine process of rank %d (%d) is killed and does not end: see dmesg", self.rank, self.pid)
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)  # ends the watcher's wait
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(timeout)
        self._channel.socket.close()
        os.close(self._wake)

    def _ended(self) -> TransportError:
        try:
            how = how_it_ended(self._process.wait(1.0))
        except subprocess.TimeoutExpired:
            how = "closed its connection"
        return TransportError(f"the engine process of rank {self.rank} {how}", op="engine", status="ended")


def _framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def _error(fields: dict[str, Any]) -> Error:
    if "argument" in fields:
        return ArgumentError(fields["argument"], fields["value"], fields["rule"], fields["remedy"])
    return TransportError(fields.pop("message"), **fields)


# ---- the process's end
def serve(fd: int) -> int:
    """Run the engine whose rank is at the other end of the socket ``fd``, until the rank says stop or ends. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group, and the rank decides
    channel = _Channel(socket.socket(fileno=fd))
    try:
        fields = channel.receive()
        layout, more = Layout.decode(json.dumps(fields).encode())
        die_with(more["parent"])
        with contextlib.ExitStack() as stack:
            try:
                engine = _open(layout, channel, stack)
            except Exception as error:
                channel.send(error=_fields(error))
                return 1
            channel.send(ready=True)
            gc.collect()
            gc.freeze()
            pace = pace_of(engine.ring, layout.spin_ns, follows=layout.follows, graph_spin_ns=layout.graph_spin_ns)
            _Loop(engine, channel, more["wake"], pace).run()
    except (EOFError, OSError):
        return 0  # the rank has gone
    return 0


def _open(layout: Layout, channel: _Channel, stack: contextlib.ExitStack) -> Engine:
    def exchange(part: bytes) -> list[bytes]:
        channel.send(exchange=part.decode("latin1"))
        return [text.encode("latin1") for text in channel.receive()["parts"]]

    store = release_store()
    heap, signals = _map(layout.heap), _map(layout.signals)
    ring = mmap.mmap(layout.ring, RING_BYTES)
    os.close(layout.ring)
    choose_cpus(_cpus_near(layout.card))
    wiring = Wiring(
        rank=layout.rank,
        heap_address=heap,
        heap_bytes=layout.heap.size,
        signal_bytes=layout.signals.size,
        peers=dict.fromkeys(layout.peers, (0, 0)),
        copier=_no_copier,
        clock_ns=time.monotonic_ns,
        signal_address=signals,
        heap_dmabuf=layout.heap.fd if layout.heap.dmabuf else -1,
        signal_dmabuf=layout.signals.fd if layout.signals.dmabuf else -1,
        card=layout.card,
        more_cards=layout.more_cards,
        exchange=exchange,
        store=store,
        timeout=layout.timeout,
    )
    plain = platform.machine() in _ORDERED
    reader = RingReader(memoryview(ring), store=None if plain else store)
    engine = open_engine(layout.transport, reader, create(layout.transport, wiring))
    stack.callback(engine.close)
    return engine


_mapped: list[mmap.mmap] = []  # never unmapped: a card may use this memory to the end of the process


def _map(memory: Memory) -> int:
    """Map a segment; returns its address in this process, 0 for GPU memory."""
    if memory.dmabuf or memory.fd < 0:
        return 0
    _mapped.append(mmap.mmap(memory.fd, memory.size))
    os.close(memory.fd)
    return ctypes.addressof(ctypes.c_char.from_buffer(_mapped[-1]))


def _cpus_near(card: Card | None) -> AbstractSet[int]:
    if card is None:
        return frozenset()
    from mkernel.transport.devices import local_cpus

    return local_cpus(card.device)


def _no_copier() -> Any:
    raise ArgumentError("transport", "emulated", "runs in the rank's own process")


_ORDERED = ("x86_64", "AMD64")  # machines on which plain stores keep their order


def release_store() -> Callable[[int, int], object]:
    """A function ``store(address, value)`` that writes a 64-bit word with release."""
    if platform.machine() in _ORDERED:
        word = ctypes.c_uint64

        def store(address: int, value: int) -> None:
            word.from_address(address).value = value  # a single aligned store

        return store
    function = getattr(ctypes.CDLL("libatomic.so.1"), "__atomic_store_8")
    function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
    return lambda address, value: function(address, value, 3)  # __ATOMIC_RELEASE


class _Loop:
    """Steps the engine until the rank says stop, or ends."""

    def __init__(self, engine: Engine, channel: _Channel, wake: int, pace: Pace) -> None:
        self._engine, self._channel, self._wake, self._pace = engine, channel, wake, pace
        self._naps = Naps((channel.socket.fileno(), wake))

    def run(self) -> None:
        moved = True
        try:
            while not self._told_to_stop():
                moved = self._wait(self._engine.spin(self._pace, moved, _LISTEN_NS))
            return
        except (EOFError, OSError):
            raise  # the rank has gone
        except Exception as error:
            self._channel.send(error=_fields(error))
        while "stop" not in self._channel.receive():  # queue pairs stay open until then, so that peers learn the cause and not a symptom
            pass

    def _told_to_stop(self) -> bool:
        message = self._channel.take()
        return message is not None and "stop" in message

    def _wait(self, nap_ns: int) -> bool:
        """Sleep at most that long; returns whether the rank has said something, e.g. that it has launched a kernel."""
        ready = self._naps.sleep(nap_ns)
        if self._channel.socket.fileno() in ready:
            self._channel.fill()
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        return bool(ready)


def _fields(error: Exception) -> dict[str, Any]:
    """The fields of an error, as ``_error`` wants them."""
    if isinstance(error, ArgumentError):
        return {"argument": error.argument, "value": str(error.value), "rule": error.rule, "remedy": error.remedy}
    if isinstance(error, TransportError):
        fields = {name: getattr(error, name) for name in ("peer", "op", "status", "queue_pair", "remedy")}
        return {"message": str(error), **fields}
    status = errno.errorcode.get(error.errno or 0, "OSError") if isinstance(error, OSError) else type(error).__name__
    return {"message": f"the engine failed: {type(error).__name__}: {error}", "op": "open", "status": status}
