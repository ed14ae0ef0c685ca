"""What the calls of a world put to other nodes, read off the rank's command ring."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mkernel import abi

__all__ = ["Count", "Puts"]


@dataclasses.dataclass
class Count:
    """Of one op: calls, puts, those of them that carry bytes, and these bytes."""

    calls: int = 0
    puts: int = 0
    carrying: int = 0
    bytes: int = 0


class Puts:
    """Counts the puts of a world's calls from now on, by op. Target cpu, where a launch returns when its kernel has ended."""

    def __init__(self, world: Any) -> None:
        self.by_op: dict[str, Count] = {}
        self.plan: Any = None  # of the call that runs
        self._ring, self._rank = abi.Ring.from_address(world._ring.address), world.rank
        self._next = 0  # ticket
        self._launch = world.launch
        world.launch = self._counted

    def under_way(self) -> Iterator[tuple[int, str]]:
        """Of puts with bytes that the running call has issued and whose completion no one has seen: bytes, and what their flags tell."""
        plan, ticket = self.plan, self._next
        while plan is not None and (command := self._command(ticket)) is not None:
            if command.bytes and ticket >= self._ring.completed:
                yield int(command.bytes), self._flag(plan, command)
            ticket += 1

    def _flag(self, plan: Any, command: abi.Command) -> str:
        if command.signal_offset < abi.SIGNAL_FLAGS:
            return "entry"
        counted = command.signal_offset >= abi.COUNTED_OFFSET
        first = abi.COUNTED_OFFSET if counted else abi.SIGNAL_FLAGS
        index = plan.flag_words * counted + (command.signal_offset - first) // 8
        return str(plan.flag_name(int(command.dst_rank), index))

    def _command(self, ticket: int) -> abi.Command | None:
        slot = self._ring.slots[ticket % abi.RING_SLOTS]
        assert slot.ticket <= ticket + 1, "a call has more puts than the ring has slots"
        return slot if slot.ticket == ticket + 1 else None

    def _counted(self, executable: Any, parameters: Any, stream: Any = None) -> None:
        self.plan = executable.plan
        count = self.by_op.setdefault(self.plan.op, Count())
        count.calls += 1
        try:
            self._launch(executable, parameters, stream)
        finally:
            self.plan = None
            while (command := self._command(self._next)) is not None:
                count.puts += 1
                count.carrying += command.bytes > 0
                count.bytes += int(command.bytes)
                self._next += 1
