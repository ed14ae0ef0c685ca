"""Ranks that meet without MPI, at ``MKERNEL_RENDEZVOUS`` or where the variables of torchrun and Slurm say: a star around rank 0.

Ranks of several hosts meet over TCP and prove to each other that they know ``MKERNEL_SECRET``. Ranks of one host meet at a Unix socket,
where the kernel tells who is at the other end, and need no secret. docs/security.md has what this protects against.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import socket
import struct
import time

from mkernel import env, errors
from mkernel.errors import ArgumentError, Error, PeerLostError
from mkernel.runtime.ranks import addresses, handshake
from mkernel.runtime.ranks.bootstrap import Bootstrap

__all__ = ["Meeting", "SocketBootstrap", "from_environment", "offered", "read_environment"]

_LENGTH = struct.Struct("!Q")
_LONGEST = 1 << 24  # bytes of one contribution; a larger number means a damaged stream, and nothing is allocated for it
_SLURM_PORTS = (20000, 20000)  # first, count
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0  # numbers from here on are batch scripts, interactive shells and the like
_MOST_RANKS = 1 << 20  # most ranks that a greeting can carry, far more than a world takes
_MAKE_SECRET = "export MKERNEL_SECRET=$(python -c 'import secrets; print(secrets.token_hex(32))')"


@dataclasses.dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks meet, and who this one is. ``one_host``: all of them are on this host, as the variables say."""

    host: str
    port: int
    rank: int
    size: int
    one_host: bool = False


class SocketBootstrap(Bootstrap):
    """Rank 0 listens, the others connect.

    Parameters
    ----------
    meeting
        On one host the ranks meet at an abstract Unix socket that is named after user and port, else at ``host:port``.
    timeout
        Seconds until all have come.
    secret
        What all ranks know (``MKERNEL_SECRET``); empty: on one host the kernel's word for the user is enough.

    Raises
    ------
    ArgumentError
        The ranks are on several hosts and there is no secret; or the host's name means no address of rank 0's host.
    TimeoutError
        Some ranks did not come within ``timeout`` seconds.
    Error
        The address is taken; or this rank has the wrong size, or another process has its rank.
    """

    def __init__(self, meeting: Meeting, timeout: float = 120.0, secret: str = "") -> None:
        self.meeting, self.rank, self.size = meeting, meeting.rank, meeting.size
        self._timeout = timeout
        self._secret = secret.encode()
        self._links: dict[int, socket.socket] = {}  # rank 0: all the others; they: rank 0
        if self.size == 1:
            return
        if not (meeting.one_host or secret):
            raise ArgumentError(
                "MKERNEL_SECRET",
                "unset",
                f"ranks of several hosts meet at {meeting.host}:{meeting.port} over the network, and must prove to each other who they are",
                f"set it alike for every rank: {_MAKE_SECRET}; or start them by MPI, which needs none; or, if they are all on this host, "
                f"set MKERNEL_RENDEZVOUS=127.0.0.1:{meeting.port}",
            )
        deadline = time.monotonic() + timeout
        own = handshake.Caller("rendezvous", self.rank, self.size, self._secret)
        try:
            if self.rank == 0:
                self._links = self._admit(own, deadline)
            else:
                address: handshake.Address = self._name() if meeting.one_host else (meeting.host, meeting.port)
                self._links[0] = handshake.knock([address], own, deadline, self._where())
            for link in self._links.values():
                if link.family != socket.AF_UNIX:
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.rank == 0 and not meeting.one_host:
                self.root_address = env.LISTEN.get() or str(next(iter(self._links.values())).getsockname()[0])
        except BaseException:
            self.close()
            raise

    def allgather(self, data: bytes) -> list[bytes]:
        if self.size == 1:
            return [data]
        for link in self._links.values():
            link.settimeout(self._timeout)
        if self.rank != 0:
            self._send(0, data)
            return _unpack(self._receive(0, _LONGEST * self.size))
        parts = [data] + [self._receive(rank, _LONGEST) for rank in range(1, self.size)]
        packed = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
        for rank in range(1, self.size):
            self._send(rank, packed)
        return parts

    def shared_secret(self) -> bytes:
        if not self._secret:  # on one host: nobody overhears its Unix sockets
            return super().shared_secret()
        nonces = self.allgather(secrets.token_bytes(32))  # so that no two worlds have the same, and none travels
        return handshake.prove(self._secret, b"world", *nonces)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _name(self) -> bytes:
        """The abstract socket. With the user in its name, jobs of two users may have one port."""
        return f"\0mkernel-{os.geteuid()}-{self.meeting.port}".encode()

    def _where(self) -> str:
        place = f"{self.meeting.host}:{self.meeting.port}"
        return f"{place} (one host: the Unix socket @{self._name().decode()[1:]})" if self.meeting.one_host else place

    def _admit(self, own: handshake.Caller, deadline: float) -> dict[int, socket.socket]:
        others = range(1, self.size)
        listeners = self._listen()
        try:
            return handshake.Door(dict.fromkeys(listeners, others), own, self._where()).admit(deadline)
        finally:
            for listener in listeners:
                listener.close()

    def _listen(self) -> list[socket.socket]:
        if self.meeting.one_host:
            try:
                return [addresses.listen_local(self._name())]
            except OSError as error:
                raise Error(f"rank 0 cannot listen at {self._where()}: {error} (choose another port)") from error
        other = env.LISTEN.get()
        return addresses.listen(other or self.meeting.host, self.meeting.port, source="MKERNEL_LISTEN" if other else "MKERNEL_RENDEZVOUS")

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._links[rank].sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise PeerLostError(f"rank {rank} went away during init ({error})", rank) from error

    def _receive(self, rank: int, longest: int) -> bytes:
        link = self._links[rank]
        try:
            (length,) = _LENGTH.unpack(_read(link, _LENGTH.size))
            if length > longest:
                raise Error(f"rank {rank} announced {length} bytes during init: its stream has gone wrong")
            return _read(link, length)
        except TimeoutError:
            raise errors.TimeoutError(f"rank {self.rank} waited {self._timeout:g} s in init for rank {rank}") from None
        except (OSError, EOFError) as error:
            raise PeerLostError(f"rank {rank} went away during init", rank) from error


