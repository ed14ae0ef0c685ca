// What gemm_allreduce and gemm_reduce_scatter of few rows share, inside one node: values travel in packets (comm/packet.cuh).
//
// A word is a pair of values with all bits inverted: 0, which no packet holds, would be two NaNs with all bits set, which ptx::pack never makes.
//
// The threads that multiplied a tile exchange it themselves, each thread its own values. Where CTAs share K of a tile (tile/shares.cuh), the threads
// that have added up a slice of its columns exchange that slice.
//
// All ranks take tiles, or slices of them, in the same order, and each is sent before anything of it is waited for: nothing waits in a circle.
#pragma once
#include "reduce/layout.cuh"
#include "tile/gemm.cuh"
#include "tile/shares.cuh"

namespace mkernel {

static_assert(kNodes == 1 && kWorldSize > 1, "ranks of one node");
static_assert(Config::kIntraComm + Config::kInterSend + Config::kInterReduce == 0, "no such roles");
static_assert(Config::kBlockN <= 128, "registers");

// Packets lie in a range of the signal segment that holds nothing else: between calls it is all zeros, whatever plan comes next.
// p.partial_offset is its start, p.tiles the number of all tiles. A thread has two rows, of a whole tile or of a slice, and kPackets packets of each;
// of a slice which has fewer columns than one of two shares, the last are left out.
using KShares = Shares<Config>;
constexpr uint32_t kRowWords = Config::kBlockN / 8;  // pairs of values of one row of a tile
constexpr uint32_t kItemWords = KShares::kMay ? (kRowWords + 1) / 2 : kRowWords;
constexpr uint32_t kPackets = (kItemWords + kPacketWords - 1) / kPacketWords;
constexpr uint32_t kValues = 2 * 2 * kPacketWords * kPackets;  // of a thread
constexpr uint32_t kSharesTogether =
    Config::kBlockN <= 64 ? 4 : 2;  // whose packets a thread looks at together: there are registers for no more
static_assert(KShares::kMay || kRowWords % kPacketWords == 0, "whole packets");

// What a thread exchanges: a whole tile's values, or those of a slice.
struct Item {
  uint32_t number;   // of the tile, or of the slice among those of all tiles
  uint32_t column;   // of tiles,
  uint32_t slice;    // and which of that tile
  uint32_t warp;     // of the consumers
  uint32_t row;      // of all rows of the product, that of the thread's first row; the other one is 8 further
  uint32_t packets;  // of each row that it has
};
// Where a thread's packets of one row lie: `next` packets apart.
struct Place {
  ptx::Words* first;
  uint32_t next;
};

// Derived says how many rows the product has, uint32_t all_rows(), which of them is the first of this rank's result, uint32_t first_row(), and has
// void exchange_values(entered, d, item), which replaces a thread's values by those to store.
template <class Derived>
struct PacketTiles : BasicOp<Config, Parameters> {
  using BasicOp::BasicOp;
  MK_DEVICE const Derived& derived() const { return static_cast<const Derived&>(*this); }

  static constexpr uint32_t kParts = 1;
  static constexpr bool kShares = KShares::kMay, kSums = kShares, kExchanges = !kShares;
  static constexpr bool kCanonicalSum = Config::kCanonical != 0;
  static_assert(!kShares || !kCanonicalSum, "one CTA adds up all of K");

  MK_DEVICE uint32_t num_tiles() const {
    if constexpr (kShares) return shares().count();
    return p.tiles;
  }
  MK_DEVICE uint32_t tile_rows() const { return (derived().all_rows() + Shape::kBlockM - 1) / Shape::kBlockM; }
  MK_DEVICE TileCoordinate coordinate(uint32_t tile) const {
    bool is_share = false, is_sum = false;
    uint32_t share = 0;
    if constexpr (kShares) tile = shares().tile_of(tile, is_share, is_sum, share);
    const RasterPosition at = raster(tile, tile_rows(), tiles_n(), p.group_m);
    return TileCoordinate{p.world.rank, at.row, at.column, 0, tile, is_sum, false, is_share, share};
  }
  MK_DEVICE uint32_t parts(const TileCoordinate&) const { return 1; }
  MK_DEVICE bool waits(const TileCoordinate&, uint32_t) const { return false; }
  MK_DEVICE bool wait_inputs(const Entered&, const TileCoordinate&, uint32_t) const { return true; }
  MK_DEVICE uint32_t first_step(const TileCoordinate& c) const {
    if constexpr (kShares) return shares().first_step(steps_k(), c.share);
    return 0;
  }
  MK_DEVICE uint32_t steps(const TileCoordinate& c, uint32_t) const {
    if constexpr (kShares) return c.is_sum ? 0 : shared_steps(c);
    return steps_k();
  }
  MK_DEVICE uint32_t shared_steps(const TileCoordinate& c) const { return shares().first_step(steps_k(), c.share + 1) - first_step(c); }

