"""Clusters on target cpu: CTAs that reach each other's shared memory; and what goes wrong between them is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mkernel import abi
from mkernel.errors import Error
from mkernel.runtime.cpu.backend import CpuBackend
from tests.cpu_target.harness import aligned, load, structure

_SEEDS = range(8)
_ROUNDS, _ROWS, _CTAS = 3, 8, 4
_Parameters = structure("out", "fault", maps=("source",), words=8)


def run(fault: int, seed: int, *, cluster: int = 2, ctas: int = _CTAS) -> str | None:
    """What is wrong."""
    kernel = load("cluster", _Parameters, threads=64, shared=4096, cluster=cluster)
    device = CpuBackend(seed=seed)
    source = aligned((_ROUNDS * 2 * _ROWS, 64), np.uint16)
    source[...] = np.arange(source.size).reshape(source.shape)
    out = aligned((_CTAS, _ROUNDS * (2 * _ROWS * 128 + 16)), np.uint8, 0xFF)
    pitch, rows = source.strides[0], len(source)
    box = device.tensor_map(source.ctypes.data, "float16", (64, rows, 1), (pitch, rows * pitch), (64, _ROWS, 1), swizzled=False)
    parameters: Any = _Parameters(abi.TensorMap.from_buffer_copy(box), out.ctypes.data, fault)
    try:
        device.launch(kernel, 0, ctas, bytes(parameters))
    except Error as error:
        return str(error)
    boxes, words = out[:, : source.nbytes], out[:, source.nbytes :].view(np.uint32)[:, ::4]
    cta, turn = np.arange(_CTAS)[:, None], np.arange(_ROUNDS)
    right = (boxes.view(np.uint16) == source.ravel()).all() and (words == (cta ^ 1) * 100 + turn).all()
    return None if right else "wrong"


@pytest.mark.parametrize("seed", _SEEDS)
def test_each_fills_the_others_memory(seed: int) -> None:
    assert run(0, seed) is None


_FAULTS = {
    1: "may not have begun",
    2: "wrong|all its 1 arrivals|is in flight|nobody has waited",
    3: "overwritten|more than expected|wrong|all its 1 arrivals|overtaken|deadlock",
    4: "has ended, and its shared memory with it|ended, but a TMA load into it is in flight",
    5: "deadlock",
    6: "CTAs 0x7 of a cluster of 2",
    7: "mbarrier_init_fence is missing",
}


@pytest.mark.parametrize("fault", _FAULTS, ids=["start", "hand-over", "give-back", "end", "multicast", "outside", "init fence"])
def test_fault_is_found(fault: int) -> None:
    found = [run(fault, seed) for seed in range(24)]
    told = [text for text in found if text is not None]
    assert told, "in none of 24 runs"
    for text in told:
        assert any(part in text for part in _FAULTS[fault].split("|")), text


def test_a_launch_has_whole_clusters() -> None:
    assert "cannot launch" in str(run(0, 0, ctas=3))
    assert "of a cluster of 1" in str(run(0, 0, cluster=1))


_Room = structure("begun", "out", "waits", "timeout_ns")


def begun(seed: int, *, waits: bool, apart: bool, early: bool = True, cluster: int = 2, timeout_ns: int = 10**11) -> Any:
    """How many of eight CTAs had begun when each of them ended. ``waits``: for all, as long as ``timeout_ns``."""
    kernel = load("room", _Room, threads=32, cluster=cluster, early=early, apart=apart)
    counter, out = aligned(1, np.uint64), aligned(8, np.uint64)
    parameters: Any = _Room(counter.ctypes.data, out.ctypes.data, int(waits), timeout_ns)
    CpuBackend(seed=seed).launch(kernel, 0, 8, bytes(parameters))
    assert counter[0] == 8, "all have, at last"
    return out


def test_clusters_that_are_apart_may_have_to_wait_for_room() -> None:
    """So a kernel whose CTAs wait for all is found, if it says that its clusters need not be resident at once."""
    found = [begun(seed, waits=True, apart=True, timeout_ns=10**7) for seed in range(12)]
    assert any((out < 8).any() for out in found), "in none of 12 runs some CTA waited for one that had no room"
    alone = [int(begun(seed, waits=False, apart=True)[:2].max()) for seed in range(12)]
    assert 2 in alone, "there is room for a single cluster"


@pytest.mark.parametrize(("early", "cluster"), [(False, 2), (True, 2), (True, 1)])
def test_other_ctas_are_all_resident(early: bool, cluster: int) -> None:
    for seed in _SEEDS:
        assert (begun(seed, waits=True, apart=False, early=early, cluster=cluster) == 8).all()
