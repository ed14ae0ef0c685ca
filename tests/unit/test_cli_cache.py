"""``mkernel cache``."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkernel import env
from mkernel.cli.main import main
from mkernel.jit import cpu
from mkernel.jit.spec import KernelSpec

HEADER = "struct Parameters { uint64_t unused[8]; };\nMK_KERNEL(32)(MK_GRID_CONSTANT Parameters p) { (void)p; }\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_empty(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert str(folder) in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert "removed 0 files" in capsys.readouterr().out


def test_clear_removes_what_was_compiled_and_nothing_else(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty_kernel.cuh").write_text(HEADER)
    spec = KernelSpec("empty_kernel", (), 32, 0, 64)
    compiled = cpu.compile(spec, include=[tmp_path])
    (folder / "cuda" / "entries").mkdir(parents=True)
    (folder / "cuda" / "entries" / "cubin").write_bytes(bytes(100))
    (folder / "cuda" / "samples").mkdir()
    (folder / "cuda" / "samples" / "mine.cu").write_text("keep")
    (folder / "letters.txt").write_text("keep")

    assert main(["cache", "show"]) == 0
    shown = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]}
    assert shown["cuda"] == "1"
    assert int(shown["cpu"]) >= 1

    assert main(["cache", "clear"]) == 0
    assert not compiled.exists()
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == ["letters.txt", "mine.cu"]
    assert cpu.compile(spec, include=[tmp_path]) == compiled  # and it comes back
    assert compiled.exists()
