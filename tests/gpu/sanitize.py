"""Small calls under ``compute-sanitizer --tool memcheck``: ``python tests/gpu/sanitize.py 1x1 --op two_shot``. Prints a RESULT line."""

from __future__ import annotations

import argparse
import os
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
from tests.gpu.exact import OPS, fused  # noqa: E402

SHAPES = ((256, 136, 72), (129, 128, 520), (1, 8, 8))  # rows of one rank, N, K: whole tiles, tails in every direction, one row
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
MISSING = 3  # exit status: there is no compute-sanitizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("world", help="NODESxRANKS")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tool", default="memcheck")
    parser.add_argument("--op", choices=OPS, default=OPS[0])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds")
    parser.add_argument("--rank", choices=("outside", "inside"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank == "outside":
        _enter(options)
    if options.rank == "inside":
        return _calls(options)
    return _driver(options)


def _driver(options: argparse.Namespace) -> int:
    nodes, per_node = (int(part) for part in options.world.split("x"))
    arguments = [__file__, options.world, "--target", options.target, "--tool", options.tool, "--op", options.op, "--rank", "outside"]
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
    print(f"RESULT {options.tool} {options.world}\t{'FAILED' if found else 'ok'}\t{found or f'{len(SHAPES)} shapes, 0 errors'}", flush=True)
    return 1 if found else 0


def verdict(text: str, ranks: int) -> str:
    """What is wrong, from what the sanitizers of all ranks have printed; empty: nothing."""
    errors = [int(number) for number in SUMMARY.findall(text)]
    if sum(errors):
        return f"errors by rank: {errors}"
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
    arguments = [options.world, "--target", options.target, "--op", options.op, "--rank", "inside"]
    os.execv(sanitizer, [*tool, sys.executable, __file__, *arguments])


def _calls(options: argparse.Namespace) -> int:
    per_node = int(options.world.split("x")[1])
    with mk.init(target=options.target, ranks_per_node=per_node, heap_bytes=64 << 20, timeout=options.limit) as world:
        for rows, n, k in SHAPES:
            for transposed in (False, True):
                c, expected, _ = fused(world, options.op, rows, n, k, transposed)
                world.synchronize()
                assert bool((c == expected).all()), f"rank {world.rank}: wrong result for {(rows, n, k)}"
        world.barrier()
    print("CALLS RIGHT", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
