"""An engine leaves a binding to a single CPU, keeps a wider one, and goes near its card where it may."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import pytest

from mkernel.proxy.cpus import choose_cpus
from mkernel.proxy.engine import Engine, EngineThread
from mkernel.proxy.ring import RingReader
from mkernel.transport.null import NullTransport
from tests.transport.harness import Producer

HERE = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(HERE) < 2, reason="needs two CPUs")


def in_a_thread(cpus: AbstractSet[int], work: Callable[[], object]) -> None:
    """Bindings are a thread's own, and inherited by those it starts."""

    def run() -> None:
        os.sched_setaffinity(0, cpus)
        work()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("bound", "near", "expected"),
    [
        (HERE[:1], (), None),  # None: wherever the machine lets it
        (HERE[1:2], HERE[:1], HERE[:1]),
        (HERE[:2], (), HERE[:2]),
        (HERE[:2], HERE[1:2], HERE[1:2]),
        (HERE[:2], (4095,), HERE[:2]),
    ],
)
def test_choose_cpus(bound: list[int], near: list[int], expected: list[int] | None) -> None:
    found: list[set[int]] = []

    def work() -> None:
        choose_cpus(set(near))
        found.append(os.sched_getaffinity(0))

    in_a_thread(set(bound), work)
    assert found[0] == set(expected) if expected is not None else found[0] >= set(HERE)


def test_an_engines_thread_leaves_the_ranks_cpu() -> None:
    found: list[set[int]] = []

    class Look(NullTransport):
        def poll(self) -> list[int]:
            found.append(os.sched_getaffinity(0))
            return super().poll()

    def rank() -> None:
        with EngineThread(Engine(RingReader(Producer().buffer), Look()), print):
            while not found:
                os.sched_yield()
        assert os.sched_getaffinity(0) == {HERE[0]}

    in_a_thread({HERE[0]}, rank)
    assert found[0] >= set(HERE)
