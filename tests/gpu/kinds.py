"""Does the cost model rank the kinds of tiles that compete for a product as GPUs do? In a world of one; to fit it, and to try a fit.

``python tests/gpu/kinds.py --random 80 --out F`` draws shapes as ``mkernel bench`` does, half of them with B transposed, and times, of
each, the fastest candidate of every kind by prediction (tiles' columns, clusters, shares of K), the ``--kinds`` fastest of those, as far as
they are predicted to take less than 1.15 of the fastest. A shape may have its own tilings: ``--shapes 442x680x2816r/block_n=64,cluster=2``,
B row-major, with ``t`` transposed. Kernels are compiled by ``--processes`` first, so that 370 variants take three minutes of one GPU. Every
element is checked. Samples are isolated, back to back and in CUDA graphs, with cuBLAS beside them; variants take turns.

``python tests/gpu/kinds.py --read F ...`` predicts what files hold, without a GPU: how far predictions are off, how far when what all
variants of a shape are off by is left out, and how much longer the one that is predicted to be the fastest takes than the fastest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# The checkout is on the path only from here on.
import mkernel as mk  # noqa: E402
from mkernel.bench.baselines import NoBaselines, open_baselines  # noqa: E402
from mkernel.bench.cases import ops  # noqa: E402
from mkernel.bench.cases.base import LAYOUTS  # noqa: E402
from mkernel.bench.peers import fresh_seed  # noqa: E402
from mkernel.bench.shapes import drawn  # noqa: E402
from mkernel.bench.timing import open_timing  # noqa: E402
from mkernel.ops.op import find  # noqa: E402
from mkernel.ops.schedule import choice_of  # noqa: E402
from mkernel.planner.allgather_gemm import AllGatherGemmProblem, make_plan  # noqa: E402
from mkernel.planner.machine import H200, Machine  # noqa: E402
from mkernel.planner.predict import predict  # noqa: E402
from mkernel.planner.prediction import ALONE, BATCH, Conditions  # noqa: E402
from mkernel.planner.tiling import TilingError  # noqa: E402
from mkernel.planner.topology import Topology  # noqa: E402
from tests.gpu.tilings import askable, parsed  # noqa: E402

VENDOR = "cuBLAS"
OP = "allgather_gemm"
_NEAR = 1.15  # of the fastest by prediction
_ROUNDS, _ISOLATED, _BATCHES, _GRAPHS = 4, 5, 2, 3  # samples of each round, of which the first does not count
_REST_MS = 3.0


class Shape(NamedTuple):
    size: str
    row_major: bool

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(text[:-1], text[-1] == "r")

    def __str__(self) -> str:
        return self.size + ("r" if self.row_major else "t")

    @property
    def rows(self) -> int:
        return int(self.size.split("x")[0])

    @property
    def problem(self) -> AllGatherGemmProblem:
        _, n, k = map(int, self.size.split("x"))
        return AllGatherGemmProblem(Topology(1, 1), n, k, "bfloat16", self.row_major)

    def plan(self, tiling: str, sms: int) -> Any:
        """Raises TilingError if there is none."""
        return make_plan(self.problem, self.rows, sms, tiling=parsed(tiling, find(OP).tilings))

    def has(self, tiling: str) -> bool:
        try:
            return bool(self.plan(tiling, H200.sms))
        except TilingError:
            return False


def kinds_of(shape: Shape, machine: Machine, most: int) -> list[str]:
    """The fastest candidate of each kind by prediction."""
    found: dict[Any, str] = {}
    fastest = math.inf
    for plan, choice, seconds in askable(OP, shape.problem, shape.rows, machine.sms, machine, "n,k"):
        fastest = min(fastest, seconds)
        if len(found) == most or seconds > _NEAR * fastest:
            break
        fields = {name: getattr(choice.tiling, name) for name in sorted(choice.tiling.fields)}
        of_kind = (fields.get(name) for name in ("cluster", "cluster_n", "cluster_k", "tiles_at_once"))
        kind = plan.columns, bool(plan.swapped), plan.shares > 1, *of_kind
        found.setdefault(kind, ",".join(f"{name}={value}" for name, value in fields.items()))
    return list(found.values())


# ---- what is measured
class Measured(NamedTuple):
    """Milliseconds of a tiling on a shape, isolated, back to back and in graphs: medians."""

    shape: Shape
    tiling: str
    ms: tuple[float, float, float]


def read(paths: Iterable[Path]) -> list[list[Measured]]:
    """By shape. The vendor's times are left out, and those of tilings that there were only when they were measured."""
    found = []
    for path in paths:
        for text, times in json.loads(path.read_text())["shapes"].items():
            shape = Shape.parse(text)
            found.append([Measured(shape, tiling, tuple(ms)) for tiling, ms in times.items() if tiling != VENDOR and shape.has(tiling)])
    return found


