"""The command line without ranks: dispatch, tables, the result check, doctor and cache."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mkernel import env
from mkernel.bench import command as bench_command
from mkernel.bench.cases import ops
from mkernel.cli import cache, doctor
from mkernel.cli.main import COMMANDS, main
from mkernel.errors import Error
from mkernel.ops.op import names
from mkernel.tools import launcher
from mkernel.tools.table import format_table
from mkernel.version import VERSION


# ---- dispatch
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"mkernel {command}" in capsys.readouterr().out


def test_unknown_command_lists_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["dance"])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert all(command in message for command in COMMANDS)


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    assert all(text in shown for _, text in COMMANDS.values())


def test_errors_are_one_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(argv: object) -> int:
        raise Error("no such luck")

    monkeypatch.setattr(cache, "main", fail)
    assert main(["cache"]) == 1
    assert capsys.readouterr().err == "mkernel cache: Error: no such luck\n"


def test_module_is_a_program() -> None:
    result = subprocess.run([sys.executable, "-m", "mkernel", "cache", "show"], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(os.environ["MKERNEL_CACHE_DIR"])


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"mkernel {VERSION}\n"


# ---- ops
SMALLEST = {"allgather_gemm": "8x8x8", "gemm": "8x8x8", "ring_attention": "1x1x1x128x64"}


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("op", [*names(), "moe_layer", "gemm", "none"])
@pytest.mark.parametrize("command", ["bench", "tune", "model", "trace"])
def test_every_op_is_taken_or_refused_in_words(
    command: str, op: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it is taken, ranks are started; here they are not."""

    def launch(*_: Any, **__: Any) -> Any:
        raise Error("no ranks here")

    monkeypatch.setattr(bench_command, "gpus", lambda: 2)
    monkeypatch.setattr(launcher, "run", lambda *_, **__: 0)
    monkeypatch.setattr("mkernel.launch", launch)
    shapes = SMALLEST.get(op, "16" if op.startswith("moe") else "16x16x16")
    world = "1x1" if op == "gemm" else "1x2"
    try:
        status = main([command, op, "--shapes", shapes, "--world", world, *(["--target", "cpu"] if command == "trace" else [])])
    except SystemExit as end:
        status = int(str(end.code))
    said = capsys.readouterr()
    taken = ops().keys() & names() if command == "tune" else ops().keys()
    if op not in taken:
        assert status == 2
        assert f"invalid choice: '{op}'" in said.err
    elif command == "trace":
        assert said.err == "mkernel trace: Error: no ranks here\n"
    else:
        assert (status, said.err) == (0, "")


@pytest.mark.parametrize("more", [[], ["--world", "1x2"]])
def test_a_trace_on_gpus_where_none_is_says_so(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for problem in ("", "the GPU driver fails: 999"):
        monkeypatch.setattr("mkernel.runtime.opening.target.gpus_here", lambda problem=problem: ((), problem, None))
        assert main(["trace", "allgather_gemm", "--target", "cuda", *more]) == 1
        rule = problem or "there is no GPU with compute capability 9.0"
        assert capsys.readouterr().err == f"mkernel trace: ArgumentError: --target = cuda: {rule} (see `python -m mkernel doctor`)\n"


# ---- tables
def test_table_aligns_numbers_right_and_text_left() -> None:
    assert format_table(["op", "ms"], [["gather", "1.5"], ["reduce", "10.25"]]).splitlines() == [
        "op         ms",
        "------  -----",
        "gather    1.5",
        "reduce  10.25",
    ]


def test_table_without_rows() -> None:
    assert format_table(["op", "ms"], []).splitlines() == ["op  ms", "--  --"]


# ---- doctor
@pytest.mark.mpi
def test_doctor_starts_mpi4py() -> None:
    pytest.importorskip("mpi4py")
    (finding,) = [finding for finding in doctor.examine() if finding.subject == "mpi4py"]
    assert finding.state == "ok", finding.detail


def test_doctor_finds_this_machine_usable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "target cpu   usable" in out
    assert "should not fail" not in out, "a probe raised"


def test_doctor_says_what_to_do_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("MKERNEL_CXX", "/nonexistent/c++")
    main(["doctor"])
    out = capsys.readouterr().out
    assert "target cpu   not usable" in out
    assert "apt-get install" in out


def test_doctor_explains_switches() -> None:
    with env.override(MKERNEL_CPU_SEED=7, MKERNEL_LOG="loud"):
        found = {finding.subject: finding for finding in doctor.examine()}
    assert found["MKERNEL_CPU_SEED"].state == "note"
    assert found["MKERNEL_LOG"].state == "broken"
    assert found["MKERNEL_LOG"].remedy


def test_doctor_notices_a_misspelt_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_CACHE_DRI", "/tmp")
    finding = next(f for f in doctor.examine() if f.subject == "MKERNEL_CACHE_DRI")
    assert "MKERNEL_CACHE_DIR" in finding.remedy


def test_doctor_does_not_tell_the_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for secret in ("0123456789abcdef" * 4, "too-short-a-secret"):
        monkeypatch.setenv("MKERNEL_SECRET", secret)
        doctor.main([])
        told = capsys.readouterr().out
        assert "MKERNEL_SECRET" in told
        assert secret not in told


def test_doctor_survives_a_probe_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> object:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "PROBES", (("thing", ("cpu",), explode),))
    (finding,) = doctor.examine()
    assert (finding.state, finding.needed_by) == ("broken", ("cpu",))
    assert "boom" in finding.detail


