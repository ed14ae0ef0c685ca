"""One Op object per op, registered once: every table and command reads it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import mkernel as mk
from mkernel.bench.cases import ops
from mkernel.errors import ArgumentError
from mkernel.ops.op import BUILT_IN, Op, find, names, register

README = Path(__file__).parents[2] / "README.md"


def test_every_op_is_a_public_function_of_its_arguments() -> None:
    assert names() == BUILT_IN
    for name in BUILT_IN:
        op, parameters = find(name), inspect.signature(getattr(mk, name)).parameters
        assert name in mk.__all__
        assert op.name == name
        arguments = op.arguments()
        assert {*arguments} <= parameters.keys()
        required = [argument for argument in arguments if argument not in op.optional]
        assert [*parameters][: len(required)] == required
        assert {*parameters} - {*arguments, "routing", "gathered"} == {"world", "out", "split", "stream", *op.options}
        assert {option: parameters[option].default for option in op.optional} == dict.fromkeys(op.optional)
        assert {option: parameters[option].default for option in op.options} == dict(op.options)
        keywords = [parameter for parameter in parameters.values() if parameter.kind is parameter.KEYWORD_ONLY]
        assert all(parameter.default is None for parameter in keywords if parameter.name not in op.options)


def test_readme_has_a_row_of_each() -> None:
    lines = README.read_text().splitlines()
    first = lines.index(find(BUILT_IN[0]).row())
    assert lines[first : first + len(BUILT_IN) + 1] == [*(find(name).row() for name in BUILT_IN), ""]


def test_every_op_is_measured_and_shown() -> None:
    for name in (name for name in BUILT_IN if find(name).bench):
        bench = ops()[name]
        assert bench.name == name
        assert set(bench.options) <= {*find(name).options, "b"}, "the latter is how an operand lies"
        assert all(bench.demo_sizes(target, 4) for target in ("cpu", "cuda"))


def test_what_is_no_op_is_an_error() -> None:
    for name in ("moe", "", None, 3, ["allgather_gemm"]):
        with pytest.raises((ArgumentError, TypeError)):
            find(name)
    with pytest.raises(ArgumentError, match="must be one of allgather_gemm, "):
        find("moe")


def test_a_name_is_given_once() -> None:
    class Another(type(find("allgather_gemm"))):  # type: ignore[misc]
        pass

    found: Op[Any] = find("allgather_gemm")
    assert register(type(found)()) is found, "a module that is imported again"
    with pytest.raises(ArgumentError, match="is the name of mkernel"):
        register(Another())


def test_unknown_options_are_told_as_python_does() -> None:
    with pytest.raises(TypeError, match=r"gemm_allreduce\(\) got an unexpected keyword argument 'sum'"):
        find("gemm_allreduce").option_values({"sum": 1, "partials": "float32"})
    assert find("gemm_allreduce").option_values({"algorithm": "one_shot"}) == ("output", "one_shot")


def test_operands_at_the_end_may_be_left_out_where_the_op_says_so() -> None:
    for op in map(find, BUILT_IN):
        required = [operand for operand in op.operands if operand not in op.optional]
        assert op.all_operands(op.operands) == op.operands
        shortest = op.all_operands(op.operands[: len(required)])
        assert shortest == (*required, *[None] * len(op.optional)), "those that may be left out come last"
        for number in (len(required) - 1, len(op.operands) + 1):
            with pytest.raises(ArgumentError, match=rf"{op.name} takes {len(op.operands)}: "):
                op.all_operands(range(number))
