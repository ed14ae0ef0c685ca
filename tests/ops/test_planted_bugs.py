"""Each rule of docs/memory_model.md broken once: one line of the device code changed, and the checks must say so.

The device code is copied, one line is replaced, and a fused GEMM runs on target cpu over a few seeds (planted.py). A wrong result, a
complaint of the emulator, a deadlock or a data race counts as found.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from mkernel import env
from mkernel.jit.headers import kernels_src
from tests.ops import packets_body, planted
from tests.ops.body import topology
from tests.ops.planted_bug import Bug
from tests.ops.planted_cluster_sums import CLUSTER_SUMS
from tests.ops.planted_common import COMMON
from tests.ops.planted_moe import MOE
from tests.ops.planted_packets import PACKETS
from tests.ops.planted_pairs import PAIRS
from tests.ops.planted_reductions import REDUCTIONS
from tests.ops.planted_ring import RING
from tests.ops.planted_swapped import SWAPPED
from tests.ops.planted_swapped_sums import SWAPPED_SUMS
from tests.sanitizer import run_sanitized

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_REPORTS = ("wrong: ", "Error: target cpu: ", "MismatchError: ", "TransportError: ", "TimeoutError: ")  # but for deadlocks


BUGS = [*COMMON, *PACKETS, *PAIRS, *SWAPPED, *SWAPPED_SUMS, *CLUSTER_SUMS, *REDUCTIONS, *MOE, *RING]
_TSAN_SEEDS = 4  # a race is seen in some interleavings only
# CTAs of a rank under ThreadSanitizer: few, since starting threads is slow there.
_TSAN_SMS = {
    "fours": 4,
    "swapped fours": 4,
    "narrow fours": 4,
    "reduce fours": 4,
    "packets fours": 4,
    "scattered packets fours": 4,
    "ring shared": 10,
    "reduce pairs": 4,
    "two shot pairs": 4,
    **{workload: 4 for workload in packets_body.WORKLOADS if workload.endswith("fours")},
}  # two for each tile of its second call; other workloads: one of each role, or two


def _seeds(bug: Bug) -> list[int]:
    """In the order in which they are tried."""
    return sorted(range(bug.seeds), key=lambda seed: seed != bug.first)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the device code; at the same place for all bugs, so that only what has changed is compiled again."""
    return tmp_path_factory.mktemp("planted") / "kernels_src"


@pytest.fixture(autouse=True)
def _fresh(copy: Path) -> Iterator[None]:
    shutil.copytree(kernels_src(), copy)
    yield
    shutil.rmtree(copy)


@pytest.mark.parametrize(("world", "workload", "sms"), sorted({(bug.world, bug.workload, bug.sms) for bug in BUGS if not bug.tsan}))
@pytest.mark.drawn(3)
def test_nothing_is_found_in_the_device_code_as_it_is(
    request: pytest.FixtureRequest, copy: Path, world: str, workload: str, sms: int
) -> None:
    with env.override(MKERNEL_KERNELS_SRC=copy, MKERNEL_CPU_SMS=sms):
        assert planted.check(world, workload, request.config.getoption("--seed")) is None


def _parameter(bug: Bug) -> ParameterSet:
    marks = [pytest.mark.slow] if bug.slow else [pytest.mark.xfail(strict=True, reason=bug.missed)] if bug.missed else []
    return pytest.param(bug, marks=marks, id=bug.name)


def test_each_can_be_planted() -> None:
    """A run draws some bugs: that the device code still has the lines that they change is asked of all, of whichever test."""
    names = [path.stem for path in _HERE.glob("*.py") if "planted_bug import Bug" in path.read_text()]
    values = [value for name in names for value in vars(importlib.import_module(f"tests.ops.{name}")).values()]
    bugs = {id(bug): bug for value in values if isinstance(value, list) for bug in value if isinstance(bug, Bug)}
    assert len(bugs) > len(BUGS)
    assert len({bug.name for bug in BUGS}) == len(BUGS), "tests are chosen by names"
    for bug in bugs.values():
        bug.planted((kernels_src() / bug.file).read_text())


@pytest.mark.parametrize("bug", [_parameter(bug) for bug in BUGS if not bug.tsan])
@pytest.mark.drawn(7)
def test_found(copy: Path, bug: Bug) -> None:
    bug.plant(copy)
    reports = []
    with env.override(MKERNEL_KERNELS_SRC=copy, MKERNEL_CPU_SMS=bug.sms):
        # The same seeds in every run: the checks are what is tested here, and the same seed gives the same interleaving.
        for seed in _seeds(bug):
            report = planted.check(bug.world, bug.workload, seed)
            if report is None:
                continue
            assert report.startswith(_REPORTS) or "\ndeadlock at " in report
            if bug.found_as in report:
                return
            reports.append(report)
    pytest.fail(f"{bug.found_as or 'nothing'} is not reported over {bug.seeds} seeds, but:\n" + "\n".join(reports))


