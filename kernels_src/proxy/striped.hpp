// Several cards of a rank as one. The reference, which says why, is mkernel/transport/striped.py: the bytes of a put are spread over the links
// by rate, its flag goes by its channel's home link once all bytes that went by others are there, and a link that fails is done without.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "abi.h"
#include "interface.hpp"
#include "rc.hpp"
#include "ring.hpp"
#include "transport.hpp"

namespace mkproxy {

constexpr uint64_t kMostLinks = 16;

// A list whose members hold its links: each is in one list at most.
template <class Member>
class List {
 public:
  Member* first() const { return first_; }
  bool empty() const { return first_ == nullptr; }

  void push(Member& member) {
    member.before = last_;
    member.after = nullptr;
    (last_ == nullptr ? first_ : last_->after) = &member;
    last_ = &member;
  }

  void remove(Member& member) {
    (member.before == nullptr ? first_ : member.before->after) = member.after;
    (member.after == nullptr ? last_ : member.after->before) = member.before;
  }

  Member& pop() {
    Member& member = *first_;
    remove(member);
    return member;
  }

  // Puts all members of another list before those of this one.
  void prepend(List& other) {
    if (other.empty()) return;
    if (!empty()) {
      other.last_->after = first_;
      first_->before = other.last_;
    } else {
      last_ = other.last_;
    }
    first_ = other.first_;
    other = List();
  }

  Member* last() const { return last_; }

 private:
  Member *first_ = nullptr, *last_ = nullptr;
};

class StripedTransport {
 public:
  StripedTransport(const Setup& setup, Report& report, Credits& credits)
      : setup_(setup), report_(report), credits_(credits), flows_of_(setup.num_peers) {
    const Setup* links = reinterpret_cast<const Setup*>(setup.links);
    for (uint64_t i = 0; i < setup.num_links; ++i) {
      ways_.push_back(std::make_unique<Way>(links[i]));
      working_.push_back(i);
    }
    sizes_.resize(setup.num_links);
    wanted_.resize(setup.num_links);
    pairs_of_link_ = links[0].num_peers * links[0].queue_pairs;
  }

  uint64_t num_peers() const { return ways_[0]->link.num_peers(); }
  int64_t peer_of(uint32_t rank) const { return ways_[0]->link.peer_of(rank); }

  // `position`: among the queue pairs of all links.
  bool under_way(uint64_t position) const {
    const Way& way = *ways_[position / pairs_of_link_];
    return !way.lost && way.link.under_way(position % pairs_of_link_);
  }

  // Accepts every put: the ring has room for so many only.
  Post post(const abi::Command& put, uint64_t peer) {
    Flow& flow = flow_of(peer, put.channel);
    if (!ways_[flow.home]->link.inside(put)) {
      report_.link = flow.home;
      fail(report_, kBadPut, put.ticket);
      return Post::kFailed;
    }
    Job& job = jobs_[put.ticket % abi::kRingSlots];
    job = Job{};
    job.put = &put;
    job.flow = &flow;
    job.bytes_left = put.bytes;
    ++report_.outstanding;
    flow.waiting.push(job);
    if (put.bytes >= 2 * setup_.smallest && working_.size() > 1) {
      share(put.bytes);
      job.bytes_left = 0;
      uint64_t offset = 0;
      for (const uint64_t number : working_) {
        if (sizes_[number] == 0) continue;
        if (!send(part_of(job, number, offset, sizes_[number], false))) return Post::kFailed;
        offset += sizes_[number];
      }
    }
    return release(flow) ? Post::kAccepted : Post::kFailed;
  }

  bool flush() {
    for (const uint64_t number : working_) {
      Way& way = *ways_[number];
      if (!way.dirty) continue;
      way.dirty = false;
      if (!way.link.flush()) return trouble(number);
    }
    return true;
  }

