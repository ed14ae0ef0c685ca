#include "memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <new>

namespace mkcpu {

static std::atomic<size_t> guards_of_all{0};

GuardedPool::GuardedPool(size_t block_bytes, size_t blocks_per_slab)
    : page_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
      block_bytes_((block_bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_),
      blocks_per_slab_(blocks_per_slab) {}

GuardedPool::~GuardedPool() {
  guards_of_all -= guards_;
  for (char* slab : slabs_) munmap(slab, blocks_per_slab_ * (block_bytes_ + page_bytes_) + page_bytes_);
}

// A slab: guard, block, guard, block, ..., guard.
void GuardedPool::grow() {
  const size_t pitch = block_bytes_ + page_bytes_;
  void* slab =
      mmap(nullptr, blocks_per_slab_ * pitch + page_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (slab == MAP_FAILED) throw std::bad_alloc();
  char* base = static_cast<char*>(slab);
  slabs_.push_back(base);
  const size_t guards = blocks_per_slab_ + 1;
  const bool guarded = guards_of_all + guards <= kMostGuards;
  if (guarded) guards_ += guards, guards_of_all += guards;
  for (size_t i = guards; i-- > 0;) {
    if (guarded) (void)mprotect(base + i * pitch, page_bytes_, PROT_NONE);  // if it fails, blocks work without
    if (i < blocks_per_slab_) free_.push_back(base + i * pitch + page_bytes_);
  }
}

char* GuardedPool::take() {
  if (free_.empty()) grow();
  char* block = free_.back();
  free_.pop_back();
  return block;
}

bool GuardedPool::guards(const void* address) const {
  const char* p = static_cast<const char*>(address);
  const size_t pitch = block_bytes_ + page_bytes_, bytes = blocks_per_slab_ * pitch + page_bytes_;
  for (const char* slab : slabs_) {
    if (p >= slab && p < slab + bytes) return static_cast<size_t>(p - slab) % pitch < page_bytes_;
  }
  return false;
}

}  // namespace mkcpu
