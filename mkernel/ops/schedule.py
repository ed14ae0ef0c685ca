"""From what a call asks for to what is launched: the plan of its class of rows, agreed on by all ranks and loaded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mkernel.errors import ArgumentError
from mkernel.jit.spec import KernelSpec
from mkernel.ops import remembered
from mkernel.ops.arguments import check_split
from mkernel.ops.op import Instance, Op
from mkernel.planner.row_classes import MOST_ROWS, examined, span
from mkernel.planner.split import Split, SplitError
from mkernel.planner.tiling import Tiling, TilingError
from mkernel.runtime.options import checked_fields
from mkernel.runtime.plan import title_of

if TYPE_CHECKING:
    from collections import OrderedDict

    from mkernel.runtime.plan import Plan
    from mkernel.runtime.prepared import Executable, Prepared
    from mkernel.runtime.world import World

__all__ = [
    "Choice",
    "Table",
    "choice_of",
    "executable",
    "executable_of_class",
    "keep",
    "plan_for",
    "prepare",
    "reserve",
    "schedule_number",
    "table_of",
    "tuning_name",
]

_COMPUTE_FACTOR = 0x010193  # odd
T = TypeVar("T")

_MAX_EXECUTABLES = 512  # remembered per world


class Choice(NamedTuple):
    """What a caller wants beside the result: a split, fields to be compiled in (None: the world's), and what tiles cover."""

    split: Split | None
    specialize: str | None
    tiling: Tiling | None = None


_NO_CHOICE = Choice(None, None)


def choice_of(split: Any, specialize: Any = None, tiling: Any = None) -> Choice:
    """The ``split=``, ``specialize=`` and ``tiling=`` of a caller, checked. ``split``: also a Choice that was made before."""
    if isinstance(split, Choice):
        return split
    if split is specialize is tiling is None:
        return _NO_CHOICE
    return Choice(check_split(split), None if specialize is None else checked_fields(specialize), _checked_tiling(tiling))


def _checked_tiling(tiling: Any) -> Tiling | None:
    if tiling is None:
        return None
    if not isinstance(tiling, (Mapping, Tiling)):
        raise ArgumentError("tiling", tiling, "must be a mapping such as {'block_n': 128}, or None")
    try:
        found = tiling if isinstance(tiling, Tiling) else Tiling.parse(tiling)
        return found if found.fields else None
    except ValueError as error:
        raise ArgumentError("tiling", tiling, str(error)) from None


def tuning_name(problem: Hashable, rows: int) -> str:
    """What names the split that tuning found for calls of this class of rows."""
    numbers = span(rows)
    return f"{problem!r}, rows {numbers[0]} to {numbers[-1]}"


def schedule_number(split: Split | None, tiling: Tiling | None = None) -> int:
    """24 bits that tell the splits apart which callers may ask for, each role's number of SMs below 255, and tilings; 0: none."""
    tiles = 0 if tiling is None else tiling.number
    if split is None or split == Split():
        return tiles
    compute, intra, send, reduce = (255 if n is None else n for n in dataclasses.astuple(split))
    return (intra | send << 8 | reduce << 16) + (compute + 1) * _COMPUTE_FACTOR + tiles & 0xFFFFFF


class Table:
    """What is known of one problem, as callers with one choice have it. Compared by identity.

    Attributes
    ----------
    plans
        The plan of the most rows of each class that has been asked for.
    prepared
        What the ranks have agreed on, once a call has needed it.
    ready
        Those of ``plans`` whose kernel is loaded, and whose class has the memory of every size.
    untuned
        The same without what tuning has found, and those that an earlier process has made: ``recalled`` from ``file``, so many.
    schedule
        What tells the choice from others in reports.
    """

    __slots__ = ("file", "plans", "prepared", "ready", "recalled", "schedule", "untuned")

    def __init__(self, choice: Choice) -> None:
        self.plans: dict[int, Any] = {}
        self.ready: dict[int, Any] = {}
        self.untuned: dict[int, Any] = {}
        self.file: str | None = None
        self.recalled = 0
        self.prepared: Prepared | None = None
        self.schedule = schedule_number(choice.split, choice.tiling)


def table_of(world: World, problem: Hashable, choice: Choice) -> Table:
    """The row of the world's table for a problem and a choice."""
    key = problem, choice
    known: Table | None = world.table.get(key)
    if known is None:
        known = world.table[key] = Table(choice)
        if known.schedule:
            world.schedules[known.schedule] = choice.split, choice.tiling
    return known


def plan_for(world: World, op: Op[Any], instance: Instance[Any], choice: Choice, table: Table | None = None) -> Any:
    """The plan of one call, from the table of the world: one plan per class of rows, made when its problem is prepared, or now.

    Roles that the split leaves open get what tuning has found, else mkernel's choice. ``table``: if it is known. Raises ArgumentError.
    """
    problem, rows = instance
    table, of_class = table or table_of(world, problem, choice), op.class_of(rows, choice.split)
    try:
        return (table.plans.get(of_class) or _largest(world, op, problem, choice, table, of_class)).of_rows(rows)
    except SplitError as error:
        raise _wrong(world, choice.split, error) from None


def _largest(world: World, op: Op[Any], problem: Hashable, choice: Choice, table: Table, of_class: int) -> Any:
    """The plan of the most rows of a class, made now."""
    made = table.plans[of_class] = _plan_of_class(world, op, Instance(problem, of_class), choice, table)
    return made


def _recall(world: World, op: Op[Any], problem: Hashable, choice: Choice, table: Table) -> None:
    """Bring back what an earlier process has planned, where all classes are planned at once: that may take as long as loading kernels."""
    table.file = ""
    if world.backend.compiles_ahead and remembered.may_be_known(op):
        table.file = remembered.name_of(world, op, problem, choice, _specialized(world, choice))
        table.untuned = remembered.recall(table.file)
        table.recalled = len(table.untuned)


def _specialized(world: World, choice: Choice) -> str | None:
    return world.specialize if choice.specialize is None else choice.specialize


def _plan_of_class(world: World, op: Op[Any], instance: Instance[Any], choice: Choice, table: Table) -> Any:
    problem, rows = instance
    split, sms, tiling = choice.split, world.backend.sm_count, choice.tiling
    more: dict[str, Any] = {"specialize": _specialized(world, choice)}
    if tiling is not None:
        if not tiling.fields <= op.tilings:
            raise ArgumentError("tiling", tiling, f"{op.name} knows {', '.join(sorted(op.tilings)) or 'none'}")
        more["tiling"] = tiling
    if op.modelled:
        more["machine"] = world.machine
    if table.file is None:
        _recall(world, op, problem, choice, table)
    try:
        untuned = table.untuned.get(rows)
        if untuned is None:
            untuned = table.untuned[rows] = op.make_plan(problem, rows, sms, split, **more)
    except SplitError as error:
        raise _wrong(world, split, error) from None
    except TilingError as error:
        raise ArgumentError("tiling", tiling, str(error)) from None
    tuned = world.tuned.get(tuning_name(problem, rows)) if world.tuned else None
    if tuned is not None:
        with contextlib.suppress(SplitError):  # what was tuned does not go with the rest of ``split``
            found = op.make_plan(problem, rows, sms, (split or Split()).filled(tuned), **more)
            if found.spec.name == untuned.spec.name:  # another kernel may round at other places
                return found
    return untuned


def _wrong(world: World, split: Split | None, error: SplitError) -> ArgumentError:
    """What to tell a caller who has asked for ``split``."""
    limit = world.options.max_sms
    if split is None and limit is not None:  # mkernel's own choice does not fit
        return ArgumentError("max_sms", limit, f"is too few for this op and world: {error.rule}", "raise it")
    return ArgumentError("split", error.split, error.rule, error.remedy)


def executable(world: World, op: Op[Any], instance: Instance[Any], split: Split | Choice | None, stream: Any) -> Executable:
    """The plan of one call, agreed on and loaded.

    Collective where the problem is used for the first time, or asks for a kernel that is not loaded: a split may.
    """
    choice = _NO_CHOICE if split is None else choice_of(split)
    problem, rows = instance
    table: Table = world.table.get((problem, choice)) or table_of(world, problem, choice)
    key = table, rows
    known: Executable | None = world.executables.get(key)
    if known is not None:
        return known
    largest = table.ready.get(op.class_of(rows, choice.split))
    plan = _made_ready(world, op, instance, choice, table, stream) if largest is None else largest.of_rows(rows)
    assert table.prepared is not None, "what is ready was agreed on"
    made = world.problems.executable(table.prepared, plan, rows, table.schedule)
    return keep(world.executables, key, made, _MAX_EXECUTABLES)


def executable_of_class(world: World, table: Table, largest: Any, rows: int) -> Executable:
    """``executable`` of a class of ``table.ready``, whose plans have ``sizes_of``: the plan of these rows is not made."""
    known: Executable | None = world.executables.get((table, rows))
    if known is not None:
        return known
    assert table.prepared is not None, "what is ready was agreed on"
    made = world.problems.executable(table.prepared, largest, rows, table.schedule, largest.sizes_of(rows))
    return keep(world.executables, (table, rows), made, _MAX_EXECUTABLES)


def keep(known: OrderedDict[Any, Any], key: Hashable, value: T, most: int) -> T:
    """Keep what was worked out for ``key``; of more than ``most`` the oldest goes."""
    if len(known) >= most:
        known.popitem(last=False)
    known[key] = value
    return value


def _made_ready(world: World, op: Op[Any], instance: Instance[Any], choice: Choice, table: Table, stream: Any) -> Plan:
    """The plan of a call whose class was not ready: now it is, if there is memory for all of its sizes."""
    plan: Plan = plan_for(world, op, instance, choice, table)
    problems = world.problems
    if table.prepared is None:
        table.prepared = problems.find(instance.problem)
    if table.prepared is None or not problems.has(plan.spec):
        table.prepared = prepare(world, op, instance, choice, stream)
    if op.by_rows:
        of_class = op.class_of(instance.rows, choice.split)
        with contextlib.suppress(ArgumentError):
            problems.reserve(table.plans[of_class])
            table.ready[of_class] = table.plans[of_class]
            return plan
    problems.reserve(plan)
    return plan


def reserve(world: World, op: Op[Any], problem: Hashable, choice: Choice, rows: Iterable[int]) -> int:
    """Set aside the memory of calls of these numbers of rows, of a problem that was prepared for them. Returns the most workspace of any.

    Their classes are ready then, if they name their class.
    """
    table, plans = table_of(world, problem, choice), {number: plan_for(world, op, Instance(problem, number), choice) for number in rows}
    # The largest first: then an error says what all need, and the staging area is made once.
    for plan in sorted(plans.values(), key=lambda plan: -plan.workspace_bytes - plan.staging_bytes):
        world.problems.reserve(plan)
    for number, plan in plans.items():
        if op.by_rows and number == op.class_of(number, choice.split) and world.problems.has(plan.spec):
            table.ready[number] = plan
    return max(int(plan.workspace_bytes) for plan in plans.values())


def prepare(world: World, op: Op[Any], instance: Instance[Any], choice: Choice, stream: Any, max_rows: int | None = None) -> Prepared:
    """Agree on a problem and load its kernels, for calls of up to ``max_rows`` rows. Collective, unless all of it is there.

    ``max_rows``: None means as many as the heap has room for, where kernels are compiled ahead (target cuda); where the host's compiler
    takes seconds for each (target cpu) it means this call's kernel alone, and others are compiled when a call asks for them.
    """
    problem, rows = instance
    plans = {rows: plan_for(world, op, instance, choice)}
    if op.by_rows and (max_rows is not None or world.backend.compiles_ahead):
        for number in examined(MOST_ROWS // world.size if max_rows is None else max_rows):
            try:
                plan = plan_for(world, op, Instance(problem, number), choice)
            except ArgumentError:  # a split that fits this call may not fit others, which will say so
                if max_rows is not None:
                    raise
                continue
            # More rows may need less of the heap, where they are done in another way: those are prepared, too.
            if max_rows is not None or plan.workspace_bytes + plan.staging_bytes <= world.heap_bytes:
                plans[number] = plan

    def plan_of(number: int, schedule: int) -> Plan | None:
        try:
            split, tiling = world.schedules.get(schedule, (None, None))
            found: Plan = plan_for(world, op, Instance(problem, number), Choice(split, choice.specialize, tiling))
        except ArgumentError:
            return None
        return found

    grids: dict[KernelSpec, int] = {}
    for plan in plans.values():
        grids[plan.spec] = max(plan.grid, grids.get(plan.spec, 0))
    table = table_of(world, problem, choice)
    if table.file and len(table.untuned) > table.recalled and world.local_rank == 0:
        remembered.keep(table.file, table.untuned)
    table.prepared = world.problems.prepare(problem, title_of(plans[rows]), grids, plan_of, stream)
    for plan in plans.values():
        plan.of_rows(0)  # works out what plans of a class have in common: not in the first call of each class
    return table.prepared
