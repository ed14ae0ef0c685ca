"""``mk.launch`` on GPUs: the cells of notebook.py, here also as the ordinary API is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.runtime.cuda.gpus import available

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("notebook.py")


@pytest.mark.parametrize(("ranks", "per_node"), [(2, 2), (2, 1), (4, 4), (4, 2)])
def test_cells(ranks: int, per_node: int) -> None:
    if len(available()) < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    command = [sys.executable, str(SCRIPT), "--ranks", str(ranks), "--ranks-per-node", str(per_node)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == 11
    assert all("\tok\t" in line for line in lines), done.stdout


def test_ranks_are_processes_with_a_gpu_each() -> None:
    if len(available()) < 2:
        pytest.skip("needs 2 GPUs")

    def use(world: Any, given: Any) -> tuple[int, int, bool, Any]:
        here = int(given.device.id) == world.device  # a CuPy array of the caller's has come to the rank's own GPU
        return os.getpid(), world.xp.cuda.Device().id, here, {"nested": [given * world.rank]}

    import cupy

    try:
        results = mk.launch(use, 2, args=(cupy.arange(4),), heap_bytes=1 << 24)  # target="auto"
        again = mk.launch(use, 2, args=(cupy.arange(4),), heap_bytes=1 << 24)
    finally:
        mk.shutdown()
    assert len({os.getpid(), *(r[0] for r in results)}) == 3
    assert [r[0] for r in again] == [r[0] for r in results]
    assert [r[1] for r in results] == [0, 1]
    assert all(r[2] for r in results)
    for rank, result in enumerate(results):
        (array,) = result[3]["nested"]
        assert type(array) is np.ndarray
        np.testing.assert_array_equal(array, np.arange(4) * rank)


def test_tensors_of_torch_come_back_as_cpu_tensors() -> None:
    torch = pytest.importorskip("torch")
    if len(available()) < 2:
        pytest.skip("needs 2 GPUs")

    def use(world: Any, given: Any) -> tuple[bool, Any]:
        return given.is_cuda and given.device.index == world.device, given + world.rank

    try:
        results = mk.launch(use, 2, args=(torch.arange(4, device="cuda"),), heap_bytes=1 << 24)
    finally:
        mk.shutdown()
    for rank, (placed, tensor) in enumerate(results):
        assert placed
        assert not tensor.is_cuda
        assert tensor.tolist() == [value + rank for value in range(4)]
