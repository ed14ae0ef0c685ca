"""Wheel and source distribution: what is in them, what they say of themselves, and that an installed wheel runs far from any checkout."""

from __future__ import annotations

import email
import email.message
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from mkernel.proxy.spawn import without_launcher
from mkernel.version import VERSION

ROOT = Path(__file__).parents[2]
pytest.importorskip("hatchling")


def build(source: Path, folder: Path, target: str) -> Path:
    """Build a ``wheel`` or ``sdist`` of the tree at ``source`` into ``folder``; returns its path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.iterdir()
    return path


def _tracked(*folders: str) -> set[str]:
    """Files of the tree, without what Python and editors leave behind."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts and path.suffix != ".pyc"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel: Path) -> email.message.Message:
    """METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_and_the_device_code(names: set[str]) -> None:
    code = {name for name in names if ".dist-info/" not in name}
    device = {f"mkernel/{path}" for path in _tracked("kernels_src")}
    assert "mkernel/kernels_src/ptx.cuh" in device
    assert code == _tracked("mkernel") | device


def test_the_source_distribution_makes_the_same_wheel(names: set[str], tmp_path: Path) -> None:
    folder = tmp_path / "sdist"
    folder.mkdir()
    with tarfile.open(build(ROOT, folder, "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"mkernel-{VERSION}"
    assert {"Makefile", "LICENSE", "README.md", "docs", "examples", "tests"} <= {path.name for path in source.iterdir()}
    again = tmp_path / "wheel"
    again.mkdir()
    with zipfile.ZipFile(build(source, again, "wheel")) as archive:
        assert set(archive.namelist()) == names


def test_what_the_wheel_says_of_itself(wheel: Path) -> None:
    told = metadata(wheel)
    assert (told["Name"], told["Version"], told["License-Expression"]) == ("mkernel", VERSION, "MIT")
    assert wheel.name == f"mkernel-{VERSION}-py3-none-any.whl", "device code is compiled where it runs: one wheel for all machines"
    assert told["Description-Content-Type"] == "text/markdown"
    assert str(told.get_payload()).startswith("# mkernel")
    extras = set(told.get_all("Provides-Extra", []))
    assert {"cuda12", "cuda13", "mpi", "rdma", "demo", "cli"} <= extras
    needed = [text for text in told.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert sorted(text.partition(">")[0] for text in needed) == ["ml-dtypes", "numpy"], "everything else is for somebody only"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_installed_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """In an empty environment, with what the package index has: doctor, the demo without MPI, and one call by ``mk.launch``."""
    venv.create(tmp_path / "venv", with_pip=True)
    program, away = tmp_path / "venv" / "bin" / "python", tmp_path / "away"
    away.mkdir()
    hidden = {"PYTHONPATH", "MKERNEL_KERNELS_SRC", "MKERNEL_CACHE_DIR"}
    environment = {name: value for name, value in without_launcher(os.environ).items() if name not in hidden}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "MKERNEL_CACHE_DIR": str(tmp_path / "cache")}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(program), *arguments], cwd=away, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel))
    where = Path(run("-c", "from mkernel.jit.headers import kernels_src; print(kernels_src())").strip())
    assert where.is_relative_to(tmp_path / "venv"), "the device code is the wheel's"
    doctor = json.loads(run("-m", "mkernel", "doctor", "--json"))
    assert doctor["targets"] == {"cuda": False, "cpu": True}
    shown = run("-m", "mkernel", "demo", "--launcher", "processes")
    assert "all results are right" in shown
    assert (away / "mkernel-demo.svg").exists()
