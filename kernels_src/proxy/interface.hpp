// The boundary of the compiled engine: what mkernel/proxy/compiled.py calls through ctypes. Its structs have mirrors in
// mkernel/transport/compiled.py; every field is a 64-bit word, in the same order (tests/proxy/test_compiled.py compares the names).
#pragma once
#include <cstdint>

#define MKP_API extern "C" __attribute__((visibility("default")))

namespace mkproxy {

enum Kind : uint64_t { kNull = 0, kRc = 1, kSrd = 2, kStriped = 3 };
enum Signal : uint64_t { kAtomic = 0, kPlain = 1, kImm = 2 };  // how flags are raised: MKERNEL_RC_SIGNAL
enum Result : int { kIdle = 0, kMoved = 1, kTrouble = 2 };

// Why a step ended in kTrouble. Python says it in words.
enum Trouble : uint64_t {
  kNone = 0,
  kBadPut = 1,       // ticket: its destination is no peer, or it lies outside the segments
  kTooLong = 2,      // ticket: it needs more work requests than a queue pair has
  kTwoChannels = 3,  // ticket: its flag is under way on another queue pair
  kPost = 4,         // pair, code: posting failed
  kPoll = 5,         // arrivals, code: polling failed
  kFailed = 6,       // arrivals, failed: completions with an error
  kBadMessage = 7,   // pair, bytes, imm: a message that is no flag
  kReceive = 8,      // pair, code: posting a receive failed
  kMiscounted = 9,   // ticket: it completed, but is not in flight
  kUnfit = 10,       // pair: it cannot be posted to as this transport does; there is no engine
  kProtocol = 11,    // pair, rule, channel, sequence, number, limit: a peer broke the protocol of srd
};

// Which rule of srd a peer broke (mkernel/transport/srd.py).
enum Rule : uint64_t {
  kReleased = 0,    // number of its puts that have been released; limit: those that have begun
  kMore = 1,        // channel, sequence; limit: writes announced
  kTwice = 2,       // channel, sequence: announced twice
  kFewer = 3,       // channel, sequence; number of writes that came; limit: announced
  kWindow = 4,      // channel, sequence; limit: where the window begins
  kLength = 5,      // number of bytes of a message
  kFlagOutside = 6  // number: offset of a flag
};

// A peer: its rank, and the addresses and keys of its segments and of its word for atomics.
struct Target {
  uint64_t rank;
  uint64_t heap;
  uint64_t heap_key;
  uint64_t signals;
  uint64_t signal_key;
  uint64_t barrier;
  uint64_t barrier_key;
  // srd: how a datagram reaches its queue pair, and how many messages it has receives for.
  uint64_t route;  // struct ibv_ah
  uint64_t number;
  uint64_t queue_key;
  uint64_t credits;
};

// What an engine works on. Addresses are of this process unless they are said to be registered ones. All of it outlives the engine.
struct Setup {
  uint64_t kind;
  uint64_t ring;   // abi::Ring
  uint64_t batch;  // commands per step
  // The provider's functions, and for tests one that is called after each flag that this engine has stored, or 0.
  uint64_t post_send;
  uint64_t post_receive;
  uint64_t poll;
  uint64_t stored;
  uint64_t sends;     // the completion queue of send queues
  uint64_t arrivals;  // the completion queue of receives
  uint64_t pairs;     // uint64_t[]: the queue pairs, by peer and then by number
  uint64_t targets;   // Target[]: the peers
  uint64_t num_peers;
  uint64_t queue_pairs;  // per peer
  uint64_t signal;       // Signal
  uint64_t heap;         // registered
  uint64_t heap_bytes;
  uint64_t heap_key;
  uint64_t signals;  // this rank's signal segment; 0 unless this engine raises its flags
  uint64_t signal_bytes;
  uint64_t scratch;             // rc: words: the peers' atomics, their answers, received values, values to send; srd: messages
  uint64_t scratch_registered;  // the same, registered
  uint64_t scratch_key;
  uint64_t max_message;  // bytes of one write
  uint64_t depth;        // work requests of a queue pair
  uint64_t receives;     // receives of a queue pair
  uint64_t completions;  // entries of `sends`
  // srd, per peer: receives for writes and announcements, puts that may wait for credits, puts that may not be known to be released.
  uint64_t credits;
  uint64_t backlog;
  uint64_t window;
  // striped: the cards of a rank, and how puts are spread over them.
  uint64_t links;  // Setup[]: of kind rc, all to the same peers
  uint64_t num_links;
  uint64_t smallest;  // bytes of a part
  uint64_t unit;      // parts begin at multiples of this
  // A link's own.
  uint64_t rate;    // in any unit that is the same for all
  uint64_t report;  // Report
};

// When an engine naps (mkernel/proxy/pace.py). Nanoseconds.
struct Pace {
  uint64_t follows;  // it stays awake while calls are under way
  uint64_t spin_ns;
  uint64_t graph_spin_ns;
  uint64_t nap_ns;
  uint64_t long_nap_ns;
  uint64_t moved_ns;  // when something moved last
};

struct Failed {
  uint64_t id;
  uint64_t status;
  uint64_t pair;
  uint64_t vendor_error;
};
constexpr uint64_t kPolled = 64;  // completions a poll takes at most

// How the engine stands after a call.
struct Report {
  uint64_t trouble;  // Trouble
  uint64_t link;     // striped: that of the trouble; what is not in this Report is in the link's
  uint64_t ticket;
  uint64_t pair;      // position of a queue pair among `Setup::pairs`
  uint64_t code;      // an errno
  uint64_t arrivals;  // 1: of `Setup::arrivals`; 0: of `Setup::sends`
  uint64_t bytes;
  uint64_t imm;   // 1 << 32 where there was none
  uint64_t rule;  // Rule
  uint64_t channel;
  uint64_t sequence;
  uint64_t number;
  uint64_t limit;
  uint64_t num_failed;
  uint64_t outstanding;  // puts accepted and not completed
  uint64_t arrived;      // messages of peers
  uint64_t taken;        // commands
  uint64_t completed;    // commands, with all before them
  uint64_t moved_ns;     // when something was posted or completed last
  uint64_t nap_ns;       // how long it may sleep
  Failed failed[kPolled];
};

}  // namespace mkproxy

MKP_API void* mkp_create(const mkproxy::Setup* setup, mkproxy::Report* report);  // null: no memory, or kUnfit
MKP_API void mkp_destroy(void* engine);
MKP_API int mkp_step(void* engine);
// Steps until it may nap, something fails, or `limit_ns` are over. `moved`: something has happened that it cannot see.
MKP_API int mkp_spin(void* engine, mkproxy::Pace* pace, int moved, uint64_t limit_ns);
MKP_API int mkp_lose(void* engine, uint64_t link);                     // striped: goes on without a link, which moves nothing any more
MKP_API int mkp_waiting(void* engine);                                 // whether there is a command to take
MKP_API int mkp_under_way(void* engine, uint64_t pair);                // whether a queue pair has work that has not completed
MKP_API int mkp_put(void* engine, uint64_t ticket, uint64_t* fields);  // channel .. signal_value of a command in flight
MKP_API uint64_t mkp_nap(mkproxy::Pace* pace, int moved, uint64_t now_ns, int launching, int captured);
