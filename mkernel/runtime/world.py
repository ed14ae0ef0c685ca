"""A world: ranks with symmetric memory, a control channel, loaded kernels, and one fate."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from mkernel import abi, env
from mkernel.errors import ArgumentError, CompileError, Error
from mkernel.jit.headers import sources_digest
from mkernel.runtime import current, ending
from mkernel.runtime.control import Failed
from mkernel.runtime.failure import Failure, Kind, read_host_block
from mkernel.runtime.heap import Heap
from mkernel.runtime.shapes import dtype_of, extents_of
from mkernel.runtime.tuned import Place

if TYPE_CHECKING:
    from types import TracebackType

    from mkernel.jit.spec import KernelSpec
    from mkernel.memory.segment import Segment
    from mkernel.plan.split import Split
    from mkernel.plan.topology import Topology
    from mkernel.runtime.control import Control, Request, Waiting
    from mkernel.runtime.device import Device, HostMemory, Kernel

__all__ = ["Executable", "Options", "Plan", "World"]

_log = logging.getLogger("mkernel")

SIGNAL_BYTES = abi.FLAG_BYTES + abi.PACKET_BYTES
DEFAULT_TIMEOUT = 30.0
DEFAULT_ENTRY_TIMEOUT = 600.0
_WORLD_BYTES = ctypes.sizeof(abi.World)
_HISTORY = 64  # recent calls whose plans a report can name; a power of two
_POLL_SECONDS = 0.02  # of the watchdog
_EXPLANATION_SECONDS = 2.0  # how long a rank that was asked to leave waits to hear why
_CLOSE_SECONDS = 10.0  # bound on everything a failed world still waits for


class Plan(Protocol):
    """What the runtime needs of a plan (``mkernel.plan``)."""

    @property
    def op(self) -> str: ...
    @property
    def digest(self) -> int: ...
    @property
    def spec(self) -> KernelSpec: ...
    @property
    def grid(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def flag_words(self) -> int: ...
    @property
    def packet_bytes(self) -> int: ...
    @property
    def staging_bytes(self) -> int: ...
    def describe(self) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Arguments of ``init`` that concern the world itself; the same on every rank."""

    target: str = "auto"
    ranks_per_node: int | None = None
    transport: str = "auto"
    heap_bytes: int | None = None
    max_sms: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    entry_timeout: float = DEFAULT_ENTRY_TIMEOUT

    def __post_init__(self) -> None:
        for name in ("timeout", "entry_timeout"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e9:
                raise ArgumentError(name, value, "must be a number of seconds greater than 0")
        for name in ("ranks_per_node", "heap_bytes", "max_sms"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ArgumentError(name, value, "must be a positive integer or None")

    @classmethod
    def resolve(cls, **arguments: Any) -> Options:
        """Arguments of ``init``: one that is left open (None, or ``transport="auto"``) takes the environment's value, then the default."""
        known = {field.name: field.default for field in dataclasses.fields(cls)}
        if arguments.keys() - known.keys():
            raise ArgumentError("init_options", sorted(arguments.keys() - known.keys()), "unknown", f"known are {', '.join(known)}")
        env.check_all()
        given = {name: value for name, value in arguments.items() if value is not None and (name, value) != ("transport", "auto")}
        told = {name: variable.get() for name, variable in _VARIABLES.items() if name not in given and variable.is_set()}
        return cls(**{**known, **told, **given})


# Options that the environment may give.
_VARIABLES: dict[str, env.Variable[Any]] = {
    "ranks_per_node": env.RANKS_PER_NODE,
    "transport": env.TRANSPORT,
    "heap_bytes": env.HEAP_BYTES,
    "max_sms": env.MAX_SMS,
    "timeout": env.TIMEOUT,
    "entry_timeout": env.ENTRY_TIMEOUT,
}


class Executable:
    """A plan that every rank of the world has loaded.

    Attributes
    ----------
    plan, kernel
        What was agreed on, and its code on this rank's device.
    """

    def __init__(self, world: World, plan: Any, kernel: Kernel) -> None:
        self.plan, self.kernel, self.grid = plan, kernel, plan.grid
        self._world = world
        self._header = abi.World()
        self._header_address = ctypes.addressof(self._header)
        self.refresh()

    def refresh(self) -> None:
        """Take over what may change between calls: tracing on or off."""
        ctypes.pointer(self._header)[0] = self._world._template
        self._header.digest = self.plan.digest & ((1 << abi.DIGEST_BITS) - 1)

    def world_header(self) -> abi.World:
        """A copy of what ``launch`` writes into the parameters."""
        return abi.World.from_buffer_copy(self._header)

    @property
    def scratch_offset(self) -> int:
        """Bytes from the start of the data heap to the plan's workspace. Changes when another plan makes the workspace grow."""
        return self._world._scratch.offset

    @property
    def staging_offset(self) -> int:
        """Bytes from the start of the data heap to the staging area, which only this rank's own engine reads. Changes when it grows."""
        return self._world._staging.offset

    @property
    def placement(self) -> int:
        """Another number whenever ``scratch_offset`` or ``staging_offset`` has changed."""
        return self._world._placement

    @property
    def flag_offset(self) -> int:
        """Bytes from the start of the signal segment to the plan's flags."""
        return abi.SIGNAL_FLAGS

    @property
    def packet_offset(self) -> int:
        """Bytes from the start of the signal segment to the plan's packets."""
        return abi.FLAG_BYTES


@dataclasses.dataclass(slots=True, eq=False)
class Area:
    """Bytes of the data heap that all plans of a world share."""

    offset: int = 0
    bytes: int = 0


@dataclasses.dataclass(slots=True)
class Parts:
    """What ``assemble`` hands over; the world owns it from then on."""

    options: Options
    topology: Topology
    rank: int
    device: int | str
    backend: Device
    control: Control
    data: Segment
    signals: Segment
    block: HostMemory
    ring: HostMemory | None
    over_mpi: bool
    waiting: Waiting
    poke: Callable[[], None] | None = None  # makes waiting kernels of the cpu target look at the abort word
    start_engine: Callable[[World], Callable[[], None]] | None = None  # returns what stops it
    wakers: list[Callable[[], None]] = dataclasses.field(default_factory=list)  # called after each launch


class World:
    """The ranks of one program; made by ``mkernel.init``, or one per rank by ``mkernel.launch``.

    A context manager: leaving it closes the world, leaving it with an exception aborts the other ranks.

    Attributes
    ----------
    rank, size
        This rank's number, and how many there are.
    node, num_nodes, local_rank, ranks_per_node
        Ranks of one node reach each other's memory directly, others over the network.
    target
        ``"cuda"`` or ``"cpu"``.
    device
        Ordinal of this rank's GPU, or ``"cpu"``.
    xp
        ``cupy`` or ``numpy``: the module of arrays that calls return.
    """

    def __init__(self, parts: Parts) -> None:
        self.topology, self.backend = parts.topology, parts.backend
        self.rank, self.size = parts.rank, parts.topology.size
        self.node, self.num_nodes = parts.topology.node(parts.rank), parts.topology.num_nodes
        self.local_rank, self.ranks_per_node = parts.topology.local_rank(parts.rank), parts.topology.ranks_per_node
        self.target, self.device, self.xp = parts.backend.target, parts.device, parts.backend.xp
        self.options, self.over_mpi = parts.options, parts.over_mpi
        self.failure: Failure | None = None
        self._control, self._waiting = parts.control, parts.waiting
        self._heap, self._signals = Heap(parts.data), parts.signals
        self._block_memory, self._ring_memory = parts.block, parts.ring
        self._block = abi.HostBlock.from_address(parts.block.host_address)
        self._state = parts.block.view.cast("B").cast("I")  # [0]: abi.HostBlock.state, one load without a system call
        self._calls = 0
        self._attention = False  # something must be looked at before the next launch
        self._pending: list[Request] = []  # other ranks that wait for an agreement
        self._surfaced = self._closed = False
        self.foreign, self._process = "", os.getpid()  # why it may not be used in a forked child; whose it is
        self._explained = threading.Event()
        self._failure_lock = threading.RLock()
        self._lock = threading.RLock()  # one public call at a time
        self._poke = parts.poke
        self._executables: dict[Hashable, Executable] = {}
        self._loaded: dict[int, Executable] = {}  # by digest
        self.tuned: dict[str, Split] = {}  # repr of a problem -> SMs of the roles that communicate; the same on every rank
        self.bound_calls: dict[Hashable, Any] = {}  # of ops: parameters prepared for particular arrays
        self._history: list[Executable | None] = [None] * _HISTORY
        self._scratch, self._staging = Area(), Area()
        self._placement = 0  # how often either has moved
        self._synchronous = self.target == "cpu"  # a launch returns when its kernel has ended
        self._trace: tuple[int, int] | None = None
        self._trace_buffers: dict[int, int] = {}  # capacity -> address
        self._template = self._make_template()
        self._stop_engine = parts.start_engine(self) if parts.start_engine is not None else None
        self._wake = parts.wakers[0] if parts.wakers else None
        self._stop_watchdog = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="mkernel-watchdog", daemon=True)
        ending.born(self)
        self._control.start(self)
        if not self._synchronous:
            self._watchdog.start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "failed" if self.failure is not None else "open"
        shape = f"{self.num_nodes} x {self.ranks_per_node}"
        return f"<mkernel.World rank {self.rank} of {self.size} ({shape} nodes x ranks) on {self.target}, {state}>"

    # ---- public
    def empty(self, shape: int | Sequence[int], dtype: Any) -> Any:
        """An uninitialized array on the symmetric heap, at the same offset on every rank.

        Collective: all ranks ask for the same number of bytes, in the same order. Blocks the host until all have; not capturable. The
        memory is freed when every rank has dropped its array.

        Raises
        ------
        ArgumentError
            Shape or dtype is none, found before the others are asked; or the heap is too small: the message says how much is needed.
        MismatchError
            The ranks ask for different sizes.
        """
        return self._array(shape, dtype, zero=False)

    def zeros(self, shape: int | Sequence[int], dtype: Any) -> Any:
        """Like ``empty``, filled with zeros (on the current stream). Collective."""
        return self._array(shape, dtype, zero=True)

    def barrier(self) -> None:
        """Wait until every rank has come here and all calls launched before have ended on all of them.

        Collective. Blocks the host (sleeping), at most ``entry_timeout + timeout`` seconds. Not capturable.
        """
        with self._lock:
            self.synchronize()  # a rank whose calls failed does not let the others through
            self._collective("barrier", "a barrier")

    def check(self) -> None:
        """Raise what has failed since the last call, if anything has. Not collective, never blocks on peers."""
        if self._closed:
            raise Error(self.foreign or "the world is closed: mk.init() makes a new one")
        self._look()
        failure = self.failure
        if failure is None:
            return
        if failure.derived:
            with self._waiting():
                self._explained.wait(_EXPLANATION_SECONDS)
            failure = self.failure or failure
        self._surfaced = True
        raise failure.error()

    def abort(self, reason: str) -> None:
        """Give the world up: running kernels leave, every rank's next call raises AbortedError with this reason. Not collective."""
        if self.foreign:
            raise Error(self.foreign)
        if not self._closed:
            self._fail(Failure(Kind.aborted, f"rank {self.rank} aborted: {reason}", self.rank))

    def told(self, failure: Failure) -> None:
        """Give the world up because whoever started the ranks says so, and tells all of them: nothing is logged. Not collective."""
        if not self._closed:
            self._fail(failure, relay=False)
            self._control.abort(failure)

    def close(self) -> None:
        """End the world and free its memory, after all ranks have come here. A failed world is closed at once, without the others.

        Collective. Blocks the host, at most ``entry_timeout + timeout`` seconds. Safe to call twice. Raises a failure nobody has seen.
        Arrays of ``empty`` that are still in use keep the heap's memory until they are dropped.
        """
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is None or self._closed or ending.clean(exc):
            self.close()
            return
        self.abort(f"{type(exc).__name__}: {exc}")
        self._surfaced = True  # the exception under way is the one to see
        self.close()
        if isinstance(exc, SystemExit):
            raise ending.seen(exc) from None

    # ---- for ops
    @property
    def place(self) -> Place:
        """What tuned splits of this world belong to."""
        return Place(self.backend.name, self.backend.sm_count, self.options.transport, sources_digest())

    def set_tuned(self, splits: dict[str, Split]) -> None:
        """What roles left open get from the next call on, by the ``repr`` of a problem. All ranks alike."""
        with self._lock:
            self.tuned = splits
            self.bound_calls.clear()  # they have the split of before

    def executable(self, key: Hashable, build: Callable[[], Plan], stream: Any = None) -> Executable:
        """The loaded plan for ``key``; on first use build it, agree on it with all ranks, and compile it everywhere.

        Collective on first use of a key; blocks the host then.

        Raises
        ------
        ArgumentError
            A graph is being captured on ``stream`` and the plan is not there yet; or the heap or the signal segment is too small.
        MismatchError
            Another rank asks for something else.
        CompileError
            The kernel does not compile, here or on another rank.
        """
        found = self._executables.get(key)
        if found is not None:
            return found
        with self._lock:
            self.check()
            plan = build()
            executable = self._loaded.get(plan.digest)  # under another key; all ranks have it
            if executable is None:
                if self.backend.capturing(self.backend.stream(stream)):
                    rule = "is being captured, and this plan is used for the first time"
                    raise ArgumentError("stream", stream, rule, "call mk.plan(...) before the capture")
                self._collective(f"plan {plan.op} {plan.digest:016x}", _title(plan))
                executable = self._loaded[plan.digest] = self._load(plan)
            self._executables[key] = executable
            return executable

    def launch(self, executable: Executable, parameters: ctypes.Structure, stream: Any = None) -> None:
        """Launch one call on ``stream``, after all earlier calls. ``parameters`` begins with ``world``, which is filled in here.

        ``stream``: as the user passed it, None for the current stream of ``xp``; or as the backend has resolved it.
        Asynchronous on cuda; on cpu it returns when the kernel has ended, and raises what it failed of.
        """
        with self._lock:
            backend = self.backend
            if self._attention or self._state[0]:
                self.check()
            turn = backend.order(backend.stream(stream))  # may wait or raise: not counted yet
            call = self._calls
            self._history[call & (_HISTORY - 1)] = executable
            # Count, then look: who asks for an agreement announces it, then looks at our count, so that one of the two sees the other.
            self._calls = call + 1
            if self._attention or self._state[0]:
                self._attend(call)
            ctypes.memmove(ctypes.addressof(parameters), executable._header_address, _WORLD_BYTES)
            try:
                backend.launch(executable.kernel, turn, executable.grid, parameters)
            except BaseException as error:
                # The others may already wait for this rank inside the call.
                self._fail(
                    Failure(Kind.aborted, f"rank {self.rank} failed in {executable.plan.op}: {type(error).__name__}: {error}", self.rank)
                )
                self._surfaced = True
                raise
            if self._wake is not None:
                self._wake()
            if self._synchronous and self._state[0]:
                self.check()

    @property
    def lock(self) -> threading.RLock:
        """Held by every public call: threads that share a world take turns."""
        return self._lock

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def call_number(self) -> int:
        """Calls launched by this rank so far (replays of graphs not counted)."""
        return self._calls

    def heap_offset(self, address: int, size: int) -> int | None:
        """Offset of an address range in this rank's data heap; None when it lies elsewhere."""
        return self._heap.offset(address, size)

    @property
    def heap_address(self) -> int:
        """Where this rank's data heap begins in its own address space."""
        return self._heap.address

    @property
    def signal_address(self) -> int:
        """Where this rank's signal segment begins in its own address space."""
        return self._signals.address()

    @property
    def heap_bytes(self) -> int:
        """Size of every rank's data heap."""
        return self._heap.size

    @property
    def signal_bytes(self) -> int:
        """Size of every rank's signal segment."""
        return self._signals.size

    def synchronize(self) -> None:
        """Wait until every call of this rank has ended, then ``check``. Not collective."""
        with self._lock:
            self.check()
            self._synchronize()
            self.check()

    def trace_begin(self, capacity: int) -> None:
        """Record up to ``capacity - 1`` intervals per lane from the next call on. Waits for earlier calls."""
        with self._lock:
            self.check()
            if self._trace is not None:
                raise ArgumentError("trace", "begin", "this world is already being traced", "end the other trace first")
            self._synchronize()
            size = self._trace_bytes(capacity)
            if capacity in self._trace_buffers:
                self.backend.clear(self._trace_buffers[capacity], size)
            else:
                self._trace_buffers[capacity] = self.backend.allocate(size)
            records = self._trace_buffers[capacity]
            self._set_trace((records, capacity))

    def trace_end(self) -> Any:
        """Stop recording; the records as a structured array [cta, lane, record] (fields of ``abi.TraceRecord``)."""
        import numpy as np

        with self._lock:
            if self.foreign:
                raise Error(self.foreign)
            if self._trace is None:
                raise ArgumentError("trace", "end", "this world is not being traced")
            records, capacity = self._trace
            self._synchronize()
            self._set_trace(None)
            self.check()
            raw = self.backend.read(records, self._trace_bytes(capacity))
        fields = np.dtype([("kind", np.uint32), ("argument", np.uint32), ("begin", np.uint64), ("end", np.uint64)])
        return np.frombuffer(raw, fields).reshape(self.backend.sm_count, abi.TRACE_LANES, capacity)

    # ---- what the control channel tells (any thread)
    def on_failure(self, failure: Failure) -> None:
        self._fail(failure, relay=False)

    def on_pending(self, requests: Sequence[Request]) -> Failure | None:
        with self._failure_lock:
            self._pending = [request for request in requests if request.rank != self.rank]
            self._attention = True
            return self._passed_by()

    def on_transport_error(self, error: Exception) -> None:
        """The engine stopped."""
        details = {name: getattr(error, name, None) for name in ("peer", "op", "status", "queue_pair", "remedy")}
        rank = self.rank if details["peer"] is None else details["peer"]
        self._fail(Failure(Kind.transport, str(error), rank, details=details))

    def _passed_by(self) -> Failure | None:
        """A mismatch, if this rank has launched a call before which others still wait for it in a collective."""
        for request in self._pending:
            if request.sequence > self._control.started and self._calls > request.call:
                executable = self._history[request.call & (_HISTORY - 1)]
                mine = _title(executable.plan) if executable is not None else "another operation"
                return Failure(Kind.mismatch, f"the ranks disagree: {request}, but rank {self.rank} has launched {mine} next", self.rank)
        return None

    # ---- failing
    def _fail(self, failure: Failure, *, relay: bool = True) -> None:
        with self._failure_lock:
            if not failure.replaces(self.failure):
                return
            self.failure = failure
            self._attention = True
            self._block.abort = 1
            if not failure.derived:
                self._explained.set()
        if self.over_mpi:
            seconds = self.options.entry_timeout + self.options.timeout
            ending.note_failure(peer_lost=failure.kind == Kind.lost, seconds=seconds)
        if not failure.derived:
            # Once per job, where it happened; a rank that has gone cannot say so itself.
            level = logging.ERROR if relay or failure.kind == Kind.lost or failure.rank == self.rank else logging.INFO
            _log.log(level, "rank %d: the world of %d ranks has failed: %s", self.rank, self.size, failure.message)
            if relay:
                self._control.abort(failure)
        if self._poke is not None:
            self._poke()

    def _look(self) -> None:
        """Notice a failure that a kernel of this rank has reported."""
        if not self._state[0] or (self.failure is not None and not self.failure.derived):
            return
        options = self.options
        failure = read_host_block(self._block, timeout_ns=int(options.timeout * 1e9), entry_timeout_ns=int(options.entry_timeout * 1e9))
        if failure is not None:
            self._fail(self._named(failure))

    def _named(self, failure: Failure) -> Failure:
        """A mismatch, with the names of the plans as far as this rank knows them."""
        record = failure.record
        if failure.kind != Kind.mismatch or record is None:
            return failure
        mask = (1 << abi.DIGEST_BITS) - 1
        names = {e.plan.digest & mask: _title(e.plan) for e in self._loaded.values()}
        mine, theirs = names.get(record.expected & mask, "?"), names.get(record.seen & mask, "a plan that this rank does not have")
        return dataclasses.replace(failure, message=f"{failure.message}: {theirs}; rank {self.rank} entered with {mine}")

    def _attend(self, call: int) -> None:
        """Before a launch: raise what stands in its way. ``call``: the count to return to."""
        try:
            self.check()
            with self._failure_lock:
                failure = self._passed_by()
                if failure is None:
                    self._pending = [r for r in self._pending if r.sequence > self._control.started]
                    self._attention = bool(self._pending)
            if failure is not None:
                self._fail(failure)
                self.check()
        except BaseException:
            self._calls = call
            raise

    def _watch(self) -> None:
        try:
            while not self._stop_watchdog.wait(_POLL_SECONDS):
                self._look()
                if self.failure is not None and not self.failure.derived:
                    return
                self.backend.release()
        except BaseException as error:  # of any kind: else nobody would notice what kernels report
            _log.exception("rank %d: the watchdog failed", self.rank)
            self.abort(f"its watchdog failed: {type(error).__name__}: {error}")

    # ---- collectives
    def exchange(self, what: str, value: Any, timeout: float | None = None) -> list[Any]:
        """Every rank's ``value`` (JSON), by rank. Collective, blocks the host; calls that were launched go on. ``what``: for messages."""
        data = json.dumps(value).encode()
        with self._lock:
            self.check()
            by_rank = [data] if self.size == 1 else self._collective(f"exchange {what}", what, data, timeout)
        return [json.loads(text) for text in by_rank]

    def _collective(self, key: str, what: str, data: bytes = b"", timeout: float | None = None) -> list[bytes]:
        # Longer than any wait of a kernel, which says more when it gives up.
        limit = self.options.entry_timeout + self.options.timeout if timeout is None else timeout
        with contextlib.suppress(Failed):  # then the control channel's failure is the world's, and raised below
            return self._control.collective(key, what, call=self._calls, timeout=limit, data=data)
        if self._control.failure is not None:
            self._fail(self._control.failure)
        self.check()
        raise AssertionError("a failed collective leaves a failed world")

    def _array(self, shape: int | Sequence[int], dtype: Any, *, zero: bool) -> Any:
        name, item = dtype_of(dtype)
        extents = extents_of(shape, item)
        size = math.prod(extents) * item
        with self._lock:
            self.check()
            reports = self._collective(f"empty {size}", f"an array of {size} bytes: {list(extents)} {name}", self._heap.report())
            self._heap.reclaim(reports)
            lease = self._heap.lease(size)
            address = self._heap.address + lease.offset
            if zero and size:
                self.backend.wrap(address, (size,), "uint8", lease).fill(0)  # as bytes: array modules differ in what they do to bfloat16
            return self.backend.wrap(address, extents, name, lease)

    # ---- plans
    def _load(self, plan: Any) -> Executable:
        """After the agreement: compile on every rank, make room, and let nobody launch before all are ready."""
        problem: Exception | None = None
        kernel: Kernel | None = None
        try:
            self._synchronize()  # modules must not be loaded beside a kernel that waits, nor the workspace moved under it
            kernel = self.backend.load(plan.spec)
            if plan.grid > kernel.max_ctas():
                raise ArgumentError("grid", plan.grid, f"only {kernel.max_ctas()} CTAs fit on this device at once")
        except Exception as error:  # told to the other ranks, then raised
            problem = error
        texts = self._collective(
            f"loaded {plan.op} {plan.digest:016x}",
            f"loading {plan.op}",
            b"" if problem is None else f"{type(problem).__name__}: {problem}".encode(),
        )
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text:
                raise CompileError(f"{plan.op} could not be loaded on rank {rank}", log=text.decode(errors="replace"))
        assert kernel is not None
        flags = (abi.FLAG_BYTES - abi.SIGNAL_FLAGS) // 8
        if plan.flag_words > flags:
            raise ArgumentError(
                "flag_words", plan.flag_words, f"the signal segment has room for {flags}", "use larger chunks or fewer ranks"
            )
        if abi.FLAG_BYTES + plan.packet_bytes > self._signals.size:
            room = self._signals.size - abi.FLAG_BYTES
            raise ArgumentError("packet_bytes", plan.packet_bytes, f"the signal segment has room for {room}")
        self._grow({self._scratch: plan.workspace_bytes, self._staging: plan.staging_bytes})
        return Executable(self, plan, kernel)

    def _grow(self, wanted: dict[Area, int]) -> None:
        """Make areas at least so large, for all plans. All ranks are idle and do the same."""
        growing = {area: size for area, size in wanted.items() if size > area.bytes}
        if not growing:
            return
        self._placement += 1
        # On cuda a captured graph may still write to the old ones: they stay.
        freed = [area for area in growing if area.bytes and self._synchronous]
        for area in freed:
            self._heap.free(area.offset)
        try:
            offsets = self._heap.allocate_all(list(growing.values()))
        except ArgumentError:
            for area in freed:
                area.offset = self._heap.allocate(area.bytes)
            raise
        for (area, size), offset in zip(growing.items(), offsets, strict=True):
            area.offset, area.bytes = offset, size

    def _synchronize(self) -> None:
        if not self._synchronous:
            self.backend.synchronize()

    # ---- structs
    def _make_template(self) -> abi.World:
        data, signals, options = self._heap.segment, self._signals, self.options
        return abi.World(
            rank=self.rank,
            size=self.size,
            node=self.node,
            num_nodes=self.num_nodes,
            local_rank=self.local_rank,
            ranks_per_node=self.ranks_per_node,
            heap_base=data.base,
            heap_stride=data.stride,
            signal_base=signals.base,
            signal_stride=signals.stride,
            control=self.backend.allocate(ctypes.sizeof(abi.ControlBlock)),
            host=self._block_memory.address,
            ring=self._ring_memory.address if self._ring_memory is not None else 0,
            timeout_ns=int(options.timeout * 1e9),
            entry_timeout_ns=int(options.entry_timeout * 1e9),
        )

    def _trace_bytes(self, capacity: int) -> int:
        return self.backend.sm_count * abi.TRACE_LANES * capacity * ctypes.sizeof(abi.TraceRecord)

    def _set_trace(self, trace: tuple[int, int] | None) -> None:
        self._trace = trace
        self._template.trace, self._template.trace_capacity = trace or (0, 0)
        for executable in self._loaded.values():
            executable.refresh()

    # ---- the end
    def disown(self) -> None:
        """In a forked child: the world is its parent's, whose peers this process must not disturb. Whoever uses it here is told so."""
        # Other threads, which are not here, may have held the locks.
        self._lock, self._failure_lock = threading.RLock(), threading.RLock()
        self._heap.disown()
        if not self._closed:
            self.foreign = (
                f"the world of rank {self.rank} belongs to process {self._process}, which this process was forked from: use it there only, "
                "or start workers by spawn (multiprocessing.set_start_method('spawn')) and give each its own mk.init()"
            )
            self.failure = Failure(Kind.aborted, self.foreign, self.rank)
            self._closed = self._attention = True

    def _close(self) -> None:
        if self._closed:
            return
        error: Error | None = None
        try:
            with self._lock:
                self._look()
                if self.failure is None:
                    self._synchronize()
                    self._look()
                    self._collective("close", "close()")
                    self._synchronize_failed()
                elif not self._surfaced:
                    self.check()
        except Error as e:
            error = e
        self._closed = self._attention = True
        self._tear_down()
        current.forget(self)
        if error is not None:
            raise error

    def _synchronize_failed(self) -> None:
        """The last barrier is passed: nothing of this world runs any more, unless it failed in the meantime."""
        if self.failure is not None:
            self.check()

    def _tear_down(self) -> None:
        """Free everything, children first. Never raises: what cannot be freed is logged and left to the end of the process."""
        idle = self.failure is None or _bounded(self.backend.synchronize, _CLOSE_SECONDS)
        self._stop_watchdog.set()
        if self._watchdog.ident is not None:
            self._watchdog.join()
        steps: list[tuple[str, Callable[[], None]]] = []
        if self._stop_engine is not None:
            steps.append(("the engine", self._stop_engine))
        steps.append(("the control channel", self._control.close))
        if idle:
            steps += [("the data heap", self._heap.close), ("the signal segment", self._signals.close), ("the device", self._close_device)]
        else:
            _log.error("rank %d: a kernel did not leave within %g s; its memory is not freed", self.rank, _CLOSE_SECONDS)
        for what, step in steps:
            try:
                step()
            except Exception:
                _log.exception("rank %d: closing %s failed", self.rank, what)

    def _close_device(self) -> None:
        self._executables.clear()
        self._loaded.clear()
        self.bound_calls.clear()
        self._history = [None] * _HISTORY
        self._state.release()
        self._block = abi.HostBlock()  # the memory behind it goes
        self._block_memory.view.release()
        if self._ring_memory is not None:
            self._ring_memory.view.release()
        self.backend.close()


def _title(plan: Any) -> str:
    return next(iter(str(plan.describe()).splitlines()), plan.op)


def _bounded(action: Callable[[], None], seconds: float) -> bool:
    """Run ``action`` on another thread; whether it ended, well or not, in time."""

    def run() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=run, name="mkernel-close", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
