"""``mk.zigzag_shard`` and ``mk.zigzag_unshard``: rows of a sequence dealt to ranks so that causal attention costs each of them the same."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mkernel.errors import ArgumentError
from mkernel.runtime.integers import whole_number

if TYPE_CHECKING:
    from mkernel.typing import Array

__all__ = ["zigzag_shard", "zigzag_unshard"]


def zigzag_shard(x: Array, axis: int, *, rank: int, ranks: int, cu_seqlens: Iterable[Any] | None = None) -> Array:
    """The part of a sequence that one of ``ranks`` ranks (W) holds: of 2W equal chunks chunk ``rank`` and chunk ``2W - 1 - rank``.

    Parameters
    ----------
    x
        Any array that can be sliced, of NumPy, CuPy, torch or an array API library. ``axis`` is the sequence: a multiple of 2W long.
    rank, ranks
        Which part, and of how many.
    cu_seqlens
        For packed sequences: n + 1 numbers of rows, the first 0; sequence i is rows ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``. Each
        sequence is dealt by itself, in chunks of ``ceil(length / 2W)`` rows; rows after its end are zeros. Numbers that lie on a device are
        copied to the host.

    Returns
    -------
    shard
        A new array of the same library: ``x.shape[axis] / W`` rows along ``axis``, or ``2 * ceil(length / 2W)`` for each packed sequence.

    Notes
    -----
    Not collective: every rank has the whole ``x``. Source: the ``zigzag`` order of ring attention in Llama 3's context parallelism.

    Raises
    ------
    ArgumentError
        The sequence is no multiple of 2W long, or ``cu_seqlens`` does not fit it.

    Examples
    --------
    >>> import numpy as np, mkernel as mk
    >>> x = np.arange(8)
    >>> [mk.zigzag_shard(x, 0, rank=r, ranks=2).tolist() for r in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    >>> mk.zigzag_shard(x, 0, rank=0, ranks=2, cu_seqlens=[0, 3, 8]).tolist()  # of 3 and of 5 rows
    [0, 0, 3, 4, 0, 0]
    """
    rank, ranks = whole_number("rank", rank, 0), whole_number("ranks", ranks, 1)
    if rank >= ranks:
        raise ArgumentError("rank", rank, f"must be 0 to ranks - 1 = {ranks - 1}")
    axis = _axis("x", x, axis)
    length = x.shape[axis]
    pieces = []
    for begin, end in _sequences(length, cu_seqlens):
        if cu_seqlens is None and length % (2 * ranks):
            raise ArgumentError("x.shape", tuple(x.shape), f"axis {axis} must be a multiple of 2 * {ranks} ranks long", "pad it")
        rows = -(-(end - begin) // (2 * ranks))
        for chunk in (rank, 2 * ranks - 1 - rank):
            first = min(begin + chunk * rows, end)
            last = min(first + rows, end)
            pieces.append(x[_along(axis, first, last)])
            if last - first < rows:
                pieces += [_library(x).zeros_like(x[_along(axis, 0, 1)])] * (rows - (last - first))
    shard: Array = _concatenated(x, pieces, axis)
    return shard


def zigzag_unshard(shards: Sequence[Array], axis: int, *, cu_seqlens: Iterable[Any] | None = None) -> Array:
    """The whole of which rank r holds ``shards[r]``: the inverse of ``zigzag_shard``.

    Parameters
    ----------
    shards
        The parts of all ranks, in their order, of equal shapes.
    axis, cu_seqlens
        As in ``zigzag_shard``. Rows after the end of a packed sequence are left out.

    Returns
    -------
    x
        A new array of the library of the shards.

    Raises
    ------
    ArgumentError
        The shards do not have the rows that ``cu_seqlens`` says, or an odd number of them.

    Examples
    --------
    >>> import numpy as np, mkernel as mk
    >>> x = np.arange(12)
    >>> mk.zigzag_unshard([mk.zigzag_shard(x, 0, rank=r, ranks=3) for r in range(3)], 0).tolist() == x.tolist()
    True
    """
    if not isinstance(shards, Sequence) or not shards:
        raise ArgumentError("shards", type(shards).__name__, "must be the parts of all ranks")
    for shard in shards:
        axis = _axis("shards", shard, axis)
    ranks, held = len(shards), shards[0].shape[axis]
    if any(tuple(shard.shape) != tuple(shards[0].shape) for shard in shards):
        raise ArgumentError("shards", [tuple(shard.shape) for shard in shards], "must have the same shape")
    if cu_seqlens is None and held % 2:
        raise ArgumentError("shards", held, "rows in each: must be even")
    pieces, at = [], 0  # at: row of each shard
    for begin, end in _sequences(held * ranks if cu_seqlens is None else None, cu_seqlens):
        rows = -(-(end - begin) // (2 * ranks))
        for chunk in range(2 * ranks):
            owner, half = (chunk, 0) if chunk < ranks else (2 * ranks - 1 - chunk, 1)
            count = max(0, min(rows, end - begin - chunk * rows))
            pieces.append(shards[owner][_along(axis, at + half * rows, at + half * rows + count)])
        at += 2 * rows
    if at != held:
        raise ArgumentError("shards", held, f"rows in each: cu_seqlens asks for {at}")
    whole: Array = _concatenated(shards[0], pieces, axis)
    return whole


def _axis(name: str, x: Any, axis: Any) -> int:
    """The axis of an array, counted from its first."""
    shape = getattr(x, "shape", None)
    if not isinstance(shape, tuple):
        raise ArgumentError(name, type(x).__name__, "is no array")
    return whole_number("axis", axis, -len(shape), len(shape) - 1) % len(shape)


def _sequences(length: int | None, cu_seqlens: Iterable[Any] | None) -> list[tuple[int, int]]:
    """First row of each sequence, and the one after its last. ``length``: of all; None: as ``cu_seqlens`` says."""
    if cu_seqlens is None:
        assert length is not None
        return [(0, length)]
    try:
        given = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else list(cu_seqlens)  # of a device all at once
        ends = [int(end) for end in given]
        is_whole = all(end == whole for end, whole in zip(given, ends, strict=True))
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole:
        raise ArgumentError("cu_seqlens", cu_seqlens, "must be numbers of rows")
    if not ends or ends[0] != 0 or any(a > b for a, b in itertools.pairwise(ends)):
        raise ArgumentError("cu_seqlens", ends, "must begin with 0 and never decrease")
    if length is not None and ends[-1] != length:
        raise ArgumentError("cu_seqlens", ends, f"must end with the number of rows, {length}")
    return list(itertools.pairwise(ends))


def _along(axis: int, begin: int, end: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(begin, end))


def _library(x: Any) -> Any:
    """The module whose array ``x`` is."""
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    return importlib.import_module(type(x).__module__.partition(".")[0])


def _concatenated(x: Any, pieces: list[Any], axis: int) -> Any:
    if not pieces:
        return x[_along(axis, 0, 0)]
    library = _library(x)
    for name in ("concat", "concatenate", "cat"):  # of the array API; of NumPy and CuPy; of torch
        if hasattr(library, name):
            return getattr(library, name)(pieces, axis) if name == "cat" else getattr(library, name)(pieces, axis=axis)
    raise ArgumentError("x", type(x).__name__, f"{library.__name__} has no function that concatenates")
