"""``mkernel cache``."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from mkernel import env
from mkernel.cli.main import main
from mkernel.jit import cpu
from mkernel.jit.headers import sources_digest
from mkernel.jit.spec import KernelSpec
from mkernel.ops.schedule import tuning_name
from mkernel.planner.allgather_gemm import AllGatherGemmProblem
from mkernel.planner.reduce import ALLREDUCE, ReduceProblem
from mkernel.planner.row_classes import span
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology
from mkernel.runtime import tuning_cache as tuned

HEADER = "struct Parameters { uint64_t unused[8]; };\nMK_KERNEL(32)(MK_GRID_CONSTANT Parameters p) { (void)p; }\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_empty(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache"]) == 0
    assert str(folder) in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0
    assert "removed 0 files" in capsys.readouterr().out


def test_clear_removes_what_was_compiled_and_nothing_else(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty_kernel.cuh").write_text(HEADER)
    spec = KernelSpec("empty_kernel", (), 32, 0, 64)
    compiled = cpu.compile(spec, include=[tmp_path])
    (folder / "cuda" / "entries").mkdir(parents=True)
    (folder / "cuda" / "entries" / "cubin").write_bytes(bytes(100))
    (folder / "cuda" / "samples").mkdir()
    (folder / "cuda" / "samples" / "mine.cu").write_text("keep")
    (folder / "letters.txt").write_text("keep")

    assert main(["cache", "show"]) == 0
    shown = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]}
    assert shown["cuda"] == "1"
    assert int(shown["cpu"]) >= 1

    assert main(["cache", "clear"]) == 0
    assert not compiled.exists()
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == ["letters.txt", "mine.cu"]
    assert cpu.compile(spec, include=[tmp_path]) == compiled  # and it comes back
    assert compiled.exists()


def test_tuned_splits_are_shown_with_their_classes_of_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line each, by problem and then by rows; of device code that is not here, too, with a remark."""
    here = tuned.TuningKey("a GPU", 132, "rc", sources_digest())
    gather = AllGatherGemmProblem(Topology(4, 2), 2048, 8192, "bfloat16", True)
    reduction = ReduceProblem(ALLREDUCE, Topology(4, 4), 8192, 2048, "float16", False, "float32", "one_shot")

    def keep(place: tuned.TuningKey, op: str, problem: AllGatherGemmProblem | ReduceProblem, rows: int, split: Split) -> None:
        asked, ends = dataclasses.asdict(problem), [span(rows)[0], span(rows)[-1]]
        tuned.save(place, tuning_name(problem, rows), split, op=op, asked=asked, rows=ends, date="2026-11-22T20:49:14+00:00")

    for rows in (4000, 100, 7):
        keep(here, "allgather_gemm", gather, rows, Split(None, 8, 2))
    keep(dataclasses.replace(here, kernels="another"), ALLREDUCE, reduction, 3, Split(None, 12))
    assert main(["cache"]) == 0
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [[cell.strip() for cell in re.split(r"  +", line)] for line in table[2:]] == [
        [
            "allgather_gemm: b (8192, 2048) row-major, bfloat16, 2x2 ranks",
            rows,
            "intra_comm 8, inter_send 2",
            "a GPU, 132 SMs, rc",
            "2026-11-22",
            "yes",
        ]
        for rows in ("5 to 8", "97 to 112", "3969 to 4032")
    ] + [
        [
            "gemm_allreduce: b (2048, 8192) transposed, float16, partials float32, algorithm one_shot, 1x4 ranks",
            "3 to 4",
            "intra_comm 12",
            "a GPU, 132 SMs, rc",
            "2026-11-22",
            "no: other device code",
        ]
    ]


@pytest.mark.parametrize("facts", [{}, {"op": "x"}, {"op": "x", "asked": {}, "rows": [1, 2]}, {"op": "x", "asked": 3, "rows": 4}])
def test_a_tuned_split_without_facts_is_shown_by_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str], facts: dict[str, object]
) -> None:
    path = tuned.save(tuned.TuningKey("a GPU", 132, "", "kernels"), "a problem, rows 1 to 16", Split(None, 8), **facts)
    (folder / "tuned" / "broken.json").write_text(json.dumps({"problem": "nothing else"}))
    assert path is not None
    assert main(["cache"]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("a problem, rows 1 to 16")]) == 1
