"""How ops are measured: a bench op for each registered op that has one, the layer of two of them, the GEMM of a world of one."""

from __future__ import annotations

import importlib

from mkernel.bench.cases import gemm, moe_layer
from mkernel.bench.cases.base import Case, LocalGemm, Op
from mkernel.ops.op import find, names

__all__ = ["Case", "LocalGemm", "Op", "ops"]


def ops() -> dict[str, Op]:
    """Bench ops by name."""
    modules = [importlib.import_module(op.bench) for op in map(find, names()) if op.bench]
    return {op.name: op for op in (*(module.OP for module in modules), moe_layer.OP, gemm.OP)}
