// gemm_allreduce for few rows, inside one node: C (M, N) = the sum over all ranks of A (M, K/W) * B (K/W, N), the same bits on every rank.
// Included by the generated source after `struct Config`.
//
// Every word is its own flag, so that nobody waits for stores to be complete and then for a flag. A word is a pair of values with all bits inverted,
// and 0 means that it has not come yet: 0 would be two NaNs with all bits set, which ptx::pack never makes. Packets of 16 bytes are four words.
// The receiver leaves zeros behind for the next call; every word that is sent is taken in the same call.
//
// The threads that multiplied a tile exchange it themselves, each thread its own values: one-shot (kTwoShot 0), everyone sends to everyone and
// adds up in the order of the ranks; two-shot, the 16 rows of a warp have an owner, to which the others send theirs, and which sends them the sum.
//
// All ranks take tiles in the same order, and a tile is sent before anything of it is waited for: nothing waits in a circle.
#pragma once
#include "reduce/layout.cuh"
#include "tile/gemm.cuh"

namespace mkernel {

static_assert(kNodes == 1 && Config::kIntraComm + Config::kInterSend + Config::kInterReduce == 0, "no such roles");
static_assert(Config::kBlockN <= 128, "registers");

// Packets lie in a range of the signal segment that holds nothing else: between calls it is all zeros, whatever plan comes next.
// p.partial_offset is its start, p.tiles the number of all tiles. A thread has two rows of a tile, and kPackets packets of each.
constexpr uint32_t kRowWords = Config::kBlockN / 8;  // pairs of values of one row
constexpr uint32_t kPacketWords = 4, kPackets = kRowWords / kPacketWords;
static_assert(kRowWords % kPacketWords == 0, "whole packets");
constexpr uint32_t kWarpPackets = 2 * kPackets * 32;

struct Tiles : BasicOp<Config, Parameters> {
  using BasicOp::BasicOp;
  static constexpr uint32_t kParts = 1;
  static constexpr bool kExchanges = kWorldSize > 1;

  MK_DEVICE uint32_t num_tiles() const { return p.tiles; }
  MK_DEVICE TileCoordinate coordinate(uint32_t tile) const {
    const RasterPosition at = raster(tile, tile_rows(), tiles_n(), p.group_m);
    return TileCoordinate{p.world.rank, at.row, at.column, 0, tile, false};
  }
  MK_DEVICE uint32_t parts(const TileCoordinate&) const { return 1; }
  MK_DEVICE bool waits(const TileCoordinate&, uint32_t) const { return false; }
  MK_DEVICE bool wait_inputs(const Entered&, const TileCoordinate&, uint32_t) const { return true; }
  MK_DEVICE uint32_t steps(const TileCoordinate&, uint32_t) const { return steps_k(); }
  MK_DEVICE void store(const Entered& entered, const TileCoordinate& c, uint32_t panel, uint32_t warpgroup, const char* smem) const {
    store_result(entered, c, panel, warpgroup, smem);
  }

  // ---- where packets are: block by block of a warp's. One-shot: (source, warp of a tile). Two-shot: (source, warp among its owner's), then
  // (warp of a tile) for the sums.
  MK_DEVICE uint32_t warps() const {  // of a tile that have rows
    return p.rows < Shape::kBlockM ? (p.rows + kWarpRows - 1) / kWarpRows : Shape::kBlockM / kWarpRows;
  }
  MK_DEVICE uint32_t owned() const { return (p.tiles * warps() + kWorldSize - 1) / kWorldSize; }
  MK_DEVICE ptx::Words* packets(const Entered& entered, uint32_t rank, uint32_t block) const {  // of this lane; packet i: 32 * i further
    return reinterpret_cast<ptx::Words*>(shared_signals(entered, rank) + p.partial_offset) + uint64_t(block) * kWarpPackets +
           ptx::lane_index();
  }

