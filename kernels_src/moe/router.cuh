// Which row of which rank each choice of each token becomes: every rank works it out for itself from the routing of all ranks.
// All CTAs share the tokens of all ranks: each counts those of its range, they meet, each adds up what comes before its range, and gives its tokens
// their places. Few tokens each CTA counts all of, and need not meet before. All ranks see the same data, so all find the same fault, or none.
#pragma once
#include "moe/counting.cuh"

namespace mkernel {

class Router : public Counting {
 public:
  using Counting::Counting;

  // Gives this CTA's tokens their rows, slots and places, and writes the arrays of the result. All threads. Then the CTAs meet again.
  MK_DEVICE void place() {
    const uint32_t lane = ptx::lane_index();
    if (warp_ < kPlacers) {
      const Range range = groups();
#pragma unroll 1
      for (uint32_t group = range.begin; group < range.end; ++group) {
        if (is_few() && group % ptx::cta_count() != ptx::cta_index()) continue;
        const Token token = token_at(group * kGroup + lane);
        if (token.exists && range.end - range.begin > 1) copy_ids(ids_of(), kept_ids(token));  // else they are still there
        place_group(token);
      }
    }
    const uint32_t thread = ptx::cta_index() * kGemmThreads + ptx::thread_index(), threads = ptx::cta_count() * kGemmThreads;
#pragma unroll 1
    for (uint32_t e = ptx::cta_index() * kRoutingWarps + warp_; e < kExperts; e += ptx::cta_count() * kRoutingWarps) begin_blocks(e);
    fill_rest(thread, threads);
    if (thread < kNodes) {
      const bool other = thread != world_.node;
      word(r_.counts, thread * 2) = other ? length(listed_by(rank_of(thread, world_.local_rank))) : 0;
      word(r_.counts, thread * 2 + 1) = other ? length(sent_to(thread)) : 0;
    }
#pragma unroll 1
    for (uint32_t e = thread; e < kExperts; e += threads) word(r_.expert_offsets, e) = scratch_.first_row[world_.rank * kExperts + e];
#pragma unroll 1
    for (uint32_t e = thread; r_.expert_counts != 0 && e < kAllExperts; e += threads) word(r_.expert_counts, e) = scratch_.total[e];
    if (thread == 0) word(r_.expert_offsets, kExperts) = scratch_.rank_rows[world_.rank];
  }

  MK_DEVICE uint32_t num_items() const { return scratch_.first_item[kExperts]; }

 private:
  MK_DEVICE static uint32_t& word(uint64_t array, uint64_t i) { return reinterpret_cast<uint32_t*>(array)[i]; }

  // Gives the tokens of a group, one per lane, their places: before them come those of earlier groups, and those of lanes before. Warp function.
  MK_DEVICE void place_group(const Token& token) {
    const uint32_t lane = ptx::lane_index();
    uint32_t* before = scratch_.before[warp_];
    uint32_t* marks = scratch_.marks[warp_];
    count_columns(token, [&](uint32_t column, uint32_t) { ptx::shared_or(&marks[column], 1u << lane); });
    ptx::sync_warp();
    uint64_t leads = 0;  // for which columns this lane is the first of the group
    uint32_t place_first = kNone, place_listed = kNone;
    count_columns(token, [&](uint32_t column, uint32_t i) {
      const uint32_t earlier = marks[column] & ((1u << lane) - 1), at = before[column] + ptx::count_bits(earlier);
      if (earlier == 0) leads |= uint64_t(1) << i;
      if (i < kTopK) {
        place_choice(token, i, column, at);
      } else if (column < kListed) {
        place_first = at;
      } else if (column < kSent) {
        place_listed = at + in_earlier_bands(column);
      } else {
        const uint32_t node = (column - kSent) / kBands, place = at + in_earlier_bands(column);
        word(r_.sums, uint64_t(node) * r_.max_tokens + token.index) = place;
        tables_.sent((node + kNodes - world_.node) % kNodes)[place] = token.index;
      }
    });
    ptx::sync_warp();  // all have read
    count_columns(token, [&](uint32_t column, uint32_t i) {
      if ((leads >> i & 1) == 0) return;
      before[column] += ptx::count_bits(marks[column]);
      marks[column] = 0;
    });
    ptx::sync_warp();
    if (token.exists) place_token(token, place_first, place_listed);
  }

  // Choice i of a token is the at-th row of an expert.
  MK_DEVICE void place_choice(const Token& token, uint32_t i, uint32_t id, uint32_t at) const {
    if (!is_on(id, world_.node * kR, kR)) return;
    const uint32_t owner = id / kExperts, expert = id % kExperts, row = scratch_.first_row[id] + at;
    if (token.rank % kR == world_.local_rank) {
      const uint64_t choice = (uint64_t(token.rank / kR) * r_.max_tokens + token.index) * kTopK + i;
      word(r_.rows, choice) = place_of_row(owner % kR, row), word(r_.experts, choice) = expert;
    }
    if (owner != world_.rank) return;
    tables_.slots()[uint64_t(token.number) * kTopK + i] = scratch_.first_slot[expert] + at;
    word(r_.source, uint64_t(row) * 3) = token.rank, word(r_.source, uint64_t(row) * 3 + 1) = token.index;
    word(r_.source, uint64_t(row) * 3 + 2) = i;
    if constexpr (kWeighted) {
      const char* weights = record(world_, r_, token.rank) + sizeof(Header) + ids_bytes(r_);
      word(r_.row_weight, row) = ptx::load_word(weights + (uint64_t(token.index) * kTopK + i) * 4);
    }
  }

