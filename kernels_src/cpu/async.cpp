// TMA and bulk copies. A load reads and writes at some later turn. A store reads shared memory at one turn and writes at another. Copies
// are independent of each other, so they happen in any order; half of them only when nothing else can run, which is the latest legal time.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "model.hpp"
#include "rows.hpp"

namespace mkcpu {

namespace {

constexpr uint32_t kSwizzleBytes = 16;                 // unit of the 128-byte swizzle
constexpr uint32_t kEagerOdds = 16, kLazyOdds = 1024;  // turns per copy

// Where a 16-byte chunk of a row of 128 bytes lies in it in shared memory: permuted by the row's address if the map says so.
uint32_t place(const AsyncCopy& copy, const char* shared_row, uint32_t chunk) {
  const auto address = static_cast<uint32_t>(shared_row - copy.cta->shared) + kSharedBase;
  return (copy.map.swizzled != 0 ? chunk ^ (address / kRowBytes % 8) : chunk) * kSwizzleBytes;
}

// ThreadSanitizer intercepts memcpy: every access is then one of the current (asynchronous) context.
void load(AsyncCopy& copy) {
  if (copy.kind == Copy::kPost) {  // not shown: whoever reads the word has waited for the barrier, which releases nothing else
    memcpy(copy.shared, copy.buffer.get(), copy.bytes);
    return;
  }
  if (copy.kind == Copy::kBulkLoad) {
    tsan::read(copy.global, copy.bytes);
    tsan::write(copy.shared, copy.bytes);
    memcpy(copy.shared, copy.global, copy.bytes);
    return;
  }
  for_rows(copy, [&](char* row, char* global, uint32_t first, uint32_t bytes) {
    char plain[kRowBytes] = {};
    if (bytes > 0) {
      tsan::read(global, bytes);
      memcpy(plain + first, global, bytes);
    }
    tsan::write(row, kRowBytes);
    for (uint32_t i = 0; i < kRowBytes / kSwizzleBytes; ++i) memcpy(row + place(copy, row, i), plain + i * kSwizzleBytes, kSwizzleBytes);
  });
}

void read_shared(AsyncCopy& copy) {
  copy.buffer.reset(new char[copy.bytes]);
  tsan::read(copy.shared, copy.bytes);
  memcpy(copy.buffer.get(), copy.shared, copy.bytes);
}

void write_global(AsyncCopy& copy) {
  Scheduler& s = scheduler();
  const Writer writer = writer_of(*copy.issuer);
  if (copy.kind == Copy::kBulkStore) {
    s.record_write(copy.global, copy.bytes, writer);
    tsan::write(copy.global, copy.bytes);
    memcpy(copy.global, copy.buffer.get(), copy.bytes);
    return;
  }
  for_rows(copy, [&](char* row, char* global, uint32_t first, uint32_t bytes) {
    const char* image = copy.buffer.get() + (row - copy.shared);
    char plain[kRowBytes];
    for (uint32_t i = 0; i < kRowBytes / kSwizzleBytes; ++i) memcpy(plain + i * kSwizzleBytes, image + place(copy, row, i), kSwizzleBytes);
    if (bytes > 0) {
      s.record_write(global, bytes, writer);
      tsan::write(global, bytes);
      memcpy(global, plain + first, bytes);
    }
  });
}

void complete_load(Scheduler& s, AsyncCopy& copy) {
  Cta& cta = *copy.cta;
  const auto offset = static_cast<uint32_t>(reinterpret_cast<char*>(copy.bar) - cta.shared);
  Mbarrier& bar = cta.mbarriers[offset];
  if (*copy.bar != bar.word()) {
    return s.fail_launch(
        *cta.launch, format("rank %u, CTA %u: the mbarrier at shared +0x%x was overwritten before a TMA load of thread %u completed on it",
                            cta.launch->rank, cta.index, offset, copy.issuer->thread));
  }
  bar.transactions -= copy.bytes;
  if (bar.transactions < -int64_t(kMaxCount)) {
    return s.fail_launch(*cta.launch, format("rank %u, CTA %u: the mbarrier at shared +0x%x received %lld bytes more than expected",
                                             cta.launch->rank, cta.index, offset, static_cast<long long>(-bar.transactions)));
  }
  if (copy.kind != Copy::kPost) tsan::release(&bar.sync[bar.phase()]);
  complete_phase_if_done(s, cta, offset, bar);
}

bool stores_done(const StoreGroups& stores, uint64_t below, bool read_only) {
  for (uint64_t g = stores.first; g < below; ++g) {
    const StoreGroups::Group& group = stores.groups[g - stores.first];
    if (group.reads_left != 0 || (!read_only && group.writes_left != 0)) return false;
  }
  return true;
}

void wake_if_stores_done(Scheduler& s, Fiber& fiber) {
  const Waiting& w = fiber.waiting;
  if (w.kind == Wait::kStores && stores_done(*fiber.stores, w.value, w.object != 0)) s.make_runnable(&fiber);
}

}  // namespace

void Scheduler::issue(std::unique_ptr<AsyncCopy> copy) {
  tsan::release(&copy->issued_sync);
  copy->first = copy->last = nullptr;
  for_global(*copy, [&](const char* global, size_t bytes) {
    if (copy->first == nullptr || global < copy->first) copy->first = global;
    if (global + bytes > copy->last) copy->last = global + bytes;
  });
  if (!puts.empty()) {
    const std::string race = race_of(*copy);
    if (!race.empty()) fail_fiber("%s", race.c_str());
  }
  Cta& cta = *copy->issuer->cta;
  (chance(2) ? eager : lazy).push_back(std::move(copy));
  progress();
  if (cta.copies_until_hold != 0 && --cta.copies_until_hold == 0) {
    hold(cta);
    return yield(false);
  }
  maybe_yield();
}

void Scheduler::record_write(const void* global, size_t bytes, const Writer& writer) {
  if (writers.empty() || !(writers.back() == writer)) writers.push_back(writer);
  const auto who = static_cast<uint32_t>(writers.size() - 1);
  const uint64_t first = reinterpret_cast<uint64_t>(global) / kLineBytes,
                 last = (reinterpret_cast<uint64_t>(global) + bytes - 1) / kLineBytes;
  for (uint64_t line = first; line <= last; ++line) written[line] = Written{turn, who};
}

void Scheduler::step_copies() {
  const auto step = [&](std::vector<std::unique_ptr<AsyncCopy>>& list, uint32_t odds) {
    if (list.empty() || !chance(odds)) return;
    const size_t index = random() % list.size();
    if (!is_held(*list[index]->issuer->cta)) execute(list, index);
  };
  step(eager, kEagerOdds);
  step(lazy, kLazyOdds);
}

bool Scheduler::execute_some_copy(bool of_held) {
  const size_t count = eager.size() + lazy.size(), begin = count == 0 ? 0 : random() % count;
  for (size_t tried = 0; tried < count; ++tried) {
    const size_t index = (begin + tried) % count;
    const bool is_eager = index < eager.size();
    auto& list = is_eager ? eager : lazy;
    const size_t place = is_eager ? index : index - eager.size();
    if (!of_held && is_held(*list[place]->issuer->cta)) continue;
    execute(list, place);
    return true;
  }
  return false;
}

void Scheduler::execute(std::vector<std::unique_ptr<AsyncCopy>>& list, size_t index) {
  std::unique_ptr<AsyncCopy> copy = std::move(list[index]);
  list[index] = std::move(list.back());
  list.pop_back();
  trace = trace * 31 + index + list.size();
  progress();
  Launch& launch = *copy->cta->launch;
  tsan::AsyncContext context;
  tsan::acquire(&copy->issued_sync);
  if (copy->is_load()) {
    load(*copy);
    complete_load(*this, *copy);
    if (!launch.error.empty()) finish_launch(launch, kFailed);
    return;
  }
  StoreGroups& stores = *copy->issuer->stores;
  StoreGroups::Group& group = stores.groups[copy->group - stores.first];
  if (!copy->has_read) {
    read_shared(*copy);
    copy->has_read = true;
    --group.reads_left;
    tsan::release(&group.read_sync);
    wake_if_stores_done(*this, *copy->issuer);
    (chance(2) ? eager : lazy).push_back(std::move(copy));
    return;
  }
  const std::string race = race_of_store(*copy);
  if (!race.empty()) {
    fail_launch(launch, format("rank %u, CTA %u, thread %u: ", launch.rank, copy->cta->index, copy->issuer->thread) + race);
    return finish_launch(launch, kFailed);
  }
  write_global(*copy);
  --group.writes_left;
  --launch.stores_in_flight;
  tsan::release(&group.write_sync);
  tsan::release(&launch.state);
  wake_if_stores_done(*this, *copy->issuer);
}

namespace {

constexpr uint32_t kTensorAlignment = 128;

std::unique_ptr<AsyncCopy> new_copy(Copy kind, const void* shared, uint32_t bytes) {
  check_begun(self());
  auto copy = std::make_unique<AsyncCopy>();
  copy->kind = kind;
  copy->issuer = &self();
  copy->cta = self().cta;
  copy->shared = static_cast<char*>(const_cast<void*>(shared));
  copy->bytes = bytes;
  return copy;
}

const CpuTensorMap& checked_map(const void* map, uint32_t rank, const char* what) {
  const auto& m = *static_cast<const CpuTensorMap*>(map);
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) scheduler().fail_fiber("%s: the tensor map at %p is not aligned to 64 bytes", what, map);
  if (m.magic != kTensorMapMagic) scheduler().fail_fiber("%s: %p is not a tensor map of target cpu", what, map);
  if (m.rank != rank) scheduler().fail_fiber("%s: the tensor map at %p has %u dimensions", what, map, m.rank);
  return m;
}

uint32_t box_bytes(const CpuTensorMap& map) { return kRowBytes * map.box[1] * map.box[2] * map.box[3]; }

void check_load(Cta& cta, uint32_t offset, uint32_t bytes, uint64_t* bar, const char* what) {
  if (!mbarrier_in(cta, shared_offset(bar, sizeof(uint64_t), sizeof(uint64_t), what), what).visible)
    scheduler().fail_fiber("%s: mbarrier_init_fence is missing between mbarrier_init and this", what);
  check_clean(cta, offset, bytes, what);
}

// Data that another CTA or an engine has written while this kernel runs comes with a flag. Between the acquire of the flag and a TMA load
// of the data there must be a fence.proxy.async: then the latest fence in this thread's past is younger than the write. And the acquire must be in its
// past: so is the latest one.
void check_source(const void* global, size_t bytes, const char* what) {
  Scheduler& s = scheduler();
  if (s.written.empty() || bytes == 0) return;
  const Fiber& fiber = self();
  const uint64_t first = reinterpret_cast<uint64_t>(global) / kLineBytes,
                 last = (reinterpret_cast<uint64_t>(global) + bytes - 1) / kLineBytes;
  for (uint64_t line = first; line <= last; ++line) {
    const auto it = s.written.find(line);
    const uint64_t known = std::min(fiber.past.fenced, fiber.past.acquired);
    if (it == s.written.end() || it->second.turn < fiber.cta->launch->begin || it->second.turn <= known) continue;
    const Writer& writer = s.writers[it->second.writer];
    if (writer.launch == fiber.cta->launch->id && writer.cta == fiber.cta->index) continue;
    if (it->second.turn <= fiber.past.fenced) {
      s.fail_fiber(
          "missing release or acquire: %s reads global memory at 0x%llx (%s), which %s has written later than this thread last acquired a "
          "flag, or any thread that it has waited for and that releases",
          what, static_cast<unsigned long long>(line * kLineBytes), s.memory_name(line * kLineBytes).c_str(),
          s.writer_name(writer).c_str());
    }
    s.fail_fiber(
        "missing fence.proxy.async: %s reads global memory at 0x%llx (%s), which %s has written later than the last fence_proxy_async "
        "before this load. After the acquire of the data's flag there must be one (or the flag was raised too early: by a thread that had "
        "not waited for its stores with store_wait; or the writer did not wait for this reader)",
        what, static_cast<unsigned long long>(line * kLineBytes), s.memory_name(line * kLineBytes).c_str(), s.writer_name(writer).c_str());
  }
}

void issue_store(std::unique_ptr<AsyncCopy> copy, uint32_t offset, const char* what) {
  check_clean(*copy->cta, offset, copy->bytes, what);
  Fiber& fiber = self();
  if (fiber.stores == nullptr) fiber.stores = std::make_unique<StoreGroups>();
  StoreGroups& stores = *fiber.stores;
  copy->group = stores.open();
  ++stores.groups.back().reads_left;
  ++stores.groups.back().writes_left;
  stores.open_used = true;
  ++fiber.cta->launch->stores_in_flight;
  scheduler().issue(std::move(copy));
}

void check_bulk(const void* global, uint32_t bytes, const char* what) {
  if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    scheduler().fail_fiber("%s: %u bytes at %p: both must be multiples of 16", what, bytes, global);
  }
}

