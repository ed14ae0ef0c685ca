"""What every op shares: a call bound to its arrays, ready to be launched, and the public ``plan``."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from mkernel.errors import ArgumentError
from mkernel.runtime import current

if TYPE_CHECKING:
    from mkernel.plan.split import Split
    from mkernel.runtime.world import Executable, World

__all__ = ["OPS", "BoundCall", "PreparedPlan", "plan", "remember"]

T = TypeVar("T")

_MAX_BOUND = 512  # argument combinations remembered per world


@dataclasses.dataclass(slots=True)
class BoundCall:
    """Parameters of one kernel over particular arrays. Good as long as the workspace stays where it is."""

    executable: Executable
    parameters: ctypes.Structure
    scratch_offset: int

    def valid(self) -> bool:
        return self.executable.scratch_offset == self.scratch_offset


def remember(world: World, key: tuple[Any, ...], value: T) -> T:
    """Keep what was worked out for ``key``, for the next call."""
    bound = world.bound_calls
    if len(bound) >= _MAX_BOUND:
        bound.clear()
    bound[key] = value
    return value


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
        return self._run(*arrays, world=self.world, out=out, stream=stream, **self._options)


OPS = ("allgather_gemm",)  # each a module of this package with a function of its name and ``prepare(world, *arrays, stream=, **options)``


def plan(op: str, *arrays: Any, world: World | None = None, stream: Any = None, **options: Any) -> PreparedPlan:
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
    if op not in OPS:
        raise ArgumentError("op", op, f"must be one of {', '.join(OPS)}")
    module = importlib.import_module(f"mkernel.ops.{op}")
    chosen = current.current(world)
    return PreparedPlan(op, chosen, module.prepare(chosen, *arrays, stream=stream, **options), getattr(module, op), options)
