"""Puts of engines and copies of kernels that touch the same bytes at the same time: found, and both parties named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mkernel.errors import Error
from mkernel.runtime.cpu.backend import CpuBackend, CpuCopier, ThreadRanks
from tests.cpu_target.harness import Relay, aligned, load, together

PIECES = 2000  # of 1 KiB: the kernel runs for several steps of the engine
SIZE = PIECES * 1024
ENGINE = "the engine of rank 7 (put 3 to rank 0)"
READER, WRITER = "rank 0, CTA [01], thread 0", "rank 0, CTA [01], thread 0"


class Memory:
    def __init__(self, thread_ranks: ThreadRanks) -> None:
        self.source, self.middle, self.out = (aligned(SIZE, np.uint8) for _ in range(3))
        self.other = aligned(SIZE, np.uint8)
        self.source[:] = np.random.default_rng(0).integers(0, 256, SIZE)
        self.flag = aligned(1, np.uint64)
        for name in ("source", "middle", "out", "other"):
            thread_ranks.name(getattr(self, name).ctypes.data, SIZE, f"test {name}")

    def relay(self, thread_ranks: ThreadRanks, rank: int = 0) -> None:
        """CTA 0 copies source to middle; then CTA 1 copies middle to out."""
        kernel = load("relay", Relay, threads=32, shared=4096, kFault=0)
        addresses = (array.ctypes.data for array in (self.source, self.middle, self.out, self.flag))
        CpuBackend(rank, thread_ranks).launch(kernel, 0, 2, bytes(Relay(*addresses, PIECES, 1)))


def run(seed: int, engine: Callable[[Memory, CpuCopier, int], Any]) -> tuple[str, bool]:
    """What the emulator says of the kernel beside ``engine(memory, copier, step)``, and whether the result is right."""
    with ThreadRanks(1, seed) as thread_ranks:
        memory, steps = Memory(thread_ranks), iter(range(10**9))
        copier = CpuBackend(0, thread_ranks).copier()
        thread_ranks.add_engine(0, lambda: bool(engine(memory, copier, next(steps))) and False, lambda: None)
        error = together(thread_ranks, 1, lambda rank: memory.relay(thread_ranks))[0]
        assert error is None or isinstance(error, Error), error
        return str(error or ""), bool((memory.out == memory.source).all())


def named(text: str) -> bool:
    """Both parties."""
    return ENGINE in text and re.search(r"rank 0, CTA [01], thread 0", text) is not None


def everywhere(engine: Callable[[Memory, CpuCopier, int], Any], pattern: str) -> None:
    """The race is found with every seed, in one of the ways in which it can show."""
    for seed in range(12):
        text, _ = run(seed, engine)
        assert re.search(pattern, text), (seed, text)
        assert named(text), text


def test_a_put_over_bytes_that_a_kernel_reads() -> None:
    def engine(memory: Memory, copier: CpuCopier, step: int) -> None:
        if step == 1:  # the kernel is at work on its source, or about to
            copier.watch(memory.source.ctypes.data, memory.other.ctypes.data, SIZE, ENGINE)

    everywhere(
        engine,
        r"race: bulk_load (is still reading|reads) global memory at \w+ \(test source \+0x\w+\), which .* (begins to write|is writing)",
    )


def test_a_put_whose_source_a_kernel_writes() -> None:
    def engine(memory: Memory, copier: CpuCopier, step: int) -> None:
        if step == 1:
            copier.watch(memory.other.ctypes.data, memory.middle.ctypes.data, SIZE, ENGINE)

    everywhere(
        engine,
        r"race: bulk_store (is still writing|writes) global memory at \w+ \(test middle \+0x\w+\), which .* (begins to read|is reading)",
    )


def test_bytes_that_a_put_has_brought_unasked() -> None:
    """Nobody has waited for them: the report says whose they are."""

    def engine(memory: Memory, copier: CpuCopier, step: int) -> None:
        if step == 1:
            memory.put = copier.watch(memory.source.ctypes.data + SIZE // 2, memory.other.ctypes.data, SIZE // 2, ENGINE)
            copier.start(memory.source.ctypes.data + SIZE // 2, memory.other.ctypes.data, SIZE // 2)
            memory.put.landed()
            memory.put.ended()

    found = [run(seed, engine)[0] for seed in range(12)]
    assert any(found)
    for text in filter(None, found):
        assert re.search(
            r"missing fence.proxy.async: bulk_load reads global memory at 0x\w+ \(test source \+0x\w+\), which the engine", text
        ), text
        assert named(text), text


def test_a_put_to_and_from_elsewhere_is_no_race() -> None:
    def engine(memory: Memory, copier: CpuCopier, step: int) -> None:
        if step == 0:
            memory.put = copier.watch(memory.other.ctypes.data, memory.source.ctypes.data, SIZE, ENGINE)  # both only read the source
        if step == 2:
            memory.put.landed()
            memory.put.ended()

    for seed in range(4):
        assert run(seed, engine) == ("", True)


def test_a_put_that_has_ended_is_no_race() -> None:
    def engine(memory: Memory, copier: CpuCopier, step: int) -> None:
        if step == 0:
            put = copier.watch(memory.middle.ctypes.data, memory.out.ctypes.data, SIZE, ENGINE)
            assert put is not None
            put.landed()
            put.ended()

    with ThreadRanks(1, 0) as thread_ranks:  # before the kernel begins
        memory = Memory(thread_ranks)
        engine(memory, CpuBackend(0, thread_ranks).copier(), 0)
        assert together(thread_ranks, 1, lambda rank: memory.relay(thread_ranks)) == [None]
        assert (memory.out == memory.source).all()


def test_a_store_over_bytes_that_another_kernel_reads() -> None:
    """Two ranks, without a word between them: one copies from where the other copies to."""
    for seed in range(12):
        with ThreadRanks(2, seed) as thread_ranks:
            reader, writer = Memory(thread_ranks), Memory(thread_ranks)
            writer.middle = reader.source
            errors = together(thread_ranks, 2, lambda rank, of=(reader, writer): of[rank].relay(thread_ranks, rank))
        text = "\n".join(str(error) for error in errors if error is not None)
        there = r"global memory at 0x\w+ \(test source \+0x\w+\), which"
        store = rf"rank 1, CTA 0, thread 0: race: bulk_store writes {there} bulk_load of rank 0, CTA 0, thread 0 is still reading"
        late = rf"rank 0, CTA 0, thread 0: missing fence.proxy.async: bulk_load reads {there} rank 1, CTA 0, thread 0 has written"
        assert re.search(f"{store}|{late}", text), (seed, text)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_run_with_and_without_puts_that_disturb_nobody(seed: int) -> None:
    """Watching changes no interleaving."""

    def trace(watched: bool) -> int:
        with ThreadRanks(1, seed) as thread_ranks:
            memory, begun = Memory(thread_ranks), []
            copier = CpuBackend(0, thread_ranks).copier()

            def step() -> bool:
                if watched and not begun:
                    begun.append(copier.watch(memory.other.ctypes.data, memory.source.ctypes.data, SIZE, ENGINE))
                return False

            thread_ranks.add_engine(0, step, lambda: None)
            assert together(thread_ranks, 1, lambda rank: memory.relay(thread_ranks)) == [None]
            return thread_ranks.trace

    assert trace(True) == trace(False)
