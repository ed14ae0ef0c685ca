// RDMA over reliable connections. The reference, which says why, is mkernel/transport/rc.py: writes carry the bytes of puts, an atomic waits
// for them, and fenced writes behind it raise the flags.
#pragma once
#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "abi.h"
#include "card.hpp"
#include "interface.hpp"
#include "ring.hpp"
#include "transport.hpp"
#include "verbs.hpp"

namespace mkproxy {

constexpr uint64_t kScratch = 2;  // words of `Setup::scratch` before the received values
constexpr uint64_t kNumbers = (1ull << 38) - 1;
enum Part : uint64_t { kData = 0, kFlag = 1, kBarrier = 2 };  // of a put: the low bits of a work request's number

// A put that was accepted.
struct Pending {
  const abi::Command* put;
  uint64_t requests;  // the most work requests that it takes
  bool ordered;       // its flag must wait for what is before it
};

// One queue pair to one peer. Puts have numbers: those below `retired` are complete, those from `flushed` on wait for a flush.
struct Connection {
  void* pair;
  uint64_t position, peer, index;  // index: among the peer's
  uint64_t room;                   // free work requests
  uint64_t accepted = 0, flushed = 0, retired = 0;
  std::vector<Pending> puts;                         // by number, modulo the size
  std::unordered_map<uint32_t, uint64_t> last_data;  // channel -> number of its last put with bytes

  Pending& at(uint64_t number) { return puts[number & (puts.size() - 1)]; }
};

class RcTransport final : public CardTransport {
 public:
  RcTransport(const Setup& setup, Report& report, Credits& credits)
      : CardTransport(setup, report, credits),
        post_send_(reinterpret_cast<PostSend>(setup.post_send)),
        scratch_(reinterpret_cast<uint64_t*>(setup.scratch)),
        extra_(setup.signal == kAtomic ? 2 : 1),
        completions_left_(setup.completions),
        flags_(setup.num_peers),
        requests_(setup.depth),
        entries_(setup.depth),
        values_(setup.depth) {
    uint64_t slots = 1;
    while (slots < setup.depth) slots *= 2;
    for (uint64_t peer = 0; peer < setup.num_peers; ++peer) {
      flags_[peer].resize((setup.signal_bytes / kWord + kPage - 1) / kPage);
      for (uint64_t index = 0; index < setup.queue_pairs; ++index) {
        Connection connection{};
        connection.position = connections_.size();
        connection.pair = pair(connection.position);
        connection.peer = peer;
        connection.index = index;
        connection.room = setup.depth;
        connection.puts.resize(slots);
        connections_.push_back(std::move(connection));
      }
    }
  }

  bool under_way(uint64_t position) const { return connections_[position].retired != connections_[position].flushed; }

  Post post(const abi::Command& put, uint64_t peer) {
    if (!inside(put)) return failed(kBadPut, put);
    Connection& connection = connections_[peer * setup_.queue_pairs + put.channel % setup_.queue_pairs];
    FlagUse& flag = use_of(peer, put.signal_offset);
    const bool mine = flag.next == 0 || flag.position == connection.position;
    const bool ordered = needs_order(connection, put, mine ? flag.next : 0);
    const uint64_t requests = (put.bytes + setup_.max_message - 1) / setup_.max_message + (ordered ? extra_ : 1);
    if (requests > setup_.depth) return failed(kTooLong, put);
    if (connection.room < requests || completions_left_ < requests) return Post::kRefused;
    if (!mine && flag.next > connections_[flag.position].retired) return failed(kTwoChannels, put);
    const uint64_t number = connection.accepted++;
    flag = {connection.position, number + 1};
    if (put.bytes != 0) connection.last_data[put.channel] = number;
    connection.room -= requests;
    completions_left_ -= requests;
    ++report_.outstanding;
    if (number == connection.flushed) dirty_.push_back(connection.position);
    connection.at(number) = {&put, requests, ordered};
    return Post::kAccepted;
  }

  // Builds the work requests of all accepted puts, with one doorbell per queue pair. The last of each asks for a completion.
  bool flush() {
    report_.moved_ns = now_ns();
    for (const uint64_t position : dirty_) {
      Connection& connection = connections_[position];
      build(connection);
      connection.flushed = connection.accepted;
      if (!commit(connection)) return false;
    }
    dirty_.clear();
    return true;
  }

