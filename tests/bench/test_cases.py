"""Bytes, shapes and options of the benchmark's cases, and the arithmetic of a measurement: no GPU, no compiler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mkernel.bench import command
from mkernel.bench.cases import ops
from mkernel.bench.cases.base import random_b
from mkernel.bench.stats import milliseconds, quantile, slowest, tera
from mkernel.errors import ArgumentError
from mkernel.planner.reduce import PARTIALS, make_plan
from mkernel.planner.topology import Topology


def test_quantiles_interpolate_and_ignore_order() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([float(i) for i in range(11)], 0.1) == 1.0
    assert quantile([float(i) for i in range(11)], 0.9) == pytest.approx(9.0)
    assert quantile([7.0], 0.9) == 7.0
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.5)


def test_quantiles_agree_with_numpy(rng: np.random.Generator) -> None:
    samples = rng.standard_normal(37).tolist()
    for q in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert quantile(samples, q) == pytest.approx(float(np.quantile(samples, q)))


def test_slowest_rank_is_the_largest_median_not_the_largest_sample() -> None:
    measurement = slowest([[1.0, 1.0, 100.0], [2.0, 2.0, 2.0], [1.5, 1.5, 1.5]], "ms", "made up")
    assert (measurement.rank, measurement.median, measurement.p10, measurement.p90) == (1, 2.0, 2.0, 2.0)


def test_a_rank_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        slowest([[1.0], []], "ms", "made up")


def test_units() -> None:
    assert milliseconds(325e9, 325.0) == pytest.approx(1000.0)
    assert tera(2.0 * 8192**3, 1.4) == pytest.approx(785.4, abs=0.1)


@pytest.mark.parametrize(("size", "link_ms"), [("2048", 0.019), ("4096", 0.077), ("8192", 0.310), ("16384", 1.24), ("32768", 4.96)])
def test_allgather_gemm_link_time_on_four_ranks(size: str, link_ms: float) -> None:
    case = ops()["allgather_gemm"].case(size, Topology(4, 4), "bfloat16")
    assert case.network_bytes == 0
    assert milliseconds(case.link_bytes, 325.0) == pytest.approx(link_ms, rel=0.03)
    assert case.shape == {"M": int(size), "N": int(size) // 4, "K": int(size)}
    assert case.flops == 2.0 * int(size) ** 3 / 4


class _Timing:
    """What makes operands."""

    def random(self, shape: tuple[int, ...], seed: int) -> Any:
        return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float16)


@pytest.mark.parametrize("row_major", [True, False])
def test_b_is_passed_as_asked(row_major: bool) -> None:
    """And planned for: what torch's linear layers pass is the transpose view of an (N, K) array."""
    made = random_b(_Timing(), 16, 24, 1, row_major)  # type: ignore[arg-type]
    assert made.shape == (16, 24)
    assert made.flags.c_contiguous == row_major
    options = {} if row_major else {"b": "transposed"}
    for op in ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce", "gemm"):
        world = Topology(1, 1) if op == "gemm" else Topology(4, 4)
        case = ops()[op].case("64x128x256", world, "bfloat16", **options)
        assert case.plan(132).problem.b_row_major == row_major  # type: ignore[attr-defined]
        assert ("transposed" in case.title) != row_major
        assert "b" not in getattr(case, "options", {}), "which the op does not take"


@pytest.mark.parametrize(("size", "network_ms"), [("8192", 0.67), ("16384", 2.68), ("32768", 10.7)])
def test_allgather_gemm_network_time_on_two_nodes_of_two(size: str, network_ms: float) -> None:
    case = ops()["allgather_gemm"].case(size, Topology(4, 2), "bfloat16")
    assert milliseconds(case.network_bytes, 50.0) == pytest.approx(network_ms, rel=0.01)
    shard = int(size) ** 2 // 4 * 2
    assert (case.link_bytes, case.network_bytes) == (2 * shard, shard)


def test_every_shard_but_ones_own_arrives_once() -> None:
    for topology in (Topology(1, 1), Topology(2, 2), Topology(4, 2), Topology(8, 2), Topology(6, 3)):
        case = ops()["allgather_gemm"].case(str(768 * topology.size), topology, "float16")
        assert case.link_bytes + case.network_bytes == (topology.size - 1) * 768 * (768 * topology.size) * 2


