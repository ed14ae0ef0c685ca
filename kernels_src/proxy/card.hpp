// What transports over verbs share: who is a peer, what lies inside the segments, polling, flags that this engine raises, receives.
#pragma once
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <vector>

#include "abi.h"
#include "interface.hpp"
#include "ring.hpp"
#include "transport.hpp"
#include "verbs.hpp"

namespace mkproxy {

uint64_t now_ns();

constexpr uint64_t kWord = 8;

class CardTransport {
 public:
  CardTransport(const Setup& setup, Report& report, Credits& credits)
      : setup_(setup),
        report_(report),
        credits_(credits),
        targets_(reinterpret_cast<const Target*>(setup.targets)),
        post_receive_(reinterpret_cast<PostReceive>(setup.post_receive)),
        poll_(reinterpret_cast<Poll>(setup.poll)),
        stored_(reinterpret_cast<void (*)()>(setup.stored)) {
    for (uint64_t peer = 0; peer < setup.num_peers; ++peer) {
      const uint64_t rank = targets_[peer].rank;
      if (by_rank_.size() <= rank) by_rank_.resize(rank + 1, -1);
      by_rank_[rank] = static_cast<int64_t>(peer);
    }
  }

  uint64_t num_peers() const { return setup_.num_peers; }
  int64_t peer_of(uint32_t rank) const { return rank < by_rank_.size() ? by_rank_[rank] : -1; }

  // Whether all that a put reads and writes lies inside the segments.
  bool inside(const abi::Command& put) const {
    const uint64_t offset = std::max(put.src_offset, put.dst_offset);
    return put.bytes <= setup_.heap_bytes && offset <= setup_.heap_bytes - put.bytes && is_flag(put.signal_offset);
  }

 protected:
  Post failed(Trouble trouble, const abi::Command& put) {
    fail(report_, trouble, put.ticket);
    return Post::kFailed;
  }

  bool is_flag(uint64_t offset) const {
    return offset % kWord == 0 && offset < setup_.signal_bytes && setup_.signal_bytes - offset >= kWord;
  }

  // Raises a flag of this rank. What the card has written before is visible to who sees it.
  void store(uint64_t offset, uint64_t value) {
    __atomic_store_n(reinterpret_cast<uint64_t*>(setup_.signals + offset), value, __ATOMIC_RELEASE);
    if (stored_ != nullptr) stored_();
  }

  // The address of a queue pair; `position`: among `Setup::pairs`.
  void* pair(uint64_t position) const { return reinterpret_cast<void*>(reinterpret_cast<const uint64_t*>(setup_.pairs)[position]); }

  bool post_receives(uint64_t position, ReceiveRequest* first) {
    ReceiveRequest* bad = nullptr;
    return posted(post_receive_(pair(position), first, &bad), position, kReceive);
  }

  // Whether a call of the provider went well; a provider answers with an errno, or with its negative.
  bool posted(int code, uint64_t position, Trouble trouble) {
    if (code == 0) return true;
    report_.pair = position;
    report_.code = static_cast<uint64_t>(code < 0 ? -code : code);
    return fail(report_, trouble);
  }

  // The next completions of a queue; negative if it failed, or one of them did. The code of a queue that fails is errno, as most providers
  // set it; what they answer then differs.
  int take(uint64_t arrivals, Completion* found) {
    errno = 0;
    const int count = poll_(reinterpret_cast<void*>(arrivals ? setup_.arrivals : setup_.sends), kPolled, found);
    report_.arrivals = arrivals;
    if (count < 0) {
      report_.code = static_cast<uint64_t>(errno);
      fail(report_, kPoll);
      return count;
    }
    report_.num_failed = 0;
    for (int i = 0; i < count; ++i) {
      const Completion& entry = found[i];
      if (entry.status != 0) report_.failed[report_.num_failed++] = {entry.id, entry.status, entry.pair, entry.vendor_error};
    }
    if (report_.num_failed == 0) return count;
    fail(report_, kFailed);
    return -1;
  }

  const Setup setup_;
  Report& report_;
  Credits& credits_;
  const Target* const targets_;

 private:
  const PostReceive post_receive_;
  const Poll poll_;
  void (*const stored_)();
  std::vector<int64_t> by_rank_;  // by rank; -1: no peer
};

}  // namespace mkproxy
