"""A rank of the process tests: ``python tests/runtime/worker.py <scenario>``. Prints one line of JSON per rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mkernel.errors import Error
from mkernel.runtime.init import join
from mkernel.runtime.options import Options
from mkernel.runtime.world import World
from tests.runtime.fake import FakeBackend, FakePlan, Parameters
from tests.runtime.notes import await_notes, note, of_others

NEVER = 600.0  # seconds; a deadline that no test lives to see


def open_world(**options: object) -> World:
    defaults = {"target": "cuda", "timeout": NEVER, "entry_timeout": NEVER, "heap_bytes": 1 << 20}
    return join(None, Options.resolve(**{**defaults, **options}), FakeBackend)


def tell(**fields: object) -> None:
    """One line, in one write: several ranks of mpirun, or a rank and its children, write to the same pipe."""
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), json.dumps(fields).encode() + b"\n")


def outcome(action: object) -> dict[str, object]:
    """How it ended; ``at``: when, by the clock that all processes of a machine share."""
    try:
        action()  # type: ignore[operator]
    except Error as error:
        record = getattr(error, "record", None)
        return {
            "error": type(error).__name__,
            "message": str(error),
            "peer": getattr(error, "rank", None),
            "record_rank": record and record.rank,
            "at": time.monotonic(),
        }
    return {"error": None, "at": time.monotonic()}


def calls(world: World, count: int = 5) -> None:
    executable = world.executable("null", FakePlan)
    for _ in range(count):
        world.launch(executable, Parameters())
    world.barrier()


def ok() -> None:
    with open_world() as world:
        array = world.zeros((3, 4), "float32")
        peers = world.topology.node_ranks(world.node)
        array[:] = world.rank
        world.barrier()
        import numpy as np

        segment, offset = world.heap.segment, world.heap_offset(array.ctypes.data, 48) or 0
        places = [segment.address(world.topology.local_rank(peer)) + offset for peer in peers]
        seen = [float(world.backend.wrap(place, (1,), "float32", None)[0]) for place in places]
        world.barrier()
        calls(world)
        tell(rank=world.rank, size=world.size, node=world.node, local=world.local_rank, seen=seen, zero=int(np.count_nonzero(array)))
        del array


def killed() -> None:
    """Rank 1 dies without a word while the others wait for it inside a call; then a new world of the survivors."""
    world = open_world()
    calls(world)
    note(f"left-{world.rank}")
    if world.rank == 1:
        await_notes(*of_others(world, "left"))
        os.kill(os.getpid(), signal.SIGKILL)
    executable = world.executable("null", FakePlan)

    def call() -> None:  # on a loaded machine the loss may be known before the launch
        world.launch(executable, Parameters())
        world.barrier()

    first = outcome(call)
    closing = outcome(world.close)
    survivors = int(os.environ["MKERNEL_SIZE"]) - 1
    os.environ["MKERNEL_SIZE"] = str(survivors)
    os.environ["MKERNEL_RANK"] = str(world.rank if world.rank < 1 else world.rank - 1)
    os.environ["MKERNEL_RENDEZVOUS"] = os.environ["SECOND_RENDEZVOUS"]
    with open_world() as again:
        calls(again)
        tell(rank=world.rank, first=first, closing=closing, again=again.size)


def killed_at_barrier() -> None:
    world = open_world()
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tell(rank=world.rank, first=outcome(world.barrier), closing=outcome(world.close))


def raises() -> None:
    """Rank 1 dies of an exception; the others are in a call and must end too, non-zero."""
    world = open_world()
    calls(world)
    if world.rank == 1:
        raise ValueError("planned")
    calls(world)


def fails() -> None:
    """Rank 1 stays away from a call: everybody dies of mkernel's TimeoutError."""
    world = open_world(entry_timeout=3.0)
    executable = world.executable("null", FakePlan)
    world.barrier()
    world.launch(executable, Parameters(silent_rank=2))
    world.barrier()


def caught() -> None:
    """The same, but the script handles the error and ends well."""
    world = open_world(entry_timeout=3.0)
    executable = world.executable("null", FakePlan)
    world.barrier()
    world.launch(executable, Parameters(silent_rank=2))
    tell(rank=world.rank, first=outcome(world.barrier), closing=outcome(world.close))


