// How many tokens of all ranks each expert gets: the first half of what router.cuh does, and what it takes to read the tokens' choices.
#pragma once
#include "comm/grid.cuh"
#include "comm/status.cuh"
#include "moe/routing.cuh"

namespace mkernel {

// A fault as one number: the first token's is the least, whatever the order in which it is found. 0 bits: none.
MK_DEVICE uint64_t fault_of(uint32_t token, uint32_t choice, uint32_t code) { return uint64_t(token) << 32 | choice << 8 | code; }
constexpr uint64_t kNoFault = ~uint64_t(0);

struct Verdict {
  uint32_t code = 0;  // 0: the call goes on
  uint64_t details[3];
};

// In this order, by all threads: read_headers, count, a meeting of the CTAs unless is_few, add_up.
class Counting {
 public:
  // `counted_alone`: choices of all ranks that each CTA counts by itself.
  MK_DEVICE Counting(const Entered& entered, const RoutingArguments& r, RoutingScratch& scratch, uint32_t counted_alone)
      : entered_(entered),
        world_(entered.world()),
        r_(r),
        scratch_(scratch),
        counted_alone_(counted_alone),
        tables_(entered, r),
        warp_(ptx::warp_index()) {}

  // Reads who has how many tokens. All threads, once the flags of all records have come. False: a rank has too many (verdict).
  MK_DEVICE bool read_headers() {
#pragma unroll 1
    for (uint32_t rank = ptx::thread_index(); rank < kWorldSize; rank += kGemmThreads) {
      const ptx::Words words = ptx::load_global(record(world_, r_, rank));
      scratch_.first_token[rank + 1] = words.word[0];
      scratch_.x_offset[rank] = uint64_t(words.word[3]) << 32 | words.word[2];
    }
    ptx::sync_cta();
    if (ptx::thread_index() == 0) {
      scratch_.first_token[0] = 0;
      scratch_.rank_rows[0] = kNone;  // who has too many, for now
#pragma unroll 1
      for (uint32_t rank = kWorldSize; rank > 0; --rank) {
        if (scratch_.first_token[rank] > r_.max_tokens) scratch_.rank_rows[0] = rank - 1;
      }
      if (scratch_.rank_rows[0] == kNone) {
#pragma unroll 1
        for (uint32_t rank = 0; rank < kWorldSize; ++rank) scratch_.first_token[rank + 1] += scratch_.first_token[rank];
      }
    }
    ptx::sync_cta();
    const uint32_t rank = scratch_.rank_rows[0];
    if (rank == kNone) return true;
    verdict_ = Verdict{kTooManyTokens, {rank, scratch_.first_token[rank + 1], r_.max_tokens}};
    return false;
  }

  // Whether the tokens are so few that each CTA counts all of them, a warp each group. Known when the headers are.
  MK_DEVICE bool is_few() const { return num_groups() <= kPlacers && scratch_.first_token[kWorldSize] * kTopK <= counted_alone_; }

  // Counts the tokens of this CTA's range for every column. All threads. Then the CTAs meet (sync_grid), unless there are few.
  MK_DEVICE void count() {
    const uint32_t lane = ptx::lane_index();
    uint64_t fault = kNoFault;
    if (warp_ < kPlacers) {
#pragma unroll 1
      for (uint32_t c = lane; c < kColumns; c += 32) scratch_.before[warp_][c] = 0;
      ptx::sync_warp();
      const Range range = groups();
#pragma unroll 1
      for (uint32_t group = range.begin; group < range.end; ++group) {
        const Token token = token_at(group * kGroup + lane);
        const uint64_t found = token.exists ? read_ids(token) : kNoFault;
        fault = found < fault ? found : fault;
        count_columns(token, [&](uint32_t column, uint32_t) { ptx::shared_add(&scratch_.before[warp_][column], 1); });
      }
    }
    const uint64_t found = least(fault);
    if (lane == 0) scratch_.fault[warp_] = found;
    ptx::sync_cta();
    if (is_few()) return;
    uint32_t* counted = tables_.counted(ptx::cta_index());
#pragma unroll 1
    for (uint32_t c = ptx::thread_index(); c < kColumns; c += kGemmThreads) {
      uint32_t sum = 0;
#pragma unroll 1
      for (uint32_t w = 0; w < kPlacers; ++w) sum += scratch_.before[w][c];
      counted[c] = sum;
    }
    if (ptx::thread_index() == 0) {
      const uint64_t first = least_of_cta();
      counted[kColumns] = static_cast<uint32_t>(first), counted[kColumns + 1] = static_cast<uint32_t>(first >> 32);
    }
  }

