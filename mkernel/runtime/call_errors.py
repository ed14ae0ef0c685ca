"""Recoverable errors: what an op's kernel has reported of a call becomes an exception, once, after which calls run again."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Protocol

from mkernel import abi
from mkernel.errors import CallError, CallReport
from mkernel.runtime.plan import Plan, may_refuse, title_of
from mkernel.runtime.ranks.control import POSITION_BITS

if TYPE_CHECKING:
    import threading

    from mkernel.runtime.backend import Backend, HostMemory

__all__ = ["CallErrors", "Refusing"]

_EPOCH = struct.Struct("=Q")  # abi.ControlBlock begins with it


class Refusing(Protocol):
    """The world, as its call errors see it."""

    @property
    def rank(self) -> int: ...
    @property
    def lock(self) -> threading.RLock: ...
    @property
    def backend(self) -> Backend: ...
    @property
    def header(self) -> abi.World: ...
    @property
    def call_number(self) -> int: ...
    def has_failed(self) -> bool:
        """Whether the world has failed, after a look at what its kernels say."""

    def plan_of(self, problem: int, rows: int, schedule: int) -> Plan | None: ...
    def wait_for_kernels(self) -> None: ...


class CallErrors:
    """Takes the report of a refused call from this rank's kernels, and lets the calls after it run again.

    A refused call halts the rank: later calls leave at once, without entering, until the report is taken. Hosts run ahead of their kernels
    by different numbers of calls; thanks to the halt the ranks agree all the same on which call comes next.
    """

    def __init__(self, world: Refusing, block: HostMemory) -> None:
        self._world = world
        self._block = abi.HostBlock.from_address(block.host_address)
        self._base = 0

    def position(self, calls: int) -> int:
        """How far a rank is that has launched so many calls, as a number that ranks can compare: it begins anew with each error."""
        return self._base + calls

    def calls(self, position: int) -> int:
        """The number of calls that a position of this rank stands for."""
        return position - self._base

    def take(self) -> CallError | None:
        """The error that a call of this rank has reported; None where there is none, or where the world has failed.

        Waits until the calls launched after it have been skipped. They wait for nobody, so neither does this.
        """
        world = self._world
        with world.lock:
            if not self._block.reported or world.has_failed():
                return None
            world.wait_for_kernels()
            if world.has_failed():
                return None
            control = world.header.control
            (counted,) = _EPOCH.unpack(world.backend.read(control, _EPOCH.size))
            said = self._block.report
            plan = world.plan_of(said.problem, said.rows, said.schedule)
            report = CallReport(
                op=plan.op if plan is not None else "",
                title=title_of(plan),
                call=said.epoch,
                rank=world.rank,
                code=self._block.reported,
                details=tuple(said.details),
                skipped=counted - (said.epoch | abi.HALTED) if counted & abi.HALTED else 0,
            )
            if counted & abi.HALTED:  # else the kernel has left as if it were right, and those after it have run
                world.backend.write(control, _EPOCH.pack(said.epoch))
            self._block.reported = 0
            errors = self.position(world.call_number) >> POSITION_BITS
            self._base = (errors + 1 << POSITION_BITS) - world.call_number
            return plan.call_error(report) if may_refuse(plan) else _plain(report)

    def close(self) -> None:
        """Let go of the memory that kernels report in, before it is freed."""
        self._block = abi.HostBlock()


def _plain(report: CallReport) -> CallError:
    """The error of an op that has none of its own."""
    return CallError(f"rank {report.rank}: call {report.call} ({report.title}) was refused: code {report.code}, {report.details}", report)
