"""Every public name has an ``Examples`` section in its docstring, and what stands there is what happens, on target cpu."""

from __future__ import annotations

import doctest
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mkernel as mk
from mkernel.proxy.spawn import without_launcher

ROOT = Path(__file__).parents[2]
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_NDIFF


def examples(docstring: str) -> str:
    """The section ``Examples`` of a docstring; "" where there is none."""
    found = re.search(r"(?ms)^Examples\n-{8}\n(.*?)(?=^\S[^\n]*\n-{3,}\n|\Z)", inspect.cleandoc(docstring))
    return found[1] if found else ""


def run(name: str, docstring: str) -> tuple[int, int]:
    """Run a docstring's examples in this process, and print what differs. Numbers of failures and of examples."""
    test = doctest.DocTestParser().get_doctest(examples(docstring), {}, name, None, None)
    result = doctest.DocTestRunner(verbose=False, optionflags=_FLAGS).run(test)  # else verbose where pytest is
    return result.failed, result.attempted


@pytest.mark.always  # the example of an error was wrong for two days, in which no run had drawn it
@pytest.mark.parametrize("name", mk.__all__)
def test_examples_say_what_happens(name: str) -> None:
    """In a process of its own: ``init`` is for a whole program, and environment variables belong to it."""
    environment = without_launcher(os.environ) | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    code = (
        f"import sys; import mkernel as mk; from tests.unit.test_docstring_examples import run; "
        f"failed, attempted = run({name!r}, mk.{name}.__doc__); sys.exit(1 if failed or not attempted else 0)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"mk.{name} has no examples, or they fail:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        ("Nothing.", (0, 0)),
        ("A sum.\n\n    Examples\n    --------\n    >>> 1 + 1\n    2\n", (0, 1)),
        ("A sum.\n\n    Examples\n    --------\n    >>> 1 + 1\n    3\n", (1, 1)),
        ("A sum.\n\n    Examples\n    --------\n    >>> 1 + 1\n    2\n\n    Raises\n    ------\n    >>> 1 + 1\n    3\n", (0, 1)),
        ("A sum.\n\n    Examples\n    --------\n    >>> raise ValueError('no')\n", (1, 1)),
    ],
)
def test_the_check_sees(docstring: str, found: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("f", docstring) == found
    assert bool(capsys.readouterr().out) == bool(found[0])
