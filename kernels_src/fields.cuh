// Fields of a template that are either compiled into a kernel, as constants of Config, or come with every call, in p.fields (the constant is then
// kDynamic). The choice is made by mkernel/planner/specialize.py. Included after `struct Config`: kN, kK, kIntraComm, kInterSend, kInterReduce.
//
// The size of a role without CTAs is always the constant 0, so that its code is not in the kernel.
#pragma once
#include "ptx.cuh"

namespace mkernel {

constexpr uint32_t kDynamic = 0xffffffffu;  // a value that no field has

template <uint32_t Constant>
MK_DEVICE uint32_t field(uint32_t value) {
  if constexpr (Constant == kDynamic) {
    return value;
  } else {
    return Constant;
  }
}

// ---- extents of one rank's operands
template <class Parameters>
MK_DEVICE uint32_t extent_n(const Parameters& p) {
  return field<Config::kN>(p.fields.n);
}
template <class Parameters>
MK_DEVICE uint32_t extent_k(const Parameters& p) {
  return field<Config::kK>(p.fields.k);
}
static_assert(Config::kN == kDynamic || Config::kN % 8 == 0, "16-byte rows");
static_assert(Config::kK == kDynamic || Config::kK % 8 == 0, "16-byte rows");

// ---- CTAs per role: intra_comm first, then inter_send, then inter_reduce; the rest compute
template <class Parameters>
MK_DEVICE uint32_t num_intra_comm(const Parameters& p) {
  return field<Config::kIntraComm>(p.fields.intra_comm);
}
template <class Parameters>
MK_DEVICE uint32_t num_inter_send(const Parameters& p) {
  return field<Config::kInterSend>(p.fields.inter_send);
}
template <class Parameters>
MK_DEVICE uint32_t num_inter_reduce(const Parameters& p) {
  return field<Config::kInterReduce>(p.fields.inter_reduce);
}
template <class Parameters>
MK_DEVICE uint32_t first_inter_send(const Parameters& p) {
  return num_intra_comm(p);
}
template <class Parameters>
MK_DEVICE uint32_t first_inter_reduce(const Parameters& p) {
  return first_inter_send(p) + num_inter_send(p);
}
template <class Parameters>
MK_DEVICE uint32_t num_comm_ctas(const Parameters& p) {  // that do not compute at first
  return first_inter_reduce(p) + num_inter_reduce(p);
}
template <class Parameters>
MK_DEVICE abi::Role role_of(const Parameters& p,
                            uint32_t cta) {  // sums on the left: a comparison of unsigned with a constant 0 draws a warning
  if (cta + 1 <= first_inter_send(p)) return abi::kIntraComm;
  if (cta + 1 <= first_inter_reduce(p)) return abi::kInterSend;
  return cta + 1 <= num_comm_ctas(p) ? abi::kInterReduce : abi::kCompute;
}

}  // namespace mkernel
