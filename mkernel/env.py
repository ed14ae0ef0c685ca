"""Every environment variable mkernel reads: declared once, typed, read live.

``env.CACHE_DIR.get()`` returns the value now; nothing is remembered, so a test or a notebook may change a variable at any time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from mkernel.errors import ArgumentError

__all__ = ["ALL", "SPECIALIZABLE", "Variable", "check_all", "ignored", "override"]

T = TypeVar("T")

_OF_TESTS = ("MKERNEL_TEST_", "MKERNEL_DOCS_")  # mkernel's own

SPECIALIZABLE = ("n", "k", "split")  # fields of a kernel that may be compiled into it (planner/specialize.py)

ALL: dict[str, Variable[Any]] = {}  # by name, in order of declaration: the README's table and `python -m mkernel doctor`


@dataclasses.dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One switch. ``default`` is a value, or a function for defaults that depend on the machine."""

    name: str
    kind: str  # as the README shows it: "path", "integer", "seconds" ...
    parse: Callable[[str], T]
    default: T | Callable[[], T]
    help: str
    secret: bool = False  # its value is shown nowhere

    def get(self) -> T:
        """The value now. Unset and empty both mean the default. Raises ArgumentError for a text that does not parse."""
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default() if callable(self.default) else self.default
        try:
            return self.parse(text)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            raise ArgumentError(self.name, self.show(), f"must be {self.kind}", str(error)) from None

    def show(self) -> str:
        """The text that it is set to, for people."""
        return "(not shown)" if self.secret else repr(os.environ.get(self.name, "").strip())

    def is_set(self) -> bool:
        return bool(os.environ.get(self.name, "").strip())


def _declare(
    name: str, kind: str, parse: Callable[[str], T], default: T | Callable[[], T], help: str, *, secret: bool = False
) -> Variable[T]:
    variable = Variable(name, kind, parse, default, help, secret)
    if name in ALL:
        raise ValueError(f"{name} is declared twice")
    ALL[name] = variable
    return variable


def _optional(parse: Callable[[str], T]) -> Callable[[str], T | None]:
    """The same parser, typed for a variable whose default is None."""
    return parse


def _boolean(text: str) -> bool:
    if text.lower() in {"1", "true", "yes", "on"}:
        return True
    if text.lower() in {"0", "false", "no", "off"}:
        return False
    raise ValueError("use 1 or 0")


def _path(text: str) -> Path:
    return Path(text).expanduser()  # RuntimeError: there is no such user