class Error(NamedTuple):
    """How far predictions are off, as logarithms: the root of the mean square, the same within shapes; and what the first choice loses."""

    all_of_it: float
    within_shapes: float
    lost: float

    def __str__(self) -> str:
        return f"off by {self.all_of_it:.1%}, within shapes by {self.within_shapes:.1%}; the first choice loses {self.lost:.2%}"


def errors(found: Sequence[Sequence[Measured]], machine: Machine) -> list[Error]:
    """How far isolated calls are off, and those back to back. Chosen first is the one that is predicted to be the fastest isolated."""
    plans = [[one.shape.plan(one.tiling, machine.sms) for one in of_shape] for of_shape in found]
    alone, batch = ([_logarithms(of_shape, machine, conditions) for of_shape in plans] for conditions in (ALONE, BATCH))
    first = [min(range(len(of_shape)), key=of_shape.__getitem__) for of_shape in alone]
    return [
        _error([[math.log(one.ms[mode] * 1e-3) for one in of_shape] for of_shape in found], predicted, first)
        for mode, predicted in enumerate((alone, batch))
    ]


def _logarithms(plans: Sequence[Any], machine: Machine, conditions: Conditions) -> list[float]:
    return [math.log(prediction.seconds) for plan in plans if (prediction := predict(plan, machine, conditions))]


def _error(taken: Sequence[Sequence[float]], predicted: Sequence[Sequence[float]], first: Sequence[int]) -> Error:
    """Logarithms of seconds by shape and tiling, and the place of the tiling that is chosen of each shape."""
    off = [[a - b for a, b in zip(*of_shape, strict=True)] for of_shape in zip(predicted, taken, strict=True)]
    squares = [one**2 for of_shape in off for one in of_shape]
    within = [(one - statistics.fmean(of_shape)) ** 2 for of_shape in off for one in of_shape]
    lost = [of_shape[at] - min(of_shape) for of_shape, at in zip(taken, first, strict=True)]
    return Error(math.sqrt(statistics.fmean(squares)), math.sqrt(statistics.fmean(within)), statistics.fmean(lost))


def summary(found: Sequence[Sequence[Measured]], machine: Machine = H200) -> str:
    head = f"{len(found)} shapes, {sum(map(len, found))} times"
    return "\n".join(
        [head, *(f"{name}: {error}" for name, error in zip(("isolated", "back to back"), errors(found, machine), strict=True))]
    )


# ---- measuring
class _Bench:
    def __init__(self, target: str, vendor: bool) -> None:
        self.world = mk.init(target=target, heap_bytes=(4096 if target == "cuda" else 256) << 20)
        self.timing: Any = open_timing(self.world, "bfloat16", _REST_MS if target == "cuda" else 0.0)
        has_vendor = vendor and target == "cuda"
        self.baselines: Any = open_baselines(self.world, self.timing.stream) if has_vendor else NoBaselines("not asked for")

    def case_of(self, shape: Shape) -> Any:
        case = ops()[OP].case(shape.size, self.world.topology, "bfloat16", b=LAYOUTS[0 if shape.row_major else 1])
        case.setup(self.timing, fresh_seed(self.world))
        return case

    def compile(self, shape: Shape, tilings: Sequence[str]) -> None:
        """Make one call of each, whose kernel is then in the cache."""
        case = self.case_of(shape)
        for tiling in tilings:
            case.fused(choice_of(None, None, parsed(tiling, find(OP).tilings)))[0]()
            self.timing.synchronize()

    def measure(self, shape: Shape, tilings: Sequence[str]) -> tuple[dict[str, list[float]], list[str]]:
        """Medians by tiling, and those with wrong results."""
        case, runs, wrong = self.case_of(shape), {}, []
        for tiling in tilings:
            runs[tiling] = list(case.fused(choice_of(None, None, parsed(tiling, find(OP).tilings))))
            for out in case.outputs():
                self.timing.poison(out)
            self.timing.warm_up(runs[tiling])
            if not max(float(case.worst(index)) for index in range(len(runs[tiling]))) <= 1.0:
                wrong.append(tiling)
        if vendor := list(case.alone(self.baselines)):
            self.timing.warm_up(vendor)
            runs[VENDOR] = vendor
        samples: dict[str, tuple[list[float], ...]] = {name: ([], [], []) for name in runs}
        for turn in range(_ROUNDS):
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                calls = runs[name]
                taken = (
                    self.timing.isolated(calls, _ISOLATED),
                    self.timing.back_to_back(calls, _BATCHES),
                    self.timing.replayed(calls, _GRAPHS),
                )
                for times, one in zip(samples[name], taken, strict=True):
                    times.extend(one.times if turn else [])
        return {name: [statistics.median(times) for times in modes] for name, modes in samples.items()}, wrong

    def close(self) -> None:
        self.baselines.close()
        self.timing.close()
        self.world.close()


