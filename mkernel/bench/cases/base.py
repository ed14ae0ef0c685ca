"""What a bench case is: one op at one shape, its inputs, its reference, its baselines and the bytes it must move."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from mkernel.ops.op import find, names
from mkernel.planner.predict import predict
from mkernel.planner.prediction import ALONE, Conditions, Prediction

if TYPE_CHECKING:
    from mkernel.bench.timing import Call, Timing
    from mkernel.planner.machine import Machine
    from mkernel.planner.split import Split
    from mkernel.planner.tiling import Tiling
    from mkernel.planner.topology import Topology
    from mkernel.runtime.plan import Plan

__all__ = ["LAYOUTS", "REFERENCES", "Case", "Kept", "LocalGemm", "Op", "b_title", "is_row_major", "random_b", "up"]

REFERENCES = 4  # that are kept: the first, a middle and the last set are looked at, and where a measurement ends
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class LocalGemm:
    """The dense product that one rank computes."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


def tilings_of(op: str) -> frozenset[str]:
    """Fields of a ``Tiling`` that the plans of a bench op have."""
    name = "allgather_gemm" if op == "gemm" else op
    return find(name).tilings if name in names() else frozenset()


class Case(abc.ABC):
    """One op at one shape. Inputs and outputs are made by ``setup``; nothing of the device is touched before."""

    label: str
    shape: dict[str, int]
    flops: float  # of one rank
    link_bytes: int  # into one GPU over NVLink
    network_bytes: int  # into one GPU over its network card
    heap_bytes: int  # symmetric heap the op needs
    title: str  # op, dims but for the rows, dtype, world
    operand_rows: int  # rows of the first operand per row that its plan counts
    solo: LocalGemm | None  # the local compute as a GEMM in a world of one; None: it is none
    weight_bytes: int = 0  # that it reads, where it is none
    tiling: Tiling | None = None  # what the tiles of its plans cover; None: as the planner chooses
    machine: Machine | None = None  # for which it chooses, whatever machine a plan is predicted on; None: as the environment says

    @abc.abstractmethod
    def plan(self, sm_count: int, split: Split | None = None, *, rows: int | None = None, specialize: str | None = None) -> Plan:
        """What mkernel does on a device with so many SMs. Raises SplitError.

        ``rows``: as plans count them, in place of the case's; ``specialize``: what is compiled in, as ``mk.plan`` takes it (None: as the
        environment says).
        """

    def predicted(self, machine: Machine, conditions: Conditions = ALONE, split: Split | None = None) -> Prediction | None:
        """What the cost model says of one call on such a machine; None where it knows nothing of the op. Raises SplitError."""
        return predict(self.plan(machine.sms, split), machine, conditions, self.shape.get("T"))

    @abc.abstractmethod
    def setup(self, timing: Timing, seed: int) -> None:
        """Make enough input sets that those not in use are larger than L2, poison the outputs."""

    @abc.abstractmethod
    def fused(self, split: Any = None) -> list[Call]:
        """One call of the op per input set."""

    @abc.abstractmethod
    def first_call(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """Op, operands and options of the first of these calls, as ``mk.plan`` and ``mk.tune`` take them."""

    @abc.abstractmethod
    def outputs(self) -> list[Any]:
        """Where call i leaves its result."""

    def written(self) -> list[Any]:
        """The same as far as call i has written it: all of it, unless the op says how much is there."""
        return self.outputs()

    @abc.abstractmethod
    def worst(self, index: int, split: Any = None) -> float:
        """Largest error of set ``index``'s output over its bound, written by calls with this split: right if <= 1."""

    @abc.abstractmethod
    def baselines(self, baselines: Any) -> dict[str, Sequence[Call]]:
        """Contestants by name, writing to the same outputs. Those that a library lacks are left to it to report."""

    @abc.abstractmethod
    def alone(self, baselines: Any) -> Sequence[Call]:
        """The local compute by the vendor's library, all inputs already there."""


LAYOUTS = "row-major", "transposed"  # of B


def is_row_major(options: Mapping[str, str]) -> bool:
    """Whether B is, by the command line's options."""
    return options.get("b", LAYOUTS[0]) == LAYOUTS[0]


def b_title(k: int, n: int, row_major: bool) -> str:
    return f"b ({k}, {n})" if row_major else f"b ({n}, {k}) transposed"


def random_b(timing: Timing, k: int, n: int, seed: int, row_major: bool) -> Any:
    """B (K, N): row-major, or the transpose view of an array (N, K)."""
    return timing.random((k, n), seed) if row_major else timing.random((n, k), seed).T


class Kept(Generic[_T]):
    """What a function of numbers returned for the last few of them, for as long as its owner lives: a cache of the class would keep arrays.

    Parameters
    ----------
    count
        How many results are kept.
    """

    def __init__(self, count: int) -> None:
        self._count, self._results = count, dict[int, _T]()

    def get(self, index: int, make: Callable[[int], _T]) -> _T:
        """The result for ``index``; ``make(index)`` where it is not kept."""
        if index not in self._results:
            while len(self._results) >= self._count:  # room is made before: two of them may not fit
                del self._results[next(iter(self._results))]
            self._results[index] = make(index)
        return self._results[index]


def up(extent: int, unit: int) -> int:
    """The next multiple of ``unit``."""
    return -(-extent // unit) * unit


class Op(abc.ABC):
    """A registered op: its shapes and how to make a case of each."""

    name: str
    title: str
    sizes: tuple[str, ...]  # default shapes, as written after --shapes
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # names that --shapes takes for several
    options: tuple[str, ...] = ()  # keyword arguments of the op that the command line offers, and b: how B lies

    def demo_sizes(self, target: str, ranks: int) -> Sequence[str]:
        """Shapes that ``mkernel demo`` shows and checks, as ``case`` takes them, for any number of ranks; one that no tile divides too."""
        return ()

    def expand(self, text: str, topology: Topology) -> Sequence[str]:
        """The shapes that one word of ``--shapes`` names. Raises ArgumentError."""
        return self.groups.get(text, (text,))

    @abc.abstractmethod
    def case(self, size: str, topology: Topology, dtype: str, **options: str) -> Case:
        """Parse one shape; ``options`` are among those of this class. Raises ArgumentError for a shape this op does not take."""
