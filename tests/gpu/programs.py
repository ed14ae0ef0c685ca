"""Random programs on GPUs: ``python tests/gpu/programs.py --ranks 4 --ranks-per-node 2 --steps 300 --seed N --seconds 120``.

The programs of tests/programs, most of their calls with an M of their own, and what only GPUs have: torch's and CuPy's operands, two
streams, ``stream=``, graphs of one to five calls that are replayed with other inputs, delays of ranks on the host and on streams. Some
programs plan every call, others each problem once, with ``max_rows`` or without: then sizes are new in the call itself, also in a
capture. Nothing waits for the device within a program: inputs are written, results saved and buffers overwritten in stream order.
Afterwards every element is compared with float64, and every all-reduce between ranks. A short table comes last. A failure prints its
program; the same again: ``--seed`` as printed, ``--steps`` up to there. Ranks on fewer GPUs take turns with MKERNEL_SHARE_GPUS=1.
``--target cpu`` goes through the motions with NumPy and torch CPU tensors: without streams, with graphs that are made of plain calls.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import os
import random
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The checkout is on the path only from here on.
from mkernel.bench.peers import gather  # noqa: E402
from mkernel.tools import launcher  # noqa: E402
from mkernel.tools.table import format_table  # noqa: E402
from tests.gpu.machines import GpuMachine, Machine  # noqa: E402
from tests.programs.calls import Array, Call, Limits, all_rows, fits  # noqa: E402
from tests.programs.memory import KINDS, NAN, pitch  # noqa: E402
from tests.programs.program import SHARED_BITS, Program, Step, draw  # noqa: E402

PROGRAM_STEPS = 20
KERNELS = 6
LARGEST_ARRAY = 16 << 20  # bytes, of a call with an M of its own: many lie on the heap at the same time
PLANS = ("calls", "problems", "max_rows")  # what is planned before a program: every call, every problem once, that with max_rows
LIBRARIES = ("cupy", "torch", "mixed")  # mixed: a of torch, b of CuPy
BOTH = 2  # added to a step's stream: made on that one, called with stream= of the other one
LONGEST_US = 2000  # that a rank is late
WORKSPACES = {"cuda": (1 << 20, 32 << 20), "cpu": (16 << 10, 128 << 10)}
LIMITS = {"cuda": Limits(rows=8192, columns=4096, depth=8192, macs=2e11), "cpu": Limits(rows=300, columns=200, depth=300, macs=2e7)}


# ---- programs


def resized(program: Program, limits: Limits, any_kernel: bool) -> Program:
    """The program with another M in most of its calls. ``any_kernel``: also such as need a kernel that the program did not need."""
    rng, shape, sms = random.Random(f"sizes {program.world} {program.seed}"), program.topology, program.sms
    kernels = {step.call.kernel(shape, sms) for step in program.steps}

    def other(call: Call) -> Call:
        if rng.random() < 0.25:
            return call
        for new in (call.resized(rng, shape, limits) for _ in range(8)):
            arrays = (*new.inputs(shape, 0).values(), new.result(shape, 0))
            small = max(2 * array.rows * array.columns for array in arrays) <= LARGEST_ARRAY
            if small and fits(new, shape, sms) and (any_kernel or new.kernel(shape, sms) in kernels):
                return new
        return call

    return dataclasses.replace(program, steps=tuple(dataclasses.replace(step, call=other(step.call)) for step in program.steps))


def plans(program: Program) -> str:
    """Which of ``PLANS`` are made."""
    return random.Random(f"plans {program.world} {program.seed}").choice(PLANS)


def decorated(program: Program, libraries: Sequence[str]) -> Program:
    """The program with what GPUs have drawn for every step."""
    rng = random.Random(f"gpu {program.world} {program.seed}")
    steps: list[Step] = []
    graph = 0
    while len(steps) < len(program.steps):
        if rng.random() < 0.2:
            graph += 1
            length = rng.randint(1, 5)
            library, stream = rng.choice(libraries), rng.randrange(2)
            for step in program.steps[len(steps) : len(steps) + length]:
                out = "reused" if step.out == "none" and library != "torch" else step.out  # CuPy cannot allocate in a capture
                changes: dict[str, Any] = {"library": library, "stream": stream, "graph": graph, "out": out, "late": _late(rng, program)}
                steps.append(dataclasses.replace(step, barrier=False, **changes))
        else:
            step = program.steps[len(steps)]
            stream = rng.randrange(2) + (BOTH if rng.random() < 0.2 else 0)
            steps.append(dataclasses.replace(step, library=rng.choice(libraries), stream=stream, late=_late(rng, program)))
    return dataclasses.replace(program, steps=tuple(steps), prepared=True)


def _late(rng: random.Random, program: Program) -> tuple[tuple[int, int, int, int], ...]:
    """Some ranks, on the host (-1) or on the stream (-2), by so many microseconds."""
    if rng.random() < 0.6:
        return ()
    size = program.topology.size
    return tuple((rank, rng.choice((-1, -2)), 0, rng.randint(10, LONGEST_US)) for rank in rng.sample(range(size), rng.randint(1, size)))


def replays(program: Program, graph: int) -> int:
    return 2 + (program.seed + graph) % 3


def pieces(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Steps one by one, those of a graph together."""
    at = 0
    while at < len(steps):
        end = at + 1
        while steps[at].graph and end < len(steps) and steps[end].graph == steps[at].graph:
            end += 1
        yield list(steps[at:end])
        at = end


