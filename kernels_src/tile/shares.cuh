// K of a tile shared by several CTAs of a rank, where tiles are few and K is long (Config::kShares). Each multiplies a range of k steps. Those of the
// shares 1, 2 ... send their sums in packets, unrounded, to the threads of the CTA that has share 0; it adds them in this order and goes on with the
// sum as if it had multiplied all of K.
//
// A tile's share 0 comes after its others in the order of tiles, and the others wait for nobody of their tile: nothing waits in a circle.
#pragma once
#include "comm/packet.cuh"
#include "tile/shape.cuh"

namespace mkernel {

// Config::kShares: 1 where p.shares may be more than 1. Kernels without shares leave it out.
namespace detail {
template <class Config, class = void>
struct HasShares {
  static constexpr bool kValue = false;
};
template <class Config>
struct HasShares<Config, Void<Config::kShares>> {
  static constexpr bool kValue = Config::kShares != 0;
};
}  // namespace detail

// Numbers of tiles count shares: of tile t the last share is t * shares, and share 0 is t * shares + shares - 1.
template <class Config>
struct Shares {
  static constexpr bool kMay = detail::HasShares<Config>::kValue;
  static constexpr uint32_t kPackets = Config::kBlockN / 2 / kPacketWords;  // of a thread: four float32 values each
  // Shares that are looked at together, since a look takes some 700 cycles: as many as there are registers for.
  static constexpr uint32_t kTogether = 32 / kPackets;
  static constexpr uint32_t kWarpPackets = kPackets * 32;
  static constexpr uint32_t kSharePackets = GemmShape<Config>::kBlockM / kWarpRows * kWarpPackets;
  static_assert(!kMay || Config::kBlockN <= 128, "registers");

  template <class Parameters>
  MK_DEVICE static uint32_t count(const Parameters& p) {
    if constexpr (kMay) {
      return p.shares;
    } else {
      return 1;
    }
  }
  template <class Parameters>
  MK_DEVICE static uint32_t first_step(const Parameters& p, uint32_t steps, uint32_t share) {  // of so many k steps of the tile
    return steps * share / count(p);
  }

  // A word is the bits of a value, inverted: 0, which no packet holds, would be a NaN with all bits set, and another NaN is sent for it.
  MK_DEVICE static uint32_t word_of(float value) {
    const uint32_t bits = ptx::bits(value);
    return bits == 0xffffffffu ? 0x80000000u : ~bits;
  }
  // What a thread has of a share; its packets lie 32 apart.
  MK_DEVICE static void send(const float (&d)[Config::kBlockN / 2], ptx::Words* to) {
#pragma unroll
    for (uint32_t i = 0; i < kPackets; ++i) {
      ptx::Words v;
#pragma unroll
      for (uint32_t j = 0; j < kPacketWords; ++j) v.word[j] = word_of(d[i * kPacketWords + j]);
      ptx::store_packet(to + i * 32, v);
    }
  }
  // Adds what `shares` shares have, at most kTogether, one after the other: first the one whose packets are at `from`. False: the call has failed.
  MK_DEVICE static bool add(const Entered& entered, float (&d)[Config::kBlockN / 2], ptx::Words* from, uint32_t shares) {
    ptx::Words v[kTogether * kPackets];
    const auto at = [&](uint32_t i) { return from + i / kPackets * kSharePackets + i % kPackets * 32; };
    if (!take_packets(entered, v, shares * kPackets, at, [&](uint32_t) { return entered.world().rank; })) return false;
#pragma unroll
    for (uint32_t i = 0; i < kTogether * kPackets; ++i) {
      if (i / kPackets >= shares) break;
#pragma unroll
      for (uint32_t j = 0; j < kPacketWords; ++j) {
        float& sum = d[i % kPackets * kPacketWords + j];
        sum = ptx::from_bits(ptx::bits(sum)) + ptx::from_bits(~v[i].word[j]);
      }
    }
    return true;
  }

  // One warp of the consumers: sends what it has of a share of the tile, or adds to its own what the others have. `rows`: valid ones from the tile's
  // first on; `offset`: where packets begin in this rank's signal segment.
  MK_DEVICE static void exchange(const Entered& entered, float (&d)[Config::kBlockN / 2], const TileCoordinate& c, uint32_t shares,
                                 uint32_t rows, uint64_t offset) {
    const uint32_t warp = ptx::thread_index() / 32 - kWarpgroup / 32;
    if (shares == 1 || warp * kWarpRows >= rows) return;
    ptx::Words* packets = reinterpret_cast<ptx::Words*>(shared_signals(entered, entered.world().local_rank) + offset) + ptx::lane_index();
    packets += uint64_t(c.index) * (shares - 1) * kSharePackets + warp * kWarpPackets;
    if (c.share != 0) return send(d, packets + (c.share - 1) * kSharePackets);
    bool ok = true;
#pragma unroll 1
    for (uint32_t i = 1; ok && i < shares; i += kTogether, packets += kTogether * kSharePackets) {
      const uint32_t others = shares - i;
      ok = add(entered, d, packets, others < kTogether ? others : kTogether);
    }
  }
};

}  // namespace mkernel