  // ---- the exchange; each thread for itself. `half`: which of its two rows.
  MK_DEVICE void exchange(const Entered& entered, float (&d)[Config::kBlockN / 2], const TileCoordinate& c) const {
    float values[Config::kBlockN / 2];  // copies, by instructions: else ptxas finds accumulators in use outside wgmma, and serializes it
#pragma unroll
    for (uint32_t i = 0; i < Config::kBlockN / 2; ++i) values[i] = ptx::from_bits(ptx::bits(d[i]));
    exchange_values(entered, values, c);
#pragma unroll
    for (uint32_t i = 0; i < Config::kBlockN / 2; ++i) d[i] = values[i];
  }
  MK_DEVICE void exchange_values(const Entered& entered, float (&d)[Config::kBlockN / 2], const TileCoordinate& c) const {
    const uint32_t warp = ptx::thread_index() / 32 - kWarpgroup / 32, row = c.m * Shape::kBlockM + warp * kWarpRows + ptx::lane_index() / 4;
    const uint32_t rank = p.world.rank, group = c.index * warps() + warp;  // the warp's number among all
    if (warp >= warps()) return;
    if constexpr (Config::kTwoShot == 0) {
      const uint32_t all = p.tiles * warps();
#pragma unroll 1
      for (uint32_t i = 1; i <= kWorldSize; ++i)
        send(d, packets(entered, (rank + i) % kWorldSize, rank * all + group), row);  // its own rank, too
      ptx::Words* from = packets(entered, rank, group);
      if (row < p.rows) add_all<0>(entered, d, from, all);
      if (row + 8 < p.rows) add_all<1>(entered, d, from, all);
    } else {
      const uint32_t owner = group % kWorldSize, slot = group / kWorldSize, sums = kWorldSize * owned();
      if (owner != rank) {
        send(d, packets(entered, owner, rank * owned() + slot), row);
        ptx::Words* from = packets(entered, rank, sums + group);
        if (row < p.rows) receive<0, false>(entered, d, from, owner);
        if (row + 8 < p.rows) receive<1, false>(entered, d, from, owner);
        return;
      }
      bool ok = true;
      const OwnValues own(d);
      // After the own values, unrounded, the others' from the next rank on; or by rank.
#pragma unroll 1
      for (uint32_t i = kCanonicalSum ? 0 : 1; ok && i < kWorldSize; ++i) {
        const uint32_t source = kCanonicalSum ? i : (rank + i) % kWorldSize;
        if (kCanonicalSum && source == rank) {
          own.add_to(d);
          continue;
        }
        ptx::Words* from = packets(entered, rank, source * owned() + slot);
        if (row < p.rows) ok = receive<0, true>(entered, d, from, source);
        if (ok && row + 8 < p.rows) ok = receive<1, true>(entered, d, from, source);
      }
      if (!ok) return;  // nobody may take what is not the sum for it
#pragma unroll 1
      for (uint32_t i = 1; i < kWorldSize; ++i) send(d, packets(entered, (rank + i) % kWorldSize, sums + group), row);
    }
  }

  // Of a canonical sum, in the order of the ranks: the own values, rounded as the others', which are added when it is their turn.
  static constexpr bool kCanonicalSum = Config::kCanonical != 0;
  struct OwnValues {
    uint32_t pairs[kCanonicalSum ? Config::kBlockN / 4 : 1];
    MK_DEVICE explicit OwnValues(float (&d)[Config::kBlockN / 2]) {
      if constexpr (kCanonicalSum) {
#pragma unroll
        for (uint32_t i = 0; i < Config::kBlockN / 4; ++i) {
          pairs[i] = ptx::pack<Shape::kElement>(d[2 * i], d[2 * i + 1]);
          d[2 * i] = d[2 * i + 1] = 0.0f;
        }
      }
    }
    MK_DEVICE void add_to(float (&d)[Config::kBlockN / 2]) const {
      if constexpr (kCanonicalSum) {
#pragma unroll
        for (uint32_t i = 0; i < Config::kBlockN / 4; ++i) {
          float low, high;
          ptx::unpack<Shape::kElement>(pairs[i], low, high);
          d[2 * i] += low, d[2 * i + 1] += high;
        }
      }
    }
  };

