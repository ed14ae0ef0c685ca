"""The arithmetic of a measurement: no GPU, no clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

__all__ = ["LINK_GB_PER_S", "NETWORK_GB_PER_S", "Measurement", "milliseconds", "quantile", "slowest", "tera"]

# Bytes into one GPU over NVLink, the best four-way all-to-all rate seen on H200; and over one 400 Gb/s network card.
LINK_GB_PER_S = 325.0
NETWORK_GB_PER_S = 50.0


def quantile(samples: Sequence[float], q: float) -> float:
    """The q-quantile (0..1), linear between the two nearest samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """Samples of one contestant on every rank. The figures are those of the slowest rank: the largest median."""

    samples: tuple[tuple[float, ...], ...]  # by rank
    unit: str  # "ms" or "us"
    method: str  # how one sample came about, in words

    @property
    def rank(self) -> int:
        """The slowest rank."""
        medians = [quantile(samples, 0.5) for samples in self.samples]
        return medians.index(max(medians))

    @property
    def median(self) -> float:
        return quantile(self.samples[self.rank], 0.5)

    @property
    def p10(self) -> float:
        return quantile(self.samples[self.rank], 0.1)

    @property
    def p90(self) -> float:
        return quantile(self.samples[self.rank], 0.9)


def slowest(by_rank: Sequence[Sequence[float]], unit: str, method: str) -> Measurement:
    """A measurement from the samples of all ranks, in rank order."""
    if not by_rank or not all(by_rank):
        raise ValueError(f"a rank has no samples: {[len(samples) for samples in by_rank]}")
    return Measurement(tuple(tuple(samples) for samples in by_rank), unit, method)


def milliseconds(count: float, gigabytes_per_second: float) -> float:
    """Time that ``count`` bytes take at a rate."""
    return count / gigabytes_per_second / 1e6


def tera(flops: float, ms: float) -> float:
    """TFLOP/s."""
    return flops / ms / 1e9
