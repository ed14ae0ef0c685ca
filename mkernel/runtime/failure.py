"""What ended a world: how kernels and hosts report it, how it travels between ranks, which exception it becomes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from mkernel import abi, errors
from mkernel.runtime.plan import Plan, title_of

__all__ = ["Failure", "Kind", "read_host_block"]


class Kind:
    """Kinds of failure, by what the user sees."""

    aborted = "aborted"
    timeout = "timeout"
    transport = "transport"
    mismatch = "mismatch"
    lost = "lost"


# What a kernel or the network complained about may turn out to have a deeper cause, which is then the one to report.
_EXPLAINED_BY = {Kind.timeout: {Kind.transport, Kind.mismatch, Kind.lost}, Kind.transport: {Kind.lost}}


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a world failed. All ranks of a failed world end up with the same one, where they can still talk."""

    kind: str
    message: str
    rank: int  # whose failure it is: for `lost` the rank that has gone, else the one that reported
    record: errors.FailureRecord | None = None
    derived: bool = False  # only an echo of another rank's failure, whose own report says more
    details: dict[str, Any] | None = None  # of a transport's failure: peer, op, status ... as TransportError takes them
    asked: tuple[tuple[int, str], ...] = ()  # of a mismatch that kernels found: what ranks say of that call, as far as they have

    def replaces(self, other: Failure | None) -> bool:
        """Whether this failure says more than ``other`` about why the world failed."""
        if other is None:
            return True
        if self.kind == other.kind == Kind.mismatch and not self.derived and not other.derived:
            return not set(self.asked) <= set(other.asked)
        if self.derived or other.derived:
            return other.derived and not self.derived
        return self.kind in _EXPLAINED_BY.get(other.kind, set())

    def joined(self, other: Failure | None) -> Failure:
        """The failure, which replaces ``other``, with what ``other`` knows of the same mismatch."""
        if other is None or other.derived or not self.kind == other.kind == Kind.mismatch:
            return self
        return dataclasses.replace(other, asked=tuple(sorted({*self.asked, *other.asked})))

    def answered(self, report: Failure) -> Failure:
        """The mismatch, as the rank of ``report`` tells it to the others: its kernel asked for something, or has not come that far."""
        asked = report.asked
        if self.record is not None and report.record is not None and report.record.epoch != self.record.epoch:
            asked = tuple((rank, f"was still in call {report.record.epoch}, which {what}") for rank, what in asked)
        return dataclasses.replace(self, asked=asked)

    def error(self) -> errors.Error:
        """A fresh exception: several threads may raise it."""
        if self.kind == Kind.timeout:
            return errors.TimeoutError(self.message, self.record)
        if self.kind == Kind.lost:
            return errors.PeerLostError(self.message, self.rank)
        if self.kind == Kind.mismatch:
            asked = "; ".join(f"rank {rank} {what}" for rank, what in self.asked)
            return errors.MismatchError(f"{self.message}: {asked}" if asked else self.message)
        if self.kind == Kind.transport:
            return errors.TransportError(self.message, **(self.details or {"peer": self.rank}))
        return errors.AbortedError(self.message)

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Failure:
        fields: dict[str, Any] = json.loads(data)
        record, asked = fields.pop("record"), fields.pop("asked")
        told = tuple((int(rank), str(what)) for rank, what in asked)
        return cls(**fields, asked=told, record=None if record is None else errors.FailureRecord(**record))


def read_host_block(
    block: abi.HostBlock,
    *,
    timeout_ns: int,
    entry_timeout_ns: int,
    plan_of: Callable[[int, int, int], Plan | None],
    destination_of: Callable[[int], int | None] = lambda ticket: None,
) -> Failure | None:
    """The failure that a kernel left in ``block``; None while all is well.

    ``plan_of(problem, rows, schedule)``: what the call did, by its numbers; it names flags, also those of a graph's replay.
    ``destination_of(ticket)``: the rank to which that command of the ring goes, if it is still there. A kernel that waits for its own put
    waits for all before it, so that the rank that is missing is that of the first command that is not complete.
    """
    state = block.state
    if state == abi.State.running:
        return None
    kind = _name(abi.FlagKind, block.flag_kind)
    plan = plan_of(block.problem, block.rows, block.schedule)
    named = _flag_name(plan, block.rank, block.flag_index) if block.flag_kind == abi.FlagKind.chunk else ""
    title = title_of(plan)
    in_ring = block.flag_kind in (abi.FlagKind.ring_slot, abi.FlagKind.ring_done)
    first = destination_of(block.seen) if in_ring else None
    peer = block.peer if first is None else first
    record = errors.FailureRecord(
        state=state,
        rank=block.rank,
        role=_name(abi.Role, block.role),
        cta=block.cta,
        flag=f"{kind.replace('_', ' ')} flag {block.flag_index}{f' ({named})' if named else ''}",
        peer=peer,
        epoch=block.epoch,
        expected=block.expected,
        seen=block.seen,
    )
    who = f"rank {record.rank}, {record.role} CTA {record.cta}"
    if state == abi.State.timed_out:
        if block.flag_kind == abi.FlagKind.entry:
            message = (
                f"{who} waited {entry_timeout_ns / 1e9:.1f} s for rank {record.peer}, which never entered call {record.epoch} ({title})"
            )
        elif in_ring:
            message = (
                f"{who} waited {timeout_ns / 1e9:.1f} s in call {record.epoch} ({title}) for its engine to complete {record.expected} puts:"
                f" put {record.seen}, to rank {record.peer}, is not complete"
            )
        else:
            message = (
                f"{who} waited {timeout_ns / 1e9:.1f} s for {record.flag} of rank {record.peer} in call {record.epoch} ({title}):"
                f" expected {record.expected}, saw {record.seen}"
            )
        return Failure(Kind.timeout, message, record.rank, record)
    if block.flag_kind == abi.FlagKind.rows:
        message = f"{who}: {record.seen} rows came to its experts, call {record.epoch} ({title}) was given {record.expected} of them"
        return Failure(Kind.mismatch, message, record.rank, record)
    if state == abi.State.mismatch:
        data = getattr(plan, "agreed_data", "")  # that the kernel compares, too
        message = f"{who}: rank {record.peer} entered call {record.epoch} with another plan{f', or other {data}' if data else ''}"
        return Failure(Kind.mismatch, message, record.rank, record, asked=((record.rank, f"asked for {title}"),))
    message = f"{who} was asked to leave call {record.epoch} while waiting for {record.flag} of rank {record.peer}"
    return Failure(Kind.aborted, message, record.rank, record, derived=True, asked=((record.rank, f"asked for {title}"),))


def _flag_name(plan: Plan | None, rank: int, index: int) -> str:
    """What a flag tells, if there is such a flag: a report must not fail because a kernel waited for one that there is not."""
    with contextlib.suppress(IndexError):
        return plan.flag_name(rank, index) if plan is not None else ""
    return ""


def _name(numbers: type[abi.Role | abi.FlagKind], value: int) -> str:
    try:
        return str(numbers(value).name)
    except ValueError:  # a kernel wrote garbage: report what is there
        return str(value)
