"""Sphinx: ``make docs`` builds build/docs. Pages are Markdown (MyST); the reference comes from docstrings (numpydoc).

Pages cite each other the way source files do (``docs/streams.md, "Graphs"``), so that they read well as plain files. Here these become
links.
"""

from __future__ import annotations

import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from mkernel.version import VERSION  # noqa: E402

project, author, release, version = "mkernel", "mkernel contributors", VERSION, VERSION
copyright = "mkernel contributors; MIT license"
extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
]
templates_path = ["_templates"]
exclude_patterns = ["benchmarks", "_templates"]
html_theme = "furo"
html_title = f"mkernel {VERSION}"
html_copy_source = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # blocks without a language are pictures and command lines
highlight_language = "none"

autodoc_typehints = "none"  # signatures have them; docstrings say shapes and units
autosummary_generate = True
autodoc_mock_imports = ["torch"]  # what mkernel.torch imports: the site is built without it
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

# ---- other projects' references
_INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "cupy": "https://docs.cupy.dev/en/stable/",
    "mpi4py": "https://mpi4py.readthedocs.io/en/stable/",
}


def _reachable() -> dict[str, tuple[str, str]]:
    """Inventories that can be had, each in a file. Without a network there are none: names of other projects are then plain text."""
    folder = HERE.parent / "build" / "inventories"
    found = {}
    for name, url in _INVENTORIES.items():
        file = folder / f"{name}.inv"
        if not file.exists():
            try:
                with urllib.request.urlopen(f"{url}objects.inv", timeout=3) as answer:
                    data = answer.read()
            except (OSError, urllib.error.URLError) as error:
                print(f"intersphinx: no links to other projects ({url}: {error})")
                break  # one that cannot be reached takes seconds, four would take more
            folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        found[name] = (url, str(file))
    return found


intersphinx_mapping = {} if os.environ.get("MKERNEL_DOCS_OFFLINE") else _reachable()

# ---- citations become links
_FENCE = re.compile(r"(?ms)^( *)```.*?^\1```\s*$|^    .*?$")  # blocks of code are left as they are
_SECTION = r'(?:,\s+(?:section\s+)?"(?P<section>[^"]+)")?'
_CITED = re.compile(rf"(?<![\w/`\[])(?<!\]\()(?P<tick>`?)(?P<folder>docs/|\.\./)?(?P<page>\w+\.md)(?P=tick)(?![\w\]]){_SECTION}")


def _anchor(heading: str) -> str:
    """The anchor that MyST, like GitHub, gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _headings(page: str) -> list[str]:
    return re.findall(r"(?m)^#{2,3} (.+?)\s*$", (HERE / page).read_text(encoding="utf-8"))


def link(match: re.Match[str]) -> str:
    """A citation as a Markdown link, or as it is where no such page exists."""
    page, section = match["page"], match["section"]
    if match["folder"] == "../":
        page = "overview.rst" if page == "README.md" else ""
    if not page or not (HERE / page).exists():
        return match[0]
    name = (match["folder"] or "") + match["page"] if match["tick"] else match["page"].removesuffix(".md")
    text = f"`{name}`" if match["tick"] else name
    if not section:
        return f"[{text}]({page})"
    quoted = " ".join(section.split())
    heading = next((heading for heading in _headings(page) if heading.startswith(quoted)), None)
    target = f"{page}#{_anchor(heading)}" if heading else page
    return f'[{text}, "{quoted}"]({target})'


def linked(text: str) -> str:
    """A page with its citations as links, outside of blocks of code."""
    parts, end = [], 0
    for block in _FENCE.finditer(text):
        parts += [_CITED.sub(link, text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, _CITED.sub(link, text[end:])])


def _on_read(app: Any, name: str, content: list[str]) -> None:
    if (HERE / f"{name}.md").exists():
        content[0] = linked(content[0])


def _on_include(app: Any, path: Path, parent: str, content: list[str]) -> None:
    if path.suffix == ".md":
        content[0] = linked(content[0])


# What a program uses of a world; the rest is for mkernel's own layers.
_OF_WORLD = {"empty", "zeros", "barrier", "check", "abort", "close"}


def _on_member(app: Any, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    of_world = getattr(member, "__qualname__", "").startswith("World.") or (isinstance(member, property) and what == "class")
    in_world = of_world and getattr(getattr(member, "fget", member), "__module__", "") == "mkernel.runtime.world"
    return True if in_world and name not in _OF_WORLD else None


def _on_docstring(app: Any, what: str, name: str, member: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [re.sub(r"docs/(\w+)\.md", r":doc:`/\1`", line) for line in lines]


def setup(app: Any) -> None:
    """Connect what this file adds to Sphinx."""
    app.connect("autodoc-skip-member", _on_member)
    app.connect("autodoc-process-docstring", _on_docstring)
    app.connect("source-read", _on_read)
    app.connect("include-read", _on_include)
