"""Compiling for sm_90a by NVRTC, without a GPU: errors, keys, the cache between threads and processes, what a cubin says."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")

from mkernel.errors import CompileError
from mkernel.jit import cuda, headers
from mkernel.jit.spec import KernelSpec

KERNELS = Path(__file__).parent / "kernels"
PLAIN = KernelSpec("plain", (("kValue", 3), ("kSpill", 0)), threads=128, shared_bytes=0, parameter_bytes=192)
EVERY_PTX = KernelSpec(
    "every_ptx",
    (("kLanes", 32), ("kWidth", 256), ("kFloat16", 0), ("kTransposed", 0)),
    threads=384,
    shared_bytes=70_000,
    parameter_bytes=320,
)

COMPILE = """
import sys, logging
from pathlib import Path
logging.basicConfig(level=logging.INFO, format="%(message)s")
from mkernel.jit import cuda
from mkernel.jit.spec import KernelSpec
constants = (("kValue", int(sys.argv[2])), ("kSpill", 0))
cubin = cuda.compile(KernelSpec("plain", constants, threads=128, shared_bytes=0, parameter_bytes=192), include=[Path(sys.argv[1])])
print(cuda.resources(cubin))
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("MKERNEL_NO_COMPILE", raising=False)
    monkeypatch.delenv("MKERNEL_DUMP", raising=False)
    return tmp_path / "cache" / "cuda"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that NVRTC was given."""
    sources: list[str] = []
    compile_now = cuda._Job.nvrtc

    def count(job: cuda._Job, path: Path | None = None) -> bytes:
        sources.append(job.source)
        return compile_now(job, path)

    monkeypatch.setattr(cuda._Job, "nvrtc", count)
    return sources


def key(spec: KernelSpec, include: Path = KERNELS) -> bytes:
    return cuda._Job(spec, [include]).key


# ---- kernels
@pytest.mark.parametrize(("width", "float16", "transposed"), [(64, 0, 0), (128, 1, 0), (192, 0, 1), (256, 1, 1), (256, 0, 0)])
def test_every_ptx_function_compiles(width: int, float16: int, transposed: int, caplog: pytest.LogCaptureFixture) -> None:
    constants = (("kLanes", 32), ("kWidth", width), ("kFloat16", float16), ("kTransposed", transposed))
    used = cuda.resources(cuda.compile(dataclasses.replace(EVERY_PTX, constants=constants), include=[KERNELS]))
    assert used.parameter_bytes == EVERY_PTX.parameter_bytes
    assert used.local_bytes == 0
    assert caplog.text == ""  # no warning of spills or serialized wgmma


def test_no_ptx_function_is_forgotten() -> None:
    names = set(re.findall(r"^MK_DEVICE [\w:*]+\*? (\w+)\(", (headers.kernels_src() / "ptx.cuh").read_text(), re.MULTILINE))
    names -= {"fma"}  # behind wgmma
    assert len(names) > 40
    text = (KERNELS / "every_ptx.cuh").read_text()
    assert {name for name in names if f"ptx::{name}" not in text} == set()


def test_sass_has_the_instructions() -> None:
    sass = cuda.disassemble(cuda.compile(EVERY_PTX, include=[KERNELS]))
    if sass is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    tma = ("UTMALDG.3D", "UTMALDG.3D.MULTICAST", "UTMASTG.3D", "UBLKCP")
    for instruction in ("HGMMA.64x256x16", *tma, "UCGABAR_WAIT", "USETMAXREG", "SYNCS", ".64.STRONG.SYS"):
        assert instruction in sass


@pytest.mark.parametrize("width", [64, 112, 256])
@pytest.mark.parametrize("float16", [0, 1])
@pytest.mark.parametrize("transposed", [0, 1])
def test_a_step_as_one_statement_is_four_instructions(width: int, float16: int, transposed: int, caplog: pytest.LogCaptureFixture) -> None:
    """The text of kernels_src/wgmma.cuh: of 112 columns beside itself, of 64 and 256 beside CUTLASS's atoms; registers apart."""
    found = []
    for whole in (0, 1):
        constants = (("kWidth", width), ("kFloat16", float16), ("kTransposed", transposed), ("kWhole", whole))
        spec = KernelSpec("step", constants, threads=128, shared_bytes=70_000, parameter_bytes=192)
        sass = cuda.disassemble(cuda.compile(spec, include=[KERNELS]))
        if sass is None:
            pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
        instructions = re.findall(r"^\s+/\*[0-9a-f]{4}\*/\s+(.*?) ;", sass, re.MULTILINE)
        kinds = ("HGMMA", "WARPGROUP", "UIADD3")  # products, fences and waits, and steps of descriptors
        found.append(sorted(re.sub(r"\b(U?[RP])\d+", r"\1", one) for one in instructions if one.startswith(kinds)))
    assert found[0] == found[1]
    assert sum(one.startswith("HGMMA") for one in found[1]) == 4
    assert caplog.text == ""  # no warning of spills or serialized wgmma


