"""Which fields are compiled into a kernel: how they are named, and that nothing else of a schedule is."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from mkernel import env
from mkernel.planner import allgather_gemm, reduce
from mkernel.planner.gemm import shift_of
from mkernel.planner.row_classes import span
from mkernel.planner.specialize import ALL, DYNAMIC, FIELDS, Specialized, parse
from mkernel.planner.split import Split
from mkernel.planner.topology import Topology

_SMS = 132
_ROWS_OF_EACH = 8  # N and K


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        ("all", FIELDS),
        ("none", ()),
        ("n", ("n",)),
        ("split, k", ("k", "split")),
        (("n", "k"), ("n", "k")),
        ((), ()),
        (frozenset(FIELDS), FIELDS),
    ],
)
def test_names(wanted: Any, fields: tuple[str, ...]) -> None:
    assert parse(wanted) == frozenset(fields)
    assert parse(str(parse(wanted))) == parse(wanted)


@pytest.mark.parametrize("wanted", ["", "m", "n,", "all,n", ("all",), "N", ["k", "rows"]])
def test_there_is_no_such_field(wanted: Any) -> None:
    with pytest.raises(ValueError, match="must be default, all, none, or of n, k, split"):
        parse(wanted)


def test_the_environment_says_what_is_meant_by_nothing() -> None:
    with env.override(MKERNEL_SPECIALIZE=None):
        assert parse(None) == parse("default") == ALL
        assert parse(None, Specialized(["k"])) == {"k"}
    with env.override(MKERNEL_SPECIALIZE="k, split"):
        assert parse(None) == {"k", "split"}
        assert parse("all") == ALL


def test_the_name_is_the_same_in_every_process() -> None:
    """Digests are of it, and ranks compare them."""
    program = "from mkernel.planner.specialize import ALL; print(repr(ALL))"
    said = {
        subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in "0123"
    }
    assert said == {f"{ALL!r}\n".encode()}
    assert repr(Specialized(["split", "n"])) == "Specialized(['n', 'split'])"


# ---- kernels over all sizes


def random_plans(rng: np.random.Generator, op: str, topology: Topology, specialize: str, count: int = 400, **same: Any) -> list[Any]:
    """Plans of many rows, some extents and some splits. Most of the work is what each N and K have to be looked at first."""
    plans = []
    for number in range(count):
        rows = int(2 ** rng.uniform(0, 15))
        if number % _ROWS_OF_EACH == 0:
            n, k = (int(x) * 8 for x in 2 ** rng.uniform(0, 11, 2))
            n, k = same.get("n", n), same.get("k", k)
        split = None if rng.random() < 0.5 else Split(compute=int(rng.integers(1, 100)))
        if op == allgather_gemm.OP:
            problem = allgather_gemm.AllGatherGemmProblem(topology, n, k, "bfloat16", True)
            plans.append(allgather_gemm.make_plan(problem, rows, _SMS, split, specialize=specialize))
        else:
            problem = reduce.ReduceProblem(op, topology, n, k, "bfloat16", True)
            plans.append(reduce.make_plan(problem, rows, _SMS, split, specialize=specialize))
    return plans


@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(2, 2), Topology(4, 4), Topology(4, 2), Topology(4, 1)], ids=str)
@pytest.mark.parametrize("op", [allgather_gemm.OP, reduce.REDUCE_SCATTER, reduce.ALLREDUCE])
def test_few_kernels_serve_all_sizes(rng: np.random.Generator, op: str, topology: Topology) -> None:
    """At most 16 of an op with every extent at run time, and 8 of one N and K (at most four tile widths by mechanism)."""
    anything = {plan.spec for plan in random_plans(rng, op, topology, "none")}
    assert 1 < len(anything) <= 16
    n, k = (int(x) * 8 for x in 2 ** rng.uniform(0, 11, 2))
    plans = random_plans(rng, op, topology, "n,k", n=n, k=k)
    assert 1 <= len({plan.spec for plan in plans if plan.split.total == _SMS}) <= 8, "compiled in are extents, not what the rows decide"
    assert len({plan.spec for plan in plans}) <= 12, "splits may ask for another mechanism"


@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(2, 2), Topology(4, 4), Topology(4, 2), Topology(4, 1)], ids=str)
@pytest.mark.parametrize("op", [allgather_gemm.OP, reduce.REDUCE_SCATTER, reduce.ALLREDUCE])
def test_calls_of_one_class_of_rows_have_the_same_kernel(rng: np.random.Generator, op: str, topology: Topology) -> None:
    """Else a call would ask for one that was not prepared."""
    module: Any = allgather_gemm if op == allgather_gemm.OP else reduce
    for plan in random_plans(rng, op, topology, "n,k"):
        split = None if rng.random() < 0.5 else Split(compute=int(rng.integers(1, 100)))
        problem = dataclasses.replace(plan.problem, algorithm=None) if module is reduce else plan.problem
        rows = span(plan.rows)
        specs = {module.make_plan(problem, r, _SMS, split, specialize="n,k").spec for r in (rows[0], int(rng.choice(rows)), rows[-1])}
        assert len(specs) == 1, (problem, rows)


@pytest.mark.parametrize("op", [allgather_gemm.OP, reduce.REDUCE_SCATTER, reduce.ALLREDUCE])
def test_what_is_not_compiled_in_comes_with_the_call(rng: np.random.Generator, op: str) -> None:
    topology = Topology(4, 2)
    for specialize in ("all", "none", *FIELDS):
        for plan in random_plans(rng, op, topology, specialize, 16):
            constants = dict(plan.spec.constants)
            problem, split, fields = plan.problem, plan.split, plan.fields
            values = {
                "n": (("kN", problem.n),),
                "k": (("kK", problem.k),),
                "split": tuple(
                    (name, getattr(split, role))
                    for name, role in (("kIntraComm", "intra_comm"), ("kInterSend", "inter_send"), ("kInterReduce", "inter_reduce"))
                ),
            }
            for field, pairs in values.items():
                compiled = field in parse(specialize) and not (field == "k" and problem.k <= 64)  # one k step never is
                assert [constants[name] for name, _ in pairs] == [value if compiled or not value else DYNAMIC for _, value in pairs]
            given = fields
            assert given == (*(value for pairs in values.values() for _, value in pairs), split.total)


def test_pieces_and_parts_are_what_the_kernel_takes_for_granted(rng: np.random.Generator) -> None:
    """Pushing warps and the copying thread go through rows without dividing (kernels_src/ops/allgather_gemm.cuh)."""
    found = 0
    for k in 128 * rng.integers(1, 200, 200):
        for rows in (1, 1000):
            problem = allgather_gemm.AllGatherGemmProblem(Topology(4, 4), 512, int(k), "bfloat16", True)
            plan = allgather_gemm.make_plan(problem, rows, _SMS)
            if plan.parts == 1:
                continue
            found += 1
            rows, units = plan.piece_box
            of_row = plan.problem.k // plan.parts // 64
            assert plan.problem.k % (64 * plan.parts) == 0
            assert of_row % units == 0
            assert rows == 1 or units == of_row
            assert rows * units * 128 <= 16 * 1024, "of a stage of the copy ring"
            assert of_row * 128 >= 512, "a warp's stride"
    assert found > 20


def test_powers_of_two() -> None:
    assert [shift_of(1 << i) for i in range(20)] == list(range(20))
    for number in (0, -1, 3, 6, 129):
        with pytest.raises(ValueError, match="power of two"):
            shift_of(number)
