"""``mk.moe_combine``: from arrays to a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.ops.arguments import check_aligned, check_extents, check_matrix, check_multiple, check_writable, row_stride
from mkernel.ops.call import call, hold
from mkernel.ops.moe import Routing, check_routing, check_row_bits, check_tokens, is_refused
from mkernel.ops.op import Instance, Op, ResultSpec, register
from mkernel.ops.parameters import place_of
from mkernel.planner.gemm import shift_of
from mkernel.planner.moe_combine import ITEM, PARAMETER_BYTES, CombineLayout, MoeCombinePlan, MoeCombineProblem, make_plan
from mkernel.planner.moe_combine import OP as OP_NAME
from mkernel.runtime.arrays.views import TensorView

if TYPE_CHECKING:
    from mkernel.planner.split import Split
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["OP", "Combining", "RoutingViews", "bind_combining", "check_combined", "moe_combine", "problem_of"]

_MOST_TOPK = 16


class RoutingViews(NamedTuple):
    """A ``Routing`` as the ops see its arrays."""

    topk_ids: TensorView
    rows: TensorView
    experts: TensorView
    sums: TensorView
    listed: TensorView
    counts: TensorView
    expert_offsets: TensorView


assert RoutingViews._fields == Routing._fields


class Combining(ctypes.Structure):
    """``Combining`` of ``kernels_src/moe/combine.cuh``."""

    _fields_ = [
        ("out", ctypes.c_uint64),
        ("add", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("row_of", ctypes.c_uint64),
        ("expert_of", ctypes.c_uint64),
        ("place_of", ctypes.c_uint64),
        ("listed", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("sum_offset", ctypes.c_uint64),
        ("arrived_offset", ctypes.c_uint64),
        ("weights_offset", ctypes.c_uint64),
        ("send_weights_offset", ctypes.c_uint64),
        ("tokens", ctypes.c_uint32),
        ("max_tokens", ctypes.c_uint32),
        ("max_rows", ctypes.c_uint32),
        ("row_bytes", ctypes.c_uint32),
        ("out_stride", ctypes.c_uint32),
        ("add_stride", ctypes.c_uint32),
        ("first_flag", ctypes.c_uint32),
        ("group_shift", ctypes.c_uint32),
        ("chunk_shift", ctypes.c_uint32),
        ("stage_weights", ctypes.c_uint32),
    ]


class Parameters(ctypes.Structure):
    """``Parameters`` of ``kernels_src/ops/moe_combine.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("combining", Combining),
        ("rows", ctypes.c_uint64),
        ("expert_offsets", ctypes.c_uint64),
        ("told_offset", ctypes.c_uint64),
        ("staged_offset", ctypes.c_uint64),
        ("rows_offset", ctypes.c_uint64),
        ("flag_offset", ctypes.c_uint64),
        ("experts", ctypes.c_uint32),
        ("row_chunk_shift", ctypes.c_uint32),
        ("stage_rows", ctypes.c_uint32),
        ("intra_comm", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 14),
    ]


assert ctypes.sizeof(Parameters) == PARAMETER_BYTES
_AT, _VALUES = place_of(Combining, "out", "stage_weights")
_OWN_AT, _OWN_VALUES = place_of(Parameters, "rows", "intra_comm")


