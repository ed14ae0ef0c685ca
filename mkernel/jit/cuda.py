"""Kernels for target cuda: a KernelSpec becomes a cubin by NVRTC, cached. Needs no driver and no GPU."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkernel import env
from mkernel.errors import CompileError
from mkernel.jit import cache
from mkernel.jit.cubin import Resources, resources
from mkernel.jit.headers import IncludePath, digest, own_folder
from mkernel.jit.source import ENTRY, render
from mkernel.jit.spec import KernelSpec

if TYPE_CHECKING:
    from cuda.core import ProgramOptions

__all__ = ["ARCH", "Resources", "begin_compiling", "compile", "compile_ptx", "disassemble", "resources", "warm_up"]

ARCH = "sm_90a"  # the `a` unlocks wgmma and setmaxnreg; such a cubin runs on compute capability 9.0 only

_TOOL_SECONDS = 60

_log = logging.getLogger("mkernel")


def compile(spec: KernelSpec, *, include: Sequence[Path] = ()) -> bytes:
    """The cubin of a kernel, from the cache or compiled now (well under a second). Ranks and threads may ask for the same at once.

    Parameters
    ----------
    spec
        Which kernel.
    include
        More folders to look for ``<name>.cuh`` in (tests).

    Raises
    ------
    CompileError
        A header or NVRTC is missing, the source has an error (``log``, ``path``), the kernel's parameters are not as large as the spec
        says, or it is not in the cache and compiling is switched off (``MKERNEL_NO_COMPILE``).
    """
    job = _Job(spec, include)
    cubin = _cached(job)
    if cubin is None:
        if env.NO_COMPILE.get():
            where = cache.folder("cuda")
            raise CompileError(f"{spec.name} is not in the cache {where}, and compiling is switched off (MKERNEL_NO_COMPILE)")
        with cache.locked("cuda", f"locks/{job.key.hex()}"):
            cubin = _cached(job)  # another rank may have been faster
            if cubin is None:
                cubin = job.compile()
                with contextlib.suppress(OSError):  # nowhere to keep it: later worlds compile it again
                    cache.keep("cuda", job.entry, job.key, cubin)
    dump = env.DUMP.get()
    if dump is not None:
        job.dump(dump, cubin)
    return cubin


def warm_up() -> None:
    """Load the libraries that compiling, and finding a kernel in the cache, need: 0.2 s that the first call would take. Never raises."""
    with contextlib.suppress(Exception):  # the first kernel meets the error again, and reports it
        from cuda.core.utils import make_program_cache_key

        search, source = IncludePath.for_cuda([]), '#include "comm/intra_comm.cuh"\n'
        options = _options("none", search)
        make_program_cache_key(code=source, code_type="c++", options=options, target_type="cubin", extra_digest=digest(search, source))


def begin_compiling() -> threading.Thread | None:
    """Where no kernel is cached yet, compile a small one in the background: NVRTC's first takes a second longer than the others.

    Never raises. Returns the thread, which the end of the process waits for; None: nothing is to be done.
    """
    if env.NO_COMPILE.get():
        return None
    with contextlib.suppress(OSError), os.scandir(cache.folder("cuda") / "entries") as entries:
        if next(entries, None) is not None:
            return None
    thread = threading.Thread(target=_compile_nothing, name="mkernel-nvrtc")
    thread.start()
    return thread


def _compile_nothing() -> None:
    with contextlib.suppress(Exception):  # the first kernel meets the error again, and reports it
        from cuda.core import Program

        source = '#include "ptx.cuh"\nextern "C" __global__ void nothing(uint32_t *at) { *at += threadIdx.x; }\n'
        program = Program(source, "c++", _options("nothing", IncludePath.for_cuda([])))
        program.compile("cubin", logs=_Log())
        program.close()


def _cached(job: _Job) -> bytes | None:
    return cache.found("cuda", job.entry, job.key)


def compile_ptx(spec: KernelSpec, *, include: Sequence[Path] = ()) -> str:
    """The kernel as PTX, for reading. Not cached."""
    return _Job(spec, include).ptx().decode(errors="replace")


def disassemble(cubin: bytes, *options: str) -> str | None:
    """The SASS of a cubin; None when there is no nvdisasm (CUDA toolkit, or package nvidia-cuda-nvdisasm), which gets ``options``."""
    import tempfile

    from cuda.pathfinder import find_nvidia_binary_utility

    tool = find_nvidia_binary_utility("nvdisasm")
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [tool, "--print-code", *options, file.name], capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True
        ).stdout


class _Job:
    """One compilation: its source, options and key."""

    def __init__(self, spec: KernelSpec, include: Sequence[Path]) -> None:
        from cuda.core.utils import make_program_cache_key

        self.spec = spec
        self.source = render(spec)
        search = IncludePath.for_cuda([*own_folder(spec), *include])
        if search.find(f"{spec.name}.cuh", search.folders[0]) is None:
            raise CompileError(f"{spec.name}: no {spec.name}.cuh in {', '.join(map(str, search.folders))}")
        self.options = _options(spec.name, search)
        self.key = make_program_cache_key(
            code=self.source, code_type="c++", options=self.options, target_type="cubin", extra_digest=digest(search, self.source)
        )

    @property
    def stem(self) -> str:
        """The stem of this kernel's file names; different for different keys."""
        return f"{self.spec.name}-{self.key.hex()[:16]}"

    @property
    def entry(self) -> str:
        """Name of the cubin in the cache."""
        return f"entries/{self.key.hex()}.cubin"

    def compile(self) -> bytes:
        source = cache.keep_source("cuda", f"source/{self.stem}.cu", self.source)
        begin = time.perf_counter()
        cubin = self.nvrtc(source)
        seconds = time.perf_counter() - begin
        used = resources(cubin, ENTRY)
        if used.parameter_bytes != self.spec.parameter_bytes:
            raise CompileError(
                f"{self.spec.name}: the kernel takes {used.parameter_bytes} bytes of parameters, its plan says {self.spec.parameter_bytes}",
                path=str(source or ""),
            )
        _log.info("compiled %s in %.2f s: %d bytes, %s", self.stem, seconds, len(cubin), used)
        if used.local_bytes:
            _log.warning("%s spills: %d bytes of local memory per thread", self.stem, used.local_bytes)
        return cubin

    def nvrtc(self, path: Path | None = None) -> bytes:
        """The cubin. Raises CompileError."""
        from cuda.core import Program

        log = _Log()
        try:
            program = Program(self.source, "c++", self.options)
            try:
                return bytes(program.compile("cubin", logs=log).code)
            finally:
                program.close()
                del program  # else the traceback of an error keeps it until cuda.core's own parts of it are gone
        except Exception as error:  # NVRTCError; RuntimeError when the library is not there
            if "NVRTC_ERROR" in str(error):
                raise CompileError(f"{self.spec.name}: NVRTC failed", log=str(error), path=str(path or "")) from error
            raise CompileError(
                f"{self.spec.name}: NVRTC cannot run ({type(error).__name__}); `pip install nvidia-cuda-nvrtc` or install the CUDA toolkit",
                log=str(error),
            ) from error
        finally:
            if log.text.strip():
                # ptxas says so when it must serialize wgmma: correct, but several times slower.
                level = logging.WARNING if "Performance Loss" in log.text else logging.DEBUG
                _log.log(level, "NVRTC on %s: %s", self.stem, log.text.strip())

    def ptx(self) -> bytes:
        """Compile to PTX by NVRTC itself: cuda.core would ask the driver, which may be missing, whether it can load the PTX."""
        from cuda.bindings import nvrtc

        def ask(result: tuple[Any, ...]) -> Any:
            if int(result[0]) != 0:
                raise CompileError(f"{self.spec.name}: NVRTC answered {result[0]} when asked for PTX")
            return result[1] if len(result) > 1 else None

        program = ask(nvrtc.nvrtcCreateProgram(self.source.encode(), self.spec.name.encode(), 0, [], []))
        try:
            options = [option.rstrip(b"\0") for option in self.options.as_bytes("nvrtc")]
            ask(nvrtc.nvrtcCompileProgram(program, len(options), options))
            text = bytearray(ask(nvrtc.nvrtcGetPTXSize(program)))
            ask(nvrtc.nvrtcGetPTX(program, text))
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        return bytes(text).rstrip(b"\0")

    def dump(self, folder: Path, cubin: bytes) -> None:
        """Write the source, PTX, SASS and log of this kernel for a reader."""
        parts: dict[str, bytes | None] = {"cu": self.source.encode(), "cubin": cubin}
        if not env.NO_COMPILE.get():
            parts["ptx"] = self.ptx()
        sass = disassemble(cubin)
        parts["sass"] = None if sass is None else f"// {resources(cubin, ENTRY)}\n{sass}".encode()
        for suffix, data in parts.items():
            if data is not None:
                cache.dump(folder / f"{self.stem}.{suffix}", data)


def _options(name: str, search: IncludePath) -> ProgramOptions:
    from cuda.core import ProgramOptions

    return ProgramOptions(
        name=name,
        std="c++20",
        arch=ARCH,
        device_as_default_execution_space=True,  # CuTe has functions without __device__
        include_path=[str(folder) for folder in search.folders],
    )


class _Log:
    """What ``Program.compile`` writes its log to."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: Any) -> None:
        self.text += str(text)
