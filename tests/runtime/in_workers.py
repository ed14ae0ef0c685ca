"""Functions on target cpu in the worker processes that ``mk.launch`` uses on GPUs."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from mkernel.runtime.options import Options
from mkernel.runtime.workers.calls import run_in_workers

SECONDS = 60.0  # for what takes milliseconds


def run(fn: Any, *args: Any, ranks: int = 2, **options: Any) -> list[Any]:
    chosen = Options.resolve(**{"target": "cpu", "heap_bytes": 1 << 22, "timeout": 20.0, "entry_timeout": SECONDS, **options})
    return run_in_workers(fn, ranks, chosen, args)


def pids(**options: Any) -> list[int]:
    return run(lambda world: os.getpid(), **options)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_gone(*processes: int) -> None:
    deadline = time.monotonic() + SECONDS
    while any(map(alive, processes)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in processes if alive(pid)]}"
        time.sleep(0.01)
