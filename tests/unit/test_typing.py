"""``mkernel.typing``: what ``help()`` shows of arrays, and a typed program that runs as it is checked."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys

import pytest

import mkernel as mk
from tests.typed.program import use


def test_a_typed_program_runs() -> None:
    names = ["float32", "float16", "int32", "bfloat16", "bfloat16"]
    assert mk.launch(use, 1, target="cpu", heap_bytes=1 << 16) == [names]


@pytest.mark.parametrize("function", [mk.World.empty, mk.World.zeros], ids=lambda function: function.__qualname__)
def test_help_names_arrays(function: object) -> None:
    shown = pydoc.render_doc(function, renderer=pydoc.plaintext)
    assert "DType" in shown
    assert "-> 'Array'" in shown
    assert "Any" not in str(inspect.signature(function))  # type: ignore[arg-type]


OPS = [name for name in mk.__all__ if inspect.isfunction(function := getattr(mk, name)) and "a" in inspect.signature(function).parameters]


@pytest.mark.parametrize("name", [*OPS, "plan", "tune"])
def test_operands_and_results_of_ops_are_arrays(name: str) -> None:
    signature = inspect.signature(getattr(mk, name))
    annotations = {parameter.name: str(parameter.annotation) for parameter in signature.parameters.values()}
    arrays = {key: text for key, text in annotations.items() if key in ("a", "b", "arrays", *(["out"] if name in OPS else []))}
    assert arrays
    assert {key: text for key, text in arrays.items() if "Array" not in text or "Any" in text} == {}
    if name in OPS:
        assert signature.return_annotation == "Array"


def test_there_are_ops() -> None:
    assert len(OPS) >= 3


def test_types_import_no_library() -> None:
    code = "import sys, mkernel.typing; print(sorted({'numpy', 'cupy', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
