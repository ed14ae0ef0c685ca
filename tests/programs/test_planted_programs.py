"""Random programs find what they are for: device code that gives way in one place fails in a few of them.

The same seeds in every run, in 2x2: the same program and seed give the same interleaving. Whatever makes programs tamer shows here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.planted_common import COMMON
from tests.programs.program import SHARED_BITS, draw
from tests.programs.run import run

KERNELS = 4
# Bug, and the most programs that it may take: some three times what it takes on average.
REVERSALS = {
    "only the owner of the memory, and its rail, are waited for": 20,
    "a shard is staged in the gather buffer, before others have entered": 12,
    "entries have the deadline of other waits": 40,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if i == 0 else pytest.mark.slow) for i, name in enumerate(REVERSALS)])
def test_a_planted_reversal_is_found(tmp_path: Path, name: str) -> None:
    (bug,) = (bug for bug in COMMON if bug.name == name)
    with bug.in_force(tmp_path / "kernels_src"):
        for family in range(2):  # half of the programs each
            for seed in range(family << SHARED_BITS, (family << SHARED_BITS) + REVERSALS[name] // 2):
                failure = run(draw("2x2", seed, kernels=KERNELS), seed)
                if failure is not None:
                    return
    pytest.fail(f"none of {REVERSALS[name]} programs fails: {name}")
