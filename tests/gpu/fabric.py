"""Whether the fabric that SMs play keeps the bandwidth and the latency that it was asked for: ``python tests/gpu/fabric.py``.

One GPU, one process: a kernel that only sends (``kernels/send_puts.cuh``) beside the fabric, which delivers to the rank's own memory.
Bandwidth is that of many puts by many CTAs, from the first command to when the last flag is seen; latency that of puts one after the
other. A line per size: what was asked, what was measured, whether it is within 10 % (bandwidth), and 10 % and 1 us (latency). Every byte is
checked.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkernel import abi
from mkernel.jit.spec import KernelSpec
from mkernel.runtime.backend import Backend
from mkernel.runtime.fabric import Fabric, FabricLink

_HERE = Path(__file__).parent
_SENDERS = {"cuda": 64, "cpu": 4}  # CTAs
_ALONE = 20  # puts that are timed one by one
_MOST_PUTS = 16384
_TIMEOUT_NS = 20_000_000_000
_TOLERANCE, _TOLERANCE_US = 0.10, 1.0


class Parameters(ctypes.Structure):
    """``Parameters`` of ``kernels/send_puts.cuh``."""

    _fields_ = [
        ("world", abi.World),
        *((name, ctypes.c_uint64) for name in ("source_offset", "target_offset", "slots", "bytes", "puts", "flag_offset", "times")),
        ("padding", ctypes.c_uint64),
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What one size showed."""

    size: int
    link: FabricLink
    puts: int
    gigabytes_per_second: float
    latency_us: float  # median
    worst_us: float
    wrong: int  # bytes

    @property
    def asked_us(self) -> float:
        return self.link.latency_us + self.size / self.link.gigabytes_per_second / 1e3

    @property
    def ok(self) -> bool:
        rate = abs(self.gigabytes_per_second / self.link.gigabytes_per_second - 1) <= _TOLERANCE
        latency = abs(self.latency_us - self.asked_us) <= _TOLERANCE * self.asked_us + _TOLERANCE_US
        return rate and latency and not self.wrong

    def __str__(self) -> str:
        return (
            f"{self.size:>9} {self.puts:>6}   {self.link.gigabytes_per_second:>6.1f} {self.gigabytes_per_second:>8.2f}   "
            f"{self.asked_us:>8.2f} {self.latency_us:>9.2f} {self.worst_us:>8.2f}   {'ok' if self.ok else 'NO'}"
            + (f"   {self.wrong} bytes are wrong" if self.wrong else "")
        )


HEAD = "    bytes   puts   GB/s asked measured   us: asked measured    worst"


