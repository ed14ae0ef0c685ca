"""What ops refuse of any array, by its name: what is none, what begins in the midst of an element, what shares memory with what is written.

Every op, every array, every pair of one that is written and another one.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import mkernel as mk
from mkernel.errors import ArgumentError
from mkernel.ops import op as ops
from mkernel.ops.call import call
from tests.ops.body import aligned

_TOKENS, _EXPERTS, _TOPK, _H, _F = 6, 3, 2, 64, 32
_LINE = 16  # bytes at whose multiples arrays begin


def _halves(*shape: int) -> NDArray[Any]:
    made = aligned(shape, "bfloat16")
    made[...] = np.random.default_rng(shape).standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
    return made


def _others(*shape: int, dtype: str = "int32") -> NDArray[Any]:
    return np.ones(shape, dtype)


def _routed(ids: type[np.signedinteger[Any]] = np.int32) -> list[Any]:
    """x, topk_ids, w, topk_weights, expert_counts of a dispatch."""
    chosen = np.stack([np.arange(_TOKENS), np.arange(_TOKENS) + 1], 1) % _EXPERTS
    return [
        _halves(_TOKENS, _H),
        chosen.astype(ids),
        _halves(_EXPERTS, _H, _F),
        np.ones(chosen.shape, np.float32),
        np.zeros(_EXPERTS, np.int32),
    ]


def _combined(*before: NDArray[Any]) -> list[Any]:
    """Arrays of a combine: what ``before`` holds, the routing of a dispatch, topk_weights and add."""
    routing = mk.moe_dispatch_gemm(*_routed()[:3]).routing
    return [*before, *(np.array(array) for array in routing), np.ones((_TOKENS, _TOPK), np.float32), _halves(_TOKENS, _H)]


def _rows() -> int:
    return int(mk.moe_dispatch_gemm(*_routed()[:3]).y.shape[0])


OPERANDS: dict[str, Any] = {
    "allgather_gemm": lambda: [_halves(16, 64), _halves(64, 24)],
    "gemm_reduce_scatter": lambda: [_halves(16, 64), _halves(64, 24)],
    "gemm_allreduce": lambda: [_halves(16, 64), _halves(64, 24)],
    "ring_attention": lambda: [_halves(1, 8, 2, 64), _halves(1, 8, 2, 64), _halves(1, 8, 2, 64)],
    "ring_attention_varlen": lambda: [_halves(8, 2, 64), _halves(8, 2, 64), _halves(8, 2, 64), np.array([0, 3, 8], np.int32)],
    "moe_dispatch_gemm": lambda: _routed(np.int64),
    "moe_combine": lambda: _combined(_halves(_rows(), _H)),
    "moe_gemm_combine": lambda: _combined(_halves(_rows(), _F), _halves(_EXPERTS, _F, _H)),
}


def _beside(one: NDArray[Any], other: NDArray[Any], apart: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both in one block of memory, with their values: the second one begins with the last bytes of the first, or behind it."""
    begin = -(-one.nbytes // _LINE) * _LINE if apart else (one.nbytes - 1) // _LINE * _LINE
    block = aligned((one.nbytes + other.nbytes + _LINE,), "float16").view(np.uint8)
    placed = []
    for array, at in ((other, begin), (one, 0)):
        new = block[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
        new[...] = array
        placed.append(new)
    return placed[1], placed[0]


def _misaligned(array: NDArray[Any]) -> NDArray[Any]:
    """The same values, half an element off."""
    block, at = aligned((array.nbytes + _LINE,), "float16").view(np.uint8), array.itemsize // 2
    new = block[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
    new[...] = array
    return new


def _try_all(world: Any, name: str) -> None:
    op = ops.find(name)
    operands = OPERANDS[name]()
    names = [*op.operands]
    assert len(operands) == len(names), "every array that a call may take"

    def run(arrays: list[Any], out: Any) -> Any:
        return call(op, tuple(arrays), op.option_values({}), world=world, out=out, split=None, stream=None)

    for i, array in enumerate(operands):
        with pytest.raises(ArgumentError, match="is no array") as caught:
            run([*operands[:i], array.tolist(), *operands[i + 1 :]], None)
        assert caught.value.argument == names[i]
    results = [np.array(array) for array in op.arrays_of(run(operands, None))]
    names += op.names_of_results(len(results))
    arrays, count = [*operands, *results], len(operands)
    for i, array in enumerate(arrays):
        given = [*arrays[:i], _misaligned(array), *arrays[i + 1 :]]
        with pytest.raises(ArgumentError, match=r"must start at a multiple of|strides") as caught:
            run(given[:count], op.returned(given[count:]))
            pytest.fail(f"{names[i]} may begin anywhere")
        assert names[i] in str(caught.value)
    written = [i for i, what in enumerate(names) if i >= count or what in op.fills]
    tried = 0
    for i in written:
        for j in range(len(arrays)):
            if i == j or not arrays[j].size or not arrays[i].size:
                continue
            for apart in (False, True):
                given = list(arrays)
                given[j], given[i] = _beside(arrays[j], arrays[i], apart)
                op_out = op.returned(given[count:])
                if apart:
                    run(given[:count], op_out)
                    continue
                with pytest.raises(ArgumentError, match=r"overlaps") as caught:
                    run(given[:count], op_out)
                    pytest.fail(f"{names[i]} may overlap {names[j]}")
                assert names[i] in str(caught.value) and names[j] in str(caught.value)
                tried += 1
    assert tried >= len(written) * (len(operands) - 1)


@pytest.mark.parametrize("name", ops.BUILT_IN)
def test_arrays_are_refused_by_name(name: str) -> None:
    mk.launch(_try_all, 1, target="cpu", args=(name,), heap_bytes=1 << 24)


def test_strides_whose_overlap_is_hard_to_find() -> None:
    """To find a common byte of such arrays takes an exact search minutes, with the world's lock held."""

    def rank(world: Any) -> None:
        arena, shape = aligned((1 << 24,), "float16"), (3, 34, 1654, 64)
        q = np.lib.stride_tricks.as_strided(arena[29720:], shape, (9898992, 291104, 176, 2))
        o = np.lib.stride_tricks.as_strided(arena[5960:], shape, (9897664, 176, 5984, 2))
        k = np.zeros(shape, np.float16)
        with pytest.raises(ArgumentError, match=r"overlaps q"):
            mk.ring_attention(q, k, k, out=(o, np.zeros(shape[:3], np.float32)))

    mk.launch(rank, 1, target="cpu", heap_bytes=1 << 22)


def test_the_name_of_the_op_comes_first() -> None:
    def rank(world: Any) -> None:
        a, b = _halves(16, 64), _halves(64, 24)
        for function in (mk.plan, mk.tune):
            with pytest.raises(ArgumentError, match="op = ndarray: must be the name of an op, before its arrays"):
                function(a, b)  # type: ignore[operator]
        with pytest.raises(ArgumentError, match="w_down = str: is no array"):
            mk.moe_layer(*_routed()[:2], np.ones((_TOKENS, _TOPK), np.float32), _halves(_EXPERTS, _H, 2 * _F), "w_down")  # type: ignore[arg-type]

    mk.launch(rank, 1, target="cpu", heap_bytes=1 << 22)


def test_a_closed_world_is_closed_for_all() -> None:
    with mk.init(target="cpu", heap_bytes=1 << 22) as world:
        a, b = _halves(16, 64), _halves(64, 24)
        mk.allgather_gemm(a, b)
    for function in (mk.tune, mk.plan):
        with pytest.raises(mk.Error, match="the world is closed"):
            function("allgather_gemm", a, b, world=world)
    with pytest.raises(mk.Error, match="the world is closed"):
        mk.allgather_gemm(a, b, world=world)


def test_what_is_gathered_is_apart() -> None:
    def rank(world: Any) -> None:
        arrays = {"a": _halves(16, 64), "b": _halves(64, 24), "out": _halves(16, 24)}
        gathered = _halves(16, 64)
        for name, array in arrays.items():
            there, kept = _beside(array, gathered, False)
            with pytest.raises(ArgumentError, match=f"gathered = .*overlaps {name}"):
                mk.allgather_gemm(**arrays | {name: there}, gathered=kept)
            there, kept = _beside(array, gathered, True)
            mk.allgather_gemm(**arrays | {name: there}, gathered=kept)
            assert kept.tobytes() == (there if name == "a" else arrays["a"]).tobytes()

    mk.launch(rank, 1, target="cpu", heap_bytes=1 << 22)
