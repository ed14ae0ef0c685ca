"""The memory of a rank when a world is opened: allocated on every rank, then shared with the others."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from typing import TYPE_CHECKING

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.runtime.opening.engine import Network
from mkernel.runtime.ranks.connect import CONNECT_SECONDS

if TYPE_CHECKING:
    from mkernel.memory.segment import Segment
    from mkernel.planner.topology import Topology
    from mkernel.runtime.backend import Backend, HostMemory
    from mkernel.runtime.ranks.control import Control

__all__ = ["HEAP_BYTES", "Memory", "open_memory", "share_memory"]

HEAP_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}  # default of heap_bytes; reserved when the world is opened, never grown


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """A rank's segments, and its host memory."""

    data: Segment
    signals: Segment
    block: HostMemory
    ring: HostMemory | None


def open_memory(backend: Backend, heap_bytes: int, topology: Topology, rank: int, network: Network, undo: contextlib.ExitStack) -> Memory:
    """Allocate a rank's memory. ``undo`` frees it if a later step fails."""
    shape = (topology.local_rank(rank), topology.ranks_per_node)
    try:
        data = backend.segment(heap_bytes, *shape)
    except OSError as error:
        raise ArgumentError("heap_bytes", heap_bytes, f"cannot be had: {error}", "ask for less") from error
    undo.callback(data.close)
    # Only engines want flags in host memory. Packets are sent inside a node only, so that flags in host memory need no room for them.
    host = network.host_signals
    signals = backend.segment(abi.FLAG_BYTES if host else abi.SIGNAL_BYTES, *shape, host=host)
    undo.callback(signals.close)
    block = backend.allocate_host(ctypes.sizeof(abi.HostBlock))
    shared = {"shared": True} if network.own_process else {}
    ring = backend.allocate_host(ctypes.sizeof(abi.Ring), **shared) if network.transport else None
    return Memory(data, signals, block, ring)


def share_memory(
    control: Control, backend: Backend, memory: Memory, topology: Topology, rank: int, network: Network
) -> dict[int, tuple[int, int]]:
    """Map the memory of the node's ranks; for the emulated transport also of its rail's: their heap and flags, by rank. Collective."""
    data, signals = memory.data, memory.signals
    with control.exchange_fds([data.fd, signals.fd], CONNECT_SECONDS) as fds:
        local = topology.node_ranks(topology.node(rank))
        data.map_peers([fds[peer][0] for peer in local])
        signals.map_peers([fds[peer][1] for peer in local])
        if network.transport != "emulated":
            return {}

        def mapped(heap: int, flags: int) -> tuple[int, int]:
            return backend.import_segment(heap, data.size), backend.import_segment(flags, signals.size, host=network.host_signals)

        return {peer: mapped(*fds[peer]) for peer in topology.rail_peers(rank)}
