"""Small virtual machines with a real RDMA stack (``rdma_rxe``), joined by a lossless wire: verbs without a NIC.

A machine is QEMU in software emulation, with the distribution's kernel. It sees the host's files, this checkout and this interpreter at the
same paths, read-only under a layer of its own memory. Machine 0 holds the wires the others are plugged into. Each machine has two: ``eth0``
for control (10.77.0.x) and ``eth1``, which carries ``rxe0`` (10.78.0.x), so that a test may cut one without the other.

Machines stay on from test to test, because booting one and reading Python into its memory takes an emulated processor longer than most
jobs. One in which anything went wrong, or was left behind, is switched off, and the next test has a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.vm.sysroot import Sysroot, cache_folder, sysroot

__all__ = ["Job", "Machines", "Outcome", "Round"]

REPOSITORY = Path(__file__).resolve().parents[2]
CONTROL, RDMA = "10.77.0.{}", "10.78.0.{}"  # addresses; machine 0 has .1
MOST = 4  # machines at a time
_LIFETIME = 3600  # seconds, of a machine that nobody has switched off
_LOOKS = 25  # for what a round's jobs left behind, 0.2 s apart
_BOOT = 60  # seconds that a machine may take until it begins with its jobs


@dataclasses.dataclass(frozen=True)
class Job:
    """One process in one machine: a Python script with arguments and environment."""

    script: Path
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Outcome:
    """How a process ended. ``code`` is None when its machine went away under it."""

    machine: int
    code: int | None
    out: str
    errors: str
    left: str = ""  # RDMA objects and processes that outlived it, one per line

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]

    def __str__(self) -> str:
        return f"machine {self.machine}: exit status {self.code}\n{self.out}\n{self.errors}\n{self.left}"


class Machines:
    """Runs rounds of jobs in machines, which it boots when they are first needed.

    Parameters
    ----------
    megabytes, cpus
        Of each machine.
    """

    def __init__(self, *, megabytes: int = 512, cpus: int = 1) -> None:
        self._sysroot = sysroot()
        self._megabytes, self._cpus = megabytes, cpus
        self._own = tempfile.TemporaryDirectory(prefix="mkernel-vm-", ignore_cleanup_errors=True)
        self._machines: dict[int, _Machine] = {}
        self._boots = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._switch_off(0)
        self._own.cleanup()

    def run(
        self, jobs: Sequence[Sequence[Job]], *, timeout: float = 120.0, meanwhile: Callable[[Round], None] | None = None
    ) -> list[Outcome]:
        """The jobs of each machine side by side; the outcomes of their processes, in the order of ``jobs``.

        Parameters
        ----------
        jobs
            By machine. Every process has ``TEST_MACHINE``, ``TEST_MACHINES``, ``TEST_JOB`` (a folder of its machine that the host sees too)
            and ``PYTHONPATH`` (pyverbs) in its environment.
        timeout
            Seconds after which all machines are switched off.
        meanwhile
            Called while the jobs run.
        """
        machines = [self._machine(number) for number in range(len(jobs))]
        some = Round(machines, jobs, self._sysroot, time.monotonic() + _BOOT + timeout)
        try:
            if meanwhile is not None:
                meanwhile(some)
            outcomes = some.wait()
        except BaseException:
            self._switch_off(0)
            raise
        if any(outcome.left or (outcome.code and machines[outcome.machine].on) for outcome in outcomes):
            self._switch_off(0)
        return outcomes

    def restart(self) -> None:
        """Whatever a job has changed in the machines, the next jobs have new ones."""
        self._switch_off(0)

    def _machine(self, number: int) -> _Machine:
        machine = self._machines.get(number)
        if machine is None or not machine.on:
            if number == 0:
                self._switch_off(0)  # the others hang on its wires
            self._boots += 1
            folder = Path(self._own.name) / str(self._boots)
            machine = self._machines[number] = _Machine(number, folder, self._sysroot, self._wires(number), self._megabytes, self._cpus)
            if number == 0:
                self._wait_for_sockets(machine)
        return machine

    def _switch_off(self, first: int) -> None:
        for number in sorted(self._machines):
            if number >= first:
                self._machines.pop(number).kill()
        if first == 0:
            for socket in Path(self._own.name).glob("wire*"):
                socket.unlink()

    def _wires(self, machine: int) -> list[str]:
        return [option for wire in range(2) for option in self._wire(machine, wire)]

    def _wire(self, machine: int, wire: int) -> list[str]:
        """A hub in machine 0 with a socket for each other machine: unlike datagrams, it loses nothing."""
        device = ["-device", f"virtio-net-pci,netdev=n{wire},mac=52:54:00:00:{wire:02x}:{machine + 1:02x},romfile="]
        if machine:
            return ["-netdev", f"stream,id=n{wire},server=off,addr.type=unix,addr.path={self._socket(machine, wire)}", *device]
        hub = ["-netdev", f"hubport,id=n{wire},hubid={wire}"]
        for peer in range(1, MOST):
            hub += ["-netdev", f"stream,id=s{wire}p{peer},server=on,addr.type=unix,addr.path={self._socket(peer, wire)}"]
            hub += ["-netdev", f"hubport,id=h{wire}p{peer},hubid={wire},netdev=s{wire}p{peer}"]
        return [*hub, *device]

    def _socket(self, machine: int, wire: int) -> Path:
        return Path(self._own.name) / f"wire{wire}-{machine}"

    def _wait_for_sockets(self, machine: _Machine) -> None:
        wanted = [self._socket(peer, wire) for peer in range(1, MOST) for wire in range(2)]
        end = time.monotonic() + 20
        while not all(socket.exists() for socket in wanted):
            if time.monotonic() > end or not machine.on:
                raise AssertionError(f"machine 0 did not start: {machine.console()}")
            time.sleep(0.01)


class _Machine:
    """One that runs."""

    def __init__(self, number: int, folder: Path, sysroot: Sysroot, wires: Sequence[str], megabytes: int, cpus: int) -> None:
        self.number, self.folder = number, folder
        self.rounds = 0
        self._console, share = folder / "console", folder / "job"
        share.mkdir(parents=True)
        # Ends with this process, however it ends, and in any case. Never KVM: inside other virtual machines a /dev/kvm that opens may hang.
        command = ["setpriv", "--pdeathsig", "TERM", "timeout", "--signal=KILL", str(_LIFETIME), "qemu-system-x86_64"]
        command += ["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "Nehalem,+rdrand", "-m", str(megabytes), "-smp", str(cpus)]
        command += ["-nodefaults", "-display", "none", "-no-reboot", "-serial", f"file:{self._console}"]
        command += ["-kernel", str(sysroot.kernel), "-initrd", str(sysroot.initramfs)]
        addresses = f"ADDRESS0={CONTROL.format(number + 1)} ADDRESS1={RDMA.format(number + 1)}"
        command += ["-append", f"console=ttyS0 quiet panic=-1 mitigations=off {addresses}"]
        for tag, path, access in (("host", "/", ",readonly=on"), ("over", sysroot.root, ",readonly=on"), ("job", share, "")):
            command += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap{access}"]
            command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        command += wires
        with (folder / "qemu").open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True)

    @property
    def on(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Like pulling the plug."""
        if self.on:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def console(self) -> str:
        files = (self._console, self.folder / "qemu")
        return "\n".join(file.read_text(errors="replace")[-4000:] for file in files if file.exists())

    def begin(self, script: str) -> Path:
        """Start the next round; its folder."""
        folder = self.folder / "job" / str(self.rounds)
        self.rounds += 1
        folder.mkdir()
        (folder / "new").write_text(script)
        (folder / "new").rename(folder / "run")
        return folder


