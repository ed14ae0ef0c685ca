"""A mailbox inside a CTA ends: its reader drains it, however many items it has a use for."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from mkernel import abi
from mkernel.errors import Error
from mkernel.runtime.cpu.backend import CpuBackend
from tests.cpu_target.harness import aligned, load

SLOTS = 4  # kMailboxSlots


class Parameters(ctypes.Structure):
    """``Parameters`` of ``kernels/mailbox_end.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("items", ctypes.c_uint64),
        ("taken", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 5),
    ]


def run(items: int, taken: int, seed: int, *, drains: bool) -> tuple[int, bool]:
    """Number of items taken before the mailbox was drained, and whether its end was reached."""
    kernel = load("mailbox_end", Parameters, threads=64, shared=1024, kDrains=int(drains))
    control, block = aligned(16, np.uint64), aligned(16, np.uint64)
    signals, out = aligned(abi.SIGNAL_FLAGS // 8, np.uint64), aligned(2, np.uint64)
    world = abi.World(size=1, num_nodes=1, ranks_per_node=1, control=control.ctypes.data, host=block.ctypes.data)
    world.signal_base, world.timeout_ns, world.entry_timeout_ns = signals.ctypes.data, 10**9, 10**9
    parameters = Parameters(world=world, items=items, taken=taken, out=out.ctypes.data)
    CpuBackend(seed=seed).launch(kernel, 0, 1, bytes(parameters))
    return int(out[0]), bool(out[1])


def test_a_mailbox_ends_whatever_is_taken_from_it(rng: np.random.Generator) -> None:
    for seed in range(20):
        items, taken = int(rng.integers(0, 5 * SLOTS)), int(rng.integers(0, 5 * SLOTS))
        assert run(items, taken, seed, drains=True) == (min(items, taken), True), (items, taken)


@pytest.mark.parametrize("seed", range(3))
def test_without_draining_whoever_posts_waits_for_ever(seed: int) -> None:
    """The end mark itself needs room."""
    assert run(SLOTS + 1, 2, seed, drains=False) == (2, False), "as long as there is room"
    with pytest.raises(Error, match=r"deadlock(.|\n)*mbarrier"):
        run(SLOTS + 2, 2, seed, drains=False)
