"""The checker of results finds what is planted, and lets pass what rounding explains."""

from __future__ import annotations

import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mkernel.bench.cases import ops
from mkernel.bench.timing import CpuTiming
from mkernel.planner.reduce import ALLREDUCE, PARTIALS, REDUCE_SCATTER, ReduceProblem, make_plan
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology
from mkernel.tools.check import UNIT_ROUNDOFF, NodeSum, Product, node_sums, to_float64, worst_product, worst_sum

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def _product(rng: np.random.Generator, m: int, n: int, k: int, dtype: Any) -> tuple[Any, Any, Any]:
    a = rng.standard_normal((m, k), dtype=np.float32).astype(dtype)
    b = rng.standard_normal((k, n), dtype=np.float32).astype(dtype)
    return a, b, (a.astype(np.float32) @ b.astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_float64_from_bits_is_exact(rng: np.random.Generator, dtype: Any) -> None:
    values = rng.standard_normal(1000, dtype=np.float32).astype(dtype)
    np.testing.assert_array_equal(to_float64(np, values), values.astype(np.float64))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(1, 8, 8), (128, 128, 64), (130, 264, 520), (64, 128, 8192)])
def test_right_results_pass(rng: np.random.Generator, dtype: Any, shape: tuple[int, int, int]) -> None:
    a, b, c = _product(rng, *shape, dtype)
    assert 0 < worst_product(np, c, a, b) <= 1


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_planted_errors_fail(rng: np.random.Generator, dtype: Any) -> None:
    m, n, k = 256, 264, 8192
    a, b, c = _product(rng, m, n, k, dtype)

    unwritten = c.copy()
    unwritten[255, 263] = np.nan
    assert worst_product(np, unwritten, a, b) == float("inf")

    skipped = a.copy()
    skipped[:, 4096:4160] = 0  # one k-step of 64
    wrong = (skipped.astype(np.float32) @ b.astype(np.float32)).astype(dtype)
    assert worst_product(np, wrong, a, b) > 1

    stale = c.copy()
    stale[128:, :128] = c[:128, :128]  # a tile of another row block
    assert worst_product(np, stale, a, b) > 1

    swapped = c.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert worst_product(np, swapped, a, b) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_correct_rounding_is_within_the_bound(dtype: str, rng: np.random.Generator) -> None:
    a, b, out = _product(rng, 64, 48, 256, DTYPES[dtype])
    assert 0.3 < worst_product(np, out, a, b) <= 1  # not so loose that it accepts anything


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_mistakes_fail(dtype: str, rng: np.random.Generator) -> None:
    a, b, _ = _product(rng, 64, 48, 256, DTYPES[dtype])
    a[3, 17] = 1
    exact = a.astype(np.float64) @ b.astype(np.float64)

    def worst(values: Any) -> float:
        return worst_product(np, values.astype(a.dtype), a, b)

    short = a.copy()
    short[3, 17] = 0  # one product of one row left out
    assert worst(short.astype(np.float64) @ b.astype(np.float64)) > 1
    assert worst(exact * (1 + 4 * UNIT_ROUNDOFF[dtype])) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-30, -22, -16])
def test_subnormal_results_are_rounded_in_their_own_steps(dtype: str, exponent: int, rng: np.random.Generator) -> None:
    """The smallest steps of float16 are 2^-24: relative errors are larger there, and right."""
    a, b, _ = _product(rng, 64, 48, 16, DTYPES[dtype])
    a = (a.astype(np.float32) * 2.0 ** (exponent / 2)).astype(a.dtype)
    b = (b.astype(np.float32) * 2.0 ** (exponent / 2)).astype(b.dtype)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert worst_product(np, exact.astype(a.dtype), a, b) <= 1
    parts = [NodeSum([Product(a[:, :8], b[:8], True), Product(a[:, 8:], b[8:], True)])]
    assert worst_sum(np, _reduced(parts, a.dtype), parts) <= 1
    if dtype == "float16":
        step = 2.0**-24 * np.maximum(1, 2.0 ** (np.floor(np.log2(np.abs(exact) + 1e-30)) + 14))
        assert worst_product(np, (exact + 1.6 * step).astype(a.dtype), a, b) > 1


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_tile_of_few_elements_may_have_all_roundings_one_way(ranks: int) -> None:
    """One element, and every rank's part rounded as far up as can be."""
    up = np.array([[1 + 2.0**-7 + 2.0**-8 + 2.0**-14]], np.float32)  # half a step above 1 + 2^-7, and a little more
    a, b = np.ones((1, 8), np.float32).astype(ml_dtypes.bfloat16), np.zeros((8, 1), np.float32).astype(ml_dtypes.bfloat16)
    b[:3] = np.array([[1 + 2.0**-7], [2.0**-8], [2.0**-14]], np.float32).astype(ml_dtypes.bfloat16)
    assert (a.astype(np.float32) @ b.astype(np.float32)) == up
    nodes = [NodeSum([Product(a, b, True)] * ranks)]
    assert 0.3 < worst_sum(np, _reduced(nodes, ml_dtypes.bfloat16), nodes) <= 1


