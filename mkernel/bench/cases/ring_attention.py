"""ring_attention: B x Hq x Hkv x S x D, S rows of the sequence over all ranks; a trailing c: causal, dealt in zigzag."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mkernel.bench.attention_baselines import attention_alone, attention_baseline
from mkernel.bench.cases.base import REFERENCES, Case, Kept, Op, up
from mkernel.errors import ArgumentError
from mkernel.planner.ring_attention import make_plan
from mkernel.planner.ring_problem import RingAttentionProblem, Sizes
from mkernel.tools.attention import Attention, positions, reference, worst

if TYPE_CHECKING:
    from mkernel.bench.timing import Call, Timing
    from mkernel.planner.split import Split
    from mkernel.planner.topology import Topology
    from mkernel.runtime.plan import Plan

__all__ = ["OP", "RingAttentionCase", "Shape"]

_ITEM = 2  # bytes of a 16-bit element
_SLACK = 16 << 20
_ALL_SCORES = 1 << 36  # of all ranks, up to which every element is checked,
_SAMPLED_ROWS = 512  # and so many rows beyond
_BLOCK_SCORES = 1 << 26  # of the reference, at a time: 512 MiB in float64
_ALONE_FLOPS = 60e-3 * 600e12  # 60 ms of cuDNN
_Q, _K, _V = range(3)  # what is drawn


@dataclasses.dataclass(frozen=True)
class Shape:
    """What ``--shapes`` names. ``length``: S."""

    batches: int
    heads: int
    kv_heads: int
    length: int
    d: int
    causal: bool

    def __str__(self) -> str:
        numbers = (self.batches, self.heads, self.kv_heads, self.length, self.d)
        return "x".join(map(str, numbers)) + ("c" if self.causal else "")

    def flops(self, ranks: int) -> float:
        """Operations of one rank, counted as usual: two products of every score that the mask does not hide."""
        return 4.0 * self.batches * self.heads * (self.length // ranks) * self.length * self.d * (0.5 if self.causal else 1.0)


class RingAttentionCase(Case):
    solo = None
    operand_rows = 1

    def __init__(self, shape: Shape, topology: Topology, dtype: str) -> None:
        self.of, self.topology, self.dtype, self.label = shape, topology, dtype, str(shape)
        self.shape = {"B": shape.batches, "Hq": shape.heads, "Hkv": shape.kv_heads, "S": shape.length, "D": shape.d}
        self.rows = shape.length // topology.size
        self._references = Kept[list[tuple[int, int, Any, Attention]]](REFERENCES)
        self.layout = "zigzag" if shape.causal else "contiguous"
        self.scale = 1 / math.sqrt(shape.d)
        self.problem = RingAttentionProblem(topology, shape.heads, shape.kv_heads, shape.d, dtype, shape.causal, self.layout, self.scale)
        self.flops = shape.flops(topology.size)
        # The rank that sees most gets all keys of all others once: from the ranks on its rail by network, the rest over NVLink.
        shard = 2 * shape.batches * shape.kv_heads * self.rows * shape.d * _ITEM
        self.network_bytes = (topology.num_nodes - 1) * shard
        self.link_bytes = (topology.size - topology.num_nodes) * shard
        self.heap_bytes = make_plan(self.problem, self.code, 132).workspace_bytes + _SLACK
        self.title = f"ring_attention: {shape.heads} heads, {shape.kv_heads} KV heads, D {shape.d}, "
        self.title += f"{'causal' if shape.causal else 'full'}, {dtype}, {topology.num_nodes}x{topology.ranks_per_node} ranks"

    @property
    def code(self) -> int:
        return Sizes(self.of.batches, self.rows).code

    def plan(self, sm_count: int, split: Split | None = None, *, rows: int | None = None, specialize: str | None = None) -> Plan:
        return make_plan(self.problem, self.code if rows is None else Sizes(1, rows).code, sm_count, split)

    def setup(self, timing: Timing, seed: int) -> None:
        rank, shape = timing.world.rank, self.of
        self._timing, self._seed = timing, seed
        elements = shape.batches * self.rows * shape.d
        count = timing.sets(_ITEM * elements * 2 * (shape.heads + shape.kv_heads))
        self._inputs = [tuple(self.drawn(i, rank, what) for what in (_Q, _K, _V)) for i in range(count)]
        self._o = [timing.empty((shape.batches, shape.heads, self.rows, shape.d)) for _ in range(count)]
        xp = timing.xp
        self._lse = [xp.empty((shape.batches, shape.heads, self.rows), dtype=xp.float32) for _ in range(count)]
        for o in self._o:
            timing.poison(o)
        timing.synchronize()

    def drawn(self, index: int, rank: int, what: int) -> Any:
        """q, k or v of a rank, the same on every rank that asks: no communication is trusted for the reference."""
        heads = self.of.heads if what == _Q else self.of.kv_heads
        shape = (self.of.batches, heads, self.rows, self.of.d)
        return self._timing.random(shape, self._seed + 1_000_003 * index + 3 * rank + what)

    def fused(self, split: Any = None) -> list[Call]:
        import mkernel as mk

        call = functools.partial(mk.ring_attention, causal=self.of.causal, layout=self.layout, world=self._timing.world, split=split)
        return [functools.partial(call, *arrays, out=(o, lse)) for arrays, o, lse in zip(self._inputs, self._o, self._lse, strict=True)]

    def first_call(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        return "ring_attention", self._inputs[0], {"causal": self.of.causal, "layout": self.layout}

    def outputs(self) -> list[Any]:
        return self._o

    # ---- the reference
    def worst(self, index: int, split: Any = None) -> float:
        xp, found = self._timing.xp, [0.0]
        for batch, head, rows, expected in self._references.get(index, self._reference):
            found.append(worst(xp, self._o[index][batch, head][rows], self._lse[index][batch, head][rows], expected))
        return max(found, key=lambda value: (value != value, value))

    def _reference(self, index: int) -> list[tuple[int, int, Any, Attention]]:
        """Batch, head and rows of all that is checked, and what they should be."""
        xp, rank, shape = self._timing.xp, self._timing.world.rank, self.of
        ranks = range(self.topology.size)
        held = [xp.asarray(positions(self.rows, source, len(ranks), self.layout)) for source in ranks]
        keys_at = xp.concatenate(held)
        k, v = ([self.drawn(index, source, what) for source in ranks] for what in (_K, _V))
        found = []
        for batch, head, rows in self.checked(rank, index):
            of = head // (shape.heads // shape.kv_heads)
            keys, values = (self._joined(xp, [part[batch, of] for part in parts]) for parts in (k, v))
            for begin in range(0, len(rows), max(1, _BLOCK_SCORES // shape.length)):
                some = xp.asarray(rows[begin : begin + max(1, _BLOCK_SCORES // shape.length)])
                visible = keys_at[None] <= held[rank][some][:, None] if shape.causal else None
                q = self._inputs[index][_Q][batch, head][some]
                found.append((batch, head, some, reference(xp, q, keys, values, self.scale, self.dtype, visible)))
        return found

    def checked(self, rank: int, index: int) -> list[tuple[int, int, Any]]:
        """Batch, head and rows of what is compared: everything, or rows that are drawn."""
        shape, everything = self.of, np.arange(self.rows)
        heads = [(batch, head) for batch in range(shape.batches) for head in range(shape.heads)]
        if len(heads) * shape.length**2 <= _ALL_SCORES:
            return [(batch, head, everything) for batch, head in heads]
        rng = np.random.default_rng([self._seed, rank, index])
        some = [heads[at] for at in rng.permutation(len(heads))[:16]]
        each = min(self.rows, _SAMPLED_ROWS // len(some))
        return [(batch, head, np.sort(rng.permutation(self.rows)[:each])) for batch, head in some]

    def _joined(self, xp: Any, parts: Sequence[Any]) -> Any:
        return xp.concatenate([xp.ascontiguousarray(part).view(xp.uint16) for part in parts]).view(self._timing.numpy_dtype)

    # ---- contestants
    def baselines(self, baselines: Any) -> dict[str, Sequence[Call]]:
        return attention_baseline(baselines, self._inputs, self._timing.world.rank, self.topology.size, self.scale, self.of.causal)

    def alone(self, baselines: Any) -> Sequence[Call]:
        """The same number of scores by cuDNN: full, this rank's rows over as many keys; causal, whole sequences of fewer heads."""
        shape, ranks, timing = self.of, self.topology.size, self._timing
        heads = (shape.heads, shape.kv_heads)
        if shape.causal:
            kv_heads = math.ceil(shape.kv_heads / ranks)
            heads = (math.ceil(shape.heads / shape.kv_heads) * kv_heads, kv_heads)
            if shape.kv_heads < ranks:
                heads = (math.ceil(shape.heads / ranks), 1)

        def make(what: int, length: int) -> Any:
            return timing.random((shape.batches, heads[what != _Q], length, shape.d), self._seed + 7 * what)

        q = make(_Q, shape.length if shape.causal else self.rows)
        return attention_alone(baselines, (q, make(_K, shape.length), make(_V, shape.length)), self.scale, shape.causal)


