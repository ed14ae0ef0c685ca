"""The documents say what the code says: quoted messages are in the source, cited documents exist, and lines can be read."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from mkernel.cli.main import main
from tests.gpu.kinds import read, summary
from tests.unit.test_imports import LAYERS, RUNTIME_FLOORS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in DOCS.glob("*.md"))]
WIDTH = 120
_PLACE = re.compile(r"<[^>]*>")
_SOURCES = ("mkernel", "kernels_src", "tests", "examples")


# ---- messages
def messages() -> list[str]:
    """Every line that docs/troubleshooting.md quotes."""
    blocks = re.findall(r"```text\n(.*?)```", (DOCS / "troubleshooting.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def texts(source: str) -> Iterator[str]:
    """String literals of a module, what an f-string puts in replaced by a zero byte."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def missing(message: str, literals: list[str]) -> list[str]:
    """The parts of a quoted message, between its ``<places>``, that no literal holds."""
    pieces = [part for text in literals for part in text.split("\0")]
    wanted = [part.strip(" :;,(") for part in _PLACE.split(message)]
    return [part for part in wanted if len(part) > 3 and not any(part in piece for piece in pieces)]


@pytest.fixture(scope="module")
def literals() -> list[str]:
    return [text for file in sorted((ROOT / "mkernel").rglob("*.py")) for text in texts(file.read_text())]


@pytest.mark.parametrize("message", messages())
def test_quoted_messages_are_in_the_source(message: str, literals: list[str]) -> None:
    assert max(map(len, _PLACE.split(message))) > 6, "too little text to look for"
    assert not missing(message, literals)


def test_the_check_finds_a_message_that_is_not_there() -> None:
    literals = list(texts('f"rank {rank} waited {seconds:g} s " f"in init for rank {other}"'))
    assert not missing("rank <r> waited <s> s in init for rank <p>", literals)
    assert missing("rank <r> waited <s> seconds for rank <p>", literals) == ["seconds for rank"]


@pytest.mark.parametrize(
    "heading",
    ["A call timed out", "The ranks disagree", "The heap is too small", "Results differ", "Slower than expected", "Does not compile"],
)
def test_what_goes_wrong_has_a_section(heading: str) -> None:
    assert f"\n## {heading}\n" in (DOCS / "troubleshooting.md").read_text()


# ---- what pages cite
def test_every_document_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert sorted(re.findall(r"`(?:\.\./)?([\w]+\.md)`", index)) == sorted(pages | {"README.md"}), "each once"
    further = (ROOT / "README.md").read_text().partition("## Further reading")[2]
    assert sorted(re.findall(r"- `docs/(\w+\.md)`", further)) == sorted(pages), "each once"


def test_nothing_cites_a_document_that_is_not_there() -> None:
    files = [path for folder in _SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cuh", ".h", ".hpp", ".cpp")]
    cited = {(str(path.relative_to(ROOT)), name) for path in files for name in re.findall(r"docs/(\w+\.md)", path.read_text())}
    cited |= {(page, name) for page in PAGES for name in re.findall(r"docs/(\w+\.md)", (ROOT / page).read_text())}
    assert cited
    assert sorted((where, name) for where, name in cited if not (DOCS / name).exists()) == []


def _sections() -> list[tuple[str, str, str]]:
    """Citations of a section: page, document, heading."""
    found = []
    for page in PAGES:
        text = re.sub(r"\s+", " ", (ROOT / page).read_text())
        found += [(page, name, heading) for name, heading in re.findall(r"docs/(\w+\.md), \"([^\"]+)\"", text)]
    return found


@pytest.mark.parametrize(("page", "name", "heading"), _sections())
def test_cited_sections_exist(page: str, name: str, heading: str) -> None:
    text = (DOCS / name).read_text()
    assert re.search(rf"(?m)^#+ {re.escape(heading)}|^- \*\*{re.escape(heading)}|^\*\*{re.escape(heading)}", text)


_LONG = "docs/model.md", "docs/scale.md"  # every row that was ever measured is planned and predicted, and thousands of nodes


def _check_commands(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A block that begins with ``$ python -m mkernel`` shows the beginning of what that prints."""
    for command, shown in re.findall(r"```\n\$ python -m mkernel (model [^\n]*)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out.startswith(shown.rstrip("\n"))


@pytest.mark.parametrize("page", [page for page in PAGES if page not in _LONG])
def test_commands_print_what_a_page_says(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    _check_commands(page, capsys)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", _LONG)
def test_commands_that_take_long_print_what_a_page_says(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    _check_commands(page, capsys)


def test_how_well_kinds_of_tiles_are_ranked() -> None:
    found = re.findall(r"\$ python tests/gpu/kinds.py --read (\S+)\n([^`$]*)\n", (DOCS / "model.md").read_text())
    assert len(found) > 1
    for path, shown in found:
        assert summary(read([ROOT / path])) == shown


def _layers(text: str) -> list[set[str]]:
    return [set(re.split(r"[\s|]+", layer.strip())) for layer in text.split("<")]


@pytest.mark.parametrize(
    ("first", "layers"),
    [
        ("errors |", [{name or "mkernel" for name in layer} - {"version"} for layer in LAYERS if layer != ("__main__",)]),
        ("integers <", [set(floor) for floor in RUNTIME_FLOORS]),
    ],
)
def test_the_order_of_imports_is_the_one_that_is_tested(first: str, layers: list[set[str]]) -> None:
    (block,) = [
        block for block in re.findall(r"(?m)(?:^    .+\n)+", (DOCS / "architecture.md").read_text()) if block.strip().startswith(first)
    ]
    assert _layers(block) == layers


def _names(text: str) -> set[str]:
    """Names of code in the pictures of a page: its blocks without a language."""
    blocks = re.findall(r"(?m)^```\n(.*?)^```$", text, re.DOTALL)
    return {name for block in blocks for name in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b|Handshake|Mailbox|EntryGate|CopyRing", block)}


def test_pictures_name_what_there_is() -> None:
    files = [path for folder in ("mkernel", "kernels_src") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cuh", ".h")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in files)))
    names = _names((DOCS / "architecture.md").read_text())
    assert len(names) > 10
    assert names - words == set()


# ---- how they look
def wide(text: str) -> list[int]:
    """Numbers of lines longer than can be read, outside of tables and blocks of code."""
    found, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.startswith("```")
        if len(line) > WIDTH and not (in_code or line.startswith(("|", "    "))):
            found.append(number)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_lines_can_be_read(page: str) -> None:
    assert wide((ROOT / page).read_text()) == []


def test_the_check_sees_a_wide_line() -> None:
    assert wide("short\n" + "x " * 61 + "\n| " + "x" * 130 + "\n```\n" + "x" * 130 + "\n```\n") == [2]