def _tsan(copy: Path, world: str, workload: str, seed: int, calls: int) -> tuple[str | None, str]:
    """What is found, and what ThreadSanitizer reports: a process of its own, with its library preloaded."""
    sms = _TSAN_SMS.get(workload, 3 if topology(world).num_nodes == 1 else 4)
    command = [sys.executable, planted.__file__, world, workload, str(seed), str(calls)]
    done = run_sanitized(command, {"MKERNEL_KERNELS_SRC": str(copy), "MKERNEL_CPU_SMS": str(sms)}, cwd=_ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["found"], done.stderr


@pytest.mark.tsan
@pytest.mark.parametrize(
    ("world", "workload"),
    [
        ("1x2", "chunks"),
        ("1x2", "gather packets short"),
        ("1x2", "tagged packets short"),
        ("1x2", "reduce short"),
        pytest.param("1x1", "sums in clusters", marks=pytest.mark.slow),
        *(pytest.param("1x1", workload, marks=pytest.mark.slow) for workload in ("in turn", "in turn pairs")),
        ("1x2", "dispatch"),
        *(pytest.param("1x2", workload, marks=pytest.mark.slow) for workload in ("two shot short", "packets", "pairs warps", "fours")),
        *(
            pytest.param("1x2", workload, marks=pytest.mark.slow)
            for workload in ("swapped", "swapped shares", "swapped fours", "narrow", "narrow fours", "wide", "wide by rows")
        ),
        *(
            pytest.param("1x3", workload, marks=pytest.mark.slow)
            for workload in ("scattered swapped", "scattered swapped shared", "swapped in one step", "swapped in two steps")
        ),
        *(pytest.param("1x2", workload, marks=pytest.mark.slow) for workload in ("reduce pairs", "two shot pairs", "reduce fours")),
        *(pytest.param("1x3", workload, marks=pytest.mark.slow) for workload in ("packets fours", "scattered packets fours")),
        *(pytest.param("1x2", workload, marks=pytest.mark.slow) for workload in ("scattered packets", "scattered packets shared")),
        pytest.param("2x2", "dispatch", marks=pytest.mark.slow),
        pytest.param("1x2", "dispatch in narrow tiles", marks=pytest.mark.slow),
        *(pytest.param(world, "ring", marks=pytest.mark.slow) for world in ("1x2", "2x2", "4x1")),
        *(pytest.param("1x2", workload, marks=pytest.mark.slow) for workload in ("ring shared", "ring by position")),
        *(pytest.param("2x2", workload, marks=pytest.mark.slow) for workload in ("varlen", "varlen by position")),
        *(pytest.param(world, "chunks", marks=pytest.mark.slow) for world in ("2x2", "4x1")),
        *(pytest.param("1x2", workload, marks=pytest.mark.slow) for workload in ("warps short", "span high", "span high warps")),
        *(
            pytest.param(world, workload, marks=pytest.mark.slow)
            for world in ("1x2", "2x2", "4x1")
            for workload in ("reduce", "reduce exactly", "one shot", "two shot")
        ),
        *(pytest.param("1x3", workload, marks=pytest.mark.slow) for workload in ("packets", "packets in one step", "packets short")),
        *(
            pytest.param("1x3", f"{kind} packets{more}", marks=pytest.mark.slow)
            for kind in ("gather", "tagged")
            for more in ("", " short", " shares")
        ),
        *(pytest.param("1x2", workload, marks=pytest.mark.slow) for workload in ("gather packets pairs", *packets_body.WORKLOADS)),
    ],
)
@pytest.mark.drawn(1)
def test_no_race_in_the_device_code_as_it_is(request: pytest.FixtureRequest, copy: Path, world: str, workload: str) -> None:
    # Few calls: each starts a thread of ThreadSanitizer's for every thread of the kernel.
    found, errors = _tsan(copy, world, workload, request.config.getoption("--seed"), 4)
    assert found is None
    assert "WARNING: ThreadSanitizer" not in errors, errors[:5000]


@pytest.mark.tsan
@pytest.mark.parametrize("bug", [_parameter(bug) for bug in BUGS if bug.tsan])
@pytest.mark.drawn(1)
def test_found_by_thread_sanitizer(copy: Path, bug: Bug) -> None:
    bug.plant(copy)
    workload = "chunks" if bug.workload == "tiles" else bug.workload
    for seed in _seeds(bug)[:_TSAN_SEEDS]:
        found, errors = _tsan(copy, bug.world, workload, seed, 12)
        if f"WARNING: ThreadSanitizer: {bug.found_as}" in errors or found is not None:
            return
    pytest.fail(f"no {bug.found_as} is reported over {_TSAN_SEEDS} seeds")
