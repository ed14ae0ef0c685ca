"""Is what the planner chooses for tiles faster than what it chose before? ``python tests/gpu/tilings.py --ranks 2``, or under mpirun.

Shapes are the rows of the issue where the ops lost, few rows above all, and random ones (``--random 40``, of the same distribution: M 1 to
16384, N 512 to 16384, K 512 to 8192, log-uniform, half of N and K multiples of 128, half of 8). Per shape two variants take turns, on fresh
inputs: ``old``, a tile per shard or owner with all of K (``OLD`` below, by ``mk.plan(tiling=)``'s means), and ``new``, what is chosen now;
with ``--all``, also every tiling that the planner has predicted a time for. Every element of every variant is checked first. Samples are
isolated calls, and calls back to back, as ``mkernel bench`` takes them (docs/benchmarks.md); a sample counts with its slowest rank. As
there, a call alone comes after calls of the same kernel: after another kernel it takes some 2 us longer (docs/speed_log.md, "Code that is
not there").

``--aligned`` adds a variant whose operands' rows begin at multiples of 128 bytes (the same numbers, in wider arrays): what it gains is what
rows that are not aligned cost the loads. It applies to ``b``, and to ``a`` of the reductions.

``--shares`` adds variants of ``allgather_gemm`` in which as many CTAs share K as there are, for each tile width, alone and in pairs.

``--pairs`` adds variants of ``allgather_gemm`` in which pairs of CTAs load B together, and of each tile width with and without; in a world
of one both add the vendor's product (``cuBLAS``), as ``--vendor`` does.

``--swapped`` adds variants with swapped operands, of several heights of tiles, alone, with K shared, and in clusters; of reductions
in packets.

``--tilings block_n=64,shares=4 packets=0`` adds these, of the fields that an op knows, where a plan can have them. A shape may have its
own, ``allgather_gemm:486x2208x3536/block_m=88,cluster=2/block_m=96,cluster_n=4``: then there is no ``old``, and ``new`` comes first.

``--b transposed`` measures calls whose B is the transpose view of an (N, K) array, as weights of torch's linear layers are passed.

``--ranked 10`` adds the ten candidates that the model of this machine predicts to be fastest (``#1`` to ``#10``, the prediction beside
each), as far as ``split=`` and a tiling can ask for them.

Per line: op, shape, variant, milliseconds isolated and back to back (medians), their ratio to the first with the upper 95 % bound, what is
predicted, and what was chosen. Then how far what is chosen is from the best of all that were measured, and predictions from the times.
``--out FILE`` gets all samples as JSON. ``--target cpu`` goes through the motions without a GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

# The checkout is on the path only from here on.
import mkernel as mk  # noqa: E402
from mkernel.bench.baselines import NoBaselines, open_baselines  # noqa: E402
from mkernel.bench.cases import ops  # noqa: E402
from mkernel.bench.cases.base import LAYOUTS  # noqa: E402
from mkernel.bench.peers import fresh_seed, gather  # noqa: E402
from mkernel.bench.timing import CudaTiming, open_timing  # noqa: E402
from mkernel.ops.op import find  # noqa: E402
from mkernel.ops.schedule import Choice, choice_of  # noqa: E402
from mkernel.planner.allgather_gemm import make_plan  # noqa: E402
from mkernel.planner.choice import ranked  # noqa: E402
from mkernel.planner.heights import SWAPPED_ROWS  # noqa: E402
from mkernel.planner.machine import Machine  # noqa: E402
from mkernel.planner.predict import predict  # noqa: E402
from mkernel.planner.reduce import SWAPPED_TILE  # noqa: E402
from mkernel.planner.split import Split, SplitError  # noqa: E402
from mkernel.planner.tiling import Tiling, TilingError  # noqa: E402
from mkernel.tools import launcher  # noqa: E402
from tests.gpu.compare import COOLDOWN_MS, bootstrap_upper  # noqa: E402

_OTHERS = {"cuBLAS", "aligned"}  # variants that are no choice of the planner's
_NEAR = 1.05  # of the best
GATHER, SCATTER, ALL = "allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"
OLD = {"span": 1, "shares": 1, "packets": 0}  # fields that an op does not know are left out
ROWS = (  # op, and M x N x K of a rank
    *((GATHER, size) for size in ("256x14336x8192", "20x15872x5504", "88x12656x3832", "84x1480x5528", "256x2560x8192", "1000x2568x3592")),
    (GATHER, "144x3328x6912"),
    *((SCATTER, size) for size in ("104x7856x5088", "20x2240x3952", "528x3360x4944", "256x8192x7168", "9052x2160x6488", "16x1152x3968")),
    (SCATTER, "1504x1680x5912"),
    *((ALL, size) for size in ("1024x8192x7168", "6x800x4416", "161x1280x6016", "524x15120x2936")),
    *((op, size) for op in (GATHER, SCATTER, ALL) for size in ("2048x2048x2048", "4096x4096x4096")),  # they must not get slower
)


def drawn(seed: int, count: int) -> list[tuple[str, str]]:
    """Random shapes, the ops in turn."""
    rng = random.Random(seed)

    def extent(low: int, high: int) -> int:
        step = rng.choice((8, 128))
        return max(step, round(low * (high / low) ** rng.random() / step) * step)

    return [
        ((GATHER, SCATTER, ALL)[i % 3], f"{round(16384 ** rng.random())}x{extent(512, 16384)}x{extent(512, 8192)}") for i in range(count)
    ]


@dataclasses.dataclass(frozen=True)
class Found:
    """One variant on one shape; milliseconds of samples that count, isolated and back to back."""

    op: str
    size: str
    variant: str
    chosen: str
    worst: float  # error over its bound
    isolated: list[float]
    back_to_back: list[float]
    predicted: float = math.nan  # ms, isolated

    def line(self, old: Found) -> str:
        cells = []
        for mine, before in ((self.isolated, old.isolated), (self.back_to_back, old.back_to_back)):
            ratio = statistics.median(mine) / statistics.median(before)
            cells.append(f"{statistics.median(mine):9.4f} {ratio:6.3f} (<= {bootstrap_upper(list(zip(before, mine, strict=True))):5.3f})")
        cells.append(f"{self.predicted:9.4f}")
        right = "" if self.worst <= 1.0 else f"  WRONG: {self.worst:.3g} times the bound"
        return f"{self.op:<20} {self.size:>16} {self.variant:>12} {' '.join(cells)}  {self.chosen}{right}"


def _named(tilings: list[Tiling]) -> dict[str, Tiling]:
    return {", ".join(f"{name} {getattr(one, name)}" for name in sorted(one.fields - {"shares"} or one.fields)): one for one in tilings}


def _short(one: Tiling) -> str:
    clusters = f" {one.cluster}x{one.cluster_n}" if one.cluster else ""
    return f"s{one.tile_rows}{clusters}{f' /{one.shares}' if one.shares != 1 else ''}"


def tiling_of(plan: Any, known: Collection[str]) -> Tiling:
    """What asks for a plan like this one, of the fields that its op knows."""
    swapped = getattr(plan, "swapped", 0) > 0
    usual = swapped and not (getattr(plan, "narrow", False) or getattr(plan, "wide", False))
    columns = plan.columns if swapped else plan.tile.block_n
    fields = {
        "block_n": None if usual else columns,
        "span": getattr(plan, "span", None),
        "shares": plan.shares,
        "cluster": plan.cluster,
        "cluster_n": getattr(plan, "cluster_n", None),
        "packets": int(plan.packets) + int(getattr(plan, "tagged", False)),
        "block_m": plan.block_rows if swapped else None,
        "cluster_k": getattr(plan, "cluster_k", 1),
        "tiles_at_once": getattr(plan, "tiles_at_once", 1),
    }
    return Tiling(**{name: value for name, value in fields.items() if name in known})


def parsed(text: str, known: Collection[str]) -> Tiling:
    """A tiling as the command line names it: ``block_n=64,cluster=2``. Fields that its op does not know are left out."""
    return Tiling.parse({name: int(value) for name, _, value in (field.partition("=") for field in text.split(",")) if name in known})


class Askable(NamedTuple):
    """A plan that the model ranks, what asks for it, and the seconds that it is predicted to take."""

    plan: Any
    choice: Choice
    seconds: float


def askable(op: str, problem: Any, rows: int, sms: int, machine: Machine, specialize: str | None = None) -> Iterator[Askable]:
    """What the model ranks, of what a caller can ask for, the fastest first; of these rows, not of their class."""
    for one in ranked(problem, rows, sms, machine, specialize):
        plan = one.plan.of_rows(rows)
        tiling = tiling_of(plan, find(op).tilings)
        choice = choice_of(Split(intra_comm=plan.split.intra_comm), None, tiling)
        with contextlib.suppress(SplitError, TilingError):
            made = find(op).make_plan(problem, rows, sms, choice.split, tiling=tiling)
            if made.describe().splitlines()[1] == plan.describe().splitlines()[1]:
                yield Askable(plan, choice, one.seconds)


class Rank:
    def __init__(self, options: argparse.Namespace) -> None:
        self.world = mk.init(target=options.target, heap_bytes=options.heap << 20)
        self.timing = open_timing(self.world, "bfloat16", COOLDOWN_MS if self.world.target == "cuda" else 0.0)
        self.options = options
        self.baselines: Any = NoBaselines("not asked for")
        if (
            (options.vendor or options.pairs or options.shares or options.swapped)
            and self.world.size == 1
            and isinstance(self.timing, CudaTiming)
        ):
            self.baselines = open_baselines(self.world, self.timing.stream)

    def _shared(self, case: Any) -> Iterator[Tiling]:
        """As many CTAs for each tile as there are."""
        for n, cluster in itertools.product((64, 128, 192, 256), (1, 2)):
            alone = Tiling(n, 1, 1, cluster)
            plan = make_plan(case.problem, case.rows, self.world.backend.sm_count, tiling=alone)
            ctas = (plan.split.compute or 1) // cluster
            left = plan.taken % ctas
            if n > 64:
                yield alone
            for shares in {ctas // left, ctas // left - 1} - {0, 1} if 0 < left == plan.taken else ():
                yield dataclasses.replace(alone, shares=shares)

    def _swapped(self, op: str, case: Any) -> Iterator[Tiling]:
        """Tiles of swapped operands, from the highest on, with K shared by as many CTAs as there are, and in clusters."""
        rows, sms = case.rows * (1 if op == ALL else self.world.size), self.world.backend.sm_count
        most = SWAPPED_ROWS if op == GATHER else SWAPPED_TILE.block_n
        least, columns = math.ceil(rows / most), math.ceil(case.problem.n / 128)
        for tile_rows in range(least, min(least + 4, math.ceil(rows / 16)) + 1):
            tiles = tile_rows * columns
            if tiles > 2 * sms and tile_rows > least + 1:
                continue
            yield from (Tiling(shares=shares, tile_rows=tile_rows) for shares in sorted({1, max(1, sms // tiles)}))
            for cluster, cluster_n in [(1, 2), (2, 1), (1, 4), (2, 2), (4, 1)]:
                if cluster <= tile_rows:
                    yield Tiling(cluster=cluster, cluster_n=cluster_n, shares=1, tile_rows=tile_rows)

    def _ranked(self, op: str, case: Any, most: int) -> dict[str, Choice]:
        """What the model predicts to be fastest, of what a caller can ask for."""
        every = askable(op, case.problem, case.rows, self.world.backend.sm_count, self.world.machine)
        found = list(dict.fromkeys(one.choice for one in every))
        return {f"#{i + 1}": choice for i, choice in enumerate(found[:most])}

    def variants(self, op: str, case: Any, own: Sequence[str]) -> dict[str, Tiling | Choice | None]:
        known = find(op).tilings
        old = Tiling.parse({name: value for name, value in OLD.items() if name in known})
        found: dict[str, Tiling | Choice | None] = {"new": None} if own else {"old": old, "new": None}
        if self.options.all:
            wide = [Tiling(block_n=columns) for columns in (64, 128, 192, 256)] if "block_n" in known else []
            spans = [Tiling(span=span) for span in range(2, self.world.size + 1) if self.world.size % span == 0] if "span" in known else []
            shares = [Tiling(shares=number) for number in (2, 4, 8)] if "shares" in known and self.world.num_nodes == 1 else []
            found |= _named([*wide, *spans, *shares])
        if self.options.pairs and "cluster" in known:
            clusters = [{"cluster": 1}, {"cluster": 2}, *([{"cluster_n": 2}] if "cluster_n" in known else [])]
            found |= _named([Tiling(block_n=n, shares=1, **cluster) for n in (None, 64, 128, 192, 256) for cluster in clusters])
        for text in (*self.options.tilings, *own):
            found[text] = parsed(text, known)
        if self.options.swapped and "tile_rows" in known:
            found |= {_short(one): one for one in self._swapped(op, case)}
        if self.options.shares and "shares" in known:
            for one in self._shared(case):
                shares = "" if one.shares == 1 else f", {one.shares} share"
                found[f"{one.block_n}{' pairs' if one.cluster == 2 else ''}{shares}"] = one
        return found | self._ranked(op, case, self.options.ranked) if self.options.ranked else found

    def _plan(self, op: str, case: Any, choice: Choice) -> Any:
        """None: there is no such plan."""
        asked: dict[str, Any] = {} if choice.tiling is None else {"tiling": choice.tiling}
        with contextlib.suppress(SplitError, TilingError):
            return find(op).make_plan(case.problem, case.rows, self.world.backend.sm_count, choice.split, **asked)
        return None

    def measure(self, op: str, size: str, *own: str) -> list[Found]:
        """Every variant on one shape; ``own``: tilings of it. Collective."""
        m, n, k = map(int, size.split("x"))
        ranks = self.world.size
        m = -(-m // ranks) * ranks if op != ALL else m
        whole_k = k if op == GATHER else k * ranks
        case = ops()[op].case(f"{m}x{n}x{whole_k}", self.world.topology, "bfloat16", b=self.options.b)
        case.setup(self.timing, fresh_seed(self.world))
        calls, worst, chosen, predicted = {}, {}, {}, {}
        wanted = self.variants(op, case, own)
        if self.options.aligned:
            wanted["aligned"] = None
        for variant, tiling in wanted.items():
            if variant == "aligned":
                self._align(case)
            choice = tiling if isinstance(tiling, Choice) else choice_of(None, None, tiling)
            made = self._plan(op, case, choice)
            if made is None:
                continue
            calls[variant] = list(case.fused(choice))
            for out in case.outputs():
                self.timing.poison(out)
            self.timing.synchronize()
            self.world.barrier()
            self.timing.warm_up(calls[variant])
            worst[variant] = max(gather(self.world, max(float(case.worst(index)) for index in range(len(calls[variant])))))
            chosen[variant] = made.describe().splitlines()[1] + f"; {made.split}"
            prediction = predict(made, self.world.machine)
            predicted[variant] = math.nan if prediction is None else prediction.seconds * 1e3
        if vendor := list(case.alone(self.baselines)):
            self.timing.warm_up(vendor)
            calls["cuBLAS"], worst["cuBLAS"], chosen["cuBLAS"], predicted["cuBLAS"] = vendor, 0.0, "", math.nan
        taken: dict[str, tuple[list[float], list[float]]] = {variant: ([], []) for variant in calls}
        for i in range(-1, self.options.samples):  # the first round does not count
            for variant in list(calls)[:: 1 if i % 2 == 0 else -1]:
                these = calls[variant]
                back_to_back = self.timing.back_to_back(these, 1).times[0]  # first: ``isolated`` is to find its code in the SMs
                here = [self.timing.isolated([these[i % len(these)]], 1).times[0], back_to_back]
                slowest = [max(times) for times in zip(*gather(self.world, here), strict=True)]
                if i >= 0:
                    for times, one in zip(taken[variant], slowest, strict=True):
                        times.append(one)
        self.timing.synchronize()
        return [Found(op, size, variant, chosen[variant], worst[variant], *times, predicted[variant]) for variant, times in taken.items()]

    def _align(self, case: Any) -> None:
        """Move operands to arrays whose rows begin at multiples of 128 bytes; the calls before keep theirs."""
        xp = self.timing.xp

        def wide(array: Any) -> Any:
            if not array.flags.c_contiguous:  # a transposed B
                return wide(array.T).T
            columns = array.shape[1]
            room = self.timing.empty((array.shape[0], -(-columns // 64) * 64))
            view = room[:, :columns]
            view.view(xp.uint16)[...] = array.view(xp.uint16)
            return view

        if hasattr(case, "_inputs"):
            case._inputs = [(wide(a), wide(b)) for a, b in case._inputs]
        else:  # an all-gather's a is contiguous
            case._b = [wide(b) for b in case._b]

    def close(self) -> None:
        self.baselines.close()
        self.timing.close()
        self.world.close()


def summary(found: list[list[Found]]) -> list[str]:
    """What is chosen beside the old tilings, and beside the best of all that were measured; and how far predictions are off."""
    lines = []
    for at, mode in ((0, "isolated"), (1, "back to back")):
        taken = [{one.variant: statistics.median((one.isolated, one.back_to_back)[at]) for one in row} for row in found]
        if ratios := [row["new"] / row["old"] for row in taken if "old" in row]:
            mean, slower = statistics.geometric_mean(ratios), sum(r > 1 for r in ratios)
            lines.append(f"{mode}: new / old, geometric mean {mean:.3f}, {slower} of {len(ratios)} slower")
        ours = [{name: ms for name, ms in row.items() if name not in _OTHERS} for row in taken]
        lost = [row["new"] / min(row.values()) for row in ours]
        if any(row.keys() - {"old", "new"} for row in ours):
            near = f"within {_NEAR - 1:.0%} in {sum(r <= _NEAR for r in lost)} of {len(lost)}, worst {max(lost):.2f}"
            lines.append(f"{mode}: new / the best of all, geometric mean {statistics.geometric_mean(lost):.3f}, {near}")
    off = sorted(abs(one.predicted / statistics.median(one.isolated) - 1) for row in found for one in row if one.predicted > 0)
    if off:
        lines.append(
            f"predictions, isolated: off by {statistics.median(off):.1%} (median), {off[int(0.9 * (len(off) - 1))]:.1%} (90th percentile)"
        )
    return lines


def rank_main(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    rank = Rank(options)
    speaks = rank.world.rank == 0
    if options.random:
        seed = options.seed if options.seed is not None else fresh_seed(rank.world)
        left = drawn(seed, options.random)
        if speaks:
            print(f"--seed {seed}")
    else:
        left = [tuple(re.split("[:/]", text)) for text in options.shapes] or list(ROWS)
    found: list[list[Found]] = []
    wrong = 0
    while left and gather(rank.world, time.monotonic() - begin < options.seconds)[0]:  # rank 0 decides
        found.append(rank.measure(*left.pop(0)))
        wrong += sum(not one.worst <= 1.0 for one in found[-1])
        if speaks:
            print(*(one.line(found[-1][0]) for one in found[-1]), sep="\n", flush=True)
            if options.out is not None:  # what has been found is kept, whatever comes
                lines = [dataclasses.asdict(one) for row in found for one in row]
                options.out.write_text(json.dumps({"ranks": rank.world.size, "target": rank.world.target, "found": lines}, indent=1))
    rank.close()
    if speaks:
        print(*summary(found), sep="\n")
        print(f"{wrong} wrong" + (f"; not measured for lack of time: {left}" if left else ""))
    return 1 if wrong or left else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=None, help="start so many ranks (else this process is one, alone or under mpirun)")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--shapes", nargs="+", default=[], help="op:MxNxK[/TILING...], N and K of a rank (default: the rows of the issue)")
    parser.add_argument("--random", type=int, default=0, help="so many random shapes instead")
    parser.add_argument("--seed", type=int, default=None, help="of the random shapes (default: fresh)")
    parser.add_argument("--b", choices=LAYOUTS, default=LAYOUTS[0], help="how B lies")
    parser.add_argument("--all", action="store_true", help="also every tiling that the planner chooses from")
    parser.add_argument("--shares", action="store_true", help="also with K shared by all SMs, and beside the vendor's product")
    parser.add_argument("--pairs", action="store_true", help="also with pairs of CTAs, and beside the vendor's product")
    parser.add_argument("--swapped", action="store_true", help="also with swapped operands, and beside the vendor's product")
    parser.add_argument("--vendor", action="store_true", help="beside the vendor's product, in a world of one")
    parser.add_argument("--tilings", nargs="+", default=[], metavar="FIELD=VALUE,...", help="also with these")
    parser.add_argument("--ranked", type=int, default=0, metavar="N", help="also with the N candidates that are predicted to be fastest")
    parser.add_argument("--aligned", action="store_true", help="also with rows at multiples of 128 bytes")
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no shape after so long")
    parser.add_argument("--heap", type=int, default=3072, help="MiB of the symmetric heap")
    parser.add_argument("--target", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, default=None, help="JSON with all samples")
    parser.add_argument("--launcher", choices=("auto", "mpi", "processes"), default="auto")
    options = parser.parse_args()
    if options.ranks is None:
        return rank_main(options)
    at = sys.argv.index("--ranks")
    arguments = [__file__, *sys.argv[1:at], *sys.argv[at + 2 :]]
    return launcher.run(options.ranks, arguments, timeout=options.seconds + 120, kind=options.launcher)


if __name__ == "__main__":
    sys.exit(main())
