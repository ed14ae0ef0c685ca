"""The mirror of an op's parameters says the same as its header: the compiler is asked, not the eye."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path

from mkernel.jit import cpu
from mkernel.jit.headers import device_code
from mkernel.jit.source import render
from mkernel.jit.spec import KernelSpec

__all__ = ["errors_of_mirror", "layout"]


def layout(parameters: type[ctypes.Structure]) -> dict[str, int]:
    """What Python thinks: C++ expressions of sizes and offsets, with their values."""
    found = {"sizeof(mkernel::Parameters)": ctypes.sizeof(parameters)}
    for name, kind, *_ in parameters._fields_:
        found[f"offsetof(mkernel::Parameters, {name})"] = getattr(parameters, name).offset
        found[f"sizeof(mkernel::Parameters::{name})"] = ctypes.sizeof(kind)
        if issubclass(kind, ctypes.Structure) and kind.__module__ != "mkernel.abi":  # those of the ABI have a test of their own
            for inner, inner_kind, *_ in kind._fields_:
                offset = getattr(parameters, name).offset + getattr(kind, inner).offset
                found[f"offsetof(mkernel::Parameters, {name}.{inner})"] = offset
                found[f"sizeof(mkernel::{kind.__name__}::{inner})"] = ctypes.sizeof(inner_kind)
    return found


def errors_of_mirror(
    spec: KernelSpec,
    parameters: type[ctypes.Structure],
    folders: tuple[Path, ...] = (),
    constants: Mapping[str, int] | None = None,
) -> str:
    """What the compiler of target cpu says against ``parameters`` as the mirror of a kernel's, and ``constants``; "" if nothing.

    Nothing is run.
    """
    expected = layout(parameters) | dict(constants or {})
    claims = [f'static_assert({what} == {value}, "{what} is not {value}");' for what, value in expected.items()]
    source = "\n".join(["#include <cstddef>", render(spec), *claims, ""])
    search: list[str] = [f"-I{folder}" for folder in (device_code()[0] / "cpu", *device_code(), *folders)]
    flags = ["-std=c++20", "-fsyntax-only", "-Wno-unknown-pragmas", "-Wno-invalid-offsetof"]
    command = [*cpu.find_compiler(), *flags, *search, "-x", "c++", "-"]
    ended = subprocess.run(command, input=source, capture_output=True, text=True, timeout=300, check=False)
    return "" if ended.returncode == 0 else ended.stderr
