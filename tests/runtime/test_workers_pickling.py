"""What travels between processes of ``mk.launch``: arrays of devices arrive in host memory, with stand-ins for CuPy and torch."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest

import mkernel as mk
from mkernel.runtime.workers.messages import Inbox, Kind, frame
from mkernel.runtime.workers.pickling import dump_call, dump_error, dump_result, load_call, load_error, load_result


class CupyArray:
    """As much of ``cupy.ndarray`` as is looked at. It cannot be pickled: it must not come to that."""

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def get(self) -> Any:
        return self.values.copy()

    def __reduce__(self) -> Any:
        raise AssertionError("a GPU's array was pickled")


class ForeignArray:
    """An array on a GPU of a library that mkernel does not know."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {}

    def __reduce__(self) -> Any:
        raise AssertionError("a GPU's array was pickled")


class Tensor:
    """As much of ``torch.Tensor`` as is looked at."""

    def __init__(self, values: Any, device: str = "cuda:3", requires_grad: bool = True) -> None:
        self.values, self.device, self.requires_grad = np.asarray(values), device, requires_grad

    @property
    def is_cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AttributeError("not of a CPU tensor")

    def detach(self) -> Tensor:
        return Tensor(self.values, self.device, False)

    def cpu(self) -> Tensor:
        return Tensor(self.values, "cpu", self.requires_grad)

    def cuda(self) -> Tensor:
        return Tensor(self.values, "cuda:current", self.requires_grad)

    def __reduce__(self) -> Any:
        assert not self.is_cuda, "a GPU's tensor was pickled"
        return Tensor, (self.values, self.device, self.requires_grad)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, cupy = types.ModuleType("torch"), types.ModuleType("cupy")
    torch.Tensor = Tensor  # type: ignore[attr-defined]
    cupy.ndarray = CupyArray  # type: ignore[attr-defined]
    cupy.asarray = lambda value: CupyArray(value.values)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "cupy", cupy)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Box:
    inside: Any


class Thing:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in leaves(part)]
    if isinstance(value, (Box, Thing)):
        return leaves(value.inside)
    return [value]


def nested(rng: np.random.Generator, make: Any, depth: int) -> Any:
    """A random heap of containers around what ``make`` makes."""
    if depth == 0:
        return make()
    parts = [nested(rng, make, depth - 1) for _ in range(2)]
    wrap = [
        lambda: parts,
        lambda: tuple(parts),
        lambda: Pair(*parts),
        lambda: dict(enumerate(parts)),
        lambda: Box(parts),
        lambda: Thing(parts),
    ]
    return wrap[rng.integers(len(wrap))]()


@pytest.mark.parametrize("kind", [CupyArray, ForeignArray, Tensor])
def test_arrays_of_devices_at_any_depth(kind: type, rng: np.random.Generator) -> None:
    for _ in range(20):
        result = nested(rng, lambda: kind(rng.standard_normal(3)), 4)
        back = load_result(dump_result(result, 0), 0)
        sent, received = leaves(result), leaves(back)
        assert len(sent) == len(received) == 16
        for one, other in zip(sent, received, strict=True):
            if kind is Tensor:
                assert (other.device, other.requires_grad) == ("cpu", False)
                other = other.values
            assert type(other) is np.ndarray
            np.testing.assert_array_equal(one.values, other)


def test_one_array_in_two_places_stays_one() -> None:
    array = CupyArray([1, 2])
    left, right = load_result(dump_result([array, array], 0), 0)
    assert left is right


def test_arguments_arrive_on_the_ranks_own_gpu() -> None:
    """By their values, wherever they were; a CuPy array does that by itself."""
    fn, (tensor, host) = load_call(dump_call(len, (Tensor([1, 2]), Tensor([3], "cpu"))), 0)
    assert fn is len
    assert (tensor.device, tensor.values.tolist()) == ("cuda:current", [1, 2])
    assert host.device == "cpu"


def test_an_exception_may_carry_arrays() -> None:
    error = ValueError("wrong", CupyArray([1, 2]))
    back = load_error(dump_error(error), "unused")
    assert type(back) is ValueError
    assert type(back.args[1]) is np.ndarray


def test_modules_of_any_kind_go_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """``mk`` itself is a module of its own type; other packages that load lazily are, too."""

    class Lazy(types.ModuleType):
        pass

    lazy = Lazy("lazy_for_this_test")
    monkeypatch.setitem(sys.modules, "lazy_for_this_test", lazy)
    fn, _ = load_call(dump_call(lambda: (mk, lazy), ()), 0)
    assert fn() == (mk, lazy)


def test_frames_arrive_whole_however_they_are_cut(rng: np.random.Generator) -> None:
    sent = [(Kind.log, "x" * int(size)) for size in rng.integers(0, 5000, 50)] + [(Kind.end, None)]
    stream, inbox, found = b"".join(frame(*message) for message in sent), Inbox(), []
    while stream:
        cut = int(rng.integers(1, 4000))
        found += list(inbox.feed(stream[:cut]))
        stream = stream[cut:]
    assert found == sent


def test_what_cannot_be_loaded_is_told_by_its_text() -> None:
    assert str(load_error(b"", "KeyError: 3")) == str(load_error(b"garbage", "KeyError: 3")) == "KeyError: 3"
    assert str(load_error(pickle.dumps("no exception"), "KeyError: 3")) == "KeyError: 3"
