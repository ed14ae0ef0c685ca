"""Calls of local attention under ThreadSanitizer: ``python tests/ops/attention_races.py``. Exits with 0 if all was right."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.ops.attention_body import Case, run

CASES = (Case(130, 400, heads=2), Case(150, 300, causal=True, chunk=70, padding=20, parts=2))


def main() -> int:
    found = run(CASES, 1)
    print(found)
    return 0 if found is None else 1


if __name__ == "__main__":
    sys.exit(main())
