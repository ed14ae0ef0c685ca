"""Every kernel as a user would get it, compiled for sm_90a without a GPU: no spills, tensor cores at work, nothing forbidden, in time."""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")

from mkernel.bench.puts import PutsPlan
from mkernel.jit import cuda
from mkernel.jit.spec import KernelSpec
from mkernel.plan.allgather_gemm import AllGatherGemmPlan, AllGatherGemmProblem, make_plan
from mkernel.plan.gemm import GemmTile
from mkernel.plan.split import Split
from mkernel.plan.topology import Topology

_REGISTERS = 168  # 65536 of an SM / 384 threads, rounded down to a multiple of 8
_SECONDS = 1.5  # of processor time for one compilation: 0.9 measured on an idle machine, more where neighbours share the core
_SMS = 132


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled anew by every run of the tests."""
    patch = pytest.MonkeyPatch()
    patch.setenv("MKERNEL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    patch.delenv("MKERNEL_NO_COMPILE", raising=False)
    yield
    patch.undo()


def plan_of(
    world: str, block_n: int, dtype: str, row_major: bool, cut: str, k: int = 8192, split: Split | None = None
) -> AllGatherGemmPlan:
    """``cut``: nothing, the last tiles, or K as well (in the same proportions as the planner would)."""
    nodes, per_node = map(int, world.split("x"))
    problem = AllGatherGemmProblem(Topology(nodes * per_node, per_node), 1024, 4 * block_n + 64, k, dtype, row_major)
    plan = make_plan(problem, _SMS, split, GemmTile.deepest(block_n))
    parts = 1 if nodes > 1 else 4
    return dataclasses.replace(plan, slices=1 if cut == "nothing" else 2, parts=parts if cut == "K" else 1)


def possible(world: str, block_n: int, cut: str, **other: object) -> bool:
    return (cut == "nothing" or block_n in (128, 256)) and (cut != "K" or world == "1x4")


def compiled(caplog: pytest.LogCaptureFixture, spec: KernelSpec) -> set[str]:
    """The instructions that a kernel is made of; it needs what an SM has."""
    begin = time.thread_time()
    cubin = cuda.compile(spec)
    seconds = time.thread_time() - begin
    used = cuda.resources(cubin)
    print(f"{seconds:.2f} s, {len(cubin)} bytes, {used}")
    assert caplog.text == "", "no warning, such as wgmma serialized by the compiler"
    assert used.local_bytes == 0, "spills"
    assert used.registers <= _REGISTERS
    assert used.shared_bytes <= 1024, "all shared memory is dynamic, but for the KiB that the system takes"
    assert used.parameter_bytes == spec.parameter_bytes

    sass = cuda.disassemble(cubin)
    assert sass is not None, "no nvdisasm: pip install 'mkernel[test]'"
    return set(re.findall(r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+(?:\.\w+)*)", sass, re.MULTILINE))


@pytest.mark.cases(
    block_n=(64, 128, 192, 256),
    world=("1x1", "1x4", "2x2", "4x1", "4x8"),
    row_major=(True, False),
    dtype=("bfloat16", "float16"),
    cut=("nothing", "tiles", "K"),
    valid=possible,
)
def test_allgather_gemm(caplog: pytest.LogCaptureFixture, world: str, block_n: int, row_major: bool, dtype: str, cut: str) -> None:
    plan = plan_of(world, block_n, dtype, row_major, cut)
    instructions = compiled(caplog, plan.spec)
    operations = {name.split(".")[0] for name in instructions}
    widths = {block_n} if cut == "nothing" else {block_n, block_n // 2}
    kind = ".BF16" if dtype == "bfloat16" else ""
    assert {name for name in instructions if name.startswith("HGMMA")} == {f"HGMMA.64x{n}x16.F32{kind}" for n in widths}
    assert {"UTMALDG", "UTMASTG"} <= operations, "TMA"
    assert ("UBLKCP" in operations) == (world != "1x1"), "bulk copies"
    assert not operations & {"STL", "LDL", "STACK"}, "local memory"
    assert not {name for name in instructions if "MULTIMEM" in name or name.startswith(("LDGMC", "MULTIMEM"))}, "NVLink multicast"


@pytest.mark.cases(
    block_n=(64, 128, 192, 256), row_major=(True, False), cut=("nothing", "tiles", "K"), valid=lambda **p: possible("1x4", **p)
)
def test_allgather_gemm_without_communication_ctas(caplog: pytest.LogCaptureFixture, block_n: int, row_major: bool, cut: str) -> None:
    plan = plan_of("1x4", block_n, "bfloat16", row_major, cut, split=Split(intra_comm=0))
    instructions = compiled(caplog, plan.spec)
    operations = {name.split(".")[0] for name in instructions}
    assert "UBLKCP" not in operations, "nothing is copied in bulk"
    assert "STG.E.128" in instructions
    assert not operations & {"STL", "LDL", "STACK"}, "local memory"


def test_the_kernel_that_only_sends(caplog: pytest.LogCaptureFixture) -> None:
    instructions = compiled(caplog, PutsPlan(Topology(4, 2), 1 << 26, 1 << 20).spec)
    assert not {name.split(".")[0] for name in instructions} & {"STL", "LDL", "STACK"}, "local memory"


@pytest.mark.parametrize("world", ["1x4", "2x2"])
def test_no_multicast_in_ptx(world: str) -> None:
    assert "multimem" not in cuda.compile_ptx(plan_of(world, 128, "bfloat16", True, "nothing").spec)


_FRESH_K = itertools.count(1024, 8)  # nothing is compiled twice


def cost(spec: KernelSpec) -> float:
    """Seconds of processor time to compile a kernel, on one core, NVRTC already loaded."""
    begin = time.thread_time()
    cuda.compile(spec)
    return time.thread_time() - begin


def cost_of_allgather_gemm() -> float:
    return cost(plan_of("1x4", 256, "bfloat16", True, "tiles", next(_FRESH_K)).spec)


def relative_cost(spec_of: Callable[[int], KernelSpec]) -> float:
    """What kernels cost to compile, of ``spec_of(k)``, relative to allgather_gemm: who else uses the machine makes little difference."""
    pairs = [(cost(spec_of(next(_FRESH_K))), cost_of_allgather_gemm()) for _ in range(3)]
    print("seconds to compile it, and allgather_gemm:", ", ".join(f"{its:.2f} {other:.2f}" for its, other in pairs))
    return statistics.median(its / other for its, other in pairs)


def test_compiling_is_quick() -> None:
    seconds = [cost_of_allgather_gemm() for _ in range(3)]
    print("seconds of processor time to compile:", ", ".join(f"{s:.2f}" for s in seconds))
    assert min(seconds) <= _SECONDS


_AGAIN = """
import sys
from tests.nvrtc.test_kernels import plan_of
from mkernel.jit import cuda
print(cuda.resources(cuda.compile(plan_of("1x2", 64, "float16", False, "nothing").spec)))
"""


def test_a_second_process_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def again() -> subprocess.CompletedProcess[str]:
        root = Path(__file__).parents[2]
        return subprocess.run([sys.executable, "-c", _AGAIN], cwd=root, capture_output=True, text=True, timeout=120, check=False)

    monkeypatch.setenv("MKERNEL_NO_COMPILE", "1")
    refused = again()
    assert refused.returncode != 0
    assert "MKERNEL_NO_COMPILE" in refused.stderr
    monkeypatch.delenv("MKERNEL_NO_COMPILE")
    used = cuda.resources(cuda.compile(plan_of("1x2", 64, "float16", False, "nothing").spec))
    monkeypatch.setenv("MKERNEL_NO_COMPILE", "1")
    second = again()
    assert second.stdout == f"{used}\n", second.stderr
