// Sizes of the attention role, and what its warps hand each other: items (q tiles) and blocks of keys.
#pragma once
#include "ptx.cuh"

namespace mkernel {

// Config constants that are read here: kHeadDim (64 or 128), kKeyBlock (keys of a block), kStages (of K), kValueStages (of V), kBeside (bytes of shared
// memory that something else needs), kQueryWarpgroups (each has 64 rows of a q tile), kFloat16, kCausal.
template <class Config>
struct AttentionShape {
  static constexpr uint32_t kHeadDim = Config::kHeadDim, kKeyBlock = Config::kKeyBlock;
  static constexpr uint32_t kStages = Config::kStages, kValueStages = Config::kValueStages, kAllStages = kStages + kValueStages;
  static constexpr uint32_t kWarpgroups = Config::kQueryWarpgroups, kThreads = 128 * (1 + kWarpgroups);
  static constexpr uint32_t kBlockRows = 64, kQueryRows = kBlockRows * kWarpgroups;  // of a warpgroup, and of a q tile
  static constexpr uint32_t kRowBytes = 128, kPanelColumns = 64;                     // the swizzle's row: 64 columns of 16 bits
  static constexpr uint32_t kPanels = kHeadDim / kPanelColumns;
  static constexpr uint32_t kQueryPanel = kBlockRows * kRowBytes, kKeyPanel = kKeyBlock * kRowBytes;  // bytes
  static constexpr uint32_t kQueryBytes = kWarpgroups * kPanels * kQueryPanel, kKeyBytes = kPanels * kKeyPanel;
  // Panels of o that a warpgroup has room for at once: all, where that fits beside q and the stages.
  static constexpr uint32_t kOutPanels = 2 * kQueryBytes + kAllStages * kKeyBytes + 1024 + Config::kBeside <= 227 * 1024 ? kPanels : 1;
  // What one of several CTAs that share an item leaves for the one that merges: every thread's sums of weighted values, and its rows' bases and sums.
  static constexpr uint32_t kPartialUnits = kHeadDim / 8 + 1;  // of 16 bytes, per thread
  static constexpr uint32_t kPartialBytes = kWarpgroups * kPartialUnits * 128 * 16;
  static constexpr bool kCausal = Config::kCausal != 0;
  static constexpr ptx::Element kElement = Config::kFloat16 ? ptx::Element::kFloat16 : ptx::Element::kBFloat16;
  // Registers per thread. The launch gives every thread the same number; the producer's warpgroup gives up some for the others.
  static constexpr uint32_t kNeeded = kHeadDim / 2 + kKeyBlock / 2 + kKeyBlock / 4 + 24;  // of a consumer: o, scores, weights, and the rest
  static constexpr uint32_t kConsumerRegisters = kWarpgroups == 3 ? 160
                                                 : kNeeded <= 160 ? 208
                                                 : kNeeded <= 200 ? 216
                                                 : kNeeded <= 220 ? 224
                                                                  : 232;
  static constexpr uint32_t kProducerRegisters = (kWarpgroups == 3 ? 512 : 504) - kWarpgroups * kConsumerRegisters;
  static_assert(kHeadDim == 64 || kHeadDim == 128, "kHeadDim");
  static_assert(kKeyBlock % 16 == 0 && kKeyBlock <= 256, "kKeyBlock: whole steps of wgmma");
  static_assert(kWarpgroups == 2 || (kWarpgroups == 3 && kNeeded <= 160), "kQueryWarpgroups: three have fewer registers each");
  static_assert(128 * (kProducerRegisters + kWarpgroups * kConsumerRegisters) <= 65536, "register file");
};

constexpr uint32_t kNoItem = 0xffffffffu;    // instead of an item's number: there are no more
constexpr uint32_t kNoCredit = 0xffffffffu;  // instead of a block's credit: nobody waits for this block

// A q tile: rows of one head of one batch, whose global positions are consecutive. An op that splits keys (Op::kSplits) gives several CTAs the same rows,
// and each other keys of them. The last part merges all.
struct AttentionItem {
  uint32_t batch, head;  // coordinates of q's and o's tensor maps
  int32_t row;           // first row in these maps
  uint32_t rows;         // valid ones, 1 .. kQueryRows; the others are neither stored nor have they any effect
  int32_t position;      // global, of the first row: with kCausal row i sees the keys whose position is at most position + i
  uint32_t part = 0, parts = 1;
};

// At most kKeyBlock keys of one KV head, whose global positions are consecutive, and their values.
struct KeyBlock {
  uint32_t map;  // the op's: which pair of tensor maps
  int32_t row;   // coordinates in these maps
  uint32_t head, batch;
  uint32_t rows;     // valid keys, 1 .. kKeyBlock
  int32_t position;  // global, of the first key
  bool is_padded;    // what the maps have after the valid rows is not zero: other rows, or anything
  bool waits;        // nobody has waited for these keys yet: the op does, before they are loaded
  uint32_t credit;   // not kNoCredit: the op is told when this block and all before it have been loaded
};

}  // namespace mkernel
