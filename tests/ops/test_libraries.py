"""Operands of other libraries on target cpu: results come in the library of the first one."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError
from tests.runtime.gpu_libraries import Tensor, Torch

ROWS, N, K = 24, 40, 64


class CpuTensor(Tensor):
    """A tensor in host memory."""

    def __init__(self, torch: Any, host: Any, made_on: int = 0) -> None:
        super().__init__(torch, host, made_on)
        self.device = "cpu"

    def get_device(self) -> int:
        return -1


class CpuTorch(Torch):
    """torch without a GPU."""

    Tensor = CpuTensor  # type: ignore[misc]

    def empty(self, shape: Any, dtype: str, device: str) -> CpuTensor:
        assert device == "cpu"
        return CpuTensor(self, super().empty(shape, dtype, device).host)


def _multiply(world: Any, torch: Any) -> list[tuple[str, bool]]:
    rng = np.random.default_rng(world.rank)
    a, w = (rng.standard_normal(shape, np.float32).astype(np.float16) for shape in ((ROWS, K), (N, K)))
    tensors = [torch.empty(array.shape, "float16", "cpu") for array in (a, w)]
    for tensor, array in zip(tensors, (a, w), strict=True):
        tensor.host[...] = array
    expected = mk.gemm_allreduce(a, w.T)
    results: list[Any] = [mk.gemm_allreduce(tensors[0], tensors[1].t()) for _ in range(3)]
    results += [mk.gemm_allreduce(tensors[0], w.T), mk.gemm_allreduce(a, tensors[1].t())]
    given = torch.empty((ROWS, N), "float16", "cpu")
    results.append(mk.gemm_allreduce(a, w.T, out=given))
    return [(type(result).__name__, bool((getattr(result, "host", result) == expected).all())) for result in results]


def test_torch_in_torch_out(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = CpuTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    right = [("CpuTensor", True)] * 4 + [("ndarray", True), ("CpuTensor", True)]
    assert mk.launch(_multiply, ranks=2, target="cpu", args=(torch,), heap_bytes=1 << 22) == [right] * 2


def test_bad_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = CpuTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)

    def use(world: Any) -> None:
        b = np.zeros((K, N), np.float16)
        for change, text in (
            ({"requires_grad": True}, "requires a gradient.*detach"),
            ({"device": "cuda:1"}, "is on cuda:1.*works on cpu"),
            ({"layout": "sparse_csr"}, "layout sparse_csr"),
            ({"is_neg": lambda: True}, "resolve_neg"),
        ):
            a = torch.empty((ROWS, K), "float16", "cpu")
            vars(a).update(change)
            with pytest.raises(ArgumentError, match=text):
                mk.gemm_allreduce(a, b)
        assert world.call_number == 0

    mk.launch(use, ranks=1, target="cpu", heap_bytes=1 << 22)


def test_with_torch_itself() -> None:
    """Where it is installed; the test above has its stand-in."""
    torch = pytest.importorskip("torch")

    def use(world: Any) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            x, w = torch.randn(ROWS, K, dtype=dtype), torch.nn.Parameter(torch.randn(N, K, dtype=dtype), requires_grad=False)
            c = mk.allgather_gemm(x, w.t())
            assert (type(c), c.dtype, tuple(c.shape)) == (torch.Tensor, dtype, (ROWS, N))
            assert torch.allclose(c.float(), x.float() @ w.float().t(), atol=0.1, rtol=0.02)
            with pytest.raises(ArgumentError, match="detach"):
                mk.allgather_gemm(x, w.detach().clone().requires_grad_().t())

    mk.launch(use, ranks=1, target="cpu", heap_bytes=1 << 22)


def test_read_only_outputs_and_overlaps() -> None:
    def use(world: Any) -> None:
        a, b = np.zeros((ROWS, K), np.float16), np.zeros((K, N), np.float16)
        frozen = np.zeros((ROWS, N), np.float16)
        frozen.flags.writeable = False
        with pytest.raises(ArgumentError, match=r"out = .*read-only"):
            mk.gemm_allreduce(a, b, out=frozen)
        both = np.zeros(2 * K * K, np.float16)
        square, over = both[: K * K].reshape(K, K), both[K * 8 : K * 8 + ROWS * K].reshape(ROWS, K)
        for operands, name in (((over, np.zeros((K, K), np.float16)), "a"), ((a, square), "b")):
            with pytest.raises(ArgumentError, match=f"out = .*overlaps {name}"):
                mk.gemm_allreduce(*operands, out=over)
        assert world.call_number == 0

    mk.launch(use, ranks=1, target="cpu", heap_bytes=1 << 22)
