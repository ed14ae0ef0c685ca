"""Is a new tree as fast as an old one? ``python tests/gpu/compare.py --old DIR --new DIR --ranks 2 --samples 40``.

Both trees are measured in one job: each has its own ranks, started once and alive together on the same GPUs; they take turns, old, new,
new, old, and the one that is not measured waits on the host. A sample is one call, timed on the device behind a barrier of all ranks and
after a rest, as ``mkernel bench`` does (docs/benchmarks.md); it counts with its slowest rank. Samples of the two trees that follow each
other are a pair, so that what warms the GPUs or slows the host meets both.

Per shape: medians in milliseconds, their ratio new / old, its upper 95 % bound (bootstrap over the pairs), what a cached call costs the
host in both, and whether both gave the same bits; or why the shape was not measured. ``--out FILE`` gets all samples as JSON. ``--limit
1.02``: exit status 1 if a bound is larger.

``--b transposed`` passes B as the transpose view of an (N, K) array.

``--shapes`` chooses: ops (``allgather_gemm``), sizes (``8192``, ``16x8192x8192``), or both (``gemm_allreduce:8192``); any op that
``mkernel bench`` measures, with a shape as it takes it (``ring_attention:1x32x8x16384x128c``). Inputs are those of each tree's own bench.
``--nodes 2`` splits the ranks into emulated nodes. ``--target cpu`` goes through the motions without a GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SQUARES = (2048, 4096, 8192, 16384)
FEW_ROWS = tuple(f"{1 << i}x8192x8192" for i in range(9))
OPS = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce")
LAYOUTS = "row-major", "transposed"  # of B, as ``mkernel bench`` has them
COOLDOWN_MS = 30.0
HOST_CALLS = 60
MARK = "COMPARE "  # a line of a worker for its parent
DEADLINE = 120.0  # seconds of one answer: a shape's kernels are compiled in it


# ---- arithmetic


def bootstrap_upper(pairs: Sequence[tuple[float, float]], seed: int = 0, resamples: int = 2000, quantile: float = 0.95) -> float:
    """The upper bound of median(new) / median(old) at this confidence: quantile of that ratio over resampled pairs (old, new)."""
    rng = random.Random(seed)
    ratios = []
    for _ in range(resamples):
        chosen = rng.choices(pairs, k=len(pairs))
        ratios.append(statistics.median(new for _, new in chosen) / statistics.median(old for old, _ in chosen))
    return sorted(ratios)[min(resamples - 1, int(quantile * resamples))]


def all_shapes() -> list[tuple[str, str]]:
    """Op and size of everything there is to measure."""
    return [(op, str(size)) for op in OPS for size in SQUARES] + [("gemm_allreduce", size) for size in FEW_ROWS]


def chosen_shapes(wanted: Sequence[str]) -> list[tuple[str, str]]:
    """The shapes that are asked for; ``op:size`` may also be one that is not in the table."""
    if not wanted:
        return all_shapes()
    chosen: list[tuple[str, str]] = []
    for text in wanted:
        op, _, size = text.partition(":")
        found = [(op, size)] if size else [shape for shape in all_shapes() if text in shape]
        if not found:
            raise SystemExit(f"--shapes {text}: no such op or size; there are {', '.join(OPS)}, and OP:SIZE of any op of mkernel bench")
        chosen += [shape for shape in found if shape not in chosen]
    return chosen


# ---- a rank of one tree: its own process, with that tree's mkernel


def worker() -> int:
    """Does what the lines of standard input say."""
    import mkernel as mk
    from mkernel.bench.timing import open_timing

    tree = Path(os.environ["COMPARE_TREE"]).resolve()
    if not Path(mk.__file__).resolve().is_relative_to(tree):
        raise SystemExit(f"mkernel comes from {mk.__file__}, not from {tree}")
    with mk.init(target=os.environ["COMPARE_TARGET"], heap_bytes=int(os.environ["COMPARE_HEAP"])) as world:
        timing = open_timing(world, "bfloat16", COOLDOWN_MS if world.target == "cuda" else 0.0)
        measured = Measured(world, timing)
        answer({"ready": world.size})
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "quit":
                break
            answer(getattr(measured, command.pop("do"))(**command))
        measured.free()
        timing.close()
    return 0


def answer(value: Any) -> None:
    print(MARK + json.dumps(value), flush=True)


class UnmeasuredError(Exception):
    """A shape that cannot be measured, and why."""


class Measured:
    """One rank's part of every command; all ranks of a tree get the same ones."""

    def __init__(self, world: Any, timing: Any) -> None:
        self.world, self.timing, self.calls = world, timing, []
        self.b = os.environ["COMPARE_B"]

    def setup(self, op: str, size: str) -> dict[str, Any]:
        """Inputs, the plan, and a first call of everything; a checksum of the first result."""
        from mkernel.bench.cases import ops
        from mkernel.errors import ArgumentError
        from mkernel.planner.topology import Topology

        self.free()
        measured, world = ops()[op], self.world
        options = {"b": self.b} if "b" in measured.options else {}
        try:
            case = measured.case(size, Topology(world.size, world.ranks_per_node), "bfloat16", **options)
        except ArgumentError as error:  # on all ranks alike
            return {"refused": str(error)}
        case.setup(self.timing, 0)
        self.calls[:] = case.fused()
        self.timing.warm_up(self.calls)
        first = getattr(case, "written", case.outputs)()[0]  # (trees before 30 November have none)
        crc, nans = 0, False
        for result in first if isinstance(first, tuple) else (first,):
            array = result.get() if hasattr(result, "get") else result
            crc = zlib.crc32(array.tobytes(), crc)
            if array.dtype.itemsize == 2:  # bfloat16, which is no type of NumPy's own: an element that nobody has written, or an infinity
                nans |= bool(((array.view("uint16") & 0x7F80) == 0x7F80).any())
        return {"crc": crc, "nans": nans, "sets": len(self.calls)}

    def sample(self, index: int) -> float:
        """Milliseconds of one call on this rank. The input sets take turns, so that none lies in a cache."""
        calls = self.calls
        return float(self.timing.isolated([calls[index % len(calls)]], 1)[0][0])  # a list of times comes first, in any tree

    def host(self, calls: int) -> float:
        """Microseconds that a cached call keeps the host, median."""
        times = []
        for _ in range(calls):
            self.timing.synchronize()
            begin = time.perf_counter_ns()
            self.calls[0]()
            times.append((time.perf_counter_ns() - begin) / 1e3)
        self.timing.synchronize()
        return statistics.median(times)

    def free(self) -> None:
        self.timing.synchronize()
        self.calls.clear()
        if self.world.target == "cuda":
            self.timing.xp.get_default_memory_pool().free_all_blocks()


