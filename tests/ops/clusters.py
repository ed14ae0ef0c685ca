"""Plans in clusters, where the planner would not choose them (yet)."""

from __future__ import annotations

from typing import Any


def in_clusters(patch: Any, cluster: int, sms: int = 8) -> None:
    """From now on plans are for clusters of so many CTAs, and there are SMs enough for a pair in each role."""
    if cluster > 1:
        patch.setattr("mkernel.plan.allgather_gemm.choose_cluster", lambda *_: cluster)
        patch.setenv("MKERNEL_CPU_SMS", str(sms))
