"""How few instructions there are from one to another, by the branches of SASS: what a loop takes that may also take a longer way."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator

__all__ = ["Flow"]

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(@!?U?P\w+\s+)?([A-Z][^;]*);")
_TARGET = re.compile(r"\.L_x_\d+")
_ENDS = "EXIT", "RET", "BRX", "JMP"


class Flow:
    """Instructions of a kernel, and which of them may come next. Branches are taken or not, whatever the others were."""

    def __init__(self, sass: str) -> None:
        self.instructions: list[str] = []
        self._conditional: list[bool] = []
        self._labels: dict[str, int] = {}
        for line in sass.splitlines():
            if label := _LABEL.match(line):
                self._labels[label[1]] = len(self.instructions)
            elif found := _INSTRUCTION.match(line):
                self.instructions.append(found[2].strip())
                self._conditional.append(found[1] is not None)

    def places(self, wanted: Callable[[str], bool]) -> frozenset[int]:
        return frozenset(i for i, one in enumerate(self.instructions) if wanted(one))

    def next(self, at: int) -> Iterator[int]:
        one = self.instructions[at]
        branches = one.startswith("BRA")
        if branches and (target := _TARGET.search(one)):
            yield self._labels[target[0]]
        may_pass = self._conditional[at] or re.match(r"BRA(\.\w+)*\s+!?U?P\d", one) is not None
        if at + 1 < len(self.instructions) and (may_pass or not (branches or one.startswith(_ENDS))):
            yield at + 1

    def distance(self, begin: int, goals: frozenset[int]) -> tuple[int, int] | None:
        """Instructions from one to the nearest of the goals, and which that is; None: it reaches none. To itself: round its loop."""
        seen, waiting = {begin}, deque([(begin, 0)])
        while waiting:
            at, far = waiting.popleft()
            for after in self.next(at):
                if after in goals:
                    return far + 1, after
                if after not in seen:
                    seen.add(after)
                    waiting.append((after, far + 1))
        return None

    def shortest_round(self, first: frozenset[int], second: frozenset[int]) -> list[int]:
        """For each of ``second`` that comes soonest after one of ``first``: the fewest instructions from there to it and back."""
        rounds: dict[int, int] = {}
        for one in first:
            there = self.distance(one, second)
            back = there and self.distance(there[1], frozenset((one,)))
            if there and back:
                rounds[there[1]] = min(there[0] + back[0], rounds.get(there[1], there[0] + back[0]))
        return sorted(rounds.values())
