"""Transports by name. Adding one touches its own file and one line of ``TRANSPORTS``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from mkernel import env
from mkernel.errors import ArgumentError

if TYPE_CHECKING:
    from mkernel.transport.base import Transport

__all__ = ["TRANSPORTS", "Card", "Copier", "Entry", "Wiring", "create", "host_signals", "names", "own_process"]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """Where a transport is, where its engine runs, and who raises the flags."""

    factory: str  # "module:function", imported on first use: a transport's libraries need not exist where it is not used
    own_process: bool = False  # the engine is a process of its own, which a busy rank cannot hold up; else a thread of the rank
    rdma: bool = False  # needs a network card
    host_signals: Callable[[], bool] = lambda: False  # an engine, on the CPU, raises the flags; else the card or the GPU's copy engine


TRANSPORTS: dict[str, Entry] = {
    "emulated": Entry("mkernel.transport.emulated:create", host_signals=env.EMULATED_HOST_SIGNALS.get),
    "null": Entry("mkernel.transport.null:create", own_process=True),
    "rc": Entry("mkernel.transport.rc:create", own_process=True, rdma=True, host_signals=lambda: env.RC_SIGNAL.get() == "imm"),
    "srd": Entry("mkernel.transport.srd:create", own_process=True, rdma=True, host_signals=lambda: True),
}


class Copier(Protocol):
    """Moves bytes between mapped segments; ``mkernel.runtime.device.Copier`` as transports see it (imports go one way)."""

    def start(self, dst: int, src: int, size: int) -> object: ...

    def done(self, token: object) -> bool: ...

    def signal(self, address: int, value: int) -> None: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """The network card of a rank: device, port, index of the GID it speaks with."""

    device: str
    port: int
    gid_index: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What any transport may need to know of its rank. A transport takes what it uses.

    Addresses are of this process; ``peers`` maps every rank of other nodes to the addresses of its (data heap, signal segment), where they
    are mapped in this process, else to zeros.

    Attributes
    ----------
    heap_address, signal_address
        This rank's segments; 0 where one lies in GPU memory and the engine is another process.
    heap_dmabuf, signal_dmabuf
        There its dma-buf descriptor, else -1.
    exchange
        Gives this rank's bytes to all ranks and returns everybody's, by rank. All ranks call it equally often.
    store
        Writes a 64-bit word of host memory with release.
    timeout
        Seconds after which a wait inside a call ends: retries of a network card must have ended before.
    """

    rank: int
    heap_address: int
    heap_bytes: int
    signal_bytes: int
    peers: Mapping[int, tuple[int, int]]
    copier: Callable[[], Copier]  # called only by transports that copy in this process
    clock_ns: Callable[[], int]
    signal_address: int = 0
    heap_dmabuf: int = -1
    signal_dmabuf: int = -1
    card: Card | None = None
    exchange: Callable[[bytes], Sequence[bytes]] | None = None
    store: Callable[[int, int], object] | None = None
    timeout: float = 30.0


def names() -> list[str]:
    """The transports that exist."""
    return sorted(TRANSPORTS)


def own_process(name: str) -> bool:
    """Whether the transport's engine runs in a process of its own."""
    return TRANSPORTS[name].own_process


def host_signals(name: str) -> bool:
    """Whether an engine raises the flags, so that they must lie in host memory. The environment decides: ask once, on all ranks."""
    return TRANSPORTS[name].host_signals()


def create(name: str, wiring: Wiring) -> Transport:
    """Open the transport ``name`` for one rank.

    Raises
    ------
    ArgumentError
        There is no such transport.
    """
    if name not in TRANSPORTS:
        raise ArgumentError("transport", repr(name), "no such transport", f"there are {', '.join(names())}")
    module, _, factory = TRANSPORTS[name].factory.partition(":")
    return cast("Transport", getattr(importlib.import_module(module), factory)(wiring))
