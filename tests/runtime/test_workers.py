"""Ranks of ``mk.launch`` as worker processes, on target cpu: what comes back, what stays, and what ends when."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.errors import ArgumentError, Error
from mkernel.runtime.options import Options
from mkernel.runtime.workers import calls
from mkernel.runtime.workers.calls import run_in_workers, shutdown
from mkernel.runtime.world import World
from tests.runtime.in_workers import SECONDS, alive, pids, run
from tests.unit.test_errors import KINDS, example


@pytest.fixture(scope="module", autouse=True)
def end_processes() -> Iterator[None]:
    yield
    shutdown()


def same_world(before: list[int]) -> bool:
    """Whether the next call finds the processes of before, and the world that the last call left."""
    found = run(lambda world: (os.getpid(), getattr(world, "seen_before", None)))
    run(lambda world: setattr(world, "seen_before", True))
    return [pid for pid, _ in found] == before and all(seen for _, seen in found)


# ---- what stays
def test_processes_and_their_world_stay() -> None:
    def use(world: World, scale: int) -> tuple[int, int, int, int]:
        world.turns = getattr(world, "turns", 0) + 1  # type: ignore[attr-defined]
        return world.rank * scale, os.getpid(), world.turns, os.getsid(0)  # type: ignore[attr-defined]

    shutdown()
    first, second = run(use, 1), run(use, 10)
    assert [r[0] for r in first] == [0, 1]
    assert [r[0] for r in second] == [0, 10]
    assert [r[1] for r in first] == [r[1] for r in second]
    assert [r[2] for r in second] == [2, 2]
    assert len({os.getpid(), *(r[1] for r in first)}) == 3
    assert [r[3] for r in first] == [r[1] for r in first], "each has a session of its own: Ctrl-C in a terminal does not reach it"


@pytest.mark.parametrize("other", [{"ranks": 3}, {"heap_bytes": 1 << 23}, {"ranks_per_node": 1}])
def test_other_options_are_another_world(other: dict[str, Any]) -> None:
    before, after = pids(), pids(**other)
    assert not set(before) & set(after)
    assert not any(map(alive, before)), "the old processes hold GPUs"
    assert pids(**other) == after


def test_a_switch_needs_new_processes_other_variables_do_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def look(world: World) -> tuple[Any, ...]:
        return os.getpid(), world.backend.sm_count, os.environ.get("COLOUR"), Path.cwd(), sys.path[-1], dict(os.environ)

    monkeypatch.setenv("PMI_RANK", "3")
    first = run(look)
    monkeypatch.setenv("COLOUR", "blue")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    second = run(look)
    assert [r[0] for r in first] == [r[0] for r in second]
    assert [r[2:5] for r in second] == [("blue", tmp_path, str(tmp_path))] * 2
    for name in ("PMI_RANK", "MKERNEL_RANK", "MKERNEL_RENDEZVOUS"):
        assert name not in second[0][5], "a rank of mk.launch is not one of a launcher"
    assert second[0][5].get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    with env.override(MKERNEL_CPU_SMS=2):
        third = run(look)
    assert [r[1] for r in third] == [2, 2] != [r[1] for r in second]
    assert not {r[0] for r in third} & {r[0] for r in second}


def test_arrays_of_the_heap_are_freed_between_calls() -> None:
    def fill(world: World, keep: bool) -> int:
        array = world.zeros(3 << 20, "uint8")
        circle: list[Any] = [array]
        circle.append(circle)
        return int(array.sum())

    for _ in range(4):
        assert run(fill, False) == [0, 0]


def test_closures_are_copies() -> None:
    counted: list[int] = []
    run(lambda world: counted.append(world.rank))
    assert counted == []


# ---- what comes back
class Pair(NamedTuple):
    array: Any
    name: str


@dataclasses.dataclass
class Box:
    inside: dict[str, Any]


def test_results_of_any_depth() -> None:
    def build(world: World) -> Any:
        bf16 = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
        own = world.zeros((2, 3), "float16")
        own[:] = world.rank
        return {"pair": Pair(bf16, "x"), "boxes": [Box({"own": own, "none": None}), (1, {2, 3})]}

    for rank, result in enumerate(run(build)):
        pair, (box, rest) = result["pair"], result["boxes"]
        assert isinstance(pair, Pair)
        assert isinstance(box, Box)
        assert pair.array.dtype == ml_dtypes.bfloat16
        assert pair.array.astype(int).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (box.inside["own"] == np.float16(rank)).all()
        box.inside["own"][:] = 5  # the caller's own memory
        assert rest == (1, {2, 3})


def test_a_large_argument_and_result() -> None:
    given = np.random.default_rng(0).integers(0, 255, 100 << 20, np.uint8)
    (back,) = run(lambda world, array: array[::-1], given, ranks=1)
    np.testing.assert_array_equal(back, given[::-1])


def test_a_trace_comes_back() -> None:
    def use(world: World) -> Any:
        with mk.trace(world) as trace:
            mk.allgather_gemm(np.ones((40, 64), np.float16), np.ones((64, 72), np.float16))
        return trace

    for rank, trace in enumerate(run(use)):
        assert trace.events.size
        assert f"rank {rank}" in trace.summary()
        assert "<svg" in trace._repr_svg_()


def test_five_cells() -> None:
    """What a notebook does: a plain loop that makes its inputs with NumPy and reads every result."""

    def cell(world: World, seed: int) -> float:
        rng, worst = np.random.default_rng(seed), 0.0
        for _ in range(4):
            a = rng.integers(-3, 4, (world.size, 24, 64)).astype(np.float16)
            b = rng.integers(-3, 4, (64, 72)).astype(np.float16)
            c = mk.allgather_gemm(a[world.rank], b)
            worst = max(worst, float(np.abs(c.astype(np.float64) - a.reshape(-1, 64).astype(np.float64) @ b.astype(np.float64)).max()))
        return worst

    before = pids()
    for seed in range(5):
        assert run(cell, seed) == [0.0, 0.0]
    assert pids() == before


# ---- exceptions
class OwnError(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")
        self.left, self.right = left, right


def test_every_exception_of_mkernel_comes_back() -> None:
    def fail(world: World, error: Exception) -> None:
        raise error

    for kind in KINDS:
        error = example(kind)
        with pytest.raises(kind) as caught:
            run(fail, error, ranks=1)
        assert type(caught.value) is kind
        assert str(caught.value) == str(error)
        assert {**vars(caught.value), "__notes__": []} == {**vars(error), "__notes__": []}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LookupError("mine"), LookupError),
        (KeyError(("a", 1)), KeyError),
        (OSError(2, "no such file", "name"), FileNotFoundError),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), UnicodeDecodeError),
        (ExceptionGroup("several", [ValueError("one"), TypeError("two")]), ExceptionGroup),
        (SystemExit("bad config"), SystemExit),
        (SystemExit(0), SystemExit),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (StopIteration(3), StopIteration),
        (AssertionError(), AssertionError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_exception_on_one_rank(error: BaseException, kind: type[BaseException]) -> None:
    def fail(world: World) -> None:
        world.barrier()
        if world.rank == 1:
            raise error
        world.barrier()

    before = pids()
    with pytest.raises(kind) as caught:
        run(fail)
    assert repr(caught.value.args) == repr(error.args)
    assert caught.value.__notes__[0] == "raised on rank 1 of mk.launch"
    assert any(note.startswith("rank 0: AbortedError") for note in caught.value.__notes__)
    assert "in fail" in str(caught.value.__cause__)
    assert pids() == before, "the same processes, with a new world"


def test_the_traceback_comes_along() -> None:
    def inner() -> None:
        raise KeyError("the first")

    def fail(world: World) -> None:
        try:
            inner()
        except KeyError as error:
            raise RuntimeError("the second") from error

    with pytest.raises(RuntimeError, match="the second") as caught:
        run(fail)
    text = str(caught.value.__cause__)
    for part in ("in inner", "KeyError: 'the first'", "direct cause", "in fail", Path(__file__).name):
        assert part in text
    assert "serve.py" not in text


def test_exceptions_of_classes_that_only_one_side_knows() -> None:
    class LocalError(Exception):
        pass

    def fail(world: World) -> None:
        raise LocalError("here")

    with pytest.raises(LocalError, match="here"):
        run(fail)

    def strange(world: World) -> None:
        raise OwnError(1, 2)

    with pytest.raises(Error, match="OwnError: 1 and 2") as caught:  # its __init__ does not take its own message back
        run(strange)
    assert "in strange" in str(caught.value.__cause__)


def test_ranks_that_end_differently() -> None:
    """One returns while the other waits in a barrier: the barrier must not be met by the end of the function."""

    def leave(world: World) -> None:
        if world.rank:
            world.barrier()

    with pytest.raises(mk.MismatchError, match="end of the function"):
        run(leave)


def test_a_rank_that_goes_on_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One failure ends the call on all ranks, also where another one does not look at its world."""
    monkeypatch.setattr("mkernel.runtime.workers.pool._LEAVE_SECONDS", 0.1)

    def use(world: World) -> None:
        if world.rank == 1:
            raise ValueError("planned")
        time.sleep(10 * SECONDS)

    before = pids()
    with pytest.raises(ValueError, match="planned"):
        run(use)
    assert pids() == before


