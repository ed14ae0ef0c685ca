"""The shape of a world: which ranks share a node."""

from __future__ import annotations

import dataclasses

__all__ = ["Topology"]


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """``size`` ranks in nodes of ``ranks_per_node`` consecutive ranks. A rail is one local rank across all nodes."""

    size: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.ranks_per_node < 1 or self.size % self.ranks_per_node:
            raise ValueError(f"{self.size} ranks cannot be split into nodes of {self.ranks_per_node}")

    @property
    def num_nodes(self) -> int:
        return self.size // self.ranks_per_node

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_rank(self, rank: int) -> int:
        return rank % self.ranks_per_node

    def rank(self, node: int, local_rank: int) -> int:
        return node * self.ranks_per_node + local_rank

    def node_ranks(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def rail_peers(self, rank: int) -> list[int]:
        """Ranks of the same local rank on the other nodes, from the next node on."""
        node, local = self.node(rank), self.local_rank(rank)
        return [self.rank((node + i) % self.num_nodes, local) for i in range(1, self.num_nodes)]
