// The counting protocol of transport srd, without a network: what either end of a direction between two ranks knows. The reference, which
// says why, is mkernel/transport/counting.py and srd.py.
#pragma once
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "interface.hpp"

namespace mkproxy {

constexpr uint32_t kSequenceBits = 16;
constexpr uint32_t kSequences = 1u << kSequenceBits;
constexpr uint32_t kChannels = 1u << (32 - kSequenceBits);

// What a peer did that the protocol forbids (interface.hpp says which of the numbers each rule has).
struct Breach {
  Rule rule;
  uint64_t channel, sequence, number, limit;
};

// The sender's half: numbers puts, and counts what the peer allows.
class Outgoing {
 public:
  Outgoing(uint64_t credits, uint64_t window) : granted_(credits), window_(window) {}

  uint64_t room() const { return granted_ - sent_; }          // messages that may be sent now
  bool open() const { return begun_ - released_ < window_; }  // whether another put may begin
  void spend() { ++sent_; }                                   // counts a message that is sent

  // Begins a put of a channel, while `open`; returns its sequence.
  uint32_t begin(uint32_t channel) {
    if (channel >= next_.size()) next_.resize(channel + 1);
    ++begun_;
    const uint32_t sequence = next_[channel];
    next_[channel] = (sequence + 1) % kSequences;
    return sequence;
  }

  // Takes over the counts of a message of the peer, which may be older than those already known.
  bool update(uint64_t granted, uint64_t released, Breach& breach) {
    if (released > begun_) {
      breach = {kReleased, 0, 0, released, begun_};
      return false;
    }
    if (granted > granted_) granted_ = granted;
    if (released > released_) released_ = released;
    return true;
  }

 private:
  uint64_t granted_;
  const uint64_t window_;
  uint64_t sent_ = 0, begun_ = 0, released_ = 0;
  std::vector<uint32_t> next_;  // by channel: sequence of its next put
};

// The receiver's half: counts messages, and releases the flags of each channel in order. `release(offset, value, breach)` raises a flag.
class Incoming {
 public:
  Incoming(uint64_t credits, uint64_t window) : credits_(credits), window_(window), told_granted_(credits) {}

  // Whether the peer must be told of credits and releases now, by an update if nothing else is sent.
  bool due() const {
    const uint64_t more = credits_ + consumed_ - told_granted_;
    return 4 * more >= credits_ || 4 * (released_ - told_released_) >= window_;
  }

  // The counts (granted, released) for a message that is sent now.
  std::pair<uint64_t, uint64_t> tell() {
    told_granted_ = credits_ + consumed_;
    told_released_ = released_;
    return {told_granted_, told_released_};
  }

  // Counts a write whose bytes have come.
  template <class Release>
  bool write(uint32_t imm, Release&& release, Breach& breach) {
    ++consumed_;
    const uint32_t channel = imm >> kSequenceBits, sequence = imm & (kSequences - 1);
    Waiting* put = find(channel, sequence, breach);
    if (put == nullptr) return false;
    ++put->came;
    if (!put->announced || put->came < put->writes) return true;
    if (put->came > put->writes) {
      breach = {kMore, channel, sequence, put->came, put->writes};
      return false;
    }
    return advance(channels_[channel], sequence, release, breach);
  }

  // Takes the announcement of a put.
  template <class Release>
  bool announce(uint32_t channel, uint32_t sequence, uint32_t writes, uint64_t offset, uint64_t value, Release&& release, Breach& breach) {
    ++consumed_;
    Waiting* put = find(channel, sequence, breach);
    if (put == nullptr) return false;
    if (put->announced || put->came > writes) {
      breach = {put->announced ? kTwice : kFewer, channel, sequence, put->came, writes};
      return false;
    }
    *put = {put->came, writes, true, offset, value};
    return put->came < writes || advance(channels_[channel], sequence, release, breach);
  }

 private:
  // A put that has not been released: writes that came, and what its announcement says, if that came.
  struct Waiting {
    uint32_t came = 0, writes = 0;
    bool announced = false;
    uint64_t offset = 0, value = 0;
  };

  struct Channel {
    uint32_t next = 0;             // sequence of the next put to be released
    std::vector<Waiting> waiting;  // by sequence, modulo the size, a power of two: those from `next` on

    Waiting& at(uint32_t sequence) { return waiting[sequence & (waiting.size() - 1)]; }
  };

  Waiting* find(uint32_t channel, uint32_t sequence, Breach& breach) {
    if (channel >= channels_.size()) channels_.resize(channel + 1);
    Channel& state = channels_[channel];
    const uint32_t ahead = (sequence - state.next) & (kSequences - 1);
    if (ahead >= window_) {
      breach = {kWindow, channel, sequence, ahead, state.next};
      return nullptr;
    }
    if (ahead >= state.waiting.size()) grow(state, ahead);
    return &state.at(sequence);
  }

  static void grow(Channel& state, uint32_t ahead) {
    Channel larger{state.next, std::vector<Waiting>(std::bit_ceil(ahead + 16))};
    for (uint32_t i = 0; i < state.waiting.size(); ++i) larger.at(state.next + i) = state.at(state.next + i);
    state = std::move(larger);
  }

  // `sequence` is whole: raises its flag and those that waited for it, unless an earlier put is not whole.
  template <class Release>
  bool advance(Channel& state, uint32_t sequence, Release& release, Breach& breach) {
    if (sequence != state.next) return true;
    while (true) {
      Waiting& put = state.at(state.next);
      if (!put.announced || put.came != put.writes) return true;
      if (!release(put.offset, put.value, breach)) return false;
      put = {};
      state.next = (state.next + 1) % kSequences;
      ++released_;
    }
  }

  const uint64_t credits_, window_;
  uint64_t told_granted_, told_released_ = 0, consumed_ = 0, released_ = 0;
  std::vector<Channel> channels_;
};

}  // namespace mkproxy
