// RDMA over SRD queue pairs (AWS EFA), which keep no order. The reference, which says why, is mkernel/transport/srd.py: writes with an
// immediate carry the bytes of a put, a message announces it, and the receiver's engine counts them and raises the flag.
#pragma once
#include <arpa/inet.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "abi.h"
#include "card.hpp"
#include "counting.hpp"
#include "interface.hpp"
#include "ring.hpp"
#include "transport.hpp"
#include "verbs.hpp"

namespace mkproxy {

// An announcement; or an update, which announces nothing and has kUpdate writes.
struct Message {
  uint16_t channel, sequence;
  uint32_t writes;
  uint64_t signal_offset, signal_value;
  uint64_t granted, released;  // what its receiver may have sent in all, and how many of its puts have been released
};
static_assert(sizeof(Message) == 40 && std::endian::native == std::endian::little, "as srd.py packs it");
constexpr uint32_t kUpdate = 0xFFFFFFFF;
constexpr uint64_t kMessageSlot = 64;  // bytes of memory for a message

class SrdTransport final : public CardTransport {
 public:
  SrdTransport(const Setup& setup, Report& report, Credits& credits) : CardTransport(setup, report, credits) {
    for (uint64_t position = 0; position < setup.num_peers; ++position) {
      auto* pair = static_cast<ExtendedPair*>(this->pair(position));
      peers_.push_back({pair, position, Outgoing(targets_[position].credits, setup.window), Incoming(setup.credits, setup.window)});
      Peer& peer = peers_.back();
      for (uint32_t request = 0; request + 1 < setup.depth; ++request) peer.free.push_back(request);  // the last one is for updates
      peer.jobs.resize(setup.depth);
      peer.backlog.resize(std::bit_ceil(setup.backlog));
    }
  }

  // The position of a queue pair that lacks a function that is used here; -1: there is none.
  static int64_t unfit(const Setup& setup) {
    const auto* pairs = reinterpret_cast<const uint64_t*>(setup.pairs);
    for (uint64_t position = 0; position < setup.num_peers; ++position) {
      if (!reinterpret_cast<const ExtendedPair*>(pairs[position])->fit()) return static_cast<int64_t>(position);
    }
    return -1;
  }

  bool under_way(uint64_t position) const {
    const Peer& peer = peers_[position];
    return peer.waiting() != 0 || peer.free.size() + 1 != setup_.depth;
  }

  Post post(const abi::Command& put, uint64_t position) {
    if (!inside(put) || put.channel >= kChannels) return failed(kBadPut, put);
    Peer& peer = peers_[position];
    if (peer.waiting() >= setup_.backlog) return Post::kRefused;
    Job& job = jobs_[put.ticket % abi::kRingSlots];
    job = {&put};
    peer.job(peer.last++) = &job;
    ++report_.outstanding;
    touch(peer);
    return Post::kAccepted;
  }

  // Posts as much as credits and send queues allow, with one doorbell per peer.
  bool flush() {
    for (const uint64_t position : touched_) {
      Peer& peer = peers_[position];
      peer.touched = begun_ = false;
      pump(peer);
      if (peer.incoming.due() && !peer.updating) {
        peer.updating = true;
        send(peer, setup_.depth - 1, {0, 0, kUpdate, 0, 0, 0, 0});
      }
      if (begun_ && !posted(peer.pair->complete(peer.pair), position, kPost)) return false;
    }
    touched_.clear();
    return true;
  }

  bool poll(bool& moved) {
    Completion found[kPolled];
    int count = look(1, found);
    if (count < 0 || !receive(found, count)) return false;
    moved |= count != 0;
    count = look(0, found);
    if (count < 0) return false;
    for (int i = 0; i < count; ++i) {
      if (!retire(found[i].id, moved)) return false;
    }
    if (moved) report_.moved_ns = now_ns();
    return flush();
  }

 private:
  // A put under way: its writes are posted, then its announcement. It is complete when all of these are.
  struct Job {
    const abi::Command* put = nullptr;
    uint64_t done = 0;     // bytes posted
    uint64_t pending = 1;  // messages that are not completed; the announcement counts before it is posted
    uint32_t sequence = 0;
    bool begun = false;
  };

