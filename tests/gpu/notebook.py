"""Cells of a notebook one after the other, ranks in processes that stay: ``python tests/gpu/notebook.py --ranks 2``. Prints RESULT lines.

``--ranks-per-node 2`` with four ranks emulates two nodes. ``--target cpu`` runs the same cells without GPUs.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# The checkout is on the path only from here on.
import numpy as np  # noqa: E402

import mkernel as mk  # noqa: E402
from mkernel.runtime.options import Options  # noqa: E402
from mkernel.runtime.workers.calls import run_in_workers  # noqa: E402
from tests.gpu.exact import OPS, fused  # noqa: E402

ROWS, N, K = 64, 136, 256  # all sums are small integers: results are exact
TURNS = 20
START_SECONDS = 0.1  # a second cell has started by then
LEAVE_SECONDS = 10.0  # from Ctrl-C, or a death, to the end of the cell
FAR = 120.0  # deadlines of the worlds: a cell that hangs must not be saved by them
MIB_LEFT = 64  # of GPU memory, after mk.shutdown()


class Notebook:
    """One kind of world, and what its cells are."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.target, self.ranks, self.per_node = options.target, options.ranks, options.ranks_per_node
        self.kept = {"heap_bytes": 256 << 20 if self.target == "cuda" else 1 << 24, "timeout": FAR, "entry_timeout": FAR}
        self.memory_before = used_memory()

    def cell(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if self.target == "cuda":
            return mk.launch(fn, self.ranks, self.per_node, "cuda", args, **self.kept)
        return run_in_workers(fn, self.ranks, Options.resolve(target="cpu", ranks_per_node=self.per_node, **self.kept), args)

    def pids(self) -> list[int]:
        return self.cell(lambda world: os.getpid())

    # ---- cells
    def plain_loop(self) -> str:
        """Inputs from NumPy, a call, its result read, in every turn, on the stream that is there."""

        def loop(world: Any, seed: int) -> int:
            rng, wrong = np.random.default_rng(seed), 0
            for _ in range(TURNS):
                a = rng.integers(-2, 3, (world.size, ROWS, K)).astype(np.float16)
                b = rng.integers(-2, 3, (K, N)).astype(np.float16)
                c = mk.allgather_gemm(world.xp.asarray(a[world.rank]), world.xp.asarray(b))
                c = c.get() if hasattr(c, "get") else c
                wrong += int((c.astype(np.float64) != a.reshape(-1, K).astype(np.float64) @ b.astype(np.float64)).sum())
            return wrong

        before = self.pids()
        for seed in range(5):
            wrong = self.cell(loop, seed)
            assert wrong == [0] * self.ranks, f"cell {seed}: {wrong} elements differ"
        assert self.pids() == before, "the processes of the first cell"
        return f"5 cells of {TURNS} turns"

    def every_op(self) -> str:
        def use(world: Any) -> dict[str, Any]:
            return {op: fused(world, op, ROWS, N, K)[:2] for op in OPS}

        for results in self.cell(use):
            for op, (c, expected) in results.items():
                assert type(c) is np.ndarray, f"{op}: {type(c)}"
                np.testing.assert_array_equal(c.astype(np.float64), np.broadcast_to(expected, c.shape).astype(np.float64), op)
        return f"{len(OPS)} ops, results in host memory"

    def second_cell(self) -> str:
        self.pids()
        took = []
        for _ in range(20):
            begin = time.monotonic()
            entered = self.cell(lambda world: time.monotonic())
            took.append((max(entered) - begin, time.monotonic() - begin))
        start, whole = (statistics.median(times) for times in zip(*took, strict=True))
        if self.target == "cuda":
            assert start < START_SECONDS, f"a cell starts after {start:.3f} s"
        return f"median {start * 1e3:.1f} ms until it runs, {whole * 1e3:.1f} ms in all"

    def first_cell(self) -> str:
        mk.shutdown()
        begin = time.monotonic()
        self.pids()
        return f"{time.monotonic() - begin:.1f} s"

    def another_stream(self) -> str:
        """A result that is under way on a stream of the function's own when the function returns; the stream is not the next cell's."""
        if self.target == "cpu":
            return "no streams on target cpu"

        def use(world: Any) -> tuple[Any, bool]:
            xp = world.xp
            before = xp.cuda.get_current_stream().ptr
            stream = xp.cuda.Stream(non_blocking=True)
            stream.use()
            c, expected, operands = fused(world, OPS[0], 2048, 2048, 2048)
            for _ in range(20):
                mk.allgather_gemm(*operands, out=c)
            return (c, expected[:, :1]), before == 0

        for _ in range(2):
            for (c, expected), default in self.cell(use):
                assert (c == expected).all()
                assert default, "the stream of the cell before"
        return "2 cells"

    def traces(self) -> str:
        def use(world: Any) -> Any:
            kept = fused(world, OPS[0], ROWS, N, K)
            with mk.trace(world) as trace:
                mk.allgather_gemm(*kept[2])
            return trace

        for trace in self.cell(use):
            assert trace.events.size
            assert "<svg" in trace._repr_svg_()
        return f"{self.ranks} traces"

    def heap(self) -> str:
        """Arrays of the symmetric heap are given back at the end of a cell: more cells than the heap has room for."""

        def use(world: Any, size: int) -> int:
            return int(world.zeros(size, "uint8").sum())

        for _ in range(5):
            assert self.cell(use, self.kept["heap_bytes"] // 2) == [0] * self.ranks
        return "5 times half of it"

    def interrupt(self) -> str:
        """Ctrl-C while a kernel waits for a rank that sleeps."""

        def wait(world: Any, folder: Path) -> None:
            kept = fused(world, OPS[0], ROWS, N, K)
            world.barrier()
            (folder / str(world.rank)).touch()
            if world.rank == world.size - 1:
                time.sleep(10 * FAR)
            c = mk.allgather_gemm(*kept[2])
            _ = c.get() if hasattr(c, "get") else c

        before = self.pids()
        sent: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / str(rank) for rank in range(self.ranks)]

            def press() -> None:
                while not all(file.exists() for file in files):
                    time.sleep(0.01)
                time.sleep(0.5)  # into the kernel
                sent.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=press, daemon=True).start()
            try:
                self.cell(wait, Path(folder))
                raise AssertionError("the cell ended by itself")
            except KeyboardInterrupt:
                took = time.monotonic() - sent[0]
        assert self.pids() == before, "the processes survive"
        self.every_op()
        if self.target == "cuda":
            assert took < LEAVE_SECONDS, f"after {took:.1f} s"
        return f"after {took:.2f} s"

    def killed(self) -> str:
        """A process dies while the others' kernels wait for it."""

        def die(world: Any) -> None:
            kept = fused(world, OPS[0], ROWS, N, K)
            world.barrier()
            if world.rank == 1:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            c = mk.allgather_gemm(*kept[2])
            _ = c.get() if hasattr(c, "get") else c

        before, begin = self.pids(), time.monotonic()
        try:
            self.cell(die)
            raise AssertionError("the cell ended well")
        except mk.PeerLostError as error:
            took = time.monotonic() - begin
            assert error.rank == 1, error
            assert "SIGKILL" in str(error), error
        after = self.pids()
        assert after[1] != before[1]
        assert [pid for rank, pid in enumerate(after) if rank != 1] == [pid for rank, pid in enumerate(before) if rank != 1]
        self.every_op()
        if self.target == "cuda":
            assert took < LEAVE_SECONDS, f"after {took:.1f} s"
        return f"after {took:.2f} s"

    def broken_context(self) -> str:
        """A kernel of the user's writes where it must not: that process's context is of no use any more, and the next cell has another."""
        if self.target == "cpu":
            return "no contexts on target cpu"

        def break_it(world: Any) -> None:
            code = 'extern "C" __global__ void spoil(unsigned long long at) { *(volatile int*)at = 1; }'
            if world.rank == 0:
                world.xp.RawKernel(code, "spoil")((1,), (1,), (world.xp.uint64(8),))
                world.xp.cuda.get_current_stream().synchronize()
            world.barrier()

        try:
            self.cell(break_it)
            raise AssertionError("the cell ended well")
        except AssertionError:
            raise
        except Exception as error:
            text = type(error).__name__
        self.every_op()
        return text

    def shutdown(self) -> str:
        before = self.pids()
        mk.shutdown()
        assert not [pid for pid in before if Path(f"/proc/{pid}").exists()]
        if self.memory_before is None:
            return "no GPU memory to look at"
        deadline = time.monotonic() + 30.0  # the driver takes its time
        while (more := (used_memory() or 0) - self.memory_before) > MIB_LEFT and time.monotonic() < deadline:
            time.sleep(0.5)
        assert more <= MIB_LEFT, f"{more} MiB of GPU memory more than before"
        return f"{more} MiB of GPU memory more than before"


CELLS = (
    Notebook.first_cell,
    Notebook.plain_loop,
    Notebook.every_op,
    Notebook.second_cell,
    Notebook.another_stream,
    Notebook.traces,
    Notebook.heap,
    Notebook.interrupt,
    Notebook.killed,
    Notebook.broken_context,
    Notebook.shutdown,
)


def used_memory() -> int | None:
    """MiB on all GPUs together, None where nobody tells."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return sum(int(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int)
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[], help="some of " + ", ".join(cell.__name__ for cell in CELLS))
    options = parser.parse_args()
    notebook, failed = Notebook(options), False
    for cell in CELLS:
        if options.only and cell.__name__ not in options.only:
            continue
        try:
            outcome, detail = "ok", cell(notebook)
        except Exception as error:
            traceback.print_exc()
            outcome, detail, failed = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0], True
        print(f"RESULT {cell.__name__.replace('_', ' ')}\t{outcome}\t{detail}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
