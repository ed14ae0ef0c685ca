"""``mk.launch``: all ranks of a world, started from one program. Threads are started here, processes (on GPUs) in ``workers``."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mkernel import env
from mkernel.errors import AbortedError
from mkernel.runtime import current
from mkernel.runtime.init import open_world
from mkernel.runtime.integers import whole_number
from mkernel.runtime.opening.placement import RankInfo, choose_target
from mkernel.runtime.opening.target import MakeBackend, gpus_here
from mkernel.runtime.options import Options
from mkernel.runtime.ranks.bootstrap import ThreadGroup, host_identity
from mkernel.runtime.world import World

if TYPE_CHECKING:
    from mkernel.runtime.cpu.thread_ranks import ThreadRanks

__all__ = ["launch", "run"]

_LEAVE_SECONDS = 10.0  # that ranks may take which were told to


def launch(
    fn: Callable[..., Any],
    ranks: int = 4,
    ranks_per_node: int | None = None,
    target: str = "auto",
    args: Sequence[Any] = (),
    *,
    seed: int | None = None,
    **init_options: Any,
) -> list[Any]:
    """Call ``fn(world, *args)`` for every rank; the results, by rank. Blocks until all ranks have ended.

    On target cpu each rank is a thread of this process, and all ranks' kernels run on one scheduler with virtual time: the same ``seed``
    gives the same interleaving, and a deadlock is reported at once.

    On GPUs each rank is a process. The processes and their world stay for the next call with the same options, which then starts in
    milliseconds; ``mk.shutdown()``, ``MKERNEL_IDLE_LIMIT`` seconds without a call, other options, a changed ``MKERNEL_`` or ``CUDA_``
    variable and the end of this process end them.

    - ``fn``, what it refers to, and ``args`` travel as *copies* (cloudpickle): a list that ``fn`` appends to stays empty here. A CuPy array
      or CUDA tensor among them arrives on the rank's own GPU. Modules are imported by name, once: call ``mk.shutdown()`` after you have
      changed one.
    - Results come back as copies in host memory, at any depth: CuPy arrays as NumPy's, CUDA tensors as CPU tensors.
    - What ranks print, warn of and log (logger ``mkernel``) is shown here while they run. They take over this process's environment
      variables, current folder, ``sys.path`` and warning filters with every call.
    - Ctrl-C, like a failure, ends the call on all ranks; a rank that does not leave within some seconds is killed, and
      replaced. The next call works.
    - Calls of several threads take turns. ``fn`` itself cannot start ranks on GPUs.

    Parameters
    ----------
    fn
        What each rank does. Calls without ``world=`` mean the rank's own world, and a result must not refer to it.
    ranks, ranks_per_node
        Size of the world and of its (emulated) nodes; by default one node.
    target, init_options
        As for ``init``: transport, heap_bytes, max_sms, batch_invariant, specialize, timeout, entry_timeout.
    seed
        Of the cpu scheduler (default ``MKERNEL_CPU_SEED``).

    Examples
    --------
    >>> import mkernel as mk
    >>> mk.launch(lambda world, factor: factor * world.rank, ranks=3, target="cpu", args=(10,))
    [0, 10, 20]

    Raises
    ------
    Exception
        What the first rank to fail raised, with its traceback as the cause where the rank is a process; the other ranks are aborted, and
        what they raised is added as notes.
    PeerLostError
        The process of a rank died; the message says which and how. The next call replaces it.
    ArgumentError
        Something that must travel to or from a process cannot be pickled; the message says what.
    """
    ranks = whole_number("ranks", ranks, 1)
    seed = None if seed is None else whole_number("seed", seed, 0, (1 << 64) - 1, " or None")
    options = Options.resolve(target=target, ranks_per_node=ranks_per_node, **init_options)
    return run(fn, ranks, options, tuple(args), seed)


def run(
    fn: Callable[..., Any],
    ranks: int,
    options: Options,
    args: tuple[Any, ...] = (),
    seed: int | None = None,
    make_backend: MakeBackend | None = None,
) -> list[Any]:
    """``launch`` after its arguments are checked; tests give another device."""
    if make_backend is None and _target(ranks, options) == "cuda":
        from mkernel.runtime.workers.calls import run_in_workers

        return run_in_workers(fn, ranks, dataclasses.replace(options, target="cuda"), args)
    return _Launch(fn, ranks, options, args, seed, make_backend).run()


def _target(ranks: int, options: Options) -> str:
    """The target of the ranks. Each worker process will see the same GPUs as this process, and has chosen none yet."""
    gpus, problem, _ = gpus_here() if options.target in ("auto", "cuda") else ((), "", None)
    info = RankInfo(host_identity(), {}, gpus, problem, shares=env.SHARE_GPUS.get())
    return choose_target([info] * ranks, options.target)


class _Launch:
    def __init__(
        self,
        fn: Callable[..., Any],
        ranks: int,
        options: Options,
        args: tuple[Any, ...],
        seed: int | None,
        make_backend: MakeBackend | None,
    ) -> None:
        self.fn, self.ranks, self.options, self.args, self.make_backend = fn, ranks, options, args, make_backend
        self.group = ThreadGroup(ranks)
        self.thread_ranks = self._make_thread_ranks(seed)
        self.results: list[Any] = [None] * ranks
        self.failures: list[tuple[int, BaseException]] = []  # in the order in which they happened
        self.worlds: dict[int, World] = {}
        self.lock = threading.Lock()

    def _make_thread_ranks(self, seed: int | None) -> ThreadRanks | None:
        if self.make_backend is not None:
            return None
        from mkernel.runtime.cpu.thread_ranks import ThreadRanks

        return ThreadRanks(self.ranks, env.CPU_SEED.get() if seed is None else seed)

    def run(self) -> list[Any]:
        threads = [
            threading.Thread(target=self._rank, args=(rank,), name=f"mkernel-rank-{rank}", daemon=True) for rank in range(self.ranks)
        ]
        with contextlib.ExitStack() as stack:
            if self.thread_ranks is not None:
                stack.callback(self.thread_ranks.close)
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except BaseException as interrupt:  # Ctrl-C: take the ranks along
                self._abort(f"{type(interrupt).__name__} in the caller of mk.launch")
                self._leave(threads)
                raise
        if self.failures:
            raise self._explain()
        return self.results

    def _leave(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for ranks that were told to leave, as long in all as one may take. Kernels of target cpu hear of it in waits only."""
        end = time.monotonic() + _LEAVE_SECONDS
        for thread in threads:
            thread.join(max(0.0, end - _LEAVE_SECONDS / 2 - time.monotonic()))
        if self.thread_ranks is not None:
            self.thread_ranks.close()  # ends those that compute
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _rank(self, rank: int) -> None:
        try:
            world = open_world(
                self.group.bootstrap(rank), self.options, group=self.group, thread_ranks=self.thread_ranks, make_backend=self.make_backend
            )
            with self.lock:
                self.worlds[rank] = world
            with current.thread_world(world, alone=world.size == 1, ranks=self.worlds), world:
                self.results[rank] = self.fn(world, *self.args)
        except BaseException as error:
            with self.lock:
                self.failures.append((rank, error))
            self._abort(f"rank {rank} failed: {type(error).__name__}: {error}")
        finally:
            if self.thread_ranks is not None:
                self.thread_ranks.finish(rank)

    def _abort(self, reason: str) -> None:
        self.group.abort(reason)
        with self.lock:
            worlds = list(self.worlds.values())
        for world in worlds:
            world.abort(reason)

    def _explain(self) -> BaseException:
        """The first failure that is not only the echo of another rank's failure."""
        causes = [item for item in self.failures if not isinstance(item[1], AbortedError)] or self.failures
        rank, error = causes[0]
        error.add_note(f"raised on rank {rank} of mk.launch")
        if self.thread_ranks is not None and self.thread_ranks.report:
            error.add_note(self.thread_ranks.report)
        for other, failure in self.failures:
            if failure is not error:
                error.add_note(f"rank {other}: {type(failure).__name__}: {failure}")
        return error
