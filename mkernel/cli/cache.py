"""``mkernel cache``: where compiled kernels and tuned splits are kept, how much there is, and away with it."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from mkernel import env
from mkernel.cli.table import format_table

__all__ = ["main"]

# What mkernel.jit and mk.tune write. Nothing else is touched: MKERNEL_CACHE_DIR may name a folder that holds other things.
_PARTS = {
    "cpu": ("*.so", "*.cpp", "*.lock", "*.partial"),
    "cuda": ("entries", "tmp", "source", "locks"),
    "tuned": ("*.json*",),
}


def main(argv: Sequence[str]) -> int:
    """``show`` (the default) or ``clear``."""
    parser = argparse.ArgumentParser(
        prog="mkernel cache", description="The cache of compiled kernels and tuned splits (MKERNEL_CACHE_DIR moves it)."
    )
    parser.add_argument("action", nargs="?", choices=("show", "clear"), default="show")
    action, folder = parser.parse_args(argv).action, env.CACHE_DIR.get()
    print(folder)
    before = {target: _content(folder / target, target) for target in _PARTS}
    if action == "show":
        print(format_table(["part", "files", "MiB"], [[target, str(n), f"{size / 2**20:.1f}"] for target, (n, size) in before.items()]))
        return 0
    for target in _PARTS:
        _clear(folder / target, target)
    left = sum(_content(folder / target, target)[0] for target in _PARTS)
    print(f"removed {sum(n for n, _ in before.values()) - left} files" + (f"; {left} could not be removed" if left else ""))
    return 1 if left else 0


def _paths(folder: Path, target: str) -> Iterator[Path]:
    for pattern in _PARTS[target]:
        yield from folder.glob(pattern)


def _content(folder: Path, target: str) -> tuple[int, int]:
    """Number of files and bytes. Other processes may be writing: what vanishes meanwhile is not counted."""
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
    """Safe beside running worlds: loaded kernels stay loaded, and what is needed again is compiled again."""
    for path in list(_paths(folder, target)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
