"""The devices that a process sees, and how a rank opens its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
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


def gpus_here(in_use: int | None = None) -> tuple[tuple[Gpu, ...], str, int | None]:
    """GPUs that this process sees; why they cannot be used, if they are there; the one that it has chosen. Raises nothing.

    It has chosen the one it has made current, else ``in_use``, where it has another world.
    """
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
    # 0 is also the current one of processes that chose nothing.
    return gpus, "", next(filter(None, _current_ordinals()), in_use)


def _current_ordinals() -> Iterator[int | None]:
    """The current device of the calling thread: as the driver tells it, and as libraries that the process uses do.

    torch makes a context current at its first allocation only.
    """
    from mkernel.runtime.cuda.gpus import current_ordinal

    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    asked: list[tuple[str, Callable[[], int | None]]] = [("the driver", current_ordinal)]
    if cupy is not None:
        asked.append(("CuPy", lambda: cupy.cuda.runtime.getDevice()))
    if torch is not None:  # asking sooner would begin to use GPUs
        asked.append(("torch", lambda: torch.cuda.current_device() if torch.cuda.is_initialized() else None))
    for name, ask in asked:
        try:
            yield ask()
        except Exception:
            logging.getLogger("mkernel").debug("%s does not tell its device", name, exc_info=True)
