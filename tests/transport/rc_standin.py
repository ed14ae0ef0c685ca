"""Transport rc over cards of this process: how tests open it, use it, and wait for its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mkernel.errors import TransportError
from mkernel.transport import Wiring
from mkernel.transport.rc import RcTransport, open_transport
from tests.transport.standin import StandinNetwork, StandinNic

__all__ = ["issue", "opener", "run_until_error", "wiring"]


def opener(
    signal: str = "atomic", queue_pairs: int = 2, kind: type[RcTransport] = RcTransport
) -> Callable[[StandinNic, Wiring], RcTransport]:
    return lambda nic, wiring: open_transport(nic, wiring, signal=signal, queue_pairs=queue_pairs, kind=kind)


def run_until_error(network: StandinNetwork, rank: int = 0) -> TransportError:
    with pytest.raises(TransportError) as caught:
        for _ in range(20_000):
            network.turn()
    assert network.engines[rank].error is caught.value
    return caught.value


def issue(network: StandinNetwork, count: int = 5, *, to: int = 1, size: int = 100) -> None:
    for number in range(count):
        network.producers[0].issue(1, to, 0, 0, size, network.flag_offset(0), number + 1)


def wiring(**changes: Any) -> Wiring:
    """The wiring of rank 0 of two, whose segments are nowhere; with ``changes``."""
    fields: dict[str, Any] = {
        "rank": 0,
        "heap_address": 0x1000,
        "heap_bytes": 4096,
        "signal_bytes": 512,
        "peers": {1: (0, 0)},
        "copier": lambda: pytest.fail("rc copies nothing"),
        "clock_ns": lambda: 0,
        "signal_address": 0x4000,
        "store": lambda address, value: None,
    }
    return Wiring(**{**fields, **changes})
