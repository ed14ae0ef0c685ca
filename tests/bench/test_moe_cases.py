"""Cases of the MoE ops: the bytes that must travel, counted one by one, and a reference that sees what is wrong with a result."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mkernel.bench.cases import moe
from mkernel.bench.cases.moe_combine import MoeCombineCase
from mkernel.bench.cases.moe_dispatch_gemm import MoeDispatchGemmCase
from mkernel.bench.cases.moe_gemm_combine import MoeGemmCombineCase
from mkernel.bench.cases.moe_layer import MoeLayerCase
from mkernel.planner.topology import Topology
from mkernel.tools.check_moe import Combined, Rows, exact, product, rounded, swiglu, worst_rows

TOPOLOGIES = [Topology(1, 1), Topology(4, 4), Topology(4, 2), Topology(4, 1), Topology(6, 2)]
SIZE = "53x72x136x12x3:zipf"


def label(topology: Topology) -> str:
    return f"{topology.num_nodes}x{topology.ranks_per_node}"


each_topology = pytest.mark.parametrize("topology", TOPOLOGIES, ids=label)


def crossings(topology: Topology, token_owners: Any, home: int) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """(who receives, over what) for one token's row on its way out, and for its experts' rows on their way back."""
    out, back = set(), []
    rail = topology.local_rank(home)
    for owner in token_owners:
        node = topology.node(owner)
        mate = topology.rank(node, rail)  # on the rail of the token's home
        if node != topology.node(home):
            out.add((mate, "network"))
        if owner != mate:
            out.add((owner, "link"))
            back.append((mate, "link"))
    others = {topology.node(owner) for owner in token_owners} - {topology.node(home)}
    return sorted(out), back + [(home, "network")] * len(others)


@each_topology
def test_bytes_are_those_of_every_row_that_crosses(topology: Topology) -> None:
    case = MoeLayerCase(SIZE, topology, "bfloat16")
    most: dict[tuple[str, str], list[int]] = {}
    for call in range(moe.DRAWN):
        counts = {(way, over): [0] * topology.size for way in ("out", "back") for over in ("link", "network")}
        for home, owners in enumerate(case.owners(call)):
            for token_owners in owners:
                for way, crossed in zip(("out", "back"), crossings(topology, token_owners, home), strict=True):
                    for who, over in crossed:
                        counts[way, over][who] += 1
        for key, by_rank in counts.items():
            most.setdefault(key, []).append(max(by_rank))
    expected = {key: round(float(np.mean(values)) * 72 * 2) for key, values in most.items()}
    for case_type, way in ((MoeDispatchGemmCase, "out"), (MoeCombineCase, "back"), (MoeGemmCombineCase, "back")):
        one = case_type(SIZE, topology, "bfloat16")
        assert (one.link_bytes, one.network_bytes) == (expected[way, "link"], expected[way, "network"])
    assert case.link_bytes == expected["out", "link"] + expected["back", "link"]
    assert case.network_bytes == expected["out", "network"] + expected["back", "network"]


def test_a_uniform_table_of_four_ranks_has_the_bytes_that_it_should() -> None:
    """8192 tokens of top-8 in 256 experts: a rank has an expert of 1 - C(192, 8) / C(256, 8) of the 6144 tokens of the others."""
    case = MoeDispatchGemmCase("8192", Topology(4, 4), "bfloat16")
    missed = float(np.prod([(192 - i) / (256 - i) for i in range(8)]))
    assert case.link_bytes == pytest.approx(6144 * (1 - missed) * 7168 * 2, rel=0.02)
    assert case.network_bytes == 0
    assert case.flops == pytest.approx(2 * 8192 * 8 / 4 * 7168 * 2048, rel=0.05)
    assert 8192 * 8 / 4 <= case.max_rows <= 1.1 * 8192 * 8 / 4


@each_topology
@pytest.mark.parametrize("case_type", [MoeDispatchGemmCase, MoeCombineCase, MoeGemmCombineCase, MoeLayerCase])
def test_there_is_room_for_every_routing_that_is_drawn(topology: Topology, case_type: type[moe.MoeCase]) -> None:
    case: Any = case_type("41x72x136x12x3:mixture", topology, "float16")
    for call in range(moe.DRAWN):
        assert all(known.expert_offsets[-1] <= case.max_rows for known in case.known(call))
        assert max(known.expert_offsets[-1] for known in case.known(call)) == case.loads[call].max()
    for sms in (4, 132):
        assert case.heap_bytes >= case.plan(sms).workspace_bytes
    assert case.plan(132).describe()


# ---- the reference
H, F, N, TOKENS, TOPK = 264, 520, 256, 40, 3


def rows_of(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Any:
    return (rng.standard_normal(shape, np.float32) * scale).astype(ml_dtypes.bfloat16)


def to_bfloat16(array: Any) -> Any:
    return array.astype(np.float32).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("kind", [MoeCombineCase, MoeDispatchGemmCase, MoeGemmCombineCase, MoeLayerCase])
def test_a_case_that_nobody_needs_is_gone(kind: type[moe.MoeCase]) -> None:
    """It holds gigabytes on the device, which the next row needs: no cache may know it."""
    case = kind(SIZE, Topology(4, 4), "bfloat16")
    assert case.known(1) is case.known(1)
    gone = weakref.ref(case)
    del case
    assert gone() is None


class Made:
    """A layer of three experts of two nodes, in the arithmetic of a kernel (float32, a rounding where there is one), and its reference."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.x, self.add = rows_of(rng, TOKENS, H), rows_of(rng, TOKENS, N)
        self.up = rows_of(rng, TOPK, H, 2 * F, scale=1 / 16)
        self.down = rows_of(rng, TOPK, F, N, scale=1 / 16)
        self.weights = rng.uniform(0.25, 1, (TOKENS, TOPK)).astype(np.float32)  # what is lost is no trifle

    def expert(self, k: int, *, lost: slice = slice(0)) -> Any:
        """The rows that expert k makes. ``lost``: columns of the hidden values that are left out."""
        whole = self.x.astype(np.float32) @ self.up[k].astype(np.float32)
        gate, up = whole[:, :F], whole[:, F:]
        hidden = to_bfloat16(gate / (1 + np.exp(-gate)) * up)
        hidden[:, lost] = 0
        return to_bfloat16(hidden.astype(np.float32) @ self.down[k].astype(np.float32))

    def result(self, experts: list[Any]) -> Any:
        """The first two experts are of the own node, the third of another one, whose sum is rounded."""
        terms = [self.weights[:, k, None] * rows.astype(np.float32) for k, rows in enumerate(experts)]
        own, other = terms[0] + terms[1], to_bfloat16(terms[2]).astype(np.float32)
        return to_bfloat16(self.add.astype(np.float32) + own + other)

    def reference(self) -> Rows:
        sums = Combined(np, TOKENS, N, "bfloat16")
        for node, experts in enumerate(((0, 1), (2,))):
            sums.begin_node()
            for k in experts:
                hidden = rounded(np, swiglu(np, product(np, exact(np, self.x), self.up[k])), "bfloat16")
                sums.add(np.arange(TOKENS), self.weights[:, k], rounded(np, product(np, hidden, self.down[k]), "bfloat16"))
            sums.end_node(own=node == 0, additions=TOPK)
        return sums.result(self.add)


