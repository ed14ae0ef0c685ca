// Thread 0 copies drawn chunks in two calls by one ring; a thread of warp 1 says when each is complete. What is announced is checked in that moment.
#pragma once
#include "comm/copy.cuh"
#include "comm/handshake.cuh"

namespace mkernel {

struct Entry {
  uint64_t from, to;  // bytes from the beginning of the source, and of each destination
  uint32_t bytes, skew;
};
struct alignas(64) Parameters {
  uint64_t entries, from, to, apart;  // `apart`: bytes from one destination to the next
  uint64_t first, all;                // chunks of the first copy, and of both
  uint64_t complete;                  // so many chunks become so; waiting for another one fails
  uint64_t may_store;                 // whether the second copy may
  uint64_t piece_bytes, destinations;
  uint64_t log;  // how many are announced, what was wrong, and which they are
  uint64_t reserved[5];
};
enum Wrong : uint32_t { kEarly = 1, kPlace = 2 };

struct Storage {
  CopyPieces pieces;
  CopyBarriers barriers;
  Handshake<4> complete;
};

struct DrawnChunks {
  struct Item {
    uint32_t bytes, skew, index, at;
    const char* from;
    char* to;
  };
  const Parameters& p;
  Storage& storage;
  Handshake<4>::Position& coming;
  uint32_t begin, found;
  bool more = true;

  MK_DEVICE uint64_t* log() const { return reinterpret_cast<uint64_t*>(p.log); }
  MK_DEVICE uint32_t first() const { return begin; }
  MK_DEVICE uint32_t next(uint32_t index) const { return index + 1; }
  MK_DEVICE uint32_t end() const { return found + (more ? 1 : 0); }
  MK_DEVICE Item item(uint32_t index) {
    if (index == found) {
      more = false;
      return Item{};
    }
    const Entry& e = reinterpret_cast<const Entry*>(p.entries)[index];
    return Item{e.bytes, e.skew, index, 0, reinterpret_cast<const char*>(p.from) + e.from, reinterpret_cast<char*>(p.to) + e.to};
  }
  MK_DEVICE bool ready(const Item& item) {
    if (item.index >= p.complete || !storage.complete.is_filled(coming)) return false;
    storage.complete.take(coming);
    coming.advance();
    return true;
  }
  MK_DEVICE bool wait(const Item& item) {
    if (item.index < p.complete) storage.complete.wait_filled(coming);
    return item.index < p.complete;
  }
  MK_DEVICE uint32_t piece_bytes() const { return static_cast<uint32_t>(p.piece_bytes); }
  MK_DEVICE uint32_t skew(const Item& item) const { return item.skew; }
  MK_DEVICE void next_piece(Item& item) const { item.at += piece_bytes() - (item.at == 0 ? item.skew : 0); }
  MK_DEVICE uint32_t loaded(const Item&, uint32_t bytes) const { return bytes; }
  MK_DEVICE void load(const Item& item, uint32_t offset, void* smem, uint32_t bytes, uint64_t* bar) const {
    if (item.at != offset) log()[1] |= kPlace;
    ptx::bulk_load(smem, item.from + offset, bytes, bar);
  }
  MK_DEVICE void store(const Item& item, uint32_t offset, const char* smem, uint32_t bytes) const {
    for (uint32_t i = 0; i < p.destinations; ++i) ptx::bulk_store(item.to + i * p.apart + offset, smem, bytes);
  }
  MK_DEVICE void announce(const Item& item) const {
    for (uint32_t i = 0; i < p.destinations; ++i) {
      for (uint32_t at = 0; at < item.bytes; ++at) {
        if (item.to[i * p.apart + at] != item.from[at]) log()[1] |= kEarly;
      }
    }
    log()[2 + log()[0]++] = item.index;
  }
};

MK_KERNEL(Config::kThreads)(MK_GRID_CONSTANT Parameters p) {
  Storage& s = *reinterpret_cast<Storage*>(ptx::shared_memory());
  if (ptx::thread_index() == 0) {
    s.complete.init(1, 1);
    ptx::mbarrier_init_fence();
  }
  ptx::sync_cta();
  Handshake<4>::Position at;
  if (ptx::thread_index() == 32) {
    for (uint32_t i = 0; i < p.complete; ++i, at.advance()) {
      s.complete.wait_taken(at);
      s.complete.fill(at);
    }
  } else if (ptx::thread_index() == 0) {
    CopyRing ring(s.pieces, s.barriers);
    DrawnChunks first{p, s, at, 0, static_cast<uint32_t>(p.first)};
    ring.copy<Config::kBehind>(first);
    if (first.more || p.complete < p.first) return;  // it has failed
    DrawnChunks second{p, s, at, first.found, static_cast<uint32_t>(p.all)};
    ring.copy<Config::kBehind>(second, [&] { return p.may_store != 0; });
  }
}

}  // namespace mkernel
