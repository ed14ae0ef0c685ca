"""The probes of ``mkernel doctor``: one generator of findings per subject."""

from __future__ import annotations

import contextlib
import ctypes.util
import dataclasses
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

from mkernel import env, transport
from mkernel.errors import ArgumentError, Error
from mkernel.tools.launcher import find_mpirun, mpi_flavour
from mkernel.transport import devices

__all__ = ["PROBES", "Finding"]

State = Literal["ok", "note", "missing", "broken"]

_CAPABILITY = (9, 0)
_EXTRA = "pip install 'mkernel[cuda13]' (driver of CUDA 13) or 'mkernel[cuda12]'"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line. ``needed_by`` names the targets that cannot run while the state is missing or broken."""

    state: State
    subject: str
    detail: str
    remedy: str = ""
    needed_by: tuple[str, ...] = ()


# ---- Python
def _python() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")
    for package in ("numpy", "ml_dtypes"):
        yield _package(package, package, f"pip install {package}", ("cuda", "cpu"))


def _package(module: str, distribution: str, remedy: str, needed_by: tuple[str, ...]) -> Finding:
    if _absent(module):
        return Finding("missing", distribution, "not installed", remedy, needed_by)
    try:
        return Finding("ok", distribution, metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return Finding("ok", distribution, "installed")


def _absent(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


# ---- target cpu
def _compiler() -> Iterator[Finding]:
    from mkernel.jit import cpu

    remedy = "apt-get install -y g++, or set MKERNEL_CXX to a C++20 compiler"
    try:
        compiler = cpu.find_compiler()
    except Error as error:
        yield Finding("missing", "C++ compiler", str(error).splitlines()[0], remedy, ("cpu",))
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <atomic>\n#include <concepts>\nbool f(std::integral auto a, std::atomic<int>& b) { return a == b; }\n")
        result = _run([*compiler, "-std=c++20", "-shared", "-fPIC", str(source), "-o", f"{source}.so"])
    if result.returncode:
        lines = result.stderr.splitlines() or ["no message"]
        yield Finding("broken", "C++ compiler", f"{' '.join(compiler)}: {lines[0]}", remedy, ("cpu",))
    else:
        version = _run([*compiler, "--version"]).stdout.splitlines() or ["version unknown"]
        yield Finding("ok", "C++ compiler", f"{' '.join(compiler)} ({version[0]})")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# ---- target cuda
def _gpus() -> Iterator[Finding]:
    from mkernel.runtime.opening.target import gpus_here

    gpus, problem, _ = gpus_here()
    if problem:
        yield Finding("broken", "GPUs", problem, f"`nvidia-smi` must list them; {_EXTRA}", ("cuda",))
    elif not gpus:
        yield Finding("missing", "GPUs", "none", "target cuda needs NVIDIA sm_90 GPUs (H100, H200) and their driver", ("cuda",))
    if not gpus:
        return
    usable = [gpu for gpu in gpus if gpu.capability == _CAPABILITY]
    for gpu in gpus:
        name = f"GPU {gpu.ordinal}"
        peers = "peers " + (" ".join(map(str, sorted(gpu.peers))) or "none")
        if gpu not in usable:
            yield Finding("note", name, f"sm_{gpu.capability[0]}{gpu.capability[1]}: the kernels are for sm_90")
        elif lost := [other.ordinal for other in usable if other is not gpu and other.ordinal not in gpu.peers]:
            remedy = "ranks of one node need peer access: choose GPUs by CUDA_VISIBLE_DEVICES, check `nvidia-smi topo -p2p r`"
            yield Finding("note", name, f"sm_90, {peers}, not {' '.join(map(str, lost))}", remedy)
        else:
            yield Finding("ok", name, f"sm_90, {peers}")
    if not usable:
        yield Finding("missing", "sm_90 GPUs", "none", "target cuda needs H100 or H200", ("cuda",))
    yield from _driver([gpu.ordinal for gpu in gpus])


def _driver(ordinals: Sequence[int]) -> Iterator[Finding]:
    """Findings about the driver, and about GPU memory that a network card reads and writes."""
    from cuda.bindings import driver

    def ask(result: tuple[object, ...]) -> int:
        if int(result[0]) != 0:  # type: ignore[call-overload]
            raise RuntimeError(f"the driver answered {result[0]}")
        return int(result[1])  # type: ignore[call-overload, no-any-return]

    version = ask(driver.cuDriverGetVersion())
    yield Finding("ok", "driver", f"CUDA {version // 1000}.{version % 1000 // 10}")
    attribute = driver.CUdevice_attribute
    asked = {
        "dma-buf": attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
        "RDMA to virtual memory": attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        "ordered RDMA writes": attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
    }
    for name, number in asked.items():
        without = [ordinal for ordinal in ordinals if ask(driver.cuDeviceGetAttribute(number, driver.CUdevice(ordinal))) == 0]
        if without:
            yield Finding("note", name, f"not on GPU {' '.join(map(str, without))}", "matters only for a network between hosts")
        else:
            yield Finding("ok", name, "on every GPU")


def _compile_for_cuda() -> Iterator[Finding]:
    for module, distribution in (("cuda.core", "cuda-core"), ("cuda.bindings", "cuda-bindings"), ("cupy", "cupy")):
        yield _package(module, distribution, _EXTRA, ("cuda",))
    if not _absent("cuda.bindings.nvrtc"):
        yield _nvrtc()
    from mkernel.jit import headers

    for name, find in (("CUTLASS headers", headers.cutlass_include), ("CUDA headers", headers.cuda_includes)):
        try:
            found = find()
        except Error as error:
            detail, _, remedy = str(error).partition(": ")
            yield Finding("missing", name, detail, remedy, ("cuda",))
        else:
            yield Finding("ok", name, ", ".join(map(str, found)) if isinstance(found, tuple) else str(found))
    yield Finding("ok", "kernels", str(headers.kernels_src()))


def _nvrtc() -> Finding:
    from cuda.bindings import nvrtc

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise a plain RuntimeError when the library is not there
        return Finding("missing", "NVRTC", f"{error}".splitlines()[0], _EXTRA, ("cuda",))
    return Finding("ok", "NVRTC", f"{major}.{minor}")


# ---- MPI and the network
def _mpi() -> Iterator[Finding]:
    remedy = "pip install 'mkernel[demo]' brings mpich; beside your cluster's MPI: 'mkernel[mpi]' (mk.launch needs neither)"
    mpirun = find_mpirun()
    if mpirun is None:
        yield Finding("note", "mpirun", "not found", remedy)
    else:
        yield Finding("ok", "mpirun", f"{mpirun} ({mpi_flavour(mpirun)})")
    if _absent("mpi4py"):
        yield Finding("note", "mpi4py", "not installed", remedy)
        return
    # In a process of its own: an MPI that does not fit ends the process that initializes it.
    result = _run([sys.executable, "-c", "from mkernel.runtime.ranks import mpi; print(mpi.library())"])
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines() or ["no message"]
        yield Finding("note", "mpi4py", f"does not start: {lines[-1]}", remedy)
    else:
        yield Finding("ok", "mpi4py", f"{metadata.version('mpi4py')} on {' '.join(result.stdout.split())}")


def _verbs() -> Iterator[Finding]:
    """Findings about cards, their ports, and everything that ``rc`` or ``srd`` needs."""
    ports = devices.find()
    if not ports:
        yield Finding("note", "verbs devices", "none (ranks of one host need none)")
    for port in ports:
        yield _port(port)
    yield from _distances(ports)
    yield from _spread(ports)
    yield _locked_memory(bool(ports))
    if ctypes.util.find_library("ibverbs") is None:
        yield Finding("note", "libibverbs", "not installed", "apt-get install -y libibverbs1 ibverbs-providers")
    usable = yield from _pyverbs()
    for port in ports:
        if usable and port.active and port.transport == "rc" and (gid := devices.choose_gid(port)) is not None:
            yield _loopback(port, gid.index)
    yield _engine()
    yield Finding("ok", "transports", ", ".join(transport.names()))


def _port(port: devices.DevicePort) -> Finding:
    gid = devices.choose_gid(port)
    kind = f"{port.link_layer or 'unknown link layer'}, {port.state.lower() or 'state unknown'}, {port.rate or 'rate unknown'}"
    detail = f"{kind}, for {port.transport}, GID {gid or 'none'}"
    if port.iwarp:
        return Finding(
            "note", port.name, f"{detail}: iWARP", "rc needs RoCE: switch the card over, e.g. irdma by `options irdma roce_ena=1`"
        )
    if not port.active:
        return Finding("note", port.name, detail, "check cable and switch; `ibv_devinfo`, `ip link`")
    if gid is None:
        return Finding("note", port.name, detail, "give its network interface an address: `ip address add`")
    if port.link_layer == "Ethernet" and "v2" not in gid.kind:
        return Finding("note", port.name, detail, "RoCE v1 is not routed: give the network interface an IP address")
    return Finding("ok", port.name, detail)


def _distances(ports: Sequence[devices.DevicePort]) -> Iterator[Finding]:
    """Findings per GPU: its nearest cards, and how much of its memory they can address at once (BAR1)."""
    for gpu in _gpu_addresses():
        by_distance: dict[int, list[str]] = {}
        for port in ports:
            by_distance.setdefault(devices.distance(gpu, port), []).append(port.name)
        if by_distance:
            near = min(by_distance)
            yield Finding("ok", f"GPU {gpu}", f"nearest: {', '.join(by_distance[near])} ({devices.describe_distance(near)})")
        bar = devices.bar_bytes(gpu, 1)
        if ports and bar:
            remedy = "" if bar >= 1 << 30 else "switch Resizable BAR on in the firmware, or keep heap_bytes below this"
            yield Finding("ok" if not remedy else "note", f"GPU {gpu} BAR1", f"{bar >> 20} MiB: the most a card can register", remedy)


def _spread(ports: Sequence[devices.DevicePort]) -> Iterator[Finding]:
    """A finding for each rank of a host to which MKERNEL_NIC gives several cards."""
    for slot, wish in enumerate(env.NIC.get() or ()):
        if "+" not in wish:
            continue
        subject = f"cards of rank {slot} of a host"
        try:
            cards = devices.cards_for("rc", slot, ports=ports)
        except ArgumentError as error:
            yield Finding("note", subject, str(error).splitlines()[0], "MKERNEL_NIC names ports of this host, those of a rank joined by +")
            continue
        total = sum(card.gigabits for card in cards)
        rates = ", ".join(f"{card.device}:{card.port} {card.gigabits / total if total else 1 / len(cards):.0%}" for card in cards)
        yield Finding("ok", subject, f"puts of rc are spread by rate: {rates}")


def _gpu_addresses() -> list[str]:
    found = []
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        with contextlib.suppress(OSError):
            if (device / "vendor").read_text().strip() == "0x10de" and (device / "class").read_text().startswith(("0x0300", "0x0302")):
                found.append(device.name)
    return found


def _locked_memory(needed: bool) -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or os.geteuid() == 0:
        return Finding("ok", "locked memory", "unlimited")
    remedy = "`ulimit -l unlimited`; for services LimitMEMLOCK=infinity; for Slurm PropagateResourceLimitsExcept=MEMLOCK" if needed else ""
    return Finding("note", "locked memory", f"at most {limit >> 10} KiB: too little to register a heap", remedy)


def _pyverbs() -> Generator[Finding, None, bool]:
    """Findings about pyverbs; returns whether it works."""
    remedy = "apt-get install -y python3-pyverbs, for the python3 it is built for: docs/transports.md"
    if _absent("pyverbs"):
        yield Finding("note", "pyverbs", "not installed (ranks of one host need none)", remedy)
        return False
    # In a process of its own: it sets up the root logger, and its libraries may be missing.
    program = "import json; from mkernel.transport.verbs import pyverbs as p; f = p.features(); print(json.dumps([p.version(), f]))"
    result = _run([sys.executable, "-c", program])
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no message"]
        yield Finding("note", "pyverbs", f"cannot be imported: {lines[-1]}", remedy)
        return False
    version, features = json.loads(result.stdout.splitlines()[-1])
    missing = [name for name, there in features.items() if not there]
    if missing:
        yield Finding(
            "note", "pyverbs", f"{version or 'version unknown'}, without {', '.join(missing)}", "rdma-core 44 or newer has them (efa: 46)"
        )
    else:
        yield Finding("ok", "pyverbs", f"{version or 'version unknown'}, with {', '.join(features)}")
    return True


def _loopback(port: devices.DevicePort, gid_index: int) -> Finding:
    """Whether a put of the port to itself arrives."""
    card = f"Card({port.device!r}, {port.port}, {gid_index}, {devices.pkey_index(port)})"
    result = _run([sys.executable, "-c", f"from mkernel.transport import Card, loopback; print(loopback.loopback({card}))"])
    if result.returncode == 0:
        return Finding("ok", f"{port.name} loopback", f"a put arrived (signal: {result.stdout.splitlines()[-1]})")
    lines = result.stderr.strip().splitlines() or ["no message"]
    return Finding("note", f"{port.name} loopback", lines[-1], "rc will fail on this port: docs/transports.md")


def _engine() -> Finding:
    """What the engine's process would run for a transport that the compiled engine serves."""
    from mkernel.proxy import compiled

    wanted = env.ENGINE.get()
    if wanted == "python":
        return Finding("note", "engine", f"in Python: {env.ENGINE.name} is set to python")
    served = ", ".join(name for name, entry in transport.TRANSPORTS.items() if entry.compiled and entry.rdma)
    try:
        compiled.library()
    except Error as error:
        remedy = "apt-get install -y g++, or set MKERNEL_CXX to a C++20 compiler"
        return Finding("note", "engine", f"in Python, which takes microseconds more per put: {str(error).splitlines()[0]}", remedy)
    return Finding("ok", "engine", f"compiled, for {served} (others run in Python)")


