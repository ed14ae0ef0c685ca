"""What ``init`` has made before there is a world."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from mkernel import abi

if TYPE_CHECKING:
    from mkernel.memory.segment import Segment
    from mkernel.planner.topology import Topology
    from mkernel.runtime.backend import Backend, HostMemory
    from mkernel.runtime.fabric import Fabric
    from mkernel.runtime.options import Options
    from mkernel.runtime.ranks.control import Control, Waiting

__all__ = ["OnError", "Parts", "StartEngine"]

OnError = Callable[[Exception], object]  # hears of the engine's failure
StartEngine = Callable[["Parts", OnError], Callable[[], None]]  # returns what stops the engine


@dataclasses.dataclass(slots=True)
class Parts:
    """What ``open_world`` hands over; the world owns it from then on."""

    options: Options
    topology: Topology
    rank: int
    device: int | str
    backend: Backend
    control: Control
    data: Segment
    signals: Segment
    block: HostMemory  # abi.HostBlock, where kernels report failures
    ring: HostMemory | None  # of commands to the engine; where SMs play the network, kernels have another one, in device memory
    over_mpi: bool
    process_group: str  # the name of torch's whose ranks they are; empty: of none
    waiting: Waiting
    machine: str  # the name of rank 0's device
    poke: Callable[[], None] | None = None  # makes waiting kernels of the cpu target look at the abort word
    start_engine: StartEngine | None = None
    device_ring: int = 0  # its address
    fabric: Fabric | None = None  # where SMs play the network
    known: abi.World | None = None  # what kernels know of their rank, once ``header`` was called
    wakers: list[Callable[[], None]] = dataclasses.field(default_factory=list)  # called before each launch

    def header(self) -> abi.World:
        """What every call's parameters begin with, but for what the call is. Allocates the kernels' control block."""
        topology, data, signals, options = self.topology, self.data, self.signals, self.options
        self.known = abi.World(
            rank=self.rank,
            size=topology.size,
            node=topology.node(self.rank),
            num_nodes=topology.num_nodes,
            local_rank=topology.local_rank(self.rank),
            ranks_per_node=topology.ranks_per_node,
            heap_base=data.base,
            heap_stride=data.stride,
            signal_base=signals.base,
            signal_stride=signals.stride,
            control=self.backend.allocate(ctypes.sizeof(abi.ControlBlock)),
            host=self.block.address,
            ring=self.device_ring or (self.ring.address if self.ring is not None else 0),
            timeout_ns=int(options.timeout * 1e9),
            entry_timeout_ns=int(options.entry_timeout * 1e9),
        )
        return self.known
