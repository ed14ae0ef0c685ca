"""What the cases of the MoE ops share: sizes, routings, operands that every rank can form again, the bytes that must travel.

T tokens of all ranks are split over the ranks, evenly but for one. The routings are the same in every run (docs/benchmarks.md), the values
are not: the i-th set of inputs has the routing of call i modulo ``DRAWN``.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mkernel.bench.cases.base import REFERENCES, Case, Kept, LocalGemm, Op, up
from mkernel.bench.moe_baselines import Route, on_device
from mkernel.bench.routings import Routed, draw, expand, parse, rows_of, tokens_of
from mkernel.tools.check_moe import Combined, Rows, worst_rows
from mkernel.tools.routing import RankRouting, reference_routing

if TYPE_CHECKING:
    from mkernel.bench.baselines import TorchBaselines
    from mkernel.bench.timing import Timing
    from mkernel.planner.topology import Topology

__all__ = ["DRAWN", "MoeCase", "MoeOp"]

DRAWN = 4  # routings, in turn
_ROUTING_SEED = 16
_ITEM = 2  # bytes of a 16-bit element
_ROWS = 64  # max_rows is a multiple
_SLACK = 64 << 20
_X, _ROWS_IN, _W, _W_DOWN, _ADD = range(5)  # what is drawn


class MoeCase(Case):
    """One MoE op at one size."""

    op: str  # its name
    solo: LocalGemm | None = None
    operand_rows = 1

    def __init__(self, label: str, topology: Topology, dtype: str) -> None:
        size = parse(label, topology)
        model = size.model
        self.label, self.topology, self.dtype, self.kind = label, topology, dtype, size.kind
        self.hidden, self.inner, self.all_experts, self.topk = model.hidden, model.inner, model.experts, model.topk
        self.experts = model.experts // topology.size
        self.shape = {"T": size.tokens, "H": model.hidden, "F": model.inner, "E": model.experts, "K": model.topk}
        self.tokens = tokens_of(size.tokens, topology.size)
        self.max_tokens = max(1, *self.tokens)
        self._routed, self._known = Kept[list[Routed]](DRAWN), Kept[list[RankRouting]](DRAWN)
        self._references = Kept[Rows](REFERENCES)
        self.title = f"{self.op}: H {self.hidden}, F {self.inner}, {self.all_experts} experts, top-{self.topk}, {self.kind}, {dtype}, "
        self.title += f"{topology.num_nodes}x{topology.ranks_per_node} ranks"

    # ---- routing
    def routed(self, call: int) -> list[Routed]:
        """Choices of every rank's tokens, in a call."""
        return self._routed.get(call, lambda call: draw(self.kind, self.tokens, self.all_experts, self.topk, _ROUTING_SEED, call))

    def known(self, call: int) -> list[RankRouting]:
        """What every rank knows of it."""

        def make(call: int) -> list[RankRouting]:
            ids = [routed.ids for routed in self.routed(call)]
            return reference_routing(ids, self.topology, self.all_experts, self.max_tokens, self.max_rows)

        return self._known.get(call, make)

    @functools.cached_property
    def expert_loads(self) -> Any:
        """(calls, W, E/W): rows of each expert."""
        return np.stack([rows_of(self.routed(call), self.all_experts) for call in range(DRAWN)])

    @property
    def loads(self) -> Any:
        """(calls, W): rows of each rank."""
        return self.expert_loads.sum(axis=2)

    @functools.cached_property
    def max_rows(self) -> int:
        """Room for what comes to any rank in any of the calls."""
        return up(max(1, int(self.loads.max())), _ROWS)

    @functools.cached_property
    def rows(self) -> int:
        """What the slowest rank multiplies, in the mean of the calls."""
        return round(float(self.loads.max(axis=1).mean()))

    def touched_bytes(self, matrices: int) -> int:
        """Weights of the experts that get any token, of the rank with most of them, in the mean of the calls."""
        experts = float((self.expert_loads > 0).sum(axis=2).max(axis=1).mean())
        return round(experts * matrices * self.hidden * self.inner * _ITEM)

    def owners(self, call: int) -> list[Any]:
        """(T, k) of each rank: who has the chosen expert."""
        return [routed.ids // self.experts for routed in self.routed(call)]

    def _travels(self, through_links: Any, through_network: Any) -> tuple[int, int]:
        """Bytes into the rank that gets most, in the mean of the calls. Given are functions of owners to rows of each rank."""
        link, network = (
            np.mean([max(count(self.owners(call))) for call in range(DRAWN)]) * self.hidden * _ITEM
            for count in (through_links, through_network)
        )
        return round(float(link)), round(float(network))

    def dispatched_bytes(self) -> tuple[int, int]:
        """NVLink and network: a token's row crosses once to each rank, and to each other node, that has an expert of it.

        From another node it comes to the rank on its rail, from which the others of the node fetch it.
        """
        topology = self.topology

        def links(owners: list[Any]) -> list[int]:
            wanted = [[(of_rank == rank).any(axis=1).sum() for of_rank in owners] for rank in range(topology.size)]
            return [sum(n for source, n in enumerate(row) if not self._same_rail(source, rank)) for rank, row in enumerate(wanted)]

        return self._travels(links, self._network_rows)

    def combined_bytes(self) -> tuple[int, int]:
        """NVLink and network: each row of the own node to the token's home, or to the rank on its rail; a sum for each other node."""
        topology = self.topology

        def links(owners: list[Any]) -> list[int]:
            found = []
            for rank in range(topology.size):
                mates = [mate for mate in topology.node_ranks(topology.node(rank)) if mate != rank]
                homes = [home for home in range(topology.size) if self._same_rail(home, rank)]
                found.append(sum(int(np.isin(owners[home], mates).sum()) for home in homes))
            return found

        def network(owners: list[Any]) -> list[int]:
            nodes = [of_rank // topology.ranks_per_node for of_rank in owners]
            others = [[n for n in range(topology.num_nodes) if n != topology.node(rank)] for rank in range(topology.size)]
            return [sum(int((nodes[rank] == n).any(axis=1).sum()) for n in others[rank]) for rank in range(topology.size)]

        return self._travels(links, network)

    def _same_rail(self, one: int, other: int) -> bool:
        return self.topology.local_rank(one) == self.topology.local_rank(other)

    def _network_rows(self, owners: list[Any]) -> list[int]:
        """Tokens of the other nodes' ranks on each rank's rail that have an expert in its node."""
        topology = self.topology
        return [
            sum(
                int((owners[peer] // topology.ranks_per_node == topology.node(rank)).any(axis=1).sum())
                for peer in topology.rail_peers(rank)
            )
            for rank in range(topology.size)
        ]

    # ---- operands
    def prepare(self, timing: Timing, seed: int, set_bytes: int) -> int:
        """Remember where values come from. Returns how many sets of inputs there are to make."""
        self._timing, self._seed = timing, seed
        return timing.sets(set_bytes)

    def random(self, what: int, index: int, rank: int, shape: tuple[int, ...]) -> Any:
        """An array of one rank, in one set of inputs; ``what``: one of the module's kinds of arrays."""
        return self._timing.random(shape, self._seed + 1_000_003 * index + 10_007 * what + rank)

    def x(self, index: int, rank: int) -> Any:
        """(T, H): tokens."""
        return self.random(_X, index, rank, (self.tokens[rank], self.hidden))

    def expert_rows(self, index: int, rank: int, columns: int) -> Any:
        """(max_rows, columns): what the experts of a rank have made of their tokens."""
        return self.random(_ROWS_IN, index, rank, (self.max_rows, columns))

    def w(self, index: int, rank: int, k: int, n: int, *, down: bool = False) -> Any:
        """(E/W, k, n): the weights of a rank's experts, small enough for products that are of about the size of what is multiplied."""
        array = self.random(_W_DOWN if down else _W, index, rank, (self.experts, k, n))
        for expert in array:
            _shrink(self._timing.xp, expert, round(math.log2(k) / 2), self.dtype)
        return array

    def add(self, index: int, rank: int) -> Any:
        """(T, H): what is added to a result."""
        return self.random(_ADD, index, rank, (self.tokens[rank], self.hidden))

    def ids(self, index: int) -> Any:
        """(T, k) int32 of this rank, on the device."""
        return self._timing.xp.asarray(self.routed(index % DRAWN)[self._timing.world.rank].ids)

    def weights(self, index: int) -> Any:
        """(T, k) float32 of this rank, on the device."""
        return self._timing.xp.asarray(self.routed(index % DRAWN)[self._timing.world.rank].weights)

    def routing(self, index: int) -> Any:
        """A ``mk.Routing`` of this rank, on the device, as a dispatch makes it."""
        import mkernel as mk

        known = self.known(index % DRAWN)[self._timing.world.rank]
        return mk.Routing(*(self._timing.xp.asarray(getattr(known, name)) for name in mk.Routing._fields))

    # ---- baselines
    def routes(self, torch: TorchBaselines, count: int) -> list[tuple[Route, Any]]:
        """Where the rows of each set of inputs go, and the weights of choices in the dtype of rows."""
        rank, xp = self._timing.world.rank, self._timing.xp
        routes = [on_device(torch, xp, Route.of(self.routed(i % DRAWN), self.experts, rank)) for i in range(count)]
        weights = [self.routed(i % DRAWN)[rank].weights.astype(self._timing.numpy_dtype) for i in range(count)]
        return [(route, torch.tensor(xp.asarray(weight))) for route, weight in zip(routes, weights, strict=True)]

    # ---- reference
    def worst(self, index: int, split: Any = None) -> float:
        return worst_rows(self._timing.xp, self.outputs()[index], self.reference(index))

    def reference(self, index: int) -> Rows:
        """What set ``index`` makes, in float64; kept."""
        return self._references.get(index, self._reference)

    @abc.abstractmethod
    def _reference(self, index: int) -> Rows: ...

    def combined(self, index: int, rows_of_expert: Any) -> Combined:
        """Sums of this rank's tokens. ``rows_of_expert(owner, expert, tokens, rows)``: ``Rows`` that ``owner``'s expert makes of them."""
        xp, rank, topology, call = self._timing.xp, self._timing.world.rank, self.topology, index % DRAWN
        sums = Combined(xp, self.tokens[rank], self.hidden, self.dtype)
        weights = self.routed(call)[rank].weights
        for node in range(topology.num_nodes):
            sums.begin_node()
            for owner in topology.node_ranks(node):
                known = self.known(call)[owner]
                for expert in range(self.experts):
                    begin, end = known.expert_offsets[expert : expert + 2]
                    source = known.source[begin:end]
                    own = np.flatnonzero(source[:, 0] == rank)
                    if len(own):
                        tokens, choices = source[own, 1], source[own, 2]
                        made: Rows = rows_of_expert(owner, expert, xp.asarray(tokens), xp.asarray(begin + own))
                        sums.add(xp.asarray(tokens), weights[tokens, choices], made)
            sums.end_node(own=node == topology.node(rank), additions=self.topk)
        return sums


class MoeOp(Op):
    """An op whose sizes are tokens, a model and a kind of routing."""

    title = "T over all ranks, DeepSeek-V3 (H 7168, F 2048, E 256, top-8), uniform, unless said"
    sizes = ("1024", "8192", "16384", "32768", "65536")
    groups = {  # noqa: RUF012 - as in the base class
        "decode": tuple(str(2**i) for i in range(2, 10)),
        "models": tuple(f"8192:{name}" for name in ("deepseek-v3", "mixtral-8x7b", "qwen3-235b")),
        "routings": tuple(f"8192:deepseek-v3:{kind}" for kind in ("uniform", "zipf", "hot", "mixture")),
    }
    matrices = 1  # of H x F that an expert has
    kind: type[MoeCase]

    def demo_sizes(self, target: str, ranks: int) -> Sequence[str]:
        experts = 2 * ranks
        if target == "cpu":
            return (f"37x136x520x{experts}x2:hot",)
        return f"4096x4096x1536x{16 * ranks}x8:uniform", f"1000x1032x520x{experts}x2:zipf"

    def expand(self, text: str, topology: Topology) -> Sequence[str]:
        return [size for name in super().expand(text, topology) for size in expand(name, topology, self.matrices)]

    def case(self, size: str, topology: Topology, dtype: str, **options: str) -> MoeCase:
        """What ``mkernel.bench.routings.parse`` takes."""
        return self.kind(size.lower(), topology, dtype)


def _shrink(xp: Any, array: Any, halvings: int, dtype: str) -> None:
    """Divide a 16-bit array by 2^halvings, in place; what would be too small becomes 0. Works on the bits."""
    bits = array.view(xp.uint16)
    step = halvings << (7 if dtype == "bfloat16" else 10)
    small = (bits & 0x7FFF) < step + (1 << (7 if dtype == "bfloat16" else 10))
    bits -= xp.uint16(step)
    bits[small] = 0
