// Online softmax of the rows that a thread of a consumer warpgroup shares with the three others of its quad.
#pragma once
#include "attention/shape.cuh"

namespace mkernel {

// Scores of a block are s[4 j + 2 i + h]: row i of the thread's two (8 apart), key 8 j + 2 * (lane % 4) + h. They become weights
// 2^(score * scale_log2 - base), where the base of a row is within kSlack of its largest score so far, or above. So the weights are at most 2^kSlack,
// which float16 holds, and what has been summed up is seldom rescaled (Milakov and Gimelshein 2018; the slack: FlashAttention-4).
class RowSums {
 public:
  static constexpr float kSlack = 8.0f;

  MK_DEVICE RowSums() {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) base_[i] = minus_infinity(), shift_[i] = sum_[i] = 0.0f;
  }
  MK_DEVICE static float minus_infinity() { return ptx::from_bits(0xff800000u); }

  // Makes weights of scores and adds them to the sums. Returns whether some base of the warp's rows has changed; then what has been summed up so far is to
  // be multiplied by `rescale`. Each lane compares its own scores; the lanes of a row tell each other only where one of them has found a larger base, which
  // is seldom after the first blocks. Warp function.
  template <uint32_t Count>
  MK_DEVICE bool add(float (&s)[Count], float scale_log2, float (&rescale)[2]) {
    float largest[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) largest[i] = largest_of_row(s, i) * scale_log2;
    const bool grows = ptx::any_of_warp(largest[0] > base_[0] + kSlack || largest[1] > base_[1] + kSlack);
    if (grows) {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        largest[i] = ptx::maximum(largest[i], ptx::shuffle_xor(largest[i], 1));
        largest[i] = ptx::maximum(largest[i], ptx::shuffle_xor(largest[i], 2));
        const bool row_grows = largest[i] > base_[i] + kSlack;
        rescale[i] = row_grows ? ptx::exp2(base_[i] - largest[i]) : 1.0f;
        sum_[i] *= rescale[i];
        base_[i] = row_grows ? largest[i] : base_[i];
        shift_[i] = base_[i] == minus_infinity() ? 0.0f : base_[i];  // a row that has seen no key yet: all of its weights are 0
      }
    }
#pragma unroll
    for (uint32_t j = 0; j < Count; ++j) s[j] = ptx::exp2(s[j] * scale_log2 - shift_[j / 2 % 2]);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < Count; j += 4) sum_[i] += s[j + 2 * i], sum_[i] += s[j + 2 * i + 1];
    }
    return grows;
  }

  // The sums of whole rows instead of each thread's own part; once, after the last add(). Warp function.
  MK_DEVICE void reduce() {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      sum_[i] += ptx::shuffle_xor(sum_[i], 1);
      sum_[i] += ptx::shuffle_xor(sum_[i], 2);
    }
  }
  // Of several parts of the keys: base and sum of row i, and the merged sums of parts that have these.
  MK_DEVICE float base(uint32_t i) const { return base_[i]; }
  MK_DEVICE float sum(uint32_t i) const { return sum_[i]; }
  MK_DEVICE void set_base(uint32_t i, float base) { base_[i] = base; }
  MK_DEVICE float merge(uint32_t i, float base,
                        float sum) {  // to sums of this base, which is not smaller; returns what the part is to be multiplied by
    const float weight = base == minus_infinity() ? 0.0f : ptx::exp2(base - base_[i]);
    sum_[i] += weight * sum;
    return weight;
  }

  // What sums of weighted values are multiplied by, and log(sum of exp(score * scale)). A row that has seen no key: 1, since these sums are 0, and
  // -infinity.
  MK_DEVICE float factor(uint32_t i) const { return sum_[i] == 0.0f ? 1.0f : ptx::reciprocal(sum_[i]); }
  MK_DEVICE float lse(uint32_t i) const {
    constexpr float kLn2 = 0.693147181f;
    return sum_[i] == 0.0f ? minus_infinity() : (base_[i] + ptx::log2(sum_[i])) * kLn2;
  }

 private:
  // By four chains, so that none of them has to wait for itself.
  template <uint32_t Count>
  MK_DEVICE static float largest_of_row(const float (&s)[Count], uint32_t i) {
    float largest[4];
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) largest[c] = s[4 * (c / 2) + 2 * i + c % 2];
#pragma unroll
    for (uint32_t j = 8; j < Count; j += 4) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) largest[j / 4 % 2 * 2 + h] = ptx::maximum(largest[j / 4 % 2 * 2 + h], s[j + 2 * i + h]);
    }
    return ptx::maximum(ptx::maximum(largest[0], largest[1]), ptx::maximum(largest[2], largest[3]));
  }

  float base_[2], shift_[2], sum_[2];  // shift_: the base, or 0 where that is minus infinity
};

// Hides keys from rows: of the thread's rows i = 0, 1 the first seen[i] keys of the block are seen.
template <uint32_t Count>
MK_DEVICE void hide_keys(float (&s)[Count], const int32_t (&seen)[2]) {
  const int32_t column = ptx::lane_index() % 4 * 2;
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const int32_t limit = seen[i] - column;
#pragma unroll
    for (int32_t j = 0; j < int32_t(Count / 4); ++j) {
#pragma unroll
      for (int32_t h = 0; h < 2; ++h) {
        if (8 * j + h >= limit) s[4 * j + 2 * i + h] = RowSums::minus_infinity();
      }
    }
  }
}

}  // namespace mkernel
