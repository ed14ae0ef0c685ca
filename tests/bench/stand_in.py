"""A world of one with NumPy in place of the op, for tests of the benchmark."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mkernel
from mkernel.bench.report import FUSED
from mkernel.bench.worker import Settings


class World:
    """A world of one as far as the benchmark looks."""

    rank, size, num_nodes, ranks_per_node, target, xp = 0, 1, 1, 1, "cpu", np
    options = types.SimpleNamespace(transport="")

    def barrier(self) -> None: ...
    def set_tuned(self, splits: dict[str, Any]) -> None: ...
    def exchange(self, what: str, value: Any, timeout: float) -> list[Any]:
        return [json.loads(json.dumps(value))]


def settings(**changes: Any) -> Settings:
    settings = Settings("gemm", ("64x72x520", "40x8x8"), "bfloat16", 3, {FUSED: None}, (), True, 50.0, "bench gemm", {})
    return dataclasses.replace(settings, **changes)


def stand_in(
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Any], None] | None = None,
    rows: Callable[[list[dict[str, Any]]], int | None] = lambda calls: None,
) -> list[dict[str, Any]]:
    """The list of calls that NumPy, in place of the op, will have got.

    ``spoil`` changes a result that was written. ``rows``: of the calls so far, this one last, how many rows it writes (None: all).
    """
    calls: list[dict[str, Any]] = []

    def allgather_gemm(a: Any, b: Any, *, world: Any, out: Any, split: Any) -> Any:
        calls.append({"split": split, "out": out})
        written = slice(rows(calls))
        out[written] = (a.astype(np.float32) @ b.astype(np.float32)).astype(out.dtype)[written]
        if spoil is not None:
            spoil(out)
        return out

    monkeypatch.setattr(mkernel, "allgather_gemm", allgather_gemm, raising=False)
    monkeypatch.setattr(mkernel, "Split", lambda **sms: sms, raising=False)
    return calls