class Round:
    """Jobs that run."""

    def __init__(self, machines: Sequence[_Machine], jobs: Sequence[Sequence[Job]], sysroot: Sysroot, end: float) -> None:
        self._machines, self._jobs, self._end = machines, jobs, end
        self._folders = [machine.begin(_script(machine, some, len(jobs), sysroot)) for machine, some in zip(machines, jobs, strict=True)]

    def kill(self, machine: int) -> None:
        """Like pulling the plug."""
        self._machines[machine].kill()

    def file(self, machine: int, name: str) -> Path:
        """A file of that name in the machine's ``TEST_JOB``."""
        return self._folders[machine] / name

    def wait_for(self, machine: int, name: str) -> str:
        """The text of such a file as soon as it exists."""
        file = self.file(machine, name)
        while not file.exists():
            if time.monotonic() > self._end or not self._machines[machine].on or self.file(machine, "done").exists():
                texts = "\n".join(map(str, self._outcomes(machine)))
                raise AssertionError(f"machine {machine} never wrote {name}\n{self._machines[machine].console()}\n{texts}")
            time.sleep(0.02)
        return file.read_text()

    def wait(self) -> list[Outcome]:
        """Until all machines have ended their jobs, or are off. At the end of the time those that have not are switched off."""
        for number, machine in enumerate(self._machines):
            while machine.on and not self.file(number, "done").exists():
                if time.monotonic() > self._end:
                    machine.kill()
                time.sleep(0.02)
        return [outcome for number in range(len(self._machines)) for outcome in self._outcomes(number)]

    def _outcomes(self, machine: int) -> Iterator[Outcome]:
        def text(name: str) -> str:
            file = self.file(machine, name)
            return file.read_text(errors="replace") if file.exists() else ""

        for number in range(len(self._jobs[machine])):
            code = text(f"{number}.code").strip()
            errors = text(f"{number}.err") + ("" if code else self._machines[machine].console())
            yield Outcome(machine, int(code) if code else None, text(f"{number}.out"), errors, text("left"))


