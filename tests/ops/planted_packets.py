"""What is planted in the packets in which an allgather_gemm's shards travel (kernels_src/comm/shard_packets.cuh)."""

from __future__ import annotations

from tests.ops.planted_bug import Bug

__all__ = ["ORDINARY_ZEROS", "PACKETS", "ZEROS"]

_FILE = "comm/shard_packets.cuh"
_COUNTS = "  if (ptx::thread_index() == kGatherFirst) ptx::add_release(&control_block(call.world)->gathered, 1);\n"
_SHORT, _REFUSED = "gather packets short", "packets after a refused call"
_TAGGED, _TAGGED_FILE, _TAKEN = "tagged packets", "comm/tagged_packets.cuh", "tile/taken.cuh"

_SETTLED = "    ptx::barrier_sync(kTakenBarrier, kConsumerThreads);  // nobody multiplies what the stages held\n"
_STORED = "    ptx::barrier_sync(kTakenBarrier, kConsumerThreads);  // all have stored\n"
ZEROS = "ptx::store_packet_if((wanted >> i & 1) != 0, at(i), ptx::Words{});"  # of comm/packet.cuh
ORDINARY_ZEROS = "if ((wanted >> i & 1) != 0) ptx::store_global(at(i), ptx::Words{});"

PACKETS = [
    Bug(
        "packets of all calls go to one half",
        "comm/sync.cuh",
        "(call.epoch() & 1) * abi::kAheadBytes",
        "0",
        workload="packets of late CTAs",
    ),
    Bug("packets are left where they were taken", "comm/packet.cuh", ZEROS, ";", workload=_SHORT),
    Bug(
        "a pair of NaNs with all bits set is sent as it is",
        _FILE,
        "values == 0xffffffffu ? 0x80008000u : ~values",
        "~values",
        workload="nans in packets",
        found_as="TimeoutError",
    ),
    Bug("what was gathered is not forgotten", "comm/sync.cuh", "    control->gathered = 0;\n", workload=_SHORT),
    Bug(
        "a CTA has gathered its part when one thread has",
        _FILE,
        "  ptx::barrier_sync(kGatherBarrier, kGatherThreads);  // all have stored\n",
        workload="gather packets",
    ),
    Bug(
        "a CTA has gathered its part before it has",
        _FILE,
        "  shards.take(*entered, own, looked);\n",
        f"{_COUNTS}  shards.take(*entered, own, looked);\n",
        also=((f"{_COUNTS}}}", "}"),),
        workload=_SHORT,
    ),
    Bug(
        "tiles begin before all is gathered",
        "ops/allgather_gemm.cuh",
        "if constexpr (kPackets && !kTagged) return wait_gathered(entered, shards());",
        "if constexpr (kPackets && !kTagged) return true;",
        workload="gather packets",
    ),
    Bug(
        "a lane sends what it sends first, and no more",
        _FILE,
        "at < bytes; at += kRound * stride()) send_round(at, read(at), send);",
        "at < bytes; at += kRound * stride()) {}",
        workload="gather packets",
        found_as="(packets of the shards) of rank",
    ),
    Bug(
        "every other unit is not taken",
        _FILE,
        "bits |= uint32_t{at + i / kPeers * stride() < bytes} << i;",
        "bits |= uint32_t{at + i / kPeers * stride() < bytes && i / kPeers % 2 == 0} << i;",
        workload="gather packets",
    ),
    Bug(
        "the own shard is not kept",
        _FILE,
        "      if (at < bytes) ptx::store_global(gathered(entered, world.local_rank, at), own.words[i]);\n",
        workload=_SHORT,
    ),
    Bug(
        "the own shard is kept as far as it was read first",
        _FILE,
        "      ptx::store_global(gathered(entered, world.local_rank, at), ptx::load_input(shard + at));\n",
        workload="gather packets",
    ),
    Bug("a skipped call sends", _FILE, " || is_skipped(call)) return;", ") return;", workload=_REFUSED),
    Bug(
        "what has been looked at before entering is taken to have come",
        "comm/packet.cuh",
        "missing = look_at_packets(v, missing, at);\n  return missing;",
        "missing = look_at_packets(v, missing, at);\n  return 0;",
        workload="gather packets",
    ),
    Bug(
        "packets that have not been looked at are taken to have come",
        _FILE,
        "at += kUnits * stride(), missing = wanted(at)) {",
        "at += kUnits * stride(), missing = 0) {",
        workload="gather packets",
    ),
    Bug(
        "B of the first share is loaded for every share",
        "tile/load.cuh",
        "(op.first_step(c) + step) * Shape::kBlockK, op.b_plane(c)",
        "step * Shape::kBlockK, op.b_plane(c)",
        workload="gather packets shares",
    ),
    Bug(
        "B of the first tile is loaded twice",
        "tile/load.cuh",
        "      if (Op::kGathers && has_b != 0) {\n",
        "      if (false) {\n",
        workload=_SHORT,
    ),
    Bug(
        "a call that fails leaves loads on their way",
        "tile/load.cuh",
        "      if (has_b != 0) fill_ahead(op, storage, known_place<Config, Op>(first), has_b);\n",
        workload=_REFUSED,
        found_as="a TMA load into it is in flight",
    ),
    Bug(
        "of a call that fails one CTA of a row of a cluster loads no rows of A",
        "tile/load.cuh",
        "rows != 0 && i < stages;",
        "rows != 0 && (GemmShape<Config>::kClusterN == 1 || Pair<Config>::column() == 0) && i < stages;",
        workload=f"{_REFUSED}, fours",
        found_as="deadlock",
    ),
    Bug(
        "the other CTA of a pair enters after the first tile only",
        "tile/schedule.cuh",
        "  bool entered = Op::kGathers;\n",
        "  bool entered = false;\n",
        workload="gather packets pairs",
        found_as="TimeoutError",
    ),
    # Of tagged packets.
    Bug(
        "tagged packets of all calls go to one half",
        "comm/sync.cuh",
        "(call.epoch() & 1) * abi::kTaggedBytes",
        "0",
        workload="packets of late CTAs, tagged",
    ),
    Bug(
        "any tag will do",
        _TAGGED_FILE,
        "(words[i].word[1] == tag) & (words[i].word[3] == tag)",
        "(words[i].word[1] != 0)",
        workload=_TAGGED,
    ),
    Bug("a packet has come when its first pair has", _TAGGED_FILE, " & (words[i].word[3] == tag);", ";", workload=_TAGGED),
    Bug(
        "a skipped call sends tagged packets",
        _TAGGED_FILE,
        "    if (is_skipped(call)) return;\n",
        workload="packets after a refused call, tagged",
        seeds=40,
    ),
    Bug(
        "tagged packets that were looked at before entering are taken to have come",
        _TAGGED_FILE,
        "if (missing == 0 || entries.is_open()) return missing == 0;",
        "if (missing == 0 || entries.is_open()) return true;",
        workload=_TAGGED,
    ),
    Bug(
        "later rounds have come with the first one",
        "tile/multiply.cuh",
        "    has_come = false;\n",
        workload="tagged packets long",
        seeds=40,
        first=9,
    ),
    Bug("a round is stored while another one is multiplied", "tile/multiply.cuh", _SETTLED, workload="tagged packets long", seeds=40),
    Bug("a round is multiplied before all have stored it", "tile/multiply.cuh", _STORED, workload=_TAGGED),
    Bug(
        "a round is multiplied without a fence",
        "tile/multiply.cuh",
        f"    ptx::fence_proxy_async_shared();\n{_STORED}",
        _STORED,
        workload=_TAGGED,
        found_as="missing fence.proxy.async",
    ),
    Bug(
        "what lies behind the end of K is what lay there",
        _TAKEN,
        "      if (!is_there(i)) continue;\n      const uint32_t place",
        "      if (!is_there(i) || !has_values(i)) continue;\n      const uint32_t place",
        workload=_TAGGED,
    ),
    Bug("rows are not swizzled", _TAKEN, "(chunk_ ^ row(i) % 8)", "chunk_", workload=_TAGGED),
    Bug("all rounds begin with the first stage", _TAKEN, "place = stage + step(i)", "place = step(i)", workload=_TAGGED),
    Bug(
        "every share begins with the first k step",
        "tile/multiply.cuh",
        "const uint32_t first = op.first_step(c);",
        "const uint32_t first = 0;",
        workload="tagged packets shares",
    ),
    Bug("the own rows are those of rank 0", _TAGGED_FILE, "TaggedRow{at - own, true}", "TaggedRow{at, true}", workload=_TAGGED),
    Bug("the last row of a tile is left out", _TAKEN, "uint32_t{row(i) < rows} << i", "uint32_t{row(i) + 1 < rows} << i", workload=_TAGGED),
    # What only ThreadSanitizer sees.
    Bug(
        "zeros are left by ordinary stores",
        "comm/packet.cuh",
        ZEROS,
        ORDINARY_ZEROS,
        found_as="data race",
        workload=_SHORT,
        tsan=True,
    ),
]
