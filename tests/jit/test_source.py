"""The generated source: short, complete, the same for both targets."""

from __future__ import annotations

import dataclasses
import re

import pytest

from mkernel.jit.source import ENTRY, render
from mkernel.jit.spec import KernelSpec

SPEC = KernelSpec("allgather_gemm", (("kN", 4096), ("kK", 8192)), threads=384, shared_bytes=200_000, parameter_bytes=704)


def constants(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)\s*=\s*(\d+)u", text)}


def test_constants_and_launch_figures_are_there() -> None:
    expected = {"kN": 4096, "kK": 8192, "kThreads": 384, "kSharedBytes": 200_000, "kParameterBytes": 704}
    assert constants(render(SPEC)) == expected


def test_the_template_is_included_after_its_config() -> None:
    text = render(SPEC)
    assert text.index('"ptx.cuh"') < text.index("struct Config") < text.index('"allgather_gemm.cuh"')


@pytest.mark.parametrize("count", [0, 1, 30])
def test_at_most_fifteen_lines(count: int) -> None:
    spec = dataclasses.replace(SPEC, constants=tuple((f"kSomeConstant{i}", 2**32 - 1 - i) for i in range(count)))
    lines = render(spec).splitlines()
    assert len(lines) <= 15
    assert max(map(len, lines)) <= 140
    assert len(constants(render(spec))) == count + 3


def test_a_constant_may_repeat_a_launch_figure() -> None:
    spec = dataclasses.replace(SPEC, constants=(("kThreads", 384),))
    assert render(spec).count("kThreads") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"constants": (("kN", -1),)},
        {"constants": (("kN", 2**32),)},
        {"constants": (("k N", 1),)},
        {"constants": (("kN", 1), ("kN", 2))},
        {"constants": (("kThreads", 128),)},
        {"name": "../etc"},
    ],
)
def test_what_is_no_source_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must|both"):
        render(dataclasses.replace(SPEC, **changes))  # type: ignore[arg-type]


def test_entry_name_is_the_macros() -> None:
    from mkernel.jit.headers import kernels_src

    assert ENTRY in (kernels_src() / "ptx.cuh").read_text()
