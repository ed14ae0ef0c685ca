"""Problems that the ranks have agreed on, their kernels, and what one call of a problem needs to be launched."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import struct
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mkernel import abi
from mkernel.errors import ArgumentError, CompileError
from mkernel.jit.headers import looked_at_once
from mkernel.jit.spec import KernelSpec
from mkernel.planner.gemm import digest_of
from mkernel.proxy.cpus import leave_single_cpu, number_of_cpus
from mkernel.runtime import progress
from mkernel.runtime.plan import Plan, may_refuse

if TYPE_CHECKING:
    from mkernel.runtime.backend import Backend, Kernel
    from mkernel.runtime.heap import Heap

__all__ = ["Agreed", "Executable", "Prepared", "Problems", "check_of"]

_CHECK_FACTORS = 0x9E3779, 0x85EBCB, 0xC2B2AF  # odd, so that a difference in only one of the three numbers always changes the sum
_FOLD = 0x27D4EB
_NUMBERS, _NUMBERS_AT = struct.Struct("=3I"), abi.World.problem.offset  # problem, rows and schedule follow each other
_FLAG_WORDS = (abi.COUNTED_OFFSET - abi.SIGNAL_FLAGS) // 8


class Traced(Protocol):
    """The world, as its calls see it: what every call's parameters begin with, and how often that has changed."""

    tracing: int

    @property
    def header(self) -> abi.World: ...


class Agreed(Traced, Protocol):
    """The world, as the problems that its ranks agree on need it."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def ranks_per_node(self) -> int: ...
    @property
    def signal_bytes(self) -> int: ...
    @property
    def lock(self) -> threading.RLock: ...
    @property
    def heap(self) -> Heap: ...
    @property
    def backend(self) -> Backend: ...
    def check(self) -> None: ...
    def wait_for_kernels(self) -> None: ...
    def collective(self, key: str, what: str, data: bytes = b"", timeout: float | None = None) -> list[bytes]: ...


def check_of(problem: int, rows: int, schedule: int) -> int:
    """What an entry flag carries beside the epoch: ``abi.CHECK_BITS`` bits.

    Two calls that differ in only one of the numbers have different checks, as long as each number is below 2^24. Of larger ones all bits
    count, too.
    """
    first, second, third = _CHECK_FACTORS
    rows += (rows >> abi.CHECK_BITS) * _FOLD
    return (first * problem + second * rows + third * schedule) & ((1 << abi.CHECK_BITS) - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A problem that every rank of the world knows by the same ``number``.

    ``plan_of(rows, schedule)``: the plan of a call, from the numbers that its kernel reports.
    """

    number: int
    title: str
    plan_of: Callable[[int, int], Plan | None]


class Executable:
    """One call's plan with the kernel that every rank of the world has loaded for it. Making one asks nobody and loads nothing.

    Attributes
    ----------
    plan, kernel, grid
        What runs.
    made_of, sizes
        The plan itself; or that of the most rows of its class, and what follows from this call's rows: then ``plan`` is made when somebody
        asks for it, which launches do not.
    header, image
        What ``launch`` writes into the parameters, and its bytes.
    workspace_map
        A tensor map of the workspace, kept here by ops whose calls of this size all have the same.
    scratch_offset, staging_offset
        Bytes from the start of the data heap to the workspace, and to the area that only this rank's own engine reads.
    flag_offset, packet_offset
        Bytes from the start of the signal segment to the flags and the packets.
    """

    __slots__ = (
        "grid",
        "header",
        "image",
        "kernel",
        "made_of",
        "sizes",
        "staging_offset",
        "tracing",
        "workspace_map",
    )  # one is made for every size
    scratch_offset = 0
    flag_offset = abi.SIGNAL_FLAGS
    packet_offset = abi.FLAG_BYTES

    def __init__(
        self,
        world: Traced,
        plan: Any,
        kernel: Kernel,
        staging_offset: int,
        problem: int,
        rows: int = 0,
        schedule: int = 0,
        sizes: Any = None,
    ) -> None:
        self.made_of, self.sizes, self.kernel, self.staging_offset = plan, sizes, kernel, staging_offset
        self.grid = plan.grid if sizes is None else sizes.grid
        self.workspace_map: bytes | None = None
        self.tracing = world.tracing
        self.header = header = abi.World.from_buffer_copy(world.header)
        header.check = check_of(problem, rows, schedule)
        _NUMBERS.pack_into(header, _NUMBERS_AT, problem, rows, schedule)
        self.image = bytes(header)

    @property
    def plan(self) -> Any:
        return self.made_of if self.sizes is None else self.made_of.of_rows(self.header.rows)

    def trace_as(self, world: Traced) -> None:
        """Take over from the world where calls record their trace, if they do."""
        self.tracing = world.tracing
        self.header.trace, self.header.trace_capacity = world.header.trace, world.header.trace_capacity
        self.image = bytes(self.header)

    def world_header(self) -> abi.World:
        """A copy of what ``launch`` writes into the parameters."""
        return abi.World.from_buffer_copy(self.header)


