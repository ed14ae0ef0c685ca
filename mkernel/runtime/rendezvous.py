"""Ranks that meet over TCP, without MPI: ``MKERNEL_RENDEZVOUS``, or the variables of torchrun and Slurm."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import struct
import time

from mkernel import env, errors
from mkernel.errors import ArgumentError, Error, PeerLostError
from mkernel.runtime.bootstrap import Bootstrap

__all__ = ["Meeting", "TcpBootstrap", "from_environment", "offered", "read_environment"]

_GREETING = struct.Struct("!8sII")  # magic, rank, size
_MAGIC = b"mkernel1"
_LENGTH = struct.Struct("!Q")
_LONGEST = 1 << 24  # bytes of one contribution: whatever talks to our port by mistake must not make us allocate
_SLURM_PORTS = (20000, 20000)  # first, count


@dataclasses.dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks meet, and who this one is."""

    host: str
    port: int
    rank: int
    size: int


class TcpBootstrap(Bootstrap):
    """Rank 0 listens at ``host:port``, the others connect; a star.

    Raises
    ------
    TimeoutError
        Some ranks did not come within ``timeout`` seconds.
    Error
        Another program uses the address, or two processes claim one rank.
    """

    def __init__(self, meeting: Meeting, timeout: float = 120.0) -> None:
        self.meeting, self.rank, self.size = meeting, meeting.rank, meeting.size
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._links: dict[int, socket.socket] = {}  # rank 0: all the others; they: rank 0
        if self.size == 1:
            return
        try:
            if self.rank == 0:
                self._accept_all()
            else:
                self._links[0] = self._connect()
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
            return _unpack(self._receive(0))
        parts = [data] + [self._receive(rank) for rank in range(1, self.size)]
        packed = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
        for rank in range(1, self.size):
            self._send(rank, packed)
        return parts

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _accept_all(self) -> None:
        where = f"{self.meeting.host}:{self.meeting.port}"
        with _listen(self.meeting) as listener:
            while len(self._links) < self.size - 1:
                missing = sorted(set(range(1, self.size)) - self._links.keys())
                listener.settimeout(max(self._deadline - time.monotonic(), 0.001))
                try:
                    link, _ = listener.accept()
                except TimeoutError:
                    raise errors.TimeoutError(
                        f"rank 0 waited {self._timeout:g} s at {where} for ranks {missing}: are they started?"
                    ) from None
                self._greet(link)

    def _greet(self, link: socket.socket) -> None:
        link.settimeout(5.0)
        try:
            magic, rank, size = _GREETING.unpack(_read(link, _GREETING.size))
        except (OSError, EOFError):
            magic, rank, size = b"", 0, 0
        if magic != _MAGIC:
            link.close()  # somebody else's connection: not our business
            return
        if size != self.size or not 0 < rank < self.size or rank in self._links:
            link.close()
            raise Error(
                f"a process came to {self.meeting.host}:{self.meeting.port} as rank {rank} of {size}; expected: ranks 1 .. {self.size - 1} "
                f"of {self.size}, each once: check MKERNEL_RANK and MKERNEL_SIZE"
            )
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links[rank] = link

    def _connect(self) -> socket.socket:
        host, port = self.meeting.host, self.meeting.port
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise errors.TimeoutError(f"rank {self.rank} found nobody at {host}:{port} within {self._timeout:g} s: is rank 0 started?")
            try:
                link = socket.create_connection((host, port), timeout=min(left, 5.0))
            except OSError:
                time.sleep(0.05)  # rank 0 is not there yet
                continue
            try:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.sendall(_GREETING.pack(_MAGIC, self.rank, self.size))
            except OSError:
                link.close()
                continue
            return link

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._links[rank].sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise PeerLostError(f"rank {rank} went away during init ({error})", rank) from error

    def _receive(self, rank: int) -> bytes:
        link = self._links[rank]
        try:
            (length,) = _LENGTH.unpack(_read(link, _LENGTH.size))
            if length > _LONGEST * self.size:
                raise Error(f"rank {rank} announced {length} bytes during init: that is no mkernel process")
            return _read(link, length)
        except TimeoutError:
            raise errors.TimeoutError(f"rank {self.rank} waited {self._timeout:g} s in init for rank {rank}") from None
        except (OSError, EOFError) as error:
            raise PeerLostError(f"rank {rank} went away during init", rank) from error


def offered() -> bool:
    """Whether the environment's variables (torchrun's or Slurm's) describe several ranks."""
    meeting = read_environment()
    return meeting is not None and meeting.size > 1


def from_environment() -> TcpBootstrap:
    """Meet where the environment says. Raises ArgumentError when it does not say all."""
    meeting = read_environment()
    if meeting is None:
        raise ArgumentError("MKERNEL_RENDEZVOUS", env.RENDEZVOUS.get(), "needs a rank and a size", "set MKERNEL_RANK and MKERNEL_SIZE")
    return TcpBootstrap(meeting)


def read_environment() -> Meeting | None:
    """Address, rank and size from mkernel's variables, else torchrun's, else Slurm's; None when there are none."""
    address = env.RENDEZVOUS.get()
    numbers = _own_numbers() or _numbers("RANK", "WORLD_SIZE") or _numbers("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if address:
        if numbers is None:
            return None
        return Meeting(*_split(address), *_checked(*numbers))
    if (torch := _numbers("RANK", "WORLD_SIZE")) and os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT", "").isdigit():
        # One port further: on MASTER_PORT itself torchrun's agent, or torch.distributed, is already listening.
        return Meeting(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, *_checked(*torch))
    slurm = _numbers("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if slurm and (host := _first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", ""))):
        step = os.environ.get("SLURM_JOB_ID", "0") + os.environ.get("SLURM_STEP_ID", "0")
        return Meeting(host, _SLURM_PORTS[0] + int(re.sub(r"\D", "", step)[-9:] or 0) % _SLURM_PORTS[1], *_checked(*slurm))
    return None


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


def _listen(meeting: Meeting) -> socket.socket:
    """Listen on the loopback when the meeting's host says so, else everywhere: names often resolve differently on their own host."""
    host, port = meeting.host, meeting.port
    try:
        if host == "localhost" or host.startswith("127."):
            return socket.create_server((host, port), backlog=128)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=128, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=128)
    except OSError as error:
        raise Error(f"rank 0 cannot listen at {host}:{port}: {error} (choose another port)") from error


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
