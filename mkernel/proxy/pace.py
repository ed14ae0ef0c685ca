"""When an engine looks again: at once, or after a nap."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

__all__ = ["GRAPH_SPIN_NS", "LONG_NAP_NS", "NAP_NS", "SPIN_NS", "Pace"]

SPIN_NS = 200_000  # how long an engine spins after the last put before it sleeps
GRAPH_SPIN_NS = 1_000_000_000  # the same where replays of graphs may put at any time
NAP_NS = 1_000_000  # the longest nap where commands may come unannounced
LONG_NAP_NS = 20_000_000  # the longest nap where a launch, which ends it, comes before any command


@dataclasses.dataclass(slots=True)
class Pace:
    """Decides how long to sleep after each step. Says 0 while anything may be wanted soon.

    An engine that follows launches spins as long as a call has not ended, however long it waits for others; then until ``spin_ns`` after
    the last movement. Where graphs have been captured, whose replays nobody announces, it spins for ``graph_spin_ns`` and naps shortly.
    All others spin for ``spin_ns`` and nap for growing times.

    Attributes
    ----------
    launching
        Whether a call that was launched has not ended; None: the engine does not follow launches.
    captured
        Whether calls have been captured in graphs.
    """

    launching: Callable[[], bool] | None = None
    captured: Callable[[], bool] = lambda: False
    spin_ns: int = SPIN_NS
    graph_spin_ns: int = GRAPH_SPIN_NS
    nap_ns: int = NAP_NS
    _moved_ns: int = 0

    def nap(self, moved: bool) -> int:
        """Nanoseconds to sleep now, at most; 0: look again at once. ``moved``: the last step has moved something, or a launch has come."""
        now = time.monotonic_ns()
        if moved:
            self._moved_ns = now
            return 0
        idle = now - self._moved_ns
        if idle < self.spin_ns:
            return 0
        if self.launching is None:
            return min(idle // 8, self.nap_ns)
        if self.launching():
            return 0
        if self.captured():
            return 0 if idle < self.graph_spin_ns else self.nap_ns
        return min(idle // 8, LONG_NAP_NS)
