"""Where the rows lie that a dispatch has brought to this rank's experts, for who needs them behind the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mkernel.ops.call import ask
from mkernel.ops.moe_dispatch_gemm import OP
from mkernel.ops.schedule import executable
from mkernel.planner.moe import SEGMENT_ROWS

if TYPE_CHECKING:
    from mkernel.runtime.world import World

__all__ = ["slots_after"]

_WORD = 2  # bytes of every dtype of rows


def slots_after(world: World, operands: Sequence[Any], max_tokens: int, max_rows: int, stream: Any) -> Any:
    """The rows in all slots, as 16-bit words, (slots, H), strided: an array of ``world.xp`` over the heap, until the next call.

    Of the dispatch of these operands without activation, which was the last call of this world on this stream. Of an expert with n rows
    the first n slots from the next multiple of ``SEGMENT_ROWS`` on have them, in the order of ``expert_offsets``; what other slots hold is
    undefined.
    """
    views, instance = ask(world, OP, operands, (None, None, max_tokens, max_rows, 1))
    made, problem = executable(world, OP, instance, None, stream), instance.problem
    place = world.heap_address + made.scratch_offset + made.plan.areas.slots
    shape = problem.blocks * SEGMENT_ROWS, problem.slot_bytes // _WORD
    return world.backend.wrap(place, shape, "int16", world.heap)[:, : views[0].shape[1]]
