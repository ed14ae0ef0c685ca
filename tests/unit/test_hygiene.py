"""What the tree must not have: files too long for a reader, names of files that are gone, and tests that decide by the clock.

A loaded machine is slow at everything.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FOLDERS = ("mkernel", "kernels_src", "tests", "examples")
SOURCES = {".cpp", ".cu", ".cuh", ".h", ".hpp", ".py"}
MOST_LINES = 500  # of one file
_CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}  # not processor time
_PROCESSOR = ("os.times()", "thread_time", "process_time")
_MEANS = {"elapsed", "seconds", "took"}  # what elapsed time is called
# These measure: deadlines of real hardware and of virtual machines, where nothing else runs.
_MAY = {"gpu/test_cuda_device.py", "gpu/notebook.py", "vm/test_worlds.py"}


def _is_elapsed(node: ast.AST) -> bool:
    """Whether an expression is a time that has passed: a difference with a clock in it, or something called so."""
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub):
            calls = (call.func for call in ast.walk(part) if isinstance(call, ast.Call))
            if any(isinstance(f, ast.Attribute) and f.attr in _CLOCKS and ast.unparse(f.value) == "time" for f in calls):
                return True
        if isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Constant) and part.slice.value in _MEANS:
            return True
    return isinstance(node, ast.Name) and node.id in _MEANS


def upper_bounds(tree: ast.AST) -> Iterator[int]:
    """Lines of assertions that something took less than so long."""
    processor = {
        name.id
        for assign in ast.walk(tree)
        if isinstance(assign, ast.Assign) and any(word in ast.unparse(assign.value) for word in _PROCESSOR)
        for name in assign.targets
        if isinstance(name, ast.Name)
    }
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.Assert):
            continue
        for compare in (node for node in ast.walk(statement.test) if isinstance(node, ast.Compare)):
            sides = [compare.left, *compare.comparators]
            for left, operator, right in zip(sides, compare.ops, sides[1:], strict=False):
                if not isinstance(operator, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
                    continue
                smaller = left if isinstance(operator, (ast.Lt, ast.LtE)) else right
                if _is_elapsed(smaller) and not (isinstance(smaller, ast.Name) and smaller.id in processor):
                    yield statement.lineno


def _modules() -> list[str]:
    return sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py"))


@pytest.mark.parametrize("module", _modules())
def test_nothing_must_be_quick(module: str) -> None:
    if module not in _MAY:
        lines = list(upper_bounds(ast.parse((TESTS / module).read_text())))
        assert not lines, (
            f"lines {lines} bound elapsed time: assert what was reported, and give waits that must not end by it a long deadline"
        )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("assert time.monotonic() - begin < 5.0", True),
        ("assert 0.3 <= time.monotonic() - begin < 3", True),
        ("assert 5.0 >= time.perf_counter() - begin", True),
        ("assert line['first']['seconds'] < 3.0", True),
        ("took = f()\nassert took < 2 and other", True),
        ("assert time.monotonic() - begin >= 0.3", False),
        ("assert death < line['at']", False),
        ("while time.monotonic() < deadline: pass", False),
        ("seconds = time.thread_time() - begin\nassert seconds < 6", False),
        ("assert min(values) <= 4", False),
    ],
)
def test_the_check_finds_what_it_is_for(text: str, found: bool) -> None:
    assert bool(list(upper_bounds(ast.parse(text)))) == found


def too_long(root: Path) -> list[str]:
    """The source files below ``root`` that have more than ``MOST_LINES`` lines, with their number of lines."""
    files = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*")) if path.suffix in SOURCES)
    lengths = ((path.relative_to(root), len(path.read_text().splitlines())) for path in files)
    return [f"{path}: {lines} lines" for path, lines in lengths if lines > MOST_LINES]


def test_no_file_is_too_long() -> None:
    assert too_long(ROOT) == [], f"split by what a reader looks for: a file has at most {MOST_LINES} lines"


@pytest.mark.parametrize(("lines", "found"), [(MOST_LINES, []), (MOST_LINES + 1, [f"{MOST_LINES + 1} lines"])])
@pytest.mark.parametrize("name", ["mkernel/new/module.py", "kernels_src/new.cuh", "tests/new.py"])
def test_the_check_sees_a_long_file(tmp_path: Path, name: str, lines: int, found: list[str]) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("#\n" * lines)
    assert too_long(tmp_path) == [f"{name}: {text}" for text in found]


_NAMED = re.compile(r"(?<![\w./<*-])((?:\w+/)*\w+\.(?:cuh|hpp|py|md))\b(?![(/])")
_USERS = {"this.py", "train.py"}  # programs of theirs


def missing_files(text: str, files: frozenset[str], *, is_python: bool = False) -> list[str]:
    """Files, of which there are none, that a page or the code of a kernel names, or that Python names between backticks."""
    if is_python:
        text = "\n".join(re.findall(r"``?([^`\n]+)``?", text))
    named = set(_NAMED.findall(text)) - _USERS
    return sorted(name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files))


@functools.cache
def _files() -> frozenset[str]:
    folders = (path for folder in (*FOLDERS, "docs") for path in (ROOT / folder).rglob("*"))
    return frozenset(str(path.relative_to(ROOT)) for path in (*folders, *ROOT.glob("*")) if path.is_file())


def _naming() -> list[str]:
    kinds = {"mkernel": {".py"}, "kernels_src": SOURCES, "tests": {".cuh", ".hpp"}, "docs": {".md"}}
    return sorted(
        file for file in _files() if Path(file).suffix in kinds.get(file.partition("/")[0], {".md"} if "/" not in file else set())
    )


@pytest.mark.parametrize("source", _naming())
def test_files_that_are_named_exist(source: str) -> None:
    assert missing_files((ROOT / source).read_text(), _files(), is_python=source.endswith(".py")) == []


@pytest.mark.parametrize("is_python", [False, True])
def test_the_check_sees_a_file_that_is_gone(is_python: bool) -> None:
    text = "As ``tile/shape.cuh`` and `shape.cuh` say, not ``gone/shape.cuh`` or `tile/gone.cuh`; a.pyc and *.py are none."
    assert missing_files(text, frozenset({"kernels_src/tile/shape.cuh"}), is_python=is_python) == ["gone/shape.cuh", "tile/gone.cuh"]


# ---- classes of Python's own, whose private names change between versions
_MEANT = {"abc", "builtins", "collections", "ctypes", "enum", "typing"}  # modules whose classes are there to be derived from
_HOOKS = {"logging.Handler", "pickle.Pickler"}  # which say what a class of ours calls; its own names are mangled


def foreign_bases(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, str]]:
    """Classes that derive from one of the standard library, and which."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {(alias.asname or alias.name).partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            first, _, rest = ast.unparse(base).partition("[")[0].partition(".")
            full = ".".join(filter(None, (known.get(first, ""), rest)))
            if full.partition(".")[0] in sys.stdlib_module_names - _MEANT:
                yield node, full


def private_names(body: ast.ClassDef) -> set[str]:
    """Names of one underscore that a class or its instances have."""
    names = {node.name for node in ast.walk(body) if isinstance(node, ast.FunctionDef)}
    names |= {node.attr for node in ast.walk(body) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("path", sorted(ROOT.joinpath("mkernel").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_names_of_pythons_own_classes_are_met(path: Path) -> None:
    """``threading.Thread`` has had a private ``_handle`` since Python 3.13; a class with a method of that name was a thread."""
    for body, base in foreign_bases(ast.parse(path.read_text())):
        assert base in _HOOKS, f"{body.name} is a {base}: let it have one"
        assert private_names(body) == set(), f"{body.name} is a {base}, which may have such names one day"


def test_a_class_that_is_a_thread_is_seen() -> None:
    tree = ast.parse(
        "import threading as t\nfrom logging import Handler\nclass A(t.Thread): pass\nclass B(Handler):\n  def _x(self): self._y"
    )
    (a, thread), (b, handler) = foreign_bases(tree)
    assert (a.name, thread, b.name, handler, private_names(b)) == ("A", "threading.Thread", "B", "logging.Handler", {"_x", "_y"})
