"""What happens when ranks fail, with a process per rank: ``python tests/gpu/faults.py 1x4`` (or ``mpirun``). Prints RESULT lines.

One start of the ranks goes through all failures, a new world after each: a process that survived one must be as good as new. The last
failure takes a rank with it; the others go on without it. What an error says counts, not how long it took: deadlines that must not end
a wait are longer than the ranks are given.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# The checkout is on the path only from here on.
import mkernel as mk  # noqa: E402
from mkernel.errors import AbortedError, Error, MismatchError, PeerLostError, TimeoutError  # noqa: A004, E402
from mkernel.planner.topology import Topology  # noqa: E402
from mkernel.tools import launcher  # noqa: E402
from tests.gpu.exact import EVERY_OP, started  # noqa: E402

ROWS, N, K, OTHER_K = 200, 136, 64, 128  # all sums are small integers: results are exact
NEVER = 600.0  # seconds; a deadline that must not be what ends a wait: longer than the ranks are given
LIMIT = 240.0  # for all ranks: only what hangs takes as long
ENTRY_SECONDS = 3.0  # where a rank stays away
GRACE = 120.0  # from the first rank's end to the last one's
HEAP, LEAK = 256 << 20, 64 << 20  # a world's heap, and what may be missing at the end
MARKER = "MKERNEL_TEST_RUN"  # in the environment of every process started here
SURVIVORS = "MKERNEL_TEST_SURVIVORS"  # where those meet that are left
OP = EVERY_OP[0]  # what the ranks call


def _say(line: str) -> None:
    """One line in one write: those of several ranks must not run into each other."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", help="NODESxRANKS, or mpirun")
    parser.add_argument("--op", choices=EVERY_OP, default=EVERY_OP[0])
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for all ranks")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--note", type=Path, help=argparse.SUPPRESS)  # where a rank writes when it kills itself
    options = parser.parse_args()
    global OP
    OP = options.op
    if options.rank:
        return _under_mpirun(options) if options.world == "mpirun" else Rank(options).run()
    return _driver(options)


# ---- a rank


class Rank:
    """One process, and the worlds it opens one after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.target = options.target
        nodes, self.per_node = (int(part) for part in options.world.split("x"))
        self.size = nodes * self.per_node
        self.free_at_first = 0

    def run(self) -> int:
        """The last rank does not come back: it kills itself in the last failure."""
        steps: Sequence[tuple[str, Callable[[], str]]] = (
            ("healthy", self.healthy),
            ("other K, uncached", self.mismatch_uncached),
            ("other K, cached", self.mismatch_cached),
            ("a rank stays away", self.absent),
            ("a rank raises", self.raises),
            ("a rank is killed", self.killed),
            ("a new world of the others", self.survivors),
            ("GPU memory", self.memory),
        )
        for name, step in steps:
            begin = time.monotonic()
            detail = step()
            if int(os.environ["MKERNEL_RANK"]) == 0:
                _say(f"RESULT {name}\tok\t{detail}, {time.monotonic() - begin:.1f} s")
        _say("SURVIVED")
        return 0

    def open(self, **options: Any) -> Any:
        defaults = {"target": self.target, "ranks_per_node": self.per_node, "heap_bytes": HEAP, "timeout": NEVER, "entry_timeout": NEVER}
        return mk.init(**{**defaults, **options})

    def open_right(self, *ks: int, **options: Any) -> Any:
        """A world whose ranks have all seen right results with these K."""
        world = self.open(**options)
        for k in ks or (K,):
            right(world, k)
        world.barrier()
        return world

    def healthy(self) -> str:
        with self.open() as world:
            assert (world.size, world.target, world.ranks_per_node) == (self.size, self.target, self.per_node), world
            right(world)
            right(world)
        self.free_at_first = free(world)
        return f"{self.size} ranks"

    def mismatch_uncached(self) -> str:
        world = self.open_right()
        other = world.rank == 1
        return expect(world, lambda: call(world, OTHER_K if other else 3 * OTHER_K), MismatchError, "disagree")

    def mismatch_cached(self) -> str:
        world = self.open_right(K, OTHER_K)
        other = world.rank == 1
        return expect(world, lambda: call(world, OTHER_K if other else K), MismatchError)

    def absent(self) -> str:
        world = self.open_right(entry_timeout=ENTRY_SECONDS)

        def stay_away() -> None:
            while True:
                world.check()
                time.sleep(0.05)

        words = f"waited {ENTRY_SECONDS:.1f} s for rank 1, which never entered call"
        return expect(world, stay_away if world.rank == 1 else lambda: call(world), TimeoutError, words)

    def raises(self) -> str:
        world = self.open_right()
        if world.rank != 1:
            return expect(world, lambda: call(world), AbortedError, "rank 1 aborted: ValueError: planned")
        try:
            with world:
                time.sleep(0.3)  # the others are inside their kernels by then
                raise ValueError("planned")
        except ValueError as error:
            return str(error)

    def killed(self) -> str:
        world = self.open_right()
        if world.rank == self.size - 1:
            time.sleep(1.0)  # the others are inside their kernels by then
            os.kill(os.getpid(), signal.SIGKILL)
        return expect(world, lambda: call(world), PeerLostError, f"rank {self.size - 1}")

    def survivors(self) -> str:
        os.environ["MKERNEL_SIZE"] = str(self.size - 1)
        os.environ["MKERNEL_RENDEZVOUS"] = os.environ[SURVIVORS]
        with self.open(ranks_per_node=self.size - 1) as world:
            assert world.size == self.size - 1, world
            right(world)
        self.free_at_end = free(world)
        return f"{world.size} ranks"

    def memory(self) -> str:
        missing = self.free_at_first - self.free_at_end
        assert missing < LEAK, f"{missing >> 20} MiB less GPU memory is free than after the first world"
        return f"{missing >> 20} MiB less free than after the first world" if self.target == "cuda" else "not looked at on target cpu"


def call(world: Any, k: int = K) -> Callable[[], bool]:
    return started(world, OP, ROWS, N, k)


def right(world: Any, k: int = K) -> None:
    is_right = call(world, k)
    world.synchronize()
    assert is_right(), f"rank {world.rank}: a wrong result"


def expect(
    world: Any,
    action: Callable[[], Any],
    kinds: type[Error] | tuple[type[Error], ...],
    words: str = "",
) -> str:
    """An action after which this rank's world fails in this way; then the world closes."""
    begin = time.monotonic()
    problem: Error | None = None
    keep = None
    try:
        keep = action()
        world.synchronize()
        world.barrier()  # a rank whose own call was in order learns it here, if not before
    except Error as error:
        problem = error
    took = time.monotonic() - begin
    assert isinstance(problem, kinds), f"rank {world.rank}: expected {kinds}, got {problem!r} after {took:.1f} s"
    assert words in str(problem), f"rank {world.rank}: {problem!r} does not say {words!r}"
    world.close()
    del keep
    return f"{type(problem).__name__} after {took:.1f} s: {problem}".replace("\t", " ").replace("\n", " ")