  // A peer, and the queue pair to it.
  struct Peer {
    ExtendedPair* pair;
    uint64_t position;
    Outgoing outgoing;
    Incoming incoming;
    std::vector<uint32_t> free{};  // work requests of the send queue
    std::vector<Job*> jobs{};      // by work request
    std::vector<Job*> backlog{};   // those from `first` to `last` wait, modulo the size
    uint64_t first = 0, last = 0;
    bool updating = false;                  // an update is not known to be delivered
    bool touched = false;                   // the next flush looks at this peer
    ReceiveRequest* first_again = nullptr;  // receives to post again
    ReceiveRequest* last_again = nullptr;

    uint64_t waiting() const { return last - first; }
    Job*& job(uint64_t number) { return backlog[number & (backlog.size() - 1)]; }
  };

  void touch(Peer& peer) {
    if (peer.touched) return;
    peer.touched = true;
    touched_.push_back(peer.position);
  }

  void pump(Peer& peer) {
    for (; peer.waiting() != 0; ++peer.first) {
      Job& job = *peer.job(peer.first);
      const abi::Command& put = *job.put;
      if (!job.begun) {
        if (!peer.outgoing.open()) return;
        job.begun = true;
        job.sequence = peer.outgoing.begin(put.channel);
      }
      for (; job.done < put.bytes; ++job.pending) {
        if (!write(peer, job)) return;
      }
      const int64_t request = spend(peer, job);
      if (request < 0) return;
      const uint64_t writes = (put.bytes + setup_.max_message - 1) / setup_.max_message;
      send(peer, static_cast<uint64_t>(request),
           {static_cast<uint16_t>(put.channel), static_cast<uint16_t>(job.sequence), static_cast<uint32_t>(writes), put.signal_offset,
            put.signal_value, 0, 0});
    }
  }

  // A work request for a message of a put; -1 if there is none, or no credit.
  int64_t spend(Peer& peer, Job& job) {
    if (peer.free.empty() || peer.outgoing.room() == 0) return -1;
    const uint32_t request = peer.free.back();
    peer.free.pop_back();
    peer.jobs[request] = &job;
    peer.outgoing.spend();
    return request;
  }

  // Begins a work request of the batch.
  ExtendedPair* begin(Peer& peer, uint64_t request) {
    if (!begun_) peer.pair->start(peer.pair);
    begun_ = true;
    peer.pair->id = peer.position * setup_.depth + request;
    peer.pair->flags = kSignaled;
    return peer.pair;
  }

  // Ends it: whither and whence.
  void end(Peer& peer, uint64_t address, uint64_t bytes, uint64_t key) {
    const Target& target = targets_[peer.position];
    peer.pair->set_route(peer.pair, reinterpret_cast<void*>(target.route), static_cast<uint32_t>(target.number),
                         static_cast<uint32_t>(target.queue_key));
    peer.pair->set_entry(peer.pair, static_cast<uint32_t>(key), address, static_cast<uint32_t>(bytes));
  }

  // Posts the next write of a put; false if there is no work request for it.
  bool write(Peer& peer, Job& job) {
    const int64_t request = spend(peer, job);
    if (request < 0) return false;
    const abi::Command& put = *job.put;
    const Target& target = targets_[peer.position];
    const uint64_t bytes = std::min(put.bytes - job.done, setup_.max_message);
    ExtendedPair* pair = begin(peer, static_cast<uint64_t>(request));
    pair->write_imm(pair, static_cast<uint32_t>(target.heap_key), target.heap + put.dst_offset + job.done,
                    htonl(put.channel << kSequenceBits | job.sequence));
    end(peer, setup_.heap + put.src_offset + job.done, bytes, setup_.heap_key);
    job.done += bytes;
    return true;
  }

  void send(Peer& peer, uint64_t request, Message message) {
    const auto [granted, released] = peer.incoming.tell();
    message.granted = granted;
    message.released = released;
    ExtendedPair* pair = begin(peer, request);
    const uint64_t offset = kMessageSlot * pair->id;
    std::memcpy(reinterpret_cast<void*>(setup_.scratch + offset), &message, sizeof message);
    pair->send(pair);
    end(peer, setup_.scratch_registered + offset, sizeof message, setup_.scratch_key);
  }

