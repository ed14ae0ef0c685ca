"""What ``mk.plan`` makes of the MoE layer: both of its kernels, and the arrays between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkernel.errors import ArgumentError
from mkernel.ops.moe import note_refused
from mkernel.ops.moe_layer import ARRAYS, NAME, OPTIONS, Between, check, moe_layer, queue_of
from mkernel.ops.op import find
from mkernel.ops.prepared_plan import PreparedPlan, plan_kernel
from mkernel.runtime import current

if TYPE_CHECKING:
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["PreparedLayer", "plan_layer"]


@dataclasses.dataclass(frozen=True, repr=False)
class PreparedLayer(PreparedPlan):
    """What ``mk.plan("moe_layer", ...)`` returns: both kernels, agreed on and loaded. ``plan`` and ``split`` are those of the first one.

    Attributes
    ----------
    max_rows
        None: how many tokens a call has is bounded by ``max_tokens``.
    workspace_bytes
        Bytes of the symmetric data heap that neither kernel exceeds.
    """

    _first: PreparedPlan = dataclasses.field(repr=False)
    _second: PreparedPlan = dataclasses.field(repr=False)

    def plan(self, rows: int | None = None) -> Any:
        return self._first.plan(rows)

    def describe(self, rows: int | None = None) -> str:
        return f"{self._first.describe(rows)}\n{self._second.describe()}"

    def run(self, *arrays: Array | None, out: Any = None, stream: Any = None) -> Any:
        """``mk.moe_layer`` of the arrays in the order of ``mk.plan``, with the options that the plan was made with."""
        x, ids, weights, up, down, add, counts = _all_arrays(arrays)
        given: dict[str, Any] = dict(zip(OPTIONS, self._options, strict=True))
        more = {"add": add, "expert_counts": counts, "world": self.world, "out": out, "stream": stream}
        result: Array = moe_layer(x, ids, weights, up, down, split=self._choice, **more, **given)  # type: ignore[arg-type]
        return result


def plan_layer(
    op: str, arrays: Sequence[Array | None], options: dict[str, Any], *, max_rows: int | None, world: World | None, **how: Any
) -> PreparedLayer:
    """``mk.plan`` of the layer. The rows between its kernels get their arrays here, so that the first call may be one that is captured."""
    unknown = options.keys() - OPTIONS.keys()
    if unknown:
        raise TypeError(f"{op}() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    given = {**OPTIONS, **options, "max_rows": max_rows}
    w = current.current(world)
    x, ids, weights, up, down, add, counts = _all_arrays(arrays)
    with w.lock:
        libraries = w.backend.libraries
        given_arrays = (x, ids, weights, up, down, add, counts)
        views: list[Any] = [None if array is None else libraries[type(array)].view(array) for array in given_arrays]
        shape = (type(x), *check(w, given["activation"], *views))
        dispatched = options | {"activation": given["activation"]}
        first = plan_kernel("moe_dispatch_gemm", [x, ids, up, None, counts], dispatched, max_rows=max_rows, world=w, **how)
        dispatch, home = find("moe_dispatch_gemm"), libraries[type(x)]
        queue = queue_of(w, home, how.get("stream"))
        operands: list[Any] = [views[0], views[1], views[3], None, views[6]]
        specs = dispatch.results(first._instance, operands)
        between = w.kept.get((*shape, *given.values()))
        if between is None:
            made = dispatch.returned([home.empty(*spec, queue) for spec in specs])
            between = w.kept[*shape, *given.values()] = Between(home, made, queue)
        between.of(home, first._instance.problem.max_tokens, queue)  # so that later calls need none
        rows, most = between.of(home, views[0].shape[0], queue), first._instance.problem.max_tokens
        if views[0].shape[0] > most:  # calls will be refused on the device, not here
            note_refused(w, home.view(rows.routing.topk_ids))
        second = plan_kernel("moe_gemm_combine", [rows.y, down, *rows.routing, weights, add], {}, world=w, **how)
    workspace = max(first.workspace_bytes, second.workspace_bytes)
    return PreparedLayer(op, w, None, workspace, first._instance, first._choice, tuple(given.values()), first, second)


def _all_arrays(arrays: Sequence[Array | None]) -> list[Array | None]:
    if not 5 <= len(arrays) <= len(ARRAYS):
        raise ArgumentError("arrays", f"{len(arrays)} arrays", f"{NAME} takes " + ", ".join(ARRAYS), "the last two may be left out")
    return [*arrays, *[None] * (len(ARRAYS) - len(arrays))]
