"""``init`` step by step: agree on the shape, connect the control channel, open the device, share memory, start the engine."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mkernel import abi, env
from mkernel.errors import AbortedError, ArgumentError, Error
from mkernel.jit.headers import sources_digest
from mkernel.runtime import current, ending, logs, tuned
from mkernel.runtime.bootstrap import Bootstrap, ThreadGroup, choose, host_identity, under_launcher
from mkernel.runtime.control import Control, Failed, LocalControl, LocalHub, Waiting
from mkernel.runtime.placement import (
    Card,
    Gpu,
    choose_device,
    choose_network,
    choose_signals,
    choose_target,
    choose_topology,
    require_equal,
    require_same_build,
)
from mkernel.runtime.wire import SocketControl
from mkernel.runtime.world import DEFAULT_ENTRY_TIMEOUT, DEFAULT_TIMEOUT, SIGNAL_BYTES, Options, Parts, World
from mkernel.transport import TRANSPORTS, host_signals, own_process
from mkernel.version import VERSION

if TYPE_CHECKING:
    from mkernel.memory.segment import Segment
    from mkernel.plan.topology import Topology
    from mkernel.proxy.process import EngineProcess
    from mkernel.runtime.cpu import Cohort
    from mkernel.runtime.device import Device, HostMemory

__all__ = ["assemble", "gpus_here", "init", "join"]

T = TypeVar("T")

HEAP_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}  # default of heap_bytes; reserved at init, never grown
_CONNECT_SECONDS = 60.0
_GPU_SPIN_NS = 2_000_000  # of an engine beside a GPU, where there are processors enough

MakeDevice = Callable[[str, "int | str", int], "Device"]  # target, ordinal or "cpu", rank


def init(
    comm: Any = None,
    *,
    target: str = "auto",
    ranks_per_node: int | None = None,
    transport: str = "auto",
    heap_bytes: int | None = None,
    max_sms: int | None = None,
    timeout: float | None = None,
    entry_timeout: float | None = None,
) -> World:
    """Join the world: every process of the program calls this once, alike.

    Collective, blocks the host until all ranks have come. The world becomes the default of later calls; close it, or use it as a context
    manager (an exception inside then aborts all ranks).

    Parameters
    ----------
    comm
        mpi4py communicator. By default the ranks meet at ``MKERNEL_RENDEZVOUS``, or are those of MPI's COMM_WORLD under an MPI launcher, or
        those of torchrun or of a step of Slurm's srun; without any of these the world has one rank.
    target
        ``"cuda"``, ``"cpu"``, or ``"auto"``: cuda if every rank has its own sm_90 GPU with peer access inside the node, cpu if there is no
        GPU, else an error.
    ranks_per_node
        Splits a host into emulated nodes that talk through the transport. Default: all ranks of a host are one node.
    transport
        How nodes talk: ``"auto"``, or a name of ``mkernel.transport``.
    heap_bytes
        Size of each rank's symmetric heap, for ``world.empty`` and the plans' workspaces. Reserved here and never grown; default 256 MiB on
        cpu, 4 GiB on cuda. When it is too small, the error says how much is needed.
    max_sms
        Most SMs (CTAs) that a kernel of this world takes; default: all of the device. What is left runs beside it: kernels of another
        library that wait for each other across ranks, NCCL's say, must find room there (docs/streams.md).
    timeout, entry_timeout
        Seconds that a wait inside a call may last once all ranks have entered it (30), and before (600).

    What is left open (None, or ``transport="auto"``) takes the environment's value (``MKERNEL_TIMEOUT`` ...), then the default.

    Raises
    ------
    ArgumentError
        An argument is wrong, differs between ranks, or does not fit the machine; ranks of several hosts without MPI have no
        ``MKERNEL_SECRET`` (docs/security.md).
    MismatchError
        The ranks run different versions of mkernel, or different kernels.
    TimeoutError
        Without MPI: some ranks did not come within two minutes.
    Error
        A launcher started several ranks but MPI sees one; a peer went away.
    """
    with _opening(comm):
        options = Options.resolve(
            target=target,
            ranks_per_node=ranks_per_node,
            transport=transport,
            heap_bytes=heap_bytes,
            max_sms=max_sms,
            timeout=timeout,
            entry_timeout=entry_timeout,
        )
    return join(comm, options)


@contextlib.contextmanager
def _opening(comm: Any) -> Iterator[None]:
    """From here on the end of this process is the others' business too: they may already wait for it, inside MPI."""
    ending.install(current.opened)
    try:
        yield
    except BaseException:
        if comm is not None or (under_launcher() and not env.RENDEZVOUS.is_set()):
            ending.note_failure(peer_lost=False, seconds=DEFAULT_TIMEOUT + DEFAULT_ENTRY_TIMEOUT)
        raise


