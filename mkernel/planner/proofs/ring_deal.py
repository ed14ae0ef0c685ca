"""Which CTA of ring attention takes which item: whoever has ended its own takes the next one. Runs of a call under any schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from mkernel.planner.proofs.wait_graph import Step, WaitGraph
from mkernel.planner.ring_attention import RingAttentionPlan
from mkernel.planner.ring_varlen import Packing

__all__ = ["Deal", "DeadlockError", "OverwrittenError", "Random", "Work", "WorkStep", "deal_in_turn", "run"]

Deal = list[list[list[int]]]  # by rank and CTA, the items in the order in which it takes them


class DeadlockError(Exception):
    """Nothing of a call can go on."""


class OverwrittenError(Exception):
    """A chunk is read whose slot has been written again."""


class Random(Protocol):
    """What a schedule is drawn from: ``numpy.random.Generator``."""

    def integers(self, low: int, high: int) -> int: ...


class WorkStep(NamedTuple):
    """A step of a compute CTA. ``words``: by ring, the chunk below which this CTA reads nothing after it, as far as its items so far go."""

    step: Step
    waits_for: list[Step]
    words: dict[int, int]


class Work(Protocol):
    """What a run needs to know of a call: ``RingAttentionCall``."""

    plan: RingAttentionPlan
    work: RingAttentionPlan | Packing
    ranks: range

    def wait_graph(self) -> WaitGraph: ...
    def item_steps(self, rank: int, cta: int, at: int, item: int) -> list[WorkStep]: ...
    def credits_of(self, rank: int, ring: int) -> Iterator[tuple[int, Step, list[Step]]]: ...
    def filling(self, rank: int, ring: int, number: int) -> Step: ...


def deal_in_turn(ranks: int, ctas: int, items: int) -> Deal:
    """Where all items take equally long."""
    return [[list(range(cta, items, ctas)) for cta in range(ctas)] for _ in range(ranks)]


class _Run:
    """A call that is under way."""

    def __init__(self, call: Work) -> None:
        self.call, self.plan, self.work = call, call.plan, call.work
        self.ctas, self.items = self.plan.ctas, self.work.items
        ranks = call.ranks
        self.done: set[Step] = {("enter", rank) for rank in ranks}
        self.deal: Deal = [[[] for _ in range(self.ctas)] for _ in ranks]
        self.taken = [min(self.ctas, self.items) for _ in ranks]
        self.words = [[[0] * self.plan.problem.rings for _ in range(self.ctas)] for _ in ranks]
        self.begun: set[tuple[int, int]] = set()
        self.newest: dict[tuple[int, int], tuple[int, int]] = {}  # of a CTA's newest item's segment, its first chunk and its end

    def word(self, rank: int, ring: int, cta: int) -> int:
        """What a CTA says of a ring: as long as items of its newest one's segment are left, no more than where that begins."""
        word, (base, end) = self.words[rank][cta][ring], self.newest.get((rank, cta), (0, 0))
        return min(word, base) if self.taken[rank] < end else word

    def take(self, rank: int, cta: int) -> int | None:
        """The next item of a CTA: its first one has its own number."""
        item = cta
        if self.deal[rank][cta]:
            item, self.taken[rank] = self.taken[rank], self.taken[rank] + 1
        return item if item < self.items else None

    def computing(self, rank: int, cta: int) -> Iterator[list[Step]]:
        """A compute CTA; what comes out is what it waits for."""
        mine, words = self.deal[rank][cta], self.words[rank][cta]
        while (item := self.take(rank, cta)) is not None:
            mine.append(item)
            segment = self.work.segment(item)
            base = segment.base
            self.newest[rank, cta] = base, segment.end
            words[:] = [min(word, base) for word in words]  # it may be the second one of its segment
            for one in self.call.item_steps(rank, cta, len(mine) - 1, item):
                yield one.waits_for
                self.check_slot(rank, one.step)
                self.done.add(one.step)
                self.begun.add((rank, cta))
                for ring, number in one.words.items():
                    words[ring] = max(words[ring], number)
            yield []  # it may rest before it takes the next one
        self.done.add(("finish", rank, cta))
        self.begun.add((rank, cta))
        words[:] = [self.work.total] * len(words)

    def check_slot(self, rank: int, step: Step) -> None:
        """Whether what a step reads is still in its slot."""
        if step[0] != "read":
            return
        _, _, _, _, ring, number = step
        assert isinstance(ring, int)
        assert isinstance(number, int)
        later = range(number + self.plan.depth, min(self.work.total, number + 4 * self.plan.depth), self.plan.depth)
        if not self.done.isdisjoint(self.call.filling(rank, ring, one) for one in later):
            raise OverwrittenError(str(step))

    def moving(self, steps: list[tuple[Step, list[Step]]]) -> Iterator[list[Step]]:
        """A CTA that moves chunks."""
        for step, waits_for in steps:
            yield waits_for
            self.done.add(step)

    def keeping(self, rank: int, ring: int) -> Iterator[bool]:
        """The keeper of a ring, which looks at one CTA after the other; what comes out is whether it can go on."""
        for number, step, forwarded in self.call.credits_of(rank, ring):
            for cta in range(self.ctas):
                while (rank, cta) not in self.begun or self.word(rank, ring, cta) < number:
                    yield False
                if cta % 4 == 0:
                    yield True
            while not self.done.issuperset(forwarded):
                yield False
            self.done.add(step)


def run(call: Work, rng: Random) -> Deal:
    """The items of each CTA in one run of a call, in which any of them may be slow. Raises DeadlockError, OverwrittenError."""
    state = _Run(call)
    moving: dict[tuple[object, ...], list[tuple[Step, list[Step]]]] = {}
    graph = call.wait_graph()
    for step in graph:
        if step[0] in ("push", "forward", "stage", "put"):
            moving.setdefault((step[0] in ("push", "forward"), *step[1:3]), []).append((step, graph.before(step)))
    agents = [state.computing(rank, cta) for rank in call.ranks for cta in range(state.ctas)]
    agents += [state.moving(steps) for steps in moving.values()]
    keepers = [state.keeping(rank, ring) for rank in call.ranks for ring in range(call.plan.problem.rings)]
    waits: dict[int, list[Step] | None] = {i: [] for i in range(len(agents))}
    slowness = [1] * len(agents)
    while waits:
        slowness[rng.integers(0, len(agents))] = 1 << max(0, rng.integers(-4, 7))
        gone_on = sum(next(keeper, False) for keeper in keepers) > 0  # each of them goes on
        for i in [i for i in waits if rng.integers(0, slowness[i]) == 0]:
            for _ in range(rng.integers(1, 6)):
                needed = waits[i]
                if needed is None or not state.done.issuperset(needed):
                    break
                gone_on = True
                waits[i] = next(agents[i], None)
            if waits[i] is None:
                del waits[i]
        if not gone_on and not any(state.done.issuperset(needed or ()) for needed in waits.values()):
            raise DeadlockError(f"{len(waits)} CTAs wait: {[needed[-1] for needed in waits.values() if needed][:4]}")
    return state.deal
