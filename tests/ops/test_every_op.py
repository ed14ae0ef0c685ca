"""The shared bodies hold for mkernel's own ops, also those to come: all go by the registry."""

from __future__ import annotations

import numpy as np
import pytest

from mkernel.bench.cases import ops
from mkernel.ops.op import BUILT_IN, find
from tests.shared.worlds import found_wrong


@pytest.mark.parametrize("world", ["1x2", "2x2"])
@pytest.mark.parametrize("op", [*(name for name in BUILT_IN if find(name).bench), "moe_layer"])
@pytest.mark.drawn(4)
def test_what_the_demo_shows_is_right_under_any_schedule(rng: np.random.Generator, op: str, world: str) -> None:
    sizes = tuple(ops()[op].demo_sizes("cpu", 4 if world == "2x2" else 2))
    sizes = sizes[1:] or sizes
    seed = int(rng.integers(1 << 30))
    assert found_wrong(op, world, str(rng.choice(("bfloat16", "float16"))), sizes, seed) is None, seed