# ---- one rank


@dataclasses.dataclass(slots=True, eq=False)
class Saved:
    """What is left of a call: its bits, those between the rows of ``out``, and those of all rows of A, if they were asked for."""

    step: Step
    replay: int
    bits: Any
    pad: Any
    gathered: Any


class Rank:
    """One rank's planes and saved results. A plane belongs to a stream, and in a graph to a call: only mkernel orders the streams."""

    def __init__(self, machine: Machine, program: Program) -> None:
        self.machine, self.program, self.world = machine, program, machine.world
        self.saved: list[Saved] = []
        sizes: dict[tuple[Any, ...], int] = {}
        for slot, step in self._slots():
            for rank in range(self.world.size):
                for name, array, place in self._arrays(step, rank):
                    if place not in ("none", "fresh"):
                        key = (name, place, step.stream % BOTH, slot)
                        sizes[key] = max(sizes.get(key, 8), array.stored[0] * pitch(array, True))
        self.planes = {key: self._plane(key[1], words) for key, words in sorted(sizes.items())}

    def _slots(self) -> Iterator[tuple[int, Step]]:
        """Calls of one graph use other planes than each other."""
        for piece in pieces(self.program.steps):
            yield from enumerate(piece)

    def _arrays(self, step: Step, rank: int) -> list[tuple[str, Array, str]]:
        arrays = step.call.inputs(self.program.topology, rank)
        operands = [(name, array, place) for (name, array), place in zip(arrays.items(), step.places, strict=True)]
        keeps = step.call.keeps(self.program.topology) if step.gathered != "none" else None
        kept = [] if keeps is None else [("gathered", keeps, step.gathered)]
        return [*operands, *kept, ("out", step.call.result(self.program.topology, rank), step.out)]

    def _plane(self, place: str, words: int) -> Any:
        if place == "heap":
            return self.world.empty((words,), "float16").view(self.world.xp.uint16)
        return self.machine.plane(words)

    def _words(self, step: Step, slot: int, name: str, array: Array, place: str) -> Any:
        """Rows as they lie in memory, as far apart as they are: (rows, pitch)."""
        step_words = pitch(array, name in step.padded)
        count = array.stored[0] * step_words
        plane = self.machine.plane(max(8, count)) if place == "fresh" else self.planes[name, place, step.stream % BOTH, slot]
        return plane[:count].reshape(array.stored[0], step_words)

    def make(self, slot: int, step: Step) -> Prepared:
        """Arrays for a call, whose contents nobody knows yet."""
        return Prepared(self, slot, step)

    def run(self) -> None:
        """The whole program; returns when all of it is enqueued."""
        self._plan()  # no call is captured or enqueued before all plans are there
        self.world.barrier()
        for piece in pieces(self.program.steps):
            if piece[0].graph:
                self._graph(piece)
            else:
                self._eager(piece[0])
            if piece[-1].barrier:
                self.world.barrier()

    def _plan(self) -> None:
        """Agree on what is planned before the first call. Collective."""
        how, problems = plans(self.program), {}
        for slot, step in self._slots():
            rows = step.call.inputs(self.program.topology, 0)["a"].rows
            if how == "calls":
                step.call.plan(self.world, self.make(slot, step).operands())
            else:
                of = repr(dataclasses.replace(step.call, rows=0))  # type: ignore[call-arg]
                known = problems.setdefault(of, (slot, step, max(rows, 1)))
                problems[of] = (*known[:2], max(known[2], rows))
        for slot, step, rows in problems.values():
            most = {"max_rows": rows} if how == "max_rows" else {}
            step.call.plan(self.world, self.make(slot, step).operands(), **most)

    def _eager(self, step: Step) -> None:
        machine, own = self.machine, step.stream % BOTH
        other = 1 - own if step.stream >= BOTH else own
        with machine.on(own):
            prepared = self.make(0, step)
            prepared.fill(0)
            self._be_late(step)
            where = {"stream": machine.handle(other)} if other != own else {}
            result = prepared.call(**where)
        with machine.on(other):
            prepared.save(0, result)
            prepared.spoil()
        if other != own:
            machine.follow(own, other)  # the planes are used again there

    def _graph(self, steps: Sequence[Step]) -> None:
        machine, stream = self.machine, steps[0].stream % BOTH
        with machine.on(stream):
            prepared = [self.make(slot, step) for slot, step in enumerate(steps)]
            results: list[Any] = [None] * len(steps)

            def body() -> None:
                results[:] = [call.call() for call in prepared]

            launch = machine.capture(stream, steps[0].library, body)
        for replay in range(replays(self.program, steps[0].graph)):
            with machine.on(stream):
                for call in prepared:
                    call.fill(replay)
                self._be_late(steps[replay % len(steps)])
                launch()
                for call, result in zip(prepared, results, strict=True):
                    call.save(replay, result)
                    call.spoil()

    def _be_late(self, step: Step) -> None:
        for rank, where, _, microseconds in step.late:
            if rank == self.world.rank:
                if where == -1:
                    time.sleep(microseconds * 1e-6)
                else:
                    self.machine.delay(microseconds)

    # ---- afterwards
    def problems(self) -> tuple[list[str], float]:
        """What is wrong with the results of this rank, and the worst error over its bound. Collective."""
        machine, xp, program, world = self.machine, self.world.xp, self.program, self.world
        machine.synchronize()
        found, worst, sums = [], 0.0, []
        for saved in self.saved:
            step, call = saved.step, saved.step.call
            bits = machine.words(saved.bits)
            array = call.result(program.topology, world.rank)
            what = f"step {step.number}, replay {saved.replay}"
            if bits.shape != (array.rows, array.columns):
                found.append(f"{what}: the result is {bits.shape}")
                continue
            if saved.pad is not None and bool((saved.pad != NAN).any()):
                found.append(f"{what}: something was written between the rows of out")
            inputs = functools.partial(self._again, saved)
            error = call.worst(xp, program.topology, world.rank, inputs, bits.view(KINDS[array.dtype]))
            worst = max(worst, error)
            if not error <= 1.0:
                found.append(f"{what}: {error:.3g} times the bound")
            if saved.gathered is not None and bool((machine.words(saved.gathered) != all_rows(xp, program.topology, inputs)).any()):
                found.append(f"{what}: other rows are gathered than were sent")
            sums.append(zlib.crc32(self._host(bits)) if call.same_on_all_ranks else 0)
        for rank, others in enumerate(gather(world, sums)):
            wrong = [self.saved[i].step.number for i, (mine, other) in enumerate(zip(sums, others, strict=False)) if mine != other]
            if wrong:
                found.append(f"other bits than rank {rank} in steps {wrong[:8]}")
        return found, worst

    def _host(self, bits: Any) -> bytes:
        return bytes((bits.get() if hasattr(bits, "get") else bits).tobytes())

    def _again(self, saved: Saved, rank: int) -> dict[str, Any]:
        """The operands of any rank, written once more."""
        inputs = {}
        for index, (name, array) in enumerate(saved.step.call.inputs(self.program.topology, rank).items()):
            words = self.world.xp.empty(array.stored, self.world.xp.uint16)
            self.machine.fill(words, seed_of(self.program, saved.step, saved.replay, rank, index), array.dtype)
            stored = words.view(KINDS[array.dtype])
            inputs[name] = stored.T if array.transposed else stored
        return inputs


