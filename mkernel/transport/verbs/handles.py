"""What the queue pairs of pyverbs are to libibverbs.

pyverbs keeps its pointers to itself. An object of it holds the address of its ``struct ibv_qp`` among its own fields, wherever its release
puts them; the structure it points to shows by its contents what it is. Memory is read through /proc/self/mem, where a wrong address is an
error and not a crash. The structures are libibverbs' interface since version 1.1: verbs.h.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

from mkernel.transport.verbs.interface import Handles

__all__ = ["find"]

# struct ibv_qp: context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type
_PAIR = struct.Struct("=6Q4I")
_RC = 2  # IBV_QPT_RC
# struct ibv_context: device, then struct ibv_context_ops, whose functions these are.
_POLL, _POST_SEND, _POST_RECEIVE = (8 * (1 + index) for index in (11, 25, 26))
_OPERATIONS = 8 * (1 + 32)


def find(pair: Any, number: int) -> Handles | None:
    """The handles of a queue pair of pyverbs (a ``QP`` or a ``QPEx`` of kind RC) with that number; None if they cannot be told for sure."""
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    size = type(pair).__basicsize__ // 8 * 8
    words = struct.unpack(f"={size // 8}Q", ctypes.string_at(id(pair), size))
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = {handles for address in set(words) if (handles := _at(memory, address, number)) is not None}
    finally:
        os.close(memory)
    return found.pop() if len(found) == 1 else None


def _at(memory: int, address: int, number: int) -> Handles | None:
    """The handles, if ``address`` is that of the queue pair."""
    here = _read(memory, address, _PAIR.size)
    if here is None:
        return None
    context, _, domain, sends, arrivals, _, _, its_number, _, kind = _PAIR.unpack(here)
    if (its_number, kind) != (number, _RC):
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
