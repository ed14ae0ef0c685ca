// The rows of a TMA box in global memory.
#pragma once
#include <algorithm>

#include "model.hpp"

namespace mkcpu {

// Calls f(shared row, first shared row's address bits, global address, first valid element, number of valid elements) for every row of the
// box.
template <class F>
void for_rows(const AsyncCopy& copy, F f) {
  const CpuTensorMap& map = copy.map;
  char* shared = copy.shared;
  const int64_t x = copy.at[0], width = map.box[0];
  const int64_t begin = x < 0 ? std::min(-x, width) : 0;
  const int64_t left = static_cast<int64_t>(map.dims[0]) - x, end = left < begin ? begin : std::min(left, width);
  for (uint32_t i = 0; i < map.box[3] * map.box[2]; ++i) {
    const int64_t w = int64_t(copy.at[3]) + i / map.box[2], z = int64_t(copy.at[2]) + i % map.box[2];
    const bool plane_inside = w >= 0 && w < static_cast<int64_t>(map.dims[3]) && z >= 0 && z < static_cast<int64_t>(map.dims[2]);
    for (uint32_t j = 0; j < map.box[1]; ++j, shared += kRowBytes) {
      const int64_t y = int64_t(copy.at[1]) + j;
      const bool inside = plane_inside && y >= 0 && y < static_cast<int64_t>(map.dims[1]);
      const int64_t first = begin * map.element_bytes, bytes = inside ? (end - begin) * map.element_bytes : 0;
      const uint64_t row = map.base + static_cast<uint64_t>(inside ? w : 0) * map.strides[2] +
                           static_cast<uint64_t>(inside ? z : 0) * map.strides[1] + static_cast<uint64_t>(inside ? y : 0) * map.strides[0];
      f(shared, reinterpret_cast<char*>(row + static_cast<uint64_t>(x * map.element_bytes + first)), static_cast<uint32_t>(first),
        static_cast<uint32_t>(bytes));
    }
  }
}

// The same for any copy: f(global address, bytes).
template <class F>
void for_global(const AsyncCopy& copy, F f) {
  if (copy.kind == Copy::kPost) return;
  if (copy.kind == Copy::kBulkLoad || copy.kind == Copy::kBulkStore) {
    f(copy.global, copy.bytes);
  } else {
    for_rows(copy, [&](char*, char* global, uint32_t, uint32_t bytes) {
      if (bytes > 0) f(global, bytes);
    });
  }
}

}  // namespace mkcpu
