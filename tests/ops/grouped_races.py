"""Calls of the grouped GEMM under ThreadSanitizer: ``python tests/ops/grouped_races.py``. Exits with 0 if all was right."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ops.grouped_body import Case, run

_COUNTS = (65, 0, 3, 130)
CASES = (Case(136, 72, _COUNTS), Case(72, 72, _COUNTS[::-1], aligned=True, gated=True))


def main() -> int:
    found = run(CASES, 1)
    print(found)
    return 0 if found is None else 1


if __name__ == "__main__":
    sys.exit(main())
