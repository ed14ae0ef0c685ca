"""``python -m mkernel model``: what mkernel would do for a shape, or for any number of rows, how long that takes, and what binds.

Needs no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mkernel import env
from mkernel.bench.cases import Case, ops
from mkernel.bench.classes import describe_classes
from mkernel.bench.command import Asked, machine_option, parse_split, parse_world, problem_arguments
from mkernel.bench.model_error import error_rows, error_table, measured_in
from mkernel.bench.published import published_table
from mkernel.bench.scale import SCALED, scale_table, switch_table
from mkernel.errors import ArgumentError
from mkernel.planner.choice import ranked
from mkernel.planner.machine import FABRIC, PYTHON_PUT, RDMA, Machine
from mkernel.planner.predict import predict
from mkernel.planner.prediction import BATCH, RESOURCES, Prediction
from mkernel.planner.reduce import ALLREDUCE
from mkernel.planner.specialize import parse
from mkernel.planner.split import Split, SplitError
from mkernel.runtime import fabric
from mkernel.tools.table import format_table

__all__ = ["comparison", "main", "machine_of"]

_HEAD = ("shape", "predicted ms", "back to back", "binds", *(f"{name} ms" for name in RESOURCES))
_SELDOM = ("engine ms", "add ms", "routing ms", "entry ms")  # columns that are left out where nothing is in them
_DIFFER = 20  # lines of a comparison


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mkernel model",
        description="The plan for each shape, how long a call is predicted to take, alone and behind others, and what binds it "
        "(docs/model.md says how, and how far predictions were from measurements).",
    )
    problem_arguments(parser, ops())
    parser.add_argument("--machine", help="h100, h200, or a file of `mkernel calibrate` (if not given: MKERNEL_MACHINE, then h200)")
    parser.add_argument("--sms", type=int, help="of the device (default: all of the machine's)")
    parser.add_argument("--split", help="SMs per role, e.g. compute=120,intra_comm=12 (default: mkernel's untuned choice)")
    network = parser.add_argument_group("network, in place of the emulated one")
    network.add_argument("--nics", type=int, help="network cards per GPU")
    network.add_argument("--nic-gbps", type=float, default=50.0, help="GB/s of a card (default 50: 400 Gb/s)")
    network.add_argument("--oversubscription", type=float, default=1.0, help="of the switches above the leaves (default 1: none)")
    network.add_argument("--leaf-nodes", type=int, default=1, help="nodes whose cards of a rail share a leaf switch (default 1)")
    network.add_argument("--engine", choices=("compiled", "python"), help="what posts puts to cards (default compiled)")
    parser.add_argument(
        "--max-rows", type=int, metavar="R", help="instead: what calls of 1 to R rows of the first operand do, by classes of rows"
    )
    parser.add_argument("--compare", action="store_true", help="instead: where the model would choose otherwise, largest gain first")
    parser.add_argument(
        "--error",
        type=Path,
        metavar="FOLDER",
        help="instead: how far predictions are from reports of `bench` in a folder (without --machine: each GPU's)",
    )
    scale = "instead: OP in worlds of 1, 2, 4 .. NODES nodes like those of --world (default 1x8), on shapes of its own: one that stays, "
    scale += "and one that grows (docs/scale.md); a card per GPU unless --nics says otherwise"
    parser.add_argument("--scale", type=int, metavar="NODES", help=scale)
    parser.add_argument("--published", type=Path, metavar="FILE", help="instead: predictions beside others' published times")
    parser.add_argument(
        "--specialize", help="what is compiled into kernels: default, all, none, or of n, k, split (if not given: MKERNEL_SPECIALIZE)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints; exit status 0."""
    options = _parser().parse_args(argv)
    positive = ("sms", "max_rows", "nics", "leaf_nodes", "scale")
    for name, value in ((f"--{name.replace('_', '-')}", getattr(options, name)) for name in positive):
        if value is not None and value < 1:
            raise ArgumentError(name, value, "must be a positive integer")
    if options.nic_gbps <= 0 or options.oversubscription < 1:
        raise ArgumentError(
            "--nic-gbps, --oversubscription", (options.nic_gbps, options.oversubscription), "must be above 0, and at least 1"
        )
    split = Split(**parse_split(options.split)) if options.split else None
    specialize: str | None = options.specialize
    try:
        parse(specialize)
    except ValueError as error:
        raise ArgumentError("--specialize", specialize, str(error)) from None
    if options.nics is None and (options.scale or options.published):
        options.nics = 1
    machine = machine_of(options)
    if (text := _instead(options, machine)) is not None:
        print(text)
        return 0
    try:
        cases = [_on(machine, case) for case in Asked.of(options).cases]
    except SplitError as error:  # a plan that needs more SMs than there are, whatever the split
        raise ArgumentError("--world", options.world, f"{options.op}: {error.rule}", error.remedy) from None
    if options.compare:
        print(comparison(cases, machine, specialize))
        return 0
    if options.max_rows is not None:
        problems = {case.title: case for case in cases}  # shapes that differ in M are one problem
        for i, case in enumerate(problems.values()):
            table = functools.partial(describe_classes, case, options.max_rows, machine.sms, split, specialize)
            print(("\n" if i else "") + _fitting(table, machine.sms, split))
        return 0
    lines = []
    for case in cases:
        print(_fitting(functools.partial(_described, case, machine.sms, split, specialize), machine.sms, split) + "\n")
        lines.append(_row(case, machine, split))
    print(_table(lines))
    print(f"\n{_in_words(machine)}")
    return 0


