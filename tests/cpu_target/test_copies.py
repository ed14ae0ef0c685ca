"""Copies of drawn chunks: all bytes arrive, and each chunk is announced once, in order, when it is there (kernels_src/comm/copy.cuh)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mkernel.errors import Error
from mkernel.runtime.cpu.backend import CpuBackend
from tests.cpu_target.harness import aligned, load, structure
from tests.ops.planted_bug import Bug

_NAMES = "entries", "from", "to", "apart", "first", "all", "complete", "may_store", "piece_bytes", "destinations", "log"
_Parameters = structure(*_NAMES, words=16)
_Entry = np.dtype([("from", np.uint64), ("to", np.uint64), ("bytes", np.uint32), ("skew", np.uint32)])
_SHARED = 8 * 16384 + 16 * 48 + 256  # bytes of Storage
_MOST_PIECE, _UNIT, _SLOTS = 16384, 16, 4
FOUND = 77  # exit status
ROOT = Path(__file__).resolve().parents[2]
_SIZE = 1 << 20  # of the source, and of a destination


def _drawn(rng: np.random.Generator, piece: int) -> np.ndarray:
    """Chunks from one unit to several pieces, whose destinations do not overlap."""
    entries, at = np.zeros(int(rng.integers(0, 40)), _Entry), 0
    pieces = rng.choice([0.01, 1, 2, 5])
    for entry in entries:
        units = int(rng.integers(1, max(2, pieces * piece // _UNIT)))
        at += _UNIT * int(rng.integers(0, 3))
        entry["bytes"], entry["to"] = _UNIT * units, at
        entry["from"] = _UNIT * rng.integers(0, (_SIZE - _UNIT * units) // _UNIT)
        entry["skew"] = _UNIT * rng.integers(0, piece // _UNIT) * rng.integers(0, 2)
        at += _UNIT * units
    return entries[entries["to"] + entries["bytes"] <= _SIZE]


def _copy(rng: np.random.Generator, seed: int, behind: int) -> str:
    """What is wrong after the copies of one launch, if anything is. ``behind``: stores in flight."""
    piece = _UNIT * int(rng.choice([1, 7, 64, _MOST_PIECE // _UNIT]))
    entries, destinations = _drawn(rng, piece), int(rng.integers(1, 4))
    first, may_store = int(rng.integers(0, len(entries) + 1)), bool(rng.integers(0, 4))
    complete = int(rng.integers(0, len(entries) + 1)) if rng.integers(0, 4) == 0 else len(entries)
    if not may_store:
        complete = min(complete, first + _SLOTS)  # nobody takes more
    source, to = aligned(_SIZE, np.uint8), aligned((destinations, _SIZE), np.uint8)
    source[:] = rng.integers(1, 256, _SIZE)
    chunks, log = aligned(max(1, len(entries)), _Entry), aligned(2 + len(entries), np.uint64)
    chunks[: len(entries)] = entries
    kernel = load("copies", _Parameters, threads=64, shared=_SHARED, kBehind=behind)
    addresses = chunks.ctypes.data, source.ctypes.data, to.ctypes.data, _SIZE
    parameters = _Parameters(*addresses, first, len(entries), complete, may_store, piece, destinations, log.ctypes.data)
    try:
        CpuBackend(seed=seed).launch(kernel, 0, 1, bytes(parameters))
    except Error as error:
        return str(error)
    announced = complete if may_store or complete < first else first
    if log[1] or list(log[2 : 2 + int(log[0])]) != list(range(announced)):
        return f"announced {log[: 2 + int(log[0])]}, not {announced}"
    there = np.zeros(_SIZE, bool)
    for i, entry in enumerate(entries):
        begin, end = int(entry["to"]), int(entry["to"] + entry["bytes"])
        there[begin:end] = True
        at = int(entry["from"])
        if i < announced and (to[:, begin:end] != source[at : at + end - begin]).any():
            return f"chunk {i} is not there"
    return "bytes beside the chunks" if to[:, ~there].any() else ""


def test_drawn_chunks(rng: np.random.Generator) -> None:
    for seed in range(60):
        assert not _copy(rng, seed, (1, 4)[seed % 2])


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if (ends >> (behind - 1) & 1)", "if (ends & 1)"),
        ("kCopyQueue = 16;", "kCopyQueue = 4;"),
        ("chunks.announce(item<Chunks>(announced++));", "chunks.announce(item<Chunks>(stored - 1));"),
        ("ptx::store_wait<0>();", ""),
        ("ptx::store_wait<Behind>();", "ptx::store_wait_read<Behind>();"),
        ("ptx::store_wait_read<kPieceStages - kPiecesAhead>();", ""),
        ("most -= chunks.skew(item);", "most += 0;\n    (void)item;"),
        ("for (; ahead > 0; --ahead) take_piece();", ""),
        ("stored = looked_, announced = looked_;", "stored = 0, announced = 0;"),
        ("at.offset += at.bytes;", "at.offset += at.offset == 0 ? least(chunks.piece_bytes(), at.item.bytes) : at.bytes;"),
    ],
    ids=lambda text: text[:40],
)
def test_a_mistake_is_found(before: str, after: str, tmp_path: Path, rng: np.random.Generator) -> None:
    seed = str(rng.integers(1 << 32))
    command = [sys.executable, "-m", "tests.cpu_target.test_copies", seed]  # it may touch memory that is not its own
    with Bug("a mistake", "comm/copy.cuh", before, after).in_force(tmp_path / "kernels_src"):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == FOUND or "touched memory that it may not" in done.stderr


def main(seed: int) -> int:
    drawn = np.random.default_rng(seed)
    for number in range(100):
        if wrong := _copy(drawn, number, 4):  # with fewer stores in flight pieces are not overwritten so soon
            print(wrong)
            return FOUND
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
