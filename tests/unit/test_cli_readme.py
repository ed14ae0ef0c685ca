"""The README says what the code says: switches and commands are compared, the example is compiled."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mkernel import env
from mkernel.cli.main import COMMANDS
from mkernel.proxy.spawn import without_launcher

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]


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


def test_the_first_example_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"## Twenty lines that run.*?```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in block.splitlines() if line]) <= 20
    (tmp_path / "first.py").write_text(block)
    environment = without_launcher(os.environ) | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "first.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(512, 64)") == 2
    assert "rank 1: " in done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    """A name may be the end of a path: ``control.py`` in the section on mkernel/runtime."""
    folders = ("mkernel", "kernels_src", "tests", "docs", "examples")
    files = [f"/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    named = set(re.findall(r"`([\w/]+\.(?:py|cuh|h|hpp|cpp|md))`", (ROOT / page).read_text()))
    assert named
    assert not [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)]


@pytest.mark.parametrize("page", PAGES)
def test_functions_of_the_kernels_that_are_named_exist(page: str) -> None:
    """Names like ``wait_ge`` or ``ControlBlock.failed`` in backticks occur somewhere in the sources."""
    paths = [*(ROOT / "kernels_src").rglob("*"), *(ROOT / "mkernel").rglob("*.py"), *(ROOT / "tests" / "small_op").glob("*.*")]
    sources = "\n".join(path.read_text() for path in paths if path.is_file() and not path.name.startswith("."))
    named = set(re.findall(r"`(?:\w+(?:::|\.))?([a-z]+(?:_[a-z0-9]+)+)`", (ROOT / page).read_text()))
    words = set(re.findall(r"\w+", sources))
    assert not [name for name in sorted(named - words) if not name.startswith(("ibv_", "rdma_"))]  # those are others'