def seed_of(program: Program, step: Step, replay: int, rank: int, index: int) -> int:
    text = f"{program.seed} {step.number} {replay} {rank} {index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")


class Prepared:
    """A call's arrays on one rank."""

    def __init__(self, rank: Rank, slot: int, step: Step) -> None:
        self.rank, self.step, self.machine = rank, step, rank.machine
        self.arrays = rank._arrays(step, rank.world.rank)
        self.words = {name: rank._words(step, slot, name, array, place) for name, array, place in self.arrays if place != "none"}
        self.given = [self._array(name, array) for name, array, _ in self.arrays if name in self.words]

    def _array(self, name: str, array: Array) -> Any:
        stored = self.words[name].view(KINDS[array.dtype])[:, : array.stored[1]]
        matrix = stored.T if array.transposed else stored
        torch = self.step.library == "torch" or (self.step.library == "mixed" and name in ("a", "out"))
        return self.machine.to_torch(matrix, array.dtype) if torch and self.machine.torch is not None else matrix

    def operands(self) -> list[Any]:
        return self.given[: len(self.step.places)]

    def fill(self, replay: int) -> None:
        """Fresh operands, and NaN everywhere else."""
        rank = self.rank.world.rank
        for index, (name, array, place) in enumerate(self.arrays):
            if place == "none":
                continue
            words = self.words[name]
            words[...] = NAN
            if name not in ("out", "gathered"):
                seed = seed_of(self.rank.program, self.step, replay, rank, index)
                self.machine.fill(words[:, : array.stored[1]], seed, array.dtype)

    def call(self, **where: Any) -> Any:
        out = self.given[-1] if "out" in self.words else None
        if "gathered" in self.words:
            where["gathered"] = self.given[len(self.step.places)]
        result = self.step.call.run(self.operands(), world=self.rank.world, out=out, **where)
        if out is not None and result is not out:
            raise AssertionError(f"step {self.step.number}: out is not returned as given")
        torch = self.machine.torch
        if out is None and torch is not None and isinstance(result, torch.Tensor) != isinstance(self.given[0], torch.Tensor):
            raise AssertionError(f"step {self.step.number}: a result of {type(result)} for operands of {type(self.given[0])}")
        return result

    def save(self, replay: int, result: Any) -> None:
        """A copy of the result, in stream order; then NaN in its place."""
        pad = None
        if "out" in self.words and "out" in self.step.padded:
            pad = self.words["out"][:, self.arrays[-1][1].columns :].copy()
        gathered = self.machine.saved(self.given[len(self.step.places)]) if "gathered" in self.words else None
        self.rank.saved.append(Saved(self.step, replay, self.machine.saved(result), pad, gathered))
        self.machine.spoil(result)

    def spoil(self) -> None:
        """The call has ended in stream order: its operands may be overwritten."""
        for words in self.words.values():
            words[...] = NAN


