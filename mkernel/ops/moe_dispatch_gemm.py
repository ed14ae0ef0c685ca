"""``mk.moe_dispatch_gemm``: from arrays to a launch."""

from __future__ import annotations

import ctypes
import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.ops.arguments import ITEM, MOST_EXTENT, check_aligned, check_matrix, check_multiple, check_writable, row_stride
from mkernel.ops.call import call, hold
from mkernel.ops.moe import (
    Routing,
    agreed_tokens,
    check_bound,
    check_columns,
    check_contiguous,
    check_expert_counts,
    check_ids,
    check_number_of_experts,
    check_routing,
    check_row_bits,
    check_rows,
    check_weights,
    layout_of_experts,
    note_refused,
    place_in_memory,
)
from mkernel.ops.op import Instance, Op, ResultSpec, register
from mkernel.ops.parameters import place_of
from mkernel.planner.choose_moe import plan_moe_dispatch_gemm
from mkernel.planner.gemm import BLOCK_K, BLOCK_M
from mkernel.planner.moe import SEGMENT_ROWS, whole_lines
from mkernel.planner.moe_dispatch_gemm import OP as OP_NAME
from mkernel.planner.moe_dispatch_gemm import PARAMETER_BYTES, MoeDispatchGemmPlan, MoeDispatchGemmProblem

if TYPE_CHECKING:
    from mkernel.planner.machine import Machine
    from mkernel.planner.split import Split
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["OP", "Dispatched", "moe_dispatch_gemm"]

_STAGED = (1 << 64) - 1  # kStaged


class RoutingArguments(ctypes.Structure):
    """``RoutingArguments`` of ``kernels_src/moe/routing.cuh``."""

    _names = (
        *("ids", "weights", "x", "topk_ids", "rows", "experts", "sums", "listed", "counts", "expert_offsets"),
        *("source", "row_weight", "expert_counts"),
        *("records_offset", "staged_offset", "sending_offset", "arrived_offset", "tables_offset", "x_offset"),
    )
    _sizes = ("tokens", "max_tokens", "max_rows", "alignment", "id_bytes", "row_bytes", "put_rows", "slot_bytes")
    _fields_ = [*((name, ctypes.c_uint64) for name in _names), *((name, ctypes.c_uint32) for name in _sizes)]


