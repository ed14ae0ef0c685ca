// The command ring: commands off it in order, credits back in order (mkernel/proxy/ring.py is the reference).
#pragma once
#include <array>
#include <cstdint>

#include "abi.h"

namespace mkproxy {

// Where a transport says that a put is complete.
class Credits {
 public:
  virtual bool complete(uint64_t ticket) = 0;  // false: no such put is under way

 protected:
  ~Credits() = default;
};

class Ring final : public Credits {
 public:
  explicit Ring(abi::Ring* ring) : ring_(ring) {}

  uint64_t taken() const { return taken_; }
  uint64_t completed() const { return completed_; }
  bool launching() const { return __atomic_load_n(&ring_->launched, __ATOMIC_RELAXED) != __atomic_load_n(&ring_->ended, __ATOMIC_RELAXED); }
  bool captured() const { return __atomic_load_n(&ring_->captured, __ATOMIC_RELAXED) != 0; }

  bool waiting() const { return __atomic_load_n(&ring_->slots[taken_ & kMask].ticket, __ATOMIC_ACQUIRE) == taken_ + 1; }

  // The next command, which stays where it is until it is complete; its `ticket` counts from 0. Null if there is none.
  const abi::Command* take() {
    if (!waiting()) return nullptr;
    abi::Command& mine = commands_[taken_ & kMask];
    mine = ring_->slots[taken_ & kMask];
    mine.ticket = taken_;
    ++taken_;
    return &mine;
  }

  const abi::Command& at(uint64_t ticket) const { return commands_[ticket & kMask]; }

  // Notes that a command is complete; false if it is not in flight. `publish` tells the device.
  bool complete(uint64_t ticket) override {
    if (ticket < done_ || ticket >= taken_ || ended_[ticket & kMask]) return false;
    ended_[ticket & kMask] = true;
    while (done_ < taken_ && ended_[done_ & kMask]) ended_[done_++ & kMask] = false;
    return true;
  }

  void publish() {
    if (done_ == completed_) return;
    completed_ = done_;
    __atomic_store_n(&ring_->completed, completed_, __ATOMIC_RELEASE);
  }

 private:
  static constexpr uint64_t kMask = abi::kRingSlots - 1;
  abi::Ring* ring_;
  uint64_t taken_ = 0, done_ = 0, completed_ = 0;
  std::array<abi::Command, abi::kRingSlots> commands_{};  // taken and not complete
  std::array<bool, abi::kRingSlots> ended_{};             // complete, but not all before it
};

}  // namespace mkproxy
