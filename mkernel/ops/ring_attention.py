"""``mk.ring_attention``: from arrays to a launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.ops.arguments import DTYPES, ITEM, check_aligned, check_extents, check_writable
from mkernel.ops.call import call, hold
from mkernel.ops.op import Instance, Op, ResultSpec, instance_of, register
from mkernel.ops.parameters import map_places, place_of
from mkernel.planner.ring_attention import (
    COPY_ROWS,
    PARAMETER_BYTES,
    RingAttentionPlan,
    make_plan,
)
from mkernel.planner.ring_attention import OP as OP_NAME
from mkernel.planner.ring_problem import LAYOUTS, MOST_RANKS, RingAttentionProblem, Sizes

if TYPE_CHECKING:
    from mkernel.planner.split import Split
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["OP", "Attended", "Parameters", "RingAttention", "checked_problem", "ring_attention"]

_HEAD_DIMS = (64, 128)
MOST_ROWS = 1 << 26  # of all batches, on one rank
_LOG2_E = math.log2(math.e)


class Attended(NamedTuple):
    """What ``mk.ring_attention`` returns.

    Attributes
    ----------
    o
        (B, Hq, S/W, D), of the dtype of q: the weighted means of v.
    lse
        (B, Hq, S/W) float32: the natural log of each row's sum of exponentials of scores; -inf for a row that sees no key. With it
        results over different keys are merged.

    Examples
    --------
    Eight keys of the same score: the log of 8.

    >>> import numpy as np, mkernel as mk
    >>> def rank(world):
    ...     x = np.zeros((1, 1, 4, 64), np.float16)
    ...     attended = mk.ring_attention(x, x, x)
    ...     return attended.o.shape, float(attended.lse[0, 0, 0])
    >>> mk.launch(rank, ranks=2, target="cpu")
    [((1, 1, 4, 64), 2.0794...), ((1, 1, 4, 64), 2.0794...)]
    """

    o: Array
    lse: Array


class RingArguments(ctypes.Structure):
    """``RingArguments`` of ``kernels_src/attention/window.cuh``."""

    _offsets = ("window_offset", "progress_offset", "counted_offset", "partial_offset")
    _sizes = (
        *("items", "items_per_pair", "group", "kv_heads", "part_rows", "tiles_per_part", "chunk_rows", "chunks_per_part"),
        *("ctas", "intra_comm", "inter_send", "period", "total", "depth", "credit_step", "shares"),
    )
    _fields_ = [*((name, ctypes.c_uint64) for name in _offsets), *((name, ctypes.c_uint32) for name in _sizes)]


class Parameters(ctypes.Structure):
    """``Parameters`` of ``kernels_src/ops/ring_attention.cuh``."""

    _maps = ("q_map", "k_map", "v_map", "o_map", "copy_k_map", "copy_v_map", "window_k_map", "window_v_map", "push_map")
    _fields_ = [
        ("world", abi.World),
        ("ring", RingArguments),
        ("o", ctypes.c_uint64),
        ("lse", ctypes.c_uint64),
        ("o_batch_bytes", ctypes.c_uint64),
        ("o_head_bytes", ctypes.c_uint64),
        ("o_row_bytes", ctypes.c_uint64),
        ("flag_offset", ctypes.c_uint64),
        ("rows", ctypes.c_uint32),
        ("scale_log2", ctypes.c_float),
        ("cu_seqlens", ctypes.c_uint64),
        ("sequences", ctypes.c_uint32),
        ("pairs_together", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 6),
        *((name, abi.TensorMap) for name in _maps),
    ]


assert ctypes.sizeof(Parameters) == PARAMETER_BYTES
_RING_AT, _RING = place_of(RingArguments, "window_offset", "shares")
_AT, _VALUES = place_of(Parameters, "o", "rows")
_MAPS = map_places(Parameters, *Parameters._maps)


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "contiguous",
    out: tuple[Array, Array] | None = None,
    world: World | None = None,
    split: Split | None = None,
    stream: Any = None,
) -> Attended:
    """Attention over a sequence that is spread over the ranks: softmax(scale * q @ k^T) @ v, in one kernel.

    B: batches; Hq, Hkv: heads of q and of k and v; S: rows of the sequence; W: ranks; D: 64 or 128.

    Parameters
    ----------
    q
        (B, Hq, S/W, D) bfloat16 or float16: this rank's rows. Any strides that are multiples of 16 bytes, D contiguous: an array
        (B, S/W, Hq, D) transposed is not copied.
    k, v
        (B, Hkv, S/W, D), the dtype of ``q``, strides as ``q``. Hq is a multiple of Hkv: query head h uses KV head h // (Hq / Hkv).
    causal
        Whether row i of the sequence sees rows 0 to i only; else it sees all.
    scale
        What scores are multiplied by, positive; None: 1 / sqrt(D). The same on all ranks.
    layout
        Which rows of the sequence a rank holds. "contiguous": rank r holds rows r * S/W and so on. "zigzag": of 2W equal chunks it holds
        chunks r and 2W - 1 - r, in that order (``mk.zigzag_shard``); S/W is even. Causal attention then costs all ranks the same.
    out
        (o, lse) that receive the results, no byte shared with an operand or each other; returned as given. ``o`` with strides as ``q``, lse
        contiguous. None: new arrays of the library of ``q``, in memory of ``stream``.
    split
        SMs that compute, that push keys to the node's ranks (``intra_comm``) and that send them to other nodes (``inter_send``: at least
        one for each other node). None, or a role left at None: mkernel's choice.
    stream
        As in ``mk.allgather_gemm``.

    Returns
    -------
    o
        (B, Hq, S/W, D), the dtype of ``q``. Scores and sums are float32; weights are rounded to the dtype of ``q`` before they multiply v;
        the result is rounded once. Keys are taken in a fixed order, so results are bitwise the same on every run.
    lse
        (B, Hq, S/W) float32: the natural log of each row's sum of exponentials.

    Notes
    -----
    Collective: every rank calls it, in the same order, with the same shapes; B and S/W may change from call to call, and either may be 0.
    Inputs are only read. Asynchronous on target cuda, and capturable once prepared, as ``mk.allgather_gemm``. Beside the results a call
    takes a window for keys and values of other ranks on the symmetric heap, whose size does not grow with S (``plan.describe()``).
    A NaN or an infinity in v may also reach rows that do not see it, of its head and up to a block of keys before it: the weight 0 times
    it is a NaN, as in other flash attention.

    Raises
    ------
    ArgumentError
        Shapes, dtypes, strides, device or split are wrong; the heap is too small. Nothing was launched.
    MismatchError, TimeoutError, PeerLostError, TransportError
        On this or a later call: the ranks disagree, or one does not answer.

    Examples
    --------
    With q = 0 all visible keys weigh the same: row i of a causal sequence is the mean of rows 0 to i of v.

    >>> import numpy as np, mkernel as mk
    >>> def rank(world):
    ...     q = k = np.zeros((1, 1, 2, 64), np.float16)
    ...     v = np.full((1, 1, 2, 64), 2 * world.rank, np.float16)
    ...     return mk.ring_attention(q, k, v, causal=True).o[0, 0, :, 0].tolist()
    >>> mk.launch(rank, ranks=2, target="cpu")
    [[0.0, 0.0], [0.666..., 1.0]]

    The algorithm: online softmax over blocks of keys (Milakov and Gimelshein 2018; FlashAttention 2 and 3), keys of other ranks as in Ring
    Attention (Liu et al. 2023), but streamed to every rank directly; zigzag as in the context parallelism of Llama 3.
    """
    result: Attended = call(OP, (q, k, v), (causal, scale, layout), world=world, out=out, split=split, stream=stream)
    return result


class RingAttention(Op[RingAttentionProblem]):
    """``mk.ring_attention``. The ``rows`` of an instance are the code of its ``Sizes``: B and S/W."""

    name = OP_NAME
    gives = "its rows of q (B, Hq, S/W, D), and of k and v (B, Hkv, S/W, D)"
    gets = "its rows' attention to all keys: o (B, Hq, S/W, D), lse (B, Hq, S/W)"
    operands: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    options: ClassVar[Mapping[str, Any]] = {"causal": False, "scale": None, "layout": "contiguous"}
    result: ClassVar[type[tuple[Any, ...]]] = Attended
    bench = "mkernel.bench.cases.ring_attention"
    by_rows = False
    tunable = ()
    parameters = Parameters

    # ---- problem and plan
    def instance(self, world: World, *operands: TensorView, **options: Any) -> Instance[RingAttentionProblem]:
        (q, k, v), layout = operands, options["layout"]
        for name, view in zip(self.operands, operands, strict=True):
            check_array(name, view, q.dtype)
        (batches, heads, length, d), ranks = q.shape, world.size
        if k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (batches, length, d):
            rule = f"must be (B, Hkv, S/W, D) = ({batches}, Hkv, {length}, {d}), both alike"
            raise ArgumentError("k.shape, v.shape", (k.shape, v.shape), rule, "q, k and v are of the same sequence")
        problem = checked_problem(world, q, k, heads, k.shape[1], packed=False, **options)
        if layout == "zigzag" and length % 2:
            raise ArgumentError(
                "q.shape", q.shape, f"S/W = {length} must be even with layout zigzag", "pad the sequence to a multiple of 2W"
            )
        if batches * length >= MOST_ROWS:
            raise ArgumentError("q.shape", q.shape, f"B * S/W must be below {MOST_ROWS}", "make several calls")
        check_extents(length * ranks, batches * heads * max(1, length))
        return instance_of((problem, Sizes(batches, length).code))

    def make_plan(
        self, problem: RingAttentionProblem, rows: int, sm_count: int, split: Split | None = None, *, specialize: str | None = None
    ) -> RingAttentionPlan:
        return make_plan(problem, rows, sm_count, split)

    def plan_rows(self, rows: int, ranks: int) -> int:
        return Sizes(1, rows).code

    def class_of(self, rows: int, split: Split | None = None) -> int:
        # Plans of all sizes are made of one, and a split that a caller gives is looked at with the sizes of the call.
        return 0 if split is None else super().class_of(rows)

    def rows_of(self, shape: Sequence[int]) -> int:
        return shape[0] * shape[2] if len(shape) == 4 else 0  # of all batches; what has another shape is refused

    def largest(self, max_rows: int, ranks: int) -> Iterable[int]:
        if max_rows >= MOST_ROWS:
            raise ArgumentError("max_rows", max_rows, f"B * S/W must be below {MOST_ROWS}")
        lengths = {max_rows, *(1 << bits for bits in range(max_rows.bit_length()))}
        return [Sizes(max_rows // length, length).code for length in sorted(lengths)]

    # ---- one call
    def results(self, instance: Instance[RingAttentionProblem], operands: Sequence[TensorView]) -> Sequence[ResultSpec]:
        q = operands[0]
        return [ResultSpec(q.shape, q.dtype), ResultSpec(q.shape[:3], "float32")]

    def check_results(
        self, instance: Instance[RingAttentionProblem], operands: Sequence[TensorView], results: Sequence[TensorView]
    ) -> None:
        q, (o, lse) = operands[0], results
        check_array("out.o", o, q.dtype)
        for name, view, shape in (("out.o", o, q.shape), ("out.lse", lse, q.shape[:3])):
            if view.shape != shape:
                raise ArgumentError(f"{name}.shape", view.shape, f"must be {shape}")
            check_writable(name, view)
        if lse.dtype != "float32":
            raise ArgumentError("out.lse.dtype", lse.dtype, "must be float32")
        expected = 4
        for extent, stride in zip(reversed(lse.shape), reversed(lse.strides), strict=True):
            if 0 not in lse.shape and extent > 1 and stride != expected:
                raise ArgumentError("out.lse.strides", lse.strides, "must be contiguous")
            expected *= extent
        if 0 in q.shape:
            return
        taken = o.shape[3] * ITEM  # bytes of what lies inside a step of the next larger stride
        for stride, extent in sorted((stride, extent) for stride, extent in zip(o.strides[:3], o.shape[:3], strict=True) if extent > 1):
            if stride < taken:
                raise ArgumentError("out.o.strides", o.strides, "rows must not overlap")
            taken = stride * extent

    def bind(
        self,
        world: World,
        executable: Executable,
        instance: Instance[RingAttentionProblem],
        operands: Sequence[TensorView],
        results: Sequence[TensorView],
    ) -> Parameters:
        (o, lse), plan, scratch = results, executable.plan, executable.scratch_offset
        parameters = Parameters()
        memory = memoryview(parameters).cast("B")
        _RING.pack_into(memory, Parameters.ring.offset + _RING_AT, *_ring_values(plan, scratch))
        batch, head, row = strides_of(o)
        _VALUES.pack_into(memory, _AT, o.address, lse.address, batch, head, row, executable.flag_offset, plan.sizes.length)
        parameters.scale_log2 = instance.problem.scale * _LOG2_E
        parameters.pairs_together = plan.pairs_together
        if plan.items:
            for place, made in zip(_MAPS, self._maps(world, executable, operands, o), strict=True):
                memory[place] = made
        return parameters

    def _maps(self, world: World, executable: Executable, operands: Sequence[TensorView], o: TensorView) -> Iterator[bytes]:
        """The tensor maps, in the order of ``Parameters``."""
        (q, k, v), plan = operands, executable.plan
        problem, make = plan.problem, world.backend.tensor_map
        key_block = problem.tile.key_block
        made = {}
        for name, view, rows in zip("qkvokv", (q, k, v, o, k, v), (64, key_block, key_block, 64, COPY_ROWS, COPY_ROWS), strict=True):
            if (name, rows) not in made:
                batches, heads, length, d = view.shape
                by_batch, by_head, by_row = strides_of(view)
                extents, strides = (d, length, heads, batches), (by_row, by_head, by_batch)
                made[name, rows] = make(view.address, problem.dtype, extents, strides, (64, rows, 1, 1))
            yield made[name, rows]
        if not problem.rings:
            yield from [bytes(128)] * 3
            return
        key = "windows", problem, plan.chunk_rows, plan.plane_bytes, plan.depth, plan.planes, executable.scratch_offset
        windows: tuple[bytes, ...] = world.held.get(key) or hold(world, key, tuple(self._windows(world, executable)))
        yield from windows

    @staticmethod
    def _windows(world: World, executable: Executable) -> Iterator[bytes]:
        """Maps of what lies on the heap, which calls of many sizes have alike."""
        plan, header, make = executable.plan, executable.header, world.backend.tensor_map
        problem, key_block = plan.problem, plan.problem.tile.key_block
        row, plane, slots = problem.head_dim * ITEM, plan.plane_bytes, problem.rings * plan.depth
        window = header.heap_base + header.local_rank * header.heap_stride + executable.scratch_offset
        for offset in (0, plane):
            extents, strides = (problem.head_dim, plan.chunk_rows, slots, 1), (row, 2 * plane, 2 * plane * slots)
            yield make(window + offset, problem.dtype, extents, strides, (64, key_block, 1, 1))
        extents, strides = (problem.head_dim, plan.chunk_rows, plan.planes, header.ranks_per_node), (row, plane, header.heap_stride)
        yield make(header.heap_base + executable.scratch_offset, problem.dtype, extents, strides, (64, COPY_ROWS, 1, 1))


def _ring_values(plan: RingAttentionPlan, scratch: int) -> tuple[int, ...]:
    """The values of ``RingArguments``, in its order."""
    problem, (intra_comm, inter_send) = plan.problem, plan.copying
    return (
        scratch,
        scratch + plan.progress_offset,
        abi.COUNTED_OFFSET,
        scratch + plan.partial_offset,
        plan.items,
        plan.items_per_pair,
        problem.group,
        problem.kv_heads,
        plan.part_rows,
        plan.tiles_per_part,
        plan.chunk_rows,
        plan.chunks_per_part,
        plan.ctas,
        intra_comm,
        inter_send,
        plan.period,
        plan.total,
        plan.depth,
        plan.credit_step,
        plan.shares,
    )


def checked_problem(
    world: World, q: TensorView, k: TensorView, heads: int, kv_heads: int, *, causal: Any, scale: Any, layout: Any, packed: bool
) -> RingAttentionProblem:
    """The problem of a call. Raises ArgumentError."""
    d = q.shape[-1]
    if d not in _HEAD_DIMS:
        raise ArgumentError("q.shape", q.shape, "D, the last extent, must be 64 or 128", "pad q, k and v with zeros")
    if world.size > MOST_RANKS:
        raise ArgumentError("world", f"{world.size} ranks", f"at most {MOST_RANKS} attend together", "attend within smaller worlds")
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ArgumentError("k.shape", k.shape, f"Hkv must divide Hq = {heads}")
    if not isinstance(causal, bool):
        raise ArgumentError("causal", causal, "must be True or False")
    if layout not in LAYOUTS:
        raise ArgumentError("layout", layout, f"must be one of {', '.join(LAYOUTS)}")
    key = OP_NAME, heads, kv_heads, d, q.dtype, causal, layout, _scale(scale, d), packed
    known: RingAttentionProblem | None = world.held.get(key)
    if known is None:
        known = hold(world, key, RingAttentionProblem(world.topology, *key[1:], world.options.batch_invariant))
    return known


def _scale(scale: Any, d: int) -> float:
    """The scale that a caller means."""
    if scale is None:
        return 1 / math.sqrt(d)
    try:
        value = float(scale)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not 0 < value < 1e30:
        raise ArgumentError("scale", scale, "must be a positive number, or None for 1 / sqrt(D)")
    return value


def strides_of(view: TensorView) -> tuple[int, int, int]:
    """Bytes from one batch, head and row to the next: any that tensor maps take where there is one only, whatever its library says."""
    (batches, heads, length, d), (batch, head, row, _) = view.shape, view.strides
    alone = d * ITEM
    return batch if batches > 1 else alone, head if heads > 1 else alone, row if length > 1 else alone


def check_array(name: str, view: TensorView, dtype: str, shape: str = "(B, heads, S/W, D)") -> None:
    """q, k, v or o, whose strides tensor maps take."""
    extents = shape.count(",") + 1
    if len(view.shape) != extents:
        raise ArgumentError(f"{name}.ndim", len(view.shape), f"must be {extents}: {shape}")
    if view.dtype not in DTYPES:
        raise ArgumentError(f"{name}.dtype", view.dtype, "must be bfloat16 (ml_dtypes) or float16")
    if view.dtype != dtype:
        raise ArgumentError(f"{name}.dtype", view.dtype, f"must be {dtype}, like q")
    if 0 in view.shape:
        return
    check_aligned(name, view)
    *strides, inner = view.strides
    if view.shape[-1] > 1 and inner != ITEM:
        raise ArgumentError(f"{name}.strides", view.strides, "D must be contiguous", f"use xp.ascontiguousarray({name})")
    for extent, stride in zip(view.shape[:-1], strides, strict=True):
        if extent > 1 and (stride <= 0 or stride % 16):
            rule = "must be positive multiples of 16 bytes"
            raise ArgumentError(f"{name}.strides", view.strides, rule, f"use xp.ascontiguousarray({name})")


OP = register(RingAttention())
