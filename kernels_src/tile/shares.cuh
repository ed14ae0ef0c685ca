// K of a tile shared by several CTAs of a rank (Config::kShares), where tiles are few and K is long. Each share is a range of k steps, and its CTA sends
// the sums of its threads, unrounded, in packets. Then the tile's columns are shared out again: for each share there is a sum, which adds up what all
// shares have of a slice of the columns, in the order of K, rounds and stores it. So as many CTAs add as have multiplied, and what each reads is in
// flight at once: a look at packets takes some 700 cycles.
//
// Sums are taken after all shares, by any CTA, and wait for shares only: nothing waits in a circle.
#pragma once
#include "comm/packet.cuh"
#include "tile/shape.cuh"

namespace mkernel {

// Numbers: those of the shares of num_tiles tiles (or pairs of tiles), tile by tile, then those of their sums. With one share there are only tiles.
template <class Config>
struct Shares {
  using Shape = GemmShape<Config>;
  static constexpr bool kMay = optional::kShares<Config>;
  static constexpr uint32_t kPackets = Shape::kBlockN / 2 / kPacketWords;  // of a thread: two rows of 8 columns, four float32 values, each
  static constexpr uint32_t kWarps = Shape::kBlockM / kWarpRows;
  uint32_t num_tiles, shares;
  uint32_t block_rows = 0;  // of a tile; with swapped operands a packet is two columns of two rows, and a thread has one for each 8 rows
  uint32_t together = 1;    // packets of which a slice has all or none

  // Of numbers. Shares of a cluster are added up by their own CTAs.
  MK_DEVICE uint32_t count() const { return shares == 1 ? num_tiles : (Shape::kClusterK > 1 ? 1 : 2) * num_tiles * shares; }
  // The tile of a number; whether it stands for a share or a sum, and which.
  MK_DEVICE uint32_t tile_of(uint32_t number, bool& is_share, bool& is_sum, uint32_t& share) const {
    is_share = shares > 1, is_sum = is_share && number >= num_tiles * shares, share = 0;
    if (!is_share) return number;
    if (is_sum) number -= num_tiles * shares;
    const uint32_t tile = quotient(number, shares);
    share = number - tile * shares;
    return tile;
  }
  MK_DEVICE uint32_t first_step(uint32_t steps, uint32_t share) const { return steps * share / shares; }
  MK_DEVICE uint32_t packets() const { return Shape::kSwapped ? block_rows / 8 : kPackets; }  // of a thread
  MK_DEVICE uint32_t first_packet(uint32_t slice) const { return packets() / together * slice / shares * together; }

  // A word is the bits of a value, inverted: 0, which no packet holds, would be a NaN with all bits set, and another NaN is sent for it.
  MK_DEVICE static uint32_t word_of(float value) {
    const uint32_t bits = ptx::bits(value);
    return bits == 0xffffffffu ? 0x80000000u : ~bits;
  }
  MK_DEVICE static uint32_t warp() { return ptx::thread_index() / 32 - kWarpgroup / 32; }  // of the consumers
  // Packets of a tile's share 0 that are this thread's. `at`: where they begin. A thread's lie 32 apart.
  MK_DEVICE ptx::Words* packets_of(char* at, const TileCoordinate& c) const {
    const uint64_t first =
        uint64_t(c.index) * shares * Shape::kCluster + c.m % Shape::kClusterM * Shape::kClusterN + c.n % Shape::kClusterN;
    return reinterpret_cast<ptx::Words*>(at) + (first * kWarps + warp()) * packets() * 32 + ptx::lane_index();
  }
  MK_DEVICE uint32_t next() const { return Shape::kCluster * kWarps * packets() * 32; }  // from one share's to the next one's

  // What a thread has of a share. `rows`: valid ones of the tile.
  MK_DEVICE void send(char* at, const float (&d)[Shape::kHeld], const TileCoordinate& c, uint32_t rows) const {
    if (!Shape::kSwapped && warp() * kWarpRows >= rows) return;
    ptx::Words* to = packets_of(at, c) + c.share * next();
#pragma unroll
    for (uint32_t i = 0; i < kPackets; ++i) {
      if (Shape::kSwapped && i * 8 >= rows) break;
      ptx::Words v;
#pragma unroll
      for (uint32_t j = 0; j < kPacketWords; ++j) v.word[j] = word_of(d[i * kPacketWords + j]);
      ptx::store_packet(to + i * 32, v);
    }
  }