  bool poll(bool& moved) {
    for (const uint64_t number : working_) {
      Way& way = *ways_[number];
      bool some = false;
      if (!way.link.poll(some)) return trouble(number);
      moved |= some;
      for (const uint64_t ticket : way.ended) {
        if (!complete(number, ticket)) return false;
      }
      way.ended.clear();
      for (uint64_t peer = 0; way.num_refusing > 0 && peer < way.queues.size(); ++peer) {
        if (!way.queues[peer].empty() && !pump(number, peer)) return false;
      }
    }
    return flush();  // of what completions have released, and of what a link that has failed has left
  }

  // Goes on without a link: what it has not completed goes by the others. It moves nothing any more, and others work.
  bool lose(uint64_t number) {
    Way& way = *ways_[number];
    way.lost = true;
    working_.erase(std::find(working_.begin(), working_.end(), number));
    List<Part> parts;
    std::swap(parts, way.flying);
    for (List<Part>& queue : way.queues) {
      queue.prepend(parts);
      std::swap(parts, queue);
    }
    while (!parts.empty()) {
      Part& part = parts.pop();
      part.flying = false;
      if (part.flag) {
        free_.push_back(&part);
        continue;
      }
      Job& job = *part.job;
      --job.parts;
      --job.on[number];
      part.way = emptiest(part.command.bytes);
      if (!send(part)) return false;
    }
    for (Flow& flow : flows_) {
      if (flow.home == number && !move(flow)) return false;
    }
    for (Flow& flow : flows_) {
      if (!release(flow)) return false;
    }
    return true;
  }

 private:
  struct Flow;

  // A put that is not complete.
  struct Job {
    const abi::Command* put;
    Flow* flow;
    Job *before, *after;                 // in a list of its flow
    uint64_t bytes_left;                 // that travel with the flag
    uint32_t parts;                      // not complete, without the flag
    std::array<uint8_t, kMostLinks> on;  // of these, by link
    bool flagged;                        // the flag is complete
    bool merged;                         // a newer value of the same word takes the flag's place
    bool ended;                          // its completion has been reported
  };

  // What one link carries of a put: some bytes, or the flag with what bytes are left.
  struct Part {
    abi::Command command;  // as the link posts it; its ticket is the part's place in `parts_`
    Job* job;
    Part *before, *after;  // in a list of its link
    uint64_t way;
    uint64_t offset;
    bool flag;
    bool flying;  // the link has accepted it
  };

  // The puts of one channel to one rank, in order.
  struct Flow {
    uint64_t peer;
    uint32_t channel;
    uint64_t home;
    List<Job> waiting;  // their flags are not posted
    List<Job> sent;     // their flags are posted and not complete
  };

  // A link, and what is on it.
  struct Way final : Credits {
    explicit Way(const Setup& setup)
        : link(setup, *reinterpret_cast<Report*>(setup.report), *this),
          report(*reinterpret_cast<Report*>(setup.report)),
          rate(static_cast<double>(setup.rate)),
          queues(setup.num_peers) {}

    bool complete(uint64_t ticket) override {
      ended.push_back(ticket);
      return true;
    }

    RcTransport link;
    Report& report;
    const double rate;
    std::vector<List<Part>> queues;  // by peer: not accepted yet
    uint64_t num_refusing = 0;       // peers to which something is queued
    List<Part> flying;
    std::vector<uint64_t> ended;  // tickets of parts that the link has completed
    uint64_t backlog = 0;         // bytes queued or under way
    uint64_t flows = 0;           // that have their home here
    bool dirty = false, lost = false;
  };

  // Reports what a link has met.
  bool trouble(uint64_t number) {
    const Report& found = ways_[number]->report;
    report_.link = number;
    const bool of_a_part = found.trouble == kTooLong || found.trouble == kTwoChannels;
    return fail(report_, static_cast<Trouble>(found.trouble), of_a_part ? parts_[found.ticket].job->put->ticket : found.ticket);
  }

