"""The engine of a rank when a world is opened: which transport it has, whether it is a process of its own, and its start."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mkernel import env
from mkernel.errors import ArgumentError
from mkernel.runtime.fabric import Fabric, FabricLink
from mkernel.runtime.opening.placement import RankInfo, choose_engine, choose_link, choose_network, choose_signals, host_slot
from mkernel.runtime.opening.together import together
from mkernel.transport import TRANSPORTS, own_process
from mkernel.transport.emulated import require_one_plain_link

if TYPE_CHECKING:
    from mkernel.memory.segment import Segment
    from mkernel.planner.topology import Topology
    from mkernel.proxy.process import EngineProcess
    from mkernel.runtime.cpu.thread_ranks import ThreadRanks
    from mkernel.runtime.parts import OnError, Parts
    from mkernel.runtime.ranks.bootstrap import Bootstrap

__all__ = ["Network", "choose_transport", "open_process", "plan_network", "start_engine"]

_GPU_SPIN_NS = 2_000_000  # of an engine beside a GPU, where there are processors enough


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """How the nodes of a world talk; the same on every rank."""

    transport: str  # empty on one node, where none is needed
    own_process: bool  # the engine is a process
    host_signals: bool  # flags lie in host memory, where an engine raises them
    sms: bool = False  # SMs play it, beside the kernels of the world: see mkernel.runtime.fabric


def plan_network(name: str, topology: Topology, infos: Sequence[RankInfo], thread_ranks: ThreadRanks | None) -> Network:
    """Decide how the nodes talk. ``name``: the transport that the user asked for. Raises ArgumentError."""
    transport = choose_transport(name, topology, infos)
    sms = transport == "emulated" and choose_engine(infos) == "sms"
    if sms:
        require_one_plain_link()
    return Network(transport, _in_own_process(transport, thread_ranks), choose_signals(infos, transport), sms)


def choose_transport(name: str, topology: Topology, infos: Sequence[RankInfo]) -> str:
    """The name of the transport; empty on one node, where none is needed. An unknown name is an error anyway."""
    from mkernel import transport

    if name != "auto" and name not in transport.names():
        raise ArgumentError("transport", repr(name), "no such transport", f"there are auto, {', '.join(transport.names())}")
    if topology.num_nodes == 1:
        return ""
    one_host = len({info.host for info in infos}) == 1
    if name == "auto":
        return "emulated" if one_host else choose_network(infos)
    if name == "emulated" and not one_host:
        raise ArgumentError("transport", repr(name), "the emulated transport connects ranks of one host only", "use auto, rc or srd")
    for rank, info in enumerate(infos):
        if info.networks.get(name):
            raise ArgumentError("transport", repr(name), f"rank {rank}: {info.networks[name]}", "see `python -m mkernel doctor`")
    return name


def _in_own_process(transport: str, thread_ranks: ThreadRanks | None) -> bool:
    """Whether the engine is a process; on one node (no transport) there is none at all."""
    if not transport or thread_ranks is None:
        return bool(transport) and own_process(transport)
    if TRANSPORTS[transport].rdma:
        rule = "mk.launch on target cpu runs in virtual time"
        raise ArgumentError("transport", repr(transport), rule, "start processes, or use emulated")
    return False


def open_process(bootstrap: Bootstrap, infos: Sequence[RankInfo], parts: Parts, undo: contextlib.ExitStack) -> EngineProcess:
    """Start the engine's process, and connect it with those of the other ranks. Collective."""
    from mkernel.proxy.process import EngineProcess, Layout, Memory
    from mkernel.transport import devices

    rank, backend, name = parts.rank, parts.backend, parts.options.transport
    rdma = TRANSPORTS[name].rdma
    assert parts.ring is not None
    ring = parts.ring.fd
    slot, link = host_slot(infos, rank), choose_link(infos) if name == "rc" else None
    peers = parts.topology.rail_peers(rank)

    def memory(segment: Segment) -> Memory:
        if segment.mappable:
            return Memory(segment.fd, segment.size)
        return Memory(segment.dmabuf() if rdma else -1, segment.size, dmabuf=True)

    def start() -> EngineProcess:
        cards = devices.cards_for(name, slot, backend.pci_address, link=link) if rdma else ()
        process = EngineProcess(
            Layout(
                transport=name,
                rank=rank,
                peers=peers,
                heap=memory(parts.data),
                signals=memory(parts.signals),
                ring=ring,
                card=cards[0] if cards else None,
                more_cards=cards[1:],
                timeout=parts.options.timeout,
                spin_ns=_spin_ns(backend.target),
                follows=backend.target == "cuda",
                graph_spin_ns=int(env.GRAPH_SPIN.get() * 1e9),
            )
        )
        undo.callback(process.close)
        return process

    engine = together(bootstrap, "its network", start)
    while (part := together(bootstrap, "its network", engine.step)) is not None:
        told = bootstrap.allgather(part)
        engine.give([told[other] if other in peers or other == rank else b"" for other in range(len(told))])
    return engine


