"""What the model takes of what was measured: for the tests that hold tables of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

Kind = TypeVar("Kind")  # of tile


def lost(measured: Mapping[str, Mapping[Kind, float]], seconds: Callable[[str, Kind], float]) -> dict[str, float]:
    """What is predicted to be the fastest takes of the time of the fastest, by shape. ``seconds``: what is predicted."""
    found = {}
    for size, times in measured.items():
        predicted = {tile: seconds(size, tile) for tile in times}
        found[size] = times[min(times, key=predicted.__getitem__)] / min(times.values())
    return found


def is_near(found: Mapping[str, float], worst: float, mean: float) -> bool:
    return max(found.values()) <= worst and statistics.geometric_mean(found.values()) <= mean