  Flow& flow_of(uint64_t peer, uint32_t channel) {
    Flow*& flow = flows_of_[peer][channel];
    if (flow == nullptr) {
      flows_.push_back({peer, channel, choose_home(), {}, {}});
      flow = &flows_.back();
    }
    return *flow;
  }

  // The link that has fewest flows for its rate.
  uint64_t choose_home() {
    uint64_t best = working_[0];
    for (const uint64_t number : working_) {
      const Way &way = *ways_[number], &other = *ways_[best];
      if (static_cast<double>(way.flows + 1) / way.rate < static_cast<double>(other.flows + 1) / other.rate) best = number;
    }
    ++ways_[best]->flows;
    return best;
  }

  // The link by which so many bytes more are there first.
  uint64_t emptiest(uint64_t size) const {
    uint64_t best = working_[0];
    for (const uint64_t number : working_) {
      const Way &way = *ways_[number], &other = *ways_[best];
      if (static_cast<double>(way.backlog + size) / way.rate < static_cast<double>(other.backlog + size) / other.rate) best = number;
    }
    return best;
  }

  // Into `sizes_`, how many of `size` bytes go by each link, so that all end at the same time; 0 or at least `smallest` by each.
  void share(uint64_t size) {
    used_ = working_;
    while (true) {
      uint64_t bytes = size;
      double rate = 0;
      for (const uint64_t number : used_) {
        bytes += ways_[number]->backlog;
        rate += ways_[number]->rate;
      }
      const double end = static_cast<double>(bytes) / rate;
      auto least = used_.begin();
      for (auto at = used_.begin(); at != used_.end(); ++at) {
        wanted_[*at] = end * ways_[*at]->rate - static_cast<double>(ways_[*at]->backlog);
        if (wanted_[*at] < wanted_[*least]) least = at;
      }
      if (used_.size() == 1 || wanted_[*least] >= static_cast<double>(setup_.smallest)) break;
      used_.erase(least);
    }
    std::fill(sizes_.begin(), sizes_.end(), 0);
    uint64_t left = size;
    for (uint64_t i = 1; i < used_.size(); ++i) {
      const uint64_t number = used_[i];
      sizes_[number] = std::min(left, static_cast<uint64_t>(wanted_[number]) / setup_.unit * setup_.unit);
      left -= sizes_[number];
    }
    sizes_[used_[0]] = left;
  }

  Part& part_of(Job& job, uint64_t way, uint64_t offset, uint64_t bytes, bool flag) {
    if (free_.empty()) {
      parts_.push_back({});
      parts_.back().command.ticket = parts_.size() - 1;
      free_.push_back(&parts_.back());
    }
    Part& part = *free_.back();
    free_.pop_back();
    part.job = &job;
    part.way = way;
    part.offset = offset;
    part.flag = flag;
    part.command.bytes = bytes;
    return part;
  }

  // Posts a part on its link, behind all that the link has not accepted yet to the same rank.
  bool send(Part& part) {
    const abi::Command& put = *part.job->put;
    abi::Command& command = part.command;
    // Channels that are equal modulo this share one of the link, which orders more than is asked for.
    command.channel = put.channel % abi::kScratchWords;
    command.dst_rank = put.dst_rank;
    command.src_offset = put.src_offset + part.offset;
    command.dst_offset = put.dst_offset + part.offset;
    command.signal_offset = part.flag ? put.signal_offset : kScratchOffset + kWord * command.channel;
    command.signal_value = part.flag ? put.signal_value : ++number_;
    Way& way = *ways_[part.way];
    way.backlog += command.bytes;
    if (!part.flag) {
      ++part.job->parts;
      ++part.job->on[part.way];
    }
    const uint64_t peer = part.job->flow->peer;
    const bool first = way.queues[peer].empty();
    way.queues[peer].push(part);
    if (!first) return true;
    ++way.num_refusing;
    return pump(part.way, peer);
  }

