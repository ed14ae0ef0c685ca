// Operand A brought into shared memory by the consumers themselves (Op::kTakes), out of packets that everybody may read. K of a tile goes in
// rounds of as many k steps as the threads can hold in registers: while one round is multiplied, the loads of the next one are on their way. The
// loading thread loads only B.
#pragma once
#include "tile/op.cuh"
#include "tile/storage.cuh"

namespace mkernel {

constexpr uint32_t kTakenBarrier = 2;  // a named barrier of the consumers

// What a consumer thread brings of a round: units of 8 values, of which a row of a k step has 8. A tile's rows are rounded up to a power of two.
template <class Config, class Op>
class TakenRounds {
  using Shape = GemmShape<Config>;
  using Unit = typename Op::Unit;
  using Row = typename Op::Row;
  static constexpr uint32_t kUnits = 4;                                           // of a thread: eight spill
  static constexpr uint32_t kRowUnits = Shape::kBlockK * 2 / sizeof(ptx::Words);  // of a row in a k step
  static constexpr uint32_t kRowsAtOnce = kConsumerThreads / kRowUnits;           // by all threads
  static constexpr uint32_t kRowSteps = kUnits * kRowsAtOnce;                     // rows times k steps of a round

 public:
  MK_DEVICE TakenRounds(const Call& call, const Op& op, const TileCoordinate& c) : call_(call), op_(op), ring_(op) {
    const uint32_t rows = op.taken_rows(c);
    while ((1u << shift_) < rows) ++shift_;
    const uint32_t thread = ptx::thread_index() - kWarpgroup;
    chunk_ = thread % kRowUnits, first_ = thread / kRowUnits;
#pragma unroll
    for (uint32_t i = 0; i < kUnits; ++i) {
      const Row found = row(i) < rows ? op.taken_row(c, row(i)) : Row{0, true};
      offset_[i] = found.offset, is_valid_ |= uint32_t{row(i) < rows} << i, is_own_ |= uint32_t{found.is_own} << i;
    }
  }
  // Issues the loads of a round, of at most `left` k steps from `begin` on. Returns how many. Loads are predicated, not branched
  // around, and of one kind: else each would wait for those before it, which might be to the same registers. (And loads of all that is not there from
  // one place take L2 long.)
  MK_DEVICE uint32_t look(uint32_t begin, uint32_t left) {
    const uint32_t most = kRowSteps >> shift_, room = most < ring_.count() ? most : ring_.count();
    begin_ = begin, steps_ = left < room ? left : room;
#pragma unroll
    for (uint32_t i = 0; i < kUnits; ++i) units_[i].look(is_there(i) && has_values(i), at(i), taken(i).is_own);
    return steps_;
  }
  // Looks again while this rank has not entered, until all of it has come. False: there is more to come.
  MK_DEVICE bool look_ahead(EntryGate& entries) {
    return op_.tagged().look_ahead(call_, entries, units_, wanted(), [&](uint32_t i) { return at(i); });
  }
  // Waits until all of it has come. False: the call has failed.
  MK_DEVICE bool wait(const Entered& entered) {
    return op_.tagged().take(entered, units_, wanted(), [&](uint32_t i) { return at(i); });
  }
  // Stores it in the stages from `stage` on. What lies behind the end of K is zero there, as TMA loads have it. `keeps`: and where the op wants it.
  MK_DEVICE void store(const Entered& entered, GemmStorage<Config>& storage, uint32_t stage, bool keeps) const {
#pragma unroll
    for (uint32_t i = 0; i < kUnits; ++i) {
      if (!is_there(i)) continue;
      const uint32_t place = stage + step(i), at = place < ring_.count() ? place : place - ring_.count();
      const ptx::Words values = has_values(i) ? units_[i].values(taken(i).is_own) : ptx::Words{};
      ptx::store_shared(ring_.a(storage, at) + row(i) * kSwizzleBytes + (chunk_ ^ row(i) % 8) * sizeof(ptx::Words), values);
      if (keeps && has_values(i)) op_.keep(entered, taken(i), k(i), values);
    }
  }

 private:
  MK_DEVICE uint32_t place(uint32_t i) const { return first_ + i * kRowsAtOnce; }
  MK_DEVICE uint32_t row(uint32_t i) const { return place(i) & ((1u << shift_) - 1); }
  MK_DEVICE uint32_t step(uint32_t i) const { return place(i) >> shift_; }  // of the round
  MK_DEVICE uint32_t k(uint32_t i) const { return (begin_ + step(i)) * Shape::kBlockK + chunk_ * 8; }
  MK_DEVICE bool is_there(uint32_t i) const { return (is_valid_ >> i & 1) != 0 && step(i) < steps_; }
  MK_DEVICE bool has_values(uint32_t i) const { return k(i) < extent_k(op_.p); }
  MK_DEVICE uint32_t wanted() const {
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < kUnits; ++i) bits |= uint32_t{is_there(i) && has_values(i) && !taken(i).is_own} << i;
    return bits;
  }
  MK_DEVICE Row taken(uint32_t i) const { return Row{offset_[i], (is_own_ >> i & 1) != 0}; }
  MK_DEVICE const char* at(uint32_t i) const { return op_.taken_from(call_, taken(i), has_values(i) ? k(i) : 0); }

  const Call& call_;
  const Op& op_;
  const StageRing<Config> ring_;
  uint32_t shift_ = 0;      // of the power of two
  uint32_t chunk_, first_;  // this thread's unit of a row, and the first of its places
  uint32_t is_valid_ = 0, is_own_ = 0, begin_ = 0, steps_ = 0;
  uint32_t offset_[kUnits];
  Unit units_[kUnits] = {};
};

}  // namespace mkernel