def cached_against_new() -> None:
    """Rank 0 wants a new plan where the others launch a cached one."""
    world = open_world()
    calls(world)
    if world.rank == 0:
        result = outcome(lambda: world.executable("other", lambda: FakePlan(op="gemm", digest=7)))
    else:
        executable = world.executable("null", FakePlan)
        world.launch(executable, Parameters())
        result = outcome(world.synchronize)
    tell(rank=world.rank, first=result, closing=outcome(world.close))


def left_open() -> None:
    """Nobody closes: the interpreter's exit does."""
    world = open_world()
    calls(world)
    tell(rank=world.rank)


def forks() -> None:
    """A forked child that ends before or after its parent disturbs nobody, and does not hide the parent's death."""
    world = open_world()
    calls(world)
    if os.fork() == 0:
        if world.rank == 1:  # it outlives what the others hear of its parent
            await_notes(*of_others(world, "heard"))
        sys.exit(0)
    calls(world)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    first = outcome(world.barrier)
    note(f"heard-{world.rank}")
    tell(rank=world.rank, first=first, closing=outcome(world.close))


def real_kernel() -> None:
    """The public API, the cpu target, ranks as processes: the sum of everything."""
    import numpy as np

    import mkernel as mk

    with mk.init(target="cpu", timeout=NEVER, entry_timeout=NEVER, heap_bytes=1 << 24) as world:
        rng = np.random.default_rng(1)
        a, b = rng.standard_normal((world.size, 40, 64)).astype(np.float16), rng.standard_normal((64, 72)).astype(np.float16)
        for _ in range(3):
            c = mk.allgather_gemm(a[world.rank], b)
        expected = a.reshape(-1, 64).astype(np.float64) @ b.astype(np.float64)
        worst = float(np.abs(c.astype(np.float64) - expected).max())
        world.barrier()
    tell(rank=world.rank, worst=worst, nodes=world.num_nodes)


def real_kernel_killed() -> None:
    """Rank 1 dies while the others' kernels wait for it."""
    import numpy as np

    import mkernel as mk

    world = mk.init(target="cpu", timeout=NEVER, entry_timeout=NEVER, heap_bytes=1 << 24)
    a, b = np.ones((40, 64), np.float16), np.ones((64, 72), np.float16)
    mk.allgather_gemm(a, b)
    world.barrier()
    note(f"left-{world.rank}")
    if world.rank == 1:
        await_notes(*of_others(world, "left"))
        os.kill(os.getpid(), signal.SIGKILL)
    tell(rank=world.rank, first=outcome(lambda: mk.allgather_gemm(a, b)), closing=outcome(world.close))


def real_kernel_other_shape() -> None:
    """Two cached plans; rank 1 calls the other one."""
    import numpy as np

    import mkernel as mk

    world = mk.init(target="cpu", timeout=NEVER, entry_timeout=NEVER, heap_bytes=1 << 24)
    shapes = [(np.ones((40, 64), np.float16), np.ones((64, n), np.float16)) for n in (72, 8)]
    for a, b in shapes:
        mk.allgather_gemm(a, b)
    world.barrier()  # else a slow rank hears of the third call in its second
    a, b = shapes[world.rank == 1]
    tell(rank=world.rank, first=outcome(lambda: mk.allgather_gemm(a, b)), closing=outcome(world.close))


def real_kernel_late() -> None:
    """Rank 1 computes something else for longer than the others are willing to wait."""
    import numpy as np

    import mkernel as mk

    world = mk.init(target="cpu", timeout=NEVER, entry_timeout=3.0, heap_bytes=1 << 24)
    a, b = np.ones((40, 64), np.float16), np.ones((64, 72), np.float16)
    mk.allgather_gemm(a, b)
    world.barrier()

    def work() -> None:
        while True:
            world.check()
            time.sleep(0.05)

    if world.rank == 1:
        tell(rank=world.rank, first=outcome(work), closing=outcome(world.close))
        return
    tell(rank=world.rank, first=outcome(lambda: mk.allgather_gemm(a, b)), closing=outcome(world.close))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
