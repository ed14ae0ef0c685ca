"""Which kernels should serve all N and K? ``python tests/planner/kinds.py`` finds them anew.

For drawn N, K and rows (up to 16384, log-uniform) every plan that the model chooses from is predicted. Then kinds of kernels are taken one
by one, each the one that makes the fastest of those taken the least slower than the fastest of all, in the geometric mean: per op and world
a line each, with that mean and the worst ratio so far, and whether the kind is one of ``planner/kinds.py`` ("+"). Those come first with
``--kept``, and what is printed for them last is what choosing of them costs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from mkernel.planner import kinds  # noqa: E402
from mkernel.planner.allgather_gemm import AllGatherGemmProblem  # noqa: E402
from mkernel.planner.candidates import candidates  # noqa: E402
from mkernel.planner.kinds import Kind  # noqa: E402
from mkernel.planner.machine import H100, H200  # noqa: E402
from mkernel.planner.predict import predict  # noqa: E402
from mkernel.planner.reduce import ALLREDUCE, REDUCE_SCATTER, ReduceProblem  # noqa: E402
from mkernel.planner.row_classes import class_of  # noqa: E402
from mkernel.planner.topology import Topology  # noqa: E402

SMS = 132
LARGE = 10.0  # what having no kernel at all counts as, of the fastest


class Case(NamedTuple):
    """What the fastest plan of each kind is predicted to take, by N, K and rows of an op, relative to the fastest of all."""

    of: str
    ratios: dict[Kind, float]
    kept: frozenset[Kind]


def extents(rng: np.random.Generator) -> tuple[int, int]:
    """N and K of a rank, 512 to 16384, log-uniform, each a multiple of 8, or of 128."""
    n, k = (int(unit) * int(2 ** rng.uniform(9, 14) / unit) for unit in rng.choice((8, 128), 2))
    return n, k


def problems(world: Topology, n: int, k: int, *, b_row_major: bool = True) -> list[Any]:
    return [
        AllGatherGemmProblem(world, n, k, "bfloat16", b_row_major),
        ReduceProblem(REDUCE_SCATTER, world, n, k, "bfloat16", b_row_major),
        ReduceProblem(ALLREDUCE, world, n, k, "bfloat16", b_row_major),
    ]


def cases(world: Topology, drawn: int, rng: np.random.Generator) -> Iterator[tuple[str, Case]]:
    """By op."""
    for turn in range(drawn):
        n, k = extents(rng)
        for problem in problems(world, n, k, b_row_major=turn % 4 < 2):
            for rows in sorted({class_of(int(2 ** rng.uniform(0, 14))) for _ in range(12)}):
                seconds: dict[Kind, float] = {}
                kept = set()
                for plan in candidates(problem, rows, SMS, "none"):
                    found, kind = predict(plan, (H100, H200)[turn % 2]), kinds.kind_of(plan)
                    assert found is not None
                    seconds[kind] = min(found.seconds, seconds.get(kind, math.inf))
                    kept |= {kind} if kinds.serves_all(plan) else set()
                least = min(seconds.values())
                label = f"{rows} x {n} x {k}"
                yield kinds.op_of(problem), Case(label, {kind: one / least for kind, one in seconds.items()}, frozenset(kept))


def cost(found: list[Case], taken: set[Kind]) -> tuple[float, float]:
    """What choosing among these costs: the geometric mean, and the worst, of the ratios to the fastest."""
    ratios = [min((ratio for kind, ratio in case.ratios.items() if kind in taken), default=LARGE) for case in found]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)), max(ratios)


def in_order(found: list[Case], first: frozenset[Kind]) -> Iterator[tuple[Kind, float, float]]:
    """All kinds in the order of what they add to those before, those of ``first`` before others; with what choosing among them costs."""
    left, taken = {kind for case in found for kind in case.ratios}, set[Kind]()
    while left:
        of = left & first or left
        best = min(of, key=lambda kind: (cost(found, taken | {kind})[0], kind))
        taken.add(best)
        left.remove(best)
        yield best, *cost(found, taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", default=["1x1", "1x2", "1x4", "1x8", "2x2"], help="nodes x ranks of a node")
    parser.add_argument("--drawn", type=int, default=100, help="how many N and K, per world")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--kept", action="store_true", help="those of planner/kinds.py before others")
    parser.add_argument(
        "--more", type=int, default=4, help="kinds beyond the most there may be; -16: only what choosing of those kept costs"
    )
    asked = parser.parse_args()
    print("seed", asked.seed)
    for name in asked.worlds:
        nodes, of_node = map(int, name.split("x"))
        world = Topology(nodes * of_node, of_node)
        by_op: dict[str, list[Case]] = {}
        for op, case in cases(world, asked.drawn, np.random.default_rng(asked.seed)):
            by_op.setdefault(op, []).append(case)
        for op, found in by_op.items():
            kept = frozenset[Kind]().union(*(case.kept for case in found))
            print(f"\n{op}, {name}, {len(found)} shapes; of the {len(kept)} kept {'{:.4f}, worst {:.2f}'.format(*cost(found, set(kept)))}")
            order = in_order(found, kept if asked.kept else frozenset())
            for number, (kind, mean, worst) in enumerate(itertools.islice(order, kinds.MOST_KINDS + asked.more), 1):
                print(f"{number:3} {mean:.4f} {worst:.2f} {'+' if kind in kept else ' '} {shown(kind)}")


def shown(kind: Kind) -> str:
    """As ``planner/kinds.py`` has it."""
    cluster = f", {kind.cluster}" if kind.cluster != (1, 1) else ""
    given = (name for name in Kind._fields[2:] if getattr(kind, name) != Kind._field_defaults[name])
    return f"Kind({kind.width}{cluster}{''.join(f', {name}={getattr(kind, name)}' for name in given)})"


if __name__ == "__main__":
    main()
