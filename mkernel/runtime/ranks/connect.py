"""The control channel of a world that is being made: sockets, or a lock where all ranks are threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mkernel.runtime.ranks.bootstrap import Bootstrap, ThreadGroup
from mkernel.runtime.ranks.control import Control, LocalControl, LocalHub, Waiting
from mkernel.runtime.ranks.socket_control import SocketControl

__all__ = ["CONNECT_SECONDS", "connect"]

CONNECT_SECONDS = 60.0


def connect(
    bootstrap: Bootstrap, hosts: Sequence[str], group: ThreadGroup | None, waiting: Waiting, release: Callable[[int], None] | None
) -> Control:
    """Connect with the other ranks; the control channel. Collective. ``hosts``: of the ranks; ``group``: of ranks that are threads."""
    if group is not None:
        return LocalControl(group.once("hub", lambda: LocalHub(group.size, release)), bootstrap.rank, waiting)
    if bootstrap.size == 1:
        return LocalControl(LocalHub(1), 0, waiting)
    return SocketControl(bootstrap, hosts, CONNECT_SECONDS, waiting)
