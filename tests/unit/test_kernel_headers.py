"""The folders of ``kernels_src`` are layers: a header includes what is below it only, and is named by its path from the top."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

import pytest

from mkernel.jit import headers

KERNELS = Path(__file__).parents[2] / "kernels_src"
LAYERS = ("", "comm", "tile", "attention", "gather", "reduce", "moe", "ops")  # each may include itself and those before it
HEADERS = sorted(file.relative_to(KERNELS) for file in KERNELS.rglob("*.*h") if file.relative_to(KERNELS).parts[0] != "cpu")


def included(header: Path) -> list[Path]:
    return [Path(name) for name in re.findall(r'^#include "(.*)"', (KERNELS / header).read_text(), re.MULTILINE)]


def layer(header: Path) -> int:
    return LAYERS.index(header.parent.as_posix().removeprefix("."))


@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_includes_go_down(header: Path) -> None:
    for other in included(header):
        assert other in HEADERS, "named by its path from kernels_src"
        assert layer(other) <= layer(header)


def test_operands_of_wgmma_are_in_order() -> None:
    """Accumulators come from the first on, for any number of columns, and their names behind those of five other operands."""
    text = (KERNELS / "wgmma.cuh").read_text()
    parts = {int(n): body for n, body in re.findall(r"^#define MK_D(\d+)\(i\) (.*)$", text, re.MULTILINE)}
    names = {int(n): body for n, body in re.findall(r"^#define MK_NAMES(\d+) (.*)$", text, re.MULTILINE)}

    def accumulators(n: int, first: int) -> list[int]:
        found: list[int] = []
        for inner, own in re.findall(r'(MK_D\d+\(i[^)]*\))|"\+f"\(d\[(i[^\]]*)\]\)', parts[n]):
            of, at = re.fullmatch(r"MK_D(\d+)\(i(?: \+ (\d+))?\)", inner).groups() if inner else (None, None)  # type: ignore[union-attr]
            found += accumulators(int(of), first + int(at or 0)) if of else [first + int(own.removeprefix("i").removeprefix(" + ") or 0)]
        return found

    def named(n: int) -> list[int]:
        before = re.match(r"MK_NAMES(\d+) ", names[n])
        return (named(int(before[1])) if before else []) + [int(name) for name in re.findall(r"%(\d+)", names[n])]

    steps = [int(n) for n in re.findall(r"MK_(?:STEP|ANY)\(\d+, (\d+)\)", text)]
    assert {*range(8, 33), 2, 4, 6} <= set(steps)
    assert all(int(columns) == 8 * int(n) for columns, n in re.findall(r"MK_(?:STEP|ANY)\((\d+), (\d+)\)", text))
    for n in steps:
        assert accumulators(n, 0) == list(range(4 * n))
        assert named(n) == list(range(5, 5 + 4 * n))


def test_no_circle_of_headers() -> None:
    left = {header: set(included(header)) for header in HEADERS}
    assert len(left) > 20
    while leaves := [header for header, names in left.items() if not names & left.keys()]:
        for header in leaves:
            del left[header]
    assert not left


def test_no_op_includes_another() -> None:
    ops = {header for header in HEADERS if header.parent.name == "ops"}
    assert len(ops) > 4
    assert [op for op in ops if ops & set(included(op))] == []


def told_headers() -> list[list[Path]]:
    """The headers that each row of the table in docs/architecture.md names."""
    page = (KERNELS.parent / "docs" / "architecture.md").read_text()
    table = page.partition("### `kernels_src`")[2].partition("| Folder | File |")[2].partition("\n\n")[0]
    rows, folder = [], ""
    for first, files, *_ in (line.strip("|").split("|") for line in table.splitlines()[2:]):
        folder = first.strip(" `/") or folder
        rows.append([Path("" if folder == "top" else folder, name) for name in re.findall(r"`(\w+\.\w+)`", files)])
    return rows


def test_the_table_names_every_header_once_and_those_below_first() -> None:
    rows = told_headers()
    assert sorted(itertools.chain(*rows)) == HEADERS
    above: set[Path] = set()
    for row in rows:
        above.update(row)
        for header in row:
            assert set(included(header)) <= above, f"{header} includes what is below it in the table"


def test_the_digest_of_the_device_code_is_of_all_its_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = tmp_path / "kernels_src"
    shutil.copytree(KERNELS, copy)
    monkeypatch.setenv("MKERNEL_KERNELS_SRC", str(copy))
    assert len(list(copy.rglob("ptx.cuh"))) == 2
    digests = {headers.sources_digest()}
    for count, header in enumerate(HEADERS, 2):
        (copy / header).write_text("// changed\n")
        digests.add(headers.sources_digest())
        assert len(digests) == count, header
    (copy / "cpu/ptx.cuh").write_text("// changed\n")  # target cpu has no splits of its own
    digests.add(headers.sources_digest())
    assert len(digests) == len(HEADERS) + 1