def test_right_results_are_right(rng: np.random.Generator) -> None:
    for _ in range(5):
        made = Made(rng)
        assert 0.2 < worst_rows(np, made.result([made.expert(k) for k in range(TOPK)]), made.reference()) <= 1


def swapped(made: Made, experts: list[Any]) -> Any:
    y = made.result(experts)
    y[[3, 4]] = y[[4, 3]]
    return y


def one_element(made: Made, experts: list[Any]) -> Any:
    y = made.result(experts)
    y[7, 11] += ml_dtypes.bfloat16(1.0)
    return y


def not_a_number(made: Made, experts: list[Any]) -> Any:
    y = made.result(experts)
    y[-1, -1] = np.nan
    return y


WRONG: dict[str, Callable[[Made, list[Any]], Any]] = {
    "an expert is lost": lambda made, experts: made.result([experts[0], experts[1], 0 * experts[2]]),
    "a token's row is lost": lambda made, experts: made.result([experts[0] * (np.arange(TOKENS) != 5)[:, None], *experts[1:]]),
    "an expert counts twice": lambda made, experts: made.result([2 * experts[0], *experts[1:]]),
    "rows of two experts are exchanged": lambda made, experts: made.result([experts[1], experts[0], experts[2]]),
    "two tokens are exchanged": swapped,
    "a slice of the hidden values is left out": lambda made, experts: made.result([made.expert(0, lost=slice(64, 128)), *experts[1:]]),
    "one element is off": one_element,
    "one element is not there": not_a_number,
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_seen(rng: np.random.Generator, what: str) -> None:
    made = Made(rng)
    assert worst_rows(np, WRONG[what](made, [made.expert(k) for k in range(TOPK)]), made.reference()) > 1


def test_a_result_of_another_shape_is_an_error(rng: np.random.Generator) -> None:
    rows = exact(np, rows_of(rng, 4, 8))
    with pytest.raises(ValueError, match=r"\(4, 8\)"):
        worst_rows(np, rows_of(rng, 4, 16), rows)
    assert worst_rows(np, rows_of(rng, 0, 8), exact(np, rows_of(rng, 0, 8))) == 0


def test_weights_are_made_smaller_exactly(rng: np.random.Generator) -> None:
    for dtype in (ml_dtypes.bfloat16, np.float16):
        array = rng.standard_normal((300, 8)).astype(dtype)
        array[0] = 0
        before = array.astype(np.float64)
        moe._shrink(np, array, 5, np.dtype(dtype).name)
        lost = np.abs(before) < 2.0**-8  # of float16: too small to be halved so often
        after = array.astype(np.float64)
        np.testing.assert_array_equal(np.where(lost, 0, after), np.where(lost, 0, before / 32))
        assert (after[lost] <= np.abs(before[lost])).all()
