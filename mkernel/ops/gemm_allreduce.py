"""``mk.gemm_allreduce``: from arrays to a launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from mkernel.errors import ArgumentError
from mkernel.ops.call import call
from mkernel.ops.op import Instance, register
from mkernel.ops.reduce import ReduceOp
from mkernel.planner.reduce import ALGORITHMS, ALLREDUCE, ReduceProblem

if TYPE_CHECKING:
    from mkernel.planner.split import Split
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["OP", "gemm_allreduce"]


def gemm_allreduce(
    a: Array,
    b: Array,
    *,
    world: World | None = None,
    out: Array | None = None,
    split: Split | None = None,
    stream: Any = None,
    partials: str = "output",
    algorithm: str | None = None,
) -> Array:
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
        ``"one_shot"``: everyone adds up what all ranks have sent; ``"two_shot"``: every tile has an owner that adds it up, and
        from which the others get it. None: by world, size, and the roles that ``split`` names.

    Returns
    -------
    c
        (M, N). Added in float32, in a fixed order of the ranks, and rounded once: bitwise the same on every rank and on every run.
        docs/architecture.md states the error.

    Notes
    -----
    Collective: every rank calls it, in the same order, with the same number of rows, which may be another in every call. Asynchronous on
    target cuda: it never waits for the device or for peers, unless its kernel is not loaded yet (the first call of a problem, where
    ``mk.plan`` has not prepared it), which blocks the host of every rank. On target cpu it returns when the result is there. Capturable in
    a CUDA graph once prepared. No buffer of the caller is in use by other ranks after the kernel has ended.

    Raises
    ------
    ArgumentError
        Shapes, dtypes, alignment, device or split are wrong; the heap is too small. Nothing was launched.
    MismatchError, TimeoutError, PeerLostError, TransportError
        On this or a later call: the ranks disagree, or one does not answer.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     a = np.ones((16, 64), ml_dtypes.bfloat16)  # this rank's columns of A
    ...     b = np.ones((64, 8), ml_dtypes.bfloat16)  # this rank's rows of B
    ...     c = mk.gemm_allreduce(a, b)
    ...     return c.shape, float(c[0, 0])
    >>> mk.launch(rank, ranks=2, target="cpu")
    [((16, 8), 128.0), ((16, 8), 128.0)]

    The algorithm: two-shot is a reduce-scatter by direct exchange, tile by tile, after which the node's other ranks pull each finished
    tile from its owner; across nodes each node sends one sum, and an owner sends the finished tile once per node
    (kernels_src/reduce, kernels_src/ops/gemm_allreduce.cuh). One-shot is direct exchange of everything (gemm_allreduce_one_shot.cuh).
    Either way up to 8 MiB of result inside a node of at most 8 ranks travel in packets, each word its own flag, and the owner, of 16 rows
    of a tile, sends the sum back (gemm_allreduce_packets.cuh).
    """
    result: Array = call(OP, (a, b), (partials, algorithm), world=world, out=out, split=split, stream=stream)
    return result


class GemmAllReduce(ReduceOp):
    """``mk.gemm_allreduce``."""

    name = ALLREDUCE
    gives = "its columns of A: (M, K/W); its rows of B: (K/W, N)"
    gets = "the sum of all products: (M, N), the same bits on every rank"
    result_rule = "(M, N)"
    bench = "mkernel.bench.cases.gemm_allreduce"
    options: ClassVar[Mapping[str, Any]] = {"partials": "output", "algorithm": None}

    def instance(
        self, world: World, *operands: TensorView, partials: Any = "output", algorithm: Any = None, **options: Any
    ) -> Instance[ReduceProblem]:
        a, b = operands
        if algorithm is not None and algorithm not in ALGORITHMS:
            raise ArgumentError("algorithm", algorithm, f"must be None or one of {', '.join(ALGORITHMS)}")
        return self.problem(world, a, b, partials, algorithm, **options)


OP = register(GemmAllReduce())
