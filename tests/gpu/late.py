"""Device code in which CTAs are late on purpose: ``python tests/gpu/late.py FOLDER`` makes a copy of it there, for MKERNEL_KERNELS_SRC.

In the copy every instruction by which threads, CTAs and ranks hand over to each other (arrivals and waits at barriers in shared memory,
flags, counters, copies by TMA) sleeps now and then before it is issued, a wait also after it is over, up to 32 us. Who sleeps, and for how
long, changes with every microsecond, thread and CTA; about every eighth CTA is slow for a millisecond or two, and sleeps often. So on a GPU
roles overtake each other as the scheduler of target cpu lets them do. Nothing of mkernel itself knows of this.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# The checkout is on the path only from here on.
from mkernel.jit.headers import kernels_src  # noqa: E402

__all__ = ["AFTER", "BEFORE", "kernels"]

BEFORE = (
    "mbarrier_arrive",
    "mbarrier_arrive_expect",
    "cluster_arrive",
    "cluster_arrive_relaxed",
    "cluster_post",
    "cluster_post_words",
    "cluster_give_back",
    "cluster_give_back_by",
    "tma_load_3d",
    "tma_load_3d_multicast",
    "tma_store_3d",
    "tma_load_4d",
    "tma_store_4d",
    "bulk_load",
    "bulk_store",
    "store_release_sys",
    "store_release_gpu",
    "store_release_shared",
    "load_acquire_sys",
    "load_acquire_sys_pair",
    "load_acquire_gpu",
    "load_acquire_shared",
    "atomic_add",
    "atomic_add_acq_rel",
    "add_release",
    "store_packet",
)
AFTER = ("mbarrier_wait", "cluster_wait")  # which loop until there is nothing to wait for
_SLEEP = """
// Sleeps in one of 256 calls, in one of 8 where the CTA is slow. No branch: code between a product and the wait for it stays straight.
MK_DEVICE void be_late() {
  uint32_t now;
  asm volatile("mov.u32 %0, %globaltimer_lo;" : "=r"(now));
  uint32_t drawn = (now >> 10) * 0x85ebca6bu + (blockIdx.x * 64u + (threadIdx.x >> 5)) * 0x9e3779b9u;
  drawn = (drawn ^ drawn >> 15) * 0x846ca68bu;
  const uint32_t below = ((now >> 20) + blockIdx.x * 5u) % 8u == 0u ? 1u << 29 : 1u << 24;
  asm volatile("{ .reg .pred p; setp.lt.u32 p, %0, %1; @p nanosleep.u32 %2; }" ::"r"(drawn), "r"(below), "r"(drawn * 0x7feb352du >> 17));
}
"""


def kernels(folder: Path, sleeps: bool = True) -> Path:
    """The copy, made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kernels_src(), folder)
    path = folder / "ptx.cuh"
    if sleeps:
        path.write_text(_late(path.read_text()))
    return folder


def _late(text: str) -> str:
    text, count = re.subn(r"(?m)^namespace ptx \{$", lambda found: found[0] + _SLEEP, text)
    assert count == 1, "ptx.cuh has not one namespace ptx"
    for name in BEFORE:
        text, count = re.subn(rf"(?m)^(MK_DEVICE \w+ {name}\([^)]*\) \{{)", r"\1 be_late();", text)
        assert count, f"ptx.cuh has no {name}"
    for name in AFTER:
        text, count = re.subn(rf"(?ms)^(MK_DEVICE void {name}\(.*?)^\}}$", r"\1  be_late();\n}", text)
        assert count == 1, f"ptx.cuh has not one {name}"
    return text


if __name__ == "__main__":
    print(kernels(Path(sys.argv[1])))
