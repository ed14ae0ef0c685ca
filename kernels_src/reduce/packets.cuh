// What gemm_allreduce and gemm_reduce_scatter of few rows share, inside one node: values travel in packets (comm/packet.cuh).
//
// A word is a pair of values with all bits inverted: 0, which no packet holds, would be two NaNs with all bits set, which ptx::pack never makes.
//
// The threads that multiplied a tile exchange it themselves, each thread its own values. Where CTAs share K of a tile (tile/shares.cuh), the threads
// that have added up a slice of its columns exchange that slice.
//
// All ranks take tiles, slices of them, or what clusters take, in the same order, and each is sent before anything of it is waited for: nothing waits in
// a circle. Tiles that clusters take keep the numbers that they have alone, so that all is sent, and added, as it is there.
#pragma once
#include "reduce/layout.cuh"
#include "tile/gemm.cuh"
#include "tile/shares.cuh"

namespace mkernel {

static_assert(kNodes == 1 && kWorldSize > 1, "ranks of one node");
static_assert(Config::kIntraComm + Config::kInterSend + Config::kInterReduce == 0, "no such roles");
static_assert(Config::kBlockN <= 128 || Shape::kSwapped, "registers");

// Packets lie in a range of the signal segment that holds nothing else: between calls it is all zeros, whatever plan comes next.
// p.partial_offset is its start, p.tiles the number of all tiles. A thread has two rows, of a whole tile or of a slice, and kPackets packets of each;
// of a slice which has fewer columns than one of two shares, the last are left out.
using KShares = Shares<Config>;
constexpr uint32_t kRowWords = Config::kBlockN / 8;  // pairs of values of one row of a tile
constexpr uint32_t kItemWords = KShares::kMay ? (kRowWords + 1) / 2 : kRowWords;
constexpr uint32_t kPackets = (kItemWords + kPacketWords - 1) / kPacketWords;
constexpr uint32_t kValues = 2 * 2 * kPacketWords * kPackets;  // of a thread
// Packets of other ranks that a thread looks at together: there are registers for no more beside its own values, or without them.
constexpr uint32_t kLook = Config::kBlockN <= 64 ? 16 : KShares::kMay ? 12 : Config::kCanonical ? 4 : 8, kLookAll = 16;
static_assert(KShares::kMay || Shape::kSwapped || kRowWords % kPacketWords == 0, "whole packets");

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
  static_assert(!kShares || !Shape::kPaired, "CTAs that share K take tiles alone");
  static_assert(!Shape::kSwapped || !kCanonicalSum, "plain products");

