"""What calls of one problem do, by classes of rows: kernel, split and chunks. Needs no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mkernel.ops.op import find
from mkernel.planner.row_classes import classes, span
from mkernel.planner.specialize import Specialized
from mkernel.tools.table import format_table

if TYPE_CHECKING:
    from mkernel.bench.cases import Case
    from mkernel.jit.spec import KernelSpec
    from mkernel.planner.split import Split

__all__ = ["Run", "describe_classes", "runs"]


@dataclasses.dataclass(frozen=True)
class Run:
    """Neighbouring classes of rows whose calls do the same.

    Attributes
    ----------
    first, last
        Rows of the op's first operand.
    cells
        Tile, mechanism, SMs per role and what travels, in words.
    workspace_bytes
        What the largest of these calls needs of the data heap, the staging area for the network included.
    """

    first: int
    last: int
    cells: tuple[str, ...]
    workspace_bytes: int
    specs: frozenset[KernelSpec]


def runs(case: Case, max_rows: int, sm_count: int, split: Split | None = None, specialize: str | None = None) -> Iterator[Run]:
    """Runs of the case's problem up to ``max_rows`` rows of the first operand.

    Raises
    ------
    SplitError
        ``split`` does not fit.
    """
    per_row = case.operand_rows
    known: Run | None = None
    for rows in classes(-(-max_rows // per_row)):
        plan: Any = case.plan(sm_count, split, rows=rows, specialize=specialize)
        cells = (find(plan.op).tile(plan), _mechanism(plan), _sms(plan), _travels(plan))
        one = Run(span(rows)[0] * per_row, rows * per_row, cells, plan.workspace_bytes + plan.staging_bytes, frozenset({plan.spec}))
        if known is not None and known.cells != cells:
            yield known
            known = None
        if known is not None:
            most = max(known.workspace_bytes, one.workspace_bytes)
            one = dataclasses.replace(one, first=known.first, workspace_bytes=most, specs=known.specs | one.specs)
        known = one
    if known is not None:
        yield known


def describe_classes(case: Case, max_rows: int, sm_count: int, split: Split | None = None, specialize: str | None = None) -> str:
    """A table of ``runs``, with the number of kernels that serve all of them."""
    found = list(runs(case, max_rows, sm_count, split, specialize))
    head = ["rows of a", "tile", "mechanism", "SMs", "travels in", "workspace MiB"]
    rows = [[f"{run.first} to {run.last}", *run.cells, f"{run.workspace_bytes / 2**20:.2f}"] for run in found]
    chosen: Any = case.plan(sm_count, split, rows=1, specialize=specialize)
    fields: frozenset[str] = getattr(chosen, "specialize", frozenset())
    lines = [
        f"{case.title}, {sm_count} SMs",
        format_table(head, rows),
        f"{_kernels(found)} for these rows (compiled in: {Specialized(fields)})",
    ]
    if fields:
        lines[-1] += f"; {_kernels(list(runs(case, max_rows, sm_count, split, 'none')))} with --specialize none"
    return "\n".join(lines)


def _kernels(found: Sequence[Run]) -> str:
    count = len(frozenset[Any]().union(*(run.specs for run in found)))
    return f"{count} kernel{'' if count == 1 else 's'}"


def _mechanism(plan: Any) -> str:
    return "nothing travels" if plan.problem.topology.size == 1 else find(plan.op).mechanism(plan)


def _sms(plan: Any) -> str:
    roles = dataclasses.asdict(plan.split)
    return ", ".join(f"{role} {sms}" for role, sms in roles.items() if sms)


def _travels(plan: Any) -> str:
    return "" if plan.problem.topology.size == 1 else find(plan.op).travels(plan)
