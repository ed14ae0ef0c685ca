"""What is planted in the device code that all ops share: flags, entries, stores, barriers, proxies, the end of a call."""

from __future__ import annotations

from tests.ops.planted_bug import Bug
from tests.ops.planted_packets import ORDINARY_ZEROS, ZEROS

__all__ = ["COMMON"]

_ENTERS = " && wait_all(call, EntryFlags{}, call.world.size - 1));"

COMMON = [
    Bug(
        "the epoch is read when other CTAs may have ended the call",
        "tile/gemm.cuh",
        "  if constexpr (kEarly) begin_call_late(call);  // all have read the epoch before the CTA leaves the call\n",
        world="1x1",
        tsan=True,
        also=(("  Pair<Config>::begin();\n", "  Pair<Config>::begin();\n  if constexpr (kEarly) begin_call_late(call);\n"),),
    ),
    Bug(
        "memory is touched while kernels before this one may still run",
        "comm/sync.cuh",
        "  ptx::wait_for_grids();\n",
        found_as="memory is touched before wait_for_grids()",
        world="1x1",
    ),
    # The chunk flag is raised for data that is not there yet, or seen too early.
    Bug("flag before the last data", "comm/copy.cuh", "    ptx::store_wait<0>();\n    while (behind", "    while (behind"),
    Bug("flag before the data", "comm/copy.cuh", "        ptx::store_wait<Behind>();\n"),
    Bug(
        "tiles do not wait for chunks",
        "tile/schedule.cuh",
        "          if (ok) ok = op.wait_inputs(*entry, c, part);\n",
        found_as="missing fence.proxy.async",
    ),
    Bug(
        "only the first part of a tile is waited for",
        "tile/schedule.cuh",
        "      if (op.waits(c, part)) {",
        "      if (op.waits(c, part) && part == 0) {",
        workload="parts",
    ),
    Bug(
        "forwarded before it has come",
        "ops/allgather_gemm.cuh",
        "    if (!wait_chunk(entered, p, pushed_source(p, item), pushed_chunk(p, item))) return;\n",
        world="2x2",
    ),
    Bug(
        "a warp's flag before all lanes have stored",
        "comm/copy.cuh",
        "  ptx::sync_warp();  // all lanes have stored\n",
        workload="warps short",
    ),
    Bug(
        "the own shard is not kept where tiles span shards",
        "ops/allgather_gemm.cuh",
        "    if (c.is_kept) ptx::bulk_store(shared_heap(entered, p.world.local_rank) + c.to + offset, smem, bytes);\n",
        workload="span",
    ),
    Bug(
        "a tile of the own shard reads its array from the beginning of the plane",
        "ops/allgather_gemm.cuh",
        "return is_own(c) ? row - own_begin(c) : row;",
        "return row;",
        workload="span high",
    ),
    Bug(
        "rows of the own shard's last tile, of which others are beside, are not kept",
        "gather/layout.cuh",
        "return begin < first || (end < p.rows ? end : p.rows) > last;",
        "return begin < first;",
        workload="span high",
    ),
    Bug(
        "rows of the own shard's first tile, of which others are beside, are not kept",
        "gather/layout.cuh",
        "return begin < first || (end < p.rows ? end : p.rows) > last;",
        "return (end < p.rows ? end : p.rows) > last;",
        workload="span high warps",
    ),
    Bug(
        "chunks that travel after those of the last rows begin with the second",
        "gather/layout.cuh",
        "block < num_blocks(p) ? block : block - num_blocks(p)",
        "block < num_blocks(p) ? block : block + 1 - num_blocks(p)",
        workload="span high warps",
    ),
    Bug(
        "a smaller first piece counts as a whole one",
        "comm/copy.cuh",
        "at.offset += most_bytes(chunks, at);",
        "at.offset += chunks.piece_bytes();",
        workload="span high",
    ),
    Bug(
        "rows of tiles of other shards begin where no tile has rows of two",
        "ops/allgather_gemm.cuh",
        "return begin_row(shard_at(1 + index - row * others)) + row;",
        "return first_row(shard_at(1 + index - row * others)) + row;",
        workload="span high",
    ),
    Bug(
        "a tile waits for the first of the shards that it covers",
        "ops/allgather_gemm.cuh",
        "last = block_of(c.plane, end - 1);",
        "last = (c.plane * span() + begin / p.rows + 1) * num_blocks(p) - 1;",
        workload="span warps",
    ),
    Bug(
        "every share is of all steps from the first on",
        "ops/allgather_gemm.cuh",
        "return c.is_share ? shares().first_step(steps_k(), c.share) : 0;",
        "return 0;",
        workload="shares",
    ),
    Bug("one look is all that is added up", "tile/shares.cuh", "first = 0; first < shares;", "first = 0; first < 1;", workload="shares"),
    Bug(
        "a slice of a sum ends a packet early",
        "tile/shares.cuh",
        "end = first_packet(c.share + 1);",
        "end = first_packet(c.share + 1) - (c.share == 2);",
        workload="shares",
        found_as="wrong",
    ),
    Bug(
        "sums come before the shares that they wait for",
        "tile/shares.cuh",
        "    is_share = shares > 1, is_sum",
        "    if (shares > 1) number = 2 * num_tiles * shares - 1 - number;\n    is_share = shares > 1, is_sum",
        workload="shares",
        found_as="deadlock",
        sms=2,
    ),
    Bug(
        "shares and sums are dealt one by one",
        "tile/schedule.cuh",
        "tile = last_ + ptx::cta_count() / kCluster;",
        "tile = last_ + 1;",
        workload="tagged packets shares",
    ),
    Bug(
        "a lane may miss that a share is wanted",
        "tile/schedule.cuh",
        "      ptx::sync_warp();  // all lanes have seen that a tile is wanted, before the next one may be\n",
        workload="tagged packets shares",
        found_as="deadlock",
        seeds=40,
    ),
    # More stages where rows are few.
    Bug(
        "a warpgroup without rows keeps the stages",
        "tile/multiply.cuh",
        "    if (reports) storage.stages.take(stage);\n",
        workload="shares",
        found_as="deadlock",
    ),
    Bug(
        "a lane gives back a stage that others have not looked at",
        "tile/multiply.cuh",
        "    ptx::sync_warp();  // all lanes have looked: the loading thread may be a lap ahead of one that has not\n",
        workload="tagged packets long",
    ),
    Bug(
        "tiles of 128 rows have low stages", "tile/op.cuh", "p.load_rows <= kBlockRows", "p.load_rows <= 2 * kBlockRows", workload="shares"
    ),
    Bug(
        "more stages are as large as few",
        "tile/storage.cuh",
        "return is_low_ ? Shape::kBytesA / 2 : Shape::kBytesA;",
        "return Shape::kBytesA;",
        workload="shares",
    ),
    # What a kernel works out step by step, or looks up, since sizes come with the call.
    Bug(
        "the thread that copies stays in its row of a part",
        "ops/allgather_gemm.cuh",
        "c.unit -= part_bytes(p) / kUnitBytes, c.row += p.piece_rows;",
        "c.unit -= part_bytes(p) / kUnitBytes;",
        workload="parts",
    ),
    Bug(
        "a warp that pushes goes on behind its part of a row",
        "gather/layout.cuh",
        "at += gap, inside -= run;",
        "inside -= run;",
        workload="warps parts",
    ),
    Bug(
        "half a tile is loaded in boxes of a whole one",
        "ops/allgather_gemm.cuh",
        "c.slice != 0 ? &p.b_slice_map : &p.b_map;",
        "c.slice != 0 ? &p.b_map : &p.b_map;",
        workload="halves",
    ),
    # Entering a call.
    *(
        Bug(
            f"nobody waits for entries: {workload} on {world}",
            "comm/sync.cuh",
            _ENTERS,
            ");",
            world=world,
            workload=workload,
            seeds=40,
            first=first,
        )
        for world, workload, first in (
            ("1x2", "short", 6),
            ("1x2", "warps short", 1),
            ("1x2", "reduce short", 1),
            ("1x8", "packets short in one step", 0),
        )
    ),
    Bug(
        "the thread that sends does not wait for entries",
        "comm/sync.cuh",
        "ok = EntryFlags{}.wait(call, i);",
        "ok = true;",
        world="4x1",
        workload="short",
        seeds=40,
        first=2,
    ),
    Bug(
        "only the owner of the memory, and its rail, are waited for",
        "comm/sync.cuh",
        "(const Call& call, uint32_t i) const { return wait_entered(call, (call.world.rank + 1 + i) % call.world.size); }",
        "(const Call& call, uint32_t i) const {\n"
        "    const uint32_t peer = (call.world.rank + 1 + i) % call.world.size, per_node = call.world.ranks_per_node;\n"
        "    const bool near = peer / per_node == call.world.node || peer % per_node == call.world.local_rank;\n"
        "    return !near || wait_entered(call, peer);\n"
        "  }",
        world="2x2",
        workload="all-reduce, then gather",
        seeds=40,
        first=9,
        sms=8,
    ),
    Bug(
        "the entry of a rail peer is handed on before it has come",
        "comm/ring.cuh",
        "if (!wait_word(call, flag, entered, 0, Awaited{abi::kFlagEntry, peer, peer}, world.entry_timeout_ns)) return;",
        "(void)flag, (void)entered;",
        also=(("ptx::load_acquire_sys(flag));", "entry_value(call.epoch(), world.check));"),),
        world="2x2",
        workload="all-reduce, then gather",
        seeds=40,
        first=9,
        sms=8,
    ),
    Bug(
        "a shard is staged in the gather buffer, before others have entered",
        "ops/allgather_gemm.cuh",
        "own_copy(p, index, p.send_offset, KeptRows{0, p.rows}); }",
        "own_copy(p, index, shard_offset(p, p.world.rank), KeptRows{0, p.rows}); }",
        also=(("src = p.send_offset + offset,", "src = shard_offset(p, p.world.rank) + offset,"),),
        world="2x2",
        workload="all-reduce, then gather from ordinary memory",
        seeds=40,
        first=21,
    ),
    Bug(
        "entries have the deadline of other waits",
        "comm/sync.cuh",
        "(handed_on ? kSecondHand : 1) * world.entry_timeout_ns);",
        "(handed_on ? kSecondHand : 1) * world.timeout_ns);",
        found_as="TimeoutError",
        world="2x2",
        workload="late",
    ),
    Bug(
        "the call ends before its puts",
        "comm/ring.cuh",
        "  if (last_put != 0) wait_put(call, last_put, last_peer);",
        world="4x1",
        workload="slow",
    ),
    # Bulk stores.
    Bug(
        "a block is overwritten while it is stored",
        "tile/epilogue.cuh",
        "      ptx::store_wait_read<Shape::kResultBuffers - 1>();  // the oldest has been read\n",
        workload="reduce exactly",  # more blocks than buffers
    ),
    Bug(
        "a tile's last block is overwritten while it is stored",
        "tile/epilogue.cuh",
        "    ptx::store_wait_read<0>();\n    while (on_their_way",
        "    while (on_their_way",
    ),
    Bug("a piece is overwritten", "comm/copy.cuh", "        ptx::store_wait_read<kPieceStages - kPiecesAhead>();\n", world="1x4"),
    Bug(
        "nobody waits for the result's stores",
        "tile/epilogue.cuh",
        "    ptx::store_wait_read<0>();\n    while (on_their_way > 0) give_back();\n  }\n",
        "    while (on_their_way > 0) give_back();\n  }\n",
        found_as="bulk stores in flight",
    ),
    Bug(
        "one buffer for results",
        "tile/epilogue.cuh",
        "    return storage.result[warpgroup][at.index];",
        "    return storage.result[warpgroup][0];",
    ),
    # Barriers.
    Bug(
        "a stage is never given back",
        "tile/multiply.cuh",
        "    if (previous != kStop && reports) give_back(previous);\n",
        found_as="deadlock",
    ),
    Bug("a stage is given back before it is read", "tile/multiply.cuh", "    ptx::wgmma_wait<1>(d);\n"),
    Bug(
        "nobody waits for a stage", "tile/multiply.cuh", "    storage.stages.wait_filled(stage);\n    multiply_stage", "    multiply_stage"
    ),
    Bug(
        "a block is written while the last one is stored",
        "tile/epilogue.cuh",
        "    storage.blocks[warpgroup].wait_taken(at);\n",
    ),
    Bug(
        "a block is stored before it is written",
        "tile/epilogue.cuh",
        "        storage.blocks[w].wait_filled(at);\n",
        found_as="missing fence.proxy.async",
    ),
    Bug(
        "a block is stored before all lanes have written it",
        "tile/epilogue.cuh",
        "    ptx::sync_warp();\n    if (lane == 0) storage.blocks[warpgroup].fill",
        "    if (lane == 0) storage.blocks[warpgroup].fill",
    ),
    Bug(
        "a block is never given back",
        "tile/epilogue.cuh",
        "storage.blocks[w].take(stored);",
        ";",
        found_as="deadlock",
    ),
    Bug(
        "a tile's slot is given back too early",
        "tile/storage.cuh",
        "  if constexpr (By == Reader::kWarp) ptx::sync_warp();",
        workload="chunks",  # of so few k steps that a warp can be a tile behind
        seeds=40,
        first=4,
    ),
    Bug("after few steps no tile is asked for", "tile/load.cuh", "is_last && steps <= kAhead)", "false)", found_as="deadlock"),
    Bug(
        "after many steps no tile is asked for",
        "tile/load.cuh",
        "      if (step == ask_at) ptx::mbarrier_arrive(&storage.tile_wanted);\n",
        workload="long",
        found_as="deadlock",
    ),
    Bug(
        "no tile is asked for after a sum",
        "tile/load.cuh",
        "steps == 0 ? part == 0 : is_last",
        "steps != 0 && is_last",
        found_as="deadlock",
        world="2x2",
        workload="reduce",
    ),
    Bug(
        "a CTA begins before its barriers are ready",
        "tile/gemm.cuh",
        "  Pair<Config>::begin();\n  if",
        "  if",
        found_as="not been initialized",
    ),
    Bug(
        "the first tile is loaded before its inputs are there",
        "tile/load.cuh",
        "op.parts(c) == 0 || (op.waits(c, 0) && !Op::kGathers) ? kStop",
        "op.parts(c) == 0 ? kStop",
        workload="span",
    ),
    Bug("the first item is taken twice", "tile/load.cuh", "    if (ahead) take_item<Reader::kThread>(storage, queue);\n"),
    # Proxies.
    Bug(
        "no proxy fence before tiles are loaded",
        "tile/load.cuh",
        "if (op.waits(c, part)) ptx::fence_proxy_async();",
        found_as="missing fence.proxy.async",
    ),
    Bug(
        "no proxy fence before forwarding",
        "ops/allgather_gemm.cuh",
        "    ptx::fence_proxy_async();  // here, not in the thread that copies: it would wait for its copies\n",
        found_as="missing fence.proxy.async",
        world="2x2",
    ),
    Bug(
        "no proxy fence before a result is stored",
        "tile/epilogue.cuh",
        "    ptx::fence_proxy_async_shared();\n",
        found_as="missing fence.proxy.async",
    ),
    Bug(
        "no proxy fence when a communication CTA joins compute",
        "comm/copy.cuh",
        "ptx::fence_proxy_async_shared(); }  // shared memory changes hands",
        "}  // shared memory changes hands",
        missed="nothing goes wrong: a bulk copy that has completed has executed this fence itself (PTX ISA, async proxy)",
    ),
    # The end of a call.
    Bug("the tile counter is not reset", "comm/sync.cuh", "    control->tile_counter = 0;\n"),
    Bug("the epoch does not advance", "comm/sync.cuh", "    control->epoch = call.epoch();\n"),
    # What only ThreadSanitizer sees: on this host's processor every store is a release.
    Bug(
        "a relaxed flag",
        "cpu/ptx.cuh",
        "  __atomic_store_n(p, v, __ATOMIC_RELEASE);\n",
        "  __atomic_store_n(p, v, __ATOMIC_RELAXED);\n",
        "data race",
        tsan=True,
    ),
    Bug(
        "a relaxed wait",
        "cpu/ptx.cuh",
        "  const T v = __atomic_load_n(p, __ATOMIC_ACQUIRE);\n",
        "  const T v = __atomic_load_n(p, __ATOMIC_RELAXED);\n",
        "data race",
        tsan=True,
        slow=True,
    ),
    Bug(
        "a lane goes ahead of another lane's acquire",
        "comm/sync.cuh",
        "  ptx::sync_warp();  // a vote orders no memory\n",
        found_as="data race",
        workload="warps short",
        tsan=True,
        slow=True,
    ),
    Bug(
        "ordinary stores of zeros",
        "comm/packet.cuh",
        ZEROS,
        ORDINARY_ZEROS,
        found_as="data race",
        workload="packets",
        tsan=True,
    ),
    Bug("a flag's slot is given back too early", "comm/mailbox.cuh", "      ptx::sync_warp();\n", found_as="data race", tsan=True),
    # A lane speaks for its warp before all lanes have looked: in which schedule one is overtaken does not matter.
    Bug(
        "a lane may miss that a tile is wanted",
        "tile/schedule.cuh",
        "      ptx::sync_warp();  // all lanes have seen that a tile is wanted, before the next one may be\n",
        found_as="data race",
        tsan=True,
    ),
    Bug(
        "a lane may miss that a stage was filled",
        "tile/multiply.cuh",
        "    ptx::sync_warp();  // all lanes have looked: the loading thread may be a lap ahead of one that has not\n",
        found_as="data race",
        workload="tagged packets long",
        tsan=True,
    ),
]
