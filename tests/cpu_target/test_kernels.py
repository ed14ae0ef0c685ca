"""Every ptx function on target cpu does what the machine does; and what a kernel does wrong is found."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel import abi
from mkernel.errors import Error
from mkernel.jit.headers import kernels_src
from mkernel.runtime.cpu.backend import CpuBackend
from tests.cpu_target.harness import BFLOAT16, Box, Faults, GemmTile, Nans, Numbers, Primitives, Race, Relay, aligned, load, map_of

SEEDS = range(8)
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


# ---- the contract
def test_the_two_ptx_headers_have_the_same_names() -> None:
    def names(header: Path) -> set[str]:
        text = re.sub(r"//.*", "", header.read_text())
        text = text[text.index("namespace ptx {") :]
        text = re.sub(r"namespace detail \{.*?\}  namespace detail|namespace detail \{.*?\n\}\s*\n", "", text, flags=re.DOTALL)
        functions = re.findall(r"MK_DEVICE\s+[\w:<>*& ]+?[\s*&](\w+)\s*\(", text)
        return {*functions, *re.findall(r"enum class (\w+)", text), *re.findall(r"\b(k[A-Z]\w+) =", text)}

    cuda, cpu = (names(kernels_src() / folder / "ptx.cuh") for folder in ("", "cpu"))
    assert len(cuda) > 50
    assert cuda == cpu


# ---- primitives
@pytest.mark.parametrize("seed", SEEDS)
def test_primitives(seed: int) -> None:
    kernel = load("primitives", Primitives, threads=64)
    out, words, flags = aligned((2, 576), np.uint32, 0xFFFFFFFF), aligned(4, np.uint32), aligned(4, np.uint64)
    CpuBackend(seed=seed).launch(kernel, 0, 2, bytes(Primitives(out.ctypes.data, words.ctypes.data, flags.ctypes.data)))
    t = np.arange(64)
    lane, warp = t % 32, t // 32
    for cta in range(2):
        index, votes, shuffle, barriers, _, packed = (out[cta, i : i + 64] for i in range(0, 384, 64))
        assert (index == (cta << 24 | 2 << 16 | warp << 8 | lane)).all()
        assert (votes == 0b0101).all()
        assert (shuffle == (warp * 32 + 5) * 3).all()
        assert (barriers == warp * 32 + (lane + 1) % 32 + (t + 33) % 64 * 100 + (warp == 1) * (lane + 7000)).all()
        assert (packed.view(BFLOAT16).reshape(64, 2) == np.stack([1.0 + t, -0.5 * t], axis=1).astype(BFLOAT16)).all()
        assert out[cta, 384] == 0xFFFFFFFF  # no check of the kernel's own failed
        assert out[cta, 385] == 0xFC003E00
        assert out[cta, 386] == 16
        assert out[cta, 387] == 1
        swapped, numbers = out[cta, 448:512].view(np.float32), out[cta, 512:576].view(np.float32)
        assert (swapped == (t ^ 3) + 0.5).all()
        assert (numbers[:2] == 7).all(), "a number, not a NaN"
        assert numbers[2] == -np.inf
        assert (numbers[32:] == np.maximum(-t[32:], -40)).all()
        assert np.abs(numbers[3:32] - np.log2(np.arange(1, 30))).max() < 2.0**-20
    assert sorted(np.concatenate([out[0, 256:320], out[1, 256:320]])) == list(range(128))
    assert out[1, 388] == 4711
    assert out[1, 389] == 4712
    assert words[0] == 2 * t.sum()
    assert words[1] == 128
    assert words[2] in (1, 2)
    assert flags[0] == 128 << 32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers(dtype: str) -> None:
    """Every 16-bit number there is, through unpack, 16 bytes of shared memory and pack."""
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(np.float16)
    device = CpuBackend()
    kernel = load("numbers", Numbers, threads=64, kFloat16=int(dtype == "float16"))
    everything = np.random.default_rng(1).permutation(1 << 16).astype(np.uint16).reshape(-1, 128)
    floats = np.random.default_rng(2).integers(0, 1 << 32, (len(everything), 64), dtype=np.uint32)
    for i, numbers in enumerate(everything):
        packed, given, out = aligned(64, np.uint32), aligned(64, np.uint32), aligned((64, 8), np.uint32, 0xDEAD)
        packed[:], given[:] = numbers.view(np.uint32), floats[i]
        device.launch(kernel, 0, 1, bytes(Numbers(packed.ctypes.data, given.ctypes.data, out.ctypes.data)))
        values = numbers.view(kind).astype(np.float32).reshape(64, 2)
        nan = np.isnan(values)
        assert (np.isnan(out[:, :2].view(np.float32)) == nan).all()
        assert ((out[:, :2] == values.view(np.uint32)) | nan).all()
        assert ((out[:, 2].copy().view(np.uint16).reshape(64, 2) == numbers.reshape(64, 2)) | nan).all()
        assert (out[:, 3] == given).all(), "a float's bits are left alone"
        assert (out[:, 4:] == np.roll(out[:, :4], -1, axis=0)).all(), "what the neighbour has stored"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_nan_becomes_the_same_one(dtype: str) -> None:
    """As PTX has it: hence no two numbers rounded have all bits set, which is what packets build on."""
    wrong = aligned(1, np.uint32)
    kernel = load("nans", Nans, threads=64, kFloat16=int(dtype == "float16"))
    CpuBackend().launch(kernel, 0, 1, bytes(Nans(wrong.ctypes.data)))
    assert wrong[0] == 0


# ---- TMA, wgmma, stmatrix
def reference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], unit: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The product in float64, and how far a float32 accumulation rounded once may be from it."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    product = a @ b
    return product, unit * np.abs(product) + a.shape[1] * 2.0**-23 * (np.abs(a) @ np.abs(b)) + 1e-7


@pytest.mark.cases(
    block_n=(64, 128, 192, 256),
    a_columns=(0, 1),
    b_rows=(0, 1),
    dtype=("bfloat16", "float16"),
    shape=((64, 256, 64), (100, 264, 200), (8, 72, 1032)),
)
def test_gemm_tile(block_n: int, a_columns: int, b_rows: int, dtype: str, shape: tuple[int, int, int], rng: np.random.Generator) -> None:
    """Both layouts of both operands, against float64; edges that no tile divides are zero-filled and clipped."""
    m, n, k = shape
    if a_columns:
        m = -(-m // 8) * 8  # rows of 16-byte multiples
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(np.float16)
    a, b = rng.standard_normal((m, k)).astype(kind), rng.standard_normal((k, n)).astype(kind)
    device = CpuBackend(seed=int(rng.integers(2**32)))
    stored_a = aligned((k, m) if a_columns else (m, k), kind)
    stored_b = aligned((k, n) if b_rows else (n, k), kind)
    stored_a[...], stored_b[...] = (a.T if a_columns else a), (b if b_rows else b.T)
    guarded = aligned((m + 2, n), kind, np.nan)  # a row before and after, which nobody may touch
    c = guarded[1:-1]
    parameters = GemmTile()
    parameters.a = map_of(device, stored_a, (64, 64))
    parameters.b = map_of(device, stored_b, (64, 64 if b_rows else block_n))
    parameters.c = map_of(device, c, (64, 64))
    parameters.steps, parameters.tiles_m = -(-k // 64), -(-m // 64)
    constants = {"kBlockN": block_n, "kAColumns": a_columns, "kBRows": b_rows, "kFloat16": int(dtype == "float16")}
    shared = 3 * (64 + block_n) * 128 + block_n * 128 + 1024
    kernel = load("gemm_tile", GemmTile, threads=160, shared=shared, **constants)
    device.launch(kernel, 0, parameters.tiles_m * -(-n // block_n), bytes(parameters))
    product, bound = reference(a, b, UNIT[dtype])
    assert (np.abs(c.astype(np.float64) - product) <= bound).all()
    assert np.isnan(guarded[[0, -1]].astype(np.float32)).all()


def test_float_rounding() -> None:
    """Pack rounds to nearest even, as numpy does, for every kind of number (through the GEMM's epilogue: identity times numbers)."""
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**16, 4096, dtype=np.uint16)
    bits[:4] = 0x0001, 0x03FF, 0x7BFF, 0x8400
    values = bits.view(np.float16).reshape(64, 64)
    a = aligned((64, 64), np.float16)
    a[...] = np.eye(64) * 0.75
    b, c = aligned((64, 64), np.float16), aligned((64, 64), np.float16, np.nan)
    b[...] = np.where(np.isfinite(values), values, 1)
    device = CpuBackend()
    parameters = GemmTile(map_of(device, a, (64, 64)), map_of(device, b, (64, 64)), map_of(device, c, (64, 64)), 1, 1)
    kernel = load("gemm_tile", GemmTile, threads=160, shared=3 * 128 * 128 + 64 * 128 + 1024, kBlockN=64, kAColumns=0, kBRows=1, kFloat16=1)
    device.launch(kernel, 0, 1, bytes(parameters))
    expected = (b.astype(np.float32) * np.float32(0.75)).astype(np.float16)
    assert (c.view(np.uint16) == expected.view(np.uint16)).all() or (c == expected).all()


