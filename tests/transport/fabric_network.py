"""Ranks joined by fabrics that SMs play: the kernel runs on target cpu in virtual time, between what a test does."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from mkernel import abi
from mkernel.errors import Error
from mkernel.runtime.cpu.backend import CpuBackend
from mkernel.runtime.cpu.scheduler import BLOCKED, CpuKernel, Scheduler
from mkernel.runtime.fabric import Fabric, FabricLink
from tests.transport.harness import LocalNetwork

__all__ = ["FabricNetwork"]

_NEVER = 2**64 - 1
_LONGEST_TURN = 400  # switches between threads of the kernels


class _Device(CpuBackend):
    """Keeps what is launched beside a call: here there is no call, and the network runs it."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, sm_count=4)
        self.launched: list[tuple[CpuKernel, int, bytes]] = []

    def accompany(self, kernel: Any, turn: Any, grid: int, parameters: Any) -> None:
        self.launched.append((kernel, grid, bytes(parameters)))


class FabricNetwork(LocalNetwork):
    """``ranks`` ranks, each its own node. Their fabrics serve one long call, which ends when the network is closed."""

    def __init__(
        self,
        ranks: int = 3,
        *,
        heap_bytes: int = 1 << 20,
        gigabytes_per_second: float = 50.0,
        latency_us: float = 5.0,
        reorder_us: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(ranks, heap_bytes, seed)
        link = FabricLink(gigabytes_per_second=gigabytes_per_second, latency_us=latency_us, reorder_us=reorder_us, seed=seed)
        self.scheduler = Scheduler(seed, virtual_time=True)
        self.devices = [_Device(rank) for rank in self.ranks]
        self.fabrics: list[Fabric] = []
        self.controls: list[abi.ControlBlock] = []
        self.launches: list[int] = []
        self.host_rings: list[abi.Ring] = []
        self._rings: list[Any] = []
        self._makers: list[Callable[[], Fabric]] = []
        for rank in self.ranks:
            device, heap, signals = self.devices[rank], self.heaps[rank], self.signals[rank]
            control = device.allocate(ctypes.sizeof(abi.ControlBlock))
            host_ring = device.allocate_host(ctypes.sizeof(abi.Ring))
            self.host_rings.append(abi.Ring.from_address(host_ring.host_address))
            self._rings.append(ctypes.c_char.from_buffer(self.producers[rank].buffer))
            header = abi.World(
                rank=rank,
                size=ranks,
                node=rank,
                num_nodes=ranks,
                ranks_per_node=1,
                heap_base=heap.address(),
                heap_stride=heap.size,
                signal_base=signals.address(),
                signal_stride=signals.size,
                control=control,
                host=device.allocate_host(ctypes.sizeof(abi.HostBlock)).address,
                ring=ctypes.addressof(self._rings[-1]),
            )
            peers = {peer: (self.heaps[peer].address(), self.signals[peer].address()) for peer in self.ranks if peer != rank}
            make = functools.partial(Fabric, device, header, peers, host_ring.address, heap.size, signals.size, link)
            self._makers.append(make)
            self.fabrics.append(make())
            self.controls.append(abi.ControlBlock.from_address(control))
            self.serve(rank, 1)

    def serve(self, rank: int, launch: int) -> None:
        """Launch a rank's fabric for the call of that number."""
        device = self.devices[rank]
        self.host_rings[rank].launched = launch
        self.fabrics[rank].serve(None, launch)
        self.launches.append(self.scheduler.start(*device.launched.pop(), rank))

    def renew(self, rank: int) -> None:
        """Give a rank another fabric, on the ring as it is; nothing may be on its way."""
        self.fabrics[rank].close()
        self.fabrics[rank] = self._makers[rank]()

    @property
    def now(self) -> int:
        """Virtual time, ns."""
        value: int = self.scheduler.library.now(self.scheduler.handle)
        return value

    def turn(self) -> bool:
        library, handle = self.scheduler.library, self.scheduler.handle
        blocked = library.run(handle, self.random.randrange(1, _LONGEST_TURN), _NEVER) == BLOCKED
        self.watcher()
        for launch in list(self.launches):
            result = self.scheduler.result(launch)
            if result is not False:
                self.launches.remove(launch)
            if isinstance(result, Error):
                raise result
        if not blocked:
            return bool(self.launches)
        timer = library.next_timer(handle)
        if timer == _NEVER:
            return False
        library.advance_to(handle, timer)
        return True

    def run(self, turns: int) -> None:
        """At most so many switches between threads of the kernels."""
        self.scheduler.library.run(self.scheduler.handle, turns, _NEVER)

    def end_call(self, launch: int = 1) -> None:
        """Say that the call has ended on every rank, which has issued all its commands."""
        for rank, producer in enumerate(self.producers):
            self.controls[rank].ring_head = producer.head
            producer.ring.ended = launch
        self.scheduler.library.poke(self.scheduler.handle)

    def close(self) -> None:
        for launch in self.launches:
            self.scheduler.library.forget(self.scheduler.handle, launch)
        self.scheduler.close()
        for fabric in self.fabrics:
            fabric.close()
        for device in self.devices:
            device.close()
        self._rings.clear()
        super().close()
