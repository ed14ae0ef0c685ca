"""Every exception of mkernel survives pickling with its type, text and attributes: on GPUs ranks of ``mk.launch`` are processes."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
import threading
from typing import Any

import pytest

import mkernel
from mkernel.errors import ArgumentError, CallReport, Error, FailureRecord, TimeoutError  # noqa: A004

SAMPLES = {
    "str": "text",
    "int": 3,
    "int | None": 2,
    "object": (1, "two"),
    "tuple[int, ...]": (5, 3),
    "CallReport": CallReport("op", "op(8 rows)", 1, 2, 3, (4, 5, 6), 7),
    "FailureRecord | None": FailureRecord(1, 2, "compute", 3, "chunk flag 4", 5, 6, 7, 8),
}


def subclasses(kind: type) -> list[type]:
    return [kind, *(found for child in kind.__subclasses__() for found in subclasses(child) if found.__module__.startswith("mkernel"))]


def load_everything() -> None:
    for module in pkgutil.walk_packages(mkernel.__path__, "mkernel."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError as missing:  # of a package that this machine lacks
                assert missing.name is None or not missing.name.startswith("mkernel"), missing


load_everything()
KINDS = subclasses(Error)


def example(kind: type) -> Any:
    """An instance, with something of the right type for every parameter."""
    positional, named = [], {}
    if kind.__init__ is Exception.__init__:
        positional.append("text")
    for parameter in inspect.signature(kind.__init__).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = SAMPLES[parameter.annotation]
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name != "self":
            positional.append(SAMPLES[parameter.annotation])
    error = kind(*positional, **named)
    error.add_note("a note")
    return error


def test_the_kinds_are_found() -> None:
    assert {"Error", "ArgumentError", "CompileError", "TransportError", "TimeoutError", "OutOfMemory"} <= {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__qualname__)
@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"])
def test_survives(kind: type, copied: Any) -> None:
    error = example(kind)
    back = copied(error)
    assert type(back) is kind
    assert str(back) == str(error) != ""
    assert back.args == error.args
    assert vars(back) == vars(error)
    assert back.__notes__ == ["a note"]


def test_an_attribute_that_cannot_be_pickled_becomes_its_text() -> None:
    lock = threading.Lock()
    back = pickle.loads(pickle.dumps(ArgumentError("stream", lock, "is wrong", "take another")))
    assert back.value == str(lock)
    assert (back.argument, back.rule, back.remedy) == ("stream", "is wrong", "take another")


def test_a_timeout_is_still_one_of_python() -> None:
    import builtins

    with pytest.raises(builtins.TimeoutError, match="late"):
        raise pickle.loads(pickle.dumps(TimeoutError("late")))
