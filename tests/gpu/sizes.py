"""Sizes that a program has never used before: ``python tests/gpu/sizes.py --ranks 2 [--nodes N] [STAGE ...]``; about 90 s on two GPUs.

``--ranks 1`` has the stages ``new``, ``loop`` and ``prepare``: host times on one GPU that no other rank uses.

Stages (default: all):

new      after ``mk.plan(max_rows=)``, 200 calls with random new M of every op: host time of a size never seen, of the same size with
         other arrays, and of the same call again; then 100 calls between which results are checked, so that no cache holds the host's code
         at the first of each ten; the pieces of a new size; what of the driver and of the ranks' agreements was used meanwhile (must be
         nothing); every element of the results
grow     rows grow by a step per call until the heap refuses: how full it was, results, and that the world goes on
loop     random M against the same M sorted, on the device: the ratio of the medians of whole loops
graphs   graphs of many sizes, then a larger call, then their replays in random order
prepare  the first preparation of every op, from an empty cache of kernels and from a full one, in new processes

A table of what was found comes last, with ``FAILED`` where something is wrong or over its limit; then the exit status is 1. ``--out FILE``
gets all numbers as JSON. ``--target cpu`` goes through the motions with small sizes; its times mean nothing and have no limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The checkout is on the path only from here on.
from mkernel.bench.peers import gather  # noqa: E402
from mkernel.errors import ArgumentError  # noqa: E402
from mkernel.tools import launcher  # noqa: E402
from mkernel.tools.table import format_table  # noqa: E402
from tests.gpu.compilations import Compilations, shown  # noqa: E402
from tests.gpu.counters import Counters, Pieces  # noqa: E402
from tests.gpu.made import BATCH, CONFIGS, OPS, Config, Site, microseconds, new_sizes  # noqa: E402
from tests.programs.calls import AllGatherGemm, Gemm  # noqa: E402

STAGES = ("new", "grow", "loop", "graphs", "prepare")
COLUMNS = ("stage", "what", "found", "limit", "outcome")


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table. ``fine``: None where nothing is demanded."""

    stage: str
    what: str
    found: str
    limit: str = ""
    fine: bool | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        return self.stage, self.what, self.found, self.limit, {None: "", True: "ok", False: "FAILED"}[self.fine]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, p90, p99 and the worst."""
    ordered = sorted(values)
    return {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in _SHARES.items()}


_SHARES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "worst": 1.0}


def _shown(found: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.1f}" for name, value in found.items())


# ---- new sizes


def stage_new(site: Site) -> Iterator[tuple[Line, Any]]:
    config, world, counters = site.config, site.world, site.counters
    for op in OPS:
        site.plan(site.call(op, 1), config.max_rows)
    counters.counts.clear()
    each = -(-(config.calls + config.checked + config.pieces) // len(OPS))
    drawn = {op: site.sizes(op, each) for op in OPS}
    order = [site.call(op, drawn[op][i]) for i in range(each) for op in OPS if i < len(drawn[op])]
    counted, checked, split = order[: config.calls], order[config.calls :][: config.checked], order[config.calls + config.checked :]
    in_turn = new_sizes(site, counted, len(counted))
    site.forget()
    between = new_sizes(site, checked, BATCH)
    times, error, taken = in_turn.times, max(in_turn.error, between.error), max(in_turn.taken, between.taken)
    times["new, the program checks results after each ten"] = between.times["new"]
    times["of these, the first of each ten"] = between.times["new"][::BATCH]
    pieces = _pieces(site, split)
    everywhere = gather(world, {"times": times, "counts": dict(counters.counts), "taken": taken, "pieces": pieces})
    real = world.target == "cuda"
    for name in times:
        found = percentiles([one for rank in everywhere for one in rank["times"][name]])
        limit = "median 100, p99 300" if name == "new" and real else ""
        fine = found["median"] <= 100 and found["p99"] <= 300 if limit else None
        yield Line("new", f"host us, {name}", _shown(found), limit, fine), {"found": found, "ranks": [r["times"][name] for r in everywhere]}
    for name in pieces:
        found = percentiles([one for rank in everywhere for one in rank["pieces"][name]])
        yield Line("new", f"  piece of a new size: {name}", _shown(found)), found
    used = {f"rank {i}: {name}": count for i, rank in enumerate(everywhere) for name, count in rank["counts"].items()}
    yield Line("new", f"forbidden in {len(counted) + len(checked)} new sizes", str(used or "nothing"), "nothing", not used), used
    grown = max(rank["taken"] for rank in everywhere)
    yield Line("new", "device memory taken meanwhile", f"{grown} bytes", "0", grown <= 0), grown
    worst = site.worst(error)
    yield Line("new", f"error / bound of {2 * (len(counted) + len(checked))} results", f"{worst:.2f}", "1", worst <= 1.0), worst


def _pieces(site: Site, calls: Sequence[Gemm]) -> dict[str, list[float]]:
    """Microseconds of each piece of the first call of a size. The pieces' clocks are in it."""
    from mkernel.ops import schedule
    from mkernel.ops.gemm import Form
    from mkernel.runtime.arrays.libraries import Crossing

    world, pieces = site.world, Pieces()
    found: dict[str, list[float]] = {}
    parts = {
        "plan": (schedule, "plan_for"),
        "form": (Form, "bind"),
        "executable": (world.problems, "executable"),
        "encoding tensor maps": (world.backend._maps, "_encode") if world.target == "cuda" else (world.backend, "tensor_map"),
        "launch": (world, "launch"),
        "streams": (Crossing, "enter"),
    }
    for first in range(0, len(calls), BATCH):
        made = [site.make(call) for call in calls[first : first + BATCH]]
        bound = [site.bound(one) for one in made]
        site.together()
        with pieces.of(parts):
            for call in bound:
                whole = microseconds(call)
                found.setdefault("all", []).append(whole)
                split = {name: 1e6 * seconds for name, seconds in pieces.take().items()}
                for name, value in {**split, "the rest": whole - sum(split.values())}.items():
                    found.setdefault(name, []).append(value)
        site.together()
    return found


