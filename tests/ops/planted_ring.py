"""Mistakes in the device code of ring attention: what moves keys, and who gives credits for them."""

from __future__ import annotations

import functools

from tests.ops.planted_bug import Bug

__all__ = ["RING"]

_EXCHANGE, _WINDOW, _OP = "attention/exchange.cuh", "attention/window.cuh", "ops/ring_attention.cuh"
_SEQUENCES, _PACKED = "attention/sequences.cuh", "attention/packed.cuh"
_Bug = functools.partial(Bug, workload="ring")
_Varlen = functools.partial(Bug, workload="varlen", world="2x2", slow=True)
_Shared = functools.partial(Bug, workload="ring shared", sms=26)
_ByPosition = functools.partial(Bug, workload="ring by position")
_WAITS_FOR_CREDIT = "wait_counted(entered, r, mate_credit_word(r, distance, mate), number - r.depth + 1, reader)"

_OF_CREDITS_ONLY = "      if (storage_.credit[at.index] == kNoCredit) continue;\n      storage_.values.wait_filled(at);\n"

RING = [
    _Bug(
        "a credit is given while an earlier block is still loaded",
        "attention/load.cuh",
        "      storage_.keys.wait_filled(keys);  // of every stage",
        "      // of every stage",
        also=(("      storage_.values.wait_filled(at);\n", _OF_CREDITS_ONLY),),
        workload="ring of longer chunks",
        world="1x4",
        seeds=40,
        sms=6,
        slow=True,
    ),
    _Bug(
        "a slot is written one credit too early",
        _EXCHANGE,
        _WAITS_FOR_CREDIT,
        "wait_counted(entered, r, mate_credit_word(r, distance, mate), number - r.depth, reader)",
    ),
    _Bug(
        "a stale chunk is read",
        _OP,
        "wait_counted(entered, p.ring, block.head, block.map, feeder)",
        "wait_counted(entered, p.ring, block.head, block.map - 1, feeder)",
        also=((">= counted(entered.call(), block.map));", ">= counted(entered.call(), block.map - 1));"),),
        slow=True,
    ),
    _Bug(
        "a chunk is stored where the one before it belongs",
        "comm/copy.cuh",
        "item<Chunks>(stored++)",
        "item<Chunks>(stored == 0 ? stored++ : stored++ - 1)",
    ),
    _Bug(
        "the first chunk of a flow is left out",
        _EXCHANGE,
        "    if (!walk.advance()) return CopiedChunk{};\n",
        "    if ((found == 0 && !walk.advance()) || !walk.advance()) return CopiedChunk{};\n",
        slow=True,
    ),
    _Bug("a stale chunk counts as ready", _OP, ">= counted(entered.call(), block.map));", ">= counted(entered.call(), 1));", slow=True),
    _Bug(
        "a rail's slot is written one credit too early",
        _EXCHANGE,
        "wait_counted(entered, r, rail_credit_word(r, distance), number - r.depth + 1, peer)",
        "wait_counted(entered, r, rail_credit_word(r, distance), number - r.depth, peer)",
        world="4x1",
        slow=True,
    ),
    _Bug(
        "nobody waits for those that forward",
        _EXCHANGE,
        "const uint32_t readers = is_rail ? num_readers(r) : r.ctas,",
        "const uint32_t readers = r.ctas,",
        world="2x2",
        seeds=20,
    ),
    _Bug(
        "a chunk of another node is forwarded before it has come",
        _EXCHANGE,
        "      if (!wait_counted(entered, r, word, number + 1, rail_peer(world, distance))) return;\n",
        world="2x2",
        slow=True,
    ),
    _Bug(
        "progress is read before it is valid",
        _EXCHANGE,
        " || !wait_all(entered, ReadersBegun<Parameters>{p}, readers)) return;",
        ") return;",
        seeds=20,
        slow=True,
    ),
    _Bug(
        "a CTA says too early that it is done with a ring",
        _OP,
        "(source_ends ? at_.item().next_base : number + 1)",
        "at_.item().next_base",
        slow=True,
    ),
    _Bug(
        "a missing proxy fence before a slot is written again",
        _EXCHANGE,
        "    ptx::fence_proxy_async();\n    arrived.post(",
        "    arrived.post(",
        found_as="missing fence.proxy.async",
        world="2x2",
        slow=True,
    ),
    _Bug("keys are put before they are staged", _EXCHANGE, "    copies.copy(staged);\n", world="4x1", slow=True),
    _Bug(
        "what is to be sent is overwritten",
        _EXCHANGE,
        "    if (before != 0 && !wait_put(call, before, peer)) return;\n",
        world="4x1",
        workload="ring deep",
        slow=True,
    ),
    _Bug(
        "the second half of a zigzag rank lies elsewhere",
        _SEQUENCES,
        "(part == 0 ? rank : 2 * kWorldSize - 1 - rank)",
        "(part == 0 ? rank : 2 * kWorldSize - 2 - rank)",
        slow=True,
    ),
    _Bug(
        "progress without a release",
        _WINDOW,
        "  ptx::store_release_gpu(reinterpret_cast<uint64_t*>(word), number);",
        "  *reinterpret_cast<uint64_t*>(word) = number;",
        found_as="data race",
        tsan=True,
        slow=True,
    ),
    # ---- packed sequences
    _Varlen(
        "chunks are sent to a tile of padding, which nobody reads",
        _SEQUENCES,
        "if constexpr (!kPacked) return last_position(s, rank, tiles.first);",
        "return last_position(s, rank, tiles.first);",
        seeds=20,
    ),
    _Varlen("keys behind the end of a sequence are seen", _OP, "(kPacked ? at_.seen : s.part_rows) - row", "s.part_rows - row"),
    _Varlen("values of another sequence are not replaced by zeros", _OP, "kPacked || part + 1 < kParts", "part + 1 < kParts"),
    _Varlen("rows of padding are left as they were", _OP, "if (entered) zero_padding(", "if (entered && p.rows == 0) zero_padding("),
    _Varlen("rows behind the last sequence are left as they were", _PACKED, "row < rows; row += q.r.ctas", "row < 0; row += q.r.ctas"),
    _Varlen("rows of padding are stored as a tile's", _OP, "valid <= row ? 0 : smaller(kQueryRows, valid - row)", "kQueryRows"),
    _Varlen(
        "waves of a sequence are not counted",
        _SEQUENCES,
        "return (r.kv_heads + waves) * kParts * s.chunks_per_part;",
        "return r.kv_heads * kParts * s.chunks_per_part;",
        seeds=20,
    ),
    # ---- keys by position
    _ByPosition(
        "a CTA waits before it says where it begins",
        _OP,
        "    publish(entered);\n    const bool open",
        "    const bool open",
        sms=8,
    ),
    _ByPosition(
        "chunks are forwarded in another order than they are read",
        _EXCHANGE,
        "kCanonical ? (there_and_back(leg, kNodes) + kNodes - world.node) % kNodes : leg",
        "leg % kNodes",
        world="2x2",
        slow=True,
    ),
    _ByPosition(
        "a CTA waits for keys of an item and says no more than where its one before has ended",
        _OP,
        "      raise(ring, base);\n",
        workload="varlen by position",
        world="2x2",
        seeds=20,
        slow=True,
    ),
    # ---- items that CTAs take when they have time for them
    _ByPosition(
        "a CTA that waits does not look whether all items of its segment are taken",
        _OP,
        "      if (ptx::lane_index() == 0) wait_taken(entered, block);\n      publish(entered);\n",
        sms=8,
    ),
    # ---- shares of keys
    _Shared("a share has every block from its first one on", _OP, "at_.turn = shares_of(r) - 1;", "at_.turn = 0;"),
    _Shared(
        "sums of shares are added up before they are left",
        _OP,
        "    return wait_all(entered, PartFlags<RingAttention>{*this, item}, item.parts - 1);",
        "    return true;",
        seeds=20,
        slow=True,
    ),
    _Shared(
        "a share is announced before all lanes have stored it",
        "attention/partial.cuh",
        "  ptx::sync_warp();  // all lanes have stored\n",
        also=(("storage.left.fill(at);\n", "storage.left.fill(at);\n  ptx::sync_warp();\n"),),
        found_as="data race",
        tsan=True,
        slow=True,
    ),
    _Shared(
        "a share waits and does not pass the chunks of which it has nothing",
        _OP,
        "      if (kShares && p.ring.shares > 1 && ring <= until) raise(ring, ring < until ? q.total() : block.map - 1);\n",
        slow=True,
    ),
    _Shared(
        "who adds up waits for shares before it says that it reads no more",
        _OP,
        "    finish(entered);  // the others may read chunks of which this share has nothing\n",
        slow=True,
    ),
]
