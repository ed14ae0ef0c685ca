"""Text in SVG pictures that stays inside them: how wide it is at most, broken into lines, shortened."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterable, Iterator

__all__ = ["clean", "fitted", "header", "lines", "page", "width"]

_LINE = 1.35  # from one line of text to the next, in font sizes

# Upper bounds of advance widths in font sizes, over the sans-serif fonts that viewers use (Arial, Helvetica, DejaVu Sans, Verdana).
_CLASSES = (
    (0.46, " !'(),-./:;I[\\]fijltr|"),
    (0.66, '0123456789abcdeghknopqsuvxyz"$*?_`{}µ'),
    (1.08, "mW@%"),
)
_WIDTHS = {character: bound for bound, characters in _CLASSES for character in characters}
_ASCII, _ANY = 0.88, 1.45
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # what XML or UTF-8 forbids, and control characters


def clean(text: str) -> str:
    """The text with what XML cannot hold replaced, ready for ``html.escape``."""
    return _UNPRINTABLE.sub("\ufffd", text)


def width(text: str, size: float) -> float:
    """Pixels that the text takes at a font size, at most."""
    return size * sum(_WIDTHS.get(c, _ASCII if c.isascii() or c == "×" else _ANY) for c in text)


def fitted(text: str, size: float, room: float) -> str:
    """The text, or as much of its beginning as fits into ``room`` pixels, with an ellipsis."""
    text = clean(text)
    if width(text, size) <= room:
        return text
    left = room - width("…", size)
    for end, character in enumerate(text):
        left -= width(character, size)
        if left < 0:
            return text[:end] + "…"
    raise AssertionError("a text that does not fit has an end that does not")


def lines(text: str, size: float, room: float) -> Iterator[str]:
    """The text in lines of at most ``room`` pixels, broken between words where that is possible, else inside them."""
    for part in text.splitlines() or [""]:
        yield from _broken(part, size, room)


def _broken(text: str, size: float, room: float) -> Iterator[str]:
    line = ""
    for word in map(clean, text.split()):
        if line and width(f"{line} {word}", size) > room:
            yield line
            line = ""
        line = f"{line} {word}" if line else word
        while width(line, size) > room and len(line) > 1:
            end = next(end for end in range(2, len(line) + 1) if width(line[:end], size) > room) - 1
            yield line[:end]
            line = line[end:]
    yield line


def page(width: float, height: float, font_size: float, body: Iterable[str]) -> str:
    """An SVG picture on white, with the elements of ``body``."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="{font_size:g}">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>"]) + "\n"


def header(title: str, left: float, size: float, page_width: float, most: int = 12) -> tuple[list[str], float]:
    """``<text>`` elements of a title at the top of a page, and the y below it. A title of more than ``most`` lines ends in an ellipsis."""
    room = page_width - left - 8
    broken = list(itertools.islice(lines(title, size, room), most + 1))
    if len(broken) > most:
        broken[most - 1 :] = [fitted(broken[most - 1], size, room - width("…", size)).removesuffix("…") + "…"]
    text = [
        f'<text x="{left:g}" y="{22 + i * _LINE * size:.1f}" font-size="{size:g}">{html.escape(line)}</text>'
        for i, line in enumerate(broken)
    ]
    return text, 22 + (len(broken) - 1) * _LINE * size
