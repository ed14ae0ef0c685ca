"""Random programs of torch with gradients: what a rank computes with mkernel's ops, and the same of all ranks with torch's alone.

A program is a list of steps over values of three kinds: "rows" (each rank has rows of its own), "columns" (each rank has all rows and some
columns) and "whole" (all ranks have the same). Its results are the values that no step takes; the loss is their product with drawn
gradients, added up over the ranks, where what is the same on all ranks counts once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mkernel.torch as mkt

__all__ = ["Alone", "Program", "Rank", "draw", "errors_of", "exact_and_rounded", "worst_of"]

D = 64  # of a head


class Leaf(NamedTuple):
    """What a program is given: a tensor per rank, or one that all ranks have."""

    shape: tuple[int, ...]
    whole: bool
    scale: float
    transposed: bool = False  # its last two dimensions are a view of the others' order
    trained: bool = True
    dtype: str = ""  # "": the program's


@dataclasses.dataclass(frozen=True)
class Step:
    """``name`` of values ``of`` and leaves ``leaves``. ``how``: options of the op; ``again``: recomputed in the backward pass (how)."""

    name: str
    of: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    how: tuple[tuple[str, Any], ...] = ()
    again: str = ""


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps, the kinds and shapes (of a rank) of their values, and leaves. Routing of experts: drawn from ``seed`` and the step."""

    ranks: int
    dtype: str
    seed: int
    steps: tuple[Step, ...]
    kinds: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    leaves: tuple[Leaf, ...]
    by_name: bool  # whether ops are told the world
    masters: bool = False  # leaves are float32, and steps run under torch.autocast,
    inside: bool = False  # and so do the backward pass's

    @property
    def results(self) -> list[int]:
        taken = {value for step in self.steps for value in step.of}
        return [value for value in range(len(self.steps)) if value not in taken]

    def data(self, leaf: int, rank: int) -> Tensor:
        """Values of a leaf in float32, as if they were stored in its dtype."""
        what = self.leaves[leaf]
        rng = np.random.default_rng([self.seed, leaf, 0 if what.whole else rank])
        if what.dtype == "float32":
            return torch.from_numpy(rng.random(what.shape, np.float32))
        shape = (*what.shape[:-2], *what.shape[:-3:-1]) if what.transposed else what.shape
        made = torch.from_numpy(rng.standard_normal(shape, np.float32) * np.float32(what.scale)).to(getattr(torch, self.dtype))
        return made.mT if what.transposed else made

    def gradient(self, value: int, rank: int) -> Tensor:
        """What a result is differentiated with."""
        rng = np.random.default_rng([self.seed, 1 << 20, value, 0 if self.kinds[value] == "whole" else rank])
        return torch.from_numpy(rng.standard_normal(self.shapes[value], np.float32)).to(getattr(torch, self.dtype))

    def routing(self, value: int, rank: int, experts: int, topk: int) -> Tensor:
        """(T, topk) experts of a rank's tokens, some of them -1; in some programs few experts get all."""
        rng = np.random.default_rng([self.seed, 1 << 21, value])
        known = rng.permutation(experts)[: max(topk, int(rng.integers(1, experts + 1)))]
        rng = np.random.default_rng([self.seed, 1 << 22, value, rank])
        tokens = self.shapes[value][0]
        ids = np.array([rng.permutation(known)[:topk] for _ in range(tokens)]).reshape(tokens, topk)
        return torch.from_numpy(np.where(rng.random((tokens, topk)) < 0.1, -1, ids).astype(np.int32))

    def most_rows(self, value: int, experts: int, topk: int) -> int:
        """The most rows that come to the experts of a rank, and at least one."""
        ids = torch.stack([self.routing(value, rank, experts, topk) for rank in range(self.ranks)])
        return max(1, int(torch.bincount(ids[ids >= 0] // (experts // self.ranks), minlength=self.ranks).max()))


# ---- drawing
class _Drawing:
    """A program that grows by drawn steps."""

    def __init__(self, rng: np.random.Generator, ranks: int, dtype: str, ops: Sequence[str]) -> None:
        self.rng, self.ranks, self.dtype, self.ops = rng, ranks, dtype, ops
        self.rows = 2 * int(rng.integers(3, 20))  # of a rank: even, for zigzag
        self.steps: list[Step] = []
        self.kinds: list[str] = []
        self.shapes: list[tuple[int, int]] = []
        self.leaves: list[Leaf] = []

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def leaf(self, *shape: int, whole: bool = False, scale: float = 1.0, **more: Any) -> int:
        self.leaves.append(Leaf(shape, whole, scale, trained=self.chance(0.8), **more))
        return len(self.leaves) - 1

    def weight(self, *shape: int) -> int:
        return self.leaf(*shape, scale=shape[-2] ** -0.5, transposed=self.chance(0.5))

    def columns(self) -> int:
        return 8 * int(self.rng.integers(2, 9))

    def add(self, name: str, kind: str, shape: tuple[int, int], of: tuple[int, ...] = (), leaves: tuple[int, ...] = (), **how: Any) -> None:
        again = str(self.rng.choice(["again", "again, nested"])) if of and name != "detach" and self.chance(0.15) else ""
        self.steps.append(Step(name, of, leaves, tuple(how.items()), again))
        self.kinds.append(kind)
        self.shapes.append(shape)

    def begin(self) -> None:
        kind = str(self.rng.choice(["rows", "rows", "whole", "columns"]))
        shape = (self.rows * (1 if kind == "rows" else self.ranks), self.columns())
        self.add("given", kind, shape, (), (self.leaf(*shape, whole=kind == "whole"),))

    def step(self) -> None:
        at = int(self.rng.integers(max(0, len(self.steps) - 2), len(self.steps)))
        known = {
            "rows": ["allgather_gemm", "shared", "ring_attention", "moe_layer", "moe"],
            "columns": ["gemm_reduce_scatter", "gemm_allreduce"],
        }
        able = [name for name in (*known.get(self.kinds[at], ["replicated_gemm"]), "pointwise", "pointwise", "sum") if name in self.ops]
        getattr(self, f"_{self.rng.choice(able)}")(at, self.kinds[at], *self.shapes[at])

    def _pointwise(self, at: int, kind: str, rows: int, columns: int) -> None:
        name = str(self.rng.choice(["gelu", "tanh in place", "halves", "bias", "silu", "detach"], p=[0.2, 0.2, 0.2, 0.2, 0.15, 0.05]))
        if name == "bias":
            if kind != "rows":  # of rows: shared()
                self.add("bias", kind, (rows, columns), (at,), (self.leaf(columns, whole=kind == "whole"),))
        elif name == "halves":
            if columns % 16 == 0:
                self.add("halves", kind, (rows, columns // 2), (at,))
        else:
            self.add(name, kind, (rows, columns), (at,))

    def _sum(self, at: int, kind: str, rows: int, columns: int) -> None:
        alike = [other for other in range(len(self.steps)) if (self.kinds[other], *self.shapes[other]) == (kind, rows, columns)]
        self.add("sum", kind, (rows, columns), (at, int(self.rng.choice(alike))))

    def _allgather_gemm(self, at: int, kind: str, rows: int, columns: int) -> None:
        n = self.columns()
        self.add("allgather_gemm", "columns", (rows * self.ranks, n), (at,), (self.weight(columns, n),), gather_again=self.chance(0.3))

    def _gemm_reduce_scatter(self, at: int, kind: str, rows: int, columns: int) -> None:
        n = self.columns()
        self.add("gemm_reduce_scatter", "rows", (rows // self.ranks, n), (at,), (self.weight(columns, n),), partials=self.partials())

    def _gemm_allreduce(self, at: int, kind: str, rows: int, columns: int) -> None:
        n = self.columns()
        self.add("gemm_allreduce", "whole", (rows, n), (at,), (self.weight(columns, n),), partials=self.partials())

    def partials(self) -> str:
        return str(self.rng.choice(["output", "float32"]))

    def _replicated_gemm(self, at: int, kind: str, rows: int, columns: int) -> None:
        n = self.columns()
        self.add("replicated_gemm", "columns", (rows, n), (at,), (self.weight(columns, n),))

    def _shared(self, at: int, kind: str, rows: int, columns: int) -> None:
        self.add("shared", kind, (rows, columns), (at,), (self.leaf(columns, whole=True),))

    def _ring_attention(self, at: int, kind: str, rows: int, columns: int) -> None:
        """Projections to q, k and v, of weights that all ranks have."""
        heads, kv_heads = ((1, 1), (2, 1))[int(self.rng.integers(2))]
        weights = self.leaf(columns, (heads + 2 * kv_heads) * D, whole=True, scale=columns**-0.5)
        causal = self.chance(0.6)
        layout = "zigzag" if causal and self.chance(0.5) else "contiguous"
        self.add("ring_attention", kind, (rows, heads * D), (at,), (weights,), heads=heads, kv_heads=kv_heads, causal=causal, layout=layout)

    def _moe_layer(self, at: int, kind: str, rows: int, columns: int) -> None:
        each, inner = int(self.rng.integers(1, 4)), 8 * int(self.rng.integers(1, 5))
        topk = int(self.rng.integers(1, min(4, each * self.ranks) + 1))
        leaves = (self.leaf(rows, topk, dtype="float32"), self.weight(each, columns, 2 * inner), self.weight(each, inner, columns))
        self.add("moe_layer", kind, (rows, columns), (at,), leaves, topk=topk, experts=each * self.ranks, add=self.chance(0.5))

    def _moe(self, at: int, kind: str, rows: int, columns: int) -> None:
        """Dispatch, an activation of what experts make, and back with or without a product."""
        each, n = int(self.rng.integers(1, 4)), self.columns()
        topk = int(self.rng.integers(1, min(4, each * self.ranks) + 1))
        leaves, back = [self.weight(each, columns, n)], self.columns() if self.chance(0.5) else 0
        leaves += [self.leaf(rows, topk, dtype="float32")] if (weighted := self.chance(0.6)) else []
        leaves += [self.weight(each, n, back)] if back else []
        how = {"topk": topk, "experts": each * self.ranks, "weighted": weighted, "back": bool(back), "cut": self.chance(0.5)}
        self.add("moe", kind, (rows, back or n), (at,), tuple(leaves), **how)


OPS = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce", "replicated_gemm", "shared", "ring_attention", "moe_layer", "moe")


def draw(rng: np.random.Generator, ranks: int, dtype: str, steps: int = 7, ops: Sequence[str] = OPS) -> Program:
    """A program of about so many steps, with ops among ``ops``."""
    drawing = _Drawing(rng, ranks, dtype, (*ops, "pointwise", "sum"))
    drawing.begin()
    for _ in range(steps):
        drawing.step()
    parts = (tuple(part) for part in (drawing.steps, drawing.kinds, drawing.shapes, drawing.leaves))
    return Program(ranks, dtype, int(rng.integers(1 << 30)), *parts, drawing.chance(0.5), drawing.chance(0.35), drawing.chance(0.5))


# ---- what both do alike
def _pointwise(name: str, x: Tensor, *more: Tensor) -> Tensor:
    functions: dict[str, Callable[..., Tensor]] = {
        "gelu": torch.nn.functional.gelu,
        "tanh in place": lambda x: x.clone().tanh_(),
        "detach": torch.detach,
        "halves": lambda x: x[:, : x.shape[1] // 2],
        "silu": torch.nn.functional.silu,
        "bias": torch.add,
        "sum": torch.add,
    }
    return functions[name](x, *more)


def _swiglu(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, 1)
    return torch.nn.functional.silu(gate) * up


class Rank:
    """One rank's part of a program, by mkernel.torch. ``backend``: of torch.compile; nested checkpoints are left out there."""

    def __init__(self, world: Any, program: Program, place: str, backend: str = "") -> None:
        self.world, self.program, self.place, self.backend = world, program, place, backend
        self.forward = torch.compile(self._forward, backend=backend, fullgraph=True) if backend else self._forward
        self.ids = {at: program.routing(at, world.rank, how["experts"], how["topk"]).to(place) for at, how in self._routed(program)}
        self.leaves = [
            self._tensor(self._stored(program.data(leaf, world.rank))).requires_grad_(what.trained)
            for leaf, what in enumerate(program.leaves)
        ]
        self.most = {at: program.most_rows(at, how["experts"], how["topk"]) for at, how in self._routed(program)}
        self.named = {"world": world} if program.by_name else {}
        self.steps = [  # as torch's compiler likes them
            (step.name, step.of, step.leaves, dict(step.how), step.again, step.name == "tanh in place" and self._may_write(step))
            for step in program.steps
        ]
        self.results = program.results

    @staticmethod
    def _routed(program: Program) -> Iterator[tuple[int, dict[str, Any]]]:
        """The steps whose tokens are routed, and their options."""
        return ((at, dict(step.how)) for at, step in enumerate(program.steps) if "topk" in dict(step.how))

    def _stored(self, data: Tensor) -> Tensor:
        return data.float() if self.program.masters else data

    def _autocast(self, enabled: bool = True) -> Any:
        kind = torch.device(self.place).type
        return torch.autocast(kind, getattr(torch, self.program.dtype), enabled=enabled and self.program.masters)

    def _tensor(self, data: Tensor) -> Tensor:
        return data.to(self.place, copy=True, memory_format=torch.preserve_format)

    def run(self) -> list[Tensor]:
        """Results, and adds to the gradients of leaves."""
        with self._autocast():
            results = self.forward(self.leaves)
        if pairs := self.differentiated(results):
            with self._autocast(self.program.inside):
                torch.autograd.backward([y for y, _ in pairs], [gradient for _, gradient in pairs])
        return [y.detach() for y in results]

    def differentiated(self, results: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Results that depend on what is trained, each with what it is differentiated with."""
        wanted = ((y, self.program.gradient(at, self.world.rank)) for at, y in zip(self.program.results, results, strict=True))
        return [(y, self._tensor(gradient).to(y.dtype)) for y, gradient in wanted if y.requires_grad]

    def _forward(self, leaves: list[Tensor]) -> list[Tensor]:
        values: list[Tensor] = []
        for at, (name, of, taken, how, again, writes) in enumerate(self.steps):
            inputs = [values[value] for value in of] + [leaves[leaf] for leaf in taken]
            nested = again == "again, nested"
            if writes:
                values.append(inputs[0].tanh_())
            elif again and any(each.requires_grad for each in inputs) and not (nested and self.backend):
                values.append(checkpoint(functools.partial(self._step, at, name, how), *inputs, use_reentrant=nested))
            else:
                values.append(self._step(at, name, how, *inputs))
        return [values[value] for value in self.results]

    def _may_write(self, step: Step) -> bool:
        """Whether the step has what an op returned for itself; attention keeps its result for the backward pass."""
        taken = sum(other.of.count(step.of[0]) for other in self.program.steps)
        return taken == 1 and not step.again and self.program.steps[step.of[0]].name in set(OPS) - {"ring_attention"}

    def _step(self, at: int, name: str, how: dict[str, Any], *inputs: Tensor) -> Tensor:
        if name == "given":
            return inputs[0]
        if name in ("ring_attention", "moe_layer", "moe", "shared"):
            return getattr(self, f"_{name}")(at, *inputs, **how)  # type: ignore[no-any-return]
        if name in OPS:
            x, w = inputs
            return getattr(mkt, name)(x.contiguous(), w, **how, **self.named)  # type: ignore[no-any-return]
        return _pointwise(name, *inputs)

    def _shared(self, at: int, x: Tensor, p: Tensor) -> Tensor:
        return x + mkt.shared(p, **self.named)

    def _ring_attention(self, at: int, x: Tensor, w: Tensor, heads: int, kv_heads: int, **how: Any) -> Tensor:
        qkv = (x @ mkt.shared(w, **self.named)).view(1, len(x), -1, D).transpose(1, 2)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
        return mkt.ring_attention(q, k, v, **how, **self.named).o.transpose(1, 2).reshape(len(x), -1)

    def _moe_layer(self, at: int, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, topk: int, experts: int, add: bool) -> Tensor:
        x, ids, most = x.tanh().contiguous(), self.ids[at], len(x)
        return mkt.moe_layer(x, ids, weights, up, down, add=x if add else None, max_tokens=most, **self.named)

    def _moe(self, at: int, x: Tensor, w: Tensor, *more: Tensor, topk: int, experts: int, weighted: bool, back: bool, cut: bool) -> Tensor:
        d = mkt.moe_dispatch_gemm(x.contiguous(), self.ids[at], w, max_tokens=len(x), **self.named)
        y = d.y[: self.most[at]] if cut else d.y
        weights, rows = more[0] if weighted else None, _pointwise("silu", y)
        if back:
            return mkt.moe_gemm_combine(rows, more[-1], d.routing, topk_weights=weights, **self.named)
        return mkt.moe_combine(rows, d.routing, topk_weights=weights, **self.named)


class Alone:
    """The whole program on one rank, by torch's own ops, whose results are of ``dtype``."""

    def __init__(self, program: Program, dtype: torch.dtype) -> None:
        self.program, self.dtype = program, dtype
        self.leaves = [
            [
                program.data(leaf, rank)
                .to(torch.float64 if dtype == torch.float64 else (torch.float32 if what.dtype else dtype))
                .requires_grad_(what.trained)
                for rank in range(1 if what.whole else program.ranks)
            ]
            for leaf, what in enumerate(program.leaves)
        ]

    def run(self) -> list[list[Tensor]]:
        """Results of each rank; adds to the gradients of leaves."""
        values: list[list[Tensor]] = []
        for at, step in enumerate(self.program.steps):
            inputs = [values[value] for value in step.of] + [self.leaves[leaf] for leaf in step.leaves]
            values.append(self._step(at, step.name, dict(step.how), *inputs))
        results = [values[value] for value in self.program.results]
        outputs = [
            (y, self.program.gradient(at, rank).to(y.dtype))
            for at, of in zip(self.program.results, results, strict=True)
            for rank, y in enumerate(of)
            if y.requires_grad
        ]
        if outputs:
            torch.autograd.backward([y for y, _ in outputs], [gradient for _, gradient in outputs])
        return [[y.detach() for y in of] for of in results]

    def _wide(self, x: Tensor) -> Tensor:
        return x if self.dtype == torch.float64 else x.float()

    def _step(self, at: int, name: str, how: dict[str, Any], *inputs: list[Tensor]) -> list[Tensor]:
        if name == "given":
            return inputs[0]
        if name in OPS:
            return getattr(self, f"_{name}")(at, *inputs, **how)  # type: ignore[no-any-return]
        most = max(len(each) for each in inputs)
        return [_pointwise(name, *(each[min(rank, len(each) - 1)] for each in inputs)) for rank in range(most)]

    def _allgather_gemm(self, at: int, x: list[Tensor], w: list[Tensor], gather_again: bool) -> list[Tensor]:
        return [torch.cat(x) @ each for each in w]

    def _products(self, x: list[Tensor], w: list[Tensor], partials: str) -> Tensor:
        wide = self._wide if partials == "float32" else lambda t: t  # type: ignore[no-any-return]
        return functools.reduce(torch.add, [wide(a) @ wide(b) for a, b in zip(x, w, strict=True)]).to(self.dtype)

    def _gemm_reduce_scatter(self, at: int, x: list[Tensor], w: list[Tensor], partials: str) -> list[Tensor]:
        return list(self._products(x, w, partials).chunk(self.program.ranks))

    def _gemm_allreduce(self, at: int, x: list[Tensor], w: list[Tensor], partials: str) -> list[Tensor]:
        return [self._products(x, w, partials)]

    def _replicated_gemm(self, at: int, x: list[Tensor], w: list[Tensor]) -> list[Tensor]:
        return [x[0] @ each for each in w]

    def _shared(self, at: int, x: list[Tensor], p: list[Tensor]) -> list[Tensor]:
        return [each + p[0] for each in x]

    def _ring_attention(
        self, at: int, x: list[Tensor], w: list[Tensor], heads: int, kv_heads: int, causal: bool, layout: str
    ) -> list[Tensor]:
        ranks, length = self.program.ranks, len(x[0])
        order = torch.arange(ranks * length)  # where each row of the sequence is
        if layout == "zigzag":
            chunks = order.view(ranks, 2, -1)
            order = torch.cat([*chunks[:, 0], *chunks[:, 1].flip(0)])
        qkv = (torch.cat(x) @ w[0])[order].view(1, ranks * length, -1, D).transpose(1, 2)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return list(o.transpose(1, 2).reshape(ranks * length, -1)[order.argsort()].chunk(ranks))

    def _routed(self, at: int, x: list[Tensor], w: list[Tensor], topk: int, experts: int) -> list[tuple[int, int, Tensor, Tensor, Tensor]]:
        """Rank, choice, its tokens, the expert's number, and what its first product gives, where there are any."""
        every, found = torch.cat(w), []
        for rank, tokens in enumerate(x):
            ids = self.program.routing(at, rank, experts, topk)
            for choice in range(topk):
                for expert in range(experts):
                    chosen = (ids[:, choice] == expert).nonzero()[:, 0]
                    found.append((rank, choice, chosen, expert, tokens[chosen] @ every[expert]))
        return found  # type: ignore[return-value]

    def _moe_layer(
        self, at: int, x: list[Tensor], weights: list[Tensor], up: list[Tensor], down: list[Tensor], topk: int, experts: int, add: bool
    ) -> list[Tensor]:
        x, every = [each.tanh() for each in x], torch.cat(down)  # else layers behind each other make ever larger values
        sums = [self._wide(each) if add else torch.zeros_like(self._wide(each)) for each in x]
        for rank, choice, chosen, expert, y in self._routed(at, x, up, topk, experts):
            back = self._wide(_swiglu(self._wide(y)).to(self.dtype) @ every[expert])  # type: ignore[index]
            sums[rank] = sums[rank].index_add(0, chosen, back * self._wide(weights[rank])[chosen, choice, None])
        return [each.to(self.dtype) for each in sums]

    def _moe(
        self, at: int, x: list[Tensor], w: list[Tensor], *more: list[Tensor], topk: int, experts: int, weighted: bool, back: bool, cut: bool
    ) -> list[Tensor]:
        rows, columns = self.program.shapes[at]
        sums = [self._wide(each.new_zeros((rows, columns))) for each in x]
        for rank, choice, chosen, expert, y in self._routed(at, x, w, topk, experts):
            made = _pointwise("silu", y)
            if back:
                made = made @ torch.cat(more[-1])[expert]  # type: ignore[index]
            factor = self._wide(more[0][rank])[chosen, choice, None] if weighted else 1
            sums[rank] = sums[rank].index_add(0, chosen, self._wide(made) * factor)
        return [each.to(self.dtype) for each in sums]


# ---- comparing
def exact_and_rounded(program: Program) -> list[dict[str, list[Tensor]]]:
    """Results and gradients by torch's ops in float64, and in the program's dtype: per rank where ranks differ."""
    found = []
    for dtype in (torch.float64, getattr(torch, program.dtype)):
        alone = Alone(program, dtype)
        named = {f"result {at}": of for at, of in zip(program.results, alone.run(), strict=True)}
        for leaf, (what, tensors) in enumerate(zip(program.leaves, alone.leaves, strict=True)):
            if what.trained:
                named[f"leaf {leaf}"] = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
        found.append(named)
    return found


def worst_of(
    world: Any, program: Program, place: str, expected: list[dict[str, list[Tensor]]], runs: int = 1, backend: str = ""
) -> dict[str, float]:
    """``errors_of`` so many runs of a program."""
    rank = Rank(world, program, place, backend)
    for _ in range(runs):
        results = rank.run()
    return errors_of(rank, results, expected, runs)


def errors_of(rank: Rank, results: list[Tensor], expected: list[dict[str, list[Tensor]]], runs: int = 1) -> dict[str, float]:
    """Each result's and gradient's error over that of torch's ops, which round as often: about 1 where all is right.

    Errors are largest ones of an element. To torch's is added half a unit of the dtype of the largest value, so that it is never nothing.
    ``runs``: whose gradients have been added up.
    """
    program = rank.program
    made = {f"result {at}": y for at, y in zip(program.results, results, strict=True)}
    for leaf, what in enumerate(program.leaves):
        if what.trained:
            gradient = rank.leaves[leaf].grad
            made[f"leaf {leaf}"] = torch.zeros_like(rank.leaves[leaf]) if gradient is None else gradient / runs
    unit, found = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[program.dtype], {}
    exact, rounded = expected
    for name, value in made.items():
        of = min(rank.world.rank, len(exact[name]) - 1)
        right = exact[name][of].double()
        if not right.numel():
            continue
        largest = float(max(each.abs().max() for each in exact[name] if each.numel()))
        theirs = max(float((low.double() - high).abs().max()) for low, high in zip(rounded[name], exact[name], strict=True) if high.numel())
        ours = float((value.detach().cpu().double() - right).abs().max())
        found[f"{name} of {program.dtype}"] = (
            ours / (theirs + unit / 2 * largest) if theirs + largest else (0.0 if ours == 0 else float("inf"))
        )
    return {name: float("inf") if value != value else value for name, value in found.items()}
