"""A rank of the process tests: ``python tests/ops/worker.py <scenario>``. Prints one line of JSON per rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mkernel as mk
from tests.ops.body import Case, back_to_back, problems

_ROWS = (0, 1, 129, 300)
_CASES = (Case("bfloat16", 136, 264), Case("float16", 72, 520, False, "narrow"), Case("float16", 200, 72, True, "wide"))


def tell(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def calls() -> None:
    """The body of the thread tests, for several kernels; ranks come to each call at random times."""
    seed = int(os.environ["TEST_SEED"])
    found: list[str] = []
    count = 0
    with mk.init(target="cpu", heap_bytes=64 << 20, timeout=60.0) as world:
        for i, case in enumerate(_CASES):
            results = back_to_back(world, case, seed + i, 0.02, _ROWS)
            found += problems(results)
            count += len(results)
        tell(rank=world.rank, shape=f"{world.num_nodes}x{world.ranks_per_node}", calls=count, problems=found)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
