"""The caller's streams on real GPUs: ``python tests/gpu/streams.py --ranks 2``. A process per rank, a short table last.

torch     operands that are still being made under torch.cuda.stream(s), the transpose of a weight, 20 turns; result type and stream
cupy      the same with CuPy
named     stream=: the result is made there, and operands that are dropped at once live until the call has read them
mixed     operands and out of two libraries, and arrays by __cuda_array_interface__ alone
graphs    captures by torch and CuPy, replays beside eager calls on other streams; what a replay of 20 calls costs more for its order
threads   four threads take turns on one world, each on a stream of its own
host      host time of a cached call: CuPy at most 12 us, torch at most 24 us, with ``out``
nccl      all_reduce of 256 MiB on a second stream beside allgather_gemm, launched in different orders on different ranks (docs/streams.md)

``--no-room`` leaves max_sms out: nccl then ends in a TimeoutError where the orders differ. Logs go to $OUT, else ./out.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

# The checkout is on the path only from here on.
import mkernel as mk  # noqa: E402
from mkernel.bench.baselines import _meeting_point  # noqa: E402
from mkernel.bench.peers import gather  # noqa: E402
from mkernel.runtime.cuda.streams import _Capture  # noqa: E402
from mkernel.tools import launcher  # noqa: E402
from mkernel.tools.table import format_table  # noqa: E402

ROWS, N, K = 256, 512, 512  # sums of K products of -1, 0 and 1 are exact in float16
CYCLES_PER_MS = 1_900_000  # of torch.cuda._sleep, about
HOST_US = {"CuPy": 12.0, "torch": 24.0}
NCCL_CTAS = 16
LIMITS = {"nccl": 100, "graphs": 60}  # max_sms; two calls of 60 SMs would run at once if nothing ordered them
NCCL_BYTES = 256 << 20
SECONDS = 8.0  # timeouts of the worlds


class WrongError(Exception):
    """A result or an order that must not be."""


class Place:
    """One rank, its libraries, and operands whose product every rank can work out alone."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.torch: Any = importlib.import_module("torch")
        self.cupy: Any = importlib.import_module("cupy")
        self.device = f"cuda:{world.device}"
        self.torch.cuda.set_device(world.device)
        self.turn = 0

    def numbers(self, shape: tuple[int, int], seed: int) -> Any:
        """-1, 0 and 1 as torch's float16, on the current stream; the same for the same seed on every rank."""
        generator = self.torch.Generator(device=self.device).manual_seed(seed)
        return self.torch.randint(-1, 2, shape, generator=generator, device=self.device).to(self.torch.float16)

    def problem(self) -> tuple[Any, Any, Any]:
        """A new problem, all of it there: this rank's rows of A, its weight (N, K), and the product."""
        self.turn += 1
        seeds = [1000 * self.turn + rank for rank in range(self.world.size)]
        shards = [self.numbers((ROWS, K), seed) for seed in seeds]
        w = self.numbers((N, K), 1000 * self.turn + 500 + self.world.rank)
        expected = self.torch.cat(shards).float() @ w.float().t()
        self.torch.cuda.synchronize()
        return shards[self.world.rank], w, expected

    def empty(self) -> Any:
        return self.torch.full((ROWS * self.world.size, N), float("nan"), dtype=self.torch.float16, device=self.device)

    def sleep(self, ms: float) -> None:
        """Keep torch's current stream busy."""
        self.torch.cuda._sleep(int(ms * CYCLES_PER_MS))

    def late(self, source: Any) -> Any:
        """A copy that is there some milliseconds from now, on torch's current stream; NaN until then."""
        made = self.torch.full_like(source, float("nan"))
        self.sleep(4.0)
        made.copy_(source)
        return made

    def as_cupy(self, tensor: Any) -> Any:
        return self.cupy.from_dlpack(tensor)

    def wrong(self, c: Any, expected: Any) -> int:
        """Wrong elements, read on torch's current stream."""
        return int((c.float() != expected).sum().item())

    def agree(self, wrong: int, what: str) -> None:
        """Raise on every rank if any rank is wrong."""
        by_rank = gather(self.world, wrong)
        if any(by_rank):
            raise WrongError(f"{what}: wrong elements by rank {by_rank}")

    def require(self, fine: bool, what: str) -> None:
        by_rank = gather(self.world, bool(fine))
        if not all(by_rank):
            raise WrongError(f"{what}: by rank {by_rank}")


