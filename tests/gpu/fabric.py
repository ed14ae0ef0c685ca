"""Whether the fabric that SMs play keeps the bandwidth and the latency that it was asked for: ``python tests/gpu/fabric.py``.

One GPU, one process: a kernel that only sends (``kernels/send_puts.cuh``) beside the fabric, which delivers to the rank's own memory.
Bandwidth is that of many puts by many CTAs, from the first command to when the last flag is seen; latency that of puts one after the
other. A line per size: what was asked, what was measured, whether it is within 10 % (bandwidth), and 10 % and 1 us (latency). Every byte is
checked. Before that a table says where the time of a lone put goes, paced and not paced, and what the fabric takes itself of the latency:
``--own auto`` gives the lines that much, to be written into mkernel/runtime/fabric.py.

It ends by itself: waits of kernels after 3 s, a line in which something hangs after 6 s (what is known of it is printed, and the next one
follows), all of it after ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import faulthandler
import math
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkernel import abi
from mkernel.jit.spec import KernelSpec
from mkernel.runtime.backend import Backend
from mkernel.runtime.fabric import Fabric, FabricLink, Stamps, own_ns

_HERE = Path(__file__).parent
_SENDERS = {"cuda": 64, "cpu": 4}  # CTAs
_ALONE = 20  # puts that are timed one by one
_MOST_PUTS = 16384
_TIMEOUT_NS = 3_000_000_000
_PATIENCE = {"cuda": 6.0, "cpu": 600.0}  # seconds until kernels are asked to leave; target cpu's time is virtual
_TOLERANCE, _TOLERANCE_US = 0.10, 1.0
_NOT_PACED = FabricLink(gigabytes_per_second=0.0, latency_us=0.0)


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


class StoppedError(Exception):
    """Kernels that gave up, or that were told to."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stages:
    """Where the time of lone puts went: by stage, the ns of each put."""

    spent: dict[str, list[int]]

    @classmethod
    def of(cls, sent: Sequence[tuple[int, int, int]], stamps: Sequence[Stamps]) -> Stages:
        spent: dict[str, list[int]] = {}
        for (begin, posted, observed), at in zip(sent, stamps, strict=True):
            for name, since, until in (
                ("posted: its ticket is released", begin, posted),
                ("seen by the taker", posted, at.seen),
                ("due, from seen", at.seen, at.due),
                ("found by its worker, from posted", posted, at.found),
                ("copied: its stores are under way", at.found, at.copied),
                ("published: they are complete", at.copied, at.published),
                ("landed: all workers are done with it", at.published, at.landed),
                ("raised, from due or landed", max(at.due, at.landed), at.raised),
                ("observed by the sender", at.raised, observed),
                ("all", begin, observed),
            ):
                spent.setdefault(name, []).append(until - since)
        return cls(spent)

    def __str__(self) -> str:
        rows = (f"{name:<40} {statistics.median(ns) / 1e3:>8.2f} {max(ns) / 1e3:>8.2f}" for name, ns in self.spent.items())
        return "\n".join(rows)


HEAD = "    bytes   puts   GB/s asked measured   us: asked measured    worst"


