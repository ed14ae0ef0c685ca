"""What an op is: one object that says all that the layers need of it, and the registry of those objects.

``docs/adding_an_op.md`` adds one step by step.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import importlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from mkernel import env
from mkernel.errors import ArgumentError
from mkernel.ops.arguments import check_extents, check_places
from mkernel.planner.row_classes import class_of, classes
from mkernel.planner.split import COMMUNICATION_ROLES, Split

if TYPE_CHECKING:
    from mkernel.planner.topology import Topology
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.plan import Plan
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World

__all__ = ["BUILT_IN", "ResultSpec", "Instance", "Op", "OpPlan", "OpProblem", "find", "instance_of", "names", "register"]

# Each a module of this package, which registers the op of its name.
BUILT_IN = (
    *("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"),
    *("moe_dispatch_gemm", "moe_combine", "moe_gemm_combine"),
    *("ring_attention", "ring_attention_varlen"),
)


class OpProblem(Protocol):
    """What the ranks agree on once: all but the sizes that change from call to call. Frozen, and equal on every rank."""

    @property
    def topology(self) -> Topology: ...
    def __hash__(self) -> int: ...


class OpPlan(Protocol):
    """What one call of certain sizes does: ``mkernel.runtime.prepared.Plan``, and its SMs per role."""

    @property
    def split(self) -> Split: ...
    def of_rows(self, rows: int) -> Any:
        """The same choices for another number of rows of the class: a plan of this type."""


Problem = TypeVar("Problem", bound=OpProblem)


class Instance(NamedTuple, Generic[Problem]):
    """What the operands of one call ask for, agreed by all ranks: a problem, and this call's rows, as plans count them.

    A size that may differ by rank is no part of it: it is bound to the launch only, and kernels tell each other (``docs/adding_an_op.md``).
    """

    problem: Problem
    rows: int


# The instance of a problem and rows, without a function of Python in between: every new size makes one.
instance_of: Callable[[tuple[Any, int]], Instance[Any]] = functools.partial(tuple.__new__, Instance)


class ResultSpec(NamedTuple):
    """Shape and dtype of a result that a call makes."""

    shape: tuple[int, ...]
    dtype: str


class Op(abc.ABC, Generic[Problem]):
    """One operation, registered once. ``mk.<op>``, ``mk.plan``, ``mk.tune``, ``demo``, ``bench``, ``model`` and the tests read it.

    Attributes
    ----------
    name
        Of the public function, and of the op in ``mk.plan`` and on the command line.
    gives, gets
        What every rank gives and gets, in a few words: the op's row in README.
    operands
        Names of the arrays that a call takes, in order. ``routing.rows`` is an array of the function's argument ``routing``.
    optional
        Those of them that a caller may leave out: they are None then, and so are their views.
    fills
        Those of them that a call writes.
    by_rows
        Whether the calls of a problem differ in a number of rows that the ranks agree on; else every instance has 0 rows.
    options
        Keyword arguments that are part of the problem, with their defaults, in order.
    beside
        Keyword arguments beside these, and ``out``, that a call has, and ``mk.plan`` accepts: what it prepares does not depend on them.
    result
        None: a call returns one array. Else the NamedTuple that it returns; ``out`` is then such a tuple.
    bench
        Name of the module whose ``OP`` says how the op is measured and demonstrated (``mkernel.bench.cases``); "" if neither.
    tunable
        Roles whose SMs ``mk.tune`` searches.
    tilings
        Fields of a ``Tiling`` that ``make_plan`` takes; it has an argument ``tiling`` if there are any.
    modelled
        Whether the cost model chooses among plans: ``make_plan`` then has an argument ``machine``.
    parameters
        The mirror of ``Parameters`` of the op's kernels.
    """

    name: ClassVar[str]
    gives: ClassVar[str]
    gets: ClassVar[str]
    operands: ClassVar[tuple[str, ...]]
    optional: ClassVar[frozenset[str]] = frozenset()
    fills: ClassVar[frozenset[str]] = frozenset()
    by_rows: ClassVar[bool] = True
    options: ClassVar[Mapping[str, Any]] = {}
    beside: ClassVar[frozenset[str]] = frozenset()
    result: ClassVar[type[tuple[Any, ...]] | None] = None
    bench: ClassVar[str] = ""
    tunable: ClassVar[tuple[str, ...]] = COMMUNICATION_ROLES
    tilings: ClassVar[frozenset[str]] = frozenset()
    modelled: ClassVar[bool] = False
    parameters: ClassVar[type[ctypes.Structure]]

    # ---- problem and plan
    @abc.abstractmethod
    def instance(self, world: World, *operands: Any, **options: Any) -> Instance[Problem]:
        """What these operands (a ``TensorView`` each, or None) ask for. Raises ArgumentError: nothing else of them is checked later."""

    @abc.abstractmethod
    def make_plan(self, problem: Problem, rows: int, sm_count: int, split: Split | None = None, *, specialize: str | None = None) -> Any:
        """What a call of so many rows does: an ``OpPlan`` that is also a ``Plan``. Raises SplitError."""

    def plan_rows(self, rows: int, ranks: int) -> int:
        """How plans count ``rows`` rows of the first operand, in a world of so many ranks."""
        return rows

    def class_of(self, rows: int, split: Split | None = None) -> int:
        """The rows, as plans count them, whose plan ``of_rows`` makes that of a call of. ``split``: what its caller asks for."""
        return class_of(rows)

    def rows_of(self, shape: Sequence[int]) -> int:
        """How many rows the first operand has, as callers count them where they say how many there may be."""
        return shape[0]

    def largest(self, max_rows: int, ranks: int) -> Iterable[int]:
        """Rows, as plans count them, of calls of up to ``max_rows`` rows: of each class, and of those that need most memory.

        Raises ArgumentError where matrices would be too large.
        """
        most = self.plan_rows(max_rows, ranks)
        check_extents(most * ranks)
        return (*classes(most), most)

    def all_operands(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The arrays of a caller, and None for each operand at the end that is left out. Raises ArgumentError where the number is wrong."""
        missing = self.operands[len(arrays) :]
        if len(arrays) > len(self.operands) or not self.optional.issuperset(missing):
            raise ArgumentError("arrays", f"{len(arrays)} arrays", f"{self.name} takes {len(self.operands)}: {', '.join(self.operands)}")
        return (*arrays, *(None for _ in missing))

    def option_values(self, options: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of ``self.options``, in their order, of a caller's keyword arguments. Raises TypeError, as the function does."""
        unknown = options.keys() - self.options.keys() - self.beside
        if unknown:
            raise TypeError(f"{self.name}() got an unexpected keyword argument {sorted(unknown)[0]!r}")
        return tuple(options.get(name, default) for name, default in self.options.items())

    # ---- one call
    @abc.abstractmethod
    def results(self, instance: Instance[Problem], operands: Sequence[TensorView]) -> Sequence[ResultSpec]:
        """The arrays that a call makes where the caller gives no ``out``."""

    def arrays_of(self, out: Any) -> Sequence[Any]:
        """The arrays of an ``out`` that the caller gives, in the order of ``results``. Raises ArgumentError."""
        if self.result is None:
            return (out,)
        fields: tuple[str, ...] = self.result._fields  # type: ignore[attr-defined]
        if not isinstance(out, tuple) or len(out) != len(fields):
            raise ArgumentError("out", type(out).__name__, f"must be a tuple of {len(fields)} arrays: {', '.join(fields)}")
        return out

    def returned(self, results: Sequence[Any]) -> Any:
        """What a call returns, made of its arrays: the one array, or the op's NamedTuple."""
        return results[0] if self.result is None else self.result(*results)

    @abc.abstractmethod
    def check_results(self, instance: Instance[Problem], operands: Sequence[TensorView], results: Sequence[TensorView]) -> None:
        """Raises ArgumentError where a given ``out`` does not fit."""

    def names_of_results(self, count: int) -> tuple[str, ...]:
        """What ``count`` arrays, in the order of ``results``, are called in errors."""
        return ("out",) if self.result is None else tuple(f"out.{name}" for name in self.result._fields)  # type: ignore[attr-defined]

    def check_places(self, operands: Sequence[TensorView | None], results: Sequence[TensorView]) -> None:
        """Raises ArgumentError where an array is misaligned, or one that a call writes has a byte of another one of the call."""
        names, written = _names_of(self, len(results))
        check_places(names, (*operands, *results), written)

    @abc.abstractmethod
    def bind(
        self,
        world: World,
        executable: Executable,
        instance: Instance[Problem],
        operands: Sequence[TensorView],
        results: Sequence[TensorView],
    ) -> ctypes.Structure:
        """The kernel's parameters for these arrays. All of them have been checked."""

    # ---- what a call keeps
    def check_kept(
        self, instance: Instance[Problem], operands: Sequence[TensorView], results: Sequence[TensorView], kept: TensorView
    ) -> None:
        """Raises ArgumentError where the array of ``beside`` that a call is to fill, too, does not fit."""
        raise NotImplementedError

    def keeping(self, world: World, executable: Executable, operands: Sequence[TensorView], kept: TensorView) -> Any:
        """What fills it behind the kernel, on the stream that it is given (``Backend.copying``); None: nothing is to be done."""
        raise NotImplementedError

    # ---- calls that are alike
    def form_of(self, keys: Sequence[Any]) -> Hashable | None:
        """What calls have in common that differ in rows and addresses only; None: every call is checked anew.

        ``keys``: the op's name, the options, keys of the operands, the split and keys of the results.
        """
        return None

    def form(
        self, world: World, instance: Instance[Problem], operands: Sequence[TensorView], results: Sequence[TensorView], split: Any
    ) -> Any:
        """What binds calls of the form of a call that has been checked, by its method ``bind`` (``ops/gemm.py``); None: there is none."""
        return None

    # ---- for people
    def row(self) -> str:
        """The op's row in the table of README. What may be left out is passed by name."""
        arguments = [f"{name}=" if name in self.optional else name for name in self.arguments()]
        return f"| `mk.{self.name}({', '.join(arguments)})` | {self.gives} | {self.gets} |"

    def arguments(self) -> tuple[str, ...]:
        """Names of the function's arguments that are arrays, or hold them."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.operands))

    def tile(self, plan: Any) -> str:
        """The extents of one unit of work, such as rows and columns of a tile."""
        return ""

    def mechanism(self, plan: Plan) -> str:
        """How the data of a call travels, in two or three words."""
        return ""

    def travels(self, plan: Plan) -> str:
        """In which units they travel."""
        return ""

    def __repr__(self) -> str:
        return f"<mkernel op {self.name}>"


@functools.lru_cache(maxsize=256)
def _names_of(op: Op[Any], results: int) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of all arrays of a call, and of those that it writes."""
    made = op.names_of_results(results)
    return (*op.operands, *made), op.fills.union(made)


_registered: dict[str, Op[Any]] = {}
_modules: set[str] = set()  # of MKERNEL_OPS, imported


def register(op: Op[Any]) -> Op[Any]:
    """Make an op known by its name. Raises ArgumentError when another one has it."""
    known = _registered.setdefault(op.name, op)
    if type(known) is not type(op):
        raise ArgumentError("op", op.name, f"is the name of {type(known).__module__}.{type(known).__qualname__} already", "choose another")
    return known


def _import_more() -> None:
    for name in env.OPS.get() or ():
        if name not in _modules:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise ArgumentError(env.OPS.name, name, f"cannot be imported: {error}", "name modules that this Python finds") from error
            _modules.add(name)


def names() -> tuple[str, ...]:
    """Names of all ops: mkernel's own, then those that were registered beside them, by the modules of ``MKERNEL_OPS`` too."""
    _import_more()
    return (*BUILT_IN, *(name for name in _registered if name not in BUILT_IN))


def check_name(name: Any) -> None:
    """Raises ArgumentError where it is something else, such as an operand."""
    if not isinstance(name, str):
        raise ArgumentError("op", type(name).__name__, "must be the name of an op, before its arrays", 'such as "allgather_gemm"')


def find(name: Any) -> Op[Any]:
    """The op of a name. Raises ArgumentError."""
    check_name(name)
    if name not in _registered:
        if name in BUILT_IN:
            importlib.import_module(f"mkernel.ops.{name}")
        else:
            _import_more()
    if name not in _registered:
        raise ArgumentError("op", name, f"must be one of {', '.join(names())}")
    return _registered[name]
