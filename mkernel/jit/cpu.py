"""Kernels for target cpu: a KernelSpec becomes a shared object, by the host's C++ compiler, cached."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from mkernel import env
from mkernel.errors import ArgumentError, CompileError
from mkernel.jit import cache
from mkernel.jit.headers import IncludePath, device_code, digest, kernels_src, own_folder
from mkernel.jit.source import render
from mkernel.jit.spec import KernelSpec

__all__ = ["compile", "core_library", "engine_library", "find_compiler", "open_library", "sanitizing"]

_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-unknown-pragmas", "-Wno-psabi", "-pthread")
# -O1: a kernel's time is spent in the scheduler and its products, so that -O2 makes no call faster and compiling a third slower.
# -fno-strict-aliasing: kernels read the same memory as different types, as CUDA code does.
_KERNEL_FLAGS = ("-O1", "-fno-strict-aliasing")
_CORE_FLAGS = ("-O3",)
_ENGINE_FLAGS = ("-O2",)
_TSAN_FLAGS = ("-fsanitize=thread", "-g1")
_CORE_SOURCES = ("memory", "fiber", "tsan", "scheduler", "sync", "async", "races", "wgmma", "report", "crash", "host")
_SECONDS = 600
_ATTEMPTS = 5
_FORMAT = "sealed"  # of the files in the cache


def compile(spec: KernelSpec, *, include: Sequence[Path] = ()) -> Path:
    """The shared object of a kernel, from the cache or compiled now. Processes and threads may ask for the same one at once.

    Parameters
    ----------
    spec
        Which kernel.
    include
        More folders to look for ``<name>.cuh`` in (tests).

    Raises
    ------
    CompileError
        No compiler, an error in the source, or compiling is switched off (``MKERNEL_NO_COMPILE``).
    """
    text = render(spec) + '#include "entry.h"\n'
    flags = [*_FLAGS, *_KERNEL_FLAGS, *(_TSAN_FLAGS if sanitizing() else ())]
    return _build(spec.name, text, flags, (kernels_src() / "cpu", *device_code(), *own_folder(spec), *include))


def core_library() -> Path:
    """The scheduler that runs the kernels (kernels_src/cpu), compiled once."""
    text = "".join(f'#include "{name}.cpp"\n' for name in _CORE_SOURCES)
    return _build("scheduler", text, [*_FLAGS, *_CORE_FLAGS], (kernels_src() / "cpu",))


def engine_library() -> Path:
    """The loop of the proxy engine (kernels_src/proxy), compiled once."""
    folder = kernels_src()
    return _build("engine", '#include "engine.cpp"\n', [*_FLAGS, *_ENGINE_FLAGS], (folder / "proxy", folder))


def find_compiler() -> tuple[str, ...]:
    """The C++ compiler's command: ``MKERNEL_CXX``, ``CXX``, or the first of g++, clang++, c++ there is.

    Raises
    ------
    CompileError
        There is none.
    ArgumentError
        ``MKERNEL_CXX`` names a program that is not there.
    """
    asked = env.CXX.get()
    if asked is not None:  # the variable names this compiler, and no other is tried
        program = shutil.which(asked[0])
        if program is None:
            raise ArgumentError(env.CXX.name, shlex.join(asked), "there is no such program", "name a C++20 compiler, or unset it")
        return (program, *asked[1:])
    for command in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        words = shlex.split(command) if command else []
        program = shutil.which(words[0]) if words else None
        if program is not None:
            return (program, *words[1:])
        if words and command == os.environ.get("CXX"):
            cache.warn_once(f"CXX = {command}: there is no such program; another compiler is taken")
    raise CompileError("target cpu needs a C++20 compiler: install g++ (apt-get install -y g++) or set MKERNEL_CXX")


def sanitizing() -> bool:
    """Whether this process runs under ThreadSanitizer (its library is preloaded). Kernels are then instrumented."""
    return hasattr(ctypes.CDLL(None), "__tsan_create_fiber")


def open_library(build: Callable[[], Path], mode: int = ctypes.DEFAULT_MODE) -> tuple[Path, ctypes.CDLL]:
    """What ``build`` (``compile``, ``core_library``) has made, and where it lies, loaded.

    A file that somebody removed meanwhile is built again; where the system does not run files of the cache, another folder takes over.

    Raises
    ------
    CompileError
        As ``build``; or there is no folder from which it can be loaded.
    """
    for _ in range(_ATTEMPTS):
        path = build()
        try:
            return path, ctypes.CDLL(str(path), mode=mode)
        except OSError as error:
            problem = error
            if path.exists():
                cache.distrust(path, f"cannot load from there: {error}")
    raise CompileError(f"{path.stem} cannot be loaded: {problem}; set MKERNEL_CACHE_DIR to a folder that is not mounted noexec")


def _build(name: str, text: str, flags: Sequence[str], folders: tuple[Path, ...]) -> Path:
    compiler = find_compiler()
    key = _hash([_FORMAT, text, digest(IncludePath(folders), text), platform.machine(), *_identity(compiler), *flags])
    stem, seal = f"{name}-{key}", key.encode()
    path = cache.find("cpu", f"{stem}.so", seal)
    if path is None:
        if env.NO_COMPILE.get():
            raise CompileError(f"{name} is not in the cache {cache.folder('cpu')}, and compiling is switched off (MKERNEL_NO_COMPILE)")
        with cache.locked("cpu", f"{stem}.lock"):
            path = cache.find("cpu", f"{stem}.so", seal)  # another process may have been faster
            if path is None:
                data = _compile([*compiler, *flags, *(f"-I{path}" for path in folders)], stem, text)
                try:
                    path = cache.keep("cpu", f"{stem}.so", seal, data, 0o700)
                except OSError as error:
                    raise CompileError(f"{stem} cannot be kept: {error}") from error
    dump = env.DUMP.get()
    if dump is not None:
        cache.dump(dump / f"{stem}.cpp", text.encode())
    return path


def _compile(compiler: Sequence[str], stem: str, text: str) -> bytes:
    """The shared object of a source."""
    kept = cache.keep_source("cpu", f"{stem}.cpp", text)
    try:
        # Compile outside the cache, whose disk may be full, and where others may look.
        with tempfile.TemporaryDirectory(prefix="mkernel-") as scratch:
            source, target = Path(scratch) / f"{stem}.cpp", Path(scratch) / f"{stem}.so"
            source.write_text(text)
            command = [*compiler, str(source), "-o", str(target)]
            result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
            if result.returncode != 0:
                log = f"{shlex.join(command)}\n{result.stderr}"
                raise CompileError(f"{stem}: {compiler[0]} failed", log=log, path=str(kept or ""))
            return target.read_bytes()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{stem}: {compiler[0]}: {error}", path=str(kept or "")) from error


def _identity(compiler: Sequence[str]) -> tuple[str, ...]:
    real = Path(compiler[0]).resolve()
    state = real.stat()
    return (*compiler, str(real), *_version(tuple(compiler), state.st_mtime_ns, state.st_size))


@functools.lru_cache(maxsize=8)
def _version(compiler: tuple[str, ...], mtime_ns: int, size: int) -> tuple[str, ...]:
    try:
        result = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise CompileError(f"{' '.join(compiler)} --version: {error}") from error
    return (result.stdout, str(mtime_ns), str(size))


def _hash(parts: Iterable[str | bytes]) -> str:
    """A digest of the parts, each with its length, so that no two lists have the same bytes."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:32]