# ---- boxes of a tensor
@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("start", [(0, 0, 0), (64, 1, 2), (128, 3, 3), (0, 0, 0, 0), (64, 1, 2, 1), (128, 3, 3, 1)])
def test_a_box_in_shared_memory(start: tuple[int, ...], swizzled: bool, rng: np.random.Generator) -> None:
    """Rows of 128 bytes, row after row, plane after plane; zeros from outside the tensor. Swizzled, the chunks of a row change places."""
    rank = len(start)
    shape, box = ((4, 5, 136), (64, 4, 2)) if rank == 3 else ((2, 4, 5, 136), (64, 2, 2, 2))
    in_memory = rng.permutation(rank - 1)  # of the outer dimensions: a view of a tensor whose dimensions lie otherwise
    source = aligned((*(shape[i] for i in in_memory), shape[-1]), np.uint16).transpose(*np.argsort(in_memory), rank - 1)
    source[...] = rng.integers(1, 1 << 16, source.shape)
    out = aligned((np.prod(box[1:]), 8, 8), np.uint16)
    device = CpuBackend()
    encoded = device.tensor_map(source.ctypes.data, "float16", shape[::-1], source.strides[-2::-1], box, swizzled)
    kernel = load("box", Box, threads=32, shared=2048, kBoxBytes=out.nbytes, kRank=rank, kStores=0)
    device.launch(kernel, 0, 1, bytes(Box(abi.TensorMap.from_buffer_copy(encoded), out.ctypes.data, *start)))
    padded = np.zeros([extent + 64 for extent in shape], np.uint16)
    padded[tuple(map(slice, shape))] = source
    expected = padded[tuple(slice(first, first + extent) for first, extent in zip(start[::-1], box[::-1], strict=True))].reshape(out.shape)
    if swizzled:
        expected = np.stack([row[np.arange(8) ^ (number % 8)] for number, row in enumerate(expected)])
    assert (out == expected).all()


