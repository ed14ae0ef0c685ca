"""Products with gradients: every element of every gradient against float64, and what torch's own checks say of the ops."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make test-torch`")

import mkernel as mk
import mkernel.torch as mkt
from mkernel.tools.check import NodeSum, Product, worst_product, worst_sum
from tests.with_torch.matrices import array, drawn, place_of, tensor

ROWS, N, K = 24, 40, 64  # of a rank
A, B, GRADIENT = range(3)
WORLD: dict[str, Any] = {"target": "cpu", "heap_bytes": 1 << 24, "specialize": "none"}


def summed(world: Any, made: torch.Tensor, terms: list[tuple[Any, Any]], owner: int | None = None) -> float:
    """The error of a sum of the ranks' products over what rounding allows; ``owner``: the rank that adds up, None: any one of them."""
    topology, home = world.topology, None if owner is None else world.topology.node(owner)
    nodes = [
        NodeSum(
            [Product(*terms[s], world.size > 1 and s != owner) for s in topology.node_ranks(node)], topology.num_nodes > 1 and node != home
        )
        for node in range(topology.num_nodes)
    ]
    return worst_sum(np, array(made), nodes)


class Rank:
    """What one rank has, and what the others have."""

    def __init__(self, world: Any, seed: int, dtype: str, shapes: dict[int, tuple[int, int]], column_major: bool) -> None:
        self.world, self.others = world, [rank for rank in range(world.size) if rank != world.rank]
        self.all = {matrix: [drawn([seed, matrix, rank], shape, dtype) for rank in range(world.size)] for matrix, shape in shapes.items()}
        if column_major:
            self.all[B] = [np.ascontiguousarray(b.T).T for b in self.all[B]]
        self.a, self.b = (tensor(self.all[matrix][world.rank], place_of(world), requires_grad=True) for matrix in (A, B))

    def gradient(self, shared: bool = False) -> torch.Tensor:
        return tensor(self.all[GRADIENT][0 if shared else self.world.rank], place_of(self.world))

    def mine(self, matrix: int) -> Any:
        return self.all[matrix][self.world.rank]


def allgather_gemm(world: Any, seed: int, dtype: str, column_major: bool, gather_again: bool) -> list[float]:
    size, rank = world.size, world.rank
    r = Rank(world, seed, dtype, {A: (ROWS, K), B: (K, N), GRADIENT: (ROWS * size, N)}, column_major)
    c = mkt.allgather_gemm(r.a, r.b, gather_again=gather_again)
    c.backward(r.gradient())
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    gathered = np.concatenate(r.all[A])
    assert r.b.grad is not None and r.b.grad.stride() == r.b.stride()
    terms = [(r.all[GRADIENT][s][rows], r.all[B][s].T) for s in range(size)]
    return [
        worst_product(np, array(c), gathered, r.mine(B)),
        summed(world, r.a.grad, terms, rank),
        worst_product(np, array(r.b.grad), gathered.T, r.mine(GRADIENT)),
    ]


def gemm_reduce_scatter(world: Any, seed: int, dtype: str, column_major: bool) -> list[float]:
    size, rank = world.size, world.rank
    r = Rank(world, seed, dtype, {A: (ROWS * size, K), B: (K, N), GRADIENT: (ROWS, N)}, column_major)
    c = mkt.gemm_reduce_scatter(r.a, r.b)
    c.backward(r.gradient())
    rows = slice(rank * ROWS, (rank + 1) * ROWS)
    gathered = np.concatenate(r.all[GRADIENT])
    terms = [(r.all[A][s][rows], r.all[B][s]) for s in range(size)]
    return [
        summed(world, c, terms, rank),
        worst_product(np, array(r.a.grad), gathered, r.mine(B).T),
        worst_product(np, array(r.b.grad), r.mine(A).T, gathered),
    ]


def gemm_allreduce(world: Any, seed: int, dtype: str, column_major: bool) -> list[float]:
    r = Rank(world, seed, dtype, {A: (ROWS, K), B: (K, N), GRADIENT: (ROWS, N)}, column_major)
    c = mkt.gemm_allreduce(r.a, r.b)
    before = world.call_number
    c.backward(r.gradient(shared=True))
    assert world.call_number == before, "the backward pass communicates nothing"
    terms = list(zip(r.all[A], r.all[B], strict=True))
    return [
        summed(world, c, terms),
        worst_product(np, array(r.a.grad), r.all[GRADIENT][0], r.mine(B).T),
        worst_product(np, array(r.b.grad), r.mine(A).T, r.all[GRADIENT][0]),
    ]


