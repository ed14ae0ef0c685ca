"""Where the headers are that a kernel includes, and a digest of all that can be included."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from mkernel import env
from mkernel.errors import CompileError
from mkernel.jit.spec import KernelSpec

__all__ = [
    "IncludePath",
    "cuda_includes",
    "cutlass_include",
    "device_code",
    "digest",
    "kernels_src",
    "looked_at_once",
    "own_folder",
    "sources_digest",
]


@dataclasses.dataclass(frozen=True, slots=True)
class IncludePath:
    """Folders in the order in which the compiler searches them."""

    folders: tuple[Path, ...]

    @classmethod
    def for_cuda(cls, more: Sequence[Path] = ()) -> IncludePath:
        """Everything a kernel needs on target cuda. Raises CompileError when something is missing, with a remedy."""
        return cls((*device_code(), *more, cutlass_include(), *cuda_includes()))

    def find(self, name: str, beside: Path) -> Path | None:
        """The file that ``#include`` of this name means inside a file of folder ``beside``."""
        found = _find(name, str(beside), [str(folder) for folder in self.folders])
        return None if found is None else Path(found)


def _find(name: str, beside: str, folders: Sequence[str]) -> str | None:
    is_file, join = os.path.isfile, os.path.join
    return next((file for folder in (beside, *folders) if is_file(file := join(folder, name))), None)


# ---- locations
def kernels_src() -> Path:
    """The device code: beside the package in a checkout, inside it when installed. ``MKERNEL_KERNELS_SRC`` names another one."""
    other = env.KERNELS_SRC.get()
    if other is not None:
        if not (other / "ptx.cuh").is_file():
            raise CompileError(f"MKERNEL_KERNELS_SRC = {other}: no ptx.cuh there; name a copy of mkernel's folder kernels_src")
        return other.resolve()
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernels_src", package.parent / "kernels_src"):
        if (folder / "ptx.cuh").is_file():
            return folder
    raise CompileError(f"kernels_src is neither in {package} nor beside it: the installation is incomplete, reinstall mkernel")


def device_code() -> tuple[Path, ...]:
    """Search path of the device code: ``kernels_src``, for headers that include each other, and its ``ops``, for generated sources."""
    folder = kernels_src()
    return folder, folder / "ops"


def own_folder(spec: KernelSpec) -> tuple[Path, ...]:
    """Search path of a kernel from outside ``kernels_src``. Raises CompileError when it has the name of one of mkernel's own."""
    if spec.folder is None:
        return ()
    name = f"{spec.name}.cuh"
    for folder in device_code():
        if (folder / name).is_file():
            raise CompileError(f"{spec.folder / name}: mkernel has a kernel of this name, {folder / name}; name it otherwise")
    if not (spec.folder / name).is_file():
        raise CompileError(f"{spec.name}: no {name} in {spec.folder}")
    return (spec.folder,)


def cutlass_include() -> Path:
    """The folder that holds ``cute/``: MKERNEL_CUTLASS, else the nvidia-cutlass package."""
    candidates = [_cutlass_package()]
    if env.CUTLASS.is_set():
        root = env.CUTLASS.get()
        candidates = [root, root and root / "include"]
    for folder in candidates:
        if folder is not None and (folder / "cute" / "arch" / "mma_sm90_gmma.hpp").is_file():
            return folder
    if env.CUTLASS.is_set():
        raise CompileError(f"MKERNEL_CUTLASS = {env.CUTLASS.get()}: no cute/arch/mma_sm90_gmma.hpp there; name CUTLASS's include folder")
    raise CompileError("CUTLASS headers not found: `pip install nvidia-cutlass`, or set MKERNEL_CUTLASS to CUTLASS's include folder")


def _cutlass_package() -> Path | None:
    # Without importing it: the package imports scipy and networkx.
    package = importlib.util.find_spec("cutlass_library")
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0]) / "source" / "include"


def cuda_includes() -> tuple[Path, ...]:
    """Folders of CUDA's own headers and of CCCL (``cuda/std``): MKERNEL_CUDA_INCLUDE, packages, CUDA_HOME, /usr/local/cuda."""
    if env.CUDA_INCLUDE.is_set():
        folder = env.CUDA_INCLUDE.get()
        found = folder and _with_cccl(folder)
        if not found:
            raise CompileError(f"MKERNEL_CUDA_INCLUDE = {folder}: no cuda_fp16.h, or no cuda/std/cstdint there or in its folder cccl")
        return found
    for folder in _cuda_candidates():
        found = _with_cccl(folder)
        if found:
            return found
    raise CompileError(
        "CUDA headers not found: `pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl` (CUDA 13; suffix -cu12 for CUDA 12), "
        "or install the CUDA toolkit and set CUDA_HOME, or set MKERNEL_CUDA_INCLUDE"
    )


