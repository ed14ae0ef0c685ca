"""Any op on target cpu: its bench case in a world of any shape, every element checked, under schedules of any seed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mkernel as mk
from mkernel.bench.cases import ops
from mkernel.bench.timing import CpuTiming
from mkernel.transport import emulated
from tests.ops.body import topology
from tests.shared.findings import errors_are_findings

__all__ = ["found_wrong"]

_NETWORK_US = 20.0  # bytes of a put travel at the latest legal time


class _Arrays(CpuTiming):
    def sets(self, set_bytes: int) -> int:
        return 3


def _run(world: Any, op: str, dtype: str, sizes: tuple[str, ...], seed: int) -> list[float]:
    """The worst error of each size, over calls with other inputs each: what an earlier call has left in memory is never right."""
    errors = []
    for number, size in enumerate(sizes):
        case = ops()[op].case(size, world.topology, dtype)
        case.setup(_Arrays(world, dtype), seed + number)
        calls = case.fused()
        for call in calls:
            call()
        errors.append(max((case.worst(index) for index in range(len(calls))), key=lambda error: (error != error, error)))
    return errors


@errors_are_findings
def found_wrong(op: str, world: str, dtype: str, sizes: tuple[str, ...], seed: int, **options: Any) -> str | None:
    """What is wrong with calls of the op's bench cases, one size after the other: a result, a complaint of the emulator, a deadlock."""
    shape = topology(world)
    faults = emulated.Faults(seed=seed, delay_us=_NETWORK_US, reorder_us=_NETWORK_US)
    defaults: dict[str, Any] = {"heap_bytes": 16 << 20, "timeout": 5.0, "entry_timeout": 60.0}
    with mock.patch.object(emulated, "Faults", lambda: faults):
        arguments = (op, dtype, sizes, seed)
        found = mk.launch(_run, shape.size, shape.ranks_per_node, "cpu", arguments, seed=seed, **{**defaults, **options})
    wrong = [f"rank {rank}, {size}: {worst:g} of its bound" for rank, of_rank in enumerate(found)
             for size, worst in zip(sizes, of_rank, strict=True) if not worst <= 1]  # fmt: skip
    return "wrong: " + "; ".join(wrong) if wrong else None
