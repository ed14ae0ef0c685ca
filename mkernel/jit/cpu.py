"""Kernels for target cpu: a KernelSpec becomes a shared object, by the host's C++ compiler, cached."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mkernel import env
from mkernel.errors import CompileError
from mkernel.jit.headers import IncludePath, digest, kernels_src
from mkernel.jit.source import render
from mkernel.jit.spec import KernelSpec

__all__ = ["compile", "core_library", "find_compiler", "sanitizing"]

_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-unknown-pragmas", "-Wno-psabi", "-pthread")
_KERNEL_FLAGS = ("-O2", "-fno-strict-aliasing")  # kernels look at the same memory as different types, as CUDA code does
_CORE_FLAGS = ("-O3",)
_TSAN_FLAGS = ("-fsanitize=thread", "-g1")
_CORE_SOURCES = ("memory", "fiber", "tsan", "scheduler", "sync", "async", "wgmma", "report", "crash", "host")
_SECONDS = 600


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
    folder = kernels_src()
    text = render(spec) + '#include "entry.h"\n'
    return _build(spec.name, text, [*_FLAGS, *_KERNEL_FLAGS, *(_TSAN_FLAGS if sanitizing() else ())], (folder / "cpu", folder, *include))


def core_library() -> Path:
    """The scheduler that runs the kernels (kernels_src/cpu), compiled once."""
    text = "".join(f'#include "{name}.cpp"\n' for name in _CORE_SOURCES)
    return _build("scheduler", text, [*_FLAGS, *_CORE_FLAGS], (kernels_src() / "cpu",))


def find_compiler() -> tuple[str, ...]:
    """The C++ compiler's command: ``MKERNEL_CXX``, ``CXX``, or the first of g++, clang++, c++ there is.

    Raises
    ------
    CompileError
        There is none.
    """
    for command in (env.CXX.get(), os.environ.get("CXX"), "g++", "clang++", "c++"):
        words = shlex.split(command) if command else []
        program = shutil.which(words[0]) if words else None
        if program is not None:
            return (program, *words[1:])
    raise CompileError("target cpu needs a C++20 compiler: install g++ (apt-get install -y g++) or set MKERNEL_CXX")


def sanitizing() -> bool:
    """Runs this process under ThreadSanitizer (its library preloaded)? Kernels are then instrumented."""
    return hasattr(ctypes.CDLL(None), "__tsan_create_fiber")


def _build(name: str, text: str, flags: Sequence[str], folders: tuple[Path, ...]) -> Path:
    compiler = find_compiler()
    key = _hash([text, digest(IncludePath(folders), text), platform.machine(), *_identity(compiler), *flags])
    folder = env.CACHE_DIR.get() / "cpu"
    target = folder / f"{name}-{key}.so"
    if not target.exists():
        if env.NO_COMPILE.get():
            raise CompileError(f"{name} is not in the cache {folder}, and compiling is switched off (MKERNEL_NO_COMPILE)")
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}-{key}.lock"):
            if not target.exists():  # another process may have been faster
                _compile([*compiler, *flags, *(f"-I{path}" for path in folders)], target, text)
    dump = env.DUMP.get()
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        (dump / f"{name}-{key}.cpp").write_text(text)
    return target


def _compile(compiler: Sequence[str], target: Path, text: str) -> None:
    source = target.with_suffix(".cpp")
    source.write_text(text)
    handle, partial = tempfile.mkstemp(dir=target.parent, suffix=".partial")
    os.close(handle)
    try:
        command = [*compiler, str(source), "-o", partial]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        if result.returncode != 0:
            raise CompileError(f"{target.stem}: {compiler[0]} failed", log=f"{shlex.join(command)}\n{result.stderr}", path=str(source))
        Path(partial).chmod(0o755)
        Path(partial).replace(target)  # atomic: other processes see all of it or nothing
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{target.stem}: {compiler[0]}: {error}", path=str(source)) from error
    finally:
        Path(partial).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One compilation of a key at a time on this host."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
    """Length-prefixed, so that no two lists of parts look alike."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()[:32]
