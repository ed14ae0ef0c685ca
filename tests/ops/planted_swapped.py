"""What is planted in tiles of swapped operands, and in those whose columns are no whole panels (kernels_src/tile/shape.cuh)."""

from __future__ import annotations

from tests.ops.planted_bug import Bug

__all__ = ["SWAPPED"]

SWAPPED = [
    # Columns of tiles that are no whole panels.
    *(
        Bug(f"{what}: {workload}", file, text, to, workload=workload, world="1x1")
        for workload in ("cut", "cut panels")
        for what, file, text, to in (
            ("what is the next tile's of a panel is stored", "tile/op.cuh", "if (c.n + 1 < tiles_n()) return", "if (c.n + 1 < 0) return"),
            (
                "the last column of tiles has the others' map",
                "tile/op.cuh",
                "if (c.n + 1 < tiles_n()) return",
                "if (c.n < tiles_n()) return",
            ),
            (
                "a tile begins where whole panels would",
                "tile/shape.cuh",
                "return c.n * GemmShape<Config>::kResultN +",
                "return c.n * Config::kBlockN +",
            ),
            (
                "the last panel is not stored",
                "tile/shape.cuh",
                ": width) + kPanel - 1) / kPanel",
                ": width)) / kPanel",
            ),
        )
    ),
    Bug(
        "the last panel of B is not expected",
        "tile/load.cuh",
        "columns = GemmShape<Config>::kCut ? GemmShape<Config>::kRoom : tile_width<Config>(c);",
        "columns = tile_width<Config>(c);",
        workload="cut panels",
        world="1x1",
    ),
    Bug(
        "the last panel of B is not loaded",
        "tile/pair.cuh",
        "p < Shape::kPanelsOfB; ++p",
        "p < Shape::kColumns / kPanel; ++p",
        workload="cut panels",
        world="1x1",
    ),
    *(
        Bug(what, file, text, to, workload=workload, found_as="wrong")
        for what, file, text, to, workload in (
            ("matrices are stored as they are", "tile/epilogue.cuh", "ptx::stmatrix_x4_transposed(", "ptx::stmatrix_x4(", "swapped"),
            (
                "columns of a block are those of the next warp",
                "tile/epilogue.cuh",
                "column = (warp * 2",
                "column = ((warp ^ 1) * 2",
                "swapped",
            ),
            ("a warpgroup's columns are the other one's", "tile/op.cuh", ": warpgroup * Shape::kUnits", ": 1 - warpgroup", "swapped"),
            (
                "rows of the next tile are written",
                "tile/op.cuh",
                "kBlockRows <= rows_of_warpgroup() ? &p.c_map",
                "0 <= rows_of_warpgroup() ? &p.c_map",
                "swapped",
            ),
            (
                "the last rows of a tile are not multiplied",
                "tile/multiply.cuh",
                "if (rows <= Heights<Config>::at(kMiddle)) {",
                "if (rows < Heights<Config>::at(kMiddle + 1)) {",
                "swapped",
            ),
            (
                "the last block of a tile is not stored",
                "tile/op.cuh",
                ": load_rows(c)) + kBlockRows - 1) / kBlockRows",
                ": load_rows(c))) / kBlockRows",
                "swapped",
            ),
            (
                "a row-major B is read as a transposed one",
                "tile/shape.cuh",
                "kMajorA = kSwapped ? kMajorOfB : ptx::Major::kK",
                "kMajorA = ptx::Major::kK",
                "swapped",
            ),
            (
                "a k step of B is one row further",
                "tile/multiply.cuh",
                "k * (Shape::kMajorA == ptx::Major::kMN ? kSwizzleBytes : 2)",
                "k * 2",
                "wide",
            ),
            (
                "the lane of an odd column stores the first row",
                "ops/allgather_gemm.cuh",
                "row = lane % 4 * 2 + odd;",
                "row = lane % 4 * 2;",
                "swapped shares",
            ),
            (
                "lanes exchange the value that they keep",
                "ops/allgather_gemm.cuh",
                "ptx::shuffle_xor(odd ? sum[2 * i] : sum[2 * i + 1], 4)",
                "ptx::shuffle_xor(odd ? sum[2 * i + 1] : sum[2 * i], 4)",
                "swapped shares",
            ),
            ("columns 8 apart are one", "ops/allgather_gemm.cuh", "p.c_row_bytes + i * 16, word", "p.c_row_bytes, word", "swapped shares"),
        )
    ),
    Bug(
        "a tile's rows are those of 128",
        "tile/op.cuh",
        "if constexpr (Shape::kSwapped) return p.block_rows;",
        "if constexpr (Shape::kSwapped) return Shape::kBlockM;",
        workload="swapped",
    ),
    Bug(
        "a share is not sent as far as there are rows",
        "tile/shares.cuh",
        "      if (Shape::kSwapped && i * 8 >= rows) break;\n",
        "      if (Shape::kSwapped && i * 8 + 8 >= rows) break;\n",
        workload="swapped shares",
    ),
    Bug(
        "sums take packets of rows that there are not",
        "tile/shares.cuh",
        "    if (Shape::kSwapped && end * 8 > rows) end = (rows + 7) / 8;\n",
        workload="swapped shares",
    ),
    Bug(
        "stages are as far apart as of 128 rows",
        "tile/storage.cuh",
        "bytes_ = bytes_a() + op.block_rows() * kSwizzleBytes;",
        "bytes_ = 2 * Shape::kBytesA;",
        workload="swapped",
    ),
    Bug(
        "one stage more than there is room for",
        "tile/storage.cuh",
        "count_ = op.stages(), bytes_",
        "count_ = op.stages() + 1, bytes_",
        workload="swapped",
    ),
    Bug(
        "rows of A are where columns of B should be",
        "tile/storage.cuh",
        "return Shape::kSwapped ? b(storage, stage) : a(storage, stage);",
        "return a(storage, stage);",
        workload="swapped fours",
    ),
    Bug(
        "parts of B of a cluster are as of kBlockN columns",
        "tile/pair.cuh",
        "(Shape::kMayBeNarrow ? width : Shape::kColumns) / kParts",
        "Shape::kBlockN / kParts",
        workload="swapped fours by columns",
    ),
    *(
        Bug(what, file, text, to, workload=workload)
        for what, file, text, to, workload in (
            (
                "the second block of a warpgroup is the first one's columns",
                "tile/multiply.cuh",
                "ptx::advance_descriptor(a, 64 * kSwizzleBytes)",
                "a",
                "wide",
            ),
            ("it is multiplied into the first one's registers", "tile/multiply.cuh", "Unit * Shape::kUnitHeld>", "0>", "wide"),
            (
                "it is stored where the other warpgroup's first is",
                "tile/op.cuh",
                "warpgroup * Shape::kUnits + unit",
                "warpgroup + unit",
                "wide",
            ),
            ("rows of its last panel are the first one's", "tile/epilogue.cuh", "unit * Shape::kUnitHeld + panel", "panel", "wide"),
            ("both warpgroups have the same half of rows", "tile/multiply.cuh", "warpgroup * kApart", "0", "wide by rows"),
            (
                "halves of rows lie over each other",
                "tile/op.cuh",
                "kSplitsRows ? warpgroup * rows_of_warpgroup()",
                "kSplitsRows ? 0",
                "wide by rows",
            ),
            (
                "lower tiles are halved where they are loaded",
                "tile/multiply.cuh",
                "kSplitsRows ? op.block_rows()",
                "kSplitsRows ? op.load_rows(c)",
                "wide by rows",
            ),
            (
                "a half's last panel is stored as far as a tile's",
                "tile/op.cuh",
                "kBlockRows <= rows_of_warpgroup()",
                "kBlockRows <= block_rows()",
                "wide by rows",
            ),
            ("narrow tiles are as far apart as others", "tile/shape.cuh", "return c.n * kPanel;", "return c.n * 2 * kPanel;", "narrow"),
            ("there are as many narrow tiles as others", "tile/op.cuh", "? (extent_n(p) + kPanel - 1) / kPanel :", "? 1 :", "narrow"),
            ("rows of A begin as of others", "tile/storage.cuh", "is_low_ || is_narrow_ ?", "is_low_ ?", "narrow"),
            ("the other warpgroup stores a narrow tile, too", "tile/shape.cuh", "c.is_narrow ? 1 :", "c.is_narrow ? 2 :", "narrow"),
            (
                "the other warpgroup multiplies it",
                "tile/multiply.cuh",
                "op.is_narrow() && warpgroup != 0",
                "op.is_narrow() && warpgroup > 1",
                "narrow",
            ),
            (
                "other panels of B are loaded, too",
                "tile/pair.cuh",
                "if (Shape::kMayBeNarrow && p * kPanel >= width) break;",
                "",
                "narrow fours",
            ),
            (
                "parts of B of narrow tiles are as of others",
                "tile/pair.cuh",
                "(Shape::kMayBeNarrow ? width : Shape::kColumns)",
                "Shape::kColumns",
                "narrow fours by columns",
            ),
        )
    ),
    Bug(
        "nobody waits for a stage of tiles of any height",
        "tile/multiply.cuh",
        "storage.stages.wait_filled(stage);\n    if",
        "if",
        workload="swapped",
    ),
    Bug(
        "such a stage is given back before it is read",
        "tile/multiply.cuh",
        "if (previous != kStop) give_back<Config>(storage, previous);\n    previous = stage.index;",
        "previous = stage.index;\n    give_back<Config>(storage, previous);",
        workload="swapped",
    ),
    *(
        Bug(what, file, text, to, world="1x1", workload="in turn")
        for what, file, text, to in (
            (
                "a warpgroup does not wait for its turn",
                "tile/multiply.cuh",
                "if (turn != 0) ptx::mbarrier_wait(",
                "if (false) ptx::mbarrier_wait(",
            ),
            (
                "it gives the turn away with its first stage",
                "tile/multiply.cuh",
                "if (step + 1 == steps) end_turn",
                "if (step == 0) end_turn",
            ),
            ("it takes the other one's stages", "tile/multiply.cuh", "stage.advance_by(steps, ring.count());", ""),
            ("both have all tiles", "tile/multiply.cuh", "if (turn % 2 != warpgroup) {", "if (false) {"),
            ("it waits for the turn before", "tile/multiply.cuh", "(turn - 1) / 2 % 2", "turn / 2 % 2"),
            ("laps are skipped without their parity", "comm/handshake.cuh", "parity ^= laps % 2;", "parity ^= 0;"),
            ("all tiles are stored from the first one's memory", "tile/epilogue.cuh", "turn ^= 1;", "turn ^= 0;"),
            ("its blocks are taken where the other one's are", "tile/epilogue.cuh", "at = next_at, stored", "at = at, stored"),
        )
    ),
    Bug(
        "a turn is given away before all lanes have seen that it had come",
        "tile/multiply.cuh",
        "  ptx::sync_warp();  // all lanes have seen that",
        "  //",
        world="1x1",
        workload="in turn short",
        seeds=40,
    ),
]
