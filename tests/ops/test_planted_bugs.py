"""Each rule of docs/memory_model.md broken once: one line of the device code changed, and the checks must say so.

The device code is copied, one line is replaced, and allgather_gemm runs on target cpu over a few seeds (planted.py). A wrong result, a
complaint of the emulator, a deadlock or a data race counts as found.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from mkernel import env
from mkernel.jit.headers import kernels_src
from tests.ops import planted
from tests.sanitizer import libtsan

_ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, slots=True)
class Bug:
    """One line of ``file`` changed: ``before`` occurs there and becomes ``after``."""

    name: str
    file: str
    before: str
    after: str = ""
    found_as: str = ""  # part of what must be reported
    world: str = "1x2"
    workload: str = "tiles"
    seeds: int = 8
    tsan: bool = False
    slow: bool = False
    missed: str = ""  # why it is not found

    def plant(self, folder: Path) -> None:
        path = folder / self.file
        text = path.read_text()
        assert text.count(self.before) == 1, f"{self.file} has {text.count(self.before)} times: {self.before}"
        path.write_text(text.replace(self.before, self.after))


BUGS = [
    # The chunk flag is raised for data that is not there yet, or seen too early.
    Bug("flag before the last data", "copy.cuh", "    ptx::store_wait<0>();\n"),
    Bug("flag before the data", "copy.cuh", "        ptx::store_wait<kPiecesBehind>();\n"),
    Bug("tiles do not wait for chunks", "gemm.cuh", "        ok = op.wait_inputs(call, c, part);\n", found_as="missing fence.proxy.async"),
    Bug(
        "only the first part of a tile is waited for",
        "gemm.cuh",
        "      if (needs_peers) {",
        "      if (needs_peers && part == 0) {",
        workload="parts",
    ),
    Bug("forwarded before it has come", "allgather_gemm.cuh", "      if (!wait_chunk(call, p, source, chunk)) return;\n", world="2x2"),
    Bug(
        "no entry before a push",
        "allgather_gemm.cuh",
        "    if (!wait_entered(call, world.node * Config::kRanksPerNode + (world.local_rank + i) % Config::kRanksPerNode)) return;\n",
        workload="short",
        seeds=40,
    ),
    Bug(
        "no entry before a put",
        "allgather_gemm.cuh",
        "        if (!wait_entered(call, peer)) return;\n",
        world="4x1",
        workload="short",
        seeds=40,
    ),
    Bug(
        "the call ends before its puts",
        "allgather_gemm.cuh",
        "    if (last_put != 0) wait_put(call, last_put, last_peer);",
        world="4x1",
        workload="slow",
    ),
    # Bulk stores.
    Bug("the result's buffer is overwritten", "gemm.cuh", "    if (thread == 0) ptx::store_wait_read<1>();"),
    Bug("a piece is overwritten", "copy.cuh", "        ptx::store_wait_read<kPieceStages - kPiecesAhead>();\n", world="1x4"),
    Bug(
        "nobody waits for the result's stores",
        "gemm.cuh",
        "  if (ptx::thread_index() % kWarpgroup == 0) ptx::store_wait<0>();\n",
        found_as="bulk stores in flight",
    ),
    Bug("one buffer for results", "gemm.cuh", "    buffer ^= 1;"),
    # Barriers.
    Bug(
        "a stage is never given back",
        "gemm.cuh",
        "    if (previous != nullptr && reports) ptx::mbarrier_arrive(previous);\n",
        found_as="deadlock",
    ),
    Bug("a stage is given back before it is read", "gemm.cuh", "    ptx::wgmma_wait<1>(d);\n"),
    Bug("nobody waits for a stage", "gemm.cuh", "    ptx::mbarrier_wait(&storage.stage_filled[stage.index], stage.parity);\n"),
    Bug(
        "a result is written while the last one is stored",
        "gemm.cuh",
        "    ptx::barrier_sync(barrier, kWarpgroup);\n#pragma unroll",
        "#pragma unroll",
    ),
    Bug(
        "a result is stored before it is written",
        "gemm.cuh",
        "    ptx::barrier_sync(barrier, kWarpgroup);\n    if (thread",
        "    if (thread",
        found_as="missing fence.proxy.async",
    ),
    Bug("a tile's slot is given back too early", "gemm.cuh", "  if constexpr (By == Reader::kWarp) ptx::sync_warp();"),
    Bug(
        "a CTA begins before its barriers are ready",
        "allgather_gemm.cuh",
        "  ptx::sync_cta();\n  compute_role",
        "  compute_role",
        found_as="not been initialized",
    ),
    # Proxies.
    Bug("no proxy fence before tiles are loaded", "gemm.cuh", "    ptx::fence_proxy_async();", found_as="missing fence.proxy.async"),
    Bug(
        "no proxy fence before forwarding",
        "allgather_gemm.cuh",
        "      ptx::fence_proxy_async();\n",
        found_as="missing fence.proxy.async",
        world="2x2",
    ),
    Bug(
        "no proxy fence before a result is stored",
        "gemm.cuh",
        "    ptx::fence_proxy_async_shared();\n",
        found_as="missing fence.proxy.async",
    ),
    Bug(
        "no proxy fence when a communication CTA joins compute",
        "allgather_gemm.cuh",
        "    ptx::fence_proxy_async_shared();  // shared memory changes hands from bulk copies to barriers and tiles\n",
        missed="the emulator tracks ordinary writes that bulk copies read, not writes of bulk copies that ordinary ones replace",
    ),
    # The end of a call.
    Bug("the tile counter is not reset", "sync.cuh", "    control->tile_counter = 0;\n"),
    Bug("the epoch does not advance", "sync.cuh", "    control->epoch = call.epoch;\n"),
    # What only ThreadSanitizer sees: on this host's processor every store is a release.
    Bug(
        "a relaxed flag",
        "cpu/ptx.cuh",
        "  __atomic_store_n(p, v, __ATOMIC_RELEASE);\n",
        "  __atomic_store_n(p, v, __ATOMIC_RELAXED);\n",
        "data race",
        tsan=True,
    ),
    Bug(
        "a relaxed wait",
        "cpu/ptx.cuh",
        "  const T v = __atomic_load_n(p, __ATOMIC_ACQUIRE);\n",
        "  const T v = __atomic_load_n(p, __ATOMIC_RELAXED);\n",
        "data race",
        tsan=True,
        slow=True,
    ),
    Bug("a flag's slot is given back too early", "copy.cuh", "      ptx::sync_warp();\n", found_as="data race", tsan=True),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the device code; at the same place for all bugs, so that only what has changed is compiled again."""
    return tmp_path_factory.mktemp("planted") / "kernels_src"


