"""Pairs of CTAs that load columns of B together (``kernels_src/tile/pair.cuh``): what goes with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from mkernel.planner.split import COMMUNICATION_ROLES, Split, SplitError

__all__ = ["complete"]


def complete(wanted: Split, default: Split, sm_count: int, spared: Container[str], cluster: int) -> Split:
    """``Split.complete`` for a kernel in clusters of so many CTAs, all of one role.

    Raises
    ------
    SplitError
        As ``Split.complete``; or ``wanted`` has a role that is no whole number of clusters.
    """
    if cluster == 1:
        return wanted.complete(default, sm_count, spared)
    even = {role: -(-(getattr(default, role) or 0) // cluster) * cluster for role in COMMUNICATION_ROLES}
    found = wanted.complete(dataclasses.replace(default, **even), sm_count // cluster * cluster, spared)
    if any((number or 0) % cluster for number in dataclasses.astuple(found)):
        raise SplitError(found, "each role needs an even number of SMs where CTAs are pairs", "make it even")
    return found