  // What comes before this CTA's range, where every expert begins, and whether the routing is right. All threads. False: it is not (verdict).
  MK_DEVICE bool add_up() {
    const uint32_t lane = ptx::lane_index();
    if (!is_few()) add_ctas();
    uint32_t* ctas_before = scratch_.marks[0];  // of few tokens nothing
#pragma unroll 1
    for (uint32_t c = ptx::thread_index(); c < kColumns; c += kGemmThreads) {
      uint32_t before = is_few() ? 0 : ctas_before[c];
      uint32_t own[kPlacers];
#pragma unroll
      for (uint32_t w = 0; w < kPlacers; ++w) own[w] = scratch_.before[w][c];
#pragma unroll
      for (uint32_t w = 0; w < kPlacers; ++w) {
        scratch_.before[w][c] = before;
        scratch_.marks[w][c] = 0;
        before += own[w];
      }
      if (is_few()) scratch_.total[c] = before;
    }
    ptx::sync_cta();
    // Of each rank its rows, then this rank's slots and the rows that it fetches: a warp each.
#pragma unroll 1
    for (uint32_t i = warp_; i < kWorldSize + 2; i += kRoutingWarps) {
      const bool is_rows = i < kWorldSize, is_slots = i == kWorldSize;
      const uint32_t* counts = scratch_.total + (is_rows ? i * kExperts : is_slots ? world_.rank * kExperts : kFirstOf);
      uint32_t* first = is_rows ? scratch_.first_row + i * kExperts : is_slots ? scratch_.first_slot : scratch_.first_item;
      const uint32_t all = scan(counts, is_rows || is_slots ? r_.alignment : 1, is_slots ? kSegmentRows : 1, first);
      if (lane == 0) (is_rows ? scratch_.rank_rows[i] : first[kExperts]) = all;
    }
    ptx::sync_cta();
    return judge(least_of_cta());
  }
  MK_DEVICE const Verdict& verdict() const { return verdict_; }

  // Rows of an expert of this rank, those that its alignment adds included.
  MK_DEVICE uint32_t rows_of(uint32_t e) const {
    const uint32_t* first = scratch_.first_row + world_.rank * kExperts;
    return (e + 1 < kExperts ? first[e + 1] : scratch_.rank_rows[world_.rank]) - first[e];
  }

 protected:
  struct Range {
    uint32_t begin, end;
  };
  struct Token {
    uint32_t number, rank, index;  // among those of all ranks; its rank, and its number there
    bool exists;
  };

  // The columns that all CTAs have counted: of all in scratch_.total, of those before this one in scratch_.marks[0]; and the first fault of any. The
  // warps share the CTAs, and have many loads under way at once. All threads.
  MK_DEVICE void add_ctas() {
    const uint32_t lane = ptx::lane_index(), per_cta = groups_per_cta(), ctas = (num_groups() + per_cta - 1) / per_cta;
    uint32_t* ctas_before = scratch_.marks[0];
#pragma unroll 1
    for (uint32_t c = ptx::thread_index(); c < kColumns; c += kGemmThreads) scratch_.total[c] = ctas_before[c] = 0;
    ptx::sync_cta();
    constexpr uint32_t kAtOnce = 6;
    constexpr uint32_t kBlocks = (kColumns + 31) / 32;  // of columns, a lane each: load i is of one block, of one of the warp's CTAs
    const auto cta_of = [&](uint32_t i) { return warp_ + i / kBlocks * kRoutingWarps; };
    const uint32_t loads = warp_ < ctas ? ((ctas - warp_ - 1) / kRoutingWarps + 1) * kBlocks : 0;
#pragma unroll 1
    for (uint32_t begin = 0; begin < loads; begin += kAtOnce) {
      uint32_t counted[kAtOnce];
#pragma unroll
      for (uint32_t n = 0; n < kAtOnce; ++n) {
        const uint32_t i = begin + n, c = i % kBlocks * 32 + lane;
        if (i < loads && c < kColumns) counted[n] = tables_.counted(cta_of(i))[c];
      }
#pragma unroll
      for (uint32_t n = 0; n < kAtOnce; ++n) {
        const uint32_t i = begin + n, c = i % kBlocks * 32 + lane;
        if (i >= loads || c >= kColumns) continue;
        ptx::shared_add(&scratch_.total[c], counted[n]);
        if (cta_of(i) < ptx::cta_index()) ptx::shared_add(&ctas_before[c], counted[n]);
      }
    }
    uint64_t fault = kNoFault;
#pragma unroll 1
    for (uint32_t other = ptx::thread_index(); other < ctas; other += kGemmThreads) {
      const uint32_t* counted = tables_.counted(other);
      const uint64_t found = uint64_t(counted[kColumns + 1]) << 32 | counted[kColumns];
      fault = found < fault ? found : fault;
    }
    fault = least(fault);
    if (lane == 0) scratch_.fault[warp_] = fault;
    ptx::sync_cta();
  }

