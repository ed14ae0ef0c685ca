"""The pictures of a trace and of a tuning: every text stays inside, and no trace is too long for them."""

from __future__ import annotations

import itertools
import string
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mkernel.abi import Role, TraceKind
from mkernel.ops.split_search import Trial, TuneResult
from mkernel.planner.split import Split
from mkernel.runtime.pictures import barchart, bins, linechart, svg, timeline
from mkernel.runtime.trace import _event_type

SVG = "{http://www.w3.org/2000/svg}"

# Advance widths of ' ' to '~' in DejaVu Sans, a wide font, in 1/2048 of the font size.
WIDE = [
    651, 821, 942, 1716, 1303, 1946, 1597, 563, 799, 799, 1024, 1716, 651, 739, 651, 690, 1303, 1303, 1303, 1303, 1303, 1303, 1303, 1303,
    1303, 1303, 690, 690, 1716, 1716, 1716, 1087, 2048, 1401, 1405, 1430, 1577, 1294, 1178, 1587, 1540, 604, 604, 1343, 1141, 1767, 1532,
    1612, 1235, 1612, 1423, 1300, 1251, 1499, 1401, 2025, 1403, 1251, 1403, 799, 690, 799, 1716, 1024, 1024, 1255, 1300, 1126, 1300, 1260,
    721, 1300, 1298, 569, 569, 1186, 569, 1995, 1298, 1253, 1300, 1300, 842, 1067, 803, 1298, 1212, 1675, 1212, 1212, 1075, 1303, 690,
    1303, 1716,
]  # fmt: skip
OTHERS = {"×": 0.84, "µ": 0.64, "…": 1.0, "é": 0.62, "Ж": 1.08, "漢": 1.0, "\ufffd": 1.03, "😀": 1.3}


def advance(text: str, size: float) -> float:
    return size * sum(WIDE[ord(c) - 32] / 2048 if " " <= c <= "~" else OTHERS[c] for c in text)


def assert_texts_inside(picture: str) -> list[str]:
    """The texts of a picture, each of which lies inside its view box."""
    root = ElementTree.fromstring(picture)
    left, top, right, bottom = map(float, root.attrib["viewBox"].split())
    texts: list[str] = []

    def visit(element: ElementTree.Element, dy: float, size: float) -> None:
        size = float(element.attrib.get("font-size", size))
        if move := element.attrib.get("transform", ""):
            dy += float(move.removeprefix("translate(0 ").removesuffix(")")) if move.startswith("translate(0 ") else 0.0
        if element.tag == SVG + "text":
            text = element.text or ""
            x, y, width = float(element.attrib["x"]), float(element.attrib["y"]) + dy, advance(text, size)
            x -= {"start": 0.0, "middle": width / 2, "end": width}[element.attrib.get("text-anchor", "start")]
            assert left <= x, (text, x)
            assert x + width <= right, (text, x + width)
            assert top <= y - size, (text, y)
            assert y + 0.25 * size <= bottom, (text, y)
            texts.append(text)
        for child in element:
            visit(child, dy, size)

    visit(root, 0.0, 16.0)
    return texts


def random_text(rng: np.random.Generator) -> str:
    """Nothing, one word, many, one very long word, lines, characters that XML must escape or cannot hold."""
    alphabet = [*string.ascii_letters, *string.digits, *" .,_-<>&\"'()@%W", *OTHERS]
    length = int(rng.choice([0, 1, 10, 40, 90, 200, 3000]))
    text = "".join(rng.choice(alphabet) for _ in range(length))
    style = rng.integers(4)
    return text if style == 0 else text.replace(" ", "W") if style == 1 else "\n".join(text.split(".")) if style == 2 else f"\x00{text}\x1b"


def events_of(*rows: tuple[int, int, Role, TraceKind, int, int, int]) -> Any:
    """As ``Trace.events``: (cta, lane, role, kind, argument, begin, end)."""
    return np.sort(np.array([(*row, 0, 0) for row in rows], _event_type()), order=["begin", "cta", "lane"])


def random_events(rng: np.random.Generator) -> Any:
    ctas, longest = int(rng.choice([1, 3, 40, 148])), int(rng.choice([1, 50, 10**6, 10**12, 10**15]))
    first = {cta: Role(int(rng.integers(4))) for cta in range(ctas)}
    rows = []
    for cta in range(ctas):
        for lane in (1, 0) if first[cta] == Role.compute else (2, 1, 0):
            begin = int(rng.integers(longest))
            role = first[cta] if lane == 2 else Role.compute
            rows.append(
                (cta, lane, role, TraceKind(int(rng.integers(1, 7))), int(rng.integers(2**32)), begin, begin + int(rng.integers(longest)))
            )
    return events_of(*rows)


@pytest.mark.parametrize("turn", range(40))
def test_texts_of_a_timeline_stay_inside(rng: np.random.Generator, turn: int) -> None:
    assert_texts_inside(timeline.draw(random_events(rng), random_text(rng)))


