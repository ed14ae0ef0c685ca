"""Whatever a caller passes: an op refuses it with an error of its own, or does what was asked for, and the world stays usable."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError, Error
from mkernel.tools.check import worst_product

CALLS = 60  # of each op
TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 8, 64, 64, 4, 2
NOT_ARRAYS = (
    *(None, True, 0, 1, 3, -5, 1 << 31, 1 << 64, 10**400, 0.5, math.inf, math.nan, np.int64(3)),
    *("", "x", "one_shot", "zigzag", "swiglu", "float32", b"ab", [1, 2], (1, 2), {"a": 1}, object()),
)
DTYPES = (
    "float32",
    "float64",
    "float16",
    "int8",
    "int64",
    "uint64",
    "bool",
    "complex64",
    ">f2",
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
)


class Drawn:
    """Right arguments, and others in their place."""

    def __init__(self, seed: int) -> None:
        self.random, self.values = random.Random(seed), np.random.default_rng(seed)

    def array(self, *shape: int, dtype: Any = ml_dtypes.bfloat16) -> Any:
        """Small integers, whose sums are exact, at a multiple of 16 bytes."""
        raw = np.empty(math.prod(shape) * np.dtype(dtype).itemsize + 16, np.uint8)
        array = raw[-raw.ctypes.data % 16 :][: raw.size - 16].view(dtype).reshape(shape)
        array[...] = self.values.integers(-2, 3, shape).astype(dtype)
        return array

    def ids(self) -> Any:
        return np.stack([self.values.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)]).astype(np.int32)

    def dispatched(self) -> Any:
        return mk.moe_dispatch_gemm(self.array(TOKENS, HIDDEN), self.ids(), self.array(EXPERTS, HIDDEN, INNER))

    def right(self, op: str) -> dict[str, Any]:
        """Arguments that an op of a world of one takes."""
        weights = self.array(TOKENS, CHOICES, dtype=np.float32)
        if op == "moe_dispatch_gemm":
            return {
                "x": self.array(TOKENS, HIDDEN),
                "topk_ids": self.ids(),
                "w": self.array(EXPERTS, HIDDEN, INNER),
                "topk_weights": weights,
            }
        if op == "moe_layer":
            matrices = {"w_gate_up": self.array(EXPERTS, HIDDEN, 2 * INNER), "w_down": self.array(EXPERTS, INNER, HIDDEN)}
            return {"x": self.array(TOKENS, HIDDEN), "topk_ids": self.ids(), "topk_weights": weights, **matrices}
        if op == "moe_gemm_combine":
            found = self.dispatched()
            return {"a": found.y, "w": self.array(EXPERTS, INNER, HIDDEN), "routing": found.routing, "topk_weights": weights}
        if op == "moe_combine":
            found = self.dispatched()
            return {"rows": found.y, "routing": found.routing}
        if op == "ring_attention":
            return {name: self.array(1, 2, 16, 64) for name in "qkv"}
        if op == "ring_attention_varlen":
            return {**{name: self.array(16, 2, 64) for name in "qkv"}, "cu_seqlens": np.array([0, 5, 16], np.int32)}
        return {"a": self.array(24, 64), "b": self.array(64, 72)}

    def another(self, value: Any) -> Any:
        """In the place of a value: something of another type, or of an array another one that is hardly different."""
        if not isinstance(value, np.ndarray) or self.random.random() < 0.2:
            return self.random.choice(NOT_ARRAYS)
        with np.errstate(invalid="ignore"):  # rows that nobody has filled
            return self.random.choice((self._converted, self._resized, self._apart, self._elsewhere))(value)

    def _converted(self, array: Any) -> Any:
        return array.astype(self.random.choice(DTYPES))

    def _resized(self, array: Any) -> Any:
        shape, at = list(array.shape), self.random.randrange(array.ndim)
        shape[at] = max(0, shape[at] + self.random.choice((-8, -1, 1, 8, 100, -shape[at])))
        return self.random.choice(
            (self.array(*shape, dtype=array.dtype), array[None], array.reshape(-1), array[1:], np.array(1, array.dtype))
        )

    def _apart(self, array: Any) -> Any:
        """Of the same shape: other strides."""
        twice = self.array(*(2 * extent for extent in array.shape), dtype=array.dtype)
        steps = tuple(slice(None, None, self.random.choice((1, 2))) for _ in array.shape)
        backwards = tuple(slice(None, None, self.random.choice((1, -1))) for _ in array.shape)
        strided = twice[steps][tuple(map(slice, array.shape))]
        return self.random.choice((strided, array[backwards], np.broadcast_to(array[:1], array.shape), np.asfortranarray(array)))

    def _elsewhere(self, array: Any) -> Any:
        """Of the same shape and strides: not aligned, not to be written, or with elements that do not count."""
        raw, begin = np.zeros(array.nbytes + 64, np.uint8), self.random.choice((1, 2, 4, 8))
        shifted = raw[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
        shifted[...] = array
        fixed = array.copy()
        fixed.flags.writeable = False
        return self.random.choice((shifted, fixed, np.ma.masked_array(array, array == 1)))


def names_of(op: str) -> list[str]:
    return [name for name in inspect.signature(getattr(mk, op)).parameters if name != "world"]


def product(arguments: dict[str, Any], out: Any) -> bool:
    """Whether the result is what NumPy has for the operands that were passed."""
    return worst_product(np, np.asarray(out), np.asarray(arguments["a"]), np.asarray(arguments["b"])) <= 1


def attention(arguments: dict[str, Any], out: Any) -> bool:
    """The same to some roundings of the weights."""
    q, k, v = (np.asarray(arguments[name], np.float64) for name in "qkv")
    k, v = (np.repeat(of_heads, q.shape[1] // of_heads.shape[1], 1) for of_heads in (k, v))
    scores = q @ k.swapaxes(2, 3) * (1 / math.sqrt(q.shape[3]) if arguments.get("scale") is None else float(arguments["scale"]))
    if arguments.get("causal"):
        scores += np.triu(np.full(scores.shape[2:], -np.inf), 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return bool(np.allclose(np.asarray(out.o, np.float64), weights / weights.sum(-1, keepdims=True) @ v, atol=0.05))


CHECKS: dict[str, Callable[[dict[str, Any], Any], bool]] = {
    **dict.fromkeys(("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"), product),
    "ring_attention": attention,
}
OPS = (*CHECKS, "ring_attention_varlen", "moe_dispatch_gemm", "moe_gemm_combine", "moe_combine", "moe_layer")


@pytest.fixture
def world() -> Iterator[Any]:
    with mk.init(target="cpu", heap_bytes=16 << 20, timeout=20.0, entry_timeout=20.0) as world:
        yield world


@pytest.mark.parametrize("op", OPS)
def test_what_is_not_refused_is_right(op: str, world: Any, rng: np.random.Generator) -> None:
    drawn = Drawn(int(rng.integers(1 << 30)))
    for _ in range(CALLS):
        arguments = drawn.right(op)
        arrays = [value for value in arguments.values() if isinstance(value, np.ndarray)]
        for name in drawn.random.sample(names_of(op), drawn.random.choice((1, 1, 2))):
            usual = arguments.get(name, drawn.random.choice((None, drawn.random.choice(arrays).copy())))
            arguments[name] = drawn.another(usual)
        before = {
            name: value.copy() for name, value in arguments.items() if isinstance(value, np.ndarray) and name not in ("out", "gathered")
        }
        said = {name: getattr(value, "dtype", value) for name, value in arguments.items()}
        try:
            out = getattr(mk, op)(**arguments)
        except (Error, TypeError) as error:
            assert str(error), said
            continue
        assert not any(isinstance(value, np.ma.MaskedArray) for value in arguments.values()), said
        assert op not in CHECKS or CHECKS[op](arguments, out), said
        for name, value in before.items():
            filled = name in ("expert_counts",)
            assert filled or value.tobytes() == arguments[name].tobytes(), f"{name} has changed: {said}"
    a, b = drawn.array(24, 64), drawn.array(64, 72)
    assert product({"a": a, "b": b}, mk.allgather_gemm(a, b)), "the world is usable"


def test_where_tokens_go_is_said_once(world: Any, rng: np.random.Generator) -> None:
    drawn = Drawn(int(rng.integers(1 << 30)))
    routing = drawn.dispatched().routing
    x, w = drawn.array(TOKENS, HIDDEN), drawn.array(EXPERTS, HIDDEN, INNER)
    with pytest.raises(ArgumentError, match="topk_ids says where tokens go"):
        mk.moe_dispatch_gemm(x, drawn.ids(), w, routing=routing)
    assert mk.moe_dispatch_gemm(x, None, w, routing=routing).rows() == TOKENS * CHOICES
