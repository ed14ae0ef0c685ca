"""Transports by name. Adding one touches its own file and one line of ``TRANSPORTS``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, cast

from mkernel.errors import ArgumentError

if TYPE_CHECKING:
    from mkernel.transport.base import Transport

__all__ = ["TRANSPORTS", "Copier", "Wiring", "create", "names"]

# name -> "module:factory", imported on first use: a transport's libraries need not exist where it is not used.
TRANSPORTS: dict[str, str] = {
    "emulated": "mkernel.transport.emulated:create",
    "null": "mkernel.transport.null:create",
}


class Copier(Protocol):
    """Moves bytes between mapped segments; ``mkernel.runtime.device.Copier`` as transports see it (imports go one way)."""

    def start(self, dst: int, src: int, size: int) -> object: ...

    def done(self, token: object) -> bool: ...

    def signal(self, address: int, value: int) -> None: ...

    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What any transport may need to know of its rank. A transport takes what it uses.

    Addresses are of this process; ``peers`` maps every rank of other nodes to the addresses of its (data heap, signal segment).
    """

    rank: int
    heap_address: int
    heap_bytes: int
    signal_bytes: int
    peers: Mapping[int, tuple[int, int]]
    copier: Callable[[], Copier]  # called only by transports that copy in this process
    clock_ns: Callable[[], int]


def names() -> list[str]:
    """The transports that exist."""
    return sorted(TRANSPORTS)


def create(name: str, wiring: Wiring) -> Transport:
    """Open the transport ``name`` for one rank.

    Raises
    ------
    ArgumentError
        There is no such transport.
    """
    if name not in TRANSPORTS:
        raise ArgumentError("transport", repr(name), "no such transport", f"there are {', '.join(names())}")
    module, _, factory = TRANSPORTS[name].partition(":")
    return cast("Transport", getattr(importlib.import_module(module), factory)(wiring))
