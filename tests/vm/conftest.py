"""Tests that boot machines are skipped, loudly, where none can be booted; with ``--require-vm`` they fail there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mkernel.jit.cpu import core_library
from tests.vm.machines import Machines
from tests.vm.sysroot import lacks, unavailable


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where it can be seen at once, they are skipped from the start: they take nothing of the budget of other tests."""
    reason = None if config.getoption("--require-vm") else lacks()
    for item in items if reason is not None else ():
        if "machines" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=f"no virtual machines here: {reason}"))


@pytest.fixture(scope="package")
def machines(request: pytest.FixtureRequest) -> Iterator[Machines]:
    """Those of all tests here."""
    reason = unavailable()
    if reason is not None and request.config.getoption("--require-vm"):
        pytest.fail(f"no virtual machines here: {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(f"no virtual machines here: {reason}")
    core_library()  # machines, which may not compile, remember for good that it was missing
    with Machines() as machines:
        yield machines
