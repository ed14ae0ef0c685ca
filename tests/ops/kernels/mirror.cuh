// allgather_gemm's schedule for the host, to be compared with mkernel/planner/gather_plan.py.
#pragma once
#include "allgather_gemm.cuh"
#include "mirror_world.cuh"

MKC_API uint32_t mirror_num_tiles(uint32_t rank, const void* shape) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  return mkernel::Tiles(p).num_tiles();
}

// Six words per tile: plane, row of tiles in it, column of tiles, slice, kind (1: a share of K, 2: a slice of the sum), share. With pairs of CTAs a number
// stands for two tiles.
MKC_API void mirror_tiles(uint32_t rank, const void* shape, uint32_t* out) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  const mkernel::Tiles tiles(p);
  for (uint32_t tile = 0; tile < tiles.num_tiles(); ++tile) {
    for (uint32_t cta = 0; cta < mkernel::Shape::kCluster; ++cta) {
      const mkernel::TileCoordinate c = tiles.coordinate_of(tile, cta);
      *out++ = c.plane, *out++ = c.m, *out++ = c.n, *out++ = c.slice, *out++ = c.is_sum ? 2 : c.is_share, *out++ = c.share;
    }
  }
}

MKC_API uint32_t mirror_num_chunks(const void* shape) { return mkernel::num_chunks(mirror::parameters(0, shape)); }

// Bytes from the start of the workspace, and of the flags.
MKC_API uint64_t mirror_shard_offset(const void* shape, uint32_t source) {
  return mkernel::shard_offset(mirror::parameters(0, shape), source);
}
MKC_API uint64_t mirror_flag_offset(const void* shape, uint32_t source, uint32_t chunk) {
  const mkernel::Parameters p = mirror::parameters(0, shape);
  return mkernel::flag_offset(p, mkernel::flag_index(p, source, chunk));
}

// What a tile waits for in one part: the numbers of the first and last of the blocks of all shards, rank by rank; none: all ones. And the row of
// the array that it reads where it begins.
MKC_API void mirror_waits(uint32_t rank, const void* shape, uint32_t tile, uint32_t* out) {
  const mkernel::Parameters p = mirror::parameters(rank, shape);
  const mkernel::Tiles tiles(p);
  const mkernel::TileCoordinate c = tiles.coordinate_of(tile, 0);
  const uint32_t begin = c.m * tiles.block_rows(), end = tiles.end_of(begin);
  out[0] = tiles.waits(c, 0) ? tiles.block_of(c.plane, begin) : 0xffffffffu;
  out[1] = tiles.waits(c, 0) ? tiles.block_of(c.plane, end - 1) : 0xffffffffu;
  out[2] = tiles.a_row(c);
}

// The number of a chunk; all ones if the way back leads elsewhere.
MKC_API uint32_t mirror_chunk_index(const void* shape, uint32_t block, uint32_t part) {
  const mkernel::Parameters p = mirror::parameters(0, shape);
  const uint32_t index = mkernel::chunk_index(p, block, part);
  const mkernel::Chunk back = mkernel::chunk_at(p, index);
  return back.block == block && back.part == part ? index : 0xffffffffu;
}

// Where a copy of a chunk of this rank's shard, piece by piece as CopyRing goes through it, reads: row and unit of the part map's box. Returns how
// many pieces.
MKC_API uint32_t mirror_pieces(const void* shape, uint32_t chunk, uint32_t* out) {
  const mkernel::Parameters p = mirror::parameters(0, shape);
  const mkernel::ShardPieces chunks{p};
  mkernel::Copied item = mkernel::own_copy(p, chunk, 0, mkernel::KeptRows{0, p.rows});
  uint32_t count = 0;
  for (uint32_t offset = 0; offset < item.bytes; offset += chunks.piece_bytes(), chunks.next_piece(item), ++count) {
    *out++ = item.row, *out++ = item.unit;
  }
  return count;
}