# ---- files and switches
def _cache() -> Iterator[Finding]:
    """Findings about the cache. Without a usable one every process compiles again, so none is an error."""
    from mkernel.jit import cache

    for target in ("cpu", "cuda"):
        where = cache.folder(target)
        existing = next((path for path in (where, *where.parents) if path.exists()), where)
        if not where.exists() and existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            yield Finding("ok", f"{target} cache", f"{where} (not there yet)")
        elif why := cache.problem(target):
            yield Finding("note", f"{target} cache", f"every process compiles again: {why}", "set MKERNEL_CACHE_DIR to a folder of yours")
        elif not os.access(where, os.W_OK):
            yield Finding("note", f"{target} cache", f"{where} cannot be written", "set MKERNEL_CACHE_DIR to a folder of yours")
        else:
            yield Finding("ok", f"{target} cache", str(where))


def _switches() -> Iterator[Finding]:
    for variable in env.ALL.values():
        if not variable.is_set():
            continue
        try:
            variable.get()
        except Error as error:
            yield Finding("broken", variable.name, str(error), f"unset it, or give {variable.kind}", ("cuda", "cpu"))
        else:
            yield Finding("note", variable.name, f"{'set' if variable.secret else f'set to {variable.show()}'}: {variable.help}")
    for name, near in env.ignored().items():
        yield Finding("note", name, "is no switch of mkernel: ignored", f"did you mean {near}?" if near else "")


PROBES: tuple[tuple[str, tuple[str, ...], Callable[[], Iterator[Finding]]], ...] = (
    ("python", ("cuda", "cpu"), _python),
    ("C++ compiler", ("cpu",), _compiler),
    ("GPUs", ("cuda",), _gpus),
    ("CUDA packages", ("cuda",), _compile_for_cuda),
    ("MPI", (), _mpi),
    ("verbs", (), _verbs),
    ("cache", ("cuda", "cpu"), _cache),
    ("switches", (), _switches),
)
