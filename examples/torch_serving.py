"""A llama-70b block served with torch, by one plan per product. Run: torchrun --nproc-per-node 4 examples/torch_serving.py."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

import mkernel as mk
import mkernel.torch


@dataclasses.dataclass(frozen=True)
class Shape:
    """A block of a model, of all ranks."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int


SHAPES = {"llama-70b": Shape(8192, 64, 8, 128, 28672), "small": Shape(256, 8, 4, 32, 512)}
Reduce = Callable[[torch.Tensor], torch.Tensor]


class Block:
    """One rank's part of a block: some heads, some inner columns. Two products per block are added up over the ranks."""

    def __init__(self, shape: Shape, world: mk.World, device: torch.device, slots: int, context: int, max_rows: int) -> None:
        self.shape, size = shape, world.size
        self.heads, self.kv_heads = shape.heads // size, shape.kv_heads // size
        generator = torch.Generator(device).manual_seed(world.rank)

        def weight(inputs: int, outputs: int, whole_inputs: int) -> torch.Tensor:
            return (torch.randn(inputs, outputs, generator=generator, device=device) * whole_inputs**-0.5).bfloat16()

        hidden, d, inner = shape.hidden, shape.head_dim, shape.inner // size
        self.w_qkv = weight(hidden, (self.heads + 2 * self.kv_heads) * d, hidden)
        self.w_out = weight(self.heads * d, hidden, shape.heads * d)
        self.w_gate_up = weight(hidden, 2 * inner, hidden)
        self.w_down = weight(inner, hidden, shape.inner)
        self.slots, self.places = torch.arange(slots, device=device), torch.arange(context, device=device)
        self.cache = torch.zeros(2, slots, self.kv_heads, context, d, dtype=torch.bfloat16, device=device)
        rows = (
            torch.empty(1, self.heads * d, dtype=torch.bfloat16, device=device),
            torch.empty(1, inner, dtype=torch.bfloat16, device=device),
        )
        # Good for every number of rows up to max_rows: a decode step of any batch, and the rows of a prefill.
        self.plans = [
            mk.plan("gemm_allreduce", row, w, max_rows=max_rows, world=world)
            for row, w in zip(rows, (self.w_out, self.w_down), strict=True)
        ]

    def fused(self, which: int, a: torch.Tensor) -> torch.Tensor:
        """Multiply and add up over the ranks in one kernel."""
        return self.plans[which].run(a, (self.w_out, self.w_down)[which])

    def separate(self, which: int, a: torch.Tensor) -> torch.Tensor:
        """The same by torch's product, and an all-reduce."""
        product = a @ (self.w_out, self.w_down)[which]
        dist.all_reduce(product)
        return product

    def _rest(self, x: torch.Tensor, attended: torch.Tensor, reduce: Any) -> torch.Tensor:
        x = x + reduce(0, attended)
        gate, up = (norm(x) @ self.w_gate_up).chunk(2, 1)
        return x + reduce(1, silu(gate) * up)

    def _qkv(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        d = self.shape.head_dim
        q, k, v = (norm(x) @ self.w_qkv).split([self.heads * d, self.kv_heads * d, self.kv_heads * d], 1)
        return tuple(each.unflatten(1, (-1, d)) for each in (q, k, v))

    def prefill(self, x: torch.Tensor, lengths: list[int], reduce: Any) -> torch.Tensor:
        """Rows of several prompts, one after the other; their keys go to the slots 0, 1 ..."""
        q, k, v = self._qkv(x)
        attended, begin = [], 0
        for slot, length in enumerate(lengths):
            own = [each[begin : begin + length].transpose(0, 1) for each in (q, k, v)]
            self.cache[0, slot, :, :length], self.cache[1, slot, :, :length] = own[1], own[2]
            attended.append(scaled_dot_product_attention(*(each[None] for each in own), is_causal=True, enable_gqa=True)[0].transpose(0, 1))
            begin += length
        return self._rest(x, torch.cat(attended).flatten(1), reduce)

    def decode(self, x: torch.Tensor, positions: torch.Tensor, reduce: Any) -> torch.Tensor:
        """One token of each of the first slots, at its position."""
        batch = len(x)
        q, k, v = self._qkv(x)
        slots = self.slots[:batch]
        self.cache[0, slots, :, positions], self.cache[1, slots, :, positions] = k, v
        keys, values = self.cache[:, :batch]
        seen = self.places <= positions[:, None]
        attended = scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=seen[:, None, None], enable_gqa=True)
        return self._rest(x, attended[:, :, 0].flatten(1), reduce)


