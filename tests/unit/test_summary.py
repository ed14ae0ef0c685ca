"""The end of a test run tells what it has not run, why, and how to run it; with one process and with several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_TESTS = """
import pytest

def test_one(): pass

@pytest.mark.gpu
@pytest.mark.parametrize("i", range(3))
def test_gpu(i): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.rdma
def test_rdma(): pass

def test_skipped(): pytest.skip("no such thing here")
"""


def summary(folder: Path, *arguments: str) -> list[str]:
    """Lines below NOT RUN, of a run with mkernel's conftest.py over the tests above."""
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    (folder / "conftest.py").write_text(
        path + (ROOT / "tests" / "conftest.py").read_text().replace("from __future__ import annotations\n", "")
    )
    (folder / "test_some.py").write_text(_TESTS)
    markers = "".join(f"  {name}: a marker\n" for name in ("gpu", "rdma", "slow", "cases", "mpi"))
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{markers}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    begins = [i for i, line in enumerate(lines) if "NOT RUN" in line]
    if not begins:
        return []
    found = [lines[begins[0]].strip("! ")]
    for line in lines[begins[0] + 1 :]:
        if not line[:5].strip().isdigit():
            break
        found.append(line.strip())
    return found


@pytest.mark.parametrize("jobs", ["0", "2"])
def test_what_is_left_out_by_marker_is_told(tmp_path: Path, jobs: str) -> None:
    found = summary(tmp_path, "-n", jobs, "-m", "not gpu and not rdma")
    assert found[0] == "NOT RUN: 6 tests"
    assert "3  gpu: left out by -m; `make test-gpu`, on GPUs" in found
    assert "1  rdma: left out by -m; `make test-rdma`" in found
    assert "1  slow: runs with --full" in found
    assert "1  no such thing here" in found


def test_what_is_left_out_by_name_is_told(tmp_path: Path) -> None:
    assert summary(tmp_path, "-k", "one") == ["NOT RUN: 6 tests", "6  left out by the command line (-k, -m, --deselect)"]


def test_nothing_is_told_where_everything_ran(tmp_path: Path) -> None:
    assert summary(tmp_path, "test_some.py::test_one") == []