def _between(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError(f"from {low} to {high}")
        return value

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    """From ``low`` to ``high``, which leaves out infinity and what is no number."""

    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError(f"from {low:g} to {high:g}")
        return value

    return parse


def _duration(text: str) -> float:
    """As ``init`` takes it."""
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError("more than 0, and less than 1e9")
    return value


def _bandwidth(text: str) -> float:
    value = float(text)
    if value != 0 and not 1e-3 <= value <= 1e6:
        raise ValueError("0, or from 0.001 to 1e6")
    return value


def _bandwidths(text: str) -> list[float]:
    rates = [_bandwidth(part) for part in _list(text)]
    if min(rates) == 0:
        raise ValueError("several, by comma, from 0.001 to 1e6")
    return rates


def _host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9:\[][A-Za-z0-9._:%\[\]-]*", text):
        raise ValueError("a name, an IPv4 or an IPv6 address")
    return text


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError("e.g. node0:29500")
    return text


def _bytes(text: str) -> int:
    """``1073741824``, ``512M``, ``8G`` (binary units)."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    number = text.upper().removesuffix("IB").removesuffix("B")
    scale = units.get(number[-1:], 1)
    size = float(number[:-1] if scale > 1 else number) * scale
    if not 1 <= size < 2**48:
        raise ValueError("from 1 to what an address can name, e.g. 8G")
    return int(size)


def _pkey(text: str) -> int:
    """``0x8001``, ``8001`` or ``1``: hexadecimal. The top bit, full membership, is not compared."""
    value = int(text, 16)
    if not value & 0x7FFF > 0 or value > 0xFFFF:
        raise ValueError("from 0x1 to 0xffff, and not 0x8000")
    return value & 0x7FFF


def _secret(text: str) -> str:
    if len(text) < 32:
        raise ValueError("make one by: python -c 'import secrets; print(secrets.token_hex(32))'")
    return text


def _modules(text: str) -> list[str]:
    """``package.module,another``."""
    names = _list(text)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{name!r} is no name of a module")
    return names


def _list(text: str) -> list[str]:
    """``mlx5_0:1,mlx5_1``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ValueError("separate names by one comma")
    return parts


def _fields(text: str) -> str:
    """``n,k``."""
    unknown = set() if text in ("default", "all", "none") else set(_list(text)).difference(SPECIALIZABLE)
    if unknown:
        raise ValueError(f"default, all, none, or of {', '.join(SPECIALIZABLE)}")
    return text


def _command(text: str) -> list[str]:
    """A program with arguments, as a shell would read it."""
    words = shlex.split(text)
    if not words or not words[0]:
        raise ValueError("name a program")
    return words


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError("choose " + ", ".join(names))
        return text.lower()

    return parse


def _cache_home() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mkernel"
    except RuntimeError as error:  # no HOME, and a user whom the system does not know: usual in containers
        raise ArgumentError("MKERNEL_CACHE_DIR", "unset", f"must be set here: {error}") from None


_natural, _positive = _between(0, 2**16), _between(1, 2**16)
_byte, _nibble = _between(0, 255), _between(0, 15)

# ---- compiling
CACHE_DIR = _declare("MKERNEL_CACHE_DIR", "a path", _path, _cache_home, "kernels, plans and tuned splits ($XDG_CACHE_HOME/mkernel)")
DUMP = _declare(
    "MKERNEL_DUMP", "a path", _optional(_path), None, "folder that receives source, PTX, cubin and SASS of every compiled kernel"
)
NO_COMPILE = _declare("MKERNEL_NO_COMPILE", "1 or 0", _boolean, False, "compiling is an error: only cached kernels run")
CXX = _declare("MKERNEL_CXX", "a command", _optional(_command), None, "host C++20 compiler of target cpu (else $CXX, g++, clang++, c++)")
CUTLASS = _declare(
    "MKERNEL_CUTLASS", "a path", _optional(_path), None, "CUTLASS include folder, holds cute/ (else the nvidia-cutlass package)"
)
CUDA_INCLUDE = _declare(
    "MKERNEL_CUDA_INCLUDE", "a path", _optional(_path), None, "CUDA include folder (else packages, CUDA_HOME, /usr/local/cuda)"
)
KERNELS_SRC = _declare("MKERNEL_KERNELS_SRC", "a path", _optional(_path), None, "folder of the device code, in place of mkernel's own")

# ---- bootstrap
RENDEZVOUS = _declare(
    "MKERNEL_RENDEZVOUS", "host:port", _optional(_address), None, "where rank 0 listens: ranks meet there instead of by MPI"
)
RANK = _declare("MKERNEL_RANK", "an integer >= 0", _optional(_natural), None, "this process's rank, with MKERNEL_RENDEZVOUS")
SIZE = _declare("MKERNEL_SIZE", "an integer >= 1", _optional(_positive), None, "number of ranks, with MKERNEL_RENDEZVOUS")
SECRET = _declare(
    "MKERNEL_SECRET",
    "at least 32 characters",
    _optional(_secret),
    None,
    "what ranks of several hosts prove to each other where there is no MPI: the same for all, and for nobody else",
    secret=True,
)
LISTEN = _declare(
    "MKERNEL_LISTEN", "an address", _optional(_host), None, "where rank 0 listens for other hosts (else where MKERNEL_RENDEZVOUS says)"
)
RANKS_PER_NODE = _declare(
    "MKERNEL_RANKS_PER_NODE", "an integer >= 1", _optional(_positive), None, "split one host into emulated nodes of this many ranks"
)

# ---- world
TIMEOUT = _declare("MKERNEL_TIMEOUT", "seconds", _optional(_duration), None, "deadline of waits once all ranks have entered a call (30)")
ENTRY_TIMEOUT = _declare(
    "MKERNEL_ENTRY_TIMEOUT", "seconds", _optional(_duration), None, "deadline until all ranks have entered a call (600)"
)
IDLE_LIMIT = _declare(
    "MKERNEL_IDLE_LIMIT", "seconds", _number(0, 1e9), 600.0, "mk.launch's processes on GPUs end after so long without a call"
)
HEAP_BYTES = _declare("MKERNEL_HEAP_BYTES", "bytes, e.g. 8G", _optional(_bytes), None, "size of each rank's symmetric heap")
MAX_SMS = _declare("MKERNEL_MAX_SMS", "an integer >= 1", _optional(_positive), None, "most SMs that a kernel takes (else all)")
BATCH_INVARIANT = _declare(
    "MKERNEL_BATCH_INVARIANT", "1 or 0", _boolean, False, "the bits of a row do not depend on the other rows of its call (mk.init)"
)
SPECIALIZE = _declare(
    "MKERNEL_SPECIALIZE",
    "default, all, none, or of n, k, split by comma",
    _fields,
    "default",
    "what is compiled into kernels; the rest comes with every call, so that one kernel serves many shapes",
)
PLANNER = _declare(
    "MKERNEL_PLANNER",
    "auto, rules or model",
    _choice("auto", "rules", "model"),
    "auto",
    "what chooses tiles of GEMM ops: rules, or the cost model (auto: where GPUs confirmed it); alike on all ranks",
)
MACHINE = _declare(
    "MKERNEL_MACHINE",
    "a path",
    _optional(_path),
    None,
    "the cost model's machine, h100, h200 or a file of `mkernel calibrate` (else by rank 0's GPU); alike on all ranks",
)
OPS = _declare(
    "MKERNEL_OPS", "modules, by comma", _optional(_modules), None, "further ops, which register themselves (docs/adding_an_op.md)"
)
SHARE_GPUS = _declare(
    "MKERNEL_SHARE_GPUS",
    "1 or 0",
    _boolean,
    False,
    "processes of a world may share GPUs and take turns: for tests on fewer GPUs than ranks",
)
LOG = _declare(
    "MKERNEL_LOG", "debug, info, warning or error", _choice("debug", "info", "warning", "error"), "warning", "level of the logger `mkernel`"
)

# ---- target cpu
CPU_SMS = _declare("MKERNEL_CPU_SMS", "an integer >= 1", _positive, 4, "CTAs that target cpu runs at once per rank")
CPU_SEED = _declare(
    "MKERNEL_CPU_SEED", "an integer >= 0", _between(0, 2**64 - 1), 0, "seed of target cpu's scheduler: the same seed gives the same run"
)

# ---- network
TRANSPORT = _declare(
    "MKERNEL_TRANSPORT", "auto, rc, srd or emulated", _choice("auto", "rc", "srd", "emulated"), "auto", "how ranks of different nodes talk"
)
NIC = _declare(
    "MKERNEL_NIC",
    "device or device:port, by comma",
    _optional(_list),
    None,
    "network cards by rank of a host (else the nearest); a+b: puts go by both",
)
GID_INDEX = _declare("MKERNEL_GID_INDEX", "an integer >= 0", _optional(_natural), None, "index of the GID to use (else chosen by content)")
PKEY = _declare(
    "MKERNEL_PKEY", "e.g. 0x8001", _optional(_pkey), None, "partition of InfiniBand to use (else the first of the port's table)"
)
TRAFFIC_CLASS = _declare("MKERNEL_TRAFFIC_CLASS", "0 to 255", _byte, 0, "traffic class of RDMA packets (RoCE: four times the DSCP)")
SERVICE_LEVEL = _declare("MKERNEL_SERVICE_LEVEL", "0 to 15", _nibble, 0, "service level of RDMA packets (InfiniBand)")
RC_SIGNAL = _declare(
    "MKERNEL_RC_SIGNAL",
    "auto, atomic, write or imm",
    _choice("auto", "atomic", "write", "imm"),
    "auto",
    "how rc raises a flag: behind an atomic, by a plain write (no routing may be adaptive), or by a message (imm)",
)
RC_QUEUE_PAIRS = _declare("MKERNEL_RC_QUEUE_PAIRS", "1 to 256", _between(1, 256), 4, "queue pairs of rc to each peer; channels share them")
ENGINE = _declare(
    "MKERNEL_ENGINE",
    "auto, compiled or python",
    _choice("auto", "compiled", "python"),
    "auto",
    "what the engine's process runs: compiled, by the host's C++ compiler at first use, where it can (else Python)",
)
GRAPH_SPIN = _declare(
    "MKERNEL_GRAPH_SPIN",
    "seconds",
    _number(0, 1e6),
    1.0,
    "how long an engine stays quick after the last put of a replayed graph, at the price of a CPU; 1000000: always",
)
EMULATED_GBPS = _declare("MKERNEL_EMULATED_GBPS", "GB/s", _bandwidth, 50.0, "bandwidth of one emulated link; 0: not paced")
EMULATED_LINKS = _declare(
    "MKERNEL_EMULATED_LINKS",
    "GB/s, by comma",
    _optional(_bandwidths),
    None,
    "emulated links of a rank, over which puts are spread (else one)",
)
EMULATED_LATENCY_US = _declare("MKERNEL_EMULATED_LATENCY_US", "microseconds", _number(0, 1e7), 5.0, "latency of one emulated link")
EMULATED_REORDER_US = _declare(
    "MKERNEL_EMULATED_REORDER_US",
    "microseconds",
    _number(0, 1e7),
    0.0,
    "emulated links deliver bytes in any order within this window, as srd does; 0: in order, as rc does",
)
EMULATED_ENGINE = _declare(
    "MKERNEL_EMULATED_ENGINE",
    "host or sms",
    _choice("host", "sms"),
    "host",
    "what moves the bytes of emulated links: a thread and copy engines, or SMs of the GPU (quick enough for small messages)",
)
EMULATED_HOST_SIGNALS = _declare(
    "MKERNEL_EMULATED_HOST_SIGNALS",
    "1 or 0",
    _boolean,
    False,
    "emulated links raise flags in host memory, as srd does: to test kernels with such flags",
)


def check_all() -> None:
    """Raise ArgumentError for the first variable that is set to what it cannot be: also one that this program would never read."""
    for variable in ALL.values():
        if variable.is_set():
            variable.get()


def ignored() -> dict[str, str]:
    """Variables that are set, look like mkernel's and are none of them: for each the one whose name is nearest, "" if none is near."""
    names = [name for name in sorted(os.environ) if name.startswith("MKERNEL_") and name not in ALL and not name.startswith(_OF_TESTS)]
    return {name: next(iter(difflib.get_close_matches(name, ALL, 1)), "") for name in names}


@contextlib.contextmanager
def override(**values: object) -> Iterator[None]:
    """Set variables for a block (tests, ``doctor``): ``with env.override(MKERNEL_CPU_SEED=3): ...``; None unsets."""
    unknown = values.keys() - ALL.keys()
    if unknown:
        raise KeyError(f"not declared in mkernel/env.py: {sorted(unknown)}")
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            _assign(name, None if value is None else str(value))
        yield
    finally:
        for name, old in before.items():
            _assign(name, old)


def _assign(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
