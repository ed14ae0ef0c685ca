"""One rank of a network of machines: a heap, flags, a ring, an engine, and a transport over the machine's card."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from mkernel.abi import SIGNAL_FLAGS
from mkernel.proxy.compiled import open_engine
from mkernel.proxy.ring import RingReader
from mkernel.transport import Wiring, create
from mkernel.transport.devices import cards_for
from tests.transport.harness import Producer

MACHINE, MACHINES = int(os.environ["TEST_MACHINE"]), int(os.environ["TEST_MACHINES"])
PORT = 5001
DEADLINE = 60.0  # seconds, with the other machines
SIGNAL_BYTES = 1 << 16
TIMEOUT = 60.0  # of the cards' retries too: no test here is about them, and machines may stand still for seconds
QUIET = 40.0  # seconds without any change after which nothing more is expected: longer than the retries


def counters() -> dict[str, int]:
    """Counters of the software card that are not 0: what it did where nothing goes on."""
    found = {
        path.name: int(path.read_text())
        for path in Path("/sys/class/infiniband").glob("*/ports/1/hw_counters/*")
        if path.name != "lifespan"
    }
    return {name: value for name, value in sorted(found.items()) if value}


class Wires:
    """Sockets over the control network: machine 0 has one to each other machine, in order; the others have one, to machine 0."""

    def __init__(self) -> None:
        if MACHINE == 0:
            with socket.create_server(("10.77.0.1", PORT)) as server:
                server.settimeout(DEADLINE)
                found = {}
                while len(found) < MACHINES - 1:
                    wire = server.accept()[0]
                    found[int.from_bytes(wire.recv(1), "little")] = wire
            self.all = [found[machine] for machine in sorted(found)]
        else:
            end = time.monotonic() + DEADLINE
            while True:
                try:
                    wire = socket.create_connection(("10.77.0.1", PORT), 2)
                    break
                except OSError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.05)
            wire.sendall(bytes([MACHINE]))
            self.all = [wire]
        for wire in self.all:
            wire.settimeout(DEADLINE)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, mine: bytes) -> list[bytes]:
        """Everybody's bytes by machine, to everybody."""
        if MACHINE:
            send(self.all[0], mine)
            return list(receive(self.all[0]))
        everybody = [mine, *(receive(wire) for wire in self.all)]
        for wire in self.all:
            send(wire, everybody)
        return everybody


def send(wire: socket.socket, thing: Any) -> None:
    data = pickle.dumps(thing)
    wire.sendall(struct.pack("<Q", len(data)) + data)


def receive(wire: socket.socket) -> Any:
    size = struct.unpack("<Q", _exactly(wire, 8))[0]
    return pickle.loads(_exactly(wire, size))


