"""Grouped GEMM + combine: who waits for whom, and who accesses which bytes (``kernels_src/ops/moe_gemm_combine.cuh``)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from mkernel.planner.gemm import BLOCK_M
from mkernel.planner.moe_gemm_combine import MoeGemmCombinePlan
from mkernel.planner.proofs.areas import FLAGS, HEAP, Access, Area, Call
from mkernel.planner.proofs.moe_combine import CombineCall, Routed
from mkernel.planner.proofs.wait_graph import Step, WaitGraph

__all__ = ["call_of"]

_WORD = 8
_COUNTER = 4


def call_of(plan: MoeGemmCombinePlan, routing: Sequence[Routed]) -> Call:
    """One call; weights do not lie on the heap."""
    return _MoeGemmCombine(plan, routing).call()


class _MoeGemmCombine(CombineCall):
    """``mk.moe_gemm_combine``.

    Steps beside those of CombineCall: ``("zero", rank)`` the counters, ``("tile", rank, expert, row)``, ``("finish", rank, expert)`` by
    whichever CTA has counted the expert's last tile; ``("fetch", rank, home, token, window)`` of rows that are summed up later,
    ``("fetched", rank)`` all of them. Tiles of one row of tiles are one step, and wait for no other.
    """

    def __init__(self, plan: MoeGemmCombinePlan, routing: Sequence[Routed]) -> None:
        super().__init__(plan.combining, routing, plan.split.intra_comm or 0, plan.split.inter_send or 0)
        self.plan, combining = plan, frozenset({"serve", "combine"})
        counting = frozenset({"zero", "tile", "fetched"})
        self.counters = Area("counters", HEAP, 0, plan.counter_bytes, counting, combining | {"finish"})
        self.products = Area("products", HEAP, plan.rows_offset, plan.row_bytes, frozenset({"tile"}), combining | {"fetch"})
        self.fetched = Area("products fetched early", HEAP, plan.fetched_offset, plan.fetched_bytes, frozenset({"fetch"}), combining)
        raising = frozenset({"zero", "finish", "serve", "put", "post"})
        words = plan.flag_words * _WORD
        self._flags = Area("flags of experts, sums and chunks", FLAGS, 0, words, raising, combining | {"tile", "put", "fetch", "fetched"})

    @property
    def flags(self) -> Area:
        return self._flags

    def call(self) -> Call:
        graph = WaitGraph()
        self.add_steps(graph)
        areas = (self.counters, self.products, self.fetched, self.sums, self.arrived, self.weights, self.staging, self.flags)
        accesses = (access for step in graph for access in (*self.accesses(step), *self._own_accesses(step)))
        return Call(graph, areas, tuple(accesses))

    # ---- who waits for whom
    def add_steps(self, graph: WaitGraph) -> None:
        super().add_steps(graph)
        for rank in self.ranks:
            graph.add(("zero", rank), self.entered())
            for expert, (begin, end) in enumerate(itertools.pairwise(self.offsets[rank])):
                rows = range(math.ceil((end - begin) / BLOCK_M))
                tiles: list[Step] = [graph.add(("tile", rank, expert, row), [*self.entered(), ("zero", rank)]) for row in rows]
                if tiles or self.plan.windows > 1:  # of an expert without rows by whoever zeroes the counters
                    graph.add(("finish", rank, expert), tiles or [("zero", rank)])
            for cta in range(self.ctas):
                graph.chain(self._fetching_steps(graph, rank, cta))
            if self.plan.windows > 1:
                graph.add(("fetched", rank), [("zero", rank), *(step for step in graph if step[:2] == ("fetch", rank))])

    @property
    def workers(self) -> int:
        """Warps take items as they come. If nothing waits in a circle where one takes all, then neither where several do."""
        return 1

    def _fetching_steps(self, graph: WaitGraph, rank: int, cta: int) -> Iterator[Step]:
        """What the warp of a CTA that finds rows waits for, in order."""
        mates = [mate for mate in self.topology.node_ranks(self.topology.node(rank)) if mate != rank]
        for window in range(self.plan.windows - 1):
            experts = [expert for expert in range(self.problem.experts) if self.window(expert) == window]
            ready: list[Step] = [("finish", mate, expert) for mate in mates for expert in experts]
            for home in [*self.topology.rail_peers(rank), rank]:
                tokens = (
                    range(self.tokens[rank]) if home == rank else self.listed[rank][self.topology.node(home)][: self.served(rank, home)]
                )
                for token in tokens[cta :: self.ctas]:
                    if self.rows_of_window(rank, home, token, window):
                        yield graph.add(("fetch", rank, home, token, window), [*self.entered(), *ready])

    def combining_steps(self, graph: WaitGraph, rank: int, worker: int) -> Iterator[Step]:
        for step in super().combining_steps(graph, rank, worker):
            yield graph.add(step, [("zero", rank)])

    def rows_ready(self, rank: int, row: int, expert: int) -> list[Step]:
        return [("fetched", rank)] if self.is_fetched(rank, row, expert) else [("finish", self.holder(rank, row)[0], expert)]

    def tokens_of(self, step: Step) -> list[tuple[int, int]]:
        """Whose tokens a step sums up: home and number."""
        kind, rank, *rest = step
        assert isinstance(rank, int)
        match kind, rest:
            case "serve", [int(peer), int(group)]:
                places = self.places_of(rank, peer, group, self.layout.group)
                return [(peer, self.served_token(rank, peer, place)) for place in places]
            case "combine", [int(token)]:
                return [(rank, token)]
        raise AssertionError(step)

    def window(self, expert: int) -> int:
        return expert * self.plan.windows // self.problem.experts

    def is_fetched(self, rank: int, row: int, expert: int) -> bool:
        return self.holder(rank, row)[0] != rank and self.window(expert) + 1 < self.plan.windows

    def rows_of_window(self, rank: int, home: int, token: int, window: int) -> list[tuple[int, int]]:
        rows = self.chosen(rank, home, token)
        return [(row, expert) for row, expert in rows if self.is_fetched(rank, row, expert) and self.window(expert) == window]

    # ---- who accesses what
    def _own_accesses(self, step: Step) -> Iterator[Access]:
        kind, rank, *rest = step
        assert isinstance(rank, int)
        pitch = self.plan.pitch
        match kind, rest:
            case "zero", []:
                yield Access(step, rank, self.counters, 0, self.plan.counter_bytes, writes=True)
                yield self.flag(step, rank, 0, writes=True)
            case "tile", [int(expert), int(row)]:
                begin = self.offsets[rank][expert] + row * BLOCK_M
                end = min(begin + BLOCK_M, self.offsets[rank][expert + 1])
                yield Access(step, rank, self.products, begin * pitch, (end - begin) * pitch, writes=True)
                yield self.flag(step, rank, 0, writes=False)
                yield Access(step, rank, self.counters, self.plan.finished_offset(expert), _COUNTER, writes=True)
            case "finish", [int(expert)]:
                yield Access(step, rank, self.counters, self.plan.finished_offset(expert), _COUNTER, writes=False)
                for mate in self.topology.node_ranks(self.topology.node(rank)):
                    yield self.flag(step, mate, self.plan.expert_flag(self.topology.local_rank(rank), expert), writes=True)

            case "fetch", [int(home), int(token), int(window)]:
                for row, expert in self.rows_of_window(rank, home, token, window):
                    yield from self._product(step, rank, row, expert)
                    yield self._place(step, rank, home, token, row, writes=True)
            case "fetched", []:
                yield self.flag(step, rank, 0, writes=False)
                yield Access(step, rank, self.counters, 0, _WORD, writes=True)
            case (("serve" | "combine"), _):
                yield from self._fetched_accesses(step, rank)

    def _fetched_accesses(self, step: Step, rank: int) -> Iterator[Access]:
        """What a step that combines accesses: the counters, and what has been fetched."""
        yield self.flag(step, rank, 0, writes=False)
        rows = [
            (home, token, row)
            for home, token in self.tokens_of(step)
            for row, expert in self.chosen(rank, home, token)
            if self.is_fetched(rank, row, expert)
        ]
        if rows:
            yield Access(step, rank, self.counters, 0, _WORD, writes=False)
        for home, token, row in rows:
            yield self._place(step, rank, home, token, row, writes=False)

    def _place(self, step: Step, rank: int, home: int, token: int, row: int, *, writes: bool) -> Access:
        """Where a row is fetched to."""
        node, combined = self.topology.node(home), self.problem
        index = (node * combined.max_tokens + token) * combined.topk + self.rows_of[rank][node][token].index(row)
        return Access(step, rank, self.fetched, index * self.plan.pitch, combined.row_bytes, writes)

    def row_accesses(self, step: Step, rank: int, row: int, expert: int) -> Iterator[Access]:
        if not self.is_fetched(rank, row, expert):
            yield from self._product(step, rank, row, expert)

    def _product(self, step: Step, rank: int, row: int, expert: int) -> Iterator[Access]:
        holder, local_row = self.holder(rank, row)
        yield self.flag(step, rank, self.plan.expert_flag(self.topology.local_rank(holder), expert), writes=False)
        yield Access(step, holder, self.products, local_row * self.plan.pitch, self.problem.row_bytes, writes=False)
