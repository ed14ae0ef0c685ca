// What an engine needs of libibverbs: the layout of what it posts and polls. A provider's functions come as addresses (interface.hpp), so that
// nothing is linked, and no header is needed to compile; where the header is installed, the layouts are compared with it.
#pragma once
#include <pthread.h>

#include <cstddef>
#include <cstdint>
#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>
#endif

namespace mkproxy {

struct Entry {  // ibv_sge
  uint64_t address;
  uint32_t bytes;
  uint32_t key;
};

struct SendRequest {  // ibv_send_wr
  uint64_t id;
  SendRequest* next;
  Entry* entries;
  int32_t num_entries;
  uint32_t opcode;
  uint32_t flags;
  uint32_t imm;  // network byte order
  uint64_t remote;
  union {
    uint32_t write_key;
    uint64_t add;
  };
  uint64_t swap;
  uint32_t atomic_key;
  uint32_t reserved;
  uint64_t others[7];  // for kinds of requests and queue pairs that are not used here
};

struct ReceiveRequest {  // ibv_recv_wr
  uint64_t id;
  ReceiveRequest* next;
  Entry* entries;
  int32_t num_entries;
};

struct Completion {  // ibv_wc
  uint64_t id;
  uint32_t status;
  uint32_t opcode;
  uint32_t vendor_error;
  uint32_t bytes;
  uint32_t imm;  // network byte order
  uint32_t pair;
  uint32_t source_pair;
  uint32_t flags;
  uint16_t pkey_index;
  uint16_t source_lid;
  uint8_t service_level;
  uint8_t path_bits;
};

// ibv_qp_ex: a queue pair that is posted to by functions of its own, and by one doorbell per batch. Others are not used here.
struct ExtendedPair {
  void *context, *user, *domain, *sends, *arrivals, *shared;
  uint32_t handle, number, state, kind;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t events_completed;
  uint64_t mask;
  // Of the request that the next function begins.
  uint64_t id;
  uint32_t flags;
  void* others[6];
  void (*write_imm)(ExtendedPair*, uint32_t key, uint64_t remote, uint32_t imm);  // imm: network byte order
  void (*send)(ExtendedPair*);
  void* more[3];
  void (*set_route)(ExtendedPair*, void* route, uint32_t number, uint32_t queue_key);
  void* still_more[3];
  void (*set_entry)(ExtendedPair*, uint32_t key, uint64_t address, uint32_t bytes);
  void* entries;
  void (*start)(ExtendedPair*);
  int (*complete)(ExtendedPair*);

