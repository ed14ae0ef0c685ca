"""What ``mk.plan`` makes of an op that is one kernel: its problem agreed on, its kernels loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mkernel.errors import ArgumentError
from mkernel.ops.call import ask, call, stream_of
from mkernel.ops.op import Instance, find
from mkernel.ops.schedule import Choice, choice_of, executable, plan_for, prepare, reserve
from mkernel.planner.row_classes import MOST_ROWS
from mkernel.runtime import current
from mkernel.runtime.plan import title_of

if TYPE_CHECKING:
    from mkernel.planner.split import Split
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["PreparedPlan", "plan_kernel"]


@dataclasses.dataclass(frozen=True, repr=False)
class PreparedPlan:
    """A problem that every rank has agreed on, with its kernels loaded: good for every number of rows up to ``max_rows``.

    ``rows`` of its methods: of the first operand of a call; None: as many as the arrays had that the plan was made with.

    Attributes
    ----------
    max_rows
        Most rows of the first operand that ``run`` takes; None: as many as the heap has room for.
    workspace_bytes
        Bytes of the symmetric data heap that no call of this plan exceeds, shared with all other plans of the world. With ``max_rows``
        None: what a call of as many rows as the arrays had uses.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     a = np.ones((16, 64), ml_dtypes.bfloat16)
    ...     b = np.ones((64, 8), ml_dtypes.bfloat16)
    ...     plan = mk.plan("allgather_gemm", a, b, max_rows=16)
    ...     return plan.workspace_bytes, plan.describe(5).splitlines()[0].split(":")[0], plan.can_run()
    >>> mk.launch(rank, ranks=2, target="cpu")[0]
    (4096, 'allgather_gemm', True)
    """

    op: str
    world: World
    max_rows: int | None
    workspace_bytes: int
    _instance: Instance[Any] = dataclasses.field(repr=False)
    _choice: Choice = dataclasses.field(repr=False)
    _options: tuple[Any, ...] = dataclasses.field(repr=False)

    def plan(self, rows: int | None = None) -> Any:
        """What a call of so many rows does: a plan of ``mkernel.planner``."""
        op, instance = find(self.op), self._instance
        if rows is not None:
            instance = Instance(instance.problem, op.plan_rows(self._checked(rows), self.world.size))
        return plan_for(self.world, op, instance, self._choice)

    def split(self, rows: int | None = None) -> Split:
        """SMs per role in a call of so many rows."""
        split: Split = self.plan(rows).split
        return split

    def describe(self, rows: int | None = None) -> str:
        """What a call of so many rows does, in words: shapes, tile, chunks, SMs per role."""
        return str(self.plan(rows).describe())

    def can_run(self) -> bool:
        """Whether the world is still able to run it."""
        return self.world.failure is None and not self.world.closed

    def run(self, *arrays: Array | None, out: Any = None, stream: Any = None) -> Any:
        """The op itself, of any number of rows up to ``max_rows``. Never collective in the host sense, never blocks on peers; capturable.

        So for operands of the plan's problem: others are what the op takes, and prepared as a first call of it is.

        Raises
        ------
        ArgumentError
            The first operand has more than ``max_rows`` rows; or as the op itself.
        """
        op = find(self.op)
        if self.max_rows is not None and arrays:
            shape = getattr(arrays[0], "shape", None) or self.world.backend.view(arrays[0]).shape  # what comes by DLPack may have none
            if shape:  # else the op says what is wrong
                self._checked(op.rows_of(shape))
        return call(op, op.all_operands(arrays), self._options, world=self.world, out=out, split=self._choice, stream=stream)

    def __repr__(self) -> str:
        made = title_of(self.plan()) if self.can_run() else self.op
        limit = "any number of rows" if self.max_rows is None else f"up to {self.max_rows} rows"
        return f"<mkernel.PreparedPlan for {limit}, workspace {self.workspace_bytes} bytes; made with {made}>"

    def _checked(self, rows: int) -> int:
        if isinstance(rows, bool) or not isinstance(rows, (int, np.integer)) or not 0 <= rows <= MOST_ROWS:
            raise ArgumentError("rows", rows, "must be a number of rows of the first operand, or None for those the plan was made with")
        if self.max_rows is not None and rows > self.max_rows:
            raise ArgumentError("a.shape", f"{rows} rows", f"the plan was made for at most {self.max_rows}", "make one with more max_rows")
        return rows


def plan_kernel(
    op: str,
    arrays: Sequence[Array | None],
    options: dict[str, Any],
    *,
    max_rows: int | None = None,
    world: World | None = None,
    split: Split | None = None,
    specialize: str | Iterable[str] | None = None,
    tiling: Mapping[str, int] | None = None,
    stream: Any = None,
) -> PreparedPlan:
    """``mk.plan`` of an op that is one kernel."""
    of, w = find(op), current.current(world)
    if max_rows is not None and (isinstance(max_rows, bool) or not isinstance(max_rows, (int, np.integer)) or max_rows < 1):
        raise ArgumentError("max_rows", max_rows, "must be a positive integer or None")
    if "max_rows" in of.options:  # how much room a call has is its own size then
        options["max_rows"] = max_rows
        max_rows = max_rows if of.by_rows else None
    arrays, given = of.all_operands(arrays), of.option_values(options)
    with w.lock:
        views, instance = ask(w, of, arrays, given)
        choice = choice_of(split, specialize, tiling)
        most = None if max_rows is None else of.plan_rows(int(max_rows), w.size)
        if max_rows is not None and max_rows < of.rows_of(views[0].shape):
            raise ArgumentError("max_rows", max_rows, "is less than the arrays have", "give the most rows that a call will have")
        queue = stream_of(w, arrays, stream)
        made = executable(w, of, instance, choice, queue) if most is None else None
        workspace = made.plan.workspace_bytes if made is not None else 0
        if most is not None and max_rows is not None:
            largest = of.largest(int(max_rows), w.size)
            prepare(w, of, instance, choice, queue, most)
            workspace = reserve(w, of, instance.problem, choice, (*largest, instance.rows))
    return PreparedPlan(op, w, None if max_rows is None else int(max_rows), int(workspace), instance, choice, given)