def replicated_gemm(world: Any, seed: int, dtype: str, column_major: bool) -> list[float]:
    r = Rank(world, seed, dtype, {A: (ROWS, K), B: (K, N), GRADIENT: (ROWS, N)}, column_major)
    a = tensor(r.all[A][0], place_of(world), requires_grad=True)
    c = mkt.replicated_gemm(a, r.b)
    c.backward(r.gradient())
    terms = [(r.all[GRADIENT][s], r.all[B][s].T) for s in range(world.size)]
    return [
        worst_product(np, array(c), r.all[A][0], r.mine(B)),
        summed(world, a.grad, terms),
        worst_product(np, array(r.b.grad), r.all[A][0].T, r.mine(GRADIENT)),
    ]


CASES = {
    "allgather_gemm": (allgather_gemm, (False,)),
    "allgather_gemm again": (allgather_gemm, (True,)),
    "gemm_reduce_scatter": (gemm_reduce_scatter, ()),
    "gemm_allreduce": (gemm_allreduce, ()),
    "replicated_gemm": (replicated_gemm, ()),
}


@pytest.mark.parametrize("column_major", [False, True], ids=["row-major", "column-major"])
@pytest.mark.parametrize(("ranks", "per_node", "dtype"), [(2, None, "bfloat16"), (4, 2, "float16"), (1, None, "bfloat16")])
@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str, ranks: int, per_node: int | None, dtype: str, column_major: bool, rng: np.random.Generator) -> None:
    function, more = CASES[case]
    args = (int(rng.integers(1 << 30)), dtype, column_major, *more)
    worst = mk.launch(function, ranks, per_node, args=args, **WORLD)
    assert max(max(ratios) for ratios in worst) <= 1, worst


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """A rank's own rows instead of all ranks': what a backward pass without its collective would use."""
    from mkernel.torch import gemm

    monkeypatch.setattr(gemm, "_weight_gradient", lambda a, gradient, b: (a.roll(ROWS, 0).t() @ gradient).contiguous())
    worst = mk.launch(allgather_gemm, 2, args=(int(rng.integers(1 << 30)), "bfloat16", False, False), **WORLD)
    assert min(max(ratios) for ratios in worst) > 1


def test_gradients_that_nobody_wants_cost_no_call() -> None:
    def rank(world: Any) -> list[int]:
        counts = []
        for op in (mkt.allgather_gemm, mkt.gemm_reduce_scatter, mkt.replicated_gemm):
            for a_wants, b_wants in ((True, False), (False, True)):
                a = torch.ones(16, K, dtype=torch.float16, requires_grad=a_wants)
                b = torch.ones(K, N, dtype=torch.float16, requires_grad=b_wants)
                c = op(a, b)
                before = world.call_number
                c.sum().backward()
                counts.append(world.call_number - before)
        return counts

    assert mk.launch(rank, 2, **WORLD) == [[1, 0, 1, 1, 1, 0]] * 2


def test_shared_parameters(rng: np.random.Generator) -> None:
    seed = int(rng.integers(1 << 30))

    def rank(world: Any) -> None:
        for number in (1, 8, 13):
            parameter = torch.zeros(number, dtype=torch.bfloat16, requires_grad=True)
            gradients = [drawn([seed, s], (1, number), "bfloat16") for s in range(world.size)]
            mkt.shared(parameter).backward(tensor(gradients[world.rank], "cpu")[0])
            one = np.ones((1, 1), gradients[0].dtype)
            terms = [Product(one, gradient) for gradient in gradients]  # added in float32, and rounded once
            assert worst_sum(np, array(parameter.grad[None]), [NodeSum(terms)]) <= 1

    mk.launch(rank, 4, **WORLD)


