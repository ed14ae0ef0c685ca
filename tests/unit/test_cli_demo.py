"""``mkernel demo``: it runs, it draws, and it cannot end well when a result is wrong."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mkernel.bench.cases import ops
from mkernel.cli import demo, demo_rank
from mkernel.cli.main import main
from mkernel.ops.op import find, names
from mkernel.planner.reduce import ALGORITHMS, choose_algorithm
from mkernel.planner.topology import Topology
from mkernel.tools import launcher
from mkernel.tools.output import require_writable


@pytest.mark.always
@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["mpi", pytest.param("processes", marks=pytest.mark.slow)])
def test_demo_runs_two_nodes_of_two(kind: str, tmp_path: Path) -> None:
    if kind == "mpi" and launcher.find_mpirun() is None:
        pytest.skip("no mpirun")
    picture = tmp_path / "demo.svg"
    command = [sys.executable, "-m", "mkernel", "demo", "--target", "cpu", "--launcher", kind, "--picture", str(picture)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line for line in result.stdout.splitlines() if line.endswith("right") and " x " in line]
    assert {tuple(row.split()[:2]) for row in rows} == {(case.op, case.dtype) for case in demo_rank.cases("cpu", 4)}
    assert len(rows) == len(demo_rank.cases("cpu", 4))
    assert all("2x2" in row for row in rows)
    texts = [t.text for t in ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}text")]
    assert {"intra_comm × 1", "inter_send × 1"} <= set(texts)


def _example(name: str, tmp_path: Path) -> tuple[int, list[str]]:
    """Exit status and lines of an example on 2 nodes of 2 ranks."""
    if launcher.find_mpirun() is None:
        pytest.skip("no mpirun")
    root = Path(__file__).parents[2]
    command = [str(root / "examples" / name), "--ranks-per-node", "2"]
    printed = tmp_path / "printed"
    with printed.open("wb") as output:
        status = launcher.run(4, command, timeout=120, kind="mpi", environment={"PYTHONPATH": str(root)}, output=output)
    return status, sorted(printed.read_text().splitlines())


@pytest.mark.mpi
def test_example_runs(tmp_path: Path) -> None:
    status, lines = _example("allgather_gemm.py", tmp_path)
    assert status == 0
    assert [line.split(" on ")[0] for line in lines] == [f"rank {rank} of 4" for rank in range(4)]
    assert all("c is (512, 256)" in line for line in lines)


@pytest.mark.mpi
def test_example_of_a_tensor_parallel_block_is_right(tmp_path: Path) -> None:
    status, lines = _example("tensor_parallel_mlp.py", tmp_path)
    assert status == 0, lines
    assert [line.split(" on ")[0] for line in lines] == [f"rank {rank} of 4" for rank in range(4)]
    assert all("y is (128, 256)" in line and line.endswith("right") for line in lines)


@pytest.mark.mpi
def test_example_of_a_cupy_program_runs_with_numpy_where_there_is_no_gpu(tmp_path: Path) -> None:
    status, lines = _example("cupy_app.py", tmp_path)
    assert status == 0, lines
    assert lines[0].startswith("no GPU: NumPy in place of CuPy")
    assert [line.split(" on ")[0] for line in lines[1:]] == [f"rank {rank} of 4" for rank in range(4)]
    assert all(line.endswith("right") for line in lines[1:])


@pytest.mark.mpi
def test_example_of_a_layer_of_experts_is_right(tmp_path: Path) -> None:
    status, lines = _example("moe_layer.py", tmp_path)
    assert status == 0, lines
    assert [line.split(" on ")[0] for line in lines] == [f"rank {rank} of 4" for rank in range(4)]
    assert all("y is (50, 256)" in line and line.endswith("right") for line in lines)


@pytest.mark.mpi
def test_example_of_a_long_sequence_is_right(tmp_path: Path) -> None:
    status, lines = _example("long_context_attention.py", tmp_path)
    assert status == 0, lines
    assert [line.split(" on ")[0] for line in lines] == [f"rank {rank} of 4" for rank in range(4)]
    assert all("o is (1, 8, 192, 64)" in line and line.endswith("right") for line in lines)


def test_the_example_of_a_long_sequence_sees_a_wrong_element() -> None:
    root = Path(__file__).parents[2]
    example = str(root / "examples" / "long_context_attention.py")
    code = """
