"""The only file that imports mpi4py. MPI is called inside ``init``, on the caller's thread, and to end a dying process; never else."""

from __future__ import annotations

import signal
from typing import Any

from mpi4py import MPI

from mkernel.runtime.ranks.bootstrap import Bootstrap

__all__ = ["MpiBootstrap", "abort_process", "library", "limit_finalize", "world_size"]


class MpiBootstrap(Bootstrap):
    """Ranks are those of an mpi4py communicator (None: COMM_WORLD)."""

    mpi = True

    def __init__(self, comm: Any = None) -> None:
        self._comm = MPI.COMM_WORLD if comm is None else comm
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def allgather(self, data: bytes) -> list[bytes]:
        return list(self._comm.allgather(data))

    def close(self) -> None:
        pass  # the communicator is the caller's


def world_size() -> int:
    return int(MPI.COMM_WORLD.Get_size())


def library() -> str:
    """Name of the MPI that mpi4py runs on."""
    return str(MPI.Get_library_version()).splitlines()[0].strip("\0 ,")


def abort_process(code: int) -> None:
    """End this process and, through the launcher, its job: the others may be unable to reach MPI_Finalize."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.COMM_WORLD.Abort(code)


def limit_finalize(seconds: int) -> None:
    """End this process (SIGALRM), and with it the job, if MPI_Finalize waits longer than this for ranks that will not come."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