  // ---- the exchange; each thread for itself
  MK_DEVICE uint32_t warps() const {  // of a tile that have rows
    const uint32_t rows = derived().all_rows();
    return rows < Shape::kBlockM ? (rows + kWarpRows - 1) / kWarpRows : Shape::kBlockM / kWarpRows;
  }
  MK_DEVICE uint32_t slices() const { return kShares ? p.shares : 1; }  // of a tile
  MK_DEVICE uint32_t items() const { return p.tiles * slices(); }
  MK_DEVICE uint32_t row_packets() const {  // of a row of an item, at most
    if constexpr (!kShares) return kPackets;
    return ((kRowWords + p.shares - 1) / p.shares + kPacketWords - 1) / kPacketWords;
  }
  MK_DEVICE uint32_t warp_packets() const { return 2 * row_packets() * 32; }  // of an item
  MK_DEVICE Item item_of(const TileCoordinate& c, uint32_t packets) const {
    const uint32_t warp = KShares::warp(), row = c.m * Shape::kBlockM + warp * kWarpRows + ptx::lane_index() / 4;
    return Item{c.index * slices() + c.share, c.n, c.share, warp, row, packets};
  }
  MK_DEVICE ptx::Words* packets_at(const Entered& entered, uint32_t rank) const {
    return reinterpret_cast<ptx::Words*>(shared_signals(entered, rank) + p.partial_offset);
  }
  MK_DEVICE void exchange(const Entered& entered, float (&d)[Config::kBlockN / 2], const TileCoordinate& c) const {
    float values[kValues];  // copies, by instructions: else ptxas finds accumulators in use outside wgmma, and serializes it
#pragma unroll
    for (uint32_t i = 0; i < kValues; ++i) values[i] = ptx::from_bits(ptx::bits(d[i]));
    const Item item = item_of(c, kPackets);
    if (item.warp < warps()) derived().exchange_values(entered, values, item);
    if constexpr (Derived::kStoresRows) {
      if (item.warp < warps()) store_rows(values, c, item, 0, kRowWords);
      return;
    }
#pragma unroll
    for (uint32_t i = 0; i < kValues; ++i) d[i] = values[i];
  }

  // ---- shares of K. Sums of all shares travel in packets of this rank's own, from p.share_offset on.
  MK_DEVICE KShares shares() const { return KShares{p.tiles, p.shares}; }
  MK_DEVICE char* share_packets(const Entered& entered) const { return shared_signals(entered, p.world.local_rank) + p.share_offset; }
  MK_DEVICE uint32_t rows_of(const TileCoordinate& c) const { return derived().all_rows() - c.m * Shape::kBlockM; }
  MK_DEVICE void send_share(const Entered& entered, const float (&d)[Config::kBlockN / 2], const TileCoordinate& c) const {
    shares().send(share_packets(entered), d, c, rows_of(c));
  }
  // Adds up a slice, exchanges it, and stores what is this rank's of it. All of it is sent before anything is waited for.
  MK_DEVICE void add_shares(const Entered& entered, const TileCoordinate& c) const {
    const KShares shared = shares();
    const uint32_t begin = shared.first_packet(c.share), end = shared.first_packet(c.share + 1);  // a word of each row has come with each
    const Item item = item_of(c, (end - begin + kPacketWords - 1) / kPacketWords);
    if (item.warp * kWarpRows >= rows_of(c) || begin == end) return;
    float d[kValues];
    ptx::Words* from = shared.packets_of(share_packets(entered), c);
#pragma unroll
    for (uint32_t i = 0; i < kPackets; ++i) {
      float sum[kPacketWords][kPacketWords] = {};  // of columns that the slice does not have any numbers: they fill up a packet
      if (begin + i * kPacketWords < end &&
          !shared.template add_columns<kSharesTogether>(entered, from, begin + i * kPacketWords, end, sum))
        return;
#pragma unroll
      for (uint32_t j = 0; j < kPacketWords * kPacketWords; ++j)
        d[i * kPacketWords * kPacketWords + j] = sum[j / kPacketWords][j % kPacketWords];
    }
    derived().exchange_values(entered, d, item);
    store_rows(d, c, item, begin, end);
  }
  // What a thread has of this rank's result, in packets of shares `begin` to `end` of the tile's. By threads, since the boxes of a TMA store must not begin
  // before the result (a GPU ends the kernel), and owners' rows begin anywhere in a tile.
  MK_DEVICE void store_rows(const float (&d)[kValues], const TileCoordinate& c, const Item& item, uint32_t begin, uint32_t end) const {
    const uint32_t column = first_column<Config>(c) + begin * 8 + ptx::lane_index() % 4 * 2;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = item.row + half * 8 - derived().first_row();  // of the result; of the others' rows beyond its last
      if (row >= p.rows) continue;
      char* to = reinterpret_cast<char*>(p.c) + uint64_t(row) * p.c_row_bytes + column * 2;
#pragma unroll
      for (uint32_t i = 0; i < kPackets * kPacketWords; ++i) {
        const uint32_t e = i * 4 + half * 2;
        if (begin + i < end && column + i * 8 < extent_n(p)) ptx::store_word(to + i * 16, ptx::pack<Shape::kElement>(d[e], d[e + 1]));
      }
    }
  }

