"""What a template asks of an op is checked on both targets: an op that lacks it is refused, by the name of the concept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mkernel import env
from mkernel.errors import CompileError
from mkernel.jit import cpu
from mkernel.jit.headers import kernels_src
from mkernel.jit.spec import KernelSpec
from mkernel.planner import allgather_gemm, reduce
from mkernel.planner.topology import Topology

_WORLD = Topology(4, 2)


def _spec(op: str) -> KernelSpec:
    if op == "allgather_gemm":
        gather = allgather_gemm.AllGatherGemmProblem(_WORLD, 256, 512, "bfloat16", True)
        return allgather_gemm.make_plan(gather, 256, 8, None).spec
    scatter = reduce.ReduceProblem(op, _WORLD, 256, 512, "bfloat16", True, "output", "two_shot")
    return reduce.make_plan(scatter, 256, 8, None).spec


CASES = {  # concept: op, file, line, what becomes of it
    "TileOp": ("gemm_reduce_scatter", "ops/gemm_reduce_scatter.cuh", "MK_DEVICE void store(", "MK_DEVICE void store_it("),
    "CopiedChunks": (
        "allgather_gemm",
        "ops/allgather_gemm.cuh",
        "MK_DEVICE void announce(const Copied& c)",
        "MK_DEVICE void tell(const Copied& c)",
    ),
    "PutChunks": ("gemm_reduce_scatter", "reduce/send.cuh", "MK_DEVICE uint32_t puts()", "MK_DEVICE bool puts()"),
    "PutTiles": ("gemm_reduce_scatter", "reduce/send.cuh", "MK_DEVICE uint64_t bytes()", "MK_DEVICE uint32_t bytes()"),
}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("concept", CASES)
def test_an_op_that_lacks_something_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, concept: str, target: str) -> None:
    op, file, before, after = CASES[concept]
    folder = tmp_path / "kernels_src"
    shutil.copytree(kernels_src(), folder)
    text = (folder / file).read_text()
    assert text.count(before) == 1
    (folder / file).write_text(text.replace(before, after))
    monkeypatch.setenv("MKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    if target == "cuda":
        pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")
        from mkernel.jit import cuda

    with env.override(MKERNEL_KERNELS_SRC=folder), pytest.raises(CompileError) as caught:
        cpu.compile(_spec(op)) if target == "cpu" else cuda.compile(_spec(op))
    assert concept in caught.value.log