def join(comm: Any, options: Options, make_device: MakeDevice | None = None) -> World:
    """``init`` after its arguments are checked; tests give another device."""
    with _opening(comm), contextlib.closing(choose(comm)) as bootstrap:
        world = assemble(bootstrap, options, make_device=make_device)
    current.remember(world)
    return world


def assemble(
    bootstrap: Bootstrap,
    options: Options,
    *,
    group: ThreadGroup | None = None,
    cohort: Cohort | None = None,
    make_device: MakeDevice | None = None,
) -> World:
    """One rank's world. ``group`` and ``cohort`` are those of ``mk.launch``; ``make_device`` replaces the target's device (tests)."""
    logs.set_up()
    rank = bootstrap.rank
    cards = _exchange_cards(bootstrap, options, probe=make_device is None)
    require_equal(cards)
    topology = choose_topology(cards, options.ranks_per_node)
    if topology.size > abi.MAX_RANKS:
        raise ArgumentError("comm", topology.size, f"a world has at most {abi.MAX_RANKS} ranks")
    target = choose_target(cards, options.target) if make_device is None else "cpu" if options.target == "auto" else options.target
    transport = _choose_transport(options.transport, topology, cards)
    separate = _in_own_process(transport, cohort)
    host = choose_signals(cards, transport)
    device: int | str = choose_device(cards, rank).ordinal if target == "cuda" and make_device is None else 0 if target == "cuda" else "cpu"
    waiting: Waiting = contextlib.nullcontext
    if cohort is not None:
        waiting = lambda: cohort.blocked(rank)  # noqa: E731

    with contextlib.ExitStack() as undo:
        control = _open_control(bootstrap, cards, group, waiting, cohort.release if cohort is not None else None)
        undo.callback(control.close)
        heap_bytes = options.heap_bytes or HEAP_BYTES[target]

        def open_memory() -> tuple[Device, Any, Any, HostMemory, HostMemory | None]:
            backend = (make_device or _device_maker(cohort))(target, device, rank)
            undo.callback(backend.close)
            backend.sm_count = min(backend.sm_count, options.max_sms or backend.sm_count)
            shape = (topology.local_rank(rank), topology.ranks_per_node)
            data = backend.segment(heap_bytes, *shape)
            undo.callback(data.close)
            # Only engines want flags in host memory, and packets stay where there is none: no room for them there.
            signals = backend.segment(abi.FLAG_BYTES if host else SIGNAL_BYTES, *shape, host=host)
            undo.callback(signals.close)
            block = backend.allocate_host(ctypes.sizeof(abi.HostBlock))
            shared = {"shared": True} if separate else {}
            ring = backend.allocate_host(ctypes.sizeof(abi.Ring), **shared) if transport else None
            return backend, data, signals, block, ring

        backend, data, signals, block, ring = _together(bootstrap, "its device and memory", open_memory)

        def share() -> dict[int, tuple[int, int]]:
            with control.exchange_fds([data.fd, signals.fd], _CONNECT_SECONDS) as fds:
                local = topology.node_ranks(topology.node(rank))
                data.map_peers([fds[peer][0] for peer in local])
                signals.map_peers([fds[peer][1] for peer in local])
                if transport != "emulated":
                    return {}
                foreign = [peer for peer in range(topology.size) if topology.node(peer) != topology.node(rank)]

                def mapped(heap: int, flags: int) -> tuple[int, int]:
                    return backend.import_segment(heap, data.size), backend.import_segment(flags, signals.size, host=host)

                return {peer: mapped(*fds[peer]) for peer in foreign}

        foreign = _together(bootstrap, "the memory of its peers", share)
        engine: EngineProcess | None = None
        if separate:
            assert ring is not None
            engine = _open_engine(bootstrap, transport, cards, backend, topology, data, signals, ring, options.timeout, undo)
        start_engine: Callable[[World], Callable[[], None]] | None = None
        wakers: list[Callable[[], None]] = []
        if ring is not None:

            def start_engine(world: World) -> Callable[[], None]:
                return _start_engine(world, transport, ring, foreign, cohort, wakers, engine, host)

        world = World(
            Parts(
                options=dataclasses.replace(options, target=target, transport=transport, heap_bytes=data.size),
                topology=topology,
                rank=rank,
                device=device,
                backend=backend,
                control=control,
                data=data,
                signals=signals,
                block=block,
                ring=ring,
                over_mpi=bootstrap.mpi,
                waiting=waiting,
                poke=cohort.poke if cohort is not None else None,
                start_engine=start_engine,
                wakers=wakers,
            )
        )
        undo.pop_all()
    try:
        known = _tuned(world) if rank == 0 else b"ready"
        world.set_tuned(tuned.decode(bootstrap.allgather(known)[0]))  # and nobody raises a flag in memory that its owner has not mapped
    except BaseException as error:
        world.abort(f"init failed: {error}")
        with contextlib.suppress(Error):
            world.close()
        raise
    return world


