"""Is a result right? Every element against float64, computed on the device in blocks of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mkernel.cli.check import UNIT_ROUNDOFF
from mkernel.plan.reduce import REDUCE_SCATTER, ReduceProblem

__all__ = ["NodeSum", "Product", "node_sums", "to_float64", "worst_product", "worst_sum"]

_BLOCK_ROWS = 2048  # a block of float64 rows at K = 32768 is 512 MiB
_TILE = 128


def to_float64(xp: Any, array: Any) -> Any:
    """A 16-bit array as float64. Works on the bits, so that no library needs to know bfloat16."""
    if str(array.dtype) == "float16":
        return array.astype(xp.float64)
    return (array.view(xp.uint16).astype(xp.uint32) << 16).view(xp.float32).astype(xp.float64)


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """What one rank adds to a sum: ``a`` (M, K of this rank) @ ``b`` (K, N)."""

    a: Any
    b: Any
    rounded: bool = False  # to the output's dtype, before it is added


@dataclasses.dataclass(frozen=True, slots=True)
class NodeSum:
    """What the ranks of one node add to a sum."""

    products: Sequence[Product]
    rounded: bool = False  # to the output's dtype, before it is added to those of other nodes


def node_sums(problem: ReduceProblem, rank: int, operands: Callable[[int], tuple[Any, Any]]) -> list[NodeSum]:
    """What the ranks add to the result of ``rank``, and which of it is rounded on its way. ``operands``: rank -> its a and b."""
    topology, rounds = problem.topology, problem.partials == "output" and problem.topology.size > 1
    scatters, sums = problem.op == REDUCE_SCATTER, topology.num_nodes > 1 and not problem.one_shot
    own = rank if scatters else None  # whose part stays exact; tiles of an all-reduce differ in that
    rows = slice(rank * problem.rows, (rank + 1) * problem.rows) if scatters else slice(None)
    nodes = []
    for node in range(topology.num_nodes):
        products = []
        for source in topology.node_ranks(node):
            a, b = operands(source)
            products.append(Product(a[rows], b, rounds and source != own))
        nodes.append(NodeSum(products, rounds and sums and not (scatters and node == topology.node(rank))))
    return nodes


def worst_product(xp: Any, out: Any, a: Any, b: Any) -> float:
    """How far ``out`` (M, N) is from ``a`` (M, K) @ ``b`` (K, N), over what rounding allows: see ``worst_sum``."""
    return worst_sum(xp, out, [NodeSum([Product(a, b)])])


def worst_sum(xp: Any, out: Any, nodes: Sequence[NodeSum]) -> float:
    """How far ``out`` (M, N) is from the sum of all products, over what rounding allows: right if <= 1; inf if not finite.

    The larger of two ratios. Element by element: one rounding to the output's dtype of the result, of each product and each node's sum that
    is marked so, plus K/8 + 32 float32 roundings of the sum of magnitudes (the matrix unit adds 16 products at a time and may truncate),
    K the largest of a rank, plus one per addition of a product or a node's sum. Tile by tile: the root mean square of the errors over that
    of the values that were rounded, which sees a skipped slice of K that the worst-case bound, linear in K, would let pass.
    """
    if not out.size:
        return 0.0
    extents = [int(product.a.shape[1]) for node in nodes for product in node.products]
    k, additions = sum(extents), len(extents) + len(nodes) - 2
    roundoff, accumulated = UNIT_ROUNDOFF[str(out.dtype)], (max(extents) / 8 + 32 + additions) * 2.0**-23
    worst = 0.0
    for start in range(0, int(out.shape[0]), _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        reference, magnitude, rounded, squares = _sum(xp, nodes, rows)
        error = xp.abs(to_float64(xp, xp.ascontiguousarray(out[rows])) - reference)
        if not bool(xp.isfinite(error).all()):
            return float("inf")
        # What was rounded early is rounded again with the sums it is part of, at most three times.
        early = (1 + roundoff) ** 3 * (accumulated * magnitude + roundoff * rounded)
        bound = roundoff * xp.abs(reference) + early + 1e-30
        worst = max(worst, float((error / bound).max()))
        # The expected size of a sum of K independent terms keeps a tile whose values cancel from counting as wrong.
        scale = _tile_mean(xp, reference**2 + squares) + _tile_mean(xp, magnitude) ** 2 / max(k, 1) + 1e-30
        worst = max(worst, float(xp.sqrt(_tile_mean(xp, error**2) / scale).max()) / (roundoff + k / 16 * 2.0**-23))
    return worst


def _sum(xp: Any, nodes: Sequence[NodeSum], rows: slice) -> tuple[Any, Any, Any, Any]:
    """Of some rows: the sum; the sum of the magnitudes of its terms; magnitudes, and squares, of all that is rounded on the way to it."""
    total = magnitude = rounded = squares = 0.0
    for node in nodes:
        subtotal = 0.0
        for product in node.products:
            a64, b64 = to_float64(xp, product.a[rows]), to_float64(xp, product.b)
            value = a64 @ b64
            magnitude = xp.abs(a64) @ xp.abs(b64) + magnitude
            subtotal = value + subtotal
            if product.rounded:
                rounded, squares = xp.abs(value) + rounded, value**2 + squares
        total = subtotal + total
        if node.rounded:
            rounded, squares = xp.abs(subtotal) + rounded, subtotal**2 + squares
    return total, magnitude, rounded, squares


def _tile_mean(xp: Any, values: Any) -> Any:
    """Means of tiles of 128 x 128; tiles at the edge average what they have."""
    rows, columns = (-(-extent // _TILE) for extent in values.shape)
    padded = xp.zeros((rows * _TILE, columns * _TILE), dtype=values.dtype)
    padded[: values.shape[0], : values.shape[1]] = values
    sums = padded.reshape(rows, _TILE, columns, _TILE).sum(axis=(1, 3))
    heights = xp.minimum(values.shape[0] - xp.arange(rows) * _TILE, _TILE)
    widths = xp.minimum(values.shape[1] - xp.arange(columns) * _TILE, _TILE)
    return sums / (heights[:, None] * widths[None, :])
