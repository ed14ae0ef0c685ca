"""What a plan asks the compiler for: one C++ template and the constants that instantiate it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

__all__ = ["KernelSpec"]


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One kernel, ready to be compiled for either target.

    ``constants`` become ``static constexpr uint32_t NAME = value;`` members of ``struct Config`` in the generated source, in this
    order; the kernel header ``<name>.cuh`` is then included and instantiates itself with ``Config``.
    """

    name: str  # e.g. "allgather_gemm"; also the stem of the header: kernels_src/ops/<name>.cuh
    constants: tuple[tuple[str, int], ...]
    threads: int  # per CTA
    shared_bytes: int  # dynamic shared memory per CTA
    parameter_bytes: int  # sizeof the kernel's one parameter struct (64-byte aligned)
    folder: Path | None = dataclasses.field(default=None, repr=False)  # where the header is, if not in kernels_src/ops; may differ by rank
    cluster: int = 1  # CTAs of a cluster; Config::kCluster where there are several
    # True: may begin while the kernel before it on its stream still runs, and waits by itself for what that writes (ptx::wait_for_grids).
    early: bool = False
    # True: CTAs wait for those of their own cluster only, so that there may be more clusters than are resident at once.
    clusters_are_apart: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        sizes = self.threads, self.shared_bytes, self.parameter_bytes, self.cluster
        return hash((self.name, self.constants, *sizes, self.early, self.clusters_are_apart))

    def __hash__(self) -> int:
        return self._hash  # asked for with every new size of a call
