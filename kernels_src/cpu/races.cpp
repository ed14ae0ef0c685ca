// Races between puts of engines and copies of kernels, and between copies: who does what to the same bytes at the same time.
#include "rows.hpp"

namespace mkcpu {

namespace {
const char* const kCopyNames[] = {"tma_load_3d", "bulk_load", "tma_store_3d", "bulk_store"};

struct Range {
  const char* begin;
  const char* end;
  bool overlaps(const Range& o) const { return begin < o.end && o.begin < end; }
};

// The first byte of the range that the copy touches; null: none.
const char* meet(const AsyncCopy& copy, const Range& range) {
  const char* at = nullptr;
  for_global(copy, [&](const char* global, size_t bytes) {
    if (at == nullptr && range.overlaps({global, global + bytes})) at = std::max(global, range.begin);
  });
  return at;
}

std::string thread_name(const AsyncCopy& copy) {
  return format("rank %u, CTA %u, thread %u", copy.cta->launch->rank, copy.cta->index, copy.issuer->thread);
}

const char* name_of(const AsyncCopy& copy) { return kCopyNames[static_cast<int>(copy.kind)]; }
}  // namespace

std::string Scheduler::put_name(uint64_t put) const {
  const auto it = put_names.find(put);
  return it == put_names.end() ? "an engine" : it->second;
}

std::string Scheduler::writer_name(const Writer& writer) const {
  return writer.launch == 0 ? put_name(writer.put) : format("rank %u, CTA %u, thread %u", writer.rank, writer.cta, writer.thread);
}

std::string Scheduler::memory_name(uint64_t address) const {
  const std::string name = flag_name(address);
  return name.starts_with("0x") ? "no rank's segment" : name;
}

std::string Scheduler::race_of(const AsyncCopy& copy) const {
  const Range all{copy.first, copy.last};
  for (const auto& [number, put] : puts) {
    const Range dst{put.dst, put.dst + put.bytes}, src{put.src, put.src + put.bytes};
    if (!put.landed && all.overlaps(dst)) {
      if (const char* at = meet(copy, dst)) {
        return format("race: %s %s global memory at %p (%s), which %s is writing", name_of(copy), copy.is_load() ? "reads" : "writes", at,
                      memory_name(reinterpret_cast<uint64_t>(at)).c_str(), put_name(number).c_str());
      }
    }
    if (!copy.is_load() && all.overlaps(src)) {
      if (const char* at = meet(copy, src)) {
        return format("race: %s writes global memory at %p (%s), which %s is reading", name_of(copy), at,
                      memory_name(reinterpret_cast<uint64_t>(at)).c_str(), put_name(number).c_str());
      }
    }
  }
  return {};
}

std::string Scheduler::race_of_store(const AsyncCopy& store) const {
  if (!puts.empty()) {
    std::string race = race_of(store);
    if (!race.empty()) return race;
  }
  const Range all{store.first, store.last};
  for (const auto* list : {&eager, &lazy}) {
    for (const auto& other : *list) {
      if (!other->is_load() || other->cta == store.cta || !all.overlaps({other->first, other->last})) continue;
      const char* at = nullptr;
      for_global(store, [&](const char* global, size_t bytes) {
        if (at == nullptr) at = meet(*other, {global, global + bytes});
      });
      if (at == nullptr) continue;
      return format("race: %s writes global memory at %p (%s), which %s of %s is still reading", name_of(store), at,
                    memory_name(reinterpret_cast<uint64_t>(at)).c_str(), name_of(*other), thread_name(*other).c_str());
    }
  }
  return {};
}

uint64_t Scheduler::put_begins(char* dst, const char* src, size_t bytes, const char* name) {
  const uint64_t number = next_put++;
  put_names.emplace(number, name);
  puts.emplace(number, Put{dst, src, bytes, false});
  const Range to{dst, dst + bytes}, from{src, src + bytes};
  for (const auto* list : {&eager, &lazy}) {
    for (const auto& copy : *list) {
      const Range all{copy->first, copy->last};
      const char* written = all.overlaps(to) ? meet(*copy, to) : nullptr;
      const char* read = copy->is_load() || !all.overlaps(from) ? nullptr : meet(*copy, from);
      if (written == nullptr && read == nullptr) continue;
      const char* at = written != nullptr ? written : read;
      Launch& launch = *copy->cta->launch;
      fail_launch(launch, format("%s: race: %s is still %s global memory at %p (%s), which %s begins to %s", thread_name(*copy).c_str(),
                                 name_of(*copy), copy->is_load() ? "reading" : "writing", at,
                                 memory_name(reinterpret_cast<uint64_t>(at)).c_str(), name, written != nullptr ? "write" : "read"));
      finish_launch(launch, kFailed);  // takes the copy off the list
      return number;
    }
  }
  return number;
}

void Scheduler::put_lands(uint64_t put) {
  const auto it = puts.find(put);
  if (it != puts.end()) it->second.landed = true;
}

void Scheduler::put_ends(uint64_t put) { puts.erase(put); }

Writer Scheduler::engine_writer(const void* dst) const {
  for (const auto& [number, put] : puts) {
    if (!put.landed && put.dst == dst) return Writer{0, 0, 0, 0, number};
  }
  return Writer{};
}

void Scheduler::forget_writes() {
  written.clear();
  writers.clear();
  std::erase_if(put_names, [&](const auto& name) { return !puts.contains(name.first); });
}

}  // namespace mkcpu
