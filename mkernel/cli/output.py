"""Files that a command writes at its end: whether it can is asked before it begins."""

from __future__ import annotations

import os
from pathlib import Path

from mkernel.errors import ArgumentError

__all__ = ["require_writable"]


def require_writable(option: str, path: str | Path, *, parents: bool = False) -> None:
    """Open the file to append, and leave everything as it was. ``parents``: make folders that are missing, and leave them.

    Raises
    ------
    ArgumentError
        The file cannot be opened for writing; the message says why.
    """
    path = Path(path)
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        new = not os.path.lexists(path)  # of a link to a file that is missing, the link stays
        with path.open("ab"):
            pass
        if new:
            path.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ArgumentError(option, path, f"must be a file that can be written ({reason})", "name another file") from None
