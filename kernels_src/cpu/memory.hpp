// Blocks of one size, between pages that may not be touched: fiber stacks and shared memory.
#pragma once
#include <cstddef>
#include <vector>

namespace mkcpu {

// Blocks are mapped in slabs, handed out again and again, and unmapped with the pool.
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
  void grow();
  size_t page_bytes_, block_bytes_, blocks_per_slab_;
  std::vector<char*> slabs_;
  std::vector<char*> free_;
};

}  // namespace mkcpu
