"""``mk.plan``: agree on a problem and load its kernels before it is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mkernel.ops import moe_layer, prepared_layer
from mkernel.ops.op import check_name
from mkernel.ops.prepared_plan import PreparedPlan, plan_kernel

if TYPE_CHECKING:
    from mkernel.planner.split import Split
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["plan"]


def plan(
    op: str,
    *arrays: Array | None,
    max_rows: int | None = None,
    world: World | None = None,
    out: Any = None,  # an argument of every op
    split: Split | None = None,
    specialize: str | Iterable[str] | None = None,
    tiling: Mapping[str, int] | None = None,
    stream: Any = None,
    **options: Any,
) -> PreparedPlan:
    """Agree on a problem and load its kernels before it is called (needed before a graph capture).

    Takes the arguments of the op itself, its arrays in the order of their names in ``Op.operands`` (None: left out); they are only looked
    at, never read. Afterwards a call of the same problem (dims other than rows, dtype, layout, options) with any number of rows up to
    ``max_rows`` makes no collective, compiles nothing and never waits for the device. Collective, blocks the host unless all is there; not
    capturable.

    Parameters
    ----------
    op
        Name of the op, such as ``"allgather_gemm"``; or ``"moe_layer"``: both of its kernels, and the arrays between them for as many
        tokens as ``x`` has.
    max_rows
        Most rows of the first operand of a later call; the workspace for them is set aside at once. None: as many as the heap has room
        for, taken when a call needs them (on target cpu, where a kernel takes seconds to compile: those whose kernels are there).
    specialize
        Fields of the kernels that are compiled in, for calls by this plan: "default" (measured for each op), "all", "none", or names of
        ``"n"``, ``"k"`` and ``"split"``. None: as the world has it (``mk.init(specialize=)``). Results are the same, bitwise.
    tiling
        What tiles cover, for calls by this plan: to measure one choice of the planner against another. A mapping with some of the fields
        of ``mkernel.planner.tiling.Tiling`` that the op knows, such as ``{"block_n": 128, "span": 1}``; the same on all ranks. None, and
        fields that are left out: predicted.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     a = np.ones((16, 64), ml_dtypes.bfloat16)
    ...     b = np.ones((64, 8), ml_dtypes.bfloat16)
    ...     plan = mk.plan("allgather_gemm", a, b, max_rows=16)
    ...     return [plan.run(a[:rows], b).shape for rows in (16, 5, 0)]
    >>> mk.launch(rank, ranks=2, target="cpu")
    [[(32, 8), (10, 8), (0, 8)], [(32, 8), (10, 8), (0, 8)]]

    Raises
    ------
    ArgumentError, MismatchError, CompileError
        As the op itself; ``max_rows`` is less than the arrays have, or needs more heap than there is.
    """
    check_name(op)
    prepare = prepared_layer.plan_layer if op == moe_layer.NAME else plan_kernel
    how: dict[str, Any] = {"split": split, "specialize": specialize, "tiling": tiling, "stream": stream}
    return prepare(op, arrays, options, max_rows=max_rows, world=world, **how)