def offered() -> bool:
    """Whether the environment's variables (torchrun's or Slurm's) describe several ranks."""
    meeting = read_environment()
    return meeting is not None and meeting.size > 1


def from_environment() -> SocketBootstrap:
    """Meet where the environment says. Raises ArgumentError when it does not say all."""
    meeting = read_environment()
    if meeting is None:
        raise ArgumentError("MKERNEL_RENDEZVOUS", env.RENDEZVOUS.get(), "needs a rank and a size", "set MKERNEL_RANK and MKERNEL_SIZE")
    return SocketBootstrap(meeting, secret=env.SECRET.get() or "")


def read_environment() -> Meeting | None:
    """Address, rank and size from mkernel's variables, else torchrun's, else Slurm's; None when there are none."""
    address = env.RENDEZVOUS.get()
    torch, slurm = _numbers("RANK", "WORLD_SIZE"), _slurm_numbers()
    own = _own_numbers()
    if address:
        numbers = own or torch or slurm
        if numbers is None:
            return None
        host, port = _split(address)
        # Our own numbers say nothing about hosts; those of a launcher do.
        together = not own and (_torch_on_one_host() if torch else _slurm_on_one_host())
        return Meeting(host, port, *_checked(*numbers), addresses.is_loopback(host) or together)
    if torch and os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT", "").isdigit():
        # One port further: on MASTER_PORT itself torchrun's agent, or torch.distributed, is already listening.
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
        return Meeting(host, port, *_checked(*torch), addresses.is_loopback(host) or _torch_on_one_host())
    if slurm and (host := _first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", ""))):
        step = os.environ.get("SLURM_JOB_ID", "0") + os.environ.get("SLURM_STEP_ID", "0")
        port = _SLURM_PORTS[0] + int(re.sub(r"\D", "", step)[-9:] or 0) % _SLURM_PORTS[1]
        return Meeting(host, port, *_checked(*slurm), _slurm_on_one_host())
    return None


def _slurm_numbers() -> tuple[int, int] | None:
    """Rank and size of a process that srun started. In a batch script only the step's variables are about running tasks."""
    step = os.environ.get("SLURM_STEP_ID") or os.environ.get("SLURM_STEPID", "")
    if not step.isdecimal() or int(step) >= _SLURM_SPECIAL_STEPS:
        return None
    return _numbers("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


def _torch_on_one_host() -> bool:
    """Whether torchrun's variables say that all ranks are on this host."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return local.isdigit() and local == os.environ.get("WORLD_SIZE")


def _slurm_on_one_host() -> bool:
    """Whether Slurm's variables say that all ranks of this step are on this host."""
    told = (os.environ.get(name, "") for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"))
    return next((text for text in told if text.isdigit()), "") == "1"


def _own_numbers() -> tuple[int, int] | None:
    rank, size = env.RANK.get(), env.SIZE.get()
    if (rank is None) != (size is None):
        raise ArgumentError("MKERNEL_RANK, MKERNEL_SIZE", (rank, size), "must be set together", "set both for every process")
    return None if rank is None or size is None else (rank, size)


def _numbers(rank_name: str, *size_names: str) -> tuple[int, int] | None:
    rank = os.environ.get(rank_name, "")
    sizes = [text for name in size_names if (text := os.environ.get(name, "")).isdigit()]
    return (int(rank), int(sizes[0])) if rank.isdigit() and sizes else None


def _checked(rank: int, size: int) -> tuple[int, int]:
    if size > _MOST_RANKS:
        raise ArgumentError("MKERNEL_SIZE", size, f"must be at most {_MOST_RANKS}")
    if not 0 <= rank < size:
        raise ArgumentError("MKERNEL_RANK", rank, f"must be less than the number of ranks, {size}")
    return rank, size


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ArgumentError("MKERNEL_RENDEZVOUS", repr(address), "must be host:port", "e.g. node0:29500")
    return host.strip("[]"), int(port)


def _first_host(nodes: str) -> str:
    """``gpu[03-05,09],login1`` -> ``gpu03``."""
    match = re.match(r"([^\[,]*)(?:\[([^\]\-,]+)[^\]]*\])?", nodes)
    return (match[1] + (match[2] or "")) if match else ""


def _read(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = link.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _unpack(packed: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(packed):
        (length,) = _LENGTH.unpack_from(packed, at)
        at += _LENGTH.size
        parts.append(packed[at : at + length])
        at += length
    return parts
