"""The cache of compiled cubins: cuda.core's own, plus one lock per key so that the ranks of a host compile a kernel once."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

from mkernel import env

__all__ = ["folder", "load", "locked", "store", "write_atomically"]

_log = logging.getLogger("mkernel")


def folder() -> Path:
    """Where the cubins of target cuda are: ``entries`` (cuda.core's program cache), ``source`` and ``locks``."""
    return env.CACHE_DIR.get() / "cuda"


def load(key: bytes) -> bytes | None:
    """The cubin of a key, or None. A cache that cannot be read counts as empty."""
    from cuda.core.utils import FileStreamProgramCache

    try:
        with FileStreamProgramCache(folder()) as programs:
            found = programs.get(key)
    except OSError as error:
        _log.warning("kernel cache %s: %s; set MKERNEL_CACHE_DIR to a folder that can be written", folder(), error)
        return None
    return None if found is None else bytes(found)


def store(key: bytes, cubin: bytes) -> None:
    """Keep a cubin; readers see all of it or nothing. A full or read-only disk costs later processes a compilation, no more."""
    from cuda.core.utils import FileStreamProgramCache

    try:
        with FileStreamProgramCache(folder()) as programs:
            programs[key] = cubin
    except OSError as error:
        _log.warning("kernel cache %s: %s; this kernel will be compiled again", folder(), error)


@contextlib.contextmanager
def locked(key: bytes) -> Iterator[None]:
    """One compilation of a key at a time among the threads and processes of this host. Without one: more work, no harm."""
    with contextlib.ExitStack() as stack:
        try:
            path = folder() / "locks" / key.hex()
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # of the open file: also between threads; ends with the process
        except OSError as error:
            _log.debug("kernel cache: no lock: %s", error)
        yield


def write_atomically(path: Path, data: bytes) -> None:
    """Other processes see the old file or the new one."""
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        partial = Path(file.name)
        try:
            file.write(data)
            file.flush()
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
