"""Is a result right? Every element against float64, within a bound that follows from the arithmetic.

This is the only checker: ``mkernel demo``, ``mkernel bench``, the examples and the tests use it, with NumPy or CuPy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mkernel.planner.reduce import REDUCE_SCATTER, ReducePlan

__all__ = ["UNIT_ROUNDOFF", "NodeSum", "Product", "node_sums", "to_float64", "worst_product", "worst_sum"]

# Largest relative error of rounding to nearest: 2^-p for p significant bits.
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# Half the spacing of subnormals, where the relative error says nothing.
_SMALLEST = {"bfloat16": 2.0**-134, "float16": 2.0**-25}
_BLOCK_ROWS = 2048  # a block of float64 rows at K = 32768 is 512 MiB
_TILE = 128
_MANY = 32  # elements of a tile from which on roundings no longer happen to agree


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

    @property
    def roundings(self) -> int:
        return sum(product.rounded for product in self.products) + self.rounded


def node_sums(plan: ReducePlan, rank: int, operands: Callable[[int], tuple[Any, Any]]) -> list[NodeSum]:
    """What each node adds to the result of ``rank``, and which parts are rounded on the way. ``operands``: rank -> its a and b."""
    problem = plan.problem
    topology, rounds = problem.topology, problem.partials == "output" and problem.topology.size > 1
    scatters, sums = problem.op == REDUCE_SCATTER, topology.num_nodes > 1 and not plan.one_shot
    # The owner's product stays exact, but for a canonical sum; in an all-reduce each tile has another owner.
    exact = scatters and not problem.canonical
    own = rank if exact else None
    rows = slice(rank * plan.rows, (rank + 1) * plan.rows) if scatters else slice(None)
    nodes = []
    for node in range(topology.num_nodes):
        products = []
        for source in topology.node_ranks(node):
            a, b = operands(source)
            products.append(Product(a[rows], b, rounds and source != own))
        nodes.append(NodeSum(products, rounds and sums and not (exact and node == topology.node(rank))))
    return nodes


def worst_product(xp: Any, out: Any, a: Any, b: Any) -> float:
    """The largest error of ``out`` (M, N) against ``a`` (M, K) @ ``b`` (K, N) over what rounding allows: see ``worst_sum``."""
    return worst_sum(xp, out, [NodeSum([Product(a, b)])])


def worst_sum(xp: Any, out: Any, nodes: Sequence[NodeSum]) -> float:
    """The largest error of ``out`` (M, N) against the sum of all products over what rounding allows.

    Right if at most 1; inf if an element is not finite. The operands are exactly what the kernel read; products of 16-bit numbers are exact
    in float32. Two ratios are formed, and the larger one is returned.

    - By element. The bound is one rounding to the output's dtype of the result and of every product and node's sum that is marked so, plus
      (K/8 + 32 + additions) float32 roundings of 2^-23 of the sum of magnitudes. K is the largest of a rank. The matrix unit adds 16
      products at a time and may truncate; target cpu adds 4 at a time and rounds; each product or node's sum is one addition more.
    - By tile of 128 x 128. The root mean square of the errors is compared with that of the values that were rounded. This finds a skipped
      slice of K that the bound by element, which grows linearly with K, would let pass.

    Raises
    ------
    ValueError
        ``out`` does not have the shape of the sum.
    """
    first = nodes[0].products[0]
    shape = (int(first.a.shape[0]), int(first.b.shape[1]))
    if tuple(out.shape) != shape:
        raise ValueError(f"the result has shape {tuple(out.shape)}, expected {shape}")
    if not out.size:
        return 0.0
    extents = [int(product.a.shape[1]) for node in nodes for product in node.products]
    k, additions = sum(extents), len(extents) + len(nodes) - 2
    unit, smallest = UNIT_ROUNDOFF[str(out.dtype)], _SMALLEST[str(out.dtype)]
    accumulated, roundings = (max(extents) / 8 + 32 + additions) * 2.0**-23, sum(node.roundings for node in nodes)
    worst = 0.0
    for start in range(0, shape[0], _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        reference, magnitude, rounded, squares = _sum(xp, nodes, rows)
        error = xp.abs(to_float64(xp, xp.ascontiguousarray(out[rows])) - reference)
        if not bool(xp.isfinite(error).all()):
            return float("inf")
        # What was rounded early is rounded again with the sums it is part of, at most three times.
        early = (1 + unit) ** 3 * (accumulated * magnitude + unit * rounded + roundings * smallest)
        bound = unit * xp.abs(reference) + early + smallest
        worst = max(worst, float((error / bound).max()))
        # The expected size of a sum of K independent terms keeps a tile whose values cancel from counting as wrong, and so do subnormals.
        counts = _tile_counts(xp, error.shape)
        scale = _tile_sum(xp, reference**2 + squares) / counts + (_tile_sum(xp, magnitude) / counts) ** 2 / max(k, 1)
        scale += (1 + roundings) * (smallest / unit) ** 2
        # In a tile of few elements all roundings may go one way; the square is then at most their number times larger (Cauchy-Schwarz).
        agree = xp.sqrt(1 + roundings * xp.minimum(1, _MANY / counts))
        ratio = xp.sqrt(_tile_sum(xp, error**2) / counts / scale) / agree
        worst = max(worst, float(ratio.max()) / (unit + k / 16 * 2.0**-23))
    return worst


def _sum(xp: Any, nodes: Sequence[NodeSum], rows: slice) -> tuple[Any, Any, Any, Any]:
    """The sum for some rows; the sum of the magnitudes of its terms; magnitudes and squares of everything that is rounded on the way."""
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


def _tile_sum(xp: Any, values: Any) -> Any:
    """Sums of the tiles of 128 x 128; the last ones have fewer elements."""
    rows, columns = (-(-extent // _TILE) for extent in values.shape)
    padded = xp.zeros((rows * _TILE, columns * _TILE), dtype=values.dtype)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded.reshape(rows, _TILE, columns, _TILE).sum(axis=(1, 3))


def _tile_counts(xp: Any, shape: tuple[int, int]) -> Any:
    """Numbers of elements of these tiles."""
    heights, widths = (xp.minimum(extent - xp.arange(-(-extent // _TILE)) * _TILE, _TILE) for extent in shape)
    return heights[:, None] * widths[None, :]
