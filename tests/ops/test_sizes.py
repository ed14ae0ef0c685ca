"""A program may change the number of rows with every call: what that costs, and that nothing else depends on it.

Most of it on a device without kernels (sizes.py): what the host does is what is tested, over many calls. ``test_sizes_cpu.py`` has the
same on target cpu, with every element checked.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import abi
from mkernel.errors import ArgumentError, Error
from mkernel.planner.row_classes import classes
from mkernel.runtime.failure import read_host_block
from tests.ops.body import Case, topology
from tests.ops.sizes import OPS, Caller, counted, draw_case, draw_rows, mismatch_of, ranks, wrongly_told

WORLDS = ("1x1", "1x2", "2x2")
CALLS = 40
IDS = [f"{op}{f' {algorithm}' if algorithm else ''}" for op, algorithm in OPS]
of_all_ops = pytest.mark.parametrize(("op", "algorithm"), OPS, ids=IDS)


def uses(seed: int, most: int, count: int = CALLS) -> list[dict[str, Any]]:
    """The same calls on every rank; where their arrays lie differs, see ``places``."""
    rng = np.random.default_rng([seed, 1])
    return [{"rows": draw_rows(rng, most)} for _ in range(count)]


def places(world: Any, seed: int) -> Any:
    """Where the arrays of a rank's calls lie: on the heap or not, the result given or not."""
    rng = np.random.default_rng([seed, 2, world.rank])
    while True:
        yield {"on_heap": bool(rng.integers(2)), "given": bool(rng.integers(2))}


# ---- what a size costs


def _after_a_plan(world: Any, case: Case, seed: int, most: int) -> dict[str, int]:
    caller = Caller(world, case, most)
    planned = caller.plan(int(np.random.default_rng(seed).integers(most + 1)), most)
    where = places(world, seed)
    with counted(world) as found:
        for i, use in enumerate(uses(seed, most)):
            caller.call(**use, **next(where), planned=planned if i % 2 else None)
    assert world.call_number == CALLS
    world.barrier()
    return dict(found)


@of_all_ops
@pytest.mark.parametrize("world", WORLDS)
def test_after_a_plan_no_size_costs_anything(rng: np.random.Generator, world: str, op: str, algorithm: str | None) -> None:
    """No collective, compilation, loading, allocation, not even on the heap, and nobody waits for the device."""
    for _ in range(3):
        case, seed = draw_case(rng, op, algorithm), int(rng.integers(1 << 31))
        most = int(2 ** rng.uniform(0, 11))
        assert ranks(_after_a_plan, world, case, seed, most) == [{}] * topology(world).size, (case, seed, most)


def _after_a_call(world: Any, case: Case, seed: int, most: int) -> dict[str, int]:
    caller, where = Caller(world, case, most), places(world, seed)
    first, *others = uses(seed, most)
    caller.call(**first, **next(where))
    with counted(world) as found:
        for use in others:
            caller.call(**use, **next(where))
    world.barrier()
    del found["heap"]  # staging grows with what calls need
    return dict(found)


@of_all_ops
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.drawn(3)
def test_the_first_call_prepares_all_sizes(rng: np.random.Generator, world: str, op: str, algorithm: str | None) -> None:
    """Where kernels are compiled ahead. The first call may be of any size, also of none."""
    for _ in range(3):
        case, seed = draw_case(rng, op, algorithm), int(rng.integers(1 << 31))
        most = int(2 ** rng.uniform(0, 11))
        assert ranks(_after_a_call, world, case, seed, most) == [{}] * topology(world).size, (case, seed, most)


def _larger_but_less(world: Any, case: Case, rows: tuple[int, ...]) -> dict[str, int]:
    caller = Caller(world, case, max(rows))
    caller.call(1)
    with counted(world) as found:
        for one in rows:
            caller.call(one)
    return dict(found)


def test_more_rows_may_need_less_of_the_heap() -> None:
    """An all-reduce in one step sends to everyone; one of more rows, in two steps, takes less room and another kernel, which is there."""
    case = Case("bfloat16", 8, 1024, op="gemm_allreduce", partials="float32")
    assert ranks(_larger_but_less, "1x2", case, (128, 1040, 1100), heap_bytes=6 << 20) == [{}] * 2


# ---- nothing depends on what was prepared


