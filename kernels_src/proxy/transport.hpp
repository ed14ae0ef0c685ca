// What an engine asks of a transport here, and the smallest one. mkernel/transport/base.py has the contract.
#pragma once
#include <cstdint>
#include <vector>

#include "abi.h"
#include "interface.hpp"
#include "ring.hpp"

namespace mkproxy {

enum class Post { kAccepted, kRefused, kFailed };

inline bool fail(Report& report, Trouble trouble, uint64_t ticket = 0) {
  report.trouble = trouble;
  report.ticket = ticket;
  return false;
}

// Completes every put at the next poll and moves nothing (mkernel/transport/null.py).
class NullTransport {
 public:
  NullTransport(const Setup&, Report& report, Ring& ring) : report_(report), ring_(ring) {}

  static constexpr uint64_t num_peers() { return 1; }
  static int64_t peer_of(uint32_t) { return 0; }
  bool under_way(uint64_t) const { return !posted_.empty(); }

  Post post(const abi::Command& put, uint64_t) {
    posted_.push_back(put.ticket);
    ++report_.outstanding;
    return Post::kAccepted;
  }

  bool flush() { return true; }

  bool poll(bool& moved) {
    for (const uint64_t ticket : posted_) {
      if (!ring_.complete(ticket)) return fail(report_, kMiscounted, ticket);
    }
    moved = !posted_.empty();
    report_.outstanding = 0;
    posted_.clear();
    return true;
  }

 private:
  Report& report_;
  Ring& ring_;
  std::vector<uint64_t> posted_;
};

}  // namespace mkproxy
