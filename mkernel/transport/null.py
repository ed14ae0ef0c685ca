"""A transport that completes every put and moves nothing. It shows the engine's own cost, and is the smallest example of a transport."""

from __future__ import annotations

from mkernel.transport import Wiring
from mkernel.transport.base import Put, Transport
from mkernel.transport.compiled import Kind, Report, Setup, Side

__all__ = ["NullSide", "NullTransport", "create"]


class NullTransport(Transport):
    """Every put completes at the next ``poll``; no byte and no signal arrives."""

    def __init__(self) -> None:
        self._posted: list[int] = []

    def post(self, put: Put) -> bool:
        self._posted.append(put.ticket)
        return True

    def flush(self) -> None:
        """Nothing is held back."""

    def poll(self) -> list[int]:
        done, self._posted = self._posted, []
        return done

    def next_event_ns(self) -> int | None:
        return 0 if self._posted else None

    def close(self) -> None:
        self._posted.clear()


class NullSide(Side):
    """It needs nothing."""

    def __init__(self, transport: NullTransport) -> None: ...

    def fill(self, setup: Setup) -> None:
        setup.kind = Kind.null

    def look(self, report: Report, under_way: list[int]) -> tuple[()]:
        return ()


def create(wiring: Wiring) -> NullTransport:
    """The transport, as ``TRANSPORTS`` wants it; ``wiring`` is not used."""
    return NullTransport()
