"""A world: ranks with symmetric memory, a control channel, loaded kernels, and one fate."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import logging
import os
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Self

from mkernel import abi
from mkernel.errors import CallError, Error
from mkernel.jit.headers import sources_digest
from mkernel.planner.machine import asked_or_known
from mkernel.proxy.ring import LaunchCount, destination
from mkernel.runtime import closing, ending
from mkernel.runtime.call_errors import CallErrors
from mkernel.runtime.failure import Failure, Kind
from mkernel.runtime.failure_watch import FailureWatch
from mkernel.runtime.heap import Heap
from mkernel.runtime.heap_arrays import new_array
from mkernel.runtime.plan import Plan, title_of
from mkernel.runtime.prepared import Executable, Problems
from mkernel.runtime.ranks.control import Failed
from mkernel.runtime.recorder import Recorder
from mkernel.runtime.tuning_cache import TuningKey

if TYPE_CHECKING:
    from types import TracebackType

    from mkernel.planner.split import Split
    from mkernel.planner.tiling import Tiling
    from mkernel.runtime.parts import Parts
    from mkernel.typing import Array, DType

__all__ = ["World", "named"]

_log = logging.getLogger("mkernel")

_HEADER = struct.Struct(f"{ctypes.sizeof(abi.World)}s")  # assigning a struct to a field takes three times as long
_HISTORY = 64  # recent calls whose plans a report can name; a power of two
_numbers = itertools.count()
_by_name: weakref.WeakValueDictionary[str, World] = weakref.WeakValueDictionary()  # all worlds of this process that are in use


def named(name: str) -> World:
    """The world of a ``World.name``. Raises Error when this process has none."""
    world = _by_name.get(name)
    if world is None:
        raise Error(f"this process has no world {name!r} (any more): call mk.init() first, and compile or export again what used another")
    return world


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
    name
        Stands for the world where only text can, as in a compiled graph: ``world0`` is the first one that this process has opened.

    Examples
    --------
    >>> import mkernel as mk
    >>> def rank(world):
    ...     array = world.zeros((2, 8), "float16")  # on the symmetric heap; collective
    ...     world.barrier()
    ...     return world.rank, world.node, world.target, array.shape
    >>> mk.launch(rank, ranks=4, ranks_per_node=2, target="cpu")[3]
    (3, 1, 'cpu', (2, 8))
    """

    def __init__(self, parts: Parts) -> None:
        self.topology, self.backend = parts.topology, parts.backend
        self.rank, self.size = parts.rank, parts.topology.size
        self.node, self.num_nodes = parts.topology.node(parts.rank), parts.topology.num_nodes
        self.local_rank, self.ranks_per_node = parts.topology.local_rank(parts.rank), parts.topology.ranks_per_node
        self.target, self.device, self.xp = parts.backend.target, parts.device, parts.backend.xp
        self.options, self.over_mpi, self.process_group = parts.options, parts.over_mpi, parts.process_group
        self.name = f"world{next(_numbers)}"
        self.machine = asked_or_known(parts.machine, parts.backend.sm_count)  # for which plans are chosen
        self.specialize = parts.options.specialize or "default"  # fields that are compiled into kernels
        self.failure: Failure | None = None  # what ended the world
        self.attention = False  # something must be looked at before the next launch
        self.foreign, self._process = "", os.getpid()  # why a forked child may not use the world; the process that may
        self.when_closed: list[Callable[[World], None]] = []
        self._closed = False
        self.lock = threading.RLock()  # held by every public call: threads that share a world take turns
        self._control, self._ring = parts.control, parts.ring
        self.heap, self._signals = Heap(parts.data), parts.signals
        self.failures = FailureWatch(self, parts.block, parts.control, parts.waiting, parts.poke)
        self._state = self.failures.state  # [0] is 0 while all is well
        self._refused = CallErrors(self, parts.block)
        self._calls = 0
        self._history: list[Executable | None] = [None] * _HISTORY
        self.problems = Problems(self)
        self._executables: dict[Hashable, Executable] = {}  # by the keys of callers who bring their own plans
        self.tuned: dict[str, Split] = {}  # name of a tuning -> SMs of the roles that communicate; the same on every rank
        self.executables: OrderedDict[Hashable, Executable] = OrderedDict()  # executables of ops, by what was asked
        self.table: dict[Hashable, Any] = {}  # of ops: plans of classes of rows, by problem and what the caller chose
        self.agreed: dict[Hashable, int] = {}  # of ops: bounds that the ranks have agreed on at a first call
        self.unchecked: set[Hashable] = set()  # of ops: operands with which calls are bound although the device refuses them
        self.held: OrderedDict[Hashable, Any] = OrderedDict()  # of ops: what is known of operands of calls of any size, such as weights
        self.forms: OrderedDict[Hashable, Any] = OrderedDict()  # of ops: what is known of calls that differ in rows and addresses only
        self.kept: dict[Hashable, Any] = {}  # of ops: arrays that calls of one shape use one after the other
        # Splits and tilings that callers have asked for, by the numbers that kernels report.
        self.schedules: dict[int, tuple[Split | None, Tiling | None]] = {}
        self.bound_calls: OrderedDict[Hashable, Any] = OrderedDict()  # of ops: parameters prepared for the arrays of a call
        self.tracing = 0  # how often recording has begun or ended
        self.recorder = Recorder(self)
        self._synchronous = self.target == "cpu"  # a launch returns when its kernel has ended
        self.header = parts.header()  # what the parameters of every call begin with
        self._stop_engine = parts.start_engine(parts, self.failures.on_transport_error) if parts.start_engine is not None else None
        self._wake, self._fabric = parts.wakers[0] if parts.wakers else None, parts.fabric
        self._launches = LaunchCount(parts.ring.address) if parts.ring is not None else None
        ending.born(self)
        _by_name[self.name] = self
        self._control.start(self.failures)
        if not self._synchronous:
            self.failures.start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "failed" if self.failure is not None else "open"
        shape = f"{self.num_nodes} x {self.ranks_per_node}"
        return f"<mkernel.World rank {self.rank} of {self.size} ({shape} nodes x ranks) on {self.target}, {state}>"

    # ---- public
    def empty(self, shape: int | Sequence[int], dtype: DType) -> Array:
        """An uninitialized array on the symmetric heap, at the same offset on every rank.

        Collective: all ranks ask for the same number of bytes, in the same order. Blocks the host until all have; not capturable. The
        memory is freed when every rank has dropped its array.

        Parameters
        ----------
        shape
            Extents of the array (C order), or one integer.
        dtype
            A dtype of NumPy or ml_dtypes, or its name, such as ``"bfloat16"``.

        Returns
        -------
        Array
            An array of ``world.xp``, contiguous, which peers of the node can read and write.

        Raises
        ------
        ArgumentError
            Shape or dtype is wrong (found before the other ranks are asked), or the heap is too small: the message says how much is needed.
        MismatchError
            The ranks ask for different sizes.
        """
        return new_array(self, shape, dtype, zero=False)

    def zeros(self, shape: int | Sequence[int], dtype: DType) -> Array:
        """Like ``empty``, filled with zeros (on the current stream). Collective."""
        return new_array(self, shape, dtype, zero=True)

    def barrier(self) -> None:
        """Wait until every rank has come here and all calls launched before have ended on all of them.

        Collective. Blocks the host (sleeping), at most ``entry_timeout + timeout`` seconds. Not capturable.
        """
        with self.lock:
            self.synchronize()  # a rank whose calls have failed raises here, and the others do not pass the barrier
            self.collective("barrier", "a barrier")

    def check(self) -> None:
        """Raise what has failed since the last call, if anything has. Not collective, never blocks on peers.

        A CallError leaves the world usable; every other error has ended it, and is raised again by whatever follows.
        """
        if self._closed:
            raise Error(self.foreign or "the world is closed: mk.init() makes a new one")
        refused = self._refused.take() if self._state[0] else None
        self.failures.check()
        if refused is not None:
            if self.unchecked:  # all that was launched has ended: from here on operands are checked again
                self.unchecked.clear()
                self.bound_calls.clear()
            raise refused

    def abort(self, reason: str) -> None:
        """Give the world up: running kernels leave, every rank's next call raises AbortedError with this reason. Not collective."""
        if self.foreign:
            raise Error(self.foreign)
        if not self._closed:
            self.failures.fail(Failure(Kind.aborted, f"rank {self.rank} aborted: {reason}", self.rank))

    def told(self, failure: Failure) -> None:
        """Give the world up because whoever started the ranks tells all of them to. Nothing is logged. Not collective."""
        if not self._closed:
            self.failures.told(failure)

    def close(self) -> None:
        """End the world and free its memory, after all ranks have come here. A failed world is closed at once, without the others.

        Collective. Blocks the host, at most ``entry_timeout + timeout`` seconds. Safe to call twice. Raises a failure, or a CallError,
        that nobody has seen.
        Arrays of ``empty`` that are still in use keep the heap's memory until they are dropped.
        """
        error: Error | None = None
        refused: CallError | None = None
        with self.lock:  # to the end: no call of another thread is under way, and the next one finds the world closed
            if self._closed:
                return
            try:
                if not self.has_failed():
                    self.wait_for_kernels()
                    refused = self._refused.take()
                    self.failures.look()
                    self.collective("close", "close()")
                    self.check()  # the last barrier is passed, but the world may have failed in the meantime
                elif not self.failures.surfaced:
                    self.check()
            except Error as e:
                error = e
            self._closed = self.attention = True
        self._tear_down()
        for forget in self.when_closed:
            forget(self)
        if error is None and refused is not None:
            error = refused
            _log.error("rank %d: %s", self.rank, refused)
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is None or self._closed or ending.clean(exc):
            self.close()
            return
        self.abort(f"{type(exc).__name__}: {exc}")
        self.failures.surfaced = True  # the exception under way is the one to see
        self.close()
        if isinstance(exc, SystemExit):
            raise ending.seen(exc) from None

    # ---- for ops
    @property
    def tuning_key(self) -> TuningKey:
        """What tuned splits of this world belong to."""
        return TuningKey(self.backend.name, self.backend.sm_count, self.options.transport, sources_digest())

    def set_tuned(self, splits: dict[str, Split]) -> None:
        """Set the splits that calls use where they leave roles open, by name (``ops.schedule.tuning_name``). All ranks alike."""
        with self.lock:
            self.tuned = splits
            self.bound_calls.clear()  # they were made for the earlier splits
            self.executables.clear()
            self.table.clear()
            self.forms.clear()

    def executable(self, key: Hashable, build: Callable[[], Plan], stream: Any = None) -> Executable:
        """A plan that is a problem of its own; on first use of ``key`` build it, agree on it with all ranks, and compile it everywhere.

        Collective on first use of a key; blocks the host then. Ops have ``problems`` instead, whose calls differ in size.

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
        with self.lock:
            self.check()
            plan = build()
            prepared = self.problems.prepare((plan.op, plan.digest), title_of(plan), {plan.spec: plan.grid}, lambda *_: plan, stream)
            self.problems.reserve(plan)
            executable = self._executables[key] = self.problems.executable(prepared, plan)
            return executable

    def launch(self, executable: Executable, parameters: ctypes.Structure, stream: Any = None, after: Any = None) -> None:
        """Launch one call on ``stream``, after all earlier calls. ``parameters`` begins with ``world``, which is filled in here.

        ``stream``: as the user passed it, None for the current stream of ``xp``; or as resolved. ``after``: enqueues more there, behind it.
        Asynchronous on cuda. On cpu it returns when the kernel has ended, and raises the kernel's failure.
        """
        with self.lock:
            backend = self.backend
            if self.attention or self._state[0]:
                self.check()
            turn = backend.order(stream if type(stream) is int and stream > 0 else backend.stream(stream))  # may raise: not counted yet
            if self._fabric is not None:
                self._fabric.admit(backend.captures(turn))
            call = self._calls
            self._history[call & (_HISTORY - 1)] = executable
            # Count, then look: a rank that asks for an agreement announces it, then looks at our count. One of the two sees the other.
            self._calls = call + 1
            if self.attention or self._state[0]:
                self._attend(call)
            if executable.tracing != self.tracing:
                executable.trace_as(self)
            _HEADER.pack_into(parameters, 0, executable.image)
            if self._launches is not None:
                self._tell_engine(turn, parameters)
            try:
                if self._fabric is not None:
                    self._fabric.serve(turn, parameters.world.launch)
                backend.launch(executable.kernel, turn, executable.grid, parameters)
                if after is not None:
                    backend.proceed(turn, after)
            except BaseException as error:
                # The others may already wait for this rank inside the call.
                what = f"rank {self.rank} failed in {executable.plan.op}: {type(error).__name__}: {error}"
                self.failures.fail(Failure(Kind.aborted, what, self.rank))
                self.failures.surfaced = True
                raise
            if self._synchronous and self._state[0]:
                self.check()

    def _tell_engine(self, turn: Any, parameters: Any) -> None:
        """Before a launch: wake the engine, which stays awake until the call has ended. Nobody counts the replays of a graph."""
        assert self._launches is not None
        if self.backend.captures(turn):
            self._launches.capture()
        else:
            parameters.world.launch = self._launches.launch()
        if self._wake is not None:
            self._wake()

    def _attend(self, call: int) -> None:
        """Before a launch: raise what stands in its way. ``call``: the count to return to."""
        try:
            self.failures.check()
            if not self.failures.settle():
                self.check()
        except BaseException:
            self._calls = call
            raise

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def call_number(self) -> int:
        """Calls launched by this rank so far (replays of graphs not counted)."""
        return self._calls

    @property
    def position(self) -> int:
        """How far this rank is, alike on all ranks between the same two of their calls: see ``CallErrors``."""
        return self._refused.position(self._calls)

    def heap_offset(self, address: int, size: int) -> int | None:
        """Offset of an address range in this rank's data heap; None when it lies elsewhere."""
        return self.heap.offset(address, size)

    @property
    def heap_address(self) -> int:
        """Where this rank's data heap begins in its own address space."""
        return self.heap.address

    @property
    def signal_address(self) -> int:
        """Where this rank's signal segment begins in its own address space."""
        return self._signals.address()

    @property
    def heap_bytes(self) -> int:
        """Size of every rank's data heap."""
        return self.heap.size

    @property
    def signal_bytes(self) -> int:
        """Size of every rank's signal segment."""
        return self._signals.size

    def synchronize(self) -> None:
        """Wait until every call of this rank has ended, then ``check``. Not collective."""
        with self.lock:
            self.check()
            self.wait_for_kernels()
            self.check()

    def title_of(self, position: int) -> str:
        """What the call after a recent position was, for messages."""
        executable = self._history[self._refused.calls(position) & (_HISTORY - 1)]
        return title_of(executable.plan) if executable is not None else "another operation"

    def plan_of(self, problem: int, rows: int, schedule: int) -> Plan | None:
        """What a call did, by the numbers that its kernel reports; None where this rank does not know."""
        return self.problems.plan_of(problem, rows, schedule)

    def put_destination(self, ticket: int) -> int | None:
        """The rank to which this rank's put number ``ticket`` goes; None where its command is no longer in the ring."""
        return None if self._ring is None or self._closed else destination(self._ring.address, ticket)

    def has_failed(self) -> bool:
        """Whether the world has failed, after a look at what its kernels say."""
        self.failures.look()
        return self.failure is not None

    def wait_for_kernels(self) -> None:
        """Wait until every call launched so far has ended, whatever came of it."""
        if not self._synchronous:
            self.backend.synchronize()

    def let_go(self) -> None:
        """Let go of memory that was kept for launches which have ended. Never blocks."""
        self.backend.release()

    # ---- collectives
    def exchange(self, what: str, value: Any, timeout: float | None = None) -> list[Any]:
        """Every rank's ``value`` (JSON), by rank. Collective; blocks the host while launched calls go on. ``what``: for messages."""
        data = json.dumps(value).encode()
        with self.lock:
            self.check()
            by_rank = [data] if self.size == 1 else self.collective(f"exchange {what}", what, data, timeout)
        return [json.loads(text) for text in by_rank]

    def collective(self, key: str, what: str, data: bytes = b"", timeout: float | None = None) -> list[bytes]:
        """Every rank's ``data``, once all have come with the same ``key``. ``what``: for messages. Raises what has failed the world."""
        if self.problems.reports:  # a rank that raises an error of a call before it comes here must not leave the others waiting here
            self.wait_for_kernels()
            self.check()
        # Longer than any wait of a kernel, because a kernel that gives up says more.
        limit = self.options.entry_timeout + self.options.timeout if timeout is None else timeout
        with contextlib.suppress(Failed):  # then the control channel's failure is the world's, and raised below
            last = self.title_of(self.position - 1)
            return self._control.collective(key, what, call=self.position, timeout=limit, data=data, last=last)
        if self._control.failure is not None:
            self.failures.fail(self._control.failure)
        self.check()
        raise AssertionError("a failed collective leaves a failed world")

    # ---- the end
    def disown(self) -> None:
        """Refuse all use of the world in a forked child: the world, and its peers, are the parent's."""
        # Threads of the parent, which are not here, may have held the locks.
        self.lock = threading.RLock()
        self.failures.disown()
        self.heap.disown()
        if not self._closed:
            self.foreign = (
                f"the world of rank {self.rank} belongs to process {self._process}, which this process was forked from: use it there only, "
                "or start workers by spawn (multiprocessing.set_start_method('spawn')) and give each its own mk.init()"
            )
            self.failure = Failure(Kind.aborted, self.foreign, self.rank)
            self._closed = self.attention = True

    def _tear_down(self) -> None:
        """Free everything, children first. Never raises."""
        idle = self.failure is None or closing.bounded(self.backend.synchronize)
        self.failures.stop()
        steps: list[tuple[str, Callable[[], None]]] = []
        if self._stop_engine is not None:
            steps.append(("the engine", self._stop_engine))
        steps.append(("the control channel", self._control.close))
        if idle:
            steps += [("the data heap", self.heap.close), ("the signal segment", self._signals.close), ("the device", self._close_device)]
        else:
            _log.error("rank %d: a kernel did not leave within %g s; its memory is not freed", self.rank, closing.CLOSE_SECONDS)
        closing.close_all(self.rank, steps)

    def _close_device(self) -> None:
        self._executables.clear()
        self.executables.clear()
        self.table.clear()
        self.problems.clear()
        self.bound_calls.clear()
        self.held.clear()
        self.forms.clear()
        self.kept.clear()
        self._history = [None] * _HISTORY
        self.failures.close()
        self._refused.close()
        if self._ring is not None:
            self._launches = None
            self._ring.view.release()
        self.backend.close()
