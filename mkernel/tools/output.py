"""Result files: a command finds out before it begins whether it can write them at its end."""

from __future__ import annotations

import os
from pathlib import Path

from mkernel.errors import ArgumentError

__all__ = ["require_writable"]


def require_writable(option: str, path: str | Path, *, parents: bool = False) -> None:
    """Raise ArgumentError if the file cannot be written; nothing changes. ``parents``: make missing folders, which stay.

    Raises
    ------
    ArgumentError
        The file cannot be opened for writing; the message says why.
    """
    path = Path(path)
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        new = not os.path.lexists(path)  # a link to a missing file stays
        with path.open("ab"):
            pass
        if new:
            path.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ArgumentError(option, path, f"must be a file that can be written ({reason})", "name another file") from None
