"""How rows are dealt to ranks: every row is held once, where the positions say, by arrays of any library."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError
from mkernel.tools.attention import positions


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_rank_holds_the_rows_of_its_positions(rng: np.random.Generator, ranks: int) -> None:
    length = 2 * ranks * int(rng.integers(1, 9))
    x = rng.standard_normal((2, 3, length, 4)).astype(ml_dtypes.bfloat16)
    shards = [mk.zigzag_shard(x, 2, rank=rank, ranks=ranks) for rank in range(ranks)]
    for rank, shard in enumerate(shards):
        assert shard.dtype == x.dtype
        assert np.array_equal(shard, x[:, :, positions(length // ranks, rank, ranks, "zigzag")])
    assert np.array_equal(mk.zigzag_unshard(shards, 2), x)
    assert np.array_equal(mk.zigzag_unshard(shards, -2), x)


def test_causal_work_is_the_same_on_all_ranks() -> None:
    seen = [int((positions(64, rank, 4, "zigzag") + 1).sum()) for rank in range(4)]
    assert len(set(seen)) == 1
    assert seen[0] * 4 == sum(range(1, 257))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_packed_sequences(rng: np.random.Generator, ranks: int) -> None:
    lengths = [1, 2 * ranks, 2 * ranks + 1, 0, *rng.integers(0, 40, 4).tolist()]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    x = 1 + np.arange(ends[-1] * 2).reshape(-1, 2)
    shards = [mk.zigzag_shard(x, 0, rank=rank, ranks=ranks, cu_seqlens=ends) for rank in range(ranks)]
    assert all(len(shard) == sum(2 * -(-length // (2 * ranks)) for length in lengths) for shard in shards)
    held = np.concatenate(shards)
    assert np.array_equal(np.sort(held[held[:, 0] > 0, 0]), x[:, 0]), "each row once; all others are zeros"
    assert np.array_equal(mk.zigzag_unshard(shards, 0, cu_seqlens=ends), x)


class Tensor:
    """What a library without the array API gives: sliced, and joined by the ``cat`` of its module, as torch's tensors are."""

    def __init__(self, data: Any) -> None:
        self.data, self.shape = data, data.shape

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.data[index])


def cat(tensors: list[Tensor], axis: int) -> Tensor:
    return Tensor(np.concatenate([tensor.data for tensor in tensors], axis))


def zeros_like(tensor: Tensor) -> Tensor:
    return Tensor(np.zeros_like(tensor.data))


def test_any_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stand_in", sys.modules[__name__])
    monkeypatch.setattr(Tensor, "__module__", "stand_in.tensors")
    x = np.arange(1, 23).reshape(2, 11)
    shards = [mk.zigzag_shard(Tensor(x), 1, rank=rank, ranks=2, cu_seqlens=[0, 3, 11]) for rank in range(2)]
    assert [shard.data[0].tolist() for shard in shards] == [[1, 0, 4, 5, 10, 11], [2, 3, 6, 7, 8, 9]]
    assert np.array_equal(mk.zigzag_unshard(shards, 1, cu_seqlens=[0, 3, 11]).data, x)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((np.zeros((4, 3)), 0), {"rank": 2, "ranks": 2}, "rank = 2: must be 0 to ranks - 1 = 1"),
        ((np.zeros((6, 3)), 0), {"rank": 0, "ranks": 2}, "must be a multiple of 2"),
        ((np.zeros((6, 3)), 0), {"rank": 0, "ranks": 2, "cu_seqlens": [0, 5]}, "must end with the number of rows, 6"),
        ((np.zeros((6, 3)), 0), {"rank": 0, "ranks": 2, "cu_seqlens": [0, 5, 4, 6]}, "must begin with 0 and never decrease"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        mk.zigzag_shard(*arguments, **options)


@pytest.mark.parametrize(
    ("shards", "ends", "message"),
    [
        ([], None, "must be the parts of all ranks"),
        ([np.zeros((4, 3)), np.zeros((6, 3))], None, "must have the same shape"),
        ([np.zeros((3, 3)), np.zeros((3, 3))], None, "must be even"),
        ([np.zeros((4, 3)), np.zeros((4, 3))], [0, 4], "cu_seqlens asks for 2"),
    ],
)
def test_shards_that_do_not_fit_are_refused(shards: Any, ends: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        mk.zigzag_unshard(shards, 0, cu_seqlens=ends)
