"""The benchmark's baselines over stand-ins for torch and CuPy: four ranks that all hold the same."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mkernel.bench.baselines import ASYNC_TP, NCCL, ONE_SHOT, TWO_SHOT, CupyBaselines, TorchBaselines


class _FourAlike:
    rank, size = 1, 4

    def __init__(self) -> None:
        self.xp = types.SimpleNamespace(matmul=np.matmul, empty=np.empty)

    def exchange(self, what: str, value: Any, timeout: float) -> list[Any]:
        return [json.loads(json.dumps(value))] * self.size


def _own_rows(array: Any) -> Any:
    rows = len(array) // _FourAlike.size
    return array[_FourAlike.rank * rows : (_FourAlike.rank + 1) * rows]


class _Tensor(np.ndarray[Any, Any]):
    def float(self) -> Any:
        return np.asarray(self).astype(np.float32)


class _Torch(types.SimpleNamespace):
    matmul = staticmethod(np.matmul)

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        return np.full(shape, np.nan, dtype)


def _torch_baselines(monkeypatch: pytest.MonkeyPatch, spoil: float = 0.0) -> TorchBaselines:
    """``spoil``: what the symmetric-memory op adds to its result."""

    def reduce_scatter_tensor(c: Any, product: Any) -> None:
        c[...] = 4 * _own_rows(product)

    def all_reduce(c: Any) -> None:
        c *= 4

    def fused_matmul_reduce_scatter(a: Any, b: Any, reduce_op: str, scatter_dim: int, group: str) -> Any:
        assert (reduce_op, scatter_dim, group) == ("sum", 0, "the group")
        return (4 * _own_rows(a @ b) + np.float16(spoil)).view(_Tensor)

    def one_shot_all_reduce_out(buffer: Any, reduce_op: str, group: str, out: Any) -> Any:
        assert (reduce_op, group, id(buffer) in symmetric) == ("sum", "the group", True)
        out[...] = 4 * buffer + np.float16(spoil)
        return out

    def two_shot_all_reduce_(buffer: Any, reduce_op: str, group: str) -> Any:
        assert (reduce_op, group, id(buffer) in symmetric) == ("sum", "the group", True)
        buffer *= 4
        buffer += np.float16(spoil)
        return buffer

    symmetric: dict[int, Any] = {}

    def symmetric_empty(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        made = np.full(shape, np.nan, dtype).view(_Tensor)
        symmetric[id(made)] = made
        return made

    ops = (fused_matmul_reduce_scatter, one_shot_all_reduce_out, two_shot_all_reduce_)
    baselines = TorchBaselines.__new__(TorchBaselines)
    baselines._world, baselines.missing = _FourAlike(), {}
    baselines._torch = _Torch(
        ops=types.SimpleNamespace(symm_mem=types.SimpleNamespace(**{op.__name__: op for op in ops})),
        cuda=types.SimpleNamespace(synchronize=lambda: None),
        linalg=types.SimpleNamespace(vector_norm=np.linalg.norm),
    )
    group = types.SimpleNamespace(WORLD=types.SimpleNamespace(group_name="the group"))
    baselines._dist = types.SimpleNamespace(reduce_scatter_tensor=reduce_scatter_tensor, all_reduce=all_reduce, group=group)
    monkeypatch.setattr(baselines, "tensor", lambda array: array.view(_Tensor), raising=False)
    memory = types.ModuleType("torch.distributed._symmetric_memory")
    memory.enable_symm_mem_for_group = lambda name: None  # type: ignore[attr-defined]
    memory.empty, memory.rendezvous = symmetric_empty, lambda buffer, group: symmetric[id(buffer)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", memory)
    return baselines


def _cupy_baselines(kinds: list[int]) -> CupyBaselines:
    """``kinds`` receives the data types that NCCL is told."""
    memory: dict[int, Any] = {}

    class _Array(np.ndarray[Any, Any]):
        @property
        def data(self) -> Any:  # type: ignore[override]
            memory[id(self)] = self
            return types.SimpleNamespace(ptr=id(self))

    def reduce_scatter(source: int, destination: int, count: int, kind: int, op: int, stream: int) -> None:
        assert (count, op, stream) == (memory[destination].size, 0, 77)
        kinds.append(kind)
        memory[destination][...] = 4 * _own_rows(memory[source])

    def all_reduce(source: int, destination: int, count: int, kind: int, op: int, stream: int) -> None:
        assert (source, count, op, stream) == (destination, memory[destination].size, 0, 77)
        kinds.append(kind)
        memory[destination] *= 4

    baselines = CupyBaselines.__new__(CupyBaselines)
    baselines._world, baselines._stream, baselines.missing = _FourAlike(), types.SimpleNamespace(ptr=77), {}
    baselines._xp = types.SimpleNamespace(matmul=np.matmul, empty=lambda shape, dtype: np.empty(shape, dtype).view(_Array))
    baselines._nccl = types.SimpleNamespace(NCCL_SUM=0, NCCL_FLOAT16=6)
    baselines._communicator = types.SimpleNamespace(reduceScatter=reduce_scatter, allReduce=all_reduce)
    return baselines


def _baseline_sets(rng: np.random.Generator, op: str, dtype: Any, view: type[Any] = np.ndarray) -> tuple[list[Any], list[Any], list[Any]]:
    a = [rng.integers(-4, 5, (16, 8)).astype(dtype).view(view) for _ in range(2)]
    b = [rng.integers(-4, 5, (8, 24)).astype(dtype).view(view) for _ in range(2)]
    rows = 4 if op == "gemm_reduce_scatter" else 16
    return a, b, [np.full((rows, 24), np.nan, dtype).view(view) for _ in range(2)]


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_allreduce"])
def test_baselines_of_the_reductions_write_the_sum(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, library: str, op: str
) -> None:
    kinds: list[int] = []
    baselines: Any = _torch_baselines(monkeypatch) if library == "torch" else _cupy_baselines(kinds)
    view = type(baselines._xp.empty((0,), np.float16)) if library == "cupy" else np.ndarray
    a, b, c = _baseline_sets(rng, op, np.float16, view)
    calls = getattr(baselines, op)(a, b, c)
    of_torch = {ASYNC_TP} if op == "gemm_reduce_scatter" else {ONE_SHOT, TWO_SHOT}
    assert set(calls) == {NCCL} | (of_torch if library == "torch" else set())
    for name in {ONE_SHOT, TWO_SHOT} & set(calls):
        for i, call in enumerate(calls[name]):
            np.testing.assert_array_equal(np.asarray(call()), 4 * (np.asarray(a[i]) @ np.asarray(b[i])))
    for i, call in enumerate(calls[NCCL]):
        call()
        whole = 4 * (np.asarray(a[i]) @ np.asarray(b[i]))
        np.testing.assert_array_equal(np.asarray(c[i]), _own_rows(whole) if op == "gemm_reduce_scatter" else whole)
    assert set(kinds) == (set() if library == "torch" else {6})
    assert baselines.missing == {}


def test_nccl_is_told_of_bfloat16() -> None:
    assert _cupy_baselines([])._type(np.empty(0, ml_dtypes.bfloat16)) == 9


def test_an_async_tp_that_is_wrong_is_left_out(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    baselines = _torch_baselines(monkeypatch, spoil=3.0)
    assert set(baselines.gemm_reduce_scatter(*_baseline_sets(rng, "gemm_reduce_scatter", np.float16))) == {NCCL}
    assert "is off by" in baselines.missing[ASYNC_TP]
    assert set(baselines.gemm_allreduce(*_baseline_sets(rng, "gemm_allreduce", np.float16))) == {NCCL}
    assert "is off by" in baselines.missing[ONE_SHOT]
    assert "is off by" in baselines.missing[TWO_SHOT]


def test_without_symmetric_memory_the_others_are_measured(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    baselines = _torch_baselines(monkeypatch)
    del sys.modules["torch.distributed._symmetric_memory"].empty  # type: ignore[attr-defined]
    assert set(baselines.gemm_allreduce(*_baseline_sets(rng, "gemm_allreduce", np.float16))) == {NCCL}
    assert set(baselines.missing) == {ONE_SHOT, TWO_SHOT}
    baselines.missing = dict.fromkeys((ONE_SHOT, TWO_SHOT), "left out by --without")
    assert set(baselines.gemm_allreduce(*_baseline_sets(rng, "gemm_allreduce", np.float16))) == {NCCL}