def _chosen(world: Any, case: Case, seed: int, most: int, max_rows: int | None, specialize: str | None) -> list[Any]:
    caller = Caller(world, case, most)
    planned = None if max_rows is None and specialize is None else caller.plan(1, max_rows, specialize=specialize)
    for use in uses(seed, most):
        caller.call(**use, on_heap=world.rank % 2 == 0, planned=planned)
    world.barrier()
    launched = world.backend.launched[-CALLS:]
    constants = {"kN", "kK", "kIntraComm", "kInterSend", "kInterReduce"}
    return [(one.kernel.spec.name, {*one.kernel.spec.constants} if specialize is None else
             {(n, v) for n, v in one.kernel.spec.constants if n not in constants}, one.chosen) for one in launched]  # fmt: skip


@of_all_ops
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.drawn(3)
def test_a_call_is_the_same_whatever_was_prepared(rng: np.random.Generator, world: str, op: str, algorithm: str | None) -> None:
    """Kernel, grid, order, chunks, areas and flags under two ``max_rows``, and without a plan."""
    case, seed, most = draw_case(rng, op, algorithm), int(rng.integers(1 << 31)), int(rng.integers(200, 1500))
    first = ranks(_chosen, world, case, seed, most, most, None)
    for max_rows in (int(most * rng.uniform(1, 4)), None):
        assert ranks(_chosen, world, case, seed, most, max_rows, None) == first, (case, seed, most, max_rows)


@of_all_ops
def test_what_is_compiled_in_changes_no_choice(rng: np.random.Generator, op: str, algorithm: str | None) -> None:
    case, seed, most = draw_case(rng, op, algorithm), int(rng.integers(1 << 31)), int(rng.integers(200, 1500))
    world = str(rng.choice(WORLDS))
    first = ranks(_chosen, world, case, seed, most, most, "none")
    for specialize in ("all", "n", "k", "split"):
        assert ranks(_chosen, world, case, seed, most, most, specialize) == first, (world, case, seed, most, specialize)


# ---- ranks that disagree

KINDS = ("rows", "split", "layout", "dtype", "k")


def other(case: Case, kind: str) -> Case:
    changes: dict[str, Any] = {
        "layout": {"row_major": not case.row_major},
        "dtype": {"dtype": "float16" if case.dtype == "bfloat16" else "bfloat16"},
        "k": {"k": case.k + 8},
    }
    return dataclasses.replace(case, **changes.get(kind, {}))


MOST = 600


def asked_for(seed: int, kind: str, at: int) -> tuple[list[int], int]:
    """The rows of each call of a sequence, and those of the call that is planted as the last."""
    rng = np.random.default_rng([seed, 3])
    rows = [int(one) for one in rng.integers(1, MOST, at + 1)]
    near = rows[at] + int(rng.choice((-1, 1, 16, 128)))
    return rows, rows[at] if kind != "rows" else near if near <= MOST else MOST


def _planted(world: Any, case: Case, seed: int, kind: str, who: int, at: int, known: bool) -> tuple[str, bool]:
    caller, wrong = Caller(world, case, MOST), Caller(world, other(case, kind), MOST)
    sequence, rows_of_wrong = asked_for(seed, kind, at)
    split = mk.Split(compute=2) if kind == "split" else None
    caller.plan(1, MOST)
    if known:
        wrong.plan(1, MOST)
        if kind == "split":
            caller.call(sequence[at], split=split)
    world.barrier()
    where, calls = places(world, seed), world.call_number + at + 1
    try:
        for rows in sequence[:at]:
            caller.call(rows, **next(where))
        if world.rank == who:
            wrong.call(rows_of_wrong, split=split)
        else:
            caller.call(sequence[at], **next(where))
        world.barrier()
    except Error as error:
        return mismatch_of(world, error, calls)
    return "no error", False


def check_planted(rng: np.random.Generator, world: str, op: str, algorithm: str | None, kind: str, known: bool) -> None:
    seed, size, case = int(rng.integers(1 << 31)), topology(world).size, draw_case(rng, op, algorithm)
    who, at = int(rng.integers(size)), int(rng.integers(12))
    found = ranks(_planted, world, case, seed, kind, who, at, known)
    (*_, rows), wrong = asked_for(seed, kind, at)
    told = [(case, rows) if rank != who else (other(case, kind), wrong) for rank in range(size)]
    titles = [f"{op}: a ({one.rows_of_a(rows, size)}, {one.k})" for one, rows in told]
    if not known:  # who asks for an agreement, and one of those who never come to it
        found = [(text, False) for text, _ in found]
    assert wrongly_told(found, titles) == [], (world, case, seed, kind, who, at)


