"""What ring attention is compared with: NCCL's all-gather of K and V, then cuDNN's attention through torch.

K and V are gathered with the sequence outermost, so that nothing has to be moved afterwards. With a causal mask in zigzag order each half
of a rank's queries attends to the keys before its chunk without a mask, and to its own chunk causally; both are merged by their lse. What
is gathered is then in zigzag order: a copy brings it in order, and counts. The steps have been run with a stand-in for torch only, not on
GPUs yet.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkernel.bench.baselines import TorchBaselines

if TYPE_CHECKING:
    from mkernel.bench.timing import Call

__all__ = ["GATHERED", "attention_alone", "attention_baseline", "zigzag_attention"]

GATHERED = "NCCL+cuDNN"


def attention_baseline(
    baselines: Any, inputs: Sequence[tuple[Any, Any, Any]], rank: int, ranks: int, scale: float, causal: bool
) -> dict[str, Sequence[Call]]:
    """All-gather of K and V, then attention, if torch and NCCL are there and the first call works on every rank. Collective."""
    if not isinstance(baselines, TorchBaselines) or baselines._dist is None:
        return {}
    torch, dist = baselines._torch, baselines._dist
    calls: list[Call] = []

    def gathered(local: Any, out: Any) -> Any:
        dist.all_gather_into_tensor(out, local)
        return out

    def call(q: Any, k: Any, v: Any, all_k: Any, all_v: Any) -> Any:
        if not causal:
            k, v = (gathered(local, out).permute(1, 2, 0, 3) for local, out in ((k, all_k), (v, all_v)))
            return _attend(torch, q, k, v, scale, False)[0]
        k, v = (in_order(torch, gathered(local, out), ranks).permute(1, 2, 0, 3) for local, out in ((k, all_k), (v, all_v)))
        return zigzag_attention(torch, q, k, v, rank, ranks, functools.partial(_attend, torch, scale=scale))

    def start() -> None:
        room = None
        for arrays in inputs:
            q, k, v = map(baselines.tensor, arrays)
            k, v = (x.permute(2, 0, 1, 3).contiguous() for x in (k, v))  # (S/W, B, Hkv, D)
            if room is None:
                room = [torch.empty((ranks * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device) for x in (k, v)]
            calls.append(functools.partial(call, q, k, v, *room))
        calls[0]()
        torch.cuda.synchronize()

    baselines.missing.update(baselines._try(GATHERED, start))
    return {} if GATHERED in baselines.missing else {GATHERED: calls}


def in_order(torch: Any, x: Any, ranks: int) -> Any:
    """Rows (S, ...) of all ranks in zigzag order, copied into the order of the sequence."""
    half = x.shape[0] // (2 * ranks)
    chunks = x.reshape(ranks, 2, half, *x.shape[1:])
    return torch.cat([chunks[:, 0].flatten(0, 1), chunks[:, 1].flip(0).flatten(0, 1)])


def zigzag_attention(torch: Any, q: Any, k: Any, v: Any, rank: int, ranks: int, attend: Any) -> Any:
    """Causal attention of a zigzag rank's rows ``q`` (B, Hq, S/W, D) to all keys (B, Hkv, S, D), in order.

    ``attend(q, k, v, causal=)`` gives (o, lse) of a square causal mask, or of none.
    """
    half, results = q.shape[2] // 2, []
    for at, chunk in enumerate((rank, 2 * ranks - 1 - rank)):
        rows, begin = q[:, :, at * half : (at + 1) * half], chunk * half
        o, lse = attend(rows, k[:, :, begin : begin + half], v[:, :, begin : begin + half], causal=True)
        if begin:
            before, lse_before = attend(rows, k[:, :, :begin], v[:, :, :begin], causal=False)
            weight = torch.sigmoid(lse - lse_before).unsqueeze(-1)
            o = (before + (o - before) * weight).to(q.dtype)
        results.append(o)
    return torch.cat(results, 2)


def attention_alone(baselines: Any, arrays: tuple[Any, Any, Any], scale: float, causal: bool) -> Sequence[Call]:
    """Attention by cuDNN, all keys already there."""
    if not isinstance(baselines, TorchBaselines):
        return ()
    found: list[Call] = []

    def start() -> None:
        torch = baselines._torch
        q, k, v = map(baselines.tensor, arrays)
        found.append(functools.partial(_attend, torch, q, k, v, scale=scale, causal=causal))
        found[0]()
        torch.cuda.synchronize()

    reason = baselines._try("cuDNN alone", start)
    baselines.missing.update(reason)
    return () if reason else found


def _attend(torch: Any, q: Any, k: Any, v: Any, scale: float, causal: bool) -> tuple[Any, Any]:
    """(o, lse) by cuDNN."""
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return o, lse.reshape(q.shape[:3])
