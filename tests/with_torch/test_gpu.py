"""The same gradients on GPUs, with CUDA tensors, and the examples with NCCL and CUDA graphs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make test-torch`")

import mkernel as mk
from tests.with_torch import test_attention, test_autocast, test_gemm, test_linear, test_moe, test_programs
from tests.with_torch.programs import draw
from tests.with_torch.test_examples import finish

pytestmark = pytest.mark.gpu
RANKS = int(os.environ.get("TEST_RANKS", 0)) or min(4, torch.cuda.device_count())  # more than GPUs: with MKERNEL_SHARE_GPUS=1
WORLD: dict[str, Any] = {"ranks": RANKS, "target": "cuda", "heap_bytes": 1 << 28}


@pytest.mark.parametrize("column_major", [False, True], ids=["row-major", "column-major"])
@pytest.mark.parametrize("case", test_gemm.CASES)
def test_products(case: str, column_major: bool, rng: np.random.Generator) -> None:
    function, more = test_gemm.CASES[case]
    worst = mk.launch(function, args=(int(rng.integers(1 << 30)), "bfloat16", column_major, *more), **WORLD)
    assert max(max(ratios) for ratios in worst) <= 1, worst


@pytest.mark.parametrize("kind", ["ColumnParallelLinear", "RowParallelLinear"])
def test_layers(kind: str, rng: np.random.Generator) -> None:
    for errors in mk.launch(test_linear._errors, args=(kind, True, True, test_linear.whole(int(rng.integers(1 << 30)), True)), **WORLD):
        assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize(("causal", "layout"), [(False, "contiguous"), (True, "contiguous"), (True, "zigzag")])
def test_attention_gradients(causal: bool, layout: str, rng: np.random.Generator) -> None:
    """Torch's kernel rounds the gradients of k and v of each piece to bfloat16."""
    for found in mk.launch(test_attention._gradients, args=(int(rng.integers(1 << 30)), causal, layout, torch.bfloat16), **WORLD):
        assert max(largest for _, largest in found) <= 8 * 2**-8, found


def test_moe_layer(rng: np.random.Generator) -> None:
    given = test_moe.draw(int(rng.integers(1 << 30)), RANKS, [40] * RANKS, True)
    for errors in mk.launch(test_moe._layer, args=(given, test_moe.reference(given, rounded=True)), **WORLD):
        assert max(errors.values()) <= 4, errors


def test_random_programs(rng: np.random.Generator) -> None:
    for _ in range(6):
        program = draw(rng, RANKS, str(rng.choice(["bfloat16", "float16"])))
        options = {key: value for key, value in WORLD.items() if key != "ranks"}
        assert test_programs.wrong(program, f"1x{RANKS}", int(rng.integers(1, 3)), **options, specialize=None) == {}, program


@pytest.mark.parametrize("name", sorted(test_autocast.OPS.keys() - {"ring_attention"}))  # whose backward pass torch does in any order
def test_autocast_in_backward(name: str) -> None:
    assert not any(mk.launch(test_autocast._differ, args=(name,), **WORLD))


@pytest.mark.parametrize("name", ["torch_tensor_parallel", "torch_serving"])
def test_examples(name: str) -> None:
    finish(name, RANKS)
