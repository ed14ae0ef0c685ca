"""``mk.gemm_reduce_scatter``: from arrays to a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mkernel.errors import ArgumentError
from mkernel.ops import reduce
from mkernel.ops.call import matmul_call
from mkernel.plan.reduce import REDUCE_SCATTER, ReduceProblem, make_plan

if TYPE_CHECKING:
    from mkernel.plan.split import Split
    from mkernel.runtime.device import TensorView
    from mkernel.runtime.world import World

__all__ = ["gemm_reduce_scatter", "make_plan", "problem_of"]


def gemm_reduce_scatter(
    a: Any,
    b: Any,
    *,
    world: World | None = None,
    out: Any = None,
    split: Split | None = None,
    stream: Any = None,
    partials: str = "output",
) -> Any:
    """Multiply, add up over all ranks, and keep this rank's rows: ``c = (sum over ranks of a @ b)[rank's rows]``, in one kernel.

    Parameters
    ----------
    a
        (M, K/W) bfloat16 or float16, rows contiguous and any multiple of 16 bytes apart: this rank's columns of A. M is a multiple of the
        number of ranks W, and may be 0.
    b
        (K/W, N), the dtype of ``a``: this rank's rows of B, row-major or the transpose view of a (N, K/W) array. K/W and N are multiples
        of 8.
    out
        (M/W, N), the dtype of ``a``, rows contiguous, no byte shared with ``a`` or ``b``; returned as given. None: a new array of
        the library of ``a`` (torch or CuPy; NumPy on target cpu), in memory of ``stream``. CuPy needs it in a capture.
    split
        SMs per role (``mk.Split``). None, or a role left at None: what ``mk.tune`` found, else mkernel's choice.
    stream
        Anything with ``__cuda_stream__``. None: the current stream of the library of ``a``. Calls of a world run in call order on
        whatever streams; docs/streams.md states what else is ordered.
    partials
        What the ranks' contributions travel as: ``"output"``, rounded once to the dtype of ``a``, or ``"float32"``, exact, twice the
        bytes.

    Returns
    -------
    c
        (M/W, N), rows ``rank * M/W`` and on of the sum. Added in float32, in a fixed order of the ranks, and rounded once: bitwise the
        same on every run. docs/architecture.md states the error.

    Notes
    -----
    Collective: every rank calls it, in the same order. Asynchronous on target cuda (it never waits for the host or for peers, except on
    the first use of a plan, which compiles); on target cpu it returns when the result is there. Capturable in a CUDA graph once planned
    (``mk.plan``). No buffer of the caller is in use by other ranks after the kernel has ended.

    Raises
    ------
    ArgumentError
        Shapes, dtypes, alignment, device or split are wrong; the heap is too small. Nothing was launched.
    MismatchError, TimeoutError, PeerLostError, TransportError
        On this or a later call: the ranks disagree, or one does not answer.

    The algorithm: a reduce-scatter by direct exchange, tile by tile. A rank computes the tiles of others first and stores each straight
    into its owner's heap; the owner adds them to its own product, a group of tiles later. Across nodes each node sends one sum
    (kernels_src/reduce.cuh).
    """
    return matmul_call(REDUCE_SCATTER, a, b, (partials,), world, out, split, stream, problem_of, reduce.bind)


def problem_of(world: World, a: TensorView, b: TensorView, partials: Any = "output") -> ReduceProblem:
    """What these operands ask for."""
    m, n, k, row_major = reduce.check_operands(a, b)
    if m % world.size:
        raise ArgumentError("a.shape", a.shape, f"M must be a multiple of the {world.size} ranks", "pad a with rows of zeros")
    return ReduceProblem(REDUCE_SCATTER, world.topology, m // world.size, n, k, a.dtype, row_major, reduce.check_partials(partials))
