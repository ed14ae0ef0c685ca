// Device side of mk.trace: what one thread did, as (kind, argument, begin, end) records in this CTA's lane of the trace buffer.
#pragma once
#include "ptx.cuh"

namespace mkernel {

// One writer thread per lane. Tracing off costs one predicate per record.
class Trace {
 public:
  MK_DEVICE Trace(const abi::World& world, uint32_t lane) : capacity_(world.trace_capacity) {
    if (capacity_ != 0) {
      const uint64_t first = (uint64_t(ptx::cta_index()) * abi::kTraceLanes + lane) * capacity_;
      records_ = reinterpret_cast<abi::TraceRecord*>(world.trace) + first;
      count_ = static_cast<uint32_t>(records_[0].begin);
    }
  }
  MK_DEVICE uint64_t now() const { return capacity_ != 0 ? ptx::clock_ns() : 0; }
  MK_DEVICE void record(abi::TraceKind kind, uint32_t argument, uint64_t begin) {
    if (capacity_ == 0 || count_ + 1 >= capacity_) return;
    ++count_;
    records_[count_].kind = kind;
    records_[count_].argument = argument;
    records_[count_].begin = begin;
    records_[count_].end = ptx::clock_ns();
    records_[0].begin = count_;
  }

 private:
  uint32_t capacity_;
  uint32_t count_ = 0;
  abi::TraceRecord* records_ = nullptr;
};

}  // namespace mkernel
