"""The heap allocator against a model that tries every byte."""

from __future__ import annotations

import random

import pytest

from mkernel.errors import Error
from mkernel.memory.allocator import ALIGNMENT, LARGE, LARGE_ALIGNMENT, Allocator, OutOfMemory


def test_offsets_and_alignment() -> None:
    heap = Allocator(1 << 20)
    assert [heap.allocate(size) for size in (1, 256, 257, 0, 8)] == [0, 256, 512, 1024, 1280]
    large = heap.allocate(LARGE)
    assert large == 2048
    assert heap.allocate(1) == 1536, "the hole before an aligned allocation stays usable"


def test_free_coalesces_on_both_sides() -> None:
    heap = Allocator(4096)
    offsets = [heap.allocate(1024) for _ in range(4)]
    assert heap.available == 0
    for index in (0, 2, 3, 1):
        heap.free(offsets[index])
    assert heap.largest == heap.available == 4096
    assert heap.allocate(4096) == 0


def test_first_fit_reuses_the_lowest_hole() -> None:
    heap = Allocator(1 << 16)
    a, b, c = (heap.allocate(1024) for _ in range(3))
    heap.free(a)
    heap.free(c)
    assert heap.allocate(512) == a
    assert heap.allocate(1024) == c
    assert b == 1024


def test_high_water_is_the_size_the_program_needs() -> None:
    heap = Allocator(1 << 20)
    for _ in range(10):
        heap.free(heap.allocate(5000))
    assert heap.high_water == 5120
    small = Allocator(heap.high_water)
    for _ in range(10):
        small.free(small.allocate(5000))


def test_out_of_memory_says_how_much_is_needed_and_that_much_suffices() -> None:
    heap = Allocator(10_240)
    a, _b, c = heap.allocate(1024), heap.allocate(1024), heap.allocate(4096)
    heap.free(a)
    heap.free(c)
    with pytest.raises(OutOfMemory, match=r"9216 bytes needed.*heap_bytes=11264") as caught:
        heap.allocate(9000)
    error = caught.value
    assert isinstance(error, Error)
    assert isinstance(error, MemoryError)
    assert (error.needed, error.available, error.largest, error.capacity, error.required) == (9216, 9216, 8192, 10240, 11264)
    assert heap.available == 9216, "a refused allocation changes nothing"
    longer = Allocator(error.required)
    a, _b, c = longer.allocate(1024), longer.allocate(1024), longer.allocate(4096)
    longer.free(a)
    longer.free(c)
    assert longer.allocate(9000) == 2048


@pytest.mark.parametrize("offset", [1, 256, 1 << 30])
def test_freeing_what_is_not_allocated(offset: int) -> None:
    heap = Allocator(1 << 16)
    heap.allocate(8)
    with pytest.raises(ValueError, match="not allocated"):
        heap.free(offset)
    heap.free(0)
    with pytest.raises(ValueError, match="freed twice"):
        heap.free(0)


def test_negative_numbers() -> None:
    with pytest.raises(ValueError, match="negative"):
        Allocator(-1)
    with pytest.raises(ValueError, match="negative"):
        Allocator(8).allocate(-1)


def test_an_empty_heap() -> None:
    heap = Allocator(0)
    with pytest.raises(OutOfMemory) as caught:
        heap.allocate(8)
    assert caught.value.required == 256
    assert heap.largest == 0


def first_fit(busy: bytearray, units: int, alignment: int) -> int | None:
    for offset in range(0, len(busy) - units + 1, alignment):
        if not any(busy[offset : offset + units]):
            return offset
    return None


@pytest.mark.parametrize("seed", range(5))
def test_against_a_model(seed: int) -> None:
    """The model keeps one byte per 256; two allocators called alike agree at every step."""
    rng = random.Random(seed)
    units = 1000
    heap, twin, busy = Allocator(units * ALIGNMENT), Allocator(units * ALIGNMENT), bytearray(units)
    live: dict[int, int] = {}
    refused = 0
    for _ in range(3000):
        if live and rng.random() < 0.49:
            offset = rng.choice(list(live))
            count = live.pop(offset)
            heap.free(offset)
            twin.free(offset)
            busy[offset // ALIGNMENT : offset // ALIGNMENT + count] = bytes(count)
        else:
            size = rng.choice((0, rng.randrange(1, 2000), rng.randrange(1, 30_000), rng.randrange(LARGE, 2 * LARGE)))
            count = max(-(-size // ALIGNMENT), 1)
            expected = first_fit(busy, count, (LARGE_ALIGNMENT if size >= LARGE else ALIGNMENT) // ALIGNMENT)
            if expected is None:
                refused += 1
                with pytest.raises(OutOfMemory):
                    heap.allocate(size)
                with pytest.raises(OutOfMemory):
                    twin.allocate(size)
                continue
            offset = heap.allocate(size)
            assert offset == twin.allocate(size) == expected * ALIGNMENT
            assert heap.size(offset) == count * ALIGNMENT
            live[offset] = count
            busy[expected : expected + count] = b"\1" * count
        assert heap.used == sum(busy) * ALIGNMENT
        assert heap.available == heap.capacity - heap.used
        assert heap.high_water >= (busy.rfind(1) + 1) * ALIGNMENT
    assert refused, "the heap was never full: the test is too easy"
    for offset in live:
        heap.free(offset)
    assert heap.largest == heap.capacity
