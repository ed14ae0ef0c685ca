"""Every way in which a cache of kernels can be bad, for both targets: the kernel asked for runs, or the error says what is wrong."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel import env
from mkernel.cli import doctor
from mkernel.errors import ArgumentError, CompileError
from mkernel.jit import cache, cpu
from mkernel.jit.spec import KernelSpec

KERNELS = Path(__file__).parent / "kernels"
RIGHT, WRONG = 42, 13  # what the kernel asked for answers, and what somebody else's does
PLAIN = KernelSpec("plain", (("kValue", 3), ("kSpill", 0)), threads=128, shared_bytes=0, parameter_bytes=192)


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A cache of this test alone, and a process that has seen no other."""
    for name, value in (("_distrusted", {}), ("_warned", set()), ("_told", set()), ("_private", None)):
        monkeypatch.setattr(cache, name, value)
    for name in ("MKERNEL_NO_COMPILE", "MKERNEL_DUMP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    if cache._private is not None:
        shutil.rmtree(cache._private, ignore_errors=True)


class Cpu:
    """A shared object that answers a number, in place of a kernel."""

    name = "cpu"

    def __init__(self) -> None:
        self.wrong = self._build(WRONG).read_bytes()

    @staticmethod
    def _build(answer: int) -> Path:
        return cpu._build(
            "answer", f'extern "C" __attribute__((visibility("default"))) int answer() {{ return {answer}; }}\n', cpu._FLAGS, (KERNELS,)
        )

    def prepare(self) -> Path:
        return self._build(RIGHT)

    def right(self) -> bool:
        _, library = cpu.open_library(lambda: self._build(RIGHT))
        return int(library.answer()) == RIGHT


class Cuda:
    """A cubin by NVRTC."""

    name = "cuda"

    def __init__(self) -> None:
        pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")
        from mkernel.jit import cuda

        self._cuda = cuda
        other = KernelSpec("plain", (("kValue", 4), ("kSpill", 0)), threads=128, shared_bytes=0, parameter_bytes=192)
        cuda.compile(other, include=[KERNELS])
        self.wrong = self._file(other).read_bytes()
        self.expected = cuda._Job(PLAIN, [KERNELS]).nvrtc()

    def _file(self, spec: KernelSpec) -> Path:
        return cache.folder("cuda") / self._cuda._Job(spec, [KERNELS]).entry

    def prepare(self) -> Path:
        self._cuda.compile(PLAIN, include=[KERNELS])
        return self._file(PLAIN)

    def right(self) -> bool:
        return bool(self._cuda.compile(PLAIN, include=[KERNELS]) == self.expected)


@pytest.fixture(params=[Cpu, Cuda], ids=["cpu", "cuda"])
def target(request: pytest.FixtureRequest, place: Path) -> Any:
    return request.param()


# ---- ways of being bad: (the kept file, what somebody else's kernel is, monkeypatch, random numbers)
Bad = Callable[[Path, bytes, pytest.MonkeyPatch, np.random.Generator], object]


def _file_for_folder(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    shutil.rmtree(file.parent)
    file.parent.write_text("a file where the folder should be")


def _file_for_root(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    root = env.CACHE_DIR.get()
    shutil.rmtree(root)
    root.write_text("a file where the cache should be")


def _unwritable(number: int) -> Bad:
    """Also where root may write: the disk is full, read-only, over its quota."""

    def act(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
        root, write = env.CACHE_DIR.get(), cache.write_atomically

        def fail(path: Path, data: bytes, mode: int = 0o600) -> None:
            if path.is_relative_to(root):
                raise OSError(number, os.strerror(number), str(path))
            write(path, data, mode)

        file.unlink()
        patch.setattr(cache, "write_atomically", fail)

    return act


def _noexec(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Nobody says so, but nothing can be loaded from there."""
    load, root = ctypes.CDLL, str(env.CACHE_DIR.get())

    def refuse(name: str | None, *args: Any, **options: Any) -> Any:
        if name is not None and name.startswith(root):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name, *args, **options)

    patch.setattr(ctypes, "CDLL", refuse)


def _mounted_noexec(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    ask = os.statvfs

    def answer(path: Any) -> Any:
        result = ask(path)
        return os.statvfs_result([*result[:8], result.f_flag | os.ST_NOEXEC, result.f_namemax])

    patch.setattr(os, "statvfs", answer)


def _no_locks(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    file.unlink()
    patch.setattr(cache.fcntl, "flock", fail)


def _truncated(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    os.truncate(file, int(rng.integers(0, file.stat().st_size)))


def _flipped(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    data = bytearray(file.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    file.write_bytes(data)


def _planted(file: Path, wrong: bytes) -> None:
    """A good kernel of somebody else, sealed as it should be."""
    key = file.stem.removeprefix("answer-").encode() if file.suffix == ".so" else bytes.fromhex(file.stem)
    body = wrong[: -cache._SEAL_BYTES]
    file.write_bytes(body + cache._sealed(body, key))


def _owned_by_another(which: str) -> Bad:
    def act(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
        path = {"file": file, "folder": cache.folder(_target_of(file)), "root": env.CACHE_DIR.get()}[which]
        _planted(file, wrong)
        if os.geteuid() == 0:
            os.chown(path, 65534, -1)
        else:  # all three are another's then
            somebody = os.geteuid() + 1
            patch.setattr(os, "geteuid", lambda: somebody)

    return act


def _target_of(file: Path) -> str:
    return file.relative_to(env.CACHE_DIR.get()).parts[0]


def _writable_for(bits: int, which: str) -> Bad:
    def act(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
        path = file if which == "file" else env.CACHE_DIR.get()
        _planted(file, wrong)
        path.chmod(stat.S_IMODE(path.stat().st_mode) | bits)

    return act


def _link(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    other = file.with_name("elsewhere")
    _planted(file, wrong)
    file.rename(other)
    file.symlink_to(other)


def _pipe(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    file.unlink()
    os.mkfifo(file)


def _vanishing(file: Path, wrong: bytes, patch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """`mkernel cache clear` of another process, between looking and loading."""
    found, times = cache.find, iter(range(3))

    def find(*args: Any) -> Path | None:
        path = found(*args)
        if path is not None and next(times, None) is not None:
            shutil.rmtree(env.CACHE_DIR.get())
        return path

    patch.setattr(cache, "find", find)


BAD: dict[str, Bad] = {
    "empty cache": lambda file, *_: shutil.rmtree(env.CACHE_DIR.get()),
    "file for folder": _file_for_folder,
    "file for root": _file_for_root,
    "disk full": _unwritable(errno.ENOSPC),
    "read-only": _unwritable(errno.EROFS),
    "no permission": _unwritable(errno.EACCES),
    "over quota": _unwritable(errno.EDQUOT),
    "cannot be loaded from": _noexec,
    "mounted noexec": _mounted_noexec,
    "no locks": _no_locks,
    "empty file": lambda file, *_: os.truncate(file, 0),
    "truncated": _truncated,
    "one bit": _flipped,
    "garbage": lambda file, wrong, patch, rng: file.write_bytes(rng.bytes(5000)),
    "another kernel's file": lambda file, wrong, *_: file.write_bytes(wrong),
    "another's file": _owned_by_another("file"),
    "another's folder": _owned_by_another("folder"),
    "another's root": _owned_by_another("root"),
    "file that the group may write": _writable_for(0o020, "file"),
    "file that all may write": _writable_for(0o002, "file"),
    "root that the group may write": _writable_for(0o020, "root"),
    "root that all may write": _writable_for(0o002, "root"),
    "link": _link,
    "pipe": _pipe,
    "vanishing": _vanishing,
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.drawn(13)
def test_the_right_kernel_runs(target: Any, bad: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    file = target.prepare()
    assert target.name == _target_of(file)
    BAD[bad](file, target.wrong, monkeypatch, rng)
    assert target.right()
    assert target.right()


def test_what_planted_files_would_do(target: Any) -> None:
    """The tests above would see it if they were loaded."""
    file = target.prepare()
    _planted(file, target.wrong)
    assert not target.right()


@pytest.mark.parametrize("bad", ["file for folder", "read-only", "another's root", "root that all may write", "mounted noexec"])
def test_it_is_told_once_and_by_doctor(
    bad: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    target = Cpu()
    BAD[bad](target.prepare(), target.wrong, monkeypatch, rng)
    with caplog.at_level(logging.WARNING, "mkernel"):
        assert target.right()
        assert target.right()
    told = [record.getMessage() for record in caplog.records if "MKERNEL_CACHE_DIR" in record.getMessage()]
    assert len(told) == 1, told
    if bad != "read-only":  # which is only simulated: doctor looks for itself
        (finding,) = (f for f in doctor.examine() if f.subject == "cpu cache")
        assert (finding.state, finding.needed_by) == ("note", ())
        assert "MKERNEL_CACHE_DIR" in finding.remedy


@pytest.mark.parametrize("bad", ["garbage", "one bit", "truncated", "empty file"])
def test_what_is_damaged_is_told(
    bad: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    target = Cpu()
    file = target.prepare()
    BAD[bad](file, target.wrong, monkeypatch, rng)
    with caplog.at_level(logging.WARNING, "mkernel"):
        assert target.right()
    assert [record.getMessage() for record in caplog.records] == [f"kernel cache: {file} is damaged: compiled again"]


def test_folders_and_files_are_the_users_alone(target: Any, place: Path) -> None:
    before = os.umask(0)
    try:
        target.prepare()
    finally:
        os.umask(before)
    folders = [place, *(path for path in place.rglob("*") if path.is_dir())]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    assert all(not stat.S_IMODE(path.stat().st_mode) & 0o022 for path in place.rglob("*") if path.is_file() and "lock" not in str(path))


def test_an_old_folder_is_closed_to_others(target: Any) -> None:
    file = target.prepare()
    cache.folder(target.name).chmod(0o777)
    assert target.right()
    assert stat.S_IMODE(cache.folder(target.name).stat().st_mode) == 0o755
    assert file.exists()


def test_nowhere_to_go(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    target = Cpu()
    BAD["disk full"](target.prepare(), target.wrong, monkeypatch, rng)

    make = cache.tempfile.mkdtemp

    def fail(*args: Any, **options: Any) -> str:
        if "dir" in options:  # what the compiler needs is not meant
            raise OSError(errno.ENOSPC, "No space left on device")
        return make(*args)

    monkeypatch.setattr(cache.tempfile, "mkdtemp", fail)
    with pytest.raises(CompileError, match="MKERNEL_CACHE_DIR"):
        target.right()


def test_the_private_folder_is_tried_elsewhere_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = Cpu()
    load = ctypes.CDLL
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def refuse(name: str | None, *args: Any, **options: Any) -> Any:
        if name is not None and name.startswith(str(tmp_path)):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name, *args, **options)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert target.right()
    assert cache._private is not None
    assert not cache._private.is_relative_to(tmp_path)


def test_a_child_leaves_the_private_folder_alone(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    target = Cpu()
    BAD["disk full"](target.prepare(), target.wrong, monkeypatch, rng)
    assert target.right()
    assert cache._private is not None
    cache._remove(cache._private, os.getpid() + 1)
    assert cache._private.is_dir()
    cache._remove(cache._private, os.getpid())
    assert not cache._private.is_dir()
    assert target.right(), "and it comes back"


# ---- several at once
_COMPILE = """
import sys
from pathlib import Path
from mkernel.jit import cpu
_, library = cpu.open_library(lambda: cpu._build("answer", sys.argv[1], cpu._FLAGS, (Path(sys.argv[2]),)))
print(library.answer())
"""


def _counting_compiler(folder: Path) -> tuple[Path, Path]:
    script, log = folder / "counting-c++", folder / "log"
    found = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    script.write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo x >> {log}; sleep 0.3;; esac\nexec {found} "$@"\n')
    script.chmod(0o755)
    return script, log


def test_threads_and_processes_compile_once(tmp_path: Path) -> None:
    """The lock's doing: without it all begin before the first has ended."""
    script, log = _counting_compiler(tmp_path)
    source = f'extern "C" __attribute__((visibility("default"))) int answer() {{ return {RIGHT}; }}\n'
    with env.override(MKERNEL_CXX=script):
        command = [sys.executable, "-c", _COMPILE, source, str(KERNELS)]
        processes = [subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) for _ in range(3)]
        assert [process.communicate()[0] for process in processes] == [f"{RIGHT}\n"] * 3
        assert log.read_text().count("x") == 1
        start = threading.Barrier(4)
        paths = []

        def build() -> None:
            start.wait()
            paths.append(cpu._build("answer", "// another\n" + source, cpu._FLAGS, (KERNELS,)))

        threads = [threading.Thread(target=build) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(paths)) == 1
    assert log.read_text().count("x") == 2


# ---- the compiler, and where things are written
@pytest.mark.parametrize("text", ["no-such-compiler", "/nonexistent/g++", "g++ 'unbalanced", "''", "/etc/passwd", "/"])
def test_a_compiler_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Not another compiler, silently."""
    monkeypatch.setenv("MKERNEL_CXX", text)
    with pytest.raises(ArgumentError, match="MKERNEL_CXX"):
        cpu.find_compiler()


@pytest.mark.parametrize("there", ["clang++", "c++"])
def test_the_first_compiler_that_is_there_is_taken(there: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Only of one that was asked for is it told that it is not there."""
    monkeypatch.delenv("MKERNEL_CXX", raising=False)
    monkeypatch.setattr(cpu.shutil, "which", lambda name: f"/bin/{name}" if name == there else None)
    for asked in ("", "no-such-compiler -O1"):
        monkeypatch.setenv("CXX", asked)
        caplog.clear()
        assert cpu.find_compiler() == (f"/bin/{there}",)
        assert len(caplog.records) == bool(asked), caplog.text
        assert not asked or asked in caplog.text


def test_a_program_that_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_CXX", "false")
    with pytest.raises(CompileError, match="false"):
        Cpu()


def test_a_dump_that_cannot_be_written(target: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MKERNEL_DUMP", str(tmp_path / "file" / "folder"))
    with pytest.raises(ArgumentError, match="MKERNEL_DUMP"):
        target.prepare()
