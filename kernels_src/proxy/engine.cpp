// The engine's hot path: ring, order per destination, posting, polling, credits, pace. What is rare is said in a Report, and Python acts on it.
// The reference is mkernel/proxy/engine.py. One thread calls.
#include <sched.h>
#include <time.h>

#include <array>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "abi.h"
#include "interface.hpp"
#include "ring.hpp"
#include "transport.hpp"
#include "rc.hpp"
#include "srd.hpp"
#include "striped.hpp"

namespace mkproxy {

uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
}

class Engine {
 public:
  Engine(abi::Ring* ring, Report& report) : ring_(ring), report_(report) {}
  virtual ~Engine() = default;
  virtual Result step() = 0;
  virtual bool under_way(uint64_t pair) const = 0;
  virtual bool lose(uint64_t link) = 0;
  Ring& ring() { return ring_; }
  Report& report() { return report_; }

 protected:
  Ring ring_;
  Report& report_;
};

template <class Transport>
class EngineOf final : public Engine {
 public:
  EngineOf(const Setup& setup, Report& report)
      : Engine(reinterpret_cast<abi::Ring*>(setup.ring), report),
        transport_(setup, report, ring_),
        batch_(setup.batch),
        held_(transport_.num_peers()) {}

  bool under_way(uint64_t pair) const override { return transport_.under_way(pair); }

  bool lose(uint64_t link) override {
    if constexpr (requires { transport_.lose(link); }) return transport_.lose(link);
    return false;
  }

  // Takes commands, posts, flushes, polls and returns credits, once. Never blocks.
  Result step() override {
    bool posted = false, done = false;
    if (!post_held(posted)) return kTrouble;
    for (uint64_t i = 0; i < batch_; ++i) {
      const abi::Command* put = ring_.take();
      if (put == nullptr) break;
      const int64_t peer = transport_.peer_of(put->dst_rank);
      if (peer < 0) return fail(report_, kBadPut, put->ticket), kTrouble;
      const Post answer = held_[peer].any ? Post::kRefused : transport_.post(*put, static_cast<uint64_t>(peer));
      if (answer == Post::kFailed) return kTrouble;
      if (answer == Post::kRefused) hold(static_cast<uint64_t>(peer), put->ticket);
      posted |= answer == Post::kAccepted;
    }
    if (posted && !transport_.flush()) return kTrouble;
    if (!transport_.poll(done)) return kTrouble;
    ring_.publish();
    report_.taken = ring_.taken();
    report_.completed = ring_.completed();
    return posted || done ? kMoved : kIdle;
  }

 private:
  // Puts to one rank that were taken from the ring and not accepted, in order: tickets, linked by `next_`.
  struct Held {
    bool any = false;
    uint64_t first = 0, last = 0;
  };

  void hold(uint64_t peer, uint64_t ticket) {
    Held& held = held_[peer];
    if (held.any) {
      next_[held.last % abi::kRingSlots] = ticket;
    } else {
      held.first = ticket;
      ++num_held_;
    }
    held.any = true;
    held.last = ticket;
  }

  // Offers what was refused again.
  bool post_held(bool& posted) {
    for (uint64_t peer = 0; num_held_ > 0 && peer < held_.size(); ++peer) {
      Held& held = held_[peer];
      while (held.any) {
        const Post answer = transport_.post(ring_.at(held.first), peer);
        if (answer == Post::kFailed) return false;
        if (answer == Post::kRefused) break;
        posted = true;
        held.any = held.first != held.last;
        held.first = next_[held.first % abi::kRingSlots];
        if (!held.any) --num_held_;
      }
    }
    return true;
  }

  Transport transport_;
  const uint64_t batch_;
  std::vector<Held> held_;  // by peer
  uint64_t num_held_ = 0;   // peers that puts are held for
  std::array<uint64_t, abi::kRingSlots> next_{};
};

uint64_t nap(Pace& pace, bool moved, uint64_t now, bool launching, bool captured) {
  if (moved) {
    pace.moved_ns = now;
    return 0;
  }
  const uint64_t idle = now - pace.moved_ns;
  if (idle < pace.spin_ns) return 0;
  if (!pace.follows) return std::min(idle / 8, pace.nap_ns);
  if (launching) return 0;
  if (captured) return idle < pace.graph_spin_ns ? 0 : pace.nap_ns;
  return std::min(idle / 8, pace.long_nap_ns);
}

}  // namespace mkproxy

using mkproxy::Engine;

namespace {
Engine& as_engine(void* p) { return *static_cast<Engine*>(p); }

template <class Transport>
Engine* make(const mkproxy::Setup& setup, mkproxy::Report& report) {
  return new mkproxy::EngineOf<Transport>(setup, report);
}
}  // namespace

void* mkp_create(const mkproxy::Setup* setup, mkproxy::Report* report) {
  try {
    if (setup->kind == mkproxy::kNull) return make<mkproxy::NullTransport>(*setup, *report);
    if (setup->kind == mkproxy::kRc) return make<mkproxy::RcTransport>(*setup, *report);
    if (setup->kind == mkproxy::kStriped) return make<mkproxy::StripedTransport>(*setup, *report);
    const int64_t unfit = mkproxy::SrdTransport::unfit(*setup);
    if (unfit < 0) return make<mkproxy::SrdTransport>(*setup, *report);
    report->pair = static_cast<uint64_t>(unfit);
    mkproxy::fail(*report, mkproxy::kUnfit);
    return nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void mkp_destroy(void* engine) { delete static_cast<Engine*>(engine); }

int mkp_step(void* engine) { return as_engine(engine).step(); }

int mkp_spin(void* engine, mkproxy::Pace* pace, int moved, uint64_t limit_ns) {
  Engine& self = as_engine(engine);
  const uint64_t begin = mkproxy::now_ns();
  bool any = moved != 0, ever = false;
  while (true) {
    const mkproxy::Result result = self.step();
    if (result == mkproxy::kTrouble) return result;
    any |= result == mkproxy::kMoved;
    ever |= any;
    const uint64_t now = mkproxy::now_ns();
    self.report().nap_ns = mkproxy::nap(*pace, any, now, self.ring().launching(), self.ring().captured());
    if (self.report().nap_ns != 0 || now - begin >= limit_ns) return ever ? mkproxy::kMoved : mkproxy::kIdle;
    any = false;
    sched_yield();
  }
}

int mkp_lose(void* engine, uint64_t link) {
  mkproxy::Report& report = as_engine(engine).report();
  report.trouble = mkproxy::kNone;
  report.nap_ns = 0;
  return as_engine(engine).lose(link) ? mkproxy::kMoved : mkproxy::kTrouble;
}

int mkp_waiting(void* engine) { return as_engine(engine).ring().waiting(); }

int mkp_under_way(void* engine, uint64_t pair) { return as_engine(engine).under_way(pair); }

int mkp_put(void* engine, uint64_t ticket, uint64_t* fields) {
  const abi::Command& put = as_engine(engine).ring().at(ticket);
  const uint64_t words[] = {put.channel, put.dst_rank, put.src_offset, put.dst_offset, put.bytes, put.signal_offset, put.signal_value};
  for (const uint64_t word : words) *fields++ = word;
  return put.ticket == ticket;
}

uint64_t mkp_nap(mkproxy::Pace* pace, int moved, uint64_t now_ns, int launching, int captured) {
  return mkproxy::nap(*pace, moved != 0, now_ns, launching != 0, captured != 0);
}
