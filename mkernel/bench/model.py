"""``python -m mkernel model``: what mkernel would do for a shape, or for any number of rows, and how long its parts would take.

Needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence

from mkernel import env
from mkernel.bench.cases import Case, ops
from mkernel.bench.classes import describe_classes
from mkernel.bench.command import Asked, parse_split, problem_arguments
from mkernel.bench.stats import LINK_GB_PER_S, NETWORK_GB_PER_S, milliseconds
from mkernel.errors import ArgumentError
from mkernel.planner.gemm import seconds_to_multiply
from mkernel.planner.specialize import parse
from mkernel.planner.split import Split, SplitError
from mkernel.tools.table import format_table

__all__ = ["main"]

_H200_SMS = 132
_MEMORY_GB_PER_S = 4800.0  # of an H200, as its data sheet says
_ITEM = 2  # bytes of a 16-bit element


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mkernel model",
        description="The plan for each shape, and about how long its parts take at rates measured on H200 (memory: its data sheet's; "
        "network: MKERNEL_EMULATED_GBPS). What waits for what is not modelled: what a call takes is what `bench` measures.",
    )
    problem_arguments(parser, ops())
    parser.add_argument("--sms", type=int, default=_H200_SMS, help=f"of the device (default {_H200_SMS}: H100, H200)")
    parser.add_argument("--split", help="SMs per role, e.g. compute=120,intra_comm=12 (default: mkernel's untuned choice)")
    parser.add_argument(
        "--max-rows", type=int, metavar="R", help="instead: what calls of 1 to R rows of the first operand do, by classes of rows"
    )
    parser.add_argument(
        "--specialize", help="what is compiled into kernels: default, all, none, or of n, k, split (if not given: MKERNEL_SPECIALIZE)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints; exit status 0."""
    options = _parser().parse_args(argv)
    if options.sms < 1:
        raise ArgumentError("--sms", options.sms, "must be a positive integer")
    if options.max_rows is not None and options.max_rows < 1:
        raise ArgumentError("--max-rows", options.max_rows, "must be a positive integer")
    split = Split(**parse_split(options.split)) if options.split else None
    specialize: str | None = options.specialize
    try:
        parse(specialize)
    except ValueError as error:
        raise ArgumentError("--specialize", specialize, str(error)) from None
    cases = Asked.of(options).cases
    if options.max_rows is not None:
        problems = {case.title: case for case in cases}  # shapes that differ in M are one problem
        for i, case in enumerate(problems.values()):
            table = functools.partial(describe_classes, case, options.max_rows, options.sms, split, specialize)
            print(("\n" if i else "") + _fitting(table, options.sms, split))
        return 0
    network = env.EMULATED_GBPS.get() or NETWORK_GB_PER_S
    rows = []
    for case in cases:
        print(_fitting(functools.partial(_described, case, options.sms, split, specialize), options.sms, split) + "\n")
        rows.append([case.label, *(f"{ms:.4f}" for ms in _parts(case, options.sms, network))])
    multiplying = seconds_to_multiply(1, 1, 1, options.sms)
    print(format_table(["shape", "multiplying ms", "memory ms", "NVLink ms", "network ms", "longest ms"], rows))
    print(f"\n{options.sms} SMs: {2e-12 / multiplying:.0f} TFLOP/s together; memory: {_MEMORY_GB_PER_S:g} GB/s, operands and product once;")
    print(f"NVLink: {LINK_GB_PER_S:g} GB/s into one GPU; network: {network:g} GB/s")
    return 0


def _described(case: Case, sms: int, split: Split | None, specialize: str | None) -> str:
    return case.plan(sms, split, specialize=specialize).describe()


def _fitting(describe: Callable[[], str], sms: int, split: Split | None) -> str:
    """The text of ``describe``. Raises ArgumentError that names the option to blame where a split does not fit."""
    try:
        return describe()
    except SplitError as error:
        raise ArgumentError("--split" if split else "--sms", error.split if split else sms, error.rule, error.remedy) from None


def _parts(case: Case, sms: int, network: float) -> list[float]:
    of_solo = 0 if case.solo is None else case.solo.m * case.solo.k + case.solo.k * case.solo.n + case.solo.m * case.solo.n
    parts = [
        seconds_to_multiply(1, 1, 1, sms) * case.flops / 2 * 1e3,
        milliseconds(_ITEM * of_solo or case.weight_bytes, _MEMORY_GB_PER_S),
        milliseconds(case.link_bytes, LINK_GB_PER_S),
        milliseconds(case.network_bytes, network),
    ]
    return [*parts, max(parts)]
