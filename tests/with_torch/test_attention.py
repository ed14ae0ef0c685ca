"""Gradients of ring attention, against float64 and against torch's own in bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make test-torch`")

import mkernel as mk
import mkernel.torch as mkt
from tests.with_torch.matrices import place_of

WORLD: dict[str, Any] = {"target": "cpu", "heap_bytes": 1 << 24, "specialize": "none"}
BATCHES, HEADS, KV_HEADS, D, LENGTH = 1, 2, 1, 64, 32  # LENGTH: rows of a rank


def draw(seed: int, ranks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradient of o, of the whole sequence."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(BATCHES, heads, LENGTH * ranks, D) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def reference(tensors: list[torch.Tensor], causal: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """O and the gradients of q, k and v, by torch in ``dtype``."""
    q, k, v, gradient = (t.detach().to(dtype) for t in tensors)
    operands = [t.requires_grad_() for t in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*operands, is_causal=causal, enable_gqa=True)
    o.backward(gradient)
    return [o.detach(), *(t.grad for t in operands if t.grad is not None)]


def _own(t: torch.Tensor, layout: str, world: Any) -> torch.Tensor:
    if layout == "contiguous":
        return t.chunk(world.size, 2)[world.rank].contiguous()
    chunks = t.chunk(2 * world.size, 2)
    return torch.cat([chunks[world.rank], chunks[2 * world.size - 1 - world.rank]], 2)


def _gradients(world: Any, seed: int, causal: bool, layout: str, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Root mean square errors of o and each gradient over those of torch, and largest errors over the largest value; float64 is right."""
    tensors = draw(seed, world.size, dtype)
    q, k, v, gradient = (_own(t, layout, world).to(place_of(world)) for t in tensors)
    operands = [t.requires_grad_() for t in (q, k, v)]
    o, lse = mkt.ring_attention(*operands, causal=causal, layout=layout)
    assert not lse.requires_grad
    o.backward(gradient)
    found = []
    whole = zip(reference(tensors, causal, torch.float64), reference(tensors, causal, dtype), strict=True)
    for made, (exact, torchs) in zip([o.detach().cpu(), *(t.grad.cpu() for t in operands if t.grad is not None)], whole, strict=True):
        exact_part = _own(exact, layout, world)
        error, theirs = made.double() - exact_part, torchs.double() - exact
        found.append((float(error.square().mean() / theirs.square().mean()) ** 0.5, float(error.abs().max() / exact.abs().max())))
    return found


@pytest.mark.parametrize(
    ("ranks", "causal", "layout", "dtype"),
    [
        (2, False, "contiguous", torch.bfloat16),
        (2, True, "contiguous", torch.float16),
        (2, True, "zigzag", torch.bfloat16),
        (1, True, "zigzag", torch.float16),
    ],
)
def test_gradients(ranks: int, causal: bool, layout: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    unit = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for found in mk.launch(_gradients, ranks, args=(int(rng.integers(1 << 30)), causal, layout, dtype), **WORLD):
        for rms, largest in found:
            assert rms <= 1.5, found
            assert largest <= 4 * unit, found


def test_a_gradient_of_the_own_keys_alone_is_seen(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """What a backward pass would give that does not add up over the ranks."""
    from mkernel.torch import attention

    def own(x: torch.Tensor, world: Any, like: torch.Tensor) -> torch.Tensor:
        return x.chunk(world.size)[world.rank].to(like.dtype).view(like.shape)

    monkeypatch.setattr(attention, "_reduce_scatter", own)
    for found in mk.launch(_gradients, 2, args=(int(rng.integers(1 << 30)), False, "contiguous", torch.bfloat16), **WORLD):
        assert min(rms for rms, _ in found[2:]) > 1.5


def test_opcheck() -> None:
    def rank(world: Any) -> None:
        from mkernel.torch import attention

        q, k, v, _ = (t.requires_grad_() for t in draw(0, 1, torch.bfloat16))
        torch.library.opcheck(attention._ring_attention.op, (q, k, v, True, None, "zigzag", world.name))

    mk.launch(rank, 1, **WORLD)
