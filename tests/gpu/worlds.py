"""Worlds of tests on GPUs: which there are, and whether this machine has room for one."""

from __future__ import annotations

import pytest

from mkernel import env
from mkernel.runtime.cuda.gpus import available

__all__ = ["WORLDS", "gpus_of"]

WORLDS = ("1x1", "1x2", "2x1", "1x4", "2x2")
_RANKS_OF_A_GPU = 4  # that take turns, with MKERNEL_SHARE_GPUS=1


def gpus_of(world: str) -> tuple[int, int]:
    """Ranks, and ranks per node. Skips the test where there are too few GPUs."""
    nodes, per_node = map(int, world.split("x"))
    if nodes * per_node > len(available()) * (_RANKS_OF_A_GPU if env.SHARE_GPUS.get() else 1):
        pytest.skip(f"{nodes * per_node} GPUs needed, or one and MKERNEL_SHARE_GPUS=1")
    return nodes * per_node, per_node