class Bench:
    """A rank that sends to itself through the fabric. ``region``: bytes of source and of target."""

    def __init__(self, backend: Backend, region: int) -> None:
        self.backend, self.region, self.launches = backend, region, 0
        self.heap = backend.segment(2 * region, 0, 1)
        self.signals = backend.segment(abi.SIGNAL_FLAGS + 8 * _MOST_PUTS, 0, 1)
        for segment in (self.heap, self.signals):
            segment.map_peers([segment.fd])
        self.host_ring = backend.allocate_host(ctypes.sizeof(abi.Ring))
        self.times = backend.allocate(16 * max(_ALONE, 1))
        self.header = abi.World(
            size=2,
            num_nodes=2,
            ranks_per_node=1,
            heap_base=self.heap.base,
            heap_stride=self.heap.stride,
            signal_base=self.signals.base,
            signal_stride=self.signals.stride,
            control=backend.allocate(ctypes.sizeof(abi.ControlBlock)),
            host=backend.allocate_host(ctypes.sizeof(abi.HostBlock)).address,
            ring=backend.allocate(ctypes.sizeof(abi.Ring)),
            timeout_ns=_TIMEOUT_NS,
            entry_timeout_ns=_TIMEOUT_NS,
        )
        constants = {"kNumNodes": 2, "kRanksPerNode": 1}
        self.kernels = [
            backend.load(
                KernelSpec("send_puts", (*constants.items(), ("kAlone", alone)), 64, 0, ctypes.sizeof(Parameters), _HERE / "kernels")
            )
            for alone in (0, 1)
        ]

    def fabric(self, link: FabricLink) -> Fabric:
        peers = {1: (self.heap.address(), self.signals.address())}
        return Fabric(self.backend, self.header, peers, self.host_ring.address, self.heap.size, self.signals.size, link)

    def run(self, fabric: Fabric, size: int, puts: int, *, alone: bool) -> list[int]:
        """Times in ns, as the kernel writes them."""
        self.launches += 1
        self.header.launch = self.launches
        abi.Ring.from_address(self.host_ring.host_address).launched = self.launches
        slots = max(self.region // size, 1)
        flags = abi.SIGNAL_FLAGS
        parameters = Parameters(self.header, 0, self.region, slots, size, puts, flags, self.times)
        backend = self.backend
        turn = backend.order(backend.stream(None))
        fabric.serve(turn, self.launches)
        backend.launch(self.kernels[alone], turn, 1 if alone else _SENDERS[backend.target], parameters)
        backend.synchronize()
        fabric.check()
        words = 2 * puts if alone else 2
        return list((ctypes.c_uint64 * words).from_buffer_copy(backend.read(self.times, 8 * words)))

    def wrong(self, size: int, puts: int) -> int:
        """Bytes of the target that are not those of the source."""
        used = min(puts, self.region // size) * size
        source, target = (self.backend.read(self.heap.address() + at, used) for at in (0, self.region))
        return 0 if source == target else sum(a != b for a, b in zip(source, target, strict=True))

    def row(self, size: int, link: FabricLink, total: int) -> Row:
        fabric = self.fabric(link)
        with contextlib.closing(fabric):
            puts = min(max(total // size, 4), _MOST_PUTS)
            self.fill(size, puts)
            self.run(fabric, size, puts, alone=False)  # warms up
            wrong = self.wrong(size, puts)
            begin, end = self.run(fabric, size, puts, alone=False)
            times = self.run(fabric, size, _ALONE, alone=True)
        each = [(after - before) / 1e3 for before, after in zip(times[::2], times[1::2], strict=True)]
        seconds = (end - begin) * 1e-9 - link.latency_us * 1e-6  # the first put is there after one latency
        return Row(size, link, puts, size * puts / seconds / 1e9, statistics.median(each), max(each), wrong)

    def fill(self, size: int, puts: int) -> None:
        """Fresh bytes at the source, none of them at the target."""
        used = min(puts, self.region // size) * size
        block = bytes(range(1, 252)) * (used // 251 + 1)
        self.backend.write(self.heap.address(), block[:used])
        self.backend.clear(self.heap.address() + self.region, used)

    def step_ns(self, times: Sequence[int]) -> int:
        """The step of the device's clock, as far as these times show it."""
        return math.gcd(*(time - times[0] for time in times))

    def close(self) -> None:
        self.backend.synchronize()
        for segment in (self.heap, self.signals):
            segment.close()
        self.backend.close()


@contextlib.contextmanager
def backend_of(target: str) -> Iterator[Any]:
    if target == "cuda":
        from mkernel.runtime.cuda.backend import CudaBackend

        yield CudaBackend(0)
        return
    from mkernel.runtime.cpu.backend import CpuBackend, ThreadRanks

    with ThreadRanks(1) as ranks:
        yield CpuBackend(0, ranks, sm_count=8)
        ranks.finish(0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gbps", type=float, nargs="+", default=[25.0, 50.0], help="GB/s")
    parser.add_argument("--latency", type=float, default=5.0, help="us")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << bits for bits in range(12, 25, 2)], help="bytes of a put")
    parser.add_argument("--total", type=int, default=64 << 20, help="bytes that are sent for each line, at most so many puts of one size")
    chosen = parser.parse_args(arguments)
    region = max(*chosen.sizes, min(chosen.total, 64 << 20))
    failed = 0
    with backend_of(chosen.target) as backend:
        bench = Bench(backend, region)
        print(f"{backend.name}; fabric of SMs, asked latency {chosen.latency:g} us\n{HEAD}", flush=True)
        for rate in chosen.gbps:
            link = FabricLink(gigabytes_per_second=rate, latency_us=chosen.latency)
            for size in chosen.sizes:
                row = bench.row(size, link, chosen.total)
                failed += not row.ok
                print(row, flush=True)
        with contextlib.closing(bench.fabric(FabricLink(gigabytes_per_second=0.0, latency_us=0.0))) as fabric:
            times = bench.run(fabric, 16, _ALONE, alone=True)
            own = statistics.median((b - a) / 1e3 for a, b in zip(times[::2], times[1::2], strict=True))
            most = bench.run(fabric, min(1 << 20, region), 32, alone=False)
            rate = 32 * min(1 << 20, region) / (most[1] - most[0])
            print(f"not paced: {own:.2f} us for a put of 16 bytes, {rate:.1f} GB/s at 1 MiB; the clock steps {bench.step_ns(times)} ns")
        bench.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