def free(world: Any) -> int:
    """Free memory of this rank's GPU, with everything given back that can be."""
    if world.target != "cuda":
        return 0
    world.xp.cuda.Device().synchronize()
    world.xp.get_default_memory_pool().free_all_blocks()
    return int(world.xp.cuda.runtime.memGetInfo()[0])


def _under_mpirun(options: argparse.Namespace) -> int:
    with mk.init(target=options.target, heap_bytes=HEAP, timeout=NEVER, entry_timeout=NEVER) as world:
        assert world.size == 4, world
        right(world)
        world.barrier()
        if world.rank == 1:
            time.sleep(1.0)
            options.note.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        call(world)
        world.synchronize()
    raise SystemExit("a rank was killed and nobody noticed")


# ---- the process that starts the ranks


def _driver(options: argparse.Namespace) -> int:
    run_id = f"{options.world}-{secrets.token_hex(8)}"
    environment = {MARKER: run_id, SURVIVORS: f"127.0.0.1:{_free_port()}", "PYTHONPATH": str(ROOT)}
    used = _memory_used()
    try:
        (_run_mpi if options.world == "mpirun" else _run_processes)(options, environment)
        _nothing_left(run_id, used)
    except (AssertionError, launcher.LauncherError) as error:
        print(f"RESULT {options.world}\tFAILED\t{str(error).splitlines()[0]}", flush=True)
        return 1
    return 0


def _arguments(options: argparse.Namespace) -> list[str]:
    return [__file__, options.world, "--rank", "--target", options.target, "--op", options.op]


def _run_processes(options: argparse.Namespace, environment: dict[str, str]) -> None:
    nodes, per_node = (int(part) for part in options.world.split("x"))
    size = Topology(nodes * per_node, per_node).size
    with tempfile.TemporaryFile() as output:
        try:
            # The others have more to do after the death of the one.
            limits = {"timeout": options.limit, "grace": GRACE}
            status = launcher.run(size, _arguments(options), kind="processes", environment=environment, output=output, **limits)
        finally:
            output.seek(0)
            text = output.read().decode(errors="replace")
            print(text, flush=True)
    assert status == signal.SIGKILL, f"expected the killed rank's status, {int(signal.SIGKILL)}, of the ranks, got {status}"
    assert text.splitlines().count("SURVIVED") == size - 1, f"only {text.splitlines().count('SURVIVED')} of {size - 1} ranks came through"


def _run_mpi(options: argparse.Namespace, environment: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "killed")
        arguments = [*_arguments(options), "--note", str(note)]
        status = launcher.run(4, arguments, timeout=options.limit, kind="mpi", environment=environment)
        assert note.exists(), f"no rank was killed, and mpirun ended with status {status}"
        took = time.monotonic() - float(note.read_text())
    assert status != 0, "mpirun ended with status 0 although a rank was killed"
    print(f"RESULT a rank is killed under mpirun\tok\tstatus {status} after {took:.1f} s", flush=True)


def _nothing_left(run_id: str, used: list[int]) -> None:
    """No process of ours, and the GPUs' memory as it was."""
    deadline = time.monotonic() + 60.0
    while True:
        processes = _processes(run_id)
        more = [after - before for before, after in zip(used, _memory_used(), strict=True)]
        if not processes and max(more, default=0) * 2**20 < LEAK:
            break
        assert time.monotonic() < deadline, f"left behind: processes {processes}, MiB of GPU memory {more}"
        time.sleep(0.2)
    print(f"RESULT nothing left behind\tok\tMiB of GPU memory more than before: {more}", flush=True)


def _processes(run_id: str) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"{MARKER}={run_id}".encode() in (process / "environ").read_bytes():
                found.append(process.name)
        except OSError:  # gone, or not ours
            continue
    return found


def _memory_used() -> list[int]:
    """MiB by GPU; empty without GPUs."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
