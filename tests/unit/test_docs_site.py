"""The site that ``make docs`` builds: what Sphinx is not needed for. Links, the lists of pages and names, and the tools in docs/."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import mkernel as mk

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in DOCS.glob("*.md"))]


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MKERNEL_DOCS_OFFLINE", "1")
        return _module(DOCS / "conf.py")


# ---- lists
def test_every_page_is_in_the_contents() -> None:
    listed = re.findall(r"(?m)^   (?:.* <)?(\w+)>?$", (DOCS / "index.rst").read_text())
    pages = {page.stem for page in [*DOCS.glob("*.md"), *DOCS.glob("*.rst")]} - {"index"}
    assert sorted(listed) == sorted(pages), "each once"


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"(?m)^   (\w+)$", (DOCS / "api.rst").read_text())
    assert sorted(listed) == sorted(mk.__all__), "each once"


def test_every_name_of_torch_is_in_its_reference() -> None:
    """The module is read, not imported: torch may not be here."""
    listed = re.findall(r"(?m)^   (\w+)$", (DOCS / "api_torch.rst").read_text())
    module = ast.parse((ROOT / "mkernel" / "torch" / "__init__.py").read_text())
    (names,) = [
        ast.literal_eval(node.value) for node in module.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert sorted(listed) == sorted(names), "each once"


# ---- links
def links(text: str) -> list[str]:
    """Targets of Markdown links, outside of blocks of code, that are not addresses."""
    prose = re.sub(r"(?ms)^ *```.*?^ *```", "", text)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in target]


def lost(page: Path, conf: ModuleType, text: str) -> list[str]:
    """Links of a page that lead to no file, or to no heading of one."""
    found = []
    for target in links(text):
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in map(conf._anchor, re.findall(r"(?m)^#+ (.+)$", file.read_text()))):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str, conf: ModuleType) -> None:
    """Also those that citations of other pages become."""
    path = DOCS / Path(page).name  # of the front page, too, which is included from there
    text = (ROOT / page).read_text()
    assert lost(ROOT / page, conf, text) == []
    made = conf.linked(text)
    assert lost(path, conf, made) == []
    assert len(links(made)) >= len(re.findall(r"docs/\w+\.md", re.sub(r"(?ms)^ *```.*?^ *```|^    .*?$", "", text)))


def test_the_check_sees_a_lost_link(conf: ModuleType) -> None:
    text = "[a](streams.md) [b](nowhere.md) [c](streams.md#graphs) [d](streams.md#nothing) [e](https://host/x)\n```\n[f](gone.md)\n```\n"
    assert lost(DOCS / "page.md", conf, text) == ["nowhere.md", "streams.md#nothing"]


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("see docs/streams.md.", "see [streams](streams.md)."),
        ("(docs/streams.md)", "([streams](streams.md))"),
        (
            'docs/streams.md,\n"Beside NCCL" says',
            '[streams, "Beside NCCL"](streams.md#beside-nccl-and-other-kernels-that-wait-for-each-other) says',
        ),
        ("| `moe.md` |", "| [`moe.md`](moe.md) |"),
        ("`../README.md`", "[`../README.md`](overview.rst)"),
        ("[x](moe.md)", "[x](moe.md)"),
        ("docs/{}.md".format("gone"), "docs/{}.md".format("gone")),
        ("```\ndocs/moe.md\n```\n", "```\ndocs/moe.md\n```\n"),
        ("    docs/moe.md\n", "    docs/moe.md\n"),
    ],
)
def test_citations_become_links(text: str, made: str, conf: ModuleType) -> None:
    assert conf.linked(text) == made


def test_broken_links_of_the_built_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text("<p id='there'><a href='https://host/'>")
    (tmp_path / "a.html").write_text("<a href='b.html#there'><a href='b.html#gone'><a href='c.html'><img src='d.svg'><a href='#'>")
    assert _module(DOCS / "check_links.py").broken(tmp_path) == ["a.html: b.html#gone", "a.html: c.html", "a.html: d.svg"]