def test_a_cold_compilation_is_quick() -> None:
    """0.15 s alone; <cuda/std/utility> in ptx.cuh once made it 1.5 s. Warm the library up first, then allow for a busy machine."""
    cuda.compile(PLAIN, include=[KERNELS])
    times = []
    for value in range(10, 13):
        spec = dataclasses.replace(PLAIN, constants=(("kValue", value), ("kSpill", 0)))
        begin = time.process_time()
        cuda.compile(spec, include=[KERNELS])
        times.append(time.process_time() - begin)
    assert min(times) < 1.0


# ---- errors
def test_broken_source_gives_log_and_path(tmp_path: Path) -> None:
    (tmp_path / "plain.cuh").write_text("MK_KERNEL(32)(int x) { undeclared_name = x; }\n")
    with pytest.raises(CompileError) as caught:
        cuda.compile(PLAIN, include=[tmp_path])
    error = caught.value
    assert "undeclared_name" in error.log
    assert "plain.cuh(1)" in error.log
    assert Path(error.path).read_text().startswith('#include "ptx.cuh"')
    assert error.path in str(error)


def test_parameters_of_another_size_are_refused() -> None:
    with pytest.raises(CompileError, match="192 bytes of parameters, its plan says 256"):
        cuda.compile(dataclasses.replace(PLAIN, parameter_bytes=256), include=[KERNELS])


def test_a_kernel_that_is_not_there() -> None:
    with pytest.raises(CompileError, match=r"no nowhere\.cuh"):
        cuda.compile(dataclasses.replace(PLAIN, name="nowhere"), include=[KERNELS])


# ---- keys
def test_key_changes_with_every_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = key(PLAIN)
    assert key(PLAIN) == original
    changes: list[Callable[[], bytes]] = [
        lambda: key(dataclasses.replace(PLAIN, constants=(("kValue", 4), ("kSpill", 0)))),
        lambda: key(dataclasses.replace(PLAIN, threads=256)),
        lambda: key(dataclasses.replace(PLAIN, shared_bytes=16)),
        lambda: key(dataclasses.replace(PLAIN, parameter_bytes=320)),
        lambda: key(EVERY_PTX),
    ]
    keys = {original, *(change() for change in changes)}
    monkeypatch.setattr(cuda, "ARCH", "sm_90")
    keys.add(key(PLAIN))
    assert len(keys) == len(changes) + 2


@pytest.mark.parametrize("name", ["ptx.cuh", "abi.h"])
def test_key_changes_with_the_device_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import shutil

    copy = tmp_path / "kernels_src"
    shutil.copytree(headers.kernels_src(), copy)
    monkeypatch.setattr(headers, "kernels_src", lambda: copy)
    before = key(PLAIN)
    with (copy / name).open("a") as file:
        file.write("// changed\n")
    assert key(PLAIN) != before


# ---- the cache
def test_the_second_time_nothing_is_compiled(compilations: list[str]) -> None:
    first = cuda.compile(PLAIN, include=[KERNELS])
    assert cuda.compile(PLAIN, include=[KERNELS]) == first
    assert len(compilations) == 1


