"""What is planted in the exchange of reductions with swapped operands (kernels_src/reduce/groups.cuh)."""

from __future__ import annotations

from tests.ops.planted_bug import Bug

__all__ = ["SWAPPED_SUMS"]

_GROUPS, _SCATTER = "reduce/groups.cuh", "ops/gemm_reduce_scatter_packets.cuh"
_ALL = "ops/gemm_allreduce_packets.cuh"

SWAPPED_SUMS = [
    *(
        Bug(what, file, before, after, world=world, workload=workload)
        for what, file, before, after, world, workload in (
            (
                "rows of a group go to the owner of its first row only",
                _SCATTER,
                "{ return owner * p.rows / kGroupRows; }",
                "{ return (owner * p.rows + kGroupRows - 1) / kGroupRows; }",
                "1x3",
                "scattered swapped",
            ),
            (
                "an owner's last rows are left out",
                _SCATTER,
                "((owner + 1) * p.rows + kGroupRows - 1) / kGroupRows",
                "(owner + 1) * p.rows / kGroupRows",
                "1x3",
                "scattered swapped",
            ),
            (
                "there is room for as many groups as rows fill",
                _SCATTER,
                "(p.rows + kGroupRows - 2) / kGroupRows + 1;",
                "(p.rows + kGroupRows - 1) / kGroupRows;",
                "1x3",
                "scattered swapped",
            ),
            (
                "the lane of an odd column stores the first row",
                _GROUPS,
                "lane % 4 * 2 + odd - derived()",
                "lane % 4 * 2 - derived()",
                "1x2",
                "scattered swapped",
            ),
            (
                "lanes exchange the value that they keep",
                _GROUPS,
                "ptx::shuffle_xor(odd ? e[0] : e[1], 4)",
                "ptx::shuffle_xor(odd ? e[1] : e[0], 4)",
                "1x2",
                "scattered swapped",
            ),
            ("columns 8 apart are one", _GROUPS, "store_word(to + next * 16, word)", "store_word(to, word)", "1x2", "scattered swapped"),
            (
                "the last columns are not stored",
                _GROUPS,
                "row < p.rows && column + next * 8 < extent_n(p)",
                "row < p.rows && column + next * 8 + 8 < extent_n(p)",
                "1x2",
                "scattered swapped",
            ),
            (
                "rows are stored where all ranks' have theirs",
                _GROUPS,
                "+ odd - derived().first_row();  // of the result",
                "+ odd;  // of the result",
                "1x2",
                "scattered swapped",
            ),
            (
                "groups are waited for that nobody sends",
                _GROUPS,
                "uint32_t{at + i >= groups.begin && at + i < groups.end}",
                "uint32_t{at + i < groups.end}",
                "1x2",
                "scattered swapped",
            ),
            (
                "a group is sent to those before its owner",
                _GROUPS,
                "at + i >= of[r].begin && at + i < of[r].end",
                "at + i < of[r].end",
                "1x3",
                "scattered swapped",
            ),
            (
                "a tile has its neighbour's rows, too",
                _GROUPS,
                "((rows < most ? rows : most) + kGroupRows - 1)",
                "(rows + kGroupRows - 1)",
                "1x2",
                "scattered swapped",
            ),
            (
                "values of others take the place of the own",
                _GROUPS,
                "values[i] += low, values[i + 1]",
                "values[i] = low, values[i + 1]",
                "1x2",
                "scattered swapped",
            ),
            (
                "what is left of a high tile is not exchanged",
                _GROUPS,
                "if constexpr (From + Count < Most)",
                "if constexpr (From + 2 * Count < Most)",
                "1x3",
                "scattered swapped high",
            ),
            (
                "the next groups are those before them",
                _GROUPS,
                "ptx::bits(d[From * kGroupValues + i])",
                "ptx::bits(d[i])",
                "1x3",
                "scattered swapped high",
            ),
            (
                "a group lies where the tile's first one does",
                _GROUPS,
                "(first + n % kCount) * from.next",
                "(n % kCount) * from.next",
                "1x3",
                "scattered swapped high",
            ),
            (
                "slices begin inside a group",
                "reduce/packets.cuh",
                "Shape::kSwapped ? 2 : 1}",
                "1}",
                "1x2",
                "scattered swapped shared",
            ),
            (
                "a slice's groups begin with the tile",
                _GROUPS,
                "groups.begin = groups.first + begin / 2,",
                "groups.begin = groups.first,",
                "1x2",
                "scattered swapped shared",
            ),
            (
                "a slice has one group fewer",
                _GROUPS,
                "groups.end = groups.first + (end + 1) / 2;",
                "groups.end = groups.first + (end - 1) / 2;",
                "1x2",
                "scattered swapped shared",
            ),
            (
                "sums of shares take rows that there are not",
                _GROUPS,
                "last < there ? last : there;",
                "last;",
                "1x2",
                "scattered swapped shared",
            ),
            (
                "in one step all sources are one",
                _ALL,
                "{ return groups_at(entered, rank, source * blocks() + block); }",
                "{ return groups_at(entered, rank, block); }",
                "1x3",
                "swapped in one step",
            ),
            (
                "in one step a sum begins with what was there",
                _ALL,
                "      for (float& e : values) e = 0.0f;\n",
                "      for (float& e : values) e = 1.0f;\n",
                "1x2",
                "swapped in one step",
            ),
            (
                "sums lie among what is added up",
                _ALL,
                "kWorldSize * owned_blocks() + block;",
                "(kWorldSize - 1) * owned_blocks() + block;",
                "1x3",
                "swapped in two steps",
            ),
            (
                "an owner has room for one block fewer",
                _ALL,
                "{ return (blocks() + kWorldSize - 1) / kWorldSize; }",
                "{ return blocks() / kWorldSize; }",
                "1x3",
                "swapped in two steps",
            ),
            (
                "the second look at the sources is left out",
                _GROUPS,
                "for (uint32_t s = 0; s < sources; s += Together)",
                "for (uint32_t s = 0; s < Together; s += Together)",
                "1x4",
                "swapped in one step",
            ),
        )
    ),
]
