"""What the network needs of a GPU: memory that others map or reach by dma-buf, its place on the PCI bus, engines as processes."""

from __future__ import annotations

import functools
import mmap
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import abi, env
from mkernel.errors import Error
from mkernel.runtime.cuda import backend as cuda
from mkernel.runtime.cuda.backend import CudaBackend
from mkernel.runtime.cuda.gpus import available
from tests.gpu import fabric
from tests.gpu.calls import THREADS, WaitParameters, wait_spec
from tests.gpu.exact import OPS, fused

pytestmark = pytest.mark.gpu

SIZE = 1 << 16
SECONDS = 5.0
CHILD_SECONDS = 30.0  # until a child has started and done its work


def copy(copier: Any, target: int, source: int, size: int) -> None:
    token = copier.start(target, source, size)
    deadline = time.monotonic() + SECONDS
    while not copier.done(token):
        assert time.monotonic() < deadline


def test_shared_host_memory(device: CudaBackend) -> None:
    """What the GPU writes another mapping of the descriptor sees, and the other way round."""
    memory = device.allocate_host(SIZE, shared=True)
    assert memory.fd >= 0
    assert bytes(memory.view) == bytes(SIZE)
    segment = device.segment(1 << 20, 0, 1)
    with mmap.mmap(memory.fd, SIZE) as other:
        copier = device.copier()
        data = np.random.default_rng(1).bytes(SIZE)
        other[:] = data
        copy(copier, segment.address(), memory.address, SIZE)
        assert device.read(segment.address(), SIZE) == data
        other[:] = bytes(SIZE)
        copy(copier, memory.address, segment.address(), SIZE)
        assert other[:] == data
        copier.close()
    segment.close()


def test_shared_memory_goes_with_the_device() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    device = CudaBackend(0)
    memory = device.allocate_host(SIZE, shared=True)
    memory.view.release()
    device.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memory.fd)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 8  # the driver keeps some of its own


def test_memory_by_dmabuf(device: CudaBackend) -> None:
    """A descriptor, once; or an error that says what this GPU or its driver lacks."""
    segment = device.segment(1 << 20, 0, 1)
    try:
        fd = segment.dmabuf()
    except Error as error:
        assert "RDMA" in str(error)
        pytest.skip(str(error))
    assert "dmabuf" in os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    assert segment.dmabuf() == fd
    segment.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_place_on_the_bus(device: CudaBackend) -> None:
    assert re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", device.pci_address)


def test_engines_are_processes() -> None:
    if len(available()) < 2:
        pytest.skip("needs 2 GPUs")

    def use(world: Any) -> tuple[bool, int]:
        world.barrier()
        return world._ring.fd >= 0, world.num_nodes

    assert mk.launch(use, ranks=2, ranks_per_node=1, transport="null", target="cuda", heap_bytes=1 << 24) == [(True, 2)] * 2


# ---- flags in host memory
RAISE = """
import ctypes, mmap, os, sys
from mkernel.proxy.process import release_store
fd, size, offset, value = map(int, sys.argv[1:])
memory = mmap.mmap(fd, size)
release_store()(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + offset, value)
os._exit(0)
"""


