"""Mistakes in the device code of the MoE ops."""

from __future__ import annotations

import functools

from tests.ops.planted_bug import Bug

__all__ = ["MOE"]

_PULL, _COUNTING, _ROUTER, _SEND, _EXCHANGE = (f"moe/{name}.cuh" for name in ("pull", "counting", "router", "send", "exchange"))
_Bug = functools.partial(Bug, workload="dispatch")

MOE = [
    _Bug("rows of other nodes are not waited for", _PULL, "flag == kNone || wait_flag(", "true || wait_flag(", world="2x2"),
    Bug(
        "a rank ends while others read its x",
        _PULL,
        "if (p.routing.x_offset != kStaged) wait_all(entered, FetchedFlags<Parameters>{p, index}, kR - 1);",
        workload="dispatch from the heap",
    ),
    _Bug(
        "lanes with a token ask for their warp",
        _COUNTING,
        "return scratch_.ids[warp_][",
        "return scratch_.ids[ptx::warp_index()][",
        found_as="the warp has diverged",
    ),
    _Bug(
        "a last piece of too many rows",
        _PULL,
        "return rows_of_piece(count - item.row);",
        "return kRowsPerPiece;",
        slow=True,
    ),
    Bug(
        "a piece that is sent has one row",
        _SEND,
        "Item{rows_of_piece(rows - first) * r.row_bytes, first}",
        "Item{r.row_bytes, first}",
        world="2x2",
        workload="dispatch in large puts",
    ),
    _Bug("one slot only", _PULL, "if (i < wanted) ptx::bulk_store(", "if (i < 1) ptx::bulk_store(", slow=True),
    _Bug(
        "tokens in reverse order of their CTAs",
        _COUNTING,
        "< ptx::cta_index()) ptx::shared_add(",
        "> ptx::cta_index()) ptx::shared_add(",
        slow=True,
    ),
    _Bug("of few tokens a CTA counts its own", _COUNTING, "if (is_few()) return Range{warp_, warp_ < all ? warp_ + 1 : warp_};", slow=True),
    _Bug("a CTA that has come waits for nobody", "comm/grid.cuh", "uint64_t(number) * ptx::cta_count()", "uint64_t(number)", seeds=20),
    Bug(
        "a tile of few rows loads those of the next expert",
        "tile/grouped.cuh",
        "kShortTiles ? c.is_short : rows(c) <= kBlockRows",
        "kShortTiles && c.is_short",
        workload="dispatch in narrow tiles",
        found_as="data race",
        tsan=True,
        slow=True,
    ),
    _Bug("a slot off by one", _ROUTER, "scratch_.first_slot[expert] + at;", "scratch_.first_slot[expert] + (at ^ 1);"),
    _Bug("blocks are released a message early", _ROUTER, "kSegmentRows - left : 0;", "kSegmentRows - left + 8 : 8;", seeds=20),
    _Bug(
        "counts of the call before",
        _ROUTER,
        "*tables_.arrived(slot / kSegmentRows) = left",
        "if (slot == kNone) *tables_.arrived(slot / kSegmentRows) = left",
        slow=True,
    ),
    _Bug(
        "tokens of a group in reverse",
        _ROUTER,
        "at = before[column] + ptx::count_bits(earlier);",
        "at = before[column] + ptx::count_bits(marks[column] & ~earlier) - 1;",
        slow=True,
    ),
    _Bug("a band forgets those before it", _ROUTER, "place_listed = at + in_earlier_bands(column);", "place_listed = at;", world="2x2"),
    _Bug("bands in order of choices", _COUNTING, "is_on(id, node * kR, kR) && expert < first", "is_on(id, node * kR, kR)", world="2x2"),
    _Bug("the node is not told what has come", _SEND, "if (ok) raise_flag(entered, p, flag, 1);", world="2x2", slow=True),
    _Bug("it is told too early", _SEND, "ok = ptx::all_of_warp(ptx::lane_index() != 0 || wait_flag(entered, p, flag, rank));", world="2x2"),
    _Bug("rows are put before they are packed", _SEND, "ring.copy(packed);", "", world="2x2", slow=True),
    _Bug(
        "staged rows are told too early",
        _EXCHANGE,
        "    ptx::sync_cta();\n    if (ptx::warp_index() == 0) raise_flag(",
        "    if (ptx::warp_index() == 0) raise_flag(",
        found_as="data race",
        tsan=True,
        slow=True,
    ),
    _Bug(
        "arrivals are counted without a release",
        _PULL,
        "ptx::add_release(tables.arrived(batch.slot[row][i % kTopK] / kSegmentRows), 1)",
        "*tables.arrived(batch.slot[row][i % kTopK] / kSegmentRows) += 1",
        found_as="data race",
        tsan=True,
        slow=True,
    ),
]
