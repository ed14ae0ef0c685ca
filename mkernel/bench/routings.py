"""Routings of benchmarks: which experts tokens choose, with which weights, from a seed; and the sizes of models that route.

Every rank can draw every rank's routing: a reference trusts no communication. Numbers are drawn by NumPy, on the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mkernel.errors import ArgumentError
from mkernel.planner.topology import Topology

__all__ = ["KINDS", "MODELS", "Model", "Routed", "Size", "draw", "drawn_sizes", "expand", "parse", "rows_of", "tokens_of"]

Array = Any

_ITEM = 2  # bytes of a 16-bit element
_MOST_WEIGHTS = 16 << 30  # bytes of a rank, of random sizes
_MOST_RESULT = 4 << 30
_BLOCK = 512
_EXPONENT = 1.0  # of Zipf's law
_ZIPF_SHARE = 0.5  # of the calls of a mixture; the rest is uniform


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """Extents of a layer: columns of a token and of what an expert makes of it, experts of all ranks, choices of a token."""

    hidden: int
    inner: int
    experts: int
    topk: int


MODELS = {
    "deepseek-v3": Model(7168, 2048, 256, 8),
    "mixtral-8x7b": Model(4096, 14336, 8, 2),
    "qwen3-235b": Model(4096, 1536, 128, 8),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """The choices of one rank's tokens.

    Attributes
    ----------
    ids
        (T, k) int32: experts, all different in a row.
    weights
        (T, k) float32: positive, the sum of each row is 1 but for rounding.
    """

    ids: Array
    weights: Array


def tokens_of(tokens: int, ranks: int) -> list[int]:
    """Tokens of each rank, of so many of all: the first ranks have one more where they do not divide evenly."""
    return [tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)]


# ---- how likely experts are
def _uniform(rng: np.random.Generator, experts: int) -> Array:
    return np.ones(experts)


def _zipf(rng: np.random.Generator, experts: int) -> Array:
    """The n-th expert, in a drawn order, is chosen in proportion to 1 / n."""
    return rng.permutation(1.0 / np.arange(1, experts + 1) ** _EXPONENT)


def _one_hot(rng: np.random.Generator, experts: int) -> Array:
    """Every token chooses one and the same expert; its other choices are uniform."""
    likely = np.ones(experts)
    likely[rng.integers(experts)] = math.inf
    return likely


def _mixture(rng: np.random.Generator, experts: int) -> Array:
    return _zipf(rng, experts) if rng.random() < _ZIPF_SHARE else _uniform(rng, experts)


# "mixture": in every call another one, with other experts in front. The others have the same experts in front in all calls of a seed.
KINDS: dict[str, Callable[[np.random.Generator, int], Array]] = {"uniform": _uniform, "zipf": _zipf, "hot": _one_hot, "mixture": _mixture}


def draw(kind: str, tokens: Sequence[int], experts: int, topk: int, seed: int, call: int) -> list[Routed]:
    """The routing of every rank. The same arguments give the same arrays everywhere; other calls choose anew.

    Parameters
    ----------
    kind
        One of ``KINDS``.
    tokens
        Of each rank.
    experts
        Of all ranks.

    Raises
    ------
    ArgumentError
        There is no such kind, or there are fewer experts than choices.
    """
    if kind not in KINDS:
        raise ArgumentError("routing", kind, f"must be one of {', '.join(KINDS)}")
    if not 1 <= topk <= experts:
        raise ArgumentError("topk", topk, f"must be from 1 to the {experts} experts")
    likely = KINDS[kind](np.random.default_rng([seed, 0, call if kind == "mixture" else 0]), experts).astype(np.float32)
    return [_of_rank(np.random.default_rng([seed, 1, call, rank]), likely, count, topk) for rank, count in enumerate(tokens)]


def _of_rank(rng: np.random.Generator, likely: Array, tokens: int, topk: int) -> Routed:
    """Experts race: the first ``topk`` to come win, if each comes after an exponential time whose rate is how likely it is."""
    ids = np.empty((tokens, topk), np.int32)
    for first in range(0, tokens, _BLOCK):  # few enough to stay in a processor's cache
        part = ids[first : first + _BLOCK]
        times = rng.standard_exponential((len(part), len(likely)), np.float32)
        times /= likely
        part[...] = np.argpartition(times, topk - 1, axis=1)[:, :topk]
    scores = rng.standard_normal((tokens, topk), np.float32)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-math.inf))
    return Routed(ids, weights / weights.sum(axis=1, keepdims=True))


def rows_of(routed: Sequence[Routed], experts: int) -> Array:
    """(W, E/W): tokens of all ranks that choose each expert, by the rank that has it."""
    count = sum(np.bincount(of_rank.ids.ravel(), minlength=experts) for of_rank in routed)
    return np.asarray(count).reshape(len(routed), -1)


# ---- sizes
@dataclasses.dataclass(frozen=True)
class Size:
    """What ``--shapes`` names: tokens of all ranks, a model, a kind of routing."""

    tokens: int
    model: Model
    kind: str

    def __str__(self) -> str:
        model = self.model
        return f"{self.tokens}x{model.hidden}x{model.inner}x{model.experts}x{model.topk}:{self.kind}"


_RULE = "must be T, T:MODEL, T:MODEL:ROUTING or TxHxFxExK:ROUTING"


def parse(text: str, topology: Topology) -> Size:
    """``8192``, ``64:qwen3-235b``, ``8192:deepseek-v3:zipf`` or ``8192x7168x2048x256x8:hot``. DeepSeek-V3 and uniform unless said.

    Raises
    ------
    ArgumentError
        It is none of these, or no size that the ops take in this world.
    """
    first, *more = text.lower().split(":")
    try:
        numbers = [int(part) for part in first.split("x")]
        if len(numbers) == 5:
            model, (kind,) = Model(*numbers[1:]), more or ["uniform"]
        else:
            (_,) = numbers
            name, kind = (*more, *("deepseek-v3", "uniform")[len(more) :])
            model = MODELS[name]
    except (ValueError, KeyError):
        raise ArgumentError("--shapes", text, _RULE, f"models: {', '.join(MODELS)}; routings: {', '.join(KINDS)}") from None
    if kind not in KINDS:
        raise ArgumentError("--shapes", text, f"the routing must be one of {', '.join(KINDS)}")
    if model.hidden % 8 or model.inner % 8 or min(numbers[0], model.hidden, model.inner, model.topk) < 1:
        raise ArgumentError("--shapes", text, "T and k must be positive, H and F positive multiples of 8")
    if model.experts % topology.size or model.experts < model.topk or model.topk > 16:
        rule = f"E must be a multiple of {topology.size} (ranks) and at least k, k at most 16"
        raise ArgumentError("--shapes", text, rule)
    return Size(numbers[0], model, kind)


def drawn_sizes(count: int, seed: int, topology: Topology, matrices: int) -> list[str]:
    """So many sizes: extents log-uniform, routings in turn; F clipped to 16 GiB of weights per rank, T to 4 GiB of rows.

    T 4 to 65536, H 1024 to 8192, F 512 to 16384, E 4 to 256 (rounded up to a multiple of the ranks), k 1 to 8.

    Parameters
    ----------
    matrices
        Of H x F that an expert has: 1, or 3 of a layer.
    """
    rng = np.random.default_rng(seed)

    def between(low: int, high: int, unit: int = 1) -> int:
        return int(2 ** rng.uniform(math.log2(low), math.log2(high))) // unit * unit

    sizes = []
    for number in range(count):
        tokens, hidden, inner = between(4, 65536), between(1024, 8192, 8), between(512, 16384, 8)
        experts = -(-between(4, 256) // topology.size) * topology.size
        topk = int(rng.integers(1, min(8, experts) + 1))
        of_weights = _MOST_WEIGHTS // (experts // topology.size * hidden * matrices * _ITEM)
        inner = min(inner, of_weights // 8 * 8)
        tokens = min(tokens, _MOST_RESULT // (min(topk, experts // topology.size) * max(hidden, inner) * _ITEM))
        sizes.append(str(Size(tokens, Model(hidden, inner, experts, topk), ("uniform", "zipf", "hot")[number % 3])))
    return sizes


def expand(text: str, topology: Topology, matrices: int) -> tuple[str, ...]:
    """The sizes that ``random:N:SEED`` stands for; anything else is one size. ``matrices``: as ``drawn_sizes``."""
    word, *numbers = text.lower().split(":")
    if word != "random":
        return (text,)
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers) or int(numbers[0]) < 1:
        raise ArgumentError("--shapes", text, "must be random:N:SEED", "for example random:60:7")
    return tuple(drawn_sizes(int(numbers[0]), int(numbers[1]), topology, matrices))