@pytest.mark.parametrize("turn", range(40))
def test_texts_of_a_bar_chart_stay_inside(rng: np.random.Generator, turn: int) -> None:
    scale = 10.0 ** rng.integers(-5, 8)
    middle = [float(value) * scale for value in rng.uniform(0.1, 1, int(rng.integers(0, 30)))]
    bars = [barchart.Bar(int(rng.integers(3)), random_text(rng), m, 0.9 * m, float(rng.uniform(1, 3)) * m, "#123456") for m in middle]
    texts = assert_texts_inside(barchart.draw(random_text(rng), bars))
    assert sum(text.endswith(" ms") for text in texts) >= len(bars)


@pytest.mark.parametrize("turn", range(20))
def test_texts_of_a_line_chart_stay_inside(rng: np.random.Generator, turn: int) -> None:
    scale = 10.0 ** rng.integers(-5, 8)
    lines = {
        f"{i} {random_text(rng)}": [(float(x), float(y) * scale) for x, y in enumerate(rng.uniform(0, 1, int(rng.integers(0, 9))))]
        for i in range(int(rng.integers(0, 4)))
    }
    picture = linechart.draw(random_text(rng), random_text(rng), random_text(rng), lines)
    assert_texts_inside(picture)
    points = ElementTree.fromstring(picture).findall(f".//{SVG}circle")
    assert len(points) == sum(map(len, lines.values()))


def test_points_of_a_line_chart_lie_at_their_values() -> None:
    root = ElementTree.fromstring(linechart.draw("t", "x", "y", {"a": [(1, 10.0), (3, 20.0)], "b": [(2, 5.0)]}))
    places = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in root.findall(f".//{SVG}circle")]
    (x1, y10), (x3, y20), (x2, y5) = places
    assert x2 == pytest.approx((x1 + x3) / 2, abs=0.2)
    assert y10 - y20 == pytest.approx(2 * (y5 - y10), abs=0.4)
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert {"0", "5", "10", "15", "20", "1", "2", "3", "a", "b", "x", "y"} <= set(texts)


