"""``mkernel model``: plans in words, and times that follow from rates."""

from __future__ import annotations

import pytest

from mkernel.bench import model
from mkernel.bench.cases import OPS
from mkernel.errors import ArgumentError
from mkernel.plan.topology import Topology


@pytest.mark.parametrize("op", list(OPS))
def test_every_default_shape_has_a_plan(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main([op, "--world", "1x1" if op == "gemm" else "2x2"]) == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("shape") :].splitlines()
    assert [line.split()[0] for line in table[2 : 2 + len(OPS[op].sizes)]] == list(OPS[op].sizes)
    assert printed.count("workspace") == len(OPS[op].sizes)


def test_the_parts_follow_from_rates(capsys: pytest.CaptureFixture[str]) -> None:
    model.main(["allgather_gemm", "--world", "1x4", "--shapes", "2048,8192", "--sms", "132"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith(("2048", "8192"))]
    assert len(rows) == 2
    for label, *cells in rows:
        multiplying, memory, link, network, longest = map(float, cells)
        case = OPS["allgather_gemm"].case(label, Topology(4, 4), "bfloat16")
        assert link == pytest.approx(case.link_bytes / 325e6, abs=1e-4)
        assert network == 0
        assert longest == max(multiplying, link) > memory > 0
        assert 600 < case.flops / multiplying / 1e9 < 800, "TFLOP/s of an H200"


def test_few_rows_take_as_long_as_their_weights(capsys: pytest.CaptureFixture[str]) -> None:
    model.main(["gemm_allreduce", "--world", "1x4", "--shapes", "1x8192x8192"])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("1x8192x8192"))
    _, _, memory, _, _, longest = row.split()
    assert longest == memory == f"{8192 * 2048 * 2 / 4.8e9:.4f}"


def test_a_split_is_taken_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model.main(["allgather_gemm", "--world", "1x4", "--shapes", "8192", "--split", "intra_comm=8"])
    assert "compute 124, intra_comm 8" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="inter_send has nothing to do"):
        model.main(["allgather_gemm", "--world", "1x4", "--shapes", "8192", "--split", "inter_send=8"])
    with pytest.raises(ArgumentError, match="--sms"):
        model.main(["allgather_gemm", "--world", "2x2", "--shapes", "8192", "--sms", "1"])
    with pytest.raises(ArgumentError, match="--sms"):
        model.main(["allgather_gemm", "--world", "2x2", "--shapes", "8192", "--sms", "0"])
