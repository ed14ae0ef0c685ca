"""tests/gpu/sizes.py without a GPU: what it counts, and its stages on target cpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from tests.gpu.compilations import Compilations, shown
from tests.gpu.counters import FORBIDDEN, Counters, Pieces

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "sizes.py"


@pytest.mark.parametrize(
    "name",
    [
        "cuCtxSynchronize",
        "cuStreamSynchronize",
        "cuEventSynchronize",
        "cuMemAlloc",
        "cuMemAllocAsync",
        "cuMemFree",
        "cuMemCreate",
        "cuMemHostAlloc",
        "cuMemcpyDtoH",
        "cuMemsetD8",
        "cuModuleLoadData",
        "cuLibraryLoadData",
        "cuFuncLoad",
    ],
)
def test_what_a_call_must_not_use(name: str) -> None:
    assert FORBIDDEN.fullmatch(name)


@pytest.mark.parametrize("name", ["cuLaunchKernelEx", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoHAsync_v2", "cuEventQuery"])
def test_what_a_call_may_use(name: str) -> None:
    assert not FORBIDDEN.fullmatch(name)


def test_functions_of_the_driver_are_counted() -> None:
    """While armed, by the thread that has armed the counters."""
    module = SimpleNamespace(cuMemAlloc=lambda size: (0, size), cuEventQuery=lambda event: event)
    query = module.cuEventQuery
    counters = Counters()
    counters.watch_module(module)
    assert module.cuMemAlloc(1) == (0, 1)
    with counters.armed():
        assert module.cuMemAlloc(2) == (0, 2)
        other = threading.Thread(target=module.cuMemAlloc, args=(3,))
        other.start()
        other.join()
    module.cuMemAlloc(4)
    assert counters.counts == {"cuMemAlloc": 1}
    assert module.cuEventQuery is query


def test_collectives_and_kernels_are_counted() -> None:
    with mk.init(target="cpu", heap_bytes=16 << 20) as world:
        counters = Counters()
        counters.watch(world)
        a, b = np.ones((8, 64), np.float16), np.ones((64, 16), np.float16)
        with counters.armed():
            mk.allgather_gemm(a, b, world=world)
        first = dict(counters.counts)
        counters.counts.clear()
        with counters.armed():
            mk.allgather_gemm(a[:3], b, world=world)
        assert first["control: collective"] > 0
        assert first["device: load"] > 0
        assert not counters.counts


def test_pieces_leave_out_what_is_inside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that calls another one has only what is left."""
    things = SimpleNamespace(inner=lambda: "done", outer=lambda: things.inner())
    pieces, seconds = Pieces(), iter([0.0, 1.0, 5.0, 7.0])
    with pieces.of({"outer": (things, "outer"), "inner": (things, "inner")}), monkeypatch.context() as clock:
        clock.setattr("tests.gpu.counters.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
        assert things.outer() == "done"
    assert pieces.take() == {"outer": 3.0, "inner": 4.0}
    assert pieces.take() == {"outer": 0, "inner": 0}


_STAGES = ["new", "grow", "loop", "graphs", "prepare"]


@pytest.mark.parametrize(
    ("ranks", "nodes", "stages"),
    [
        (2, 1, _STAGES[:-1]),
        pytest.param(2, 1, [], marks=pytest.mark.slow),  # all of them: `prepare` compiles everything twice
        pytest.param(2, 2, ["new", "graphs", "loop"], marks=pytest.mark.slow),
        pytest.param(1, 1, [], marks=pytest.mark.slow),
    ],
)
def test_the_script(ranks: int, nodes: int, stages: list[str], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--target", "cpu", "--ranks", str(ranks), "--nodes", str(nodes), "--seed", "3"]
    command += ["--out", str(out)]
    command += ["--launcher", "processes", "--limit", "120"]
    done = subprocess.run([*command, *stages], env=os.environ, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    lines = {(line["stage"], line["what"]): line for line in found["lines"]}
    assert {stage for stage, _ in lines} == set(stages or (_STAGES if ranks > 1 else ["new", "loop", "prepare"]))
    assert lines["new", "forbidden in 24 new sizes"]["found"] == "nothing"
    assert all(line["fine"] for (_, what), line in lines.items() if "error / bound" in what)
    assert len(found["numbers"]["new: host us, new"]["ranks"]) == ranks
    assert "0 FAILED" in done.stdout


@pytest.mark.parametrize(
    ("asked", "told"),
    [(["gone"], "no such stage: gone"), (["--ranks", "1", "grow"], "a rank by itself gathers nothing"), (["--ranks", "0"], "positive")],
)
def test_what_cannot_be_asked_for(asked: list[str], told: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *asked], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert told in done.stderr


def test_compilations_are_noted_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own time: a thread that waits does not run."""
    from mkernel.jit import cuda

    spec = SimpleNamespace(name="op", constants=(("kBlockN", 128), ("kIntraComm", 8)))
    monkeypatch.setattr(cuda._Job, "nvrtc", lambda job, path=None: time.sleep(0.05))
    for name in ("warm_up", "_compile_nothing"):
        monkeypatch.setattr(cuda, name, lambda: None)
    compilations, begin = Compilations(), time.perf_counter()
    compilations.install()
    job: Any = SimpleNamespace(spec=spec)
    threads = [threading.Thread(target=cuda._Job.nvrtc, args=(job,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cuda._compile_nothing()
    found = compilations.since(begin)
    assert [one["what"] for one in found] == [*["op 128/100"] * 3, "NVRTC's first"]
    assert all(one["begin"] >= 0 and one["running"] < 0.04 <= one["seconds"] for one in found[:3])
    assert shown(found[0]).startswith("op 128/100: 0.")
    assert compilations.since(begin) == []
