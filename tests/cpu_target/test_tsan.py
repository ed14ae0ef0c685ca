"""ThreadSanitizer sees the emulated threads: a correct kernel is clean, each missing synchronization is a race."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mkernel.jit.headers import kernels_src
from tests.sanitizer import run_sanitized

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import numpy as np
from mkernel.errors import Error
from mkernel.jit import cpu
from mkernel.runtime.cpu.backend import ThreadRanks, CpuBackend
from tests.cpu_target.harness import Race, aligned, load
assert cpu.sanitizing()
kernel = load("race", Race, threads=64, kFault=int(sys.argv[1]), kLaps=3)
for seed in range(2):
    with ThreadRanks(1, seed) as thread_ranks:
        data, flag = aligned(256, np.uint32), aligned(1, np.uint64)
        try:
            CpuBackend(0, thread_ranks).launch(kernel, 0, 1, bytes(Race(data.ctypes.data, flag.ctypes.data)))
        except Error as error:  # what was only possible has happened
            assert sys.argv[1] == "7" and "overtaken" in str(error)
print("ended")
"""
FAULTS = ["none", "barrier", "vote is no barrier", "relaxed flag", "mbarrier", "store not awaited", "stage reused", "overtaken"]


def run(script: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    done = run_sanitized([sys.executable, "-c", script, *map(str, arguments)], variables, cwd=ROOT)
    assert done.stdout == "ended\n", done.stderr[-3000:]
    return done


@pytest.mark.tsan
@pytest.mark.parametrize("fault", range(len(FAULTS)), ids=FAULTS)
def test_races(fault: int) -> None:
    done = run(SCRIPT, fault)
    if fault == 0:
        assert "WARNING: ThreadSanitizer" not in done.stderr, done.stderr[:5000]
    else:
        assert "WARNING: ThreadSanitizer: data race" in done.stderr
        assert ("mkc_mbarrier_wait" if FAULTS[fault] == "overtaken" else "race.cuh") in done.stderr  # the report names the kernel's line


OP = """
import sys
import ml_dtypes
import numpy as np
import mkernel as mk
def rank(world):
    rng = np.random.default_rng(world.rank)
    for _ in range(2):
        a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((136, 72), (72, 64)))
        assert np.isfinite(getattr(mk, sys.argv[2])(a, b, **dict(option.split("=") for option in sys.argv[3:])).astype(np.float32)).all()
mk.launch(rank, ranks=2, ranks_per_node=int(sys.argv[1]), target="cpu")
print("ended")
"""


_CALLS = [(2, "allgather_gemm"), (1, "gemm_allreduce algorithm=two_shot")]
_MORE = [
    (1, "allgather_gemm"),
    (2, "gemm_reduce_scatter"),
    *((2, call) for call in ("gemm_allreduce algorithm=one_shot", "gemm_allreduce algorithm=two_shot")),
    *((1, call) for call in ("gemm_allreduce algorithm=one_shot", "gemm_reduce_scatter")),
    *((ranks, "gemm_reduce_scatter partials=float32") for ranks in (2, 1)),
]


@pytest.mark.tsan
@pytest.mark.parametrize(("ranks_per_node", "call"), [*_CALLS, *(pytest.param(*case, marks=pytest.mark.slow) for case in _MORE)])
def test_op_is_clean(ranks_per_node: int, call: str) -> None:
    """A whole operation, over direct access and over the network; with a CTA of each role."""
    done = run(OP, ranks_per_node, *call.split(), MKERNEL_CPU_SMS="4" if "two_shot" in call else "3")
    assert "WARNING: ThreadSanitizer" not in done.stderr, done.stderr[:5000]


OVER_SMS = """
import sys
from tests.shared.worlds import found_wrong
assert found_wrong(sys.argv[1], "2x1", "bfloat16", (sys.argv[2],), int(sys.argv[3])) is None
print("ended")
"""
_CASES = {"moe_combine": "37x136x520x4x2:hot", "gemm_reduce_scatter": "200x288x144"}
_UNORDERED = (  # what one lane has acquired, the others have not
    "  const uint64_t landed = raised + least_of_warp(static_cast<uint32_t>(least - raised));\n  ptx::sync_warp();\n",
    "  const uint64_t landed = raised + least_of_warp(static_cast<uint32_t>(least - raised));\n",
)


@pytest.mark.tsan
@pytest.mark.slow
@pytest.mark.parametrize(("op", "planted"), [*((op, False) for op in _CASES), ("moe_combine", True)])
def test_a_network_that_sms_play(op: str, planted: bool, tmp_path: Path) -> None:
    variables = {"MKERNEL_EMULATED_ENGINE": "sms", "MKERNEL_CPU_SMS": "4"}
    if planted:
        copy = tmp_path / "kernels_src"
        shutil.copytree(kernels_src(), copy)
        fabric = copy / "ops/fabric.cuh"
        assert fabric.read_text().count(_UNORDERED[0]) == 1
        fabric.write_text(fabric.read_text().replace(*_UNORDERED))
        variables["MKERNEL_KERNELS_SRC"] = str(copy)
    for seed in range(8 if planted else 1):  # which lane raises a flag is by chance
        told = run(OVER_SMS, op, _CASES[op], seed, **variables).stderr
        if "WARNING: ThreadSanitizer: data race" in told:
            break
    assert ("WARNING: ThreadSanitizer: data race" in told) == planted, told[:5000]
