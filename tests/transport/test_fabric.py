"""The fabric that SMs play: the contract in every mood, what it is faithful to, its end and its errors; planted bugs must show."""

from __future__ import annotations

import pytest

from tests.transport.contract import CHECKS
from tests.transport.fabric_network import FabricNetwork

MOODS = {
    "rc": {},
    "srd": {"reorder_us": 40.0},
    "not paced": {"gigabytes_per_second": 0.0, "latency_us": 0.0},
    "slow": {"gigabytes_per_second": 1.0, "latency_us": 1.0},
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mood", MOODS)
def test_contract(mood: str, check: str, pytestconfig: pytest.Config) -> None:
    with FabricNetwork(2, seed=pytestconfig.getoption("--seed"), **MOODS[mood]) as network:
        CHECKS[check](network)