std::atomic<uint64_t> filled_rows{0};

// Checks what a load reads, and counts the rows that lie outside, which it fills with zeros.
void check_rows(const AsyncCopy& copy, const char* what) {
  uint64_t filled = 0;
  for_rows(copy, [&](char*, char* global, uint32_t, uint32_t bytes) {
    check_source(global, bytes, what);
    filled += bytes == 0;
  });
  filled_rows.fetch_add(filled, std::memory_order_relaxed);
}

}  // namespace
}  // namespace mkcpu

using namespace mkcpu;

uint64_t mkc_filled_rows() { return filled_rows.load(std::memory_order_relaxed); }

void mkc_tensor_load(void* smem, const void* map, uint64_t* bar, uint32_t rank, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  const Call call;
  const char* what = rank == 3 ? "tma_load_3d" : "tma_load_4d";
  const CpuTensorMap& m = checked_map(map, rank, what);
  const uint32_t bytes = box_bytes(m);
  check_load(*call.fiber.cta, shared_offset(smem, bytes, kTensorAlignment, what), bytes, bar, what);
  auto copy = new_copy(Copy::kTensorLoad, smem, bytes);
  copy->map = m, copy->bar = bar, copy->at[0] = c0, copy->at[1] = c1, copy->at[2] = c2, copy->at[3] = c3;
  check_rows(*copy, what);
  call.scheduler.issue(std::move(copy));
}

