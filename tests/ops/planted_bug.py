"""A mistake in the device code, to be made on purpose."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

from mkernel import env
from mkernel.jit.headers import kernels_src

__all__ = ["Bug"]


@dataclasses.dataclass(frozen=True, slots=True)
class Bug:
    """One line of ``file`` changed: ``before`` occurs there and becomes ``after``."""

    name: str
    file: str
    before: str
    after: str = ""
    found_as: str = ""  # part of what must be reported
    world: str = "1x2"
    workload: str = "tiles"
    seeds: int = 8
    first: int = 0  # of these seeds, the one that is tried first: it has found the bug, when it was written here
    tsan: bool = False
    slow: bool = False
    missed: str = ""  # why it is not found
    also: tuple[tuple[str, str], ...] = ()  # other lines of the file that change with it
    sms: int = 4  # CTAs that a rank runs at once

    @contextlib.contextmanager
    def in_force(self, folder: Path) -> Iterator[None]:
        """Kernels that are compiled within come from a copy of the device code that has the bug: ``folder``, which is made."""
        shutil.copytree(kernels_src(), folder)
        self.plant(folder)
        with env.override(MKERNEL_KERNELS_SRC=folder):
            yield

    def plant(self, folder: Path) -> None:
        path = folder / self.file
        path.write_text(self.planted(path.read_text()))

    def planted(self, text: str) -> str:
        for before, after in ((self.before, self.after), *self.also):
            assert text.count(before) == 1, f"{self.file} has {text.count(before)} times: {before}"
            text = text.replace(before, after)
        return text
