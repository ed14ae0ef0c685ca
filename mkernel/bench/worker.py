"""One rank of a benchmark: it checks and times; rank 0 reports."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mkernel import env
from mkernel.bench import machine
from mkernel.bench.baselines import Baselines, NoBaselines, open_baselines
from mkernel.bench.cases import Case, ops
from mkernel.bench.cases.base import tilings_of
from mkernel.bench.peers import fresh_seed, gather, worst_reason
from mkernel.bench.puts import PutsPlan, puts
from mkernel.bench.report import ALONE, ENGINE, FUSED, GRAPH, MODES, SOLO, TUNED, Report, Row, rivals, told
from mkernel.bench.stats import LINK_GB_PER_S, Measurement, milliseconds, slowest
from mkernel.bench.summary import slower_than
from mkernel.bench.timing import BATCH, CudaTiming, open_timing, require_speed
from mkernel.errors import ArgumentError
from mkernel.ops.split_search import tune_calls
from mkernel.planner.machine import asked_or_known, network_of
from mkernel.planner.prediction import ALONE as ISOLATED
from mkernel.planner.prediction import BATCH as BACK_TO_BACK

if TYPE_CHECKING:
    from mkernel.bench.timing import Call, Taken, Timing

__all__ = ["Settings", "measure"]

_FEWEST_SAMPLES = 3
_LEAST_SECONDS, _USUAL_FLOPS = 30e-6, 500e12  # of a call, for guesses


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run was asked for."""

    op: str
    sizes: tuple[str, ...]
    dtype: str
    samples: int
    splits: Mapping[str, Mapping[str, int] | None]  # contestant -> SMs by role; None: mkernel's choice
    without: tuple[str, ...]  # columns left out
    allow_cpu: bool
    network_gb_per_s: float
    command: str
    solo: Mapping[str, Mapping[str, Any]]  # local GEMM "MxNxK" -> mode -> measurement in a world of one
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)  # keyword arguments of the op
    cooldown_ms: float = 0.0  # before every sample
    seconds: float | None = None  # that the samples of a shape may take, about; None: as long as they take
    again: float | None = None  # rows that take more than so much of NCCL+cuBLAS are measured again, with more samples, which count
    again_samples: int = 30
    graph: bool = False  # also calls that are replayed from a CUDA graph


def measure(
    world: Any, settings: Settings, after_row: Callable[[Report], None] = lambda report: None, earlier: Report | None = None
) -> Report:
    """Measure one op on this world. Collective; every rank returns the rows that it measured, rank 0 after those of ``earlier``.

    ``after_row`` is called on rank 0 with the report so far, so that a run that is cut short leaves its rows. ``earlier``, on rank 0: such
    a report; sizes of which it has a row are not measured again. ArgumentError on all ranks where it is of another op, machine or version.
    """
    require_speed(world, settings.allow_cpu)
    op = ops()[settings.op]
    world.set_tuned({})  # splits that were tuned before are not mkernel's own choice
    timing = open_timing(world, settings.dtype, settings.cooldown_ms)
    baselines = open_baselines(world, timing.stream) if isinstance(timing, CudaTiming) else NoBaselines("none on target cpu")
    baselines.missing.update(dict.fromkeys(settings.without, "left out by --without"))
    of_run = {"name": machine.device_name(world), "before": machine.clocks() if world.rank == 0 else []}
    report = Report(
        op=op.name,
        title=", ".join([op.title, *(f"{name} {value}" for name, value in settings.options.items())]),
        world={"ranks": world.size, "nodes": world.num_nodes, "ranks_per_node": world.ranks_per_node},
        target=world.target,
        dtype=settings.dtype,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=settings.command,
        versions=machine.versions(),
        settings={
            "samples": settings.samples,
            "splits": {name: dict(split) if split else None for name, split in settings.splits.items()},
            "options": dict(settings.options),
            "link_gb_per_s": LINK_GB_PER_S,
            "network_gb_per_s": settings.network_gb_per_s,
            "network": _network_of(world),
            "tilings": sorted(tilings_of(op.name)),
            "cooldown_ms": settings.cooldown_ms,
            "seconds_per_shape": settings.seconds,
            "again_above": settings.again,
            "graph": settings.graph,
            "without": sorted(settings.without),
            "environment": {one.name: one.get() for one in (env.PLANNER, env.SPECIALIZE) if one.is_set()},  # what choices depend on
        },
        machine=of_run,
    )
    known = _resume(world, report, earlier)
    seed = fresh_seed(world)
    for i, size in enumerate(settings.sizes):
        case = op.case(size, _topology(world), settings.dtype, **settings.options)
        if case.label in known:
            continue
        _progress(world, f"{op.name} {size} ...")
        row = _Measurer(world, timing, baselines, settings, case).row(seed + i * 10**9)
        report.rows.append(row)
        _progress(world, f"{op.name} {told(row)}")
        if world.rank == 0:
            after_row(report)
    # Only after success: closing is collective, and after a failure the peers may have gone.
    baselines.close()
    timing.close()
    of_run["after"] = machine.clocks() if world.rank == 0 else []  # the report's, or of the last of its runs
    return report


