"""Calls of ``allgather_rows`` under ThreadSanitizer: ``python tests/small_op/races.py <ranks> <ranks per node> <folder of the kernel>``.

A few rows, many chunks; then a call with too many rows, and a right one after it. Exits with 0 if all was right.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import mkernel as mk
from tests.small_op import plan
from tests.small_op.op import allgather_rows
from tests.small_op.plan import RowsError

_COLUMNS = 24


def calls(world: Any) -> bool:
    counts = [(5, 0, 41, 18)[rank % 4] for rank in range(world.size)]
    x = np.full((counts[world.rank], _COLUMNS), world.rank + 1, np.float16)
    expected = np.repeat(np.arange(1, world.size + 1), counts)[:, None]
    right = []
    for room in (sum(counts), sum(counts) - 1, sum(counts) + 1):
        try:
            right.append(bool((allgather_rows(x, max_rows=room).rows[: sum(counts)] == expected).all()))
        except RowsError as error:
            right.append(error.max_rows == room < sum(counts))
    return all(right)


def main(ranks: str, ranks_per_node: str, folder: str) -> int:
    plan.CHUNK_BYTES, plan.FOLDER = 128, Path(folder)
    found = mk.launch(calls, int(ranks), int(ranks_per_node), "cpu", heap_bytes=1 << 20, timeout=60.0, entry_timeout=60.0)
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
