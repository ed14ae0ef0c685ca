"""What the CTAs of a rank spent their time on: busy, waiting and idle by role, and how much of the waiting was for which rank.

A CTA is *busy* while one of its threads multiplies, adds or moves data, *waiting* while it is not busy and a thread waits for a flag of
another rank, else *idle*. All times are ns.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mkernel.abi import MAX_RANKS, TRACE_FLAG_LANE, FlagKind, Role, TraceKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Intervals", "Occupancy", "RoleTime", "home_roles", "occupancy", "of_cta"]

_MOVES = (TraceKind.send, TraceKind.forward, TraceKind.put, TraceKind.fetch)
_COMMUNICATION_LANE = 2


class Intervals(NamedTuple):
    """Intervals in order that neither overlap nor touch."""

    begin: NDArray[np.int64]
    end: NDArray[np.int64]

    @classmethod
    def of(cls, events: NDArray[Any]) -> Intervals:
        """What any of the events covers."""
        return cls._where(events["begin"], events["end"], lambda at, points: at)

    @classmethod
    def _where(cls, begin: NDArray[Any], end: NDArray[Any], choose: Any) -> Intervals:
        begin, end = begin.astype(np.int64), end.astype(np.int64)
        points = np.unique(np.concatenate([begin, end]))
        if points.size < 2:
            return cls(points[:0], points[:0])
        covered = np.searchsorted(np.sort(begin), points[:-1], "right") > np.searchsorted(np.sort(end), points[:-1], "right")
        chosen = np.concatenate([[False], choose(covered, points[:-1]), [False]])
        changes = np.diff(chosen.astype(np.int8))
        return cls(points[np.flatnonzero(changes == 1)], points[np.flatnonzero(changes == -1)])

    def holds(self, points: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each point lies in an interval (their ends do not)."""
        inside: NDArray[np.bool_] = np.searchsorted(self.begin, points, "right") > np.searchsorted(self.end, points, "right")
        return inside

    def plus(self, other: Intervals) -> Intervals:
        """What either covers."""
        return Intervals._where(np.concatenate([self.begin, other.begin]), np.concatenate([self.end, other.end]), lambda at, _: at)

    def minus(self, other: Intervals) -> Intervals:
        """What this covers and the other does not."""
        begin, end = (np.concatenate(pair) for pair in zip(self, other, strict=True))
        return Intervals._where(begin, end, lambda _, points: self.holds(points) & ~other.holds(points))

    def until(self, points: NDArray[np.int64]) -> NDArray[np.int64]:
        """How much of what is covered lies before each point."""
        sums = np.concatenate([[0], np.cumsum(self.end - self.begin)])
        ends = np.concatenate([[0], self.end])
        at = np.searchsorted(self.begin, points, "right")
        before: NDArray[np.int64] = sums[at] - np.where(at > 0, np.maximum(ends[at] - points, 0), 0)
        return before

    def shared(self, other: Intervals) -> int:
        """Length of what both cover."""
        return self.length - self.minus(other).length

    @property
    def length(self) -> int:
        return int((self.end - self.begin).sum())


class RoleTime(NamedTuple):
    """Sums over the CTAs of one role."""

    ctas: int
    busy: int
    waiting: int
    idle: int


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """What ``occupancy`` finds.

    Attributes
    ----------
    span
        From the first begin to the last end.
    roles
        By the role in which a CTA began.
    lost
        (MAX_RANKS, number of FlagKinds): what CTAs lost waiting for a flag of a rank, summed over CTAs.
    moving
        How long at least one CTA moved data.
    overlap
        Mean share of the compute CTAs that were busy meanwhile; nan where no data was moved, or none computes.
    """

    span: int
    roles: dict[Role, RoleTime]
    lost: NDArray[np.int64]
    moving: int
    overlap: float

    @property
    def ctas(self) -> int:
        return sum(time.ctas for time in self.roles.values())


class _Cta(NamedTuple):
    busy: Intervals
    waiting: Intervals
    flags: NDArray[Any]  # events of waits for ranks, which do not overlap


def home_roles(events: NDArray[Any]) -> dict[int, Role]:
    """The role in which each CTA began: a communication CTA that joined compute keeps its first.

    Waits for flags say it. Of a CTA that has waited for none, what its communication thread did does.
    """
    roles = dict.fromkeys(np.unique(events["cta"]).tolist(), Role.compute)
    for chosen in ((events["role"] != Role.compute) & (events["lane"] == _COMMUNICATION_LANE), events["lane"] == TRACE_FLAG_LANE):
        ctas, first = np.unique(events["cta"][chosen], return_index=True)
        roles |= {cta: Role(role) for cta, role in zip(ctas.tolist(), events["role"][chosen][first].tolist(), strict=True)}
    return roles


def of_cta(events: NDArray[Any], role: Role) -> _Cta:
    """The time of one CTA, from its events and the role in which it began."""
    kind, lane = events["kind"], events["lane"]
    flags = events[lane == TRACE_FLAG_LANE]
    waits = Intervals.of(events[(kind == TraceKind.wait) | (lane == TRACE_FLAG_LANE)])
    works = (kind != TraceKind.wait) & (lane != TRACE_FLAG_LANE)
    busy = Intervals.of(events[works])
    if role == Role.inter_send:  # one thread waits for what it puts: its intervals hold its waits
        moving = Intervals.of(events[works & (lane == _COMMUNICATION_LANE)]).minus(Intervals.of(flags))
        busy = moving.plus(Intervals.of(events[works & (lane != _COMMUNICATION_LANE)]))
    return _Cta(busy, waits.minus(busy), flags)


def occupancy(events: NDArray[Any]) -> Occupancy:
    """What the CTAs of a rank spent the time of a trace on: of ``Trace.events``."""
    span = int(events["end"].max()) if events.size else 0
    homes = home_roles(events)
    moving = Intervals.of(events[(events["lane"] == _COMMUNICATION_LANE) & np.isin(events["kind"], _MOVES)])
    sums = {role: [0, 0, 0] for role in Role}
    lost = np.zeros((MAX_RANKS, len(FlagKind)), np.int64)
    computing = 0
    for cta, role in homes.items():
        time = of_cta(events[events["cta"] == cta], role)
        for at, value in enumerate((1, time.busy.length, time.waiting.length)):
            sums[role][at] += value
        begin, end = time.flags["begin"], time.flags["end"]
        wasted = end - begin - (time.busy.until(end) - time.busy.until(begin))
        np.add.at(lost, (time.flags["peer"], time.flags["flag"]), wasted)
        if role == Role.compute:
            computing += time.busy.shared(moving)
    roles = {role: RoleTime(n, busy, waiting, n * span - busy - waiting) for role, (n, busy, waiting) in sums.items() if n}
    room = roles[Role.compute].ctas * moving.length if Role.compute in roles else 0
    return Occupancy(span, roles, lost, moving.length, computing / room if room else float("nan"))