def drawn_shapes(count: int, seed: int, topology: Topology) -> list[str]:
    """So many shapes: B 1 to 16, Hq 8 to 64, groups of 1 to 8, D 64 or 128, S 2048 to 131072, causal or not; at most 60 ms of cuDNN."""
    rng, unit, shapes = np.random.default_rng(seed), 2 * topology.size, []
    for _ in range(count):
        batches, length = int(2 ** rng.uniform(0, 4.99)) or 1, int(2 ** rng.uniform(11, 17))
        group = int(2 ** rng.integers(0, 4))
        kv_heads = max(1, int(2 ** rng.uniform(3, 6)) // group)
        shape = Shape(
            min(16, batches), kv_heads * group, kv_heads, length // unit * unit, int(rng.choice([64, 128])), bool(rng.integers(2))
        )
        fits = shape.flops(topology.size) / _ALONE_FLOPS
        shape = dataclasses.replace(shape, batches=max(1, int(shape.batches / max(1.0, fits))))
        while shape.flops(topology.size) > _ALONE_FLOPS:
            shape = dataclasses.replace(shape, length=max(unit, shape.length // 2 // unit * unit))
        shapes.append(str(shape))
    return shapes


class _Op(Op):
    name = "ring_attention"
    title = "B x Hq x Hkv x S x D, S over all ranks; c: causal"
    sizes = ("16x16x16x6144x128", "16x16x16x12288x128", "16x16x16x24576x128", "16x16x16x49152x128")
    groups: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "causal": ("16x16x16x6144x128c", "16x16x16x12288x128c", "16x16x16x24576x128c", "16x16x16x49152x128c"),
        "gqa": tuple(f"1x64x8x{length}x128c" for length in (4096, 8192, 16384, 32768, 65536, 131072)),
        "long": ("1x64x8x262144x128c", "1x64x8x524288x128c"),
    }

    def demo_sizes(self, target: str, ranks: int) -> Sequence[str]:
        if target == "cpu":
            return [f"1x2x1x{up(300, 2 * ranks)}x64c", f"2x2x2x{up(200, ranks)}x128"]
        return [f"1x32x8x{up(8192, 2 * ranks)}x128c", f"2x8x8x{up(1000, ranks)}x64"]

    def expand(self, text: str, topology: Topology) -> Sequence[str]:
        word, *numbers = text.lower().split(":")
        if word != "random":
            return self.groups.get(text, (text,))
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers) or int(numbers[0]) < 1:
            raise ArgumentError("--shapes", text, "must be random:N:SEED", "for example random:60:7")
        return drawn_shapes(int(numbers[0]), int(numbers[1]), topology)

    def case(self, size: str, topology: Topology, dtype: str, **options: str) -> RingAttentionCase:
        """``BxHqxHkvxSxD``, with a trailing ``c`` where it is causal."""
        text = size.lower()
        try:
            batches, heads, kv_heads, length, d = (int(part) for part in text.removesuffix("c").split("x"))
        except ValueError:
            rule = "must be BxHqxHkvxSxD, with a trailing c where it is causal"
            raise ArgumentError("--shapes", size, rule, "for example 1x64x8x32768x128c") from None
        shape = Shape(batches, heads, kv_heads, length, d, text.endswith("c"))
        unit = topology.size * (2 if shape.causal else 1)
        if min(batches, heads, kv_heads, length) < 1 or heads % kv_heads or d not in (64, 128) or length % unit:
            rule = f"Hkv must divide Hq, D be 64 or 128, S a multiple of {unit} (ranks; causal: twice the ranks)"
            raise ArgumentError("--shapes", size, rule)
        return RingAttentionCase(shape, topology, dtype)


OP = _Op()
