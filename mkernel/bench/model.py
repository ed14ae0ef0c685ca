"""``python -m mkernel model``: what mkernel would do for a shape, and how long its parts would take. Needs no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mkernel import env
from mkernel.bench.cases import OPS, Case
from mkernel.bench.command import Asked, parse_split, problem_arguments
from mkernel.bench.stats import LINK_GB_PER_S, NETWORK_GB_PER_S, milliseconds
from mkernel.cli.table import format_table
from mkernel.errors import ArgumentError
from mkernel.plan.gemm import seconds_to_multiply
from mkernel.plan.split import Split, SplitError

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
    problem_arguments(parser, OPS)
    parser.add_argument("--sms", type=int, default=_H200_SMS, help=f"of the device (default {_H200_SMS}: H100, H200)")
    parser.add_argument("--split", help="SMs per role, e.g. compute=120,intra_comm=12 (default: mkernel's untuned choice)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints; exit status 0."""
    options = _parser().parse_args(argv)
    if options.sms < 1:
        raise ArgumentError("--sms", options.sms, "must be a positive integer")
    split = Split(**parse_split(options.split)) if options.split else None
    network = env.EMULATED_GBPS.get() or NETWORK_GB_PER_S
    rows = []
    for case in Asked.of(options).cases:
        print(_described(case, options.sms, split) + "\n")
        rows.append([case.label, *(f"{ms:.4f}" for ms in _parts(case, options.sms, network))])
    multiplying = seconds_to_multiply(1, 1, 1, options.sms)
    print(format_table(["shape", "multiplying ms", "memory ms", "NVLink ms", "network ms", "longest ms"], rows))
    print(f"\n{options.sms} SMs: {2e-12 / multiplying:.0f} TFLOP/s together; memory: {_MEMORY_GB_PER_S:g} GB/s, operands and product once;")
    print(f"NVLink: {LINK_GB_PER_S:g} GB/s into one GPU; network: {network:g} GB/s")
    return 0


def _described(case: Case, sms: int, split: Split | None) -> str:
    try:
        return case.plan(sms, split).describe()
    except SplitError as error:
        raise ArgumentError("--split" if split else "--sms", error.split if split else sms, error.rule, error.remedy) from None


def _parts(case: Case, sms: int, network: float) -> list[float]:
    assert case.solo is not None
    m, n, k = case.solo.m, case.solo.n, case.solo.k
    once = milliseconds(_ITEM * (m * k + k * n + m * n), _MEMORY_GB_PER_S)
    parts = [
        seconds_to_multiply(m, n, k, sms) * 1e3,
        once,
        milliseconds(case.link_bytes, LINK_GB_PER_S),
        milliseconds(case.network_bytes, network),
    ]
    return [*parts, max(parts)]
