"""What every op shares: a call bound to its arrays, ready to be launched, and the public ``plan``."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mkernel.errors import ArgumentError
from mkernel.ops.arguments import check_aligned, check_apart, check_matrix, check_split, check_writable, layout_of, row_stride
from mkernel.plan.gemm import BLOCK_K
from mkernel.plan.split import Split, SplitError
from mkernel.runtime import current
from mkernel.runtime.arrays import Crossing

if TYPE_CHECKING:
    from mkernel.plan.gemm import GemmProblem
    from mkernel.runtime.views import TensorView
    from mkernel.runtime.world import Executable, Plan, World

__all__ = [
    "OPS",
    "BoundCall",
    "PreparedPlan",
    "check_result",
    "executable",
    "find_op",
    "map_of_b",
    "matmul_call",
    "plan",
    "remember",
    "set_map",
    "stream_of",
]

T = TypeVar("T")

_MAX_BOUND = 512  # argument combinations remembered per world


@dataclasses.dataclass(slots=True)
class BoundCall:
    """Parameters of one kernel over particular arrays. Good as long as the workspace and the staging area stay where they are."""

    executable: Executable
    parameters: ctypes.Structure
    placement: int

    def valid(self) -> bool:
        return self.executable.placement == self.placement


def remember(world: World, key: tuple[Any, ...], value: T) -> T:
    """Keep what was worked out for ``key``, for the next call."""
    bound = world.bound_calls
    if len(bound) >= _MAX_BOUND:
        bound.clear()
    bound[key] = value
    return value


def executable(world: World, problem: Hashable, make_plan: Callable[..., Plan], split: Split | None, stream: Any) -> Executable:
    """The agreed and compiled plan of a problem. Collective on first use.

    Roles that ``split`` leaves open get what tuning has found, else mkernel's choice.
    """
    check_split(split)
    tuned = world.tuned.get(repr(problem))
    wanted = split if tuned is None else (split or Split()).filled(tuned)

    def build() -> Plan:
        try:
            untuned = make_plan(problem, world.backend.sm_count, split)
        except SplitError as error:
            limit = world.options.max_sms
            if split is None and limit is not None:  # mkernel's own choice does not fit
                raise ArgumentError("max_sms", limit, f"is too few for this op and world: {error.rule}", "raise it") from None
            raise ArgumentError("split", error.split, error.rule, error.remedy) from None
        if wanted != split:
            with contextlib.suppress(SplitError):  # what was tuned does not go with the rest of ``split``
                found = make_plan(problem, world.backend.sm_count, wanted)
                if found.spec.name == untuned.spec.name:  # another kernel may round at other places
                    return found
        return untuned

    return world.executable((problem, split, wanted), build, stream)


def matmul_call(
    op: str,
    a: Any,
    b: Any,
    options: tuple[Hashable, ...],
    world: World | None,
    out: Any,
    split: Split | None,
    stream: Any,
    problem: Callable[..., GemmProblem],
    bind: Callable[..., BoundCall],
) -> Any:
    """One call of an op that makes a matrix of two.

    ``problem(world, a view, b view, *options)`` checks and describes it; ``bind(world, problem, views of a, b and the result, split,
    stream)`` prepares its launch. Both are called only for arguments not seen before. The world's lock is held throughout, so that what
    was bound is still right when it is launched, whatever other threads do.
    """
    w = current.current(world)
    with w.lock:
        libraries = w.backend.libraries
        home, other = libraries[type(a)], libraries[type(b)]
        queue = home.stream() if stream is None else w.backend.stream(stream)
        ka, kb = home.key(a), other.key(b)
        try:
            if out is None:
                known = w.bound_calls.get((op, ka, kb, *options))
                if known is None:
                    asked = problem(w, home.view(a), other.view(b), *options)
                    known = remember(w, (op, ka, kb, *options), (asked.result_shape, asked.dtype))
                shape, dtype = known
                c = home.empty(shape, dtype, queue)
            else:
                c = out
            third = libraries[type(c)]
            call = (op, ka, kb, third.key(c), split, *options)
            bound = w.bound_calls.get(call)
        except TypeError:  # an option that cannot be hashed
            check_split(split)
            problem(w, home.view(a), other.view(b), *options)
            raise
        if bound is None or not bound.valid():
            views = home.view(a), other.view(b), third.view(c)
            bound = remember(w, call, bind(w, problem(w, *views[:2], *options), *views, split, queue))
        if stream is None and home is other is third and home.one_stream:
            w.launch(bound.executable, bound.parameters, queue)
            return c
        crossing = Crossing(home, queue, stream is not None, (a, b), out)
        crossing.enter()
        w.launch(bound.executable, bound.parameters, queue)
        crossing.leave()
        return c


def stream_of(world: World, arrays: Sequence[Any], stream: Any) -> Any:
    """The stream of a call on these operands, as the backend has resolved it."""
    backend = world.backend
    return backend.libraries[type(arrays[0])].stream() if stream is None and arrays else backend.stream(stream)


def check_result(problem: GemmProblem, a: TensorView, b: TensorView, c: TensorView, rule: str) -> int:
    """``out`` fits the problem and lies apart from the operands; returns the bytes between its rows."""
    if check_matrix("out", c, problem.dtype) != problem.result_shape:
        raise ArgumentError("out.shape", c.shape, f"must be {rule} = {problem.result_shape}")
    check_writable("out", c)
    if problem.result_shape[0]:
        check_aligned("out", c)
    stride = row_stride("out", c)
    check_apart("out", c, {"a": a, "b": b})
    return stride


def map_of_b(world: World, problem: GemmProblem, b: TensorView, columns: int) -> bytes:
    """The tensor map of ``b`` in either layout; ``columns``: of one load where its columns are contiguous."""
    n, k = problem.n, problem.k
    inner, outer, box = (n, k, BLOCK_K) if problem.b_row_major else (k, n, columns)
    stride = layout_of("b", b)[1]
    return world.backend.tensor_map(b.address, problem.dtype, (inner, outer, 1), (stride, stride * outer), (64, box, 1))


def set_map(parameters: ctypes.Structure, name: str, value: bytes) -> None:
    """Put a tensor map into the parameters of a kernel."""
    ctypes.memmove(ctypes.addressof(parameters) + getattr(type(parameters), name).offset, value, len(value))


@dataclasses.dataclass(frozen=True)
class PreparedPlan:
    """A plan that every rank has agreed on and compiled; ``run`` repeats the call on any arrays of the same shapes.

    Attributes
    ----------
    split
        SMs per role.
    workspace_bytes
        Of the symmetric data heap, shared with all other plans of the world.
    """

    op: str
    world: World
    executable: Executable
    _run: Callable[..., Any] = dataclasses.field(repr=False)
    _options: dict[str, Any] = dataclasses.field(repr=False)

    @property
    def split(self) -> Split:
        split: Split = self.executable.plan.split
        return split

    @property
    def workspace_bytes(self) -> int:
        return int(self.executable.plan.workspace_bytes)

    def describe(self) -> str:
        """What will run, in words: shapes, tile, chunks, SMs per role."""
        return str(self.executable.plan.describe())

    def can_run(self) -> bool:
        """Whether the world is still able to run it."""
        return self.world.failure is None and not self.world.closed

    def run(self, *arrays: Any, out: Any = None, stream: Any = None) -> Any:
        """The op itself, with this plan. Not collective in the host sense, never blocks on peers; capturable."""
        return self._run(*arrays, world=self.world, out=out, split=self.split, stream=stream, **self._options)


# Each a module of this package with a function of its name, ``problem_of(world, *views, **options)`` and
# ``make_plan(problem, sm_count, split)``.
OPS = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce")


def find_op(name: Any) -> Any:
    """The module of an op."""
    if name not in OPS:
        raise ArgumentError("op", name, f"must be one of {', '.join(OPS)}")
    return importlib.import_module(f"mkernel.ops.{name}")


def plan(
    op: str,
    *arrays: Any,
    world: World | None = None,
    out: Any = None,  # an argument of every op
    split: Split | None = None,
    stream: Any = None,
    **options: Any,
) -> PreparedPlan:
    """Agree on and compile the plan of one call before it is made (needed before a graph capture).

    Takes the arguments of the op itself; the arrays are only looked at, never read. Collective, blocks the host on first use; not
    capturable.

    Parameters
    ----------
    op
        Name of the op, such as ``"allgather_gemm"``.

    Raises
    ------
    ArgumentError, MismatchError, CompileError
        As the op itself.
    """
    module, chosen = find_op(op), current.current(world)
    problem = module.problem_of(chosen, *map(chosen.backend.view, arrays), **options)
    prepared = executable(chosen, problem, module.make_plan, split, stream_of(chosen, arrays, stream))
    return PreparedPlan(op, chosen, prepared, getattr(module, op), options)
