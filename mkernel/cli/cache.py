"""``mkernel cache``: shows where compiled kernels, plans and tuned splits are kept and how large they are, or clears them."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mkernel import env
from mkernel.jit.headers import sources_digest
from mkernel.runtime import tuning_cache as tuned
from mkernel.tools.table import format_table

__all__ = ["main"]

# What mkernel.jit, preparations and mk.tune write. Nothing else is touched: MKERNEL_CACHE_DIR may name a folder that holds other things.
_PARTS = {
    "cpu": ("*.so", "*.cpp", "*.lock", "*.partial"),
    "cuda": ("entries", "tmp", "source", "locks"),
    "plans": ("*.plans", "*.partial"),
    "tuned": ("*.json*",),
}


def main(argv: Sequence[str]) -> int:
    """``show`` (the default) or ``clear``. Returns the exit status."""
    action, folder = _parser().parse_args(argv).action, env.CACHE_DIR.get()
    print(folder)
    before = {target: _content(folder / target, target) for target in _PARTS}
    if action == "show":
        print(format_table(["part", "files", "MiB"], [[target, str(n), f"{size / 2**20:.1f}"] for target, (n, size) in before.items()]))
        entries = sorted((entry for _, entry in tuned.entries()), key=lambda entry: _order(str(entry["problem"])))
        if entries:
            code = sources_digest()
            print("\n" + format_table(["tuned for", "rows of a", "SMs", "on", "date", "used"], [_tuned(entry, code) for entry in entries]))
        return 0
    for target in _PARTS:
        _clear(folder / target, target)
    left = sum(_content(folder / target, target)[0] for target in _PARTS)
    print(f"removed {sum(n for n, _ in before.values()) - left} files" + (f"; {left} could not be removed" if left else ""))
    return 1 if left else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mkernel cache", description="The cache of compiled kernels, plans and tuned splits (MKERNEL_CACHE_DIR moves it)."
    )
    parser.add_argument("action", nargs="?", choices=("show", "clear"), default="show")
    return parser


def _order(name: str) -> list[tuple[int, str]]:
    """A key that sorts names by the numbers in them, too."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _tuned(entry: Mapping[str, Any], code: str) -> list[str]:
    """One line of the table. ``code``: digest of the installed device code."""
    try:
        what, (first, last) = _asked(entry["op"], dict(entry["asked"])), map(int, entry["rows"])
        rows = f"{first} to {last}"
    except (ArithmeticError, KeyError, TypeError, ValueError):  # written by hand, or by another version
        what, rows = str(entry["problem"]), ""
    roles = ", ".join(f"{role} {sms}" for role, sms in entry["split"].items())
    where = ", ".join(filter(None, (f"{entry['device']}, {entry['sms']} SMs", entry["transport"])))
    used = "yes" if entry["kernels"] == code else "no: other device code"
    return [what, rows, roles, where, str(entry.get("date", ""))[:10], used]


def _asked(op: str, problem: dict[str, Any]) -> str:
    """A problem (``planner/allgather_gemm.py``, ``planner/reduce.py``) in words."""
    ranks = problem["topology"]["ranks_per_node"]
    layout = "row-major" if problem["b_row_major"] else "transposed"
    options = [f"{name} {problem[name]}" for name in ("partials", "algorithm") if problem.get(name)]
    facts = [
        f"b ({problem['k']}, {problem['n']}) {layout}",
        problem["dtype"],
        *options,
        f"{problem['topology']['size'] // ranks}x{ranks} ranks",
    ]
    return f"{op}: {', '.join(facts)}"


def _paths(folder: Path, target: str) -> Iterator[Path]:
    for pattern in _PARTS[target]:
        yield from folder.glob(pattern)


def _content(folder: Path, target: str) -> tuple[int, int]:
    """Number of files and bytes. A file that another process removes meanwhile is not counted."""
    sizes = []
    for path in _paths(folder, target):
        for file in (path, *path.rglob("*")):
            try:
                if file.is_file():
                    sizes.append(file.stat().st_size)
            except FileNotFoundError:
                continue
    return len(sizes), sum(sizes)


def _clear(folder: Path, target: str) -> None:
    """Remove the files. Running worlds go on: loaded kernels stay loaded, and missing ones are compiled again."""
    for path in list(_paths(folder, target)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
