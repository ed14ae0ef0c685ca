"""``mk.tune``: measure how many SMs each role should have for one problem, and remember it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mkernel import env
from mkernel.errors import ArgumentError
from mkernel.ops.call import ask, call, stream_of
from mkernel.ops.op import find
from mkernel.ops.schedule import executable, tuning_name
from mkernel.planner.predict import predict
from mkernel.planner.prediction import BEHIND
from mkernel.planner.row_classes import span
from mkernel.planner.split import COMMUNICATION_ROLES, Split
from mkernel.planner.split_search import search
from mkernel.runtime import current, progress
from mkernel.runtime import tuning_cache as tuned
from mkernel.runtime.pictures.barchart import Bar, draw

if TYPE_CHECKING:
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["Trial", "TuneResult", "tune", "tune_calls"]

Call = Callable[[], object]

_LEAD = 2  # calls in front of the timed ones: every call waits for all ranks, so these bring them into step
_BATCH = 2, 200  # calls that are timed together: at least, and at most
_TIMES = "times of tuning"  # what ranks exchange
_BATCH_MS = 10.0  # how long a batch should take, so that its ends do not count


class Trial(NamedTuple):
    """One split, measured beside the others of its ``round``: milliseconds per call, of the slowest rank."""

    round: int
    split: Split
    median: float
    fastest: float
    slowest: float


@dataclasses.dataclass(frozen=True)
class TuneResult:
    """What ``tune`` found; in a notebook it shows itself.

    Attributes
    ----------
    best
        SMs per role: what calls with ``split=None`` use from now on.
    default
        What mkernel chooses without tuning.
    table
        Every measurement. Times of different rounds were taken at different times: compare inside a round.

    Examples
    --------
    >>> import mkernel as mk
    >>> split = mk.Split(2, 2, 0, 0)
    >>> result = mk.TuneResult("allgather_gemm", "a title", split, split, ())
    >>> result.best == result.default
    True
    """

    op: str
    title: str
    best: Split
    default: Split
    table: tuple[Trial, ...]

    def __str__(self) -> str:
        head = ["round", *COMMUNICATION_ROLES, "ms", "fastest", "slowest"]
        rows = [head, *([*map(str, (t.round, *_roles(t.split))), *(f"{ms:.4f}" for ms in t[2:])] for t in self.table)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        names = {"best": self.best, "default": self.default}
        marks = ["", *("  " + ", ".join(name for name, split in names.items() if t.split == split) for t in self.table)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([self.title, *((line + mark).rstrip() for line, mark in zip(lines, marks, strict=True))])

    def plot(self, path: str | Path | None = None) -> TuneResult:
        """Draw every measurement as a bar: SVG to ``path``, or, without one, in the notebook cell that returns this result."""
        if path is not None:
            Path(path).write_text(self._repr_svg_(), encoding="utf-8")
        return self

    def _repr_svg_(self) -> str:
        bars = []
        for trial in self.table:
            colour = "#54a24b" if trial.split == self.best else "#4c78a8" if trial.split == self.default else "#c9c9c9"
            label = ", ".join(f"{role} {sms}" for role, sms in zip(COMMUNICATION_ROLES, _roles(trial.split), strict=True))
            bars.append(Bar(trial.round, label, trial.median, trial.fastest, trial.slowest, colour))
        return draw(f"{self.title}\n(green: best, blue: default; lines from fastest to slowest)", bars)


def tune(
    op: str,
    *arrays: Array,
    world: World | None = None,
    out: Any = None,
    stream: Any = None,
    samples: int = 7,
    save: bool | None = None,
    **options: Any,
) -> TuneResult:
    """Measure splits of the SMs between the roles for one problem, and use the fastest for it from now on.

    Takes the arguments of the op itself, without ``split``, and calls it many times, back to back, on these arrays. Calls of this world
    with the same problem (dims but for the rows, dtype, layout, options), rows of the same class (about as many: docs/planner.md) and
    ``split=None``, or with roles left at None, then use what was found; so do later worlds that start with the same cache folder, on the
    same kind of device, with the same shape, transport and device code. No bit of any result changes by tuning. Captured graphs stay as
    they are.

    Parameters
    ----------
    op
        Name of the op, such as ``"allgather_gemm"``.
    out
        Where the op puts its result; None: a new array in every call.
    samples
        Batches of calls per split, taken in turn with the other splits.
    save
        Whether later worlds shall know. Default: on GPUs; the times of target cpu, and of ranks that share a GPU, say nothing about speed.

    Returns
    -------
    TuneResult
        The same on every rank.

    Notes
    -----
    Collective, blocks the host: some seconds, most of them to compile one kernel per split where the split is compiled in
    (``mk.init(specialize=)``). Not capturable. A split replaces another only
    if it takes 1 % less, and in the end again than mkernel's own choice in a measurement of the two alone. Operands that fit the
    L2 cache stay there from call to call. The kernels of all splits stay loaded as long as the world is open.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     a = np.ones((16, 64), ml_dtypes.bfloat16)
    ...     b = np.ones((64, 8), ml_dtypes.bfloat16)
    ...     return mk.tune("allgather_gemm", a, b, samples=1).best.total
    >>> mk.launch(rank, ranks=2, target="cpu", max_sms=2)
    [2, 2]

    Raises
    ------
    ArgumentError, MismatchError, CompileError, TimeoutError, PeerLostError, TransportError
        As the op itself.

    The algorithm: coordinate descent over the roles (mkernel/planner/split_search.py). It begins with the splits that the cost model
    predicts to be fastest (docs/model.md).
    """
    of, w = find(op), current.current(world)
    w.check()
    arrays, given = of.all_operands(arrays), of.option_values(options)

    def calls_with(split: Split) -> list[Call]:
        return [functools.partial(call, of, arrays, given, world=w, out=out, split=split, stream=stream)]

    return tune_calls(op, arrays, calls_with, world=w, stream=stream, samples=samples, save=save, **options)


def tune_calls(
    op: str,
    arrays: Sequence[Any],
    calls_with: Callable[[Split], Sequence[Call]],
    *,
    world: World,
    stream: Any = None,
    samples: int = 7,
    save: bool | None = None,
    **options: Any,
) -> TuneResult:
    """``tune``, on calls of one's own for each split, which are made in turn: on several sets of arrays like ``arrays``, say."""
    of, backend = find(op), world.backend
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ArgumentError("samples", samples, "must be a positive integer")
    if not (save is None or isinstance(save, bool)):
        raise ArgumentError("save", save, "must be True, False or None")
    queue = stream_of(world, arrays, stream)
    if backend.capturing(queue):
        raise ArgumentError("stream", stream, "is being captured, and tuning measures", "tune before the capture")
    _, instance = ask(world, of, of.all_operands(arrays), of.option_values(options))

    def ready(split: Split) -> Sequence[Call]:
        executable(world, of, instance, split, queue)
        return calls_with(split)

    def measure(calls: Sequence[Sequence[Call]]) -> list[list[float]]:
        return _measure(world, calls, samples, queue)

    with progress.steps(f"tuning {op}", None):
        seen = _search(world, lambda split: of.make_plan(*instance, backend.sm_count, split), of.tunable, ready, measure, _predicted(world))
    result = TuneResult(op, next(iter(seen.plan.describe().splitlines())), seen.plan.split, seen.default, tuple(seen.trials))
    found = dataclasses.replace(result.best, compute=None) if result.best != result.default else None
    key = tuning_name(*instance)
    others = {other: split for other, split in world.tuned.items() if other != key}
    world.set_tuned(others if found is None else {**others, key: found})
    if save is None:
        save = world.target == "cuda" and not env.SHARE_GPUS.get()
    if save and world.rank == 0:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        times = [{"round": t.round, "split": dataclasses.asdict(t.split), "ms": t.median} for t in result.table]
        per_row = world.size // of.plan_rows(world.size, world.size)  # rows of the first operand per row of a plan
        rows = [per_row * number for number in (span(instance.rows)[0], span(instance.rows)[-1])]
        tuned.save(world.tuning_key, key, found, op=op, asked=dataclasses.asdict(instance.problem), rows=rows, date=date, times=times)
    return result