# ---- rows grow to the heap's size


def stage_grow(site: Site) -> Iterator[tuple[Line, Any]]:
    config, world = site.config, site.world
    most = world.heap_bytes // (world.size * config.grow_k * 2) + config.grow_step
    whole = site.call(AllGatherGemm, most, config.grow_n, config.grow_k)
    prepared = site.plan(site.call(AllGatherGemm, config.grow_step, config.grow_n, config.grow_k), None)
    base = site.make(whole, views=False)
    buffers = {name: words.reshape(-1) for name, words in base.words.items()}
    rows, calls, error, refused = 0, 0, 0.0, ""
    host: list[float] = []

    def one(number: int, check: bool) -> float:
        made = site.make(site.call(AllGatherGemm, number, config.grow_n, config.grow_k), buffers=buffers)
        made.seeds = base.seeds
        host.append(microseconds(site.bound(made)))
        if not check:
            return 0.0
        site.machine.synchronize()
        return site.error(made, made.words["out"], most)

    while not refused:
        try:
            error = max(error, one(rows + config.grow_step, calls % 10 == 0))
            rows, calls = rows + config.grow_step, calls + 1
        except ArgumentError as problem:
            refused = str(problem)
    ends = gather(world, [rows, refused])
    error = max(error, one(rows, True), one(config.grow_step, True))
    site.together()
    plan = prepared.plan(rows)
    share = (plan.workspace_bytes + plan.staging_bytes) / world.heap_bytes
    alike = all(end == ends[0] for end in ends)
    yield (
        Line("grow", f"heap used at {rows} rows, after {calls} calls", f"{100 * share:.1f} %", "over 90 %", share > 0.9),
        [rows, calls, share],
    )
    yield Line("grow", "host us per call", _shown(percentiles(host))), host
    said = "heap_bytes" in refused and "mk.init(heap_bytes=" in refused
    yield Line("grow", "the refusal", f"{refused[:60]}...", "alike, with the size needed", alike and said), ends
    worst = site.worst(error)
    yield Line("grow", "error / bound, also after the refusal", f"{worst:.2f}", "1", worst <= 1.0), worst


# ---- random sizes against sorted ones


