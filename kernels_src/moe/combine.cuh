// Combining: every token gets the weighted sum of the rows that its experts made of it. Shared by the kernels that combine; each says where rows are.
//
// A rank reads the rows of its node one by one and weights them in float32, in order of k. So it does for its own tokens, and, as the only rank of
// this node on their rail, for those of its rail peers: these sums, one for each token that this node has experts for, are rounded and put to the
// token's home, which adds them in order of the nodes. A warp does one token after the other.
#pragma once
#include "comm/copy.cuh"
#include "comm/world.cuh"
#include "concepts.cuh"
#include "moe/places.cuh"
#include "trace.cuh"

namespace mkernel {

// ---- config: kTopK, kWeighted, kCanonical, kFloat16, kNumNodes, kRanksPerNode
constexpr uint32_t kTopK = Config::kTopK;  // choices of a token
constexpr bool kWeighted = Config::kWeighted != 0;
// The own node's rows, too, are first added up and rounded: then it does not matter whose token it is.
constexpr bool kByNode = kNodes > 1 && Config::kCanonical != 0;
constexpr ptx::Element kRowElement = Config::kFloat16 ? ptx::Element::kFloat16 : ptx::Element::kBFloat16;
constexpr uint32_t kUnitValues = kWarpUnit / 2;  // in the 16 bytes that a lane loads of a row
// That a lane loads: their words are in registers, as are all addresses and weights.
constexpr uint32_t kRowsAtOnce = kTopK <= 8 ? kTopK : kTopK <= 12 ? 6 : 4;
constexpr uint32_t kUnitsAtOnce = kTopK >= 8 ? 1 : kTopK >= 4 ? 2 : 4;       // of each row, so that about 8 loads are under way
constexpr uint32_t kUnrolledNodes = kNodes <= 4 && kTopK <= 8 ? kNodes : 1;  // of the loop over node sums
static_assert(kTopK >= 1 && kTopK <= 32, "a lane for each choice of a token");

// ---- arguments: the member `combining` of a kernel's Parameters. N: nodes, k: kTopK; arrays of routing are int32, as mkernel/tools/routing.py says
struct Combining {
  uint64_t out;                  // this rank's tokens: (tokens, row_bytes), rows out_stride bytes apart
  uint64_t add;                  // the same, add_stride apart: what the sums are added to; 0: nothing
  uint64_t weights;              // (tokens, k) float32; 0: all 1
  uint64_t row_of;               // routing.rows: (N, max_tokens, k)
  uint64_t expert_of;            // routing.experts: (N, max_tokens, k)
  uint64_t place_of;             // routing.sums: (N, max_tokens)
  uint64_t listed;               // routing.listed: (N, max_tokens)
  uint64_t counts;               // routing.counts: (N, 2)
  uint64_t sum_offset;           // data heap: (N - 1, max_tokens, row_bytes) node sums for the rail peers, by distance of their node
  uint64_t arrived_offset;       // data heap: (N - 1, max_tokens, row_bytes) node sums of the other nodes, by their distance
  uint64_t weights_offset;       // data heap: (N - 1, max_tokens, k) weights of the rail peers, by distance of their node
  uint64_t send_weights_offset;  // data heap: where the network reads this rank's weights, in the caller's array or in the staging area
  uint32_t tokens;               // of this rank; may differ by rank
  uint32_t max_tokens;           // the same on all ranks, as what follows
  uint32_t max_rows;
  uint32_t row_bytes;
  uint32_t out_stride;
  uint32_t add_stride;
  uint32_t first_flag;     // of those below
  uint32_t group_shift;    // a warp makes 1 << group_shift node sums before it raises a flag
  uint32_t chunk_shift;    // a put brings 1 << chunk_shift node sums
  uint32_t stage_weights;  // 1: inter_send first copies the weights to send_weights_offset
};

// ---- where things are
MK_DEVICE int32_t load_index(uint64_t array, uint64_t i) { return reinterpret_cast<const int32_t*>(array)[i]; }
MK_DEVICE uint64_t token_index(const Combining& c, uint32_t node, uint32_t token) { return uint64_t(node) * c.max_tokens + token; }
MK_DEVICE uint32_t ceil_shift(uint32_t number, uint32_t shift) { return (number + (1u << shift) - 1) >> shift; }
// `distance`: of the token's home for what is sent, of the node that has made the sum for what has arrived.
MK_DEVICE uint64_t sum_offset(const Combining& c, uint32_t distance, uint32_t place) {
  return c.sum_offset + token_index(c, distance - 1, place) * c.row_bytes;
}
MK_DEVICE uint64_t arrived_offset(const Combining& c, uint32_t distance, uint32_t place) {
  return c.arrived_offset + token_index(c, distance - 1, place) * c.row_bytes;
}
MK_DEVICE uint64_t peer_weights_offset(const Combining& c, uint32_t distance) {
  return c.weights_offset + token_index(c, distance - 1, 0) * kTopK * sizeof(float);
}
// How many tokens of the rail peer at a distance this node has experts for, and how many of this rank's tokens that node has experts for.
template <class Parameters>
MK_DEVICE uint32_t count_served(const Parameters& p, uint32_t distance) {
  return load_index(p.combining.counts, node_at(p.world, distance) * 2);
}
template <class Parameters>
MK_DEVICE uint32_t count_awaited(const Parameters& p, uint32_t distance) {
  return load_index(p.combining.counts, node_at(p.world, distance) * 2 + 1);
}

// ---- flags, by number: of a group of node sums of this rank, of a chunk of node sums that has arrived, of weights that have arrived
MK_DEVICE uint32_t sum_groups(const Combining& c) { return ceil_shift(c.max_tokens, c.group_shift); }
MK_DEVICE uint32_t sum_chunks(const Combining& c) { return ceil_shift(c.max_tokens, c.chunk_shift); }
MK_DEVICE uint32_t sum_flag(const Combining& c, uint32_t distance, uint32_t group) {
  return c.first_flag + (distance - 1) * sum_groups(c) + group;
}
MK_DEVICE uint32_t arrived_flag(const Combining& c, uint32_t distance, uint32_t chunk) {
  return c.first_flag + (kNodes - 1) * sum_groups(c) + (distance - 1) * sum_chunks(c) + chunk;
}
MK_DEVICE uint32_t weights_flag(const Combining& c, uint32_t distance) {
  return c.first_flag + (kNodes - 1) * (sum_groups(c) + sum_chunks(c)) + distance - 1;
}

// One choice of a token, whose expert is in this node: the row that the calling lane has to do with.
struct Choice {
  uint64_t index;   // in routing.rows
  uint32_t holder;  // local rank of the rank that has the row,
  uint32_t row;     // its number there,
  uint32_t expert;  // and its expert, counted from 0 on that rank; 0 where nobody asks for it
  bool exists;
};

// Whether this rank's array has room for the rows that came to its experts; `came`: where the last of them ends. A program may have cut it shorter. Else
// the world is given up before anybody reads behind its end. All threads of each CTA.
template <class Parameters>
MK_DEVICE bool rows_fit(const Call& call, const Parameters& p, uint32_t came) {
  if (came <= p.combining.max_rows || is_skipped(call)) return true;
  if (ptx::thread_index() == 0) fail(call, abi::kMismatch, Awaited{abi::kFlagRows, 0, call.world.rank}, p.combining.max_rows, came);
  return false;
}

// Where the rows of this node are, and when they are there.
template <class Rows>
concept CombinedRows = requires(const Rows rows, const Entered& entered, const Choice& choice) {
  requires Same<decltype(Rows::kByExpert), const bool>;  // whether a choice must say its expert
  { rows.wait(entered, choice) } -> Same<bool>;          // until the row is complete; false: the call has failed. By one lane
  { rows.at(choice) } -> Same<const char*>;              // then
};

// The rows of one token, alike in all lanes of a warp: where they are (0: there is none), and what they weigh.
struct Chosen {
  const char* at[kTopK];
  float weight[kTopK];
};

template <class Parameters>
MK_DEVICE Choice make_choice(const Parameters& p, uint64_t index, int32_t row, uint32_t expert) {
  if (row < 0) return Choice{index, 0, 0, 0, false};
  return Choice{index, holder_of(row), row_at(row), expert, true};
}

// Choice i of a token of the rail's rank in `node`; there is none from kTopK on.
template <class Parameters, CombinedRows Rows>
MK_DEVICE Choice choice_of(const Parameters& p, const Rows&, uint32_t node, uint32_t token, uint32_t i) {
  const Combining& c = p.combining;
  const uint64_t index = token_index(c, node, token) * kTopK + i;
  const int32_t row = i < kTopK ? load_index(c.row_of, index) : -1;
  const uint32_t expert = Rows::kByExpert && i < kTopK ? load_index(c.expert_of, index) : 0;  // of no row something, at the same time
  return make_choice(p, index, row, expert);
}

template <class Rows>
struct RowFlags {  // of the row that the calling lane has
  const Rows& rows;
  const Choice& choice;
  MK_DEVICE bool wait(const Entered& entered, uint32_t) const { return !choice.exists || rows.wait(entered, choice); }
};

// Finds and waits for the rows of a token of the rail's rank in `node`; `weights`: that rank's, (its tokens, k). False: the call has failed.
// Warp function.
template <class Parameters, CombinedRows Rows>
MK_DEVICE bool choose_rows(const Entered& entered, const Parameters& p, const Rows& rows, uint32_t node, uint32_t token,
                           const float* weights, Chosen& chosen) {
  const Choice choice = choice_of(p, rows, node, token, ptx::lane_index());
  const float weight = kWeighted && ptx::lane_index() < kTopK ? weights[uint64_t(token) * kTopK + ptx::lane_index()] : 0;
  if (!wait_all(entered, RowFlags<Rows>{rows, choice}, kTopK)) return false;
  const uint64_t at = choice.exists ? reinterpret_cast<uint64_t>(rows.at(choice)) : 0;
#pragma unroll
  for (uint32_t i = 0; i < kTopK; ++i) {
    const uint64_t high = ptx::broadcast(static_cast<uint32_t>(at >> 32), i), low = ptx::broadcast(static_cast<uint32_t>(at), i);
    chosen.at[i] = reinterpret_cast<const char*>(high << 32 | low);
    chosen.weight[i] = kWeighted ? ptx::from_bits(ptx::broadcast(ptx::bits(weight), i)) : 0;
  }
  return true;
}

MK_DEVICE void add_row(float (&sum)[kUnitValues], const ptx::Words& words, float weight, bool weighted) {
#pragma unroll
  for (uint32_t i = 0; i < kUnitValues / 2; ++i) {
    float low, high;
    ptx::unpack<kRowElement>(words.word[i], low, high);
    sum[2 * i] += weighted ? weight * low : low;
    sum[2 * i + 1] += weighted ? weight * high : high;
  }
}
MK_DEVICE ptx::Words round_row(const float (&sum)[kUnitValues]) {
  ptx::Words words;
#pragma unroll
  for (uint32_t i = 0; i < kUnitValues / 2; ++i) words.word[i] = ptx::pack<kRowElement>(sum[2 * i], sum[2 * i + 1]);
  return words;
}

// Adds the rows of a token to what begin(offset, sum) sets, 16 bytes of a lane at a time; finish(offset, sum) has the rest. Warp function.
template <class Begin, class Finish>
MK_DEVICE void sum_rows(const Chosen& chosen, uint32_t row_bytes, const Begin& begin, const Finish& finish) {
#pragma unroll 1
  for (uint32_t offset = ptx::lane_index() * kWarpUnit; offset < row_bytes; offset += kUnitsAtOnce * kWarpStride) {
    float sum[kUnitsAtOnce][kUnitValues] = {};
    const auto each_unit = [&](const auto& visit) {
#pragma unroll
      for (uint32_t u = 0; u < kUnitsAtOnce; ++u) {
        if (offset + u * kWarpStride < row_bytes) visit(u, offset + u * kWarpStride);
      }
    };
    each_unit([&](uint32_t u, uint32_t at) { begin(at, sum[u]); });
#pragma unroll
    for (uint32_t first = 0; first < kTopK; first += kRowsAtOnce) {
      ptx::Words words[kUnitsAtOnce][kRowsAtOnce];
      each_unit([&](uint32_t u, uint32_t at) {
#pragma unroll
        for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
          if (first + i < kTopK && chosen.at[first + i] != nullptr) words[u][i] = ptx::load_global(chosen.at[first + i] + at);
        }
      });
      each_unit([&](uint32_t u, uint32_t) {
#pragma unroll
        for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
          if (first + i < kTopK && chosen.at[first + i] != nullptr) add_row(sum[u], words[u][i], chosen.weight[first + i], kWeighted);
        }
      });
    }
    each_unit([&](uint32_t u, uint32_t at) { finish(at, sum[u]); });
  }
}

