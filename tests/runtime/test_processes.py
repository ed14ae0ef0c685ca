"""Ranks as processes: plain ones that meet over TCP, and real mpirun. What a user sees when a rank dies, fails or disagrees.

No test measures time. Deadlines that must not be what ends a wait are longer than ``start`` and ``start_mpi`` give a test.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.processes import RUN_ID, Result, free_port, start, start_mpi


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No process, shared-memory file or abstract socket outlives its test."""
    before = leftovers()
    yield
    deadline = time.monotonic() + 60.0
    while leftovers() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers() - before == set()


def leftovers() -> set[str]:
    """What this test run has left behind; others may run beside it. Abstract sockets and memfds cannot outlive their processes."""
    left = {str(path) for path in Path("/dev/shm").iterdir() if "mkernel" in path.name}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if RUN_ID.encode() in (process / "environ").read_bytes():
                    left.add(f"process {process.name}: {(process / 'cmdline').read_bytes()!r}")
    return left


def check_ok(lines: list[dict[str, object]], size: int, per_node: int) -> None:
    assert [line["rank"] for line in lines] == list(range(size))
    for line in lines:
        node = line["rank"] // per_node  # type: ignore[operator]
        assert (line["size"], line["node"], line["local"]) == (size, node, line["rank"] % per_node)  # type: ignore[operator]
        assert line["seen"] == [float(rank) for rank in range(node * per_node, (node + 1) * per_node)]


def flatten(results: list[Result]) -> list[dict[str, object]]:
    return [line for result in results for line in result.lines]


@pytest.mark.parametrize(("size", "per_node"), [(1, 1), (4, 4), (4, 2)])
def test_plain_processes(size: int, per_node: int) -> None:
    results = start("ok", size, MKERNEL_RANKS_PER_NODE=str(per_node))
    assert [result.code for result in results] == [0] * size, results
    assert all(result.errors == "" for result in results), results
    check_ok(flatten(results), size, per_node)


@pytest.mark.mpi
@pytest.mark.parametrize("per_node", [4, 2])
def test_mpirun(per_node: int) -> None:
    result = start_mpi("ok", 4, MKERNEL_RANKS_PER_NODE=str(per_node))
    assert result.code == 0, result.errors
    check_ok(result.lines, 4, per_node)


def test_a_killed_rank_and_a_new_world(tmp_path: Path) -> None:
    results = start("killed", 3, TEST_NOTES=str(tmp_path), SECOND_RENDEZVOUS=f"127.0.0.1:{free_port()}")
    assert [result.code for result in results] == [0, -9, 0], results
    for result in (results[0], results[2]):
        (line,) = result.lines
        assert line["first"]["error"] == "PeerLostError"
        assert line["first"]["peer"] == 1
        assert line["closing"]["error"] is None
        assert line["again"] == 2
        assert result.errors.count("has failed") == 1, "logged once"


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_killed_while_others_are_at_a_barrier(size: int) -> None:
    results = start("killed_at_barrier", size)
    assert [result.code for result in results] == [0] * (size - 1) + [-9]
    for line in flatten(results):
        assert line["first"]["error"] == "PeerLostError"  # type: ignore[index]
        assert line["first"]["peer"] == size - 1  # type: ignore[index]


@pytest.mark.mpi
def test_mpirun_does_not_hang_when_a_rank_is_killed() -> None:
    result = start_mpi("killed_at_barrier", 4)
    assert result.code != 0


@pytest.mark.mpi
def test_mpirun_does_not_hang_when_a_rank_raises() -> None:
    result = start_mpi("raises", 4)
    assert result.code != 0
    assert "ValueError: planned" in result.errors


@pytest.mark.mpi
def test_mpirun_does_not_hang_when_mkernel_fails() -> None:
    result = start_mpi("fails", 3)
    assert result.code != 0
    assert "waited 3.0 s for rank 1, which never entered call 1" in result.errors