def _on(machine: Machine, case: Case) -> Case:
    """The case, whose plans are for this machine."""
    case.machine = machine
    return case


def _instead(options: argparse.Namespace, machine: Machine) -> str | None:
    """What is asked for in place of plans, if anything. Raises ArgumentError."""
    if options.error is not None:
        return _errors(options, machine if options.machine or env.MACHINE.is_set() else None)
    if options.published is not None:
        return f"{published_table(options.published, machine)}\n\n{_in_words(machine)}"
    if options.scale is None:
        return None
    if options.op not in SCALED:
        raise ArgumentError("--scale", options.op, f"must be of {', '.join(SCALED)}")
    per_node = parse_world(options.world or "1x8").ranks_per_node
    tables = [scale_table(options.op, machine, options.scale, per_node)]
    if options.op == ALLREDUCE:
        tables.append(f"one step up to so many rows:\n{switch_table(machine, options.scale, per_node)}")
    return "\n\n".join([*tables, _in_words(machine)])


def _errors(options: argparse.Namespace, asked: Machine | None) -> str:
    """What ``--error`` asks for: of one world each row, else a table. Raises ArgumentError where there is nothing to compare with."""
    rows = measured_in("--error", options.error)
    if not options.world:
        return error_table(rows, asked)
    world = parse_world(options.world)
    name = f"{world.num_nodes}x{world.ranks_per_node}"
    chosen = [row for row in rows if row.world == name]
    if not chosen:
        known = ", ".join(sorted({row.world for row in rows}))
        raise ArgumentError("--world", options.world, f"no report in {options.error} is of it", f"there are {known}")
    return error_rows(chosen, asked)


def machine_of(options: argparse.Namespace) -> Machine:
    """The machine that the options describe. Raises ArgumentError."""
    machine = machine_option(options.machine, options.sms)
    paced, latency = env.EMULATED_GBPS.get(), env.EMULATED_LATENCY_US.get()
    switches: dict[str, Any] = {"oversubscription": options.oversubscription, "leaf_nodes": options.leaf_nodes}
    if options.engine and options.nics is None:
        raise ArgumentError("--engine", options.engine, "is that of network cards", "say how many by --nics")
    if options.nics is not None:
        bandwidth = options.nics * options.nic_gbps * 1e9
        put = PYTHON_PUT if options.engine == "python" else RDMA.put
        return machine.with_network(dataclasses.replace(RDMA, bandwidth=bandwidth, put=put, **switches))
    network = dataclasses.replace(machine.network, **switches)
    if env.EMULATED_ENGINE.get() == "sms":
        network = dataclasses.replace(FABRIC, **switches)
        machine = machine if options.sms else dataclasses.replace(machine, sms=machine.sms - fabric.SMS)
    if env.EMULATED_GBPS.is_set() and paced:
        network = dataclasses.replace(network, bandwidth=paced * 1e9)
    if env.EMULATED_LATENCY_US.is_set():
        network = dataclasses.replace(network, latency=latency * 1e-6)
    return machine.with_network(network)


