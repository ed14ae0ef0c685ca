"""``mk.trace``: what every CTA of this rank did, when."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from mkernel import abi
from mkernel.abi import FlagKind, Role, TraceKind
from mkernel.errors import ArgumentError, Error
from mkernel.runtime.clock import Clock
from mkernel.runtime.integers import whole_number
from mkernel.runtime.pictures import perfetto
from mkernel.runtime.pictures.occupancy import Occupancy, occupancy
from mkernel.runtime.pictures.timeline import draw

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["FLAGS", "Trace", "trace"]

# What a communication thread does tells its role, so that a trace needs no plan and may hold calls of several ops.
_ROLE_OF_KIND = {
    TraceKind.tile: Role.compute,  # of the second consumer warpgroup, where it has tiles of its own
    TraceKind.send: Role.intra_comm,
    TraceKind.forward: Role.intra_comm,
    TraceKind.put: Role.inter_send,
    TraceKind.reduce: Role.inter_reduce,
    TraceKind.fetch: Role.intra_comm,
}
_COMMUNICATION_LANE = 2
_MOST_RECORDS = 1 << 24  # of a lane


# What a flag is, in summaries: by FlagKind.
FLAGS = {FlagKind.entry: "entry", FlagKind.chunk: "data", FlagKind.ring_slot: "engine", FlagKind.ring_done: "engine"}


class _Recorder(Protocol):
    def begin(self, capacity: int) -> None: ...
    def end(self) -> NDArray[Any]: ...
    def clock(self) -> Clock: ...


class _TracedWorld(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def recorder(self) -> _Recorder: ...


def trace(world: _TracedWorld, *, capacity: int = 4096) -> Trace:
    """Record what the CTAs of this rank do during a block: ``with mk.trace(world) as t: ...``, then ``t.save``, ``t.plot``, ``t.summary``.

    Parameters
    ----------
    world
        The world whose calls are recorded. Every rank may trace, or only some.
    capacity
        Records per lane (a CTA has four lanes); later ones are dropped, which ``truncated`` tells. 24 bytes each.

    Notes
    -----
    Not collective. Entering and leaving the block wait until this rank's earlier calls have ended. Not capturable: graphs captured inside
    the block would keep writing to a buffer that is gone.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     a, b = np.ones((16, 64), ml_dtypes.bfloat16), np.ones((64, 8), ml_dtypes.bfloat16)
    ...     with mk.trace(world) as t:
    ...         mk.allgather_gemm(a, b)
    ...     return t
    >>> print(mk.launch(rank, ranks=2, target="cpu")[0].summary())
    rank 0: ... us, ... CTAs
      compute ... tile ...

    Raises
    ------
    ArgumentError
        ``capacity`` is less than 2 (the first record of a lane holds its count), or more than 2^24.
    """
    if not hasattr(world, "recorder"):
        raise ArgumentError("world", world, "must be a World", "pass what mk.init() or mk.launch gave")
    return Trace(world, whole_number("capacity", capacity, 2, _MOST_RECORDS))


class Trace:
    """The recorded intervals; see ``trace``. In a notebook it shows itself as a picture.

    Attributes
    ----------
    events
        Structured array, one entry per interval, ordered by begin: cta, lane, role, kind, argument (tile or chunk index), begin and end
        (ns after the first begin); of waits for ranks (kind ``TraceKind.flag``, lane 3) also peer and flag (``FlagKind``). Of several waits
        of a CTA at a time the one that ends last counts. Empty until the block has ended.
    start_ns, clock_error_ns
        When the first interval began, on the clock of the host (``time.monotonic_ns``; of ``mk.launch`` on target cpu in emulated time),
        and how far that may be off. By it ``mk.Traces`` aligns the ranks.
    truncated
        Some lane was full: its later intervals are missing.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     a, b = np.ones((16, 64), ml_dtypes.bfloat16), np.ones((64, 8), ml_dtypes.bfloat16)
    ...     with mk.trace(world) as t:
    ...         mk.allgather_gemm(a, b)
    ...     return t
    >>> t = mk.launch(rank, ranks=2, target="cpu")[1]
    >>> t.truncated, bool((t.events["end"] >= t.events["begin"]).all()), len(t.events) > 0
    (False, True, True)
    """

    events: NDArray[Any]
    truncated: bool
    start_ns: int
    clock_error_ns: int
    _title: str | None = None  # of the picture

    def __init__(self, world: _TracedWorld, capacity: int) -> None:
        import numpy as np

        self._world: _TracedWorld | None = world
        self._capacity, self._rank = capacity, world.rank
        self.truncated = False
        self.start_ns, self.clock_error_ns = 0, 0
        self.events = np.zeros(0, _event_type())

    def __enter__(self) -> Self:
        if self._world is None:
            raise ArgumentError("trace", "begin", "this trace has come from another process, which has its world", "begin a new one")
        self._world.recorder.begin(self._capacity)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_world": None}  # what was recorded travels between processes, the world does not

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        assert self._world is not None
        try:
            records = self._world.recorder.end()
        except Error:
            if exc is None:
                raise
            return  # the block has raised the world's own error, which says more
        clock = self._world.recorder.clock()
        self.events, self.truncated, start = collect(records)
        self.start_ns, self.clock_error_ns = start + clock.offset_ns, clock.error_ns
        if self.truncated:
            logging.getLogger("mkernel").warning("trace: %d records per lane were not enough, later ones are missing", self._capacity)

    @classmethod
    def of(cls, rank: int, events: bytes, truncated: bool) -> Self:
        """A trace that another process has recorded, from the bytes of its ``events``."""
        import numpy as np

        trace = cls.__new__(cls)
        trace._world, trace._capacity, trace._rank, trace.truncated = None, 0, rank, truncated
        trace.start_ns, trace.clock_error_ns = 0, 0
        trace.events = np.frombuffer(events, _event_type())
        return trace

    @property
    def rank(self) -> int:
        """The rank that has recorded it."""
        return self._rank

    def save(self, path: str | Path) -> Path:
        """Write Chrome trace JSON (for ui.perfetto.dev): a process per rank, a track per SM, named by the role in which its CTA began."""
        path = Path(path)
        path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": perfetto.tracks(self._rank, self.events)}))
        return path

    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> Trace:
        """Draw one row per CTA, grouped by the role in which it began: SVG to ``path``, or, without one, in the notebook cell that ends so.

        The picture has at most 4 MiB: a long trace is drawn in bins of time, each in the colour of what took most of it, and says so.
        """
        self._title = title
        if path is not None:
            Path(path).write_text(self._draw(), encoding="utf-8")
        return self

    def summary(self) -> str:
        """Where the time of each role went, how much of the communication was overlapped, and for whom this rank waited.

        First count, mean and share of (CTAs of the role x span) by kind of interval, under the role that did it. Then, under the role in
        which a CTA began: *busy* (a thread multiplies, adds or moves data), *waiting* (not busy, and a thread waits), *idle*. The last line
        has the time that CTAs lost to waiting for each rank, on average over the CTAs, by what was missing: the rank's entry into the call,
        its data, or its engine. ``mk.Traces`` has that of all ranks as a matrix.
        """
        import numpy as np

        if not self.events.size:
            return f"rank {self._rank}: no intervals"
        span = int(self.events["end"].max())
        lines = [f"rank {self._rank}: {span / 1e3:.1f} us, {np.unique(self.events['cta']).size} CTAs" + " (truncated)" * self.truncated]
        for role in Role:
            of_role = self.events[self.events["role"] == role]
            ctas = np.unique(of_role["cta"]).size
            for kind in TraceKind:
                chosen = of_role[of_role["kind"] == kind]
                if not chosen.size:
                    continue
                total = int((chosen["end"] - chosen["begin"]).sum())
                lines.append(
                    f"  {role.name:<12} {ctas:>4} CTAs  {kind.name:<8} {chosen.size:>6} x {total / chosen.size / 1e3:>9.2f} us"
                    f" = {100 * total / (ctas * span) if span else 0:>5.1f} %"
                )
        return "\n".join([*lines, *_shares(occupancy(self.events))])

    def _draw(self) -> str:
        return draw(self.events, self._title or f"rank {self._rank}")

    def _repr_svg_(self) -> str:
        return self._draw()


def _shares(found: Occupancy) -> list[str]:
    """The lines of a summary about roles, overlap and waiting for ranks."""
    lines = []
    for role, time in found.roles.items():
        room = max(time.ctas * found.span, 1)
        parts = (f"{name} {100 * getattr(time, name) / room:.1f} %" for name in ("busy", "waiting", "idle"))
        lines.append(f"  {role.name:<12} {time.ctas:>4} CTAs: {', '.join(parts)}")
    if found.moving:
        share = f", {100 * found.overlap:.1f} % of the compute CTAs busy meanwhile" if found.overlap == found.overlap else ""
        lines.append(f"  overlap: data moved during {found.moving / 1e3:.1f} us{share}")
    lost = found.lost / max(found.ctas, 1) / 1e3
    by_rank = sorted(((float(lost[rank].sum()), rank) for rank in range(len(lost)) if lost[rank].any()), reverse=True)
    told = (f"rank {rank} {total:.1f} us ({_by_flag(lost[rank])})" for total, rank in by_rank)
    return [*lines, *([f"  waited for: {'; '.join(told)}"] if by_rank else [])]


def _by_flag(lost: NDArray[Any]) -> str:
    names = dict.fromkeys(FLAGS.values(), 0.0)
    for kind, name in FLAGS.items():
        names[name] += float(lost[kind])
    return ", ".join(f"{name} {value:.1f}" for name, value in names.items() if value)


def _event_type() -> np.dtype[Any]:
    import numpy as np

    words = [(name, np.uint32) for name in ("cta", "lane", "role", "kind", "argument")]
    return np.dtype([*words, ("begin", np.int64), ("end", np.int64), ("peer", np.uint32), ("flag", np.uint32)])


def collect(records: NDArray[Any]) -> tuple[NDArray[Any], bool, int]:
    """Intervals of the device's records [cta, lane, record], whether a lane was full, and the device's time at the first begin.

    Record 0 of a lane holds its count; that of the lane of flags counts also those that were not kept.
    """
    import numpy as np

    ctas, lanes, capacity = records.shape
    counts = np.minimum(records[:, :, 0]["begin"].astype(np.int64), capacity - 1)
    events = np.zeros(int(counts.sum()), _event_type())
    at = 0
    for cta in range(ctas):
        for lane in range(lanes):
            valid = records[cta, lane, 1 : 1 + int(counts[cta, lane])]
            part = events[at : at + valid.size]
            part["cta"], part["lane"] = cta, lane
            for field in ("kind", "argument", "begin", "end"):
                part[field] = valid[field]
            if lane == abi.TRACE_FLAG_LANE:
                _unpack_flags(part)
            else:
                part["role"] = _lane_role(valid["kind"]) if lane == _COMMUNICATION_LANE else Role.compute
            at += valid.size
    start = int(events["begin"].min()) if events.size else 0
    events["begin"] -= start
    events["end"] -= start
    events = np.concatenate([events[events["lane"] != abi.TRACE_FLAG_LANE], *_last_to_end(events)])
    return np.sort(events, order=["begin", "cta", "lane"]), bool((counts >= capacity - 1).any()), start


def _unpack_flags(events: NDArray[Any]) -> None:
    """Take apart what ``kind`` holds in the lane of flags (kernels_src/trace.cuh)."""
    packed = events["kind"].copy()
    events["kind"] = packed & 0xFF
    events["flag"] = packed >> abi.TRACE_FLAG_KIND_SHIFT & 0xF
    events["role"] = packed >> abi.TRACE_ROLE_SHIFT & 0xF
    events["peer"] = packed >> abi.TRACE_PEER_SHIFT


def _last_to_end(events: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Waits for flags by CTA, cut so that they do not overlap: of several at a time the one that ends last is what the CTA waits for."""
    import numpy as np

    flags = events[events["lane"] == abi.TRACE_FLAG_LANE]
    for cta in np.unique(flags["cta"]):
        waits = flags[flags["cta"] == cta]
        waits = waits[np.argsort(-waits["end"], kind="stable")]
        # All before it in this order end later: one that begins before this one ends takes over from there.
        earliest = np.minimum.accumulate(np.concatenate([[np.iinfo(np.int64).max], waits["begin"][:-1]]))
        waits["end"] = np.minimum(waits["end"], earliest)
        yield waits[waits["end"] > waits["begin"]]


def _lane_role(kinds: NDArray[Any]) -> int:
    """Role of one communication, or second computing, thread: its first interval that is not a wait says it."""
    roles = (_ROLE_OF_KIND.get(TraceKind(int(kind))) for kind in kinds)
    return next((int(role) for role in roles if role is not None), int(Role.intra_comm))
