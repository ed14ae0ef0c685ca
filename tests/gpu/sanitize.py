"""Small calls under ``compute-sanitizer --tool memcheck``: ``python tests/gpu/sanitize.py 1x1 --op two_shot``. Prints a RESULT line.

Of the GEMMs shapes with tails, of attention and the MoE ops drawn calls (``--seed``), with chunks and puts that are small. Every element is
checked.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# The checkout is on the path only from here on.
import mkernel as mk  # noqa: E402
from mkernel.tools import launcher  # noqa: E402
from tests.gpu import drawn  # noqa: E402
from tests.gpu.exact import EVERY_OP, OPS, started  # noqa: E402

SHAPES = ((256, 136, 72), (129, 128, 520), (1, 8, 8))  # rows of one rank, N, K: whole tiles, tails in every direction, one row
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")  # of memcheck, initcheck and synccheck; of racecheck
DRAWN = 3  # calls of an op that draws them
MISSING = 3  # exit status: there is no compute-sanitizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", help="NODESxRANKS")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tool", default="memcheck")
    parser.add_argument("--op", choices=EVERY_OP, default=EVERY_OP[0])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds")
    parser.add_argument("--seed", type=int, default=None, help="of drawn calls; default: fresh, printed")
    parser.add_argument("--rank", choices=("outside", "inside"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    if options.rank == "outside":
        _enter(options)
    if options.rank == "inside":
        return _calls(options)
    return _driver(options)


def _driver(options: argparse.Namespace) -> int:
    nodes, per_node = (int(part) for part in options.world.split("x"))
    arguments = [__file__, *_arguments(options), "--tool", options.tool, "--rank", "outside"]
    with tempfile.TemporaryFile() as output:
        try:
            status = launcher.run(
                nodes * per_node, arguments, timeout=options.limit, kind="processes", environment={"PYTHONPATH": str(ROOT)}, output=output
            )
            problem = f"status {status}" if status else ""
        except launcher.LauncherError as error:
            status, problem = 1, str(error)
        output.seek(0)
        text = output.read().decode(errors="replace")
    print(text, flush=True)
    if status == MISSING:
        print(f"RESULT {options.tool} {options.world}\tNOT RUN\tthere is no compute-sanitizer here", flush=True)
        return 1
    found = verdict(text, nodes * per_node) or problem
    detail = found or f"{f'{len(SHAPES)} shapes' if options.op in OPS else f'{DRAWN} calls of --seed {options.seed}'}, 0 errors"
    print(f"RESULT {options.tool} {options.world}\t{'FAILED' if found else 'ok'}\t{detail}", flush=True)
    return 1 if found else 0


def _arguments(options: argparse.Namespace) -> list[str]:
    more = ["--seed", str(options.seed), "--limit", str(options.limit)]
    return [options.world, "--target", options.target, "--op", options.op, *more]


def verdict(text: str, ranks: int) -> str:
    """What is wrong, from what the sanitizers of all ranks have printed; empty: nothing."""
    errors = [int(number) for number in SUMMARY.findall(text)]
    if sum(errors):
        return f"errors or hazards by rank: {errors}"
    if len(errors) != ranks:
        return f"{len(errors)} summaries of {ranks} ranks"
    return "" if text.count("CALLS RIGHT") == ranks else "a rank's results were wrong, or it did not come to them"


def _enter(options: argparse.Namespace) -> None:
    """Become the sanitizer of this rank."""
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
    sanitizer = shutil.which("compute-sanitizer", path=folders)
    if sanitizer is None:
        sys.exit(MISSING)
    # What the driver refuses is checked by mkernel itself; CuPy asks it for things that may be refused.
    tool = [sanitizer, "--tool", options.tool, "--report-api-errors", "no", "--error-exitcode", "9"]
    os.execv(sanitizer, [*tool, sys.executable, __file__, *_arguments(options), "--rank", "inside"])


def _calls(options: argparse.Namespace) -> int:
    per_node = int(options.world.split("x")[1])
    rng = random.Random(options.seed)
    shapes = [(*shape, transposed) for shape in SHAPES for transposed in (False, True)]
    if options.op not in OPS:
        shapes = [(0, 0, rng.randrange(2**31), False) for _ in range(DRAWN)]
    with (
        mk.init(target=options.target, ranks_per_node=per_node, heap_bytes=64 << 20, timeout=options.limit) as world,
        drawn.in_pieces(options.target),
    ):
        for shape in shapes:
            right = started(world, options.op, *shape)
            world.synchronize()
            assert right(), f"rank {world.rank}: wrong result for {shape}"
        world.barrier()
    print("CALLS RIGHT", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
