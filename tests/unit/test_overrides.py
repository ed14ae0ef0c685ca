"""What overrides a method of mkernel, in the package or in a test, can be called as the method that it overrides.

mypy says so of the package, but tests are not typed strictly, and a test that would call the method may not be drawn.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import mkernel
import tests.gpu
import tests.ops
import tests.small_op
from mkernel.bench.cases.base import Case

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OTHERS = {"mkernel.torch", "mkernel.bench.baselines", "mkernel.__main__"}  # import torch, or run


def _import_all() -> None:
    for package in (mkernel, tests.gpu, tests.ops, tests.small_op):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not any(module.name == other or module.name.startswith(other + ".") for other in _OTHERS):
                try:
                    importlib.import_module(module.name)
                except ImportError as error:
                    assert (error.name or "").partition(".")[0] in ("torch", "cupy", "cuda", "mpi4py", "pyverbs", "conftest"), error


def _below(kind: type) -> Iterator[type]:
    for one in type.__subclasses__(kind):
        yield one
        yield from _below(one)


def _functions(kind: type) -> dict[str, Callable[..., Any]]:
    """The plain methods that the class itself defines, but for those that every class calls in its own way."""
    return {name: of for name, of in vars(kind).items() if inspect.isfunction(of) and name not in ("__init__", "__post_init__")}


def refused(override: Callable[..., Any], base: Callable[..., Any]) -> str:
    """Which call of ``base`` a method ``override`` does not take; "" if it takes all."""
    mine, given = inspect.signature(override).parameters.values(), inspect.signature(base).parameters.values()
    kinds = {parameter.kind for parameter in mine}
    places = [parameter for parameter in mine if parameter.kind in _POSITIONAL]
    asked = [parameter for parameter in given if parameter.kind in _POSITIONAL]
    if len(places) < len(asked) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return f"takes {len(places)} positional arguments, not {len(asked)}"
    names = {parameter.name for parameter in mine if parameter.kind != inspect.Parameter.POSITIONAL_ONLY}
    for parameter in given:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name not in names and inspect.Parameter.VAR_KEYWORD not in kinds:
            return f"takes no {parameter.name}="
    for place, parameter in enumerate(places):
        optional = place < len(asked) and asked[place].default is not inspect.Parameter.empty
        if (place >= len(asked) or optional) and parameter.default is inspect.Parameter.empty:
            return f"needs {parameter.name}"
    surely = {parameter.name for parameter in given if parameter.default is inspect.Parameter.empty}
    for parameter in mine:
        needed = parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is inspect.Parameter.empty
        if needed and parameter.name not in surely:
            return f"needs {parameter.name}="
    return ""


def overrides() -> Iterator[tuple[type, str, str]]:
    """Class, method and what is wrong with it ("" if nothing), of each method of mkernel that a class overrides."""
    bases = {one for one in _below(object) if str(one.__module__).partition(".")[0] == "mkernel"}
    for kind in {below for base in bases for below in _below(base)}:
        for name, function in _functions(kind).items():
            for base in kind.__mro__[1:]:
                if base in bases and name in _functions(base):
                    yield kind, name, refused(function, _functions(base)[name])
                    break


def test_what_overrides_a_method_can_be_called_like_it() -> None:
    _import_all()
    found = [(kind, name, wrong) for kind, name, wrong in overrides() if "<locals>" not in kind.__qualname__]
    assert len(found) > 200
    assert sum(kind.__module__.startswith("tests") for kind, _, _ in found) > 20
    assert [f"{kind.__module__}.{kind.__qualname__}.{name} {wrong}" for kind, name, wrong in found if wrong] == []


def _of(signature: str) -> Callable[..., Any]:
    found: dict[str, Any] = {}
    exec(f"def method({signature}): ...", found)
    return found["method"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("override", "base", "wrong"),
    [
        ("self, index", "self, index, split=None", "takes 2 positional arguments, not 3"),
        ("self, index, split", "self, index, split=None", "needs split"),
        ("self, index, more", "self, index", "needs more"),
        ("self, index", "self, index, *, rows=None", "takes no rows="),
        ("self, index, *, rows", "self, index, *, rows=None", "needs rows="),
        ("self, other, split=None, *, more=None", "self, index, split=None", ""),
        ("self, *args, **options", "self, index, *, rows=None", ""),
        ("self, index, rows=None", "self, index, *, rows=None", ""),
    ],
)
def test_what_is_refused(override: str, base: str, wrong: str) -> None:
    assert refused(_of(override), _of(base)) == wrong


def test_a_case_as_it_was_before_splits_is_found() -> None:
    class Former(Case):
        def worst(self, index: int) -> float:  # type: ignore[override]
            return float(index)

    assert [(name, wrong) for kind, name, wrong in overrides() if kind is Former] == [("worst", "takes 2 positional arguments, not 3")]
