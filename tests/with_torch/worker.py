"""A rank of the tests with processes: ``python tests/with_torch/worker.py <scenario>``. Prints one line of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import mkernel as mk
import mkernel.torch as mkt
from tests.with_torch.programs import Rank, draw, errors_of, exact_and_rounded, worst_of

WORLD: dict[str, Any] = {"target": "cpu", "heap_bytes": 1 << 24, "specialize": "none"}
ROWS, BATCH, HIDDEN, INNER = 8, 2, 32, 64  # ROWS: of a rank
# Whether the sequence is spread, whether FSDP2 is there, and how float32 parameters become bfloat16.
STYLES = (
    (True, False, ""), (False, False, ""), (True, True, ""), (True, True, "mixed"), (True, False, "autocast"), (False, True, "autocast"),
)  # fmt: skip


def tell(**fields: Any) -> None:
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), json.dumps(fields).encode() + b"\n")


class Block(torch.nn.Module):
    """Two layers as they are in a transformer's feed-forward part."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up = mkt.ColumnParallelLinear(HIDDEN, INNER, **options)
        self.down = mkt.RowParallelLinear(INNER, HIDDEN, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Whole(torch.nn.Module):
    """The same on one rank, of torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(HIDDEN, INNER, dtype=torch.bfloat16)
        self.down = torch.nn.Linear(INNER, HIDDEN, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def join_group() -> None:
    dist.init_process_group("gloo", rank=int(os.environ["MKERNEL_RANK"]), world_size=int(os.environ["MKERNEL_SIZE"]))


def compiled() -> None:
    """The collectives of a compiled block, forward and backward: what its graphs hold, and in which order they run."""
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if "mkernel" in str(node.target)])
        return graph.forward

    with mk.init(**WORLD) as world:
        torch.manual_seed(0)
        block = Block()
        launched: list[str] = []
        launch = world.launch
        world.launch = lambda executable, *more: (launched.append(executable.plan.op), launch(executable, *more))[1]  # type: ignore[method-assign]
        x = torch.randn(ROWS, BATCH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        results = []
        for run in (block, torch.compile(block, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True)):
            x.grad = None
            block.zero_grad()
            y = run(x)
            y.float().square().sum().backward()
            results.append([y.detach(), x.grad, *(p.grad for p in block.parameters())])
        half = len(launched) // 2
        tell(
            rank=world.rank,
            graphs=graphs,
            eager=launched[:half],
            compiled=launched[half:],
            equal=[bool(torch.equal(*pair)) for pair in zip(*results, strict=True)],
        )


def inductor() -> None:
    """The block compiled by torch's own compiler gives what it gives eagerly."""
    with mk.init(**WORLD) as world:
        torch.manual_seed(0)
        block = Block()
        x = torch.randn(ROWS, BATCH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        results = []
        for run in (block, torch.compile(block, fullgraph=True)):
            x.grad = None
            block.zero_grad()
            y = run(x)
            y.float().square().sum().backward()
            results.append([y.detach(), x.grad, *(p.grad for p in block.parameters())])
        worst = max(float((p - q).abs().max() / p.abs().max()) for p, q in zip(*results, strict=True))
        tell(rank=world.rank, worst=worst)


def programs() -> None:
    """Random programs, compiled: without kernels of torch's, whose rounding may differ."""
    with mk.init(**(WORLD | {"heap_bytes": 1 << 27})) as world:
        rng = np.random.default_rng(int(os.environ["SEED"]))
        for _ in range(int(os.environ["PROGRAMS"])):
            program = draw(rng, world.size, str(rng.choice(["bfloat16", "float16"])))
            torch._dynamo.reset()
            errors = worst_of(world, program, "cpu", exact_and_rounded(program), 2, "aot_eager")
            tell(rank=world.rank, errors=errors, program=str(program))


def group() -> None:
    """Worlds of process groups: of all ranks, and of halves."""
    join_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    with mk.init(dist.group.WORLD, **WORLD) as world, mk.init(mesh["tp"].get_group(), **WORLD) as half:
        a, b = torch.full((8, 8), float(world.rank), dtype=torch.bfloat16), torch.eye(8, dtype=torch.bfloat16)
        tell(
            rank=world.rank,
            sizes=[world.size, half.size],
            ranks=[world.rank, half.rank],
            all=mkt.allgather_gemm(a, b, world=world)[::8, 0].tolist(),
            half=mkt.allgather_gemm(a, b, world=half)[::8, 0].tolist(),
        )
    dist.destroy_process_group()


def meshes() -> None:
    """Random programs of two worlds of a mesh as one function, half of them compiled: ranks are neighbours in both."""
    join_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    rng = np.random.default_rng(int(os.environ["SEED"]))
    with contextlib.ExitStack() as stack:
        groups = dist.group.WORLD, mesh["tp"].get_group(), mesh["dp"].get_group()
        worlds = [stack.enter_context(mk.init(group, **(WORLD | {"heap_bytes": 1 << 26}))) for group in groups]
        for number in range(int(os.environ["PROGRAMS"])):
            chosen = [worlds[i] for i in rng.permutation(len(worlds))[:2]]
            programs = [dataclasses.replace(draw(rng, world.size, "bfloat16", 4), by_name=True, masters=False) for world in chosen]
            backend = "aot_eager" if number % 2 else ""
            parts = [Rank(world, program, "cpu", backend) for world, program in zip(chosen, programs, strict=True)]

            def both(leaves: list[list[torch.Tensor]], parts: list[Rank] = parts) -> list[list[torch.Tensor]]:
                return [part._forward(of_part) for part, of_part in zip(parts, leaves, strict=True)]

            torch._dynamo.reset()
            forward = torch.compile(both, backend=backend, fullgraph=True) if backend else both
            results = forward([part.leaves for part in parts])
            pairs = [pair for part, of_part in zip(parts, results, strict=True) for pair in part.differentiated(of_part)]
            if pairs:
                torch.autograd.backward([y for y, _ in pairs], [gradient for _, gradient in pairs])
            for part, of_part in zip(parts, results, strict=True):
                errors = errors_of(part, of_part, exact_and_rounded(part.program))
                tell(rank=worlds[0].rank, errors=errors, program=str(part.program))
    dist.destroy_process_group()


def relative(made: torch.Tensor, expected: torch.Tensor) -> float:
    return float((made.double() - expected.double()).norm() / expected.double().norm())


def whole_of(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def layouts(sequence: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plans for parallelize_module: torch's, and ours."""
    along = Shard(0) if sequence else Replicate()
    return tuple(  # type: ignore[return-value]
        {"up": module.ColwiseParallel(input_layouts=along), "down": module.RowwiseParallel(output_layouts=along)}
        for module in (torch.distributed.tensor.parallel, mkt)
    )


def trained(block: torch.nn.Module, xs: list[torch.Tensor], steps: int, autocast: bool) -> list[torch.Tensor]:
    """Results, and all gradients and parameters after so many steps."""
    optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
    found = []
    for x in xs[:steps]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = block(x)
        y.float().square().sum().backward()
        found += [y.detach(), *(whole_of(p.grad) for p in block.parameters())]
        optimizer.step()
    return [*found, *(whole_of(p) for p in block.parameters())]


def styles() -> None:
    """A block that torch parallelizes, and one that we do: 2 x 2 ranks, with and without sequence parallelism, with and without FSDP2.

    Parameters are bfloat16, or float32 under torch.autocast ("autocast") or made bfloat16 by FSDP2 ("mixed").
    """
    join_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    errors, placements = {}, []
    with mk.init(mesh["dp"].get_group(), **WORLD), mk.init(mesh["tp"].get_group(), **WORLD):  # styles take that of their mesh
        for sequence, fsdp, how in STYLES:
            found = []
            for plan in layouts(sequence):
                torch.manual_seed(3)
                block = parallelize_module(Whole().float() if how else Whole(), mesh["tp"], plan)
                if fsdp:
                    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if how == "mixed" else MixedPrecisionPolicy()
                    fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
                placements.append({name: str(p.placements) for name, p in block.named_parameters()})
                torch.manual_seed(4 + (mesh.get_local_rank("dp") if fsdp else 0))
                xs = [torch.randn(2 * ROWS, BATCH, HIDDEN).to(torch.float32 if how else torch.bfloat16) for _ in range(3)]
                xs = [x.chunk(2)[mesh.get_local_rank("tp")] if sequence else x for x in xs]
                found.append(trained(block, xs, 3, how == "autocast"))
            errors[f"sequence {sequence}, fsdp {fsdp}, {how}"] = [relative(*pair) for pair in zip(*reversed(found), strict=True)]
    tell(
        rank=dist.get_rank(),
        errors=errors,
        alike=[placements[at] == placements[at + 1] for at in range(0, 2 * len(STYLES), 2)],
        last=placements[-1],
    )
    dist.destroy_process_group()


def checkpoints() -> None:
    """Saved by torch's layers, loaded by ours, and back; then by one rank that has whole layers."""
    join_group()
    folder, mesh = os.environ["CHECKPOINTS"], init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with mk.init(mesh.get_group(), **WORLD):
        blocks = []
        for seed, plan in zip((3, 4), layouts(True), strict=True):
            torch.manual_seed(seed)
            blocks.append(parallelize_module(Whole(), mesh, plan))
        theirs, ours = blocks
        dcp.save(theirs.state_dict(), checkpoint_id=f"{folder}/theirs")
        before = [bool(torch.equal(whole_of(p), whole_of(q))) for p, q in zip(theirs.parameters(), ours.parameters(), strict=True)]
        state = ours.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/theirs")
        ours.load_state_dict(state)
        after = [bool(torch.equal(whole_of(p), whole_of(q))) for p, q in zip(theirs.parameters(), ours.parameters(), strict=True)]
        dcp.save(ours.state_dict(), checkpoint_id=f"{folder}/ours")
        whole = Whole()
        state = whole.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/ours")
        torch.manual_seed(3)
        back = [bool(torch.equal(p, state[name])) for name, p in Whole().named_parameters()]
    tell(rank=dist.get_rank(), before=before, after=after, back=back)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    SCENARIOS = {function.__name__: function for function in (compiled, inductor, programs, group, meshes, styles, checkpoints)}
    SCENARIOS[sys.argv[1]]()
