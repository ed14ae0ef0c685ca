"""Ranks that are processes: compiled graphs, process groups, DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make test-torch`")

from tests.runtime.processes import free_port, start
from tests.with_torch.test_programs import MOST

WORKER = Path(__file__).with_name("worker.py")


def lines(scenario: str, ranks: int, **more: str) -> list[dict[str, Any]]:
    """What each rank tells."""
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    results = start(scenario, ranks, worker=WORKER, **store, **more)
    assert [result.code for result in results] == [0] * ranks, [result.errors for result in results]
    return [line for result in results for line in result.lines]


def test_collectives_of_a_compiled_block_come_in_one_order() -> None:
    first, *others = lines("compiled", 2)
    forward = ["mkernel._allgather_gemm_gathered.default", "mkernel._shared.default", "mkernel._gemm_reduce_scatter.default"]
    assert sorted(first["graphs"][0]) == sorted(forward)
    backward = ["mkernel._sum_over_ranks.default", "mkernel._allgather_gemm_gathered.default", "mkernel._gemm_reduce_scatter.default"]
    assert sorted(first["graphs"][1]) == sorted(backward)
    pair = ["allgather_gemm", "gemm_reduce_scatter"]
    assert first["compiled"] == first["eager"] == [*pair, "gemm_allreduce", *pair]
    for other in others:
        assert {**other, "rank": 0} == first, "the same graphs and the same order of calls on all ranks"
    assert all(first["equal"]), "bitwise what the block gives eagerly"


def test_inductor() -> None:
    assert max(line["worst"] for line in lines("inductor", 2)) <= 2**-6, "fused pointwise operations round at other places"


def test_random_programs(rng: np.random.Generator) -> None:
    for line in lines("programs", 2, PROGRAMS="4", SEED=str(rng.integers(1 << 30))):
        assert max(line["errors"].values(), default=0.0) <= MOST, line


def test_worlds_of_process_groups() -> None:
    for rank, line in enumerate(lines("group", 4)):
        assert line["sizes"] == [4, 2]
        assert line["ranks"] == [rank, rank % 2]
        assert line["all"] == [0.0, 1.0, 2.0, 3.0]
        assert line["half"] == [float(rank // 2 * 2), float(rank // 2 * 2 + 1)]


def test_random_programs_of_two_worlds(rng: np.random.Generator) -> None:
    for line in lines("meshes", 4, PROGRAMS="4", SEED=str(rng.integers(1 << 30))):
        assert max(line["errors"].values(), default=0.0) <= MOST, line


def test_styles_beside_torchs() -> None:
    """Three steps of training: torch's tensor parallelism and ours round at other places only, also below FSDP2."""
    for line in lines("styles", 4):
        assert line["alike"] == [True] * 6, "parameters lie as torch has them"
        assert set(line["last"]) == {"up.weight", "up.bias", "down.weight", "down.bias"}
        assert len(line["errors"]) == 6
        for case, errors in line["errors"].items():
            assert max(errors) <= 2**-6, f"{case}: {errors}"


def test_checkpoints(tmp_path: Path) -> None:
    for line in lines("checkpoints", 2, CHECKPOINTS=str(tmp_path)):
        assert line["before"] == [False] * 4
        assert line["after"] == [True] * 4
        assert line["back"] == [True] * 4
