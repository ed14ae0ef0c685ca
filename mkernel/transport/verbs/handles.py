"""What the queue pairs and address handles of pyverbs are to libibverbs.

pyverbs keeps its pointers to itself. An object of it holds the address of its ``struct ibv_qp`` among its own fields, wherever its release
puts them; the structure it points to shows by its contents what it is. Memory is read through /proc/self/mem, where a wrong address is an
error and not a crash. The structures are libibverbs' interface since version 1.1: verbs.h.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from mkernel.transport.verbs.interface import Handles

__all__ = ["find", "find_route"]

# struct ibv_qp: context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type
_PAIR = struct.Struct("=6Q4I")
_KINDS = {"RC": 2, "SRD": 0xFF}  # IBV_QPT_RC, IBV_QPT_DRIVER
# struct ibv_ah: context, pd, handle
_ROUTE = struct.Struct("=2Q")
# struct ibv_context: device, then struct ibv_context_ops, whose functions these are.
_POLL, _POST_SEND, _POST_RECEIVE = (8 * (1 + index) for index in (11, 25, 26))
_OPERATIONS = 8 * (1 + 32)


_T = TypeVar("_T")


def find(pair: Any, number: int, kind: Literal["RC", "SRD"] = "RC") -> Handles | None:
    """The handles of a queue pair of pyverbs (a ``QP``, ``QPEx`` or ``SRDQPEx``) with that number; None if they cannot be told for sure."""
    return _search(pair, lambda memory, address: _at(memory, address, number, _KINDS[kind]))


def find_route(handle: Any, pair: Handles) -> int | None:
    """The address of the ``struct ibv_ah`` of an ``AH`` of pyverbs, of the protection domain of that queue pair; None as above."""

    def at(memory: int, address: int) -> int | None:
        its_pair, route = _read(memory, pair.pair, _PAIR.size), _read(memory, address, _ROUTE.size)
        if its_pair is None or route is None:
            return None
        context, _, domain, *_ = _PAIR.unpack(its_pair)
        return address if _ROUTE.unpack(route) == (context, domain) else None

    return _search(handle, at)


def _search(thing: Any, at: Callable[[int, int], _T | None]) -> _T | None:
    """What ``at(memory, address)`` finds at an address that the object of pyverbs holds; None if nothing, or several things."""
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    size = type(thing).__basicsize__ // 8 * 8
    words = struct.unpack(f"={size // 8}Q", ctypes.string_at(id(thing), size))
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = {known for address in set(words) if (known := at(memory, address)) is not None}
    finally:
        os.close(memory)
    return found.pop() if len(found) == 1 else None


def _at(memory: int, address: int, number: int, kind: int) -> Handles | None:
    """The handles, if ``address`` is that of the queue pair."""
    here = _read(memory, address, _PAIR.size)
    if here is None:
        return None
    context, _, domain, sends, arrivals, _, _, its_number, _, its_kind = _PAIR.unpack(here)
    if (its_number, its_kind) != (number, kind):
        return None
    # The protection domain and both completion queues begin with the same context.
    for thing in (domain, sends, arrivals):
        if _read(memory, thing, 8) != struct.pack("=Q", context):
            return None
    operations = _read(memory, context, _OPERATIONS)
    if operations is None:
        return None
    functions = [struct.unpack_from("=Q", operations, offset)[0] for offset in (_POST_SEND, _POST_RECEIVE, _POLL)]
    return Handles(address, sends, arrivals, *functions) if all(functions) else None


def _read(memory: int, address: int, size: int) -> bytes | None:
    """That many bytes of this process; None if there are none at that address."""
    if address % 8 or not 4096 <= address < 1 << 47:
        return None
    try:
        data = os.pread(memory, size, address)
    except OSError:
        return None
    return data if len(data) == size else None
