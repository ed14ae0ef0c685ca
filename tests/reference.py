"""How far the result of a reduction may be from the exact sum, for numpy and CuPy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mkernel.cli.check import UNIT_ROUNDOFF
from mkernel.plan.topology import Topology

_SMALLEST = {"bfloat16": 2.0**-134, "float16": 2.0**-25}  # half the spacing of subnormals, where relative error says nothing


def worst_sum_over_bound(
    xp: Any,
    values: Any,
    products: Sequence[Any],
    accumulated: Any,
    dtype: str,
    *,
    rounded: Iterable[int] = (),
    sums: Iterable[Sequence[int]] = (),
) -> float:
    """The largest |values - sum of products| / bound over all elements; at most 1 where right, inf where an element is not finite.

    All float64. ``products``: of each rank. ``accumulated``: what float32 additions may be off by together. ``rounded``: the ranks whose
    product travels in ``dtype``; ``sums``: the ranks whose products travel as one sum in ``dtype``. The result is rounded once more.
    """
    if not values.size:
        return 0.0
    if not bool(xp.isfinite(values).all()):
        return float("inf")
    unit, smallest = UNIT_ROUNDOFF[dtype], _SMALLEST[dtype]
    reference, error = sum(products), accumulated.copy()
    for rank in rounded:
        error += unit * xp.abs(products[rank]) + smallest
    for ranks in sums:  # each of an error that is itself rounded is at most `unit` of all errors, which the last line doubles
        error += unit * xp.abs(sum(products[rank] for rank in ranks)) + smallest
    bound = (1 + 2 * unit) * error + unit * xp.abs(reference) + smallest
    return float((xp.abs(values - reference) / bound).max())


def roundings(op: str, topology: Topology, rank: int, partials: str, algorithm: str | None) -> dict[str, Any]:
    """``rounded`` and ``sums`` of ``worst_sum_over_bound`` for the result of ``rank``. Who owns a tile of an all-reduce is left open."""
    if partials == "float32":
        return {}
    if algorithm == "one_shot":
        return {"rounded": range(topology.size)}
    if topology.size == 1:
        return {}
    own = op == "gemm_reduce_scatter"  # its own product and its node's sum stay in float32
    return {
        "rounded": [source for source in range(topology.size) if not (own and source == rank)],
        "sums": [
            topology.node_ranks(node)
            for node in range(topology.num_nodes)
            if topology.num_nodes > 1 and not (own and node == topology.node(rank))
        ],
    }
