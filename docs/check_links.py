"""``python docs/check_links.py build/docs``: whether every link between pages of the built site leads somewhere."""

from __future__ import annotations

import html.parser
import sys
import urllib.parse
from pathlib import Path


class _Page(html.parser.HTMLParser):
    """The anchors of a page, and what it links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given.get("id") or "", given.get("name") or ""}
        self.links += [link for link in (given.get("href"), given.get("src")) if link]


def broken(root: Path) -> list[str]:
    """``page: link`` for each link inside the site that leads to no file, or to no anchor of a page."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path.resolve()
            there = pages.get(root / target.relative_to(root.resolve())) if target.is_relative_to(root.resolve()) else None
            anchor = urllib.parse.unquote(url.fragment)
            if not target.exists() or (there is not None and anchor not in there.anchors):
                found.append(f"{path.relative_to(root)}: {link}")
    return found


def main() -> int:
    """Exit status 1 if a link is broken, or if there is no page."""
    root = Path(sys.argv[1])
    found = broken(root)
    count = len(list(root.rglob("*.html")))
    print("\n".join([*found, f"{count} pages, {len(found)} broken links"]))
    return 1 if found or not count else 0


if __name__ == "__main__":
    sys.exit(main())
