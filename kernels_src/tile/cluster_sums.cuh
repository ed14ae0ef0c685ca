// K of a tile shared by the CTAs of a cluster (Config::kClusterK), in a world of one: each multiplies a range of k steps and adds up a slice of the
// tile's columns. A thread sends what it has of each slice, unrounded, to the shared memory of that slice's CTA, whose barrier counts the bytes; there the
// same thread adds up what all CTAs sent, its own share among them, in the order of K. So the sums are those of shares in packets (shares.cuh), to the
// bit, without a way through memory.
//
// All CTAs of a cluster have shares of the same tiles, one after the other, and none fails: what one waits for all the others send. A CTA ends when it has
// all that is sent to it; what it sends is in registers.
#pragma once
#include "tile/shares.cuh"
#include "tile/storage.cuh"

namespace mkernel {

template <class Config>
struct ClusterSums {
  using Shape = GemmShape<Config>;
  static constexpr uint32_t kCtas = Shape::kClusterK;
  static constexpr uint32_t kPackets = Shares<Config>::kPackets, kWarps = Shares<Config>::kWarps;
  static constexpr uint32_t kOfSlice = (kPackets + kCtas - 1) / kCtas;  // packets of a thread in a slice, at most
  static constexpr uint32_t kWordsOfWarp = 32;

  MK_DEVICE static constexpr uint32_t first(uint32_t slice) { return kPackets * slice / kCtas; }
  MK_DEVICE static constexpr uint32_t slice_of(uint32_t packet) {
    uint32_t slice = 0;
    while (first(slice + 1) <= packet) ++slice;
    return slice;
  }
  // Where CTA `from` puts this thread's packet, the i-th of the slice.
  MK_DEVICE static ptx::Words* place(GemmStorage<Config>& storage, uint32_t i, uint32_t from) {
    return reinterpret_cast<ptx::Words*>(storage.result) + ((i * kWarps + Shares<Config>::warp()) * kCtas + from) * kWordsOfWarp +
           ptx::lane_index();
  }

  // The consumer threads: of the cluster's `round`-th tile, `rows` of which are valid. store(packet, sum) for each of the thread's packets in the slice
  // of its CTA.
  template <class Store>
  MK_DEVICE static void add(GemmStorage<Config>& storage, const float (&d)[Shape::kHeld], uint32_t rows, uint32_t round, bool has_more,
                            const Store& store) {
    static_assert(kOfSlice * kCtas * kWarps * kWordsOfWarp * sizeof(ptx::Words) <= sizeof(storage.result), "room for a slice of all CTAs");
    const uint32_t cta = ptx::cluster_rank(), begin = first(cta), mine = first(cta + 1) - begin;
    const bool has_rows = Shares<Config>::warp() * kWarpRows < rows;
    if (round == 0) {
      ptx::cluster_meet();  // of the cluster's CTAs, which have initialized their barriers
    } else {
      ptx::cluster_wait(&storage.sums.taken, (round - 1) % 2);  // of the tile before
    }
    if (ptx::thread_index() == kWarpgroup) {
      const uint32_t warps = rows < Shape::kBlockM ? (rows + kWarpRows - 1) / kWarpRows : kWarps;
      ptx::mbarrier_arrive_expect(&storage.sums.filled, mine * warps * kCtas * kWordsOfWarp * sizeof(ptx::Words));
    }
    if (has_rows) {
#pragma unroll
      for (uint32_t packet = 0; packet < kPackets; ++packet) {
        const uint32_t slice = slice_of(packet);
        ptx::Words v;
#pragma unroll
        for (uint32_t j = 0; j < kPacketWords; ++j) v.word[j] = ptx::bits(d[packet * kPacketWords + j]);
        ptx::cluster_post_words(place(storage, packet - first(slice), cta), &storage.sums.filled, slice, v);
      }
      ptx::cluster_wait(&storage.sums.filled, round % 2);
#pragma unroll
      for (uint32_t i = 0; i < kOfSlice; ++i) {
        if (i >= mine) break;
        float sum[kPacketWords] = {};
#pragma unroll
        for (uint32_t from = 0; from < kCtas; ++from) {
          const ptx::Words v = ptx::load_shared(place(storage, i, from));
#pragma unroll
          for (uint32_t j = 0; j < kPacketWords; ++j) sum[j] += ptx::from_bits(v.word[j]);
        }
        store(begin + i, sum);
      }
    }
    if (!has_more) return;
    ptx::sync_warp();  // all lanes have read
    if (ptx::lane_index() < kCtas) ptx::cluster_give_back(&storage.sums.taken, ptx::lane_index());
  }
};

}  // namespace mkernel
