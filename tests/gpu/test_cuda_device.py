"""runtime/cuda and memory/vmm.py on real GPUs: segments, arrays, launches, graphs, tensor maps, and copies beside spinning kernels."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.jit.spec import KernelSpec
from mkernel.memory.driver import DriverError, driver
from mkernel.runtime.cuda import backend as cuda
from mkernel.runtime.cuda.backend import CudaBackend
from mkernel.runtime.cuda.gpus import available
from tests.gpu.calls import SECONDS, THREADS, Calls

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_of_this_folder")]

ROOT = Path(__file__).parents[2]


class BoxParameters(ctypes.Structure):
    _fields_ = [
        ("world", abi.World),
        ("from_", ctypes.c_int32 * 4),
        ("to", ctypes.c_int32 * 4),
        ("padding", ctypes.c_char * 32),
        ("source", ctypes.c_ubyte * 128),  # not c_char: ctypes would copy up to the first zero byte only
        ("target", ctypes.c_ubyte * 128),
    ]


def need_gpus(count: int) -> None:
    if len(available()) < count:
        pytest.skip(f"needs {count} GPUs")


# ---- the machine
@pytest.mark.parametrize("float16", [0, 1])
def test_every_nan_becomes_the_same_one(device: CudaBackend, monkeypatch: pytest.MonkeyPatch, float16: int) -> None:
    """The kernel of target cpu's test of the same name."""
    folder = ROOT / "tests" / "cpu_target" / "kernels"
    monkeypatch.setattr(cuda.compiler, "compile", functools.partial(cuda.compiler.compile, include=[folder]))
    kernel, wrong = device.load(KernelSpec("nans", (("kFloat16", float16),), THREADS, 0, 8)), device.allocate(4)
    device.launch(kernel, device.order(device.stream(None)), 1, wrong.to_bytes(8, "little"))
    assert device.read(wrong, 4) == bytes(4)


def test_available() -> None:
    gpus = available()
    assert [gpu.ordinal for gpu in gpus] == list(range(len(gpus)))
    assert len({gpu.uuid for gpu in gpus}) == len(gpus)
    assert all(gpu.ordinal not in gpu.peers and gpu.memory_bytes > 1 << 30 for gpu in gpus)


def test_close_gives_everything_back(device: CudaBackend) -> None:
    import cupy

    device.allocate(1 << 20)
    before = cupy.cuda.runtime.memGetInfo()[0]
    with_more = CudaBackend(0)
    with_more.allocate(256 << 20)
    with_more.allocate_host(1 << 20)
    with with_more.segment(512 << 20, 0, 1) as segment:
        with_more.import_segment(segment.fd, segment.size)
        assert cupy.cuda.runtime.memGetInfo()[0] <= before - (768 << 20)
    with_more.close()
    with_more.close()
    assert cupy.cuda.runtime.memGetInfo()[0] >= before - (32 << 20)


# ---- memory
def test_segment_is_zeroed_and_shared_by_descriptor(device: CudaBackend) -> None:
    with device.segment(5 << 20, 0, 1) as segment:
        assert segment.size >= 5 << 20
        assert device.read(segment.address(), segment.size) == bytes(segment.size)
        alias = device.import_segment(segment.fd, segment.size)
        device.wrap(segment.address() + 100, (3,), "uint8", segment)[...] = 7
        assert device.read(alias + 99, 5) == b"\0\7\7\7\0"


def test_peers_of_one_process() -> None:
    need_gpus(2)
    devices = [CudaBackend(ordinal) for ordinal in range(2)]
    segments = [device.segment(4 << 20, rank, 2) for rank, device in enumerate(devices)]
    for segment in segments:
        segment.map_peers([other.fd for other in segments])
    for rank, (device, segment) in enumerate(zip(devices, segments, strict=True)):
        with device.xp.cuda.Device(rank):
            device.wrap(segment.address(1 - rank) + 64 * rank, (64,), "uint8", segment)[...] = rank + 1
            device.xp.cuda.Device(rank).synchronize()
    for rank, (device, segment) in enumerate(zip(devices, segments, strict=True)):
        other = 1 - rank
        assert device.read(segment.address() + 64 * other, 64) == bytes([other + 1]) * 64
    for device, segment in zip(devices, segments, strict=True):
        segment.close()
        device.close()


