"""Drawn calls of attention and of the MoE ops, on either target: sets of inputs of the same shapes, and every element of their results.

A ``Family`` is what GEMM calls of one shape are to other tests: its calls differ in values, in routing, in lengths of sequences, so that
the arrays of one may take the contents of another, as between the replays of a graph. Every rank draws the same family.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import numpy as np

import mkernel as mk
from mkernel.planner import moe_combine, moe_dispatch_gemm, ring_attention
from mkernel.planner.moe import most_rows
from mkernel.tools.routing import RankRouting, reference_routing
from tests.ops import combine_body, moe_body, ring_body, varlen_body
from tests.ops.layer_body import Layer
from tests.ops.moe_body import DTYPES, ROUTINGS

__all__ = [
    "FAMILIES",
    "SIZES",
    "Attention",
    "Family",
    "Packed",
    "Ring",
    "Routed",
    "Size",
    "draw",
    "flat",
    "in_pieces",
    "like",
    "to_device",
    "to_host",
    "words",
]


@dataclasses.dataclass(frozen=True)
class Size:
    """The most that is drawn. ``scores``: of a rank, about; ``tries``: so many sizes of attention are drawn, the largest counts."""

    tokens: int
    columns: int
    topk: int
    scores: int
    tries: int = 1


SIZES = {"cuda": Size(300, 1040, 4, 1 << 24), "cpu": Size(40, 160, 4, 1 << 16), "sanitizer": Size(40, 160, 4, 1 << 18)}


@contextlib.contextmanager
def in_pieces(target: str) -> Iterator[None]:
    """What is planned within travels in many pieces: small puts, small chunks, rings of one or two slots."""
    put, chunk, fewest = (64 << 10, 128 << 10, 2) if target == "cuda" else (256, 1, 1)
    combine = moe_combine.Scale(put_bytes=put, copy_bytes=put, window_rows=0)
    ring = ring_attention.Scale(chunk_bytes=chunk, window_bytes=1, fewest=fewest)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(moe_dispatch_gemm, "PUT_BYTES", put))
        stack.enter_context(mock.patch.object(moe_combine, "SCALE", combine))
        stack.enter_context(mock.patch.object(ring_attention, "SCALE", ring))
        yield


# ---- arrays and what is made of them
def words(array: Any) -> Any:
    """Its elements as unsigned integers."""
    return array.view(np.dtype(f"uint{8 * array.dtype.itemsize}"))


def to_device(xp: Any, array: Any) -> Any:
    """A copy for ``xp``, rows as far from each other as the host's."""
    if not array.size:
        return xp.empty(array.shape, array.dtype)
    if array.flags.c_contiguous:
        return xp.array(words(array)).view(array.dtype)  # CuPy copies no bfloat16
    whole = array.base
    assert whole.flags.c_contiguous
    assert (whole.ctypes.data, whole.dtype) == (array.ctypes.data, array.dtype)
    return xp.lib.stride_tricks.as_strided(to_device(xp, whole), array.shape, array.strides)