def rank_main(options: argparse.Namespace) -> int:
    import mkernel as mk

    world_name = f"{options.ranks // options.ranks_per_node}x{options.ranks_per_node}"
    heap = 2 << 30 if options.target == "cuda" else 64 << 20
    begin, steps, calls, worst, count = time.monotonic(), 0, 0, 0.0, 0
    with (
        mk.init(target=options.target, ranks_per_node=options.ranks_per_node, heap_bytes=heap) as world,
        mock.patch("tests.programs.program.WORKSPACES", WORKSPACES[world.target]),
    ):
        machine = (GpuMachine if world.target == "cuda" else Machine)(world)
        libraries = LIBRARIES if machine.torch is not None else ("cupy",)
        while steps < options.steps and not any(gather(world, time.monotonic() - begin > options.seconds)):
            number = min(PROGRAM_STEPS, options.steps - steps)
            seed = (options.seed << SHARED_BITS) + count
            # A family of kernels serves four programs; splits are drawn for a device with few SMs and fit a larger one.
            family = seed + (count // 4 << SHARED_BITS)
            program = draw(world_name, family, number, KERNELS, LIMITS[world.target])
            program = decorated(resized(program, LIMITS[world.target], world.target == "cuda"), libraries)
            with mock.patch("mkernel.planner.gemm._PUT_BYTES", (program.put_bytes, program.put_bytes)):
                rank = Rank(machine, program)
                try:
                    rank.run()
                    found, error = rank.problems()
                except BaseException:
                    print(f"rank {world.rank} in {program}", file=sys.stderr, flush=True)
                    raise
            wrong = [f"rank {i}: {text}" for i, texts in enumerate(gather(world, found)) for text in texts]
            if wrong:
                if world.rank == 0:
                    print("WRONG " + "\n".join(wrong[:20]), f"plans of {plans(program)}, {program}", sep="\n", flush=True)
                raise AssertionError(wrong[0])
            steps, calls, worst, count = steps + number, calls + len(rank.saved), max(worst, error), count + 1
            if isinstance(machine, GpuMachine):
                machine.forget()
        worst = max(gather(world, worst))
        if world.rank == 0:
            seconds = f"{time.monotonic() - begin:.0f} s"
            which = f"{world.target}, {', '.join(libraries)}"
            print(f"RESULT {world_name}\t{which}\t{count}\t{steps} of {options.steps}\t{calls}\t{worst:.2f}\t{seconds}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=None, help="default: fresh, printed")
    parser.add_argument("--seconds", type=float, default=120.0, help="begin no program after so long")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--launcher", choices=("auto", "mpi", "processes"), default="auto")
    parser.add_argument("--limit", type=float, default=None, help="seconds after which the ranks are killed (default: --seconds + 120)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.ranks_per_node = options.ranks_per_node or options.ranks
    if options.ranks % options.ranks_per_node:
        parser.error("--ranks must be a multiple of --ranks-per-node")
    if options.rank:
        return rank_main(options)
    seed = int.from_bytes(os.urandom(3), "little") if options.seed is None else options.seed
    print(f"programs from --seed {seed}", flush=True)
    arguments = [__file__, "--rank", "--seed", str(seed), "--steps", str(options.steps), "--seconds", str(options.seconds)]
    arguments += ["--ranks", str(options.ranks), "--ranks-per-node", str(options.ranks_per_node), "--target", options.target]
    log = Path(os.environ.get("OUT") or "out").resolve() / f"programs-{options.ranks}-{options.ranks_per_node}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    outcome = "ok"
    with log.open("wb") as output:
        try:
            status = launcher.run(
                options.ranks, arguments, timeout=options.limit or options.seconds + 120, kind=options.launcher, output=output
            )
            outcome = "ok" if status == 0 else f"FAILED ({status})"
        except launcher.LauncherError as error:
            outcome = f"FAILED: {error}"
    lines = log.read_text(errors="replace").splitlines()
    if outcome != "ok":
        wrong = next((i for i, line in enumerate(lines) if line.startswith("WRONG ")), max(0, len(lines) - 60))
        print(*lines[wrong : wrong + 60], sep="\n", flush=True)
    rows = [(*line.removeprefix("RESULT ").split("\t"), outcome) for line in lines if line.startswith("RESULT ")]
    columns = ("world", "target", "programs", "steps", "calls", "error / bound", "time", "outcome")
    print(format_table(columns, rows or [("?", options.target, "", "", "", "", "", outcome)]), flush=True)
    return 0 if outcome == "ok" and rows else 1


if __name__ == "__main__":
    sys.exit(main())
