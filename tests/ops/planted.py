"""Runs a fused GEMM with what may be a faulty copy of the device code: ``python tests/ops/planted.py <world> <workload> <seed> <calls>``.

Which copy: ``MKERNEL_KERNELS_SRC``. Prints what was found wrong, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mkernel as mk
from mkernel.planner.tiling import Tiling
from mkernel.transport import emulated
from tests.ops import moe_body, packets_body, ring_body, varlen_body
from tests.ops.body import Case, Rank, Use, bits, problems, scatters_tiles, topology, use_of
from tests.shared.findings import errors_are_findings
from tests.virtual_time import sleep

_SCATTER, _ALL = "gemm_reduce_scatter", "gemm_allreduce"
_SLOW_US = 400.0  # puts are under way for as long as a call takes, and complete up to four calls later
# Kernel, number of calls, rows of these calls in turn, delay of the network in microseconds.
_TWO_SHOT = Case("bfloat16", 64, 256, split="few movers", op=_ALL, algorithm="two_shot")
_CHUNKS = Tiling(packets=0)  # few rows inside a node travel in packets where nothing is asked for
_SMALL_TWO_SHOT = Case("bfloat16", 64, 128, split="few movers", op=_ALL, algorithm="two_shot")
WORKLOADS = {
    "tiles": (Case("bfloat16", 256, 264, split="mover"), 3, (300, 129), 20.0),  # several steps of k, several tiles
    "long": (Case("bfloat16", 1352, 8, split="mover"), 2, (300, 129), 20.0),  # more steps of k than the next tile is asked for ahead
    "parts": (Case("bfloat16", 4096, 8, split="mover"), 2, (129, 7), 20.0),  # K travels in parts
    "chunks": (Case("bfloat16", 64, 8, split="mover"), 2, (700, 7), 20.0),  # more chunks than the queue of flags to raise is long
    "short": (Case("bfloat16", 64, 8, split="mover"), 12, (7, 130), 20.0),  # calls so short that ranks are often in different ones
    "slow": (Case("bfloat16", 64, 8, split="mover"), 12, (7, 130), _SLOW_US),
    "warps": (Case("bfloat16", 256, 264, split="warps", tiling=_CHUNKS), 3, (300, 129), 20.0),  # no communication CTAs
    "warps parts": (Case("bfloat16", 4096, 8, split="warps", tiling=_CHUNKS), 2, (129, 7), 20.0),
    "halves": (Case("bfloat16", 200, 256, row_major=False, split="mover"), 2, (129, 400), 20.0),  # of the last tiles
    "warps short": (Case("bfloat16", 64, 8, split="warps", tiling=_CHUNKS), 12, (7, 130), 20.0),
    # Tiles that reach over the end of a shard.
    "span": (Case("bfloat16", 256, 136, split="mover", tiling=Tiling(span=2)), 3, (90, 129), 20.0),
    "span warps": (Case("bfloat16", 256, 136, split="warps", tiling=Tiling(span=2)), 3, (90, 129), 20.0),
    # So many rows that tiles have rows of one shard only; chunks of several pieces, and shards that begin inside a line.
    "span high": (Case("bfloat16", 264, 136, split="mover", tiling=Tiling(span=2)), 3, (333, 259), 20.0),
    "span high warps": (Case("bfloat16", 264, 136, split="warps", tiling=Tiling(span=2)), 3, (333, 259), 20.0),
    # K of a tile shared by nine CTAs: more than are looked at together.
    "shares": (Case("bfloat16", 616, 136, split="narrow", tiling=Tiling(64, 1, 9)), 4, (90, 20), 20.0),
    # In a world of one by the CTAs of a cluster, which take several tiles; slices of two packets, and three.
    "sums in clusters": (Case("bfloat16", 360, 136, tiling=Tiling(64, cluster_k=3)), 4, (200, 300, 17), 20.0),
    # Shards that travel in packets: several rounds of each warp, calls as short as above, K shared by CTAs, and pairs of CTAs.
    "gather packets": (Case("bfloat16", 256, 264, tiling=Tiling(64, packets=1)), 3, (300, 129), 20.0),
    "gather packets short": (Case("bfloat16", 64, 8, tiling=Tiling(64, packets=1)), 12, (7, 130), 20.0),
    "gather packets shares": (Case("bfloat16", 360, 136, tiling=Tiling(64, None, 3, packets=1)), 4, (40, 20), 20.0),
    "gather packets pairs": (Case("bfloat16", 264, 264, tiling=Tiling(64, None, None, 2, packets=1)), 3, (150, 65), 20.0),
    # The same of tagged packets, which go straight into shared memory: the last k step is not whole, and rows of several rounds.
    "tagged packets": (Case("bfloat16", 264, 264, tiling=Tiling(64, packets=2)), 4, (150, 33, 9, 64), 20.0),
    "tagged packets short": (Case("bfloat16", 72, 8, tiling=Tiling(64, packets=2)), 12, (7, 130), 20.0),
    "tagged packets shares": (Case("bfloat16", 360, 136, tiling=Tiling(64, None, 3, packets=2)), 4, (40, 20), 20.0),
    "tagged packets long": (Case("bfloat16", 1352, 8, tiling=Tiling(64, None, 1, packets=2)), 4, (7, 3), 20.0),  # rounds of all stages
    # Pairs of CTAs that load B together.
    "pairs": (Case("bfloat16", 264, 264, split="pairs", tiling=Tiling(64, 1, None, 2)), 3, (300, 129), 20.0),
    "pairs warps": (Case("bfloat16", 264, 136, False, split="warps", tiling=Tiling(64, 1, None, 2)), 3, (300, 129), 20.0),
    "pairs along N": (Case("bfloat16", 264, 264, split="pairs", tiling=Tiling(64, 1, None, 1, None, 2)), 3, (300, 129), 20.0),
    "fours": (Case("bfloat16", 264, 264, split="warps", tiling=Tiling(64, 1, None, 2, None, 2)), 3, (300, 129), 20.0),
    # Columns of tiles that are no whole panels: 16 of the third one, and 6 tiles of which the last one has fewer.
    "cut": (Case("bfloat16", 264, 808, False, tiling=Tiling(144, 1, 1, 1, None, 1)), 3, (300, 129), 20.0),
    "cut panels": (Case("bfloat16", 264, 808, tiling=Tiling(144, 1, 1, 2, None, 1)), 3, (300, 129), 20.0),
    # Swapped operands: tiles of 112 and 224 rows, or 48 and 96; the last rows of tiles have fewer, and blocks of a result are not whole.
    "swapped": (Case("bfloat16", 264, 264, split="mover", tiling=Tiling(None, 1, 1, 1, 0, 1, 2)), 3, (197, 93), 20.0),
    "swapped shares": (Case("bfloat16", 360, 264, tiling=Tiling(None, None, 3, 1, 1, 1, 1)), 4, (40, 17), 20.0),
    "swapped fours by columns": (
        Case("bfloat16", 264, 264, False, split="warps", tiling=Tiling(None, 1, 1, 2, 0, 2, 3)),
        3,
        (300, 129),
        20.0,
    ),
    # Wide ones: of 112 rows and 256 columns; of 160, of which each warpgroup has 80, and 192 columns.
    "wide": (Case("bfloat16", 264, 520, split="mover", tiling=Tiling(256, 1, 1, 1, 0, 1, 2)), 3, (197, 93), 20.0),
    "wide by rows": (Case("bfloat16", 264, 392, False, "mover", tiling=Tiling(192, 1, 1, 1, 0, 1, 2)), 3, (300, 129), 20.0),
    # Several tiles of each warpgroup, and several laps of the stages for each.
    "in turn": (Case("bfloat16", 1032, 520, tiling=Tiling(None, 1, 1, 1, 0, 1, 3, None, 2)), 2, (300, 129), 20.0),
    "in turn short": (Case("bfloat16", 8, 1056, tiling=Tiling(None, 1, 1, 2, 0, 2, 7, None, 2)), 2, (330, 700), 20.0),
    "in turn pairs": (Case("bfloat16", 520, 1032, False, tiling=Tiling(None, 1, 1, 2, 0, 1, 4, None, 2)), 2, (330, 129), 20.0),
    "narrow": (Case("bfloat16", 264, 264, tiling=Tiling(64, None, 1, 1, 1, 1, 2)), 4, (97, 60), 20.0),
    "narrow fours": (Case("bfloat16", 264, 264, tiling=Tiling(64, None, 1, 2, 1, 2, 3)), 3, (120, 64), 20.0),
    "narrow fours by columns": (Case("bfloat16", 264, 264, False, tiling=Tiling(64, None, 1, 2, 1, 2, 3)), 3, (120, 64), 20.0),
    "swapped fours": (Case("bfloat16", 264, 264, split="warps", tiling=Tiling(None, 1, 1, 2, 0, 2, 3)), 3, (300, 129), 20.0),
    # In reductions in packets: tiles of 48 and 16 rows, or all rows in one of 192 and 96; a group of 16 rows has several owners.
    "scattered swapped": (Case("bfloat16", 136, 264, op=_SCATTER, tiling=Tiling(None, None, 1, 1, 1, 1, 2)), 4, (31, 15), 20.0),
    "scattered swapped shared": (Case("bfloat16", 264, 136, op=_SCATTER, tiling=Tiling(None, None, 3, 1, 1, 1, 1)), 4, (36, 21), 20.0),
    "scattered swapped high": (Case("bfloat16", 72, 264, op=_SCATTER, tiling=Tiling(None, None, 1, 1, 1, 1, 1)), 4, (90, 47), 20.0),
    "swapped in one step": (
        Case("bfloat16", 72, 264, op=_ALL, algorithm="one_shot", tiling=Tiling(None, None, 1, 1, 1, 1, 2)),
        4,
        (170, 33),
        20.0,
    ),
    "swapped in two steps": (
        Case("bfloat16", 264, 136, op=_ALL, algorithm="two_shot", tiling=Tiling(None, None, 2, 1, 1, 1, 2)),
        4,
        (170, 33),
        20.0,
    ),
    # The same for the reductions.
    "reduce": (Case("bfloat16", 136, 264, op=_SCATTER), 3, (300, 129), 20.0),
    "reduce exactly": (Case("bfloat16", 520, 264, op=_SCATTER, partials="float32"), 2, (300, 129), 20.0),
    "reduce short": (Case("bfloat16", 64, 8, op=_SCATTER), 12, (7, 130), 20.0),
    "reduce slow": (Case("bfloat16", 64, 8, op=_SCATTER), 12, (7, 130), _SLOW_US),
    "one shot": (Case("bfloat16", 64, 264, op=_ALL, partials="float32", algorithm="one_shot"), 4, (129, 7), 20.0),
    "one shot slow": (Case("bfloat16", 64, 8, op=_ALL, algorithm="one_shot"), 12, (7, 130), _SLOW_US),
    "two shot": (Case("bfloat16", 64, 520, split="mover", op=_ALL, algorithm="two_shot"), 4, (300, 129), 20.0),
    "two shot short": (Case("bfloat16", 64, 72, split="mover", op=_ALL, algorithm="two_shot"), 12, (7, 130), 20.0),
    "packets": (Case("bfloat16", 64, 264, op=_ALL, algorithm="two_shot"), 4, (129, 7), 20.0),
    "packets in one step": (Case("bfloat16", 64, 264, op=_ALL, algorithm="one_shot"), 4, (129, 7), 20.0),
    "packets short in one step": (Case("bfloat16", 64, 8, op=_ALL, algorithm="one_shot"), 12, (7, 130), 20.0),
    "packets short": (Case("bfloat16", 64, 8, op=_ALL, algorithm="two_shot"), 12, (7, 130), 20.0),
    # And in pairs of CTAs, whose last row of tiles has no neighbour.
    "reduce pairs": (Case("bfloat16", 136, 264, split="pairs", op=_SCATTER, tiling=Tiling(64, cluster=2, packets=0)), 3, (300, 129), 20.0),
    "reduce fours": (Case("bfloat16", 136, 296, op=_SCATTER, tiling=Tiling(64, None, None, 1, 0, 4)), 3, (300, 129), 20.0),
    "two shot pairs": (
        Case("bfloat16", 64, 264, split="pairs", op=_ALL, algorithm="two_shot", tiling=Tiling(64, cluster=2, packets=0)),
        3,
        (300, 129),
        20.0,
    ),
    "scattered packets": (Case("bfloat16", 64, 264, op=_SCATTER), 4, (43, 129, 7), 20.0),  # rows of several owners in a tile
    "scattered packets short": (Case("bfloat16", 64, 8, op=_SCATTER), 12, (3, 65), 20.0),
    # Clusters that have no tile for some CTAs, in either direction.
    "packets fours": (Case("bfloat16", 136, 296, op=_ALL, algorithm="two_shot", tiling=Tiling(64, None, 1, 2, 1, 2)), 4, (300, 129), 20.0),
    "scattered packets fours": (Case("bfloat16", 136, 296, op=_SCATTER, tiling=Tiling(64, None, 1, 2, 1, 2)), 4, (150, 65), 20.0),
    # K of a tile shared by three CTAs: slices of five columns of words, and six.
    "shared packets": (Case("bfloat16", 360, 136, op=_ALL, algorithm="two_shot", tiling=Tiling(128, None, 3)), 4, (43, 129, 7), 20.0),
    "shared packets in one step": (Case("bfloat16", 200, 72, op=_ALL, algorithm="one_shot", tiling=Tiling(64, None, 3)), 4, (43, 7), 20.0),
    "scattered packets shared": (Case("bfloat16", 360, 136, op=_SCATTER, tiling=Tiling(128, None, 3)), 4, (43, 65, 7), 20.0),
    "late": (Case("bfloat16", 64, 8, op=_SCATTER), 2, (7,), 20.0),  # rank 1 comes between the two deadlines
}
# Two ops in turn, whose areas of the workspace overlap: cases with their rows, number of calls, whether operands lie on the heap.
SEQUENCES = {
    "all-reduce, then gather": (((_TWO_SHOT, 2048), (Case("bfloat16", 1024, 64), 224)), 6, True),
    "all-reduce, then gather from ordinary memory": (((_SMALL_TWO_SHOT, 1024), (Case("bfloat16", 2048, 8), 28)), 24, False),
}
_LATE_SECONDS = 11.0  # of virtual time


def _calls(world: Any, workload: str, seed: int, most: int) -> tuple[list[str], list[bytes]]:
    """What is wrong, and what must be the same on all ranks."""
    if workload in SEQUENCES:
        return _sequence(world, workload, seed, most), []
    case, count, rows, _ = WORKLOADS[workload]
    rank = Rank(world, case, seed, rows)
    results = []
    for number in range(min(count, most)):
        if workload == "late" and world.rank == 1 and number == count - 1:  # of a plan that all know: the others have launched
            sleep(world, _LATE_SECONDS)
        results.append(rank.call(number, rows[number % len(rows)], use_of(7 * number + 2, case)))
    return problems(results), bits(results) if case.op == _ALL else []


def _sequence(world: Any, workload: str, seed: int, most: int) -> list[str]:
    cases, count, on_heap = SEQUENCES[workload]
    turns = [(Rank(world, case, seed, (rows,)), rows) for case, rows in cases]
    use = Use(on_heap, "none", padded=False)
    results = []
    for number in range(min(count, most)):
        rank, rows = turns[number % len(turns)]
        results.append(rank.call(number, rows, use))
    return problems(results)


def check(world: str, workload: str, seed: int, most: int = 1000) -> str | None:
    """What is wrong with at most so many calls: a result, a complaint of the emulator, a deadlock."""
    if workload in (*packets_body.WORKLOADS, packets_body.IN_CLUSTERS):
        return packets_body.found_wrong(world, workload, seed)
    if workload == "dispatch":
        return moe_body.found_wrong(world, moe_body.PLANTED, seed, moe_body.PLANTED_KINDS[:most])
    if workload == "dispatch in narrow tiles":
        with moe_body.narrow_tiles():
            return moe_body.found_wrong(world, moe_body.PLANTED, seed, moe_body.PLANTED_KINDS[:most])
    if workload == "dispatch in large puts":
        return moe_body.found_wrong(world, moe_body.PLANTED, seed, moe_body.PLANTED_KINDS[:most], put_bytes=12 << 10)
    if workload in ring_body.PLANTED_SCALES:
        sizes = ring_body.SHARED_SIZES if workload == "ring shared" else ring_body.PLANTED_SIZES
        return ring_body.found_wrong(world, ring_body.PLANTED, seed, sizes[:most], ring_body.PLANTED_SCALES[workload])
    if workload == "ring by position":
        return ring_body.found_wrong(world, ring_body.PLANTED, seed, ring_body.BY_POSITION_SIZES[:most], batch_invariant=True)
    if workload in ("varlen", "varlen by position"):
        by_position = workload != "varlen"
        return varlen_body.found_wrong(world, varlen_body.PLANTED, seed, varlen_body.PLANTED_CALLS[:most], batch_invariant=by_position)
    if workload == "dispatch from the heap":
        return moe_body.found_overwritten(world, seed)
    return _check_gemms(world, workload, seed, most)


@errors_are_findings
def _check_gemms(world: str, workload: str, seed: int, most: int) -> str | None:
    shape, network_us = topology(world), WORKLOADS[workload][-1] if workload in WORKLOADS else 0.0
    ack_us = 4 * network_us if network_us == _SLOW_US else 0.0
    # Bytes of a put travel at the latest legal time.
    faults = emulated.Faults(seed=seed, delay_us=network_us, reorder_us=network_us, ack_us=ack_us)
    options: dict[str, Any] = {"seed": seed, "heap_bytes": 16 << 20, "timeout": 5.0, "entry_timeout": 60.0}
    with mock.patch.object(emulated, "Faults", lambda: faults), pytest.MonkeyPatch.context() as patch:
        if not workload.startswith("scattered"):
            scatters_tiles(patch)
        found = mk.launch(_calls, shape.size, shape.ranks_per_node, "cpu", (workload, seed, most), **options)
    if any(same != found[0][1] for _, same in found):
        return "wrong: ranks have different bits"
    return next((f"wrong: {problem}" for of_rank, _ in found for problem in of_rank), None)


def main(world: str, workload: str, seed: str, most: str) -> None:
    sys.stdout.write(json.dumps({"found": check(world, workload, int(seed), int(most))}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