def _exactly(wire: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = wire.recv(size - len(data))
        if not part:
            raise ConnectionError("the other machine has hung up")
        data += part
    return bytes(data)


class Node:
    """The rank of a machine has its number. ``transport``: its name; the heap is zero."""

    def __init__(self, wires: Wires, transport: str, heap_bytes: int = 1 << 20) -> None:
        self.rank = MACHINE
        self.memory = mmap.mmap(-1, heap_bytes + SIGNAL_BYTES)
        self.view = memoryview(self.memory)
        self.heap = self.view[:heap_bytes]
        self.flags = self.view[heap_bytes:].cast("Q")
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.producer = Producer()
        wiring = Wiring(
            rank=MACHINE,
            heap_address=address,
            heap_bytes=heap_bytes,
            signal_bytes=SIGNAL_BYTES,
            peers={peer: (0, 0) for peer in range(MACHINES) if peer != MACHINE},
            copier=_no_copier,
            clock_ns=time.monotonic_ns,
            signal_address=address + heap_bytes,
            card=cards_for(transport, 0)[0],
            exchange=wires.exchange,
            store=self._store,
            timeout=TIMEOUT,
        )
        self.transport = create(transport, wiring)
        self.engine = open_engine(transport, RingReader(self.producer.buffer), self.transport)  # MKERNEL_ENGINE says which

    @staticmethod
    def _store(address: int, value: int) -> None:
        ctypes.c_uint64.from_address(address).value = value

    @staticmethod
    def flag_offset(index: int) -> int:
        return SIGNAL_FLAGS + 8 * index

    def flag(self, index: int) -> int:
        return self.flags[self.flag_offset(index) >> 3]

    def issue(self, channel: int, to: int, source: int, target: int, size: int, flag: int, value: int) -> int | None:
        return self.producer.issue(channel, to, source, target, size, self.flag_offset(flag), value)

    def close(self) -> None:
        self.engine.close()


def _no_copier() -> Any:
    raise AssertionError("this transport copies nothing itself")


class RemoteNetwork:
    """``contract.Network`` as machine 0 sees it: other machines do as they are told over the control network, and step their engines."""

    def __init__(self, node: Node, wires: Wires) -> None:
        self.node, self.wires = node, wires.all
        self.ranks = range(MACHINES)
        self.producers: Sequence[Any] = [node.producer, *(_RemoteProducer(self, rank) for rank in self.ranks if rank)]
        self.flags: dict[int, list[int]] = {}
        self.watcher = lambda: None
        self.moved = time.monotonic()
        self.last: list[Any] = []
        self.turn()

    def call(self, rank: int, *request: Any) -> Any:
        wire = self.wires[rank - 1]
        send(wire, request)
        return receive(wire)

    @staticmethod
    def flag_offset(index: int) -> int:
        return Node.flag_offset(index)

    def flag(self, rank: int, index: int) -> int:
        """As it was at the last turn, in another machine: what is read of its memory is read later, so a flag may not be ahead of it."""
        return self.flags[rank][index] if rank else self.node.flag(index)

    def read(self, rank: int, offset: int, size: int) -> bytes:
        return self.call(rank, "read", offset, size) if rank else bytes(self.node.heap[offset : offset + size])

    def write(self, rank: int, offset: int, data: bytes) -> None:
        if rank:
            self.call(rank, "write", offset, data)
        else:
            self.node.heap[offset : offset + len(data)] = data

    def turn(self) -> bool:
        """A little time; False when nothing has changed for long."""
        for _ in range(8):
            self.node.engine.step()
        state: list[Any] = [self.node.producer.completed, [self.node.flag(index) for index in range(64)]]
        for wire in self.wires:
            send(wire, ("state",))
        for rank in self.ranks[1:]:
            completed, self.flags[rank] = receive(self.wires[rank - 1])
            self.producers[rank].completed = completed
            state += [completed, self.flags[rank]]
        now = time.monotonic()
        if state != self.last:
            self.last, self.moved = state, now
        return now - self.moved < QUIET


class _RemoteProducer:
    def __init__(self, network: RemoteNetwork, rank: int) -> None:
        self.network, self.rank = network, rank
        self.head = self.completed = 0

    def issue(self, *arguments: int) -> int | None:
        ticket = self.network.call(self.rank, "issue", arguments)
        if ticket is not None:
            self.head = ticket + 1
        return ticket


def serve(node: Node, wire: socket.socket) -> None:
    """Step the engine and do what machine 0 says, until it hangs up or says "end"."""
    while True:
        node.engine.step()
        wire.settimeout(0.0)
        try:
            if not wire.recv(1, socket.MSG_PEEK):
                raise ConnectionError("machine 0 has hung up")
        except BlockingIOError:
            continue
        finally:
            wire.settimeout(DEADLINE)
        request = receive(wire)
        if request[0] == "end":
            return
        send(wire, _answer(node, *request))


def _answer(node: Node, what: str, *arguments: Any) -> Any:
    if what == "state":
        return node.producer.completed, [node.flag(index) for index in range(64)]
    if what == "issue":
        return node.producer.issue(*arguments[0])
    if what == "read":
        offset, size = arguments
        return bytes(node.heap[offset : offset + size])
    if what == "write":
        offset, data = arguments
        node.heap[offset : offset + len(data)] = data
        return None
    raise AssertionError(what)
