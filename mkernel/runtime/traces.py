"""``mk.Traces``: traces of several ranks, on one time axis, and who waited for whom."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from mkernel.abi import FlagKind
from mkernel.errors import ArgumentError
from mkernel.runtime.pictures import perfetto
from mkernel.runtime.pictures.occupancy import occupancy
from mkernel.runtime.trace import FLAGS, Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Traces"]

_ROUNDS = 8  # exchanges by which hosts compare their clocks


class _Exchanging(Protocol):
    @property
    def rank(self) -> int: ...
    def exchange(self, what: str, value: Any) -> list[Any]: ...


class Traces:
    """Traces of the same calls by several ranks.

    Made of what ``mk.launch`` returns, or collectively by ``gather``.

    Attributes
    ----------
    traces
        The ranks' traces, by rank.
    blame
        (ranks, ranks) float64, us: ``blame[r, p]`` is what a CTA of rank r lost on average waiting for rank p, while it could do nothing
        else. The diagonal is a rank's own engine, or its own other CTAs.
    clock_error_ns
        How far times of two ranks may be off against each other, at most.

    Examples
    --------
    >>> import ml_dtypes, numpy as np, mkernel as mk
    >>> def rank(world):
    ...     a, b = np.ones((16, 64), ml_dtypes.bfloat16), np.ones((64, 8), ml_dtypes.bfloat16)
    ...     with mk.trace(world) as t:
    ...         mk.allgather_gemm(a, b)
    ...     return t
    >>> traces = mk.Traces(mk.launch(rank, ranks=2, target="cpu"))
    >>> traces.blame.shape, traces.clock_error_ns
    ((2, 2), 0)

    Raises
    ------
    ArgumentError
        There is no trace, or a rank has two.
    """

    traces: tuple[Trace, ...]
    blame: NDArray[np.float64]
    clock_error_ns: int

    def __init__(self, traces: Iterable[Trace]) -> None:
        import numpy as np

        self.traces = tuple(sorted(traces, key=lambda trace: trace.rank))
        ranks = [trace.rank for trace in self.traces]
        if not ranks or len(set(ranks)) != len(ranks):
            raise ArgumentError("traces", f"of ranks {ranks}", "must be one trace of each rank")
        self._found = [occupancy(trace.events) for trace in self.traces]
        size = 1 + max([*ranks, *(int(np.flatnonzero(found.lost.any(axis=1)).max(initial=0)) for found in self._found)])
        self.blame_by_flag: NDArray[np.float64] = np.zeros((size, size, len(FlagKind)))  # the same by what was missing
        for rank, found in zip(ranks, self._found, strict=True):
            self.blame_by_flag[rank] = found.lost[:size] / max(found.ctas, 1) / 1e3
        self.blame = self.blame_by_flag.sum(axis=2)
        errors = sorted((trace.clock_error_ns for trace in self.traces), reverse=True)
        self.clock_error_ns = sum(errors[:2])

    @classmethod
    def gather(cls, world: _Exchanging, trace: Trace) -> Self:
        """The traces of all ranks, on every rank: collective, blocks the host.

        Ranks of other hosts have other clocks. They are compared by when the ranks enter and leave some exchanges: nobody leaves one before
        everybody has entered it. ``clock_error_ns`` says how well that went.
        """
        import time

        times = []
        for _ in range(_ROUNDS):
            entered = time.monotonic_ns()
            world.exchange("clocks of a trace", None)
            times.append((entered, time.monotonic_ns()))
        by_rank = world.exchange("clocks and hosts of a trace", {"times": times, "host": _host()})
        packed = base64.b85encode(zlib.compress(trace.events.tobytes())).decode()
        told = {"events": packed, "start": trace.start_ns, "error": trace.clock_error_ns, "truncated": trace.truncated}
        found = []
        for rank, given in enumerate(world.exchange("a trace", told)):
            offset, error = host_offset(by_rank[0], by_rank[rank])
            one = Trace.of(rank, zlib.decompress(base64.b85decode(given["events"])), given["truncated"])
            one.start_ns, one.clock_error_ns = given["start"] + offset, given["error"] + error
            found.append(one)
        return cls(found)

    def save(self, path: str | Path) -> Path:
        """Write Chrome trace JSON (for ui.perfetto.dev): a process per rank, a track per SM, all on one time axis."""
        path = Path(path)
        first = min(trace.start_ns for trace in self.traces)
        events = [event for trace in self.traces for event in perfetto.tracks(trace.rank, trace.events, trace.start_ns - first)]
        about = {"clock_error_us": self.clock_error_ns / 1e3}
        path.write_text(json.dumps({"displayTimeUnit": "ns", "otherData": about, "traceEvents": events}))
        return path

    def culprit(self) -> int | None:
        """The rank that cost the others most: what they lost waiting for it, less what it lost waiting for them. None: nobody waited."""
        import numpy as np

        others = self.blame * ~np.eye(len(self.blame), dtype=bool)
        if not others.any():
            return None
        return int((others.sum(axis=0) - others.sum(axis=1)).argmax())

    def summary(self) -> str:
        """The summary of each rank, then the matrix of who waited for whom, and which rank cost the others most."""
        lines = [line for trace in self.traces for line in trace.summary().splitlines()]
        size = len(self.blame)
        lines.append("us that a CTA of a rank (row) lost on average waiting for a rank (column):")
        lines.append("           " + "".join(f"{f'rank {rank}':>10}" for rank in range(size)))
        lines += [f"  rank {rank:<3} " + "".join(f"{value:>10.1f}" for value in row) for rank, row in enumerate(self.blame)]
        culprit = self.culprit()
        if culprit is not None:
            by_flag = dict.fromkeys(FLAGS.values(), 0.0)
            for kind, name in FLAGS.items():
                by_flag[name] += float(self.blame_by_flag[:, culprit, kind].sum() - self.blame_by_flag[culprit, culprit, kind])
            told = ", ".join(f"{name} {value / max(size - 1, 1):.1f}" for name, value in by_flag.items() if value)
            own = float(self.blame[culprit].sum() - self.blame[culprit, culprit])
            mean = sum(by_flag.values()) / max(size - 1, 1)
            lines.append(
                f"most was lost waiting for rank {culprit}: {mean:.1f} us ({told}) by each other rank; it waited {own:.1f} us itself"
            )
        lines.append(f"clocks of two ranks agree within {self.clock_error_ns / 1e3:g} us")
        return "\n".join(lines)


def _host() -> str:
    """What tells hosts, and their boots, apart: processes of one boot share ``time.monotonic_ns``."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_offset(reference: dict[str, Any], other: dict[str, Any]) -> tuple[int, int]:
    """What to add to times of the host ``other`` to get those of ``reference``, and how far that may be off, ns.

    Each has ``host`` and ``times``, when it entered and left each exchange. Nobody leaves one before everybody has entered it, which
    bounds the difference from both sides; of all exchanges the closest bounds count.
    """
    if reference["host"] == other["host"]:
        return 0, 0
    pairs = list(zip(reference["times"], other["times"], strict=True))
    least = max(entered - left for (entered, _), (_, left) in pairs)
    most = min(left - entered for (_, left), (entered, _) in pairs)
    return (least + most) // 2, (most - least + 1) // 2
