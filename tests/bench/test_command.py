"""The benchmark's command line, and how it starts ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mkernel.bench import command, main, routings, shapes
from mkernel.bench.report import FUSED, SOLO, Report
from mkernel.bench.timing import COOLDOWN_MS, LONGEST_COOLDOWN_MS
from mkernel.errors import ArgumentError
from mkernel.planner.topology import Topology
from mkernel.runtime.ranks import choice, rendezvous
from mkernel.tools import launcher

needs_a_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="target cpu needs a C++ compiler")


@pytest.mark.parametrize("cooldown", ["-1", "nan", str(LONGEST_COOLDOWN_MS + 1)])
def test_a_cooldown_that_makes_no_sense(cooldown: str) -> None:
    with pytest.raises(ArgumentError, match="--cooldown"):
        main(["gemm", "--allow-cpu", f"--cooldown={cooldown}"])


def test_only_columns_that_exist_can_be_left_out() -> None:
    with pytest.raises(ArgumentError, match=r"--without = nccl: must be one of .*torch async-TP"):
        main(["gemm", "--allow-cpu", "--without", "nccl"])


def test_a_run_is_resumed_from_its_own_file(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--resume = .*--out FILE"):
        main(["gemm", "--allow-cpu", "--resume"])
    file = tmp_path / "x.json"
    options = command._parser().parse_args(["gemm", "--resume", "--out", str(file)])
    assert command._earlier(options) is None, "nothing was begun"
    report = Report("gemm", "", {}, "cpu", "bfloat16", "", "", {}, {}, {})
    command._write(report, options)
    assert command._earlier(options) == report
    assert command._earlier(command._parser().parse_args(["gemm", "--out", str(file)])) is None
    for text in ("{", "[]", '{"schema": 1, "rows": [], "op": "gemm"}', '{"schema": 2}'):
        file.write_text(text)
        with pytest.raises(ArgumentError, match="no report of this bench"):
            command._earlier(options)


@pytest.mark.usefixtures("no_launcher")
def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(command, "_ranks", lambda *_: pytest.fail("ranks were started"))
    for name in ("", "file/x.json", "x\0.json"):
        with pytest.raises(ArgumentError, match=r"--out = .*must be a file that can be written"):
            main(["gemm", "--allow-cpu", "--out", f"{tmp_path}/{name}"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").touch()
    with pytest.raises(ArgumentError, match=r"--save = .*must be a file that can be written"):
        main(["gemm", "--allow-cpu", "--save"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs", "file"]


@needs_a_compiler
@pytest.mark.usefixtures("no_launcher")
def test_a_rank_that_no_parent_has_started_asks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``mpirun`` there is no parent: rank 0 finds out before anything is measured."""
    for name, value in (("RENDEZVOUS", "127.0.0.1:1"), ("RANK", "0"), ("SIZE", "1")):
        monkeypatch.setenv(f"MKERNEL_{name}", value)
    monkeypatch.setattr("mkernel.bench.worker.measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(ArgumentError, match=r"--out = .*must be a file that can be written"):
        main(["gemm", "--worker", "--allow-cpu", "--world", "1x1", "--shapes", "8x8x8", "--out", str(tmp_path)])


@needs_a_compiler
@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("op", ["allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"])
def test_the_command_on_two_processes(op: str, tmp_path: Path) -> None:
    """The real world and op on target cpu: local compute first, then two ranks, one report of both."""
    out = tmp_path / "report.json"
    arguments = [op, "--allow-cpu", "--world", "1x2", "--shapes", "130x72x80", "--samples", "2", "--launcher", "processes"]
    given = {"b": "transposed"} if op == "allgather_gemm" else {"partials": "float32"}
    arguments += [word for name, value in given.items() for word in (f"--{name}", value)]
    left_out = op == "gemm_reduce_scatter"
    arguments += ["--without", SOLO] if left_out else []
    assert main([*arguments, "--out", str(out), "--timeout", "240"]) == 0
    report = Report.from_json(out.read_text())
    (row,) = report.rows
    assert report.correct
    assert report.op == op
    assert report.settings["cooldown_ms"] == COOLDOWN_MS
    assert report.settings["options"] == given
    assert (report.world, report.target) == ({"ranks": 2, "nodes": 1, "ranks_per_node": 2}, "cpu")
    assert report.command.endswith("--timeout 240")
    assert str(tmp_path) not in report.command
    assert set(row.times) == ({FUSED} if left_out else {FUSED, SOLO})
    assert [len(samples) for samples in row.times[FUSED]["isolated"].samples] == [2, 2]
    assert left_out or len(row.times[SOLO]["isolated"].samples) == 1
    assert row.missing.get(SOLO) == ("left out by --without" if left_out else None)


def test_world_and_split_are_parsed() -> None:
    assert command.parse_world("2x2") == Topology(4, 2)
    assert command.parse_world("4") == Topology(4, 4)
    assert command.parse_split("compute=120, intra_comm=12") == {"compute": 120, "intra_comm": 12}
    for text in ("", "two", "2x2x2", "0x4"):
        with pytest.raises(ArgumentError, match="NODESxRANKS"):
            command.parse_world(text)
    for text in ("", "compute", "compute=x", "comput=3", "compute=-1"):
        with pytest.raises(ArgumentError, match="split"):
            command.parse_split(text)


def test_the_help_names_every_model_and_routing_and_both_ways_to_name_a_world() -> None:
    told = " ".join(command._parser().format_help().split())
    assert all(name in told for name in (*shapes.MODELS, *routings.MODELS, *routings.KINDS))
    assert command.WORLD in told


@pytest.mark.usefixtures("no_launcher")
def test_without_a_gpu_bench_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpus", lambda: 0)
    with pytest.raises(ArgumentError, match="speeds of target cpu mean nothing"):
        main(["allgather_gemm"])


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    ("variables", "size"),
    [
        ({}, 0),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, 1),
        ({"MKERNEL_RENDEZVOUS": "127.0.0.1:9", "MKERNEL_RANK": "2", "MKERNEL_SIZE": "3"}, 3),
        ({"MKERNEL_RENDEZVOUS": "127.0.0.1:9", "MKERNEL_RANK": "2", "MKERNEL_SIZE": "3", "PMI_RANK": "1", "PMI_SIZE": "4"}, 3),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}, 2),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "9", "TORCHELASTIC_RUN_ID": "none"}, 1),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}, 2),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1"}, 0),  # a shell
        ({"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1"}, 0),  # a shell
    ],
)
def test_commands_and_worlds_agree_on_who_is_a_rank(variables: dict[str, str], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher.is_rank() == (size > 0)
    assert launcher.launched_size() == size
    chosen: list[str] = []
    monkeypatch.setattr(choice, "_mpi", lambda comm: chosen.append("mpi"))
    monkeypatch.setattr(rendezvous, "from_environment", lambda: chosen.append("rendezvous"))
    choice.choose()
    assert bool(chosen) == (size > 1 or "OMPI_COMM_WORLD_SIZE" in variables)


def test_the_recorded_command_names_no_path() -> None:
    words = ["gemm", "--out", "/somewhere/x.json", "--samples", "5", "--out=/else.json", "--save"]
    assert command._without_paths(words) == ["gemm", "--samples", "5", "--save"]


def test_importing_the_command_imports_nothing_heavy() -> None:
    code = "import sys, mkernel.bench.command, mkernel.bench.worker; "
    code += "print([m for m in ('cupy', 'torch', 'cuda', 'mpi4py') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_the_benchmarks_kernels_compile_for_sm_90() -> None:
    core = pytest.importorskip("cuda.core", reason="NVRTC is not installed")
    source = Path(command.__file__).with_name("kernels.cu").read_text()
    cubin = core.Program(source, "c++", core.ProgramOptions(std="c++17", arch="sm_90")).compile("cubin").code
    for name in (b"hold", b"meet", b"fill"):
        assert name in cubin
