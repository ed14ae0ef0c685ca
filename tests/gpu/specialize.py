"""What does it cost that a field comes with the call instead of being compiled in? ``mpirun -n 2 python tests/gpu/specialize.py``.

Also ``python tests/gpu/specialize.py`` (one rank), and ``--ranks 2`` (starts them itself). One group of processes, a world for each
variant: ``all`` (N, K and the split compiled in), ``none``, and each single field not compiled in (``no n``, ``no k``, ``no split``).
Variants take turns, forward and back; a sample is one call, timed on the device behind a barrier of all ranks and after a rest, and counts
with its slowest rank, as in ``compare.py``. Samples of one round are a pair, so that what warms the GPUs meets all variants.

Per op, shape and variant: milliseconds (median), their ratio to ``all``, its upper 95 % bound (bootstrap over the pairs), microseconds more
than ``all``, and whether the result has the same bits. ``--limit 1.01 --limit-us 0.5``: exit status 1 where a bound is over both.

``--shapes`` chooses: ops (``allgather_gemm``), sizes (``8192``, ``16x8192x8192``), or both (``gemm_allreduce:8192``); ``--variants`` some
of the variants. ``--out FILE`` gets all samples as JSON. ``--target cpu`` goes through the motions without a GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

# The checkout is on the path only from here on.
import mkernel as mk  # noqa: E402
from mkernel import env  # noqa: E402
from mkernel.bench.peers import gather  # noqa: E402
from mkernel.bench.timing import open_timing  # noqa: E402
from mkernel.tools import launcher  # noqa: E402
from tests.gpu.compare import COOLDOWN_MS, OPS, SQUARES, bootstrap_upper  # noqa: E402

VARIANTS = {"all": "all", "none": "none", "no n": "k,split", "no k": "n,split", "no split": "n,k"}  # MKERNEL_SPECIALIZE of each
FEW_ROWS = tuple(f"{rows}x8192x8192" for rows in (1, 16, 64, 256))


def all_shapes() -> list[tuple[str, str]]:
    return [(op, str(size)) for op in OPS for size in (*SQUARES, *FEW_ROWS)]


def chosen_shapes(wanted: Sequence[str]) -> list[tuple[str, str]]:
    """Those of all shapes that are asked for; ``op:size`` may also be one that is not in the table."""
    chosen: list[tuple[str, str]] = []
    for text in wanted:
        op, _, size = text.partition(":")
        found = [(op, size)] if size else [shape for shape in all_shapes() if text in shape]
        if not found or found[0][0] not in OPS:
            raise SystemExit(f"--shapes {text}: no such op or size; there are {', '.join(OPS)} and sizes S or MxNxK")
        chosen += [shape for shape in found if shape not in chosen]
    return chosen or all_shapes()


def extents(op: str, size: str, ranks: int) -> tuple[int, int, int]:
    """Rows of a, columns of b and K on every rank. S: M = N = K = S; rows that ranks share are rounded up to the ranks."""
    numbers = [int(part) for part in size.split("x")]
    m, n, k = numbers if len(numbers) == 3 else (numbers[0],) * 3
    shared = -(-m // ranks)
    if op == "allgather_gemm":
        return shared, n // ranks, k
    return (shared * ranks if op == "gemm_reduce_scatter" else m), n, k // ranks


@dataclasses.dataclass(frozen=True)
class Found:
    """One variant on one shape."""

    op: str
    size: str
    variant: str
    median_ms: float
    ratio: float
    upper: float  # of the ratio
    more_us: float  # at that bound
    same_bits: bool
    samples: list[float]

    def line(self) -> str:
        bits = "same" if self.same_bits else "OTHER"
        return (
            f"{self.op:<20} {self.size:>14} {self.variant:>9} {self.median_ms:9.4f} {self.ratio:7.4f} {self.upper:7.4f}"
            f" {self.more_us:8.2f}  {bits}"
        )


HEADER = f"{'op':<20} {'size':>14} {'variant':>9} {'ms':>9} {'ratio':>7} {'upper':>7} {'us more':>8}  bits"


class Rank:
    """A world for each variant; all alive together."""

    def __init__(self, variants: Sequence[str], target: str, heap_mib: int) -> None:
        self.stack = contextlib.ExitStack()
        self.worlds: dict[str, Any] = {}
        takes = "specialize" in inspect.signature(mk.init).parameters
        for variant in variants:
            wanted = VARIANTS[variant]
            with env.override(MKERNEL_SPECIALIZE=wanted):
                options = {"specialize": wanted} if takes else {}
                world = mk.init(target=target, heap_bytes=heap_mib << 20, **options)
            self.worlds[variant] = self.stack.enter_context(world)
        self.world = self.worlds[variants[0]]
        self.timing = open_timing(self.world, "bfloat16", COOLDOWN_MS if self.world.target == "cuda" else 0.0)

    def measure(self, op: str, size: str, samples: int) -> list[Found]:
        """Every variant on one shape. Collective."""
        timing, ranks = self.timing, self.world.size
        rows, n, k = extents(op, size, ranks)
        result_rows = {"allgather_gemm": rows * ranks, "gemm_reduce_scatter": rows // ranks, "gemm_allreduce": rows}[op]
        count = timing.sets(2 * (rows * k + k * n + result_rows * n))
        sets = []
        for i in range(count):
            seed = 1_000_003 * i + 2 * self.world.rank
            sets.append((timing.random((rows, k), seed), timing.random((k, n), seed + 1), timing.empty((result_rows, n))))
        calls, same = {}, {}
        reference = None
        for variant, world in self.worlds.items():
            calls[variant] = [functools.partial(getattr(mk, op), a, b, out=c, world=world) for a, b, c in sets]
            first = sets[0][2]
            timing.poison(first)
            with env.override(MKERNEL_SPECIALIZE=VARIANTS[variant]):  # where plans are made
                timing.warm_up(calls[variant])
            bits = first.view(timing.xp.uint16)
            if reference is None:
                reference = bits.copy()
                finite = not bool(((bits & 0x7F80) == 0x7F80).any())
                if not all(gather(self.world, finite)):
                    raise SystemExit(f"{op} {size}: elements that nobody has written, or that are not finite")
            same[variant] = all(gather(self.world, bool((bits == reference).all())))
        taken: dict[str, list[float]] = {variant: [] for variant in calls}
        for i in range(-1, samples):  # the first round does not count
            for variant in list(calls)[:: 1 if i % 2 == 0 else -1]:
                here = timing.isolated([calls[variant][i % count]], 1).times[0]
                slowest = max(gather(self.world, here))
                if i >= 0:
                    taken[variant].append(slowest)
        base = taken["all"]
        found = []
        for variant, times in taken.items():
            ratio, upper = 1.0, 1.0
            if variant != "all":
                ratio = statistics.median(times) / statistics.median(base)
                upper = bootstrap_upper(list(zip(base, times, strict=True)))
            more = (upper - 1) * statistics.median(base) * 1e3
            found.append(Found(op, size, variant, statistics.median(times), ratio, upper, more, same[variant], times))
        timing.synchronize()
        if self.world.target == "cuda":
            del sets, calls, first, bits, reference
            timing.xp.get_default_memory_pool().free_all_blocks()
        return found

    def close(self) -> None:
        self.timing.close()
        self.stack.close()


def rank_main(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    rank = Rank(options.variants, options.target, options.heap)
    speaks = rank.world.rank == 0
    if speaks:
        print(f"{rank.world.size} ranks, target {rank.world.target}, {options.samples} samples\n{HEADER}", flush=True)
    found: list[Found] = []
    left = chosen_shapes(options.shapes)
    while left and gather(rank.world, time.monotonic() - begin < options.seconds)[0]:  # rank 0 decides
        found += rank.measure(*left.pop(0), options.samples)
        if speaks:
            print(*(f.line() for f in found[-len(options.variants) :]), sep="\n", flush=True)
            if options.out is not None:  # what has been found is kept, whatever comes
                options.out.write_text(json.dumps({"ranks": rank.world.size, "found": [dataclasses.asdict(f) for f in found]}, indent=1))
    rank.close()
    wrong = [f for f in found if not f.same_bits]
    slow = [f for f in found if options.limit is not None and f.upper > options.limit and f.more_us > options.limit_us]
    if speaks:
        if left:
            print("not measured for lack of time: " + ", ".join(f"{op}:{size}" for op, size in left))
        print(f"{len(found)} lines in {time.monotonic() - begin:.0f} s: {len(wrong)} with other bits, {len(slow)} over the limit")
    return 1 if wrong or slow or left else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=None, help="start so many ranks (else this process is one, alone or under mpirun)")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--shapes", nargs="+", default=[], help="ops, sizes, op:size (default: all)")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="beside all")
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no shape after so long")
    parser.add_argument("--heap", type=int, default=3072, help="MiB of each world's symmetric heap")
    parser.add_argument("--target", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--limit", type=float, default=None, help="largest upper bound of the ratio that is well,")
    parser.add_argument("--limit-us", type=float, default=0.0, help="if it is more than so many microseconds, too")
    parser.add_argument("--out", type=Path, default=None, help="JSON with all samples")
    parser.add_argument("--launcher", choices=("auto", "mpi", "processes"), default="auto")
    options = parser.parse_args()
    options.variants = ["all", *(v for v in options.variants if v != "all")]
    if options.ranks is None:
        return rank_main(options)
    at = sys.argv.index("--ranks")
    arguments = [__file__, *sys.argv[1:at], *sys.argv[at + 2 :]]
    return launcher.run(options.ranks, arguments, timeout=options.seconds + 120, kind=options.launcher)


if __name__ == "__main__":
    sys.exit(main())
