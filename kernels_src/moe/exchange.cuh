// What a rank tells all others before their tokens are placed: its routing, and, where its own node reads them, its rows.
#pragma once
#include "comm/copy.cuh"
#include "comm/ring.cuh"
#include "moe/routing.cuh"

namespace mkernel {

// One of the ids that a rank gives, and, as kernels use it, an int32, -1 (kNone) where it is not routed. An int64 that has no int32 becomes the nearest.
struct GivenId {
  uint32_t low, high;
};
MK_DEVICE GivenId load_id(const RoutingArguments& r, uint64_t i) {
  const char* ids = reinterpret_cast<const char*>(r.ids) + i * r.id_bytes;
  return GivenId{ptx::load_input_word(ids), ptx::load_input_word(ids + r.id_bytes - 4)};
}
MK_DEVICE uint32_t as_word(const RoutingArguments& r, const GivenId& id) {
  const uint32_t sign = id.low >> 31 != 0 ? kNone : 0;
  return id.high == sign || r.id_bytes == 4 ? id.low : id.high >> 31 != 0 ? 0x80000000u : 0x7fffffffu;
}

// Writes this rank's record into its heap. All threads of one CTA; then it is announced. Of a rank with too many tokens only the header is needed.
MK_DEVICE void write_record(const Entered& entered, const RoutingArguments& r) {
  const abi::World& world = entered.world();
  char* record = shared_heap(entered, world.local_rank) + record_offset(r, world.node);
  if (ptx::thread_index() == 0) {
    const ptx::Words header{{r.tokens, 0, static_cast<uint32_t>(r.x_offset), static_cast<uint32_t>(r.x_offset >> 32)}};
    ptx::store_global(record, header);
  }
  const uint32_t ids = r.tokens <= r.max_tokens ? r.tokens * kTopK : 0;
  constexpr uint32_t kAtOnce = 8;  // loads of a thread that are under way
#pragma unroll 1
  for (uint32_t begin = ptx::thread_index(); begin < ids; begin += kAtOnce * kGemmThreads) {
    const auto each = [&](const auto& visit) {
#pragma unroll
      for (uint32_t n = 0; n < kAtOnce; ++n) {
        if (begin + n * kGemmThreads < ids) visit(n, begin + n * kGemmThreads);
      }
    };
    GivenId id[kAtOnce];
    uint32_t weight[kAtOnce];
    each([&](uint32_t n, uint32_t i) {
      id[n] = load_id(r, i);
      if constexpr (kWeighted) weight[n] = ptx::load_input_word(reinterpret_cast<const char*>(r.weights) + uint64_t(i) * 4);
    });
    each([&](uint32_t n, uint32_t i) {
      ptx::store_word(record + sizeof(Header) + i * 4, as_word(r, id[n]));
      if constexpr (kWeighted) ptx::store_word(record + sizeof(Header) + ids_bytes(r) + i * 4, weight[n]);
    });
  }
}

// Tells the node and the rail peers of the record, which is written. One warp; returns what its first lane must wait for before the call ends
// (wait_put), 0 on one node.
template <class Parameters>
MK_DEVICE uint64_t announce_record(const Entered& entered, const Parameters& p) {
  const abi::World& world = p.world;
  raise_flag(entered, p, world.rank, 0);
  uint64_t ticket = 0;
  if (kNodes > 1 && ptx::lane_index() == 0) {
    const uint64_t at = record_offset(p.routing, world.node);
#pragma unroll 1
    for (uint32_t distance = 1; distance < kNodes; ++distance) {
      const uint32_t peer = rail_peer(world, distance);
      ticket = issue_put(entered, Put{1, peer, at, at, record_bytes(p.routing), flag_offset(p, world.rank), entered.call().epoch()});
    }
  }
  return ticket;
}

// Tells the node of the records that the rail peers have put here. One warp.
template <class Parameters>
MK_DEVICE bool forward_records(const Entered& entered, const Parameters& p) {
  bool ok = true;
#pragma unroll 1
  for (uint32_t distance = 1; ok && distance < kNodes; ++distance) {
    const uint32_t rank = rail_peer(p.world, distance);
    ok = ptx::all_of_warp(ptx::lane_index() != 0 || wait_flag(entered, p, rank, rank));
    ptx::sync_warp();
    if (ok) raise_flag(entered, p, rank, 1);
  }
  return ok;
}

template <class Parameters>
struct RecordFlags {
  const Parameters& p;
  MK_DEVICE bool wait(const Entered& entered, uint32_t rank) const { return wait_flag(entered, p, rank, raiser(p.world, rank)); }
};

// Copies this rank's rows to where its node reads them, unless they are on the heap. All threads of all CTAs.
template <class Parameters>
MK_DEVICE void stage_rows(const Entered& entered, const Parameters& p) {
  const RoutingArguments& r = p.routing;
  if (kR == 1 || r.x_offset != kStaged || r.tokens > r.max_tokens) return;
  const abi::World& world = p.world;
  char* staged = shared_heap(entered, world.local_rank) + r.staged_offset;
  const uint32_t chunks = (r.tokens + kStagedRows - 1) / kStagedRows;
#pragma unroll 1
  for (uint32_t chunk = ptx::cta_index(); chunk < chunks; chunk += ptx::cta_count()) {
    const uint32_t left = r.tokens - chunk * kStagedRows, rows = left < kStagedRows ? left : kStagedRows;
#pragma unroll 1
    for (uint32_t row = ptx::warp_index(); row < rows; row += kRoutingWarps) {
      const uint64_t token = chunk * kStagedRows + row;
      const char* from = reinterpret_cast<const char*>(r.x) + token * r.row_bytes + ptx::lane_index() * kWarpUnit;
      char* to = staged + token * r.slot_bytes;
      const auto load = [&] {
        const ptx::Words words = ptx::load_input(from);
        from += kWarpStride;
        return words;
      };
      copy_by_warp(r.row_bytes, load, [&](uint32_t offset, const ptx::Words& words) { ptx::store_global(to + offset, words); });
    }
    ptx::sync_cta();
    if (ptx::warp_index() == 0) raise_flag(entered, p, chunk_flag(r, world.rank, chunk), 1);
  }
}

}  // namespace mkernel