class Bench:
    """A rank that sends to itself through the fabric. ``region``: bytes of source and of target."""

    def __init__(self, backend: Backend, region: int) -> None:
        self.backend, self.region, self.launches = backend, region, 0
        self.own: int | None = None  # ns; None: what is known
        self.heap = backend.segment(2 * region, 0, 1)
        self.signals = backend.segment(abi.SIGNAL_FLAGS + 8 * _MOST_PUTS, 0, 1)
        for segment in (self.heap, self.signals):
            segment.map_peers([segment.fd])
        self.host_ring = backend.allocate_host(ctypes.sizeof(abi.Ring))
        self.times = backend.allocate(24 * _ALONE)
        self.host = backend.allocate_host(ctypes.sizeof(abi.HostBlock))
        self.report = abi.HostBlock.from_address(self.host.host_address)
        self.header = abi.World(
            size=2,
            num_nodes=2,
            ranks_per_node=1,
            heap_base=self.heap.base,
            heap_stride=self.heap.stride,
            signal_base=self.signals.base,
            signal_stride=self.signals.stride,
            control=backend.allocate(ctypes.sizeof(abi.ControlBlock)),
            host=self.host.address,
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

    def fabric(self, link: FabricLink, *, stamps: bool = False) -> Fabric:
        peers = {1: (self.heap.address(), self.signals.address())}
        sizes = self.heap.size, self.signals.size
        return Fabric(self.backend, self.header, peers, self.host_ring.address, *sizes, link, own_ns=self.own, stamps=stamps)

    def run(self, fabric: Fabric, size: int, puts: int, *, alone: bool) -> list[int]:
        """Times in ns, as the kernel writes them. Raises StoppedError."""
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
        self._finish()
        fabric.check()
        words = 3 * puts if alone else 2
        return list((ctypes.c_uint64 * words).from_buffer_copy(backend.read(self.times, 8 * words)))

    def _finish(self) -> None:
        """Wait for the kernels, not for ever."""
        told: list[bool] = []

        def stop() -> None:
            told.append(True)
            self.report.abort = 1
            print(f"launch {self.launches} is asked to leave", flush=True)

        timer = threading.Timer(_PATIENCE[self.backend.target], stop)
        timer.daemon = True
        timer.start()
        self.backend.synchronize()
        timer.cancel()
        if told or self.report.state != abi.State.running:
            raise StoppedError(f"{'kernels went on for too long' if told else 'a kernel has given up'}: {self._state()}")

    def _state(self) -> str:
        ring = abi.Ring.from_buffer_copy(self.backend.read(self.header.ring, ctypes.sizeof(abi.Ring)))
        control = abi.ControlBlock.from_buffer_copy(self.backend.read(self.header.control, ctypes.sizeof(abi.ControlBlock)))
        report = self.report
        waited = f"flag kind {report.flag_kind} index {report.flag_index}, expected {report.expected}, seen {report.seen}"
        newest = max(slot.ticket for slot in ring.slots)
        calls = f"launch {self.launches}, ended {ring.ended}"
        return f"state {report.state}, {waited}; {control.ring_head} puts, newest {newest}, {ring.completed} complete; {calls}"

    def alone(self, fabric: Fabric, size: int) -> list[tuple[int, int, int]]:
        """Begin, posted and observed of lone puts."""
        times = self.run(fabric, size, _ALONE, alone=True)
        return list(zip(times[::3], times[1::3], times[2::3], strict=True))

    def stages(self, size: int, link: FabricLink) -> Stages:
        with contextlib.closing(self.fabric(link, stamps=True)) as fabric:
            self.alone(fabric, size)  # warms up
            first = int.from_bytes(self.backend.read(self.header.ring, 8), "little")
            sent = self.alone(fabric, size)
            noted = (Stamps * abi.RING_SLOTS).from_buffer_copy(self.backend.read(fabric.stamps, ctypes.sizeof(Stamps) * abi.RING_SLOTS))
            return Stages.of(sent, [noted[(first + i) % abi.RING_SLOTS] for i in range(_ALONE)])

    def own_of(self, size: int, link: FabricLink) -> int:
        """What the fabric takes of the latency beyond what it is told to take, in ns."""
        before, self.own = self.own, 0
        with contextlib.closing(self.fabric(link)) as fabric:
            self.alone(fabric, size)
            asked = link.latency_us * 1e3 + size / link.gigabytes_per_second
            own = statistics.median(observed - begin for begin, _, observed in self.alone(fabric, size)) - asked
        self.own = before
        return round(own)

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
            each = [(observed - begin) / 1e3 for begin, _, observed in self.alone(fabric, size)]
        seconds = (end - begin) * 1e-9 - link.latency_us * 1e-6  # the first put is there after one latency
        return Row(size, link, puts, size * puts / seconds / 1e9, statistics.median(each), max(each), wrong)

    def fill(self, size: int, puts: int) -> None:
        """Fresh bytes at the source, none of them at the target."""
        used = min(puts, self.region // size) * size
        block = bytes(range(1, 252)) * (used // 251 + 1)
        self.backend.write(self.heap.address(), block[:used])
        self.backend.clear(self.heap.address() + self.region, used)

    def close(self) -> None:
        for segment in (self.heap, self.signals):
            segment.close()


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


class Report:
    """The lines of one run of the script. A bench in which a kernel has given up is done for; another one takes its place."""

    def __init__(self, backend: Backend, region: int) -> None:
        self.backend, self.region, self.failed = backend, region, 0
        self.bench = Bench(backend, region)

    def attempt(self, what: str, action: Callable[[Bench], bool]) -> None:
        try:
            self.failed += not action(self.bench)
        except StoppedError as stopped:
            self.failed += 1
            print(f"{what}: {stopped}", flush=True)
            own = self.bench.own
            self.bench.close()
            self.bench = Bench(self.backend, self.region)
            self.bench.own = own

    def show_stages(self, bench: Bench, size: int, link: FabricLink) -> bool:
        print(f"where the time of a lone put of {size} bytes goes, in us: median, worst of {_ALONE}; {link}", flush=True)
        print(bench.stages(size, link), flush=True)
        return True

    def find_own(self, bench: Bench, size: int, link: FabricLink) -> bool:
        bench.own = bench.own_of(size, link)
        print(f"it takes {bench.own} ns itself; known so far: {own_ns(bench.backend.target)}", flush=True)
        return True

    def show_row(self, bench: Bench, size: int, link: FabricLink, total: int) -> bool:
        row = bench.row(size, link, total)
        print(row, flush=True)
        return row.ok

    def show_most(self, bench: Bench, size: int) -> bool:
        with contextlib.closing(bench.fabric(_NOT_PACED)) as fabric:
            sent = bench.alone(fabric, 16)
            own = statistics.median((observed - begin) / 1e3 for begin, _, observed in sent)
            begin, end = bench.run(fabric, size, 32, alone=False)
        step = math.gcd(*(time - sent[0][0] for put in sent for time in put))
        print(f"not paced: {own:.2f} us for a put of 16 bytes, {32 * size / (end - begin):.1f} GB/s at {size}; the clock steps {step} ns")
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gbps", type=float, nargs="+", default=[25.0, 50.0], help="GB/s")
    parser.add_argument("--latency", type=float, default=5.0, help="us")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << bits for bits in range(12, 25, 2)], help="bytes of a put")
    parser.add_argument("--total", type=int, default=64 << 20, help="bytes that are sent for each line, at most so many puts of one size")
    parser.add_argument("--own", default="known", help="ns that the fabric takes itself: known, auto (measured) or a number")
    parser.add_argument("--limit", type=float, default=55.0, help="seconds; 0: none")
    chosen = parser.parse_args(arguments)
    if chosen.limit:  # of what hangs with the driver's functions, too
        faulthandler.dump_traceback_later(chosen.limit, exit=True)
    region = max(*chosen.sizes, min(chosen.total, 64 << 20))
    with backend_of(chosen.target) as backend:
        report = Report(backend, region)
        print(f"{backend.name}; fabric of SMs, asked latency {chosen.latency:g} us", flush=True)
        links = [FabricLink(gigabytes_per_second=rate, latency_us=chosen.latency) for rate in chosen.gbps]
        if chosen.own == "auto":
            report.attempt("own", lambda bench: report.find_own(bench, min(chosen.sizes), links[0]))
        elif chosen.own != "known":
            report.bench.own = int(chosen.own)
        for link in (_NOT_PACED, links[0]):
            report.attempt("stages", lambda bench, link=link: report.show_stages(bench, min(chosen.sizes), link))
        print(HEAD, flush=True)
        for link in links:
            for size in chosen.sizes:
                report.attempt(f"{size:>9}", lambda bench, size=size, link=link: report.show_row(bench, size, link, chosen.total))
        report.attempt("not paced", lambda bench: report.show_most(bench, min(1 << 20, region)))
        report.bench.close()
        backend.close()
    if chosen.limit:
        faulthandler.cancel_dump_traceback_later()
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
