"""Cases of ring_attention: shapes, a reference that sees what is wrong, and the baseline's steps with NumPy in place of torch."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from mkernel.bench.attention_baselines import attention_alone, attention_baseline, in_order, zigzag_attention
from mkernel.bench.cases import ops
from mkernel.bench.cases import ring_attention as cases
from mkernel.bench.timing import CpuTiming
from mkernel.errors import ArgumentError
from mkernel.planner.topology import Topology
from mkernel.tools.attention import positions, reference

TOPOLOGY = Topology(4, 2)


def test_shapes_are_read() -> None:
    case = ops()["ring_attention"].case("2x8x2x1024x64c", TOPOLOGY, "bfloat16")
    assert case.shape == {"B": 2, "Hq": 8, "Hkv": 2, "S": 1024, "D": 64}
    assert case.flops == 4 * 2 * 8 * 256 * 1024 * 64 / 2
    shard = 2 * 2 * 2 * 256 * 64 * 2
    assert (case.link_bytes, case.network_bytes) == (2 * shard, shard)
    assert "causal" in case.plan(132).describe()


@pytest.mark.parametrize("size", ["1x8x8x1024", "1x8x3x1024x64", "1x8x8x1026x64", "1x8x8x1028x64c", "1x8x8x1024x96", "0x8x8x1024x64", "c"])
def test_what_is_no_shape_is_refused(size: str) -> None:
    with pytest.raises(ArgumentError):
        ops()["ring_attention"].case(size, TOPOLOGY, "bfloat16")


@pytest.mark.parametrize("topology", [Topology(2, 2), Topology(4, 4)])
def test_drawn_shapes_take_at_most_60_ms(topology: Topology) -> None:
    op = ops()["ring_attention"]
    shapes = op.expand("random:60:7", topology)
    assert shapes == op.expand("random:60:7", topology)
    assert len(shapes) == 60
    drawn = [op.case(shape, topology, "bfloat16") for shape in shapes]
    assert all(case.flops <= 60e-3 * 600e12 for case in drawn)
    assert {case.shape["D"] for case in drawn} == {64, 128}
    assert {case.shape["Hq"] // case.shape["Hkv"] for case in drawn} == {1, 2, 4, 8}
    assert all(op.case(shape, topology, "bfloat16").flops > 0 for group in op.groups.values() for shape in group)
    with pytest.raises(ArgumentError, match="random:N:SEED"):
        op.expand("random:3", topology)


def test_the_reference_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong element is seen where all scores are computed, and where rows are drawn."""
    world = types.SimpleNamespace(rank=1, size=2, xp=np)
    for most in (1 << 36, 1):
        monkeypatch.setattr(cases, "_ALL_SCORES", most)
        monkeypatch.setattr(cases, "_BLOCK_SCORES", 1000)
        case: Any = ops()["ring_attention"].case("2x4x2x200x64c", Topology(2, 2), "float16")
        case.setup(CpuTiming(world, "float16"), 3)
        assert not case.worst(0) <= 1, "nobody has written anything"
        q, held = case._inputs[0][0], [positions(100, rank, 2, "zigzag") for rank in range(2)]
        for batch in range(2):
            for head in range(4):
                keys, values = (np.concatenate([case.drawn(0, rank, what)[batch, head // 2] for rank in range(2)]) for what in (1, 2))
                visible = np.concatenate(held)[None] <= held[1][:, None]
                right = reference(np, q[batch, head], keys, values, 1 / 8, "float16", visible)
                case._o[0][batch, head], case._lse[0][batch, head] = right.o, right.lse
        assert case.worst(0) <= 1
        case._lse[0] += 1
        assert case.worst(0) > 1


class Tensor(np.ndarray[Any, Any]):
    def unsqueeze(self, axis: int) -> Any:
        return np.expand_dims(self, axis).view(Tensor)

    def to(self, dtype: Any) -> Any:
        return self.astype(dtype)

    def flatten(self, first: Any = 0, last: Any = 1) -> Any:
        return self.reshape(-1, *self.shape[last + 1 :])

    def flip(self, axis: int) -> Any:
        return np.flip(self, axis)


def test_the_baseline_is_causal_attention(rng: np.random.Generator) -> None:
    ranks, length, half = 3, 36, 6
    q, k, v = (rng.standard_normal((2, heads, length, 4)) for heads in (4, 2, 2))

    def attend(q: Any, k: Any, v: Any, causal: bool) -> Any:
        scores = np.einsum("bhnd,bhmd->bhnm", q, np.repeat(k, 2, 1))
        if causal:
            scores = np.where(np.tril(np.ones(scores.shape[2:], bool)), scores, -np.inf)
        total = np.exp(scores).sum(-1)
        return (np.exp(scores) @ np.repeat(v, 2, 1) / total[..., None]).view(Tensor), np.log(total).view(Tensor)

    torch = types.SimpleNamespace(
        sigmoid=lambda x: 1 / (1 + np.exp(-x)), cat=lambda parts, axis=0: np.concatenate(parts, axis).view(Tensor)
    )
    whole = attend(q, k, v, True)[0]
    for rank in range(ranks):
        mine = positions(length // ranks, rank, ranks, "zigzag")
        found = zigzag_attention(torch, q[:, :, mine].view(Tensor), k, v, rank, ranks, attend)
        np.testing.assert_allclose(found, whole[:, :, mine], atol=1e-12)
    dealt = np.concatenate([positions(length // ranks, rank, ranks, "zigzag") for rank in range(ranks)])
    assert in_order(torch, dealt.view(Tensor)[:, None], ranks)[:, 0].tolist() == list(range(length))
    assert half * 2 * ranks == length


def test_where_there_is_no_torch_there_is_no_baseline() -> None:
    assert attention_baseline(object(), (), 0, 2, 1.0, True) == {}
    assert attention_alone(object(), (None, None, None), 1.0, True) == ()