@pytest.mark.mpi
def test_mpirun_ends_well_when_the_script_copes() -> None:
    result = start_mpi("caught", 3)
    assert result.code == 0, result.errors
    assert [(line["first"]["error"], line["closing"]["error"]) for line in result.lines] == [("TimeoutError", None)] * 3


def test_plain_processes_end_when_one_raises() -> None:
    results = start("raises", 3)
    assert [result.code for result in results] == [1] * 3
    assert "ValueError: planned" in results[1].errors
    for result in (results[0], results[2]):
        assert "AbortedError: rank 1 aborted: its process died of ValueError: planned" in result.errors


def test_a_rank_that_stays_away() -> None:
    results = start("caught", 3)
    assert [result.code for result in results] == [0] * 3, results
    for line in flatten(results):
        assert line["first"]["error"] == "TimeoutError"  # type: ignore[index]
        assert "for rank 1, which never entered call 1" in line["first"]["message"]  # type: ignore[index]
        assert line["first"]["record_rank"] in (0, 2)  # type: ignore[index]


def test_a_new_plan_against_a_cached_one() -> None:
    results = start("cached_against_new", 3)
    assert [result.code for result in results] == [0] * 3, results
    for line in flatten(results):
        assert line["first"]["error"] == "MismatchError"  # type: ignore[index]
        assert "rank 0 asked for gemm(digest 0x7) after 5 calls" in line["first"]["message"]  # type: ignore[index]


def test_forked_children_take_no_part(tmp_path: Path) -> None:
    """Rank 1's child lives until the others have heard of its parent's death."""
    results = start("forks", 3, TEST_NOTES=str(tmp_path))
    assert [result.code for result in results] == [0, -9, 0], results
    for line in flatten(results):
        assert line["first"]["error"] == "PeerLostError"  # type: ignore[index]


@pytest.mark.mpi
def test_worlds_left_open_are_closed_at_exit() -> None:
    assert [(result.code, result.errors) for result in start("left_open", 2)] == [(0, "")] * 2
    assert start_mpi("left_open", 2).code == 0


# ---- with real kernels on target cpu


@pytest.mark.parametrize("per_node", [2, 1])
def test_kernels_in_plain_processes(per_node: int) -> None:
    results = start("real_kernel", 2, MKERNEL_RANKS_PER_NODE=str(per_node))
    assert [result.code for result in results] == [0] * 2, results
    for line in flatten(results):
        assert line["worst"] < 0.02, line  # type: ignore[operator]
        assert line["nodes"] == 2 // per_node


@pytest.mark.mpi
@pytest.mark.parametrize("per_node", [4, 2])
def test_kernels_under_mpirun(per_node: int) -> None:
    result = start_mpi("real_kernel", 4, MKERNEL_RANKS_PER_NODE=str(per_node))
    assert result.code == 0, result.errors
    assert [line["worst"] < 0.02 for line in result.lines] == [True] * 4


def test_kernels_leave_when_a_peer_is_killed(tmp_path: Path) -> None:
    results = start("real_kernel_killed", 3, TEST_NOTES=str(tmp_path))
    assert [result.code for result in results] == [0, -9, 0], results
    for line in flatten(results):
        assert line["first"]["error"] == "PeerLostError", line  # type: ignore[index]
        assert line["first"]["peer"] == 1  # type: ignore[index]


def test_kernels_see_another_plan() -> None:
    results = start("real_kernel_other_shape", 3)
    assert [result.code for result in results] == [0] * 3, results
    for line in flatten(results):
        assert line["first"]["error"] == "MismatchError", line  # type: ignore[index]
        assert "call 3" in line["first"]["message"]  # type: ignore[index]


def test_kernels_do_not_wait_for_ever() -> None:
    results = start("real_kernel_late", 3)
    assert [result.code for result in results] == [0] * 3, results
    for line in flatten(results):
        assert line["first"]["error"] == "TimeoutError", line  # type: ignore[index]
        assert "for rank 1, which never entered call 2" in line["first"]["message"]  # type: ignore[index]
        assert line["first"]["record_rank"] in (0, 2)  # type: ignore[index]
