// Who waits for what.
#include <algorithm>

#include "model.hpp"

namespace mkcpu {

namespace {
constexpr size_t kLongestThreadList = 60;  // characters

std::string wait_text(const Cta& cta, const Waiting& w, const std::string& flag) {
  const auto object = static_cast<uint32_t>(w.object);
  switch (w.kind) {
    case Wait::kNone:
      return "can run (polling)";
    case Wait::kMbarrier: {
      const Mbarrier& bar = cta.mbarriers.at(object);
      return format("mbarrier at shared +0x%x, parity %u (in phase %u: %u of %u arrivals and %lld bytes missing)", object,
                    static_cast<uint32_t>(w.value), bar.phase(), bar.pending, bar.expected, static_cast<long long>(bar.transactions));
    }
    case Wait::kBarrier:
      return format("named barrier %u (%u of %u threads there)", object, cta.barriers[object].arrived, cta.barriers[object].expected);
    case Wait::kCta:
      return format("sync_cta (%u of %u threads there)", cta.everyone.arrived, cta.live);
    case Wait::kCluster:
      return format("cluster_meet (%u of %u threads there)", cluster_barrier(cta).arrived, live_of_cluster(cta));
    case Wait::kWarp:
      return "the other lanes of its warp";
    case Wait::kWarpgroup:
      return "the other threads of its warpgroup, in wgmma_wait";
    case Wait::kStores:
      return "its bulk stores";
    case Wait::kRoom:
      return "room: its cluster begins when another one has ended";
    case Wait::kFlag:
      return format("flag %s >= %llu (now %llu)", flag.c_str(), static_cast<unsigned long long>(w.value),
                    static_cast<unsigned long long>(__atomic_load_n(reinterpret_cast<const uint64_t*>(w.object), __ATOMIC_RELAXED)));
  }
  return "?";
}
}  // namespace

std::string Scheduler::flag_name(uint64_t address) const {
  const std::lock_guard lock(names_lock);
  auto it = names.upper_bound(address);
  if (it != names.begin() && (--it, address < it->second.first + it->first)) {
    return format("%s +0x%llx", it->second.second.c_str(), static_cast<unsigned long long>(address - it->first));
  }
  return format("0x%llx", static_cast<unsigned long long>(address));
}

// One line per thing waited for, with the threads that wait for it.
std::string Scheduler::describe(const Launch& launch) const {
  std::string text;
  for (const auto& cta : launch.ctas) {
    std::vector<std::pair<const Fiber*, std::string>> groups;  // the first thread of each, and all of them
    for (uint32_t t = 0; t < launch.threads; ++t) {
      const Fiber& fiber = cta->fibers[t];
      if (fiber.finished) continue;
      uint32_t last = t;
      while (last + 1 < launch.threads && !cta->fibers[last + 1].finished && cta->fibers[last + 1].waiting == fiber.waiting) ++last;
      const std::string range = t == last ? format("%u", t) : format("%u-%u", t, last);
      auto group = groups.begin();
      while (group != groups.end() && !(group->first->waiting == fiber.waiting)) ++group;
      if (group == groups.end()) {
        groups.emplace_back(&fiber, range);
      } else if (group->second.size() < kLongestThreadList) {
        group->second += ", " + range;
      } else if (group->second.back() != '.') {
        group->second += ", ...";
      }
      t = last;
    }
    for (const auto& [fiber, threads] : groups) {
      const std::string flag = fiber->waiting.kind == Wait::kFlag ? flag_name(fiber->waiting.object) : std::string();
      text += format("rank %u, CTA %u, threads %s: %s\n", launch.rank, cta->index, threads.c_str(),
                     wait_text(*cta, fiber->waiting, flag).c_str());
    }
  }
  return text;
}

std::string Scheduler::report() const {
  std::string text;
  for (const auto& [id, launch] : launches) {
    if (launch->state == kRunningLaunch) text += describe(*launch);
  }
  return text;
}

}  // namespace mkcpu
