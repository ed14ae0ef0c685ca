"""Random programs on target cpu, every element checked. Seeds are fresh in every run and printed with a failure.

The same again, as the failure says: ``python tests/programs/search.py --worlds WORLD --seed SEED --sequences 1 --kernels KERNELS``.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

import mkernel as mk
from mkernel.planner.row_classes import classes
from mkernel.planner.topology import Topology
from tests.programs import calls
from tests.programs.calls import AllGatherGemm, AllReduce, Limits, ReduceScatter
from tests.programs.program import FOREVER, SHARED_BITS, Network, Program, Step, draw
from tests.programs.run import Failure, run, script, shorter
from tests.programs.search import WORLDS, fresh_seed

FEW, KERNELS = 4, 4  # programs of a world in `make test`, and kernels that are compiled for them
SEQUENCES = 25  # with --full, of each of
FAMILIES = 3  # families of kernels, and world
ALONG_ONE_AXIS = tuple(f"1x{ranks}" for ranks in range(2, 9)) + tuple(f"{nodes}x1" for nodes in range(2, 7))
ALONG_BOTH = ("2x2", "2x3", "2x4", "3x2", "4x2")


def check(world: str, first: int, programs: int, kernels: int) -> None:
    for seed in range(first, first + programs):
        failure = run(draw(world, seed, kernels=kernels), seed)
        again = f"python tests/programs/search.py --worlds {world} --seed {seed} --sequences 1 --kernels {kernels} --shorten"
        assert failure is None, f"{again}\n{failure}"


@pytest.mark.always
def test_random_programs_of_some_worlds() -> None:
    """A world of one; one of one node or without mates, one of several nodes with them: of all shapes, others in every run."""
    first = fresh_seed()
    rng = random.Random(first)
    check("1x1", first, FEW, KERNELS)
    for worlds in (ALONG_ONE_AXIS, ALONG_BOTH):
        check(rng.choice(worlds), first, FEW, KERNELS)


@pytest.mark.slow
@pytest.mark.parametrize("family", range(FAMILIES))
@pytest.mark.parametrize("world", WORLDS)
def test_random_programs(world: str, family: int) -> None:
    check(world, fresh_seed(), SEQUENCES, 6)


@pytest.mark.parametrize("world", ["2x2", pytest.param("3x2", marks=pytest.mark.slow)])
def test_programs_of_one_seed(world: str) -> None:
    """Always the same ones."""
    check(world, 0, 2, 3)


# ---- what was found


def two_shot_then_gather(place: str = "heap") -> Program:
    """A rank's node mates still pull finished tiles from its heap when its rail peer puts the next call's chunks there."""
    reduced = AllReduce(
        rows=2048, n=256, k=64, dtype="bfloat16", transposed=False, split=mk.Split(intra_comm=1, inter_send=1, inter_reduce=1),
        algorithm="two_shot",
    )  # fmt: skip
    gathered = AllGatherGemm(rows=224, n=64, k=1024, dtype="bfloat16", transposed=False)
    steps = [Step(i, call, (place, "ordinary"), "fresh") for i, call in enumerate((reduced, gathered, gathered, gathered))]
    return Program("2x2", 1, tuple(steps), sms=8)


# Two of the seeds that failed before writers waited for all ranks; of 0..30, nine with 4 SMs and two with 8.
NAMED = [pytest.param(seed, id=str(seed), marks=() if seed == 5 else pytest.mark.slow) for seed in range(31)]


@pytest.mark.parametrize("seed", NAMED)
def test_two_shot_allreduce_before_allgather_gemm(seed: int) -> None:
    for sms in (4, 8):
        failure = run(dataclasses.replace(two_shot_then_gather(), sms=sms), seed)
        assert failure is None, str(failure)


def test_two_shot_allreduce_whose_last_pulls_are_slow() -> None:
    """A CTA that pulls rests after every few copies, for as long as anybody else can go on: with most seeds this failed, too."""
    reduced = AllReduce(
        rows=1024, n=256, k=8, dtype="bfloat16", transposed=False, split=mk.Split(intra_comm=1, inter_send=1, inter_reduce=1),
        algorithm="two_shot",
    )  # fmt: skip
    gathered = AllGatherGemm(rows=112, n=64, k=1024, dtype="bfloat16", transposed=False)
    late = ((0, 0, 16, 1_000_000),)
    steps = [
        Step(i, call, ("heap", "ordinary"), "fresh", late=late if call is reduced else ())
        for i, call in enumerate((reduced, gathered, reduced, gathered))
    ]
    for seed in range(3):
        failure = run(Program("2x2", 1, tuple(steps)), seed)
        assert failure is None, str(failure)


@pytest.mark.timeout(100)
def test_a_cta_that_rests_after_every_copy_among_thousands_of_threads_that_poll() -> None:
    """Each rest ends when nobody else can go on. Where some CTA was always stalled, that was found after minutes, if at all."""
    call = AllGatherGemm(rows=36, n=16, k=1032, dtype="float16", transposed=False, packets=1)
    steps = [Step(i, call, ("heap", "ordinary"), "fresh", late=((1, 1, 1, 10**12),)) for i in range(4)]
    failure = run(Program("1x4", 1, tuple(steps), sms=8), 1)
    assert failure is None, str(failure)


# ---- the generator


@pytest.mark.parametrize("world", WORLDS)
def test_a_seed_gives_one_program_and_its_repr_an_equal_one(world: str) -> None:
    names = {**vars(calls), "Split": mk.Split, "Program": Program, "Step": Step, "Network": Network}
    for seed in (0, 1, 77):
        program = draw(world, seed)
        assert program == draw(world, seed)
        assert eval(repr(program), names) == program
        assert str(program).count("\n") == len(program.steps) == 10
    assert draw(world, 0).steps != draw(world, 1).steps


def test_seeds_that_differ_in_their_last_bits_share_their_kernels() -> None:
    kernels = {
        step.call.kernel(program.topology, program.sms)
        for program in (draw("2x2", seed, kernels=4) for seed in range(1 << SHARED_BITS))
        for step in program.steps
    }
    assert len(kernels) <= 4


def _seeds(families: int, of_each: int) -> list[int]:
    """Programs of a family share their kernels, whose drawing is most of the work."""
    return [(family << SHARED_BITS) + number for family in range(families) for number in range(of_each)]


def test_everything_is_drawn() -> None:
    """Over many seeds every op, algorithm, layout, place, partials, split, lateness and network occurs."""
    programs = [draw(world, seed) for world in WORLDS for seed in _seeds(6, 4)]
    steps = [step for program in programs for step in program.steps]
    drawn = [step.call for step in steps]
    assert {type(call) for call in drawn} == set(calls.OPS)
    assert {call.algorithm for call in drawn if isinstance(call, AllReduce)} == {None, "one_shot", "two_shot"}
    assert {call.partials for call in drawn if isinstance(call, (AllReduce, ReduceScatter))} == {"output", "float32"}
    near = [step.call for program in programs if program.world == "1x4" for step in program.steps]
    in_packets = [call for call in near if isinstance(call, (AllReduce, ReduceScatter)) and call.is_packed(Topology(4, 4), 8)]
    assert {(call.op, call.shares > 1) for call in in_packets} == {
        (op, shared) for op in ("gemm_reduce_scatter", "gemm_allreduce") for shared in (False, True)
    }
    alone = Topology(1, 1)
    gathers = [AllGatherGemm.draw(random.Random(seed), alone, Limits(), "chunks") for seed in range(400)]
    kinds = {(call.shares > 1, call.together > 1) for call in gathers if calls.fits(call, alone, 8)}
    assert kinds == {(shared, together) for shared in (True, False) for together in (True, False)}
    assert {(call.dtype, call.transposed) for call in drawn} == {(d, t) for d in ("bfloat16", "float16") for t in (True, False)}
    assert {call.rows == 0 for call in drawn} == {call.split is None for call in drawn} == {True, False}
    assert {place for step in steps for place in step.places} == {"heap", "ordinary"}
    assert {step.out for step in steps} == {"none", "fresh", "reused", "heap"}
    assert {step.gathered for step in steps if isinstance(step.call, AllGatherGemm)} == {"none", "heap", "ordinary"}
    assert {name for step in steps for name in step.padded} == {"a", "b", "out"}
    assert {cta for step in steps for _, cta, _, _ in step.late} == set(range(-1, 8))
    assert {len(step.late) for step in steps} == {0, 1, 2, 4, 6}
    assert {turns >= FOREVER for step in steps for *_, turns in step.late} == {True, False}
    assert {step.asleep is None for step in steps} == {True, False}
    assert {step.barrier for step in steps} == {program.prepared for program in programs} == {True, False}
    assert {program.network.host_signals for program in programs} == {program.network.sms for program in programs} == {True, False}
    assert all(program.network == Network() for program in programs if program.world == "1x4")
    assert any(one == next_ for program in programs for one, next_ in itertools.pairwise(drawn))
    assert {step.max_rows > 0 for step in steps} == {step.planned for step in steps} == {True, False}
    assert sum(not step.planned for step in steps) > len(steps) / 20, "calls of a size that no plan was made with"
    again = [
        one.call for program in programs for before, one in itertools.pairwise(program.steps) if one.call.sized(1) == before.call.sized(1)
    ]
    assert len({call.rows for call in again}) > len(again) / 4


def test_workspaces_overlap_at_random_places() -> None:
    """Two calls that follow each other are as large as each other within a factor of two, now one larger and now the other."""
    ratios = []
    for seed in _seeds(8, 5):
        program = draw("2x2", seed)
        sizes = [step.call.workspace(program.topology, program.sms) for step in program.steps]
        ratios += [b / a for a, b in itertools.pairwise(sizes) if a and b and a != b]
    assert sum(0.5 <= ratio <= 1 for ratio in ratios) > len(ratios) / 8
    assert sum(1 <= ratio <= 2 for ratio in ratios) > len(ratios) / 8


def test_a_split_that_does_not_fit_is_not_drawn() -> None:
    for world in ("1x2", *WORLDS):
        for seed in _seeds(2, 4):
            program = draw(world, seed, limits=Limits(rows=64))
            assert all(calls.fits(step.call, program.topology, program.sms) for step in program.steps)


@pytest.mark.parametrize("world", ["1x2", "1x8", "2x1", *WORLDS])
def test_a_split_that_does_not_fit_is_not_planned(world: str) -> None:
    """Neither for the step itself, nor for any of the rows that it plans for: of a device with as many SMs as an H100 has, too."""
    planned = 0
    for sms in (6, 132):
        for seed in _seeds(2, 2):
            program = draw(world, seed, sms=sms)
            for step in program.steps:
                ends = [step.call.sized(rows) for rows in classes(step.max_rows)] if step.max_rows else []
                planned += len(ends) > 0
                assert all(calls.fits(call, program.topology, sms) for call in (step.call, *ends)), step
    assert planned
    assert not calls.fits(AllGatherGemm(rows=1, n=8, k=8, dtype="float16", transposed=False, split=mk.Split(compute=9)), Topology(2, 2), 8)


# ---- the runner


class Wrong(AllGatherGemm):
    """Overwrites an element of its result on rank 1."""

    def run(self, arrays, **where):  # type: ignore[no-untyped-def]
        c = super().run(arrays, **where)
        if where["world"].rank == 1 and c.size:
            c[0, 3] += 1.0
        return c


def _program(*steps: Step) -> Program:
    return Program("1x2", 3, steps, sms=4)


def _step(number: int, call: calls.Call, **more: object) -> Step:
    return Step(number, call, ("heap", "ordinary"), **more)  # type: ignore[arg-type]


RIGHT = AllGatherGemm(rows=5, n=8, k=16, dtype="bfloat16", transposed=False)


def test_a_wrong_element_is_found_and_the_program_made_shorter() -> None:
    wrong = Wrong(rows=5, n=8, k=16, dtype="bfloat16", transposed=False)
    program = _program(
        _step(0, RIGHT), _step(1, RIGHT, late=((0, -1, 0, 5000),)), _step(2, wrong, out="reused", barrier=True), _step(3, RIGHT)
    )
    failure = run(program, 1)
    assert failure is not None
    assert (failure.kind, failure.step) == ("wrong", 2)
    assert "rank 1: " in failure.text
    found = shorter(failure)
    assert found.program == dataclasses.replace(program, steps=(_step(2, wrong),))
    assert "program seed 3, scheduler seed 1" in str(found)


def test_an_element_that_nobody_writes_is_found() -> None:
    class Lazy(AllGatherGemm):
        def run(self, arrays, **where):  # type: ignore[no-untyped-def]
            c = super().run(arrays, **where | {"out": None})
            where["out"][:-1] = c[:-1]
            return where["out"]

    failure = run(_program(_step(0, Lazy(rows=5, n=8, k=16, dtype="bfloat16", transposed=False), out="reused")), 1)
    assert failure is not None
    assert "8 of 80 elements are not finite, in rows 9-9, columns 0-7" in failure.text


def test_rows_that_are_not_kept_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = _step(0, AllGatherGemm(rows=5, n=8, k=64, dtype="bfloat16", transposed=False, packets=2), gathered="heap")
    assert run(_program(step), 1) is None
    monkeypatch.setattr("mkernel.ops.allgather_gemm._Keeping.keeps", 0)
    failure = run(_program(step), 1)
    assert failure is not None
    assert "other rows are gathered than were sent in 320 of 640 elements" in failure.text


def test_the_script_runs_the_program_again() -> None:
    program = _program(_step(0, RIGHT))
    source = script(Failure(program, 7, "wrong", 0, "text"))
    with pytest.raises(SystemExit) as ended:
        exec(compile(source, "script", "exec"), {})
    assert ended.value.code is False  # nothing is wrong with it