@pytest.fixture(autouse=True)
def _fresh(copy: Path) -> Iterator[None]:
    shutil.copytree(kernels_src(), copy)
    yield
    shutil.rmtree(copy)


@pytest.mark.parametrize(("world", "workload"), sorted({(bug.world, bug.workload) for bug in BUGS if not bug.tsan}))
def test_nothing_is_found_in_the_device_code_as_it_is(request: pytest.FixtureRequest, copy: Path, world: str, workload: str) -> None:
    with env.override(MKERNEL_KERNELS_SRC=copy):
        assert planted.check(world, workload, request.config.getoption("--seed")) is None


def _parameter(bug: Bug) -> ParameterSet:
    marks = [pytest.mark.slow] if bug.slow else [pytest.mark.xfail(strict=True, reason=bug.missed)] if bug.missed else []
    return pytest.param(bug, marks=marks, id=bug.name)


@pytest.mark.parametrize("bug", [_parameter(bug) for bug in BUGS if not bug.tsan])
def test_found(request: pytest.FixtureRequest, copy: Path, bug: Bug) -> None:
    bug.plant(copy)
    first = request.config.getoption("--seed")
    with env.override(MKERNEL_KERNELS_SRC=copy):
        found = next(
            (text for seed in range(first, first + bug.seeds) if (text := planted.check(bug.world, bug.workload, seed)) is not None), None
        )
    assert found is not None, f"nothing is found over {bug.seeds} seeds"
    assert found.startswith(("wrong: ", "Error: target cpu: ", "MismatchError: ")) or "\ndeadlock at " in found
    assert bug.found_as in found


def _tsan(copy: Path, world: str, seed: int) -> tuple[str | None, str]:
    """What is found, and what ThreadSanitizer reports: a process of its own, with its library preloaded."""
    preload = libtsan()
    environment = os.environ | {
        "LD_PRELOAD": preload,
        "TSAN_OPTIONS": "exitcode=0 report_signal_unsafe=0 report_thread_leaks=0",
        "MKERNEL_KERNELS_SRC": str(copy),
        "MKERNEL_CPU_SMS": "3",  # starting threads is slow under ThreadSanitizer
        "OPENBLAS_NUM_THREADS": "1",  # its threads synchronize in a way that ThreadSanitizer does not see
    }
    # Some versions of the library cannot place their shadow memory under strong address-space randomization.
    setarch = shutil.which("setarch")
    command = [*((setarch, platform.machine(), "-R") if setarch else ()), sys.executable, planted.__file__, world, "chunks", str(seed)]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["found"], done.stderr


@pytest.mark.tsan
@pytest.mark.parametrize("world", ["1x2", pytest.param("2x2", marks=pytest.mark.slow), pytest.param("4x1", marks=pytest.mark.slow)])
def test_no_race_in_the_device_code_as_it_is(request: pytest.FixtureRequest, copy: Path, world: str) -> None:
    found, errors = _tsan(copy, world, request.config.getoption("--seed"))
    assert found is None
    assert "WARNING: ThreadSanitizer" not in errors, errors[:5000]


@pytest.mark.tsan
@pytest.mark.parametrize("bug", [_parameter(bug) for bug in BUGS if bug.tsan])
def test_found_by_thread_sanitizer(request: pytest.FixtureRequest, copy: Path, bug: Bug) -> None:
    bug.plant(copy)
    found, errors = _tsan(copy, bug.world, request.config.getoption("--seed"))
    assert f"WARNING: ThreadSanitizer: {bug.found_as}" in errors or found is not None