def _samples(world: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    from mkernel.torch import gemm

    def matrix(*shape: int, wants: bool = True) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16).requires_grad_(wants)

    name = world.name
    return [
        (gemm._allgather_gemm, (matrix(ROWS, K), matrix(K, N), name)),
        (gemm._allgather_gemm, (matrix(ROWS, K), matrix(N, K).detach().t().requires_grad_(), name)),
        (gemm._allgather_gemm_gathered, (matrix(ROWS, K), matrix(K, N), name)),
        (gemm._gemm_reduce_scatter, (matrix(ROWS, K), matrix(K, N), name, "output")),
        (gemm._gemm_allreduce, (matrix(ROWS, K), matrix(K, N, wants=False), name, "float32")),
        (gemm._replicated_gemm, (matrix(ROWS, K), matrix(K, N), name)),
        (gemm._shared, (matrix(N), name)),
        (gemm._sum_over_ranks, (matrix(N, wants=False), name)),
        (gemm._all_gather, (matrix(ROWS, K, wants=False), name)),
    ]


def _kept(world: Any, plant: bool) -> int:
    """How many tensors there are more after one call of each op, whose results are gone. ``plant``: one op keeps what it made."""
    from mkernel.torch import gemm

    def tensors() -> int:
        while gc.collect():  # what tests before have left may take several rounds
            pass
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    kept: list[torch.Tensor] = []
    samples, new_ones = _samples(world), torch.Tensor.new_ones
    before = tensors()
    with pytest.MonkeyPatch.context() as patch:
        if plant:
            patch.setattr(torch.Tensor, "new_ones", lambda *a, **more: kept.append(made := new_ones(*a, **more)) or made)
        with torch.no_grad():
            for function, arguments in samples:
                function(*map(gemm.plain, filter(torch.is_tensor, arguments)), *(each for each in arguments if not torch.is_tensor(each)))
    return tensors() - before


@pytest.mark.parametrize("plant", [False, True])
def test_nothing_is_kept_of_a_call(plant: bool) -> None:
    """What a call makes in a CUDA graph lies in the graph's memory, and has values once that is replayed: torch refuses such a graph."""
    assert mk.launch(_kept, 1, args=(plant,), **WORLD) == [int(plant)]


def test_no_function_is_cached() -> None:
    """The same of ops that are not called above: in ``mkernel.torch`` a cache would keep tensors."""
    folder = Path(mkt.__file__).parent
    assert not [path.name for path in folder.glob("*.py") if re.search(r"functools\.(lru_)?cache\b", path.read_text(encoding="utf-8"))]


def test_opcheck() -> None:
    """Schemas, results without values, autograd and AOT dispatch, as torch's own checker sees them."""

    def rank(world: Any) -> None:
        for function, arguments in _samples(world):
            torch.library.opcheck(function.op, arguments)

    mk.launch(rank, 1, **WORLD)


def test_export_sees_the_ops() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.randn(N, K, dtype=torch.bfloat16))
            self.down = torch.nn.Parameter(torch.randn(K, N, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mkt.gemm_reduce_scatter(torch.relu(mkt.allgather_gemm(x, self.up.t())), self.down.t())

    def rank(world: Any) -> list[str]:
        block, x = Block(), torch.randn(16, K, dtype=torch.bfloat16)
        rows = torch.export.Dim("rows", min=2, max=32)
        program = torch.export.export(block, (x,), dynamic_shapes={"x": {0: 8 * rows}})
        with torch.no_grad():
            for sample in (x, torch.randn(24, K, dtype=torch.bfloat16)):
                assert torch.equal(program.module()(sample), block(sample))
        return [str(node.target) for node in program.graph.nodes if "mkernel" in str(node.target)]

    (names,) = mk.launch(rank, 1, **WORLD)
    assert [name.split(".")[1] for name in names] == ["allgather_gemm_gathered", "gemm_reduce_scatter"]


def test_a_name_without_a_world() -> None:
    def rank(world: Any) -> None:
        a, b = torch.zeros(16, K, dtype=torch.float16), torch.zeros(K, N, dtype=torch.float16)
        with pytest.raises(mk.Error, match=r"no world 'elsewhere'.*mk\.init"):
            mkt.gemm_allreduce(a, b, world="elsewhere")
        assert mkt.gemm_allreduce(a, b, world=world.name).shape == (16, N)
        assert mkt.gemm_allreduce(a, b, world=world).shape == (16, N)

    mk.launch(rank, 1, **WORLD)