// ---- for the rail peers: the sums of this node
template <class Parameters>
struct WeightFlags {
  const Parameters& p;
  MK_DEVICE bool wait(const Entered& entered, uint32_t i) const {
    return count_served(p, 1 + i) == 0 || wait_flag(entered, p, weights_flag(p.combining, 1 + i), rail_peer(p.world, 1 + i));
  }
};

// Which items a warp combines: those of every stride-th number.
struct StridedItems {
  uint32_t next, stride;
  MK_DEVICE uint32_t take() {
    const uint32_t item = next;
    next += stride;
    return item;
  }
};

// Groups of sums for the rail peers: item i is group i / (kNodes - 1) of the one at distance 1 + i % (kNodes - 1).
template <class Parameters>
MK_DEVICE uint32_t num_served_groups(const Parameters& p) {
  uint32_t most = 0;
#pragma unroll 1
  for (uint32_t distance = 1; distance < kNodes; ++distance) {
    const uint32_t count = count_served(p, distance);
    most = count > most ? count : most;
  }
  return ceil_shift(most, p.combining.group_shift) * (kNodes - 1);
}

// Places of a group in the list of the rail peer at a distance.
struct Places {
  uint32_t begin, end;
};
template <class Parameters>
MK_DEVICE Places places_of(const Parameters& p, uint32_t distance, uint32_t group) {
  const uint32_t count = count_served(p, distance), begin = group << p.combining.group_shift;
  const uint32_t limit = begin + (1u << p.combining.group_shift);
  return Places{begin, limit < count ? limit : count};
}

