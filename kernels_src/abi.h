// Structs shared by host and device, defined once. The Python mirror is mkernel/abi.py; tests/unit/test_abi.py compares sizes and offsets.
// Plain C layout: fixed-width integers, explicit padding, no pointers (addresses are 64-bit integers).
#pragma once
#if defined(__CUDACC_RTC__)
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#else
#include <cstddef>
#include <cstdint>
#endif

namespace abi {

constexpr uint32_t kMaxRanks = 512;    // ranks of a world; sizes the entry flags
constexpr uint32_t kRingSlots = 1024;  // commands in flight per rank, a power of two
constexpr uint32_t kScratchWords = 64;

// CTA roles. The numbers appear in traces and in failure reports.
enum Role : uint32_t { kCompute = 0, kIntraComm = 1, kInterSend = 2, kInterReduce = 3, kNumRoles = 4 };

// Why a kernel left early. kRunning until the first failure of a world, then never changed again.
enum State : uint32_t { kRunning = 0, kTimedOut = 1, kMismatch = 2, kAborted = 3 };

// What a failed wait was waiting for.
enum FlagKind : uint32_t { kFlagEntry = 0, kFlagChunk = 1, kFlagRingSlot = 2, kFlagRingDone = 3, kFlagRows = 4 };

// A TMA tensor map: CUtensorMap on target cuda, CpuTensorMap (kernels_src/cpu) on target cpu.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// One put travelling from the device to the engine. `ticket` is written last (release): slot i of lap n holds i + n * kRingSlots + 1.
struct Command {
  uint64_t ticket;
  uint32_t channel;  // puts of one channel to one rank become visible in order
  uint32_t dst_rank;
  uint64_t src_offset;     // bytes, in this rank's data heap
  uint64_t dst_offset;     // bytes, in the destination's data heap
  uint64_t bytes;          // 0: signal only
  uint64_t signal_offset;  // bytes, in the destination's signal segment
  uint64_t signal_value;   // the flag's new value (monotonic)
  uint64_t reserved;
};

// Device-to-host command ring: many producers (CTAs), one consumer (the engine). Lives in pinned host memory.
struct Ring {
  uint64_t completed;  // written by the engine: commands 0 .. completed-1 are complete (their source bytes may be reused)
  // So that an engine knows when it must be quick. Nobody waits for these words.
  uint64_t launched;  // written by the host before a launch that it counts: World::launch
  uint64_t ended;     // written by the device: World::launch of the last call that has ended, among those counted
  uint64_t captured;  // written by the host: nonzero once a call has been captured in a graph, whose replays nobody counts
  uint64_t reserved[4];
  Command slots[kRingSlots];
};

// What a kernel says of a call that its op refuses (comm/status.cuh). The world stays usable.
struct CallReport {
  uint64_t epoch;                    // of that call
  uint32_t problem, rows, schedule;  // what this rank asked for, as in World
  uint32_t reserved;
  uint64_t details[3];  // what the op says beside HostBlock::reported
};

// Pinned host memory of one rank: the kernel writes a failure or a report here, the host writes an abort request here.
struct HostBlock {
  uint32_t state;     // State; written last (release) by the device. The host reads it and the next word by one load
  uint32_t reported;  // the op's code of a recoverable error, not 0; written last (release) by the device, zeroed by the host
  uint32_t role;
  uint32_t cta;
  uint32_t flag_kind;
  uint32_t flag_index;  // kFlagEntry: the peer's rank; kFlagChunk: index into the chunk flags
  uint32_t peer;        // the rank that should have raised the flag
  uint32_t problem;     // what this rank asked for, as in World
  uint64_t epoch;
  uint64_t expected;
  uint64_t seen;
  uint64_t abort;  // written by the host: nonzero asks every running and later kernel to leave
  uint32_t rows;
  uint32_t schedule;
  uint32_t rank;
  uint32_t reserved;
  CallReport report;
};

// Device memory of one rank, never touched by others. Zero at start.
struct ControlBlock {
  uint64_t epoch;         // number of finished calls; with kHalted and the number of skipped calls on top after a reported one
  uint64_t ring_head;     // commands ever issued
  uint32_t tile_counter;  // next tile of the dynamic scheduler; zeroed by the last CTA out
  uint32_t exit_counter;  // CTAs that have left; zeroed by the last CTA out
  uint32_t failed;        // State of the first failure of this rank (compare-and-swap)
  uint32_t reserved0;
  uint64_t gathered;  // CTAs whose part of the gather buffer is full (comm/shard_packets.cuh); zeroed by the last CTA out
  uint64_t met;       // how often CTAs have come to barriers of the grid (comm/grid.cuh); zeroed by the last CTA out
  uint64_t reserved1[10];
};

// First words of every rank's signal segment; op flags follow at kSignalFlags.
struct SignalHeader {
  uint64_t entered[2][kMaxRanks];  // by parity of the epoch, then source rank: epoch << kCheckBits | World::check of what it asked for
  uint64_t abort;                  // written by a peer of the same node that failed: nonzero asks to leave
  uint64_t reserved[15];
  uint64_t scratch[kScratchWords];  // written by transports that need a flag for nobody (mkernel/transport/striped.py)
};
constexpr uint32_t kSignalFlags = sizeof(SignalHeader);  // byte offset of the first op flag
constexpr uint32_t kCheckBits = 24;
constexpr uint64_t kAheadBytes = 4 << 20;        // packets that are sent before their rank has entered, of one parity of the epoch
constexpr uint64_t kTaggedBytes = 8 << 20;       // tagged packets, which are sent as early, behind both halves of them: likewise
constexpr uint64_t kHalted = uint64_t(1) << 63;  // in ControlBlock::epoch, until the host has raised what a call has reported

// One interval of the trace. Lane l of CTA b owns records [(b * kTraceLanes + l) * capacity, ...); the first holds the count in `begin`.
enum TraceKind : uint32_t {
  kTraceTile = 1,
  kTraceWait = 2,
  kTraceSend = 3,
  kTracePut = 4,
  kTraceForward = 5,
  kTraceReduce = 6,
  kTraceFetch = 7,  // rows from where they are to where they are needed
  kTraceRoute = 8,  // of MoE: routing is exchanged, and tokens get their places
  kTraceFlag = 9,   // any thread waits for a system flag; `kind` then also says which, of whom, and in which role: see below
};
// 0: scheduler warp, 1: first consumer warpgroup, 2: communication thread, 3: every thread that waits for a system flag
constexpr uint32_t kTraceLanes = 4;
constexpr uint32_t kTraceFlagLane = 3;
// In `kind` of kTraceFlag, above the kind itself.
constexpr uint32_t kTraceFlagKindShift = 8;
constexpr uint32_t kTraceRoleShift = 12;
constexpr uint32_t kTracePeerShift = 16;
struct TraceRecord {
  uint32_t kind;
  uint32_t argument;  // tile or chunk index
  uint64_t begin;     // ns, device clock
  uint64_t end;
};

// What a kernel knows of its rank. The first member of every kernel's parameters.
struct World {
  uint32_t rank, size, node, num_nodes, local_rank, ranks_per_node;
  uint32_t check;           // kCheckBits bits of the next three, which every rank must pass alike
  uint32_t trace_capacity;  // records per lane; 0: tracing is off
  uint32_t problem;         // its number, in the order in which the ranks agreed on problems
  uint32_t rows;            // of this call, where the op says that ranks agree on them; else 0
  uint32_t schedule;        // which split the caller asked for; 0: none
  uint32_t launch;          // number of this launch, not 0, where an engine follows them (Ring::launched); 0: not counted
  uint64_t heap_base;       // local rank p's data heap is at heap_base + p * heap_stride, on every rank of the node
  uint64_t heap_stride;
  uint64_t signal_base;  // likewise the signal segment
  uint64_t signal_stride;
  uint64_t control;  // ControlBlock*
  uint64_t host;     // HostBlock*
  uint64_t ring;     // Ring*; 0 on one node
  uint64_t trace;    // TraceRecord*
  uint64_t timeout_ns;
  uint64_t entry_timeout_ns;
};

// Of a kernel's parameters: fields that may be compiled into it instead (kernels_src/fields.cuh).
struct Fields {
  uint32_t n, k;                                  // of one rank's operands
  uint32_t intra_comm, inter_send, inter_reduce;  // CTAs of these roles
  uint32_t ctas;                                  // of all roles, as many as there may be; never compiled in
  uint32_t reserved[2];
};

static_assert(sizeof(TensorMap) == 128 && sizeof(Command) == 64 && sizeof(HostBlock) == 128 && sizeof(CallReport) == 48, "abi");
static_assert(sizeof(ControlBlock) == 128 && sizeof(TraceRecord) == 24 && sizeof(World) == 128 && sizeof(Fields) == 32, "abi");
static_assert(sizeof(Ring) == 64 + 64 * kRingSlots && kSignalFlags % 128 == 0, "abi");

}  // namespace abi