@pytest.mark.parametrize(("size", "link_ms"), [("2048", 0.019), ("4096", 0.077), ("8192", 0.310), ("16384", 1.24), ("32768", 4.96)])
def test_link_time_of_the_reductions_on_four_ranks(size: str, link_ms: float) -> None:
    for op, times in (("gemm_reduce_scatter", 1), ("gemm_allreduce", 2)):
        case = ops()[op].case(size, Topology(4, 4), "bfloat16")
        assert case.network_bytes == 0
        assert milliseconds(case.link_bytes, 325.0) == pytest.approx(times * link_ms, rel=0.03)
        assert case.shape == {"M": int(size), "N": int(size), "K": int(size)}
        assert case.flops == 2.0 * int(size) ** 3 / 4


@pytest.mark.parametrize(("size", "network_ms"), [("8192", 0.67), ("16384", 2.68), ("32768", 10.7)])
def test_network_time_of_the_reductions_on_two_nodes_of_two(size: str, network_ms: float) -> None:
    shard = int(size) ** 2 // 4 * 2
    for op, times in (("gemm_reduce_scatter", 1), ("gemm_allreduce", 2)):
        case = ops()[op].case(size, Topology(4, 2), "bfloat16")
        assert milliseconds(case.network_bytes, 50.0) == pytest.approx(times * network_ms, rel=0.01)
        assert (case.link_bytes, case.network_bytes) == (times * 2 * shard, times * shard)


def test_small_shapes_are_a_table_of_their_own() -> None:
    op = ops()["gemm_allreduce"]
    assert set(op.sizes) == set(op.groups["large"]) | set(op.groups["small"])
    options = command._parser().parse_args(["gemm_allreduce", "--world", "1x4", "--shapes", "small"])
    assert command.Asked.of(options).sizes == tuple(f"{m}x8192x8192" for m in (1, 8, 32, 128, 256))
    case = op.case("32x8192x8192", Topology(4, 4), "bfloat16")
    assert case.solo is not None
    assert (case.solo.m, case.solo.n, case.solo.k) == (32, 8192, 2048)
    assert case.link_bytes == 2 * 3 * 32 * 8192 * 2 // 4


def test_options_go_to_the_op_that_has_them() -> None:
    def plan(*words: str) -> command.Asked:
        return command.Asked.of(command._parser().parse_args([*words, "--world", "1x4", "--shapes", "512"]))

    assert plan("gemm_allreduce", "--partials", "float32", "--algorithm", "one_shot").op_options == {
        "partials": "float32",
        "algorithm": "one_shot",
    }
    assert plan("gemm_reduce_scatter").op_options == {}
    for words in (["gemm_reduce_scatter", "--algorithm", "one_shot"], ["allgather_gemm", "--partials", "float32"]):
        with pytest.raises(ArgumentError, match="has no such option"):
            plan(*words)


def test_the_heap_holds_what_the_plan_needs() -> None:
    for op, size in (("gemm_reduce_scatter", "8192"), ("gemm_allreduce", "8192"), ("gemm_allreduce", "256x8192x8192")):
        for topology in (Topology(4, 4), Topology(4, 2), Topology(4, 1)):
            for partials in PARTIALS:
                case: Any = ops()[op].case(size, topology, "bfloat16", partials=partials)
                for sms in (4, 114, 132, 148):
                    assert case.heap_bytes >= make_plan(case.problem, case.rows, sms).workspace_bytes


def test_bad_shapes_say_what_they_must_be() -> None:
    for size in ("x", "10", "4096x100x4096", "0", "8x8", "-8"):
        with pytest.raises(ArgumentError, match="--shapes"):
            ops()["allgather_gemm"].case(size, Topology(4, 4), "bfloat16")
    for size in ("x", "40", "4096x100x4096", "8x8x40", "0", "8x8", "-32", "0x8x32"):
        for op in ("gemm_reduce_scatter", "gemm_allreduce"):
            with pytest.raises(ArgumentError, match="--shapes"):
                ops()[op].case(size, Topology(4, 4), "bfloat16")
    with pytest.raises(ArgumentError, match="multiple of 4"):
        ops()["gemm_reduce_scatter"].case("1x8x32", Topology(4, 4), "bfloat16")
    assert ops()["gemm_allreduce"].case("1x8x32", Topology(4, 4), "bfloat16").shape == {"M": 1, "N": 8, "K": 32}
    with pytest.raises(ArgumentError, match="MxNxK"):
        ops()["gemm"].case("8192", Topology(1, 1), "bfloat16")
    with pytest.raises(ArgumentError, match="world of one"):
        ops()["gemm"].case("8192x8192x8192", Topology(4, 4), "bfloat16")


def test_default_shapes_of_every_op_are_valid() -> None:
    for op in ops().values():
        topology = Topology(1, 1) if op.name == "gemm" else Topology(4, 4)
        for size in op.sizes:
            case = op.case(size, topology, "bfloat16")
            assert case.flops > 0
            assert case.heap_bytes > 0
