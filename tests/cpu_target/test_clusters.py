"""Clusters on target cpu: what CTAs of a pair do to each other's shared memory, and what they must not."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mkernel.errors import Error
from mkernel.runtime.cpu import CpuDevice
from tests.cpu_target.harness import BFLOAT16, Cluster, aligned, load, map_of

SEEDS = range(8)
ROUNDS, STEPS, THREADS = 3, 7, 64


def run(fault: int, seed: int, ctas: int = 4) -> bool:
    """Whether the results are right."""
    kernel = load("cluster", Cluster, threads=128, shared=8192, cluster=2, kFault=fault)
    device = CpuDevice(seed=seed)
    source = aligned((STEPS * 16, 64), BFLOAT16)
    source.view(np.uint16)[...] = np.random.default_rng(seed).integers(0, 1 << 16, source.shape)
    out = aligned((ctas, 2 + STEPS * THREADS), np.uint32)
    parameters = Cluster(map_of(device, source, (64, 8)), out.ctypes.data, ROUNDS, STEPS)
    try:
        device.launch(kernel, 0, ctas, bytes(parameters))
    finally:
        device.close()
    rows = source.view(np.uint32).sum(axis=1, dtype=np.uint32)
    added = out[:, 2:].reshape(ctas, STEPS * 16, 4).sum(axis=2, dtype=np.uint32)
    ranks, sums = out[:, 0], out[:, 1]
    return bool((added == rows).all() and (ranks == np.arange(ctas) % 2).all() and (sums == 2 * ROUNDS - ranks).all())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pair(seed: int) -> None:
    assert run(0, seed)


# What is said, always or at least for some seeds.
FAULTS: dict[int, tuple[str, bool]] = {
    1: (r"(mbarrier_arrive_cluster|store_cluster|tma_load_3d_multicast): reaches for CTA \d before the first cluster_sync", True),
    2: (r"CTA \d has ended, and with it its shared memory \(cluster_sync missing at the end\)", False),
    3: (r"mbarrier_arrive_cluster: there is no CTA 2 in a cluster of 2", True),
    4: (r"deadlock: [\s\S]*thread\w* 64: mbarrier at shared .*, parity \d \(in phase \d: 2 of 4 arrivals", True),
    6: (r"deadlock: [\s\S]*CTA 0, threads 0-95: cluster_sync \(96 of 192 threads there\)", True),
    7: (r"the mbarrier at shared \+0x\w+ (of CTA \d )?has not been initialized", True),
    8: (r"deadlock: [\s\S]*0 of 1 arrivals and 1024 bytes missing", True),
}


@pytest.mark.parametrize("fault", FAULTS, ids=[re.sub(r"\W+", " ", text)[:40] for text, _ in FAULTS.values()])
def test_fault_is_found(fault: int) -> None:
    text, always = FAULTS[fault]
    found = 0
    for seed in range(20):
        try:
            right = run(fault, seed)
        except Error as error:
            assert re.search(text, str(error)), error
            found += 1
        else:
            assert right
            assert not always
    assert found >= 2


def test_a_stage_reused_too_early_corrupts_data() -> None:
    """The two CTAs run apart, and each loads into the other."""
    wrong = 0
    for seed in range(20):
        try:
            wrong += not run(5, seed)
        except Error:
            wrong += 1
    assert wrong >= 5


def test_the_grid_is_made_of_whole_clusters() -> None:
    with pytest.raises(Error, match="cluster: 3 CTAs in clusters of 2"):
        run(0, 0, 3)
    assert run(0, 0, 2)