  // What the arrays say of a token beside its rows; and where it is fetched from.
  MK_DEVICE void place_token(const Token& token, uint32_t place_first, uint32_t place_listed) const {
    const uint32_t node = token.rank / kR;
    const bool on_rail = token.rank % kR == world_.local_rank, own = token.rank == world_.rank;
#pragma unroll 1
    for (uint32_t i = 0; i < kTopK; ++i) {
      const uint32_t id = ids_of()[i];
      const uint64_t choice = (uint64_t(node) * r_.max_tokens + token.index) * kTopK + i;
      if (own) word(r_.topk_ids, uint64_t(token.index) * kTopK + i) = id;
      if (on_rail && !is_on(id, world_.node * kR, kR)) word(r_.rows, choice) = kNone, word(r_.experts, choice) = kNone;
      if (!is_on(id, world_.rank, 1)) tables_.slots()[uint64_t(token.number) * kTopK + i] = kNone;
    }
    if (place_listed != kNone && on_rail) word(r_.listed, uint64_t(node) * r_.max_tokens + place_listed) = token.index;
#pragma unroll 1
    for (uint32_t other = 0; own && other < kNodes; ++other) {
      if (other == world_.node || band_of(other) == kNone) word(r_.sums, uint64_t(other) * r_.max_tokens + token.index) = kNone;
    }
    const uint32_t first = first_expert(token);
    if (first == kNone) return;
    const uint32_t number = scratch_.first_item[first] + interleaved(place_first, scratch_.total[kFirstOf + first]);
    tables_.items()[number] = item(token, place_listed);
  }

  // Tokens of an expert are in order of their ranks; they are fetched from all ranks in turn. The i-th of n comes as this one.
  MK_DEVICE static uint32_t interleaved(uint32_t i, uint32_t n) {
    const uint32_t each = n / kWorldSize, more = n % kWorldSize;  // the first `more` parts have one more
    const uint32_t long_ones = more * (each + 1);
    const uint32_t part = i < long_ones ? i / (each + 1) : more + (i - long_ones) / each;
    const uint32_t inside = i < long_ones ? i % (each + 1) : (i - long_ones) % each;
    return inside * kWorldSize + part;
  }
  MK_DEVICE Item item(const Token& token, uint32_t place_listed) const {
    const uint64_t at = uint64_t(token.index) * r_.row_bytes;
    if (token.rank == world_.rank) return Item{r_.x + at, kNone, token.number};
    const char* memory = heap(world_, token.rank % kR);
    if (token.rank / kR == world_.node) {
      const uint64_t x_offset = scratch_.x_offset[token.rank];
      if (x_offset != kStaged) return Item{reinterpret_cast<uint64_t>(memory + x_offset + at), kNone, token.number};
      const uint32_t flag = chunk_flag(r_, token.rank, token.index / kStagedRows);
      return Item{reinterpret_cast<uint64_t>(memory + r_.staged_offset + uint64_t(token.index) * r_.slot_bytes), flag, token.number};
    }
    const uint64_t area = r_.arrived_offset + uint64_t(node_distance(world_, token.rank) - 1) * r_.max_tokens * r_.row_bytes;
    const uint32_t flag = chunk_flag(r_, token.rank, place_listed / r_.put_rows);
    return Item{reinterpret_cast<uint64_t>(memory + area + uint64_t(place_listed) * r_.row_bytes), flag, token.number};
  }

  // A block of slots is complete when kSegmentRows rows have arrived; those that there are not count as there. Warp function.
  MK_DEVICE void begin_blocks(uint32_t e) const {
    const uint32_t rows = scratch_.total[world_.rank * kExperts + e], end = scratch_.first_slot[e + 1];
#pragma unroll 1
    for (uint32_t slot = scratch_.first_slot[e] + ptx::lane_index() * kSegmentRows; slot < end; slot += 32 * kSegmentRows) {
      const uint32_t before = slot - scratch_.first_slot[e], left = rows > before ? rows - before : 0;
      *tables_.arrived(slot / kSegmentRows) = left < kSegmentRows ? kSegmentRows - left : 0;
    }
  }

  // Rows between experts, and what the arrays of the routing have beyond the tokens that there are.
  MK_DEVICE void fill_rest(uint32_t thread, uint32_t threads) const {
#pragma unroll 1
    for (uint32_t e = thread; r_.alignment > 1 && e < kExperts; e += threads) {
      const uint32_t expert = world_.rank * kExperts + e;
      const uint32_t end = e + 1 < kExperts ? scratch_.first_row[expert + 1] : scratch_.rank_rows[world_.rank];
#pragma unroll 1
      for (uint32_t row = scratch_.first_row[expert] + scratch_.total[expert]; row < end; ++row) {
#pragma unroll 1
        for (uint32_t i = 0; i < 3; ++i) word(r_.source, uint64_t(row) * 3 + i) = kNone;
        if constexpr (kWeighted) word(r_.row_weight, row) = 0;
      }
    }
#pragma unroll 1
    for (uint32_t node = 0; node < kNodes; ++node) {
      const uint32_t rank = rank_of(node, world_.local_rank), tokens = scratch_.first_token[rank + 1] - scratch_.first_token[rank];
      const uint32_t listed = node != world_.node ? length(listed_by(rank)) : 0;
      const uint64_t at = uint64_t(node) * r_.max_tokens;
#pragma unroll 1
      for (uint32_t i = tokens * kTopK + thread; i < r_.max_tokens * kTopK; i += threads) {
        word(r_.rows, at * kTopK + i) = kNone, word(r_.experts, at * kTopK + i) = kNone;
      }
#pragma unroll 1
      for (uint32_t i = r_.tokens + thread; i < r_.max_tokens; i += threads) word(r_.sums, at + i) = kNone;
#pragma unroll 1
      for (uint32_t i = listed + thread; i < r_.max_tokens; i += threads) word(r_.listed, at + i) = kNone;
    }
  }
};

}  // namespace mkernel
