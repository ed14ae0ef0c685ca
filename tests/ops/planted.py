"""Runs allgather_gemm over several seeds until something is found wrong: ``python tests/ops/planted.py <world> <first seed> <seeds>``.

With a faulty copy of the device code (``MKERNEL_KERNELS_SRC``) this must find the fault. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mkernel as mk
from mkernel.errors import CompileError, Error
from tests.ops.body import USES, Case, Rank, problems, topology

_CASE = Case("bfloat16", 256, 264)  # several steps of k, several tiles, an odd number of panels in a tile, parts of K
_CALLS = ((300, USES[2]), (129, USES[9]), (300, USES[3]))  # rows, and where a and out are


def _calls(world: Any, seed: int) -> list[str]:
    rank = Rank(world, _CASE, seed, (129, 300))
    return problems([rank.call(number, rows, use) for number, (rows, use) in enumerate(_CALLS)])


def check(world: str, seed: int) -> str | None:
    """What is wrong: a result, a complaint of the emulator, a deadlock."""
    shape = topology(world)
    try:
        found = mk.launch(_calls, shape.size, shape.ranks_per_node, "cpu", (seed,), seed=seed, heap_bytes=16 << 20, timeout=5.0, entry_timeout=5.0)
    except CompileError:
        raise
    except Error as error:
        return f"{type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", ()))
    return next((f"wrong: {problem}" for of_rank in found for problem in of_rank), None)


def main(world: str, first: str, count: str) -> None:
    for seed in range(int(first), int(first) + int(count)):
        found = check(world, seed)
        if found is not None:
            sys.stdout.write(json.dumps({"seed": seed, "found": found}) + "\n")
            return
    sys.stdout.write(json.dumps({"seed": None, "found": None}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
