"""How two processes prove to each other that they know a secret, and a door that strangers neither pass nor block.

The one that connects sends a greeting: who it claims to be, and a nonce. The one that listens answers with a nonce of its own and with
HMAC-SHA256(secret, "listener" + greeting + nonce). Then the first proves itself by HMAC-SHA256(secret, "caller" + greeting + nonce), and
the second says whether it is let in. Both nonces are fresh, so that nothing that was overheard can be used again. Whoever cannot prove
itself learns nothing but that mkernel listens here.

Where there is no secret (the ranks of one host, over Unix sockets) the kernel tells the user at the other end, who must be ours; the same
messages follow, with an empty secret.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection, Mapping, Sequence

from mkernel import errors
from mkernel.errors import Error

__all__ = ["Address", "Caller", "Door", "knock", "peer_user", "prove"]

_log = logging.getLogger("mkernel")

Address = bytes | tuple[str, int]  # name of an abstract Unix socket, or host and port

_MAGIC = b"mkernel2"
_NONCE = 32
_GREETING = struct.Struct(f"!8s16sII{_NONCE}s")  # magic, purpose, rank, size, nonce
_ANSWER = struct.Struct(f"!8s{_NONCE}s32s")  # magic, nonce, the listener's proof
_PROOF = 32
_VERDICT = struct.Struct("!BH")  # let in?; bytes of the reason that follow
_CREDENTIALS = struct.Struct("=3i")  # pid, uid, gid
_GUEST_SECONDS = 10.0  # a connection that has not proved itself within this time is dropped
_GUESTS = 256  # most connections that have not proved themselves yet; one more replaces the oldest
_PAUSE_SECONDS = 0.05  # before the next try
_ACCEPTED_AT_ONCE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who a process claims to be. ``purpose``: at most 16 bytes, the same at both ends. ``secret``: empty where users are compared."""

    purpose: str
    rank: int
    size: int
    secret: bytes = dataclasses.field(repr=False)

    def greeting(self) -> bytes:
        return _GREETING.pack(_MAGIC, self.purpose.encode(), self.rank, self.size, secrets.token_bytes(_NONCE))


class _Stranger(Exception):  # noqa: N818 -- not an error: it is dropped
    """The other end is no rank of this world. The text says why."""


