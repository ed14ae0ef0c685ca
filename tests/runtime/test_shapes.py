"""Shapes and dtypes of arrays on the heap: what NumPy takes as it stands is taken, all else is an error before any rank is asked."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from mkernel.errors import ArgumentError
from mkernel.runtime.arrays.shapes import dtype_of, extents_of
from mkernel.runtime.launch import run
from mkernel.runtime.options import Options
from mkernel.runtime.world import World
from tests.runtime.fake import FakeBackend

_BAD_SHAPES: list[Any] = [
    *(2.7, 2.0, "12", b"12", "", None, True, (True, 2), (2, 2.0), (2, "3"), [[2]], {2, 3}, {2: 3}, 1j, -1, (2, -1), object(), int, (None,)),
    *(np.float32(2), np.array(2.5), np.array([1.5]), np.array([[2, 3]]), np.bool_(True), np.array([True]), (np.array([2]),), iter([2])),
    *(2**63, (2**40, 2**40), (2**70, 0), (1,) * 26, (0,) * 26, bytearray(b"12"), memoryview(b"12"), float("nan"), float("inf"), ...),
]
_GOOD_SHAPES: list[Any] = [
    *(
        0,
        3,
        (),
        (0, 3),
        [2, 3],
        (np.int64(2), 3),
        np.int32(4),
        np.uint8(5),
        np.array(3),
        np.array([2, 3]),
        range(2, 4),
        (1,) * 25,
        (2**40, 0),
    ),
]
_BAD_DTYPES: list[Any] = [
    *(">f2", ">i4", np.dtype("f4").newbyteorder("S"), "float7", "", None, object, "O", "U5", "S3", "V8", "M8[ns]", "m8", str, bytes, list),
    *(
        "i4,i4",
        "(2,)f4",
        [("a", "i4")],
        {},
        {"names": ["a"], "formats": ["i4"]},
        (np.float32, (2,)),
        3,
        2.5,
        np.longdouble,
        ...,
        "f4 ",
    ),
]
_GOOD_DTYPES: list[Any] = [
    *(
        "float32",
        "f4",
        "<f2",
        "=i8",
        np.float64,
        np.dtype("int8"),
        int,
        float,
        bool,
        complex,
        "bfloat16",
        "?",
        np.uint16,
        "c8",
        np.longlong,
    ),
]


def _name(value: object) -> str:
    """What names a case alike in every process: without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


@pytest.mark.parametrize("shape", _BAD_SHAPES, ids=_name)
def test_bad_shapes(shape: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        extents_of(shape, 4)
    assert caught.value.argument == "shape"


@pytest.mark.parametrize("shape", _GOOD_SHAPES, ids=_name)
def test_good_shapes(shape: Any) -> None:
    assert extents_of(shape, 4) == np.broadcast_to(np.float32(0), shape).shape
    assert all(type(extent) is int for extent in extents_of(shape, 4))


@pytest.mark.parametrize("dtype", _BAD_DTYPES, ids=_name)
def test_bad_dtypes(dtype: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        dtype_of(dtype)
    assert caught.value.argument == "dtype"


@pytest.mark.parametrize("dtype", _GOOD_DTYPES, ids=_name)
def test_good_dtypes(dtype: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    expected = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert dtype_of(dtype) == (expected.name, expected.itemsize)


def test_random_shapes_agree_with_numpy(rng: np.random.Generator) -> None:
    """Whatever is put together from good and bad parts: the same extents as NumPy's, or an error that names the argument."""
    parts = [0, 1, 3, 7, np.int8(2), np.uint64(5), -1, 2.0, "3", None, True, np.array(4), np.array([4]), 2**62, [2], (), b"1"]
    taken = 0
    for _ in range(3000):
        shape: Any = tuple(parts[i] for i in rng.integers(len(parts), size=rng.integers(0, 4)))
        shape = list(shape) if rng.random() < 0.5 else shape
        try:
            extents = extents_of(shape, 8)
        except ArgumentError as error:
            assert error.argument == "shape"
            continue
        taken += 1
        assert extents == np.broadcast_to(np.int64(0), shape).shape
    assert taken > 100


def test_nobody_else_is_asked() -> None:
    """One rank's mistake is found before the collective: the others know nothing of it, and the next array is the same on all."""

    def use(world: World) -> tuple[int, ...]:
        if world.rank == 1:
            for shape, dtype in [(shape, "float32") for shape in _BAD_SHAPES] + [(3, dtype) for dtype in _BAD_DTYPES]:
                for make in (world.empty, world.zeros):
                    before = world._control.started
                    with pytest.raises(ArgumentError):
                        make(shape, dtype)
                    assert world._control.started == before
        array = world.zeros((np.int64(2), 3), np.float16)
        assert array.dtype == np.float16
        assert not array.any()
        return tuple(array.shape)

    options = Options(target="cpu", timeout=5.0, entry_timeout=20.0, heap_bytes=1 << 20)
    assert run(use, 2, options, make_backend=FakeBackend) == [(2, 3)] * 2
