"""Curves over worlds of up to 4096 nodes: what they must keep to, and that the page of curves shows what the model says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from mkernel.abi import MAX_RANKS
from mkernel.bench import model
from mkernel.bench.published import Constants, fitted, published
from mkernel.bench.scale import GROWTHS, SCALED, curve
from mkernel.errors import ArgumentError
from mkernel.planner.machine import H200, RDMA
from mkernel.planner.prediction import RESOURCES
from mkernel.planner.ring_problem import MOST_RANKS

PAGE = Path(__file__).parents[2] / "docs" / "scale"
MACHINE = H200.with_network(RDMA)
NODES = [1 << power for power in range(13)]


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_scale", PAGE / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("op", SCALED)
def test_a_curve_keeps_to_what_can_be(op: str, growth: str) -> None:
    points = curve(op, growth, MACHINE, NODES)
    assert [point.nodes for point in points] == NODES
    for point in points:
        assert ("ranks" in point.missing) == (point.ranks > (MOST_RANKS if op == "ring_attention" else MAX_RANKS))
        if point.prediction is None:
            assert {"SMs", "shape"} & set(point.missing)
            continue
        assert 0 < point.efficiency < 1
        assert point.prediction.binds in RESOURCES
    seconds = [point.prediction.seconds for point in points if point.prediction]
    assert len(seconds) >= 6
    if growth == "weak":  # each rank has as much of its own, and more of the others'
        assert seconds == sorted(seconds)
    else:
        assert seconds[1] < seconds[0]


def test_pictures_are_what_the_model_says() -> None:
    """Otherwise: python docs/scale/draw.py."""
    for name, text in _module().pictures().items():
        assert (PAGE / name).read_text(encoding="utf-8") == text, name


def test_constants_of_another_implementation_are_found() -> None:
    """Times that the model has made with constants are fitted by them, and by no others."""
    rows = published(PAGE / "published.json", MACHINE)["gemm_reduce_scatter"]
    wanted = Constants(150e-6, 0.8, 0.7)
    made = [type(row)(row.op, row.label, row.ms * row.ratio(wanted.of(MACHINE)), row.plan, row.tokens) for row in rows]
    assert fitted(made, MACHINE) == wanted
    assert all(row.ratio(wanted.of(MACHINE)) == pytest.approx(1) for row in made)


def test_what_is_wrong_is_refused() -> None:
    for wrong in ("--scale 0", "gemm --scale 8", "--world 2x2 --leaf-nodes 0", "--world 2x2 --engine python"):
        with pytest.raises(ArgumentError):
            model.main(wrong.split())
    with pytest.raises(ArgumentError, match=r"--world.*ring_attention: inter_send needs an SM for each rank .*511"):
        model.main(["ring_attention", "--world", "512x1", "--shapes", "1x16x16x65536x128"])
