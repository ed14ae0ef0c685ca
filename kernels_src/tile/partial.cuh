// Partial tiles: what one rank has computed of a tile that another rank owns, on its way there.
//
// A partial tile is read only by the same threads of another CTA, so it is stored as threads hold it in registers: in blocks of 64 rows (one
// warpgroup) x 128 bytes, panel by panel, each thread's values 16 bytes at a time. Every access is then contiguous over a warp, a whole tile is
// contiguous for copies and puts, and a tile of few rows is a prefix of every block.
#pragma once
#include "tile/optional.cuh"

namespace mkernel {

constexpr uint32_t kBlockRows = 64, kBlockBytes = kBlockRows * 128;
constexpr uint32_t kBlockUnits = 4;                                     // of 16 bytes, per thread and block
constexpr uint32_t kWarpRows = 16, kWarpBytes = kBlockUnits * 32 * 16;  // of a block
static_assert(kBlockBytes == kBlockRows / kWarpRows * kWarpBytes, "a block is one warpgroup's");

MK_DEVICE uint32_t unit_offset(uint32_t unit) {  // in a block, of this thread's
  return ptx::thread_index() % 128 / 32 * kWarpBytes + (unit * 32 + ptx::lane_index()) * 16;
}
MK_DEVICE uint32_t block_bytes(uint32_t rows, uint32_t warpgroup) {  // of a tile of so many rows: whole warps'
  const uint32_t begin = warpgroup * kBlockRows, left = rows > begin ? rows - begin : 0;
  return left >= kBlockRows ? kBlockBytes : (left + kWarpRows - 1) / kWarpRows * kWarpBytes;
}
// Stores to a peer, a piece at a time, each complete before the next is issued. One thread. If all CTAs store whole tiles at once, the stores that
// the link cannot take yet wait in the SMs, in front of their loads: gemm_reduce_scatter 8192 took 6 % longer (docs/speed_log.md).
constexpr uint32_t kPacedBytes = 4096;
MK_DEVICE void store_paced(char* to, const char* smem, uint32_t bytes) {
#pragma unroll 1
  for (uint32_t offset = 0; offset < bytes; offset += kPacedBytes) {
    const uint32_t left = bytes - offset;
    ptx::bulk_store(to + offset, smem + offset, left < kPacedBytes ? left : kPacedBytes);
    ptx::store_commit();
    ptx::store_wait<0>();
  }
}
constexpr uint32_t largest_divisor(uint32_t of, uint32_t limit) {
  uint32_t divisor = of < limit ? of : limit;
  while (of % divisor != 0) --divisor;
  return divisor;
}

template <class Config>
struct Partial {
  static constexpr bool kFloat32 = optional::kPartialFloat32<Config>;
  static constexpr ptx::Element kElement = Config::kFloat16 ? ptx::Element::kFloat16 : ptx::Element::kBFloat16;
  static constexpr uint32_t kUnit = kFloat32 ? 4 : 8;  // values in 16 bytes
  static constexpr uint32_t kPanels =
      Config::kBlockN / 2 / (kUnit * kBlockUnits);  // a thread holds half as many values as there are columns
  static constexpr uint32_t kTileBytes = kPanels * 2 * kBlockBytes;

  MK_DEVICE static ptx::Words round(const float* e) {  // kUnit values, each rounded once
    ptx::Words v;
    if constexpr (kFloat32) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) v.word[i] = ptx::bits(e[i]);
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) v.word[i] = ptx::pack<kElement>(e[2 * i], e[2 * i + 1]);
    }
    return v;
  }
  MK_DEVICE static void add(float* e, const ptx::Words& v) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if constexpr (kFloat32) {
        e[i] += ptx::from_bits(v.word[i]);
      } else {
        float low, high;
        ptx::unpack<kElement>(v.word[i], low, high);
        e[2 * i] += low, e[2 * i + 1] += high;
      }
    }
  }
};

}  // namespace mkernel
