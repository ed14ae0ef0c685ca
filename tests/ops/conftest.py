"""What the modules of tests of the fused GEMMs share."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator

import pytest

from mkernel import env
from mkernel.jit import cpu as compiler
from mkernel.jit.spec import KernelSpec


def specialize_of(item: pytest.Item) -> str:
    """What is compiled into the kernels of a test: everything in one of five tests, else nothing that need not be.

    The same in every process. Kernels into which nothing is compiled serve many tests.
    """
    return "all" if zlib.crc32(item.nodeid.encode()) % 5 == 0 else "none"


@pytest.fixture(autouse=True)
def _specialize(request: pytest.FixtureRequest) -> Iterator[None]:
    with env.override(MKERNEL_SPECIALIZE=specialize_of(request.node)):
        yield


@pytest.fixture(scope="module")
def compiled_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile what a module's ``test_every_element`` will need, beside it: a test that comes too early waits for its own kernel only.

    The module's ``plans_of(parameters)`` says which plans a case needs.
    """
    module = request.module
    specs: dict[KernelSpec, None] = {}
    for item in request.session.items:
        if getattr(item, "originalname", "") == "test_every_element" and item.module is module:
            with env.override(MKERNEL_SPECIALIZE=specialize_of(item)):
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
