"""How ranks find each other: variables, TCP, threads, and what goes wrong on the way."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mkernel import errors
from mkernel.errors import AbortedError, ArgumentError, Error, PeerLostError
from mkernel.runtime.ranks import bootstrap, rendezvous
from mkernel.runtime.ranks.bootstrap import SingleBootstrap, ThreadGroup
from mkernel.runtime.ranks.choice import choose
from mkernel.runtime.ranks.rendezvous import Meeting, SocketBootstrap, read_environment
from tests.runtime.processes import clean_environment, free_port, mpirun


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)


def set_all(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_alone_without_variables() -> None:
    alone = choose()
    assert isinstance(alone, SingleBootstrap)
    assert alone.allgather(b"x") == [b"x"]


def test_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, MKERNEL_RENDEZVOUS="node0:1234", MKERNEL_RANK=2, MKERNEL_SIZE=3, RANK=7, WORLD_SIZE=8)
    assert read_environment() == Meeting("node0", 1234, 2, 3)


@pytest.mark.parametrize(
    ("variables", "rank", "size"),
    [({"RANK": 1, "WORLD_SIZE": 4}, 1, 4), ({"SLURM_PROCID": 3, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 5}, 3, 5)],
)
def test_own_address_with_a_launchers_numbers(monkeypatch: pytest.MonkeyPatch, variables: dict[str, int], rank: int, size: int) -> None:
    set_all(monkeypatch, MKERNEL_RENDEZVOUS="[::1]:1234", **variables)
    assert read_environment() == Meeting("::1", 1234, rank, size, one_host=True)


def test_torchrun_leaves_its_port_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, RANK=1, WORLD_SIZE=4, MASTER_ADDR="10.0.0.1", MASTER_PORT=29500)
    assert read_environment() == Meeting("10.0.0.1", 29501, 1, 4)
    assert rendezvous.offered()


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, SLURM_PROCID=5, SLURM_NTASKS=9, SLURM_STEP_NUM_TASKS=8, SLURM_JOB_ID=4711, SLURM_STEP_ID=0)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[03-05,09],login1")
    meeting = read_environment()
    assert meeting is not None
    assert (meeting.host, meeting.rank, meeting.size) == ("gpu03", 5, 8)
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert read_environment() != meeting, "two steps of a job must not meet"


TORCH = {"RANK": 1, "WORLD_SIZE": 4, "MASTER_ADDR": "node0", "MASTER_PORT": 29500}
SLURM = {"SLURM_PROCID": 1, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 4, "SLURM_JOB_ID": 4711, "SLURM_JOB_NODELIST": "node0"}
OWN = {"MKERNEL_RANK": 1, "MKERNEL_SIZE": 4}


@pytest.mark.parametrize(
    ("variables", "one_host"),
    [
        ({**TORCH}, False),
        ({**TORCH, "LOCAL_WORLD_SIZE": 4}, True),
        ({**TORCH, "LOCAL_WORLD_SIZE": 2}, False),
        ({**TORCH, "LOCAL_WORLD_SIZE": ""}, False),
        ({**TORCH, "MASTER_ADDR": "127.0.0.1"}, True),
        ({**TORCH, "MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": 4}, True),
        ({**SLURM}, False),
        ({**SLURM, "SLURM_NNODES": 1}, True),
        ({**SLURM, "SLURM_NNODES": 2}, False),
        ({**SLURM, "SLURM_JOB_NUM_NODES": 2, "SLURM_STEP_NUM_NODES": 1}, True),
        ({**SLURM, "SLURM_NNODES": 1, "SLURM_STEP_NUM_NODES": 2}, False),
        ({**OWN, "MKERNEL_RENDEZVOUS": "node0:1"}, False),
        ({**OWN, "MKERNEL_RENDEZVOUS": "localhost:1"}, True),
        ({**OWN, "MKERNEL_RENDEZVOUS": "[::1]:1"}, True),
        ({**OWN, **TORCH, "LOCAL_WORLD_SIZE": 4, "MKERNEL_RENDEZVOUS": "node0:1"}, False),
        ({**TORCH, "LOCAL_WORLD_SIZE": 4, "MKERNEL_RENDEZVOUS": "node0:1"}, True),
        ({**SLURM, "SLURM_NNODES": 1, "MKERNEL_RENDEZVOUS": "node0:1"}, True),
        ({**SLURM, "SLURM_NNODES": 2, "MKERNEL_RENDEZVOUS": "node0:1"}, False),
    ],
)
def test_who_is_on_one_host(monkeypatch: pytest.MonkeyPatch, variables: dict[str, object], one_host: bool) -> None:
    """Known before anybody meets. Ranks that cannot be known to be on one host need a secret; one that is too short does not count."""
    set_all(monkeypatch, **variables)
    meeting = read_environment()
    assert meeting is not None
    assert (meeting.rank, meeting.size, meeting.one_host) == (1, 4, one_host)
    if not one_host:
        with pytest.raises(ArgumentError, match="MKERNEL_SECRET = unset"):
            choose()
        monkeypatch.setenv("MKERNEL_SECRET", "too short")
        with pytest.raises(ArgumentError, match=r"MKERNEL_SECRET = \(not shown\): must be at least 32 characters"):
            choose()


def test_launchers_that_say_one_rank_are_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, SLURM_PROCID=0, SLURM_STEP_ID=0, SLURM_STEP_NUM_TASKS=1, SLURM_JOB_NODELIST="login1")
    assert not rendezvous.offered()


BATCH = {"SLURM_JOB_ID": 4711, "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": 2, "SLURM_NTASKS": 4, "SLURM_NPROCS": 4}
BATCH |= {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0, "SLURM_GTIDS": 0, "SLURM_TASKS_PER_NODE": "2(x2)"}


@pytest.mark.parametrize(
    "step",
    [
        {},  # a batch script; a shell of salloc
        {"SLURM_STEP_ID": "batch"},
        {"SLURM_STEP_ID": 0xFFFFFFFB},  # the same as a number
        {"SLURM_STEP_ID": 0xFFFFFFFA, "SLURM_STEP_NUM_TASKS": 4},  # salloc's interactive step
        {"SLURM_STEPID": 0xFFFFFFFB, "SLURM_STEP_NUM_TASKS": 4},
        {"SLURM_STEP_ID": 0},
    ],
)
def test_a_batch_script_is_no_rank(monkeypatch: pytest.MonkeyPatch, step: dict[str, object]) -> None:
    """It waited for three others that nobody had started."""
    set_all(monkeypatch, **BATCH, **step)
    assert read_environment() is None
    assert isinstance(choose(), SingleBootstrap)


def test_a_step_of_a_batch_script(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, **{**BATCH, "SLURM_PROCID": 2}, SLURM_STEP_ID=3, SLURM_STEP_NUM_TASKS=3)
    meeting = read_environment()
    assert meeting is not None
    assert (meeting.host, meeting.rank, meeting.size) == ("node0", 2, 3)


@pytest.mark.parametrize(
    ("variables", "argument"),
    [
        ({"MKERNEL_RENDEZVOUS": "nowhere"}, "MKERNEL_RENDEZVOUS"),
        ({"MKERNEL_RENDEZVOUS": "host:0", "MKERNEL_RANK": 0, "MKERNEL_SIZE": 2}, "MKERNEL_RENDEZVOUS"),
        ({"MKERNEL_RENDEZVOUS": "host:70000", "MKERNEL_RANK": 0, "MKERNEL_SIZE": 2}, "MKERNEL_RENDEZVOUS"),
        ({"MKERNEL_RENDEZVOUS": "host:1", "MKERNEL_RANK": 0}, "MKERNEL_RANK, MKERNEL_SIZE"),
        ({"MKERNEL_RENDEZVOUS": "host:1", "MKERNEL_RANK": 2, "MKERNEL_SIZE": 2}, "MKERNEL_RANK"),
    ],
)
def test_incomplete_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, object], argument: str) -> None:
    set_all(monkeypatch, **variables)
    with pytest.raises(ArgumentError) as caught:
        choose()
    assert caught.value.argument == argument


def test_a_communicator_must_be_one() -> None:
    with pytest.raises(ArgumentError, match="mpi4py communicator"):
        choose(comm=42)


def test_launcher_with_another_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one sees when mpi4py was built against another MPI than mpirun's: N processes, each alone."""
    pytest.importorskip("mpi4py")
    code = "from mkernel.runtime.ranks.choice import choose\nchoose()"
    environment = clean_environment(OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="1")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "the launcher started 4 ranks, but MPI sees one" in done.stderr


