"""Predictions beside times that others have published of their kernels: how far off, as ours and with constants of theirs. Needs no GPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mkernel.bench.cases import ops
from mkernel.bench.command import parse_world
from mkernel.bench.scale import moe_plans
from mkernel.errors import ArgumentError
from mkernel.planner.machine import Machine
from mkernel.planner.predict import predict
from mkernel.planner.prediction import BATCH
from mkernel.tools.table import format_table

__all__ = ["Constants", "Published", "fitted", "published", "published_table"]

_FIXED = (0.0, 50e-6, 100e-6, 150e-6, 200e-6, 250e-6, 500e-6, 1e-3)
_SPEEDS = (1.1, 1.0, 0.9, 0.8, 0.7, 0.6)
_RATES = (1.2, 1.0, 0.85, 0.7, 0.5)


class Constants(NamedTuple):
    """How another implementation differs: seconds more per call, and shares of the speed of products, and of links and network."""

    fixed: float = 0.0
    speed: float = 1.0
    rate: float = 1.0

    def of(self, machine: Machine) -> Machine:
        rate, network = self.rate, machine.network
        return dataclasses.replace(
            machine,
            start_hot=machine.start_hot + self.fixed,
            **{name: getattr(machine, name) * self.speed for name in ("sm_flops", "attention_flops", "sm_load")},
            **{name: getattr(machine, name) * rate for name in ("link", "link_pair", "cta_link", "add")},
            network=dataclasses.replace(network, bandwidth=network.bandwidth * rate),
        )


@dataclasses.dataclass(frozen=True)
class Published:
    """One time: milliseconds of a call behind others."""

    op: str
    label: str
    ms: float
    plan: Any  # ours, for the same shape
    tokens: int | None

    def ratio(self, machine: Machine) -> float:
        """Predicted over published. Raises ValueError where the model knows nothing of the op."""
        found = predict(self.plan, machine, BATCH, self.tokens)
        if found is None:
            raise ValueError(f"the cost model knows nothing of {self.op}")
        return found.seconds * 1e3 / self.ms


def published(path: Path, machine: Machine) -> dict[str, list[Published]]:
    """The times of a file, by op, in the order of sizes. Raises ArgumentError where it has none."""
    raw = _read(path)
    world = parse_world(raw["world"])
    found: dict[str, list[Published]] = {}
    plan: Any
    for op, times in raw["ms"].items():
        for label, ms in times.items():
            tokens = None
            if op == "moe_dispatch_gemm":  # planned without drawing a routing, which takes seconds
                tokens, hidden, inner, experts, topk = map(int, label.partition(":")[0].split("x"))
                plan, _ = moe_plans(machine, world, tokens, (hidden, inner, experts // world.size, topk), gated=False)
            else:
                plan = ops()[op].case(label, world, raw["dtype"]).plan(machine.sms)
            found.setdefault(op, []).append(Published(op, label, ms, plan, tokens))
    return found


def _read(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        problem = "" if isinstance(raw, dict) and raw.keys() >= {"world", "dtype", "ms"} else "it has no world, dtype and ms"
    except (OSError, ValueError) as error:
        problem = (isinstance(error, OSError) and error.strerror) or str(error)
    if problem:
        rule = f"must be a JSON file of times by op and shape ({problem})"
        raise ArgumentError("--published", path, rule, "docs/scale/published.json is one")
    return dict(raw)


def fitted(rows: Sequence[Published], machine: Machine) -> Constants:
    """The constants, of a grid, with which the predictions of ``rows`` are nearest, by squares of logarithms."""

    def cost(constants: Constants) -> float:
        candidate = constants.of(machine)
        return sum(math.log(row.ratio(candidate)) ** 2 for row in rows)

    return min(itertools.starmap(Constants, itertools.product(_FIXED, _SPEEDS, _RATES)), key=cost)


def published_table(path: Path, machine: Machine) -> str:
    """Each time with its prediction, and with constants that were fitted to every other size of its op."""
    lines = []
    for op, rows in published(path, machine).items():
        constants = fitted(rows[::2], machine)
        theirs = constants.of(machine)
        said = f"{constants.fixed * 1e6:g} us, {constants.speed:g}, {constants.rate:g}"
        for i, row in enumerate(rows):
            ours, fit = row.ratio(machine), row.ratio(theirs)
            lines.append(
                [
                    op,
                    row.label.partition(":")[0],
                    f"{row.ms:.3f}",
                    f"{ours * row.ms:.3f}",
                    f"{ours:.2f}",
                    f"{fit:.2f}",
                    "" if i % 2 else "yes",
                    said,
                ]
            )
    head = ["op", "shape", "published ms", "ours, predicted", "ratio", "ratio, as theirs", "fitted", "more per call, products, links"]
    return format_table(head, lines)
