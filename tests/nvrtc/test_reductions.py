"""The kernels of gemm_reduce_scatter and gemm_allreduce, compiled for sm_90a without a GPU: what test_kernels.py asks of allgather_gemm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")

from mkernel.jit import cuda
from mkernel.planner.gemm import GemmTile
from mkernel.planner.heights import usual_heights
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReducePlan, ReduceProblem, make_plan
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology
from tests.nvrtc.test_kernels import (
    _SMS,
    MODES,
    _own_cache,  # noqa: F401 - a fixture for every test here
    branched_packets,
    compiled,
    fits,
    loop_of_pairs,
    relative_cost,
)
from tests.ops.planted_bug import Bug

HOWS = (REDUCE_SCATTER, "one_shot", "two_shot")


def plan_of(
    how: str,
    world: str,
    block_n: int,
    dtype: str,
    row_major: bool,
    partials: str,
    k: int = 2048,
    specialize: str = "all",
    canonical: bool = False,
) -> ReducePlan:
    nodes, per_node = map(int, world.split("x"))
    op, algorithm = (REDUCE_SCATTER, "two_shot") if how == REDUCE_SCATTER else (ALLREDUCE, how)
    problem = ReduceProblem(op, Topology(nodes * per_node, per_node), 4 * block_n + 64, k, dtype, row_major, partials, algorithm, canonical)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mkernel.planner.reduce.fits_packets", lambda plan: False)
        return make_plan(problem, 1024, _SMS, None, GemmTile.deepest(block_n), specialize=specialize)


def packets_of(
    how: str,
    size: int,
    block_n: int,
    dtype: str = "bfloat16",
    row_major: bool = True,
    k: int = 2048,
    specialize: str = "all",
    canonical: bool = False,
    shares: int = 1,
    clusters: tuple[int, int] = (1, 1),
) -> ReducePlan:
    op, algorithm = (REDUCE_SCATTER, None) if how == REDUCE_SCATTER else (ALLREDUCE, how)
    problem = ReduceProblem(op, Topology(size, size), 4 * block_n + 64, k, dtype, row_major, "output", algorithm, canonical)
    rows = 1000 // size if how == REDUCE_SCATTER else 1000
    rows = rows if shares == 1 else 16
    tiling = Tiling(block_n, None, shares, clusters[0], 1, clusters[1])
    plan = make_plan(problem, rows, _SMS, specialize=specialize, tiling=tiling)
    assert (plan.packets, plan.spec.cluster) == (True, clusters[0] * clusters[1])
    return plan


@pytest.mark.drawn(2)
@pytest.mark.cases(
    how=HOWS,
    block_n=(64, 128, 192, 256),
    world=("1x1", "1x4", "2x2", "4x1", "4x8"),
    row_major=(True, False),
    dtype=("bfloat16", "float16"),
    partials=("output", "float32"),
    specialize=MODES,
    canonical=(False, True),
)
def test_kernel(
    caplog: pytest.LogCaptureFixture,
    how: str,
    world: str,
    block_n: int,
    row_major: bool,
    dtype: str,
    partials: str,
    specialize: str,
    canonical: bool,
) -> None:
    plan = plan_of(how, world, block_n, dtype, row_major, partials, specialize=specialize, canonical=canonical)
    instructions = compiled(caplog, plan.spec)
    operations = {name.split(".")[0] for name in instructions}
    kind = ".BF16" if dtype == "bfloat16" else ""
    assert {name for name in instructions if name.startswith("HGMMA")} == {f"HGMMA.64x{block_n}x16.F32{kind}"}
    assert {"UTMALDG", "UTMASTG"} <= operations, "TMA"
    assert ("UBLKCP" in operations) == (world != "1x1" or how == "one_shot"), "bulk copies"
    assert not operations & {"STL", "LDL", "STACK"}, "local memory"
    assert not {name for name in instructions if "MULTI" in name or name.startswith("LDGMC")}, "multicast"
    assert not {name for name in instructions if name.startswith(("ATOM", "RED")) and ".F" in name}, "sums whose order chance decides"


@pytest.mark.drawn(3)
@pytest.mark.cases(
    how=HOWS,
    size=(2, 3, 4, 8),
    row_major=(True, False),
    dtype=("bfloat16", "float16"),
    specialize=MODES,
    shares=(1, 3),
    clusters=((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)),
    valid=lambda shares, clusters, **_: shares == 1 or clusters == (1, 1),
)
def test_kernel_of_swapped_operands(
    caplog: pytest.LogCaptureFixture,
    how: str,
    size: int,
    row_major: bool,
    dtype: str,
    specialize: str,
    shares: int,
    clusters: tuple[int, int],
) -> None:
    """One kernel for tiles of all heights; what threads have does not spill, however many ranks they exchange it with."""
    op, algorithm = (REDUCE_SCATTER, None) if how == REDUCE_SCATTER else (ALLREDUCE, how)
    problem = ReduceProblem(op, Topology(size, size), 520, 2048, dtype, row_major, "output", algorithm)
    plan = make_plan(problem, 40, _SMS, specialize=specialize, tiling=Tiling(None, None, shares, clusters[0], 1, clusters[1], 2))
    assert plan.swapped
    instructions = compiled(caplog, plan.spec, packets=True)
    kind, heights = ".BF16" if dtype == "bfloat16" else "", usual_heights(most=192, unit=8 * clusters[1])
    assert {name for name in instructions if name.startswith("HGMMA")} == {f"HGMMA.64x{height}x16.F32{kind}" for height in heights}
    assert {"LDG.E.128.STRONG.SYS", "STG.E.128.STRONG.SYS"} <= instructions, "whole packets"
    assert not {name.split(".")[0] for name in instructions} & {"STL", "LDL", "STACK"}, "local memory"


@pytest.mark.parametrize(("how", "size"), [(REDUCE_SCATTER, 2), ("one_shot", 4), ("two_shot", 8)])
@pytest.mark.drawn(1)
def test_descriptors_of_ctas_alone_are_the_warps(caplog: pytest.LogCaptureFixture, how: str, size: int) -> None:
    """Put together by mov.b64 they were moved for each product, by NVRTC 13.5, in CTAs that are no clusters, between ranks."""
    op, algorithm = (REDUCE_SCATTER, None) if how == REDUCE_SCATTER else (ALLREDUCE, how)
    problem = ReduceProblem(op, Topology(size, size), 520, 2048, "bfloat16", False, "output", algorithm)
    compiled(caplog, make_plan(problem, 40, _SMS, tiling=Tiling(None, None, 1, 1, 1, 1, 2)).spec, packets=True)


@pytest.mark.drawn(2)
@pytest.mark.cases(
    how=(REDUCE_SCATTER, "two_shot"),
    block_n=(64, 128, 192, 256),
    world=("1x1", "1x2", "1x4", "2x2", "4x1", "4x8"),
    row_major=(True, False),
    dtype=("bfloat16", "float16"),
    partials=("output", "float32"),
    specialize=MODES,
    canonical=(False, True),
    clusters=((2, 1), (1, 2), (2, 2), (1, 4), (4, 1)),
    valid=lambda how, world, clusters, **_: (
        clusters == (2, 1) or world == "1x1" or (how == REDUCE_SCATTER and world[0] == "1" and 1 in clusters)
    ),
)
def test_kernel_of_clusters(
    caplog: pytest.LogCaptureFixture,
    how: str,
    world: str,
    block_n: int,
    row_major: bool,
    dtype: str,
    partials: str,
    specialize: str,
    canonical: bool,
    clusters: tuple[int, int],
) -> None:
    problem = plan_of(how, world, block_n, dtype, row_major, partials, canonical=canonical).problem
    tiling = Tiling(block_n, None, 1, clusters[0], 0, clusters[1])
    plan = make_plan(problem, 1024, _SMS, specialize=specialize, tiling=tiling)
    loop_of_pairs(caplog, plan.spec, block_n, dtype)


@pytest.mark.drawn(1)
@pytest.mark.cases(
    how=(REDUCE_SCATTER, "two_shot"),
    world=("1x2", "1x4", "2x2", "4x1", "4x8"),
    row_major=(True, False),
    dtype=("bfloat16", "float16"),
    specialize=MODES,
)
def test_the_kernel_that_needs_most_registers(
    caplog: pytest.LogCaptureFixture, how: str, world: str, row_major: bool, dtype: str, specialize: str
) -> None:
    """Canonical sums of the widest pairs: of all kernels of pairs they alone have spilled, in 52 cases of 160."""
    problem = plan_of(how, world, 256, dtype, row_major, "output", canonical=True).problem
    plan = make_plan(problem, 1024, _SMS, specialize=specialize, tiling=Tiling(256, cluster=2, packets=0))
    loop_of_pairs(caplog, plan.spec, 256, dtype)


@pytest.mark.parametrize("specialize", [pytest.param("all", marks=pytest.mark.slow), "none"])
@pytest.mark.cases(how=HOWS, block_n=(64, 128, 192, 256), world=("1x2", "1x4", "2x2"), canonical=(False, True))
@pytest.mark.drawn(1)
def test_wgmma_is_not_serialized(
    caplog: pytest.LogCaptureFixture, specialize: str, how: str, block_n: int, world: str, canonical: bool
) -> None:
    """Every epilogue with every width, and with --full in every world: ptxas decides by the details of what stands around the loop."""
    fits(caplog, plan_of(how, world, block_n, "bfloat16", True, "output", specialize=specialize, canonical=canonical).spec)


@pytest.mark.drawn(1)
@pytest.mark.cases(
    how=HOWS,
    size=tuple(range(2, 9)),
    block_n=(64, 128),
    row_major=(True, False),
    dtype=("bfloat16", "float16"),
    specialize=MODES,
    canonical=(False, True),
    shares=(1, 4),
    clusters=((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)),
    valid=lambda canonical, shares, clusters, **_: shares == 1 or not (canonical or clusters != (1, 1)),
)
def test_packets(
    caplog: pytest.LogCaptureFixture,
    how: str,
    size: int,
    block_n: int,
    row_major: bool,
    dtype: str,
    specialize: str,
    canonical: bool,
    shares: int,
    clusters: tuple[int, int],
) -> None:
    more: dict[str, Any] = {"specialize": specialize, "canonical": canonical, "shares": shares, "clusters": clusters}
    plan = packets_of(how, size, block_n, dtype, row_major, **more)
    instructions = compiled(caplog, plan.spec, packets=True)
    operations = {name.split(".")[0] for name in instructions}
    kind = ".BF16" if dtype == "bfloat16" else ""
    assert {name for name in instructions if name.startswith("HGMMA")} == {f"HGMMA.64x{block_n}x16.F32{kind}"}
    assert "UBLKCP" not in operations, "nothing is copied in bulk"
    assert {name for name in instructions if "128" in name and "SYS" in name and name.startswith(("LD", "ST"))} >= {
        "LDG.E.128.STRONG.SYS",
        "STG.E.128.STRONG.SYS",
    }, "whole packets"
    assert not operations & {"STL", "LDL", "STACK"}, "local memory"
    assert not {name for name in instructions if "MULTIMEM" in name or name.startswith("LDGMC")}, "NVLink multicast"
    assert not {name for name in instructions if name.startswith(("ATOM", "RED")) and ".F" in name}, "sums whose order chance decides"


def test_packets_behind_branches_are_seen(tmp_path: Path) -> None:
    """As they were looked at before: an address took 26 instructions, of each packet and in each look."""
    predicated = "ptx::load_packet_if((missing >> i & 1) != 0, v[i], at(i));"
    branched = "if ((missing >> i & 1) != 0) ptx::load_packet_if(true, v[i], at(i));"
    with Bug("", "comm/packet.cuh", predicated, branched).in_force(tmp_path / "kernels"):
        sass = cuda.disassemble(cuda.compile(packets_of(REDUCE_SCATTER, 4, 64).spec))
    assert sass is not None
    assert branched_packets(sass) != []


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.slow) for size in range(2, 8)] + [8])
@pytest.mark.parametrize("how", ["one_shot", REDUCE_SCATTER])
def test_all_packets_of_a_row_fit_into_registers(caplog: pytest.LogCaptureFixture, how: str, size: int) -> None:
    fits(caplog, packets_of(how, size, 128).spec)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in range(3, 9))])
@pytest.mark.parametrize("how", HOWS)
def test_packets_of_shares_fit_into_registers(caplog: pytest.LogCaptureFixture, how: str, size: int) -> None:
    fits(caplog, packets_of(how, size, 128, shares=4).spec)


@pytest.mark.parametrize("how", HOWS)
def test_no_multicast_in_ptx(how: str) -> None:
    ptx = cuda.compile_ptx(plan_of(how, "2x2", 128, "bfloat16", True, "output").spec)
    assert "multimem" not in ptx
    assert "multicast" not in ptx


@pytest.mark.parametrize(
    ("how", "most"),
    [pytest.param(how, most, marks=pytest.mark.slow) for how, most in ((REDUCE_SCATTER, 1.6), ("one_shot", 1.6), ("two_shot", 2.2))],
)
def test_compiling_is_quick(how: str, most: float) -> None:
    """Pulling tiles costs half as much as the GEMM: 1.8 measured for two_shot, 1.2 for gemm_reduce_scatter."""
    assert relative_cost(lambda k: plan_of(how, "2x2", 256, "bfloat16", True, "output", k).spec) <= most


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_compiling_packets_is_quick(how: str) -> None:
    """0.9 measured for one_shot."""
    assert relative_cost(lambda k: packets_of(how, 8, 128, k=k).spec) <= 1.2


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_compiling_shares_is_quick(how: str) -> None:
    assert relative_cost(lambda k: packets_of(how, 8, 128, k=k, shares=4).spec) <= 1.6
