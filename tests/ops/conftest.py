"""What the modules of tests of the fused GEMMs share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mkernel.jit import cpu as compiler
from mkernel.jit.spec import KernelSpec


@pytest.fixture(scope="module")
def compiled_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile what a module's ``test_every_element`` will need, beside it: a test that comes too early waits for its own kernel only.

    The module's ``plans_of(parameters)`` says which plans a case needs.
    """
    module = request.module
    specs: dict[KernelSpec, None] = {}
    for item in request.session.items:
        if getattr(item, "originalname", "") == "test_every_element" and item.module is module:
            specs |= dict.fromkeys(plan.spec for plan in module.plans_of(item.callspec.params))
    stop = threading.Event()

    def work() -> None:
        for spec in specs:
            if not stop.is_set():
                compiler.compile(spec)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()