def prove(secret: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of parts whose lengths are fixed or prepended."""
    return hmac.new(secret, b"".join(struct.pack("!I", len(part)) + part for part in parts), hashlib.sha256).digest()


def peer_user(link: socket.socket) -> int:
    """User of the process at the other end of a Unix socket, as the kernel tells it."""
    _, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def _require_own_user(link: socket.socket) -> None:
    if link.family != socket.AF_UNIX:
        raise _Stranger("it came over a network, and there is no secret")
    if (user := peer_user(link)) != os.geteuid():
        raise _Stranger(f"it belongs to user {user}, not to user {os.geteuid()}")


# ---- the end that listens
class _Guest:
    """A connection that has not proved itself yet."""

    def __init__(self, link: socket.socket, expected: Collection[int]) -> None:
        self.link, self.expected = link, expected
        self.due = time.monotonic() + _GUEST_SECONDS
        self.wanted = _GREETING.size
        self.inbox = b""
        self.greeting = b""
        self.proof = b""  # that we wait for


class Door:
    """Lets in the ranks that are expected, as many at once as come; strangers are dropped, and nobody waits for them.

    Parameters
    ----------
    listeners
        Listening sockets, each with the ranks that are expected there. They stay the caller's.
    own
        Purpose, this rank, size of the world, and the secret.
    where
        Names the place in messages.
    """

    def __init__(self, listeners: Mapping[socket.socket, Collection[int]], own: Caller, where: str) -> None:
        self._listeners, self._own, self._where = listeners, own, where
        self._expected = {rank for ranks in listeners.values() for rank in ranks}
        self._guests: dict[socket.socket, _Guest] = {}
        self._selector = selectors.DefaultSelector()
        self._refused = 0
        self._reason = ""

    def admit(self, deadline: float) -> dict[int, socket.socket]:
        """The expected ranks' connections, once all have come. They are blocking, without a timeout.

        Raises
        ------
        TimeoutError
            ``deadline`` (of ``time.monotonic``) has passed; the message says who is missing and who was turned away.
        """
        admitted: dict[int, socket.socket] = {}
        try:
            for listener in self._listeners:
                listener.setblocking(False)
                self._selector.register(listener, selectors.EVENT_READ)
            while missing := self._expected - admitted.keys():
                now = time.monotonic()
                if now >= deadline:
                    raise errors.TimeoutError(self._too_late(sorted(missing)))
                self._drop_the_slow(now)
                due = min([deadline, *(guest.due for guest in self._guests.values())])
                for key, _ in self._selector.select(max(due - now, 0.0)):
                    if key.fileobj in self._listeners:
                        self._accept(key.fileobj)  # type: ignore[arg-type]  # a socket: see above
                    elif (guest := self._guests.get(key.fileobj)) is not None:  # type: ignore[call-overload]  # not dropped meanwhile
                        self._hear(guest, admitted)
            result, admitted = admitted, {}
            return result
        finally:
            for link in [*self._guests, *admitted.values()]:
                link.close()
            self._guests.clear()
            self._selector.close()

    def _too_late(self, missing: Sequence[int]) -> str:
        text = f"rank {self._own.rank} waited at {self._where} for ranks {missing}: are they started?"
        if self._refused:
            text += f" ({self._refused} connections were turned away; the first: {self._reason})"
        return text

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                link, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:  # strangers, or the program, hold all descriptors
                if self._guests:
                    self._turn_away(next(iter(self._guests.values())), f"no room for it ({error})")
                else:
                    time.sleep(_PAUSE_SECONDS)
                return
            link.setblocking(False)
            if len(self._guests) >= _GUESTS:
                silent = next((guest for guest in self._guests.values() if not guest.greeting), next(iter(self._guests.values())))
                self._turn_away(silent, f"it did not prove itself, and {_GUESTS} more came")
            guest = self._guests[link] = _Guest(link, self._listeners[listener])
            self._selector.register(link, selectors.EVENT_READ)
            try:
                if not self._own.secret:
                    _require_own_user(link)
            except _Stranger as stranger:
                self._turn_away(guest, str(stranger))

    def _hear(self, guest: _Guest, admitted: dict[int, socket.socket]) -> None:
        try:
            part = guest.link.recv(guest.wanted - len(guest.inbox))
            if not part:
                raise _Stranger(f"it left after {len(guest.inbox)} of {guest.wanted} bytes")
            guest.inbox += part
            if len(guest.inbox) < guest.wanted:
                return
            message, guest.inbox = guest.inbox, b""
            if not guest.greeting:
                self._answer(guest, message)
            else:
                self._judge(guest, message, admitted)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, _Stranger) as error:
            self._turn_away(guest, str(error))

    def _answer(self, guest: _Guest, greeting: bytes) -> None:
        magic, purpose, _, _, _ = _GREETING.unpack(greeting)
        if magic != _MAGIC or purpose.rstrip(b"\0") != self._own.purpose.encode():
            raise _Stranger(f"it began with {greeting[:24]!r}")
        nonce = secrets.token_bytes(_NONCE)
        guest.greeting, guest.wanted = greeting, _PROOF
        guest.proof = prove(self._own.secret, b"caller", greeting, nonce)
        _send_now(guest.link, _ANSWER.pack(_MAGIC, nonce, prove(self._own.secret, b"listener", greeting, nonce)))

    def _judge(self, guest: _Guest, proof: bytes, admitted: dict[int, socket.socket]) -> None:
        _, _, rank, size, _ = _GREETING.unpack(guest.greeting)
        if not hmac.compare_digest(proof, guest.proof):
            raise _Stranger(f"it claimed to be rank {rank} of {size}, and did not prove that it knows MKERNEL_SECRET")
        reason = ""
        if size != self._own.size:
            reason = f"a world of {size} ranks, here are {self._own.size}"
        elif rank in admitted:
            reason = f"rank {rank} is there already: two processes have one rank"
        elif rank not in guest.expected:
            reason = f"rank {rank} of {size} is not expected here: ranks {sorted(guest.expected)} are"
        text = reason.encode()
        _send_now(guest.link, _VERDICT.pack(not reason, len(text)) + text)
        if reason:
            raise _Stranger(reason)
        self._forget(guest)
        guest.link.setblocking(True)
        admitted[rank] = guest.link

    def _drop_the_slow(self, now: float) -> None:
        for guest in [guest for guest in self._guests.values() if guest.due <= now]:
            self._turn_away(guest, f"it sent nothing that counts within {_GUEST_SECONDS:g} s")

    def _turn_away(self, guest: _Guest, reason: str) -> None:
        try:
            name = guest.link.getpeername()
            reason = f"from {name[0]} port {name[1]}: {reason}" if guest.link.family != socket.AF_UNIX else reason
        except OSError:
            pass  # it has gone
        self._forget(guest)
        guest.link.close()
        self._refused += 1
        self._reason = self._reason or reason
        # One line at warning per door: strangers must not fill a log.
        level = logging.WARNING if self._refused == 1 else logging.DEBUG
        _log.log(level, "rank %d turned a connection to %s away: %s", self._own.rank, self._where, reason)

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.link)
        del self._guests[guest.link]


def _send_now(link: socket.socket, data: bytes) -> None:
    """Send a few bytes on a fresh connection, whose buffer has room for them."""
    if link.send(data) != len(data):
        raise _Stranger("it takes no bytes")


# ---- the end that connects
def knock(addresses: Sequence[Address], own: Caller, deadline: float, where: str) -> socket.socket:
    """A connection to one of ``addresses`` whose listener has proved itself and let us in. Blocking, without a timeout.

    Tries again until ``deadline`` (of ``time.monotonic``): the listener may not be there yet, or a stranger be there in its place.

    Raises
    ------
    TimeoutError
        The deadline has passed; the message says what was found there.
    Error
        The listener knows the secret and refuses us: the sizes differ, or the rank is taken.
    """
    seconds = deadline - time.monotonic()
    found, warned = "nobody is there", False
    while True:
        for address in addresses:
            left = deadline - time.monotonic()
            if left <= 0:
                raise errors.TimeoutError(f"rank {own.rank} was not let in at {where} within {seconds:.1f} s: {found}: is rank 0 started?")
            try:
                link = _connect(address, min(left, _GUEST_SECONDS))
            except OSError as error:
                found = found if warned else f"nobody answers ({error})"
                continue
            try:
                return _enter(link, own, deadline)
            except _Stranger as stranger:
                link.close()
                if not warned:
                    _log.warning("rank %d found a stranger at %s, and tries on: %s", own.rank, where, stranger)
                found, warned = str(stranger), True
            except (OSError, EOFError) as error:
                link.close()
                found = found if warned else str(error)
            except BaseException:
                link.close()
                raise
        time.sleep(_PAUSE_SECONDS)


def _connect(address: Address, timeout: float) -> socket.socket:
    if not isinstance(address, bytes):
        return socket.create_connection(address, timeout=timeout)
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(timeout)
        link.connect(address)
    except BaseException:
        link.close()
        raise
    return link


def _enter(link: socket.socket, own: Caller, deadline: float) -> socket.socket:
    if not own.secret:
        _require_own_user(link)
    greeting = own.greeting()
    link.sendall(greeting)
    magic, nonce, proof = _ANSWER.unpack(_read(link, _ANSWER.size, min(deadline, time.monotonic() + _GUEST_SECONDS)))
    if magic != _MAGIC or not hmac.compare_digest(proof, prove(own.secret, b"listener", greeting, nonce)):
        raise _Stranger("whoever answers did not prove that it knows MKERNEL_SECRET; is it the same on all ranks?")
    link.sendall(prove(own.secret, b"caller", greeting, nonce))
    # The listener has proved itself, so its answer counts, however late. A second try could find our rank taken by the first.
    admitted, length = _VERDICT.unpack(_read(link, _VERDICT.size, deadline))
    reason = _read(link, length, deadline).decode(errors="replace")
    if not admitted:
        raise Error(f"rank {own.rank} of {own.size} was not let in: {reason} (check MKERNEL_RANK and MKERNEL_SIZE)")
    link.settimeout(None)
    return link


def _read(link: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("whoever answers is too slow")
        link.settimeout(left)
        part = link.recv(size - len(data))
        if not part:
            raise EOFError("the connection ended before it was answered")
        data += part
    return data
