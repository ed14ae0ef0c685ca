"""The machine of a measurement: versions, device, clocks."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from typing import Any

from mkernel.jit.headers import sources_digest
from mkernel.ops.remembered import code_digest

__all__ = ["clocks", "device_name", "versions"]

_PACKAGES = (
    "mkernel", "cuda-core", "cuda-bindings", "cupy-cuda13x", "cupy-cuda12x", "torch", "nvidia-cuda-nvrtc", "nvidia-nccl-cu13",
    "nvidia-cublas", "nvidia-cutlass", "numpy", "ml_dtypes", "mpi4py",
)  # fmt: skip
_QUERY = ("index", "name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw")


def versions() -> dict[str, str]:
    """Installed versions of everything that a figure may depend on, and digests of the kernels and of what plans them."""
    found = {"python": platform.python_version(), "kernels": sources_digest(), "plans": code_digest()[:16]}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def clocks() -> list[dict[str, str]]:
    """What nvidia-smi says of every GPU now; empty where it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(_QUERY, (field.strip() for field in line.split(",")), strict=False)) for line in text.splitlines() if line]


def device_name(world: Any) -> str:
    if world.target != "cuda":
        return platform.processor() or platform.machine()
    name = world.xp.cuda.runtime.getDeviceProperties(world.device)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)
