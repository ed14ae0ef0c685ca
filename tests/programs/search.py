"""Search over random programs on target cpu: ``python tests/programs/search.py --worlds 1x4 2x2 3x2 4x1 --sequences 75``.

Draws programs (program.py) from fresh seeds, or from ``--seed`` on, runs each with its own seed for the scheduler, checks every element,
and prints what fails: program seed, scheduler seed, step. ``--shorten`` then drops what the failure does not need and prints a script.
The same again: ``--seed N --sequences 1``, with ``--scheduler N`` and ``--steps`` as printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is loaded
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.programs.program import SHARED_BITS, draw
from tests.programs.run import Failure, run, script, shorter

WORLDS = ("1x1", "1x4", "2x2", "3x2", "4x1")


def fresh_seed() -> int:
    """The first of 64 seeds whose programs share their kernels."""
    return int.from_bytes(os.urandom(4), "little") << SHARED_BITS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS))
    parser.add_argument("--sequences", type=int, default=25, help="programs of each world")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--kernels", type=int, default=6, help="that the programs of 64 seeds share")
    parser.add_argument("--seed", type=int, default=None, help="of the first program (default: fresh)")
    parser.add_argument("--scheduler", type=int, default=None, help="seed of the scheduler (default: the program's)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no program after so long")
    parser.add_argument("--shorten", action="store_true", help="look for the shortest failing program, and print a script")
    parser.add_argument("--show", action="store_true", help="print every program")
    options = parser.parse_args()
    first = fresh_seed() if options.seed is None else options.seed
    print(f"programs from --seed {first}, {options.steps} steps each", flush=True)
    begin, failures, ran = time.monotonic(), list[Failure](), 0
    for world in options.worlds:
        of_world, count, since = len(failures), 0, time.monotonic()
        for seed in range(first, first + options.sequences):
            if time.monotonic() - begin > options.seconds:
                break
            program = draw(world, seed, options.steps, options.kernels)
            if options.show:
                print(program, flush=True)
            failure = run(program, seed if options.scheduler is None else options.scheduler)
            count += 1
            if failure is not None:
                failures.append(failure)
                _tell(failure, options.shorten)
        ran += count
        print(f"{world}: {count} programs, {len(failures) - of_world} failed, {time.monotonic() - since:.0f} s", flush=True)
    print(f"{ran} programs, {len(failures)} failed")
    return 1 if failures else 0


def _tell(failure: Failure, shorten: bool) -> None:
    print(f"FAILED {failure.program.world} {str(failure) if shorten else str(failure).splitlines()[0][:300]}", flush=True)
    if shorten:
        found = shorter(failure, range(failure.scheduler_seed + 1, failure.scheduler_seed + 5))
        print(f"SHORTER {found}\n{script(found)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
