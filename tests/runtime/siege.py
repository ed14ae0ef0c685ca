"""Strangers: whatever connects to a socket of mkernel and is no rank. They come at once when somebody listens, and go on coming."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from mkernel.runtime.ranks import handshake

GREETING, ANSWER, PROOF = handshake._GREETING, handshake._ANSWER, handshake._PROOF
PURPOSES = (b"rendezvous", b"control")
AT_ONCE = 24  # of them come before any rank can
HELD = 150  # connections that are kept open in silence


class Recorder:
    """What callers of an earlier run sent: (greeting, proof)."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, bytes]] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[Recorder]:
        enter = handshake._enter
        recorder = self

        class Overheard:
            def __init__(self, link: socket.socket) -> None:
                self.link, self.parts = link, list[bytes]()

            def sendall(self, data: bytes) -> None:
                self.parts.append(data)
                self.link.sendall(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.link, name)

        def overheard(link: socket.socket, *rest: Any) -> socket.socket:
            ear = Overheard(link)
            try:
                enter(ear, *rest)  # type: ignore[arg-type]
                return link
            finally:
                if len(ear.parts) == 2:
                    recorder.sent.append((ear.parts[0], ear.parts[1]))

        handshake._enter = overheard
        try:
            yield self
        finally:
            handshake._enter = enter


class Siege:
    """Strangers at every socket that listens inside the block.

    Parameters
    ----------
    seed
        Of what they do.
    size
        Of the world that they pretend to belong to.
    recorded
        Handshakes of an earlier run.
    """

    def __init__(self, seed: int, size: int, recorded: list[tuple[bytes, bytes]]) -> None:
        self._random = random.Random(seed)
        self._size, self._recorded = size, recorded
        self._addresses: list[tuple[int, Any]] = []
        self._held: list[socket.socket] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.came = 0
        self.admitted: list[str] = []  # kinds of strangers that somebody let in
        self.kinds: dict[str, Callable[[socket.socket, random.Random], object]] = {
            name: getattr(self, name) for name in vars(Siege) if name.startswith("as_")
        }

    # ---- what they do with a connection; it is held open afterwards if they return True
    def as_silence(self, link: socket.socket, rng: random.Random) -> bool:
        return True

    def as_noise(self, link: socket.socket, rng: random.Random) -> bool:
        link.sendall(rng.randbytes(rng.randrange(1, 400)))
        return rng.random() < 0.5

    def as_another_protocol(self, link: socket.socket, rng: random.Random) -> bool:
        link.sendall(rng.choice([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"SSH-2.0-x\r\n", b"mkernel1" + bytes(8), b"\n"]))
        return rng.random() < 0.5

    def as_half_a_greeting(self, link: socket.socket, rng: random.Random) -> bool:
        link.sendall(self._greeting(rng)[: rng.randrange(GREETING.size)])
        return rng.random() < 0.5

    def as_a_greeting_by_bytes(self, link: socket.socket, rng: random.Random) -> bool:
        for byte in self._greeting(rng)[: rng.randrange(GREETING.size + 1)]:
            link.sendall(bytes([byte]))
        return rng.random() < 0.5

    def as_half_a_proof(self, link: socket.socket, rng: random.Random) -> bool:
        self._greet(link, self._greeting(rng))
        link.sendall(rng.randbytes(rng.randrange(PROOF)))
        return rng.random() < 0.5

    def as_a_wrong_secret(self, link: socket.socket, rng: random.Random) -> bool:
        greeting = self._greeting(rng)
        answer = self._greet(link, greeting)
        self._expect_no(link, handshake.prove(rng.randbytes(20), b"caller", greeting, answer[8:40]))
        return False

    def as_a_mirror(self, link: socket.socket, rng: random.Random) -> bool:
        """Gives the listener's own proof back, or an old one's bytes."""
        answer = self._greet(link, self._greeting(rng))
        self._expect_no(link, answer[40:])
        return False

    def as_an_earlier_rank(self, link: socket.socket, rng: random.Random) -> bool:
        if self._recorded:
            greeting, proof = rng.choice(self._recorded)
            self._greet(link, greeting)
            self._expect_no(link, proof)
        return False

    def as_a_huge_length(self, link: socket.socket, rng: random.Random) -> bool:
        self._greet(link, self._greeting(rng))
        self._expect_no(link, bytes(PROOF) + struct.pack("!Q", 1 << 62) + struct.pack("!BI", 1, 0xFFFFFFFF))
        return False

    # ---- their tools
    def _greeting(self, rng: random.Random) -> bytes:
        rank = rng.choice([*range(self._size), self._size, 0xFFFFFFFF])
        size = rng.choice([self._size] * 4 + [0, 1, self._size + 1, 0xFFFFFFFF])
        return GREETING.pack(b"mkernel2", rng.choice(PURPOSES), rank, size, rng.randbytes(32))

    def _greet(self, link: socket.socket, greeting: bytes) -> bytes:
        link.sendall(greeting)
        answer = b""
        while len(answer) < ANSWER.size:
            part = link.recv(ANSWER.size - len(answer))
            if not part:
                raise ConnectionError
            answer += part
        return answer

    def _expect_no(self, link: socket.socket, proof: bytes) -> None:
        link.sendall(proof)
        verdict = link.recv(3)
        if verdict and verdict[0]:
            raise AssertionError("let in")

    # ---- the siege
    def _attack(self, address: tuple[int, Any], seed: int) -> None:
        rng = random.Random(seed)
        name = rng.choice(list(self.kinds))
        link = socket.socket(address[0])
        link.settimeout(0.3)
        keep = False
        try:
            link.connect(address[1])
            self.came += 1
            keep = bool(self.kinds[name](link, rng))
        except OSError:
            pass  # turned away, or nobody listens any more
        except AssertionError:
            self.admitted.append(name)
        finally:
            with self._lock:
                if keep:
                    self._held.append(link)
                if len(self._held) > HELD or not keep:
                    (self._held.pop(0) if keep else link).close()

    def _go_on(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.wait(0.002):
            with self._lock:
                address = rng.choice(self._addresses) if self._addresses else None
            if address is not None:
                self._attack(address, rng.randrange(1 << 30))

    def __enter__(self) -> Self:
        real = self._listen = socket.socket.listen
        siege = self

        def listen(self: socket.socket, *args: int) -> None:
            real(self, *args)
            address = (self.family, self.getsockname())
            with siege._lock:
                siege._addresses.append(address)
                seeds = [siege._random.randrange(1 << 30) for _ in range(AT_ONCE)]
            first = [threading.Thread(target=siege._attack, args=(address, seed), daemon=True) for seed in seeds]
            for thread in first:
                thread.start()
            siege._first += first
            end = siege.came + 4
            while siege.came < end and any(thread.is_alive() for thread in first):  # some are there before any rank
                threading.Event().wait(0.001)

        self._first: list[threading.Thread] = []
        socket.socket.listen = listen  # type: ignore[assignment,method-assign]
        self._threads = [threading.Thread(target=self._go_on, args=(self._random.randrange(1 << 30),), daemon=True) for _ in range(2)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        socket.socket.listen = self._listen  # type: ignore[method-assign]
        self._stop.set()
        for thread in [*self._threads, *self._first]:
            thread.join()
        for link in self._held:
            link.close()
