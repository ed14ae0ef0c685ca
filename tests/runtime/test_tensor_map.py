"""runtime/cuda/tensor_map.py over a driver that writes down what it is asked: what the encoder is given, errors, memory and the bound."""

from __future__ import annotations

import ctypes
import threading
import time
import types
from typing import Any

import numpy as np
import pytest

from mkernel.errors import ArgumentError
from mkernel.runtime.cuda import tensor_map
from mkernel.runtime.cuda.tensor_map import TensorMaps

GOOD: dict[str, Any] = {
    "address": 1 << 40,
    "dtype": "bfloat16",
    "shape": (256, 100, 3),
    "strides": (512, 51200),
    "box": (64, 32, 1),
    "swizzled": True,
}


class Encoder:
    """``cuTensorMapEncodeTiled``: the map that it makes is what it was asked, and its number."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.status, self.pause = 0, 0.0

    def __call__(self, out: int, kind: int, rank: int, address: int, extents: int, strides: int, box: int, steps: int, *modes: int) -> int:
        assert out % 64 == 0
        first = (ctypes.c_uint64 * rank).from_address(extents)[:]
        time.sleep(self.pause)
        numbers = (ctypes.c_uint64 * (rank - 1)).from_address(strides)[:], (ctypes.c_uint32 * rank).from_address(box)[:]
        assert (ctypes.c_uint32 * rank).from_address(steps)[:] == [1] * rank
        self.asked.append((kind, rank, address, first, *numbers, modes))
        if self.status:
            return self.status
        ctypes.memset(out, 0, 128)
        for i, value in enumerate((address, *first, *numbers[0], *numbers[1], *modes)):
            ctypes.c_uint64.from_address(out + 8 * i).value = value
        return 0


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Encoder:
    made = Encoder()

    pointer, number, enum = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
    # As the driver declares it, a function of C; and, as the driver's is used, without types.
    declared = ctypes.CFUNCTYPE(enum, pointer, enum, number, *[pointer] * 5, *[enum] * 4)(made)
    untyped = ctypes.PYFUNCTYPE(enum)(ctypes.cast(declared, ctypes.c_void_p).value)

    def prompt(name: str) -> Any:
        assert name == "cuTensorMapEncodeTiled"
        return lambda *arguments: declared and untyped(*arguments)

    monkeypatch.setattr(tensor_map, "prompt", prompt)
    names = types.SimpleNamespace(CUresult=lambda status: types.SimpleNamespace(name=f"status {status}"))
    monkeypatch.setattr(tensor_map, "driver", lambda: names)
    return made


def test_what_the_driver_is_told(encoder: Encoder) -> None:
    found = TensorMaps().get(**GOOD)
    assert encoder.asked == [(9, 3, 1 << 40, [256, 100, 3], [512, 51200], [64, 32, 1], (0, 3, 2, 0))]
    assert len(found) == 128
    assert [int.from_bytes(found[8 * i : 8 * i + 8], "little") for i in range(4)] == [1 << 40, 256, 100, 3]
    TensorMaps().get(**GOOD | {"dtype": "float16", "swizzled": False})
    assert encoder.asked[-1] == (6, 3, 1 << 40, [256, 100, 3], [512, 51200], [64, 32, 1], (0, 0, 2, 0))


@pytest.mark.parametrize(
    ("shape", "strides", "extents", "steps"),
    [
        ((64, 0, 2), (128, 0), [64, 1, 2], [128, 0]),
        ((64, 1, 1), (7, 9), [64, 1, 1], [128, 128]),
        ((60, 5, 1), (128, 3), [60, 5, 1], [128, 640]),
        ((60, 1, 4), (3, 256), [60, 1, 4], [128, 256]),
        ((0, 0, 0), (0, 0), [1, 1, 1], [16, 16]),
        ((64, 5, 4, 3), (512, 128, 2560), [64, 5, 4, 3], [512, 128, 2560]),
        ((64, 5, 1, 0), (128, 3, 5), [64, 5, 1, 1], [128, 640, 640]),
    ],
)
def test_dimensions_that_nothing_is_read_of(encoder: Encoder, shape: Any, strides: Any, extents: list[int], steps: list[int]) -> None:
    """The encoder refuses extents of 0 and odd strides, also where no element uses them."""
    TensorMaps().get(**GOOD | {"shape": shape, "strides": strides, "box": (64, 32, 1, 1)[: len(shape)]})
    assert encoder.asked[-1][1] == len(shape)
    assert encoder.asked[-1][3:5] == (extents, steps)


def test_the_numbers_are_the_drivers() -> None:
    """The bindings know the same enumerations."""
    from cuda.bindings import driver

    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    assert {
        "bfloat16": int(kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
        "float16": int(kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16),
    } == tensor_map._DTYPES
    assert (int(swizzles.CU_TENSOR_MAP_SWIZZLE_NONE), int(swizzles.CU_TENSOR_MAP_SWIZZLE_128B)) == tensor_map._SWIZZLES
    assert int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B) == tensor_map._PROMOTION
    assert int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE) == tensor_map._NO_INTERLEAVE
    assert int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == tensor_map._ZEROS
    assert int(driver.CUresult.CUDA_ERROR_INVALID_VALUE) == tensor_map._INVALID_VALUE


@pytest.mark.parametrize("planes", [1, 3])
def test_matrices_have_the_maps_of_tensors(encoder: Encoder, planes: int, rng: np.random.Generator) -> None:
    """What is made of address, rows and rows of a box alone, in any order, is what ``get`` makes of all."""
    maps = TensorMaps(lambda: 4096)
    for dtype, row_bytes in (("bfloat16", 512), ("float16", 528)):
        made = maps.matrices(dtype, 256, row_bytes, planes)
        for address, rows in ((1 << 40, 100), (1 << 41, 1), (1 << 40, 0), (0, 0), (1 << 42, 2), (1 << 40, 1 << 31), (1 << 40, 100)):
            first, second = (int(box) for box in rng.integers(1, 257, 2))
            for boxes in ((first,), (first, second), (second, second), (first, second, second)):
                found, asked = made(address, rows, *boxes), encoder.asked[-1]
                each = [maps.get(address, dtype, (256, rows, planes), (row_bytes, rows * row_bytes), (64, box, 1)) for box in boxes]
                assert found == b"".join(each), (address, rows, boxes)
                assert asked == encoder.asked[-1]
    encoder.status = 17
    with pytest.raises(ArgumentError, match=r"tensor = float16 \(256, 100, 3\).*\(status 17\)" if planes == 3 else r"\(status 17\)"):
        made(1 << 40, 100, 32)
    with pytest.raises(ArgumentError, match=r"\(status 1\)"):
        made(1 << 40, 1 << 64, 32)


def test_errors(encoder: Encoder) -> None:
    maps = TensorMaps()
    for change, text in (({"dtype": "float32"}, "bfloat16 or float16"), ({"box": (32, 8, 1)}, "inner extent must be 64")):
        with pytest.raises(ArgumentError, match=text):
            maps.get(**GOOD | change)
    for change in ({"strides": (-512, 51200)}, {"box": (64, 1 << 32, 1)}, {"shape": (256, 1 << 64, 1)}):
        with pytest.raises(ArgumentError, match=r"no tensor map can describe it \(status 1\)"):
            maps.get(**GOOD | change)
    assert encoder.asked == []
    encoder.status = 17
    with pytest.raises(ArgumentError, match=r"tensor = bfloat16 \(256, 100, 3\).*0x10000000000.*\(status 17\).*16-byte aligned"):
        maps.get(**GOOD)
    assert len(encoder.asked) == 1
    encoder.status = 0
    assert len(maps.get(**GOOD)) == 128


def test_threads_do_not_mix_their_numbers(encoder: Encoder) -> None:
    maps, problems = TensorMaps(), list[BaseException]()
    encoder.pause = 0.001

    def work(thread: int) -> None:
        try:
            for i in range(20):
                number = 1 + 100 * thread + i
                found = maps.get(**GOOD | {"address": 4096 * number, "shape": (256, number + 1, 3)})
                assert [int.from_bytes(found[at : at + 8], "little") for at in (0, 16)] == [4096 * number, number + 1]
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(encoder.asked) == 80
