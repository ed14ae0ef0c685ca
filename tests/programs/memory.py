"""Where the arrays of a program's steps lie: a few planes that every step uses again, as an application's buffers are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.ops.body import aligned
from tests.programs.calls import Array
from tests.programs.program import Program, Step

__all__ = ["Memory", "host_input", "host_inputs", "matrix"]

KINDS = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
PADDING = 8  # elements between rows that lie apart
NAN = 0x7FFF  # in either dtype


def pitch(array: Array, padded: bool) -> int:
    return array.stored[1] + (PADDING if padded else 0)


def matrix(plane: Any, array: Array, padded: bool) -> Any:
    """A matrix at the beginning of a plane of 16-bit words, all of whose words become NaN."""
    outer, inner = array.stored
    step = pitch(array, padded)
    words = plane[: outer * step]
    words[...] = NAN
    whole = words.view(KINDS[array.dtype]).reshape(outer, step)[:, :inner]
    return whole.T if array.transposed else whole


class Memory:
    """One rank's planes. ``ordinary(words)`` makes one of so many 16-bit words outside the heap. Collective."""

    def __init__(self, world: Any, program: Program, ordinary: Callable[[int], Any]) -> None:
        self.world, self.program, self._ordinary = world, program, ordinary
        sizes: dict[tuple[str, str], int] = {}
        for step in program.steps:
            for rank in range(world.size):  # planes on the heap are as large on every rank
                arrays = step.call.inputs(program.topology, rank)
                kept = [*zip(arrays.items(), step.places, strict=True), (("out", step.call.result(program.topology, rank)), step.out)]
                if step.gathered != "none":
                    kept.append((("gathered", step.call.keeps(program.topology)), step.gathered))
                for (name, array), place in kept:
                    words = array.stored[0] * pitch(array, True)
                    sizes[name, place] = max(sizes.get((name, place), 8), words)
        self._planes = {key: self._plane(key[1], words) for key, words in sorted(sizes.items()) if key[1] not in ("none", "fresh")}

    def _plane(self, place: str, words: int) -> Any:
        if place == "heap":
            return self.world.empty((words,), "float16").view(self.world.xp.uint16)
        return self._ordinary(words)

    def operands(self, step: Step) -> dict[str, Any]:
        """Arrays for the operands, all NaN."""
        arrays = step.call.inputs(self.program.topology, self.world.rank)
        return {
            name: matrix(self._planes[name, place], array, name in step.padded)
            for (name, array), place in zip(arrays.items(), step.places, strict=True)
        }

    def out(self, step: Step) -> Any:
        """What to give as ``out``, all NaN; or None."""
        if step.out == "none":
            return None
        array, padded = step.call.result(self.program.topology, self.world.rank), "out" in step.padded
        fresh = step.out == "fresh"
        plane = self._ordinary(max(8, array.stored[0] * pitch(array, padded))) if fresh else self._planes["out", step.out]
        return matrix(plane, array, padded)

    def gathered(self, step: Step) -> Any:
        """What to give as ``gathered``, all NaN; or None."""
        if step.gathered == "none":
            return None
        return matrix(self._planes["gathered", step.gathered], step.call.keeps(self.program.topology), False)


def host_input(program: Program, step: Step, rank: int, index: int, array: Array) -> NDArray[Any]:
    """Values of one operand of one rank in one step: fresh ones, that anybody can draw again."""
    rng = np.random.default_rng([program.seed, step.number, rank, index])
    values: NDArray[Any] = rng.standard_normal(array.stored, np.float32).astype(KINDS[array.dtype])
    return values.T if array.transposed else values


def host_inputs(program: Program, step: Step, rank: int) -> Mapping[str, NDArray[Any]]:
    arrays = step.call.inputs(program.topology, rank)
    return {name: host_input(program, step, rank, i, array) for i, (name, array) in enumerate(arrays.items())}


def host_plane(words: int) -> NDArray[Any]:
    """Ordinary memory of target cpu."""
    return aligned((words,), "float16").view(np.uint16)


def spilled(out: NDArray[Any] | None) -> bool:
    """Whether anything was written between the rows of ``out``."""
    if out is None or out.shape[0] < 2 or out.strides[0] == out.shape[1] * 2:
        return False
    whole = np.lib.stride_tricks.as_strided(out.view(np.uint16), (out.shape[0] - 1, out.strides[0] // 2), (out.strides[0], 2))
    return bool((whole[:, out.shape[1] :] != NAN).any())
