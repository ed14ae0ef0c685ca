"""What the MoE ops are compared with: gather, NCCL all-to-all with splits that the host knows beforehand, torch's grouped GEMM.

The orders of rows and the splits are worked out ahead and cost the baseline nothing. The steps have been run with a stand-in for torch
only, not on GPUs yet. torch's all-to-all whose splits are on the device is not among the contestants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mkernel.bench.baselines import NCCL, TorchBaselines

if TYPE_CHECKING:
    from mkernel.bench.routings import Routed
    from mkernel.bench.timing import Call

__all__ = ["MoeBaseline", "Route", "grouped_alone", "moe_baseline", "on_device"]


@dataclasses.dataclass(frozen=True)
class Route:
    """Where the rows of one rank's tokens go, and where those of its experts come from. NumPy arrays, or the library's.

    Attributes
    ----------
    tokens
        The token of each row that is sent, by expert, then token.
    sent, received
        Rows to, and from, each rank.
    order
        Of the rows as they are received, which comes next by expert, then source rank, then token.
    place
        The inverse of ``order``.
    ends
        (E/W) int32: the row after the last of each expert.
    home
        (T * k): which of the rows that were sent is of each choice.
    """

    tokens: Any
    sent: list[int]
    received: list[int]
    order: Any
    place: Any
    ends: Any
    home: Any

    @classmethod
    def of(cls, routed: Sequence[Routed], experts: int, rank: int) -> Route:
        """That of a rank. ``experts``: of each rank."""
        ids = [of_rank.ids.ravel() for of_rank in routed]
        by_expert = np.argsort(ids[rank], kind="stable")
        mine = [np.sort(of_rank[of_rank // experts == rank], kind="stable") for of_rank in ids]  # as each rank sends them
        order = np.argsort(np.concatenate(mine), kind="stable")
        counts = np.bincount(np.concatenate(mine) - rank * experts, minlength=experts)
        return cls(
            by_expert // routed[rank].ids.shape[1],
            np.bincount(ids[rank] // experts, minlength=len(ids)).tolist(),
            [len(of_rank) for of_rank in mine],
            order,
            np.argsort(order),
            np.cumsum(counts).astype(np.int32),
            np.argsort(by_expert),
        )

    def on(self, move: Callable[[Any], Any]) -> Route:
        """The same with arrays that ``move`` has made of them."""
        moved = {name: move(getattr(self, name)) for name in ("tokens", "order", "place", "ends", "home")}
        return dataclasses.replace(self, **moved)


class MoeBaseline:
    """The steps, on tensors. ``exchange(rows, sent, received)``: an all-to-all, of which the latter are rows of each rank."""

    def __init__(self, torch: Any, exchange: Callable[[Any, list[int], list[int]], Any]) -> None:
        self._torch, self._exchange = torch, exchange

    def dispatch(self, route: Route, x: Any, w: Any) -> Any:
        rows = self._exchange(x[route.tokens], route.sent, route.received)
        return self.multiply(route, rows[route.order], w)

    def multiply(self, route: Route, rows: Any, w: Any) -> Any:
        return self._torch._grouped_mm(rows, w, offs=route.ends)

    def activate(self, rows: Any) -> Any:
        gate, up = rows.chunk(2, dim=-1)
        return self._torch.nn.functional.silu(gate) * up

    def combine(self, route: Route, rows: Any, weights: Any) -> Any:
        back = self._exchange(rows[route.place], route.received, route.sent)
        choices = back[route.home].reshape(*weights.shape, -1)
        return self._torch.einsum("tk,tkh->th", weights, choices)


def moe_baseline(baselines: Any, make: Callable[[MoeBaseline, TorchBaselines], Sequence[Call]]) -> dict[str, Sequence[Call]]:
    """``make``'s calls by NCCL's name, if torch and NCCL are there and the first of the calls works on every rank. Collective."""
    if not isinstance(baselines, TorchBaselines) or baselines._dist is None:
        return {}
    torch, dist = baselines._torch, baselines._dist

    def exchange(rows: Any, sent: list[int], received: list[int]) -> Any:
        out = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(out, rows, received, sent)
        return out

    calls: list[Call] = []

    def start() -> None:
        calls.extend(make(MoeBaseline(torch, exchange), baselines))
        calls[0]()
        torch.cuda.synchronize()

    baselines.missing.update(baselines._try(NCCL, start))
    return {} if NCCL in baselines.missing else {NCCL: calls}


def on_device(baselines: TorchBaselines, xp: Any, route: Route) -> Route:
    """A route whose arrays are torch's."""
    return route.on(lambda array: baselines._torch.from_dlpack(xp.asarray(array)))


def grouped_alone(baselines: Any, make: Callable[[MoeBaseline, TorchBaselines], Sequence[Call]]) -> Sequence[Call]:
    """The grouped GEMM by torch, all rows already there and in order."""
    if not isinstance(baselines, TorchBaselines):
        return ()
    found: list[Call] = []
    reason = baselines._try("grouped GEMM alone", lambda: found.extend(make(MoeBaseline(baselines._torch, _never), baselines)))
    baselines.missing.update(reason)
    return () if reason else found


def _never(rows: Any, sent: list[int], received: list[int]) -> Any:
    raise AssertionError("nothing is exchanged")