def _tuned(world: World) -> bytes:
    """What this host knows of splits, for all ranks. Never raises: the others wait."""
    try:
        return tuned.encode(tuned.load(world.place))
    except Exception:
        logging.getLogger("mkernel").warning("tuned splits cannot be read; mkernel's own choices are used", exc_info=True)
        return tuned.encode({})


def _exchange_cards(bootstrap: Bootstrap, options: Options, *, probe: bool) -> list[Card]:
    gpus, problem, preferred = gpus_here() if probe and options.target in ("auto", "cuda") else ((), "", None)
    card = Card(
        host_identity(),
        dataclasses.asdict(options),
        gpus,
        problem,
        preferred,
        networks=_networks_here(),
        host_signals=list(filter(host_signals, TRANSPORTS)),
        shares=env.SHARE_GPUS.get(),
        version=VERSION,
        sources=_sources(),
    )
    told = [json.loads(part) for part in bootstrap.allgather(json.dumps(card.to_json()).encode())]
    require_same_build(
        [(fields.get("version", "?"), fields.get("sources", "?")) for fields in told]
    )  # before the rest, which may look different there
    return [Card.from_json(fields) for fields in told]


def _sources() -> str:
    """The digest of the device code, or why there is none. Never raises: the others wait for this rank's card."""
    try:
        return sources_digest()
    except (Error, OSError) as error:
        return f"that cannot be read ({error})"


def _networks_here() -> dict[str, str]:
    """By RDMA transport, in order of preference: why it cannot be used here; empty if it can. Reads sysfs only."""
    from mkernel.transport import devices

    ports = devices.find()
    missing = "pyverbs is not installed" if ports and importlib.util.find_spec("pyverbs") is None else ""
    rdma = [name for name, entry in TRANSPORTS.items() if entry.rdma]
    return {name: devices.problem(name, ports) or missing for name in rdma}


def _together(bootstrap: Bootstrap, what: str, step: Callable[[], T]) -> T:
    """Do a step of init on every rank; when it fails on one, fail on all."""
    result: T | None = None
    problem: Exception | None = None
    try:
        result = step()
    except Failed as failed:
        problem = failed.failure.error()
    except Exception as error:
        problem = error
    texts = bootstrap.allgather(b"" if problem is None else f"{type(problem).__name__}: {problem}".encode())
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text:
            raise AbortedError(f"rank {rank} could not open {what}: {text.decode(errors='replace')}")
    return result  # type: ignore[return-value]  # set: there was no problem


def _open_control(
    bootstrap: Bootstrap, cards: Sequence[Card], group: ThreadGroup | None, waiting: Waiting, release: Callable[[int], None] | None
) -> Control:
    if group is not None:
        return LocalControl(group.once("hub", lambda: LocalHub(group.size, release)), bootstrap.rank, waiting)
    if bootstrap.size == 1:
        return LocalControl(LocalHub(1), 0, waiting)
    return SocketControl(bootstrap, [card.host for card in cards], _CONNECT_SECONDS, waiting)


def _choose_transport(name: str, topology: Topology, cards: Sequence[Card]) -> str:
    """The name of the transport; empty on one node, where none is needed. An unknown name is an error anyway."""
    from mkernel import transport

    if name != "auto" and name not in transport.names():
        raise ArgumentError("transport", repr(name), "no such transport", f"there are auto, {', '.join(transport.names())}")
    if topology.num_nodes == 1:
        return ""
    one_host = len({card.host for card in cards}) == 1
    if name == "auto":
        return "emulated" if one_host else choose_network(cards)
    if name == "emulated" and not one_host:
        raise ArgumentError("transport", repr(name), "the emulated transport connects ranks of one host only", "use auto, rc or srd")
    for rank, card in enumerate(cards):
        if card.networks.get(name):
            raise ArgumentError("transport", repr(name), f"rank {rank}: {card.networks[name]}", "see `python -m mkernel doctor`")
    return name


def _in_own_process(transport: str, cohort: Cohort | None) -> bool:
    """Whether the engine is a process; on one node (no transport) there is none at all."""
    if not transport or cohort is None:
        return bool(transport) and own_process(transport)
    if TRANSPORTS[transport].rdma:
        rule = "mk.launch on target cpu runs in virtual time"
        raise ArgumentError("transport", repr(transport), rule, "start processes, or use emulated")
    return False


