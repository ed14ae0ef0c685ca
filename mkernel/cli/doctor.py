"""``mkernel doctor``: says what this machine has, in which state, and what to do about what is missing. Never a traceback."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection, Sequence

from mkernel.cli.probes import PROBES, Finding
from mkernel.version import VERSION

__all__ = ["examine", "main"]

_TARGETS = {"cuda": "the fused kernels on this machine's GPUs", "cpu": "the same kernels, emulated: for checking and debugging"}


def main(argv: Sequence[str]) -> int:
    """Exit status 0 if at least one target is usable here."""
    options = _parser().parse_args(argv)
    findings = examine()
    blocked = {target for finding in findings if finding.state in ("missing", "broken") for target in finding.needed_by}
    if options.json:
        usable = {target: target not in blocked for target in _TARGETS}
        found = {"version": VERSION, "targets": usable, "findings": [dataclasses.asdict(finding) for finding in findings]}
        print(json.dumps(found, indent=2))
    else:
        _show(findings, blocked)
    return 1 if _TARGETS.keys() <= blocked else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mkernel doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print version, usable targets and all findings as one JSON object")
    return parser


def _show(findings: Sequence[Finding], blocked: Collection[str]) -> None:
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.state:<8} {finding.subject:<{width}}  {finding.detail}")
        if finding.remedy:
            print(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    print()
    for target, meaning in _TARGETS.items():
        print(f"target {target:<4}  {'not usable' if target in blocked else 'usable'}: {meaning}")


def examine() -> list[Finding]:
    """All findings. A probe that fails is a finding of its own."""
    findings: list[Finding] = []
    for subject, needed_by, probe in PROBES:
        try:
            findings.extend(probe())
        except (Exception, SystemExit) as error:  # whatever is broken here must not hide the rest
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
            findings.append(Finding("broken", subject, detail, "this probe should not fail: please report it", needed_by))
    return findings
