"""What is planted in clusters of CTAs that load B, or A, together (kernels_src/tile/pair.cuh)."""

from __future__ import annotations

from tests.ops.planted_bug import Bug

__all__ = ["PAIRS"]

_TO_OTHERS = "ptx::cluster_rank() ^ lane"

PAIRS = [
    Bug(
        "a stage is given back by the consumers of one CTA of a pair",
        "tile/multiply.cuh",
        "Pair<Config>::give_back(taken, lane);",
        "if (lane < 2) ptx::mbarrier_arrive(taken);",
        workload="pairs",
    ),
    Bug(
        "a stage is given back to the CTA itself twice, and not to its partner",
        "tile/pair.cuh",
        f"taken, {_TO_OTHERS});",
        "taken, ptx::cluster_rank());",
        workload="pairs",
    ),
    Bug(
        "the other CTA takes an item that has not come",
        "tile/pair.cuh",
        "    ptx::cluster_wait(&storage.relay.slots.filled[at.index], at.parity);\n",
        workload="pairs",
    ),
    Bug(
        "the leader sends an item where another one still is",
        "tile/pair.cuh",
        "        ptx::cluster_wait(&storage.relay.slots.taken[at.index], at.parity ^ 1);\n",
        workload="pairs",
    ),
    Bug(
        "the leader does not release what it has acquired with an item",
        "tile/pair.cuh",
        "          ptx::cluster_arrive(filled, cta);\n",
        "          ptx::cluster_arrive_relaxed(filled, cta);\n",
        workload="pairs",
        found_as="missing release or acquire",
    ),
    Bug(
        "halves of B are swapped",
        "tile/pair.cuh",
        "part = row(), ctas",
        "part = row(), half = 1 - part, ctas",
        also=(("smem + p * Shape::kPanelBytes + part * ", "smem + p * Shape::kPanelBytes + half * "), ("smem + part * ", "smem + half * ")),
        workload="pairs",
        found_as="wrong",
    ),
    *(
        Bug(what, file, text, to, workload=workload, found_as=found_as)
        for workload in ("pairs along N", "fours", "swapped fours")
        for what, file, text, to, found_as in (
            (f"a stage is given back to the CTA itself only: {workload}", "tile/pair.cuh", _TO_OTHERS, "ptx::cluster_rank()", ""),
            (f"rows of A are of the step before: {workload}", "tile/load.cuh", "of_row(), k, row,", "of_row(), k - 64, row,", "wrong"),
            (
                f"rows of A are loaded for the CTA alone: {workload}",
                "tile/load.cuh",
                "Pair<Config>::of_row(), k,",
                "1u << ptx::cluster_rank(), k,",
                "",
            ),
            (f"all load the first rows of A: {workload}", "tile/pair.cuh", "return column() * (rows", "return 0 * (rows", "wrong"),
            (
                f"all rows of A come to one place: {workload}",
                "tile/load.cuh",
                "smem_a = ring.rows(storage, stage.index) + from",
                "smem_a = ring.rows(storage, stage.index) + 0",
                "wrong",
            ),
            (f"all have the first column: {workload}", "tile/op.cuh", "+ cta % Shape::kClusterN;", "+ cta * 0;", "wrong"),
        )
    ),
    Bug(
        "B of a cluster of four comes from one of its rows",
        "tile/pair.cuh",
        "part = row(), ctas = of_column();",
        "part = 0, ctas = of_column();",
        workload="fours",
    ),
    Bug(
        "a warpgroup passes that has some rows of its tile",
        "tile/multiply.cuh",
        "op.load_rows(c) <= warpgroup * kBlockRows",
        "op.load_rows(c) < (warpgroup + 1) * kBlockRows",
        workload="fours",
        found_as="wrong",
    ),
    Bug(
        "a CTA ends before its partner has given all stages back",
        "tile/pair.cuh",
        "++i, stage.advance(ring.count())) storage.stages.wait_taken(stage);",
        "++i) stage.advance(ring.count());",
        workload="pairs",
        found_as="has ended, and its shared memory with it",
    ),
    Bug(
        "the leader ends before its partner has taken the last item",
        "tile/schedule.cuh",
        "  Pair<Config>::end_sending(storage, at);\n",
        workload="pairs",
        found_as="has ended, and its shared memory with it",
    ),
    Bug(
        "a pair begins before its barriers are there",
        "tile/pair.cuh",
        "    if constexpr (kIs) ptx::cluster_meet();\n",
        workload="pairs",
    ),
    Bug(
        "a pair waits for the inputs of its upper tile",
        "ops/allgather_gemm.cuh",
        "const uint32_t begin = c.m * block_rows(), end = end_of(begin);",
        "const uint32_t begin = c.m * block_rows(), end = begin + kBlockRows * 2 < plane_rows() ? begin + kBlockRows * 2 : plane_rows();",
        workload="pairs",
        seeds=40,  # one in eight finds it
        first=8,
    ),
    Bug(
        "two clusters begin with the same tile",
        "tile/schedule.cuh",
        "gpc * each + (gpc < left ? gpc : left) + cluster / kGpcs",
        "gpc * each + cluster / kGpcs",
        workload="pairs",
        found_as="wrong",
        world="1x1",
        sms=24,
    ),
    Bug(
        "the other CTA is not told that there is no more",
        "tile/schedule.cuh",
        "  Pair<Config>::send(storage, at, kStop, false);\n",
        workload="pairs",
        found_as="deadlock",
    ),
    Bug(
        "the other CTA does not enter",
        "tile/schedule.cuh",
        "    if (!entered) storage.entries.open(call), entered = true;\n",
        workload="pairs",
        found_as="deadlock",
    ),
    # The reductions.
    Bug(
        "a stage of partial tiles is given back by the consumers of one CTA of a pair",
        "tile/multiply.cuh",
        "all lanes have read\n  give_back<Config>(storage, stage.index);",
        "all lanes have read\n  if (ptx::lane_index() < 2) ptx::mbarrier_arrive(&storage.stages.taken[stage.index]);",
        workload="reduce pairs",
    ),
    Bug(
        "a stage of partial tiles is given back to one CTA of a pair",
        "tile/multiply.cuh",
        "all lanes have read\n  give_back<Config>(storage, stage.index);",
        "all lanes have read\n  if (ptx::lane_index() < 2) ptx::cluster_give_back(&storage.stages.taken[stage.index], 0);",
        workload="reduce pairs",
    ),
    Bug(
        "a CTA without a tile passes through fewer stages than its partner",
        "reduce/owned_tiles.cuh",
        "    if (c.is_sum) return kR;\n",
        "    if (c.is_sum) return kR;\n    if (!is_there(c)) return 0;\n",
        workload="reduce pairs",
    ),
    Bug(
        "a pair waits for what its upper tile adds",
        "reduce/owned_tiles.cuh",
        "rows_there(c) * columns_there(c) * addends(c, part)",
        "columns_there(c) * addends(c, part)",
        workload="reduce pairs",
    ),
    *(
        Bug(f"{what}: reduce fours", "reduce/owned_tiles.cuh", text, to, workload="reduce fours", seeds=8, first=4)
        for what, text, to in (
            ("a cluster waits for what its first column adds", "rows_there(c) * columns_there(c) * addends", "rows_there(c) * addends"),
            ("a cluster waits for tiles that are not its own", "raster_number(c.m + row, c.n + column,", "raster_number(c.m + row, c.n,"),
            ("tiles of a cluster follow each other", "c.index -= derived().first_tile(owner);", "c.index = 4 * taken + cta;"),
        )
    ),
    *(
        Bug(f"{what}: {workload}", file, text, to, workload=workload, world=world)
        for workload, world in (("packets fours", "1x2"), ("scattered packets fours", "1x3"))
        for what, file, text, to in (
            ("a tile that is not there is exchanged", "tile/multiply.cuh", "if (op.is_there(c)) {", "{"),
            ("a tile beyond the last column is there", "tile/op.cuh", "&& (Shape::kClusterN == 1 || c.n < tiles_n())", ""),
        )
    ),
    Bug(
        "tiles of a cluster are one tile",
        "tile/op.cuh",
        "raster_number(c.m, c.n, rows,",
        "raster_number(at.row, at.column, rows,",
        workload="packets fours",
    ),
    *(
        Bug(
            f"the lower tile of a pair adds what is the upper one's: {workload}",
            "reduce/owned_tiles.cuh",
            "partial_offset(p, addend_index(c, i)));",
            "partial_offset(p, addend_index(c, i) - ptx::cluster_rank()));",
            workload=workload,
            found_as="wrong",
        )
        for workload in ("reduce pairs", "two shot pairs")
    ),
    *(
        Bug(
            f"a tile that the lower CTA of a pair does not have is sent: {workload}",
            "tile/op.cuh",
            "    if (!is_there(c)) return 0;\n",
            workload=workload,
        )
        for workload in ("reduce pairs", "two shot pairs")
    ),
    Bug(
        "others are told of a tile that the lower CTA of a pair does not have: reduce",
        "ops/gemm_reduce_scatter.cuh",
        "return !is_own(c) && is_there(c); }",
        "return !is_own(c); }",
        workload="reduce pairs",
    ),
    Bug(
        "others are told of a tile that the lower CTA of a pair does not have: two shot",
        "ops/gemm_allreduce.cuh",
        "return kWorldSize > 1 && is_there(c); }",
        "return kWorldSize > 1; }",
        workload="two shot pairs",
    ),
    Bug(
        "a finished tile that the lower CTA of a pair does not have is stored over another one",
        "ops/gemm_allreduce.cuh",
        "      if (!is_there(c)) return;\n",
        workload="two shot pairs",
    ),
    Bug(
        "the CTAs of a pair make sums of their own",
        "reduce/owned_tiles.cuh",
        "(first_sum + i * num_inter_reduce(p)) / Shape::kCluster;",
        "first_sum + i * num_inter_reduce(p);",
        world="2x2",
        workload="reduce pairs",
        sms=8,
    ),
    # Nothing is wrong with the pair: that it leaves where a chunk never comes.
    Bug(
        "a flag that is never raised",
        "comm/world.cuh",
        "  ptx::store_release_sys(reinterpret_cast<uint64_t*>(word), entered.call().epoch());\n",
        "  (void)word;\n",
        workload="pairs",
        found_as="TimeoutError",
    ),
]