@pytest.mark.parametrize("kind", KINDS)
@of_all_ops
def test_a_rank_that_asks_for_something_else_is_found(rng: np.random.Generator, op: str, algorithm: str | None, kind: str) -> None:
    """Any rank, at any place in a sequence of calls: all ranks learn of it, and what each has asked for."""
    check_planted(rng, str(rng.choice(("1x2", "1x3"))), op, algorithm, kind, known=True)


@pytest.mark.parametrize("kind", ["layout", "dtype", "k"])
def test_a_rank_that_asks_for_a_new_problem_is_found(rng: np.random.Generator, kind: str) -> None:
    """It waits for an agreement to which the others never come."""
    check_planted(rng, str(rng.choice(("1x2", "1x3", "2x2"))), *OPS[rng.integers(len(OPS))], kind, known=False)


# ---- growth


def _grow(world: Any, case: Case, step: int, most: int) -> tuple[int, int]:
    """The rows that still run, and the size of the heap that the next ones need."""
    caller = Caller(world, case, 1)  # no plane of it on the heap
    caller.out, caller.planes[False] = (np.empty(0, np.uint16),) * 2
    for rows in range(step, most, step):
        case_rows = case.rows_of_a(rows, world.size) * case.k
        caller.planes[False] = np.zeros(case_rows + 8, np.float16)[:case_rows].view(np.uint16).view(caller.b.dtype)
        try:
            caller.call(rows)
        except ArgumentError as error:
            found = re.search(r"mk\.init\(heap_bytes=(\d+)\)", str(error))
            assert error.argument == "heap_bytes"
            assert found, str(error)
            caller.call(rows - step)  # the world goes on
            world.barrier()
            return rows - step, int(found[1])
    return most, 0


