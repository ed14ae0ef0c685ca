#pragma once
#include "gemm_allreduce.cuh"
#include "mirror_owned.cuh"

// Where a finished tile is: by the distance of its owner's node and its owner's local rank.
MKC_API void mirror_finished(uint32_t rank, const void* shape, uint32_t distance, uint32_t local_rank, uint32_t index,
                             mirror::Place* out) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  *out = mirror::Place{mkernel::result_offset(p, distance, index), local_rank, mkernel::finished_flag(p, distance, local_rank, index)};
}
MKC_API uint32_t mirror_put_results(uint32_t rank, const void* shape, uint32_t distance, uint32_t first, mirror::Place* out) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  const mkernel::Tiles tiles(p);
  return put(mkernel::ResultsToSend{tiles}, rank, distance, first, out);
}
