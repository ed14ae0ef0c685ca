"""Worlds whose kernels take all SMs, each on a stream of its own: ``TEST_SEED=1 mpirun -n 4 python tests/gpu/worlds_apart.py``.

Every rank holds up its streams for times of its own, so that only the order of calls makes all ranks begin kernels in one order. If they
did not, they would wait for each other, and end by their deadline: ``--planted`` does that. One line of JSON per rank.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["TEST_TARGET"] = "cuda"

import cupy
from mpi4py import MPI

import mkernel as mk
from mkernel.runtime.cuda.streams import LaunchQueue
from tests.ops import several_worlds as worlds
from tests.runtime.worker import tell

CALLS, WORLDS, KINDS = 48, 3, 2  # worlds of a process, and problems of each
_OPTIONS = {"heap_bytes": 1 << 26, "timeout": 20.0, "max_sms": None}
_FEWEST = 5000  # columns: tiles for most SMs
_HELD_NS = 3_000_000  # at most
_OPS = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce")
_KERNELS = Path(mk.__file__).parent / "bench" / "kernels.cu"


@dataclasses.dataclass
class Made:
    """A call of this process's world of a partition: operands, and what comes out of it."""

    which: int
    call: worlds.Call
    arrays: list[Any]
    right: Any
    out: Any = None

    def run(self, partition: worlds.Partition) -> None:
        self.out = worlds.run(self.call.op, self.arrays, self.call.sizes, world=partition.world, out=self.out)

    def problem(self) -> list[str]:
        return [] if worlds.is_near(self.call.op, self.out.get(), self.right) else [f"{self.call} of partition {self.which}"]


class Program:
    def __init__(self, seed: int, comm: Any) -> None:
        self.seed, self.comm = seed, comm
        self.rng, self.own = np.random.default_rng([seed, 2]), np.random.default_rng([seed, 3, comm.rank])
        self.hold = cupy.RawModule(code=_KERNELS.read_text(), options=("--std=c++17",)).get_function("hold")
        self.partitions = [worlds.opened(self._partition(), comm, **_OPTIONS) for _ in range(WORLDS)]
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(WORLDS)]
        self.kinds = [[self._kind() for _ in range(KINDS)] for _ in range(WORLDS)]

    def _partition(self) -> worlds.Partition:
        """In one of its worlds at least some wait for others."""
        while True:
            partition = worlds.draw(self.rng, self.comm.size)
            if any(len(partition.members(color)) > 1 for color in {*partition.colors} - {-1}):
                return dataclasses.replace(partition, per_node=None)

    def _kind(self) -> tuple[str, int, int]:
        rng = self.rng
        return str(rng.choice(_OPS)), 8 * int(rng.integers(1, 12)), 8 * int(rng.integers(_FEWEST // 8, 1024))

    def made(self, number: int, which: int) -> Made | None:
        """None: this process is in no world of the partition."""
        (op, k, n), rows = self.kinds[which][self.rng.integers(KINDS)], int(self.rng.integers(140))
        partition, sizes = self.partitions[which], [rows, k, n]
        if partition.world is None:
            return None
        members = partition.members(partition.colors[self.comm.rank])
        every = [worlds.operands(self.seed, number, member, op, sizes, len(members)) for member in members]
        rank = partition.world.rank
        return Made(which, worlds.Call(op, sizes), [cupy.asarray(a) for a in every[rank]], worlds.expected(op, every, rank, sizes))

    def captured(self, made: Made) -> Any:
        with self.streams[made.which] as stream:
            made.run(self.partitions[made.which])
            stream.begin_capture()
            made.run(self.partitions[made.which])
            return stream.end_capture()

    def run(self) -> list[str]:
        calls = [self.made(number, which) for number, which in enumerate(self.rng.integers(WORLDS, size=CALLS).tolist())]
        first = [self.made(CALLS + which, which) for which in range(WORLDS)]
        graphs = [None if made is None else self.captured(made) for made in first]
        cupy.cuda.Device().synchronize()
        for made in calls:
            replayed = int(self.rng.integers(WORLDS)) if self.rng.random() < 0.4 else None
            if replayed is not None and graphs[replayed] is not None:
                self._hold(replayed)
                graphs[replayed].launch(self.streams[replayed])
            if made is not None:
                self._hold(made.which)
                with self.streams[made.which]:
                    made.run(self.partitions[made.which])
        cupy.cuda.Device().synchronize()
        found = [problem for made in (*first, *calls) if made is not None for problem in made.problem()]
        graphs.clear()
        for partition in self.partitions:
            if partition.world is not None:
                partition.world.close()
        return found

    def _hold(self, which: int) -> None:
        with self.streams[which]:
            if self.own.random() < 0.5:
                self.hold((1,), (1,), (np.uint64(self.own.integers(_HELD_NS)),))


if __name__ == "__main__":
    if "--planted" in sys.argv:
        LaunchQueue.join = lambda *arguments: None  # type: ignore[method-assign]
    tell(rank=MPI.COMM_WORLD.rank, problems=Program(int(os.environ["TEST_SEED"]), MPI.COMM_WORLD).run())
