"""What moves bytes for the emulated transport on target cpu."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mkernel.memory.memfd import Mapping
from mkernel.runtime.cpu.memory import File
from mkernel.runtime.cpu.scheduler import Scheduler, SchedulerLibrary

if TYPE_CHECKING:
    from mkernel.runtime.cpu.thread_ranks import ThreadRanks

__all__ = ["CpuCopier"]


class _Watched:
    """A put that the emulator knows of: it reports whoever reads or writes the same bytes meanwhile."""

    def __init__(self, scheduler: Scheduler, dst: int, src: int, size: int, name: str) -> None:
        self._scheduler = scheduler
        self._put = scheduler.library.put_begins(scheduler.handle, dst, src, size, name.encode())

    def landed(self) -> None:
        """The signal is written: its bytes are there."""
        self._scheduler.library.put_lands(self._scheduler.handle, self._put)

    def ended(self) -> None:
        """It is complete: its source may change."""
        if self._scheduler.handle:
            self._scheduler.library.put_ends(self._scheduler.handle, self._put)


class CpuCopier:
    """Copies at once; see ``mkernel.runtime.backend.Copier``. With thread ranks it works on their scheduler's thread."""

    def __init__(self, library: SchedulerLibrary, thread_ranks: ThreadRanks | None, imported: Sequence[tuple[Mapping, File]]) -> None:
        self._library, self._thread_ranks, self._imported = library, thread_ranks, imported

    def start(self, dst: int, src: int, size: int) -> None:
        with self._addressed(dst) as address:
            self._library.copy(None if self._thread_ranks is None else self._thread_ranks._scheduler.handle, address, src, size)

    def done(self, token: object) -> bool:
        return True

    def watch(self, dst: int, src: int, size: int, name: str) -> _Watched | None:
        """Tell the emulator of a put under way, from when it was posted; None where there is no emulator that sees all ranks."""
        if self._thread_ranks is None:
            return None
        with self._addressed(dst) as address:
            return _Watched(self._thread_ranks._scheduler, address, src, size, name)

    def signal(self, address: int, value: int) -> None:
        with self._addressed(address) as flag:
            self._library.signal(flag, value)

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def _addressed(self, address: int) -> Iterator[int]:
        """The address at which the ranks of another node have mapped what is at ``address`` in an imported segment."""
        if self._thread_ranks is None:
            yield address
            return
        segments = self._thread_ranks.segments
        with segments.lock:
            for mapping, file in self._imported:
                if mapping.address <= address < mapping.address + mapping.size:
                    base = segments.find(file)
                    yield address if base is None else base + address - mapping.address
                    return
            yield address
