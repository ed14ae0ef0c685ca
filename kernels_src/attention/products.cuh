// The two products of a consumer warpgroup: scores of its 64 rows with a block of keys, and the block's values weighted by them.
#pragma once
#include "attention/storage.cuh"

namespace mkernel {

namespace detail {
constexpr uint32_t kStep = 16, kAtom = 1024;  // k of one wgmma; 8 rows of 128 bytes, after which the swizzle repeats
}

// s = q * k^T. Committed, not waited for.
template <class Config>
MK_DEVICE void multiply_keys(float (&s)[Config::kKeyBlock / 2], const char* q, const char* k) {
  using Shape = AttentionShape<Config>;
  const uint64_t a = ptx::matrix_descriptor(q, 16, detail::kAtom), b = ptx::matrix_descriptor(k, 16, detail::kAtom);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t column = 0; column < Shape::kHeadDim; column += detail::kStep) {
    const uint32_t panel = column / Shape::kPanelColumns, inside = column % Shape::kPanelColumns * 2;
    ptx::wgmma<Shape::kKeyBlock, Shape::kElement, ptx::Major::kK, ptx::Major::kK>(
        s, ptx::advance_descriptor(a, panel * Shape::kQueryPanel + inside), ptx::advance_descriptor(b, panel * Shape::kKeyPanel + inside),
        column > 0);
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