def torch_streams(place: Place) -> str:
    torch, late = place.torch, 0
    for turn in range(20):
        x, w, expected = place.problem()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            c = mk.allgather_gemm(place.late(x), place.late(w).t(), world=place.world)
            late += not stream.query()
            wrong = place.wrong(c, expected)
        place.require(type(c) is torch.Tensor and c.dtype == torch.float16, f"turn {turn}: a tensor comes back")
        place.agree(wrong, f"turn {turn}")
    place.require(late > 0, "calls were made while their operands were not there yet")
    return f"20 turns, the operands not there yet in {late}"


def cupy_streams(place: Place) -> str:
    cupy, torch, late = place.cupy, place.torch, 0
    for turn in range(20):
        x, w, expected = place.problem()
        own = cupy.cuda.Stream(non_blocking=True)
        with torch.cuda.stream(torch.cuda.ExternalStream(own.ptr)), own:
            a, b = place.as_cupy(place.late(x)), place.as_cupy(place.late(w)).T
            c = mk.allgather_gemm(a, b, world=place.world)
            late += not own.done
            wrong = place.wrong(torch.from_dlpack(c), expected)
        place.require(type(c) is cupy.ndarray, f"turn {turn}: a CuPy array comes back")
        place.agree(wrong, f"turn {turn}")
    place.require(late > 0, "calls were made while their operands were not there yet")
    return f"20 turns, the operands not there yet in {late}"


def named(place: Place) -> str:
    """Operands are dropped while the call has not begun, and their memory is asked for and overwritten."""
    torch, cupy, late = place.torch, place.cupy, 0
    for turn, library in itertools.product(range(5), ("torch", "cupy")):
        x, w, expected = place.problem()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            place.sleep(10.0)
        if library == "torch":
            a, b = x.clone(), w.clone().t()
        else:
            a, b = place.as_cupy(x).copy(), place.as_cupy(w).copy().T
        c = mk.allgather_gemm(a, b, world=place.world, stream=stream)
        late += not stream.query()
        del a, b
        if library == "torch":
            garbage: list[Any] = [torch.full_like(one, float("nan")) for one in (x, w, x, w)]
        else:
            garbage = [cupy.full((rows, K), float("nan"), dtype="float16") for rows in (ROWS, N, ROWS, N)]
        with torch.cuda.stream(stream):
            wrong = place.wrong(c if library == "torch" else torch.from_dlpack(c), expected)
        del garbage
        place.agree(wrong, f"turn {turn}, {library}")
        place.require(isinstance(c, torch.Tensor if library == "torch" else cupy.ndarray), "the library of the operands")
    place.require(late > 0, "operands were dropped while their call had not ended")
    return f"10 turns, operands dropped before their call had ended in {late}"


class _Interface:
    """An array by ``__cuda_array_interface__`` alone."""

    def __init__(self, array: Any, stream: int) -> None:
        self._array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream, "version": 3}