# ---- the launcher
def _fake_mpirun(folder: Path, version: str) -> Path:
    path = folder / "mpirun"
    path.write_text(f'#!/bin/sh\necho "{version}"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("version", "flavour"),
    [
        ("mpirun (Open MPI) 4.1.4", "openmpi"),
        ("mpirun (OpenRTE) 2.1.1", "openmpi"),
        ("HYDRA build details:", "mpich"),
        ("Intel(R) MPI Library", "mpich"),
    ],
)
def test_flavours_of_mpirun(version: str, flavour: str, tmp_path: Path) -> None:
    assert launcher.mpi_flavour(_fake_mpirun(tmp_path, version)) == flavour


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that the launcher has started."""
    found: list[subprocess.Popen[bytes]] = []
    real = launcher._start

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        found.append(real(*arguments))
        return found[-1]

    monkeypatch.setattr(launcher, "_start", start)
    return found


def test_a_hanging_world_is_ended(started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(launcher.LauncherError, match="did not end"):
        launcher._supervise([(["sleep", "60"], os.environ)], None, 0.1, 1.0)
    assert [process.poll() for process in started] == [-signal.SIGTERM]


def test_one_failing_rank_ends_the_others(started: list[subprocess.Popen[bytes]]) -> None:
    commands = [["sleep", "60"], ["sh", "-c", "exit 3"]]
    assert launcher._supervise([(command, os.environ) for command in commands], None, 30, 0.1) == 3
    assert [process.poll() for process in started] == [-signal.SIGTERM, 3]


_REPORT = """
import os, sys, pathlib
NAMES = ("MKERNEL_RENDEZVOUS", "MKERNEL_SECRET", "ADDED")
pathlib.Path(sys.argv[1], os.environ["MKERNEL_RANK"]).write_text(" ".join(os.environ[name] for name in NAMES))
"""


def test_plain_processes_are_told_where_to_meet(tmp_path: Path) -> None:
    assert launcher.run(3, ["-c", _REPORT, str(tmp_path)], timeout=60, kind="processes", environment={"ADDED": "!"}) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    (told,) = {path.read_text() for path in tmp_path.iterdir()}
    assert told.startswith("127.0.0.1:")
    assert told.endswith("!")
    secret = told.split()[1]
    assert len(secret) == 64, "made for this run, and the same for all ranks"


def test_open_mpi_gets_the_options_it_needs(tmp_path: Path) -> None:
    line = launcher._mpirun_line(_fake_mpirun(tmp_path, "mpirun (Open MPI) 4.1.4"), 4)
    assert line[1:6] == ["-n", "4", "--oversubscribe", "--bind-to", "none"]
    assert ("--allow-run-as-root" in line) == (os.geteuid() == 0)
    assert launcher._mpirun_line(_fake_mpirun(tmp_path, "HYDRA build details:"), 4)[1:] == ["-n", "4"]


@pytest.mark.mpi
def test_mpirun_starts_every_rank(tmp_path: Path) -> None:
    if launcher.find_mpirun() is None:
        pytest.skip("no mpirun")
    code = "import sys, pathlib; from mpi4py import MPI; c = MPI.COMM_WORLD; pathlib.Path(sys.argv[1], str(c.rank)).write_text(str(c.size))"
    assert launcher.run(3, ["-c", code, str(tmp_path)], timeout=60, kind="mpi") == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "3", "1": "3", "2": "3"}


def test_a_failing_rank_is_the_exit_status() -> None:
    code = "import os, sys; sys.exit(7 if os.environ['MKERNEL_RANK'] == '1' else 0)"
    assert launcher.run(2, ["-c", code], timeout=60, kind="processes") == 7


def run_until_noted(folder: Path, ranks: int, code: str, kind: str) -> None:
    """Ranks that do not end, with more and more time until each has left a note: on a busy machine they take long to begin."""
    for seconds in (2, 10, 60):
        for note in folder.iterdir():
            note.unlink()
        with pytest.raises(launcher.LauncherError, match="did not end"):
            launcher.run(ranks, ["-c", code, str(folder)], timeout=seconds, kind=kind)
        if len(list(folder.iterdir())) == ranks:
            return
    pytest.fail("the ranks have not begun")


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_hang_are_ended_with_their_children(tmp_path: Path, ranks: int) -> None:
    code = "import subprocess, sys, pathlib; p = subprocess.Popen(['sleep', '600']); "
    code += "pathlib.Path(sys.argv[1], str(p.pid)).touch(); p.wait()"
    run_until_noted(tmp_path, ranks, code, "processes")
    children = [int(path.name) for path in tmp_path.iterdir()]
    assert not [pid for pid in children if _alive(pid)]


def _alive(pid: int) -> bool:
    """Still there a moment later; a zombie counts as ended: whoever adopted it has only not looked yet."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_ending_the_command_ends_its_ranks(tmp_path: Path, number: signal.Signals) -> None:
    """A closed terminal too."""
    inner = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"
    outer = (
        "import sys; from mkernel.tools import launcher; launcher.run(2, ['-c', sys.argv[2], sys.argv[1]], timeout=600, kind='processes')"
    )
    process = subprocess.Popen([sys.executable, "-c", outer, str(tmp_path), inner])
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert len(ranks) == 2
    assert not [pid for pid in ranks if _alive(pid)]