  MK_DEVICE uint32_t num_tiles() const {
    if constexpr (kShares) return shares().count();
    return p.taken;
  }
  MK_DEVICE uint32_t tile_rows() const { return (derived().all_rows() + block_rows() - 1) / block_rows(); }
  MK_DEVICE TileCoordinate coordinate(uint32_t tile) const {
    if constexpr (Shape::kPaired) return coordinate_of(tile, ptx::cluster_rank());
    bool is_share = false, is_sum = false;
    uint32_t share = 0;
    if constexpr (kShares) tile = shares().tile_of(tile, is_share, is_sum, share);
    const RasterPosition at = raster(tile, tile_rows(), tiles_n(), p.group_m);
    return TileCoordinate{p.world.rank, at.row, at.column, 0, tile, is_sum, false, is_share, false, share};
  }
  MK_DEVICE TileCoordinate coordinate_of(uint32_t number, uint32_t cta) const {  // of a cluster
    return of_cluster(TileCoordinate{p.world.rank, 0, 0, 0, 0, false}, number, cta, tile_rows());
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
  // What there is of d from `first` on, by instructions: else ptxas finds accumulators in use outside wgmma, and serializes it.
  template <uint32_t To, uint32_t From>
  MK_DEVICE static void copy(float (&to)[To], const float (&d)[From], uint32_t first = 0) {
#pragma unroll
    for (uint32_t i = 0; i < To; ++i) {
      if (first + i < From) to[i] = ptx::from_bits(ptx::bits(d[first + i]));
    }
  }
  MK_DEVICE void exchange(const Entered& entered, float (&d)[Shape::kHeld], const TileCoordinate& c) const {
    float values[kValues];
    copy(values, d);
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
  MK_DEVICE KShares shares() const { return KShares{p.tiles, p.shares, block_rows(), Shape::kSwapped ? 2 : 1}; }
  MK_DEVICE char* share_packets(const Entered& entered) const { return shared_signals(entered, p.world.local_rank) + p.share_offset; }
  MK_DEVICE uint32_t rows_of(const TileCoordinate& c) const { return derived().all_rows() - c.m * block_rows(); }
  MK_DEVICE void send_share(const Entered& entered, const float (&d)[Shape::kHeld], const TileCoordinate& c) const {
    shares().send(share_packets(entered), d, c, Shape::kSwapped ? load_rows(c) : rows_of(c));
  }
  // Moves all values to the front, whose first ones go, and puts sums behind them: for loops, whose code is there once.
  template <uint32_t Values>
  MK_DEVICE static void append(float (&values)[Values], const float (&sum)[kPacketWords][kPacketWords]) {
    constexpr uint32_t kSummed = kPacketWords * kPacketWords, kOthers = Values - kSummed;
#pragma unroll
    for (uint32_t i = 0; i < kOthers; ++i) values[i] = values[i + kSummed];
#pragma unroll
    for (uint32_t i = 0; i < kSummed; ++i) values[kOthers + i] = sum[i / kPacketWords][i % kPacketWords];
  }
  // Adds up a slice, exchanges it, and stores what is this rank's of it. All of it is sent before anything is waited for.
  MK_DEVICE void add_shares(const Entered& entered, const TileCoordinate& c) const {
    const KShares shared = shares();
    const uint32_t begin = shared.first_packet(c.share), end = shared.first_packet(c.share + 1);  // a word of each row has come with each
    const Item item = item_of(c, (end - begin + kPacketWords - 1) / kPacketWords);
    if (item.warp * kWarpRows >= rows_of(c) || begin == end) return;
    float d[kValues] = {};
    ptx::Words* from = shared.packets_of(share_packets(entered), c);
#pragma unroll 1
    for (uint32_t packet = begin; packet < begin + kPackets * kPacketWords; packet += kPacketWords) {
      float sum[kPacketWords][kPacketWords] = {};  // of columns that the slice does not have any numbers: they fill up a packet
      if (packet < end && !shared.add_four(entered, from, packet, end, sum)) return;
      append(d, sum);
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
    const auto source = [&](uint32_t s) {
      return kCanonicalSum ? s + (s >= rank) : rank + 1 + s - (rank + 1 + s < kWorldSize ? 0 : kWorldSize);
    };
    const auto add = [&](uint32_t s, uint32_t half, uint32_t i, const ptx::Words& v) {
#pragma unroll
      for (uint32_t j = 0; j < kPacketWords; ++j) {
        const uint32_t e = element(half, i, j);
        if (kCanonicalSum && s == rank) own.add_to(d, e);
        float low, high;
        values_of(v.word[j], low, high);
        d[e] += low, d[e + 1] += high;
      }
    };
    if (!take_rows<kWorldSize - 1, kLook>(entered, item, first, second, source, at, add)) return false;
    if (kCanonicalSum && rank == kWorldSize - 1) {
#pragma unroll
      for (uint32_t e = 0; e < kValues; e += 2) own.add_to(d, e);
    }
    return true;
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
    MK_DEVICE void add_to(float (&d)[kValues], uint32_t e) const {  // the pair (d[e], d[e + 1])
      if constexpr (kCanonicalSum) {
        float low, high;
        ptx::unpack<Shape::kElement>(pairs[e / 2], low, high);
        d[e] += low, d[e + 1] += high;
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
  // Both rows from one rank, instead of the own values. False: they did not come.
  template <class At>
  MK_DEVICE bool receive(const Entered& entered, float (&d)[kValues], const Item& item, bool first, bool second, uint32_t owner,
                         const At& at) const {
    const auto set = [&](uint32_t, uint32_t half, uint32_t i, const ptx::Words& v) {
#pragma unroll
      for (uint32_t j = 0; j < kPacketWords; ++j) values_of(v.word[j], d[element(half, i, j)], d[element(half, i, j) + 1]);
    };
    return take_rows<1, kLook>(entered, item, first, second, [&](uint32_t) { return owner; }, at, set);
  }
  // Both rows from all ranks, added up in their order. False: they did not come.
  template <class At>
  MK_DEVICE bool add_all(const Entered& entered, float (&d)[kValues], const Item& item, bool first, bool second, const At& at) const {
#pragma unroll
    for (uint32_t e = 0; e < kValues; ++e) d[e] = 0.0f;
    const auto add = [&](uint32_t, uint32_t half, uint32_t i, const ptx::Words& v) {
#pragma unroll
      for (uint32_t j = 0; j < kPacketWords; ++j) {
        const uint32_t e = element(half, i, j);
        float low, high;
        values_of(v.word[j], low, high);
        d[e] += low, d[e + 1] += high;
      }
    };
    return take_rows<kWorldSize, kLookAll>(entered, item, first, second, [](uint32_t s) { return s; }, at, add);
  }
  // Takes a thread's packets of its first row, its second, or both, from each of Sources ranks, source(0) and so on, once all their words have come;
  // leaves zeros there. Those of as many ranks as there are registers for are looked at together, since a look takes some 700 cycles, however many it
  // is at. use(number of the source, half, packet of the row, its words), the sources in their order. at(source, half): where a row's packets lie.
  template <uint32_t Sources, uint32_t Look, class Source, class At, class Use>
  MK_DEVICE bool take_rows(const Entered& entered, const Item& item, bool first, bool second, const Source& source, const At& at,
                           const Use& use) const {
    constexpr uint32_t kRows = 2 * kPackets <= Look ? 2 : 1, kOfSource = kRows * kPackets,
                       kFit = Look / kOfSource > 1 ? Look / kOfSource : 1;
    constexpr uint32_t kLooks = (Sources + kFit - 1) / kFit, kTogether = (Sources + kLooks - 1) / kLooks;
#pragma unroll 1
    for (uint32_t begin = 0; begin < Sources; begin += kTogether) {
#pragma unroll
      for (uint32_t half = 0; half < 2; half += kRows) {
        ptx::Words v[kTogether * kOfSource];
        uint32_t wanted = 0;
#pragma unroll
        for (uint32_t n = 0; n < kTogether * kOfSource; ++n) {
          const bool is_there = begin + n / kOfSource < Sources && has(item.packets, n % kPackets);
          wanted |= uint32_t{is_there && (half + n % kOfSource / kPackets == 0 ? first : second)} << n;
        }
        const auto place = [&](uint32_t n) {
          const Place row = at(source(begin + n / kOfSource), half + n % kOfSource / kPackets);
          return row.first + n % kPackets * row.next;
        };
        if (!take_packets(entered, v, wanted, place, [&](uint32_t n) { return source(begin + n / kOfSource); })) return false;
#pragma unroll
        for (uint32_t s = 0; s < kTogether; ++s) {
          if (begin + s == Sources) break;
#pragma unroll
          for (uint32_t n = 0; n < kOfSource; ++n) use(begin + s, half + n / kPackets, n % kPackets, v[s * kOfSource + n]);
        }
      }
    }
    return true;
  }
};

}  // namespace mkernel