def stage_loop(site: Site) -> Iterator[tuple[Line, Any]]:
    config, world, machine = site.config, site.world, site.machine
    for op in OPS:
        most = site.most(op)
        site.plan(site.call(op, 1), config.max_rows)
        site.forget()
        base = site.make(site.call(op, most), views=False)
        buffers = {name: words.reshape(-1) for name, words in base.words.items()}
        drawn = [site.sizes(op, 1)[0] for _ in range(config.loop)]
        sample = set(site.rng.sample(sorted(set(drawn)), min(5, len(set(drawn)))))
        made, calls = {}, {}
        for rows in sorted(set(drawn)):
            own = {"out": machine.plane(base.words["out"].size)} if rows in sample else {}
            one = site.make(site.call(op, rows), buffers={**buffers, **own})
            one.seeds = base.seeds
            calls[rows] = site.bound(one)
            if rows in sample:
                made[rows] = one
        base_rows = base.words["a"].shape[0]
        orders = {"random": drawn, "sorted": sorted(drawn)}
        for rows in drawn:
            calls[rows]()
        taken: dict[str, list[float]] = {name: [] for name in orders}
        error = 0.0
        for turn in range(config.turns):
            for name in list(orders)[:: 1 if turn % 2 == 0 else -1]:
                for one in made.values():
                    site.poison(one)
                site.together()
                here = _loop_ms(site, [calls[rows] for rows in orders[name]])
                taken[name].append(max(gather(world, here)))
                if turn == config.turns - 1:
                    error = max([error, *(site.error(one, one.words["out"], base_rows) for one in made.values())])
        medians = {name: statistics.median(values) for name, values in taken.items()}
        ratio = medians["random"] / medians["sorted"]
        fine = ratio <= 1.05 if world.target == "cuda" else None
        text = f"{ratio:.3f}  ({medians['random']:.2f} and {medians['sorted']:.2f} ms)"
        yield Line("loop", f"{op.op}, {len(drawn)} M: random / sorted", text, "1.05", fine), taken
        worst = site.worst(error)
        yield Line("loop", f"{op.op}: error / bound of a sample", f"{worst:.2f}", "1", worst <= 1.0), worst
        del base, buffers, made, calls
        site.forget()


def _loop_ms(site: Site, calls: Sequence[Callable[[], Any]]) -> float:
    """Milliseconds of all calls on the device; on the host on target cpu. The device is idle afterwards."""
    if site.world.target != "cuda":
        return microseconds(lambda: [call() for call in calls]) / 1e3
    cuda = site.world.xp.cuda
    begin, end = cuda.Event(), cuda.Event()
    begin.record()
    for call in calls:
        call()
    end.record()
    site.machine.synchronize()
    return float(cuda.get_elapsed_time(begin, end))


# ---- graphs


