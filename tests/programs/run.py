"""Runs a program on target cpu, checks every element, and makes a failing program shorter."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

import mkernel as mk
from mkernel import env
from mkernel.errors import ArgumentError, CompileError
from mkernel.transport import emulated
from tests.programs.calls import all_rows
from tests.programs.memory import Memory, host_inputs, host_plane, spilled
from tests.programs.program import Network, Program, Step
from tests.virtual_time import sleep

__all__ = ["Failure", "problem_of", "run", "script", "shorter"]

_HEAP_BYTES = 256 << 20
_FAR = 0.5  # an element so far off is not rounding


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong. ``kind``: "wrong" (a result) or "error" (an exception, or a complaint of target cpu)."""

    program: Program
    scheduler_seed: int
    kind: str
    step: int | None  # number of the step
    text: str

    def __str__(self) -> str:
        where = f"step {self.step}" if self.step is not None else "some step"
        head = f"{self.kind} in {where}, program seed {self.program.seed}, scheduler seed {self.scheduler_seed}"
        return f"{head}: {self.text}\n{self.program}"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Result:
    c: NDArray[Any]
    spilled: bool
    gathered: NDArray[Any] | None


def run(program: Program, scheduler_seed: int, timeout: float = 5.0) -> Failure | None:
    """Run it on target cpu; the first thing that is wrong, or None. ``timeout``: of the world, in virtual seconds."""
    at = [-1] * program.topology.size
    network = program.network
    faults = emulated.Faults(seed=scheduler_seed, delay_us=network.delay_us, reorder_us=network.reorder_us, ack_us=network.ack_us)
    emulated_by: dict[str, object] = {"MKERNEL_EMULATED_ENGINE": "host", "MKERNEL_EMULATED_HOST_SIGNALS": int(network.host_signals)}
    if network.sms:
        emulated_by = {
            "MKERNEL_EMULATED_ENGINE": "sms",
            "MKERNEL_EMULATED_LATENCY_US": 5.0 + network.delay_us,
            "MKERNEL_EMULATED_REORDER_US": network.reorder_us,
            "MKERNEL_CPU_SEED": scheduler_seed,  # of the order, too
        }
    with (
        env.override(MKERNEL_CPU_SMS=program.sms, MKERNEL_PLANNER=program.planner, **emulated_by),
        mock.patch.object(emulated, "Faults", lambda: faults),
        mock.patch("mkernel.planner.gemm._PUT_BYTES", (program.put_bytes, program.put_bytes)),
    ):
        shape = program.topology
        options = {"heap_bytes": _HEAP_BYTES, "timeout": timeout}
        try:
            by_rank = mk.launch(_rank, shape.size, shape.ranks_per_node, "cpu", (program, at), seed=scheduler_seed, **options)
        except (ArgumentError, CompileError):
            raise  # the program itself is at fault
        except mk.Error as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            return Failure(program, scheduler_seed, "error", max(at), f"{type(error).__name__}: {error}\n{notes}")
    for i, step in enumerate(program.steps):
        text = problem_of(program, step, [results[i] for results in by_rank])
        if text is not None:
            return Failure(program, scheduler_seed, "wrong", step.number, text)
    return None


def _rank(world: Any, program: Program, at: list[int]) -> list[_Result]:
    memory = Memory(world, program, host_plane)
    if program.prepared:
        for step in program.steps:  # those that follow with the same plan find it
            if step.planned:
                step.call.plan(world, list(memory.operands(step).values()), step.max_rows)
    agreed = world.problems.collectives
    results = []
    for step in program.steps:
        at[world.rank] = step.number
        operands = memory.operands(step)
        for name, values in host_inputs(program, step, world.rank).items():
            operands[name][...] = values
        out, gathered = memory.out(step), memory.gathered(step)
        for rank, cta, after, turns in step.late:
            if rank == world.rank:
                world.backend.thread_ranks.hold(rank, turns, after, None if cta < 0 else cta)
        if step.asleep is not None and step.asleep[0] == world.rank:
            sleep(world, step.asleep[1])
        keep = {} if gathered is None else {"gathered": gathered}
        c = step.call.run(list(operands.values()), world=world, out=out, **keep)
        assert out is None or c is out, "out is returned as given"
        results.append(_Result(np.array(c), spilled(out), None if gathered is None else gathered.view(np.uint16).copy()))
        memory.operands(step)  # the call has ended: its inputs may be overwritten
        if step.barrier:
            world.barrier()
    if program.prepared and _all_planned(program.steps):
        assert world.problems.collectives == agreed, "a call of a size that was planned for has asked the other ranks"
    return results


