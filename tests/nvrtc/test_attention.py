"""The attention role compiled for sm_90a without a GPU: what test_kernels.py asks of allgather_gemm, and the order of its main loop."""

from __future__ import annotations

import dataclasses
import re

import pytest

pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")

from mkernel.jit import cuda
from mkernel.planner import ring_attention, ring_varlen
from mkernel.planner.attention_tile import AttentionTile
from mkernel.planner.ring_problem import LAYOUTS, RingAttentionProblem, Sizes
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology
from tests.nvrtc.test_kernels import (
    _own_cache,  # noqa: F401 - a fixture for every test here
    fits,
    relative_cost,
)
from tests.ops.attention_op import AttentionPlan, AttentionProblem

_INSTRUCTION = re.compile(r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+(?:\.\w+)*)(?:[ ]+([^;]*))?;", re.MULTILINE)


def ring_plan(problem: RingAttentionProblem) -> ring_attention.RingAttentionPlan:
    """The plan for one sequence of 4096 rows, or for packed ones of so many."""
    return ring_varlen.make_plan(problem, 4096, 132) if problem.packed else ring_attention.make_plan(problem, Sizes(1, 4096).code, 132)


# Tiles that tests/gpu/attention_variants.py compares with the usual ones.
_OTHER_TILES = {64: AttentionTile(64, 128, 4, 2), 128: AttentionTile(128, 128, 2, 2)}


def plan_of(head_dim: int, dtype: str, causal: bool, parts: int = 1, tile: AttentionTile | None = None) -> AttentionPlan:
    return AttentionPlan(AttentionProblem(Topology(4, 4), head_dim, dtype, causal, parts=parts, tile=tile), 8192, Split(132, 0, 0, 0))


@pytest.mark.cases(head_dim=(64, 128), dtype=("bfloat16", "float16"), causal=(False, True), parts=(1, 2), usual=(True, False))
@pytest.mark.drawn(1)
def test_kernel(caplog: pytest.LogCaptureFixture, head_dim: int, dtype: str, causal: bool, parts: int, usual: bool) -> None:
    tile = AttentionTile.of(head_dim, causal) if usual else _OTHER_TILES[head_dim]
    sass = cuda.disassemble(fits(caplog, plan_of(head_dim, dtype, causal, parts, tile).spec))
    assert sass is not None, "no nvdisasm: pip install 'mkernel[test]'"
    instructions = [(name, operands) for name, operands in _INSTRUCTION.findall(sass)]
    operations = {name.split(".")[0] for name, _ in instructions}
    kind = ".BF16" if dtype == "bfloat16" else ""
    assert {name for name, _ in instructions if name.startswith("HGMMA")} == {
        f"HGMMA.64x{n}x16.F32{kind}" for n in {tile.key_block, head_dim}
    }
    assert {"UTMALDG", "UTMASTG", "USETMAXREG"} <= operations
    assert "STG.E.128" in {name for name, _ in instructions}, "rows of tiles that are not full"
    assert not operations & {"STL", "LDL", "STACK"}, "local memory"
    check_main_loop(instructions, tile, head_dim)


def check_main_loop(instructions: list[tuple[str, str]], tile: AttentionTile, head_dim: int) -> None:
    """Both products are issued before the scores are waited for; the softmax runs beside the second one and has no more than it needs."""
    products = [i for i, (name, _) in enumerate(instructions) if name.startswith("HGMMA")]
    # In the order of the code: scores of the first block; in the loop scores and values; values of the last block.
    scores, values = head_dim // 16, tile.key_block // 16
    assert len(products) == 2 * (scores + values)
    begin, end = products[scores], products[2 * scores + values]
    loop = instructions[begin:end]
    moved = [name for name, _ in loop].count("R2UR")
    assert moved < scores + values, "what the warp has in common is in uniform registers, descriptors of operands above all"
    assert products[2 * scores + values - 1] - begin < 5 * (scores + values) + 16, "the products follow each other"
    waits = [i for i, (name, _) in enumerate(loop) if name == "WARPGROUP.DEPBAR.LE"]
    assert [loop[i][1].split(",")[-1].strip() for i in waits] == ["0x1"], "the wait for the values comes after the softmax"
    softmax = [name.split(".")[0] for name, _ in loop[waits[0] :]]
    count = tile.key_block // 2  # scores of a thread
    assert [name for name, _ in loop[waits[0] :]].count("MUFU.EX2") == count + 2, "and a factor for each of two rows"
    assert softmax.count("FFMA") <= count + 2
    assert softmax.count("FMNMX") <= count + 4
    assert softmax.count("FADD") <= count + 8


@pytest.mark.cases(
    head_dim=(64, 128),
    dtype=("bfloat16", "float16"),
    causal=(False, True),
    layout=LAYOUTS,
    world=((1, 1), (4, 4), (4, 2)),
    packed=(False, True),
    canonical=(False, True),
)
@pytest.mark.drawn(1)
def test_ring_attention(
    caplog: pytest.LogCaptureFixture,
    head_dim: int,
    dtype: str,
    causal: bool,
    layout: str,
    world: tuple[int, int],
    packed: bool,
    canonical: bool,
) -> None:
    """No kind of it spills: its producer, which walks through keys of all ranks, has the fewest registers to spare."""
    problem = RingAttentionProblem(Topology(*world), 8, 2, head_dim, dtype, causal, layout, 0.125, packed=packed, canonical=canonical)
    sass = cuda.disassemble(fits(caplog, ring_plan(problem).spec))
    assert sass is not None, "no nvdisasm: pip install 'mkernel[test]'"
    assert not {name.split(".")[0] for name, _ in _INSTRUCTION.findall(sass)} & {"STL", "LDL", "STACK"}, "local memory"


def test_what_moves_keys_is_inlined_once() -> None:
    """A kernel between nodes, where sequences are packed, was 3.6 times as long as in a world of one, and took NVRTC 3.8 s."""
    sizes = []
    for world in ((1, 1), (4, 2)):
        problem = RingAttentionProblem(Topology(*world), 8, 2, 128, "bfloat16", True, "zigzag", 0.125, packed=True)
        sass = cuda.disassemble(cuda.compile(ring_plan(problem).spec))
        assert sass is not None, "no nvdisasm: pip install 'mkernel[test]'"
        sizes.append(len(_INSTRUCTION.findall(sass)))
    assert sizes[1] < 2.7 * sizes[0], sizes


@pytest.mark.slow
def test_compiling_is_about_as_quick_as_allgather_gemm() -> None:
    spec = plan_of(128, "bfloat16", True).spec
    assert relative_cost(lambda k: dataclasses.replace(spec, constants=(*spec.constants, ("kFresh", k)))) < 1.6