import runpy, sys
import mkernel as mk
real = mk.ring_attention
def spoiled(*arrays, **options):
    result = real(*arrays, **options)
    result.o[0, 3, -1, 7] += 0.25
    return result
mk.ring_attention = spoiled
sys.argv[1:] = ["--rows", "64"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    command = [sys.executable, "-c", f"import sys; sys.argv[0] = {example!r}" + code]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stderr
    assert result.stdout.endswith("WRONG\n")


def test_example_of_tuning_draws(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "examples" / "explore_split.py"), "--ranks", "2", "--m", "256", "--n", "136", "--k", "136"]
    environment = {**os.environ, "PYTHONPATH": str(root), "MKERNEL_CPU_SMS": "3"}
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "best" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"splits.svg", "default.svg", "best.svg"}
    for path in tmp_path.iterdir():
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


_SPOILED = """
import runpy, sys
import mkernel as mk
real = mk.{op}
def spoiled(*arrays):
    y = real(*arrays)
    y[-1, -1] += 0.25
    return y
mk.{op} = spoiled
sys.argv[1:] = ["--tokens", "64", "--hidden", "64", "--inner", "64"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("example", "op"), [("tensor_parallel_mlp.py", "gemm_reduce_scatter"), ("moe_layer.py", "moe_layer")])
def test_an_example_sees_a_wrong_element(example: str, op: str) -> None:
    root = Path(__file__).parents[2]
    code = f"import sys; sys.argv[0] = {str(root / 'examples' / example)!r}" + _SPOILED.format(op=op)
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1, result.stderr
    assert result.stdout.endswith("WRONG\n")


def test_every_op_is_shown_in_all_its_ways() -> None:
    shown = [*(name for name in names() if find(name).bench), "moe_layer"]
    for target in ("cpu", "cuda"):
        cases = demo_rank.cases(target, 4)
        assert {(case.op, case.dtype) for case in cases} == set(itertools.product(shown, ("bfloat16", "float16")))
        sizes = [tuple(map(int, case.size.split("x"))) for case in cases if case.op == "gemm_allreduce"]
        reductions = {choose_algorithm(Topology(4, 2), m, n) for m, n, _ in sizes}
        assert reductions == set(ALGORITHMS)
        for ranks in (1, 3, 8):
            for case in demo_rank.cases(target, ranks):  # each is a shape that the op takes
                ops()[case.op].case(case.size, Topology(ranks, 1), case.dtype)


def _reports(worst: float, cases: int | None = None, status: int = 0) -> Any:
    """Stands in for the ranks: every rank reports, rank 3 with this ratio of error to bound."""

    def run(ranks: int, arguments: Sequence[str], **_: Any) -> int:
        folder = Path(arguments[arguments.index("--worker") + 1])
        for rank in range(ranks):
            entries = [
                {"case": vars(case), "worst": worst if rank == 3 else 0.5, "milliseconds": 1.0}
                for case in demo_rank.cases("cpu", ranks)[:cases]
            ]
            (folder / f"{rank}.json").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return status

    return run


@pytest.mark.parametrize("worst", [1.01, float("inf"), float("nan")])
def test_one_wrong_rank_fails_the_demo(worst: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launcher, "run", _reports(worst))
    assert main(["demo", "--target", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: see above" in out
    assert not [line for line in out.splitlines() if line.endswith("right") and " x " in line]


NOT_WRITABLE = ["missing/x.svg", "", "file/x.svg", "x\0.svg", "a" * 300]


@pytest.mark.parametrize("name", NOT_WRITABLE)
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(launcher, "run", lambda *_, **__: pytest.fail("ranks were started"))
    assert main(["demo", "--target", "cpu", "--picture", f"{tmp_path}/{name}"]) == 1
    said = capsys.readouterr()
    assert "mkernel demo: ArgumentError: --picture = " in said.err
    assert "must be a file that can be written" in said.err
    assert "Traceback" not in said.err
    assert not said.out
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_whether_a_picture_can_be_written_is_found_out_without_a_trace(tmp_path: Path) -> None:
    old = tmp_path / "old.svg"
    old.write_text("kept")
    link = tmp_path / "link.svg"
    link.symlink_to(old)
    for path in (old, link, tmp_path / "new.svg"):
        require_writable("--picture", path)
    assert old.read_text() == link.read_text() == "kept"
    assert not (tmp_path / "new.svg").exists()
    (tmp_path / "dangling.svg").symlink_to(tmp_path / "target")
    require_writable("--picture", tmp_path / "dangling.svg")
    assert (tmp_path / "dangling.svg").is_symlink()


def test_a_picture_that_can_no_longer_be_written_costs_the_picture_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report, path = _reports(0.5), tmp_path / "x.svg"

    def run(ranks: int, arguments: Sequence[str], **options: Any) -> int:
        (Path(arguments[arguments.index("--worker") + 1]) / demo_rank.PICTURE).write_text("<svg/>")
        path.mkdir()
        return int(report(ranks, arguments, **options))

    monkeypatch.setattr(launcher, "run", run)
    assert main(["demo", "--target", "cpu", "--picture", str(path)]) == 0
    said = capsys.readouterr()
    assert "the picture is lost" in said.err
    assert "all results are right" in said.out


def test_right_reports_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launcher, "run", _reports(1.0))
    assert main(["demo", "--target", "cpu"]) == 0
    assert "all results are right" in capsys.readouterr().out


def test_missing_reports_fail_the_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launcher, "run", _reports(0.5, cases=1))
    assert main(["demo", "--target", "cpu"]) == 1
    assert f"1 of {len(demo_rank.cases('cpu', 4))} cases reported" in capsys.readouterr().err


def test_a_rank_that_fails_at_the_end_fails_the_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launcher, "run", _reports(0.5, status=7))
    assert main(["demo", "--target", "cpu"]) == 1
    assert "status 7" in capsys.readouterr().err


def test_ranks_that_hang_fail_the_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reported = _reports(0.5, cases=2)

    def run(*arguments: Any, **options: Any) -> int:
        reported(*arguments, **options)
        raise launcher.TimeLimitError("the ranks did not end within 7 s")

    monkeypatch.setattr(launcher, "run", run)
    assert main(["demo", "--target", "cpu", "--timeout", "7"]) == 1
    said = capsys.readouterr()
    assert "did not end" in said.err
    assert said.out.splitlines()[-1].endswith("; NOT FINISHED within the time limit of 7 s: --timeout SECONDS raises it")
    assert "WRONG" not in said.out, "what was checked is right"
    assert sum(line.endswith("right") for line in said.out.splitlines()) == 2


def test_ranks_that_are_wrong_and_hang_are_both(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reported = _reports(2.0, cases=2)

    def run(*arguments: Any, **options: Any) -> int:
        reported(*arguments, **options)
        raise launcher.TimeLimitError("the ranks did not end within 7 s")

    monkeypatch.setattr(launcher, "run", run)
    assert main(["demo", "--target", "cpu"]) == 1
    assert re.search(r"WRONG: see above; NOT FINISHED .* 300 s", capsys.readouterr().out)


def test_a_demo_that_is_interrupted_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*_: Any, **__: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "run", run)
    assert main(["demo", "--target", "cpu"]) == 130
    assert capsys.readouterr().err == "mkernel demo: interrupted\n"


def test_worlds_by_number_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def worlds(gpus: int) -> list[tuple[str, str]]:
        monkeypatch.setattr(demo, "_usable_gpus", lambda: gpus)
        return [(group.target, group.name) for group in demo._groups("auto")]

    assert worlds(0) == [("cpu", "2x2")]
    assert worlds(1) == [("cpu", "2x2"), ("cuda", "1x1")]
    assert worlds(4) == [("cuda", "2x2"), ("cuda", "1x4")]
    assert worlds(8) == [("cuda", "2x2"), ("cuda", "1x8")]