def to_host(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array
    return words(array).get().view(array.dtype) if array.size else np.empty(array.shape, array.dtype)


def like(results: Any, make: Callable[[Any], Any], known: dict[int, Any] | None = None) -> Any:
    """Results of the same structure; an array that is there twice is made once. None stays None."""
    known = {} if known is None else known
    if isinstance(results, tuple):
        parts = [like(part, make, known) for part in results]
        return type(results)(*parts) if hasattr(results, "_fields") else tuple(parts)
    if results is None:
        return None
    if id(results) not in known:
        known[id(results)] = make(results)
    return known[id(results)]


def flat(results: Any) -> list[Any]:
    """The arrays of results, each once."""
    found: list[Any] = []
    like(results, found.append)
    return found


class Family(abc.ABC):
    """Calls of one problem on one rank, by number."""

    op: ClassVar[str]

    def __init__(self, world: Any) -> None:
        self.world, self.xp = world, world.xp

    @abc.abstractmethod
    def host(self, number: int) -> list[Any]:
        """Operands of this rank."""

    @abc.abstractmethod
    def call(self, arrays: list[Any], out: Any = None) -> Any:
        """One call, with operands on the device."""

    @abc.abstractmethod
    def wrong(self, number: int, results: Any) -> list[str]:
        """What is wrong with this rank's results, which lie on the host."""

    def defined(self, number: int, results: Any) -> list[Any]:
        """Those parts of results that must be the same whenever this call is made."""
        return flat(results)

    def arrays(self, number: int) -> list[Any]:
        return [to_device(self.xp, array) for array in self.host(number)]

    def found(self, number: int, results: Any) -> list[str]:
        """What is wrong with results on the device, which is idle."""
        title = f"rank {self.world.rank}, {self}, call {number}"
        return [f"{title}: {text}" for text in self.wrong(number, like(results, to_host))]


# ---- attention
class Attention(Family):
    def __init__(self, world: Any, rng: np.random.Generator, size: Size, kernel: tuple[int, bool, str, str] | None = None) -> None:
        super().__init__(world)
        d, causal, layout, dtype = kernel or draw_kernel(rng)
        self.model, self.seed = ring_body.draw_model(rng, d, causal, layout, dtype), int(rng.integers(1 << 30))
        self.options = {"causal": causal, "scale": self.model.scale, "layout": layout, "world": world}


def draw_kernel(rng: np.random.Generator) -> tuple[int, bool, str, str]:
    """D, causal, layout, dtype."""
    return int(rng.choice([64, 128])), bool(rng.integers(2)), str(rng.choice(["contiguous", "zigzag"])), str(rng.choice(list(DTYPES)))


class Ring(Attention):
    op = "ring_attention"

    def __init__(self, world: Any, rng: np.random.Generator, size: Size, kernel: tuple[int, bool, str, str] | None = None) -> None:
        super().__init__(world, rng, size, kernel)
        drawn = [ring_body.draw_sizes(rng, self.model, world.size, size.scores) for _ in range(size.tries)]
        self.sizes = max(drawn, key=math.prod)

    def __str__(self) -> str:
        return f"ring_attention of B {self.sizes[0]}, {self.sizes[1]} rows, {self.model}"

    def host(self, number: int) -> list[Any]:
        return list(ring_body.inputs(self.model, self.seed, self.world.rank, number, *self.sizes))

    def call(self, arrays: list[Any], out: Any = None) -> Any:
        return mk.ring_attention(*arrays, out=out, **self.options)

    def wrong(self, number: int, results: Any) -> list[str]:
        ranks = range(self.world.size)
        gathered = [ring_body.inputs(self.model, self.seed, rank, number, *self.sizes) for rank in ranks]
        return ring_body.errors(self.model, len(ranks), self.world.rank, gathered, *results)


class Packed(Attention):
    op = "ring_attention_varlen"

    def __init__(self, world: Any, rng: np.random.Generator, size: Size, kernel: tuple[int, bool, str, str] | None = None) -> None:
        super().__init__(world, rng, size, kernel)
        drawn = [varlen_body.draw_packed(rng, self.model, world.size, size.scores) for _ in range(size.tries)]
        self.first = max(drawn, key=lambda packed: sum(packed.lengths))

    def __str__(self) -> str:
        return f"ring_attention_varlen of {self.first}, {self.model}"

    def packed(self, number: int) -> varlen_body.Packed:
        """As many sequences in as many rows, in another order, some of them shorter."""
        if number == 0:
            return self.first
        rng, parts = np.random.default_rng([self.seed, number, 1]), 2 if self.model.layout == "zigzag" else 1
        rows = self.first.rows(self.world.size, parts)
        lengths = [int(length * rng.choice([0, 0.3, 0.9, 1, 1, 1])) for length in rng.permutation(self.first.lengths)]
        other = varlen_body.Packed(tuple(lengths))
        return other._replace(spare=rows - other.rows(self.world.size, parts))

    def host(self, number: int) -> list[Any]:
        packed = self.packed(number)
        whole = varlen_body.whole(self.model, self.seed, number, packed)
        return [*varlen_body.inputs(self.model, whole, packed, self.world.rank, self.world.size), np.array(packed.ends(), np.int32)]

    def call(self, arrays: list[Any], out: Any = None) -> Any:
        return mk.ring_attention_varlen(*arrays, out=out, **self.options)

    def wrong(self, number: int, results: Any) -> list[str]:
        packed = self.packed(number)
        whole = varlen_body.whole(self.model, self.seed, number, packed)
        return varlen_body.errors(self.model, whole, packed, self.world.rank, self.world.size, *results)


# ---- mixture of experts
class Moe(Family):
    """``tokens``: T of each rank, the same in every call."""

    def __init__(self, world: Any, rng: np.random.Generator, size: Size) -> None:
        super().__init__(world)
        drawn = moe_body.draw_model(rng, world.size)
        h, f = (8 * int(rng.integers(1, size.columns // 8 + 1)) for _ in range(2))
        tokens = int(rng.integers(1, size.tokens + 1))
        self.model = dataclasses.replace(drawn, h=h, f=f, topk=min(drawn.topk, size.topk), max_tokens=tokens)
        self.seed, self.id_type = int(rng.integers(1 << 30)), rng.choice([np.int32, np.int64])
        self.tokens = [int(rng.integers(0, tokens + 1)) * int(rng.integers(4) > 0) for _ in range(world.size)]
        self.tokens[int(rng.integers(world.size))] = tokens
        self.kinds = ("uniform", *rng.permutation(ROUTINGS[1:]))

    def __str__(self) -> str:
        return f"{self.op} of {self.tokens} tokens, {self.model}"

    def ids(self, number: int) -> list[Any]:
        """(T, k) of every rank."""
        rng = np.random.default_rng([self.seed, number, 3])
        found = moe_body.draw_ids(rng, self.model, self.world.size, self.kinds[number % len(self.kinds)], self.tokens)
        return [ids.astype(self.id_type) for ids in found]

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a family lives as long as its check
    def known(self, number: int) -> list[RankRouting]:
        """What every rank knows of the routing."""
        model, topology = self.model, self.world.topology
        return reference_routing(
            self.ids(number), topology, model.experts * self.world.size, model.max_tokens, self.max_rows, model.alignment
        )

    @property
    def max_rows(self) -> int:
        model = self.model
        return most_rows(self.world.size, model.max_tokens, model.topk, model.experts, model.alignment)

    @functools.lru_cache(maxsize=32)  # noqa: B019 - a family lives as long as its check
    def tokens_of(self, number: int, rank: int) -> tuple[Any, Any]:
        """Tokens of a rank, and the weights of their choices."""
        x, _, weights = moe_body.inputs(self.model, self.seed, rank, number, self.tokens[rank])
        return x, weights


@dataclasses.dataclass(frozen=True)
class Spoilt:
    """Operands of this rank, the routing of one rank being wrong; which rank and value an error must tell, and which token it may."""

    arrays: list[Any]
    told: list[int]
    token: int


class Routed(Moe):
    """Ops that take a routing: operand 1 is the ids. Operands of two dimensions have a row for each token."""

    def faults(self) -> list[str]:
        """What can be wrong with a routing."""
        more = ["twice"] if self.model.topk > 1 else []
        return ["none such", "negative", "tokens", *more, *(["int64"] if self.id_type is np.int64 else [])]

    def spoilt(self, number: int, fault: str, seed: int) -> Spoilt:
        """Call ``number``, but for the choices of one token, or with a token too many."""
        rng, arrays = np.random.default_rng(seed), self.host(number)
        rank = int(rng.choice([rank for rank, tokens in enumerate(self.tokens) if tokens]))
        token, expert = int(rng.integers(self.tokens[rank])), int(rng.integers(self.model.experts * self.world.size))
        most = self.model.max_tokens + 1
        value = {"none such": self.model.experts * self.world.size, "negative": -2, "twice": expert, "int64": 2**40, "tokens": most}[fault]
        if self.world.rank == rank and fault == "tokens":
            rows = np.arange(most) % self.tokens[rank]
            arrays = [array[rows] if array.ndim == 2 else array for array in arrays]
        elif self.world.rank == rank:
            arrays[1] = arrays[1].copy()
            arrays[1][token] = -1
            arrays[1][token, : 2 if fault == "twice" else 1] = value
        return Spoilt(arrays, [rank, min(value, 2**31 - 1)], token)


class Dispatch(Routed):
    op = "moe_dispatch_gemm"

    @functools.cached_property
    def experts(self) -> Any:
        return moe_body.inputs(self.model, self.seed, self.world.rank, 0, 0)[1]

    def host(self, number: int) -> list[Any]:
        x, weights = self.tokens_of(number, self.world.rank)
        return [x, self.ids(number)[self.world.rank], self.experts, weights]

    def call(self, arrays: list[Any], out: Any = None) -> Any:
        model, (x, ids, w, weights) = self.model, arrays
        options = {"activation": "swiglu" if model.gated else None, "max_tokens": model.max_tokens, "alignment": model.alignment}
        given = weights if model.weighted else None
        return mk.moe_dispatch_gemm(x, ids, w, topk_weights=given, out=out, world=self.world, **options)

    def wrong(self, number: int, results: Any) -> list[str]:
        ranks, mine = range(self.world.size), self.world.rank
        gathered = [self.tokens_of(number, rank) for rank in ranks]
        return moe_body.check(self.model, len(ranks), mine, self.known(number)[mine], gathered, self.experts, results)

    def defined(self, number: int, results: Any) -> list[Any]:
        known = self.known(number)[self.world.rank]
        last = int(known.expert_offsets[-1])
        rows = self.xp.asarray(np.flatnonzero(known.source[:last, 0] >= 0))
        found = [words(results.y)[rows], results.source[:last], *flat(results.routing)]
        return found if results.row_weight is None else [*found, results.row_weight[rows]]


class WholeLayer(Routed):
    op = "moe_layer"

    def __init__(self, world: Any, rng: np.random.Generator, size: Size) -> None:
        super().__init__(world, rng, size)
        model = self.model = dataclasses.replace(self.model, alignment=1, weighted=True)
        self.layer = Layer(model.h, model.f, model.experts, model.dtype, model.row_major, model.gated, self.seed)
        self.adds = bool(rng.integers(2))

    def host(self, number: int) -> list[Any]:
        x, weights = self.tokens_of(number, self.world.rank)
        x = (x.astype(np.float32) * np.sqrt(self.model.h)).astype(x.dtype)
        add = [x[::-1].copy()] if self.adds else []
        return [x, self.ids(number)[self.world.rank], weights, *self.layer.weights(self.world.rank), *add]

    def call(self, arrays: list[Any], out: Any = None) -> Any:
        options = {"activation": "swiglu" if self.model.gated else None, "max_tokens": self.model.max_tokens}
        add = arrays[5] if self.adds else None
        return mk.moe_layer(*arrays[:5], add=add, out=out, world=self.world, **options)

    def wrong(self, number: int, results: Any) -> list[str]:
        x, ids, weights, *_ = host = self.host(number)
        values, bound = self.layer.reference(x, ids, weights, host[5] if self.adds else None)
        bad = ~(np.abs(results.astype(np.float64) - values) <= bound)
        return [f"{bad.sum()} of {bad.size} elements, the first at {np.argwhere(bad)[0].tolist()}"] if bad.any() else []


class Combine(Moe):
    op = "moe_combine"
    multiplies = False

    def __init__(self, world: Any, rng: np.random.Generator, size: Size) -> None:
        super().__init__(world, rng, size)
        model, shape = dataclasses.replace(self.model, alignment=min(self.model.alignment, 8)), world.topology
        self.model = model
        self.drawn = combine_body.Drawn(
            f"{shape.num_nodes}x{shape.ranks_per_node}",
            model.h,
            model.dtype,
            model.topk,
            model.experts,
            model.max_tokens,
            model.weighted,
            self.kinds,
            self.seed,
            model.f if self.multiplies else 0,
            model.row_major,
        )
        self.adds = bool(rng.integers(2))

    @property
    def max_rows(self) -> int:
        return self.drawn.max_rows

    @functools.lru_cache(maxsize=4)  # noqa: B019 - a family lives as long as its check
    def inputs(self, number: int) -> combine_body.Inputs:
        rng = np.random.default_rng([self.seed, number, 4])
        found = combine_body.Inputs(self.drawn, self.ids(number), self.known(number), rng)
        shapes, dtype = [(tokens, self.model.h) for tokens in self.tokens], DTYPES[self.model.dtype]
        found.adds = [rng.standard_normal(shape).astype(dtype) if self.adds else None for shape in shapes]
        return found

    def host(self, number: int) -> list[Any]:
        inputs, rank = self.inputs(number), self.world.rank
        experts = [inputs.experts[rank]] if self.multiplies else []
        if experts and not self.model.row_major:
            experts = [np.ascontiguousarray(experts[0].swapaxes(1, 2)).swapaxes(1, 2)]
        add = [inputs.adds[rank]] if self.adds else []
        return [inputs.rows[rank], *experts, *combine_body.routing_of(inputs.known[rank]), inputs.weights[rank], *add]

    def call(self, arrays: list[Any], out: Any = None) -> Any:
        split = 2 if self.multiplies else 1
        operands, routing, (weights, *add) = arrays[:split], mk.Routing(*arrays[split : split + 7]), arrays[split + 7 :]
        options = {"topk_weights": weights if self.model.weighted else None, "add": add[0] if add else None}
        return getattr(mk, self.op)(*operands, routing, out=out, world=self.world, **options)

    def wrong(self, number: int, results: Any) -> list[str]:
        worst = self.inputs(number).worst(self.world.rank, results)
        return [] if worst <= 1 else [f"{worst:g} of the bound"]


class GemmCombine(Combine):
    op = "moe_gemm_combine"
    multiplies = True


FAMILIES: dict[str, Callable[[Any, np.random.Generator, Size], Family]] = {
    family.op: family for family in (Dispatch, GemmCombine, Combine, WholeLayer, Ring, Packed)
}


def draw(world: Any, op: str, seed: int, size: str = "", tries: int = 1) -> Family:
    """The family of a seed: the same on every rank. ``size``: of ``SIZES``; else that of the target."""
    return FAMILIES[op](world, np.random.default_rng(seed), dataclasses.replace(SIZES[size or world.target], tries=tries))