  // ---- values and packets. `half`: which of a thread's two rows.
  // Adds what the others have of rows that are this rank's, in a fixed order: after the own values, unrounded, the others' from the next rank on; or
  // by rank. `first`, `second`: whether it is so of either row. at(source, half): where they are. False: they did not come.
  template <class At>
  MK_DEVICE bool add_others(const Entered& entered, float (&d)[kValues], const Item& item, bool first, bool second, const At& at) const {
    const uint32_t rank = p.world.rank;
    const OwnValues own(d);
    bool ok = true;
#pragma unroll 1
    for (uint32_t i = kCanonicalSum ? 0 : 1; ok && i < kWorldSize; ++i) {
      const uint32_t source = kCanonicalSum ? i : (rank + i) % kWorldSize;
      if (kCanonicalSum && source == rank) {
        own.add_to(d);
        continue;
      }
      if (first) ok = receive<0, true>(entered, d, at(source, 0), item.packets, source);
      if (ok && second) ok = receive<1, true>(entered, d, at(source, 1), item.packets, source);
    }
    return ok;
  }

  // Of a canonical sum, in the order of the ranks: the own values, rounded as the others', which are added when it is their turn.
  struct OwnValues {
    uint32_t pairs[kCanonicalSum ? kValues / 2 : 1];
    MK_DEVICE explicit OwnValues(float (&d)[kValues]) {
      if constexpr (kCanonicalSum) {
#pragma unroll
        for (uint32_t i = 0; i < kValues / 2; ++i) {
          pairs[i] = ptx::pack<Shape::kElement>(d[2 * i], d[2 * i + 1]);
          d[2 * i] = d[2 * i + 1] = 0.0f;
        }
      }
    }
    MK_DEVICE void add_to(float (&d)[kValues]) const {
      if constexpr (kCanonicalSum) {
#pragma unroll
        for (uint32_t i = 0; i < kValues / 2; ++i) {
          float low, high;
          ptx::unpack<Shape::kElement>(pairs[i], low, high);
          d[2 * i] += low, d[2 * i + 1] += high;
        }
      }
    }
  };