def _all_planned(steps: Sequence[Step]) -> bool:
    """Whether each step has a plan, or another's plan covers it: not so in every shortened program."""
    most: dict[object, int] = {}
    for step in steps:
        most[step.call.sized(1)] = max(most.get(step.call.sized(1), -1), step.max_rows or -1)
    return all(step.planned or step.call.sizes <= most[step.call.sized(1)] for step in steps)


def problem_of(program: Program, step: Step, results: Sequence[_Result]) -> str | None:
    """What is wrong with the results of a step, by rank."""
    shape = program.topology
    inputs = functools.lru_cache(maxsize=None)(functools.partial(host_inputs, program, step))
    for rank, result in enumerate(results):
        array = step.call.result(shape, rank)
        if result.c.shape != (array.rows, array.columns) or result.c.dtype.name != array.dtype:
            return f"rank {rank}: the result is {result.c.shape} {result.c.dtype}"
        if result.spilled:
            return f"rank {rank}: something was written between the rows of out"
        if result.gathered is not None and result.gathered.tobytes() != (sent := all_rows(np, shape, inputs)).tobytes():
            return f"rank {rank}: other rows are gathered than were sent{_where(result.gathered, sent)}"
        if step.call.same_on_all_ranks and rank > 0:
            if result.c.tobytes() != results[0].c.tobytes():
                return f"ranks 0 and {rank} have different bits{_where(result.c, results[0].c)}"
            continue
        worst = step.call.worst(np, shape, rank, inputs, result.c)
        if not worst <= 1.0:
            return f"rank {rank}: {worst:.3g} times the bound{_nans(result.c)}"
    return None


def _nans(c: NDArray[Any]) -> str:
    rows, columns = np.nonzero(~np.isfinite(c.astype(np.float32)))
    if not len(rows):
        return ""
    return f"; {len(rows)} of {c.size} elements are not finite, in rows {rows.min()}-{rows.max()}, columns {columns.min()}-{columns.max()}"


def _where(c: NDArray[Any], other: NDArray[Any]) -> str:
    rows, columns = np.nonzero(c.view(np.uint16) != other.view(np.uint16))
    return f" in {len(rows)} of {c.size} elements, rows {rows.min()}-{rows.max()}, columns {columns.min()}-{columns.max()}"


# ---- shorter programs


def shorter(
    failure: Failure, seeds: Iterable[int] = (), attempt: Callable[[Program, int], Failure | None] = run, most: int = 300
) -> Failure:
    """A failure of as few and as plain steps as are found: what still fails, with this scheduler seed or one of ``seeds``, is kept.

    ``most``: runs.
    """
    tried = [failure.scheduler_seed, *seeds]
    runs = 0
    improved = True
    while improved:
        improved = False
        for candidate in _simpler(failure.program):
            found = None
            for seed in tried:
                if runs >= most:
                    return failure
                runs += 1
                found = attempt(candidate, seed)
                if found is not None:
                    break
            if found is not None:
                failure, improved = found, True
                break
    return failure


def _simpler(program: Program) -> Iterator[Program]:
    """Programs with less in them, those with least first."""
    steps = program.steps
    size = len(steps) // 2
    while size >= 1:
        for begin in range(0, len(steps), size):
            rest = steps[:begin] + steps[begin + size :]
            if rest:
                yield dataclasses.replace(program, steps=rest)
        size //= 2
    if program.network != Network():
        yield dataclasses.replace(program, network=Network())
    plain: list[dict[str, Any]] = [{"late": ()}, {"asleep": None}, {"barrier": False}, {"padded": ()}, {"out": "none"}]
    plain.append({"gathered": "none"})
    for change in plain:
        for i, step in enumerate(steps):
            simple = dataclasses.replace(step, **change)
            if simple != step:
                yield dataclasses.replace(program, steps=(*steps[:i], simple, *steps[i + 1 :]))


def script(failure: Failure) -> str:
    """A Python script that runs the failing program again; from the root of a checkout."""
    program = failure.program
    steps = "".join(f"        {step!r},\n" for step in program.steps)
    rest = ", ".join(
        f"{field.name}={getattr(program, field.name)!r}"
        for field in dataclasses.fields(program)
        if field.name not in ("world", "seed", "steps") and getattr(program, field.name) != field.default
    )
    return f'''"""{failure.kind}: run with PYTHONPATH=. from the root of a checkout."""

import sys

from mkernel import Split  # noqa: F401
from tests.programs.calls import *  # noqa: F403
from tests.programs.program import Network, Program, Step  # noqa: F401
from tests.programs.run import run

PROGRAM = Program(
    {program.world!r},
    {program.seed},
    (
{steps}    ),
    {rest}
)
failure = run(PROGRAM, {failure.scheduler_seed})
print(failure or "all right")
sys.exit(failure is not None)
'''
