"""How far the cost model's predictions are from what was measured, and which constants of a machine fit measurements best. Needs no GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from mkernel.bench.cases import Case, ops
from mkernel.bench.cases.base import tilings_of
from mkernel.bench.report import FUSED, MODES, SOLO, Report
from mkernel.bench.stats import quantile
from mkernel.errors import ArgumentError
from mkernel.planner.machine import Machine, changed, machine_of, network_of
from mkernel.planner.prediction import ALONE, BATCH, Conditions
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology
from mkernel.tools.table import format_table

__all__ = ["FITTED", "Measured", "error_rows", "error_table", "fit", "held_out", "measured", "measured_in", "quantiles"]

# What ``fit`` changes: constants that no measurement of their own has told.
FITTED = (
    *("sm_flops", "slow_octave", "warm", "sm_load", "start", "start_hot", "start_lone", "start_early"),
    *("tile", "entry", "flag", "beside"),
)
_TRUST = 0.5  # how far, as a logarithm, a constant may go from what it was before as for an error of one logarithm
_FACTORS = (0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.25)
_ROUNDS = 12
_NEAR = 0.15
_REMEDY = "`mkernel bench OP --out FOLDER/OP.json` writes one"


@dataclasses.dataclass(frozen=True)
class Measured:
    """One time of a report: milliseconds, of the slowest rank, of our kernels."""

    op: str
    world: str
    label: str
    mode: str
    ms: float
    case: Case
    conditions: Conditions
    network: str = ""  # as the report names it

    @property
    def ranks(self) -> int:
        nodes, per_node = map(int, self.world.split("x"))
        return nodes * per_node

    def error(self, machine: Machine | None = None) -> float:
        """Predicted (by ``machine``, else by the one that its plan is for) over measured, as a natural logarithm: 0 is right.

        Raises ValueError where the model knows nothing of the op.
        """
        machine = machine or self.case.machine
        assert machine is not None, "a report names its GPUs"
        predicted = self.case.predicted(machine.with_network(network_of(self.network, machine.network)), self.conditions)
        if predicted is None:
            raise ValueError(f"the cost model knows nothing of {self.op}")
        return math.log(predicted.seconds * 1e3 / self.ms)


def measured_in(option: str, folder: Path) -> list[Measured]:
    """``measured`` of a folder that an option names.

    Raises
    ------
    ArgumentError
        There is no such folder, it holds a file that is no report, or no times.
    """
    try:
        rows = measured(folder) if folder.is_dir() else []
    except (OSError, ValueError) as error:
        raise ArgumentError(option, folder, f"must hold reports of `mkernel bench` only: {error}", _REMEDY) from None
    if not rows:
        raise ArgumentError(option, folder, "holds no report of `mkernel bench` with times", _REMEDY)
    return rows


def measured(folder: Path) -> list[Measured]:
    """Every time of mkernel's untuned calls in the reports of a folder: of the op, and of its local product in a world of one.

    Raises ValueError where a file is no report.
    """
    found: dict[tuple[str, ...], Measured] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            report = Report.from_json(path.read_text(encoding="utf-8"))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name} is none ({error})") from None
        topology = Topology(report.world["ranks"], report.world["ranks_per_node"])
        machine = machine_of(str(report.machine.get("name", "")))
        network = str(report.settings.get("network") or "")
        rested = bool(report.settings.get("cooldown_ms") or report.settings.get("rest_ms"))  # as it was called before
        for row in report.rows:
            case = ops()[report.op].case(row.label, topology, report.dtype, **report.settings["options"])
            runs = [(FUSED, report.op, topology, case)]
            if case.solo is not None:
                local = f"{case.solo.m}x{case.solo.n}x{case.solo.k}"
                layout = {name: value for name, value in report.settings["options"].items() if name == "b"}
                runs.append((SOLO, "gemm", Topology(1, 1), ops()["gemm"].case(local, Topology(1, 1), report.dtype, **layout)))
            for contestant, op, of, ran in runs:
                ran.machine = machine
                ran.tiling = _tiling(report.settings.get("tilings", ()), op, of)
                for mode in MODES:
                    if (ms := row.time(contestant, mode)) is not None:
                        conditions = (ALONE if mode == MODES[0] else BATCH)._replace(rested=rested)
                        world = f"{of.num_nodes}x{of.ranks_per_node}"
                        found[path.name, op, ran.label, mode] = Measured(op, world, ran.label, mode, ms, ran, conditions, network)
    return list(found.values())


_CHOSEN_SINCE = {"span", "shares", "cluster", "packets"}  # fields that the planner did not choose when there were reports already


def _tiling(known: Sequence[str], op: str, topology: Topology) -> Tiling | None:
    """What tiles covered that were measured before the planner chose fields of ``Tiling`` beside those that are ``known`` in the report."""
    has_packets = topology.size > 1 and op == "allgather_gemm"  # reductions have always had them
    since = tilings_of(op) & _CHOSEN_SINCE - set(known) - (set() if has_packets else {"packets"})
    return Tiling(**{name: int(name != "packets") for name in since}) if since else None


def held_out(row: Measured) -> bool:
    """Whether a row is left out of fits, so that its error tells something: every other size of each table."""
    shape = row.case.shape
    if "T" in shape:
        return shape["T"] == 1024
    return "S" in shape or max(shape["M"], 1) in (8, 128, 4096, 16384)


def quantiles(errors: Iterable[float]) -> tuple[float, float]:
    """Median and 90th percentile of the sizes of errors, as shares."""
    sizes = [abs(math.expm1(error)) for error in errors]
    return quantile(sizes, 0.5), quantile(sizes, 0.9)


def error_table(rows: Sequence[Measured], machine: Machine | None = None) -> str:
    """By op and world: how many rows, median and 90th percentile of the error, of all and of those that are left out of fits."""
    groups: dict[tuple[str, str], list[Measured]] = {}
    for row in rows:
        groups.setdefault((row.op, row.world), []).append(row)
    lines = []
    for (op, world), group in [*sorted(groups.items()), (("all", ""), list(rows))]:
        cells = [op, world]
        for some in (group, [row for row in group if held_out(row)]):
            cells += [str(len(some)), *(f"{100 * size:.1f} %" for size in quantiles(row.error(machine) for row in some))] if some else ["0"]
        lines.append([*cells, *(["-"] * (8 - len(cells)))])
    return format_table(["op", "world", "rows", "median", "90th", "held out", "median", "90th"], lines)


def error_rows(rows: Sequence[Measured], machine: Machine | None = None) -> str:
    """Each row: what was measured, what is predicted, and how far that is off; and how many are within 15 %."""
    lines, near = [], 0
    for row in rows:
        off = math.expm1(row.error(machine))
        near += abs(off) <= _NEAR
        lines.append([row.op, row.label, row.mode, f"{row.ms:.3f}", f"{row.ms * (1 + off):.3f}", f"{100 * off:+.1f} %"])
    table = format_table(["op", "shape", "mode", "measured ms", "predicted ms", "off"], lines)
    return f"{table}\n\n{near} of {len(lines)} within {100 * _NEAR:g} %"


def fit(rows: Sequence[Measured], machine: Machine, names: Sequence[str] = FITTED) -> Machine:
    """The machine with those constants for which the predictions of ``rows`` are nearest, by squares of logarithms: coordinate descent.

    A constant stays near what it was, unless measurements say more than one row's error.
    """

    def cost(candidate: Machine) -> float:
        moved = sum((math.log(getattr(candidate, name) / getattr(machine, name)) / _TRUST) ** 2 for name in names)
        return sum(row.error(candidate) ** 2 for row in rows) + 0.01 * moved

    best, least = machine, cost(machine)
    for _ in range(_ROUNDS):
        before = least
        for name in names:
            for factor in _FACTORS:
                candidate = changed(best, **{name: getattr(best, name) * factor})
                if (found := cost(candidate)) < least:
                    best, least = candidate, found
        if least > 0.999 * before:
            break
    return best
