"""Rows up to 4 GiB apart: no address is worked out in 32 bits. The memory between them is never touched, and takes none."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import mkernel as mk
from mkernel.errors import ArgumentError
from tests.ops.body import topology
from tests.ops.planted_bug import Bug

WORLD: dict[str, Any] = {"target": "cpu", "heap_bytes": 1 << 26, "specialize": "none"}
WORLDS = ["1x1", "1x2", "2x2"]
MOST = (1 << 32) - 16
_NORESERVE = 0x4000  # of Linux
M, N, K = 10, 72, 40  # M: of a rank


def far(shape: tuple[int, ...], strides: tuple[int, ...], values: Any) -> Any:
    """A float16 array with these strides, most of whose memory does not exist."""
    size = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except OSError as error:
        pytest.skip(f"no room for {size} bytes of addresses: {error}")
    array = as_strided(np.frombuffer(memory, np.float16)[:1], shape, strides)
    array[...] = values
    return array


def rows_of(values: Any, pitch: int) -> Any:
    return far(values.shape, (pitch, 2), values)


def integers(*seed_and_shape: Any) -> Any:
    *seed, shape = seed_and_shape
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float16)


def _products(world: Any, seed: int, pitch: int) -> list[str]:
    """Every GEMM op with a, b, and out of such rows; sums of integers that float16 holds."""
    size, wrong = world.size, []
    a, b = ([integers(seed, which, rank, shape) for rank in range(size)] for which, shape in enumerate(((M * size, K), (K, N))))
    whole = sum(x.astype(np.float32) @ y.astype(np.float32) for x, y in zip(a, b, strict=True))
    far_a = rows_of(a[world.rank], pitch)
    for transposed in (False, True):
        far_b = rows_of(b[world.rank].T, pitch).T if transposed else rows_of(b[world.rank], pitch)
        c, part = rows_of(np.full((M * size, N), np.nan, np.float16), pitch), rows_of(np.full((M, N), np.nan, np.float16), pitch)
        mk.gemm_reduce_scatter(far_a, far_b, out=part)
        wrong += [] if np.array_equal(part, whole[M * world.rank :][:M]) else [f"reduce_scatter, transposed {transposed}"]
        for algorithm in ("one_shot", "two_shot"):
            mk.gemm_allreduce(far_a, far_b, out=c, algorithm=algorithm)
            wrong += [] if np.array_equal(c, whole) else [f"{algorithm}, transposed {transposed}"]
            c[...] = np.nan
        mk.allgather_gemm(a[world.rank][:M], far_b, out=c)
        gathered = np.concatenate([x[:M] for x in a]).astype(np.float32) @ b[world.rank].astype(np.float32)
        wrong += [] if np.array_equal(c, gathered) else [f"allgather_gemm, transposed {transposed}"]
    return wrong


def _attended(world: Any, seed: int, pitch: int) -> list[str]:
    """Batches, heads or rows of all operands and of o so far apart: the same bits as of dense ones."""
    wrong, length = [], 6
    heads = {"q": 2, "k": 1, "v": 1}
    mine = [np.random.default_rng([seed, world.rank, h]).standard_normal((2, h, length, 64)).astype(np.float16) for h in heads.values()]
    dense = mk.ring_attention(*mine, causal=True)
    o, lse = np.array(dense.o), np.array(dense.lse)
    strides_of = {
        "rows": lambda h: (pitch * length * h, pitch * length, pitch, 2),
        "heads": lambda h: (pitch * h, pitch, 128, 2),
        "batches": lambda h: (pitch, length * 128, 128, 2),
        "transposed": lambda h: (pitch * length, 128, pitch, 2),
    }
    for name, strides in strides_of.items():
        arrays = [far(array.shape, strides(array.shape[1]), array) for array in mine]
        out = far(o.shape, strides(2), np.nan), np.zeros(lse.shape, np.float32)
        mk.ring_attention(*arrays, causal=True, out=out)
        wrong += [] if np.array_equal(out[0], o) and np.array_equal(out[1], lse) else [name]
    return wrong


def launch(function: Any, world: str, *args: Any) -> list[Any]:
    shape = topology(world)
    return mk.launch(function, shape.size, shape.ranks_per_node, args=args, **WORLD)


def drawn(rng: np.random.Generator) -> list[int]:
    """Distances: the largest one, and any between 256 MiB and it."""
    return [MOST, int(2 ** rng.uniform(28, 32)) // 16 * 16]


@pytest.mark.parametrize("function", [_products, _attended])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.drawn(3)
def test_rows_far_apart(rng: np.random.Generator, world: str, function: Any) -> None:
    for pitch in drawn(rng):
        assert launch(function, world, int(rng.integers(1 << 30)), pitch) == [[]] * topology(world).size, pitch


def test_further_is_refused() -> None:
    def rank(world: Any) -> None:
        near, a, b = np.zeros((2, 64), np.float16), *(rows_of(np.zeros((64, 64), np.float16), MOST + 16) for _ in range(2))
        dense = np.zeros((64, 64), np.float16)
        for far_b, out in ((b, None), (b.T, None), (dense, a[:2])):
            with pytest.raises(ArgumentError, match="below 4 GiB"):
                mk.allgather_gemm(near, far_b, out=out)
        with pytest.raises(ArgumentError, match="below 4 GiB"):
            mk.gemm_reduce_scatter(a, dense)
        assert world.call_number == 0

    mk.launch(rank, 1, **WORLD)


_SHORT = Bug("a row of c begins at 32 bits", "reduce/packets.cuh", "uint64_t(row) * p.c_row_bytes", "row * p.c_row_bytes")


def test_a_distance_in_32_bits_is_seen(rng: np.random.Generator, tmp_path: Path) -> None:
    with _SHORT.in_force(tmp_path / "kernels_src"):
        assert launch(_products, "1x2", int(rng.integers(1 << 30)), MOST) != [[]] * 2