def test_the_shape_must_match(rng: np.random.Generator) -> None:
    a, b, _ = _product(rng, 8, 8, 16, np.float16)
    for shape in ((8, 9), (7, 8), (8,)):
        with pytest.raises(ValueError, match="shape"):
            worst_product(np, np.zeros(shape, np.float16), a, b)


def test_unit_roundoff_is_the_worst_rounding() -> None:
    """A value half way between two neighbours of 1 is off by 2^-p relative to 1."""
    for name, dtype in DTYPES.items():
        half_way = 1 + float(ml_dtypes.finfo(dtype).eps) / 2
        assert abs(float(np.array(half_way).astype(dtype)) - half_way) == UNIT_ROUNDOFF[name]


def test_the_bound_is_what_rounding_allows() -> None:
    """Every rank's part of an element is 1; the result is off by one rounding of 1."""

    def allowed(op: str, shape: Topology, rank: int = 0, partials: str = "output", algorithm: str | None = None) -> float:
        """In units of one rounding of 1."""
        plan = make_plan(ReduceProblem(op, shape, 8, 8, "bfloat16", True, partials, algorithm), 1, 132)
        a, b = np.zeros((shape.size, 8), np.float32), np.ones((8, 8), np.float32)
        a[:, 0] = 1
        nodes = node_sums(plan, rank, lambda source: (a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)))
        nodes = [NodeSum([Product(p.a[:1], p.b, p.rounded) for p in node.products], node.rounded) for node in nodes]
        values = np.full((1, 8), shape.size * (1 + 2.0**-7)).astype(ml_dtypes.bfloat16)
        return 2 * shape.size / worst_sum(np, values, nodes)

    one, two, four = Topology(1, 1), Topology(2, 2), Topology(4, 2)
    about = [  # the result's own rounding, the products', the nodes' sums
        (allowed(REDUCE_SCATTER, one), 1),
        (allowed(ALLREDUCE, one, algorithm="one_shot"), 1),
        (allowed(REDUCE_SCATTER, two, 1), 2 + 1),
        (allowed(ALLREDUCE, two, algorithm="two_shot"), 2 + 2),
        (allowed(ALLREDUCE, two, algorithm="one_shot"), 2 + 2),
        (allowed(REDUCE_SCATTER, four, 3), 4 + 3 + 2),
        (allowed(ALLREDUCE, four, algorithm="two_shot"), 4 + 4 + 2 + 2),
        (allowed(ALLREDUCE, four, algorithm="one_shot"), 4 + 4),
        (allowed(ALLREDUCE, four, partials="float32", algorithm="two_shot"), 4),
    ]
    for found, expected in about:
        assert expected <= found < expected * 1.02


def test_an_empty_result_is_right() -> None:
    empty = np.empty((0, 8), dtype=np.float16)
    assert worst_product(np, empty, np.empty((0, 8), dtype=np.float16), np.ones((8, 8), dtype=np.float16)) == 0.0


def _partial(product: Product, dtype: Any) -> Any:
    """As a kernel would: accumulated in float32, rounded once if it is to be sent."""
    value = product.a.astype(np.float32) @ product.b.astype(np.float32)
    return value.astype(dtype).astype(np.float32) if product.rounded else value


def _reduced(nodes: list[NodeSum], dtype: Any, times: dict[int, float] | None = None) -> Any:
    """The sum of all products. ``times``: product -> how often it is added, for mistakes."""
    total: Any = 0.0
    position = 0
    for node in nodes:
        subtotal: Any = 0.0
        for product in node.products:
            subtotal = subtotal + (times or {}).get(position, 1.0) * _partial(product, dtype)
            position += 1
        total = total + (subtotal.astype(dtype).astype(np.float32) if node.rounded else subtotal)
    return total.astype(dtype)