  bool poll(bool& moved) {
    Completion found[kPolled];
    int count = take(0, found);
    if (count < 0) return false;
    for (int i = 0; i < count; ++i) {
      if (!retire(found[i].id, moved)) return false;
    }
    if (setup_.receives != 0) {
      count = take(1, found);
      if (count < 0) return false;
      for (int i = 0; i < count; ++i) {
        if (!raise_flag(found[i])) return false;
        moved = true;
      }
    }
    if (moved) report_.moved_ns = now_ns();
    return true;
  }

 private:
  static constexpr uint64_t kPage = 512;
  struct FlagUse {
    uint64_t position;  // of the queue pair of its last put
    uint64_t next;      // number of that put, plus 1; 0: there was none
  };
  using Page = std::array<FlagUse, kPage>;

  FlagUse& use_of(uint64_t peer, uint64_t offset) {
    std::unique_ptr<Page>& page = flags_[peer][offset / kWord / kPage];
    if (!page) page = std::make_unique<Page>();
    return (*page)[offset / kWord % kPage];
  }

  // Whether bytes, or another value of the flag, are under way that must be in memory before the flag is written.
  // `next`: number of the last put with this flag on this queue pair, plus 1, or 0.
  bool needs_order(const Connection& connection, const abi::Command& put, uint64_t next) const {
    if (put.bytes != 0 || next > connection.retired) return true;
    const auto last = connection.last_data.find(put.channel);
    return last != connection.last_data.end() && last->second >= connection.retired;
  }

  void build(Connection& connection) {
    num_requests_ = 0;
    const uint64_t first = connection.flushed, last = connection.accepted - 1;
    if (setup_.signal != kAtomic) {
      for (uint64_t number = first; number <= last; ++number) {
        write(connection, number);
        if (setup_.signal == kPlain) {
          raise(connection, number, number, number == last, false);
        } else {
          tell(connection, number, number == last);
        }
      }
      return;
    }
    uint64_t last_ordered = last + 1;  // none
    for (uint64_t number = first; number <= last; ++number) {
      if (connection.at(number).ordered) last_ordered = number;
    }
    for (uint64_t number = first; number <= last; ++number) {  // first: behind a fenced request they would wait
      if (!connection.at(number).ordered) raise(connection, number, number, last_ordered > last && number == last, false);
    }
    for (uint64_t number = first; number <= last; ++number) write(connection, number);
    if (last_ordered > last) return;
    order(connection, last);
    for (uint64_t number = first; number <= last_ordered; ++number) {
      const Pending& pending = connection.at(number);
      // Only the last value of each flag is written: fenced writes have no order among themselves.
      if (!pending.ordered || use_of(connection.peer, pending.put->signal_offset).next != number + 1) continue;
      const bool final = number == last_ordered;
      // The last request of the batch has its completion, and so the number of its last put.
      raise(connection, number, final ? last : number, final, true);
    }
  }

  // The next work request of the batch.
  SendRequest& request(const Connection& connection, uint64_t number, Part part, Opcode opcode, bool signaled, Entry entry) {
    SendRequest& request = requests_[num_requests_];
    entries_[num_requests_] = entry;
    request = SendRequest{};
    request.id = targets_[connection.peer].rank << 48 | connection.index << 40 | (number & kNumbers) << 2 | part;
    request.entries = &entries_[num_requests_];
    request.num_entries = 1;
    request.opcode = opcode;
    request.flags = signaled ? uint32_t{kSignaled} : 0;
    if (num_requests_ > 0) requests_[num_requests_ - 1].next = &request;
    ++num_requests_;
    return request;
  }

  void write(Connection& connection, uint64_t number) {
    const abi::Command& put = *connection.at(number).put;
    const Target& target = targets_[connection.peer];
    for (uint64_t done = 0; done < put.bytes;) {
      const uint64_t size = std::min(put.bytes - done, setup_.max_message);
      const Entry entry{setup_.heap + put.src_offset + done, static_cast<uint32_t>(size), static_cast<uint32_t>(setup_.heap_key)};
      SendRequest& made = request(connection, number, kData, kWrite, false, entry);
      made.remote = target.heap + put.dst_offset + done;
      made.write_key = static_cast<uint32_t>(target.heap_key);
      done += size;
    }
  }