def norm(x: torch.Tensor) -> torch.Tensor:
    """RMSNorm without weights."""
    return rms_norm(x, x.shape[1:], eps=1e-5)


def captured(step: Callable[[], torch.Tensor], graphs: bool) -> tuple[Callable[[], object], torch.Tensor]:
    """What does the step again, and where its result is then."""
    result = step()  # also compiles and loads what it needs
    if not graphs:
        return lambda: result.copy_(step()), result
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph.replay, result


def milliseconds(runs: list[Callable[[], object]], device: torch.device, repeat: int) -> list[float]:
    """The median of each, which take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeat):
        for run, own in zip(runs, times, strict=True):
            dist.barrier()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            own.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(own) for own in times]


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance of two results, in roundings of bfloat16 of their size."""
    return float((a.double() - b.double()).norm() / b.double().norm()) * 2**8


def main() -> int:
    """Prefill and decode by fused kernels, and by torch's products with all-reduces: the same results but for rounding, and their times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="default: llama-70b on GPUs, else small")
    parser.add_argument("--batches", type=int, nargs="+", help="of decode steps; default: 1 to 256 on GPUs, else 1 3 8")
    parser.add_argument("--prompts", type=int, nargs="+", help="lengths of prompts, each a list's rows; default: ragged")
    parser.add_argument("--repeat", type=int, help="calls that are timed; default: 50 on GPUs, else 1")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    shape = SHAPES[options.shape or ("llama-70b" if gpu else "small")]
    batches = options.batches or ([1, 2, 4, 8, 16, 32, 64, 128, 256] if gpu else [1, 3, 8])
    prompts = options.prompts or ([700, 33, 1291, 512, 8, 77] if gpu else [5, 12, 1])
    repeat, context = options.repeat or (50 if gpu else 1), max(prompts) + 8
    right, ratios = True, dict[str, list[float]](prefill=[], decode=[])
    with mk.init(dist.group.WORLD) as world, torch.no_grad():
        block = Block(shape, world, device, max(*batches, len(prompts)), context, max(*batches, sum(prompts)))
        generator = torch.Generator(device).manual_seed(99)  # the same rows on all ranks
        for kind, sizes in (("prefill", [prompts, prompts[::-1], prompts[:2]]), ("decode", batches)):
            for size in sizes:
                rows = sum(size) if isinstance(size, list) else size
                x = torch.randn(rows, shape.hidden, generator=generator, device=device).bfloat16()
                positions = torch.full((rows,), context - 1, device=device)
                steps = []
                for reduce in (block.fused, block.separate):
                    if isinstance(size, list):
                        steps.append(captured(lambda x=x, size=size, reduce=reduce: block.prefill(x, size, reduce), False))
                    else:
                        steps.append(captured(lambda x=x, at=positions, reduce=reduce: block.decode(x, at, reduce), gpu))
                fused, separate = milliseconds([run for run, _ in steps], device, repeat)
                distance = differ(steps[0][1], steps[1][1])
                del steps  # a graph that holds NCCL's kernels must be gone before its process group is destroyed
                right = right and distance <= 2
                ratios[kind].append(separate / fused)
                if world.rank == 0:
                    what = f"{kind} of {rows} rows" + (
                        f" ({len(size)} prompts)" if isinstance(size, list) else " in a graph" if gpu else ""
                    )
                    print(f"{what}: mkernel {fused:.3f} ms, torch {separate:.3f} ms, {distance:.2f} roundings apart")
        if world.rank == 0:
            for kind, each in ratios.items():
                print(f"{kind}: torch / mkernel {statistics.geometric_mean(each):.3f} in the geometric mean, least {min(each):.3f}")
            print("right" if right else "WRONG")
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