def comparison(cases: Sequence[Case], machine: Machine, specialize: str | None = None) -> str:
    """The shapes where the cost model would choose another plan than the rules, those with the largest predicted gain first."""
    rows = []
    for case in cases:
        plan: Any = case.plan(machine.sms, specialize=specialize)
        if plan.op not in ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"):
            raise ArgumentError("--compare", plan.op, "the model chooses for the fused GEMMs only")
        found = ranked(plan.problem, plan.rows, machine.sms, machine, specialize)
        best, chosen = found[0], predict(plan.of_rows(found[0].plan.rows), machine)
        assert chosen is not None, "there is a model of every op with candidates"
        seconds = chosen.seconds
        if best.seconds < seconds:
            how = [f"{one.tile.block_n} wide, {_sms(one)}" for one in (plan, best.plan)]
            rows.append((best.seconds / seconds, [case.label, f"{seconds * 1e3:.4f}", how[0], f"{best.seconds * 1e3:.4f}", how[1]]))
    rows.sort(key=lambda row: row[0])
    lines = [[*cells, f"{ratio:.2f}"] for ratio, cells in rows[:_DIFFER]]
    table = format_table(["shape", "rules ms", "rules", "model ms", "model", "model / rules"], lines)
    return (
        f"{len(rows)} of {len(cases)} shapes differ; predicted, not measured\n\n{table}"
        if rows
        else "the model would choose as the rules do"
    )


def _sms(plan: Any) -> str:
    if getattr(plan, "packets", False):
        return "packets"
    groups = f", groups of {plan.group_tiles}" if hasattr(plan, "group_tiles") else ""
    return f"{plan.split.compute}/{plan.split.intra_comm} SMs{groups}"


def _described(case: Case, sms: int, split: Split | None, specialize: str | None) -> str:
    return case.plan(sms, split, specialize=specialize).describe()


def _fitting(describe: Callable[[], str], sms: int, split: Split | None) -> str:
    """The text of ``describe``. Raises ArgumentError that names the option to blame where a split does not fit."""
    try:
        return describe()
    except SplitError as error:
        raise ArgumentError("--split" if split else "--sms", error.split if split else sms, error.rule, error.remedy) from None


def _row(case: Case, machine: Machine, split: Split | None) -> list[str]:
    alone = case.predicted(machine, split=split)
    behind = case.predicted(machine, BATCH, split)
    if alone is None or behind is None:
        return [case.label, *["-"] * (len(_HEAD) - 1)]
    return [case.label, _ms(alone.seconds), _ms(behind.seconds), alone.binds, *_parts(alone)]


def _table(rows: Sequence[Sequence[str]]) -> str:
    kept = [i for i, name in enumerate(_HEAD) if name not in _SELDOM or any(row[i] not in (_ms(0.0), "-") for row in rows)]
    return format_table([_HEAD[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _parts(prediction: Prediction) -> list[str]:
    return [_ms(getattr(prediction, name)) for name in RESOURCES]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4f}"


def _in_words(machine: Machine) -> str:
    network = machine.network
    return (
        f"{machine.name}, {machine.sms} SMs: {machine.sm_flops * machine.sms / 1e12:.0f} TFLOP/s together after a rest; "
        f"memory {machine.memory / 1e9:g} GB/s;\n"
        f"NVLink {machine.link / 1e9:g} GB/s into one GPU, {machine.link_pair / 1e9:g} between two; "
        f"network {network.bandwidth / 1e9:g} GB/s, a put at least {network.put * 1e6:g} us, "
        f"first reaction {network.reaction * 1e6:g} us, oversubscription {network.oversubscription:g} above leaves of {network.leaf_nodes}"
    )