// The sums of one group, of the list of the rail peer at a distance. Warp function.
template <class Parameters, CombinedRows Rows>
MK_DEVICE bool serve_group(const Entered& entered, const Parameters& p, const Rows& rows, uint32_t distance, uint32_t group) {
  const Combining& c = p.combining;
  const abi::World& world = p.world;
  const uint32_t node = node_at(world, distance);
  const Places places = places_of(p, distance, group);
  const float* weights = reinterpret_cast<const float*>(heap(world, world.local_rank) + peer_weights_offset(c, distance));
#pragma unroll 1
  for (uint32_t place = places.begin; place < places.end; ++place) {
    Chosen chosen;
    if (!choose_rows(entered, p, rows, node, load_index(c.listed, token_index(c, node, place)), weights, chosen)) return false;
    char* to = shared_heap(entered, world.local_rank) + sum_offset(c, distance, place);
    sum_rows(
        chosen, c.row_bytes, [](uint32_t, float (&)[kUnitValues]) {},
        [&](uint32_t offset, const float (&sum)[kUnitValues]) { ptx::store_global(to + offset, round_row(sum)); });
  }
  ptx::sync_warp();  // all lanes have stored
  if (places.begin < places.end && ptx::lane_index() == 0) raise_flag_of(entered, p, sum_flag(c, distance, group), world.local_rank);
  return true;
}

