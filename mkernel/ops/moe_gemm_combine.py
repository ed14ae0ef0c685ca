"""``mk.moe_gemm_combine``: from arrays to a launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.ops.arguments import check_aligned, check_matrix, check_multiple, check_writable, row_stride
from mkernel.ops.call import call, hold
from mkernel.ops.moe import Routing, check_routing, layout_of_experts
from mkernel.ops.moe_combine import Combining, bind_combining, check_combined, problem_of
from mkernel.ops.op import Instance, Op, ResultSpec, register
from mkernel.ops.parameters import place_of
from mkernel.planner.choose_moe import plan_moe_gemm_combine
from mkernel.planner.gemm import BLOCK_K, BLOCK_M
from mkernel.planner.moe_gemm_combine import OP as OP_NAME
from mkernel.planner.moe_gemm_combine import PARAMETER_BYTES, MoeGemmCombinePlan, MoeGemmCombineProblem

if TYPE_CHECKING:
    from mkernel.planner.machine import Machine
    from mkernel.planner.split import Split
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.prepared import Executable
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["OP", "moe_gemm_combine"]

_SHORT_ROWS = 64  # of a short tile


class Parameters(ctypes.Structure):
    """``Parameters`` of ``kernels_src/ops/moe_gemm_combine.cuh``."""

    _fields_ = [
        ("world", abi.World),
        ("fields", abi.Fields),
        ("combining", Combining),
        ("c", ctypes.c_uint64),
        ("expert_offsets", ctypes.c_uint64),
        ("counters_offset", ctypes.c_uint64),
        ("rows_offset", ctypes.c_uint64),
        ("flag_offset", ctypes.c_uint64),
        ("fetched_offset", ctypes.c_uint64),
        ("c_row_bytes", ctypes.c_uint32),
        ("group_m", ctypes.c_uint32),
        ("windows", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 7),
        ("a_map", abi.TensorMap),
        ("a_short_map", abi.TensorMap),
        ("b_map", abi.TensorMap),
        ("c_map", abi.TensorMap),
    ]


assert ctypes.sizeof(Parameters) == PARAMETER_BYTES
_COMBINING_AT, _COMBINING = place_of(Combining, "out", "stage_weights")


def moe_gemm_combine(
    a: Array,
    w: Array,
    routing: Routing,
    *,
    topk_weights: Array | None = None,
    add: Array | None = None,
    out: Array | None = None,
    world: World | None = None,
    split: Split | None = None,
    stream: Any = None,
) -> Array:
    """Multiply the rows of each expert by the expert's weights, and bring the products back: the weighted sum of a token's, in one kernel.

    The dual of ``mk.moe_dispatch_gemm``, and its backward pass. T: tokens of this rank; k: choices of a token; W: ranks; E: experts.

    Parameters
    ----------
    a
        (max_rows, F) bfloat16 or float16, rows contiguous and any multiple of 16 bytes apart: the rows of this rank's experts, as ``d.y``
        of ``mk.moe_dispatch_gemm``. F is a multiple of 8. Rows of no expert are not used, and need not be there: max_rows, the same on all
        ranks, may be less than that of the dispatch.
    w
        (E/W, F, H), the dtype of ``a``: the weights of this rank's experts, each row-major, or all transpose views of (H, F). H is a
        multiple of 8.
    routing, topk_weights, add, out
        As in ``mk.moe_combine``.
    split
        SMs per role: those of ``intra_comm`` combine, and in large calls first copy rows; they never multiply. None, or a role left at
        None: mkernel's choice.
    stream
        As in ``mk.allgather_gemm``.

    Returns
    -------
    y
        (T, H): ``mk.moe_combine`` of the products, each of which is accumulated in float32 and rounded once to the dtype of ``a``. Bitwise
        the same on every run.

    Notes
    -----
    Collective, asynchronous and capturable as ``mk.moe_combine``, with the same sizes that may differ by rank.

    Raises
    ------
    ArgumentError
        Shapes, dtypes, alignment, device or split are wrong; the heap is too small. Nothing was launched.
    MismatchError, TimeoutError, PeerLostError, TransportError
        On this or a later call: the ranks disagree, or one does not answer.

    Examples
    --------
    A token of one rank, whose only expert is on the other one; its row there is row 0, and the other rank has no tokens.

    >>> import numpy as np, mkernel as mk
    >>> from mkernel.tools.routing import reference_routing
    >>> def rank(world):
    ...     ids = [np.array([[1]], np.int32), np.empty((0, 1), np.int32)]  # (T, k) of each rank: expert 1 is on rank 1
    ...     known = reference_routing(ids, world.topology, num_experts=2, max_tokens=1, max_rows=2)[world.rank]
    ...     routing = mk.Routing(*(getattr(known, name) for name in mk.Routing._fields))  # in a program: of mk.moe_dispatch_gemm
    ...     a, w = np.full((2, 8), world.rank, np.float16), np.ones((1, 8, 8), np.float16)
    ...     y = mk.moe_gemm_combine(a, w, routing)
    ...     return y[:, 0].tolist()
    >>> mk.launch(rank, ranks=2, target="cpu")
    [[8.0], []]

    The algorithm: compute CTAs multiply expert by expert into this rank's heap, and who finishes the last tile of an expert tells the
    node that its rows are there. CTAs of ``intra_comm`` combine from the start and never multiply; compute CTAs join in when there are no
    more tiles. A token's rows are waited for by expert. In large calls ``intra_comm`` first copies rows of earlier experts from the node
    mates, window by window of experts, to where they are summed up later (kernels_src/ops/moe_gemm_combine.cuh).
    """
    if type(routing) is not Routing:
        check_routing(routing)
    operands = (a, w, *routing, topk_weights, add)
    result: Array = call(OP, operands, (), world=world, out=out, split=split, stream=stream)
    return result


class MoeGemmCombine(Op[MoeGemmCombineProblem]):
    """``mk.moe_gemm_combine``."""

    name = OP_NAME
    gives = "the rows of its experts: (max_rows, F); their weights: (E/W, F, H); where each token's rows are"
    gets = "the weighted sum of the products of its tokens' rows: (T, H)"
    operands = ("a", "w", *(f"routing.{name}" for name in Routing._fields), "topk_weights", "add")
    optional: ClassVar[frozenset[str]] = frozenset({"topk_weights", "add"})
    by_rows = False
    modelled = True
    bench = "mkernel.bench.cases.moe_gemm_combine"
    tunable = ("intra_comm", "inter_send")
    parameters = Parameters

    def tile(self, plan: Any) -> str:
        return f"{BLOCK_M}x{plan.tile.block_n}"

    # ---- problem and plan
    def instance(self, world: World, *operands: Any, **options: Any) -> Instance[MoeGemmCombineProblem]:
        a, w, *routing, weights, add = operands
        max_rows, k = check_matrix("a", a)
        check_multiple("F", k)
        experts, columns, row_major, _ = layout_of_experts("w", w, k, a.dtype)
        combined = problem_of(world, a.dtype, columns, max_rows, routing, weights)
        if experts != combined.experts:
            raise ArgumentError("w.shape", w.shape, f"must have the {combined.experts} experts of the routing")
        row_stride("a", a)
        check_aligned("a", a)
        if add is not None:
            check_combined(combined, routing[0].shape[0], "add", add)
        key = OP_NAME, combined, k, row_major
        return Instance(world.held.get(key) or hold(world, key, MoeGemmCombineProblem(*key[1:])), 0)

    def make_plan(
        self,
        problem: MoeGemmCombineProblem,
        rows: int,
        sm_count: int,
        split: Split | None = None,
        *,
        specialize: str | None = None,
        machine: Machine | None = None,
    ) -> MoeGemmCombinePlan:
        return plan_moe_gemm_combine(problem, sm_count, split, specialize=specialize, machine=machine)

    # ---- one call
    def results(self, instance: Instance[MoeGemmCombineProblem], operands: Sequence[TensorView]) -> Sequence[ResultSpec]:
        return [ResultSpec((operands[2].shape[0], instance.problem.n), instance.problem.dtype)]

    def check_results(
        self, instance: Instance[MoeGemmCombineProblem], operands: Sequence[TensorView], results: Sequence[TensorView]
    ) -> None:
        (out,), (_, _, ids, *_) = results, operands
        check_combined(instance.problem.combined, ids.shape[0], "out", out)
        check_writable("out", out)

    def bind(
        self,
        world: World,
        executable: Executable,
        instance: Instance[MoeGemmCombineProblem],
        operands: Sequence[TensorView],
        results: Sequence[TensorView],
    ) -> Parameters:
        (a, w, *routing, weights, add), (out,) = operands, results
        plan: MoeGemmCombinePlan = executable.plan
        key = OP_NAME, executable, a, w
        parameters = Parameters.from_buffer_copy(world.held.get(key) or hold(world, key, self._of_experts(world, executable, a, w)))
        memory = memoryview(parameters).cast("B")
        combining = bind_combining(world, executable, plan.combining, routing, weights, add, out)
        _COMBINING.pack_into(memory, Parameters.combining.offset + _COMBINING_AT, *combining)
        parameters.expert_offsets = routing[-1].address
        return parameters

    def _of_experts(self, world: World, executable: Executable, a: TensorView, w: TensorView) -> Parameters:
        """What does not depend on the tokens of a rank."""
        plan: MoeGemmCombinePlan = executable.plan
        problem, scratch = plan.problem, executable.scratch_offset
        rows, n, k, dtype = problem.combined.max_rows, problem.n, problem.k, problem.dtype
        products = scratch + plan.rows_offset
        _, _, row_major, stride = layout_of_experts("w", w, k, dtype)
        inner, outer, box = (n, k, BLOCK_K) if row_major else (k, n, plan.tile.block_n)
        plane = w.strides[0] if w.shape[0] > 1 else stride * outer
        tensor_map, a_stride, c_stride = world.backend.tensor_map, row_stride("a", a), plan.pitch
        a_is = (a.address, dtype, (k, rows, 1), (a_stride, rows * a_stride))
        c_at = world.heap_address + products
        maps = {
            "a_map": tensor_map(*a_is, (BLOCK_K, BLOCK_M, 1)),
            "a_short_map": tensor_map(*a_is, (BLOCK_K, _SHORT_ROWS, 1)),
            "b_map": tensor_map(w.address, dtype, (inner, outer, w.shape[0]), (stride, plane), (64, box, 1)),
            "c_map": tensor_map(c_at, dtype, (n, rows, 1), (c_stride, rows * c_stride), (64, 64, 1)),
        }
        return Parameters(
            fields=abi.Fields(*plan.fields),
            c=c_at,
            counters_offset=scratch,
            rows_offset=products,
            flag_offset=executable.flag_offset,
            fetched_offset=scratch + plan.fetched_offset,
            windows=plan.windows,
            c_row_bytes=c_stride,
            group_m=plan.group_m,
            **{name: abi.TensorMap.from_buffer_copy(raw) for name, raw in maps.items()},
        )


OP = register(MoeGemmCombine())