@pytest.mark.parametrize("world", ["1x2", "2x2"])
@pytest.mark.parametrize("op", ["allgather_gemm", "gemm_reduce_scatter"])
def test_rows_grow_to_what_the_heap_holds(rng: np.random.Generator, world: str, op: str) -> None:
    """One step further is an error on all ranks alike that says which heap it takes; and with that heap it runs."""
    case, step, size = draw_case(rng, op, None, 64), int(rng.integers(1, 4)) * 40, topology(world).size
    case = Case(case.dtype, 256, 64, case.row_major, op=op, partials=case.partials)
    results = ranks(_grow, world, case, step, 100_000, heap_bytes=1 << 20)
    assert results == [results[0]] * size
    rows, needed = results[0]
    assert rows >= step
    again = ranks(_grow, world, case, step, rows + 2 * step, heap_bytes=needed)
    assert again == [again[0]] * size
    assert again[0][0] >= rows + step, (case, step, rows, needed)
    unit = ranks(lambda w: w.heap_bytes, "1x1", heap_bytes=1)[0]
    less = ranks(_grow, world, case, step, rows + 2 * step, heap_bytes=(needed - 1) // unit * unit)
    assert less[0][0] <= rows, "it asks for no more than it needs"


class Model:
    """What of the heap is whose: workspace from the beginning, arrays, and the staging areas of calls."""

    def __init__(self, world: Any) -> None:
        self.world, self.arrays, self.workspace, self.staging = world, dict[int, tuple[int, Any]](), 0, dict[int, int]()

    def called(self, launched: Any, plan: Any) -> None:
        self.workspace = max(self.workspace, plan.workspace_bytes)
        if plan.staging_bytes:
            offset = launched.parameters.send_offset
            if self.world.rank % 2 == 0:  # whose operands are ordinary arrays
                self.staging[offset] = max(self.staging.get(offset, 0), plan.staging_bytes)

    def check(self) -> None:
        taken = [(0, self.workspace, "workspace"), *((at, at + size, "staging") for at, size in self.staging.items())]
        taken += [(at, at + size, f"array {number}") for number, (size, array) in self.arrays.items() for at in (self.at(array),)]
        for (_, end, one), (begin, _, next_) in itertools.pairwise(sorted(one for one in taken if one[0] != one[1])):
            assert end <= begin, f"{one} and {next_} overlap"
        assert all(end <= self.world.heap_bytes for _, end, _ in taken)

    def at(self, array: Any) -> int:
        at = self.world.heap_offset(array.ctypes.data, array.nbytes)
        assert at is not None
        return int(at)

    def contents(self) -> None:
        for number, (_, array) in self.arrays.items():
            assert (array == number % 251).all(), f"array {number} has changed"


def _mixed(world: Any, cases: list[Case], seed: int, steps: int) -> tuple[list[int], int]:
    rng, own = np.random.default_rng([seed, 4]), np.random.default_rng([seed, 5, world.rank])
    model, offsets, refused, most = Model(world), list[int](), 0, 400
    callers = [Caller(world, case, 1) for case in cases]
    for caller in callers:
        caller.planes[False] = np.zeros(caller.case.rows_of_a(most, world.size) * caller.case.k, caller.b.dtype)
        model.arrays[-1 - len(model.arrays)] = (caller.planes[True].nbytes, caller.planes[True])
    kept = {number: model.arrays.pop(number) for number in list(model.arrays)}  # of any contents
    drop, alive = list[int](), list[int]()
    for step in range(steps):
        what = rng.random()
        if what < 0.35:
            size = int(2 ** rng.uniform(0, 18.5))
            try:
                array = world.empty(size, "uint8")
            except ArgumentError:
                refused += 1
                continue
            array[...] = step % 251
            model.arrays[step] = (size, array)
            alive.append(step)
            offsets.append(model.at(array))
            del array
        elif what < 0.6 and alive:
            drop.append(alive.pop(rng.integers(len(alive))))  # by each rank when it likes
        else:
            caller, rows = callers[rng.integers(len(callers))], int(rng.integers(most))
            try:
                caller.call(rows, on_heap=False)
                model.called(world.backend.launched[-1], world._history[(world.call_number - 1) & 63].plan)
            except ArgumentError:
                refused += 1
        for number in [one for one in drop if own.random() < 0.3]:
            drop.remove(number)
            del model.arrays[number]
        model.arrays |= kept
        model.check()
        for number in kept:
            del model.arrays[number]
        model.contents()
        offsets.append(world.heap._allocator.workspace)
    world.barrier()
    return offsets, refused


@pytest.mark.parametrize("world", ["1x2", "2x2"])
def test_arrays_workspace_and_staging_never_overlap(rng: np.random.Generator, world: str) -> None:
    """Arrays come and go, on each rank in its own time, between calls of any size: who has which bytes is the same on all ranks."""
    refusals = 0
    for _ in range(4):
        seed = int(rng.integers(1 << 31))
        cases = [draw_case(rng, op, algorithm, 256) for op, algorithm in (OPS[i] for i in rng.integers(len(OPS), size=2))]
        cases.append(Case("bfloat16", 128, 8))
        found = ranks(_mixed, world, cases, seed, 120, heap_bytes=512 << 10)
        assert found == [found[0]] * len(found), (cases, seed)
        refusals += found[0][1]
    assert refusals, "the heap was never full: nothing was shown"


# ---- captures and reports


def _captured(world: Any, seed: int, sizes: int) -> list[str]:
    """Calls of many sizes are captured; then workspace and staging grow, arrays come; then all is replayed."""
    rng, model = np.random.default_rng([seed, 6]), Model(world)
    case, problems = Case("bfloat16", 64, 72), list[str]()
    caller = Caller(world, case, 1)
    caller.planes[False] = np.zeros(64 * 4096, caller.b.dtype)
    caller.plan(1)
    graph, plans = [], []
    for _ in range(sizes):
        caller.call(rows := int(rng.integers(1, 500)))
        graph.append(world.backend.launched[-1])
        plans.append(world._history[(world.call_number - 1) & 63].plan)
        assert plans[-1].rows == rows
        model.called(graph[-1], plans[-1])
    before = [world.heap._allocator.workspace, world.problems._staging.offset]
    for rows in (700, 1500, 3000, 4000):  # beyond what was captured
        array = world.empty(int(rng.integers(1, 1 << 16)), "uint8")
        array[...] = len(model.arrays)
        model.arrays[len(model.arrays)] = (array.nbytes, array)
        del array
        caller.call(rows)
        model.called(world.backend.launched[-1], world._history[(world.call_number - 1) & 63].plan)
        model.check()
    now = [world.heap._allocator.workspace, world.problems._staging.offset]
    assert now[0] > before[0]
    assert world.num_nodes == 1 or now[1] != before[1], "staging has grown, too"
    world.bound_calls.clear()  # forgotten, as after many other calls
    world.executables.clear()
    world.barrier()
    size = world.size
    for number in rng.permutation(sizes):  # a replay: the driver launches what was captured
        kept, plan = graph[number], plans[number]
        world.backend.launch(kept.kernel, None, kept.grid, type(kept.parameters).from_buffer_copy(kept.raw))
        parameters = kept.parameters
        end = parameters.gather_offset + size * plan.shard_bytes
        if end > world.heap._allocator.workspace or parameters.gather_offset != 0:
            problems.append(f"{plan.rows} rows: the gather buffer ends at {end}, outside the workspace")
        if world.num_nodes > 1 and world.rank % 2 == 0:
            inside = [at for at, length in model.staging.items() if at <= parameters.send_offset < at + length]
            if not inside:
                problems.append(f"{plan.rows} rows: staged at {parameters.send_offset}, which is no staging area")
        header, last = parameters.world, plan.flag_words - 1
        call = {"problem": header.problem, "rows": header.rows, "schedule": header.schedule}
        block = abi.HostBlock(**call, flag_kind=1, flag_index=last, rank=world.rank, peer=0, epoch=1, state=1)
        world._history[:] = [None] * len(world._history)
        told = read_host_block(block, timeout_ns=1, entry_timeout_ns=1, plan_of=world.problems.plan_of)
        if (
            told is None
            or plan.flag_name(world.rank, plan.flag_words - 1) not in told.message
            or f"a ({plan.rows}, 64)" not in told.message
        ):
            problems.append(f"{plan.rows} rows: a report says {told}")
    model.check()
    model.contents()
    world.backend.synchronize()  # replays of different calls on different ranks would disagree
    world.barrier()
    return problems


@pytest.mark.parametrize("world", ["1x2", "2x2"])
def test_captured_calls_stay_valid(rng: np.random.Generator, world: str) -> None:
    """What a replay reads and writes is still the workspace's and the staging area's, and its numbers still name the plan in reports."""
    seed = int(rng.integers(1 << 31))
    assert ranks(_captured, world, seed, 20) == [[]] * topology(world).size, seed


def _reports(world: Any, case: Case, seed: int) -> list[str]:
    """Numbers as kernels report them, of calls that are in no history."""
    rng, problems = np.random.default_rng([seed, 7]), list[str]()
    caller = Caller(world, case, 600)
    planned = caller.plan(1, 600)
    splits = [None, mk.Split(compute=2), mk.Split(compute=3)]
    for _ in range(30):
        rows, split = int(rng.integers(601)), splits[rng.integers(3)]
        caller.call(rows, split=split, planned=None if split else planned)
        header, plan = world.backend.launched[-1].parameters.world, world._history[(world.call_number - 1) & 63].plan
        world._history[:] = [None] * len(world._history)
        world.executables.clear()
        if world.problems.plan_of(header.problem, header.rows, header.schedule) != plan:
            problems.append(f"{rows} rows, {split}: another plan is reported")
    if world.problems.plan_of(17, 1, 0) is not None:
        problems.append("a problem that nobody has made")
    return problems


@of_all_ops
def test_reports_know_calls_without_history(rng: np.random.Generator, op: str, algorithm: str | None) -> None:
    case, seed = draw_case(rng, op, algorithm), int(rng.integers(1 << 31))
    for world in WORLDS:
        assert ranks(_reports, world, case, seed) == [[]] * topology(world).size, (world, case, seed)


# ---- what is asked of the table


def _plan_says(world: Any, case: Case, seed: int) -> None:
    rng = np.random.default_rng([seed, 8])
    most = int(rng.integers(1, 1500))
    caller = Caller(world, case, most)
    planned, per_row = caller.plan(0, most), case.rows_of_a(1, world.size)
    every = [planned.plan(rows * per_row).workspace_bytes for rows in (*(end for end in classes(most) if end <= most), most)]
    assert planned.workspace_bytes >= max(every)
    for rows in rng.integers(0, most + 1, 10):
        caller.call(int(rows), planned=planned)
        plan = world._history[(world.call_number - 1) & 63].plan
        assert planned.plan(int(rows) * per_row) == plan
        assert planned.split(int(rows) * per_row) == plan.split
        assert planned.describe(int(rows) * per_row) == plan.describe()
        assert plan.workspace_bytes <= planned.workspace_bytes <= world.heap._allocator.workspace
    with pytest.raises(ArgumentError, match="made for at most"):
        planned.describe((most + 1) * per_row)
    with pytest.raises(ArgumentError, match="made for at most"):
        planned.run(np.zeros(((most + 1) * per_row, case.k), caller.b.dtype), caller.b)
    if most > 1:
        with pytest.raises(ArgumentError, match="is less than the arrays have"):
            caller.plan(most, most - 1)
    world.barrier()


@of_all_ops
def test_a_plan_says_what_its_calls_do(rng: np.random.Generator, op: str, algorithm: str | None) -> None:
    case, seed = draw_case(rng, op, algorithm), int(rng.integers(1 << 31))
    ranks(_plan_says, str(rng.choice(WORLDS)), case, seed)