def moe_combine(
    rows: Array,
    routing: Routing,
    *,
    topk_weights: Array | None = None,
    add: Array | None = None,
    out: Array | None = None,
    world: World | None = None,
    split: Split | None = None,
    stream: Any = None,
) -> Array:
    """Bring the rows of the experts back: every token gets the weighted sum of the rows that its experts made of it, in one kernel.

    T: tokens of this rank; k: choices of a token; W: ranks; E: experts.

    Parameters
    ----------
    rows
        (max_rows, H) bfloat16 or float16, contiguous: a row for each token that came to an expert of this rank, as ``d.y`` of
        ``mk.moe_dispatch_gemm``. H is a multiple of 8. Rows of no expert are not used, and need not be there: max_rows, the same on all
        ranks, may be less than that of the dispatch. An array of ``world.empty`` is read where it is; any other is first copied, if other
        ranks of the node need it.
    routing
        ``d.routing`` of the dispatch, or what is equal to it. Its arrays may change between calls; wrong ones are not noticed.
    topk_weights
        (T, k) float32, contiguous: what each row is multiplied by. None: 1. On all ranks, or on none.
    add
        (T, H), the dtype of ``rows``, rows contiguous: added to the sums. None: nothing, also on some ranks only.
    out
        (T, H), the dtype of ``rows``, rows contiguous, no byte shared with an operand; returned as given. None: a new array of the
        library of ``rows``, in memory of ``stream``.
    split
        SMs that combine (``intra_comm``) and that send to other nodes (``inter_send``); None, or a role left at None: mkernel's choice.
    stream
        As in ``mk.allgather_gemm``.

    Returns
    -------
    y
        (T, H). Of a token that no expert has: ``add``, or 0. The sum is made in float32 in fixed order: ``add``, the rows of this node in
        order of k, then the sums of the other nodes in order of the nodes, each summed in the same way and rounded once; the result is
        rounded once. Bitwise the same on every run.

    Notes
    -----
    Collective: every rank calls it, in the same order. T may differ by rank and be 0; H, k, ``max_rows``, and ``max_tokens`` and E/W of the
    routing are the same on all ranks. Asynchronous on target cuda, and capturable once prepared, as ``mk.allgather_gemm``. No buffer of the
    caller is in use by other ranks after the kernel has ended.

    Raises
    ------
    ArgumentError
        Shapes, dtypes, alignment, device or split are wrong; the heap is too small. Nothing was launched.
    MismatchError, TimeoutError, PeerLostError, TransportError
        On this or a later call: the ranks disagree, rows that came are not there, or a rank does not answer.

    Examples
    --------
    A token of one rank, whose only expert is on the other one; its row there is row 0, and the other rank has no tokens.

    >>> import numpy as np, mkernel as mk
    >>> from mkernel.tools.routing import reference_routing
    >>> def rank(world):
    ...     ids = [np.array([[1]], np.int32), np.empty((0, 1), np.int32)]  # (T, k) of each rank: expert 1 is on rank 1
    ...     known = reference_routing(ids, world.topology, num_experts=2, max_tokens=1, max_rows=2)[world.rank]
    ...     routing = mk.Routing(*(getattr(known, name) for name in mk.Routing._fields))  # in a program: of mk.moe_dispatch_gemm
    ...     rows = np.full((2, 8), 3, np.float16)
    ...     y = mk.moe_combine(rows, routing, topk_weights=np.full((len(ids[world.rank]), 1), 0.5, np.float32))
    ...     return y.tolist()
    >>> mk.launch(rank, ranks=2, target="cpu")
    [[[1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5]], []]

    The algorithm: each rank reads the rows of its node where they are and adds them up for its own tokens. Across nodes, one sum per token
    and node travels: the rank on the rail of the token's home makes it (kernels_src/moe/combine.cuh).
    """
    if type(routing) is not Routing:
        check_routing(routing)
    operands = (rows, *routing, topk_weights, add)
    result: Array = call(OP, operands, (), world=world, out=out, split=split, stream=stream)
    return result


# ---- what all ops that combine have in common
def problem_of(
    world: World, dtype: str, columns: int, max_rows: int, routing: Sequence[TensorView], weights: TensorView | None
) -> MoeCombineProblem:
    """The problem of rows of this dtype and number, and of these arrays of a ``Routing``. Raises ArgumentError where they do not fit."""
    views = RoutingViews(*routing)
    tokens, experts, max_tokens, topk = _check_routing(world, views)
    if weights is not None:
        if weights.dtype != "float32":
            raise ArgumentError("topk_weights.dtype", weights.dtype, "must be float32")
        if weights.shape != (tokens, topk):
            raise ArgumentError("topk_weights.shape", weights.shape, f"must be (T, k) = {(tokens, topk)}")
        _check_contiguous("topk_weights", weights, 4)
    check_multiple("H", columns)
    if max_rows < 1:
        raise ArgumentError("max_rows", max_rows, "must be positive")
    check_extents(columns * ITEM, max_tokens * topk)
    key = OP_NAME, columns, dtype, topk, experts, max_tokens, max_rows, weights is not None
    known: MoeCombineProblem | None = world.held.get(key)
    if known is None:
        check_row_bits(world.topology, max_rows)
        by_node = world.options.batch_invariant and world.topology.num_nodes > 1  # on one node nothing else is done
        known = hold(world, key, MoeCombineProblem(world.topology, *key[1:], by_node))
    return known


