"""Which way the ranks of a world find each other: the caller's communicator, else what the environment asks for."""

from __future__ import annotations

import os
from typing import Any

from mkernel import env
from mkernel.errors import ArgumentError, Error
from mkernel.runtime.ranks import rendezvous
from mkernel.runtime.ranks.bootstrap import Bootstrap, SingleBootstrap
from mkernel.runtime.ranks.torch_group import TorchBootstrap, is_process_group

__all__ = ["choose", "launcher_size", "number_on_host", "under_mpi"]

# Variables that MPI launchers set for each process (Open MPI, MPICH and Intel MPI through PMI, PMIx servers).
_LAUNCHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_LAUNCHER_MARKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PMI_FD")
# Variables for a process's number among those of its host, the innermost launcher first: torchrun may run inside a step of Slurm.
_NUMBERS = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "SLURM_LOCALID",
)


def launcher_size() -> int:
    """Number of ranks that an MPI launcher says there are; 1 without a launcher."""
    for name in _LAUNCHER_SIZES:
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 1:
            return int(text)
    return 1


def under_mpi() -> bool:
    """Whether an MPI launcher started this process."""
    return any(os.environ.get(name) for name in (*_LAUNCHER_MARKS, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))


def number_on_host() -> int | None:
    """The number of this process among those that its launcher has started on this host; None if it does not tell.

    A world may have some of these processes only, so its own ranks do not count them.
    """
    told = (os.environ.get(name, "") for name in _NUMBERS)
    return next((int(text) for text in told if text.isdigit()), None)


def choose(comm: Any = None) -> Bootstrap:
    """The way in that the caller, or else the environment, asks for.

    An explicit communicator, mpi4py's or torch's; else ``MKERNEL_RENDEZVOUS``; else an MPI launcher; else torchrun's or Slurm's variables;
    else a world of one.

    Raises
    ------
    ArgumentError
        ``comm`` is no communicator, or the variables are incomplete.
    Error
        A launcher started several ranks, but MPI sees one.
    """
    if is_process_group(comm):
        return TorchBootstrap(comm)
    if comm is not None:
        if not all(hasattr(comm, name) for name in ("Get_rank", "Get_size", "allgather")):
            raise ArgumentError("comm", comm, "must be an mpi4py communicator or a process group of torch", "omit it to use COMM_WORLD")
        return _mpi(comm)
    if env.RENDEZVOUS.get():
        return rendezvous.from_environment()
    if under_mpi():
        return _mpi(None)
    if rendezvous.offered():
        return rendezvous.from_environment()
    if (env.SIZE.get() or 1) > 1:
        raise ArgumentError("MKERNEL_SIZE", env.SIZE.get(), "says nothing without MKERNEL_RENDEZVOUS", "set both, and MKERNEL_RANK")
    return SingleBootstrap()


def _mpi(comm: Any) -> Bootstrap:
    try:
        from mkernel.runtime.ranks import mpi

        bootstrap = mpi.MpiBootstrap(comm)
    except ImportError as error:
        if launcher_size() == 1:
            return SingleBootstrap()
        raise Error(
            f"an MPI launcher started {launcher_size()} ranks, but mpi4py cannot be imported ({error}): install mpi4py, or set "
            "MKERNEL_RENDEZVOUS=host:port, MKERNEL_RANK and MKERNEL_SIZE"
        ) from error
    expected = launcher_size()
    if expected > 1 and bootstrap.size == 1 and mpi.world_size() == 1:
        raise Error(
            f"the launcher started {expected} ranks, but MPI sees one: mpi4py uses another MPI ({mpi.library()}) than the launcher. "
            "Start with the mpirun of that MPI, or rebuild mpi4py against the launcher's"
        )
    return bootstrap
