"""What tests under ThreadSanitizer share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mkernel.jit import cpu as compiler

__all__ = ["libtsan"]


def libtsan() -> str:
    """The library to preload, that of the compiler in use. Skips the test, aloud, where the compiler has none."""
    for name in ("libtsan.so", "libtsan.so.2", "libtsan.so.0"):
        result = subprocess.run([*compiler.find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=False)
        path = Path(result.stdout.strip())
        if result.returncode == 0 and path.is_absolute() and path.exists():
            return str(path.resolve())
    pytest.skip("ThreadSanitizer: the compiler has no libtsan (apt-get install -y libtsan2)")