def test_a_signal_while_ranks_are_started_ends_them(tmp_path: Path) -> None:
    """It comes after the first has been started and before anybody waits for them."""
    inner = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"
    outer = f"""
import os, pathlib, signal, sys, time
from mkernel.tools import launcher
real, folder = launcher._start, pathlib.Path(sys.argv[1])
def start(*arguments):
    process = real(*arguments)
    while not (folder / str(process.pid)).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    return process
launcher._start = start
launcher.run(2, ["-c", {inner!r}, sys.argv[1]], timeout=600, kind="processes")
"""
    assert subprocess.run([sys.executable, "-c", outer, str(tmp_path)], timeout=120, check=False).returncode == 128 + signal.SIGTERM
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    assert len(ranks) == 2
    assert not [pid for pid in ranks if _alive(pid)]


def test_nohup_is_respected() -> None:
    code = "import signal, sys; from mkernel.tools import launcher; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    code += "sys.exit(launcher.run(1, ['-c', 'import os, signal; os.kill(os.getppid(), signal.SIGHUP)'], timeout=60))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


_LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "4", "PMI_RANK": "1", "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
_LAUNCHERS |= {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_NODELIST": "nowhere"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_do_not_inherit_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """The world of one that `bench` measures first is one, whoever started `bench`."""
    for name, value in _LAUNCHERS.items():
        monkeypatch.setenv(name, value)
    code = "import os, pathlib, sys; from mkernel.runtime.ranks.choice import choose; b = choose(); "
    code += "pathlib.Path(sys.argv[1], f'{b.rank} of {b.size} {os.environ.get(\"ADDED\")}').touch()"
    assert launcher.run(ranks, ["-c", code, str(tmp_path)], timeout=60, kind="processes", environment={"ADDED": "here"}) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{rank} of {ranks} here" for rank in range(ranks)]


@pytest.mark.mpi
def test_mpirun_ends_ranks(tmp_path: Path) -> None:
    if launcher.find_mpirun() is None:
        pytest.skip("no mpirun that mpi4py can use")
    code = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], f'pid{os.getpid()}').touch(); time.sleep(600)"
    run_until_noted(tmp_path, 2, code, "mpi")
    ranks = [int(path.name[3:]) for path in tmp_path.glob("pid*")]
    assert not [pid for pid in ranks if _alive(pid)]
