"""Whether this process is one of several ranks that somebody else has started (``mkernel.cli.launcher`` starts them)."""

from __future__ import annotations

import os

__all__ = ["launched_size", "under_launcher"]

# What launchers set in the processes they start.
_MARKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MKERNEL_RENDEZVOUS", "TORCHELASTIC_RUN_ID")
_SIZES = ("MKERNEL_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")


def under_launcher() -> bool:
    """Whether this process is one rank of something that was already started."""
    # A Slurm step of one task is an interactive shell more often than a world of one.
    return any(os.environ.get(mark) for mark in _MARKS) or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def launched_size() -> int:
    """How many ranks the launcher of this process started; 0: there is none, or it does not say."""
    return next((int(os.environ[name]) for name in _SIZES if os.environ.get(name, "").isdigit()), 0) if under_launcher() else 0
