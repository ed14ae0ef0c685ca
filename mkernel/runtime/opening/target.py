"""The devices that a process sees, and how a rank opens its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mkernel.runtime.opening.placement import Gpu

if TYPE_CHECKING:
    from mkernel.runtime.backend import Backend
    from mkernel.runtime.cpu.thread_ranks import ThreadRanks

__all__ = ["MakeBackend", "backend_maker", "gpus_here"]

MakeBackend = Callable[[str, "int | str", int], "Backend"]  # target, ordinal or "cpu", rank


def backend_maker(thread_ranks: ThreadRanks | None) -> MakeBackend:
    """What opens a rank's device. ``thread_ranks``: those of ``mk.launch`` on target cpu."""

    def make(target: str, device: int | str, rank: int) -> Backend:
        if target == "cuda":
            from mkernel.runtime.cuda.backend import CudaBackend

            return CudaBackend(int(device))
        from mkernel.runtime.cpu.backend import CpuBackend

        return CpuBackend(rank=rank, thread_ranks=thread_ranks)

    return make


def gpus_here() -> tuple[tuple[Gpu, ...], str, int | None]:
    """GPUs that this process sees; why they cannot be used, if they are there; the one it has made current. Raises nothing."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return (), "", None
    installed = Path("/dev/nvidia0").exists()
    try:
        from mkernel.runtime.cuda.gpus import available

        gpus = tuple(Gpu(g.ordinal, g.uuid, g.capability, tuple(g.peers)) for g in available())
    except ImportError as error:
        return (), f"there is a GPU, but {error}: install mkernel[cuda13]" if installed else "", None
    except Exception as error:  # of any kind; choose_target tells the user
        return (), f"the GPU driver fails: {error}", None
    if not gpus:
        return (), "there is a GPU, but its driver does not answer: run nvidia-smi" if installed else "", None
    return gpus, "", _current_ordinal()


def _current_ordinal() -> int | None:
    """The device that the process has chosen through CuPy, if it uses CuPy already."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    try:
        return int(cupy.cuda.runtime.getDevice())
    except Exception:
        logging.getLogger("mkernel").debug("CuPy does not tell its device", exc_info=True)
        return None
