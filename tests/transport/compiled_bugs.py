"""Planted bugs of the compiled engine: changes of its source, each of which breaks the contract in its own way."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path

from mkernel.jit.cpu import find_compiler
from mkernel.proxy.compiled import load
from tests.transport.standin import MOODS, Mood

__all__ = ["BUGS", "PLANTED_MOODS", "STRIPED_BUGS", "Bug", "build", "planted"]

KERNELS = Path(__file__).parents[2] / "kernels_src"
_EARLY = "visible before the bytes|never sent|went back|signals arrived"
PLANTED_MOODS = MOODS | {
    "narrow": Mood(max_message=512, max_send=10, lazy=0.6),  # a long put fits an empty queue only, a short one nearly always
    "untold": Mood(late_completions=300),  # much has landed that nobody has been told of when a link is lost
}
_HELD = "signal .* is visible|is not in flight|nothing more will|were overwritten"
_LOST = "nothing will ever complete|no end in"


@dataclasses.dataclass(frozen=True)
class Bug:
    """``old`` becomes ``new`` in a file of kernels_src/proxy; it occurs there once. ``message``: what the contract says then."""

    name: str
    file: str
    old: str
    new: str
    message: str = _EARLY
    signal: str = "atomic"
    mood: str = "late"
    check: str = "signal_never_before_data"


BUGS = (
    Bug(
        "no_fence",
        "rc.hpp",
        "raise(connection, number, final ? last : number, final, true);",
        "raise(connection, number, final ? last : number, final, false);",
    ),
    Bug("no_atomic", "rc.hpp", "    order(connection, last);\n", ""),
    Bug("flags_first", "rc.hpp", "if (!connection.at(number).ordered) raise(", "raise("),
    Bug(
        "empty_puts_never_wait",
        "rc.hpp",
        "return last != connection.last_data.end() && last->second >= connection.retired;",
        "return false;",
        "a signal without data",
        mood="slow",
        check="signal_only",
    ),
    Bug(
        "two_values_under_way",
        "rc.hpp",
        "put.bytes != 0 || next > connection.retired",
        "put.bytes != 0",
        "went back",
        check="values_of_a_flag",
    ),
    Bug(
        "every_value_is_written",
        "rc.hpp",
        " || use_of(connection.peer, pending.put->signal_offset).next != number + 1) continue",
        ") continue",
    ),
    Bug("epoch_early", "rc.hpp", "value = put.signal_value;\n    SendRequest", "value = put.signal_value + 1;\n    SendRequest"),
    Bug("lost_byte", "rc.hpp", "static_cast<uint32_t>(size)", "static_cast<uint32_t>(size - 1)"),
    Bug("the_first_part_only", "rc.hpp", "      done += size;", "      done = put.bytes;", mood="short_messages"),
    Bug(
        "any_queue_pair",
        "rc.hpp",
        "put.channel % setup_.queue_pairs];",
        "put.ticket % setup_.queue_pairs];",
        "visible before|never sent|went back|two channels",
    ),
    Bug(
        "completed_at_post",
        "engine.cpp",
        "      posted |= answer == Post::kAccepted;",
        "      posted |= answer == Post::kAccepted;\n      if (answer == Post::kAccepted) ring_.complete(put->ticket);",
        "visible before|never sent|not in flight",
    ),
    Bug(
        "credits_in_any_order",
        "ring.hpp",
        "    ended_[ticket & kMask] = true;\n",
        "    if (ticket >= done_) { done_ = ticket + 1; return true; }\n",
        _EARLY + "|in flight",
    ),
    Bug(
        "lost_completion",
        "rc.hpp",
        "      if (!credits_.complete(pending.put->ticket))",
        "      if (pending.put->ticket != 20 && !credits_.complete(pending.put->ticket))",
        _LOST,
    ),
    Bug("what_is_held_is_overtaken", "engine.cpp", "held_[peer].any ? Post::kRefused :", "", _EARLY + "|in flight", mood="narrow"),
    Bug(
        "a_held_put_is_lost",
        "engine.cpp",
        "      next_[held.last % abi::kRingSlots] = ticket;\n",
        "      next_[held.last % abi::kRingSlots] = ticket + 1;\n",
        _HELD,
        mood="short_queues",
        check="wrap",
    ),
    Bug(
        "room_is_not_given_back",
        "rc.hpp",
        "      connection.room += pending.requests;\n",
        "",
        _LOST + "|nothing more will",
        mood="short_queues",
        check="wrap",
    ),
    Bug(
        "told_before_it_is_written",
        "rc.hpp",
        "        write(connection, number);\n        if",
        "        if (setup_.signal == kImm) tell(connection, number, false);\n        write(connection, number);\n        if",
        signal="imm",
    ),
    Bug(
        "the_wrong_received_value",
        "rc.hpp",
        "kScratch + position * setup_.receives + slot;",
        "kScratch + position * setup_.receives + (slot + 1) % setup_.receives;",
        signal="imm",
        mood="short_queues",
    ),
    Bug(
        "no_receive_again",
        "rc.hpp",
        "    return post_receives(position, &again);",
        "    return true;",
        "RNR|FLUSH",
        signal="imm",
        mood="short_queues",
        check="wrap",
    ),
    Bug(
        "slots_of_the_ring_wrap_early",
        "ring.hpp",
        "static constexpr uint64_t kMask = abi::kRingSlots - 1;",
        "static constexpr uint64_t kMask = abi::kRingSlots / 2 - 1;",
        ".",
        check="wrap",
    ),
)


STRIPED_BUGS = (  # ``check``: whether a link is lost
    Bug("flags_do_not_wait", "striped.hpp", "      if (job.parts != job.on[flow.home]) return true;\n", "", mood="slow"),
    Bug(
        "flags_wait_for_their_own_bytes_only",
        "striped.hpp",
        "      Job& job = *flow.waiting.first();\n      if (job.parts != job.on[flow.home]) return true;\n      flow.waiting.remove(job);",
        "      Job* found = flow.waiting.first();\n      while (found != nullptr && found->parts != found->on[flow.home]) {\n"
        "        found = found->after;\n      }\n"
        "      if (found == nullptr) return true;\n      Job& job = *found;\n      flow.waiting.remove(job);",
        mood="slow",
    ),
    Bug(
        "flags_take_links_in_turn",
        "striped.hpp",
        "      Job& job = *flow.waiting.first();\n",
        "      Job& job = *flow.waiting.first();\n      flow.home = ++number_ % ways_.size();\n",
        mood="slow",
    ),
    Bug(
        "credit_with_the_flag",
        "striped.hpp",
        "      flow.sent.push(job);\n",
        "      flow.sent.push(job);\n      job.flagged = true;\n      if (!finish(job)) return false;\n",
        _EARLY + "|not in flight",
        mood="slow",
    ),
    Bug(
        "a_byte_between_two_parts",
        "striped.hpp",
        "if (!send(part_of(job, number, offset, sizes_[number], false)))",
        "if (!send(part_of(job, number, offset, sizes_[number] - (offset == 0), false)))",
    ),
    Bug(
        "no_order_where_a_link_refuses",
        "striped.hpp",
        "    if (!first) return true;\n    ++way.num_refusing;\n",
        "    if (!first) {\n      way.queues[peer].remove(part);\n      List<Part> front;\n      front.push(part);\n"
        "      way.queues[peer].prepend(front);\n      return true;\n    }\n    ++way.num_refusing;\n",
        mood="narrow",
    ),
    Bug("nothing_is_flushed_after_completions", "striped.hpp", "    return flush();  // of", "    return true;  // of", _LOST),
    Bug("refused_parts_stay", "striped.hpp", "way.num_refusing > 0 && peer", "false && peer", _LOST, mood="narrow"),
    Bug(
        "nothing_is_sent_again",
        "striped.hpp",
        "      part.way = emptiest(part.command.bytes);\n      if (!send(part)) return false;\n",
        "      if (!release(*job.flow) || !finish(job)) return false;\n",
        _EARLY + "|" + _LOST,
        mood="slow",
        check="lost",
    ),
    Bug(
        "old_flags_are_sent_again",
        "striped.hpp",
        "if (!job->merged && !newer.insert(job->put->signal_offset).second) job->merged = true;",
        "",
        "went back",
        mood="untold",
        check="lost",
    ),
    Bug(
        "bytes_of_merged_flags_are_not_sent_again",
        "striped.hpp",
        "      if (!job->merged || size == 0) continue;\n",
        "      continue;\n",
        mood="slow",
        check="lost",
    ),
    Bug("completed_twice", "striped.hpp", "job.parts != 0 || job.ended)", "job.parts != 0)", "is not in flight", mood="slow", check="lost"),
    Bug(
        "homes_stay",
        "striped.hpp",
        "      if (flow.home == number && !move(flow)) return false;\n",
        "",
        _LOST + "|IBV_WC|" + _EARLY,
        mood="slow",
        check="lost",
    ),
)


def planted(bug: Bug) -> str:
    """The text of the bug's file with the bug."""
    text = (KERNELS / "proxy" / bug.file).read_text()
    assert text.count(bug.old) == 1, f"{bug.name}: its place is in {bug.file} {text.count(bug.old)} times"
    return text.replace(bug.old, bug.new)


def build(bug: Bug | None, folder: Path) -> ctypes.CDLL:
    """The engine with that bug; None: without any. ``folder`` is empty."""
    proxy = folder / "proxy"
    shutil.copytree(KERNELS / "proxy", proxy)
    if bug is not None:
        (proxy / bug.file).write_text(planted(bug))
    library = folder / "engine.so"
    command = [*find_compiler(), "-std=c++20", "-O0", "-fPIC", "-shared", "-w", f"-I{proxy}", f"-I{KERNELS}"]
    subprocess.run([*command, str(proxy / "engine.cpp"), "-o", str(library)], check=True)
    return load(ctypes.CDLL(str(library)))