  // Word j of packet i of a row: the values (d[element], d[element + 1]).
  MK_DEVICE static constexpr uint32_t element(uint32_t half, uint32_t i, uint32_t j) { return (i * kPacketWords + j) * 4 + half * 2; }
  MK_DEVICE static ptx::Words packet(const float (&d)[Config::kBlockN / 2], uint32_t half, uint32_t i) {
    ptx::Words v;
#pragma unroll
    for (uint32_t j = 0; j < kPacketWords; ++j) {
      const uint32_t e = element(half, i, j);
      v.word[j] = ~ptx::pack<Shape::kElement>(d[e], d[e + 1]);
    }
    return v;
  }
  MK_DEVICE static void values_of(uint32_t word, float& low, float& high) { ptx::unpack<Shape::kElement>(~word, low, high); }
  MK_DEVICE void send(const float (&d)[Config::kBlockN / 2], ptx::Words* to, uint32_t row) const {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      if (row + half * 8 >= p.rows) continue;
#pragma unroll
      for (uint32_t i = 0; i < kPackets; ++i) ptx::store_packet(to + (half * kPackets + i) * 32, packet(d, half, i));
    }
  }
  // One row from one rank: added to the own values, or instead of them. False: it did not come.
  template <uint32_t Half, bool Adds>
  MK_DEVICE bool receive(const Entered& entered, float (&d)[Config::kBlockN / 2], ptx::Words* from, uint32_t source) const {
    ptx::Words v[kPackets];
    if (!take<1>(entered, v, from + Half * kPackets * 32, 0, source)) return false;
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
  // One row from all ranks, `all` blocks apart, added up in their order.
  template <uint32_t Half>
  MK_DEVICE void add_all(const Entered& entered, float (&d)[Config::kBlockN / 2], ptx::Words* from, uint32_t all) const {
    ptx::Words v[kWorldSize * kPackets];
    if (!take<kWorldSize>(entered, v, from + Half * kPackets * 32, uint64_t(all) * kWarpPackets, 0)) return;
#pragma unroll
    for (uint32_t i = 0; i < kPackets; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < kPacketWords; ++j) {
        const uint32_t e = element(Half, i, j);
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (uint32_t s = 0; s < kWorldSize; ++s) {
          float x, y;
          values_of(v[s * kPackets + i].word[j], x, y);
          low += x, high += y;
        }
        d[e] = low, d[e + 1] = high;
      }
    }
  }
  // Takes a row's packets from each of Sources ranks, `first` and up, `stride` packets apart, once all their words have come; leaves zeros there.
  template <uint32_t Sources>
  MK_DEVICE bool take(const Entered& entered, ptx::Words (&v)[Sources * kPackets], ptx::Words* from, uint64_t stride,
                      uint32_t first) const {
    const auto at = [&](uint32_t i) { return from + i / kPackets * stride + i % kPackets * 32; };
    Deadline deadline(entered.call(), p.world.timeout_ns);
    while (true) {
      uint32_t missing = Sources * kPackets;
#pragma unroll
      for (uint32_t i = 0; i < Sources * kPackets; ++i) {
        v[i] = ptx::load_packet(at(i));
        const uint32_t* word = v[i].word;
        const bool here = (word[0] != 0) & (word[1] != 0) & (word[2] != 0) & (word[3] != 0);  // && would be branches
        if (!here) missing = i;
      }
      if (missing == Sources * kPackets) break;
      // Of the packet's halves that one which lacks a word: it is less now, as a number, than with that word.
      const uint32_t half = v[missing].word[0] != 0 && v[missing].word[1] != 0;
      const uint64_t now = v[missing].word[half * 2] | uint64_t(v[missing].word[half * 2 + 1]) << 32;
      const abi::State state = deadline.pass(reinterpret_cast<const uint64_t*>(at(missing)) + half, now + 1);
      if (state == abi::kRunning) continue;
      fail(entered.call(), state, Awaited{abi::kFlagChunk, 0, first + missing / kPackets}, entered.call().epoch(), 0);
      return false;
    }
#pragma unroll
    for (uint32_t i = 0; i < Sources * kPackets; ++i) ptx::store_packet(at(i), ptx::Words{});
    return true;
  }
};

// ---- the role switch
MK_KERNEL(kGemmThreads)(MK_GRID_CONSTANT Parameters p) {
  const Call call = kEarly ? coming_call(p.world, abi::kCompute) : begin_call_ahead(p.world, abi::kCompute);
  compute_role(call, Tiles(p), shared_storage<GemmStorage<Config>>());
}

}  // namespace mkernel