def test_sub_communicators_may_have_one_rank() -> None:
    code = "from mpi4py import MPI\nfrom mkernel.runtime.ranks.choice import choose\nassert choose(MPI.COMM_SELF).size == 1"
    command = [mpirun(), "-n", "2", sys.executable, "-c", code]
    assert subprocess.run(command, env=clean_environment(), timeout=60, check=False).returncode == 0


def test_launcher_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, OMPI_COMM_WORLD_SIZE=4, OMPI_COMM_WORLD_RANK=1)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mkernel.runtime.ranks.mpi", raising=False)
    monkeypatch.delattr("mkernel.runtime.ranks.mpi", raising=False)  # as the package remembers it, if another test has imported it
    with pytest.raises(Error, match="mpi4py cannot be imported"):
        choose()


# ---- sockets: one host, and several hosts with a secret

SECRET = "of tests alone, 32 characters long"
KINDS = ["one host", "hosts"]


def meet(kind: str, port: int, rank: int, size: int, timeout: float = 60.0) -> SocketBootstrap:
    one_host = kind == "one host"
    return SocketBootstrap(Meeting("127.0.0.1", port, rank, size, one_host), timeout, "" if one_host else SECRET)


@pytest.mark.parametrize("kind", KINDS)
def test_allgather_is_by_rank_and_repeats(kind: str) -> None:
    port, size = free_port(), 5

    def rank(r: int) -> list[list[bytes]]:
        with contextlib.closing(meet(kind, port, r, size)) as link:
            return [link.allgather(bytes([r, i]) * (i * 50_000)) for i in range(4)]

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(rank, range(size)))
    expected = [[bytes([r, i]) * (i * 50_000) for r in range(size)] for i in range(4)]
    assert results == [expected] * size