// A copy for each CTA: they take effect in any order.
void mkc_tensor_load_multicast(void* smem, const void* map, uint64_t* bar, uint32_t ctas, int32_t c0, int32_t c1, int32_t c2) {
  const Call call;
  const char* what = "tma_load_3d_multicast";
  const uint32_t cluster = call.fiber.cta->launch->cluster;
  const CpuTensorMap& m = checked_map(map, 3, what);
  const uint32_t bytes = box_bytes(m), offset = shared_offset(smem, bytes, kTensorAlignment, what);
  const uint32_t bar_offset = shared_offset(bar, sizeof(uint64_t), sizeof(uint64_t), what);
  if (ctas == 0 || ctas >> cluster != 0) call.scheduler.fail_fiber("%s: CTAs 0x%x of a cluster of %u", what, ctas, cluster);
  for (uint32_t rank = 0; rank < cluster; ++rank) {
    if ((ctas >> rank & 1) == 0) continue;
    Cta& cta = cluster_cta(rank, what);
    check_load(cta, offset, bytes, bar, what);
    auto copy = new_copy(Copy::kTensorLoad, cta.shared + offset, bytes);
    copy->cta = &cta, copy->map = m, copy->bar = reinterpret_cast<uint64_t*>(cta.shared + bar_offset);
    copy->at[0] = c0, copy->at[1] = c1, copy->at[2] = c2, copy->at[3] = 0;
    check_rows(*copy, what);
    call.scheduler.issue(std::move(copy));
  }
}

