"""``mk.trace``: what every CTA of this rank did, when."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from mkernel.abi import Role, TraceKind
from mkernel.errors import ArgumentError, Error
from mkernel.runtime.pictures.timeline import draw

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Trace", "trace"]

_LANES = ("scheduler", "consumers", "communication")
# What a communication thread does tells its role, so that a trace needs no plan and may hold calls of several ops.
_ROLE_OF_KIND = {
    TraceKind.send: Role.intra_comm,
    TraceKind.forward: Role.intra_comm,
    TraceKind.put: Role.inter_send,
    TraceKind.reduce: Role.inter_reduce,
    TraceKind.fetch: Role.intra_comm,
}
_COMMUNICATION_LANE = 2


class _Recorder(Protocol):
    def begin(self, capacity: int) -> None: ...
    def end(self) -> NDArray[Any]: ...


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
        Records per lane (a CTA has three lanes); later ones are dropped, which ``truncated`` tells. 24 bytes each.

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
        ``capacity`` is less than 2 (the first record of a lane holds its count).
    """
    if capacity < 2:
        raise ArgumentError("capacity", capacity, "at least 2 records per lane")
    return Trace(world, capacity)


class Trace:
    """The recorded intervals; see ``trace``. In a notebook it shows itself as a picture.

    Attributes
    ----------
    events
        Structured array, one entry per interval, ordered by begin: cta, lane, role, kind, argument (tile or chunk index), begin and end
        (ns after the first begin). Empty until the block has ended.
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

    def __init__(self, world: _TracedWorld, capacity: int) -> None:
        import numpy as np

        self._world: _TracedWorld | None = world
        self._capacity, self._rank = capacity, world.rank
        self.truncated = False
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
        self.events, self.truncated = collect(records)
        if self.truncated:
            logging.getLogger("mkernel").warning("trace: %d records per lane were not enough, later ones are missing", self._capacity)

    def save(self, path: str | Path) -> Path:
        """Write Chrome trace JSON (``chrome://tracing``, Perfetto): the rank is the process, each lane of a CTA a thread."""
        path = Path(path)
        path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": self._chrome_events()}))
        return path

    def plot(self, path: str | Path | None = None, *, title: str | None = None) -> Trace:
        """Draw one row per CTA, grouped by role: SVG to ``path``, or, without one, in the notebook cell that returns this trace.

        The picture has at most 4 MiB: a long trace is drawn in bins of time, each in the colour of what took most of it, and says so.
        """
        if path is not None:
            Path(path).write_text(self._draw(title), encoding="utf-8")
        return self

    def summary(self) -> str:
        """Where the time of each role went: count, total, mean and share of (CTAs of the role x span) by kind of interval."""
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
        return "\n".join(lines)

    def _draw(self, title: str | None = None) -> str:
        return draw(self.events, title or f"rank {self._rank}")

    def _repr_svg_(self) -> str:
        return self._draw()

    def _chrome_events(self) -> list[dict[str, object]]:
        process = {"ph": "M", "pid": self._rank, "name": "process_name", "args": {"name": f"rank {self._rank}"}}
        events: list[dict[str, object]] = [process]
        for cta, lane in sorted({(int(e["cta"]), int(e["lane"])) for e in self.events}):
            thread = {"ph": "M", "pid": self._rank, "tid": cta * len(_LANES) + lane, "name": "thread_name"}
            events.append({**thread, "args": {"name": f"CTA {cta} {_LANES[lane]}"}})
        for event in self.events:
            kind = TraceKind(int(event["kind"])).name
            events.append(
                {
                    "ph": "X",
                    "pid": self._rank,
                    "tid": int(event["cta"]) * len(_LANES) + int(event["lane"]),
                    "name": f"{kind} {int(event['argument'])}",
                    "cat": Role(int(event["role"])).name,
                    "ts": int(event["begin"]) / 1e3,
                    "dur": int(event["end"] - event["begin"]) / 1e3,
                }
            )
        return events


def _event_type() -> np.dtype[Any]:
    import numpy as np

    words = [(name, np.uint32) for name in ("cta", "lane", "role", "kind", "argument")]
    return np.dtype([*words, ("begin", np.int64), ("end", np.int64)])


def collect(records: NDArray[Any]) -> tuple[NDArray[Any], bool]:
    """Intervals of the device's records [cta, lane, record], and whether a lane was full. Record 0 of a lane holds its count."""
    import numpy as np

    ctas, lanes, capacity = records.shape
    counts = records[:, :, 0]["begin"].astype(np.int64)
    events = np.zeros(int(counts.sum()), _event_type())
    at = 0
    for cta in range(ctas):
        for lane in range(lanes):
            valid = records[cta, lane, 1 : 1 + int(counts[cta, lane])]
            part = events[at : at + valid.size]
            part["cta"], part["lane"] = cta, lane
            part["role"] = _lane_role(valid["kind"]) if lane == _COMMUNICATION_LANE else Role.compute
            for field in ("kind", "argument", "begin", "end"):
                part[field] = valid[field]
            at += valid.size
    if events.size:
        start = events["begin"].min()
        events["begin"] -= start
        events["end"] -= start
    return np.sort(events, order=["begin", "cta", "lane"]), bool((counts >= capacity - 1).any())


def _lane_role(kinds: NDArray[Any]) -> int:
    """Role of one communication thread: its first interval that is not a wait says it."""
    roles = (_ROLE_OF_KIND.get(TraceKind(int(kind))) for kind in kinds)
    return next((int(role) for role in roles if role is not None), int(Role.intra_comm))
