"""A run of several workers has one seed, the printed one: else a failure could not be repeated."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_TEST = "def test_it(request, worker_id):\n    print('SEED', worker_id, request.config.getoption('--seed'))\n"


def test_workers_have_the_seed_that_is_printed(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    for path in tests.glob("*.*"):  # conftest.py, and whatever it needs
        shutil.copy(path, tmp_path)
    for number in range(4):
        (tmp_path / f"test_{number}.py").write_text(_TEST)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MKERNEL_TEST_SEED"))}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "-rP",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    header = next(line for line in done.stdout.splitlines() if line.startswith("mkernel: inputs from --seed"))
    seeds = {line.split()[2] for line in done.stdout.splitlines() if line.startswith("SEED")}
    workers = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("SEED")}
    assert len(workers) == 2, done.stdout
    assert seeds == {header.split()[4].rstrip(",")}
