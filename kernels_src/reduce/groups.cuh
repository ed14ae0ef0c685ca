// The exchange of reduce/packets.cuh with swapped operands (tile/shape.cuh). Each warp has 16 columns of all rows of a tile, and of 16 rows, a group, each
// thread has eight values: of two columns, 8 apart, and of four rows, two by two. They are one packet. Groups have numbers among all rows of the product,
// since tiles begin with one; where rows of a group have several owners, it is sent to each.
//
// Where CTAs share K of a tile, the threads that have added up some of its groups exchange these.
#pragma once
#include "reduce/packets.cuh"

namespace mkernel {

constexpr uint32_t kGroupRows = 16, kGroupValues = 8;                                                 // values of a thread
constexpr uint32_t kTileGroups = Config::kBlockN / kGroupRows, kSliceGroups = (kTileGroups + 1) / 2;  // at most
constexpr uint32_t kSliceValues = (kSliceGroups + 1) / 2 * 2 * kGroupValues;                          // two groups are added up at a time
// Groups that a thread adds up at a time, and of how many ranks it looks at packets together: registers are also for the groups that are left.
constexpr uint32_t kTakenGroups = 4, kTakenRanks = 2;
constexpr uint32_t kColumnWarps = Shape::kColumns / kWarpRows;
constexpr uint32_t kGroupPackets = kColumnWarps * 32;  // of a group of a tile

// Groups of a tile, by their numbers among all: from `begin` to `end`.
struct Groups {
  uint32_t tile, column;  // its number, and that of its column of tiles
  uint32_t first;         // the tile's first group
  uint32_t begin, end;

  MK_DEVICE Groups between(uint32_t from, uint32_t to) const {
    return Groups{tile, column, first, from > begin ? from : begin, to < end ? to : end};
  }
};
// Where a thread's packets of a tile lie, of all its groups: `next` apart.
struct GroupPlace {
  ptx::Words* first;
  uint32_t next;
};

// Derived has, beside what PacketTiles wants, send_values(entered, d, groups, at) and finish_values(entered, values, groups, at), which stores the result;
// `at` is the group with which d, or values, begins. bool kKeepsOwn: values are the own ones; else any, because they have been sent, too.
template <class Derived>
struct GroupTiles : PacketTiles<Derived> {
  using Base = PacketTiles<Derived>;
  using Base::Base, Base::p, Base::derived, Base::block_rows, Base::load_rows, Base::rows_of;

  MK_DEVICE Groups groups_of(const TileCoordinate& c) const {
    const uint32_t first = c.m * block_rows() / kGroupRows, rows = rows_of(c), most = block_rows();
    return Groups{c.index, c.n, first, first, first + ((rows < most ? rows : most) + kGroupRows - 1) / kGroupRows};
  }
  // This lane's packet of a warp's, where a tile's begin.
  MK_DEVICE static uint32_t lane_of_tile() { return KShares::warp() * 32 + ptx::lane_index(); }

  MK_DEVICE void exchange(const Entered& entered, float (&d)[Shape::kHeld], const TileCoordinate& c) const {
    if constexpr (!Shape::kSwapped) return Base::exchange(entered, d, c);
    exchange_groups(entered, d, groups_of(c), groups_of(c).first);
  }
  MK_DEVICE void add_shares(const Entered& entered, const TileCoordinate& c) const {
    if constexpr (!Shape::kSwapped) return Base::add_shares(entered, c);
    const KShares shared = this->shares();
    const uint32_t begin = shared.first_packet(c.share), there = load_rows(c) / 8, last = shared.first_packet(c.share + 1);
    const uint32_t end = last < there ? last : there;
    if (begin >= end) return;
    Groups groups = groups_of(c);
    groups.begin = groups.first + begin / 2, groups.end = groups.first + (end + 1) / 2;
    float values[kSliceValues] = {};
    ptx::Words* from = shared.packets_of(this->share_packets(entered), c);
#pragma unroll 1
    for (uint32_t packet = begin; packet < begin + kSliceValues / kPacketWords; packet += kPacketWords) {
      float sum[kPacketWords][kPacketWords] = {};
      if (packet < end && !ptx::all_of_warp(shared.template add_columns<4, 4>(entered, from, packet, end, sum))) return;
      Base::append(values, sum);
    }
    exchange_groups(entered, values, groups, groups.begin);
  }
  // Groups of d, which begins with number `at`: all are sent before any is waited for. They are then finished some at a time, in a loop, because what is
  // done with them is long, and SMs have to fetch it; those that are left move to the front.
  template <uint32_t Values>
  MK_DEVICE void exchange_groups(const Entered& entered, const float (&d)[Values], const Groups& groups, uint32_t at) const {
    constexpr uint32_t kMost = Values / kGroupValues, kGroups = kTakenGroups < kMost ? kTakenGroups : kMost;
    constexpr uint32_t kCount = kGroups * kGroupValues;
    constexpr uint32_t kLeft = Derived::kKeepsOwn ? (kMost - kGroups) * kGroupValues : 0;
    derived().send_values(entered, d, groups, at);
    float values[kCount], left[kLeft + 1];
    if constexpr (Derived::kKeepsOwn) Base::copy(values, d), Base::copy(left, d, kCount);
#pragma unroll 1
    for (uint32_t from = at; from < groups.end; from += kGroups) {
      derived().finish_values(entered, values, groups.between(from, from + kGroups), from);
#pragma unroll
      for (uint32_t i = 0; i < kCount && i < kLeft; ++i) values[i] = left[i];
#pragma unroll
      for (uint32_t i = kCount; i < kLeft; ++i) left[i - kCount] = left[i];
    }
  }