  bool fit() const {
    return write_imm != nullptr && send != nullptr && set_route != nullptr && set_entry != nullptr && start != nullptr &&
           complete != nullptr;
  }
};

using PostSend = int (*)(void* pair, SendRequest* first, SendRequest** bad);
using PostReceive = int (*)(void* pair, ReceiveRequest* first, ReceiveRequest** bad);
using Poll = int (*)(void* queue, int limit, Completion* found);

enum Opcode : uint32_t { kWrite = 0, kSendImm = 3, kFetchAdd = 6 };   // ibv_wr_opcode
enum SendFlag : uint32_t { kFence = 1, kSignaled = 2, kInline = 8 };  // ibv_send_flags
constexpr uint32_t kReceived = 128;                                   // IBV_WC_RECV: a bit that the opcodes of all receives have
constexpr uint32_t kWithImm = 2;                                      // IBV_WC_WITH_IMM

static_assert(sizeof(Entry) == 16 && sizeof(SendRequest) == 128 && sizeof(ReceiveRequest) == 32 && sizeof(Completion) == 48, "verbs");
#if __has_include(<infiniband/verbs.h>)
static_assert(sizeof(Entry) == sizeof(ibv_sge) && offsetof(Entry, key) == offsetof(ibv_sge, lkey), "ibv_sge");
static_assert(sizeof(SendRequest) == sizeof(ibv_send_wr) && offsetof(SendRequest, flags) == offsetof(ibv_send_wr, send_flags) &&
                  offsetof(SendRequest, imm) == offsetof(ibv_send_wr, imm_data) &&
                  offsetof(SendRequest, remote) == offsetof(ibv_send_wr, wr.rdma.remote_addr) &&
                  offsetof(SendRequest, write_key) == offsetof(ibv_send_wr, wr.rdma.rkey) &&
                  offsetof(SendRequest, remote) == offsetof(ibv_send_wr, wr.atomic.remote_addr) &&
                  offsetof(SendRequest, add) == offsetof(ibv_send_wr, wr.atomic.compare_add) &&
                  offsetof(SendRequest, atomic_key) == offsetof(ibv_send_wr, wr.atomic.rkey),
              "ibv_send_wr");
static_assert(sizeof(ReceiveRequest) == sizeof(ibv_recv_wr) && offsetof(ReceiveRequest, num_entries) == offsetof(ibv_recv_wr, num_sge),
              "ibv_recv_wr");
static_assert(sizeof(Completion) == sizeof(ibv_wc) && offsetof(Completion, bytes) == offsetof(ibv_wc, byte_len) &&
                  offsetof(Completion, imm) == offsetof(ibv_wc, imm_data) && offsetof(Completion, pair) == offsetof(ibv_wc, qp_num) &&
                  offsetof(Completion, flags) == offsetof(ibv_wc, wc_flags),
              "ibv_wc");
static_assert(kWrite == uint32_t{IBV_WR_RDMA_WRITE} && kSendImm == uint32_t{IBV_WR_SEND_WITH_IMM} &&
                  kFetchAdd == uint32_t{IBV_WR_ATOMIC_FETCH_AND_ADD},
              "ibv_wr_opcode");
static_assert(kFence == uint32_t{IBV_SEND_FENCE} && kSignaled == uint32_t{IBV_SEND_SIGNALED} && kInline == uint32_t{IBV_SEND_INLINE},
              "ibv_send_flags");
static_assert(kReceived == IBV_WC_RECV && kWithImm == IBV_WC_WITH_IMM, "completions");
static_assert(offsetof(ExtendedPair, mask) == offsetof(ibv_qp_ex, comp_mask) && offsetof(ExtendedPair, id) == offsetof(ibv_qp_ex, wr_id) &&
                  offsetof(ExtendedPair, flags) == offsetof(ibv_qp_ex, wr_flags) &&
                  offsetof(ExtendedPair, write_imm) == offsetof(ibv_qp_ex, wr_rdma_write_imm) &&
                  offsetof(ExtendedPair, send) == offsetof(ibv_qp_ex, wr_send) &&
                  offsetof(ExtendedPair, set_route) == offsetof(ibv_qp_ex, wr_set_ud_addr) &&
                  offsetof(ExtendedPair, set_entry) == offsetof(ibv_qp_ex, wr_set_sge) &&
                  offsetof(ExtendedPair, start) == offsetof(ibv_qp_ex, wr_start) &&
                  offsetof(ExtendedPair, complete) == offsetof(ibv_qp_ex, wr_complete),
              "ibv_qp_ex");
// What mkernel/transport/verbs/handles.py takes for granted.
static_assert(IBV_QPT_DRIVER == 0xFF && offsetof(ibv_ah, pd) == 8, "ibv_ah");
static_assert(offsetof(ibv_qp, send_cq) == 24 && offsetof(ibv_qp, recv_cq) == 32 && offsetof(ibv_qp, qp_num) == 52 &&
                  offsetof(ibv_qp, qp_type) == 60 && IBV_QPT_RC == 2,
              "ibv_qp");
static_assert(offsetof(ibv_context, ops.poll_cq) == 96 && offsetof(ibv_context, ops.post_send) == 208 &&
                  offsetof(ibv_context, ops.post_recv) == 216,
              "ibv_context");
#endif

}  // namespace mkproxy
