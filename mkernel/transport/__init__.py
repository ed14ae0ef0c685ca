"""The transports by name. A new transport is a file of its own and one line of ``TRANSPORTS``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from mkernel import env
from mkernel.errors import ArgumentError

if TYPE_CHECKING:
    from mkernel.transport.base import Transport
    from mkernel.transport.compiled import Side

__all__ = ["TRANSPORTS", "Card", "Copier", "Entry", "Wiring", "compiled_side", "create", "host_signals", "names", "own_process"]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """Where a transport is implemented, where its engine runs, and what raises its flags.

    Attributes
    ----------
    factory
        ``"module:function"``. It is imported on first use, so that the libraries of a transport are needed only where it is used.
    own_process
        The engine is a process of its own, which a busy rank cannot hold up; else it is a thread of the rank.
    rdma
        The transport needs a network card.
    host_signals
        Tells whether an engine, on the CPU, raises the flags; else the card or the GPU's copy engine does.
    compiled
        ``"module:name"`` of what makes its side of the compiled engine; empty: only the engine in Python serves it.
    """

    factory: str
    own_process: bool = False
    rdma: bool = False
    host_signals: Callable[[], bool] = lambda: False
    compiled: str = ""


TRANSPORTS: dict[str, Entry] = {
    "emulated": Entry("mkernel.transport.emulated:create", host_signals=env.EMULATED_HOST_SIGNALS.get),
    "null": Entry("mkernel.transport.null:create", own_process=True, compiled="mkernel.transport.null:NullSide"),
    "rc": Entry(
        "mkernel.transport.rc:create",
        own_process=True,
        rdma=True,
        host_signals=lambda: env.RC_SIGNAL.get() == "imm",
        compiled="mkernel.transport.rc_compiled:side",
    ),
    "srd": Entry(
        "mkernel.transport.srd:create",
        own_process=True,
        rdma=True,
        host_signals=lambda: True,
        compiled="mkernel.transport.srd_compiled:SrdSide",
    ),
}


class Copier(Protocol):
    """Moves bytes between mapped segments. A target's backend provides it (``mkernel.runtime.backend.Copier``). Nothing here blocks."""

    def start(self, dst: int, src: int, size: int) -> object:
        """Start to copy ``size`` bytes between two addresses; returns a token for ``done``."""

    def done(self, token: object) -> bool:
        """Whether that copy has ended."""

    def signal(self, address: int, value: int) -> None:
        """Write a 64-bit word after all copies that are done."""

    def close(self) -> None:
        """Give everything back."""


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """The network card of a rank: which one it is. Opened, it is a ``verbs.Nic``.

    Attributes
    ----------
    device
        Its name, e.g. ``"mlx5_0"``.
    port
        Number of its port, from 1.
    gid_index
        Entry of the port's GID table to speak with.
    pkey_index
        Entry of the port's table of partitions to be in.
    gigabits
        Its rate in 10^9 bits per second; 0: unknown.
    """

    device: str
    port: int
    gid_index: int
    pkey_index: int = 0
    gigabits: float = dataclasses.field(default=0.0, compare=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What a transport may need to know about its rank; each uses a part of it.

    Attributes
    ----------
    rank
        This rank.
    heap_address, signal_address
        Addresses of this rank's segments in this process; 0 if a segment lies in GPU memory and the engine is another process.
    heap_bytes, signal_bytes
        Sizes of the segments of every rank.
    heap_dmabuf, signal_dmabuf
        Descriptor of the segment's dma-buf if its address is 0, else -1.
    peers
        The ranks to which this one puts, and which put to it: those on its rail (the same local rank of the other nodes), with the
        addresses of their (data heap, signal segment) in this process; zeros if they are not mapped here. A put elsewhere is an error.
    copier
        Makes a copier. Only transports that copy in this process call it.
    clock_ns
        The engine's clock, in nanoseconds.
    card
        The network card, for transports that need one.
    more_cards
        Further cards over which puts are spread; as many on every rank.
    exchange
        Gives this rank's bytes to all ranks and returns the bytes of all, by rank. All ranks call it equally often.
    store
        ``store(address, value)`` writes a 64-bit word of host memory with release.
    timeout
        Seconds after which a wait inside a call ends. A network card must have given up its retries before.
    """

    rank: int
    heap_address: int
    heap_bytes: int
    signal_bytes: int
    peers: Mapping[int, tuple[int, int]]
    copier: Callable[[], Copier]
    clock_ns: Callable[[], int]
    signal_address: int = 0
    heap_dmabuf: int = -1
    signal_dmabuf: int = -1
    card: Card | None = None
    more_cards: Sequence[Card] = ()
    exchange: Callable[[bytes], Sequence[bytes]] | None = None
    store: Callable[[int, int], object] | None = None
    timeout: float = 30.0


def names() -> list[str]:
    """The names of all transports, sorted."""
    return sorted(TRANSPORTS)


def own_process(name: str) -> bool:
    """Whether the transport's engine runs in a process of its own."""
    return TRANSPORTS[name].own_process


def host_signals(name: str) -> bool:
    """Whether an engine raises the flags, so that they must lie in host memory.

    The environment has a say: ask once, and agree on the answer with all ranks.
    """
    return TRANSPORTS[name].host_signals()


def create(name: str, wiring: Wiring) -> Transport:
    """Open the transport ``name`` for one rank. Collective if the transport exchanges addresses (``rc``, ``srd``).

    Raises
    ------
    ArgumentError
        There is no such transport, or the environment's options do not fit the card.
    TransportError
        The network card could not be opened or connected.
    """
    if name not in TRANSPORTS:
        raise ArgumentError("transport", repr(name), "no such transport", f"there are {', '.join(names())}")
    return cast("Transport", _load(TRANSPORTS[name].factory)(wiring))


def compiled_side(name: str, transport: Transport) -> Side:
    """What the compiled engine needs to post and poll in place of ``transport``, which is open and has posted nothing yet.

    Raises
    ------
    UnfitError
        That engine does not know this transport, or cannot use this card.
    """
    place = TRANSPORTS[name].compiled
    if not place:
        from mkernel.transport.compiled import UnfitError

        raise UnfitError(f"it does not know transport {name}")
    return cast("Side", _load(place)(transport))


def _load(place: str) -> Any:
    """What ``"module:name"`` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
