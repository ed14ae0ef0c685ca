"""Worlds of any of a program's processes, in any order, opened and closed between calls: as tensor- and expert-parallel groups are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.runtime.processes import start_mpi

_WORKER = Path(__file__).with_name("several_worlds.py")


@pytest.mark.mpi
@pytest.mark.parametrize("number", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 12))])
def test_several_worlds(rng: np.random.Generator, number: int) -> None:
    processes = 4 if number % 3 == 0 else int(rng.integers(2, 7))
    result = start_mpi("program", processes, worker=_WORKER, TEST_SEED=str(rng.integers(1 << 30)))
    assert result.code == 0, result
    assert result.lines == [{"rank": rank, "problems": []} for rank in range(processes)], result.errors