  // The atomic: what is before it is in memory before a fenced write after it begins.
  void order(Connection& connection, uint64_t number) {
    const Target& target = targets_[connection.peer];
    const Entry answer{setup_.scratch_registered + kWord, kWord, static_cast<uint32_t>(setup_.scratch_key)};
    SendRequest& made = request(connection, number, kBarrier, kFetchAdd, false, answer);
    made.remote = target.barrier;
    made.add = 0;
    made.atomic_key = static_cast<uint32_t>(target.barrier_key);
  }

  void raise(Connection& connection, uint64_t number, uint64_t named, bool signaled, bool fenced) {
    const abi::Command& put = *connection.at(number).put;
    const Target& target = targets_[connection.peer];
    uint64_t& value = values_[num_requests_];
    value = put.signal_value;
    SendRequest& made = request(connection, named, kFlag, kWrite, signaled, {reinterpret_cast<uint64_t>(&value), kWord, 0});
    made.flags |= kInline | (fenced ? uint32_t{kFence} : 0);
    made.remote = target.signals + put.signal_offset;
    made.write_key = static_cast<uint32_t>(target.signal_key);
  }

  void tell(Connection& connection, uint64_t number, bool signaled) {
    const abi::Command& put = *connection.at(number).put;
    // The slot is free: at most `depth` puts are under way.
    const uint64_t slot = kScratch + connections_.size() * setup_.receives + connection.position * setup_.depth + number % setup_.depth;
    scratch_[slot] = put.signal_value;
    const Entry entry{setup_.scratch_registered + kWord * slot, kWord, static_cast<uint32_t>(setup_.scratch_key)};
    request(connection, number, kFlag, kSendImm, signaled, entry).imm = htonl(static_cast<uint32_t>(put.signal_offset / kWord));
  }

  bool commit(Connection& connection) {
    SendRequest* bad = nullptr;
    return posted(post_send_(connection.pair, requests_.data(), &bad), connection.position, kPost);
  }

  // Notes that a work request, and with it all that were posted before it on its queue pair, has completed.
  bool retire(uint64_t id, bool& moved) {
    const int64_t peer = peer_of(static_cast<uint32_t>(id >> 48));
    const uint64_t index = id >> 40 & 0xFF, number = id >> 2 & kNumbers;
    if (peer < 0 || index >= setup_.queue_pairs) return fail(report_, kMiscounted, id);
    Connection& connection = connections_[static_cast<uint64_t>(peer) * setup_.queue_pairs + index];
    while (connection.retired != connection.flushed && ((number - connection.retired) & kNumbers) <= kNumbers >> 1) {
      const Pending& pending = connection.at(connection.retired);
      connection.room += pending.requests;
      completions_left_ += pending.requests;
      --report_.outstanding;
      ++connection.retired;
      moved = true;
      if (!credits_.complete(pending.put->ticket)) return fail(report_, kMiscounted, pending.put->ticket);
    }
    return true;
  }

  // Raises the flag of a message, before which its sender's writes are in memory, and posts its receive again.
  bool raise_flag(const Completion& completion) {
    ++report_.arrived;
    const uint64_t position = completion.id >> 32, slot = completion.id & 0xFFFFFFFF;
    const bool told = (completion.opcode & kReceived) != 0 && (completion.flags & kWithImm) != 0;
    const uint64_t flag = told ? ntohl(completion.imm) : 0;
    report_.pair = position;
    if (!told || completion.bytes != kWord || !is_flag(kWord * flag)) {
      report_.bytes = completion.bytes;
      report_.imm = told ? flag : 1ull << 32;
      return fail(report_, kBadMessage);
    }
    const uint64_t word = kScratch + position * setup_.receives + slot;
    store(kWord * flag, scratch_[word]);
    Entry entry{setup_.scratch_registered + kWord * word, kWord, static_cast<uint32_t>(setup_.scratch_key)};
    ReceiveRequest again{completion.id, nullptr, &entry, 1};
    return post_receives(position, &again);
  }

  const PostSend post_send_;
  uint64_t* const scratch_;
  const uint64_t extra_;       // work requests of an ordered put in addition to its writes
  uint64_t completions_left_;  // entries of the completion queue that no request may need
  std::vector<Connection> connections_;
  std::vector<std::vector<std::unique_ptr<Page>>> flags_;  // by peer
  std::vector<uint64_t> dirty_;                            // positions of the queue pairs that have accepted puts
  // The batch that is being built: work requests, their entries, and values that travel in them.
  std::vector<SendRequest> requests_;
  std::vector<Entry> entries_;
  std::vector<uint64_t> values_;
  uint64_t num_requests_ = 0;
};

}  // namespace mkproxy