def _wanted(options: argparse.Namespace) -> dict[Shape, list[str]]:
    wanted = {Shape.parse(text.split("/")[0]): text.split("/")[1:] for text in options.shapes}
    if options.random:
        seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "little")
        print(f"--seed {seed}")
        for at, size in enumerate(drawn(options.random, seed, 1, splits_k=False)):
            wanted[Shape(size, at % 2 == 0)] = []
    return {shape: tilings or kinds_of(shape, H200, options.kinds) for shape, tilings in wanted.items()}


def _compile(wanted: dict[Shape, list[str]], options: argparse.Namespace) -> None:
    """In processes of their own: each makes every n-th call."""
    shapes = ["/".join([str(shape), *tilings]) for shape, tilings in wanted.items()]
    command = [sys.executable, __file__, "--target", options.target, "--shapes", *shapes, "--part"]
    running = [subprocess.Popen([*command, f"{part}:{options.processes}"]) for part in range(options.processes)]
    statuses = [process.wait() for process in running]
    if any(statuses):
        raise SystemExit("kernels could not be compiled")


def _compile_part(wanted: dict[Shape, list[str]], part: str, target: str) -> None:
    number, parts = map(int, part.split(":"))
    bench, at = _Bench(target, vendor=False), 0
    for shape, tilings in wanted.items():
        if mine := [tiling for i, tiling in enumerate(tilings, at) if i % parts == number]:
            bench.compile(shape, mine)
        at += len(tilings)
    bench.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", nargs="+", type=Path, default=[], metavar="FILE", help="predict what these files hold, and end")
    parser.add_argument("--shapes", nargs="+", default=[], help="MxNxKt or MxNxKr, with /TILING/TILING... or as the model ranks them")
    parser.add_argument("--random", type=int, default=0, help="and so many drawn shapes")
    parser.add_argument("--seed", type=int, default=None, help="of the drawn shapes (default: fresh)")
    parser.add_argument("--kinds", type=int, default=6, help="at most, of a shape")
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=400.0, help="measure no other shape after so long")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=None, help="JSON with all times")
    options = parser.parse_args()
    if options.read:
        print(summary(read(options.read)))
        return 0
    begin = time.monotonic()
    wanted = _wanted(options)
    if options.part:
        _compile_part(wanted, options.part, options.target)
        return 0
    _compile(wanted, options)
    bench, shapes, failed = _Bench(options.target, vendor=True), {}, 0
    for shape, tilings in wanted.items():
        if time.monotonic() - begin > options.seconds:
            print(f"not measured for lack of time: {len(wanted) - len(shapes)}")
            break
        shapes[str(shape)], wrong = bench.measure(shape, tilings)
        failed += len(wrong)
        for name, ms in shapes[str(shape)].items():
            print(shape, *(f"{one * 1e3:8.1f}" for one in ms), name, "WRONG" if name in wrong else "", flush=True)
        if options.out is not None:  # what has been found is kept, whatever comes
            options.out.write_text(json.dumps({"unit": "ms", "target": options.target, "shapes": shapes}, indent=0) + "\n")
    bench.close()
    print(f"{failed} wrong")
    return 1 if failed or len(shapes) < len(wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
