"""``max_sms``: kernels leave SMs to others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.errors import ArgumentError
from mkernel.planner.split import Split
from mkernel.runtime.launch import run
from mkernel.runtime.options import Options
from tests.runtime.fake import FakeBackend

OPS = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce")


def _plans(world: Any, m: int = 512) -> list[int]:
    a, b = np.zeros((m, 64), np.float16), np.zeros((64, 256), np.float16)
    return [mk.plan(op, a, b, world=world).split().total for op in OPS]


@pytest.mark.parametrize("per_node", [4, 2])
def test_no_plan_takes_more(per_node: int) -> None:
    with env.override(MKERNEL_CPU_SMS=16):
        usual = mk.launch(_plans, ranks=4, ranks_per_node=per_node, target="cpu", heap_bytes=1 << 24)
        limited = mk.launch(_plans, ranks=4, ranks_per_node=per_node, target="cpu", heap_bytes=1 << 24, max_sms=9)
        more = mk.launch(_plans, ranks=4, ranks_per_node=per_node, target="cpu", heap_bytes=1 << 24, max_sms=1000)
    assert usual == more == [[16] * 3] * 4
    assert limited == [[9] * 3] * 4


def test_results_are_right() -> None:
    def use(world: Any) -> bool:
        a, b = np.ones((40, 64), np.float16), np.ones((64, 72), np.float16)
        return bool((mk.allgather_gemm(a * np.float16(world.rank), b) == np.repeat(np.arange(4) * 64.0, 40)[:, None]).all())

    with env.override(MKERNEL_CPU_SMS=8):
        assert mk.launch(use, ranks=4, ranks_per_node=2, target="cpu", heap_bytes=1 << 22, max_sms=3) == [True] * 4


def test_the_environment_sets_it() -> None:
    with env.override(MKERNEL_MAX_SMS=3):
        assert Options.resolve().max_sms == Options.resolve(max_sms=None).max_sms == 3
        assert Options.resolve(max_sms=2).max_sms == 2
    assert Options.resolve().max_sms is None


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_bad_numbers(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"max_sms = .*positive integer"):
        Options.resolve(max_sms=value)


def test_too_few_for_the_roles() -> None:
    def use(world: Any) -> None:
        with pytest.raises(ArgumentError, match=r"max_sms = 1: is too few for this op and world: compute gets 0 of 1 SMs.*raise it"):
            _plans(world)
        with pytest.raises(ArgumentError, match=r"split = .*asks for 3 SMs, the device has 1"):
            mk.plan("allgather_gemm", np.zeros((8, 8), np.float16), np.zeros((8, 8), np.float16), split=Split(2, 1))

    mk.launch(use, ranks=2, target="cpu", heap_bytes=1 << 22, max_sms=1)


def test_the_device_is_seen_smaller() -> None:
    """Its plans, its traces, and what was tuned there are those of a smaller device."""

    def use(world: Any) -> tuple[int, int]:
        return world.backend.sm_count, world.tuning_key.sms

    def launched(limit: int | None) -> Any:
        return run(use, 2, Options(target="cuda", heap_bytes=1 << 20, max_sms=limit), make_backend=FakeBackend)

    assert launched(3) == [(3, 3)] * 2
    assert launched(5) == launched(None) == [(4, 4)] * 2


@pytest.mark.parametrize("sms", [(7, 4, 6), (3, 9, 9)])
def test_ranks_on_devices_of_different_sizes_plan_for_the_smallest(sms: tuple[int, ...]) -> None:
    """Calls tell each other problem, rows and the split that was asked for: what follows from these must be the same on every rank."""

    def make_backend(*arguments: Any) -> FakeBackend:
        device = FakeBackend(*arguments)
        device.sm_count = sms[arguments[-1]]
        return device

    def use(world: Any) -> int:
        return world.backend.sm_count

    assert run(use, 3, Options(target="cuda", heap_bytes=1 << 20), make_backend=make_backend) == [min(sms)] * 3
    assert run(use, 3, Options(target="cuda", heap_bytes=1 << 20, max_sms=5), make_backend=make_backend) == [min(*sms, 5)] * 3
