"""Bad arguments raise before anything is launched and leave the world usable; ranks that disagree all get a MismatchError, soon."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from _pytest.mark import ParameterSet

import mkernel as mk
from mkernel.errors import ArgumentError, Error, MismatchError
from mkernel.planner.reduce import ALGORITHMS
from tests.ops.body import aligned, random, roles, topology

ROWS, K, N = 24, 64, 72
HOWS = ("allgather_gemm", "gemm_reduce_scatter", "one_shot", "two_shot")  # ops, and algorithms of gemm_allreduce


def ranks(fn: Any, world: str, *args: Any, **options: Any) -> list[Any]:
    shape = topology(world)
    defaults = {"heap_bytes": 8 << 20, "timeout": 20.0, "entry_timeout": 20.0}
    return mk.launch(fn, shape.size, shape.ranks_per_node, "cpu", args, **{**defaults, **options})


class Good:
    """Right operands of one op, and the right result of a call with them. ``how``: an op, or an algorithm of gemm_allreduce."""

    def __init__(self, world: Any, how: str = "allgather_gemm", n: int = N, k: int = K) -> None:
        self.world, self.how = world, how
        self.op, self.options = ("gemm_allreduce", {"algorithm": how}) if how in ALGORITHMS else (how, {})
        self.rows_a = ROWS * (world.size if how == "gemm_reduce_scatter" else 1)
        self.rows_c = ROWS * (world.size if how == "allgather_gemm" else 1)
        self.a, self.b = self._operands(world.rank, n, k)
        self.out: Any = None
        others = [self._operands(rank, n, k) for rank in range(world.size)]
        if how == "allgather_gemm":
            self.right = np.concatenate([a for a, _ in others]).astype(np.float32) @ self.b.astype(np.float32)
        else:
            whole = sum(a.astype(np.float32) @ b.astype(np.float32) for a, b in others)
            self.right = whole[world.rank * ROWS :][:ROWS] if how == "gemm_reduce_scatter" else whole

    def _operands(self, rank: int, n: int, k: int) -> tuple[Any, Any]:
        """Small integers: sums are exact."""
        a, b = (aligned(shape, "float16") for shape in ((self.rows_a, k), (k, n)))
        for i, array in enumerate((a, b)):
            array[...] = np.random.default_rng([rank, i]).integers(-2, 3, array.shape)
        return a, b

    def fused(self, a: Any, b: Any, **options: Any) -> Any:
        return getattr(mk, self.op)(a, b, **{**self.options, **options})

    def plan(self, a: Any, b: Any) -> Any:
        return mk.plan(self.op, a, b, **self.options)

    def call(self) -> None:
        out = self.out = self.empty()
        self.fused(self.a, self.b, world=self.world, out=out)
        assert (out == self.right).all()

    def empty(self, columns: int | None = None, dtype: str = "float16") -> Any:
        out = aligned((self.rows_c, self.b.shape[1] if columns is None else columns), dtype)
        out[...] = np.nan
        return out


def _shifted(array: Any) -> Any:
    """The same, at an address that is no multiple of 16."""
    memory = aligned((array.size + 8,), array.dtype.name)[1 : array.size + 1].reshape(array.shape)
    memory[...] = array
    return memory


# what is wrong: (the call, the argument that the error names, what it says)
Bad = dict[str, tuple[Callable[[Good], object], str, str]]
BAD: Bad = {
    "a of one dimension": (lambda g: g.fused(g.a[0], g.b), "a.ndim", "must be 2"),
    "a of three dimensions": (lambda g: g.fused(g.a[None], g.b), "a.ndim", "must be 2"),
    "b of one dimension": (lambda g: g.fused(g.a, g.b[0]), "b.ndim", "must be 2"),
    "a is no array": (lambda g: g.fused([[1.0] * K] * ROWS, g.b), "a", "neither DLPack nor an array interface"),
    "b is no array": (lambda g: g.fused(g.a, None), "b", "neither DLPack nor an array interface"),
    "a and b do not fit": (lambda g: g.fused(g.a[:, :56].copy(), g.b), "b.shape", r"\(K(/W)?, N\) with K(/W)? = a.shape\[1\] = 56"),
    "b is not transposed": (lambda g: g.fused(g.a, g.b.T), "b.shape", "this rank's (columns|rows)"),
    "float32": (lambda g: g.fused(g.a.astype(np.float32), g.b.astype(np.float32)), "a.dtype", "float32.*bfloat16.*float16"),
    "integers": (lambda g: g.fused(g.a.astype(np.int16), g.b), "a.dtype", "must be bfloat16"),
    "swapped bytes": (lambda g: g.fused(g.a.astype(">f2"), g.b), "a", "native"),
    "two dtypes": (lambda g: g.fused(g.a, random((K, N), "bfloat16", np.random.default_rng(0))), "b.dtype", "must be float16"),
    "K not a multiple of 8": (
        lambda g: g.fused(aligned((g.rows_a, 60), "float16"), aligned((60, N), "float16")),
        "K",
        "60.*multiple of 8.*pad",
    ),
    "N not a multiple of 8": (lambda g: g.fused(g.a, aligned((K, 76), "float16")), "N", "76.*multiple of 8.*pad"),
    "K of zero": (lambda g: g.fused(aligned((g.rows_a, 0), "float16"), aligned((0, N), "float16")), "K", "positive multiple of 8"),
    "N of zero": (lambda g: g.fused(g.a, aligned((K, 0), "float16")), "N", "positive multiple of 8"),
    "a not aligned": (lambda g: g.fused(_shifted(g.a), g.b), "a", "multiple of 16 bytes"),
    "b not aligned": (lambda g: g.fused(g.a, _shifted(g.b)), "b", "multiple of 16 bytes"),
    "out not aligned": (lambda g: g.fused(g.a, g.b, out=_shifted(g.empty())), "out", "multiple of 16 bytes"),
    "a transposed": (lambda g: g.fused(aligned((K, g.rows_a), "float16").T, g.b), "a.strides", "contiguous"),
    "every other column of b": (lambda g: g.fused(g.a, np.repeat(g.b, 2, 1)[:, ::2]), "b.strides", "row-major or the transpose view"),
    "rows of b unaligned": (lambda g: g.fused(g.a, aligned((K, N + 4), "float16")[:, :N]), "b.strides", "row-major or the transpose view"),
    "b upside down": (lambda g: g.fused(g.a, g.b[::-1]), "b.strides", "row-major or the transpose view"),
    "one row for all of b": (lambda g: g.fused(g.a, np.broadcast_to(g.b[0], (K, N))), "b.strides", "row-major or the transpose view"),
    "out too small": (lambda g: g.fused(g.a, g.b, out=g.empty()[:-1]), "out.shape", r"\(M(/W)?, N\) = \("),
    "out too wide": (lambda g: g.fused(g.a, g.b, out=g.empty(N + 8)), "out.shape", r"\(M(/W)?, N\) = \("),
    "out of three dimensions": (lambda g: g.fused(g.a, g.b, out=g.empty()[None]), "out.ndim", "must be 2"),
    "out of another dtype": (lambda g: g.fused(g.a, g.b, out=g.empty(dtype="bfloat16")), "out.dtype", "must be float16"),
    "out transposed": (lambda g: g.fused(g.a, g.b, out=aligned((N, g.rows_c), "float16").T), "out.strides", "contiguous"),
    "one row for all of out": (
        lambda g: g.fused(g.a, g.b, out=np.lib.stride_tricks.as_strided(g.empty(), strides=(0, 2))),
        "out.strides",
        "rows must not overlap",
    ),
    "rows of out unaligned": (lambda g: g.fused(g.a, g.b, out=g.empty(N + 4)[:, :N]), "out.strides", "multiple of 16 bytes"),
    "out is no array": (lambda g: g.fused(g.a, g.b, out="c"), "out", "neither DLPack nor an array interface"),
    "out read-only": (lambda g: g.fused(g.a, g.b, out=np.broadcast_to(g.empty(), (g.rows_c, N))), "out", "read-only"),
    "more SMs than there are": (lambda g: g.fused(g.a, g.b, split=mk.Split(compute=5)), "split", "asks for .* SMs, the device has 4"),
    "all SMs for others": (lambda g: g.fused(g.a, g.b, split=mk.Split(compute=0)), "split", "compute gets 0 of 4"),
    "a negative number": (lambda g: g.fused(g.a, g.b, split=mk.Split(compute=-1)), "split", "compute"),
    "half an SM": (lambda g: g.fused(g.a, g.b, split=mk.Split(compute=1.5)), "split", "number of SMs"),  # type: ignore[arg-type]
    "a list of SMs": (lambda g: g.fused(g.a, g.b, split=mk.Split(compute=[1])), "split", "number of SMs"),  # type: ignore[arg-type]
    "a tuple for a split": (lambda g: g.fused(g.a, g.b, split=(2, 1, 1)), "split", "mk.Split or None"),
    "a list for a split": (lambda g: g.fused(g.a, g.b, split=[2, 1, 1]), "split", "mk.Split or None"),
    "a stream": (lambda g: g.fused(g.a, g.b, stream=7), "stream", "target cpu has no streams"),
    "a stream, uncached": (lambda g: g.fused(g.a[:8], g.b, stream=7), "stream", "target cpu has no streams"),
    "an unknown op": (lambda g: mk.plan("allgather_gem", g.a, g.b), "op", "must be one of allgather_gemm"),
    "a plan of bad operands": (lambda g: g.plan(g.a, g.b[:8]), "b.shape", r"K(/W)? = a.shape\[1\]"),
    "a plan for a bad out": (lambda g: g.plan(g.a, g.b).run(g.a, g.b, out=g.b), "out.shape", r"\(M(/W)?, N\)"),
}
BAD_TO_GATHER: Bad = {
    "every other row of a": (lambda g: g.fused(np.repeat(g.a, 2, 0)[::2], g.b), "a.strides", "contiguous.*ascontiguousarray"),
    "rows of a apart": (lambda g: g.fused(aligned((g.rows_a, K + 8), "float16")[:, :K], g.b), "a.strides", "contiguous"),
}
BAD_TO_REDUCE: Bad = {
    "rows of a unaligned": (lambda g: g.fused(aligned((g.rows_a, K + 4), "float16")[:, :K], g.b), "a.strides", "multiple of 16 bytes"),
    "one row for all of a": (lambda g: g.fused(np.broadcast_to(g.a[0], g.a.shape), g.b), "a.strides", "rows must not overlap"),
    "unknown partials": (lambda g: g.fused(g.a, g.b, partials="float16"), "partials", "must be one of output, float32"),
    "no partials": (lambda g: g.fused(g.a, g.b, partials=None), "partials", "must be one of output, float32"),
    "a list of partials": (lambda g: g.fused(g.a, g.b, partials=["output"]), "partials", "must be one of output, float32"),
}
BAD_TO_SCATTER: Bad = {"M not a multiple of W": (lambda g: g.fused(g.a[:-1], g.b), "a.shape", r"M must be a multiple of the \d ranks.*pad")}
BAD_TO_ALL: Bad = {
    "unknown algorithm": (lambda g: g.fused(g.a, g.b, algorithm="ring"), "algorithm", "must be None or one of one_shot, two_shot"),
    "a list of algorithms": (lambda g: g.fused(g.a, g.b, algorithm=["one_shot"]), "algorithm", "must be None or one of one_shot"),
}
ROLES = ("intra_comm", "inter_send", "inter_reduce")


def _bad_splits(g: Good) -> Bad:
    """A role without CTAs that is needed, and one with a CTA that has nothing to do."""
    used = roles(g.world.topology, g.op, g.how if g.how in ALGORITHMS else None)

    def with_role(role: str, number: int) -> Callable[[Good], object]:
        return lambda g: g.fused(g.a, g.b, split=mk.Split(**{role: number}))

    # Inside a node an all-reduce of few values does without intra_comm, and allgather_gemm leaves it to computing CTAs.
    needed = [role for role in used if role != "intra_comm" or g.how not in ("two_shot", "allgather_gemm") or g.world.num_nodes > 1]
    starved: Bad = {f"{role} starved": (with_role(role, 0), "split", f"{role} is needed.*at least 1") for role in needed}
    idle: Bad = {f"{role} idle": (with_role(role, 1), "split", f"{role} has nothing to do") for role in ROLES if role not in used}
    return starved | idle


def _all_bad(world: Any, how: str) -> list[str]:
    good, wrong = Good(world, how), []
    good.call()
    bad = BAD | _bad_splits(good) | (BAD_TO_GATHER if how == "allgather_gemm" else BAD_TO_REDUCE)
    bad |= (BAD_TO_SCATTER if how == "gemm_reduce_scatter" and world.size > 1 else {}) | (BAD_TO_ALL if how in ALGORITHMS else {})
    for what, (call, argument, text) in bad.items():
        if argument == "K" and how != "allgather_gemm":
            argument = "K/W"
        before = world.call_number
        try:
            with pytest.raises(ArgumentError, match=text) as caught:
                call(good)
            assert caught.value.argument == argument, caught.value
            assert str(caught.value).startswith(f"{argument} = ")
            assert world.call_number == before, "it counted as a call"
        except (pytest.fail.Exception, Exception) as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
        good.call()
    world.barrier()
    return wrong


@pytest.mark.parametrize("world", ["1x1", "1x2", "2x2"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.drawn(3)
def test_bad_arguments(world: str, how: str) -> None:
    assert ranks(_all_bad, world, how) == [[]] * topology(world).size


def _one_rank_bad(world: Any, how: str) -> None:
    """While the other ranks already wait for it inside the call."""
    g = Good(world, how)
    for bad in (lambda: g.fused(g.a[0], g.b), lambda: g.fused(g.a, g.b, stream=7), lambda: g.fused(g.a, g.b, split=[])):
        for _ in range(2):
            if world.rank == world.size - 1:
                with pytest.raises(ArgumentError):
                    bad()
            g.call()
        world.barrier()


@pytest.mark.parametrize("world", ["1x2", "2x2"])
@pytest.mark.parametrize("how", HOWS)
def test_a_bad_argument_on_one_rank_disturbs_nobody(world: str, how: str) -> None:
    ranks(_one_rank_bad, world, how)


_LARGE = 1 << 16  # rows of a; never multiplied


def _heap_too_small(world: Any, how: str) -> tuple[str, int]:
    good, large = Good(world, how), aligned((_LARGE, K), "float16")
    good.call()
    kept = world.zeros((1024,), "uint8")
    with pytest.raises(ArgumentError, match=r"heap_bytes = \d+: too small.*mk\.init\(heap_bytes=(\d+)\)") as caught:
        good.fused(large, good.b)
    good.call()
    with pytest.raises(ArgumentError, match="heap_bytes"):  # also the second time
        good.fused(large, good.b)
    good.call()
    assert not kept.any()
    del kept
    return str(caught.value), int(caught.value.remedy.split("=")[1].rstrip(")"))


@pytest.mark.parametrize("world", ["1x2", "2x2"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.drawn(2)
def test_a_heap_too_small_says_how_large_it_must_be(world: str, how: str) -> None:
    enough = {needed for _, needed in ranks(_heap_too_small, world, how, heap_bytes=1 << 20)}
    (needed,) = enough

    def fits(w: Any) -> int:
        w.empty((1024,), "uint8")
        return int(Good(w, how).plan(aligned((_LARGE, K), "float16"), aligned((K, N), "float16")).workspace_bytes)

    assert needed > max(1 << 20, *ranks(fits, world, heap_bytes=needed))


def test_a_closed_world_says_so() -> None:
    kept = ranks(lambda world: (world, Good(world)), "1x1")
    world, good = kept[0]
    with pytest.raises(Error, match=r"closed.*mk\.init"):
        mk.allgather_gemm(good.a, good.b, world=world)
    with pytest.raises(ArgumentError, match=r"mk\.init"):
        mk.allgather_gemm(good.a, good.b)


# ---- ranks that disagree


def _disagree(
    world: Any, how: str, calls: Callable[[Good, Good], tuple[Callable[[], object], Callable[[], object]]], plan_first: bool
) -> str:
    """What a rank gets to hear: the last one does something else than the others."""
    good, other = Good(world, how), Good(world, how, 8)
    try:
        if plan_first:
            for g in (good, other):
                g.call()
                g.fused(g.a, g.b, split=mk.Split(compute=1))  # of the last of these the host may return later than others go on
            good.out = other.out = None
        usual, different = calls(good, other)
        (different if world.rank == world.size - 1 else usual)()
        world.barrier()
    except MismatchError as error:
        for g in (good, other):
            if "entered call 5" in str(error) and g.out is not None:
                assert np.isnan(g.out).all(), "the kernel has written to the result although the ranks disagree"
        return str(error)
    except Error as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


DISAGREEMENTS: dict[str, Callable[[Good, Good], Any]] = {
    "N": lambda good, other: (good.call, other.call),
    "M": lambda good, other: (good.call, lambda: good.fused(good.a[:8], good.b)),
    "split": lambda good, other: (good.call, lambda: good.fused(good.a, good.b, split=mk.Split(compute=1))),
    "dtype": lambda good, other: (
        good.call,
        lambda: good.fused(*(random(array.shape, "bfloat16", np.random.default_rng(0)) for array in (good.a, good.b))),
    ),
    "layout": lambda good, other: (good.call, lambda: good.fused(good.a, np.asfortranarray(good.b))),
    "barrier": lambda good, other: (good.call, good.world.barrier),
    "call at a barrier": lambda good, other: (good.world.barrier, good.call),
    "array": lambda good, other: (good.call, lambda: good.world.empty((8,), "float16")),
    "plan": lambda good, other: (good.call, lambda: other.plan(other.a, other.b)),
    "one call more": lambda good, other: (good.call, lambda: (good.call(), good.call())),
    "op": lambda good, other: (good.call, lambda: _another_op(good)),
}
TO_REDUCE: dict[str, Callable[[Good, Good], Any]] = {
    "partials": lambda good, other: (good.call, lambda: good.fused(good.a, good.b, partials="float32")),
    "algorithm": lambda good, other: (good.call, lambda: good.fused(good.a, good.b, algorithm=_other_algorithm(good))),
}
DISAGREEMENTS |= TO_REDUCE


def _another_op(good: Good) -> object:
    return mk.gemm_allreduce(good.a, good.b) if good.op != "gemm_allreduce" else mk.gemm_reduce_scatter(good.a, good.b)


def _other_algorithm(good: Good) -> str:
    return next(algorithm for algorithm in ALGORITHMS if algorithm != good.how)


_SOON = {  # of the reductions, in `make test`
    ("op", "gemm_reduce_scatter"),
    ("split", "gemm_reduce_scatter"),
    ("partials", "gemm_reduce_scatter"),
    ("M", "two_shot"),
    ("algorithm", "two_shot"),
    ("partials", "one_shot"),
    ("N", "one_shot"),
}


def _disagreements() -> Iterator[ParameterSet]:
    for what, how in itertools.product(DISAGREEMENTS, HOWS):
        if (how == "allgather_gemm" and what in TO_REDUCE) or (what == "algorithm" and how not in ALGORITHMS):
            continue
        soon = how == "allgather_gemm" or (what, how) in _SOON
        yield pytest.param(what, how, marks=() if soon else pytest.mark.slow)


@pytest.mark.parametrize("plan_first", [False, True], ids=["new", "cached"])
@pytest.mark.parametrize(("what", "how"), list(_disagreements()))
@pytest.mark.drawn(7)
def test_ranks_that_disagree_all_hear_of_it(what: str, how: str, plan_first: bool) -> None:
    # Four roles on four SMs: there is one split only.
    for world in ("1x2",) if (what, how) == ("split", "two_shot") else ("1x2", "2x2"):
        for rank, text in enumerate(ranks(_disagree, world, how, DISAGREEMENTS[what], plan_first)):
            assert re.match(r"the ranks disagree: |rank \d, \w+ CTA \d: rank \d entered call \d with another plan: ", text), (
                world,
                rank,
                text,
            )
            named = re.findall(r"(?:allgather_gemm|gemm_\w+): .*? [\d/]+ SMs|an? array .*? float16|a barrier", text)
            assert len(set(named)) == 2, f"{text}: does not name two different operations"
