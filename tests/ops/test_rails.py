"""Ranks put to their rail only: the same local rank of the other nodes. So a rank needs as many connections as there are other nodes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from mkernel.bench.cases import ops
from mkernel.ops.op import BUILT_IN, find
from mkernel.transport.base import Put
from mkernel.transport.emulated import EmulatedTransport
from tests.ops.body import topology
from tests.shared.worlds import found_wrong

_LATER = ("3x2", "2x3", "2x4")  # with --full


class _Noting(EmulatedTransport):
    """Notes who puts to whom: (rank, destination)."""

    noted: ClassVar[set[tuple[int, int]]] = set()

    def post(self, put: Put) -> bool:
        self.noted.add((self._rank, put.dst_rank))
        return super().post(put)


@pytest.mark.parametrize("world", ["2x2", *(pytest.param(world, marks=pytest.mark.slow) for world in _LATER)])
@pytest.mark.parametrize("op", [*(name for name in BUILT_IN if find(name).bench), "moe_layer"])
@pytest.mark.drawn(2)
def test_every_op_puts_on_its_rail(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, op: str, world: str) -> None:
    """All of the rail is put to, and nobody else: the emulated network refuses to, which would be an error of the call."""
    shape, seed = topology(world), int(rng.integers(1 << 30))
    monkeypatch.setattr(_Noting, "noted", set())
    monkeypatch.setattr("mkernel.transport.emulated.EmulatedTransport", _Noting)
    monkeypatch.setenv("MKERNEL_CPU_SMS", "8")  # ring attention needs a CTA for each of the others
    sizes = tuple(ops()[op].demo_sizes("cpu", shape.size))
    assert found_wrong(op, world, "bfloat16", sizes[1:] or sizes, seed) is None, seed
    assert _Noting.noted == {(rank, peer) for rank in range(shape.size) for peer in shape.rail_peers(rank)}