@pytest.mark.parametrize("kind", KINDS)
def test_says_who_is_missing(kind: str) -> None:
    with pytest.raises(errors.TimeoutError, match=r"ranks \[1, 2\]"):
        meet(kind, free_port(), 0, 3, timeout=0.3)
    with pytest.raises(errors.TimeoutError, match="is rank 0 started"):
        meet(kind, free_port(), 1, 3, timeout=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_notices_a_rank_that_leaves(kind: str) -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        zero, one = pool.submit(meet, kind, port, 0, 2), pool.submit(meet, kind, port, 1, 2)
        one.result().close()
        with pytest.raises(PeerLostError) as caught:
            zero.result().allgather(b"")
        assert caught.value.rank == 1
        zero.result().close()


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(Error, match="choose another port"):
        meet("hosts", server.getsockname()[1], 0, 2, timeout=1.0)
    port = free_port()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0mkernel-{os.geteuid()}-{port}".encode())
        with pytest.raises(Error, match="choose another port"):
            meet("one host", port, 0, 2, timeout=1.0)


def test_a_contribution_has_a_size() -> None:
    """A length that no contribution has is a stream that has gone wrong; nobody waits for its bytes."""
    port = free_port()
    for way in (0, 1):
        with ThreadPoolExecutor(2) as pool:
            links = [job.result() for job in [pool.submit(meet, "one host", port, rank, 2) for rank in range(2)]]
            links[1 - way]._links[way].sendall((1 << 40).to_bytes(8, "big"))
            with pytest.raises(Error, match=f"rank {1 - way} announced {1 << 40} bytes"):
                links[way].allgather(b"")
            for link in links:
                link.close()


# ---- threads


def test_threads() -> None:
    group = ThreadGroup(3)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda own: [own.allgather(bytes([own.rank, i])) for i in range(50)], map(group.bootstrap, range(3))))
    assert results == [[[bytes([r, i]) for r in range(3)] for i in range(50)]] * 3


def test_threads_are_released_by_abort() -> None:
    group = ThreadGroup(2)
    threading.Timer(0.1, group.abort, ["rank 1 cannot"]).start()
    with pytest.raises(AbortedError, match="rank 1 cannot"):
        group.bootstrap(0).allgather(b"")


def test_host_identity_is_stable() -> None:
    assert bootstrap.host_identity() == bootstrap.host_identity() != ""
