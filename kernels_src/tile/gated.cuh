// The values of a result: what the tensor cores have summed up, or SwiGLU of it.
#pragma once
#include "tile/op.cuh"

namespace mkernel {

// silu(gate) * up in float32, silu(x) = x / (1 + exp(-x)). With clamp > 0 gate is first cut off above clamp, and up outside of +-clamp; NaNs pass.
// The relative error is at most (|gate| + 8) * 2^-23 (that of ptx::exp2 and ptx::reciprocal, and of the rounding of gate * log2(e)); below
// gate = -87, where silu is smaller than 2^-119, it may be 0.
MK_DEVICE float swiglu(float gate, float up, float clamp) {
  constexpr float kLog2E = 1.44269504f;
  const float limit = clamp > 0.0f ? clamp : ptx::from_bits(0x7f800000u);  // infinity
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate * ptx::reciprocal(1.0f + ptx::exp2(-kLog2E * gate)) * up;
}

// Eight values of a thread, the first of which would be the `first` of d if d held results. Of a gated tile d holds panels of gate and of up in turn.
template <class Config, bool kGated = GemmShape<Config>::kGated>
struct Results {
  const float* value;
  template <class Op>
  MK_DEVICE Results(const Op&, const float (&d)[GemmShape<Config>::kHeld], uint32_t first) : value(&d[first]) {}
  MK_DEVICE float operator[](uint32_t i) const { return value[i]; }
};
template <class Config>
struct Results<Config, true> {
  float value[8];
  template <class Op>
  MK_DEVICE Results(const Op& op, const float (&d)[GemmShape<Config>::kHeld], uint32_t first) {
    constexpr uint32_t kValues = kPanel / 2;  // of a panel, per thread
    const float clamp = op.clamp();
    const float* gate = &d[first / kValues * 2 * kValues + first % kValues];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) value[i] = swiglu(gate[i], gate[kValues + i], clamp);
  }
  MK_DEVICE float operator[](uint32_t i) const { return value[i]; }
};

}  // namespace mkernel
