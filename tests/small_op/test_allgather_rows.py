"""An op from outside the package, in worlds of every shape: every element, too many rows, other ops beside it, planted bugs."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError, CompileError, Error
from mkernel.planner.proofs.areas import unordered
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology
from mkernel.transport import emulated
from tests.planner import test_areas
from tests.shared import proofs
from tests.shared.mirrors import errors_of_mirror
from tests.small_op import plan as planner
from tests.small_op.op import OP, Parameters, allgather_rows
from tests.small_op.plan import AllGatherRowsPlan, AllGatherRowsProblem, RowsError, make_plan
from tests.small_op.proof import call_of

FOLDER = Path(__file__).parent
WORLDS = {"1x1": (1, 1), "1x2": (2, 2), "1x3": (3, 3), "2x2": (4, 2), "3x1": (3, 1)}  # nodes x ranks per node -> ranks, per node
CALLS = 4
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows are many chunks, which a slow network brings in any order."""
    monkeypatch.setattr(planner, "CHUNK_BYTES", 512)
    faults = emulated.Faults(seed=5, delay_us=20.0, reorder_us=20.0)
    monkeypatch.setattr(emulated, "Faults", lambda: faults)


def launch(fn: Any, world: str, *args: Any, seed: int = 0, **options: Any) -> list[Any]:
    ranks, per_node = WORLDS[world]
    defaults = {"heap_bytes": 4 << 20, "timeout": 20.0, "entry_timeout": 20.0}
    return mk.launch(fn, ranks, per_node, "cpu", args, seed=seed, **{**defaults, **options})


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What all ranks pass in one call."""

    counts: tuple[int, ...]
    columns: int
    dtype: str
    spare: int  # rows of room beyond those that there are

    @classmethod
    def draw(cls, rng: np.random.Generator, ranks: int) -> Drawn:
        counts = tuple(int(n) for n in rng.choice([0, 1, 2, 7, 30, 61], ranks))
        dtype = str(rng.choice(list(DTYPES)))
        return cls(counts, 8 * int(rng.integers(1, 30)), dtype, int(rng.choice([0, 0, 1, 17])) + (not any(counts)))

    @property
    def max_rows(self) -> int:
        return sum(self.counts) + self.spare

    def shard(self, rank: int, seed: int) -> Any:
        """Bits of any kind, NaNs too."""
        rng = np.random.default_rng((seed, rank))
        return rng.integers(0, 1 << 16, (self.counts[rank], self.columns), np.uint16).view(DTYPES[self.dtype])

    def wrong(self, rank_sees: Any, seed: int) -> str:
        """What is not as it should be in a rank's result; "" if nothing."""
        expected = np.concatenate([self.shard(rank, seed).view(np.uint16) for rank in range(len(self.counts))])
        offsets = [0, *itertools.accumulate(self.counts)]
        if rank_sees.offsets.tolist() != offsets or rank_sees.offsets.dtype != np.int32:
            return f"{self}: offsets {rank_sees.offsets.tolist()}, not {offsets}"
        got = rank_sees.rows.view(np.uint16)
        if got.shape != (self.max_rows, self.columns):
            return f"{self}: shape {got.shape}"
        rows = np.nonzero((got[: len(expected)] != expected).any(axis=1))[0]
        return f"{self}: rows {rows.tolist()} differ" if len(rows) else ""


def program(world: Any, drawn: list[Drawn], seed: int) -> list[str]:
    """Calls one after the other, without a barrier; every other one with arrays of the caller."""
    found = []
    for number, one in enumerate(drawn):
        x, out = one.shard(world.rank, seed + number), None
        if number % 2:
            rows = np.full((one.max_rows, one.columns), np.nan, DTYPES[one.dtype])
            out = rows, np.full(world.size + 1, -1, np.int32)
        result = allgather_rows(x, max_rows=one.max_rows, out=out)
        found.append(one.wrong(result, seed + number))
        if out is not None and one.spare and not np.isnan(out[0][sum(one.counts) :].astype(np.float32)).all():
            found.append(f"{one}: rows after the last were written")
    return [text for text in found if text]


@pytest.mark.parametrize("schedule", range(3))
@pytest.mark.parametrize("world", WORLDS)
def test_every_element(rng: np.random.Generator, world: str, schedule: int) -> None:
    seed = int(rng.integers(1 << 30))
    drawn = [Drawn.draw(rng, WORLDS[world][0]) for _ in range(CALLS)]
    for number, wrong in enumerate(launch(program, world, drawn, seed, seed=seed + schedule)):
        assert wrong == [], f"rank {number}, seed {seed + schedule}"


