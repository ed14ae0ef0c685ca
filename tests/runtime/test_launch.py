"""``mk.launch`` on the cpu target: all ranks' kernels on one scheduler with virtual time. Every failure shows itself at once."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.runtime.cpu.backend import ThreadRanks
from mkernel.runtime.current import named
from mkernel.runtime.world import World


def inputs(rows: int = 40, n: int = 72) -> tuple[Any, Any]:
    return np.ones((rows, 64), np.float16), np.ones((64, n), np.float16)


def multiply(world: World, n: int = 72) -> Any:
    return mk.allgather_gemm(*inputs(n=n))


@pytest.mark.parametrize(("ranks", "per_node"), [(1, None), (3, None), (4, 2), (4, 1)])
def test_results_by_rank(ranks: int, per_node: int | None) -> None:
    def use(world: World, scale: float) -> Any:
        a, b = inputs()
        for _ in range(3):
            c = mk.allgather_gemm(a * np.float16(world.rank * scale), b)
        world.barrier()
        return c

    results = mk.launch(use, ranks, per_node, target="cpu", args=(0.5,), heap_bytes=1 << 22)
    expected = np.repeat(np.arange(ranks) * 32.0, 40)[:, None] * np.ones(72)
    for result in results:
        np.testing.assert_array_equal(result.astype(np.float64), expected)


def test_the_same_seed_gives_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[int] = []
    close = ThreadRanks.close

    def note(self: ThreadRanks) -> None:
        if threading.current_thread() is threading.main_thread():
            traces.append(self.trace)
        close(self)

    def use(world: World) -> None:
        for turn in range(4):
            multiply(world)
            world.barrier()
            if turn % 2:
                world.empty(100, "uint8")

    monkeypatch.setattr(ThreadRanks, "close", note)
    for seed in (1, 1, 1, 2):
        mk.launch(use, 4, 2, target="cpu", seed=seed, heap_bytes=1 << 22)
    assert traces[0] == traces[1] == traces[2] != traces[3]


def test_a_rank_that_stays_away() -> None:
    def use(world: World) -> None:
        multiply(world)
        if world.rank != 2:
            multiply(world)

    with pytest.raises(mk.Error) as caught:
        mk.launch(use, 3, target="cpu", heap_bytes=1 << 22, entry_timeout=3600.0)  # virtual time: a test may take 300 s
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "rank 2" in text
    assert "close()" in text or "never entered call 2" in text


@pytest.mark.parametrize(("ranks", "per_node"), [(3, None), (4, 2)])
def test_another_plan_in_the_same_call(ranks: int, per_node: int | None) -> None:
    def use(world: World) -> None:
        multiply(world)
        multiply(world, n=8)
        multiply(world, n=8 if world.rank == 1 else 72)

    with pytest.raises(mk.MismatchError) as caught:
        mk.launch(use, ranks, per_node, target="cpu", heap_bytes=1 << 22)
    assert "call 3" in str(caught.value)
    assert all("MismatchError" in note for note in caught.value.__notes__ if note.startswith("rank "))


def test_a_new_plan_against_a_cached_one() -> None:
    def use(world: World) -> None:
        multiply(world)
        multiply(world, n=16 if world.rank == 1 else 72)

    with pytest.raises(mk.MismatchError, match="rank 1 asked for"):
        mk.launch(use, 3, target="cpu", heap_bytes=1 << 22)


def test_an_exception_on_one_rank_takes_kernels_along() -> None:
    def use(world: World) -> None:
        multiply(world)
        if world.rank == 1:
            raise LookupError("mine")
        multiply(world)

    with pytest.raises(LookupError, match="mine") as caught:
        mk.launch(use, 3, target="cpu", heap_bytes=1 << 22)
    assert caught.value.__notes__[0] == "raised on rank 1 of mk.launch"


def test_a_new_world_after_each_failure() -> None:
    for _ in range(3):
        with pytest.raises(LookupError):
            mk.launch(lambda world: multiply(world) if world.rank else {}["missing"], 3, target="cpu", heap_bytes=1 << 22)
        assert len(mk.launch(multiply, 2, target="cpu", heap_bytes=1 << 22)) == 2


def test_a_broken_link_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated network fails a completion: every rank gets the TransportError."""
    from mkernel.transport import emulated

    def create(wiring: Any) -> Any:
        faults = emulated.Faults(fail_completion=1) if wiring.rank == 1 else None
        return emulated.EmulatedTransport(wiring.rank, wiring.heap_address, wiring.peers, wiring.copier(), wiring.clock_ns, faults=faults)

    monkeypatch.setattr(emulated, "create", create)
    with pytest.raises(mk.TransportError) as caught:
        mk.launch(multiply, 4, 2, target="cpu", heap_bytes=1 << 22)
    assert "injected fault" in str(caught.value)
    assert sum("TransportError" in note for note in caught.value.__notes__) == 3


def test_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    mk.launch(multiply, 4, 2, target="cpu", heap_bytes=1 << 22)
    assert [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("mkernel")] == []


def test_a_name_means_the_rank_of_this_thread() -> None:
    """Whichever rank's it is: what torch compiles for one thread names that one's world, and runs on all."""
    names: list[str] = []

    def rank(world: World) -> list[bool]:
        names.append(world.name)
        world.barrier()
        return [named(name) is world for name in names]

    assert mk.launch(rank, 3, target="cpu") == [[True] * 3] * 3
    with mk.init(target="cpu") as alone:
        assert named(alone.name) is alone
