// The two products of a consumer warpgroup: scores of its 64 rows with a block of keys, and the block's values weighted by them.
#pragma once
#include "attention/storage.cuh"

namespace mkernel {

namespace detail {
constexpr uint32_t kStep = 16, kAtom = 1024;  // k of one wgmma; 8 rows of 128 bytes, after which the swizzle repeats
}

// A warpgroup's rows of q in the layout of wgmma's A.
template <class Config>
MK_DEVICE void load_query(uint32_t (&query)[AttentionShape<Config>::kQueryWords], const char* q) {
  using Shape = AttentionShape<Config>;
  const uint32_t lane = ptx::lane_index(), row = ptx::thread_index() % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (uint32_t word = 0; word < Shape::kQueryWords; ++word) {
    const uint32_t unit = word / 4 * 2 + word / 2 % 2, panel = unit / 8, chunk = unit % 8 ^ row % 8;  // of 8 columns, swizzled
    const char* at = q + panel * Shape::kQueryPanel + (row + 8 * (word % 2)) * Shape::kRowBytes + chunk * 16 + lane % 4 * 4;
    query[word] = *reinterpret_cast<const uint32_t*>(at);
  }
}

// s = q * k^T. Committed, not waited for.
template <class Config>
MK_DEVICE void multiply_keys(float (&s)[Config::kKeyBlock / 2], const uint32_t (&query)[AttentionShape<Config>::kQueryWords], const char* q,
                             const char* k) {
  using Shape = AttentionShape<Config>;
  const uint64_t a = ptx::matrix_descriptor(q, 16, detail::kAtom), b = ptx::matrix_descriptor(k, 16, detail::kAtom);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t column = 0; column < Shape::kHeadDim; column += detail::kStep) {
    const uint32_t panel = column / Shape::kPanelColumns, inside = column % Shape::kPanelColumns * 2;
    const uint64_t keys = ptx::advance_descriptor(b, panel * Shape::kKeyPanel + inside);
    if constexpr (Shape::kQueryInRegisters) {
      ptx::wgmma_registers<Shape::kKeyBlock, Shape::kElement, ptx::Major::kK>(s, &query[column / 4], keys, column > 0);
    } else {
      ptx::wgmma<Shape::kKeyBlock, Shape::kElement, ptx::Major::kK, ptx::Major::kK>(
          s, ptx::advance_descriptor(a, panel * Shape::kQueryPanel + inside), keys, column > 0);
    }
  }
  ptx::wgmma_commit();
}

// o += weights * v; the weights are 16-bit pairs in the layout of wgmma's A, which is that of s. Committed, not waited for.
template <class Config>
MK_DEVICE void multiply_values(float (&o)[Config::kHeadDim / 2], const uint32_t (&weights)[Config::kKeyBlock / 4], const char* v) {
  using Shape = AttentionShape<Config>;
  const uint64_t b = ptx::matrix_descriptor(v, Shape::kKeyPanel, detail::kAtom);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t key = 0; key < Shape::kKeyBlock; key += detail::kStep) {
    ptx::wgmma_registers<Shape::kHeadDim, Shape::kElement, ptx::Major::kMN>(o, &weights[key / 4],
                                                                            ptx::advance_descriptor(b, key * Shape::kRowBytes), true);
  }
  ptx::wgmma_commit();
}

template <class Config>
MK_DEVICE void round_weights(uint32_t (&weights)[Config::kKeyBlock / 4], const float (&s)[Config::kKeyBlock / 2]) {
#pragma unroll
  for (uint32_t i = 0; i < Config::kKeyBlock / 4; ++i) weights[i] = ptx::pack<AttentionShape<Config>::kElement>(s[2 * i], s[2 * i + 1]);
}

template <uint32_t Count>
MK_DEVICE void rescale_rows(float (&o)[Count], const float (&factor)[2]) {
#pragma unroll
  for (uint32_t j = 0; j < Count; ++j) o[j] *= factor[j / 2 % 2];
}

}  // namespace mkernel