def test_compiling_begins_in_the_background_where_nothing_is_cached(compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    begun = cuda.begin_compiling()
    assert begun is not None
    begun.join(120)
    assert not begun.is_alive()
    monkeypatch.setenv("MKERNEL_NO_COMPILE", "1")
    assert cuda.begin_compiling() is None
    monkeypatch.delenv("MKERNEL_NO_COMPILE")
    cuda.compile(PLAIN, include=[KERNELS])
    assert len(compilations) == 1, "nothing of it is kept, or counts"
    assert cuda.begin_compiling() is None


def test_the_small_kernel_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong with it nobody would hear of."""
    monkeypatch.setattr(cuda.contextlib, "suppress", lambda *_: cuda.contextlib.nullcontext())
    cuda._compile_nothing()


def test_another_process_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.compile(PLAIN, include=[KERNELS])
    monkeypatch.setenv("MKERNEL_NO_COMPILE", "1")
    found = _process(3)
    assert "Resources(" in found.communicate()[0]
    assert found.returncode == 0
    missing = _process(4)
    assert "MKERNEL_NO_COMPILE" in missing.communicate()[0]
    assert missing.returncode == 1


def test_four_processes_compile_once() -> None:
    processes = [_process(5) for _ in range(4)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert sum(output.count("compiled plain-") for output in outputs) == 1, outputs
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def _process(value: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMPILE, str(KERNELS), str(value)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_damaged_folder_costs_only_time(own_cache: Path, compilations: list[str], caplog: pytest.LogCaptureFixture) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text("a file where the folder should be")
    cuda.compile(PLAIN, include=[KERNELS])
    cuda.compile(PLAIN, include=[KERNELS])
    assert len(compilations) == 1, "this process remembers"
    assert "MKERNEL_CACHE_DIR" in caplog.text


def test_failures_are_not_cached(tmp_path: Path, compilations: list[str]) -> None:
    (tmp_path / "plain.cuh").write_text("#error no\n")
    for _ in range(2):
        with pytest.raises(CompileError):
            cuda.compile(PLAIN, include=[tmp_path])
    assert len(compilations) == 2
    assert cuda._cached(cuda._Job(PLAIN, [tmp_path])) is None


# ---- what can be read
def test_dump(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MKERNEL_DUMP", str(tmp_path / "dump"))
    cubin = cuda.compile(PLAIN, include=[KERNELS])
    files = {file.suffix: file for file in (tmp_path / "dump").iterdir()}
    assert {".cu", ".ptx", ".cubin"} <= files.keys() <= {".cu", ".ptx", ".cubin", ".sass"}
    assert files[".cubin"].read_bytes() == cubin
    assert ".target sm_90a" in files[".ptx"].read_text()
    assert "kValue = 3u" in files[".cu"].read_text()
    if ".sass" in files:
        assert "registers=" in files[".sass"].read_text().splitlines()[0]


@pytest.mark.parametrize("spill", [0, 1])
def test_resources_agree_with_the_tool(tmp_path: Path, spill: int, caplog: pytest.LogCaptureFixture) -> None:
    from cuda.pathfinder import find_nvidia_binary_utility

    cubin = cuda.compile(dataclasses.replace(PLAIN, constants=(("kValue", 1), ("kSpill", spill))), include=[KERNELS])
    used = cuda.resources(cubin)
    assert (used.local_bytes > 0) == bool(spill)
    assert ("local memory" in caplog.text) == bool(spill)
    tool = find_nvidia_binary_utility("cuobjdump")
    if tool is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump")
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    text = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    said = dict(re.findall(r"(\w+):(\d+)", text.split("mkernel_entry")[1]))
    assert (used.registers, used.local_bytes) == (int(said["REG"]), int(said["STACK"]))


def test_what_is_no_cubin() -> None:
    for data in (b"", b"\x7fELF", b"\x7fELF\x02", b"\x7fELF\x02" + bytes(20), b"\x7fELF\x01" + bytes(100), b"\x7fELF\x02" + bytes(100)):
        with pytest.raises(ValueError, match="cubin"):
            cuda.resources(data)