void mkc_tensor_store(const void* map, const void* smem, uint32_t rank, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  const Call call;
  const char* what = rank == 3 ? "tma_store_3d" : "tma_store_4d";
  const CpuTensorMap& m = checked_map(map, rank, what);
  const uint32_t bytes = box_bytes(m), offset = shared_offset(smem, bytes, kTensorAlignment, what);
  if (c0 < 0 || c1 < 0 || c2 < 0 || c3 < 0) {
    scheduler().fail_fiber("%s: the box begins at (%d, %d, %d, %d): a GPU ends a kernel whose store begins before the tensor", what, c0, c1,
                           c2, c3);
  }
  auto copy = new_copy(Copy::kTensorStore, smem, bytes);
  copy->map = m, copy->at[0] = c0, copy->at[1] = c1, copy->at[2] = c2, copy->at[3] = c3;
  issue_store(std::move(copy), offset, what);
}

void mkc_bulk_load(void* smem, const void* global, uint32_t bytes, uint64_t* bar) {
  const Call call;
  check_bulk(global, bytes, "bulk_load");
  check_load(*call.fiber.cta, shared_offset(smem, bytes, 16, "bulk_load"), bytes, bar, "bulk_load");
  check_source(global, bytes, "bulk_load");
  auto copy = new_copy(Copy::kBulkLoad, smem, bytes);
  copy->global = static_cast<char*>(const_cast<void*>(global)), copy->bar = bar;
  call.scheduler.issue(std::move(copy));
}

