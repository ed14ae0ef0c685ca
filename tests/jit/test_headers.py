"""Finding headers, and the digest of what a source can include."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mkernel.errors import CompileError
from mkernel.jit.headers import IncludePath, cuda_includes, cutlass_include, digest, kernels_src, looked_at_once

SOURCE = '#include "ptx.cuh"\n#include "kernel.cuh"\n'


@pytest.fixture
def tree(tmp_path: Path) -> IncludePath:
    """kernel.cuh -> inner/deep.h -> <library/far.h>, and a file that nobody includes."""
    texts = {
        "src/ptx.cuh": "",
        "src/kernel.cuh": '  #  include "inner/deep.h"\n#if 0\n#include "conditional.h"\n#endif\n',
        "src/conditional.h": "",
        "src/inner/deep.h": '#include <library/far.h>\n#include "missing.h"\n',
        "src/unrelated.cuh": "",
        "system/library/far.h": '#include "near.h"\n',
        "system/library/near.h": '#include "far.h"\n',  # a circle
        "system/cuda_runtime_api.h": "#define CUDART_VERSION 13000",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return IncludePath((tmp_path / "src", tmp_path / "system"))


@pytest.mark.parametrize(
    "name",
    [
        "src/kernel.cuh",
        "src/inner/deep.h",
        "src/conditional.h",
        "system/library/far.h",
        "system/library/near.h",
        "system/cuda_runtime_api.h",
    ],
)
def test_digest_changes_with_every_file_that_can_be_included(tree: IncludePath, tmp_path: Path, name: str) -> None:
    before = digest(tree, SOURCE)
    assert digest(tree, SOURCE) == before
    with (tmp_path / name).open("a") as file:
        file.write("// changed\n")
    assert digest(tree, SOURCE) != before


def test_digest_ignores_other_files(tree: IncludePath, tmp_path: Path) -> None:
    before = digest(tree, SOURCE)
    (tmp_path / "src/unrelated.cuh").write_text("// changed\n")
    assert digest(tree, SOURCE) == before


def test_headers_are_looked_at_once(tree: IncludePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside ``looked_at_once``, whoever nests it, digests of any source ask the file system once; afterwards they ask again."""
    asked: list[str] = []
    isfile = os.path.isfile
    monkeypatch.setattr(os.path, "isfile", lambda file: asked.append(str(file)) or isfile(file))
    before = digest(tree, SOURCE)
    with looked_at_once():
        with looked_at_once():
            assert digest(tree, SOURCE) == before
        asked.clear()
        (tmp_path / "src/kernel.cuh").write_text("// changed\n")
        assert digest(tree, SOURCE) == before
        assert digest(tree, '#include "kernel.cuh"\n') != before
        assert asked == []
    assert digest(tree, SOURCE) != before


def test_digest_sees_a_file_that_comes_to_shadow_another(tree: IncludePath, tmp_path: Path) -> None:
    before = digest(tree, SOURCE)
    (tmp_path / "src/library").mkdir()
    shutil.copy(tmp_path / "system/library/far.h", tmp_path / "src/library/far.h")
    assert digest(tree, SOURCE) != before


def test_kernels_src_is_the_checkouts() -> None:
    assert kernels_src() == Path(__file__).parents[2] / "kernels_src"


def test_switches_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("include/cute/arch/mma_sm90_gmma.hpp", "cuda/cuda_fp16.h", "cuda/cccl/cuda/std/cstdint"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("MKERNEL_CUTLASS", str(tmp_path))
    assert cutlass_include() == tmp_path / "include"
    monkeypatch.setenv("MKERNEL_CUDA_INCLUDE", str(tmp_path / "cuda"))
    assert cuda_includes() == (tmp_path / "cuda", tmp_path / "cuda" / "cccl")


@pytest.mark.parametrize(("name", "find"), [("MKERNEL_CUTLASS", cutlass_include), ("MKERNEL_CUDA_INCLUDE", cuda_includes)])
def test_a_switch_that_leads_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, find: object) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    assert callable(find)
    with pytest.raises(CompileError, match=name):
        find()


def test_missing_headers_come_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    from mkernel.jit import headers

    for name in ("MKERNEL_CUTLASS", "MKERNEL_CUDA_INCLUDE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(headers, "_cutlass_package", lambda: None)
    with pytest.raises(CompileError, match="pip install nvidia-cutlass"):
        cutlass_include()
    monkeypatch.setattr(headers, "_cuda_candidates", lambda: iter(()))
    with pytest.raises(CompileError, match="pip install nvidia-cuda-runtime"):
        cuda_includes()
