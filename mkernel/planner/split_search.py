"""Which splits to measure, and which of them to keep. Pure Python: whoever measures drives the search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

from mkernel.planner.split import COMMUNICATION_ROLES, Split, SplitError

__all__ = ["SMS", "WORTH", "search"]

SMS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24)  # of a role: what is tried
_MEASURED_FIRST = 4  # plans that the cost model likes best
WORTH = 0.99  # of the time of what it replaces: a split that gains less is not kept


class _Spec(Protocol):
    @property
    def name(self) -> str: ...


class _Plan(Protocol):
    @property
    def split(self) -> Split: ...
    @property
    def digest(self) -> int: ...
    @property
    def spec(self) -> _Spec: ...


P = TypeVar("P", bound=_Plan)


def search(
    plan_for: Callable[[Split | None], P],
    roles: Sequence[str] = COMMUNICATION_ROLES,
    predicted: Callable[[P], float] | None = None,
) -> Generator[Sequence[P], Sequence[float], P]:
    """The fastest plan, role by role: a coordinate descent from mkernel's own choice, or from what wins among the most promising plans.

    Yields plans to be measured side by side and is sent their times, in order and any unit; returns the plan to keep. What was found is
    measured once more, alone beside mkernel's own choice, and kept only if it wins again: the fastest of many is partly luck.

    ``plan_for`` makes the plan for a split (None: mkernel's choice), or raises SplitError. Only plans of the same kernel are compared, so
    that tuning changes no bit of a result. ``predicted``: the seconds of a plan, by the cost model; the plans that it likes better than
    mkernel's choice are the first to be measured.
    """
    default = best = plan_for(None)
    if predicted is not None and (promising := _promising(plan_for, default, roles, predicted)):
        before, *times = yield [default, *promising]
        fastest = min(range(len(times)), key=times.__getitem__)
        if times[fastest] < WORTH * before:
            best = promising[fastest]
    for role in roles:
        rivals = _rivals(plan_for, best, role)
        if not rivals:
            continue
        before, *times = yield [best, *rivals]
        fastest = min(range(len(times)), key=times.__getitem__)
        if times[fastest] < WORTH * before:
            best = rivals[fastest]
    if best.digest != default.digest:
        before, again = yield [default, best]
        if again >= WORTH * before:
            return default
    return best


def _promising(plan_for: Callable[[Split | None], P], default: P, roles: Sequence[str], predicted: Callable[[P], float]) -> Sequence[P]:
    """The plans that are predicted to be faster than ``default``, the fastest first, of all that a descent by predictions looks at."""
    best, seen = default, {default.digest: (predicted(default), default)}
    for role in roles:
        for plan in _rivals(plan_for, best, role):
            seen.setdefault(plan.digest, (predicted(plan), plan))
        best = min(seen.values(), key=lambda one: one[0])[1]
    limit = WORTH * seen.pop(default.digest)[0]
    return [plan for seconds, plan in sorted(seen.values(), key=lambda one: one[0]) if seconds < limit][:_MEASURED_FIRST]


def _rivals(plan_for: Callable[[Split | None], P], best: P, role: str) -> list[P]:
    """Plans that differ from ``best`` in the SMs of one role. The op says which numbers it takes."""
    known, rivals = {best.digest}, []
    for sms in SMS:
        try:
            plan = plan_for(dataclasses.replace(best.split, compute=None, **{role: sms}))
        except SplitError:
            continue
        if plan.spec.name == best.spec.name and plan.digest not in known:
            known.add(plan.digest)
            rivals.append(plan)
    return rivals
