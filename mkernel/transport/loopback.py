"""One put of transport rc from a port to itself: what ``mkernel doctor`` tries."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import secrets
import time
from collections.abc import Callable
from typing import Any

from mkernel import env
from mkernel.errors import TransportError
from mkernel.transport import Card, Wiring, rdma, verbs
from mkernel.transport.base import Put
from mkernel.transport.rc import open_transport

__all__ = ["loopback"]


def loopback(card: Card, timeout: float = 5.0, open_card: Callable[[Card, int], verbs.Nic] = rdma.open_card) -> str:
    """Send one put from a port to itself, and wait for it; returns how its flag was raised (``"atomic"`` ...).

    Raises
    ------
    TransportError
        The card cannot be opened, or the put did not arrive unharmed within ``timeout`` seconds.
    """
    size = mmap.PAGESIZE
    memories = [mmap.mmap(-1, 2 * size) for _ in range(2)]
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in memories]
    with contextlib.ExitStack() as undo:
        ends = []
        for rank in range(2):
            wiring = Wiring(
                rank=rank,
                heap_address=addresses[rank],
                heap_bytes=size,
                signal_bytes=size,
                peers={1 - rank: (0, 0)},
                copier=_no_copier,
                clock_ns=time.monotonic_ns,
                signal_address=addresses[rank] + size,
                store=lambda address, value: setattr(ctypes.c_uint64.from_address(address), "value", value),
                timeout=timeout,
            )
            end = open_transport(open_card(card, rank), wiring, signal=env.RC_SIGNAL.get(), queue_pairs=1)
            undo.callback(end.close)
            ends.append(end)
        exchanged = [end.address for end in ends]
        for end in ends:
            end.connect(exchanged)
        memories[0][:size] = secrets.token_bytes(size)
        ends[0].post(Put(0, 0, 1, 0, 0, size, 0, 1))
        ends[0].flush()
        deadline = time.monotonic() + timeout
        while ctypes.c_uint64.from_address(addresses[1] + size).value != 1:
            for end in ends:
                end.poll()
            if time.monotonic() > deadline:
                raise TransportError(f"a put from {card.device}:{card.port} to itself did not arrive in {timeout:g} s", status="timeout")
        if memories[0][:size] != memories[1][:size]:
            raise TransportError(f"a put from {card.device}:{card.port} to itself arrived damaged", status="data")
        return ends[0].signal


def _no_copier() -> Any:
    raise AssertionError("rc copies nothing in this process")
