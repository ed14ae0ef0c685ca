"""Where a world listens: at the address that was named, or at those that face the other hosts, and nowhere else."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mkernel import env
from mkernel.errors import ArgumentError, Error
from mkernel.runtime.ranks import addresses
from mkernel.runtime.ranks import socket_control as wire
from mkernel.runtime.ranks.bootstrap import Bootstrap, ThreadGroup
from mkernel.runtime.ranks.rendezvous import Meeting, SocketBootstrap
from mkernel.runtime.ranks.socket_control import SocketControl
from tests.runtime.processes import free_port

SECRET = "of tests alone, 32 characters long"
LONG = 60.0


@contextlib.contextmanager
def resolves(monkeypatch: pytest.MonkeyPatch, **names: list[str]) -> Iterator[None]:
    """Names with a meaning of the test's own."""
    real = socket.getaddrinfo

    def lookup(host: str, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in names:
            return real(host, port, *args, **kwargs)
        if not names[host]:
            raise socket.gaierror(-2, "Name or service not known")
        return [entry for address in names[host] for entry in real(address, port, *args, **kwargs)]

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lookup)
        yield


def listening() -> set[tuple[str, str]]:
    """Sockets of this network namespace that listen over TCP: (address, port), both as the kernel writes them."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                host, port = local.split(":")
                found.add((host, port))
    return found


def during_listen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Families and addresses of all sockets that begin to listen from now on."""
    seen: list[tuple[int, Any]] = []
    real = socket.socket.listen

    def listen(self: socket.socket, *args: int) -> None:
        real(self, *args)
        seen.append((self.family, self.getsockname()))

    monkeypatch.setattr(socket.socket, "listen", listen)
    return seen


def everyone(action: Callable[[int], Any], size: int = 3) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(action, range(size)))


# ---- what an address means


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("node0", False), ("10.0.0.1", False)],
)
def test_loopback(host: str, expected: bool) -> None:
    assert addresses.is_loopback(host) is expected


def test_own_addresses_can_be_listened_at() -> None:
    own = addresses.own_addresses()
    assert own
    for address in own:
        for listener in addresses.listen(address, 0, source="test"):
            listener.close()
    assert not any(addresses.is_loopback(address) for address in own) or own == ["127.0.0.1"]


def test_hosts_without_names_and_routes_have_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's own network often has neither: the interfaces' addresses are there all the same."""
    monkeypatch.setattr(addresses, "_source", lambda address, family: "")
    usable = [address for address in addresses._interfaces() if not addresses.is_loopback(address)]
    assert addresses.own_addresses() == (list(dict.fromkeys(usable)) or ["127.0.0.1"])


def test_a_host_that_has_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_source", lambda address, family: "")
    monkeypatch.setattr(addresses, "_interfaces", lambda: ["127.0.0.1", "::1"])
    assert addresses.own_addresses() == ["127.0.0.1"]


def test_only_what_faces_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts on 10.0.0.x, each with the same network of containers inside, and one of them with an interface that leads elsewhere."""
    routes = {"10.0.0.2": "10.0.0.1", "fd00::2": "fd00::1", "172.17.0.1": "172.17.0.1", "192.168.5.1": ""}
    monkeypatch.setattr(addresses, "own_addresses", lambda: ["10.0.0.1", "fd00::1", "172.17.0.1", "192.168.7.1"])
    monkeypatch.setattr(addresses, "_source", lambda address, family: routes[address])
    assert addresses.facing(["10.0.0.2", "172.17.0.1", "192.168.5.1", "fd00::2"]) == ["10.0.0.1", "fd00::1"]
    assert addresses.facing(["172.17.0.1"]) == ["172.17.0.1"], "better than nothing: namespaces of one host"


# ---- listening where the meeting says


def test_a_name_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = addresses.own_addresses()[0]
    with resolves(monkeypatch, node0=[own]):
        for listener in addresses.listen("node0", 0, source="MKERNEL_RENDEZVOUS"):
            assert listener.getsockname()[0] == own
            listener.close()


@pytest.mark.parametrize("meaning", [["127.0.1.1"], ["203.0.113.7"], ["127.0.1.1", "::1", "203.0.113.7"], []])
def test_a_name_that_others_cannot_reach(monkeypatch: pytest.MonkeyPatch, meaning: list[str]) -> None:
    """What /etc/hosts makes of a host's own name, another host's address, no address: never a socket on all interfaces instead."""
    seen = during_listen(monkeypatch)
    with resolves(monkeypatch, node0=meaning), pytest.raises(ArgumentError, match=r"MKERNEL_RENDEZVOUS = node0") as caught:
        SocketBootstrap(Meeting("node0", free_port(), 0, 2), LONG, SECRET)
    assert "MKERNEL_LISTEN" in caught.value.remedy
    assert addresses.own_addresses()[0] in caught.value.remedy
    assert [where for _, where in seen if where[0] != "127.0.0.1"] == []


