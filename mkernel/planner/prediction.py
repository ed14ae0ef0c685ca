"""What every part of the cost model shares: under which conditions a call runs, and what is predicted of it."""

from __future__ import annotations

from typing import NamedTuple

from mkernel.planner.machine import Machine

__all__ = [
    "ALONE",
    "BATCH",
    "BEHIND",
    "RESOURCES",
    "Conditions",
    "Prediction",
    "blend",
    "busy_of",
]

ITEM = 2  # bytes of a 16-bit element
RESOURCES = ("tensor", "load", "memory", "link", "network", "engine", "add", "routing", "entry", "start", "latency")
_BATCH_CALLS = 20
_BLEND = 3.0


class Conditions(NamedTuple):
    """How a call runs.

    Attributes
    ----------
    hot
        Right behind another call of the same world.
    calls
        Calls in a row, without a rest between them.
    rested
        Whether the GPU has rested before the first of them.
    """

    hot: bool = False
    calls: int = 1
    rested: bool = True


ALONE = Conditions()  # as the bench's mode "isolated"
BEHIND = Conditions(hot=True)  # as one of a few calls in a stream
BATCH = Conditions(hot=True, calls=_BATCH_CALLS)  # as the bench's mode "back-to-back"


class Prediction(NamedTuple):
    """Seconds of a call, and how long each resource is busy in them.

    ``tensor``: multiplying; ``load``: from L2 into the SMs; ``memory``, ``link``, ``network``: what goes over each, at its full rate;
    ``engine``: its puts; ``add``: a node's sums, by the CTAs for that; ``routing``: until rows of MoE have places; ``entry``: until all
    ranks are known to have entered; ``start``: launch, prologue and end. What is left, ``latency``, are waits: for flags, and for what
    comes last.
    """

    seconds: float
    tensor: float = 0.0
    load: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    network: float = 0.0
    start: float = 0.0
    engine: float = 0.0
    add: float = 0.0
    entry: float = 0.0
    routing: float = 0.0

    @property
    def latency(self) -> float:
        """What no resource's work explains."""
        busy = max(self.tensor, self.load, self.memory, self.link, self.network, self.engine, self.add)
        return max(0.0, self.seconds - self.start - self.entry - self.routing - busy)

    @property
    def binds(self) -> str:
        """The name of what takes longest: one of ``RESOURCES``."""
        return max(RESOURCES, key=lambda name: float(getattr(self, name)))


def blend(*seconds: float, sharpness: float = _BLEND) -> float:
    """Seconds of things that are done side by side and disturb each other: more than the longest, less than the sum."""
    most = max(seconds)
    return most * float(sum((one / most) ** sharpness for one in seconds)) ** (1 / sharpness) if most > 0 else 0.0


def busy_of(conditions: Conditions, machine: Machine, seconds: float) -> float:
    """How long the GPU has worked without rest at the end of a call of about so many seconds."""
    return seconds * conditions.calls + (0.0 if conditions.rested else machine.warm)
