"""``mk.gemm_allreduce``: from arrays to a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mkernel.errors import ArgumentError
from mkernel.ops import reduce
from mkernel.ops.call import matmul_call
from mkernel.plan.reduce import ALGORITHMS, ALLREDUCE, ReduceProblem, choose_algorithm, make_plan

if TYPE_CHECKING:
    from mkernel.plan.split import Split
    from mkernel.runtime.device import TensorView
    from mkernel.runtime.world import World

__all__ = ["gemm_allreduce", "make_plan", "problem_of"]


def gemm_allreduce(
    a: Any,
    b: Any,
    *,
    world: World | None = None,
    out: Any = None,
    split: Split | None = None,
    stream: Any = None,
    partials: str = "output",
    algorithm: str | None = None,
) -> Any:
    """Multiply and add up over all ranks: ``c = sum over ranks of a @ b``, the same bits on every rank, in one kernel.

    Parameters
    ----------
    a
        (M, K/W) bfloat16 or float16, rows contiguous and any multiple of 16 bytes apart: this rank's columns of A. M is any number, also 0;
        few rows (decoding) are fast.
    b
        (K/W, N), the dtype of ``a``: this rank's rows of B, row-major or the transpose view of a (N, K/W) array. K/W and N are multiples
        of 8.
    out
        (M, N), the dtype of ``a``, rows contiguous, no byte shared with ``a`` or ``b``; returned as given. None: a new array of
        the library of ``a`` (torch or CuPy; NumPy on target cpu), in memory of ``stream``. CuPy needs it in a capture.
    split
        SMs per role (``mk.Split``). None, or a role left at None: what ``mk.tune`` found, else mkernel's choice.
    stream
        Anything with ``__cuda_stream__``. None: the current stream of the library of ``a``. Calls of a world run in call order on
        whatever streams; docs/streams.md states what else is ordered.
    partials
        What the ranks' contributions travel as: ``"output"``, rounded once to the dtype of ``a``, or ``"float32"``, exact, twice the
        bytes.
    algorithm
        ``"one_shot"``: everyone sends to everyone and adds up everything; ``"two_shot"``: every tile has an owner that adds it up, and
        from which the others get it. None: by world and size.

    Returns
    -------
    c
        (M, N). Added in float32, in a fixed order of the ranks, and rounded once: bitwise the same on every rank and on every run.
        docs/architecture.md states the error.

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

    The algorithm: two-shot is a reduce-scatter by direct exchange, tile by tile, after which the node's other ranks pull each finished
    tile from its owner; across nodes each node sends one sum, and an owner sends the finished tile once per node
    (kernels_src/reduce.cuh, gemm_allreduce.cuh). One-shot is direct exchange of everything (gemm_allreduce_one_shot.cuh).
    Either way up to 8 MiB of result inside a node of at most 8 ranks travel in packets, each word its own flag, and the owner, of 16 rows
    of a tile, sends the sum back (gemm_allreduce_packets.cuh).
    """
    return matmul_call(ALLREDUCE, a, b, (partials, algorithm), world, out, split, stream, problem_of, reduce.bind)


def problem_of(world: World, a: TensorView, b: TensorView, partials: Any = "output", algorithm: Any = None) -> ReduceProblem:
    """What these operands ask for."""
    m, n, k, row_major = reduce.check_operands(a, b)
    if algorithm is None:
        algorithm = choose_algorithm(world.topology, m, n)
    elif algorithm not in ALGORITHMS:
        raise ArgumentError("algorithm", algorithm, f"must be None or one of {', '.join(ALGORITHMS)}")
    return ReduceProblem(ALLREDUCE, world.topology, m, n, k, a.dtype, row_major, reduce.check_partials(partials), algorithm)
