"""Shapes of dense products that ``--shapes`` names: drawn ones, and the matrices of models that are split over the ranks of a node.

Both say what a rank multiplies: M rows of all ranks, N columns and K. An all-gather has N of every rank's own columns, a reduction
splits K.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from mkernel.errors import ArgumentError
from mkernel.planner.topology import Topology

__all__ = ["MODELS", "ROWS", "Matrix", "drawn", "expand"]

ROWS = (16, 64, 256, 1024, 4096)  # M of the shapes of a model
_M, _N, _K = (1, 16384), (512, 16384), (512, 8192)  # log-uniform
_COARSE, _FINE = 128, 8  # half of N and of K are multiples of the one, half of the other
_RULE = "must be random:N:SEED, or MODEL:tpR with R the number of ranks"


class Matrix(NamedTuple):
    """Columns and rows of a weight matrix: K is ``inputs``, N ``outputs``. ``name``: what it is in the layer."""

    name: str
    inputs: int
    outputs: int


# By model: matrices whose columns are split (they follow an all-gather), and those whose rows are (a reduction follows them).
MODELS: dict[str, tuple[tuple[Matrix, ...], tuple[Matrix, ...]]] = {
    "llama-70b": (
        (Matrix("qkv", 8192, 10240), Matrix("gate and up", 8192, 57344)),
        (Matrix("o", 8192, 8192), Matrix("down", 28672, 8192)),
    ),
    "qwen2.5-7b": (
        (Matrix("qkv", 3584, 4608), Matrix("gate and up", 3584, 37888)),
        (Matrix("o", 3584, 3584), Matrix("down", 18944, 3584)),
    ),
    "deepseek-v3": (  # of MLA what is split by heads, and the layers without experts
        (Matrix("q up", 1536, 24576), Matrix("gate and up", 7168, 36864)),
        (Matrix("o", 16384, 7168), Matrix("down", 18432, 7168)),
    ),
    "mixtral": (  # its experts are shapes of the MoE ops
        (Matrix("qkv", 4096, 6144),),
        (Matrix("o", 4096, 4096),),
    ),
}


def drawn(count: int, seed: int, ranks: int, *, splits_k: bool) -> list[str]:
    """So many shapes as ``MxNxK``, as an op takes them; every rank draws the same. M is a multiple of the ranks, for all ops alike.

    M 1 to 16384, N 512 to 16384, K of a rank 512 to 8192, log-uniform.
    """
    rng = np.random.default_rng(seed)

    def between(low: int, high: int, unit: int = 1) -> int:
        return max(unit, int(low * (high / low) ** rng.random()) // unit * unit)

    shapes = []
    for _ in range(count):
        m = -(-between(*_M) // ranks) * ranks
        n, k = (between(*limits, _COARSE if rng.random() < 0.5 else _FINE) for limits in (_N, _K))
        shapes.append(f"{m}x{n}x{k * ranks if splits_k else k}")
    return shapes


def _of_model(text: str, name: str, degree: str, ranks: int, *, splits_k: bool) -> list[str]:
    if int(degree or ranks) != ranks:
        raise ArgumentError("--shapes", text, f"is split over {degree} ranks, and there are {ranks}", f"write {name}:tp{ranks}, or --world")
    shapes = []
    for matrix in MODELS[name][splits_k]:
        split = matrix.inputs if splits_k else matrix.outputs
        if split % (8 * ranks):
            raise ArgumentError("--shapes", text, f"{matrix.name}: {split} cannot be split over {ranks} ranks in multiples of 8")
        n, k = (matrix.outputs, matrix.inputs) if splits_k else (matrix.outputs // ranks, matrix.inputs)
        shapes += [f"{-(-m // ranks) * ranks}x{n}x{k}" for m in ROWS]
    return shapes


def expand(text: str, topology: Topology, *, splits_k: bool) -> list[str]:
    """The shapes that one word of ``--shapes`` names; anything that is none of these names is one shape.

    Raises
    ------
    ArgumentError
        The word begins as one of these names, and does not go on as they do.
    """
    name, _, rest = text.lower().partition(":")
    if name == "random":
        numbers = re.fullmatch(r"([1-9]\d*):(\d+)", rest)
        if not numbers:
            raise ArgumentError("--shapes", text, _RULE, "for example random:200:7")
        return drawn(int(numbers[1]), int(numbers[2]), topology.size, splits_k=splits_k)
    if name in MODELS:
        degree = re.fullmatch(r"(?:tp([1-9]\d*))?", rest)
        if not degree:
            raise ArgumentError("--shapes", text, _RULE, "for example llama-70b:tp4")
        return _of_model(text, name, degree[1] or "", topology.size, splits_k=splits_k)
    return [text]