  // ---- values and packets
  // Sends groups of d, which begins with number `at`, to so many ranks: to each some of them, and to where its packets of the tile lie.
  template <uint32_t Ranks, uint32_t Values>
  MK_DEVICE static void send_groups(const float (&d)[Values], const Groups& groups, uint32_t at, const Groups (&of)[Ranks],
                                    const GroupPlace (&place)[Ranks]) {
    ptx::Words* to[Ranks];
#pragma unroll
    for (uint32_t r = 0; r < Ranks; ++r) to[r] = place[r].first + (at - of[r].first) * place[r].next;
#pragma unroll
    for (uint32_t i = 0; i < Values / kGroupValues; ++i) {
      if (at + i >= groups.end) break;
      ptx::Words v;
#pragma unroll
      for (uint32_t j = 0; j < kPacketWords; ++j) v.word[j] = ~ptx::pack<Shape::kElement>(d[i * 8 + 2 * j], d[i * 8 + 2 * j + 1]);
#pragma unroll
      for (uint32_t r = 0; r < Ranks; ++r) ptx::store_packet_if(at + i >= of[r].begin && at + i < of[r].end, to[r] + i * place[r].next, v);
    }
  }
  // Takes groups of values, which begin with number `at`, from so many ranks, source(0) and so on, of as many together, once all words have come; leaves
  // zeros there. use(i, word): two values, from value i on, the sources in their order. place(source): of the tile's packets. All lanes of a warp; false:
  // they did not come.
  template <uint32_t Together, uint32_t Values, class Source, class At, class Use>
  MK_DEVICE static bool take_groups(const Entered& entered, float (&)[Values], uint32_t sources, const Groups& groups, uint32_t at,
                                    const Source& source, const At& place, const Use& use) {
    constexpr uint32_t kCount = Values / kGroupValues;
    uint32_t there = 0;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) there |= uint32_t{at + i >= groups.begin && at + i < groups.end} << i;
    const uint32_t first = at - groups.first;
#pragma unroll 1
    for (uint32_t s = 0; s < sources; s += Together) {
      ptx::Words v[Together * kCount];
      uint32_t wanted = there;
#pragma unroll
      for (uint32_t t = 1; t < Together; ++t) wanted |= s + t < sources ? there << t * kCount : 0;
      const auto packet = [&](uint32_t n) {
        const GroupPlace from = place(source(s + n / kCount));
        return from.first + (first + n % kCount) * from.next;
      };
      const bool ok = take_packets(entered, v, wanted, packet, [&](uint32_t n) { return source(s + n / kCount); });
      if (!ptx::all_of_warp(ok)) return false;
#pragma unroll
      for (uint32_t t = 0; t < Together; ++t) {
        if (s + t >= sources) break;
#pragma unroll
        for (uint32_t n = 0; n < kCount * kPacketWords; ++n) use(n * 2, v[t * kCount + n / kPacketWords].word[n % kPacketWords]);
      }
    }
    return true;
  }
  // Of how many ranks packets of so many values are looked at together.
  MK_DEVICE static constexpr uint32_t together(uint32_t values, uint32_t sources) {
    const uint32_t fit = kTakenRanks * kTakenGroups * kGroupValues / values;
    return fit < 1 ? 1 : fit < sources ? fit : sources;
  }
  // Adds what the others have, after the own values, unrounded, from the next rank on.
  template <uint32_t Values, class At>
  MK_DEVICE bool add_others(const Entered& entered, float (&values)[Values], const Groups& groups, uint32_t at, const At& place) const {
    const uint32_t rank = p.world.rank;
    const auto source = [&](uint32_t s) { return rank + 1 + s - (rank + 1 + s < kWorldSize ? 0 : kWorldSize); };
    const auto add = [&](uint32_t i, uint32_t word) {
      float low, high;
      Base::values_of(word, low, high);
      values[i] += low, values[i + 1] += high;
    };
    return take_groups<together(Values, kWorldSize - 1)>(entered, values, kWorldSize - 1, groups, at, source, place, add);
  }
  // Stores groups of values, which begin with number `at`, and of their rows those of this rank's result. A lane has columns r and r + 8 of rows two by two;
  // with the lane of the next column it exchanges one of each, so that both store whole words: the lane of the even column in the first of the rows, the
  // other one in the second. All lanes of a warp.
  template <uint32_t Values>
  MK_DEVICE void store_groups(const float (&values)[Values], const Groups& groups, uint32_t at) const {
    const uint32_t lane = ptx::lane_index(), odd = lane / 4 % 2;
    const uint32_t column = groups.column * Shape::kColumns + KShares::warp() * kWarpRows + lane / 4 - odd;
    const uint32_t first =
        at * kGroupRows + lane % 4 * 2 + odd - derived().first_row();  // of the result; of the others' rows beyond its last
#pragma unroll
    for (uint32_t i = 0; i < Values / kGroupValues; ++i) {
      if (at + i < groups.begin || at + i >= groups.end) continue;
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t row = first + i * kGroupRows + half * 8;
        char* to = reinterpret_cast<char*>(p.c) + uint64_t(row) * p.c_row_bytes + column * 2;
#pragma unroll
        for (uint32_t next = 0; next < 2; ++next) {  // of columns 8 apart
          const float* e = &values[i * kGroupValues + half * 4 + next * 2];
          const float kept = odd ? e[1] : e[0], other = ptx::shuffle_xor(odd ? e[0] : e[1], 4);
          const uint32_t word = odd ? ptx::pack<Shape::kElement>(other, kept) : ptx::pack<Shape::kElement>(kept, other);
          if (row < p.rows && column + next * 8 < extent_n(p)) ptx::store_word(to + next * 16, word);
        }
      }
    }
  }
};

}  // namespace mkernel
