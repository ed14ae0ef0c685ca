"""Ranks of a test tell each other, and the test, where they are: by files in the folder TEST_NOTES, not by sleeping."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def note(name: str, text: str = "") -> None:
    """Leave a note: it is there whole or not at all."""
    path = Path(os.environ["TEST_NOTES"], name)
    scratch = path.with_name(f".{name}")
    scratch.write_text(text)
    scratch.rename(path)


def await_notes(*names: str) -> None:
    """Wait until all are there. The test's own limit ends what would wait for ever."""
    while not all(Path(os.environ["TEST_NOTES"], name).exists() for name in names):
        time.sleep(0.01)


def of_others(world: Any, word: str) -> list[str]:
    """``word-RANK`` of every other rank."""
    return [f"{word}-{rank}" for rank in range(world.size) if rank != world.rank]