def refused(world: Any, drawn: list[Drawn], seed: int) -> list[Any]:
    """Each call first with room for too few rows, then with enough."""
    told: list[Any] = []
    for number, one in enumerate(drawn):
        room = sum(one.counts) - 1
        memory = np.full((2 * room + 2, one.columns), np.nan, DTYPES[one.dtype])  # a kernel that moves rows all the same stays inside
        out = memory[:room], np.full(world.size + 1, -1, np.int32)
        try:
            allgather_rows(one.shard(world.rank, seed), max_rows=room, out=out)
        except RowsError as error:
            told.append((error.call, error.rank, error.rows, error.max_rows, error.largest[1], error.skipped))
        assert np.isnan(memory.astype(np.float32)).all(), "nothing was moved"
        assert one.wrong(allgather_rows(one.shard(world.rank, seed + number), max_rows=one.max_rows), seed + number) == ""
    world.barrier()
    return told


@pytest.mark.parametrize("world", WORLDS)
def test_too_many_rows_are_told_on_every_rank_and_the_world_goes_on(rng: np.random.Generator, world: str) -> None:
    seed = int(rng.integers(1 << 30))
    drawn = [one for one in (Drawn.draw(rng, WORLDS[world][0]) for _ in range(40)) if sum(one.counts) > 1][:CALLS]
    for rank, told in enumerate(launch(refused, world, drawn, seed, seed=seed)):
        each = ((2 * i + 1, rank, sum(one.counts), sum(one.counts) - 1, max(one.counts), 0) for i, one in enumerate(drawn))
        assert told == list(each), f"seed {seed}"


def mixed(world: Any, drawn: list[Drawn], seed: int) -> list[str]:
    """Between GEMMs, whose workspace lies where the rows do; some calls are refused."""
    found = []
    a = np.full((24, 64), world.rank + 1, np.float16)
    b = np.full((64, 16), 0.125, np.float16)
    for number, one in enumerate(drawn):
        if number % 2:
            with pytest.raises(RowsError):
                allgather_rows(one.shard(world.rank, seed), max_rows=sum(one.counts) - 1)
        gathered = mk.allgather_gemm(a, b)
        result = allgather_rows(one.shard(world.rank, seed + number), max_rows=one.max_rows)
        reduced = mk.gemm_reduce_scatter(np.repeat(a, world.size, axis=0), b)
        if not (gathered == np.repeat(np.arange(1, world.size + 1), 24)[:, None] * 8).all():
            found.append(f"{number}: allgather_gemm")
        if not (reduced == 8 * sum(range(1, world.size + 1))).all():
            found.append(f"{number}: gemm_reduce_scatter")
        found.append(one.wrong(result, seed + number))
    return [text for text in found if text]


@pytest.mark.parametrize("world", ["1x2", "2x2"])
def test_between_other_ops(rng: np.random.Generator, world: str) -> None:
    seed = int(rng.integers(1 << 30))
    drawn = [one for one in (Drawn.draw(rng, WORLDS[world][0]) for _ in range(40)) if sum(one.counts) > 1][:CALLS]
    assert launch(mixed, world, drawn, seed, seed=seed) == [[]] * WORLDS[world][0], f"seed {seed}"


def test_a_prepared_plan(rng: np.random.Generator) -> None:
    def use(world: Any) -> str:
        one = Drawn((5, 9), 16, "float16", 2)
        x = one.shard(world.rank, 3)
        plan = mk.plan("allgather_rows", x, max_rows=one.max_rows)
        agreed = world.problems.collectives
        found = one.wrong(plan.run(x), 3)
        assert world.problems.collectives == agreed
        return found + plan.describe().splitlines()[0]

    assert launch(use, "1x2") == ["allgather_rows: up to 16 rows of 16 float16 on 2 ranks"] * 2


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "what"),
    [
        ((3, 12), "float16", {"max_rows": 9}, "H = 12"),
        ((3, 8), "float32", {"max_rows": 9}, r"x\.dtype"),
        ((3,), "float16", {"max_rows": 9}, r"x\.ndim"),
        ((3, 8), "float16", {"max_rows": 0}, "max_rows = 0"),
        ((3, 8), "float16", {"max_rows": 9, "out": (np.empty((8, 8), np.float16), np.empty(2, np.int32))}, r"out\.rows"),
        ((3, 8), "float16", {"max_rows": 9, "out": (np.empty((9, 8), np.float16), np.empty(2, np.int64))}, r"out\.offsets"),
    ],
)
def test_bad_arguments(shape: tuple[int, ...], dtype: str, options: dict[str, Any], what: str) -> None:
    def use(world: Any) -> None:
        with pytest.raises(ArgumentError, match=what):
            allgather_rows(np.zeros(shape, dtype), **options)

    launch(use, "1x1")