def _check_routing(world: World, views: RoutingViews) -> tuple[int, int, int, int]:
    """(T, E/W, max_tokens, k) of a routing whose arrays fit each other and the world."""
    if len(views.rows.shape) != 3 or views.rows.shape[0] != world.num_nodes:
        raise ArgumentError("routing.rows.shape", views.rows.shape, f"must be ({world.num_nodes} nodes, max_tokens, k)")
    nodes, max_tokens, topk = views.rows.shape
    if max_tokens < 1 or not 1 <= topk <= _MOST_TOPK:
        raise ArgumentError("routing.rows.shape", views.rows.shape, f"max_tokens must be positive, and k 1 to {_MOST_TOPK}")
    tokens = views.topk_ids.shape[0] if views.topk_ids.shape else 0
    if tokens > max_tokens:
        _check_refused(world, views.topk_ids, max_tokens)
    experts = max(1, sum(views.expert_offsets.shape[:1]) - 1)
    of_tokens, of_choices = (nodes, max_tokens), (nodes, max_tokens, topk)
    shapes = (tokens, topk), of_choices, of_choices, of_tokens, of_tokens, (nodes, 2), (experts + 1,)
    for name, view, shape in zip(RoutingViews._fields, views, shapes, strict=True):
        if view.shape != shape or view.dtype != "int32":
            rule = f"must be {shape} int32"
            raise ArgumentError(f"routing.{name}", f"{view.shape} {view.dtype}", rule, "pass routing as the dispatch has made it")
        _check_contiguous(f"routing.{name}", view, 4)
    return tokens, experts, max_tokens, topk


def _check_refused(world: World, ids: TensorView, max_tokens: int) -> None:
    """Raise the error of a routing with too many tokens, unless its dispatch is already refused for them.

    The dispatch reports the same fault on every rank. An error of this rank alone would end the world, so the call is launched, and the
    device skips it.
    """
    if is_refused(world, ids):
        return
    world.synchronize()  # these ids may be a copy of what a refused dispatch was to write: then its error is the one to raise
    raise ArgumentError("routing.topk_ids.shape", ids.shape, f"T must be at most max_tokens = {max_tokens}")


def check_combined(problem: MoeCombineProblem, tokens: int, name: str, view: TensorView) -> None:
    """An array with a row per token: ``add`` or ``out``."""
    check_tokens(name, view, (tokens, problem.columns), problem.dtype)


def _check_contiguous(name: str, view: TensorView, item: int) -> None:
    shape, strides, expected = view.shape, view.strides, item
    if 0 in shape:
        return
    for i in range(len(shape) - 1, -1, -1):
        if strides[i] != expected and shape[i] > 1:
            raise ArgumentError(f"{name}.strides", strides, "must be contiguous", f"use xp.ascontiguousarray({name})")
        expected *= shape[i]
    if view.address % item:
        raise ArgumentError(name, f"array at {view.address:#x}", f"must start at a multiple of {item} bytes")


