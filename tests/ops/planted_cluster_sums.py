"""What is planted in sums of shares of K by the CTAs of a cluster (kernels_src/tile/cluster_sums.cuh)."""

from __future__ import annotations

from tests.ops import packets_body
from tests.ops.planted_bug import Bug

__all__ = ["CLUSTER_SUMS"]

_FILE, _WORKLOAD = "tile/cluster_sums.cuh", "sums in clusters"

CLUSTER_SUMS = [
    *(
        Bug(what, _FILE, before, after, found_as, "1x1", _WORKLOAD)
        for what, before, after, found_as in (
            ("sums do not wait for what is sent", "      ptx::cluster_wait(&storage.sums.filled, round % 2);\n", "", ""),
            ("what two CTAs send lies in the same place", "* kCtas + from) * kWordsOfWarp", "* kCtas) * kWordsOfWarp", "wrong"),
            ("a sum is stored in the first slice", "store(begin + i, sum)", "store(i, sum)", "wrong"),
            (
                "all shares are the own one",
                "ptx::load_shared(place(storage, i, from))",
                "ptx::load_shared(place(storage, i, cta))",
                "wrong",
            ),
            ("fewer bytes are expected than sent", "mine * warps * kCtas *", "mine * warps * (kCtas - 1) *", ""),
            ("as many bytes are expected of a tile of few rows", "rows < Shape::kBlockM ?", "false ?", "deadlock"),
            ("what is sent of the next tile does not wait", "ptx::cluster_wait(&storage.sums.taken, (round - 1) % 2);", "", ""),
            ("one CTA is told that a slice is added up", "if (ptx::lane_index() < kCtas) ", "if (ptx::lane_index() < 1) ", "deadlock"),
            ("nobody waits until the others have barriers", "      ptx::cluster_meet();", "      ", "may not have begun"),
        )
    ),
    Bug(
        "two shares begin at the same k step",
        "tile/shares.cuh",
        "return steps * share / shares;",
        "return steps * (share / 2 * 2) / shares;",
        "",
        "1x1",
        _WORKLOAD,
    ),
    Bug(
        "a CTA of a skipped call ends before the others have told it",
        "tile/multiply.cuh",
        "ptx::cluster_wait(&storage.sums.taken, (rounds - 1) % 2);",
        "{}",
        "has ended",
        "1x1",
        packets_body.IN_CLUSTERS,
        seeds=24,
        sms=2,
    ),
]
