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
  // The same, of an interval whose beginning waits in the buffer: where threads multiply there are no registers for it.
  MK_DEVICE void begin() {
    if (has_room()) records_[count_ + 1].begin = ptx::clock_ns();
  }
  MK_DEVICE void end(abi::TraceKind kind, uint32_t argument) {
    if (has_room()) record(kind, argument, records_[count_ + 1].begin);
  }
  MK_DEVICE void record(abi::TraceKind kind, uint32_t argument, uint64_t begin) {
    if (!has_room()) return;
    ++count_;
    records_[count_].kind = kind;
    records_[count_].argument = argument;
    records_[count_].begin = begin;
    records_[count_].end = ptx::clock_ns();
    records_[0].begin = count_;
  }

 private:
  MK_DEVICE bool has_room() const { return capacity_ != 0 && count_ + 1 < capacity_; }

  uint32_t capacity_;
  uint32_t count_ = 0;
  abi::TraceRecord* records_ = nullptr;
};

// A wait of any thread of this CTA for a system flag, since `begin`. The lane has many writers: its count may be more than there is room for.
MK_DEVICE void record_flag(const abi::World& world, uint32_t role, abi::FlagKind kind, uint32_t peer, uint32_t index, uint64_t begin) {
  const uint32_t first = (ptx::cta_index() * abi::kTraceLanes + abi::kTraceFlagLane) * world.trace_capacity;
  abi::TraceRecord* record = reinterpret_cast<abi::TraceRecord*>(world.trace) + first;
  const uint32_t at = ptx::atomic_add(reinterpret_cast<uint32_t*>(&record->begin), 1) + 1;
  if (at >= world.trace_capacity) return;
  record += at;
  record->begin = begin;
  record->argument = index;
  record->kind = abi::kTraceFlag | kind << abi::kTraceFlagKindShift | role << abi::kTraceRoleShift | peer << abi::kTracePeerShift;
  record->end = ptx::clock_ns();
}

}  // namespace mkernel
