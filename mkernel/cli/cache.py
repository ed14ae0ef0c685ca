"""``mkernel cache``: where compiled kernels are kept, how much there is, and away with it."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from mkernel import env
from mkernel.cli.table import format_table

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """``show`` (the default) or ``clear``."""
    parser = argparse.ArgumentParser(prog="mkernel cache", description="The cache of compiled kernels (MKERNEL_CACHE_DIR moves it).")
    parser.add_argument("action", nargs="?", choices=("show", "clear"), default="show")
    folder = env.CACHE_DIR.get()
    if parser.parse_args(argv).action == "clear":
        return _clear(folder)
    print(folder)
    if not folder.is_dir():
        print("empty: nothing has been compiled yet")
        return 0
    rows = [[part.name, str(files), f"{size / 2**20:.1f}"] for part in sorted(folder.iterdir()) for files, size in [_content(part)]]
    print(format_table(["part", "files", "MiB"], rows))
    return 0


def _content(path: Path) -> tuple[int, int]:
    """Number of files and bytes under a path. Other processes may be writing: what vanishes meanwhile is not counted."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    sizes = []
    for file in files:
        try:
            sizes.append(file.stat().st_size)
        except FileNotFoundError:
            continue
    return len(sizes), sum(sizes)


def _clear(folder: Path) -> int:
    """Empties the folder but keeps it. Safe beside running worlds: what they need again they compile again."""
    if not folder.is_dir():
        print(f"{folder}: nothing to clear")
        return 0
    files, size = _content(folder)
    for part in folder.iterdir():
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
    left = _content(folder)[0]
    print(f"{folder}: removed {files - left} files, {size / 2**20:.1f} MiB" + (f"; {left} could not be removed" if left else ""))
    return 1 if left else 0
