"""Tests that boot machines are skipped, loudly, where none can be booted; with ``--require-vm`` they fail there."""

from __future__ import annotations

import pytest

from tests.vm import machines


@pytest.fixture(autouse=True, scope="session")
def _machines_can_boot(request: pytest.FixtureRequest) -> None:
    reason = machines.unavailable()
    if reason is None:
        return
    if request.config.getoption("--require-vm"):
        pytest.fail(f"no virtual machines here: {reason}", pytrace=False)
    pytest.skip(f"no virtual machines here: {reason}")