def start_engine(
    parts: Parts,
    on_error: OnError,
    rail: dict[int, tuple[int, int]],
    thread_ranks: ThreadRanks | None,
    process: EngineProcess | None,
    network: Network,
) -> Callable[[], None]:
    """Start the engine, or listen to its process. Returns what stops it. ``rail``: mapped memory of the rail peers, by rank."""
    if process is not None:
        process.watch(on_error)
        parts.wakers.append(process.wake)
        return process.close
    if network.sms:
        return start_fabric(parts, on_error, rail, thread_ranks)
    from mkernel import transport
    from mkernel.proxy.engine import Engine, EngineThread, pace_of
    from mkernel.proxy.process import release_store
    from mkernel.proxy.ring import RingReader

    rank, backend = parts.rank, parts.backend
    assert parts.ring is not None
    clock = time.monotonic_ns if thread_ranks is None else thread_ranks.now
    # On cpu credits must be real release stores: kernels read them with acquire, and on AArch64 a plain store may come too early.
    store = backend.copier().signal if backend.target == "cpu" else None
    wiring = transport.Wiring(
        rank=rank,
        heap_address=parts.data.address(),
        heap_bytes=parts.data.size,
        signal_bytes=parts.signals.size,
        peers=rail or dict.fromkeys(parts.topology.rail_peers(rank), (0, 0)),
        copier=backend.copier,
        clock_ns=clock,
        signal_address=parts.signals.address(),
        store=release_store() if store is None and network.host_signals else store,
        timeout=parts.options.timeout,
    )
    engine = Engine(RingReader(parts.ring.view, store=store), transport.create(parts.options.transport, wiring), clock)
    if thread_ranks is None:
        graphs = int(env.GRAPH_SPIN.get() * 1e9)
        pace = pace_of(engine.ring, _spin_ns(backend.target), follows=backend.target == "cuda", graph_spin_ns=graphs)
        thread = EngineThread(engine, on_error, name=f"mkernel-engine-{rank}", pace=pace).start()
        parts.wakers.append(thread.wake)
        return thread.close
    remove = thread_ranks.add_engine(rank, engine.step, engine.next_event_ns, on_error)

    def stop() -> None:
        remove()
        engine.close()

    return stop


def start_fabric(parts: Parts, on_error: OnError, rail: dict[int, tuple[int, int]], thread_ranks: ThreadRanks | None) -> Callable[[], None]:
    """Prepare the kernel that plays the network beside those of the world. Returns what stops it."""
    backend = parts.backend
    assert parts.ring is not None
    assert parts.known is not None
    fabric = parts.fabric = Fabric(
        backend,
        parts.known,
        {peer: (backend.kernel_address(heap), backend.kernel_address(signals)) for peer, (heap, signals) in rail.items()},
        parts.ring.address,
        parts.data.size,
        parts.signals.size,
        FabricLink(
            gigabytes_per_second=env.EMULATED_GBPS.get(),
            latency_us=env.EMULATED_LATENCY_US.get(),
            reorder_us=env.EMULATED_REORDER_US.get(),
            seed=env.CPU_SEED.get(),
        ),
    )
    if thread_ranks is None:
        fabric.watch(on_error)
        return fabric.close

    def look() -> bool:
        fabric.check()
        return False

    remove = thread_ranks.add_engine(parts.rank, look, lambda: None, on_error)

    def stop() -> None:
        remove()
        fabric.close()

    return stop


def _spin_ns(target: str) -> int:
    from mkernel.proxy.pace import SPIN_NS

    return _GPU_SPIN_NS if target == "cuda" else SPIN_NS