def mixed(place: Place) -> str:
    torch, cupy = place.torch, place.cupy
    for turn in range(5):
        x, w, expected = place.problem()
        mine, theirs = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
        outside = torch.cuda.ExternalStream(theirs.ptr)
        # The first operand is torch's, the second CuPy's, and late on CuPy's stream.
        with torch.cuda.stream(outside), theirs:
            b = place.as_cupy(place.late(w)).T
        with torch.cuda.stream(mine), theirs:
            c = mk.allgather_gemm(x, b, world=place.world)
            wrong = place.wrong(c, expected)
        place.agree(wrong, f"turn {turn}: torch and CuPy")
        # CuPy in, late; out is torch's, and torch reads it on its own stream at once.
        with torch.cuda.stream(outside), theirs:
            a, b = place.as_cupy(place.late(x)), place.as_cupy(place.late(w)).T
        with torch.cuda.stream(mine), theirs:
            out = place.empty()
            place.sleep(2.0)
            out.fill_(float("nan"))  # what torch still does to out comes before the call
            c = mk.allgather_gemm(a, b, out=out, world=place.world)
            wrong = place.wrong(c, expected)
        place.require(c is out, "out comes back as given")
        place.agree(wrong, f"turn {turn}: CuPy into torch")
        # Arrays that tell a stream and nothing else. The call runs on CuPy's current stream.
        with torch.cuda.stream(outside), theirs:
            a, b = place.as_cupy(place.late(x)), place.as_cupy(place.late(w)).T
        own = cupy.cuda.Stream(non_blocking=True)
        with own:
            c = mk.allgather_gemm(_Interface(a, theirs.ptr), _Interface(b, theirs.ptr), world=place.world)
        with torch.cuda.stream(torch.cuda.ExternalStream(own.ptr)):
            wrong = place.wrong(torch.from_dlpack(c), expected)
        place.agree(wrong, f"turn {turn}: interfaces")
    return "15 calls"


def graphs(place: Place) -> str:
    torch, world = place.torch, place.world
    x, w, expected = place.problem()
    y, v, other = place.problem()
    s, u = torch.cuda.Stream(), torch.cuda.Stream()
    # Eager on S, late; captured on T; eager on U, which must come after the one on S.
    with torch.cuda.stream(s):
        place.sleep(5.0)
        first = mk.allgather_gemm(x, w.t(), world=world)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = [mk.allgather_gemm(x, w.t(), world=world) for _ in range(3)]
    with torch.cuda.stream(u):
        second = mk.allgather_gemm(y, v.t(), world=world)
        ended = u.query()
        behind = s.query() or not ended
        wrong = place.wrong(second, other)
    with torch.cuda.stream(s):
        wrong += place.wrong(first, expected)
    place.require(behind, "eager on U ran after eager on S")
    place.agree(wrong, "eager, captured, eager")
    # Replays on one stream, eager calls on another, no order of the program's between them.
    for turn in range(50):
        for one in inside:
            one.fill_(float("nan"))
        torch.cuda.synchronize()
        late, early = (s, u) if turn % 2 else (u, s)
        with torch.cuda.stream(late):
            place.sleep(0.5 if (turn + world.rank) % 3 else 0.0)
            if turn % 4 < 2:
                graph.replay()
            else:
                second = mk.allgather_gemm(y, v.t(), world=world)
        with torch.cuda.stream(early):
            if turn % 4 < 2:
                second = mk.allgather_gemm(y, v.t(), world=world)
            else:
                graph.replay()
        world.synchronize()
        place.require(s.query() and u.query(), f"turn {turn}: synchronize() waits for replays and calls")
        place.agree(sum(place.wrong(one, expected) for one in inside) + place.wrong(second, other), f"turn {turn}")
    _cupy_capture(place)
    begin = time.monotonic()
    with torch.cuda.stream(torch.cuda.Stream()):
        place.sleep(500.0)
    world.synchronize()
    place.require(time.monotonic() - begin < 0.25, "synchronize() waits for this world alone")
    torch.cuda.synchronize()
    return f"50 turns; the order of a graph of 20 calls costs {_cost_of_order(place):+.1f} %"


