"""``mkernel trace``: what every CTA does in calls of an op, and which rank waits for which.

Starts the ranks itself (mk.launch): on this machine's GPUs, else on target cpu, which says what follows what and nothing about speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mkernel.bench.cases import ops
from mkernel.bench.command import WORLD, parse_split, parse_world
from mkernel.errors import ArgumentError
from mkernel.tools.output import require_writable

if TYPE_CHECKING:
    from mkernel.runtime.trace import Trace
    from mkernel.runtime.world import World

__all__ = ["main"]

_RANKS = 4
_LEAD = 2  # calls before those that are recorded: they compile, and bring the ranks into step
_HEAP_MARGIN = 1 << 24


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mkernel trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=list(ops()), metavar="OP", help="one of " + ", ".join(ops()))
    parser.add_argument("--shapes", help="one shape, as of `mkernel bench` (default: the smallest of `mkernel demo`)")
    parser.add_argument("--world", help=f"{WORLD}, on this machine (default: all GPUs, or 1x4)")
    parser.add_argument("--target", choices=("auto", "cuda", "cpu"), default="auto", help="auto: GPUs if there are any")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--split", help="SMs per role, e.g. compute=120,intra_comm=12 (default: mkernel's choice)")
    parser.add_argument("--calls", type=int, default=4, help="calls in the trace (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs, and of target cpu's scheduler (default %(default)s)")
    parser.add_argument("--save", metavar="FILE", help="write JSON for ui.perfetto.dev: a process per rank, a track per SM")
    parser.add_argument("--plot", metavar="FILE", help="write an SVG picture of one rank, a row per CTA")
    parser.add_argument("--rank", type=int, default=0, help="of the picture (default %(default)s)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the summary of all ranks. Returns the exit status."""
    import mkernel as mk

    options = _parser().parse_args(argv)
    for option, path in (("--save", options.save), ("--plot", options.plot)):
        if path:
            require_writable(option, path)
    if options.calls < 1:
        raise ArgumentError("--calls", options.calls, "must be at least 1")
    op, target = ops()[options.op], _target(options.target)
    topology = parse_world(options.world or f"1x{_gpus()[0] if target == 'cuda' else _RANKS}")
    if not 0 <= options.rank < topology.size:
        raise ArgumentError("--rank", options.rank, f"must be one of the {topology.size} ranks")
    shape = options.shapes or (list(op.demo_sizes(target, topology.size)) or list(op.sizes))[0]
    sizes = list(op.expand(shape, topology))
    if len(sizes) != 1:
        raise ArgumentError("--shapes", shape, f"is {len(sizes)} shapes: a trace is of one")
    case = op.case(sizes[0], topology, options.dtype)
    asked = (options.op, sizes[0], options.dtype, parse_split(options.split) if options.split else None, options.calls, options.seed)
    heap = case.heap_bytes + 4 * case.network_bytes + _HEAP_MARGIN
    per_node = topology.ranks_per_node
    traces = mk.Traces(mk.launch(_traced, topology.size, per_node, target, asked, seed=options.seed, heap_bytes=heap))
    print(f"{case.title}, {options.calls} calls on target {target}")
    print(traces.summary())
    if options.save:
        print(f"tracks of all ranks: {traces.save(options.save)}")
    if options.plot:
        traces.traces[options.rank].plot(options.plot, title=f"{case.title}, rank {options.rank}")
        print(f"picture of rank {options.rank}: {options.plot}")
    return 0


def _target(target: str) -> str:
    """The target that runs. Raises ArgumentError where GPUs are asked for and none is there."""
    gpus, problem = _gpus()
    if target == "cuda" and not gpus:
        raise ArgumentError("--target", target, problem or "there is no GPU with compute capability 9.0", "see `python -m mkernel doctor`")
    return target if target != "auto" else "cuda" if gpus else "cpu"


def _gpus() -> tuple[int, str]:
    """How many GPUs here run kernels, and what is wrong with those that are there."""
    from mkernel.runtime.opening.target import gpus_here

    gpus, problem, _ = gpus_here()
    return sum(gpu.capability == (9, 0) for gpu in gpus), problem


def _traced(world: World, op: str, size: str, dtype: str, split: dict[str, int] | None, calls: int, seed: int) -> Trace:
    """One rank: some calls on random operands, the last of which are recorded."""
    import mkernel as mk
    from mkernel.cli.demo_rank import Arrays

    arrays = Arrays(world, dtype)
    case = ops()[op].case(size, world.topology, dtype)
    case.setup(arrays, seed)
    (call,) = case.fused(None if split is None else mk.Split(**split))
    for _ in range(_LEAD):
        call()
    world.barrier()
    with mk.trace(world, capacity=1 << 14) as trace:
        for _ in range(calls):
            call()
    return trace
