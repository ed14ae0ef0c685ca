"""``mkernel model``: plans in words, and times that follow from rates."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from mkernel import env
from mkernel.bench import classes, model
from mkernel.bench.cases import ops
from mkernel.bench.model_error import Measured
from mkernel.errors import ArgumentError
from mkernel.ops.op import BUILT_IN, find
from mkernel.planner.machine import H200
from mkernel.planner.prediction import ALONE
from mkernel.planner.topology import Topology


@pytest.mark.parametrize("op", [*(name for name in BUILT_IN if find(name).bench), "moe_layer", "gemm"])
def test_every_default_shape_has_a_plan(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main([op, "--world", "1x1" if op == "gemm" else "2x2"]) == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("shape") :].splitlines()
    assert [line.split()[0] for line in table[2 : 2 + len(ops()[op].sizes)]] == list(ops()[op].sizes)
    assert printed.count("workspace") == len(ops()[op].sizes)


def _predictions(printed: str) -> dict[str, dict[str, str]]:
    """The last table: cells by shape and column."""
    lines = printed.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("shape ")]
    columns = re.split(r"  +", lines[at].strip())
    rows = itertools.takewhile(bool, lines[at + 2 :])
    return {row.split()[0]: dict(zip(columns, row.split(), strict=True)) for row in rows}


def test_a_prediction_is_no_less_than_what_rates_allow(capsys: pytest.CaptureFixture[str]) -> None:
    model.main(["allgather_gemm", "--world", "1x4", "--shapes", "2048,8192", "--sms", "132"])
    rows = _predictions(capsys.readouterr().out)
    assert set(rows) == {"2048", "8192"}
    for label, row in rows.items():
        case = ops()["allgather_gemm"].case(label, Topology(4, 4), "bfloat16")
        parts = {name: float(row[f"{name} ms"]) for name in ("tensor", "load", "memory", "link", "network", "start", "latency")}
        assert parts["link"] == pytest.approx(case.link_bytes / 320e6, abs=1e-4)
        assert parts["network"] == 0
        assert float(row["predicted ms"]) >= max(parts.values())
        assert parts[row["binds"]] == max(parts.values())
        assert float(row["predicted ms"]) > case.flops / 132 / 6.6e9 / H200.boost, "the tensor cores of all SMs"


def test_few_rows_wait_for_their_weights(capsys: pytest.CaptureFixture[str]) -> None:
    model.main(["gemm_allreduce", "--world", "1x4", "--shapes", "1x8192x8192"])
    row = _predictions(capsys.readouterr().out)["1x8192x8192"]
    assert row["binds"] == "memory"
    assert float(row["memory ms"]) == pytest.approx(8192 * 2048 * 2 / 4.3e9, rel=0.01)


def test_few_tokens_wait_for_the_weights_of_their_experts(capsys: pytest.CaptureFixture[str]) -> None:
    for op, matrices in (("moe_dispatch_gemm", 1), ("moe_layer", 3)):
        model.main([op, "--world", "1x4", "--shapes", "4:mixtral-8x7b:uniform"])
        row = _predictions(capsys.readouterr().out)["4:mixtral-8x7b:uniform"]
        experts = float(row["memory ms"]) * 4.3e9 / (matrices * 4096 * 14336 * 2)
        assert 1.1 < experts < 1.4, "4 x 2 choices of 8 experts touch 1 - exp(-1) of the two of a rank, in the mean"


def test_a_faster_network_is_worth_its_share(capsys: pytest.CaptureFixture[str]) -> None:
    times = []
    for more in ([], ["--nics", "1"], ["--nics", "2"], ["--nics", "2", "--oversubscription", "4"]):
        model.main(["gemm_allreduce", "--world", "8x2", "--shapes", "8192", *more])
        row = _predictions(capsys.readouterr().out)["8192"]
        times.append((float(row["network ms"]), float(row["predicted ms"])))
    emulated, one, two, blocked = times
    assert emulated[0] == one[0] == pytest.approx(2 * two[0], rel=1e-3) == pytest.approx(blocked[0] / 2, rel=1e-3)
    assert emulated[1] > one[1] > two[1] < blocked[1]


def test_a_network_that_sms_play_is_quicker_and_leaves_fewer_sms(capsys: pytest.CaptureFixture[str]) -> None:
    times = []
    for engine in ("host", "sms"):
        with env.override(MKERNEL_EMULATED_ENGINE=engine):
            model.main(["allgather_gemm", "--world", "2x2", "--shapes", "2048"])
        printed = capsys.readouterr().out
        times.append(float(_predictions(printed)["2048"]["predicted ms"]))
        assert f"H200, {132 if engine == 'host' else 128} SMs" in printed
    assert times[1] < times[0] / 2


@pytest.mark.parametrize("wrong", ["--nics 0", "--nics 1 --nic-gbps 0", "--oversubscription 0.5", "--machine a100"])
def test_wrong_machines_are_refused(wrong: str) -> None:
    with pytest.raises(ArgumentError):
        model.main(["allgather_gemm", "--world", "1x4", "--shapes", "8192", *wrong.split()])


def test_a_machine_that_is_none_is_blamed_on_what_named_it() -> None:
    with pytest.raises(ArgumentError, match=r"^--machine = a100: must be .*`mkernel calibrate` writes such a file"):
        model.main(["allgather_gemm", "--machine", "a100"])
    with env.override(MKERNEL_MACHINE="a100"), pytest.raises(ArgumentError, match=r"^MKERNEL_MACHINE = a100: must be"):
        model.main(["allgather_gemm"])
    with env.override(MKERNEL_MACHINE="a100"):
        assert model.main(["gemm", "--shapes", "64x64x64", "--machine", "h100"]) == 0


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    """The message names the option, and what would do."""
    with pytest.raises(ArgumentError, match=r"--published = .*No such file.*docs/scale/published.json"):
        model.main(["--published", str(tmp_path / "none.json")])
    with pytest.raises(ArgumentError, match=r"--error = .*holds no report of `mkernel bench`.*--out"):
        model.main(["--error", str(tmp_path / "none")])
    (tmp_path / "else.json").write_text("[1]")
    with pytest.raises(ArgumentError, match=r"--published = .*no world, dtype and ms"):
        model.main(["--published", str(tmp_path / "else.json")])
    with pytest.raises(ArgumentError, match=r"--error = .*else.json is none"):
        model.main(["--error", str(tmp_path)])


def test_the_error_of_a_world_without_reports_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = ops()["gemm"].case("64x64x64", Topology(1, 1), "bfloat16")
    case.machine = H200
    row = Measured("gemm", "1x1", "64x64x64", "isolated", 1.0, case, ALONE)
    monkeypatch.setattr(model, "measured_in", lambda option, folder: [row])
    with pytest.raises(ArgumentError, match=r"--world = 1x3: no report .* \(there are 1x1\)"):
        model.main(["gemm", "--error", "reports", "--world", "1x3"])
    assert model.main(["gemm", "--error", "reports", "--world", "1"]) == 0
    assert "64x64x64" in capsys.readouterr().out


def test_a_comparison_lists_where_the_model_would_choose_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main(["gemm_allreduce", "--world", "1x4", "--shapes", "random:30:5", "--compare"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert re.match(r"\d+ of 30 shapes differ", first)
    assert 0.3 < float(last.split()[-1]) <= 1, "where the rules' kernel is one too many of an N and K, the next best may gain nothing"
    with pytest.raises(ArgumentError, match="--compare"):
        model.main(["ring_attention", "--world", "1x4", "--compare"])


def test_a_split_is_taken_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model.main(["allgather_gemm", "--world", "1x4", "--shapes", "8192", "--split", "intra_comm=8"])
    assert "compute 124, intra_comm 8" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="inter_send has nothing to do"):
        model.main(["allgather_gemm", "--world", "1x4", "--shapes", "8192", "--split", "inter_send=8"])
    with pytest.raises(ArgumentError, match="--sms"):
        model.main(["allgather_gemm", "--world", "2x2", "--shapes", "8192", "--sms", "1"])
    with pytest.raises(ArgumentError, match="--sms"):
        model.main(["allgather_gemm", "--world", "2x2", "--shapes", "8192", "--sms", "0"])


# ---- classes of rows
def _runs(printed: str) -> list[tuple[int, int]]:
    return [(int(first), int(last)) for first, last in re.findall(r"^(\d+) to (\d+) ", printed, re.MULTILINE)]


@pytest.mark.parametrize("op", ["allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce", "gemm"])
@pytest.mark.parametrize("most", [1, 300, 20_000])
def test_classes_cover_every_number_of_rows_once(op: str, most: int, capsys: pytest.CaptureFixture[str]) -> None:
    world, size = ("1x1", 1) if op == "gemm" else ("1x4", 4)
    assert model.main([op, "--world", world, "--shapes", "4096x1024x4096", "--max-rows", str(most)]) == 0
    found = _runs(capsys.readouterr().out)
    step = size if op == "gemm_reduce_scatter" else 1  # rows of the first operand, which a rank of a reduce-scatter has all of
    assert found[0][0] == step
    assert [first for first, _ in found[1:]] == [last + step for _, last in found[:-1]]
    assert found[-1][1] >= most > found[-1][0] - step


@pytest.mark.parametrize("world", [Topology(2, 2), Topology(4, 2), Topology(4, 4)])
@pytest.mark.parametrize("op", ["allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"])
def test_a_line_of_the_table_is_what_calls_of_these_rows_do(op: str, world: Topology) -> None:
    case = ops()[op].case("4096x1024x4096", world, "bfloat16")
    found = list(classes.runs(case, 8192, 132))
    assert len(found) > 1
    assert all(one.cells != other.cells for one, other in itertools.pairwise(found))
    for run in found:
        for rows in {run.first, (run.first + run.last) // 2, run.last}:
            plan: Any = case.plan(132, rows=rows // case.operand_rows)
            height, columns = run.cells[0].split("x")
            assert int(columns) == plan.columns
            if rows == run.last or not plan.swapped:  # with swapped operands fewer rows of a class have lower tiles
                assert int(height) == plan.block_rows
            assert f"compute {plan.split.compute}" in run.cells[2]
            assert plan.spec in run.specs
            assert plan.workspace_bytes + plan.staging_bytes <= run.workspace_bytes
    assert all(len(run.specs) == 1 for run in found), "a line is one kernel"


def test_kernels_are_counted_with_and_without_what_is_compiled_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKERNEL_PLANNER", "rules")  # which choose either way
    arguments = ["allgather_gemm", "--world", "1x4", "--shapes", "8192x8192x2048", "--max-rows", "65536", "--specialize"]
    model.main([*arguments, "all"])
    specialized, dynamic = map(int, re.findall(r"(\d+) kernels?", capsys.readouterr().out))
    model.main([*arguments, "none"])
    (alone,) = map(int, re.findall(r"(\d+) kernels?", capsys.readouterr().out))
    assert alone == dynamic < specialized, "two numbers of pushing CTAs are two kernels only where the split is compiled in"


def test_shapes_that_differ_in_rows_alone_have_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    model.main(["gemm_allreduce", "--world", "1x4", "--shapes", "1x8192x8192,64x8192x8192,64x4096x8192", "--max-rows", "64"])
    assert capsys.readouterr().out.count("rows of a") == 2


def test_wrong_options_of_classes_are_refused() -> None:
    arguments = ["allgather_gemm", "--world", "1x4", "--shapes", "8192"]
    with pytest.raises(ArgumentError, match="--max-rows"):
        model.main([*arguments, "--max-rows", "0"])
    with pytest.raises(ArgumentError, match="--specialize"):
        model.main([*arguments, "--max-rows", "8", "--specialize", "m"])
    with pytest.raises(ArgumentError, match="inter_send has nothing to do"):
        model.main([*arguments, "--max-rows", "8", "--split", "inter_send=8"])
