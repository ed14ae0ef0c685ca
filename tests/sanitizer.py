"""What tests under ThreadSanitizer share."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mkernel.jit import cpu as compiler

__all__ = ["at_fixed_addresses", "libtsan", "run_sanitized"]


def libtsan() -> str:
    """The library to preload, that of the compiler in use. Skips the test, aloud, where the compiler has none."""
    for name in ("libtsan.so", "libtsan.so.2", "libtsan.so.0"):
        result = subprocess.run([*compiler.find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        path = Path(result.stdout.strip())
        if result.returncode == 0 and path.is_absolute() and path.exists():
            return str(path.resolve())
    pytest.skip("ThreadSanitizer: the compiler has no libtsan (apt-get install -y libtsan2)")


def at_fixed_addresses(command: Sequence[str]) -> list[str]:
    """The command, its memory not placed at random: else some versions of the library find no room for theirs."""
    setarch = shutil.which("setarch")
    return [*((setarch, platform.machine(), "-R") if setarch else ()), *command]


def run_sanitized(command: Sequence[str], variables: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
    """A Python process whose kernels ThreadSanitizer looks at: what it says is in ``stderr``. ``options``: of ``subprocess.run``."""
    environment = {
        "LD_PRELOAD": libtsan(),
        "TSAN_OPTIONS": "exitcode=0 report_signal_unsafe=0 report_thread_leaks=0",
        "OPENBLAS_NUM_THREADS": "1",  # its threads synchronize in a way that ThreadSanitizer does not see
    }
    options = {"timeout": 280, **options}
    return subprocess.run(
        at_fixed_addresses(command), env=os.environ | environment | variables, capture_output=True, text=True, check=False, **options
    )
