"""A transformer block trained beside torch's own tensor parallelism. Run: torchrun --nproc-per-node 2 examples/torch_tensor_parallel.py.

``--compile`` hands both blocks to ``torch.compile``, which takes most of the host's time off them; with ``--graphs`` in mode
"reduce-overhead", which replays CUDA graphs. ``--async-tp`` trains a third one, compiled by torch with its asynchronous tensor parallelism
(GPUs only).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import mkernel as mk
import mkernel.torch as mkt


class Block(nn.Module):
    """Attention and feed-forward on (S/W, B, H); in between, a rank has all of the sequence and some of the heads and inner columns."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        # Without weights: those of norms would be used for a rank's own rows only, and need mkt.shared.
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, elementwise_affine=False) for _ in range(2))
        self.qkv = nn.Linear(hidden, 3 * hidden)  # outputs ordered (head, q or k or v, D), so that a shard has whole heads
        self.out = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x))
        length, batches, columns = qkv.shape
        q, k, v = qkv.view(length, batches, -1, 3, self.head_dim).permute(3, 1, 2, 0, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.permute(2, 0, 1, 3).reshape(length, batches, columns // 3))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def parallel(options: argparse.Namespace, mesh: Any, device: torch.device, module: Any, pipelined: bool) -> nn.Module:
    """The block, the same in all cases, whose linear layers the styles of ``module`` have spread over the ranks.

    ``pipelined``: torch splits gathers and scatters, and overlaps their parts with products.
    """
    torch.manual_seed(0)
    column, row = module.ColwiseParallel, module.RowwiseParallel
    plan = {name: column(input_layouts=Shard(0)) for name in ("qkv", "up")} | {
        name: row(output_layouts=Shard(0)) for name in ("out", "down")
    }
    block = Block(options.hidden, options.heads).to(device, torch.bfloat16)
    block = torch_parallel.parallelize_module(block, mesh, plan)
    if pipelined:
        enable_symm_mem_for_group(mesh.get_group().group_name)
    if options.graphs and not pipelined:
        return torch.compile(block, mode="reduce-overhead")
    return torch.compile(block, options={"_micro_pipeline_tp": pipelined}) if options.compile or pipelined else block


class Training:
    """A block with its optimizer, its losses so far, and the seconds of its steps on the slowest rank."""

    def __init__(self, block: nn.Module, options: argparse.Namespace, device: torch.device) -> None:
        self.block, self.device, self.size = block, device, dist.get_world_size()
        torch.manual_seed(1)
        shape = (options.sequence, options.batch, options.hidden)
        self.x, self.target = (torch.randn(shape).to(device, torch.bfloat16).chunk(self.size)[dist.get_rank()] for _ in range(2))
        self.optimizer = torch.optim.AdamW(block.parameters(), lr=options.lr, fused=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> None:
        """One step, between two waits for the device."""
        dist.barrier()
        begin = now(self.device)
        self.optimizer.zero_grad()
        error = self.block(self.x).float() - self.target.float()
        loss = error.square().mean() / self.size  # this rank's part of the mean
        loss.backward()
        self.optimizer.step()
        took = torch.tensor(now(self.device) - begin, dtype=torch.float64, device=self.device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self.seconds.append(float(took))
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        self.losses.append(float(whole))


def now(device: torch.device) -> float:
    """Seconds, after everything on the device has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> int:
    """Train the blocks on the same data; their losses may differ by what bfloat16 rounds at other places."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, help="default: 4096 on GPUs, else 64")
    parser.add_argument("--heads", type=int, help="default: 32 on GPUs, else 4")
    parser.add_argument("--sequence", type=int, help="of all ranks; default: 4096 on GPUs, else 32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, help="default: 0.064 / hidden, since wide blocks diverge at what narrow ones learn by")
    parser.add_argument("--compile", action="store_true", help="torch.compile the blocks")
    parser.add_argument("--graphs", action="store_true", help="torch.compile them in mode reduce-overhead")
    parser.add_argument("--async-tp", action="store_true", help="also torch's asynchronous tensor parallelism, compiled")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    for name, values in (("hidden", (4096, 64)), ("heads", (32, 4)), ("sequence", (4096, 32))):
        setattr(options, name, getattr(options, name) or values[0 if gpu else 1])
    options.lr = options.lr or 0.064 / options.hidden

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with mk.init(mesh.get_group()) as world:
        kinds = {"torch": (torch_parallel, False), "mkernel": (mkt, False)}
        if options.async_tp:
            kinds["torch, async-TP"] = torch_parallel, True
        trainings = {name: Training(parallel(options, mesh, device, *kind), options, device) for name, kind in kinds.items()}
        for _ in range(options.steps):
            for training in trainings.values():  # in turn, so that nobody has the device cooler, or the host busier
                training.step()
        losses = {name: training.losses for name, training in trainings.items()}
        worst = max(abs(a - b) / a for each in losses.values() for a, b in zip(losses["torch"], each, strict=True))
        right = worst <= options.steps**0.5 * 2**-8  # each step rounds the parameters anew
        if world.rank == 0:
            show(trainings, options, world, worst, right)
    if options.graphs:  # NCCL waits, when it ends, for all graphs that hold its kernels
        del training, trainings
        torch.compiler.reset()
        gc.collect()
    dist.destroy_process_group()
    return 0 if right else 1


def show(trainings: dict[str, Training], options: argparse.Namespace, world: mk.World, worst: float, right: bool) -> None:
    """Losses of some steps, and the time of one."""
    sizes = f"hidden {options.hidden}, sequence {options.sequence}, batch {options.batch}"
    how = ", compiled, graphs" if options.graphs else ", compiled" * options.compile
    print(f"{world.size} ranks on {world.target}: {sizes}, bfloat16{how}")
    for step in sorted({0, *range(9, options.steps, 10), options.steps - 1}):
        print(f"step {step + 1:3d}: " + ", ".join(f"{name} {training.losses[step]:.5f}" for name, training in trainings.items()))
    for name, training in trainings.items():
        low, median, high = (x * 1e3 for x in statistics.quantiles(training.seconds[options.steps // 5 :], n=10)[::4])
        print(f"{name}: median of a step {median:.2f} ms (p10 {low:.2f}, p90 {high:.2f}; slowest rank)")
    print(f"losses differ by at most {worst:.1e} of their value: {'right' if right else 'WRONG'}")


if __name__ == "__main__":
    sys.exit(main())
