"""Planted bugs of transport srd in the compiled engine: changes of its source, each of which breaks the contract in its own way."""

from __future__ import annotations

import functools

from tests.transport.compiled_bugs import Bug

__all__ = ["BUGS", "COUNTING_BUGS"]

_EARLY = "visible before the bytes|never sent|went back|overtook|changed later"
_COUNT = "|outside the window|more than|writes came|announced twice|not in flight|released .* puts of|a message of"
_STUCK = "nothing will ever complete|nothing more will|no end in|signals arrived|the last signal is"

_counting = functools.partial(Bug, file="counting.hpp")
_srd = functools.partial(Bug, file="srd.hpp")

BUGS = (
    _counting(
        "flag_before_all_writes",
        old="if (!put.announced || put.came != put.writes) return true;",
        new="if (!put.announced) return true;",
        message=_EARLY + _COUNT,
    ),
    _counting(
        "flag_before_a_single_write",
        old="*put = {put->came, writes, true,",
        new="*put = {put->came, writes == 1 ? 0 : writes, true,",
        message=_EARLY + _COUNT,
    ),
    _counting("no_order_of_flags", old="if (sequence != state.next) return true;", new="state.next = sequence;", message=_EARLY + _COUNT),
    _counting("value_early", old="release(put.offset, put.value, breach)", new="release(put.offset, put.value + 1, breach)"),
    _counting(
        "sequences_begin_again_early",
        old="next_[channel] = (sequence + 1) % kSequences;",
        new="next_[channel] = (sequence + 1) % (kSequences - 1);",
        message=_STUCK + _COUNT,
        mood="quick",
        check="sequences",
    ),
    _counting(
        "the_receiver_does_not_begin_again",
        old="state.next = (state.next + 1) % kSequences;",
        new="state.next = state.next + 1;",
        message=_STUCK + _COUNT,
        mood="quick",
        check="sequences",
    ),
    _counting(
        "what_waits_is_lost", old="larger.at(state.next + i) = state.at(state.next + i);", new=";", message=_STUCK + _COUNT, check="wrap"
    ),
    _counting("what_was_released_stays", old="      put = {};\n", new="", message=_EARLY + "|" + _STUCK + _COUNT, check="wrap"),
    _counting(
        "credits_are_never_told",
        old="return 4 * more >= credits_ || 4 * (released_ - told_released_) >= window_;",
        new="return more == ~0ull;",
        message=_STUCK,
        mood="fewest",
        check="updates",
    ),
    _srd(
        "no_receive_again",
        old="if (!post_receives(peer.position, first)) return false;",
        new="",
        message="RNR",
        mood="short_queues",
        check="wrap",
    ),
    _srd(
        "one_receive_again",
        old="(peer.first_again == nullptr ? peer.first_again : peer.last_again->next) = &again[i];",
        new="peer.first_again = &again[i];",
        message="receives are missing",
        mood="bursts",
        check="receives",
    ),
    _srd(
        "the_wrong_message",
        old="(setup_.depth + setup_.receives) - 1 - id)",
        new="(setup_.depth + setup_.receives) - 2 - id)",
        message=".*" + _COUNT,
    ),
    _srd(
        "messages_share_their_memory",
        old="const uint64_t offset = kMessageSlot * pair->id;",
        new="const uint64_t offset = kMessageSlot * peer.position;",
        message=_STUCK + _COUNT,
        mood="slow",
        check="wrap",
    ),
    _srd(
        "credit_before_the_last_write",
        old="if (--job->pending != 0) return true;",
        new="if (--job->pending > 1) return true;",
        message=_EARLY + _COUNT,
    ),
    _srd(
        "writes_do_not_count_for_credit",
        old="for (; job.done < put.bytes; ++job.pending) {",
        new="for (; job.done < put.bytes;) {",
        mood="slow",
        message=_EARLY + _COUNT + "|" + _STUCK,
    ),
    _srd("lost_byte", old="job.done, bytes, setup_.heap_key);", new="job.done, bytes - 1, setup_.heap_key);"),
    _srd("the_first_part_only", old="job.done += bytes;", new="job.done = put.bytes;", message=_STUCK + _COUNT, mood="short_messages"),
    _srd(
        "every_part_is_the_first",
        old="target.heap + put.dst_offset + job.done,",
        new="target.heap + put.dst_offset,",
        mood="short_messages",
    ),
    _srd(
        "one_channel",
        old="htonl(put.channel << kSequenceBits | job.sequence)",
        new="htonl(job.sequence)",
        message=_EARLY + "|" + _STUCK + _COUNT,
    ),
    _srd("a_single_update", old="      peer.updating = false;\n", new="", message=_STUCK, mood="fewest", check="updates"),
    _srd(
        "what_waits_for_credits_is_overwritten",
        old="backlog[number & (backlog.size() - 1)]",
        new="backlog[number & (backlog.size() / 2 - 1)]",
        message=_STUCK + _COUNT + "|" + _EARLY,
        mood="short_queues",
        check="wrap",
    ),
    _srd(
        "credits_wake_nobody",
        old="if (peer.waiting() != 0 || peer.incoming.due()) touch(peer);",
        new="",
        message=_STUCK,
        mood="fewest",
        check="updates",
    ),
    _srd(
        "room_wakes_nobody",
        old="    if (peer.waiting() != 0) touch(peer);\n    Job* job",
        new="    Job* job",
        message=_STUCK,
        mood="fewest",
        check="wrap",
    ),
    _srd("the_wrong_flag", old="store(offset, value);", new="store(offset ^ 8, value);", message=_EARLY + "|" + _STUCK),
)

# Bugs that only the protocol by itself shows: a card tries again where no receive is posted.
COUNTING_BUGS = (
    _counting("overspends", old="return granted_ - sent_;", new="return granted_ - sent_ + 10;", message="no receive was posted"),
    _counting("no_window", old="return begun_ - released_ < window_;", new="return true;", message="outside the window"),
    _counting(
        "credits_are_told_early",
        old="++consumed_;\n    const uint32_t channel",
        new="consumed_ += 2;\n    const uint32_t channel",
        message="no receive was posted",
    ),
    _counting("never_tells", old="return 4 * more >= credits_ ||", new="return false && more &&", message="wait for each other"),
)