def _cuda_candidates() -> Iterator[Path]:
    # The packages first: they are what pip resolved beside this NVRTC. A toolkit of another release may not match it.
    for entry in sys.path:
        for folder in ("nvidia/cu13/include", "nvidia/cuda_runtime/include"):
            yield Path(entry or ".") / folder
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "include"
    yield Path("/usr/local/cuda/include")


def _with_cccl(folder: Path) -> tuple[Path, ...] | None:
    if not (folder / "cuda_fp16.h").is_file():
        return None
    # CUDA 13 moved CCCL into include/cccl; the CUDA 12 packages have it in a package of its own.
    for cccl in (folder / "cccl", folder, folder.parent.parent / "cuda_cccl" / "include"):
        if (cccl / "cuda" / "std" / "cstdint").is_file():
            return (folder,) if cccl == folder else (folder, cccl)
    return None


# ---- digest
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
_VERSIONS = ("cuda_runtime_api.h", "cuda/std/__cccl/version.h", "cutlass/version.h")


def digest(path: IncludePath, source: str, roots: Sequence[Path] = ()) -> bytes:
    """Digest of every header that compiling ``source`` can include, directly or not.

    Conditions are ignored, which only makes the set larger. Includes that are spelled by a macro are not followed: the version headers of
    CUDA, CCCL and CUTLASS, always part of the digest, stand for them. All of ``roots`` (files) is included whatever the source says.
    """
    looked, folders = _looked or _Looked(), tuple(map(str, path.folders))
    todo = [file for name in (*_VERSIONS, *_names(source.encode())) if (file := looked.find(name, folders[0], folders))]
    todo += map(str, roots)
    seen: dict[str, bytes] = {}
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen[file], names = looked.read(file)
        beside = file.rpartition("/")[0]
        todo += [found for name in names if (found := looked.find(name, beside, folders)) is not None and found not in seen]
    total = hashlib.sha256()
    for file in sorted(seen):
        total.update(file.encode() + b"\0" + seen[file])
    return total.digest()


class _Looked:
    """What a look at the headers has found: each is looked for, and looked at, once."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str, tuple[str, ...]], str | None] = {}
        self._files: dict[str, tuple[bytes, tuple[str, ...]]] = {}

    def find(self, name: str, beside: str, folders: tuple[str, ...]) -> str | None:
        """As ``IncludePath.find``, of strings."""
        key = name, beside, folders
        if key not in self._places:
            self._places[key] = _find(name, beside, folders)
        return self._places[key]

    def read(self, file: str) -> tuple[bytes, tuple[str, ...]]:
        """Digest and includes of a file."""
        if file not in self._files:
            self._files[file] = _as_it_is(Path(file))
        return self._files[file]


_looked: _Looked | None = None  # while somebody is inside ``looked_at_once``
_lookers = 0
_lookers_lock = threading.Lock()


@contextlib.contextmanager
def looked_at_once() -> Iterator[None]:
    """Inside, by any thread, headers stay as the first look finds them: the kernels of one preparation include the same hundred files."""
    global _looked, _lookers
    with _lookers_lock:
        _looked, _lookers = _looked or _Looked(), _lookers + 1
    try:
        yield
    finally:
        with _lookers_lock:
            _lookers -= 1
            if not _lookers:
                _looked = None


def _as_it_is(file: Path) -> tuple[bytes, tuple[str, ...]]:
    """Digest and includes of a file, read again only after it has changed."""
    status = file.stat()
    return _read(file, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _read(file: Path, mtime_ns: int, size: int) -> tuple[bytes, tuple[str, ...]]:
    """Digest and includes of one version of a file."""
    text = file.read_bytes()
    return hashlib.sha256(text).digest(), tuple(_names(text))


def sources_digest() -> str:
    """A digest of the device code of target cuda: another one may want other splits."""
    total, folder = hashlib.sha256(), kernels_src()
    for file in sorted(folder.rglob("*.*h")):
        name = file.relative_to(folder)
        if name.parts[0] != "cpu":
            total.update(name.as_posix().encode() + b"\0" + _as_it_is(file)[0])
    return total.hexdigest()[:16]


def _names(text: bytes) -> Iterator[str]:
    for match in _INCLUDE.finditer(text):
        yield match[1].decode(errors="replace")
