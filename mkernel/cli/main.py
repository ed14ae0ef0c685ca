"""The entry point: finds the command and passes it the rest of the line."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from typing import cast

from mkernel import env
from mkernel.errors import Error
from mkernel.version import VERSION

__all__ = ["COMMANDS", "main"]

# command: (module with main(argv) -> exit status, one line of help)
COMMANDS = {
    "doctor": ("mkernel.cli.doctor", "what this machine has, what is missing and how to get it"),
    "demo": ("mkernel.cli.demo", "run the fused kernels on 4 ranks and check every element"),
    "bench": ("mkernel.bench", "measure the fused kernels against their baselines"),
    "tune": ("mkernel.bench.tune", "measure how many SMs each role should have, and remember it"),
    "model": (
        "mkernel.bench.model",
        "what mkernel would do for a shape, or for any number of rows, and how long its parts would take; needs no GPU",
    ),
    "trace": ("mkernel.cli.trace", "show what every CTA does in calls of an op, and which rank waits for which"),
    "calibrate": ("mkernel.bench.calibrate", "measure what the cost model needs to know of this machine, in a minute, and save it"),
    "cache": ("mkernel.cli.cache", "show or clear the cache of compiled kernels, plans and tuned splits"),
    "completion": ("mkernel.cli.completion", "print what makes bash, zsh or tcsh complete these commands and their options"),
}


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="mkernel",
        description="Fused communication and compute kernels.",
        epilog="\n".join(["commands:", *(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mkernel {VERSION}")
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of " + ", ".join(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see `mkernel COMMAND --help`")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors of mkernel are one message, not a traceback (MKERNEL_LOG=debug shows it)."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments:
        _parser().print_help()
        return 2
    options = _parser().parse_args(arguments)
    try:
        # A command's module is imported only when it is asked for: ``bench`` brings its baselines.
        run = cast("Callable[[Sequence[str]], int | None]", importlib.import_module(COMMANDS[options.command][0]).main)
        return run(options.arguments) or 0
    except Error as error:
        if _debugging():
            logging.getLogger("mkernel").exception("mkernel %s failed", options.command)
        print(f"mkernel {options.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"mkernel {options.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `mkernel doctor | head`: nobody reads on; keep the interpreter's own flush quiet
        sys.stdout = None
        return 0


def _debugging() -> bool:
    try:
        return env.LOG.get() == "debug"
    except Error:  # the switch itself is what is wrong
        return False