CHILD = """
import sys
from mkernel.runtime.cuda.backend import CudaBackend
fd, size, ordinal = map(int, sys.argv[1:])
device = CudaBackend(ordinal)
with device.segment(size, 1, 2) as segment:
    segment.map_peers([fd, -1])
    assert device.read(segment.address(0), 4) == b"abcd"
    device.wrap(segment.address(0) + 4, (4,), "uint8", segment)[...] = 9
    device.xp.cuda.Device(ordinal).synchronize()
device.close()
"""


@pytest.mark.parametrize("ordinal", [0, 1])
def test_peers_of_two_processes(device: CudaBackend, ordinal: int) -> None:
    need_gpus(ordinal + 1)
    with device.segment(2 << 20, 0, 1) as segment:
        device.wrap(segment.address(), (4,), "uint8", segment)[...] = device.xp.asarray(np.frombuffer(b"abcd", np.uint8))
        device.xp.cuda.Device(0).synchronize()
        command = [sys.executable, "-c", CHILD, str(segment.fd), str(segment.size), str(ordinal)]
        subprocess.run(command, cwd=ROOT, pass_fds=[segment.fd], check=True, timeout=120)
        assert device.read(segment.address(), 9) == b"abcd" + b"\x09" * 4 + b"\0"


# ---- arrays
def test_views(device: CudaBackend) -> None:
    import ml_dtypes

    xp = device.xp
    for dtype, name in ((ml_dtypes.bfloat16, "bfloat16"), (np.float16, "float16"), (np.int64, "int64"), (np.float32, "float32")):
        array = xp.empty((6, 8), dtype=dtype)
        view = device.view(array[::2, 1:].T)
        item = array.dtype.itemsize
        assert (view.address, view.shape, view.strides, view.dtype) == (array.data.ptr + item, (7, 3), (item, 16 * item), name)
    assert device.view(device.empty((0, 8), "bfloat16")).shape == (0, 8)
    owner = object()
    with device.segment(1 << 20, 0, 1) as segment:
        wrapped = device.wrap(segment.address(), (2, 4), "bfloat16", owner)
        assert device.view(wrapped) == cuda.TensorView(segment.address(), (2, 4), (8, 2), "bfloat16")
        assert device.view(Foreign(wrapped)) == device.view(wrapped)  # by DLPack
        halves = device.wrap(segment.address(), (2, 4), "float16", owner)
        assert device.view(Interface(halves.__cuda_array_interface__)) == device.view(halves)


