"""The heap allocator against a model that tries every byte."""

from __future__ import annotations

import random

import pytest

from mkernel.errors import Error
from mkernel.memory.allocator import ALIGNMENT, LARGE, LARGE_ALIGNMENT, Allocator, OutOfMemory


def test_offsets_and_alignment() -> None:
    heap = Allocator(1 << 20)
    end = heap.capacity
    assert [end - heap.allocate(size) for size in (1, 256, 257, 0, 8)] == [256, 512, 1024, 1280, 1536]
    large = heap.allocate(LARGE)
    assert end - large == LARGE + 2048
    assert end - heap.allocate(1) == 1792, "the hole behind an aligned allocation stays usable"


def test_free_coalesces_on_both_sides() -> None:
    heap = Allocator(4096)
    offsets = [heap.allocate(1024) for _ in range(4)]
    assert heap.available == 0
    for index in (0, 2, 3, 1):
        heap.free(offsets[index])
    assert heap.largest == heap.available == 4096
    assert heap.allocate(4096) == 0


def test_first_fit_reuses_the_highest_hole() -> None:
    heap = Allocator(1 << 16)
    a, b, c = (heap.allocate(1024) for _ in range(3))
    heap.free(a)
    heap.free(c)
    assert heap.allocate(512) == a + 512
    assert heap.allocate(1024) == c
    assert b == heap.capacity - 2048


def test_the_workspace_grows_until_it_meets_the_lowest_array() -> None:
    heap = Allocator(1 << 16)
    first, second = heap.allocate(1024), heap.allocate(2048)
    heap.reserve(5000)
    heap.reserve(100)  # never shrinks
    assert heap.workspace == 5000
    heap.reserve(second)
    with pytest.raises(OutOfMemory, match=f"{second + 1} bytes needed") as caught:
        heap.reserve(second + 1)
    assert heap.workspace == second, "a refused growth changes nothing"
    longer = Allocator(caught.value.required)
    longer.allocate(1024)
    longer.allocate(2048)
    longer.reserve(second + 1)
    assert heap.available == heap.largest == 0
    with pytest.raises(OutOfMemory):
        heap.allocate(1)
    heap.free(first)
    assert heap.allocate(1024) == first, "a hole above stays usable"


def test_out_of_memory_says_how_much_is_needed_and_that_much_suffices() -> None:
    heap = Allocator(10_240)
    heap.reserve(512)
    a, _b, c = heap.allocate(1024), heap.allocate(1024), heap.allocate(4096)
    heap.free(a)
    heap.free(c)
    with pytest.raises(OutOfMemory, match=r"9216 bytes needed.*heap_bytes=") as caught:
        heap.allocate(9000)
    error = caught.value
    assert isinstance(error, Error)
    assert isinstance(error, MemoryError)
    assert (error.needed, error.available, error.largest, error.capacity) == (9216, 8704, 7680, 10240)
    assert heap.available == 8704, "a refused allocation changes nothing"
    assert error.required < heap.capacity + 4096
    longer = Allocator(error.required)
    longer.reserve(512)
    a, _b, c = longer.allocate(1024), longer.allocate(1024), longer.allocate(4096)
    longer.free(a)
    longer.free(c)
    longer.allocate(9000)


@pytest.mark.parametrize("offset", [1, 256, 1 << 30])
def test_freeing_what_is_not_allocated(offset: int) -> None:
    heap = Allocator(1 << 16)
    live = heap.allocate(8)
    with pytest.raises(ValueError, match="not allocated"):
        heap.free(offset)
    heap.free(live)
    with pytest.raises(ValueError, match="freed twice"):
        heap.free(live)


def test_negative_numbers() -> None:
    with pytest.raises(ValueError, match="negative"):
        Allocator(-1)
    with pytest.raises(ValueError, match="negative"):
        Allocator(8).allocate(-1)


def test_an_empty_heap() -> None:
    heap = Allocator(0)
    with pytest.raises(OutOfMemory) as caught:
        heap.allocate(8)
    Allocator(caught.value.required).allocate(8)
    assert heap.largest == 0


def first_fit(busy: bytearray, units: int, alignment: int) -> int | None:
    for offset in range((len(busy) - units) // alignment * alignment, -1, -alignment):
        if not any(busy[offset : offset + units]):
            return offset
    return None


@pytest.mark.parametrize("seed", range(5))
def test_against_a_model(seed: int) -> None:
    """The model keeps one byte per 256; two allocators called alike agree at every step."""
    rng = random.Random(seed)
    units = 1000
    heap, twin, busy = Allocator(units * ALIGNMENT), Allocator(units * ALIGNMENT), bytearray(units)
    workspace = 0  # in units
    live: dict[int, int] = {}
    refused = 0
    for _ in range(3000):
        if rng.random() < 0.02:
            size = workspace * ALIGNMENT + rng.randrange(2000)
            count = -(-size // ALIGNMENT)
            if any(count > offset // ALIGNMENT for offset in live):
                for one in (heap, twin):
                    with pytest.raises(OutOfMemory):
                        one.reserve(size)
                continue
            heap.reserve(size)
            twin.reserve(size)
            workspace = max(workspace, count)
            assert heap.workspace == size or size <= heap.workspace
        elif live and rng.random() < 0.49:
            offset = rng.choice(list(live))
            count = live.pop(offset)
            heap.free(offset)
            twin.free(offset)
            busy[offset // ALIGNMENT : offset // ALIGNMENT + count] = bytes(count)
        else:
            size = rng.choice((0, rng.randrange(1, 2000), rng.randrange(1, 30_000), rng.randrange(LARGE, 2 * LARGE)))
            count = max(-(-size // ALIGNMENT), 1)
            expected = first_fit(
                bytearray(b"\1" * workspace) + busy[workspace:], count, (LARGE_ALIGNMENT if size >= LARGE else ALIGNMENT) // ALIGNMENT
            )
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
        assert heap.available == heap.capacity - heap.used - heap.workspace
    assert refused, "the heap was never full: the test is too easy"
    for offset in live:
        heap.free(offset)
    assert heap.largest == heap.capacity - heap.workspace
