"""The README says what the code says: switches and commands are compared, the example is compiled."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mkernel import env
from mkernel.cli.completion import whole_parser
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


PLACES = {"OP": "allgather_gemm", "MxNxK": "64x64x64", "R": "8", "OLD": "a", "NEW": "b", "DIR": "a"}


def _commands(page: str, start: str) -> list[list[str]]:
    """The words after ``start`` of each command that a page shows, in a block or in backticks; places filled in."""
    text = re.sub(r"`([^`\n]*)\n([^`\n]*)`", r"`\1 \2`", (ROOT / page).read_text())  # broken over two lines
    lines = re.findall(rf"^(?:\$ |    |mpirun -n 4 |srun --\S+ |.*`|.*: `?|)(?:\S+/)?{start} ([^`\n]*)", text, re.MULTILINE)
    words = [shlex.split(line, comments=True) for line in lines]
    return [[PLACES.get(word, word) for word in line] for line in words if line and line[0] not in ("...", "COMMAND")]


def test_commands_that_pages_show_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    """Each by the parser of its command; of scripts, that they exist and know the options."""
    parser, seen = whole_parser(COMMANDS), 0
    for page in PAGES:
        for words in _commands(page, "python -m mkernel"):
            try:
                parser.parse_args([word for word in words if word not in (">", "|")])
            except SystemExit:
                raise AssertionError(f"{page}: {words}: {capsys.readouterr().err}") from None
            seen += 1
        for words in _commands(page, "python"):
            script = ROOT / words[0]
            if words[0].startswith(("tests/", "docs/", "examples/")):
                known = "\n".join(file.read_text() for file in script.parent.glob("*.py"))
                assert script.exists(), (page, words)
                assert not [word for word in words if word.startswith("--") and f'"{word}"' not in known], (page, words)
                seen += 1
    assert seen > 60
    with pytest.raises(SystemExit):
        parser.parse_args(["model", "allgather_gemm", "--gone"])


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
