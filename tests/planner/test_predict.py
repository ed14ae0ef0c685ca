"""The cost model: its predictions keep to what a machine can do, its published error is true, and what it chooses can run."""

from __future__ import annotations

import dataclasses
import heapq
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkernel import env
from mkernel.bench import model_error
from mkernel.bench.model_error import Measured, fit, held_out, measured, quantiles
from mkernel.bench.shapes import drawn
from mkernel.errors import ArgumentError
from mkernel.planner import choice
from mkernel.planner.allgather_gemm import AllGatherGemmProblem, make_plan
from mkernel.planner.heights import MOST_MORE_KERNELS
from mkernel.planner.kinds import MOST_KINDS, op_of
from mkernel.planner.machine import H100, H200, RDMA, load, machine_named, save
from mkernel.planner.predict import predict
from mkernel.planner.predict_gemm import _last_own, joined
from mkernel.planner.prediction import ALONE, BATCH, RESOURCES
from mkernel.planner.row_classes import MOST_KERNELS, classes, most_chosen
from mkernel.planner.tile_cost import Around, Operands, TileCost, TileShape, tile_cost
from mkernel.planner.tiling import Tiling
from mkernel.planner.topology import Topology
from tests.planner.kernels import kind_of_kernel
from tests.planner.kinds import extents, problems

REPORTS = Path(__file__).parents[2] / "docs" / "benchmarks"
WORLDS = [Topology(2, 2), Topology(4, 4), Topology(8, 8), Topology(4, 2), Topology(2, 1)]
LARGE = [Topology(16, 8), Topology(96, 4), Topology(512, 8), Topology(32768, 8)]  # the last is on paper only
RDMA_H200 = H200.with_network(RDMA)


# ---- the error
def some_reports(folder: Path, pattern: str) -> list[Measured]:
    for path in REPORTS.glob(pattern):
        (folder / path.name).symlink_to(path)
    return measured(folder)


@pytest.mark.slow
def test_the_error_is_what_is_aimed_at() -> None:
    """On rows that no constant was fitted to: docs/model.md has the whole table, and a test of the pages compares it."""
    rows = measured(REPORTS)
    assert len(rows) > 150
    of_gemm = [row for row in rows if row.op.startswith(("gemm", "allgather"))]
    for op, world in sorted({(row.op, row.world) for row in of_gemm}):
        errors = [row.error() for row in of_gemm if (row.op, row.world) == (op, world) and held_out(row)]
        median, worst = quantiles(errors)
        assert median <= 0.15 if world == "2x1" else median <= 0.12, (op, world)
        assert worst <= 0.30, (op, world)
    others = [row for row in rows if row not in of_gemm]
    assert quantiles(row.error() for row in others)[0] <= 0.2


@pytest.mark.parametrize("op", ["gemm", "allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce"])
def test_what_is_predicted_of_a_report_is_what_the_planner_chooses(op: str) -> None:
    """But for fields that it did not choose when there were reports already: a new one would have all reports predicted by other plans."""
    fields = "span", "shares", "cluster", "packets"
    assert model_error._tiling(fields, op, Topology(4, 4)) is None
    assert model_error._tiling((), op, Topology(4, 4)).fields <= set(fields)  # type: ignore[union-attr]


def test_a_report_is_predicted_on_the_network_that_it_names(tmp_path: Path) -> None:
    row = next(row for row in some_reports(tmp_path, "allgather_gemm-2x2-*.json") if row.world == "2x2" and row.label == "2048")
    errors = {
        said: dataclasses.replace(row, network=said).error(H200)
        for said in ("", "emulated by host, 5 us", "emulated by sms, 5 us", "rc", "srd")
    }
    assert errors[""] == errors["emulated by host, 5 us"] > errors["emulated by sms, 5 us"]
    assert errors[""] > errors["srd"] > errors["rc"]