def test_texts_of_a_tuning_stay_inside_and_are_complete() -> None:
    splits = [Split(compute=4, intra_comm=a, inter_send=b, inter_reduce=c) for a, b, c in itertools.product((0, 128), repeat=3)]
    title = "allgather_gemm: C (16384, 4096) = A (16384, 16384) @ B (16384, 4096), bfloat16; 2 nodes of 2, tiles of 128 x 256, pull"
    result = TuneResult("allgather_gemm", title, splits[1], splits[0], tuple(Trial(i // 3, s, 1.5, 1.4, 1.7) for i, s in enumerate(splits)))
    texts = assert_texts_inside(result._repr_svg_())
    assert title in " ".join(texts)
    assert "intra_comm 128, inter_send 128, inter_reduce 128" in texts
    assert texts.count("1.5000 ms") == len(splits)


def test_titles_lose_nothing_unless_they_are_longer_than_a_page() -> None:
    words = [f"word{i}" for i in range(100)]
    head, _ = svg.header(" ".join(words), 8, 14, 1000)
    assert " ".join(ElementTree.fromstring(line).text or "" for line in head).split() == words
    head, bottom = svg.header("x" * 100_000, 8, 14, 1000)
    assert len(head) == 12
    assert head[-1].endswith("…</text>")
    assert bottom < 300


@pytest.mark.parametrize(("size", "room"), [(11, 0), (11, 5), (14, 100), (14, 984)])
def test_what_is_fitted_fits(rng: np.random.Generator, size: float, room: float) -> None:
    for _ in range(50):
        text = random_text(rng).replace("\n", " ")
        short = svg.fitted(text, size, room)
        assert advance(short, size) <= max(room, svg.width("…", size))
        assert svg.clean(text).startswith(short.removesuffix("…"))
        if svg.width(svg.clean(text), size) <= room:
            assert short == svg.clean(text)


# ---- long traces

Kinds = Callable[[np.random.Generator, int], Any]


def generated(count: int, ctas: int, kinds: Kinds, rng: np.random.Generator, longest: int = 2000) -> Any:
    """About ``count`` intervals in all three lanes of every CTA, with gaps between them."""
    per, parts = count // (3 * ctas), []
    for cta, lane in itertools.product(range(ctas), range(3)):
        events = np.zeros(per, _event_type())
        times = np.cumsum(rng.integers(1, longest, 2 * per))
        events["cta"], events["lane"], events["role"] = cta, lane, Role.compute if lane < 2 else Role(int(rng.integers(1, 4)))
        events["kind"], events["argument"] = kinds(rng, per), rng.integers(0, 2**32, per)
        events["begin"], events["end"] = times[::2], times[1::2]
        parts.append(events)
    return np.sort(np.concatenate(parts), order=["begin", "cta", "lane"])


def mixed(rng: np.random.Generator, count: int) -> Any:
    return rng.integers(1, 7, count)


def alternating(rng: np.random.Generator, count: int) -> Any:
    return 1 + np.arange(count) % 2


@pytest.mark.parametrize(("count", "ctas", "kinds"), [(100_000, 1, alternating), (1_000_000, 132, mixed), (100_000, 1100, alternating)])
def test_many_intervals_make_a_small_picture(rng: np.random.Generator, count: int, ctas: int, kinds: Any) -> None:
    events = generated(count, ctas, kinds, rng)
    picture = timeline.draw(events, "long")
    assert len(picture.encode()) <= timeline.MOST_BYTES
    assert any(f"{events.size} intervals: each bin of" in text for text in assert_texts_inside(picture))
    assert (f"the first 1024 of {ctas} CTAs" in picture) == (ctas > 1024)


@pytest.mark.parametrize("count", [3 * 132, timeline.MOST_BARS])
def test_a_short_trace_is_drawn_interval_by_interval(rng: np.random.Generator, count: int) -> None:
    """Intervals that can be told apart: each has a bar of its own, with its kind, number and duration."""
    events = generated(count, 132, alternating, rng, longest=10**6)
    picture = timeline.draw(events, "short")
    titles = [title.text for title in ElementTree.fromstring(picture).iter(SVG + "title")]
    expected = [f"CTA {e['cta']} {TraceKind(e['kind']).name} {e['argument']}: {(e['end'] - e['begin']) / 1e3:.2f} µs" for e in events]
    assert sorted(titles, key=str) == sorted(expected)
    assert "bin of" not in picture
    assert len(picture.encode()) <= timeline.MOST_BYTES


def test_one_interval_more_than_can_be_drawn_one_by_one(rng: np.random.Generator) -> None:
    events = generated(timeline.MOST_BARS + 3 * 132, 132, mixed, rng, longest=10**6)
    picture = timeline.draw(events, "longer")
    assert "bin of" in picture
    assert picture.count("<rect") == 1 + len(TraceKind)  # the page and the legend


def test_bins_have_the_kind_that_takes_most_of_them(rng: np.random.Generator) -> None:
    """Against counting nanosecond by nanosecond; a bin in which something begins is never empty."""
    for _ in range(20):
        span, count = 1000, int(rng.integers(1, 60))
        times = np.sort(rng.choice(span, 2 * count, replace=False))
        events = np.zeros(count, _event_type())
        events["kind"], events["begin"], events["end"] = rng.integers(1, 7, count), times[::2], times[1::2]
        edges = np.unique(np.concatenate([[0, span + 1], rng.integers(0, span, 12)])).astype(np.int64)
        found = bins.busiest(events, edges)
        by_ns = np.zeros((len(TraceKind) + 1, span + 1), np.int64)
        for event in events:
            by_ns[event["kind"], event["begin"] : event["end"]] = 1
        for kind, begin, end in zip(found.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            covered = by_ns[:, begin:end].sum(axis=1)
            assert (kind == -1) == (not covered.any())
            assert kind == -1 or covered[kind] == covered.max()


def test_bins_of_clocks_that_are_far_from_zero_do_not_overflow() -> None:
    """The sums of begins and ends wrap around; their differences do not."""
    count, span = 100_000, 10**14
    begins = np.linspace(0, span - 10**8, count).astype(np.int64)
    events = np.zeros(count, _event_type())
    events["kind"], events["begin"], events["end"] = TraceKind.tile, begins, begins + 10**8
    events["kind"][count // 2 :] = TraceKind.wait
    edges = np.linspace(0, span, 101).astype(np.int64)
    assert bins.busiest(events, edges).tolist() == [TraceKind.tile] * 50 + [TraceKind.wait] * 50


def test_an_interval_without_length_shows() -> None:
    events = events_of((0, 1, Role.compute, TraceKind.tile, 0, 0, 0), (0, 1, Role.compute, TraceKind.tile, 1, 100, 100))
    assert bins.busiest(events, np.array([0, 10, 90, 101])).tolist() == [TraceKind.tile, -1, TraceKind.tile]


def test_paths_of_bins_cover_what_was_recorded() -> None:
    """The first, a middle and the last bin of one lane, read back from the moves of its path."""
    rows = [(0, 1, Role.compute, TraceKind.tile, i, 10 * i, 10 * i + 10) for i in (0, 1, 5, 9)]
    ((path,), bin_ns) = bins.drawn_in_bins([(4.0, 2.0, events_of(*rows))], 100, 50.0, 10.0, timeline.COLOURS)
    assert bin_ns == 10.0
    assert 'd="M0 5h2m3 0h1m3 0h1"' in path
    assert "translate(50 0) scale(1 1)" in path
    assert 'stroke-width="2"' in path
