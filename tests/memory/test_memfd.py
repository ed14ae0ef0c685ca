"""Symmetric segments on memfd: threads, processes, other nodes; nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mkernel.memory.memfd import GRANULARITY, MemfdSegment, import_fd
from mkernel.memory.segment import Segment


def word(address: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(address)


def maps_and_fds() -> tuple[int, int]:
    return Path("/proc/self/maps").read_text().count("memfd:mkernel"), len(list(Path("/proc/self/fd").iterdir()))


def node(size: int, ranks: int) -> list[MemfdSegment]:
    segments = [MemfdSegment(size, rank, ranks) for rank in range(ranks)]
    for segment in segments:
        segment.map_peers([peer.fd for peer in segments])
    return segments


def test_it_is_a_segment_zeroed_and_rounded_up() -> None:
    with MemfdSegment(GRANULARITY + 1, 1, 2) as segment:
        assert isinstance(segment, Segment)
        assert segment.size == segment.stride == 2 * GRANULARITY
        assert segment.address() == segment.address(1) == segment.base + segment.stride
        assert ctypes.string_at(segment.address(), segment.size) == bytes(segment.size)
        ctypes.memset(segment.address(), 255, segment.size)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_rank_sees_every_part(ranks: int) -> None:
    segments = node(3 * GRANULARITY, ranks)
    for rank, segment in enumerate(segments):
        last = segment.size - 8
        word(segment.address()).value = 100 + rank
        word(segment.address() + last).value = 200 + rank
    for segment in segments:
        for peer in range(ranks):
            assert word(segment.address(peer)).value == 100 + peer
            assert word(segment.address(peer) + segment.size - 8).value == 200 + peer
    assert len({segment.base for segment in segments}) == ranks, "every rank has its own reservation"
    for segment in segments:
        segment.close()


def test_a_part_survives_its_owner_until_the_last_mapping_goes() -> None:
    first, second = node(GRANULARITY, 2)
    word(first.address()).value = 42
    first.close()
    assert word(second.address(0)).value == 42
    second.close()


def test_nothing_is_left_behind() -> None:
    before = maps_and_fds()
    for _ in range(3):
        segments = node(1 << 20, 4)
        foreign = import_fd(segments[1].fd, segments[1].size)
        assert maps_and_fds()[0] > before[0]
        foreign.close()
        foreign.close()
        for segment in segments:
            segment.close()
            segment.close()
    assert maps_and_fds() == before
    assert not list(Path("/dev/shm").glob("*mkernel*"))


def test_context_manager_closes_on_an_exception() -> None:
    before = maps_and_fds()
    with pytest.raises(KeyError), MemfdSegment(GRANULARITY, 0, 1):
        raise KeyError
    assert maps_and_fds() == before


def test_a_large_reservation_costs_no_memory() -> None:
    with MemfdSegment(8 << 30, 0, 8) as segment:
        word(segment.address() + segment.size - 8).value = 1
        assert segment.stride == 8 << 30


def test_import_for_another_node() -> None:
    with MemfdSegment(GRANULARITY, 0, 1) as segment:
        word(segment.address()).value = 5
        with import_fd(segment.fd, segment.size) as mapping:
            assert word(mapping.address).value == 5
            word(mapping.address + 8).value = 6
            assert word(segment.address() + 8).value == 6
        assert mapping.address == 0


def test_sizes_must_agree() -> None:
    with MemfdSegment(GRANULARITY, 0, 2) as small, MemfdSegment(2 * GRANULARITY, 1, 2) as large:
        with pytest.raises(ValueError, match=r"local rank 0 has 65536 bytes, 131072 expected"):
            large.map_peers([small.fd, large.fd])
        with pytest.raises(ValueError, match="131072 expected"):
            import_fd(small.fd, large.size)


def test_a_peer_cannot_shrink_it() -> None:
    with MemfdSegment(GRANULARITY, 0, 1) as segment, pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)


@pytest.mark.parametrize(("size", "local_rank", "ranks"), [(-1, 0, 1), (8, 1, 1), (8, -1, 1), (8, 0, 0)])
def test_bad_arguments(size: int, local_rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="segment of"):
        MemfdSegment(size, local_rank, ranks)


def test_wrong_number_of_peers_and_use_after_close() -> None:
    segment = MemfdSegment(GRANULARITY, 0, 2)
    with pytest.raises(ValueError, match="1 descriptors for 2"):
        segment.map_peers([segment.fd])
    segment.close()
    with pytest.raises(ValueError, match="closed"):
        segment.map_peers([0, 0])


def test_a_failed_construction_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = maps_and_fds()
    with pytest.raises(OSError, match="mmap"):
        MemfdSegment(1 << 40, 0, 1 << 20)  # 2^60 bytes of address space
    assert maps_and_fds() == before


def test_forgetting_to_close_warns() -> None:
    segment = MemfdSegment(GRANULARITY, 0, 1)
    base, fd = segment.base, segment.fd
    with pytest.warns(ResourceWarning, match="not closed"):
        del segment
        gc.collect()
    word(base).value = 1  # only a warning: arrays may still point there
    os.close(fd)
    ctypes.CDLL(None).munmap(ctypes.c_void_p(base), ctypes.c_size_t(GRANULARITY))


def test_threads_of_one_process() -> None:
    """As under ``mk.launch``: one thread per rank, descriptors by shared list."""
    ranks, rounds = 4, 50
    fds, barrier, failures = [0] * ranks, threading.Barrier(ranks), []

    def run(rank: int) -> None:
        try:
            with MemfdSegment(GRANULARITY, rank, ranks) as segment:
                fds[rank] = segment.fd
                barrier.wait()
                segment.map_peers(fds)
                barrier.wait()
                for number in range(1, rounds + 1):
                    word(segment.address((rank + 1) % ranks)).value = number * 10 + rank
                    barrier.wait()
                    assert word(segment.address()).value == number * 10 + (rank - 1) % ranks
                    barrier.wait()
        except BaseException as failure:
            failures.append(failure)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def _child(channel: socket.socket) -> None:
    with MemfdSegment(2 * GRANULARITY, 1, 2) as segment:
        _, (peer, *_), _, _ = socket.recv_fds(channel, 16, 1)
        socket.send_fds(channel, [b"fd"], [segment.fd])
        segment.map_peers([peer, -1])
        os.close(peer)
        channel.recv(1)  # rank 0 has written both parts
        assert word(segment.address(0)).value == 11
        assert word(segment.address(1)).value == 22
        word(segment.address(0) + GRANULARITY).value = 33
        word(segment.address(1) + GRANULARITY).value = 44
        channel.send(b".")
        channel.recv(1)


def test_processes_by_descriptor_passing() -> None:
    here, there = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=_child, args=(there,))
    process.start()
    with here, there, MemfdSegment(2 * GRANULARITY, 0, 2) as segment:
        here.settimeout(60)
        socket.send_fds(here, [b"fd"], [segment.fd])
        _, (peer, *_), _, _ = socket.recv_fds(here, 16, 1)
        segment.map_peers([-1, peer])
        os.close(peer)
        word(segment.address(0)).value = 11
        word(segment.address(1)).value = 22
        here.send(b".")
        assert here.recv(1) == b"."
        assert word(segment.address(0) + GRANULARITY).value == 33
        assert word(segment.address(1) + GRANULARITY).value == 44
        here.send(b".")
        process.join(60)
    assert process.exitcode == 0


def test_descriptors_do_not_leak_into_children() -> None:
    with MemfdSegment(GRANULARITY, 0, 1) as segment:
        code = f"import os\ntry: os.fstat({segment.fd})\nexcept OSError: raise SystemExit(0)\nraise SystemExit(1)"
        assert subprocess.run([sys.executable, "-c", code], close_fds=False, check=False).returncode == 0
