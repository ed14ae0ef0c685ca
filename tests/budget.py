"""Which tests `make test` runs, so that it takes no longer however many there are.

``costs.json`` has the seconds of each test that takes half a second or more, as a run with ``--write-costs`` measured them. Where all that
was collected would take longer than ``--budget`` seconds (of one core of that machine), a test runs with a probability that falls with the
root of its cost, by the seed: cheap ones always, each one in some runs, and all of them with ``--full``. Tests that nobody has measured
yet, and those marked ``always``, run in each run. A selection (-k, a file) that is within the budget runs whole.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["BUDGET", "function_of", "is_drawn", "outgrown", "read", "scale_of", "write"]

BUDGET = 360.0
_COSTS = Path(__file__).parent / "costs.json"
_LEAST = 0.5  # seconds: what takes less always runs
_MORE = 5.0  # seconds, that tests may vary by
_REST = 0.05  # of a test that takes less, about


def function_of(nodeid: str) -> str:
    """What costs are known of: the test function of a case."""
    return nodeid.partition("[")[0]


def read(path: Path = _COSTS) -> dict[str, float]:
    """Seconds by test function, of one case."""
    found: dict[str, float] = json.loads(path.read_text())
    return found


def write(measured: Mapping[str, list[float]], path: Path = _COSTS) -> None:
    """Keep the mean cost of the functions that ran, beside those of others."""
    means = {name: sum(seconds) / len(seconds) for name, seconds in measured.items() if seconds}
    known = {name: cost for name, cost in read(path).items() if name not in means}
    kept = known | {name: round(mean, 1) for name, mean in means.items() if mean >= _LEAST}
    path.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")


def outgrown(measured: Mapping[str, list[float]], known: Mapping[str, float]) -> dict[str, float]:
    """Mean seconds of the functions that take so much longer than is known that a run that draws them takes too long."""
    means = {name: sum(seconds) / len(seconds) for name, seconds in measured.items()}
    return {name: mean for name, mean in means.items() if mean > 3 * known.get(name, _LEAST) + _MORE}


def scale_of(costs: Iterable[float | None], budget: float) -> float:
    """The scale with which tests of such costs take ``budget`` seconds in the mean; None: always run. Infinite if all of them fit."""
    some = list(costs)
    heavy, rest = [cost for cost in some if cost], sum(_REST for cost in some if not cost)
    if sum(heavy) + rest <= budget:
        return float("inf")
    least, most = 0.0, max(heavy)
    for _ in range(60):
        middle = (least + most) / 2
        taken = rest + sum(cost * _probability(cost, middle) for cost in heavy)
        least, most = (middle, most) if taken < budget else (least, middle)
    return least


def _probability(cost: float, scale: float) -> float:
    return min(1.0, (scale / cost) ** 0.5)


def is_drawn(nodeid: str, cost: float, scale: float, seed: int) -> bool:
    """Whether a case runs with this seed: the same in all processes of a run."""
    return zlib.crc32(f"{seed} {nodeid}".encode()) < _probability(cost, scale) * 2**32