class Parameters(ctypes.Structure):
    """``Parameters`` of ``kernels_src/ops/moe_dispatch_gemm.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("fields", abi.Fields),
        ("routing", RoutingArguments),
        ("c", ctypes.c_uint64),
        ("slots_offset", ctypes.c_uint64),
        ("flag_offset", ctypes.c_uint64),
        ("c_row_bytes", ctypes.c_uint32),
        ("group_m", ctypes.c_uint32),
        ("clamp", ctypes.c_float),
        ("counted_alone", ctypes.c_uint32),
        ("a_map", abi.TensorMap),
        ("a_short_map", abi.TensorMap),
        ("b_map", abi.TensorMap),
        ("c_map", abi.TensorMap),
    ]


assert ctypes.sizeof(Parameters) == PARAMETER_BYTES
_ROUTING_AT, _ROUTING = place_of(RoutingArguments, "ids", "slot_bytes")


class Dispatched(NamedTuple):
    """What ``moe_dispatch_gemm`` returns.

    Attributes
    ----------
    y
        (max_rows, F): the products, grouped by this rank's experts. Rows from ``expert_offsets[-1]`` on are undefined.
    expert_offsets
        (E/W + 1) int32, on the device: the rows of expert e of this rank begin with row ``expert_offsets[e]``.
    source
        (max_rows, 3) int32: rank, token and choice (the index in ``topk_ids``) that each row comes from.
    row_weight
        (max_rows) float32: ``topk_weights`` of that choice; None where none were passed.
    routing
        Where this rank's tokens went (``mk.Routing``): for ``moe_combine`` and ``moe_gemm_combine``.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     x, w = np.ones((3, 64), ml_dtypes.bfloat16), np.ones((2, 64, 8), ml_dtypes.bfloat16)
    ...     d = mk.moe_dispatch_gemm(x, np.array([[0], [1], [1]], np.int32), w)
    ...     return d.rows(), d.expert_offsets.tolist(), d.source[:3].tolist(), d.row_weight
    >>> mk.launch(rank, ranks=1, target="cpu")
    [(3, [0, 1, 3], [[0, 0, 0], [0, 1, 0], [0, 2, 0]], None)]
    """

    y: Array
    expert_offsets: Array
    source: Array
    row_weight: Array | None
    routing: Routing

    def rows(self) -> int:
        """How many rows of ``y`` there are. Waits for the device."""
        return int(self.expert_offsets[-1])


def moe_dispatch_gemm(
    x: Array,
    topk_ids: Array | None,
    w: Array,
    *,
    topk_weights: Array | None = None,
    activation: str | None = None,
    clamp: float | None = None,
    expert_counts: Array | None = None,
    routing: Routing | None = None,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    alignment: int = 1,
    world: World | None = None,
    out: Dispatched | None = None,
    split: Split | None = None,
    stream: Any = None,
) -> Dispatched:
    """Send each token to the ranks of its experts, and multiply the rows of each expert by the expert's weights, in one kernel.

    Of E experts, rank r has r*E/W to (r+1)*E/W - 1.

    Parameters
    ----------
    x
        (T, H) bfloat16 or float16, contiguous: this rank's tokens. T may be 0 and differ by rank and call. H is a multiple of 8. An array
        of ``world.empty`` saves a copy.
    topk_ids
        (T, k) int32 or int64, contiguous, k from 1 to 16: the experts of each token, all different; -1: not routed. None: those of
        ``routing``.
    w
        (E/W, H, F), the dtype of ``x``: the weights of this rank's experts, each row-major or all transpose views of (F, H). F is a
        multiple of 8. With ``activation``: (E/W, H, 2 F) = [gate | up].
    topk_weights
        (T, k) float32, contiguous: travel along, as ``row_weight``. On all ranks or on none.
    activation
        "swiglu": y = silu(x @ gate) * (x @ up), in float32, rounded once. None: y = x @ w.
    clamp
        With ``activation``: gate is cut off above it, up outside of +-clamp, before they are used. None: no limit.
    expert_counts
        (E) int32, to be filled: how many tokens of all ranks each expert gets. None: not wanted.
    routing
        Of an earlier dispatch: sends the same way again, with ``topk_ids=None``.
    max_tokens
        Most tokens of any rank in any call; the same on every rank. None: the most that a rank has at the first call, rounded up.
    max_rows
        Most rows that any rank gets; the same on every rank. None: those of any routing, while they take no more than 8 GiB.
    alignment
        The rows of each expert begin at a multiple; those in between have ``source`` -1 and an undefined ``y``.
    out
        A Dispatched of arrays to fill; CuPy needs it in a capture. Its ``routing.expert_offsets`` is its ``expert_offsets``. Otherwise no
        byte is shared, by them or with an operand; but ``topk_ids`` may be its ``routing.topk_ids``, to send the same way again.

    Returns
    -------
    Dispatched
        ``y``, ``expert_offsets``, ``source``, ``row_weight`` and ``routing``. Rows of an expert are in order of source rank, then token.
        Bitwise the same on every run.

    Notes
    -----
    Collective: every rank calls it, in the same order. Asynchronous on target cuda; never waits for the device, but the first call of a
    problem does. Capturable in a CUDA graph once prepared: routing and values, not T, may change between replays.

    Raises
    ------
    ArgumentError
        Shapes, dtypes, alignment or split are wrong; the heap is too small; more than 8 GiB would be needed. Nothing was launched.
    RoutingError
        On every rank, by this or a later call: an id is no expert, or twice in a token; a rank has more than ``max_tokens`` tokens, or
        would get more than ``max_rows`` rows. Nothing was moved, and the world stays usable.
    MismatchError, TimeoutError, PeerLostError, TransportError
        On this or a later call: the ranks disagree (also on the number of experts), or one does not answer.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     x = np.full((2, 64), world.rank + 1, ml_dtypes.bfloat16)  # two tokens
    ...     w = np.ones((1, 64, 8), ml_dtypes.bfloat16)  # one expert
    ...     d = mk.moe_dispatch_gemm(x, np.array([[0], [1]], np.int32), w)  # the first token to expert 0, the second to 1
    ...     return [float(y) for y in d.y[: d.rows(), 0]], d.source[: d.rows()].tolist()
    >>> mk.launch(rank, ranks=2, target="cpu")
    [([64.0, 128.0], [[0, 0, 0], [1, 0, 0]]), ([64.0, 128.0], [[0, 1, 0], [1, 1, 0]])]

    The algorithm: the ranks exchange their routing; each works out all places, fetches every row that it needs once, in order of its first
    expert, and multiplies blocks of rows as they become complete (kernels_src/ops/moe_dispatch_gemm.cuh).
    """
    if routing is not None:
        check_routing(routing)
        if topk_ids is not None:
            raise ArgumentError(
                "routing", type(routing).__name__, "topk_ids says where tokens go", "pass one of them, and None for the other"
            )
        topk_ids = routing[0]
    options = (activation, clamp, max_tokens, max_rows, alignment)
    result: Dispatched = call(OP, (x, topk_ids, w, topk_weights, expert_counts), options, world=world, out=out, split=split, stream=stream)
    return result


def _is_positive(value: Any) -> bool:
    """In float32."""
    try:
        return isinstance(value, numbers.Real) and bool(np.float32(value) > 0)
    except OverflowError:
        return False


_NAMES = tuple(f"out.{name}" for name in (*Dispatched._fields[:-1], *(f"routing.{name}" for name in Routing._fields[:-1])))
_UNWEIGHTED_NAMES = tuple(name for name in _NAMES if name != "out.row_weight")


class MoeDispatchGemm(Op[MoeDispatchGemmProblem]):
    """``mk.moe_dispatch_gemm``."""

    name = OP_NAME
    gives = "its tokens: (T, H), their experts: (T, k), the weights of its experts: (E/W, H, F)"
    gets = "the products of its experts: (max_rows, F), and where they come from"
    operands = ("x", "topk_ids", "w", "topk_weights", "expert_counts")
    optional = frozenset({"topk_weights", "expert_counts"})
    fills = frozenset({"expert_counts"})
    options: ClassVar[Mapping[str, Any]] = {"activation": None, "clamp": None, "max_tokens": None, "max_rows": None, "alignment": 1}
    result = Dispatched
    by_rows = False
    modelled = True
    bench = "mkernel.bench.cases.moe_dispatch_gemm"
    tunable = ("intra_comm", "inter_send")
    parameters = Parameters

    # ---- problem and plan
    def instance(self, world: World, *operands: Any, **options: Any) -> Instance[MoeDispatchGemmProblem]:
        x, ids, w, weights, expert_counts = operands
        tokens, h = check_matrix("x", x)
        check_multiple("H", h)
        if tokens and row_stride("x", x) != h * ITEM:
            raise ArgumentError("x.strides", x.strides, "x must be contiguous", "use xp.ascontiguousarray(x)")
        if tokens:
            check_aligned("x", x)
        topk = check_ids(ids, tokens)
        check_columns(world.topology, topk)
        check_weights(weights, (tokens, topk))
        activation, clamp, alignment = options["activation"], options["clamp"], options["alignment"]
        if activation not in (None, "swiglu"):
            raise ArgumentError("activation", repr(activation), 'must be "swiglu" or None')
        if clamp is not None and (activation is None or not _is_positive(clamp)):
            raise ArgumentError("clamp", clamp, "must be a number that is positive in float32, and only with an activation")
        experts, columns, row_major, _ = layout_of_experts("w", w, h, x.dtype)
        gated = activation is not None
        if gated and columns % 16:
            raise ArgumentError("w.shape", w.shape, "must be (E/W, H, 2 F) with F a multiple of 8")
        if check_bound("alignment", alignment) * experts >= MOST_EXTENT:
            raise ArgumentError("alignment", alignment, f"times {experts} experts must be below {MOST_EXTENT}")
        check_expert_counts(expert_counts, experts * world.size)
        n = columns // 2 if gated else columns
        shape = (world.topology, n, h, x.dtype, row_major, experts, topk)
        most = agreed_tokens(world, (OP_NAME, *shape), tokens, options["max_tokens"])
        rows = check_rows(world.size, options["max_rows"], most, topk, experts, alignment, h + n)
        key = OP_NAME, *shape, most, rows, alignment, weights is not None, gated, float(clamp or 0)
        known: MoeDispatchGemmProblem | None = world.held.get(key)
        if known is None:
            check_number_of_experts(experts, world.topology)
            check_row_bits(world.topology, rows)
            known = hold(world, key, MoeDispatchGemmProblem(*key[1:]))
        return Instance(known, 0)

    def make_plan(
        self,
        problem: MoeDispatchGemmProblem,
        rows: int,
        sm_count: int,
        split: Split | None = None,
        *,
        specialize: str | None = None,
        machine: Machine | None = None,
    ) -> MoeDispatchGemmPlan:
        return plan_moe_dispatch_gemm(problem, sm_count, split, specialize=specialize, machine=machine)

    # ---- one call
    def results(self, instance: Instance[MoeDispatchGemmProblem], operands: Sequence[TensorView]) -> Sequence[ResultSpec]:
        known, ids = _results(instance.problem), ResultSpec((operands[0].shape[0], instance.problem.topk), "int32")
        return [*known[:-5], ids, *known[-5:]]

    def arrays_of(self, out: Any) -> Sequence[Any]:
        if not isinstance(out, tuple) or len(out) != 5 or not isinstance(out[4], tuple) or len(out[4]) != 7:
            raise ArgumentError("out", type(out).__name__, "must be a Dispatched, as an earlier call has returned it")
        y, offsets, source, weight, routing = out
        if routing[6] is not offsets and place_in_memory(routing[6]) != place_in_memory(offsets):
            raise ArgumentError("out.routing.expert_offsets", "another array", "must be out.expert_offsets itself: one array is filled")
        return [y, offsets, source, *([] if weight is None else [weight]), *routing[:6]]

    def returned(self, results: Sequence[Any]) -> Dispatched:
        y, offsets, source, *more = results
        weight = more.pop(0) if len(more) > 6 else None
        return Dispatched(y, offsets, source, weight, Routing._make([*more, offsets]))

    def names_of_results(self, count: int) -> tuple[str, ...]:
        return _NAMES if count == len(_NAMES) else _UNWEIGHTED_NAMES

    def check_places(self, operands: Sequence[TensorView | None], results: Sequence[TensorView]) -> None:
        ids, sent = operands[1], results[-6]
        if ids is not None and ids[:4] == sent[:4]:  # sent the same way again: all ids are read before any is written, as it was
            operands = [operands[0], None, *operands[2:]]
        super().check_places(operands, results)

    def check_results(
        self, instance: Instance[MoeDispatchGemmProblem], operands: Sequence[TensorView], results: Sequence[TensorView]
    ) -> None:
        specs = self.results(instance, operands)
        if len(specs) != len(results):
            raise ArgumentError("out", f"{len(results)} arrays", f"must have {len(specs)}: row_weight goes with topk_weights")
        names = self.names_of_results(len(results))
        for name, view, (shape, dtype) in zip(names, results, specs, strict=True):
            if view.shape != shape or view.dtype != dtype:
                raise ArgumentError(name, f"{view.shape} {view.dtype}", f"must be {shape} {dtype}")
            if not view.writable:
                check_writable(name, view)
        y = results[0]
        check_aligned("out.y", y)
        row_stride("out.y", y)
        for name, view in zip(names[1:], results[1:], strict=True):
            check_contiguous(name, view)

    def bind(
        self,
        world: World,
        executable: Executable,
        instance: Instance[MoeDispatchGemmProblem],
        operands: Sequence[TensorView],
        results: Sequence[TensorView],
    ) -> Parameters:
        problem, plan = instance.problem, executable.plan
        x, ids, w, weights, expert_counts = operands
        y, offsets, source, *more = results
        row_weight = more.pop(0) if problem.weighted else None
        areas, start, tokens, row_bytes = plan.areas, executable.scratch_offset, x.shape[0], problem.row_bytes
        if tokens > problem.max_tokens:
            note_refused(world, more[0])
        offset = world.heap_offset(x.address, tokens * row_bytes) if tokens else 0
        key = OP_NAME, executable, w, y
        parameters = Parameters.from_buffer_copy(world.held.get(key) or hold(world, key, self._of_experts(world, executable, w, y)))
        memory = memoryview(parameters).cast("B")
        _ROUTING.pack_into(
            memory,
            Parameters.routing.offset + _ROUTING_AT,
            ids.address,
            0 if weights is None else weights.address,
            x.address,
            *(view.address for view in more),
            offsets.address,
            source.address,
            0 if row_weight is None else row_weight.address,
            0 if expert_counts is None else expert_counts.address,
            start + areas.records,
            start + areas.staged,
            start + areas.sending,
            start + areas.arrived,
            start + areas.tables,
            _STAGED if offset is None else offset,
            tokens,
            problem.max_tokens,
            problem.max_rows,
            problem.alignment,
            8 if ids.dtype == "int64" else 4,
            row_bytes,
            plan.put_rows,
            whole_lines(row_bytes),
        )
        return parameters

    def _of_experts(self, world: World, executable: Executable, w: TensorView, y: TensorView) -> Parameters:
        """What does not depend on the tokens of a rank."""
        plan: MoeDispatchGemmPlan = executable.plan
        problem = plan.problem
        slots_offset, slots, dtype, k = (
            executable.scratch_offset + plan.areas.slots,
            problem.blocks * SEGMENT_ROWS,
            problem.dtype,
            problem.k,
        )
        tensor_map, y_stride = world.backend.tensor_map, row_stride("out.y", y)
        columns = 2 * problem.n if problem.gated else problem.n
        _, _, row_major, stride = layout_of_experts("w", w, k, dtype)
        inner, outer = (columns, k) if row_major else (k, columns)
        box = BLOCK_K if row_major or problem.gated else plan.tile.block_n
        a = (world.heap_address + slots_offset, dtype, (k, slots, 1), (problem.slot_bytes, slots * problem.slot_bytes))
        plane = w.strides[0] if w.shape[0] > 1 else stride * outer
        maps = {
            "a_map": tensor_map(*a, (BLOCK_K, BLOCK_M, 1)),
            "a_short_map": tensor_map(*a, (BLOCK_K, SEGMENT_ROWS, 1)),
            "b_map": tensor_map(w.address, dtype, (inner, outer, problem.experts), (stride, plane), (64, box, 1)),
            "c_map": tensor_map(y.address, dtype, (problem.n, problem.max_rows, 1), (y_stride, problem.max_rows * y_stride), (64, 64, 1)),
        }
        return Parameters(
            fields=abi.Fields(*plan.fields),
            c=y.address,
            slots_offset=slots_offset,
            flag_offset=executable.flag_offset,
            c_row_bytes=y_stride,
            group_m=plan.group_m,
            clamp=problem.clamp,
            counted_alone=plan.counted_alone,
            **{name: abi.TensorMap.from_buffer_copy(raw) for name, raw in maps.items()},
        )


@functools.lru_cache(maxsize=256)
def _results(problem: MoeDispatchGemmProblem) -> list[ResultSpec]:
    """The arrays that a call makes, but for ``topk_ids``, which has a row per token."""
    nodes, most, topk = problem.topology.num_nodes, problem.max_tokens, problem.topk
    return [
        ResultSpec((problem.max_rows, problem.n), problem.dtype),
        ResultSpec((problem.experts + 1,), "int32"),
        ResultSpec((problem.max_rows, 3), "int32"),
        *([ResultSpec((problem.max_rows,), "float32")] if problem.weighted else []),
        ResultSpec((nodes, most, topk), "int32"),
        ResultSpec((nodes, most, topk), "int32"),
        ResultSpec((nodes, most), "int32"),
        ResultSpec((nodes, most), "int32"),
        ResultSpec((nodes, 2), "int32"),
    ]


OP = register(MoeDispatchGemm())