def test_the_variable_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 listens where it says; what the name means to rank 0 plays no part then."""
    port = free_port()
    seen = during_listen(monkeypatch)

    def one(rank: int) -> list[bytes]:
        with contextlib.closing(SocketBootstrap(Meeting("node0" if rank == 0 else "localhost", port, rank, 3), LONG, SECRET)) as bootstrap:
            assert bootstrap.root_address == ("127.0.0.1" if rank == 0 else "")
            return bootstrap.allgather(bytes([rank]))

    with resolves(monkeypatch, node0=["127.0.1.1"]), env.override(MKERNEL_LISTEN="127.0.0.1"):
        assert everyone(one) == [[b"\0", b"\1", b"\2"]] * 3
    assert seen == [(socket.AF_INET, ("127.0.0.1", port))]
    with env.override(MKERNEL_LISTEN="203.0.113.7"), pytest.raises(ArgumentError, match="MKERNEL_LISTEN = 203"):
        SocketBootstrap(Meeting("127.0.0.1", port, 0, 2), LONG, SECRET)


def test_ranks_of_one_host_listen_at_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    seen = during_listen(monkeypatch)

    def one(rank: int) -> None:
        with contextlib.closing(SocketBootstrap(Meeting("localhost", port, rank, 3, one_host=True), LONG)) as bootstrap:
            SocketControl(bootstrap, ["a"] * 3, LONG).close()

    everyone(one)
    assert {family for family, _ in seen} == {socket.AF_UNIX}


# ---- the control channel


class Named(Bootstrap):
    """Threads, one of which has been given an address."""

    def __init__(self, group: ThreadGroup, rank: int, root_address: str) -> None:
        self._inner = group.bootstrap(rank)
        self.rank, self.size, self.root_address = rank, group.size, root_address
        self.allgather = self._inner.allgather  # type: ignore[method-assign]

    def allgather(self, data: bytes) -> list[bytes]: ...

    def close(self) -> None:
        pass


def connect(root_address: str) -> None:
    group = ThreadGroup(3)
    everyone(lambda rank: SocketControl(Named(group, rank, root_address if rank == 0 else ""), ["a", "b", "c"], LONG).close())


@pytest.mark.parametrize("named", ["", "127.0.0.1"])
def test_the_control_channel_listens_where_others_come(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """At the rendezvous' address; without one (MPI) at those that face the other hosts. Never at all."""
    seen = during_listen(monkeypatch)
    connect(named)
    hosts = [where[0] for _, where in seen]
    assert hosts == [named] if named else set(hosts) <= set(addresses.own_addresses())
    assert not any(map(addresses.any_address, hosts))


def test_the_control_channel_listens_everywhere_if_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = during_listen(monkeypatch)
    with env.override(MKERNEL_LISTEN="0.0.0.0"):
        connect("")
    assert [where[0] for _, where in seen] == ["0.0.0.0"]
    assert wire._reachable("0.0.0.0") == addresses.own_addresses()
    assert wire._reachable("10.0.0.1") == ["10.0.0.1"]


@pytest.mark.parametrize("problem", ["203.0.113.7", "no way"])
def test_what_rank_0_cannot_do_is_told_to_all(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    """Nobody waits for a rank 0 that has nowhere to listen."""
    group = ThreadGroup(3)
    if problem == "no way":
        monkeypatch.setattr(addresses, "facing", lambda others: [])
    texts = []

    def one(rank: int) -> None:
        with pytest.raises(Error, match="rank 0 cannot listen for the other hosts") as caught:
            SocketControl(group.bootstrap(rank), ["a", "b", "c"], LONG)
        texts.append(str(caught.value))

    with env.override(MKERNEL_LISTEN=None if problem == "no way" else problem):
        everyone(one)
    assert len(texts) == 3
    assert all("MKERNEL_LISTEN" in text for text in texts)


@pytest.mark.parametrize("one_host", [True, False])
def test_ports_are_closed_when_all_have_come(monkeypatch: pytest.MonkeyPatch, one_host: bool) -> None:
    """No socket of a world listens any more once it is made; closed, not only forgotten."""
    real, sockets = socket.socket.listen, []

    def listen(self: socket.socket, *args: int) -> None:
        real(self, *args)
        sockets.append(self)

    monkeypatch.setattr(socket.socket, "listen", listen)
    port = free_port()
    sockets.clear()  # those of the test itself

    def one(rank: int) -> SocketControl:
        meeting = Meeting("127.0.0.1", port, rank, 3, one_host)
        with contextlib.closing(SocketBootstrap(meeting, LONG, "" if one_host else SECRET)) as bootstrap:
            return SocketControl(bootstrap, ["a", "a", "a"] if one_host else ["a", "b", "c"], LONG)

    controls = everyone(one)
    assert [listener.fileno() for listener in sockets] == [-1, -1]
    if not one_host:
        assert f"{port:04X}" not in {number for _, number in listening()}
    everyone(lambda rank: controls[rank].close())