def test_reading_reports_chooses_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes as long as all classes of rows of each N and K."""
    monkeypatch.setattr(choice, "_kept", lambda *_: pytest.fail("kernels were chosen"))
    assert {row.op for row in some_reports(tmp_path, "gemm_*-1x*.json")} == {"gemm", "gemm_reduce_scatter", "gemm_allreduce"}


def test_a_fit_finds_what_measurements_were_made_with(rng: np.random.Generator, tmp_path: Path) -> None:
    rows = some_reports(tmp_path, "gemm-*.json")
    rows = [rows[at] for at in rng.permutation(len(rows))[:24]]  # all of them take minutes, and more with each report
    other = dataclasses.replace(H200, start_lone=H200.start_lone * 1.3, sm_flops=H200.sm_flops * 0.8)
    made = []
    for row in rows:
        prediction = row.case.predicted(other, row.conditions)
        assert prediction is not None
        made.append(dataclasses.replace(row, ms=prediction.seconds * 1e3))
    found = fit(made, H200, ("start_lone", "sm_flops"))
    assert found.start_lone == pytest.approx(other.start_lone, rel=0.03)
    assert found.sm_flops == pytest.approx(other.sm_flops, rel=0.01)
    assert quantiles(row.error(found) for row in made)[1] < 0.015


# ---- what any prediction must keep to
@pytest.mark.parametrize("world", [*WORLDS, *LARGE], ids=str)
def test_no_call_is_faster_than_its_resources(world: Topology, rng: np.random.Generator) -> None:
    machine = H200 if world in WORLDS else RDMA_H200
    for turn in range(40):
        n, k = (int(8 * 2 ** rng.uniform(3, 11)) for _ in range(2))
        rows = int(2 ** rng.uniform(0, 13))
        if turn % 2:  # large results of short products, which wait for links and networks
            rows, n, k = int(2 ** rng.uniform(11, 15)), int(8 * 2 ** rng.uniform(9, 11)), int(8 * 2 ** rng.uniform(3, 7))
        for problem in problems(world, n, k):
            for conditions in (ALONE, BATCH):
                plan = choice.candidates(problem, rows, 132).__next__()
                found = predict(plan, machine, conditions)
                assert found is not None
                parts = {name: getattr(found, name) for name in RESOURCES}
                assert math.isfinite(found.seconds)
                assert found.seconds >= found.start + max(found.tensor, found.load, found.memory) > 0
                assert found.seconds * (1 + 1e-9) >= max(parts.values()), parts
                if world.num_nodes > 1:  # the first puts of data follow the entries
                    assert found.seconds >= found.entry + max(found.network, found.engine)
                assert parts[found.binds] == max(parts.values())


@pytest.mark.parametrize("world", [*WORLDS, *LARGE], ids=str)
def test_fewer_rows_of_a_plan_take_no_longer(world: Topology, rng: np.random.Generator) -> None:
    """In as many rows of tiles, as many of them own ones. Else by no more than one row of tiles takes: what ranks have is rounded."""
    for _ in range(20):
        n, k = (int(8 * 2 ** rng.uniform(3, 11)) for _ in range(2))
        rows = int(2 ** rng.uniform(1, 13))
        for problem in problems(world, n, k):
            plan = choice.candidates(problem, rows, 132).__next__()
            part = plan.of_rows(int(rng.integers(1, rows + 1)))
            fewer, all_of_them = (predict(one, RDMA_H200) for one in (part, plan))
            assert fewer is not None
            assert all_of_them is not None
            alike = all(getattr(part, name, None) == getattr(plan, name, None) for name in ("tile_rows", "fewest_own"))
            more = 0.01 if alike else 1 / plan.tile_rows
            assert fewer.seconds <= all_of_them.seconds * (1 + more), plan.describe()


def test_of_few_rows_one_warpgroup_multiplies(rng: np.random.Generator) -> None:
    """Up to 64 rows of a tile; where CTAs add up shares of wide tiles both multiply, since ptxas finds no registers for the other code."""
    for _ in range(20):
        n, k = (int(64 * 2 ** rng.uniform(2, 7)) for _ in range(2))
        problem = AllGatherGemmProblem(Topology(1, 1), n, k, "bfloat16", bool(rng.integers(2)))
        columns, shares = int(rng.choice([64, 128, 192, 256])), int(rng.integers(1, 3))

        def tensor(rows: int) -> float:
            found = predict(make_plan(problem, rows, 132, tiling=Tiling(columns, shares=shares, cluster=1)), H200)  # noqa: B023
            assert found is not None
            return found.tensor

        halves = shares == 1 or columns <= 128
        assert tensor(64) == pytest.approx(tensor(128) * (0.5 if halves else 1.0))
        assert tensor(65) == pytest.approx(tensor(128))


@pytest.mark.parametrize("world", [*WORLDS, *LARGE], ids=str)
def test_half_a_machine_is_never_faster(world: Topology, rng: np.random.Generator) -> None:
    """A machine with one rate halved, or one cost doubled, takes as long or longer for the same plan."""
    of_l2 = ("l2", "l2_rows", "l2_rows_sectors", "l2_rows_split")
    rates = ("sm_flops", "sm_load", *of_l2, "memory", "link", "link_pair", "cta_link", "warps_link", "add")
    costs = ("start", "tile", "entry", "flag", "tile_split", "paired", "beside", "poll")
    whole = H200 if world in WORLDS else RDMA_H200
    slower = [dataclasses.replace(whole, **{name: getattr(whole, name) / 2}) for name in rates]
    slower += [dataclasses.replace(whole, **{name: getattr(whole, name) * 2}) for name in costs]
    of_network = {name: getattr(whole.network, name) * 2 for name in ("latency", "put", "reaction", "issue", "hop", "oversubscription")}
    of_network |= {"bandwidth": whole.network.bandwidth / 2, "radix": whole.network.radix // 2}
    slower += [whole.with_network(dataclasses.replace(whole.network, **{name: value})) for name, value in of_network.items()]
    for _ in range(10):
        n, k, rows = (int(8 * 2 ** rng.uniform(3, 11)) for _ in range(3))
        for problem in problems(world, n, k):
            plan = choice.candidates(problem, rows, 132).__next__()
            before = predict(plan, whole)
            assert before is not None
            for machine in slower:
                after = predict(plan, machine)
                assert after is not None
                assert after.seconds >= before.seconds * (1 - 1e-3), (plan.describe(), machine)


def test_rows_that_begin_between_lines_are_loaded_longer() -> None:
    def cost(n: int, k: int, load_rows: int = 128, speed: float = 1.0, in_fours: bool = False, b_row: int = 0) -> TileCost:
        """``b_row``: 0, of a row-major B."""
        tile = TileShape(128, 128, load_rows, *((2, 2) if in_fours else (1, 1)))
        return tile_cost(H200, tile, Operands(n, k, k, b_row or n), Around(active=H200.sms), speed)

    aligned = cost(2048, 4096)
    assert cost(2056, 4096).load > cost(2064, 4096).load >= aligned.load
    in_fours = [cost(2048, k, in_fours=True, b_row=k).load / k for k in (4096, 4112)]
    assert in_fours[0] < in_fours[1], "clusters do not ask together for what lies in two lines"
    assert cost(2048, 4104).load > cost(2048, 4160).load
    assert cost(2048, 4096, load_rows=16).load < aligned.load
    assert cost(2056, 4096, b_row=4096).load == aligned.load, "of a transposed B"
    one_side = [cost(n, k, b_row=b).load for n, k, b in ((2056, 4096, 2056), (2048, 4104, 0))]
    both = cost(2048, 4104, b_row=4104).load
    assert max(one_side) < both <= cost(2056, 4104).load
    assert cost(2048, 4096, speed=0.5).tensor == 2 * aligned.tensor


# ---- choosing
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_the_choice_is_a_candidate_and_no_slower_than_the_rules(world: Topology, rng: np.random.Generator) -> None:
    for problem in problems(world, 3328, 6912):
        for rows in rng.choice(list(classes(1 << 14)), 12, replace=False):
            found = choice.ranked(problem, int(rows), 132, H200)
            chosen = choice.choose(problem, int(rows), 132, H200, None)
            rules = next(iter(choice.candidates(problem, int(rows), 132)))
            seconds = {one.plan.digest: one.seconds for one in found}
            assert [one.seconds for one in found] == sorted(one.seconds for one in found)
            of_chosen = choice.predict(chosen, H200).seconds
            assert found[0].seconds <= of_chosen
            has_kernel = rules.spec in choice._kept(problem, 132, H200, None)  # of which a problem has few
            assert of_chosen <= seconds[rules.digest] or not has_kernel
            assert chosen.split.total <= 132


@pytest.mark.parametrize("sms", [2, 4, 16, 114])
def test_small_devices_have_plans_too(sms: int) -> None:
    for problem in problems(Topology(2, 2), 136, 264):
        for rows in (1, 100, 1000):
            assert choice.choose(problem, choice.class_of(rows), sms, H200, None).split.total <= sms


def where_they_differ(topology: Topology, sms: int, rng: np.random.Generator) -> tuple[AllGatherGemmProblem, int]:
    """A problem and a number of rows for which the model and the rules choose differently."""
    for _ in range(200):
        n, k, rows = (8 * round(2 ** rng.uniform(low, high)) for low, high in ((6, 11), (6, 10), (5, 9)))
        problem = AllGatherGemmProblem(topology, n, k, "bfloat16", True)
        plans = []
        for planner in ("rules", "model"):
            with env.override(MKERNEL_PLANNER=planner):
                plans.append(choice.plan_allgather_gemm(problem, rows, sms).digest)
        if plans[0] != plans[1]:
            return problem, rows
    raise AssertionError("the rules and the model agree everywhere")


def test_the_switch_is_explicit(rng: np.random.Generator) -> None:
    """On another number of SMs than the model was confirmed on."""
    sms = 114
    problem, rows = where_they_differ(Topology(2, 2), sms, rng)
    rules = choice.plan_allgather_gemm(problem, rows, sms)
    asked = choice.plan_allgather_gemm(problem, rows, sms, rules.split)
    with env.override(MKERNEL_PLANNER="model"):
        chosen = choice.plan_allgather_gemm(problem, rows, sms)
        assert chosen.rows == rows
        assert chosen.digest != rules.digest
        assert choice.plan_allgather_gemm(problem, rows, sms, rules.split).digest == asked.digest, "a split that is given decides"
        compiled_in = choice.plan_allgather_gemm(problem, rows, sms, specialize="all")
    assert compiled_in.digest == choice.plan_allgather_gemm(problem, rows, sms, specialize="all").digest
    assert choice.plan_allgather_gemm(problem, rows, sms).digest == rules.digest


def test_the_model_decides_where_it_was_confirmed(rng: np.random.Generator) -> None:
    """In one node, on as many SMs as an H200 has."""
    for topology, sms, decides in (
        (Topology(1, 1), 132, True),
        (Topology(1, 1), 114, False),
        (Topology(2, 2), 132, True),
        (Topology(2, 1), 132, False),
    ):
        problem, rows = where_they_differ(topology, sms, rng)
        with env.override(MKERNEL_PLANNER="rules"):
            rules = choice.plan_allgather_gemm(problem, rows, sms)
        with env.override(MKERNEL_PLANNER="model"):
            model = choice.plan_allgather_gemm(problem, rows, sms)
        assert choice.plan_allgather_gemm(problem, rows, sms).digest == (model if decides else rules).digest


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_table_has_few_kernels(ranks: int, rng: np.random.Generator) -> None:
    drawn = [8 * int(extent) for extent in rng.integers(64, 1024, 2)]
    for n, k in ((14336, 8192), tuple(drawn)):
        for problem in problems(Topology(ranks, ranks), n, k):
            plans = [choice.choose(problem, rows, 132, H200, None) for rows in classes(1 << 13)]
            kernels = {plan.spec for plan in plans}
            assert len(set(map(kind_of_kernel, kernels))) <= MOST_KERNELS
            assert len(kernels) <= MOST_KERNELS + MOST_MORE_KERNELS


def kernels_of_all(world: Topology, rng: np.random.Generator) -> int:
    """How many kernels an op of the world needs for many dims, N and K at run time."""
    found: dict[str, set[Any]] = {}
    for _ in range(8):
        for problem in problems(world, *extents(rng)):
            kernels = found.setdefault(op_of(problem), set())
            kernels |= {choice.choose(problem, rows, 132, H100, "none").spec for rows in choice._CLASSES[::3]}
    return max(map(len, found.values()))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_all_n_and_k_have_few_kernels(ranks: int, rng: np.random.Generator) -> None:
    assert kernels_of_all(Topology(ranks, ranks), rng) <= MOST_KINDS


@pytest.mark.slow
def test_with_kernels_that_are_seldom_the_fastest_there_would_be_more(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, forget_choices: Callable[[], None]
) -> None:
    monkeypatch.setattr(choice, "_may_be_chosen", lambda plan: True)
    forget_choices()
    assert any(kernels_of_all(Topology(2, 2), rng) > MOST_KINDS for _ in range(10))


def test_kernels_that_are_kept_leave_no_class_without_one(rng: np.random.Generator) -> None:
    """Some classes may be able to have none of the kernels that are best for the others."""
    rare = 0
    for _ in range(50):
        possible = [rng.permutation(10)[:3].tolist() if rng.random() < 0.1 else list(range(8, 24)) for _ in range(100)]
        seconds = [dict(zip(kernels, rng.uniform(1, 2, len(kernels)).tolist(), strict=True)) for kernels in possible]
        weights = [float(len(kernels) > 3) for kernels in possible]
        kept = choice._covering(seconds, weights)
        assert len(kept) <= 8
        assert all(kept.intersection(kernels) for kernels in possible)
        rare += any(not set(choice._most_useful(seconds, weights)).intersection(kernels) for kernels in possible)
    assert rare, "the most useful were enough: nothing was shown"


def test_kernels_that_are_kept_are_those_without_which_calls_take_longest(rng: np.random.Generator) -> None:
    """Not those that most classes would choose: where a kernel is the best by little, another one may do."""
    kernels, needed, left_out = range(12), {9, 10, 11}, 0
    for _ in range(20):
        seconds = [{kernel: float(rng.uniform(1.0, 1.02)) for kernel in kernels} for _ in range(60)]
        for at, best in enumerate(needed):
            seconds[at] = {kernel: 1.0 if kernel == best else 1.5 for kernel in kernels}
        assert needed <= choice._covering(seconds, [1.0] * len(seconds))
        left_out += not needed <= most_chosen(min(one, key=one.__getitem__) for one in seconds)
    assert left_out, "most classes would have chosen them, too: nothing was shown"


def test_thousands_of_rows_do_not_outvote_tens() -> None:
    """Most classes are of thousands of rows. By classes alone the kernel of the first three would be left out here."""
    assert sum(choice._WEIGHTS) == pytest.approx(math.log(choice._CLASSES[-1] + 1))
    wanted = [8, 8, 8, *(at % 8 for at in range(len(choice._CLASSES) - 3))]
    seconds = [{kernel: 1.0 if kernel == best else 1.1 for kernel in range(9)} for best in wanted]
    assert 8 in choice._covering(seconds, choice._WEIGHTS)
    assert 8 not in choice._covering(seconds, [1.0] * len(wanted))


# ---- machines
def test_a_machine_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    save(H100, path, {"date": "today"})
    assert load(path) == H100 == machine_named(str(path))
    assert machine_named("h100", 114).sms == 114
    raw = json.loads(path.read_text())
    for field, value in (("sms", None), ("memory", -1.0), ("unknown", 1.0)):
        broken = {**raw, "machine": {**raw["machine"], field: value}}
        path.write_text(json.dumps(broken))
        with pytest.raises(ArgumentError, match="MKERNEL_MACHINE"):
            machine_named(str(path))


def test_drawn_shapes_fit_every_op(rng: np.random.Generator) -> None:
    seed = int(rng.integers(1 << 30))
    for ranks in (1, 2, 4):
        shapes = [tuple(map(int, text.split("x"))) for text in drawn(50, seed, ranks, splits_k=False)]
        assert len(set(shapes)) > 45
        assert all(m % ranks == n % 8 == k % 8 == 0 for m, n, k in shapes)
        assert 15 < sum(n % 128 == 0 for _, n, _ in shapes) < 42
        whole = drawn(50, seed, ranks, splits_k=True)
        assert whole == [f"{m}x{n}x{k * ranks}" for m, n, k in shapes], "the same products of a rank"


def test_own_tiles_of_the_last_wave_are_those_of_the_order(rng: np.random.Generator) -> None:
    """In an order of whole groups that is written out: others' tiles of a group, then own ones of the group before it."""
    for _ in range(300):
        groups, group, ctas = (int(most) for most in rng.integers(1, (12, 60, 90)))
        order = [own for i in range(groups) for own in [False] * group + [True] * (group if i else 0)] + [True] * group
        assert _last_own(groups * group, group, ctas) == sum(order[-ctas:])


def test_who_is_free_takes_the_next_tile(rng: np.random.Generator) -> None:
    """CTAs that have pushed come late, and are few: the end is that of a list of tiles, from which everyone takes one after the other."""
    for _ in range(300):
        ctas = int(rng.integers(1, 140))
        tiles, others, late = int(rng.integers(1, 4 * ctas + 1)), int(rng.integers(0, ctas // 8 + 1)), float(rng.uniform(0, 5))
        free, end = [0.0] * ctas + [late] * others, 0.0
        heapq.heapify(free)
        for _ in range(tiles):
            done = heapq.heappop(free) + 1.0
            end = max(end, done)
            heapq.heappush(free, done)
        assert joined(tiles, ctas, 1.0, others, late) == pytest.approx(end)