def stage_graphs(site: Site) -> Iterator[tuple[Line, Any]]:
    config, machine = site.config, site.machine
    for op in OPS:
        site.plan(site.call(op, 1), None)
    captured = []
    for i in range(config.graphs):
        op = OPS[i % len(OPS)]
        rows = max(1, site.sizes(op, 1)[0] // 8)
        library = site.libraries[i % len(site.libraries)]
        made = site.make(site.call(op, rows), library)
        captured.append((made, machine.capture(0, "cupy" if library == "mixed" else library, site.bound(made))))
    before = site.world.heap._allocator.workspace
    error = 0.0
    for op in OPS:  # larger than all that were captured
        made = site.make(site.call(op, site.most(op)))
        site.bound(made)()
        site.together()
        error = max(error, site.error(made, made.words["out"]))
    after = site.world.heap._allocator.workspace
    order = [*range(len(captured)), *(site.rng.randrange(len(captured)) for _ in range(config.replays - len(captured)))]
    site.rng.shuffle(order)
    for number, index in enumerate(order):
        made, replay = captured[index]
        made.seeds = ((number << 8) + (1 << 40), (number << 8) + (1 << 40) + 128)
        site.fill(made)
        site.poison(made)
        replay()
        made.saved[...] = made.words["out"]
        site.poison(made)
        if number % 4 == 3:  # replays follow each other without a wait in between
            machine.synchronize()
        error = max(error, site.error(made, made.saved))
    site.together()
    text = f"{before} to {after} bytes"
    yield Line("graphs", f"workspace, {len(captured)} captures, then growth", text, "more", after > before), [before, after]
    worst = site.worst(error)
    yield Line("graphs", f"error / bound of {len(order)} replays", f"{worst:.2f}", "1", worst <= 1.0), worst


# ---- preparing


def _operands(config: Config, world: Any) -> dict[str, list[tuple[tuple[int, ...], str]]]:
    """Shapes and dtypes of every op's operands."""
    found = {}
    for op in OPS:
        call = op(rows=1, n=config.n, k=config.k, dtype="float16", transposed=False)
        found[op.op] = [(array.stored, "float16") for array in call.inputs(world.topology, world.rank).values()]
    heads = config.k // 128
    found["ring_attention"] = [((1, 2 * 64, heads, 128), "float16")] * 3
    tokens, experts, topk, h, f = 64, 2, 2, config.k, config.n  # experts: of a rank
    x, ids, weights = ((tokens, h), "float16"), ((tokens, topk), "int32"), ((tokens, topk), "float32")
    up, down = ((experts, h, 2 * f), "float16"), ((experts, f, h), "float16")
    found["moe_dispatch_gemm"] = [x, ids, up]
    found["moe_layer"] = [x, ids, weights, up, down]
    return found


def prepare(options: argparse.Namespace, max_rows: int | None) -> None:
    """On one rank: the first preparation of each op, one after the other."""
    import mkernel as mk
    from mkernel.ops import schedule

    config, compilations = CONFIGS[options.target], Compilations()
    compilations.install()
    found: dict[str, Any] = {}
    with mk.init(target=options.target, ranks_per_node=options.ranks_per_node, heap_bytes=config.heap) as world:
        pieces, xp = Pieces(), world.xp
        parts = {"plans": (schedule, "plan_for"), "loading": (world.backend, "load"), "compiling": (world.problems, "_compile")}
        parts["the other ranks"] = world, "collective"
        for op, shapes in _operands(config, world).items():
            arrays = [xp.zeros(shape, dtype=dtype) for shape, dtype in shapes]
            most = max_rows if op in {each.op for each in OPS} else None  # of others the arrays say for how many
            world.barrier()
            kernels, begin = len(world.problems._kernels), time.perf_counter()
            with pieces.of(parts):
                seconds = microseconds(functools.partial(mk.plan, op, *arrays, world=world, max_rows=most)) / 1e6
                split = pieces.take()
            ranks = gather(world, {"seconds": seconds, "compiled": compilations.since(begin), "pieces": split})
            found[op] = {"ranks": ranks, "kernels": len(world.problems._kernels) - kernels}
        if world.rank == 0:
            Path(options.result).write_text(json.dumps({"cores": len(os.sched_getaffinity(0)), "ops": found}))


_KERNELS = {"moe_layer": "moe_"}  # beginnings of their names, where they are not the op's


def prepare_lines(cold: dict[str, Any], cached: dict[str, Any], name: str, target: str) -> Iterator[Line]:
    for op in cold:
        for what, found, limit in ((f"{op}, {name}, cold", cold[op], 2.0), (f"{op}, {name}, from the cache", cached[op], 0.2)):
            seconds = max(rank["seconds"] for rank in found["ranks"])
            each = [one for rank in found["ranks"] for one in rank["compiled"] if one["what"].startswith(_KERNELS.get(op, op))]
            pieces = max(found["ranks"], key=lambda rank: rank["seconds"])["pieces"]
            split = ", ".join(f"{part} {value:.2f}" for part, value in pieces.items() if value >= 0.005)
            total = sum(one["seconds"] for one in each)
            nvrtc = f", {len(each)} by NVRTC in {total:.2f} s, at most {max(one['seconds'] for one in each):.2f} s each" if each else ""
            text = f"{seconds:.2f} s, {found['kernels']} kernels{nvrtc} ({split})"
            yield Line("prepare", what, text, f"{limit} s", seconds <= limit if target == "cuda" else None)
            beside = [one for rank in found["ranks"] for one in rank["compiled"] if one not in each]
            for one in [*beside, *sorted(each, key=lambda one: -one["seconds"])[:1]]:
                yield Line("prepare", "  of these", shown(one))


# ---- the ranks, and who starts them


def rank_main(options: argparse.Namespace) -> int:
    if options.stages == ["prepare"]:
        prepare(options, options.max_rows)
        return 0
    import mkernel as mk

    counters, config = Counters(), CONFIGS[options.target]
    counters.install()
    run = {"new": stage_new, "grow": stage_grow, "loop": stage_loop, "graphs": stage_graphs}
    found: dict[str, Any] = {"lines": [], "numbers": {}}
    for stage in options.stages:
        begin = time.monotonic()
        heap = config.grow_heap if stage == "grow" else config.heap
        with mk.init(target=options.target, ranks_per_node=options.ranks_per_node, heap_bytes=heap) as world:
            site = Site(world, options, counters, stage)
            with site.machine.on(0):
                for line, numbers in run[stage](site):
                    found["lines"].append(dataclasses.astuple(line))
                    found["numbers"][f"{line.stage}: {line.what}"] = numbers
                    if world.rank == 0:  # what was found is kept, whatever comes then
                        Path(options.result).write_text(json.dumps(found))
            site.together()
            site.forget()
        found["lines"].append(dataclasses.astuple(Line(stage, "seconds of the stage", f"{time.monotonic() - begin:.1f}")))
        if world.rank == 0:
            Path(options.result).write_text(json.dumps(found))
    return 0


def _start(options: argparse.Namespace, stages: Sequence[str], result: Path, more: Sequence[str] = (), **variables: str) -> str:
    """Run stages on ranks of their own; what went wrong, if anything."""
    arguments = [__file__, *stages, "--rank", "--result", str(result), "--target", options.target, "--seed", str(options.seed)]
    arguments += ["--ranks", str(options.ranks), "--nodes", str(options.nodes), *more]
    try:
        status = launcher.run(options.ranks, arguments, timeout=options.limit, kind=options.launcher, environment=variables)
    except launcher.LauncherError as error:
        return str(error)
    return "" if status == 0 else f"exit status {status}"


def _prepared(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Line, Any]]:
    """The stage that starts processes anew: from an empty cache, then from a full one."""
    for max_rows in (None, CONFIGS[options.target].max_rows):
        more = [] if max_rows is None else ["--max-rows", str(max_rows)]
        found = []
        for run in ("cold", "cached"):
            result = folder / f"{run}-{max_rows}.json"
            wrong = _start(options, ["prepare"], result, more, MKERNEL_CACHE_DIR=str(folder / f"cache-{max_rows}"))
            if wrong:
                yield Line("prepare", f"max_rows={max_rows}, {run}", wrong, "", False), None
                return
            found.append(json.loads(result.read_text()))
        name = f"max_rows={max_rows}, {found[0]['cores']} cores"
        for line in prepare_lines(found[0]["ops"], found[1]["ops"], name, options.target):
            yield line, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)} (default: all)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=None, help="default: fresh, printed")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which ranks are killed")
    parser.add_argument("--out", type=Path, default=None, help="JSON with all numbers")
    parser.add_argument("--launcher", choices=("auto", "mpi", "processes"), default="auto")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("--max-rows", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    alone = {"new", "loop", "prepare"}
    unknown = [stage for stage in options.stages if stage not in STAGES]
    if unknown:
        parser.error(f"no such stage: {', '.join(unknown)}")
    if options.ranks < 1 or options.ranks % options.nodes:
        parser.error("--ranks must be a positive multiple of --nodes")
    options.ranks_per_node = options.ranks // options.nodes
    if options.ranks == 1 and not alone.issuperset(options.stages):
        parser.error(f"a rank by itself gathers nothing on its heap: it has the stages {', '.join(sorted(alone))}")
    options.stages = options.stages or [stage for stage in STAGES if options.ranks > 1 or stage in alone]
    if options.rank:
        return rank_main(options)
    begin = time.monotonic()
    options.seed = int.from_bytes(os.urandom(3), "little") if options.seed is None else options.seed
    print(f"sizes from --seed {options.seed}", flush=True)
    lines: list[Line] = []
    numbers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mkernel-sizes-") as name:
        folder = Path(name)
        inside = [stage for stage in options.stages if stage != "prepare"]
        if inside:
            wrong = _start(options, inside, folder / "found.json")
            if (folder / "found.json").exists():
                found = json.loads((folder / "found.json").read_text())
                lines, numbers = [Line(*cells) for cells in found["lines"]], found["numbers"]
            if wrong:
                lines.append(Line(" ".join(inside), "the ranks", wrong, "", False))
        if "prepare" in options.stages:
            for line, found in _prepared(options, folder):
                lines.append(line)
                numbers["prepare"] = [*numbers.get("prepare", []), *([found] if found not in numbers.get("prepare", []) else [])]
    if options.out is not None:
        described: dict[str, Any] = {"seed": options.seed, "ranks": options.ranks, "nodes": options.nodes, "target": options.target}
        options.out.write_text(
            json.dumps({**described, "lines": [dataclasses.asdict(line) for line in lines], "numbers": numbers}, indent=1)
        )
    print(format_table(COLUMNS, [line.cells for line in lines]))
    failed = sum(line.fine is False for line in lines)
    print(f"{options.ranks} ranks, {options.nodes} nodes, {options.target}: {failed} FAILED, {time.monotonic() - begin:.0f} s", flush=True)
    return 1 if failed or not lines else 0


if __name__ == "__main__":
    sys.exit(main())