def _open_engine(
    bootstrap: Bootstrap,
    name: str,
    cards: Sequence[Card],
    backend: Device,
    topology: Topology,
    data: Segment,
    signals: Segment,
    ring: HostMemory,
    timeout: float,
    undo: contextlib.ExitStack,
) -> EngineProcess:
    """Start the engine's process, and connect it with those of the other ranks. Collective."""
    from mkernel.proxy.process import EngineProcess, Layout, Memory
    from mkernel.transport import devices

    rank, rdma = bootstrap.rank, TRANSPORTS[name].rdma
    place = [other for other, card in enumerate(cards) if card.host == cards[rank].host].index(rank)

    def memory(segment: Segment) -> Memory:
        if segment.mappable:
            return Memory(segment.fd, segment.size)
        return Memory(segment.dmabuf() if rdma else -1, segment.size, dmabuf=True)

    def start() -> EngineProcess:
        card = devices.card_for(name, place, backend.pci_address) if rdma else None
        process = EngineProcess(
            Layout(
                transport=name,
                rank=rank,
                peers=[peer for peer in range(topology.size) if topology.node(peer) != topology.node(rank)],
                heap=memory(data),
                signals=memory(signals),
                ring=ring.fd,
                card=card,
                timeout=timeout,
                spin_ns=_spin_ns(backend.target),
            )
        )
        undo.callback(process.close)
        return process

    engine = _together(bootstrap, "its network", start)
    while (part := _together(bootstrap, "its network", engine.step)) is not None:
        engine.give(bootstrap.allgather(part))
    return engine


def _start_engine(
    world: World,
    name: str,
    ring: HostMemory,
    foreign: dict[int, tuple[int, int]],
    cohort: Cohort | None,
    wakers: list[Callable[[], None]],
    process: EngineProcess | None,
    host: bool,
) -> Callable[[], None]:
    """Returns what stops the engine."""
    if process is not None:
        process.watch(world.on_transport_error)
        wakers.append(process.wake)
        return process.close
    from mkernel import transport
    from mkernel.proxy.engine import Engine, EngineThread
    from mkernel.proxy.process import release_store
    from mkernel.proxy.ring import RingReader

    clock = time.monotonic_ns if cohort is None else cohort.now
    others = [peer for peer in range(world.size) if world.topology.node(peer) != world.node]
    # On cpu credits must be real release stores: kernels read them with acquire, and on AArch64 a plain store may come too early.
    store = world.backend.copier().signal if world.target == "cpu" else None
    wiring = transport.Wiring(
        rank=world.rank,
        heap_address=world.heap_address,
        heap_bytes=world.heap_bytes,
        signal_bytes=world.signal_bytes,
        peers=foreign or dict.fromkeys(others, (0, 0)),
        copier=world.backend.copier,
        clock_ns=clock,
        signal_address=world.signal_address,
        store=release_store() if store is None and host else store,
        timeout=world.options.timeout,
    )
    engine = Engine(RingReader(ring.view, store=store), transport.create(name, wiring), clock)
    if cohort is None:
        thread = EngineThread(engine, world.on_transport_error, name=f"mkernel-engine-{world.rank}", spin_ns=_spin_ns(world.target)).start()
        wakers.append(thread.wake)
        return thread.close
    remove = cohort.add_engine(world.rank, engine.step, engine.next_event_ns, world.on_transport_error)

    def stop() -> None:
        remove()
        engine.close()

    return stop


def _spin_ns(target: str) -> int:
    from mkernel.proxy.engine import SPIN_NS

    return _GPU_SPIN_NS if target == "cuda" else SPIN_NS


def _device_maker(cohort: Cohort | None) -> MakeDevice:
    def make(target: str, device: int | str, rank: int) -> Device:
        if target == "cuda":
            from mkernel.runtime.cuda import CudaDevice

            return CudaDevice(int(device))
        from mkernel.runtime.cpu import CpuDevice

        return CpuDevice(rank=rank, cohort=cohort)

    return make


def gpus_here() -> tuple[tuple[Gpu, ...], str, int | None]:
    """GPUs that this process sees; why they cannot be used, if they are there; the one it has made current. Raises nothing."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return (), "", None
    installed = Path("/dev/nvidia0").exists()
    try:
        from mkernel.runtime import cuda

        gpus = tuple(Gpu(g.ordinal, g.uuid, g.capability, tuple(g.peers)) for g in cuda.available())
    except ImportError as error:
        return (), f"there is a GPU, but {error}: install mkernel[cuda13]" if installed else "", None
    except Exception as error:  # whatever a driver may say: the user learns it from choose_target
        return (), f"the GPU driver fails: {error}", None
    if not gpus:
        return (), "there is a GPU, but its driver does not answer: run nvidia-smi" if installed else "", None
    return gpus, "", _current_ordinal()


def _current_ordinal() -> int | None:
    """The device that the process has chosen through CuPy, if it uses CuPy already."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    try:
        return int(cupy.cuda.runtime.getDevice())
    except Exception:
        logging.getLogger("mkernel").debug("CuPy does not tell its device", exc_info=True)
        return None