@pytest.mark.parametrize("start", [(0, 0, 0), (64, 3, 2), (-64, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_no_store_begins_before_its_tensor(start: tuple[int, ...]) -> None:
    """Loads may, and bring zeros. A GPU ends a kernel that stores so by an illegal instruction (an H100, 2026-11-25)."""
    source, out = aligned((4, 5, 136), np.uint16), aligned((8, 8, 8), np.uint16)
    source[...] = 7
    device = CpuBackend()
    encoded = device.tensor_map(source.ctypes.data, "float16", source.shape[::-1], source.strides[-2::-1], (64, 4, 2), False)
    kernel = load("box", Box, threads=32, shared=2048, kBoxBytes=out.nbytes, kRank=3, kStores=1)
    begins = pytest.raises(Error, match="begins before the tensor") if min(start) < 0 else contextlib.nullcontext()
    with begins:
        device.launch(kernel, 0, 1, bytes(Box(abi.TensorMap.from_buffer_copy(encoded), out.ctypes.data, *start)))
    assert (source == 7).all()


# ---- the relay: bulk copies, flags, the async proxy
def relay(fault: int, seed: int, rng: np.random.Generator) -> bool:
    """Whether the data arrived."""
    kernel = load("relay", Relay, threads=32, shared=4096, kFault=fault)
    pieces = 5
    source, middle, out = aligned(pieces * 1024, np.uint8), aligned(pieces * 1024, np.uint8), aligned(pieces * 1024, np.uint8)
    source[:] = rng.integers(0, 256, source.size)
    flag = aligned(1, np.uint64)
    parameters = Relay(source.ctypes.data, middle.ctypes.data, out.ctypes.data, flag.ctypes.data, pieces, 7)
    CpuBackend(seed=seed).launch(kernel, 0, 2, bytes(parameters))
    return bool((out == source).all())


@pytest.mark.parametrize("seed", SEEDS)
def test_relay(seed: int, rng: np.random.Generator) -> None:
    assert relay(0, seed, rng)


def test_missing_proxy_fence_after_acquire(rng: np.random.Generator) -> None:
    for seed in SEEDS:
        with pytest.raises(Error, match=r"CTA 1, thread 0: missing fence.proxy.async: bulk_load reads global memory"):
            relay(1, seed, rng)


@pytest.mark.parametrize(("fault", "least"), [(2, 20), (3, 80)], ids=["wait_group.read before a flag", "stage reused before it was read"])
def test_missing_wait_corrupts_data(fault: int, least: int, rng: np.random.Generator) -> None:
    """Copies complete late, so that a missing wait shows in the data: with 23 and 86 of these seeds."""
    wrong = 0
    for seed in range(100):
        try:
            wrong += not relay(fault, seed, rng)
        except Error as error:  # the late store was seen by the proxy check, or the load after the next piece's
            assert re.search("store_wait|race: bulk_store writes", str(error))
            wrong += 1
    assert wrong >= least


# ---- lanes that others leave behind
def overtaken(fault: int, seed: int) -> bool:
    """Whether a slot of a ring has come round again before a lane looked at it."""
    kernel = load("race", Race, threads=64, kFault=fault, kLaps=100)
    data, flag = aligned(256, np.uint32), aligned(1, np.uint64)
    try:
        CpuBackend(seed=seed).launch(kernel, 0, 1, bytes(Race(data.ctypes.data, flag.ctypes.data)))
    except Error as error:
        assert re.search("overtaken: since this thread waits|deadlock", str(error))
        return True
    return False


def test_a_lane_that_is_left_behind_is_overtaken_where_another_one_speaks_for_it() -> None:
    assert not any(overtaken(0, seed) for seed in range(20))
    assert sum(overtaken(7, seed) for seed in range(20)) >= 5


# ---- planted faults
FAULTS: dict[int, str] = {
    1: r"missing fence.proxy.async: bulk_store uses shared \+0x0 .* thread 0 has written",
    2: r"thread 0: ended with bulk stores in flight",
    3: r"thread 0: ended with bulk stores that were never committed",
    4: r"deadlock: .*\n.*threads 0-127: mbarrier at shared \+0x4000, parity 0 \(in phase 0: 1 of 2 arrivals and \d+ bytes missing\)",
    5: r"ended with wgmma in flight",
    6: r"bulk_load: mbarrier_init_fence is missing",
    7: r"mbarrier_arrive: the mbarrier at shared \+0x4000 has all its 1 arrivals and waits for bytes",
    8: r"a parity of 2",
    9: r"bulk_load: 2048 bytes at .* are outside shared memory",
    10: r"bulk_load: 2048 bytes at .*: both must be multiples of 16",
    11: r"ended, but (a TMA load into it is in flight|nobody has waited for the TMA loads of an mbarrier)",
    12: r"the warp has diverged: this lane is in (sync_warp|all_of_warp)",
    13: r"barrier 2 of (96|128) threads, others use it with (96|128)",
    14: r"wgmma before the first wgmma_fence",
    15: r"barrier_sync: 100 threads: must be a multiple of 32",
    16: r"the mbarrier at shared \+0x4000 (has been overwritten|was overwritten before a TMA load)",
    17: r"the mbarrier at shared \+0x4008 has not been initialized",
    18: r"does not say 128-byte swizzle",
    19: r"the threads of the warpgroup gave different operands",
    20: r"an atomic access of 8 bytes",
    21: r"missing fence.proxy.async: wgmma reads shared \+0x2\w+, which thread \d+ has written",
    22: r"is not a tensor map of target cpu",
    23: r"deadlock: .*\n.*0 of 1 arrivals and 16 bytes missing|deadlock: .*\n.*1 of 1 arrivals",
    28: r"the warp has diverged: some of its lanes have called warp_index\(\), a shuffle, where others have not",
    29: r"the warp has diverged: some of its lanes have called warp_index\(\)",
}


def run_fault(fault: int, seed: int, device: CpuBackend | None = None) -> np.ndarray[Any, Any]:
    kernel = load("faults", Faults, threads=128, shared=16384 + 1024, kFault=fault)
    source, out, flag = aligned(4096, np.uint8), aligned(4096, np.uint8), aligned(2, np.uint64)
    parameters = Faults(source.ctypes.data, out.ctypes.data, flag.ctypes.data)
    (device or CpuBackend(seed=seed)).launch(kernel, 0, 1, bytes(parameters))
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_no_fault(seed: int) -> None:
    words = run_fault(0, seed)[:2048].view(np.uint32).reshape(128, 4)
    # Row l of the four 8x8 matrices of a warp is made of register l // 8 of lanes 4 * (l % 8) .. + 3.
    t = np.arange(128)
    first = t // 32 * 32 + t % 8 * 4
    assert (words == first[:, None] + np.arange(4) + t[:, None] % 32 // 8).all()


@pytest.mark.parametrize("fault", FAULTS, ids=[re.sub(r"\W+", " ", text)[:40] for text in FAULTS.values()])
def test_fault_is_found(fault: int) -> None:
    device = CpuBackend(seed=1)
    for _ in range(10):
        with pytest.raises(Error, match=FAULTS[fault]):
            run_fault(fault, 0, device)
    run_fault(0, 0, device)  # the device works on after a failed kernel


CRASHES = {
    24: r"rank 0, CTA 0, thread 5 touched shared \+0x4410, of 17408 bytes",
    25: r"rank 0, CTA 0, thread 6 touched memory beyond the end of its stack \(\d+ bytes\)",
    26: r"rank 0, CTA 0, thread 7 touched memory that it may not \(address 0x8\)",
    27: r"rank 0, CTA 0, thread 8 divided an integer by zero",
}


@pytest.mark.parametrize("fault", CRASHES)
@pytest.mark.parametrize("handler", [False, True], ids=["plain", "faulthandler"])
def test_crash_is_explained(fault: int, handler: bool) -> None:
    """The process dies as it would, but says which thread it was."""
    script = f"from tests.cpu_target.test_kernels import run_fault; run_fault({fault}, 0)"
    command = [sys.executable, *(["-X", "faulthandler"] if handler else []), "-c", script]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -(signal.SIGFPE if fault == 27 else signal.SIGSEGV)
    assert re.search(CRASHES[fault], done.stderr), done.stderr
    assert ("Fatal Python error" in done.stderr) == handler


# ---- determinism
def test_same_seed_same_interleaving() -> None:
    def trace(seed: int) -> tuple[int, bytes]:
        device = CpuBackend(seed=seed)
        out, words, flags = aligned((2, 448), np.uint32), aligned(4, np.uint32), aligned(4, np.uint64)
        kernel = load("faults", Faults, threads=128, shared=16384 + 1024, kFault=0)
        source, target = aligned(4096, np.uint8), aligned(4096, np.uint8)
        for _ in range(2):
            device.launch(kernel, 0, 1, bytes(Faults(source.ctypes.data, target.ctypes.data, flags.ctypes.data)))
        del out, words
        return device.trace, target.tobytes()

    first, second, other = trace(3), trace(3), trace(4)
    assert first == second
    assert first[0] != other[0]
    assert first[1] == other[1]
