"""What is planted in the fabric's kernel, and the check that must notice (``test_fabric.py``)."""

from __future__ import annotations

from tests.ops.planted_bug import Bug

__all__ = ["BUGS"]

_FILE = "ops/fabric.cuh"
# By the check that finds it.
BUGS: dict[str, list[Bug]] = {
    "signal_never_before_data": [
        Bug(
            "flag before the data",
            _FILE,
            "    if (landed < known && landed < raised + 32) landed = landed_of(p, raised, known);\n",
            "    landed = known;\n",
        ),
        Bug("the last byte stays behind", _FILE, "offset = whole + lane; offset < bytes;", "offset = whole + lane; offset + 1 < bytes;"),
        Bug(
            "a source is given back when its command is taken",
            _FILE,
            "store_release_sys(&ring->completed, raised);",
            "store_release_sys(&ring->completed, known);",
        ),
        Bug("a worker says so before all lanes have stored", _FILE, "  ptx::sync_warp();  // all lanes have stored\n"),
        Bug("of two values of a flag any is written", _FILE, "  if ((lanes_due & (lanes_due - 1)) != 0) {", "  if (false) {"),
    ],
    "reordered": [
        Bug("no order inside a channel", _FILE, "      if (due < channel_due) due = channel_due;  // behind earlier puts on its channel\n"),
    ],
    "never_early": [
        Bug("the latency is not waited for", _FILE, "begin + until + p.latency_ns;", "begin + until;"),
        Bug("the link is free at once", _FILE, "    free_ = begin + total;\n"),
        Bug("puts of a batch leave at once", _FILE, "      if ((lane & lanes) != 0) until += others;\n"),
        Bug("an idle link saves up bandwidth", _FILE, "begin = free_ < now ? now : free_;", "begin = free_ == 0 ? now : free_;"),
    ],
    "not_much_later": [Bug("the latency is waited for twice", _FILE, "begin + until + p.latency_ns;", "begin + until + 2 * p.latency_ns;")],
    "end": [
        Bug(
            "it ends before all commands are taken",
            _FILE,
            "    if (ptx::load_acquire_sys(&control_block(p_.world)->ring_head) != taken) return false;\n",
        ),
        Bug("it ends before all flags are raised", _FILE, "    if (raised >= ending) break;", "    if (ending != kNever) break;"),
    ],
    "on_a_used_ring": [
        Bug(
            "a worker begins at the first command of a ring",
            _FILE,
            "of_lane(greater(ptx::load_acquire_sys(progress_of(p, worker)), ptx::load_acquire_sys(&ring->completed)), 0);",
            "of_lane(ptx::load_acquire_sys(progress_of(p, worker)), 0);",
        ),
        Bug(
            "a worker that has said nothing yet counts as one that is ahead",
            _FILE,
            "  least = greater(least, raised);  // a worker that has not said anything yet on a ring that was used before\n",
        ),
    ],
}
