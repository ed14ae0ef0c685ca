"""``mkernel tune`` on target cpu: the real command and ranks, whose times mean nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mkernel.bench import tune
from mkernel.errors import ArgumentError

needs_a_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="target cpu needs a C++ compiler")


pytestmark = pytest.mark.usefixtures("no_launcher")


@needs_a_compiler
def test_two_processes_tune_two_shapes(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["allgather_gemm", "--allow-cpu", "--world", "1x2", "--shapes", "130x72x80,2x8x8", "--launcher", "processes"]
    assert tune.main([*words, "--samples", "1", "--no-save", "--timeout", "240"]) == 0
    printed = capfd.readouterr().out
    assert "allgather_gemm: a (65, 80) per rank" in printed
    assert "allgather_gemm: a (1, 8) per rank" in printed
    assert printed.count("best") >= 2


def test_needs_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    with pytest.raises(ArgumentError, match="no GPU found"):
        tune.main(["allgather_gemm", "--world", "1x2"])


def test_the_gemm_alone_has_no_roles(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["gemm"])
    assert "invalid choice" in capsys.readouterr().err
