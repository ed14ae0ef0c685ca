"""What a rank's later calls do after a refused one, by the kernels themselves: nothing, and without waiting for anybody.

On target cpu a call ends before the host goes on, so that the host never is ahead. Here kernels are launched as the replay of a graph
launches them: without a look at what has been reported.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import abi
from mkernel.errors import CompileError, Error
from mkernel.jit.headers import kernels_src
from mkernel.ops.call import BoundCall
from tests.small_op import plan as planner
from tests.small_op.op import allgather_rows
from tests.small_op.plan import RowsError

ROUNDS = 3


class Program:
    """Calls of every op of a world, over arrays that stay the same, and their results."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.rows = 3 + world.rank
        self.x = np.full((self.rows, 16), world.rank + 1, np.float16)
        self.a = np.full((world.size * 40, 64), world.rank + 1, np.float16)
        self.b = np.full((64, 16), 0.125, np.float16)
        self.total = world.size * (world.size + 1) // 2
        self.room = sum(3 + rank for rank in range(world.size))
        self.bound: list[BoundCall] = []

    def all(self) -> None:
        """One call of each op, whose results are right."""
        size, before = self.world.size, set(self.world.bound_calls)
        ranks = np.arange(1, size + 1)
        gathered = allgather_rows(self.x, max_rows=self.room)
        assert (gathered.rows[:, 0] == np.repeat(ranks, 2 + ranks)).all()
        assert (mk.allgather_gemm(self.a[:40], self.b) == np.repeat(ranks, 40)[:, None] * 8).all()
        assert (mk.gemm_reduce_scatter(self.a, self.b) == 8 * self.total).all()
        for algorithm in ("one_shot", "two_shot"):
            assert (mk.gemm_allreduce(self.a, self.b, algorithm=algorithm) == 8 * self.total).all()
        tiles = mk.Split(intra_comm=1) if size > 1 else None  # instead of packets
        assert (mk.gemm_allreduce(self.a, self.b, split=tiles, algorithm="two_shot") == 8 * self.total).all()
        new = [value for key, value in self.world.bound_calls.items() if key not in before and isinstance(value, BoundCall)]
        self.bound = self.bound or new

    def refused(self) -> BoundCall:
        """The call that is refused."""
        before = set(self.world.bound_calls)
        with pytest.raises(RowsError):
            allgather_rows(self.x, max_rows=self.room - 1)
        return next(v for k, v in self.world.bound_calls.items() if k not in before and isinstance(v, BoundCall))

    def replay(self, bound: BoundCall) -> None:
        self.world.backend.launch(bound.executable.kernel, None, bound.executable.grid, bound.parameters)


def program(world: Any) -> list[int]:
    calls, skipped = Program(world), list[int]()
    calls.all()
    bad = calls.refused()
    for number in range(ROUNDS):
        control = abi.ControlBlock.from_address(world.header.control)
        before = control.epoch
        calls.replay(bad)
        assert control.epoch == (before + 1) | abi.HALTED
        later = [*calls.bound, bad][number : number + 2 + 2 * world.rank]  # another number on each rank, of other ops
        for each in later:
            calls.replay(each)
        with pytest.raises(RowsError) as caught:
            world.check()
        assert (caught.value.call, caught.value.skipped) == (before + 1, len(later))
        assert control.epoch == before + 1
        skipped.append(len(later))
        calls.all()
    for each in [bad, *calls.bound]:  # all of them at once
        calls.replay(each)
    with pytest.raises(RowsError, match=f"{len(calls.bound)} later calls of this rank were skipped"):
        world.barrier()
    calls.all()
    world.barrier()
    return skipped


@pytest.mark.parametrize("world", ["1x1", "1x2", "1x3", "2x2", "3x1"])
@pytest.mark.drawn(1)
def test_later_calls_are_skipped_whatever_they_are(rng: np.random.Generator, world: str) -> None:
    nodes, per_node = map(int, world.split("x"))
    seed = int(rng.integers(1 << 30))
    found = mk.launch(program, nodes * per_node, per_node, "cpu", seed=seed, heap_bytes=8 << 20, timeout=5.0, entry_timeout=5.0)
    assert len(found) == nodes * per_node, f"seed {seed}"


# ---- planted bugs: in copies of the kernel and of the headers that it includes
BUGS = {
    "later calls enter": (
        "allgather_rows.cuh",
        "const MaybeEntered entered = enter(call);",
        "const MaybeEntered entered = enter(Call{call.world, call.before & ~abi::kHalted, call.role, call.check});",
    ),
    "later calls are announced": ("comm/ring.cuh", "if (is_skipped(call)) return;", ""),
    "the refused call leaves as any other": (
        "allgather_rows.cuh",
        "refused ? leave_refused(call) : leave_call(call);",
        "leave_call(call);",
    ),
}


def ahead(world: Any) -> None:
    """A refused call, after which each rank replays another number of right ones; then all call again."""
    x, room = np.full((3, 16), world.rank + 1, np.float16), 3 * world.size
    before = set(world.bound_calls)
    allgather_rows(x, max_rows=room)
    with pytest.raises(RowsError):
        allgather_rows(x, max_rows=room - 1)
    right, bad = (v for k, v in world.bound_calls.items() if k not in before and isinstance(v, BoundCall))
    for each in [bad, *[right] * world.rank]:
        world.backend.launch(each.executable.kernel, None, each.executable.grid, each.parameters)
    with pytest.raises(RowsError) as caught:
        world.check()
    assert caught.value.skipped == world.rank
    for spare in (1, 2):
        gathered = allgather_rows(x, max_rows=room + spare)
        assert (gathered.rows[:room, 0] == np.repeat(np.arange(1, world.size + 1), 3)).all()


def run_ahead() -> None:
    mk.launch(ahead, 3, 3, "cpu", heap_bytes=1 << 20, timeout=1.0, entry_timeout=1.0)


def test_nothing_is_found_in_the_kernel_as_it_is() -> None:
    run_ahead()


@pytest.mark.parametrize("bug", BUGS)
def test_planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bug: str) -> None:
    name, old, new = BUGS[bug]
    kernel = Path(__file__).parent / "allgather_rows.cuh"
    shutil.copy(kernel, tmp_path)
    (tmp_path / "comm").mkdir()
    text = (kernel if name == kernel.name else kernels_src() / name).read_text()
    assert text.count(old) == 1, "the text of the bug has changed"
    (tmp_path / name).write_text(text.replace(old, new))
    monkeypatch.setattr(planner, "FOLDER", tmp_path)
    with pytest.raises((Error, AssertionError)) as caught:
        run_ahead()
    assert not isinstance(caught.value, CompileError), caught.value
