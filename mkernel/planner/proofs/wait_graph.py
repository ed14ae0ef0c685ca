"""Who waits for whom inside one call: a graph whose cycles are deadlocks. Built from a plan, looked at by tests."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

__all__ = ["Step", "WaitGraph"]

Step = tuple[Hashable, ...]  # what one CTA does without waiting in between, such as ("push", rank, chunk)


class WaitGraph:
    """Steps, and for each the steps that must have ended before it can end.

    A schedule cannot deadlock, whatever the timing, when the graph has no cycle and every step is run by a CTA that is resident: all of
    them are, because a kernel is launched with one CTA per SM.
    """

    def __init__(self) -> None:
        self._before: dict[Step, list[Step]] = {}

    def __len__(self) -> int:
        return len(self._before)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._before)

    def before(self, step: Step) -> list[Step]:
        """What ``step`` waits for."""
        return self._before[step]

    def add(self, step: Step, waits_for: Iterable[Step] = ()) -> Step:
        """Add a step, or more that a known one waits for."""
        self._before.setdefault(step, []).extend(waits_for)
        return step

    def chain(self, steps: Iterable[Step]) -> None:
        """Each waits for the one before it: they are done by one CTA, in this order."""
        previous: Step | None = None
        for step in steps:
            self.add(step, () if previous is None else (previous,))
            previous = step

    def missing(self) -> set[Step]:
        """Steps that are waited for and that nobody does: a wait without end as well."""
        return {before for steps in self._before.values() for before in steps if before not in self._before}

    def find_cycle(self) -> list[Step] | None:
        """Steps each of which waits for the next one, and the last for the first; None if there are none."""
        done: set[Step] = set()
        for start in self._before:
            path: list[Step] = []  # from `start` down
            inside: set[Step] = set()
            todo = [(start, iter((start,)))]
            while todo:
                parent, rest = todo[-1]
                step = next(rest, None)
                if step is None:
                    todo.pop()
                    if path and todo:
                        done.add(parent)
                        inside.discard(parent)
                        path.pop()
                elif step in inside:
                    return path[path.index(step) :]
                elif step not in done:
                    path.append(step)
                    inside.add(step)
                    todo.append((step, iter(self._before.get(step, ()))))
        return None
