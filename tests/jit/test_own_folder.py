"""Kernels from a folder outside ``kernels_src``: found there, and compiled again when one of its files that they include has changed."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mkernel.errors import CompileError
from mkernel.jit import cpu
from mkernel.jit.spec import KernelSpec

SPEC = KernelSpec("plain", (("kValue", 3), ("kSpill", 0)), threads=128, shared_bytes=0, parameter_bytes=192)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelSpec:
    """A kernel whose header includes another one of its folder."""
    monkeypatch.setenv("MKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "kernels"
    shutil.copytree(Path(__file__).parent / "kernels", folder)
    (folder / "helper.cuh").write_text("// of the plain kernel\n")
    (folder / "plain.cuh").write_text('#include "helper.cuh"\n' + (folder / "plain.cuh").read_text())
    return dataclasses.replace(SPEC, folder=folder)


def key_for_cuda(spec: KernelSpec) -> Any:
    pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")
    from mkernel.jit import cuda

    cuda.compile(spec)
    return cuda._Job(spec, ()).key


@pytest.mark.parametrize("key_of", [cpu.compile, key_for_cuda], ids=["cpu", "cuda"])
def test_a_changed_file_of_the_folder_is_compiled_again(spec: KernelSpec, key_of: Callable[[KernelSpec], Any]) -> None:
    assert spec.folder is not None
    first = key_of(spec)
    assert key_of(spec) == first
    (spec.folder / "helper.cuh").write_text("// of the plain kernel, changed\n")
    assert key_of(spec) != first


@pytest.mark.parametrize("key_of", [cpu.compile, key_for_cuda], ids=["cpu", "cuda"])
def test_what_is_wrong_with_a_folder_is_said(spec: KernelSpec, key_of: Callable[[KernelSpec], Any]) -> None:
    assert spec.folder is not None
    with pytest.raises(CompileError, match=r"no nowhere\.cuh in .*kernels"):
        key_of(dataclasses.replace(spec, name="nowhere"))
    shutil.copy(spec.folder / "plain.cuh", spec.folder / "allgather_gemm.cuh")
    with pytest.raises(CompileError, match=r"mkernel has a kernel of this name"):
        key_of(dataclasses.replace(spec, name="allgather_gemm"))


def test_ranks_may_have_it_in_different_places(spec: KernelSpec) -> None:
    """The ranks agree on kernels by their repr."""
    assert repr(spec) == repr(dataclasses.replace(spec, folder=Path("/elsewhere")))
    assert spec != dataclasses.replace(spec, folder=Path("/elsewhere")), "in one process they are two kernels"