def test_a_flag_that_another_process_raises(device: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel spins on this rank's part of a segment in host memory, then writes to the peer's part, which the host sees."""
    kernels = Path(__file__).parent / "kernels"
    monkeypatch.setattr(cuda.compiler, "compile", functools.partial(cuda.compiler.compile, include=[kernels]))
    try:
        segments = [device.segment(SIZE, rank, 2, host=True) for rank in range(2)]
    except Error as error:
        pytest.skip(str(error))  # it says which attribute of the GPU is wrong
    for segment in segments:
        segment.map_peers([other.fd for other in segments])
    own, peer = segments[0].address(0), segments[0].address(1)
    kernel = device.load(wait_spec(1))
    data = device.allocate(4 * THREADS)
    device.wrap(data, (4 * THREADS,), "uint8", None)[...] = 1
    device.xp.cuda.get_current_stream().synchronize()
    parameters = WaitParameters(abi.World(timeout_ns=int(CHILD_SECONDS * 1e9)), own + 64, 7, data, peer + 4096)
    device.launch(kernel, device.order(device.stream(None)), 2, bytes(parameters))
    command = [sys.executable, "-c", RAISE, str(segments[0].fd), str(SIZE), "64", "7"]
    subprocess.run(command, cwd=Path(__file__).parents[2], pass_fds=[segments[0].fd], check=True, timeout=CHILD_SECONDS)
    device.synchronize()
    with mmap.mmap(segments[1].fd, SIZE) as memory:
        written = np.frombuffer(memory[4096 : 4096 + 8 * THREADS], np.uint32).reshape(2, THREADS)
    assert (written == np.uint32(0x01010101) + np.uint32([[0], [1]])).all(), "the kernel gave up, or wrote elsewhere"
    for segment in segments:
        segment.close()
        segment.close()


@pytest.mark.parametrize("op", ["allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"])
def test_calls_whose_flags_lie_in_host_memory(op: str) -> None:
    """The same bits as with flags in GPU memory."""
    if len(available()) < 2:
        pytest.skip("needs 2 GPUs")

    def use(world: Any) -> tuple[bool, list[bytes]]:
        random = np.random.default_rng(world.rank)
        a, b = (world.xp.asarray(random.standard_normal((256, 256), np.float32).astype(np.float16)) for _ in range(2))
        results = [getattr(mk, op)(a, b, world=world) for _ in range(20)]
        return world._signals.mappable, [result.get().tobytes() for result in results]

    found = []
    for host in (0, 1):
        with env.override(MKERNEL_EMULATED_HOST_SIGNALS=host):
            found.append(mk.launch(use, ranks=2, ranks_per_node=1, target="cuda", heap_bytes=1 << 26))
    assert [[mappable for mappable, _ in ranks] for ranks in found] == [[False] * 2, [True] * 2]
    assert [results for _, results in found[0]] == [results for _, results in found[1]]


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_results_are_read_at_once(ranks_per_node: int) -> None:
    """On the legacy stream: each rank copies a result to the host while its peer has yet to call."""
    if len(available()) < 2:
        pytest.skip("needs 2 GPUs")

    def use(world: Any) -> float:
        inputs = [np.random.default_rng((0, rank)).standard_normal((256, 256)).astype(np.float16) for rank in range(2)]
        a, b = world.xp.asarray(inputs[world.rank]), world.xp.asarray(inputs[0])
        expected = np.concatenate(inputs).astype(np.float64) @ inputs[0].astype(np.float64)
        world.barrier()
        worst = 0.0
        for call in range(10):
            time.sleep(0.02 * ((call + world.rank) % 2))
            c = mk.allgather_gemm(a, b, world=world).get().astype(np.float64)
            worst = max(worst, float(np.abs(c - expected).max() / np.abs(expected).max()))
        return worst

    worst = mk.launch(use, ranks=2, ranks_per_node=ranks_per_node, target="cuda", heap_bytes=1 << 26, timeout=5.0, entry_timeout=5.0)
    assert max(worst) < 2**-11, "rounded once"


def test_the_fabric_of_sms_keeps_what_was_asked() -> None:
    assert fabric.main(["--sizes", "4096", "65536", "1048576"]) == 0


@pytest.mark.parametrize("reorder", [0, 20])
def test_calls_over_the_fabric_of_sms(monkeypatch: pytest.MonkeyPatch, reorder: int) -> None:
    """Two nodes of one rank, which may share a GPU: a fabric runs in the time slices of its rank."""
    monkeypatch.setenv("MKERNEL_EMULATED_ENGINE", "sms")
    monkeypatch.setenv("MKERNEL_EMULATED_REORDER_US", str(reorder))
    monkeypatch.setenv("MKERNEL_SHARE_GPUS", "1")

    def use(world: Any) -> bool:
        right = True
        for op in OPS:
            for rows in (8, 1024):
                c, expected, _ = fused(world, op, rows, 512, 256)
                right &= bool((c == expected).all())
        return right

    assert mk.launch(use, ranks=2, ranks_per_node=1, target="cuda", heap_bytes=1 << 28, timeout=20.0, entry_timeout=60.0) == [True, True]
