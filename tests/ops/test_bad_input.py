"""Bad arguments raise before anything is launched and leave the world usable; ranks that disagree all get a MismatchError, soon."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.cli.check import worst_over_bound
from mkernel.errors import ArgumentError, Error, MismatchError
from tests.ops.body import aligned, random, topology

ROWS, K, N = 24, 64, 72


def ranks(fn: Any, world: str, *args: Any, **options: Any) -> list[Any]:
    shape = topology(world)
    defaults = {"heap_bytes": 8 << 20, "timeout": 20.0, "entry_timeout": 20.0}
    return mk.launch(fn, shape.size, shape.ranks_per_node, "cpu", args, **{**defaults, **options})


class Good:
    """Right operands, and the right result of a call with them."""

    def __init__(self, world: Any, n: int = N, k: int = K) -> None:
        self.world = world
        self.a, self.b = (random(shape, "float16", np.random.default_rng([world.rank, i])) for i, shape in enumerate(((ROWS, k), (k, n))))
        self.out: Any = None
        self.whole = np.concatenate([random((ROWS, k), "float16", np.random.default_rng([rank, 0])) for rank in range(world.size)])

    def call(self) -> None:
        out = self.out = self.empty()
        mk.allgather_gemm(self.a, self.b, world=self.world, out=out)
        assert worst_over_bound(out, self.whole, self.b, "float16") <= 1.0

    def empty(self, columns: int | None = None, dtype: str = "float16") -> Any:
        out = aligned((ROWS * self.world.size, self.b.shape[1] if columns is None else columns), dtype)
        out[...] = np.nan
        return out


def _shifted(array: Any) -> Any:
    """The same, at an address that is no multiple of 16."""
    memory = aligned((array.size + 8,), array.dtype.name)[1 : array.size + 1].reshape(array.shape)
    memory[...] = array
    return memory


def _gemm(a: Any, b: Any, **options: Any) -> Any:
    return mk.allgather_gemm(a, b, **options)


# what is wrong: (the call, the argument that the error names, what it says)
BAD: dict[str, tuple[Callable[[Good], object], str, str]] = {
    "a of one dimension": (lambda g: _gemm(g.a[0], g.b), "a.ndim", "must be 2"),
    "a of three dimensions": (lambda g: _gemm(g.a[None], g.b), "a.ndim", "must be 2"),
    "b of one dimension": (lambda g: _gemm(g.a, g.b[0]), "b.ndim", "must be 2"),
    "a is no array": (lambda g: _gemm([[1.0] * K] * ROWS, g.b), "array", "neither DLPack nor an array interface"),
    "b is no array": (lambda g: _gemm(g.a, None), "array", "neither DLPack nor an array interface"),
    "a and b do not fit": (lambda g: _gemm(g.a[:, :56].copy(), g.b), "b.shape", r"\(K, N\) with K = a.shape\[1\] = 56"),
    "b is not transposed": (lambda g: _gemm(g.a, g.b.T), "b.shape", "this rank's columns"),
    "float32": (lambda g: _gemm(g.a.astype(np.float32), g.b.astype(np.float32)), "a.dtype", "float32.*bfloat16.*float16"),
    "integers": (lambda g: _gemm(g.a.astype(np.int16), g.b), "a.dtype", "must be bfloat16"),
    "swapped bytes": (lambda g: _gemm(g.a.astype(">f2"), g.b), "array", "native"),
    "two dtypes": (lambda g: _gemm(g.a, random((K, N), "bfloat16", np.random.default_rng(0))), "b.dtype", "must be float16"),
    "K not a multiple of 8": (lambda g: _gemm(aligned((ROWS, 60), "float16"), aligned((60, N), "float16")), "K", "60.*multiple of 8.*pad"),
    "N not a multiple of 8": (lambda g: _gemm(g.a, aligned((K, 76), "float16")), "N", "76.*multiple of 8.*pad"),
    "K of zero": (lambda g: _gemm(aligned((ROWS, 0), "float16"), aligned((0, N), "float16")), "K", "positive multiple of 8"),
    "N of zero": (lambda g: _gemm(g.a, aligned((K, 0), "float16")), "N", "positive multiple of 8"),
    "a not aligned": (lambda g: _gemm(_shifted(g.a), g.b), "a", "multiple of 16 bytes"),
    "b not aligned": (lambda g: _gemm(g.a, _shifted(g.b)), "b", "multiple of 16 bytes"),
    "out not aligned": (lambda g: _gemm(g.a, g.b, out=_shifted(g.empty())), "out", "multiple of 16 bytes"),
    "every other row of a": (lambda g: _gemm(np.repeat(g.a, 2, 0)[::2], g.b), "a.strides", "contiguous.*ascontiguousarray"),
    "rows of a apart": (lambda g: _gemm(aligned((ROWS, K + 8), "float16")[:, :K], g.b), "a.strides", "contiguous"),
    "a transposed": (lambda g: _gemm(aligned((K, ROWS), "float16").T, g.b), "a.strides", "contiguous"),
    "every other column of b": (lambda g: _gemm(g.a, np.repeat(g.b, 2, 1)[:, ::2]), "b.strides", "row-major or the transpose view"),
    "rows of b unaligned": (lambda g: _gemm(g.a, aligned((K, N + 4), "float16")[:, :N]), "b.strides", "row-major or the transpose view"),
    "b upside down": (lambda g: _gemm(g.a, g.b[::-1]), "b.strides", "row-major or the transpose view"),
    "one row for all of b": (lambda g: _gemm(g.a, np.broadcast_to(g.b[0], (K, N))), "b.strides", "row-major or the transpose view"),
    "out too small": (lambda g: _gemm(g.a, g.b, out=g.empty()[:-1]), "out.shape", r"\(M, N\) = \("),
    "out too wide": (lambda g: _gemm(g.a, g.b, out=g.empty(N + 8)), "out.shape", r"\(M, N\) = \("),
    "out of three dimensions": (lambda g: _gemm(g.a, g.b, out=g.empty()[None]), "out.ndim", "must be 2"),
    "out of another dtype": (lambda g: _gemm(g.a, g.b, out=g.empty(dtype="bfloat16")), "out.dtype", "must be float16"),
    "out transposed": (lambda g: _gemm(g.a, g.b, out=aligned((N, ROWS * g.world.size), "float16").T), "out.strides", "contiguous"),
    "one row for all of out": (
        lambda g: _gemm(g.a, g.b, out=np.lib.stride_tricks.as_strided(g.empty(), strides=(0, 2))),
        "out.strides",
        "rows must not overlap",
    ),
    "rows of out unaligned": (lambda g: _gemm(g.a, g.b, out=g.empty(N + 4)[:, :N]), "out.strides", "multiple of 16 bytes"),
    "out is no array": (lambda g: _gemm(g.a, g.b, out="c"), "array", "neither DLPack nor an array interface"),
    "out read-only": (lambda g: _gemm(g.a, g.b, out=np.broadcast_to(g.empty(), (ROWS * g.world.size, N))), "out", "read-only"),
    "more SMs than there are": (lambda g: _gemm(g.a, g.b, split=mk.Split(compute=5)), "split", "asks for .* SMs, the device has 4"),
    "all SMs for others": (lambda g: _gemm(g.a, g.b, split=mk.Split(compute=0)), "split", "compute gets 0 of 4"),
    "a negative number": (lambda g: _gemm(g.a, g.b, split=mk.Split(compute=-1)), "split", "compute"),
    "a role without work": (lambda g: _gemm(g.a, g.b, split=mk.Split(inter_reduce=1)), "split", "inter_reduce has nothing to do"),
    "half an SM": (lambda g: _gemm(g.a, g.b, split=mk.Split(compute=1.5)), "split", "number of SMs"),  # type: ignore[arg-type]
    "a list of SMs": (lambda g: _gemm(g.a, g.b, split=mk.Split(compute=[1])), "split", "number of SMs"),  # type: ignore[arg-type]
    "a tuple for a split": (lambda g: _gemm(g.a, g.b, split=(2, 1, 1)), "split", "mk.Split or None"),
    "a list for a split": (lambda g: _gemm(g.a, g.b, split=[2, 1, 1]), "split", "mk.Split or None"),
    "a stream": (lambda g: _gemm(g.a, g.b, stream=7), "stream", "target cpu has no streams"),
    "a stream, uncached": (lambda g: _gemm(g.a[:8], g.b, stream=7), "stream", "target cpu has no streams"),
    "an unknown op": (lambda g: mk.plan("allgather_gem", g.a, g.b), "op", "must be one of allgather_gemm"),
    "a plan of bad operands": (lambda g: mk.plan("allgather_gemm", g.a, g.b[:8]), "b.shape", r"K = a.shape\[1\]"),
    "a plan for a bad out": (lambda g: mk.plan("allgather_gemm", g.a, g.b).run(g.a, g.b, out=g.b), "out.shape", r"\(M, N\)"),
}
# Of worlds that have the role.
BAD_OF_NODE = {"starved": (lambda g: _gemm(g.a, g.b, split=mk.Split(intra_comm=0)), "split", "intra_comm is needed.*at least 1")}
BAD_OF_NODES = {"cut off": (lambda g: _gemm(g.a, g.b, split=mk.Split(inter_send=0)), "split", "inter_send is needed.*at least 1")}


def _all_bad(world: Any) -> list[str]:
    good, wrong = Good(world), []
    good.call()
    bad = BAD | (BAD_OF_NODE if world.ranks_per_node > 1 else {}) | (BAD_OF_NODES if world.num_nodes > 1 else {})
    for what, (call, argument, text) in bad.items():
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
def test_bad_arguments(world: str) -> None:
    assert ranks(_all_bad, world) == [[]] * topology(world).size


def _one_rank_bad(world: Any) -> None:
    """While the other ranks already wait for it inside the call."""
    good = Good(world)
    for bad in (lambda: _gemm(good.a[0], good.b), lambda: _gemm(good.a, good.b, stream=7), lambda: _gemm(good.a, good.b, split=[])):
        for _ in range(2):
            if world.rank == world.size - 1:
                with pytest.raises(ArgumentError):
                    bad()
            good.call()
        world.barrier()


@pytest.mark.parametrize("world", ["1x2", "2x2"])
def test_a_bad_argument_on_one_rank_disturbs_nobody(world: str) -> None:
    ranks(_one_rank_bad, world)


def _heap_too_small(world: Any) -> tuple[str, int]:
    good = Good(world)
    good.call()
    kept = world.zeros((1024,), "uint8")
    with pytest.raises(ArgumentError, match=r"heap_bytes = \d+: too small.*mk\.init\(heap_bytes=(\d+)\)") as caught:
        mk.allgather_gemm(aligned((4096, K), "float16"), good.b)
    good.call()
    with pytest.raises(ArgumentError, match="heap_bytes"):  # also the second time
        mk.allgather_gemm(aligned((4096, K), "float16"), good.b)
    good.call()
    assert not kept.any()
    del kept
    return str(caught.value), int(caught.value.remedy.split("=")[1].rstrip(")"))


@pytest.mark.parametrize("world", ["1x2", "2x2"])
def test_a_heap_too_small_says_how_large_it_must_be(world: str) -> None:
    enough = {needed for _, needed in ranks(_heap_too_small, world, heap_bytes=1 << 20)}
    (needed,) = enough

    def fits(w: Any) -> None:
        w.empty((1024,), "uint8")
        mk.allgather_gemm(np.ones((4096, K), np.float16), Good(w).b)

    assert needed > topology(world).size * 4096 * K * 2
    ranks(fits, world, heap_bytes=needed)


def test_a_closed_world_says_so() -> None:
    kept = ranks(lambda world: (world, Good(world)), "1x1")
    world, good = kept[0]
    with pytest.raises(Error, match=r"closed.*mk\.init"):
        mk.allgather_gemm(good.a, good.b, world=world)
    with pytest.raises(ArgumentError, match=r"mk\.init"):
        mk.allgather_gemm(good.a, good.b)


# ---- ranks that disagree


def _disagree(
    world: Any, calls: Callable[[Good, Good], tuple[Callable[[], object], Callable[[], object]]], plan_first: bool
) -> tuple[str, float]:
    """The last rank does something else than the others. Comes back with what it got to hear, and when."""
    good, other = Good(world), Good(world, 8)
    if plan_first:
        for g in (good, other):
            g.call()
            mk.allgather_gemm(g.a, g.b, split=mk.Split(compute=1))
        good.out = other.out = None
    usual, different = calls(good, other)
    begin = time.monotonic()
    try:
        (different if world.rank == world.size - 1 else usual)()
        world.barrier()
    except MismatchError as error:
        for g in (good, other):
            if "entered call 5" in str(error) and g.out is not None:
                assert np.isnan(g.out).all(), "the kernel has written to the result although the ranks disagree"
        return str(error), time.monotonic() - begin
    except Error as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing", time.monotonic() - begin


DISAGREEMENTS: dict[str, Callable[[Good, Good], Any]] = {
    "N": lambda good, other: (good.call, other.call),
    "M": lambda good, other: (good.call, lambda: mk.allgather_gemm(good.a[:8], good.b)),
    "split": lambda good, other: (good.call, lambda: mk.allgather_gemm(good.a, good.b, split=mk.Split(compute=1))),
    "dtype": lambda good, other: (
        good.call,
        lambda: mk.allgather_gemm(
            random((ROWS, K), "bfloat16", np.random.default_rng(0)), random((K, N), "bfloat16", np.random.default_rng(1))
        ),
    ),
    "layout": lambda good, other: (good.call, lambda: mk.allgather_gemm(good.a, np.asfortranarray(good.b))),
    "barrier": lambda good, other: (good.call, good.world.barrier),
    "call at a barrier": lambda good, other: (good.world.barrier, good.call),
    "array": lambda good, other: (good.call, lambda: good.world.empty((8,), "float16")),
    "plan": lambda good, other: (good.call, lambda: mk.plan("allgather_gemm", other.a, other.b)),
    "one call more": lambda good, other: (good.call, lambda: (good.call(), good.call())),
}


@pytest.mark.parametrize("plan_first", [False, True], ids=["new", "cached"])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_all_hear_of_it(what: str, plan_first: bool) -> None:
    for world in ("1x2", "2x2"):
        for rank, (text, seconds) in enumerate(ranks(_disagree, world, DISAGREEMENTS[what], plan_first)):
            assert re.match(r"the ranks disagree: |rank \d, \w+ CTA \d: rank \d entered call \d with another plan: ", text), (
                world,
                rank,
                text,
            )
            named = re.findall(r"allgather_gemm: .*? [\d/]+ SMs|an? array .*? float16|a barrier", text)
            assert len(set(named)) == 2, f"{text}: does not name two different operations"
            assert seconds < 10.0
