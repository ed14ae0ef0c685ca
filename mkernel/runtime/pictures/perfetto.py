"""A trace as Chrome trace events, which Perfetto shows: a process per rank, a track per SM, named by the role in which its CTA began."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mkernel.abi import TRACE_FLAG_LANE, FlagKind, Role, TraceKind
from mkernel.runtime.pictures.occupancy import Intervals, home_roles, of_cta

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["tracks"]

_BESIDE = 1 << 16  # added to a CTA's number: its second track
_ROLE_ORDER = (Role.intra_comm, Role.inter_send, Role.inter_reduce, Role.compute)
_SCHEDULER_LANE, _COMMUNICATION_LANE = 0, 2
_MISSING = {FlagKind.entry: "to enter", FlagKind.chunk: "data", FlagKind.ring_slot: "engine", FlagKind.ring_done: "engine"}


def tracks(rank: int, events: NDArray[Any], start_ns: int = 0) -> list[dict[str, object]]:
    """Chrome trace events of ``Trace.events``.

    A CTA has one track of what it did, one after the other, and, between, of whom it waited for. Where it also moved data meanwhile, as a
    CTA does whose warps push beside its tiles, that is on a second track below.

    Parameters
    ----------
    start_ns
        Added to all times.
    """
    homes = home_roles(events)
    order = {cta: at for at, cta in enumerate(sorted(homes, key=lambda cta: (_ROLE_ORDER.index(homes[cta]), cta)))}
    numbers = {role: iter(range(len(homes))) for role in Role}
    found: list[dict[str, object]] = [{"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}]
    found.append({"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}})
    for cta, at in order.items():
        name = f"{homes[cta].name} {next(numbers[homes[cta]])} (CTA {cta})"
        of_this = events[events["cta"] == cta]
        beside = _is_beside(of_this)
        found += [*_named(rank, cta, name, 2 * at), *(_event(rank, cta, event, start_ns) for event in _did(of_this, homes[cta], beside))]
        if beside.any():
            found += _named(rank, cta + _BESIDE, f"{name}: beside its tiles", 2 * at + 1)
            found += [_event(rank, cta + _BESIDE, event, start_ns) for event in of_this[beside]]
    return found


def _named(rank: int, track: int, name: str, place: int) -> Iterator[dict[str, object]]:
    thread = {"ph": "M", "pid": rank, "tid": track}
    yield {**thread, "name": "thread_name", "args": {"name": name}}
    yield {**thread, "name": "thread_sort_index", "args": {"sort_index": place}}


def _is_beside(events: NDArray[Any]) -> NDArray[np.bool_]:
    """Which events of a CTA's communication thread overlap what else the CTA does."""
    moves = events["lane"] == _COMMUNICATION_LANE
    tiles = Intervals.of(events[~moves & (events["lane"] != _SCHEDULER_LANE) & (events["lane"] != TRACE_FLAG_LANE)])
    during = tiles.until(events["end"]) - tiles.until(events["begin"])
    overlapping: NDArray[np.bool_] = moves & (during > 0)
    return overlapping


def _did(events: NDArray[Any], role: Role, beside: NDArray[np.bool_]) -> NDArray[Any]:
    """What goes on the main track: what the CTA did, and parts of waits for ranks in which it did nothing else."""
    works = events[~beside & (events["kind"] != TraceKind.wait) & (events["lane"] != TRACE_FLAG_LANE)]
    busy = of_cta(events, role).busy
    parts = []
    for wait in events[events["lane"] == TRACE_FLAG_LANE]:
        idle = Intervals(wait["begin"].reshape(1), wait["end"].reshape(1)).minus(busy)
        pieces = np.repeat(wait, idle.begin.size)
        pieces["begin"], pieces["end"] = idle
        parts.append(pieces)
    if role == Role.inter_send:  # its intervals hold its waits, and are cut there
        works = np.concatenate([_cut(work, busy) for work in works]) if works.size else works
    return np.sort(np.concatenate([works, *parts]), order="begin")


def _cut(work: NDArray[Any], busy: Intervals) -> NDArray[Any]:
    whole = Intervals(work["begin"].reshape(1), work["end"].reshape(1))
    inside = whole.minus(whole.minus(busy))
    pieces = np.repeat(work, inside.begin.size)
    pieces["begin"], pieces["end"] = inside
    return pieces


def _event(rank: int, track: int, event: Any, start_ns: int) -> dict[str, object]:
    kind, argument = TraceKind(int(event["kind"])), int(event["argument"])
    name = f"{kind.name} {argument}"
    more: dict[str, object] = {}
    if kind == TraceKind.flag:
        missing, peer = _MISSING[FlagKind(int(event["flag"]))], int(event["peer"])
        name = f"waits for rank {peer}: {missing}" + (f" {argument}" if missing == "data" else "")
        more = {"args": {"rank": peer}}
    begin, end = int(event["begin"]), int(event["end"])
    return {
        "ph": "X",
        "pid": rank,
        "tid": track,
        "name": name,
        "cat": Role(int(event["role"])).name,
        "ts": (start_ns + begin) / 1e3,
        "dur": (end - begin) / 1e3,
        **more,
    }