  // Adds what all shares have of a thread's next four packets before `end`, in the order of K, to `sum`. `from`: share 0's first packet. False: they did
  // not come.
  MK_DEVICE bool add_four(const Entered& entered, ptx::Words* from, uint32_t packet, uint32_t end, float (&sum)[4][kPacketWords]) const {
    if (Shape::kBlockN <= 64 && end - packet <= 2) return add_columns<8, 2>(entered, from, packet, end, sum);  // as is usual there
    return add_columns<4, 4>(entered, from, packet, end, sum);
  }
  // The same of so many packets; looks at so many shares together.
  template <uint32_t Together, uint32_t Columns, uint32_t Most>
  MK_DEVICE bool add_columns(const Entered& entered, ptx::Words* from, uint32_t packet, uint32_t end,
                             float (&sum)[Most][kPacketWords]) const {
    constexpr uint32_t kBoth = Together * Columns;
#pragma unroll 1
    for (uint32_t first = 0; first < shares; first += Together) {
      ptx::Words v[kBoth];
      uint32_t wanted = 0;
#pragma unroll
      for (uint32_t i = 0; i < kBoth; ++i) wanted |= uint32_t{first + i % Together < shares && packet + i / Together < end} << i;
      const auto at = [&](uint32_t i) { return from + (first + i % Together) * next() + (packet + i / Together) * 32; };
      if (!take_packets(entered, v, wanted, at, [&](uint32_t) { return entered.world().rank; })) return false;
#pragma unroll
      for (uint32_t i = 0; i < kBoth; ++i) {
        if (first + i % Together >= shares) continue;
#pragma unroll
        for (uint32_t j = 0; j < kPacketWords; ++j) sum[i / Together][j] += ptx::from_bits(~v[i].word[j]);
      }
    }
    return true;
  }

  // The sums of slice c.share: store(packet, sum) for each of the thread's packets in it.
  template <class Store>
  MK_DEVICE void add_up(const Entered& entered, char* at, const TileCoordinate& c, uint32_t rows, const Store& store) const {
    if (!Shape::kSwapped && warp() * kWarpRows >= rows) return;
    // As few looks as there can be: a slice has the fewer columns, the more shares there are.
    constexpr bool kNarrow = Shape::kBlockN <= 64;
    if constexpr (Shape::kSwapped) return add_up_together<4, 4>(entered, at, c, rows, store);  // less code
    if (shares == 2) return add_up_together<2, kNarrow ? 4 : 8>(entered, at, c, rows, store);
    if (shares <= 4) return add_up_together<4, kNarrow ? 3 : 4>(entered, at, c, rows, store);
    add_up_together<8, 2>(entered, at, c, rows, store);
  }
  template <uint32_t Together, uint32_t Columns, class Store>
  MK_DEVICE void add_up_together(const Entered& entered, char* at, const TileCoordinate& c, uint32_t rows, const Store& store) const {
    ptx::Words* from = packets_of(at, c);
    const uint32_t begin = first_packet(c.share);
    uint32_t end = first_packet(c.share + 1);
    if (Shape::kSwapped && end * 8 > rows) end = (rows + 7) / 8;
#pragma unroll 1
    for (uint32_t packet = begin; packet < end; packet += Columns) {
      float sum[Columns][kPacketWords] = {};
      const bool ok = add_columns<Together, Columns>(entered, from, packet, end, sum);
      if (Shape::kSwapped ? !ptx::all_of_warp(ok) : !ok) return;  // lanes exchange columns to store them: all of them, or none
#pragma unroll
      for (uint32_t i = 0; i < Columns; ++i) {
        if (packet + i < end) store(packet + i, sum[i]);
      }
    }
  }
};

}  // namespace mkernel