def bind_combining(
    world: World,
    executable: Executable,
    layout: CombineLayout,
    routing: Sequence[TensorView],
    weights: TensorView | None,
    add: TensorView | None,
    out: TensorView,
) -> tuple[int, ...]:
    """The values of ``Combining``, in its order."""
    views, problem, scratch = RoutingViews(*routing), layout.problem, executable.scratch_offset
    tokens = min(views.topk_ids.shape[0], problem.max_tokens)  # with more of them the call is skipped, and nothing must lie beyond arrays
    at = {name: scratch + offset for name, offset in layout.offsets.items()}
    travel = weights is not None and tokens > 0 and world.num_nodes > 1
    on_heap = world.heap_offset(weights.address, tokens * problem.topk * 4) if weights is not None and travel else None
    return (
        out.address,
        add.address if add is not None and tokens else 0,
        weights.address if weights is not None else 0,
        *(view.address for view in (views.rows, views.experts, views.sums, views.listed, views.counts)),
        at["sum"],
        at["arrived"],
        at["weights"],
        executable.staging_offset if on_heap is None else on_heap,
        tokens,
        problem.max_tokens,
        problem.max_rows,
        problem.row_bytes,
        row_stride("out", out),
        0 if add is None else row_stride("add", add),
        layout.first_flag,
        shift_of(layout.group),
        shift_of(layout.chunk),
        travel and on_heap is None,
    )


class MoeCombine(Op[MoeCombineProblem]):
    """``mk.moe_combine``."""

    name = OP_NAME
    gives = "the rows of its experts: (max_rows, H); where each token's are"
    gets = "the weighted sum of its tokens' rows: (T, H)"
    operands = ("rows", *(f"routing.{name}" for name in Routing._fields), "topk_weights", "add")
    optional: ClassVar[frozenset[str]] = frozenset({"topk_weights", "add"})
    bench = "mkernel.bench.cases.moe_combine"
    by_rows = False
    tunable = ("intra_comm", "inter_send")
    parameters = Parameters

    # ---- problem and plan
    def instance(self, world: World, *operands: TensorView, **options: Any) -> Instance[MoeCombineProblem]:
        rows, *routing, weights, add = operands
        max_rows, columns = check_matrix("rows", rows)
        problem = problem_of(world, rows.dtype, columns, max_rows, routing, weights)
        if row_stride("rows", rows) != problem.row_bytes:
            raise ArgumentError("rows.strides", rows.strides, "rows must be contiguous", "use xp.ascontiguousarray(rows)")
        check_aligned("rows", rows)
        if add is not None:
            check_combined(problem, routing[0].shape[0], "add", add)
        return Instance(problem, 0)

    def make_plan(
        self, problem: MoeCombineProblem, rows: int, sm_count: int, split: Split | None = None, *, specialize: str | None = None
    ) -> MoeCombinePlan:
        return make_plan(problem, rows, sm_count, split)

    # ---- one call
    def results(self, instance: Instance[MoeCombineProblem], operands: Sequence[TensorView]) -> Sequence[ResultSpec]:
        return [ResultSpec((operands[1].shape[0], instance.problem.columns), instance.problem.dtype)]

    def check_results(self, instance: Instance[MoeCombineProblem], operands: Sequence[TensorView], results: Sequence[TensorView]) -> None:
        (out,), (_, ids, *_) = results, operands
        check_combined(instance.problem, ids.shape[0], "out", out)
        check_writable("out", out)

    def bind(
        self,
        world: World,
        executable: Executable,
        instance: Instance[MoeCombineProblem],
        operands: Sequence[TensorView],
        results: Sequence[TensorView],
    ) -> Parameters:
        (rows, *routing, weights, add), (out,), problem = operands, results, instance.problem
        plan: MoeCombinePlan = executable.plan
        scratch, shared = executable.scratch_offset, world.ranks_per_node > 1
        offset = world.heap_offset(rows.address, problem.max_rows * problem.row_bytes) if shared else None
        staged = scratch + plan.staged_offset
        parameters = Parameters()
        memory = memoryview(parameters).cast("B")
        values = bind_combining(world, executable, plan.combining, routing, weights, add, out)
        _VALUES.pack_into(memory, Parameters.combining.offset + _AT, *values)
        _OWN_VALUES.pack_into(
            memory,
            _OWN_AT,
            rows.address,
            RoutingViews(*routing).expert_offsets.address,
            scratch,
            staged,
            staged if offset is None else offset,
            executable.flag_offset,
            problem.experts,
            shift_of(plan.row_chunk),
            shared and offset is None,
            plan.roles[0],
        )
        return parameters


OP = register(MoeCombine())
