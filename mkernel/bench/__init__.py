"""``python -m mkernel bench``: what each op costs on this machine, beside its baselines, in one run (docs/benchmarks.md)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 only if every result was right."""
    from mkernel.bench.command import main as run

    return run(argv)