# ---- the parent


class Tree:
    """The ranks of one tree."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace, out: Path) -> None:
        self.name, self.folder = name, folder.resolve()
        if not (self.folder / "mkernel" / "__init__.py").is_file():
            raise SystemExit(f"--{name} {folder}: there is no mkernel in it")
        common = os.environ | {
            "PYTHONPATH": str(self.folder),
            "PYTHONNOUSERSITE": "1",
            "MKERNEL_RENDEZVOUS": f"127.0.0.1:{free_port()}",
            "MKERNEL_SIZE": str(options.ranks),
            "MKERNEL_SECRET": secrets.token_hex(32),
            "COMPARE_TREE": str(self.folder),
            "COMPARE_TARGET": options.target,
            "COMPARE_HEAP": str(options.heap << 20),
            "COMPARE_B": options.b,
        }
        if options.nodes > 1:
            common["MKERNEL_RANKS_PER_NODE"] = str(options.ranks // options.nodes)
        self.log = out / f"compare-{name}.log"
        self._errors = self.log.open("wb")
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--worker"]
        self.processes = [
            subprocess.Popen(
                command,
                env=common | {"MKERNEL_RANK": str(rank)},
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
            for rank in range(options.ranks)
        ]
        self._answers: list[queue.Queue[str | None]] = [queue.Queue() for _ in self.processes]
        for process, answers in zip(self.processes, self._answers, strict=True):
            threading.Thread(target=self._read, args=(process, answers), daemon=True).start()

    def _read(self, process: subprocess.Popen[bytes], answers: queue.Queue[str | None]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode(errors="replace")
            if line.startswith(MARK):
                answers.put(line.removeprefix(MARK))
            else:
                self._errors.write(raw)
        answers.put(None)

    def tell(self, do: str, **arguments: Any) -> None:
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        for rank, process in enumerate(self.processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except OSError:
                raise self._ended(rank) from None

    def answers(self) -> list[Any]:
        """What every rank says to the last command."""
        deadline, found = time.monotonic() + DEADLINE, []
        for rank, answers in enumerate(self._answers):
            try:
                line = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise SystemExit(f"{self.name}, rank {rank}: no answer in {DEADLINE:.0f} s\n{self._tail()}") from None
            if line is None:
                raise self._ended(rank)
            found.append(json.loads(line))
        return found

    def ask(self, do: str, **arguments: Any) -> list[Any]:
        self.tell(do, **arguments)
        return self.answers()

    def _ended(self, rank: int) -> SystemExit:
        time.sleep(1.0)  # the other ranks say what they saw
        return SystemExit(f"{self.name}, rank {rank} has ended\n{self._tail()}")

    def _tail(self) -> str:
        self._errors.flush()
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def close(self) -> None:
        """Ask the ranks to leave, and see to it."""
        with contextlib.suppress(SystemExit):
            self.tell("quit")
        deadline = time.monotonic() + 15.0
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        self._errors.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def trees(options: argparse.Namespace, out: Path) -> Iterator[tuple[Tree, Tree]]:
    with contextlib.ExitStack() as stack:
        both = []
        for name in ("old", "new"):
            tree = Tree(name, getattr(options, name), options, out)
            stack.callback(tree.close)
            both.append(tree)
        for tree in both:  # both start at the same time
            tree.answers()
        yield both[0], both[1]


def measure(both: tuple[Tree, Tree], op: str, size: str, samples: int) -> dict[str, Any]:
    """One shape on both trees in turn. Raises UnmeasuredError."""
    for tree in both:
        tree.tell("setup", op=op, size=size)  # both compile at the same time
    first = [tree.answers() for tree in both]
    for tree, ranks in zip(both, first, strict=True):
        if "refused" in ranks[0]:
            raise UnmeasuredError(f"{tree.name}: {ranks[0]['refused']}")
        if any(rank["nans"] for rank in ranks):
            raise UnmeasuredError(f"{tree.name} leaves elements that are not finite")
    for tree in both:  # each once, not counted
        tree.ask("sample", index=0)
    taken: dict[str, list[float]] = {"old": [], "new": []}
    for i in range(samples):
        for tree in both if i % 2 == 0 else both[::-1]:
            taken[tree.name].append(max(tree.ask("sample", index=i)))
    host: dict[str, list[float]] = {"old": [], "new": []}
    for i in range(4):
        for tree in both if i % 2 == 0 else both[::-1]:
            host[tree.name].append(statistics.median(tree.ask("host", calls=HOST_CALLS // 4)))
    pairs = list(zip(taken["old"], taken["new"], strict=True))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    return {
        "op": op,
        "size": size,
        "samples": taken,
        "median_ms": medians,
        "ratio": medians["new"] / medians["old"],
        "upper": bootstrap_upper(pairs),
        "host_us": {name: statistics.median(values) for name, values in host.items()},
        "same_bits": [a["crc"] for a in first[0]] == [b["crc"] for b in first[1]],
    }


def main() -> int:
    if sys.argv[1:] == ["--worker"]:
        return worker()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="a checkout")
    parser.add_argument("--new", type=Path, required=True, help="another one")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--shapes", nargs="+", default=[], help="ops, sizes, op:size (default: all)")
    parser.add_argument("--b", choices=LAYOUTS, default=LAYOUTS[0], help="how B lies")
    parser.add_argument("--seconds", type=float, default=180.0, help="begin no shape after so long")
    parser.add_argument("--heap", type=int, default=4096, help="MiB of each rank's symmetric heap")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=None, help="largest upper bound of the ratio that is well")
    parser.add_argument("--out", type=Path, default=None, help="JSON with all samples")
    options = parser.parse_args()
    if options.ranks % options.nodes:
        parser.error("--ranks must be a multiple of --nodes")
    shapes = chosen_shapes(options.shapes)
    logs = Path(os.environ.get("OUT") or "out").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    begin, rows, left, unmeasured = time.monotonic(), [], list(shapes), 0
    print(f"{'op':<20} {'size':>14} {'old ms':>9} {'new ms':>9} {'ratio':>7} {'upper':>7} {'host us old':>11} {'new':>6}  bits", flush=True)
    with trees(options, logs) as both:
        for op, size in shapes:
            if time.monotonic() - begin > options.seconds:
                break
            left.remove((op, size))
            try:
                row = measure(both, op, size, options.samples)
            except UnmeasuredError as error:
                unmeasured += 1
                print(f"{op:<20} {size:>14} {error}", flush=True)
                continue
            rows.append(row)
            ms, host = row["median_ms"], row["host_us"]
            print(
                f"{op:<20} {size:>14} {ms['old']:9.4f} {ms['new']:9.4f} {row['ratio']:7.3f} {row['upper']:7.3f}"
                f" {host['old']:11.1f} {host['new']:6.1f}  {'same' if row['same_bits'] else 'other'}",
                flush=True,
            )
            if options.out is not None:  # what has been found is kept, whatever comes
                described = {"old": str(options.old), "new": str(options.new), "ranks": options.ranks, "nodes": options.nodes}
                options.out.write_text(json.dumps({**described, "target": options.target, "rows": rows}, indent=1))
    if left:
        print("not measured for lack of time: " + ", ".join(f"{op}:{size}" for op, size in left))
    slow = [row for row in rows if options.limit is not None and row["upper"] > options.limit]
    print(f"{len(rows)} shapes in {time.monotonic() - begin:.0f} s" + (f", {len(slow)} over {options.limit}" if options.limit else ""))
    return 1 if slow or left or unmeasured else 0


if __name__ == "__main__":
    sys.exit(main())
