// Constants of Config that kernels may leave out, with what they then are: those of tiles that only some ops have.
#pragma once
#include "ptx.cuh"

namespace mkernel::optional {

// 1 where B is [gate | up] and a result is silu(gate) * up (gated.cuh).
template <class Config>
constexpr bool kGated = false;
template <class Config>
  requires requires { Config::kGated; }
constexpr bool kGated<Config> = Config::kGated != 0;

// CTAs of a cluster (pair.cuh), and how many of these are neighbours in N.
template <class Config>
constexpr uint32_t kCluster = 1;
template <class Config>
  requires requires { Config::kCluster; }
constexpr uint32_t kCluster<Config> = Config::kCluster;
template <class Config>
constexpr uint32_t kClusterN = 1;
template <class Config>
  requires requires { Config::kClusterN; }
constexpr uint32_t kClusterN<Config> = Config::kClusterN;

// CTAs of a cluster that share K of a tile (cluster_sums.cuh).
template <class Config>
constexpr uint32_t kClusterK = 1;
template <class Config>
  requires requires { Config::kClusterK; }
constexpr uint32_t kClusterK<Config> = Config::kClusterK;

// 1 where partial tiles are added in the order of the ranks, whoever adds (multiply.cuh).
template <class Config>
constexpr bool kCanonical = false;
template <class Config>
  requires requires { Config::kCanonical; }
constexpr bool kCanonical<Config> = Config::kCanonical != 0;

// 0 where partial tiles have the type of the result, else 1 (partial.cuh).
template <class Config>
constexpr bool kPartialFloat32 = false;
template <class Config>
  requires requires { Config::kPartialFloat32; }
constexpr bool kPartialFloat32<Config> = Config::kPartialFloat32 != 0;

// 1 where CTAs may share K of a tile (shares.cuh).
template <class Config>
constexpr bool kShares = false;
template <class Config>
  requires requires { Config::kShares; }
constexpr bool kShares<Config> = Config::kShares != 0;

// 1 where wgmma has columns of B in the place of rows, and tiles have as many rows as the call says (shape.cuh).
template <class Config>
constexpr bool kSwapped = false;
template <class Config>
  requires requires { Config::kSwapped; }
constexpr bool kSwapped<Config> = Config::kSwapped != 0;

// Columns of such tiles.
template <class Config>
constexpr uint32_t kColumns = 128;
template <class Config>
  requires requires { Config::kColumns; }
constexpr uint32_t kColumns<Config> = Config::kColumns;

// Columns of a tile whose operands are not swapped, a multiple of 16, where these are not kBlockN but some fewer (shape.cuh).
template <class Config>
constexpr uint32_t kWidth = Config::kBlockN;
template <class Config>
  requires requires { Config::kWidth; }
constexpr uint32_t kWidth<Config> = Config::kWidth;

// 1 where consumer warpgroups have such tiles in turn, each all of its own.
template <class Config>
constexpr bool kAlternates = false;
template <class Config>
  requires requires { Config::kAlternates; }
constexpr bool kAlternates<Config> = Config::kAlternates != 0;

// 1 where the call says whether such tiles are narrow.
template <class Config>
constexpr bool kNarrow = false;
template <class Config>
  requires requires { Config::kNarrow; }
constexpr bool kNarrow<Config> = Config::kNarrow != 0;

// 1 where a call whose tiles have at most 64 rows has more stages, of less of A (storage.cuh).
template <class Config>
constexpr bool kLow = false;
template <class Config>
  requires requires { Config::kLow; }
constexpr bool kLow<Config> = Config::kLow != 0;

// 1 where shards travel in packets, 2 where in tagged ones, whose rows consumers have in registers, too (taken.cuh).
template <class Config>
constexpr uint32_t kPackets = 0;
template <class Config>
  requires requires { Config::kPackets; }
constexpr uint32_t kPackets<Config> = Config::kPackets;

}  // namespace mkernel::optional
