"""The README says what the code says: switches and commands are compared, the example is compiled."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from mkernel import env
from mkernel.cli.main import COMMANDS

README = (Path(__file__).parents[2] / "README.md").read_text()


def _default(variable: env.Variable) -> str:
    """As the README shows it; what depends on the machine is told by the variable's help."""
    if callable(variable.default) or variable.default is None:
        return ""
    if isinstance(variable.default, bool):
        return str(int(variable.default))
    return f"{variable.default:g}" if isinstance(variable.default, float) else str(variable.default)


def test_switches() -> None:
    expected = [f"| `{v.name}` | {v.kind} | {_default(v)} | {v.help} |" for v in env.ALL.values()]
    written = [line for line in README.splitlines() if line.startswith("| `MKERNEL_")]
    assert written == expected, "the table of README.md must be:\n" + "\n".join(expected)


def test_commands() -> None:
    written = dict(re.findall(r"^\| `([a-z]+)` \| (.*) \|$", README, re.MULTILINE))
    assert written == {name: text for name, (_, text) in COMMANDS.items()}


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_examples_are_python(block: str) -> None:
    ast.parse(block)