def _resume(world: Any, report: Report, earlier: Report | None) -> frozenset[str]:
    """The labels of rows that rank 0 has of an earlier run. Collective."""
    differs = report.differs_from(earlier) if earlier else ""
    known = [row.label for row in earlier.rows] if earlier else []
    differs, known = gather(world, [differs, known])[0]
    if differs:
        raise ArgumentError("--resume", "that file", f"rows there are of {differs}", "give another --out, or delete it")
    if earlier:
        report.resume(earlier)
    return frozenset(known)


def _topology(world: Any) -> Any:
    from mkernel.planner.topology import Topology

    return Topology(world.size, world.ranks_per_node)


def _network_of(world: Any) -> str:
    """How the nodes talk: figures over an emulated network depend on who plays it."""
    name: str = world.options.transport
    return name if name != "emulated" else f"{name} by {env.EMULATED_ENGINE.get()}, {env.EMULATED_LATENCY_US.get():g} us"


class _Measurer:
    """One shape on all ranks."""

    def __init__(self, world: Any, timing: Timing, baselines: Baselines, settings: Settings, case: Case) -> None:
        self.world, self.timing, self.baselines, self.settings, self.case = world, timing, baselines, settings, case
        self.splits = {name: _split(split) for name, split in settings.splits.items()}  # of mkernel's contestants

    def row(self, seed: int) -> Row:
        case, settings = self.case, self.settings
        row = Row(
            label=case.label,
            shape=case.shape,
            flops=case.flops,
            link_bytes=case.link_bytes,
            network_bytes=case.network_bytes,
            link_ms=milliseconds(case.link_bytes, LINK_GB_PER_S),
            network_ms=milliseconds(case.network_bytes, settings.network_gb_per_s),
        )
        case.setup(self.timing, seed)
        contestants: dict[str, Sequence[Call]] = {name: case.fused(split) for name, split in self.splits.items()}
        if TUNED not in settings.without and self.world.size > 1 and self.timing.tunes:
            contestants |= self._tuned(row)
        row.predicted = self._predicted()
        row.worst = max(self._check(name, calls) for name, calls in contestants.items())
        if row.correct:
            others = self._others(row)
            row.worst = max(row.worst, self._time(row, contestants, others, self._samples(len(contestants) + len(others))))
            if self.settings.again is not None and row.correct and slower_than(row, self.settings.again):
                row.worst = max(row.worst, self._time(row, contestants, others, self.settings.again_samples))
            self._add_solo(row)
        if not row.correct:
            row.times.clear()
            row.host.clear()
        return row

    def _samples(self, contestants: int) -> int:
        """As many as were asked for, or as go into the seconds of a shape, if the product runs at a usual rate. Alike on all ranks."""
        if self.settings.seconds is None:
            return self.settings.samples
        once = (1 + BATCH) * (_LEAST_SECONDS + self.case.flops / _USUAL_FLOPS) * contestants
        return max(_FEWEST_SAMPLES, min(self.settings.samples, int(self.settings.seconds / once)))

    def _predicted(self) -> dict[str, Any]:
        """What the cost model says of the first contestant; nothing for target cpu, unless MKERNEL_MACHINE names a machine."""
        if self.world.target != "cuda" and not env.MACHINE.is_set():
            return {}
        sms = self.world.backend.sm_count
        of = asked_or_known(machine.device_name(self.world), sms)
        self.case.machine = of
        of = of.with_network(network_of(_network_of(self.world), of.network))
        split, found = self.splits[FUSED], dict[str, Any]()
        for mode, conditions in zip(MODES, (ISOLATED, BACK_TO_BACK), strict=True):
            prediction = self.case.predicted(of, conditions._replace(rested=self.settings.cooldown_ms > 0), split)
            if prediction is None:
                return {}
            found |= {mode: prediction.seconds * 1e3, "binds": found.get("binds", prediction.binds)}
        return {**found, "machine": of.name}

    def _tuned(self, row: Row) -> dict[str, Sequence[Call]]:
        """Calls with the split that ``mk.tune`` finds on this shape. The other contestants stay untuned."""
        name, arrays, options = self.case.first_call()
        result = tune_calls(name, arrays, self.case.fused, world=self.world, save=False, **options)
        self.world.set_tuned({})
        row.tuned = dataclasses.asdict(result.best)
        if result.best == result.default:
            row.missing[TUNED] = "nothing was faster than mkernel's own choice"
            return {}
        self.splits[TUNED] = result.best
        return {TUNED: self.case.fused(result.best)}

    def _others(self, row: Row) -> dict[str, Sequence[Call]]:
        """Calls of the baselines, and of what is measured alone."""
        import mkernel as mk

        case, world, baselines = self.case, self.world, self.baselines
        found = {**case.baselines(baselines), ALONE: case.alone(baselines)}
        if world.num_nodes > 1:
            to_each = case.network_bytes // (world.num_nodes - 1)
            name, arrays, options = case.first_call()
            put_bytes = int(mk.plan(name, *arrays, world=world, **options).plan().put_bytes)
            found[ENGINE] = [puts(world, PutsPlan(_topology(world), to_each, put_bytes))]
        row.missing.update(baselines.missing)
        return {name: calls for name, calls in found.items() if calls and name not in self.settings.without}

    def _check(self, name: str, calls: Sequence[Call]) -> float:
        """The worst error after calls of every set, back to back on poisoned outputs; looks at the first, a middle and the last."""
        self._poison()
        for call in calls:
            call()
        self.timing.synchronize()
        return self._agreed_worst(name, sorted({0, len(calls) // 2, len(calls) - 1}))

    def _poison(self) -> None:
        for c in self.case.outputs():
            self.timing.poison(c)

    def _agreed_worst(self, name: str, sets: Sequence[int]) -> float:
        worst = max(self.case.worst(i, self.splits[name]) for i in sets)
        self.timing.synchronize()
        return max(float(text) for text in gather(self.world, str(worst)))  # as text: JSON has no infinity

    def _time(self, row: Row, ours: Mapping[str, Sequence[Call]], others: Mapping[str, Sequence[Call]], count: int) -> float:
        """The worst error of ``ours`` over its bound, under load: every measurement begins on poisoned outputs, its last call is checked.

        Half of the samples in this order, the other half in reverse: a GPU that gets warm favours nobody.
        """
        contestants, worst = {**ours, **others}, 0.0

        def timed(name: str, measure: Callable[[Sequence[Call], int], Taken], samples: int) -> Taken:
            nonlocal worst
            self.timing.warm_up(contestants[name])
            self._poison()
            taken = measure(contestants[name], samples)
            if name in ours:
                self.timing.synchronize()
                worst = max(worst, self._agreed_worst(name, [taken.last]))
            return taken

        taken: dict[tuple[str, str], list[Taken]] = {}
        modes = dict(zip(MODES, (self.timing.isolated, self.timing.back_to_back), strict=True))
        first = -(-count // 2)
        for names, samples in ((list(contestants), first), (list(contestants)[::-1], count - first)):
            for name in names if samples else ():
                for mode, measure in modes.items():
                    taken.setdefault((name, mode), []).append(timed(name, measure, samples))
        for name in contestants:
            row.times[name] = {mode: self._slowest(taken[name, mode]) for mode in modes}
            row.host[name] = self._slowest([timed(name, self.timing.host, count)], unit="us")
            if self.settings.graph and (name in ours or name in rivals(contestants)):
                self._add_graph(row, name, functools.partial(timed, name, self.timing.replayed, count), name in ours)
        return worst

    def _add_graph(self, row: Row, name: str, take: Callable[[], Taken], ours: bool) -> None:
        """Calls in a CUDA graph. A baseline that cannot be captured is left out on all ranks; a failure of mkernel is never hidden."""
        taken, reason = None, ""
        try:
            taken = take()
        except Exception as error:
            if ours:
                raise
            reason = f"cannot be captured: {type(error).__name__}: {error}".splitlines()[0][:300]
        if reason := worst_reason(self.world, reason):
            row.missing[f"{GRAPH} {name}"] = reason
        elif taken is not None:
            row.times[name][GRAPH] = self._slowest([taken])

    def _slowest(self, taken: Sequence[Taken], unit: str = "ms") -> Measurement:
        times = [time for part in taken for time in part.times]
        return slowest(gather(self.world, times), unit, "; then: ".join(dict.fromkeys(part.method for part in taken)))

    def _add_solo(self, row: Row) -> None:
        case = self.case
        if case.solo is None or SOLO in self.settings.without or (self.world.size == 1 and FUSED in self.settings.splits):
            return  # in a world of one the fused column is compute alone
        label = f"{case.solo.m}x{case.solo.n}x{case.solo.k}"
        if label in self.settings.solo:
            row.times[SOLO] = {mode: slowest(raw["samples"], raw["unit"], raw["method"]) for mode, raw in self.settings.solo[label].items()}
        else:
            row.missing[SOLO] = "measured by a run of its own in a world of one (start bench without mpirun)"


def _split(sms: Mapping[str, int] | None) -> Any:
    if sms is None:
        return None
    import mkernel as mk

    return mk.Split(**sms)


def _progress(world: Any, text: str) -> None:
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)