  // Posts what is queued to a rank, as far as the link accepts it.
  bool pump(uint64_t number, uint64_t peer) {
    Way& way = *ways_[number];
    List<Part>& queue = way.queues[peer];
    while (!queue.empty()) {
      const Post answer = way.link.post(queue.first()->command, peer);
      if (answer == Post::kFailed) return trouble(number);
      if (answer == Post::kRefused) return true;
      Part& part = queue.pop();
      part.flying = true;
      way.flying.push(part);
      way.dirty = true;
    }
    --way.num_refusing;
    return true;
  }

  // Posts the flags whose bytes, and those of all earlier puts of the channel, are there or before them on the same link.
  bool release(Flow& flow) {
    while (!flow.waiting.empty()) {
      Job& job = *flow.waiting.first();
      if (job.parts != job.on[flow.home]) return true;
      flow.waiting.remove(job);
      if (job.merged) {
        job.flagged = true;
        if (!finish(job)) return false;
        continue;
      }
      flow.sent.push(job);
      if (!send(part_of(job, flow.home, job.put->bytes - job.bytes_left, job.bytes_left, true))) return false;
    }
    return true;
  }

  bool complete(uint64_t number, uint64_t ticket) {
    if (ticket >= parts_.size() || !parts_[ticket].flying || parts_[ticket].way != number) return fail(report_, kMiscounted, ticket);
    Part& part = parts_[ticket];
    Way& way = *ways_[number];
    way.flying.remove(part);
    part.flying = false;
    free_.push_back(&part);
    way.backlog -= part.command.bytes;
    Job& job = *part.job;
    Flow& flow = *job.flow;
    if (part.flag) {
      job.flagged = true;
      // Completions have no order: earlier flags of the word have been raised, too, and must not be again.
      for (Job* earlier = flow.sent.first(); earlier != &job; earlier = earlier->after) {
        if (earlier->put->signal_offset == job.put->signal_offset) earlier->merged = true;
      }
      flow.sent.remove(job);
    } else {
      --job.parts;
      --job.on[number];
      if (!release(flow)) return false;
    }
    return finish(job);
  }

  bool finish(Job& job) {
    if (!job.flagged || job.parts != 0 || job.ended) return true;
    job.ended = true;
    --report_.outstanding;
    return credits_.complete(job.put->ticket) || fail(report_, kMiscounted, job.put->ticket);
  }

  // Gives a flow another home. Of the flags under way only the newest value of each word is written again.
  bool move(Flow& flow) {
    flow.home = choose_home();
    std::unordered_set<uint64_t> newer;
    for (Job* job = flow.sent.last(); job != nullptr; job = job->before) {
      if (!job->merged && !newer.insert(job->put->signal_offset).second) job->merged = true;
    }
    for (Job* job = flow.sent.first(); job != nullptr; job = job->after) {
      const uint64_t size = std::exchange(job->bytes_left, job->merged ? 0 : job->bytes_left);
      if (!job->merged || size == 0) continue;
      if (!send(part_of(*job, emptiest(size), job->put->bytes - size, size, false))) return false;
    }
    flow.waiting.prepend(flow.sent);
    return true;
  }

  static constexpr uint64_t kScratchOffset = offsetof(abi::SignalHeader, scratch);

  const Setup setup_;
  Report& report_;
  Credits& credits_;
  std::vector<std::unique_ptr<Way>> ways_;  // by number
  std::vector<uint64_t> working_;           // numbers of those that have not failed
  uint64_t pairs_of_link_;
  std::array<Job, abi::kRingSlots> jobs_{};  // of the puts under way, by ticket
  std::deque<Part> parts_;                   // where they are stays the same
  std::vector<Part*> free_;
  std::deque<Flow> flows_;
  std::vector<std::unordered_map<uint32_t, Flow*>> flows_of_;  // by peer, and by channel
  uint64_t number_ = 0;                                        // value of the last scratch flag
  // Of the put that is being spread: the links that take part, what each would carry, and what it does.
  std::vector<uint64_t> used_;
  std::vector<double> wanted_;
  std::vector<uint64_t> sizes_;
};

}  // namespace mkproxy
