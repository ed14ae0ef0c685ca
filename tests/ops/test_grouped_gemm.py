"""The grouped GEMM that the MoE kernels build on, by itself: every element, nothing outside, and planted bugs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark import ParameterSet

from mkernel import env
from mkernel.jit.headers import kernels_src
from tests.ops import grouped_races
from tests.ops.grouped_body import Case, check, draw_counts, run
from tests.ops.grouped_op import OP, GroupedPlan, GroupedProblem, Parameters
from tests.ops.planted_bug import Bug
from tests.sanitizer import run_sanitized
from tests.shared.mirrors import errors_of_mirror

_SMS = 4


@pytest.fixture(autouse=True)
def _few_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_CPU_SMS", str(_SMS))


def drawn(rng: np.random.Generator, experts: int = 6, **fixed: object) -> Case:
    n, k = (int(8 * rng.integers(1, most)) for most in (40, 20))
    chosen = {"group_m": int(rng.integers(1, 4)), "pitch": int(8 * rng.integers(3))}
    if fixed.get("gated"):
        chosen["clamp"] = float(rng.choice((0.0, 0.6)))
    return Case(n, k, draw_counts(rng, experts), **(chosen | fixed))  # type: ignore[arg-type]


def _valid(block_n: int, gated: bool, **_: object) -> bool:
    return not gated or block_n % 128 == 0


@pytest.mark.cases(
    block_n=(64, 128, 192, 256),
    row_major=(True, False),
    gated=(False, True),
    dtype=("bfloat16", "float16"),
    aligned=(False, True),
    enters=(True, False),
    valid=_valid,
)
@pytest.mark.drawn(3)
def test_every_element(
    rng: np.random.Generator, block_n: int, row_major: bool, gated: bool, dtype: str, aligned: bool, enters: bool
) -> None:
    cases = tuple(
        drawn(rng, block_n=block_n, row_major=row_major, gated=gated, dtype=dtype, aligned=aligned, enters=enters) for _ in range(3)
    )
    seed = int(rng.integers(1 << 30))
    assert run(cases, seed, int(rng.integers(1, 3))) is None, (cases, seed)


@pytest.mark.parametrize("counts", [(0,), (0, 0, 0), (1,), (0, 64, 0), (128, 0), (0, 0, 129)], ids=str)
def test_experts_without_rows(rng: np.random.Generator, counts: tuple[int, ...]) -> None:
    case, seed = Case(72, 64, counts, aligned=bool(rng.integers(2))), int(rng.integers(1 << 30))
    assert run((case,), seed) is None, (case, seed)


def test_many_experts(rng: np.random.Generator) -> None:
    """More than the CTA has threads; few have rows."""
    counts = np.zeros(1100, np.int64)
    counts[rng.integers(len(counts), size=6)] = rng.choice((1, 64, 65, 130), 6)
    case, seed = Case(8, 8, tuple(map(int, counts)), aligned=True), int(rng.integers(1 << 30))
    assert run((case,), seed) is None, (case, seed)


def test_parameters_are_those_of_the_kernel() -> None:
    from mkernel.planner.topology import Topology

    problem = GroupedProblem(Topology(1, 1), 64, 64, 4, "bfloat16", b_row_major=True)
    plan: GroupedPlan = OP.make_plan(problem, 100, _SMS)
    assert plan.spec.folder is not None
    assert errors_of_mirror(plan.spec, Parameters, (plan.spec.folder,)) == ""


# ---- planted bugs

_PLAIN = Case(264, 72, (65, 0, 130, 63, 3))
_ALIGNED = Case(72, 72, (65, 0, 130, 63, 3), aligned=True)
_GATED = Case(136, 72, (65, 0, 130, 63, 3), gated=True, clamp=0.6)
_WORKLOADS = {"tiles": (_PLAIN, _PLAIN), "aligned": (_ALIGNED,), "gated": (_GATED,)}
BUGS = [
    Bug("one row too many", "tile/masked.cuh", "if (row < rows_ &&", "if (row <= rows_ &&", "outside of the result"),
    Bug("columns are not masked", "tile/masked.cuh", " && column < extent_n(op_.p)", "", "outside of the result"),
    Bug(
        "a block that is not full is stored whole",
        "tile/epilogue.cuh",
        "(op.is_partial(c) || is_full(op, c, w))",
        "true",
        "outside of the result",
    ),
    Bug(
        "both warpgroups take the first half of a short tile's columns",
        "tile/multiply.cuh",
        "(kSharesA ? warpgroup * kApart : 0)",
        "0",
        "wrong: expert",
    ),
    Bug("all experts have the weights of the first", "tile/load.cuh", "b_plane = op.b_plane(c)", "b_plane = 0", "wrong: expert"),
    Bug(
        "a tile is announced before its masked blocks are there",
        "tile/epilogue.cuh",
        "      masked.store(panel, block);\n      end();",
        "      end();\n      masked.store(panel, block);",
        "announced before",
    ),
    Bug("lanes read before others have written", "tile/masked.cuh", "      ptx::sync_warp();  // all lanes have written the block\n"),
    Bug("no fence before a full block is stored", "tile/epilogue.cuh", "    ptx::fence_proxy_async_shared();\n", found_as="missing fence"),
    Bug("gate and up are exchanged", "tile/load.cuh", "p % 2 != 0 ? extent_n", "p % 2 == 0 ? extent_n", "wrong: expert", workload="gated"),
    Bug(
        "short tiles take as many slots as others",
        "tile/grouped.cuh",
        "(2 * first_tile_row(e) - tiles_[e] % (1u << kShortBits))",
        "(2 * first_tile_row(e))",
        "wrong: expert",
        workload="aligned",
    ),
    Bug(
        "gates are cut off below, too",
        "tile/gated.cuh",
        "gate = gate > limit ? limit : gate;",
        "gate = gate > limit ? limit : gate < -limit ? -limit : gate;",
        "wrong: expert",
        workload="gated",
    ),
    Bug("nobody announces the entry", "tile/gemm.cuh", "= Op::kAnnouncesEntry && ", "= !Op::kAnnouncesEntry && ", "TimeoutError", "1x2"),
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "kernels_src"
    shutil.copytree(kernels_src(), folder)
    return folder


def _parameter(bug: Bug) -> ParameterSet:
    return pytest.param(bug, marks=[pytest.mark.slow] if bug.slow else [], id=bug.name)


@pytest.mark.parametrize("bug", [_parameter(bug) for bug in BUGS])
@pytest.mark.drawn(3)
def test_found(copy: Path, bug: Bug) -> None:
    bug.plant(copy)
    reports = []
    with env.override(MKERNEL_KERNELS_SRC=copy):
        for seed in range(bug.seeds):  # the same ones in every run
            report = check(_WORKLOADS[bug.workload], seed, int(bug.world[-1]))
            if report is not None:
                reports.append(report)
                if bug.found_as in report:
                    return
    pytest.fail(f"{bug.found_as or 'nothing'} is not reported over {bug.seeds} seeds, but:\n" + "\n".join(reports))


@pytest.mark.parametrize("workload", _WORKLOADS)
def test_nothing_is_found_in_the_device_code_as_it_is(request: pytest.FixtureRequest, workload: str) -> None:
    assert check(_WORKLOADS[workload], request.config.getoption("--seed"), 2) is None


# ---- ThreadSanitizer


def _reported(kernels: Path, *, right: bool = True) -> str:
    """What ThreadSanitizer says of a process that makes a few calls with these kernels. ``right``: their results must be."""
    variables = {"MKERNEL_KERNELS_SRC": str(kernels), "MKERNEL_CPU_SMS": "3"}  # few: starting threads is slow there
    done = run_sanitized([sys.executable, str(grouped_races.__file__)], variables)
    assert done.returncode == 0 or not right, done.stdout + done.stderr[-3000:]
    return done.stderr


@pytest.mark.tsan
def test_no_race() -> None:
    errors = _reported(kernels_src())
    assert "WARNING: ThreadSanitizer" not in errors, errors[:5000]


@pytest.mark.tsan
@pytest.mark.slow
def test_a_tile_that_is_announced_before_all_lanes_have_stored_is_a_race(copy: Path) -> None:
    before = "    ptx::sync_warp();\n    if (lane == 0) storage.blocks[warpgroup].fill"
    Bug("", "tile/epilogue.cuh", before, "    if (lane == 0) storage.blocks[warpgroup].fill").plant(copy)
    assert "WARNING: ThreadSanitizer: data race" in _reported(copy, right=False)