  MK_DEVICE uint32_t num_groups() const { return (scratch_.first_token[kWorldSize] + kGroup - 1) / kGroup; }
  MK_DEVICE uint32_t groups_per_cta() const { return (num_groups() + ptx::cta_count() - 1) / ptx::cta_count(); }
  // The groups of this warp: contiguous, and those of a CTA's warps follow each other; or of all CTAs' warps the same, where there are few.
  MK_DEVICE Range groups() const {
    const uint32_t all = num_groups(), per_cta = groups_per_cta(), per_warp = (per_cta + kPlacers - 1) / kPlacers;
    if (is_few()) return Range{warp_, warp_ < all ? warp_ + 1 : warp_};
    const uint32_t first = ptx::cta_index() * per_cta, last = first + per_cta < all ? first + per_cta : all;
    const uint32_t begin = first + warp_ * per_warp, end = begin + per_warp < last ? begin + per_warp : last;
    return Range{begin, end};
  }
  MK_DEVICE Token token_at(uint32_t number) const {
    uint32_t rank = 0;
    const bool exists = number < scratch_.first_token[kWorldSize];
#pragma unroll 1
    while (exists && number >= scratch_.first_token[rank + 1]) ++rank;
    return Token{number, rank, number - scratch_.first_token[rank], exists};
  }

  // The ids of the lane's token, kNone where a choice is not routed; and where they are kept for when it gets its places. Loops over them are unrolled
  // only where they are copied, or the code would be ten times as long.
  MK_DEVICE uint32_t* ids_of() const { return scratch_.ids[warp_][ptx::lane_index()]; }
  MK_DEVICE uint32_t* kept_ids(const Token& token) const { return tables_.ids() + uint64_t(token.number) * kTopK; }
  MK_DEVICE static void copy_ids(uint32_t* to, const uint32_t* from) {
    uint32_t ids[kTopK];
#pragma unroll
    for (uint32_t i = 0; i < kTopK; ++i) ids[i] = ptx::load_word(from + i);
#pragma unroll
    for (uint32_t i = 0; i < kTopK; ++i) to[i] = ids[i];
  }

  // Checks the ids of a token, and keeps those that are right. Returns the first fault.
  MK_DEVICE uint64_t read_ids(const Token& token) const {
    const char* given = record(world_, r_, token.rank) + sizeof(Header) + uint64_t(token.index) * kTopK * 4;
    uint32_t* ids = ids_of();
    uint64_t fault = kNoFault;
    copy_ids(ids, reinterpret_cast<const uint32_t*>(given));
#pragma unroll 1
    for (uint32_t i = 0; i < kTopK; ++i) {
      const uint32_t id = ids[i];
      uint32_t code = id != kNone && id >= kAllExperts ? kBadExpert : 0;
#pragma unroll 1
      for (uint32_t j = 0; j < i; ++j) {
        if (id != kNone && id == ids[j]) code = kTwice;
      }
      if (code != 0 && fault == kNoFault) fault = fault_of(token.number, i, code);
      ids[i] = code != 0 ? kNone : id;
    }
    if (is_few()) return fault;  // a warp has one group
    uint32_t* kept = kept_ids(token);
#pragma unroll
    for (uint32_t i = 0; i < kTopK; ++i) kept[i] = ids[i];
    return fault;
  }
  MK_DEVICE static bool is_on(uint32_t id, uint32_t first_rank, uint32_t ranks) {  // one of the experts of these ranks; kNone is not
    return id - first_rank * kExperts < ranks * kExperts && id != kNone;
  }
  // The first expert of this rank that a token has, counted from 0; kNone: it has none.
  MK_DEVICE uint32_t first_expert(const Token& token) const {
    uint32_t first = kNone;
#pragma unroll 1
    for (uint32_t i = 0; i < kTopK; ++i) {
      const uint32_t expert = ids_of()[i] - world_.rank * kExperts;
      if (expert < kExperts && expert < first) first = expert;
    }
    return first;
  }
  // The band of a token in the list of a node; kNone: it has no expert there.
  MK_DEVICE uint32_t band_of(uint32_t node) const {
    uint32_t first = kNone;
#pragma unroll 1
    for (uint32_t i = 0; i < kTopK; ++i) {
      const uint32_t id = ids_of()[i], expert = id % kExperts;
      if (is_on(id, node * kR, kR) && expert < first) first = expert;
    }
    return first == kNone ? kNone : first * kBands / kExperts;
  }
  // The first column of a list: of this node, of a rank's tokens; of another node, of this rank's. How many a list has, and those of bands before a column's.
  MK_DEVICE static uint32_t listed_by(uint32_t rank) { return kListed + rank * kBands; }
  MK_DEVICE static uint32_t sent_to(uint32_t node) { return kSent + node * kBands; }
  MK_DEVICE uint32_t added(uint32_t column, uint32_t end) const {
    uint32_t sum = 0;
#pragma unroll 1
    for (; column < end; ++column) sum += scratch_.total[column];
    return sum;
  }
  MK_DEVICE uint32_t length(uint32_t list) const { return added(list, list + kBands); }
  MK_DEVICE uint32_t in_earlier_bands(uint32_t column) const { return added(column - (column - kListed) % kBands, column); }
  // Calls f(column, i) for each column that a token counts for, each with an i of its own; below kTopK it is the choice.
  template <class F>
  MK_DEVICE void count_columns(const Token& token, const F& f) const {
    if (!token.exists) return;
    const bool sends = kNodes > 1 && token.rank == world_.rank, comes = kNodes > 1 && token.rank / kR != world_.node;
    const uint32_t others = sends ? kNodes : comes ? 1 : 0;
#pragma unroll 1
    for (uint32_t i = 0; i < kTopK + 1 + others; ++i) {  // one loop, so that f is there once
      uint32_t column = kNone;
      if (i < kTopK) {
        column = ids_of()[i];
      } else if (i == kTopK) {
        const uint32_t first = first_expert(token);
        if (first != kNone) column = kFirstOf + first;
      } else {
        const uint32_t node = comes ? world_.node : i - kTopK - 1, band = comes || node != world_.node ? band_of(node) : kNone;
        if (band != kNone) column = (comes ? listed_by(token.rank) : sent_to(node)) + band;
      }
      if (column != kNone) f(column, i);
    }
  }

