"""Results are operands of the next call, as programs use them: memory that a call has written is what the next one reads first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mkernel as mk
from tests.ops.body import WORLDS, topology
from tests.ops.moe_body import DTYPES

CALLS = 5


def _rank(world: Any, op: str, k: int, sizes: tuple[int, ...], dtype: str, seed: int) -> list[str]:
    return [wrong for at, rows in enumerate(sizes) for wrong in _chain(world, op, k, rows, dtype, seed + at)]


def _chain(world: Any, op: str, k: int, rows: int, dtype: str, seed: int) -> list[str]:
    """Rank ``call % W`` alone has a B that is not zero, a permutation of columns: every result is known exactly."""
    rank, size, scatters = world.rank, world.size, op == "gemm_reduce_scatter"
    everyone = np.random.default_rng(seed).integers(-8, 9, (size, rows * size if scatters else rows, k)).astype(DTYPES[dtype])
    wrong = []
    a = everyone[rank]
    for call in range(CALLS):
        column = np.random.default_rng([seed, call]).permutation(k)
        b = np.zeros((k, k), a.dtype)
        if op == "allgather_gemm" or rank == call % size:
            b[column, np.arange(k)] = 1
        c = getattr(mk, op)(a, b)
        if op == "allgather_gemm":
            everyone = everyone[:, :, column]
            whole = everyone.reshape(-1, k)
            a = c[rank * rows : (rank + 1) * rows]
        else:
            whole = everyone[call % size][:, column]
            if scatters:
                whole = whole[rank * rows : (rank + 1) * rows]
                a = np.concatenate([c] * size)
                shards = np.split(everyone[call % size][:, column], size)
                everyone = np.stack([np.concatenate([shard] * size) for shard in shards])
            else:
                a, everyone = c, np.stack([whole] * size)
        if not np.array_equal(c, whole):
            wrong.append(f"call {call}: {np.count_nonzero(c != whole)} elements of {c.size}")
    return wrong


@pytest.mark.cases(world=(*WORLDS, "2x1"), op=("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"))
@pytest.mark.drawn(4)
def test_a_chain_of_calls(rng: np.random.Generator, world: str, op: str) -> None:
    of, k = topology(world), 8 * int(rng.integers(1, 20))
    sizes = tuple(int(rng.integers(1, most)) for most in (40, 110, 150, 150))
    arguments = (op, k, sizes, str(rng.choice(list(DTYPES))), int(rng.integers(1 << 30)))
    found = mk.launch(_rank, of.size, ranks_per_node=of.ranks_per_node, target="cpu", heap_bytes=16 << 20, max_sms=4, args=arguments)
    assert not any(found), found
