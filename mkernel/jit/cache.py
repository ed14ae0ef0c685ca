"""The cache of compiled kernels, for both targets: whom it trusts, how files get there, and what replaces an unusable folder.

Code from this folder runs in every program of its owner. So only the owner may write there, every file carries a seal over its key and
its bytes, and a kernel whose seal does not fit is compiled again. A folder that cannot be used costs a warning and compilations, never a
program.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from mkernel import env
from mkernel.errors import ArgumentError

__all__ = [
    "distrust",
    "dump",
    "find",
    "folder",
    "found",
    "keep",
    "keep_source",
    "locked",
    "problem",
    "read",
    "warn_once",
    "write_atomically",
]

_log = logging.getLogger("mkernel")

_SEAL = b"mkernel seal 1\0\0"
_SEAL_BYTES = len(_SEAL) + hashlib.sha256().digest_size
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_mutex = threading.RLock()
_distrusted: dict[Path, str] = {}  # folders whose files the system does not run, and why
_told: set[Path] = set()  # folders that a warning was about
_warned: set[str] = set()
_private: Path | None = None  # in place of folders that cannot be used


def folder(target: str) -> Path:
    """Where the kernels of a target belong: ``cpu`` or ``cuda`` in ``MKERNEL_CACHE_DIR``."""
    return env.CACHE_DIR.get() / target


def problem(target: str) -> str:
    """Why a target's folder cannot be used; empty if it can. Makes a missing folder, for its owner alone."""
    place = folder(target)
    if place in _distrusted:
        return _distrusted[place]
    try:
        for path in (place.parent, place):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if why := _stranger(path, tighten=path == place or not env.CACHE_DIR.is_set()):
                return why
        if not os.access(place, os.R_OK | os.X_OK):
            return f"{place} cannot be read"
        if target == "cpu" and os.statvfs(place).f_flag & os.ST_NOEXEC:
            return f"{place} is mounted noexec"
    except OSError as error:
        return str(error)
    return ""


def find(target: str, name: str, key: bytes) -> Path | None:
    """The file of this name that was kept under this key: whole, and of an owner whom this process trusts. None: there is none."""
    return next((path for path in _places(target, name) if read(path, key) is not None), None)


def found(target: str, name: str, key: bytes) -> bytes | None:
    """What is in the file that ``find`` finds."""
    return next((data for path in _places(target, name) if (data := read(path, key)) is not None), None)


def _places(target: str, name: str) -> list[Path]:
    """Where a file of this name may be."""
    if why := problem(target):
        _warn_folder(folder(target), why)
    places = [] if why else [folder(target)]
    if _private is not None:
        places.append(_private / target)
    return [place / name for place in places]


