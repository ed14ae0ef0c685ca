"""Ranks that die, hang, stay away or raise in the middle of a fused GEMM: the others hear of it and nothing is left behind.

No test measures time: a slow machine is slow at everything. Deadlines that must not be what ends a wait are longer than ``_SECONDS``, after
which a test gives up; of those that must be, the error says how long it was. Ranks tell each other by files where they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ops.body import topology
from tests.runtime.processes import Result, free_port, start, start_mpi
from tests.runtime.test_processes import _nothing_left  # noqa: F401 - a fixture for every test here

_WORKER = Path(__file__).with_name("worker.py")
_SECONDS = 200.0


_OTHERS = ("gemm_reduce_scatter", "two_shot", "one_shot")  # ops, and algorithms of gemm_allreduce


def some(worlds: tuple[str, ...], *others: Any) -> pytest.MarkDecorator:
    """allgather_gemm in these worlds, and so many of the rest; all with --full."""
    rest = [(world, how) for world in worlds for how in _OTHERS if (world, how) not in others]
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in rest]
    return pytest.mark.parametrize(("world", "how"), [*((world, "allgather_gemm") for world in worlds), *others, *slow])


_RING_TOO = pytest.param("2x2", "ring_attention", marks=pytest.mark.slow)


def ranks(notes: Path, scenario: str, world: str, how: str, **environment: str) -> list[Result]:
    shape = topology(world)
    environment = {"MKERNEL_RANKS_PER_NODE": str(shape.ranks_per_node), "TEST_HOW": how, "TEST_NOTES": str(notes), **environment}
    return start(scenario, shape.size, _SECONDS, _WORKER, **environment)


def lines(results: list[Result], *, but: int | None = None) -> list[dict[str, Any]]:
    for rank, result in enumerate(results):
        assert rank == but or len(result.lines) == 1, (rank, result)
    return [result.lines[0] for rank, result in enumerate(results) if rank != but]


@some(
    ("1x3", "2x2"),
    ("2x2", "two_shot"),
    ("2x2", "moe_dispatch_gemm"),
    ("2x2", "ring_attention"),
)
@pytest.mark.drawn(1)
def test_a_rank_killed_inside_a_kernel(tmp_path: Path, world: str, how: str) -> None:
    a_rank_is_killed(tmp_path, world, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["allgather_gemm", "two_shot", "ring_attention"])
def test_a_rank_killed_beside_a_network_that_sms_play(tmp_path: Path, how: str) -> None:
    a_rank_is_killed(tmp_path, "2x2", how, MKERNEL_EMULATED_ENGINE="sms")


def a_rank_is_killed(tmp_path: Path, world: str, how: str, **environment: str) -> None:
    results = ranks(tmp_path, "killed", world, how, SECOND_RENDEZVOUS=f"127.0.0.1:{free_port()}", **environment)
    assert [result.code for result in results] == [-9 if rank == 1 else 0 for rank in range(len(results))], results
    death = float((tmp_path / "death").read_text())
    for line in lines(results, but=1):
        assert line["first"]["error"] == "PeerLostError", line
        assert line["first"]["peer"] == 1
        assert death < line["first"]["at"], "the call was not over"
        assert line["again"]["error"] == line["first"]["error"], "a failed world stays failed"
        assert line["closing"]["error"] is None, "the failure has been seen"
        assert line["left"] == {"sockets": 0, "memfds": 0, "maps": 0, "threads": 0}
        assert line["second"] == len(results) - 1


@pytest.mark.mpi
@some(("1x4", "2x2"), ("1x4", "gemm_reduce_scatter"), ("2x2", "two_shot"))
@pytest.mark.drawn(1)
def test_mpirun_ends_when_a_rank_is_killed_inside_a_kernel(tmp_path: Path, world: str, how: str) -> None:
    per_node = str(topology(world).ranks_per_node)
    result = start_mpi("killed_uncaught", 4, _SECONDS, _WORKER, MKERNEL_RANKS_PER_NODE=per_node, TEST_HOW=how, TEST_NOTES=str(tmp_path))
    assert (tmp_path / "death").exists()
    assert result.code != 0
    assert not any(line.get("ended") == "well" for line in result.lines)


@pytest.mark.parametrize(
    ("world", "how"),
    [
        ("1x3", "gather packets"),
        ("1x3", "tagged packets"),
        *(pytest.param("2x2", how, marks=pytest.mark.slow) for how in ("allgather_gemm", "two_shot")),
    ],
)
def test_a_rank_killed_before_it_calls(tmp_path: Path, world: str, how: str) -> None:
    results = ranks(tmp_path, "killed_outside", world, how)
    assert [result.code for result in results] == [-9 if rank == 1 else 0 for rank in range(len(results))], results
    for line in lines(results, but=1):
        assert line["first"]["error"] == "PeerLostError", line
        assert line["first"]["peer"] == 1
        assert line["closing"]["error"] is None


@some(("1x2", "2x2"), ("1x3", "gather packets"), ("1x3", "tagged packets"), ("1x2", "two_shot"), ("2x2", "gemm_reduce_scatter"))
@pytest.mark.drawn(1)
def test_a_rank_that_never_calls(tmp_path: Path, world: str, how: str) -> None:
    results = ranks(tmp_path, "stays_away", world, how)
    assert [result.code for result in results] == [0] * len(results), results
    for line in lines(results):
        assert line["first"]["error"] == "TimeoutError", line
        assert "waited 3.0 s for rank 1, which never entered call 2" in line["first"]["message"]
        assert line["first"]["record_rank"] != 1
        assert line["closing"]["error"] is None


@some(("2x2",), ("1x2", "packets"), ("2x2", "two_shot"), _RING_TOO)
@pytest.mark.drawn(1)
def test_a_rank_that_hangs_inside_a_kernel(tmp_path: Path, world: str, how: str) -> None:
    results = ranks(tmp_path, "slow_inside", world, how)
    assert [result.code for result in results] == [0] * len(results), results
    for rank, line in enumerate(lines(results)):
        heard = line["closing"] if rank == 1 and line["first"]["error"] is None else line["first"]  # it may have all it needs
        assert heard["error"] == "TimeoutError", line
        assert "waited 3.0 s for" in heard["message"]


@some(("1x2", "2x2"), ("1x3", "gather packets"), ("1x3", "tagged packets"), ("1x2", "one_shot"), ("2x2", "gemm_reduce_scatter"))
@pytest.mark.drawn(1)
def test_a_rank_that_raises(tmp_path: Path, world: str, how: str) -> None:
    results = ranks(tmp_path, "raises", world, how)
    assert "ValueError: the input file is gone" in results[1].errors
    assert results[1].code == 1
    for line in lines(results, but=1):
        assert line["first"]["error"] == "AbortedError", line
        assert "ValueError: the input file is gone" in line["first"]["message"]