def _script(machine: _Machine, jobs: Sequence[Job], machines: int, sysroot: Sysroot) -> str:
    """A machine's jobs side by side; then what they left behind."""
    folder = f"/mnt/job/{machine.rounds}"
    lines = [f"cd {shlex.quote(str(REPOSITORY))}"]
    common = {
        "PYTHONPATH": f"{REPOSITORY}:{sysroot.pyverbs}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPYCACHEPREFIX": str(_compiled_python()),
        "HOME": "/root",
        "OPENBLAS_NUM_THREADS": "1",
        "TEST_MACHINE": str(machine.number),
        "TEST_MACHINES": str(machines),
        "TEST_JOB": folder,
    }
    if "MKERNEL_CACHE_DIR" in os.environ:
        common["MKERNEL_CACHE_DIR"] = os.environ["MKERNEL_CACHE_DIR"]
    for number, job in enumerate(jobs):
        environment = {**common, **job.environment}
        environment["PYTHONPATH"] = ":".join(filter(None, (job.environment.get("PYTHONPATH"), common["PYTHONPATH"])))
        variables = shlex.join(f"{name}={value}" for name, value in environment.items())
        command = f"env {variables} {shlex.join([sys.executable, str(job.script), *job.arguments])}"
        files = f">{folder}/{number}.out 2>{folder}/{number}.err </dev/null"
        lines.append(f"({command} {files}; echo $? >{folder}/{number}.code) &")
    lines.append("wait")
    # The kernel takes queue pairs of a killed process down in its own time: look for a while.
    lines.append(f"for look in {' '.join(map(str, range(_LOOKS)))}; do")
    lines.append(f"  rdma resource show qp | grep -v 'type GSI\\|type SMI' >{folder}/left")
    lines.append(f"  rdma resource show mr >>{folder}/left")
    lines.append(f"  ps -eo pid,args | grep '[m]kernel' >>{folder}/left")
    lines.append(f"  test -s {folder}/left || break")
    lines.append("  sleep 0.2")
    lines.append("done")
    return "\n".join(lines) + "\n"


# What jobs import of others. Compiling Python takes an emulated processor seconds per process, so the machines find it compiled.
_IMPORTS = """
numpy ml_dtypes mkernel.bench mkernel.proxy.process mkernel.runtime.init mkernel.runtime.cpu.backend mkernel.transport.rc
mkernel.transport.devices mkernel.cli.doctor tests.ops.body tests.ops.sequence_body tests.transport.contract tests.transport.harness
"""
_OWN = ("mkernel", "tests/ops", "tests/shared", "tests/transport", "tests/vm")
_COMPILE = f"""
import compileall, importlib, json, runpy, subprocess
for name in {_IMPORTS.split()}:
    importlib.import_module(name)
for folder in {_OWN}:
    compileall.compile_dir(folder, quiet=1)
"""


@functools.cache
def _compiled_python() -> Path:
    """A folder for PYTHONPYCACHEPREFIX with the bytecode of what jobs import."""
    folder = cache_folder() / "bytecode"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", _COMPILE], cwd=REPOSITORY, env=environment, check=True, timeout=240)
    return folder