def read(path: Path, key: bytes) -> bytes | None:
    """The bytes that ``keep`` put there under this key; None when they are not there, damaged, or somebody else's."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or _foreign(status) or status.st_mode & _OTHERS_WRITE:
                warn_once(f"kernel cache: {path} is not this user's alone: compiled again")
                return None
            data = file.read()
    except OSError as error:
        _log.debug("kernel cache: %s", error)
        return None
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if seal != _sealed(body, key):
        warn_once(f"kernel cache: {path} is damaged: compiled again")
        return None
    return body


def keep(target: str, name: str, key: bytes, data: bytes, mode: int = 0o600) -> Path:
    """Keep what was compiled; readers see all of it or nothing. Returns where.

    In a private folder of this process where the target's own cannot be used: no room, no permission, another's.

    Raises
    ------
    OSError
        There is no private folder either.
    """
    sealed = data + _sealed(data, key)
    why = problem(target)
    if not why:
        try:
            write_atomically(folder(target) / name, sealed, mode)
            return folder(target) / name
        except OSError as error:
            why = str(error)
    _warn_folder(folder(target), why)
    with _mutex:
        path = _private_folder() / target / name
        write_atomically(path, sealed, mode)
    return path


def keep_source(target: str, name: str, text: str) -> Path | None:
    """Keep a source, for error messages and debuggers. Nothing depends on it."""
    path = folder(target) / name
    try:
        if problem(target):
            path = _private_folder() / target / name
        write_atomically(path, text.encode())
    except OSError as error:
        _log.debug("kernel cache: %s", error)
        return None
    return path


def distrust(path: Path, why: str) -> None:
    """Stop using the folder of a file that is intact but cannot be loaded."""
    global _private
    with _mutex:
        _distrusted[path.parent] = f"{path.parent}: {why}"
        if _private is not None and path.parent.parent == _private:
            _private = None  # the next one lies elsewhere
    _warn_folder(path.parent, why)


@contextlib.contextmanager
def locked(target: str, name: str) -> Iterator[None]:
    """Let one thread of this host compile a key at a time. Where no lock can be had, some work is done twice, without harm."""
    with contextlib.ExitStack() as stack:
        try:
            if not problem(target):
                path = folder(target) / name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = stack.enter_context(path.open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)  # of the open file: also between threads; ends with the process
        except OSError as error:
            _log.debug("kernel cache: no lock: %s", error)
        yield


def write_atomically(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file: other processes see the old one or the new one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        partial.chmod(mode)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def dump(path: Path, data: bytes) -> None:
    """Write a file into the folder that ``MKERNEL_DUMP`` names. Raises ArgumentError when that is no folder to write to."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise ArgumentError(env.DUMP.name, str(path.parent), f"cannot be written: {error}", "name another folder") from error


def _sealed(body: bytes, key: bytes) -> bytes:
    """The seal behind a file's bytes, which proves that they are complete and of this kernel."""
    return _SEAL + hashlib.sha256(len(key).to_bytes(8, "little") + key + body).digest()


def _foreign(status: os.stat_result) -> bool:
    """Whether neither this user nor root owns it."""
    return status.st_uid not in (os.geteuid(), 0)


def _stranger(path: Path, *, tighten: bool) -> str:
    """Why other users could put files there; empty if they cannot. ``tighten``: take their permission away, as the folder is mkernel's."""
    status = path.stat()
    if _foreign(status):
        return f"{path} belongs to user {status.st_uid}, not to this one ({os.geteuid()})"
    if not status.st_mode & _OTHERS_WRITE or status.st_mode & stat.S_ISVTX:
        return ""
    if tighten and status.st_uid == os.geteuid():
        path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
        return ""
    return f"others may write to {path}: chmod go-w {path}"


def _private_folder() -> Path:
    """A folder that only this process uses, and removes when it ends. Raises OSError when there is no place for one."""
    global _private
    with _mutex:
        if _private is None or not _private.is_dir():
            tried = {path.parent.parent for path in _distrusted}
            bases = [base for base in (os.environ.get("TMPDIR", "/tmp"), "/dev/shm", "/var/tmp") if Path(base) not in tried]
            for base in bases:
                with contextlib.suppress(OSError):
                    _private = Path(tempfile.mkdtemp(prefix="mkernel-", dir=base))
                    atexit.register(_remove, _private, os.getpid())
                    return _private
            raise OSError(f"no folder for compiled kernels in {', '.join(bases) or 'any temporary folder'}: set MKERNEL_CACHE_DIR")
        return _private


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # not in its forked children
        shutil.rmtree(path, ignore_errors=True)


def warn_once(text: str) -> None:
    """Give a warning once per process."""
    with _mutex:
        if text in _warned:
            return
        _warned.add(text)
    _log.warning("%s", text)


def _warn_folder(path: Path, why: str) -> None:
    remedy = "every process compiles kernels again: set MKERNEL_CACHE_DIR to a folder of yours"
    if path not in _told:
        _told.add(path)
        _log.warning("kernel cache %s: %s; %s", path, why, remedy)
