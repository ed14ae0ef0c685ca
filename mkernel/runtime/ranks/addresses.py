"""Addresses of this host: which ones there are, which of them face other hosts, and sockets that listen there and nowhere else."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import secrets
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from mkernel.errors import ArgumentError, Error

__all__ = ["any_address", "facing", "is_loopback", "listen", "listen_local", "own_addresses", "tune"]

_BACKLOG = 1024  # connections, also of strangers, that wait to be accepted
_SIOCGIFADDR = 0x8915
_SILENCE_SECONDS = 9  # a host whose kernel does not answer for so long has gone


def is_loopback(host: str) -> bool:
    """Whether a name always means the host on which it is used: ``localhost``, ``127.0.0.1``, ``::1``."""
    return host == "localhost" or _loopback_address(host)


def _loopback_address(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def any_address(host: str) -> bool:
    """Whether it stands for all addresses of a host: ``0.0.0.0``, ``::``."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return False


def own_addresses() -> list[str]:
    """Addresses of this host's interfaces, the one of the default route first; the loopback only where there is no other."""
    found = [address for probe in (("192.0.2.1", socket.AF_INET), ("2001:db8::1", socket.AF_INET6)) if (address := _source(*probe))]
    found += _interfaces()
    return list(dict.fromkeys(address for address in found if not _loopback_address(address))) or ["127.0.0.1"]


def facing(others: Sequence[str]) -> list[str]:
    """Addresses of this host's interfaces by which it reaches other hosts, given by all addresses that they have.

    Networks inside a host that look alike on all hosts (those of containers) face nobody.
    """
    own = set(own_addresses())
    foreign = [address for address in others if address not in own] or list(others)
    found = [source for address in foreign if (source := _source(address, socket.AF_INET6 if ":" in address else socket.AF_INET))]
    return list(dict.fromkeys(found))


def _source(address: str, family: int) -> str:
    """Address of this host on the way to another, as the routing table says; nothing is sent. Empty where there is no way."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return ""


def _interfaces() -> list[str]:
    """Addresses of the interfaces themselves, for networks with neither a default route nor names."""
    found = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, *_ = line.split()
            if scope == "00":  # global
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def listen(host: str, port: int, *, source: str) -> list[socket.socket]:
    """Sockets that listen at the addresses of ``host`` that are this host's own, and at no others.

    Other hosts must reach them: a name that means the loopback here (as a host's own name often does) will not do.

    Parameters
    ----------
    port
        0: any.
    source
        Where ``host`` was named, for messages.

    Raises
    ------
    ArgumentError
        The name cannot be resolved, or means no address of this host that others reach.
    Error
        The port is taken.
    """
    try:
        found = [(int(info[0]), str(info[4][0])) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise ArgumentError(source, host, f"cannot be resolved on the host of rank 0: {error}", _remedy()) from error
    listeners: list[socket.socket] = []
    for family, address in dict.fromkeys(found):
        if _loopback_address(address) and not is_loopback(host):
            continue
        try:
            listeners.append(socket.create_server((address, port), family=family, backlog=_BACKLOG))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            for listener in listeners:
                listener.close()
            raise Error(f"rank 0 cannot listen at {host}:{port}: {error} (choose another port)") from error
    if not listeners:
        meant = ", ".join(address for _, address in dict.fromkeys(found))
        raise ArgumentError(
            source, host, f"means {meant} on the host of rank 0, and that is no address at which other hosts reach it", _remedy()
        )
    return listeners


def _remedy() -> str:
    return f"name an address of that host, or set MKERNEL_LISTEN on rank 0 to it; it has {', '.join(own_addresses())}"


def listen_local(name: bytes = b"") -> socket.socket:
    """An abstract Unix socket, which is in no file system and ends with its process; ``name``: begins with a zero byte; else random."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(name or b"\0mkernel-" + secrets.token_hex(16).encode())
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def tune(connection: socket.socket) -> None:
    """Set a connection up: small messages are sent at once, and a host that stops answering without EOF is noticed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _SILENCE_SECONDS // 3),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, _SILENCE_SECONDS - _SILENCE_SECONDS // 3),
        (socket.TCP_USER_TIMEOUT, _SILENCE_SECONDS * 1000),  # for what was sent and is not acknowledged
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