def test_a_rank_that_cannot_be_interrupted_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mkernel.runtime.workers.pool._LEAVE_SECONDS", 0.1)
    monkeypatch.setattr("mkernel.runtime.workers.pool._KILL_SECONDS", 0.5)
    deaf = tmp_path / "deaf"

    def use(world: World) -> None:
        if world.rank == 1:
            while not deaf.exists():  # an interrupt before the other's loop would end it
                time.sleep(0.01)
            raise ValueError("planned")
        while True:
            with contextlib.suppress(BaseException):
                deaf.touch()
                time.sleep(10 * SECONDS)

    before = pids()
    with pytest.raises(ValueError, match="planned") as caught:
        run(use)
    assert any("did not leave" in note for note in caught.value.__notes__)
    after = pids()
    assert after[1] == before[1]
    assert after[0] != before[0]


# ---- what cannot be pickled
def test_functions_arguments_and_results_that_cannot_travel() -> None:
    lock = threading.Lock()
    before = pids()
    assert same_world(before) or same_world(before)
    for call, parts in (
        (lambda: run(lambda world: lock.locked()), ("fn", "variable 'lock'", "lock")),
        (lambda: run(lambda world, x: None, {"a": [1, lock]}), ("args", "args[0]['a'][1]", "lock")),
        (lambda: run(lambda world: {"a": [1, Pair(threading.Lock(), "x")]}), ("result of rank", "result['a'][1].array", "lock")),
        (lambda: run(lambda world: Box({"w": world})), ("result of rank", "result.inside['w']", "World")),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        for part in parts:
            assert part in str(caught.value), caught.value
    assert same_world(before), "nothing of this is the world's fault"


class Stubborn:
    """Can be pickled, but not unpickled outside of the process that made it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _only_in, (os.getpid(),)


def _only_in(pid: int) -> Stubborn:
    if pid != os.getpid():
        raise LookupError("made elsewhere")
    return Stubborn()


def test_what_cannot_be_unpickled() -> None:
    with pytest.raises(ArgumentError, match=r"cannot be unpickled on rank [01]: LookupError: made elsewhere"):
        run(lambda world, x: None, Stubborn())
    with pytest.raises(ArgumentError, match="result of rank 0: cannot be unpickled in the caller: LookupError"):
        run(lambda world: Stubborn())


def test_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkernel.runtime.workers import pickling

    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    pickling._pickler.cache_clear()
    with pytest.raises(Error, match="pip install cloudpickle"):
        run(lambda world: None)
    pickling._pickler.cache_clear()


# ---- who calls
def test_nested_launches_are_refused() -> None:
    def nest(world: World) -> Any:
        mk.shutdown()  # nothing of this process's own
        with pytest.raises(Error, match="inside a function"):
            run_in_workers(len, 2, Options.resolve(target="cpu"))
        return mk.launch(lambda inner: inner.size, ranks=3, target="cpu", heap_bytes=1 << 20)

    assert run(nest, ranks=1) == [[3, 3, 3]]


def test_a_call_inside_a_call_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reached through what shows output, e.g. a notebook's hook."""
    from mkernel.runtime.workers import relay

    refused = []

    def write(name: str, text: str) -> None:
        for again in (pids, shutdown):
            with pytest.raises(Error, match="same thread"):
                again()
            refused.append(text)

    monkeypatch.setattr(relay, "write", write)
    run(lambda world: print("x"), ranks=1)
    assert refused == ["x\n", "x\n"]


def test_threads_take_turns() -> None:
    def use(world: World, number: int) -> tuple[int, float, float]:
        begin = time.monotonic()
        time.sleep(0.05)
        world.barrier()
        return number, begin, time.monotonic()

    found: dict[int, list[Any]] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: run(use, n)})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: [r[0] for r in results] for number, results in found.items()} == {n: [n, n] for n in range(4)}
    spans = sorted((min(r[1] for r in results), max(r[2] for r in results)) for results in found.values())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_launch_uses_processes_on_gpus_and_threads_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkernel.runtime import launch
    from mkernel.runtime.opening.placement import Gpu

    made: list[tuple[Any, ...]] = []
    gpus = tuple(Gpu(n, f"gpu {n}", (9, 0), tuple({0, 1} - {n})) for n in range(2))
    monkeypatch.setattr(launch, "gpus_here", lambda: (gpus, "", 1))  # the caller has chosen a GPU; its ranks have not
    monkeypatch.setattr(calls, "run_in_workers", lambda *arguments: made.append(arguments) or ["result"])
    assert mk.launch(len, 2, args=(1,), heap_bytes=1 << 20) == ["result"]
    ((fn, ranks, options, args),) = made
    assert (fn, ranks, options.target, options.heap_bytes, args) == (len, 2, "cuda", 1 << 20, (1,))
    with pytest.raises(ArgumentError, match="GPUs"):
        mk.launch(len, 3)
    here = threading.get_ident()
    assert here not in mk.launch(lambda world: threading.get_ident(), 2, target="cpu", heap_bytes=1 << 20)
    assert len(made) == 1
