"""``python -m mkernel tune``: ``mk.tune`` on the shapes of an op, from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mkernel.bench.cases import ops
from mkernel.bench.command import Asked, open_world, problem_arguments, rank_arguments, require_gpus
from mkernel.ops.op import names
from mkernel.runtime import progress
from mkernel.tools import launcher

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mkernel tune",
        description="Measure how many SMs each role of an op should have, and remember it: for these shapes, this kind of GPU, worlds of "
        "this shape. One rank per GPU.",
    )
    problem_arguments(parser, [name for name in names() if name in ops()])  # of the ops of mk.tune those that have a bench case
    rank_arguments(parser)
    parser.add_argument("--samples", type=int, default=7, help="batches of calls per split (default 7)")
    parser.add_argument("--no-save", action="store_true", help="only show what is found")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if everything was measured."""
    words = list(argv) if argv is not None else []
    options = _parser().parse_args(words)
    asked = Asked.of(options)
    if options.worker or launcher.is_rank():
        return _worker(asked)
    require_gpus(options)
    world = f"{asked.topology.num_nodes}x{asked.topology.ranks_per_node}"
    command = ["-m", "mkernel", "tune", *words, "--world", world, "--worker"]
    with progress.relayed(f"tune {asked.op.name}") as output:
        return launcher.run(asked.topology.size, command, timeout=options.timeout, kind=options.launcher, output=output)


def _worker(asked: Asked) -> int:
    from mkernel.bench.peers import fresh_seed
    from mkernel.bench.timing import open_timing, require_speed
    from mkernel.ops.split_search import tune_calls

    options = asked.options
    heap = max(case.heap_bytes for case in asked.cases) + 4 * max(case.network_bytes for case in asked.cases)  # as of `bench`
    with open_world(asked, heap) as world:
        require_speed(world, options.allow_cpu)
        timing = open_timing(world, options.dtype)
        for size in asked.sizes:
            case = asked.op.case(size, asked.topology, options.dtype, **asked.op_options)  # a new one: the arrays of the last go
            case.setup(timing, fresh_seed(world))
            op, arrays, arguments = case.first_call()
            save = False if options.no_save else None
            result = tune_calls(op, arrays, case.fused, world=world, samples=options.samples, save=save, **arguments)
            if world.rank == 0:
                print(f"{result}\n", flush=True)
        timing.close()
    return 0