  // Where each expert begins, of which there are so many: rounded up to a multiple of `inner`, and that to one of `outer`. Returns where the one after
  // the last would. Warp function.
  MK_DEVICE uint32_t scan(const uint32_t* counts, uint32_t inner, uint32_t outer, uint32_t* first) {
    const uint32_t lane = ptx::lane_index(), each = (kExperts + 31) / 32;
    const uint32_t begin = lane * each < kExperts ? lane * each : kExperts, end = begin + each < kExperts ? begin + each : kExperts;
    uint32_t sum = 0;
#pragma unroll 1
    for (uint32_t e = begin; e < end; ++e) sum += round_up(round_up(counts[e], inner), outer);
    scratch_.scan[warp_][lane] = sum;
    ptx::sync_warp();
    uint32_t at = 0, all = 0;
#pragma unroll 8
    for (uint32_t other = 0; other < 32; ++other) {
      if (other == lane) at = all;
      all += scratch_.scan[warp_][other];
    }
    ptx::sync_warp();  // all have read
#pragma unroll 1
    for (uint32_t e = begin; e < end; ++e) {
      first[e] = at;
      at += round_up(round_up(counts[e], inner), outer);
    }
    return all;
  }
  MK_DEVICE static uint32_t round_up(uint32_t value, uint32_t unit) { return (value + unit - 1) / unit * unit; }

  // The least fault of the lanes of a warp. Almost always there is none.
  MK_DEVICE uint64_t least(uint64_t fault) {
    if (!ptx::any_of_warp(fault != kNoFault)) return kNoFault;
    uint64_t* found = scratch_.found[warp_];
    found[ptx::lane_index()] = fault;
    ptx::sync_warp();
#pragma unroll 1
    for (uint32_t i = 0; i < 32; ++i) fault = found[i] < fault ? found[i] : fault;
    ptx::sync_warp();  // all have read
    return fault;
  }
  MK_DEVICE uint64_t least_of_cta() const {
    uint64_t fault = kNoFault;
#pragma unroll
    for (uint64_t found : scratch_.fault) fault = found < fault ? found : fault;
    return fault;
  }

  MK_DEVICE bool judge(uint64_t fault) {
    if (fault != kNoFault) {
      const uint32_t number = static_cast<uint32_t>(fault >> 32), choice = static_cast<uint32_t>(fault) >> 8 & 0xff;
      const Token token = token_at(number);
      const char* ids = record(world_, r_, token.rank) + sizeof(Header) + uint64_t(token.index) * kTopK * 4;
      verdict_ = Verdict{static_cast<uint32_t>(fault) & 0xff, {token.rank, token.index, ptx::load_word(ids + choice * 4)}};
      return false;
    }
#pragma unroll 1
    for (uint32_t rank = 0; rank < kWorldSize; ++rank) {
      if (scratch_.rank_rows[rank] <= r_.max_rows) continue;
      verdict_ = Verdict{kTooManyRows, {rank, scratch_.rank_rows[rank], r_.max_rows}};
      return false;
    }
    return true;
  }

  Entered entered_;
  const abi::World& world_;
  const RoutingArguments& r_;
  RoutingScratch& scratch_;
  uint32_t counted_alone_;
  Tables tables_;
  uint32_t warp_;  // asked for once, by all lanes: most of what needs it is done by lanes that have a token
  Verdict verdict_;
};

}  // namespace mkernel
