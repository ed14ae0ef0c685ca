"""``batch_invariant``: the bits of a row do not depend on the other rows of its call, on its place, on its owner, or on the algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError
from tests.ops.body import scatters_tiles, topology
from tests.ops.moe_body import DTYPES
from tests.ops.planted_bug import Bug

POOL = 300  # rows that batches are drawn from
HEAP = 64 << 20
WORLDS = ("1x1", "1x2", "1x3", "1x4", "2x1", "2x2", "3x2")
Bits = dict[int, bytes]  # of a row of the pool


@dataclasses.dataclass(frozen=True)
class Case:
    """One op on operands that are the same for every batch."""

    op: str
    n: int
    k: int
    dtype: str
    seed: int
    options: tuple[tuple[str, Any], ...] = ()

    def draw(self, *shape: int, stream: int) -> Any:
        return np.random.default_rng([self.seed, stream]).standard_normal(shape).astype(DTYPES[self.dtype])


def _gemm(world: Any, case: Case, rows: list[int]) -> Bits:
    """What this rank gets of these rows of the pool; M is a multiple of the ranks, so the last ones may be filled up with the first."""
    padded = [*rows, *rows][: -(-len(rows) // world.size) * world.size] if len(rows) >= world.size else rows * world.size
    padded = padded[: -(-len(rows) // world.size) * world.size]
    op, size, rank = case.op, world.size, world.rank
    b = case.draw(case.k, case.n, stream=rank + 1)
    share = len(padded) // size
    mine = padded[rank * share : (rank + 1) * share]
    if op == "allgather_gemm":
        a = case.draw(POOL, case.k, stream=1000)
        c, owned = mk.allgather_gemm(a[mine], b, **dict(case.options)), padded
    else:
        # What the first and the last rank add cancels, and is so large that the sum of the others tells when they were added.
        large = rank in (0, size - 1) and size > 2
        a = case.draw(POOL, case.k, stream=1001 if large else 1002 + rank)
        b = case.draw(case.k, case.n, stream=1) * a.dtype.type((-1 if rank else 1) * 2.0**8) if large else b * a.dtype.type(2.0**-10)
        c = getattr(mk, op)(a[padded], b, **dict(case.options))
        owned = mine if op == "gemm_reduce_scatter" else padded
    return {row: c[i].tobytes() for i, row in enumerate(owned)}


def _layer(world: Any, case: Case, rows: list[int]) -> Bits:
    """A layer of experts; rows are dealt to the ranks one by one, so that numbers of tokens differ."""
    experts, topk, size = 3, 4, world.size
    ids = np.stack([np.random.default_rng([case.seed, 7, i]).permutation(experts * size)[:topk] for i in range(POOL)]).astype(np.int32)
    weights = np.random.default_rng([case.seed, 8]).random((POOL, ids.shape[1]), np.float32)
    x, add = case.draw(POOL, case.k, stream=9), case.draw(POOL, case.k, stream=10)
    up = case.draw(experts, case.k, 2 * case.n, stream=20 + world.rank)
    down = case.draw(experts, case.n, case.k, stream=60 + world.rank)
    mine = rows[world.rank :: size]
    with_add = {"add": add[mine]} if case.seed % 2 else {}
    y = mk.moe_layer(x[mine], ids[mine], weights[mine], up, down, max_tokens=POOL, **with_add)
    return {row: y[i].tobytes() for i, row in enumerate(mine)}


def _rank(world: Any, case: Case, batches: list[list[int]]) -> list[Bits]:
    one: Callable[..., Bits] = _layer if case.op == "moe_layer" else _gemm
    return [one(world, case, rows) for rows in batches]


def draw_batches(rng: np.random.Generator) -> list[list[int]]:
    """One row alone, the whole pool, and shuffled parts of it of every order of size."""
    sizes = [1, POOL, *(int(size) for size in rng.integers(2, [8, 64, 130, POOL])), POOL]
    return [[int(row) for row in rng.permutation(POOL)[:size]] for size in sizes]


def found_different(case: Case, world: str, batches: list[list[int]], **options: Any) -> str | None:
    """Runs the batches in one world; says which row got other bits than before."""
    of = topology(world)
    told = mk.launch(
        _rank, of.size, ranks_per_node=of.ranks_per_node, target="cpu", heap_bytes=HEAP, max_sms=4, args=(case, batches), **options
    )
    known: dict[tuple[int, int], bytes] = {}
    for number, batch in enumerate(batches):
        seen = 0
        for rank, results in enumerate(told):
            for row, bits in results[number].items():
                seen += 1
                columns = rank if case.op == "allgather_gemm" else 0  # every rank has columns of its own there
                if known.setdefault((columns, row), bits) != bits:
                    return f"row {row} in batch {number} of {len(batch)} rows, rank {rank}"
        assert seen >= len(batch)
    return None


def _case(rng: np.random.Generator, op: str, **options: Any) -> Case:
    n, k = (8 * int(rng.integers(1, most)) for most in (40, 24))
    return Case(op, n, k, str(rng.choice(list(DTYPES))), int(rng.integers(1 << 30)), tuple(options.items()))


@pytest.mark.cases(
    world=WORLDS,
    how=("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce", "one_shot", "two_shot", "moe_layer"),
    partials=("output", "float32"),
    valid=lambda world, how, partials: (
        (partials == "output" or how not in ("allgather_gemm", "moe_layer")) and (how != "one_shot" or world not in ("2x2", "3x2"))
    ),
)
@pytest.mark.drawn(3)
def test_bits_of_a_row_are_its_own(rng: np.random.Generator, world: str, how: str, partials: str) -> None:
    op = "gemm_allreduce" if how in ("one_shot", "two_shot") else how
    options = {"algorithm": how} if how in ("one_shot", "two_shot") else {}
    if op.startswith("gemm"):
        options["partials"] = partials
    found = found_different(_case(rng, op, **options), world, draw_batches(rng), batch_invariant=True)
    assert found is None, found


@pytest.mark.parametrize("world", ["1x1", "1x3", "2x1", "3x2"])
def test_bits_do_not_depend_on_the_algorithm(rng: np.random.Generator, world: str) -> None:
    case, of = _case(rng, "gemm_allreduce"), topology(world)
    batches = [[int(row) for row in rng.permutation(POOL)[: int(rng.integers(1, 140))]]]
    results = []
    for algorithm in (None, "two_shot") if of.num_nodes > 1 and of.ranks_per_node > 1 else (None, "two_shot", "one_shot"):
        each = dataclasses.replace(case, options=(("algorithm", algorithm),))
        results.append(
            mk.launch(
                _rank,
                of.size,
                ranks_per_node=of.ranks_per_node,
                target="cpu",
                heap_bytes=HEAP,
                max_sms=int(rng.integers(4, 7)),
                batch_invariant=True,
                args=(each, batches),
            )
        )
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    ("world", "op"), [("1x4", "gemm_reduce_scatter"), ("2x2", "moe_layer"), pytest.param("1x3", "gemm_allreduce", marks=pytest.mark.slow)]
)
def test_by_default_bits_depend_on_the_owner(rng: np.random.Generator, world: str, op: str) -> None:
    """Else the tests above would find nothing."""
    case = dataclasses.replace(_case(rng, op), n=256, k=128)
    assert found_different(case, world, draw_batches(rng)[-2:]) is not None


@pytest.mark.parametrize(("op", "ranks"), [("allgather_gemm", 1), ("gemm_reduce_scatter", 2), ("gemm_allreduce", 2)])
def test_no_ctas_share_k(op: str, ranks: int) -> None:
    """By default they do where tiles are few, and then sums depend on the number of rows."""

    def shares(world: Any) -> int:
        a, b = np.ones((8, 2048), DTYPES["bfloat16"]), np.ones((2048, 64), DTYPES["bfloat16"])
        if world.options.batch_invariant:
            with pytest.raises(ArgumentError, match="with batch_invariant one CTA adds up all of K"):
                mk.plan(op, a, b, tiling={"shares": 2})
        return int(mk.plan(op, a, b).plan().shares)

    by_option = {
        option: mk.launch(shares, ranks, target="cpu", heap_bytes=1 << 22, max_sms=4, batch_invariant=option) for option in (False, True)
    }
    assert by_option[False][0] > 1
    assert by_option[True] == [1] * ranks


def test_one_step_across_nodes_is_refused() -> None:
    def use(world: Any) -> None:
        a, b = np.ones((8, 8), DTYPES["bfloat16"]), np.ones((8, 8), DTYPES["bfloat16"])
        mk.gemm_allreduce(a, b, algorithm="one_shot")

    with pytest.raises(ArgumentError, match=r"algorithm = one_shot: adds no sums by node.*two_shot"):
        mk.launch(use, 4, ranks_per_node=2, target="cpu", heap_bytes=1 << 22, max_sms=4, batch_invariant=True)


PLANTED = [
    Bug("the owner first", "reduce/owned_tiles.cuh", "? Level{kR, p.world.local_rank}", "? Level{kR, 0}", world="1x3"),
    Bug(
        "the own product as it is",
        "reduce/owned_tiles.cuh",
        "kCanonical = kAdds && Config::kCanonical != 0;",
        "kCanonical = false;",
        world="1x2",
    ),
    Bug("the own node first", "reduce/owned_tiles.cuh", ": Level{kNodes, p.world.node};", ": Level{kNodes, 0};", world="3x2"),
    Bug(
        "own packets first",
        "reduce/packets.cuh",
        "kCanonicalSum && s == rank",
        "kCanonicalSum && s == 0",
        world="1x3",
        also=(("kCanonicalSum && rank == kWorldSize - 1", "false"),),
    ),
    Bug(
        "own scattered packets as they are",
        "reduce/packets.cuh",
        "kCanonicalSum = Config::kCanonical != 0;",
        "kCanonicalSum = false;",
        world="1x2",
    ),
]


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
@pytest.mark.drawn(1)
def test_planted(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, tmp_path: Path, bug: Bug) -> None:
    """The rows of a few batches may happen to have the same owners: others are drawn then."""
    if "packets" not in bug.name:
        scatters_tiles(monkeypatch)
    op = "gemm_allreduce" if "packets" in bug.name and "scattered" not in bug.name else "gemm_reduce_scatter"
    case = dataclasses.replace(_case(rng, op), n=128, k=128)
    with bug.in_force(tmp_path / "kernels_src"):
        assert any(found_different(case, bug.world, draw_batches(rng)[-2:], batch_invariant=True) is not None for _ in range(4))
