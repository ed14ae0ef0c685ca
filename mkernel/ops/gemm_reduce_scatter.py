"""``mk.gemm_reduce_scatter``: from arrays to a launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from mkernel.errors import ArgumentError
from mkernel.ops.call import call
from mkernel.ops.op import Instance, instance_of, register
from mkernel.ops.reduce import ReduceOp
from mkernel.planner.reduce import REDUCE_SCATTER, ReduceProblem

if TYPE_CHECKING:
    from mkernel.planner.split import Split
    from mkernel.runtime.arrays.views import TensorView
    from mkernel.runtime.world import World
    from mkernel.typing import Array

__all__ = ["OP", "gemm_reduce_scatter"]


def gemm_reduce_scatter(
    a: Array,
    b: Array,
    *,
    world: World | None = None,
    out: Array | None = None,
    split: Split | None = None,
    stream: Any = None,
    partials: str = "output",
) -> Array:
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
    ...     a = np.ones((32, 64), ml_dtypes.bfloat16)  # this rank's columns of A
    ...     b = np.ones((64, 8), ml_dtypes.bfloat16)  # this rank's rows of B
    ...     c = mk.gemm_reduce_scatter(a, b)
    ...     return c.shape, float(c[0, 0])
    >>> mk.launch(rank, ranks=2, target="cpu")
    [((16, 8), 128.0), ((16, 8), 128.0)]

    The algorithm: a reduce-scatter by direct exchange, tile by tile. A rank computes the tiles of others first and stores each straight
    into its owner's heap; the owner adds them to its own product, a group of tiles later. Across nodes each node sends one sum
    (kernels_src/reduce). Up to 4 MiB of products inside a node of at most 8 ranks travel in packets, each word its own flag
    (gemm_reduce_scatter_packets.cuh).
    """
    result: Array = call(OP, (a, b), (partials,), world=world, out=out, split=split, stream=stream)
    return result


class GemmReduceScatter(ReduceOp):
    """``mk.gemm_reduce_scatter``."""

    name = REDUCE_SCATTER
    gives = "its columns of A: (M, K/W); its rows of B: (K/W, N)"
    gets = "its rows of the sum of all products: (M/W, N)"
    result_rule = "(M/W, N)"
    bench = "mkernel.bench.cases.gemm_reduce_scatter"
    options: ClassVar[Mapping[str, Any]] = {"partials": "output"}
    tilings = ReduceOp.tilings | {"span"}

    def instance(self, world: World, *operands: TensorView, partials: Any = "output", **options: Any) -> Instance[ReduceProblem]:
        (a, b), size = operands, world.size
        problem, m = self.problem(world, a, b, partials, **options)
        if m % size:
            raise ArgumentError("a.shape", a.shape, f"M must be a multiple of the {size} ranks", "pad a with rows of zeros")
        return instance_of((problem, m // size))

    def plan_rows(self, rows: int, ranks: int) -> int:
        return -(-rows // ranks)


OP = register(GemmReduceScatter())