  // Word j of packet i of a row: the values (d[element], d[element + 1]).
  MK_DEVICE static constexpr uint32_t element(uint32_t half, uint32_t i, uint32_t j) { return (i * kPacketWords + j) * 4 + half * 2; }
  MK_DEVICE static ptx::Words packet(const float (&d)[kValues], uint32_t half, uint32_t i) {
    ptx::Words v;
#pragma unroll
    for (uint32_t j = 0; j < kPacketWords; ++j) {
      const uint32_t e = element(half, i, j);
      v.word[j] = ~ptx::pack<Shape::kElement>(d[e], d[e + 1]);
    }
    return v;
  }
  MK_DEVICE static void values_of(uint32_t word, float& low, float& high) { ptx::unpack<Shape::kElement>(~word, low, high); }
  MK_DEVICE static bool has(uint32_t packets, uint32_t i) { return !kShares || i < packets; }  // a row that packet
  MK_DEVICE void send(const float (&d)[kValues], uint32_t half, const Place& to, uint32_t packets) const {
#pragma unroll
    for (uint32_t i = 0; i < kPackets; ++i) {
      if (has(packets, i)) ptx::store_packet(to.first + i * to.next, packet(d, half, i));
    }
  }
  // One row from one rank: added to the own values, or instead of them. False: it did not come.
  template <uint32_t Half, bool Adds>
  MK_DEVICE bool receive(const Entered& entered, float (&d)[kValues], const Place& from, uint32_t packets, uint32_t source) const {
    ptx::Words v[kPackets];
    if (!take<1>(entered, v, from, 0, packets, source)) return false;
#pragma unroll
    for (uint32_t i = 0; i < kPackets; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < kPacketWords; ++j) {
        const uint32_t e = element(Half, i, j);
        float low, high;
        values_of(v[i].word[j], low, high);
        d[e] = Adds ? d[e] + low : low, d[e + 1] = Adds ? d[e + 1] + high : high;
      }
    }
    return true;
  }
  // One row from all ranks, `blocks` of a warp's packets apart, added up in their order.
  template <uint32_t Half>
  MK_DEVICE void add_all(const Entered& entered, float (&d)[kValues], const Place& from, uint32_t blocks, uint32_t packets) const {
    constexpr uint32_t kAtOnce = kShares && kWorldSize * kPackets > 8 ? 1 : kPackets;  // the accumulators of a tile take registers, too
#pragma unroll
    for (uint32_t first = 0; first < kPackets; first += kAtOnce) {
      if (!has(packets, first)) return;
      ptx::Words v[kWorldSize * kAtOnce];
      // The distance, worked out here: outside it takes two registers, and of eight ranks' packets none are left.
      const uint64_t stride = uint64_t(blocks) * warp_packets();
      if (!take<kWorldSize>(entered, v, Place{from.first + first * from.next, from.next}, stride, packets - first, 0)) return;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (uint32_t j = 0; j < kPacketWords; ++j) {
          const uint32_t e = element(Half, first + i, j);
          float low = 0.0f, high = 0.0f;
#pragma unroll
          for (uint32_t s = 0; s < kWorldSize; ++s) {
            float x, y;
            values_of(v[s * kAtOnce + i].word[j], x, y);
            low += x, high += y;
          }
          d[e] = low, d[e + 1] = high;
        }
      }
    }
  }
  // Takes as many of a row's packets as v has room for from each of Sources ranks, `source` and up, `stride` packets apart, once all their words
  // have come; leaves zeros there.
  template <uint32_t Sources, uint32_t Count>
  MK_DEVICE bool take(const Entered& entered, ptx::Words (&v)[Count], const Place& from, uint64_t stride, uint32_t packets,
                      uint32_t source) const {
    constexpr uint32_t kEach = Count / Sources;
    const auto at = [&](uint32_t i) { return from.first + i / kEach * stride + i % kEach * from.next; };
    if constexpr (kShares) {
      uint32_t wanted = 0;
#pragma unroll
      for (uint32_t i = 0; i < Count; ++i) wanted |= uint32_t{has(packets, i % kEach)} << i;
      return take_packets(entered, v, wanted, at, [&](uint32_t i) { return source + i / kEach; });
    }
    Deadline deadline(entered.call(), p.world.timeout_ns);
    while (true) {
      uint32_t missing = Count;
#pragma unroll
      for (uint32_t i = 0; i < Count; ++i) {
        v[i] = ptx::load_packet(at(i));
        const uint32_t* word = v[i].word;
        const bool here = (word[0] != 0) & (word[1] != 0) & (word[2] != 0) & (word[3] != 0);  // && would be branches
        if (!here) missing = i;
      }
      if (missing == Count) break;
      // Of the packet's halves that one which lacks a word: it is less now, as a number, than with that word.
      const uint32_t part = v[missing].word[0] != 0 && v[missing].word[1] != 0;
      const uint64_t now = v[missing].word[part * 2] | uint64_t(v[missing].word[part * 2 + 1]) << 32;
      const abi::State state = deadline.pass(reinterpret_cast<const uint64_t*>(at(missing)) + part, now + 1);
      if (state == abi::kRunning) continue;
      fail(entered.call(), state, Awaited{abi::kFlagChunk, 0, source + missing / kEach}, entered.call().epoch(), 0);
      return false;
    }
#pragma unroll
    for (uint32_t i = 0; i < Count; ++i) ptx::store_packet(at(i), ptx::Words{});
    return true;
  }
};

}  // namespace mkernel
