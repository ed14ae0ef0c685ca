"""What ``make`` installs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize(
    ("target", "cuda", "extras"),
    [
        ("demo", "", "demo"),
        ("demo", "12", "demo,cuda12"),
        ("demo", "13", "demo,cuda13"),
        ("demo", "14", "demo,cuda13"),
        ("test", "13", "test"),
        ("test-full", "", "test"),
        ("test-gpu", "13", "test,cuda13"),
        ("test-mutants", "13", "test"),
        ("test-torch", "", "test"),
        ("lint", "", "lint"),
        ("docs", "13", "docs"),
        ("dist", "", "test"),
    ],
)
@pytest.mark.drawn(1)
def test_extras(target: str, cuda: str, extras: str, tmp_path: Path) -> None:
    command = ["make", "-n", target, f"DRIVER_CUDA={cuda}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert re.findall(r"-e '\.\[(.*)\]'", done.stdout) == [extras]