void mkc_cluster_post(void* p, uint64_t* bar, uint32_t rank, const void* value, uint32_t bytes) {
  const Call call;
  Cta& cta = cluster_cta(rank, "cluster_post");
  const uint32_t offset = shared_offset(p, bytes, bytes, "cluster_post");
  const uint32_t at = shared_offset(bar, sizeof(uint64_t), sizeof(uint64_t), "cluster_post");
  mbarrier_in(cta, at, "cluster_post");
  auto copy = new_copy(Copy::kPost, cta.shared + offset, bytes);
  copy->cta = &cta;
  copy->bar = reinterpret_cast<uint64_t*>(cta.shared + at);
  copy->buffer.reset(new char[bytes]);
  memcpy(copy->buffer.get(), value, bytes);
  call.scheduler.issue(std::move(copy));
}

void mkc_bulk_store(void* global, const void* smem, uint32_t bytes) {
  const Call call;
  check_bulk(global, bytes, "bulk_store");
  const uint32_t offset = shared_offset(smem, bytes, 16, "bulk_store");
  auto copy = new_copy(Copy::kBulkStore, smem, bytes);
  copy->global = static_cast<char*>(global);
  issue_store(std::move(copy), offset, "bulk_store");
}

void mkc_store_commit() {
  const Call call;
  Fiber& fiber = call.fiber;
  if (fiber.stores == nullptr) fiber.stores = std::make_unique<StoreGroups>();
  fiber.stores->groups.emplace_back();
  fiber.stores->open_used = false;
}

void mkc_store_wait(uint32_t pending, bool read_only) {
  const Call call;
  Scheduler& s = call.scheduler;
  Fiber& fiber = call.fiber;
  if (fiber.stores == nullptr) return s.maybe_yield();
  StoreGroups& stores = *fiber.stores;
  const uint64_t below = stores.open() > pending ? stores.open() - pending : 0;
  if (stores_done(stores, below, read_only)) {
    s.maybe_yield();
  } else {
    s.park(Waiting{Wait::kStores, read_only, below, kNever});
  }
  for (uint64_t g = stores.first; g < below; ++g) {
    StoreGroups::Group& group = stores.groups[g - stores.first];
    tsan::acquire(&group.read_sync);
    if (!read_only) tsan::acquire(&group.write_sync);
  }
  if (stores.waited < below) stores.waited = below;
  while (!read_only && stores.first < below) stores.groups.pop_front(), ++stores.first;
}