  // As `take`, for a provider that answers with a negative errno and leaves errno alone, as EFA's does.
  int look(uint64_t arrivals, Completion* found) {
    const int count = take(arrivals, found);
    if (count < 0 && report_.trouble == kPoll && report_.code == 0) report_.code = static_cast<uint64_t>(-count);
    return count;
  }

  // Notes that a work request has completed.
  bool retire(uint64_t id, bool& moved) {
    const uint64_t position = id / setup_.depth, request = id % setup_.depth;
    if (position >= peers_.size()) return fail(report_, kMiscounted, id);
    Peer& peer = peers_[position];
    if (request == setup_.depth - 1) {
      peer.updating = false;
      touch(peer);
      return true;
    }
    if (peer.waiting() != 0) touch(peer);
    Job* job = peer.jobs[request];
    if (job == nullptr) return fail(report_, kMiscounted, id);
    peer.jobs[request] = nullptr;
    peer.free.push_back(static_cast<uint32_t>(request));
    if (--job->pending != 0) return true;
    --report_.outstanding;
    moved = true;
    return credits_.complete(job->put->ticket) || fail(report_, kMiscounted, job->put->ticket);
  }

  // ---- the receiver's part
  // Offset of a receive's memory among the messages: behind those of the send queues, from the end.
  uint64_t place(uint64_t id) const { return kMessageSlot * (peers_.size() * (setup_.depth + setup_.receives) - 1 - id); }

  // Counts what has come, raises flags, and posts the receives again, with one doorbell per peer.
  bool receive(const Completion* found, int count) {
    ReceiveRequest again[kPolled];
    Entry entries[kPolled];
    for (int i = 0; i < count; ++i) {
      const uint64_t id = found[i].id;
      Peer& peer = peers_[id / setup_.receives];
      ++report_.arrived;
      if (!understand(peer, found[i])) return false;
      entries[i] = {setup_.scratch_registered + place(id), kMessageSlot, static_cast<uint32_t>(setup_.scratch_key)};
      again[i] = {id, nullptr, &entries[i], 1};
      (peer.first_again == nullptr ? peer.first_again : peer.last_again->next) = &again[i];
      peer.last_again = &again[i];
    }
    for (int i = 0; i < count; ++i) {
      Peer& peer = peers_[found[i].id / setup_.receives];
      ReceiveRequest* first = peer.first_again;
      if (first == nullptr) continue;
      peer.first_again = nullptr;
      if (!post_receives(peer.position, first)) return false;
      if (peer.waiting() != 0 || peer.incoming.due()) touch(peer);
    }
    return true;
  }

  bool understand(Peer& peer, const Completion& completion) {
    Breach breach{};
    const auto release = [this](uint64_t offset, uint64_t value, Breach& why) {
      if (!is_flag(offset)) {
        why = {kFlagOutside, 0, 0, offset, 0};
        return false;
      }
      store(offset, value);
      return true;
    };
    if ((completion.flags & kWithImm) != 0) {
      return peer.incoming.write(ntohl(completion.imm), release, breach) || broken(peer, breach);
    }
    Message message;
    if (completion.bytes != sizeof message) return broken(peer, {kLength, 0, 0, completion.bytes, 0});
    std::memcpy(&message, reinterpret_cast<const void*>(setup_.scratch + place(completion.id)), sizeof message);
    if (!peer.outgoing.update(message.granted, message.released, breach)) return broken(peer, breach);
    if (message.writes == kUpdate) return true;
    return peer.incoming.announce(message.channel, message.sequence, message.writes, message.signal_offset, message.signal_value, release,
                                  breach) ||
           broken(peer, breach);
  }

  bool broken(const Peer& peer, const Breach& breach) {
    report_.pair = peer.position;
    report_.rule = breach.rule;
    report_.channel = breach.channel;
    report_.sequence = breach.sequence;
    report_.number = breach.number;
    report_.limit = breach.limit;
    return fail(report_, kProtocol);
  }

  std::vector<Peer> peers_;
  std::vector<uint64_t> touched_;            // positions
  std::array<Job, abi::kRingSlots> jobs_{};  // of the puts under way, by ticket
  bool begun_ = false;                       // whether the batch that is being built has a request
};

}  // namespace mkproxy