class _Seen(NamedTuple):
    plan: Any
    default: Split
    trials: list[Trial]


def _search(
    world: World,
    plan_for: Callable[[Split | None], Any],
    roles: Sequence[str],
    ready: Callable[[Split], Sequence[Call]],
    measure: Callable[[Sequence[Sequence[Call]]], list[list[float]]],
    predicted: Callable[[Any], float] | None = None,
) -> _Seen:
    """Drive the search: every rank measures the same and learns the same times."""
    steps, trials, default = search(plan_for, roles, predicted), [], plan_for(None).split
    try:
        plans = next(steps)
        for round_ in range(len(roles) + 2):
            for plan in plans[world.rank :: world.size]:  # the ranks share the work of compiling
                with contextlib.suppress(Exception):  # loading meets it again, and tells the other ranks
                    world.backend.compile(plan.spec)
            times = measure([ready(plan.split) for plan in plans])
            measured = [Trial(round_, plan.split, statistics.median(ms), min(ms), max(ms)) for plan, ms in zip(plans, times, strict=True)]
            trials += measured
            plans = steps.send([trial.median for trial in measured])
    except StopIteration as end:
        return _Seen(end.value, default, trials)
    raise AssertionError("a search has a first round, one per role, and a last one")


def _predicted(world: World) -> Callable[[Any], float] | None:
    """Seconds of a plan by the cost model, where it describes this world's machine: on GPUs, or where a machine is named."""
    if world.target != "cuda" and not env.MACHINE.is_set():
        return None

    def seconds(plan: Any) -> float:
        prediction = predict(plan, world.machine, BEHIND)
        return math.inf if prediction is None else prediction.seconds  # of some ops nothing is known without a call's sizes

    return seconds


def _measure(world: World, calls: Sequence[Sequence[Call]], samples: int, queue: Any) -> list[list[float]]:
    """Milliseconds per call, of the rank whose median is the largest; the splits take turns, so that a GPU that gets warm favours none."""

    def batch(some: Sequence[Call], count: int) -> float:
        world.barrier()
        return world.backend.milliseconds(queue, [some[i % len(some)] for i in range(_LEAD + count)], _LEAD) / count

    fewest, most = _BATCH
    once = max(world.exchange(_TIMES, max(batch(some, 1) for some in calls)))
    count = min(most, max(fewest, math.ceil(_BATCH_MS / max(once, 1e-6))))
    mine: list[list[float]] = [[] for _ in calls]
    for turn in range(samples):
        order = range(len(calls))
        for i in order if turn % 2 == 0 else reversed(order):
            mine[i].append(batch(calls[i], count))
    by_rank = world.exchange(_TIMES, mine)
    return [max((of_rank[i] for of_rank in by_rank), key=statistics.median) for i in range(len(calls))]


def _roles(split: Split) -> list[int]:
    return [getattr(split, role) or 0 for role in COMMUNICATION_ROLES]
