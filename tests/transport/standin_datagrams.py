"""The stand-in's SRD queue pairs as libibverbs shows them to compiled engines: structures with functions of their own (ibv_wr_*)."""

from __future__ import annotations

import ctypes
import platform
import socket
from collections.abc import Callable
from typing import Any

from mkernel.transport.verbs import VerbsError
from tests.transport.standin_card import CardDestination, CardPair

__all__ = ["FUNCTIONS", "Datagrams", "ExtendedPair"]

_SIGNALED = 2  # ibv_send_flags
_u32, _u64, _p = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
_BASE = 168 if platform.machine() == "aarch64" else 160  # bytes of struct ibv_qp: glibc's mutex is larger there
_NAMES = (
    *("cmp_swp", "fetch_add", "bind_mw", "local_inv", "rdma_read", "rdma_write", "write_imm", "send", "send_imm", "send_inv", "send_tso"),
    *("set_route", "set_xrc_srqn", "set_inline_data", "set_inline_data_list", "set_entry", "set_sge_list", "start", "complete", "abort"),
)


class ExtendedPair(ctypes.Structure):
    """ibv_qp_ex. Functions that nobody may call are null."""

    _fields_ = [("base", ctypes.c_char * _BASE), ("mask", _u64), ("id", _u64), ("flags", _u32), *((name, _p) for name in _NAMES)]


FUNCTIONS: dict[str, Any] = {
    "start": ctypes.CFUNCTYPE(None, _p),
    "write_imm": ctypes.CFUNCTYPE(None, _p, _u32, _u64, _u32),
    "send": ctypes.CFUNCTYPE(None, _p),
    "set_route": ctypes.CFUNCTYPE(None, _p, _p, _u32, _u32),
    "set_entry": ctypes.CFUNCTYPE(None, _p, _u32, _u64, _u32),
    "complete": ctypes.CFUNCTYPE(ctypes.c_int, _p),
}


class _Request:
    """A request that is being built; ``rkey`` is None for a message."""

    def __init__(self, pair: ExtendedPair, rkey: int | None = None, remote: int = 0, imm: int | None = None) -> None:
        assert pair.flags == _SIGNALED, "EFA takes no request without a completion"
        self.wr_id, self.rkey, self.remote, self.imm = pair.id, rkey, remote, imm
        self.to: CardDestination | None = None
        self.entry: tuple[int, int, int] | None = None


class _Open:
    """A queue pair with its structure and the batch that is being built."""

    def __init__(self, pair: CardPair) -> None:
        self.pair, self.structure = pair, ExtendedPair()
        self.batch: list[_Request] | None = None


class Datagrams:
    """``guarded(function)`` keeps what ``function`` raises, and makes it an errno."""

    def __init__(self, guarded: Callable[[Callable[..., int]], Callable[..., int]]) -> None:
        self._opened: dict[int, _Open] = {}  # by the address of the structure
        self._routes: dict[int, CardDestination] = {}

        def nothing(function: Callable[..., None]) -> Callable[..., None]:
            def well(*arguments: object) -> int:
                function(*arguments)
                return 0

            whole = guarded(well)

            def call(*arguments: object) -> None:
                whole(*arguments)

            return call

        bodies = {name: nothing(getattr(self, f"_{name}")) for name in FUNCTIONS if name != "complete"}
        self._functions = {name: kind(bodies.get(name) or guarded(self._complete)) for name, kind in FUNCTIONS.items()}

    def show(self, pair: CardPair) -> int:
        """The address of the queue pair's structure."""
        for address, opened in self._opened.items():
            if opened.pair is pair:
                return address
        opened = _Open(pair)
        for name, function in self._functions.items():
            setattr(opened.structure, name, ctypes.cast(function, _p))  # type: ignore[arg-type]
        address = ctypes.addressof(opened.structure)
        self._opened[address] = opened
        return address

    def pair(self, address: int) -> CardPair | None:
        """The queue pair with that structure."""
        opened = self._opened.get(address)
        return None if opened is None else opened.pair

    def structure(self, pair: CardPair) -> ExtendedPair:
        return self._opened[self.show(pair)].structure

    def route(self, destination: CardDestination) -> int:
        """What stands for the address of its address handle."""
        number = 0x1000 + id(destination)
        self._routes[number] = destination
        return number

    # ---- ibv_wr_*
    def _start(self, address: int) -> None:
        opened = self._opened[address]
        assert opened.batch is None, "a batch is begun twice"
        opened.batch = []

    def _begin(self, address: int, *remote: int) -> None:
        opened = self._opened[address]
        assert opened.batch is not None, "a request outside of a batch"
        opened.batch.append(_Request(opened.structure, *remote))

    def _write_imm(self, address: int, rkey: int, remote: int, imm: int) -> None:
        self._begin(address, rkey, remote, socket.ntohl(imm))

    def _send(self, address: int) -> None:
        self._begin(address)

    def _set_route(self, address: int, route: int, number: int, qkey: int) -> None:
        opened, known = self._opened[address], self._routes[route]
        assert opened.batch
        assert not known.closed
        opened.batch[-1].to = CardDestination(known.nic, known.gid, number, qkey)

    def _set_entry(self, address: int, lkey: int, local: int, size: int) -> None:
        opened = self._opened[address]
        assert opened.batch
        opened.batch[-1].entry = local, size, lkey

    def _complete(self, address: int) -> int:
        opened = self._opened[address]
        assert opened.batch, "an empty batch, or none"
        batch, opened.batch = opened.batch, None
        if opened.pair.state != "RTS":
            raise VerbsError("posting to a queue pair", 22)
        for request in batch:
            assert request.entry is not None
            assert request.to is not None
            if request.rkey is None:
                opened.pair.send(request.wr_id, *request.entry, signaled=True, to=request.to)
            else:
                opened.pair.write(
                    request.wr_id, *request.entry, request.remote, request.rkey, signaled=True, imm=request.imm, to=request.to
                )  # fmt: skip
        opened.pair.commit()
        return 0
