"""The stand-in's cards as libibverbs shows them to compiled engines: structures in memory, and three functions of a provider.

Those of SRD queue pairs are in standin_datagrams.py.
"""

from __future__ import annotations

import ctypes
import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from mkernel.transport import verbs
from mkernel.transport.verbs import VerbsError
from tests.transport.standin_datagrams import Datagrams

if TYPE_CHECKING:
    from tests.transport.standin import Fabric
    from tests.transport.standin_card import CardPair

__all__ = ["Calls", "Request"]

_WRITE, _SEND_IMM, _FETCH_ADD = 0, 3, 6  # ibv_wr_opcode
_FENCE, _SIGNALED, _INLINE = 1, 2, 8  # ibv_send_flags
_RECEIVED, _WITH_IMM = 128, 2
_u16, _u32, _u64, _p = ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


class Entry(ctypes.Structure):
    """ibv_sge."""

    _fields_ = [("address", _u64), ("bytes", _u32), ("key", _u32)]


class _Rdma(ctypes.Structure):
    _fields_ = [("remote", _u64), ("key", _u32)]


class _Atomic(ctypes.Structure):
    _fields_ = [("remote", _u64), ("add", _u64), ("swap", _u64), ("key", _u32)]


class _To(ctypes.Union):
    _fields_ = [("rdma", _Rdma), ("atomic", _Atomic)]


class Request(ctypes.Structure):
    """ibv_send_wr."""


Request._fields_ = [
    ("id", _u64),
    ("next", ctypes.POINTER(Request)),
    ("entries", ctypes.POINTER(Entry)),
    ("num_entries", ctypes.c_int),
    ("opcode", _u32),
    ("flags", _u32),
    ("imm", _u32),
    ("to", _To),
    ("others", _u64 * 7),
]


class Receive(ctypes.Structure):
    """ibv_recv_wr."""


Receive._fields_ = [
    ("id", _u64),
    ("next", ctypes.POINTER(Receive)),
    ("entries", ctypes.POINTER(Entry)),
    ("num_entries", ctypes.c_int),
]


class End(ctypes.Structure):
    """ibv_wc."""

    _fields_ = [
        *(("id", _u64), ("status", _u32), ("opcode", _u32), ("vendor_error", _u32), ("bytes", _u32), ("imm", _u32), ("pair", _u32)),
        *(("source_pair", _u32), ("flags", _u32), ("others", _u16 * 3)),
    ]


class Calls:
    """Gives every card of a fabric to compiled engines. An exception of a card is kept in ``failure``: C cannot pass it on."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.failure: BaseException | None = None
        self.datagrams = Datagrams(self._guarded)
        self._post_send = ctypes.CFUNCTYPE(ctypes.c_int, _p, ctypes.POINTER(Request), _p)(self._guarded(self._send))
        self._post_receive = ctypes.CFUNCTYPE(ctypes.c_int, _p, ctypes.POINTER(Receive), _p)(self._guarded(self._receive))
        self._poll = ctypes.CFUNCTYPE(ctypes.c_int, _p, ctypes.c_int, ctypes.POINTER(End), use_errno=True)(self._polled)
        self._stored = ctypes.CFUNCTYPE(None)(lambda: self.fabric.watcher())

    def handles(self, pair: CardPair) -> verbs.Handles:
        queues = self.fabric.queues
        functions = [ctypes.cast(function, _p).value or 0 for function in (self._post_send, self._post_receive, self._poll, self._stored)]
        address = pair.number if pair.kind == "RC" else self.datagrams.show(pair)
        return verbs.Handles(address, 1 + queues.index(pair.sends), 1 + queues.index(pair.receives), *functions)

    def _guarded(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            try:
                return function(*arguments)
            except VerbsError as error:
                return error.code
            except BaseException as error:
                self.failure = error
                return errno.EIO

        return call

    def _send(self, number: int, first: ctypes._Pointer[Request], bad: int) -> int:
        pair = self.fabric.pairs[number]
        link = first
        while link:
            request = link.contents
            link = request.next
            assert request.num_entries == 1
            entry, signaled = request.entries[0], bool(request.flags & _SIGNALED)
            local, rdma = (entry.address, entry.bytes, entry.key), request.to.rdma
            if request.opcode == _FETCH_ADD:
                atomic = request.to.atomic
                assert entry.bytes == 8
                pair.fetch_add(request.id, entry.address, entry.key, atomic.remote, atomic.key, atomic.add, signaled=signaled)
            elif request.opcode == _SEND_IMM:
                pair.send(request.id, *local, signaled=signaled, imm=socket.ntohl(request.imm))
            elif request.flags & _INLINE:
                assert (request.opcode, entry.bytes) == (_WRITE, 8)
                value, fenced = _u64.from_address(entry.address).value, bool(request.flags & _FENCE)
                pair.write_inline(request.id, value, rdma.remote, rdma.key, signaled=signaled, fenced=fenced)
            else:
                assert request.opcode == _WRITE
                pair.write(request.id, *local, rdma.remote, rdma.key, signaled=signaled)
        pair.commit()
        return 0

    def _receive(self, number: int, first: ctypes._Pointer[Receive], bad: int) -> int:
        pair = self.datagrams.pair(number) or self.fabric.pairs[number]
        link = first
        while link:
            request = link.contents
            link = request.next
            assert request.num_entries == 1
            entry = request.entries[0]
            pair.receive(request.id, entry.address, entry.bytes, entry.key)
        return 0

    def _polled(self, number: int, limit: int, found: ctypes._Pointer[End]) -> int:
        count = [0]

        def take() -> int:
            count[0] = self._take(number, limit, found)
            return 0

        code = self._guarded(take)()
        if self.fabric.queues[number - 1].nic.limits.srd:  # as EFA's provider answers
            ctypes.set_errno(0)
            return -code if code else count[0]
        ctypes.set_errno(code)
        return -1 if code else count[0]

    def _take(self, number: int, limit: int, found: ctypes._Pointer[End]) -> int:
        completions = self.fabric.queues[number - 1].poll(limit)
        for place, end in enumerate(completions):
            opcode, flags = _RECEIVED if end.received else 0, 0 if end.imm is None else _WITH_IMM
            imm = socket.htonl(end.imm or 0)
            found[place] = End(end.wr_id, end.status, opcode, end.vendor_error, end.size, imm, end.qp, end.source_qp, flags)
        return len(completions)
