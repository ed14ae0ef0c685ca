// Blocks of one size, between pages that may not be touched: fiber stacks and shared memory.
#pragma once
#include <cstddef>
#include <vector>

namespace mkcpu {

// Blocks are mapped in slabs, handed out again and again, and unmapped with the pool. A page between blocks parts a mapping in two, and a process has
// 65530 at most (vm.max_map_count), without which nobody in it gets memory: beyond kMostGuards of all pools together, blocks have no such pages.
class GuardedPool {
 public:
  GuardedPool(size_t block_bytes, size_t blocks_per_slab);
  ~GuardedPool();
  GuardedPool(const GuardedPool&) = delete;
  GuardedPool& operator=(const GuardedPool&) = delete;

  char* take();  // page-aligned; throws std::bad_alloc
  void give(char* block) { free_.push_back(block); }
  size_t block_bytes() const { return block_bytes_; }  // whole pages
  bool guards(const void* address) const;              // does it lie in a page between blocks?

 private:
  static constexpr size_t kMostGuards = 24576;
  void grow();
  size_t page_bytes_, block_bytes_, blocks_per_slab_;
  std::vector<char*> slabs_;
  std::vector<char*> free_;
  size_t guards_ = 0;  // of kMostGuards
};

}  // namespace mkcpu
