"""The benchmark of the host path (host_path.py) runs: the real device over a driver library whose functions return at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_program_is_measured() -> None:
    command = [sys.executable, "-m", "tests.runtime.host_path", "--calls", "90"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert all(re.fullmatch(r".{36} +\d+\.\d\d us \(median of rounds \d+\.\d\d\)", line) for line in lines), ended.stdout
    for name in ("CuPy, out given, a stream", "torch, out new, a stream", "World.launch", "a new tensor map", "a new binding"):
        assert any(line.startswith(f"{name} ") for line in lines), name
