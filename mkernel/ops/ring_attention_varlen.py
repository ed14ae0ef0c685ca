"""``mk.ring_attention_varlen``: packed sequences, from arrays to a launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mkernel.errors import ArgumentError
from mkernel.ops.arguments import check_extents
from mkernel.ops.call import call
from mkernel.ops.op import Instance, ResultSpec, instance_of, register
from mkernel.ops.ring_attention import MOST_ROWS, Parameters, RingAttention, check_array, checked_problem
from mkernel.planner.ring_problem import RingAttentionProblem
from mkernel.planner.ring_varlen import OP as OP_NAME
from mkernel.planner.ring_varlen import RingAttentionVarlenPlan, make_plan

if TYPE_CHECKING:
    from mkernel.planner.split import Split
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["OP", "AttendedVarlen", "ring_attention_varlen"]

_ROWS = "(rows, heads, D)"


class AttendedVarlen(NamedTuple):
    """What ``mk.ring_attention_varlen`` returns.

    Attributes
    ----------
    o
        (rows, Hq, D), of the dtype of q: the weighted means of v; 0 in rows of no sequence.
    lse
        (Hq, rows) float32: the natural log of each row's sum of exponentials of scores; -inf in rows of no sequence.

    Examples
    --------
    One sequence of two rows, on two ranks: each has one, and a row of no sequence.

    >>> import numpy as np, mkernel as mk
    >>> def rank(world):
    ...     x = np.zeros((2, 1, 64), np.float16)
    ...     return mk.ring_attention_varlen(x, x, x, np.array([0, 2], np.int32)).lse.tolist()
    >>> mk.launch(rank, ranks=2, target="cpu")
    [[[0.693..., -inf]], [[0.693..., -inf]]]
    """

    o: Array
    lse: Array


def ring_attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    out: tuple[Array, Array] | None = None,
    world: World | None = None,
    split: Split | None = None,
    stream: Any = None,
) -> AttendedVarlen:
    """Attention inside each of several packed sequences, all of them spread over the ranks, in one kernel.

    n: sequences; Hq, Hkv: heads of q and of k and v; W: ranks; D: 64 or 128; rows: of a rank.

    Parameters
    ----------
    q
        (rows, Hq, D) bfloat16 or float16: this rank's rows. Any strides that are multiples of 16 bytes, D contiguous.
    k, v
        (rows, Hkv, D), the dtype of ``q``, strides as ``q``. Hq is a multiple of Hkv: query head h uses KV head h // (Hq / Hkv).
    cu_seqlens
        (n + 1) int32 on the device, contiguous: sequence i is rows ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1`` of all ranks' rows, as if
        they were not spread. The first number is 0; lengths may be 0. The same on all ranks. Read by the kernel only: the next call, or
        replay of a graph, may find other numbers there.
    causal
        Whether row i of a sequence sees its rows 0 to i only; else it sees all of them.
    scale
        As in ``mk.ring_attention``.
    layout
        Which rows of a sequence a rank holds. "contiguous": of W equal chunks of ceil(length / W) rows chunk r. "zigzag": of 2W equal
        chunks of ceil(length / 2W) rows chunks r and 2W - 1 - r, in that order (``mk.zigzag_shard``). Chunks lie one after the other,
        sequence by sequence; rows behind the end of a sequence are padding, and so are rows behind the last sequence.
    out
        (o, lse) that receive the results, as in ``mk.ring_attention``.
    split, stream
        As in ``mk.ring_attention``.

    Returns
    -------
    o
        (rows, Hq, D), the dtype of ``q``, exact as in ``mk.ring_attention``; 0 in rows of padding, whatever q, k and v have there.
    lse
        (Hq, rows) float32: the natural log of each row's sum of exponentials; -inf in rows of padding.

    Notes
    -----
    Collective: every rank calls it, in the same order, with the same shapes but for n, which the kernel compares; n and rows may change
    from call to call, and either may be 0. Inputs are only read. Asynchronous on target cuda, and capturable once prepared. Memory as
    ``mk.ring_attention``.

    Raises
    ------
    ArgumentError
        Shapes, dtypes, strides, device or split are wrong; the heap is too small. Nothing was launched.
    SequenceError
        On this or a later call: ``cu_seqlens`` does not begin with 0, decreases, or its sequences do not fit into the rows. The results are
        undefined, and the world stays usable.
    MismatchError, TimeoutError, PeerLostError, TransportError
        On this or a later call: the ranks disagree, also about ``cu_seqlens``, or one does not answer.

    Examples
    --------
    Sequences of 3 and of 2 rows on two ranks, 0 0 0 1 1: with q = 0 all keys of a sequence weigh the same.

    >>> import numpy as np, mkernel as mk
    >>> def rank(world):
    ...     q = k = np.zeros((3, 1, 64), np.float16)
    ...     v = np.full((3, 1, 64), 6 * world.rank, np.float16)
    ...     return mk.ring_attention_varlen(q, k, v, np.array([0, 3, 5], np.int32)).o[:, 0, 0].tolist()
    >>> mk.launch(rank, ranks=2, target="cpu")
    [[2.0, 2.0, 3.0], [2.0, 0.0, 3.0]]

    The algorithm: as ``mk.ring_attention``; sequences as in FlashAttention's varlen functions.
    """
    arrays, options = (q, k, v, cu_seqlens), (causal, scale, layout)
    result: AttendedVarlen = call(OP, arrays, options, world=world, out=out, split=split, stream=stream)
    return result


def _as_batch(view: TensorView) -> TensorView:
    """(rows, heads, D) as (1, heads, rows, D)."""
    (rows, heads, d), (row, head, inner) = view.shape, view.strides
    return view._replace(shape=(1, heads, rows, d), strides=(max(row * max(rows, 1), head * heads), head, row, inner))


class RingAttentionVarlen(RingAttention):
    """``mk.ring_attention_varlen``. The ``rows`` of an instance are a rank's; how many sequences they are is the kernel's to compare."""

    name = OP_NAME
    gives = "its rows of q (rows, Hq, D), and of k and v (rows, Hkv, D), of packed sequences; where these begin"
    gets = "its rows' attention to all keys of their sequence: o (rows, Hq, D), lse (Hq, rows)"
    operands = ("q", "k", "v", "cu_seqlens")
    result = AttendedVarlen
    bench = ""  # it is measured as shapes of ring_attention

    # ---- problem and plan
    def instance(self, world: World, *operands: TensorView, **options: Any) -> Instance[RingAttentionProblem]:
        q, k, v, ends = operands
        for name, view in zip(self.operands[:3], operands[:3], strict=True):
            check_array(name, view, q.dtype, _ROWS)
        rows, heads, d = q.shape
        if k.shape != v.shape or (k.shape[0], k.shape[2]) != (rows, d):
            rule = f"must be (rows, Hkv, D) = ({rows}, Hkv, {d}), both alike"
            raise ArgumentError("k.shape, v.shape", (k.shape, v.shape), rule, "q, k and v are of the same sequences")
        problem = checked_problem(world, q, k, heads, k.shape[1], packed=True, **options)
        if rows >= MOST_ROWS:
            raise ArgumentError("q.shape", q.shape, f"rows must be below {MOST_ROWS}", "make several calls")
        check_extents(rows * world.size, rows * heads)
        if len(ends.shape) != 1 or ends.shape[0] < 1:
            raise ArgumentError("cu_seqlens.shape", ends.shape, "must be (n + 1): where each sequence begins, and where the last one ends")
        if ends.dtype != "int32":
            raise ArgumentError("cu_seqlens.dtype", ends.dtype, "must be int32")
        if ends.shape[0] > 1 and ends.strides[0] != 4:
            raise ArgumentError("cu_seqlens.strides", ends.strides, "must be contiguous", "use xp.ascontiguousarray(cu_seqlens)")
        if ends.address % 4:
            raise ArgumentError("cu_seqlens", f"array at {ends.address:#x}", "must start at a multiple of 4 bytes")
        return instance_of((problem, rows))

    def make_plan(
        self, problem: RingAttentionProblem, rows: int, sm_count: int, split: Split | None = None, *, specialize: str | None = None
    ) -> RingAttentionVarlenPlan:
        return make_plan(problem, rows, sm_count, split)

    def plan_rows(self, rows: int, ranks: int) -> int:
        return rows

    def rows_of(self, shape: Sequence[int]) -> int:
        return shape[0] if shape else 0

    def largest(self, max_rows: int, ranks: int) -> Iterable[int]:
        if max_rows >= MOST_ROWS:
            raise ArgumentError("max_rows", max_rows, f"must be below {MOST_ROWS}")
        return sorted({max_rows, *(1 << bits for bits in range(max_rows.bit_length()))})

    # ---- one call
    def results(self, instance: Instance[RingAttentionProblem], operands: Sequence[TensorView]) -> Sequence[ResultSpec]:
        q = operands[0]
        return [ResultSpec(q.shape, q.dtype), ResultSpec((q.shape[1], q.shape[0]), "float32")]

    def check_results(
        self, instance: Instance[RingAttentionProblem], operands: Sequence[TensorView], results: Sequence[TensorView]
    ) -> None:
        (o, lse), (rows, heads, _) = results, operands[0].shape
        check_array("out.o", o, operands[0].dtype, _ROWS)
        for name, view, shape in (("out.o", o, operands[0].shape), ("out.lse", lse, (heads, rows))):
            if view.shape != shape:
                raise ArgumentError(f"{name}.shape", view.shape, f"must be {shape}")
        flat = lse._replace(shape=(1, heads, rows), strides=(4 * heads * rows, *lse.strides))
        super().check_results(instance, [*map(_as_batch, operands[:3]), operands[3]], [_as_batch(o), flat])

    def bind(
        self,
        world: World,
        executable: Executable,
        instance: Instance[RingAttentionProblem],
        operands: Sequence[TensorView],
        results: Sequence[TensorView],
    ) -> Parameters:
        arrays, ends = [_as_batch(view) for view in operands[:3]], operands[3]
        parameters = super().bind(world, executable, instance, arrays, [_as_batch(results[0]), results[1]])
        parameters.rows = instance.rows
        parameters.cu_seqlens, parameters.sequences = ends.address, ends.shape[0] - 1
        return parameters


OP = register(RingAttentionVarlen())