class Foreign:
    """Another library's array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class Interface:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


def test_arrays_of_the_host_are_refused(device: CudaBackend) -> None:
    for array in (np.ones(4), [1, 2], 3.0, None):
        with pytest.raises(ArgumentError, match=r"cupy\.asarray"):
            device.view(array)


@pytest.mark.parametrize("form", ["CuPy", "DLPack", "array interface"])
def test_arrays_of_another_gpu_are_refused(device: CudaBackend, form: str) -> None:
    need_gpus(2)
    with device.xp.cuda.Device(1):
        there = device.xp.ones(4, dtype=np.float16)
    array = {"CuPy": there, "DLPack": Foreign(there), "array interface": Interface(there.__cuda_array_interface__)}[form]
    with pytest.raises(ArgumentError, match="is on GPU 1, this rank works on GPU 0"):
        device.view(array)


def test_equal_keys_mean_equal_views(device: CudaBackend) -> None:
    """CuPy's arrays and torch's tensors have keys; whatever a view tells apart, a key does."""
    xp = device.xp
    memory = xp.zeros(64, dtype=np.uint16)
    half = memory.view(np.float16)
    arrays = [half[:32], half[8:40], half[:16], half[:32].reshape(4, 8), half[:32].reshape(8, 4), half[:32].reshape(4, 8).T, half[:32:2]]
    arrays += [memory.view(np.int32)[:32], memory[:32].view(device._cupy._dtypes["bfloat16"])]
    assert len({device.key(array) for array in arrays}) == len({device.view(array) for array in arrays}) == len(arrays)
    assert device.key(half[:32]) == device.key(arrays[0])
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(64, dtype=torch.float16, device="cuda:0")
    tensors = [tensor[:32], tensor[8:40], tensor[:32].reshape(4, 8), tensor[:32].reshape(4, 8).T, tensor[:32].view(torch.bfloat16)]
    views = [device.view(tensor) for tensor in tensors]
    assert [view.shape for view in views] == [tuple(tensor.shape) for tensor in tensors]
    assert len({device.key(tensor) for tensor in tensors}) == len(set(views)) == len(tensors)
    assert device.key(tensor[:32]) == device.key(tensors[0])
    assert type(device.key(tensor)) is tuple, "the cheap way"
    assert device.key(tensor.clone().requires_grad_()) not in {device.key(tensor)}
    for bad in (torch.zeros(4), torch.zeros(4, device="cuda:0", requires_grad=True)):
        with pytest.raises(ArgumentError):
            device.view(bad)


# ---- launches
def test_a_launch_needs_no_current_context_and_leaves_none(device: CudaBackend) -> None:
    calls = Calls(device, wait=0)
    with contextlib.closing(device.copier()) as copier:
        calls.write(copier)
    problems: list[object] = []

    def launch() -> None:
        try:
            before = driver().cuCtxGetCurrent()
            calls.launch(device.stream(device.xp.cuda.Stream.null))
            problems.extend([] if int(before[1]) == int(driver().cuCtxGetCurrent()[1]) == 0 else ["a context was left behind"])
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert problems == []
    calls.check()
    calls.launch(device.stream(None))  # and from here, where it is current
    calls.check()
    calls.close()


def test_launch_and_streams(device: CudaBackend) -> None:
    xp = device.xp
    calls = Calls(device, wait=0)
    with contextlib.closing(device.copier()) as copier:
        calls.write(copier)
    own = xp.cuda.Stream(non_blocking=True)
    for stream in (None, own, own.ptr, xp.cuda.Stream.null):
        calls.launch(device.stream(stream))
        calls.check()
    with own:
        assert device.stream(None) == own.ptr
    assert device.stream(None) == device.stream(0) == device.stream(xp.cuda.Stream.null)
    with pytest.raises(ArgumentError, match="stream"):
        device.stream("default")
    calls.close()


def test_a_grid_that_cannot_be_resident_is_refused(device: CudaBackend) -> None:
    calls = Calls(device, wait=0)
    calls.out = device.allocate(4 * THREADS * (calls.kernel.max_ctas() + 1))
    parameters = calls.parameters()
    device.launch(calls.kernel, device.order(device.stream(None)), calls.kernel.max_ctas(), parameters)
    with pytest.raises(DriverError, match="COOPERATIVE_LAUNCH_TOO_LARGE"):
        device.launch(calls.kernel, device.order(device.stream(None)), calls.kernel.max_ctas() + 1, parameters)
    with pytest.raises(ArgumentError, match="takes 192"):
        device.launch(calls.kernel, device.order(device.stream(None)), 1, parameters[:-1])
    calls.close()


def test_launching_is_cheap(device: CudaBackend) -> None:
    calls = Calls(device, wait=0)
    stream = device.stream(None)
    parameters = calls.parameters()
    costs = []
    for _ in range(50):
        device.synchronize()
        begin = time.perf_counter()
        for _ in range(20):
            device.launch(calls.kernel, device.order(stream), calls.ctas, parameters)
        costs.append((time.perf_counter() - begin) / 20)
    print(f"launch: {1e6 * np.median(costs):.1f} us")
    assert np.median(costs) < 30e-6
    calls.close()


def test_milliseconds(device: CudaBackend) -> None:
    """Only the timed calls count, and all of them; the stream is idle afterwards."""
    xp = device.xp
    program = 'extern "C" __global__ void spin(long long ns) { long long t, b; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(b)); '
    program += 'do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); while (t - b < ns); }'
    spin, stream = xp.RawKernel(program, "spin"), xp.cuda.Stream(non_blocking=True)

    def call() -> None:
        with stream:
            spin((1,), (1,), (xp.int64(2_000_000),))

    call()
    assert 3 * 2.0 < device.milliseconds(device.stream(stream), [call] * 5, 2) < 3 * 2.0 + 1.9
    assert stream.done


def test_graphs(device: CudaBackend) -> None:
    xp = device.xp
    calls = Calls(device, wait=0)
    stream = xp.cuda.Stream(non_blocking=True)
    assert not device.capturing(stream.ptr)
    with stream:
        stream.begin_capture()
        assert device.capturing(device.stream(None))
        assert not device.capturing(device.stream(xp.cuda.Stream.null))
        calls.launch(stream.ptr)
        graph = stream.end_capture()
    with contextlib.closing(device.copier()) as copier:
        calls.write(copier)
    graph.launch(stream)
    device.synchronize()
    calls.check()
    calls.close()


# ---- beside a kernel that spins
def test_copies_and_signals_run_beside_a_spinning_kernel(device: CudaBackend) -> None:
    calls = Calls(device, wait=1)
    with contextlib.closing(device.copier()) as copier:
        for value in range(1, 21):
            calls.launch(device.stream(None), value)
            time.sleep(0.002)
            calls.write(copier, factor=value)
            copier.signal(calls.flag, value)
            calls.check()
    calls.close()


@pytest.mark.parametrize("how", ["free", "load", "get"])
def test_copies_go_on_while_the_program_waits_for_the_kernel(device: CudaBackend, how: str) -> None:
    """The driver waits for kernels with the context locked in some calls: the copier must not need that lock."""
    calls = Calls(device, wait=1)
    xp, began = device.xp, threading.Event()
    array, address = xp.zeros(1 << 20, xp.uint8), xp.cuda.runtime.malloc(1 << 26)
    kernel = xp.RawKernel(f'extern "C" __global__ void beside_{how}(char* x) {{ *x = 1; }}', f"beside_{how}")

    def program() -> None:
        with xp.cuda.Device(device.ordinal):
            began.set()
            if how == "load":
                kernel((1,), (1,), (array,))
            elif how == "get":
                array.get()
            xp.cuda.runtime.free(address)

    with contextlib.closing(device.copier()) as copier:
        calls.launch(device.stream(xp.cuda.Stream.null))
        thread = threading.Thread(target=program)
        thread.start()
        began.wait()
        time.sleep(0.3)
        begin = time.monotonic()
        calls.write(copier)
        copier.signal(calls.flag, 1)
        thread.join(SECONDS)
        assert time.monotonic() - begin < SECONDS / 2, "the copier waited for the kernel, which gave up"
    calls.check()
    calls.close()


def test_an_engine_works_while_a_graph_is_captured(device: CudaBackend) -> None:
    """Even in the strictest mode, where the driver refuses most calls of all threads."""
    xp = device.xp
    calls = Calls(device, wait=0)
    stream = xp.cuda.Stream(non_blocking=True)
    problems: list[BaseException] = []

    def engine(copier: Any) -> None:
        try:
            calls.write(copier)
            copier.signal(calls.flag, 1)
        except BaseException as error:
            problems.append(error)

    with contextlib.closing(device.copier()) as copier:
        with stream:
            stream.begin_capture(xp.cuda.runtime.streamCaptureModeGlobal)
            calls.launch(stream.ptr)
            thread = threading.Thread(target=engine, args=(copier,))
            thread.start()
            thread.join()
            graph = stream.end_capture()
        assert problems == []
        graph.launch(stream)
        device.synchronize()
        calls.check()
    calls.close()


def test_many_signals_in_order(device: CudaBackend) -> None:
    with device.segment(1 << 20, 0, 1) as segment, contextlib.closing(device.copier()) as copier:
        for value in range(1, 5001):
            copier.signal(segment.address() + 8 * (value % 3), value)
        copier.close()
        assert np.frombuffer(device.read(segment.address(), 24), np.uint64).tolist() == [4998, 4999, 5000]


def test_a_full_launch_queue_does_not_stop_the_copier(device: CudaBackend) -> None:
    """A thread launches far more than the queue holds behind a kernel that waits; the signal still comes through."""
    calls = Calls(device, wait=1)
    owner = device.xp.cuda.Stream(non_blocking=True)  # CuPy destroys a stream that nobody holds
    stream = device.stream(owner)
    calls.launch(stream)

    def flood() -> None:
        for _ in range(3000):
            calls.launch(stream)

    thread = threading.Thread(target=flood, daemon=True)
    with contextlib.closing(device.copier()) as copier:
        thread.start()
        time.sleep(0.5)
        assert thread.is_alive()
        begin = time.monotonic()
        calls.write(copier)
        copier.signal(calls.flag, 1)
        thread.join(10 * SECONDS)
        assert time.monotonic() - begin < SECONDS / 2
    calls.check()
    calls.close()


# ---- tensor maps
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("start", [(0, 0, 0), (64, 8, 1), (128, 24, 2), (64, 28, 1)])
@pytest.mark.parametrize("swizzled", [True, False])
def test_tensor_maps(device: CudaBackend, dtype: str, start: tuple[int, int, int], swizzled: bool) -> None:
    """A box from a strided tensor to another, whose ends it crosses: zeros come in, nothing goes out."""
    rows, columns, box = 30, 136, (64, 8, 1)
    source = np.arange(3 * rows * 160, dtype=np.uint16).reshape(3, rows, 160)
    a = device.xp.asarray(source)
    c = device.xp.full((3, rows, columns), 0xFFFF, dtype=np.uint16)
    shape = (columns, rows, 3)
    parameters = BoxParameters(
        abi.World(),
        (*start, 0),
        (*start, 0),
        b"",
        tuple(device.tensor_map(a.data.ptr, dtype, shape, (a.strides[1], a.strides[0]), box, swizzled)),
        tuple(device.tensor_map(c.data.ptr, dtype, shape, (c.strides[1], c.strides[0]), box, swizzled)),
    )
    spec = KernelSpec("copy_box", (("kBoxBytes", 64 * 8 * 2),), 32, 2048, ctypes.sizeof(BoxParameters))
    device.launch(device.load(spec), device.order(device.stream(None)), 1, bytes(parameters))
    device.synchronize()
    expected = np.full((3, rows, columns), 0xFFFF, dtype=np.uint16)
    x, y, z = start
    expected[z, y : y + 8, x : x + 64] = source[z, y : y + 8, x : min(x + 64, columns)]
    assert (c.get() == expected).all()


@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rank", [3, 4])
def test_tensor_maps_are_those_of_the_bindings(device: CudaBackend, rank: int, dtype: str, swizzled: bool) -> None:
    """Byte for byte, whatever the sizes."""
    bindings, draw, address = driver(), random.Random(7), device.allocate(1 << 16)
    kinds, modes = bindings.CUtensorMapDataType, bindings.CUtensorMapSwizzle
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if dtype == "bfloat16" else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    for _ in range(50):
        shape = (draw.randint(1, 1 << 16), draw.randint(2, 1 << 20), draw.randint(2, 64))
        step = -(-shape[0] * 2 // 16) * 16 + 16 * draw.randint(0, 4)
        strides, box = (step, step * shape[1]), (64, draw.randint(1, 256), 1)
        if rank == 4:  # the outermost dimension lies inside the others
            shape, strides, box = (*shape, draw.randint(2, 8)), (8 * step, 8 * strides[1], step), (*box, 1)
        status, expected = bindings.cuTensorMapEncodeTiled(
            kind,
            rank,
            address,
            [bindings.cuuint64_t(extent) for extent in shape],
            [bindings.cuuint64_t(stride) for stride in strides],
            [bindings.cuuint32_t(extent) for extent in box],
            [bindings.cuuint32_t(1)] * rank,
            bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            modes.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else modes.CU_TENSOR_MAP_SWIZZLE_NONE,
            bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        assert int(status) == 0, (shape, strides, box)
        assert device.tensor_map(address, dtype, shape, strides, box, swizzled) == ctypes.string_at(expected.getPtr(), 128)


def test_what_no_tensor_map_describes(device: CudaBackend) -> None:
    box, address = (64, 8, 1), device.allocate(1 << 16)
    for changes in ({"address": address + 8}, {"strides": (24, 4096)}, {"dtype": "float32"}, {"box": (32, 8, 1)}):
        arguments = {"address": address, "dtype": "float16", "shape": (64, 8, 2), "strides": (128, 1024), "box": box} | changes
        with pytest.raises(ArgumentError):
            device.tensor_map(**arguments)
    assert len(device.tensor_map(0, "float16", (64, 0, 2), (128, 0), box)) == 128