def _cupy_capture(place: Place) -> None:
    """CuPy has to be given ``out``, and says so."""
    cupy, torch = place.cupy, place.torch
    x, w, expected = place.problem()
    a, b, out = place.as_cupy(x), place.as_cupy(w).T, place.as_cupy(place.empty())
    torch.cuda.synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        mk.allgather_gemm(a, b, out=out, world=place.world)
        stream.synchronize()
        stream.begin_capture()
        try:
            mk.allgather_gemm(a, b, world=place.world)
            refused = False
        except mk.ArgumentError as error:
            refused = "pass out=" in str(error)
        mk.allgather_gemm(a, b, out=out, world=place.world)
        graph = stream.end_capture()
        out.fill(float("nan"))
        graph.launch(stream)
        stream.synchronize()
    place.require(refused, "without out, a capture with CuPy is refused")
    place.agree(place.wrong(torch.from_dlpack(out), expected), "a replay of CuPy's capture")


def _cost_of_order(place: Place) -> float:
    """Percent that 20 captured calls take longer with the two nodes that order their replays."""
    torch, world = place.torch, place.world
    queue = world.backend._queue
    x, w, _ = place.problem()
    c = place.empty()
    made = []
    for ordered in (True, False):
        graph = torch.cuda.CUDAGraph()
        real = queue._order_in_capture, queue._launched_in_capture
        if not ordered:
            queue._order_in_capture, queue._launched_in_capture = lambda *arguments: _Capture(0), lambda *arguments: None
        with torch.cuda.graph(graph):
            for _ in range(20):
                mk.allgather_gemm(x, w.t(), out=c, world=world)
        queue._order_in_capture, queue._launched_in_capture = real
        made.append(graph)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(40):
        for graph, found in zip(made, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            world.barrier()
            place.sleep(0.3)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end))
    with_order, without = (max(gather(world, statistics.median(found))) for found in times)
    return 100.0 * (with_order / without - 1.0)


def threads(place: Place) -> str:
    """They take turns alike on all ranks, as docs/streams.md asks: by a baton, without waiting for results."""
    torch, world = place.torch, place.world
    problems = [place.problem() for _ in range(4)]
    baton, results = threading.Condition(), dict[int, tuple[Any, Any]]()
    state = {"next": 0}
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            torch.cuda.set_device(world.device)
            stream = torch.cuda.Stream()
            for turn in range(number, 40, 4):
                x, w, expected = problems[number]
                with baton:
                    if not baton.wait_for(lambda turn=turn: state["next"] == turn, timeout=SECONDS):
                        raise WrongError("the other threads did not come")
                with torch.cuda.stream(stream):
                    place.sleep(0.2)
                    results[turn] = mk.allgather_gemm(x, w.t(), world=world), expected
                with baton:
                    state["next"] += 1
                    baton.notify_all()
            stream.synchronize()
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failed:
        raise failed[0]
    place.agree(sum(place.wrong(c, expected) for c, expected in results.values()), "calls of four threads")
    return f"{len(results)} calls"


def host(place: Place) -> str:
    torch, cupy, world = place.torch, place.cupy, place.world
    x, w, _ = place.problem()
    out = place.empty()
    b = w.t().contiguous()
    arrays = {"CuPy": [place.as_cupy(one) for one in (x, b, out)], "torch": [x, b, out]}
    stream = torch.cuda.Stream()
    found = {}
    kind = cupy.cuda.Stream
    same = kind.from_external(stream) if hasattr(kind, "from_external") else cupy.cuda.ExternalStream(stream.cuda_stream)
    with torch.cuda.stream(stream), same:
        for name, (a, b, c) in arrays.items():
            times = []
            for i in range(320):
                if i % 10 == 0:
                    world.barrier()
                begin = time.perf_counter_ns()
                mk.allgather_gemm(a, b, out=c, world=world)
                times.append((time.perf_counter_ns() - begin) / 1e3)
            found[name] = max(gather(world, statistics.median(times[20:])))
    text = ", ".join(f"{name} {us:.1f} us (limit {HOST_US[name]:.0f})" for name, us in found.items())
    place.require(all(us <= HOST_US[name] for name, us in found.items()), text)
    return text


