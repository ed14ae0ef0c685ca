"""What a PreparedPlan says of itself, and what ``mk.plan`` says that it cannot do."""

from __future__ import annotations

import pydoc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError

BYTES = 1 << 20


def operands(rows: int) -> tuple[Any, Any]:
    return np.ones((rows, 136), np.float16), np.ones((136, 264), np.float16)


def launch(use: Callable[[mk.World], Any], ranks: int = 2) -> list[Any]:
    return mk.launch(use, ranks=ranks, target="cpu", heap_bytes=BYTES, timeout=20.0, entry_timeout=20.0)


class Bare:
    """An array that says by DLPack alone what it is: no shape, no length."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_help_of_plan_is_of_the_function() -> None:
    text = pydoc.plain(pydoc.render_doc(mk.plan))
    signature, found, _ = text.partition("Agree on a problem")
    assert found
    assert "max_rows: " in signature


def test_it_reads_well() -> None:
    def use(world: mk.World) -> tuple[str, str]:
        a, b = operands(96)
        return repr(mk.plan("allgather_gemm", a, b, max_rows=200)), repr(mk.plan("allgather_gemm", a, b))

    for limited, open_ended in launch(use):
        assert "up to 200 rows" in limited
        assert "any number of rows" in open_ended
        assert all("a (96, 136) per rank, b (136, 264)" in text and "\n" not in text for text in (limited, open_ended))


@pytest.mark.parametrize("rows", [-1, 2.5, "many", True])
def test_a_number_of_rows_that_is_none_is_refused(rows: Any) -> None:
    def use(world: mk.World) -> None:
        plan = mk.plan("allgather_gemm", *operands(96), max_rows=200)
        for method in (plan.plan, plan.split, plan.describe):
            with pytest.raises(ArgumentError, match="rows"):
                method(rows)
            with pytest.raises(ArgumentError, match="at most 200"):
                method(201)

    launch(use)


def test_run_looks_at_rows_and_leaves_the_rest_to_the_op() -> None:
    def use(world: mk.World) -> None:
        plan, b = mk.plan("allgather_gemm", *operands(96), max_rows=200), operands(1)[1]
        assert (np.asarray(plan.run(Bare(operands(7)[0]), b)) == 136).all()
        with pytest.raises(ArgumentError, match="at most 200"):
            plan.run(Bare(operands(201)[0]), b)
        for wrong in (5, np.float16(1)):
            with pytest.raises(ArgumentError):
                plan.run(wrong, b)

    launch(use)


def test_a_heap_that_is_too_small_says_what_all_sizes_need() -> None:
    """Not only the first that does not fit: a heap of the bytes that are named is enough."""
    rows = 40_000

    def use(world: mk.World) -> int:
        with pytest.raises(ArgumentError, match="heap_bytes") as caught:
            mk.plan("allgather_gemm", *operands(8), max_rows=rows)
        return int(str(caught.value).rpartition("heap_bytes=")[2].rstrip(")"))

    needed = set(launch(use))
    assert len(needed) == 1
    assert 2 * rows * 136 * 2 <= needed.pop() < 2.2 * rows * 136 * 2
