"""``mkernel doctor``: what this machine has, in which state, and the remedy for what is missing. Never a traceback."""

from __future__ import annotations

import argparse
import ctypes.util
import dataclasses
import difflib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

from mkernel import env
from mkernel.cli.launcher import find_mpirun, mpi_flavour
from mkernel.errors import Error

__all__ = ["Finding", "examine", "main"]

State = Literal["ok", "note", "missing", "broken"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line. ``needed_by`` names the targets that cannot run while the state is not ok."""

    state: State
    subject: str
    detail: str
    remedy: str = ""
    needed_by: tuple[str, ...] = ()


def main(argv: Sequence[str]) -> int:
    """Exit status 0 if at least one target is usable here."""
    argparse.ArgumentParser(prog="mkernel doctor", description=__doc__).parse_args(argv)
    findings = examine()
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.state:<8} {finding.subject:<{width}}  {finding.detail}")
        if finding.remedy:
            print(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    blocked = {target for finding in findings if finding.state in ("missing", "broken") for target in finding.needed_by}
    print()
    for target, meaning in (("cuda", "fused kernels on this machine's GPUs"), ("cpu", "the same kernels, emulated: for checking and debugging")):
        print(f"target {target:<5} {'not usable' if target in blocked else 'usable'}: {meaning}")
    return 1 if {"cuda", "cpu"} <= blocked else 0


def examine() -> list[Finding]:
    """Everything there is to say. A probe that fails is a finding of its own."""
    findings: list[Finding] = []
    for subject, needed_by, probe in _PROBES:
        try:
            findings.extend(probe())
        except (Exception, SystemExit) as error:  # whatever is broken here must not hide the rest
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
            findings.append(Finding("broken", subject, detail, "this probe should not fail: please report it", needed_by))
    return findings


# ---- Python
def _python() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")
    for package in ("numpy", "ml_dtypes"):
        yield _package(package, package, f"pip install {package}", ("cuda", "cpu"))


def _package(module: str, distribution: str, remedy: str, needed_by: tuple[str, ...] = ()) -> Finding:
    if importlib.util.find_spec(module.split(".")[0]) is None or _absent(module):
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
        source.write_text("#include <atomic>\n#include <concepts>\nstd::atomic<std::integral auto> f();\n".replace("<std::integral auto>", "<int>"))
        result = subprocess.run(
            [*compiler, "-std=c++20", "-shared", "-fPIC", source, "-o", source.with_suffix(".so")], capture_output=True, text=True, timeout=60, check=False
        )
    if result.returncode:
        lines = result.stderr.splitlines() or ["no message"]
        yield Finding("broken", "C++ compiler", f"{' '.join(compiler)}: {lines[0]}", remedy, ("cpu",))
    else:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout.splitlines()
        yield Finding("ok", "C++ compiler", f"{' '.join(compiler)} ({version[0] if version else 'version unknown'})")


# ---- MPI and the network
def _mpi() -> Iterator[Finding]:
    remedy = "pip install 'mkernel[demo]' (brings mpich), or your cluster's MPI with pip install 'mkernel[mpi]'; mk.launch and MKERNEL_RENDEZVOUS need none"
    mpirun = find_mpirun()
    if mpirun is None:
        yield Finding("note", "mpirun", "not found", remedy)
    else:
        yield Finding("ok", "mpirun", f"{mpirun} ({mpi_flavour(mpirun)})")
    if _absent("mpi4py"):
        yield Finding("note", "mpi4py", "not installed", remedy)
        return
    # In a process of its own: an MPI that does not fit ends the process that initializes it.
    result = subprocess.run(
        [sys.executable, "-c", "from mkernel.runtime import mpi; print(mpi.library())"], capture_output=True, text=True, timeout=60, check=False
    )
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines() or ["no message"]
        yield Finding("note", "mpi4py", f"does not start: {lines[-1]}", remedy)
    else:
        yield Finding("ok", "mpi4py", f"{metadata.version('mpi4py')} on {result.stdout.strip()}")


def _verbs() -> Iterator[Finding]:
    devices = Path("/sys/class/infiniband")
    names = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if names:
        yield Finding("ok", "verbs devices", ", ".join(f"{name} ({_port_states(devices / name)})" for name in names))
    else:
        yield Finding("note", "verbs devices", "none: ranks of other hosts cannot be reached", "one host: none needed; emulated nodes work without")
    if ctypes.util.find_library("ibverbs") is None:
        yield Finding("note", "libibverbs", "not installed", "apt-get install -y libibverbs1 ibverbs-providers")
    yield dataclasses.replace(_package("pyverbs", "pyverbs", "pip install 'mkernel[rdma]'"), needed_by=())


def _port_states(device: Path) -> str:
    ports = sorted((device / "ports").iterdir())
    return ", ".join(f"port {port.name} {(port / 'state').read_text().split(':')[-1].strip().lower()}" for port in ports)


# ---- files and switches
def _cache() -> Iterator[Finding]:
    folder = env.CACHE_DIR.get()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(existing, os.W_OK | os.X_OK):
        yield Finding("ok", "cache", f"{folder}" + ("" if folder.exists() else " (not there yet)"))
    else:
        yield Finding("broken", "cache", f"{folder} cannot be written", "set MKERNEL_CACHE_DIR to a folder of yours", ("cuda", "cpu"))


def _switches() -> Iterator[Finding]:
    for variable in env.ALL.values():
        if not variable.is_set():
            continue
        try:
            variable.get()
        except Error as error:
            yield Finding("broken", variable.name, str(error), f"unset it, or give {variable.kind}", ("cuda", "cpu"))
        else:
            yield Finding("note", variable.name, f"set to {os.environ[variable.name]!r}: {variable.help}")
    for name in sorted(os.environ):
        if name.startswith("MKERNEL_") and name not in env.ALL:
            close = difflib.get_close_matches(name, env.ALL, 1)
            yield Finding("note", name, "is no switch of mkernel: ignored", f"did you mean {close[0]}?" if close else "")


_PROBES: tuple[tuple[str, tuple[str, ...], Callable[[], Iterator[Finding]]], ...] = (
    ("python", ("cuda", "cpu"), _python),
    ("C++ compiler", ("cpu",), _compiler),
    ("MPI", (), _mpi),
    ("verbs", (), _verbs),
    ("cache", ("cuda", "cpu"), _cache),
    ("switches", (), _switches),
)