@dataclasses.dataclass(slots=True, eq=False)
class _Area:
    """Bytes of the data heap that all plans of a world share."""

    offset: int = 0
    bytes: int = 0


class Problems:
    """All that the ranks of one world have agreed on. Every rank has the same, because each agreement is a collective."""

    def __init__(self, world: Agreed) -> None:
        self._world = world
        self._prepared: dict[Hashable, Prepared] = {}
        self._kernels: dict[KernelSpec, Kernel] = {}
        self._staging = _Area()
        self.collectives = 0  # agreements so far
        self.reports = False  # whether a kernel of some plan may refuse a call

    def find(self, key: Hashable) -> Prepared | None:
        return self._prepared.get(key)

    def plan_of(self, problem: int, rows: int, schedule: int) -> Plan | None:
        """What a call did, by the numbers that its kernel reports; None where this rank does not know."""
        prepared = next((one for one in list(self._prepared.values()) if one.number == problem), None)
        return None if prepared is None else prepared.plan_of(rows, schedule)

    def has(self, spec: KernelSpec) -> bool:
        """Whether every rank has loaded this kernel."""
        return spec in self._kernels

    def prepare(
        self,
        key: Hashable,
        title: str,
        grids: Mapping[KernelSpec, int],
        plan_of: Callable[[int, int], Plan | None],
        stream: Any = None,
    ) -> Prepared:
        """Agree with all ranks on the problem ``key``, and compile and load those of its kernels that are not there yet.

        Collective unless all of it is there; blocks the host then. ``title``: for messages; ``grids``: of each kernel, the most CTAs.

        Raises
        ------
        ArgumentError
            A graph is being captured on ``stream``; a kernel does not fit the device.
        MismatchError
            Another rank asks for something else.
        CompileError
            A kernel does not compile, here or on another rank.
        """
        world = self._world
        with world.lock:
            prepared = self._prepared.get(key)
            missing = sorted((spec for spec in grids if spec not in self._kernels), key=repr)
            if prepared is not None and not missing:
                return prepared
            world.check()
            if world.backend.capturing(world.backend.stream(stream)):
                rule = "is being captured, and this call is the first of its problem, or needs a kernel that is not loaded"
                raise ArgumentError("stream", stream, rule, "call mk.plan(...) before the capture")
            self.collectives += 1
            world.collective(f"prepare {digest_of((key, missing)):016x}", title)
            self._load(title, missing, grids)
            if prepared is None:
                prepared = self._prepared[key] = Prepared(len(self._prepared) + 1, title, plan_of)
            return prepared

    def executable(self, prepared: Prepared, plan: Plan, rows: int = 0, schedule: int = 0, sizes: Any = None) -> Executable:
        """What launches one call of ``plan``, whose kernel is loaded and which has its memory (``reserve``). Not collective.

        ``sizes``: of so many rows, where ``plan`` is that of the most rows of their class, and has the memory of all.
        """
        return Executable(self._world, plan, self._kernels[plan.spec], self._staging.offset, prepared.number, rows, schedule, sizes)

    def reserve(self, plan: Plan) -> None:
        """Set aside the memory that calls of ``plan`` share. Not collective, but all ranks do it alike, in the same order.

        Raises
        ------
        ArgumentError
            The data heap or the signal segment is too small.
        """
        world = self._world
        if plan.flag_words > _FLAG_WORDS:
            rule = f"the signal segment has room for {_FLAG_WORDS}"
            raise ArgumentError("flag_words", plan.flag_words, rule, "use larger chunks or fewer ranks")
        packets = plan.packet_bytes
        if packets and abi.FLAG_BYTES + packets > world.signal_bytes:
            raise ArgumentError("packet_bytes", packets, f"the signal segment has room for {world.signal_bytes - abi.FLAG_BYTES}")
        self.reports = self.reports or may_refuse(plan)
        more = plan.staging_bytes > self._staging.bytes
        world.heap.reserve(plan.workspace_bytes, plan.staging_bytes if more else 0)
        if more:
            self._stage(plan.staging_bytes)

    def _stage(self, size: int) -> None:
        """Make the staging area larger. Older ones stay: calls under way and captured graphs may use them.

        Each is at least twice as large as the one before, where there is room: all together take at most twice the bytes of the last.
        """
        area, heap = self._staging, self._world.heap
        try:
            offset, size = heap.allocate(max(size, 2 * area.bytes)), max(size, 2 * area.bytes)
        except ArgumentError:
            offset = heap.allocate(size)
        area.offset, area.bytes = offset, size

    def clear(self) -> None:
        self._prepared.clear()
        self._kernels.clear()

    def _load(self, title: str, specs: Sequence[KernelSpec], grids: Mapping[KernelSpec, int]) -> None:
        """Compile and load on every rank, after the agreement. Returns when all ranks are ready to launch."""
        with looked_at_once():
            self._load_all(title, specs, grids)

    def _load_all(self, title: str, specs: Sequence[KernelSpec], grids: Mapping[KernelSpec, int]) -> None:
        world = self._world
        if len(specs) > 1:  # ranks and cores share the work of compiling; loading finds the kernels in the cache, or meets the error again
            self._compile(title, specs[world.rank :: world.size])
            world.collective(f"compiled {digest_of(specs):016x}", f"compiling {title}")
        loaded: dict[KernelSpec, Kernel] = {}
        problem: Exception | None = None
        try:
            if specs:
                world.wait_for_kernels()  # modules must not be loaded beside a kernel that waits
            with progress.steps(f"compiling and loading {title}", len(specs)) as is_loaded:
                for spec in specs:
                    loaded[spec] = kernel = world.backend.load(spec)
                    at_once = spec.cluster if spec.clusters_are_apart else grids[spec]
                    if at_once > kernel.max_ctas():
                        raise ArgumentError("grid", at_once, f"only {kernel.max_ctas()} CTAs fit on this device at once")
                    is_loaded()
        except Exception as error:  # told to the other ranks, then raised
            problem = error
        told = b"" if problem is None else f"{type(problem).__name__}: {problem}".encode()
        texts = world.collective(f"loaded {digest_of(specs):016x}", f"loading {title}", told)
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text:
                raise CompileError(f"{title} could not be loaded on rank {rank}", log=text.decode(errors="replace"))
        self._kernels.update(loaded)

    def _compile(self, title: str, specs: Sequence[KernelSpec]) -> None:
        if not specs:
            return
        world = self._world
        threads = max(1, number_of_cpus() // world.ranks_per_node)

        def one(spec: KernelSpec) -> None:
            with contextlib.suppress(Exception):
                world.backend.compile(spec)
            is_compiled()

        workers = min(threads, len(specs))
        with (
            progress.steps(f"compiling {title}", len(specs)) as is_compiled,
            concurrent.futures.ThreadPoolExecutor(workers, "mkernel-compile", leave_single_cpu) as pool,
        ):
            list(pool.map(one, specs))