def nccl(place: Place) -> str:
    """Every combination of launch orders, 30 turns."""
    torch, world = place.torch, place.world
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://{_meeting_point(world)}",
        rank=world.rank,
        world_size=world.size,
        device_id=torch.device(place.device),
    )
    x, w, expected = place.problem()
    big = torch.ones(NCCL_BYTES // 2, dtype=torch.float16, device=place.device)
    c = place.empty()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()

    def multiply() -> None:
        with torch.cuda.stream(first):
            mk.allgather_gemm(x, w.t(), out=c, world=world)

    def reduce() -> None:
        with torch.cuda.stream(second):
            dist.all_reduce(big, op=dist.ReduceOp.MAX)

    multiply()
    reduce()
    torch.cuda.synchronize()
    begin = time.monotonic()
    for turn in range(30):
        c.fill_(float("nan"))
        torch.cuda.synchronize()
        order = (multiply, reduce) if turn >> (world.rank % 2) & 1 else (reduce, multiply)
        world.barrier()
        for launch in order:
            launch()
            time.sleep(0.002)  # so that the orders really differ
        world.synchronize()
        torch.cuda.synchronize()
        place.agree(place.wrong(c, expected) + int((big != 1).sum().item()), f"turn {turn}")
    dist.destroy_process_group()
    return f"30 turns in {time.monotonic() - begin:.1f} s, {world.options.max_sms} SMs + {os.environ.get('NCCL_MAX_CTAS')} CTAs"


CHECKS: dict[str, Callable[[Place], str]] = {
    "torch": torch_streams,
    "cupy": cupy_streams,
    "named": named,
    "mixed": mixed,
    "graphs": graphs,
    "threads": threads,
    "host": host,
    "nccl": nccl,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", help=f"some of {', '.join(CHECKS)} (default: all)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds per check")
    parser.add_argument("--no-room", action="store_true", help="without max_sms")
    parser.add_argument("--tail", type=int, default=30, help="lines shown of the log of a check that failed")
    parser.add_argument("--launcher", choices=("auto", "mpi", "processes"), default="auto")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.checks) - CHECKS.keys():
        parser.error(f"unknown checks {sorted(unknown)}: choose from {', '.join(CHECKS)}")
    if options.rank:
        return _rank(options.checks[0], options.no_room)
    out = Path(os.environ.get("OUT") or "out").resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in options.checks or list(CHECKS):
        log, begin = out / f"streams-{name}.log", time.monotonic()
        arguments = [__file__, name, "--rank", *(["--no-room"] if options.no_room else [])]
        environment = {"NCCL_MAX_CTAS": str(NCCL_CTAS)} if name == "nccl" else {}
        with log.open("wb") as output:
            try:
                status = launcher.run(
                    options.ranks, arguments, timeout=options.limit, kind=options.launcher, environment=environment, output=output
                )
                outcome = "ok" if status == 0 else f"FAILED ({status})"
            except launcher.LauncherError as error:
                outcome = f"FAILED: {error}"
        text = log.read_text(errors="replace")
        detail = next((line.removeprefix("RESULT ") for line in text.splitlines() if line.startswith("RESULT ")), "")
        if outcome == "ok" and not detail:
            outcome = "FAILED: no rank has said that it is done"
        if outcome != "ok":
            print(f"--- end of {log.name}", *text.splitlines()[-options.tail :], sep="\n", flush=True)
        results.append((name, outcome, f"{detail}; {time.monotonic() - begin:.0f} s"))
    print(format_table(("check", "outcome", "detail"), results), flush=True)
    return 0 if all(outcome == "ok" for _, outcome, _ in results) else 1


def _rank(name: str, no_room: bool) -> int:
    max_sms = None if no_room else LIMITS.get(name)
    with mk.init(target="cuda", heap_bytes=512 << 20, max_sms=max_sms, timeout=SECONDS, entry_timeout=2 * SECONDS) as world:
        place = Place(world)
        x, w, expected = place.problem()  # plans are made before anything is late or captured
        place.agree(place.wrong(mk.allgather_gemm(x, w.t(), world=world), expected), "the first call")
        detail = CHECKS[name](place)
        world.barrier()
        if world.rank == 0:
            print(f"RESULT {detail}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
