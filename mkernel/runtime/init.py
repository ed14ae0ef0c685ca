"""``init`` step by step: agree on the shape, connect the control channel, open the device, share memory, start the engine."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mkernel import abi, env
from mkernel.errors import ArgumentError, Error
from mkernel.runtime import current, ending, logs
from mkernel.runtime import tuning_cache as tuned
from mkernel.runtime.fabric import SMS
from mkernel.runtime.opening.engine import open_process, plan_network, start_engine
from mkernel.runtime.opening.infos import exchange_infos
from mkernel.runtime.opening.memory import HEAP_BYTES, Memory, open_memory, share_memory
from mkernel.runtime.opening.placement import choose_device, choose_target, choose_topology, require_equal
from mkernel.runtime.opening.target import MakeBackend, backend_maker
from mkernel.runtime.opening.together import together
from mkernel.runtime.options import DEFAULT_ENTRY_TIMEOUT, DEFAULT_TIMEOUT, Options
from mkernel.runtime.parts import Parts
from mkernel.runtime.ranks.bootstrap import Bootstrap, ThreadGroup
from mkernel.runtime.ranks.choice import choose, under_mpi
from mkernel.runtime.ranks.connect import connect
from mkernel.runtime.ranks.control import Waiting, not_told
from mkernel.runtime.ranks.torch_group import is_process_group
from mkernel.runtime.world import World

if TYPE_CHECKING:
    from mkernel.runtime.backend import Backend
    from mkernel.runtime.cpu.thread_ranks import ThreadRanks

__all__ = ["init", "join", "open_world"]


def init(
    comm: Any = None,
    *,
    target: str = "auto",
    ranks_per_node: int | None = None,
    transport: str = "auto",
    heap_bytes: int | None = None,
    max_sms: int | None = None,
    batch_invariant: bool = False,
    specialize: str | Iterable[str] | None = None,
    timeout: float | None = None,
    entry_timeout: float | None = None,
) -> World:
    """Join a world: its processes call this alike, most programs once.

    Collective, blocks the host until all ranks have come. The first world is the default of later calls; close it, or use it as a context
    manager (an exception inside then aborts all ranks). A process may join several, of some of the program's processes each: give
    ``comm``, and pass ``world=`` to the calls (docs/streams.md, "Several worlds").

    On GPUs a rank is on the device that its process has made current (by torch, CuPy or the driver; 0 counts as none), else where another
    world of the process is, else on the only one that it sees, else on the one whose number its launcher gave it on the host
    (``LOCAL_RANK``, ``OMPI_COMM_WORLD_LOCAL_RANK``, ``SLURM_LOCALID`` ...), else as the ranks of a host are counted.

    Parameters
    ----------
    comm
        mpi4py communicator, or a process group of torch.distributed, which is used in here only. By default the ranks meet at
        ``MKERNEL_RENDEZVOUS``, or are those of MPI's COMM_WORLD under an MPI launcher, or those of torchrun or of a step of Slurm's srun;
        without any of these the world has one rank.
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
    batch_invariant
        True: the bits of a row of a result do not depend on the other rows of the call, on how many there are, on where it lies, on which
        rank owns it, or on the algorithm that was chosen (docs/batch_invariance.md). By default they do not depend on the run.
    specialize
        What is compiled into kernels instead of coming with every call: ``"default"`` (measured for each op), ``"all"``, ``"none"``, or
        names of ``"n"``, ``"k"`` (extents of a rank's operands) and ``"split"`` (SMs per role). Results are bitwise
        the same (docs/planner.md says what is the default).
    timeout, entry_timeout
        Seconds that a wait inside a call may last once all ranks have entered it (30), and before (600).

    What is left open (None, ``transport="auto"``, ``batch_invariant=False``) takes the environment's value (``MKERNEL_TIMEOUT`` ...),
    then the default.

    Examples
    --------
    A program that ``mpirun -n 4 python program.py`` starts has four ranks; started by itself it is a world of one.

    >>> import mkernel as mk
    >>> with mk.init(target="cpu", heap_bytes=1 << 24) as world:
    ...     print(world.rank, world.size, world.empty((2, 8), "float16").shape)
    0 1 (2, 8)

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
            batch_invariant=batch_invariant,
            specialize=specialize,
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
        if (comm is not None and not is_process_group(comm)) or (under_mpi() and not env.RENDEZVOUS.is_set()):
            ending.note_failure(peer_lost=False, seconds=DEFAULT_TIMEOUT + DEFAULT_ENTRY_TIMEOUT)
        raise


def join(comm: Any, options: Options, make_backend: MakeBackend | None = None) -> World:
    """``init`` after its arguments are checked; tests give another device."""
    with _opening(comm), contextlib.closing(choose(comm)) as bootstrap:
        world = open_world(bootstrap, options, make_backend=make_backend)
    current.remember(world)
    return world


def open_world(
    bootstrap: Bootstrap,
    options: Options,
    *,
    group: ThreadGroup | None = None,
    thread_ranks: ThreadRanks | None = None,
    make_backend: MakeBackend | None = None,
) -> World:
    """One rank's world. ``group`` and ``thread_ranks`` are those of ``mk.launch``; ``make_backend`` replaces the target's (tests)."""
    logs.set_up()
    rank = bootstrap.rank
    in_use = next((world.device for world in current.opened() if isinstance(world.device, int) and not world.foreign), None)
    infos = exchange_infos(bootstrap, options, probe=make_backend is None, in_use=in_use)
    require_equal(infos)
    topology = choose_topology(infos, options.ranks_per_node)
    if topology.size > abi.MAX_RANKS:
        raise ArgumentError("comm", topology.size, f"a world has at most {abi.MAX_RANKS} ranks")
    target = choose_target(infos, options.target) if make_backend is None else "cpu" if options.target == "auto" else options.target
    network = plan_network(options.transport, topology, infos, thread_ranks)
    device: int | str = "cpu"
    if target == "cuda":
        device = choose_device(infos, rank).ordinal if make_backend is None else 0
    engine_sms = SMS if network.sms and target == "cuda" else 0  # target cpu has an SM for everybody
    make = make_backend or backend_maker(thread_ranks)
    waiting: Waiting = not_told
    if thread_ranks is not None:
        waiting = lambda over: thread_ranks.blocked(rank, over)  # noqa: E731

    with contextlib.ExitStack() as undo:
        release = thread_ranks.release if thread_ranks is not None else None
        control = connect(bootstrap, [info.host for info in infos], group, waiting, release)
        undo.callback(control.close)

        def open_device() -> tuple[Backend, Memory]:
            backend = make(target, device, rank)
            undo.callback(backend.close)
            free = backend.sm_count - engine_sms
            backend.sm_count = min(free, options.max_sms or free)
            return backend, open_memory(backend, options.heap_bytes or HEAP_BYTES[target], topology, rank, network, undo)

        backend, memory = together(bootstrap, "its device and memory", open_device)
        # Plans follow from SMs and from rank 0's machine; ranks compare neither.
        devices = [said.decode().split(" ", 1) for said in bootstrap.allgather(f"{backend.sm_count} {backend.name}".encode())]
        backend.sm_count = min(int(sms) for sms, _ in devices)
        if topology.size > 1:
            backend.join(backend.sm_count + engine_sms)
        share = lambda: share_memory(control, backend, memory, topology, rank, network)  # noqa: E731
        rail = together(bootstrap, "the memory of its peers", share)
        parts = Parts(
            options=dataclasses.replace(options, target=target, transport=network.transport, heap_bytes=memory.data.size),
            topology=topology,
            rank=rank,
            device=device,
            backend=backend,
            control=control,
            data=memory.data,
            signals=memory.signals,
            block=memory.block,
            ring=memory.ring,
            device_ring=backend.allocate(ctypes.sizeof(abi.Ring)) if network.sms else 0,
            over_mpi=bootstrap.mpi,
            process_group=bootstrap.process_group,
            machine=devices[0][1],
            waiting=waiting,
            poke=thread_ranks.poke if thread_ranks is not None else None,
        )
        process = open_process(bootstrap, infos, parts, undo) if network.own_process else None
        if network.transport:
            parts.start_engine = functools.partial(start_engine, rail=rail, thread_ranks=thread_ranks, process=process, network=network)
        world = World(parts)
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
        return tuned.encode(tuned.load(world.tuning_key))
    except Exception:
        logging.getLogger("mkernel").warning("tuned splits cannot be read; mkernel's own choices are used", exc_info=True)
        return tuned.encode({})