# ---- the proofs, the mirror, the GPU's compiler
def plan_of(world: str, rows: int, columns: int = 64, sms: int = 4) -> AllGatherRowsPlan:
    return make_plan(AllGatherRowsProblem(Topology(*WORLDS[world]), columns, "float16"), rows, sms, Split(intra_comm=1))


@pytest.mark.parametrize("world", WORLDS)
def test_proofs(rng: np.random.Generator, world: str) -> None:
    def draw() -> Any:
        one = Drawn.draw(rng, WORLDS[world][0])
        return call_of(plan_of(world, one.max_rows, one.columns), one.counts)

    for _ in range(3):
        call = draw()
        proofs.check_call(call)
        proofs.check_order(draw(), draw(), "allgather_rows twice")
        for how in test_areas.ops_of(world) if world in test_areas.WORLDS else ():
            other = test_areas.draw(rng, how, world)
            proofs.check_order(call, other, f"allgather_rows, then {how}")
            proofs.check_order(other, call, f"{how}, then allgather_rows")


@pytest.mark.parametrize("world", [world for world in WORLDS if world != "1x1"])
def test_steps_that_do_not_wait_for_entries_are_found(world: str) -> None:
    """The proof can fail: of each kind of step that writes, one that waits for nothing meets the call before, whose rows may be others'."""
    ranks, plan = WORLDS[world][0], plan_of(world, 40)
    call, others = (call_of(plan, [10 if rank in some else 0 for rank in range(ranks)]) for some in (range(ranks), (1,)))
    for kind in {access.step[0] for access in call.accesses if access.writes}:
        alone = [proofs.with_waits(one, str(kind), for_peer=False) for one in (call, others)]
        assert any(any(unordered(first, second)) for first in (call, others) for second in alone), kind


def test_flags_have_names() -> None:
    plan = plan_of("2x2", 40)
    names = [plan.flag_name(0, index) for index in range(plan.flag_words)]
    assert len(set(names)) == len(names)
    assert names[2] == "how many rows rank 2 has"
    assert names[-1] == f"chunk {plan.max_chunks - 1} of the rows of rank 3"


@pytest.mark.parametrize("world", ["1x1", "2x2"])
def test_the_mirror_says_what_the_header_says(world: str) -> None:
    assert OP.parameters is Parameters
    assert errors_of_mirror(plan_of(world, 40).spec, Parameters, (FOLDER,)) == ""


@pytest.mark.parametrize("world", WORLDS)
def test_it_compiles_for_the_gpu(world: str, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC is not installed: pip install 'mkernel[test]'")
    from mkernel.jit import cuda

    used = cuda.resources(cuda.compile(plan_of(world, 40, sms=132).spec))
    assert used.local_bytes == 0, "spills"
    assert used.registers <= 128
    assert caplog.text == ""


# ---- planted bugs: in a copy of the kernel, of which something is left out
BUGS = {
    "a chunk is not waited for": ("1x3", "if (!wait_all(entered, ChunkFlag{p, rank, chunk, writer}, 1)) return false;", ""),
    "inter_send does not wait": ("3x1", "return wait_flag(entered, p, chunk_flag(p, p.world.rank, chunk), p.world.rank);", "return true;"),
    "counts are not waited for": ("1x2", "if (!wait_all(entered, CountFlags{p}, kWorldSize)) return false;", ""),
    "the node is not told": ("2x2", "if (holder == world.local_rank) raise_flag(entered, p, chunk_flag(p, rank, chunk), 1);", ""),
    "one row too many": ("1x2", "first[kWorldSize] <= p.max_rows", "first[kWorldSize] <= p.max_rows + 1"),
    "one rank does not report": ("1x2", "== 0) report_error", "== 0 && p.world.rank == 0) report_error"),
    "each rank judges by its own rows": ("1x2", "refused = !packing.fits();", "refused = p.rows > p.max_rows / 2;"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bug: str) -> None:
    world, old, new = BUGS[bug]
    text = re.sub(r"\s+", " ", (FOLDER / "allgather_rows.cuh").read_text().replace("\n", "\x00")).replace("\x00", "\n")
    assert text.count(old) == 1, "the text of the bug has changed"
    (tmp_path / "allgather_rows.cuh").write_text(text.replace(old, new))
    monkeypatch.setattr(planner, "FOLDER", tmp_path)
    drawn = [Drawn((61, 30, 7, 2)[: WORLDS[world][0]], 64, "float16", 0)] * 2
    for seed in range(5):  # some schedules are kind
        try:
            wrong = launch(program, world, drawn, seed, seed=seed, timeout=1.0, entry_timeout=1.0)
            launch(refused, world, drawn, seed, seed=seed, timeout=1.0, entry_timeout=1.0)
        except CompileError:
            raise
        except (Error, AssertionError):
            return
        if any(wrong):
            return
    pytest.fail("the bug was not noticed")
