"""Every way a process can end, alone or with all others, under mpirun or not: each rank ends, with the right status, and hears why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.processes import start, start_mpi

_WORKER = Path(__file__).with_name("ending_worker.py")
_SECONDS = 150.0  # a hang; the worlds' own limit is 600 s

# The status of a process, and whether it was a good end.
_STATUS = {
    **dict.fromkeys(("returns", "exit_none", "exit_0", "caught_exit"), 0),
    **dict.fromkeys(("exit_1", "exit_text", "exit_object", "raises", "raises_nested"), 1),
    **dict.fromkeys(("exit_3", "raises_exit"), 3),
    "interrupted": -2,
    "os_exit": 5,
    "terminated": -15,
    "thread": 0,  # as Python has it: a thread's exception is printed
    "swallowed": 0,
}
_SAID = {  # what the others hear where the world sees it: in its block, or as the exception that ends the process
    "exit_1": "SystemExit: 1",
    "exit_3": "SystemExit: 3",
    "exit_text": "SystemExit: bad config",
    "exit_object": "SystemExit: a custom reason",
    "raises_exit": "SystemExit: 3",
    "raises": "ValueError: planned",
    "raises_nested": "KeyError: 'missing'",
    "interrupted": "KeyboardInterrupt",
    "os_exit": "rank 1 has gone",
    "terminated": "rank 1 has gone",
    "swallowed": "rank 1 aborted: given up",
}


_GOOD = [way for way, status in _STATUS.items() if status == 0 and way != "swallowed"]


def _valid(way: str, block: str, who: str, how: str, hook: str, peer: str) -> bool:
    if peer == "in MPI" and (how == "plain" or way == "os_exit"):
        return False
    if peer != "calls" and (who == "all" or block == "closed"):
        return False  # there is none
    if block == "closed" and way in ("thread", "swallowed"):
        return False  # they use the world
    # A process that leaves MPI without a word, when no world is open any more, or together with all others, is not ours to notice.
    return how == "plain" or way not in ("os_exit", "terminated") or (block != "closed" and who == "one")


@pytest.mark.mpi
@pytest.mark.cases(
    way=list(_STATUS),
    block=["with", "open", "closed"],
    who=["one", "all"],
    how=["plain", "mpi"],
    hook=["none", "before", "after"],
    peer=["calls", "in MPI"],
    valid=_valid,
)
@pytest.mark.drawn(5)
def test_endings(way: str, block: str, who: str, how: str, hook: str, peer: str) -> None:
    # Does rank 0 go on, which cannot end well when rank 1 leaves? Else both come to their ends.
    going_on = who == "one" and block != "closed"
    # Nobody can see this outside of a world's block: the world is closed then, as at every good end.
    quiet = way in _GOOD or (block == "open" and way == "raises_exit")
    status = 1 if going_on and quiet else _STATUS[way]
    why = "close()" if quiet else _SAID[way]
    # Who hears of it only by waiting so long has not heard; but a rank inside MPI hears nothing, and is ended with the job.
    limit = "1" if (quiet or way == "swallowed") and peer == "in MPI" else "600"
    extra = {"WAY": way, "BLOCK": block, "WHO": who, "HOOK": hook, "PEER": peer if going_on else "ends", "LIMIT": limit}
    if how == "mpi":
        result = start_mpi("end", 2, _SECONDS, _WORKER, **extra)
        assert (result.code != 0) == (going_on or status != 0), result
        said = result.errors
    else:
        first, second = start("end", 2, _SECONDS, _WORKER, **extra)
        assert second.code == status, second
        assert first.code == (1 if going_on else status if who == "all" else 0), first
        said = first.errors
    if going_on and hook == "none" and peer != "in MPI":
        assert why in said, said


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["plain", "mpi"])
@pytest.mark.parametrize("block", ["open", "with"])
def test_a_good_end_waits_for_who_is_still_busy(how: str, block: str) -> None:
    """At exit as in close(): longer than the time that a wait inside a call has."""
    extra = {"WAY": "returns", "BLOCK": block, "WHO": "one", "HOOK": "none", "PEER": "late", "LIMIT": "600"}
    results = start("end", 2, _SECONDS, _WORKER, **extra) if how == "plain" else [start_mpi("end", 2, _SECONDS, _WORKER, **extra)]
    assert [(result.code, result.errors) for result in results] == [(0, "")] * len(results)


@pytest.mark.mpi
def test_init_that_fails_on_one_rank_ends_the_job() -> None:
    result = start_mpi("bad_init", 2, _SECONDS, _WORKER)
    assert result.code != 0
    assert "MKERNEL_TIMEOUT" in result.errors


def test_a_dead_main_program_is_told_before_its_last_thread_ends(tmp_path: Path) -> None:
    first, second = start("outlived", 2, _SECONDS, _WORKER, HEARD=str(tmp_path / "heard"))
    assert (first.code, second.code) == (1, 1)
    assert "died of ValueError: planned" in first.errors
