"""``allgather_rows`` under ThreadSanitizer: no race, and the check can fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.sanitizer import run_sanitized
from tests.small_op import races
from tests.small_op.plan import FOLDER

pytestmark = pytest.mark.tsan


def reported(ranks: int, ranks_per_node: int, folder: Path = FOLDER, *, right: bool = True) -> str:
    """What ThreadSanitizer says of a process that makes a few calls. ``right``: their results must be."""
    command = [sys.executable, str(races.__file__), str(ranks), str(ranks_per_node), str(folder)]
    done = run_sanitized(command, {"MKERNEL_CPU_SMS": "3"})  # few: starting threads is slow under ThreadSanitizer
    assert done.returncode == 0 or not right, done.stderr[-3000:]
    return done.stderr


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(2, 2), (4, 2), (3, 1)], ids=["1x2", "2x2", "3x1"])
@pytest.mark.drawn(1)
def test_no_race(ranks: int, ranks_per_node: int) -> None:
    errors = reported(ranks, ranks_per_node)
    assert "WARNING: ThreadSanitizer" not in errors, errors[:5000]


def test_a_missing_barrier_is_found(tmp_path: Path) -> None:
    """Lane 0 packs, and the other lanes do not wait until it has."""
    text = (FOLDER / "allgather_rows.cuh").read_text()
    packed = "  ptx::sync_warp();\n  return true;\n"
    assert text.count(packed) == 1
    (tmp_path / "allgather_rows.cuh").write_text(text.replace(packed, "  return true;\n"))
    assert "WARNING: ThreadSanitizer: data race" in reported(2, 2, tmp_path, right=False)