// ---- for this rank's own tokens
template <class Parameters>
struct ArrivedFlags {  // of the sums of all nodes for a token
  const Parameters& p;
  uint32_t token;
  MK_DEVICE bool wait(const Entered& entered, uint32_t node) const {
    const Combining& c = p.combining;
    const int32_t place = load_index(c.place_of, token_index(c, node, token));
    const uint32_t writer = rank_of(node, p.world.local_rank);
    return place < 0 || wait_flag(entered, p, arrived_flag(c, node_distance(p.world, writer), place >> c.chunk_shift), writer);
  }
};

template <class Parameters, CombinedRows Rows>
MK_DEVICE bool combine_token(const Entered& entered, const Parameters& p, const Rows& rows, uint32_t token) {  // warp function
  const Combining& c = p.combining;
  const abi::World& world = p.world;
  Chosen chosen;
  if (!choose_rows(entered, p, rows, world.node, token, reinterpret_cast<const float*>(c.weights), chosen)) return false;
  if (kNodes > 1 && !wait_all(entered, ArrivedFlags<Parameters>{p, token}, kNodes)) return false;
  const auto add_to = [&](uint32_t offset, float (&sum)[kUnitValues]) {
    const char* add = reinterpret_cast<const char*>(c.add) + uint64_t(token) * c.add_stride;
    if (c.add != 0) add_row(sum, ptx::load_input(add + offset), 1, false);
  };
  const auto begin = [&](uint32_t offset, float (&sum)[kUnitValues]) {
    if (!kByNode) add_to(offset, sum);
  };
  const auto finish = [&](uint32_t offset, float (&sum)[kUnitValues]) {
    if constexpr (kNodes > 1) {
      const ptx::Words own = round_row(sum);
      if constexpr (kByNode) {
#pragma unroll
        for (float& e : sum) e = 0.0f;
        add_to(offset, sum);
      }
#pragma unroll kUnrolledNodes
      for (uint32_t node = 0; node < kNodes; ++node) {
        if (kByNode && node == world.node) add_row(sum, own, 1, false);
        const int32_t place = load_index(c.place_of, token_index(c, node, token));
        if (place < 0) continue;
        const uint64_t arrived = arrived_offset(c, node_distance(world, rank_of(node, world.local_rank)), place);
        add_row(sum, ptx::load_global(heap(world, world.local_rank) + arrived + offset), 1, false);
      }
    }
    ptx::store_global(reinterpret_cast<char*>(c.out) + uint64_t(token) * c.out_stride + offset, round_row(sum));
  };
  sum_rows(chosen, c.row_bytes, begin, finish);
  return true;
}

// All items that a warp takes: first what other nodes wait for, then this rank's tokens. False: the call has failed. Warp function; `traces`: whether
// it is the one of its CTA whose spans are recorded.
template <class Parameters, CombinedRows Rows, class Items>
MK_DEVICE bool combine(const Entered& entered, const Parameters& p, const Rows& rows, Items items, bool traces) {
  Trace trace(p.world, 2);
  traces = traces && ptx::lane_index() == 0;
  const uint32_t served = kNodes > 1 ? num_served_groups(p) : 0;
  bool has_weights = !kWeighted;
#pragma unroll 1
  while (true) {
    const uint32_t item = items.take(), token = item - served;
    const uint64_t begin = trace.now();
    if (kNodes > 1 && item < served) {
      if (!has_weights && !wait_all(entered, WeightFlags<Parameters>{p}, kNodes - 1)) return false;
      has_weights = true;
      if (!serve_group(entered, p, rows, 1 + item % kOtherNodes, item / kOtherNodes)) return false;
    } else {
      if (token >= p.combining.tokens) return true;
      if (!combine_token(entered, p, rows, token)) return false;
    }
    if (traces) trace.record(abi::kTraceReduce, item, begin);
  }
}

}  // namespace mkernel