def _nodes(rng: np.random.Generator, dtype: Any, m: int, n: int, k: int, rounded: bool, num_nodes: int = 2) -> list[NodeSum]:
    def product(own: bool) -> Product:
        return Product(*_product(rng, m, n, k, dtype)[:2], rounded and not own)

    return [NodeSum([product(node == rank == 0) for rank in range(2)], rounded and node > 0) for node in range(num_nodes)]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("shape", [(1, 8, 8), (130, 264, 136), (64, 128, 2048)])
def test_right_sums_pass_and_roundings_must_be_allowed(rng: np.random.Generator, dtype: Any, shape: tuple[int, int, int]) -> None:
    exact, rounded = (_nodes(rng, dtype, *shape, rounded) for rounded in (False, True))
    assert 0 < worst_sum(np, _reduced(exact, dtype), exact) <= 1
    assert 0 < worst_sum(np, _reduced(rounded, dtype), rounded) <= 1
    if shape[2] == 136:  # enough elements for the worst of them, and K small enough for one rounding to be seen beside float32's
        pretended = [NodeSum([Product(product.a, product.b) for product in node.products]) for node in rounded]
        assert worst_sum(np, _reduced(rounded, dtype), pretended) > 1


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_a_partial_that_is_lost_or_added_twice_fails(rng: np.random.Generator, dtype: Any, factor: float) -> None:
    nodes = _nodes(rng, dtype, 128, 136, 512, True, num_nodes=4)
    for position in (0, 1, 7):
        assert worst_sum(np, _reduced(nodes, dtype, {position: factor}), nodes) > 10


class _FourRanks:
    """Rank 2 of two nodes of two, as far as a case looks."""

    rank, size, num_nodes, ranks_per_node, target, xp = 2, 4, 2, 2, "cpu", np
    backend = types.SimpleNamespace(sm_count=132)


@pytest.mark.parametrize("split", [None, Split(inter_send=1, inter_reduce=1)], ids=str)
def test_a_split_that_asks_for_two_steps_has_their_roundings(monkeypatch: pytest.MonkeyPatch, split: Split | None) -> None:
    """Few rows of an all-reduce go in one step, unless a split names roles that only two steps have."""
    case: Any = ops()["gemm_allreduce"].case("8x72x96", Topology(4, 2), "bfloat16")
    case.setup(CpuTiming(_FourRanks(), "bfloat16"), 7)
    rounded: list[bool] = []
    monkeypatch.setattr("mkernel.bench.cases.reduce.worst_sum", lambda xp, out, nodes: rounded.extend(node.rounded for node in nodes))
    case.worst(0, split)
    assert rounded == [split is not None] * 2


@pytest.mark.parametrize("partials", PARTIALS)
@pytest.mark.parametrize(
    ("op", "algorithm"), [("gemm_reduce_scatter", None), ("gemm_allreduce", "one_shot"), ("gemm_allreduce", "two_shot")]
)
def test_the_reference_of_a_reduction(op: str, algorithm: str | None, partials: str) -> None:
    """Right results of rank 2 pass; those of another rank, or without one rank's contribution, do not."""
    options = {"partials": partials} | ({"algorithm": algorithm} if algorithm else {})
    case: Any = ops()[op].case("136x72x96", Topology(4, 2), "bfloat16", **options)
    case.setup(CpuTiming(_FourRanks(), "bfloat16"), 7)
    assert case.worst(0) == float("inf")  # poisoned
    operands = [case._operands(1, rank) for rank in range(4)]
    assert all(any(a is x for x, _ in case._inputs) is False for a, _ in operands)  # written again
    np.testing.assert_array_equal(operands[2][0], case._inputs[1][0])
    values = [a.astype(np.float32) @ b.astype(np.float32) for a, b in operands]

    def result(contributions: list[Any], rank: int = 2) -> Any:
        rows = case.rows
        total = sum(contributions).astype(ml_dtypes.bfloat16)
        return total[rank * rows : (rank + 1) * rows] if op == "gemm_reduce_scatter" else total

    case.outputs()[1][...] = result(values)
    assert case.worst(1) <= 1
    case.outputs()[1][...] = result(values[:3])
    assert case.worst(1) > 10
    if op == "gemm_reduce_scatter":
        case.outputs()[1][...] = result(values, rank=1)
        assert case.worst(1) > 10
    own = 2 if op == "gemm_reduce_scatter" else None  # what stays is not rounded
    sent = [value if rank == own else value.astype(ml_dtypes.bfloat16).astype(np.float32) for rank, value in enumerate(values)]
    case.outputs()[1][...] = result(sent)
    assert (case.worst(1) <= 1) == (partials == "output")
