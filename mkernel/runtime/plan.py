"""What the runtime needs of a plan."""

from __future__ import annotations

from typing import Protocol, TypeGuard

from mkernel.errors import CallError, CallReport
from mkernel.jit.spec import KernelSpec

__all__ = ["Plan", "Reporter", "may_refuse", "title_of"]


class Plan(Protocol):
    """What the runtime needs of a plan (``mkernel.plan``): what one call of certain sizes does."""

    @property
    def op(self) -> str: ...
    @property
    def digest(self) -> int: ...
    @property
    def spec(self) -> KernelSpec: ...
    @property
    def grid(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def flag_words(self) -> int: ...
    @property
    def packet_bytes(self) -> int: ...
    @property
    def staging_bytes(self) -> int: ...
    def describe(self) -> str: ...
    def flag_name(self, rank: int, index: int) -> str:
        """What flag ``index`` of ``rank`` tells, for reports."""


class Reporter(Protocol):
    """A plan whose kernel may refuse the call (``report_error`` in ``kernels_src/comm/status.cuh``). Every such plan has this method."""

    def call_error(self, report: CallReport) -> CallError:
        """The exception for a report of this plan's kernel."""


def may_refuse(plan: object) -> TypeGuard[Reporter]:
    """Whether the plan's kernel may refuse a call. An isinstance of a protocol takes 12 us, of every size that is new."""
    return hasattr(plan, "call_error")


def title_of(plan: Plan | None) -> str:
    """One line that tells a plan from any other. None: a plan that only other ranks know."""
    if plan is None:
        return "a plan that this rank does not know"
    return next(iter(str(plan.describe()).splitlines()), plan.op)
