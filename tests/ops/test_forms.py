"""Calls that are as one before but for rows and addresses: bound without the checks that were made then, to the same parameters.

What does depend on rows and addresses is checked in each.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import abi
from mkernel.errors import ArgumentError
from mkernel.ops import allgather_gemm, arguments, gemm
from mkernel.ops.op import find
from mkernel.runtime.arrays.views import TensorView
from mkernel.runtime.launch import run
from mkernel.runtime.options import Options
from tests.ops.body import aligned
from tests.runtime.fake import FakeBackend

OPS = ("allgather_gemm", "gemm_reduce_scatter", "gemm_allreduce")
MOST = 600


class Device(FakeBackend):
    """Whose tensor maps say what they are of, and whose kernels do nothing."""

    def view(self, array: Any) -> TensorView:
        return super().view(array)._replace(writable=array.flags.writeable)

    def tensor_map(self, *arguments: Any, swizzled: bool = True) -> bytes:
        return hashlib.blake2b(repr((arguments, swizzled)).encode()).digest() * 2

    def launch(self, *arguments: Any) -> None: ...


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of ops whose results were checked in the general way."""
    names: list[str] = []
    check = gemm.GemmOp.check_results

    def noted(self: Any, *arguments: Any) -> None:
        names.append(self.name)
        check(self, *arguments)

    monkeypatch.setattr(gemm.GemmOp, "check_results", noted)
    return names


class Site:
    """One rank's operands of an op."""

    def __init__(self, world: Any, op: str, rng: random.Random) -> None:
        self.world, self.op = world, op
        self.of_a, self.of_c = {OPS[0]: (1, world.size), OPS[1]: (world.size, 1)}.get(op, (1, 1))
        self.dtype = rng.choice(("bfloat16", "float16"))
        self.n, self.k = 8 * rng.randint(1, 40), rng.choice((64, 256, 4096, 8 * rng.randint(1, 40)))
        self.pad = 8 * rng.randint(1, 3)
        self.transposed = rng.random() < 0.5
        self.b = self.weights()
        mk.plan(op, *self.arrays(1)[:1], self.b, world=world, max_rows=MOST)

    def arrays(self, rows: int, spread: bool = False) -> tuple[Any, Any]:
        """New a and c; ``spread``: their rows lie apart where they may."""
        pad = self.pad if spread else 0
        a = aligned((self.of_a * rows, self.k + pad * (self.op != OPS[0])), self.dtype)[:, : self.k]
        return a, aligned((self.of_c * rows, self.n + pad), self.dtype)[:, : self.n]

    def weights(self, shift: int = 0) -> Any:
        """A new b; ``shift``: elements from where it should begin."""
        memory = aligned((self.n * self.k + shift,), self.dtype)[shift:]
        return memory.reshape(self.n, self.k).T if self.transposed else memory.reshape(self.k, self.n)

    def call(self, a: Any, c: Any, b: Any = None) -> None:
        getattr(mk, self.op)(a, self.b if b is None else b, out=c, world=self.world)

    def forget(self, forms: bool) -> None:
        for known in (self.world.bound_calls, self.world.executables, *([self.world.forms] if forms else [])):
            known.clear()

    def bound(self, a: Any, c: Any, b: Any = None) -> tuple[Any, ...]:
        """Everything that a launch is told, but for its number."""
        self.forget(forms=False)  # also what was bound to arrays that lay at the same addresses
        self.call(a, c, b)
        bound = next(reversed(self.world.bound_calls.values()))
        made = bound.executable
        return (
            bytes(bound.parameters)[ctypes.sizeof(abi.World) :],
            bytes(made.header),
            made.grid,
            repr(made.plan),
            made.plan.grid,
            made.plan.describe(),
        )


def in_worlds(use: Callable[[Any], None], size: int, per_node: int) -> None:
    options = Options(target="cuda", heap_bytes=64 << 20, ranks_per_node=per_node, timeout=600.0, entry_timeout=600.0)
    run(use, size, options, make_backend=Device)


def alone(op: str, rng: random.Random, use: Callable[[Site], None]) -> None:
    in_worlds(lambda world: use(Site(world, op, rng)), 1, 1)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("size", "per_node"), [(1, 1), (2, 2), (4, 2)])
def test_parameters_are_those_of_a_call_that_was_checked(
    op: str, size: int, per_node: int, rng: np.random.Generator, checked: list[str]
) -> None:
    seed = int(rng.integers(1 << 30))

    def use(world: Any) -> None:
        drawn = random.Random(seed)
        site = Site(world, op, drawn)
        for spread in (False, True):
            site.bound(*site.arrays(2, spread))
        world.barrier()
        before = len(checked)
        world.barrier()
        spread = [site.arrays(drawn.randint(2, MOST // size), drawn.random() < 0.5) for _ in range(20)]
        calls = [(a, c, drawn.choice((site.b, site.weights()))) for a, c in spread]
        found = [site.bound(*arrays) for arrays in calls]
        world.barrier()
        assert len(checked) == before
        world.barrier()
        for arrays, of_form in zip(calls, found, strict=True):
            site.forget(forms=True)
            assert site.bound(*arrays) == of_form, [array.shape for array in arrays]
        world.barrier()
        assert len(checked) == before + 20 * size

    in_worlds(use, size, per_node)


def wrong(site: Site, rng: random.Random) -> Iterator[tuple[str, Any, Any, Any]]:
    """What is wrong, a, c and b: of the form of a good call where that does not say it."""
    rows, b = rng.randint(2, MOST), site.b
    a, c = site.arrays(rows)
    memory = aligned((rows * max(site.n, site.k) + 8 * site.n,), site.dtype)
    shifted = rng.randint(1, 7)
    yield "a", memory[shifted : rows * site.k + shifted].reshape(a.shape), c, b
    yield "b", a, c, site.weights(shifted)
    yield "out", a, memory[shifted : rows * site.n + shifted].reshape(c.shape), b
    yield "out.shape", a, site.arrays(rows + rng.choice((-1, 1)))[1], b
    start = 8 * rng.randint(0, min(rows * site.k // 8 - 1, site.n))
    yield "out", memory[: rows * site.k].reshape(a.shape), memory[start : start + rows * site.n].reshape(c.shape), b
    for other in (b, site.weights()):
        words = (other.T if site.transposed else other).reshape(-1)
        first = 8 * rng.randint(0, (site.k - 2) * site.n // 8)  # the first, or the last, bytes of b, or some in between
        yield "out", site.arrays(2)[0], words[first : first + 2 * site.n].reshape(2, site.n), other
    fixed = c[:]
    fixed.flags.writeable = False
    yield "out", a, fixed, b


@pytest.mark.parametrize("op", OPS)
def test_what_depends_on_rows_and_addresses_is_checked(op: str, rng: np.random.Generator) -> None:
    drawn = random.Random(int(rng.integers(1 << 30)))

    def use(site: Site) -> None:
        site.call(*site.arrays(drawn.randint(2, MOST)))
        assert site.world.forms
        for name, a, c, b in wrong(site, drawn):
            texts = []
            for forms in (False, True):  # with what is known, then without
                site.forget(forms)
                with pytest.raises(ArgumentError) as caught:
                    site.call(a, c, b)
                texts.append(str(caught.value))
                assert caught.value.argument == name
                if not forms:
                    site.call(*site.arrays(drawn.randint(2, MOST)))
            assert texts[0] == texts[1]
            site.call(*site.arrays(drawn.randint(2, MOST)))

    alone(op, drawn, use)


def test_rows_beyond_what_a_matrix_may_have(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(int(rng.integers(1 << 30)))

    def use(site: Site) -> None:
        site.call(*site.arrays(5))
        for module in (gemm, arguments, allgather_gemm):
            monkeypatch.setattr(module, "MOST_EXTENT", 5000)
        site.call(*site.arrays(4999))
        with pytest.raises(ArgumentError, match="every extent must be below"):
            site.call(*site.arrays(5000))

    alone(OPS[0], drawn, use)


@pytest.mark.parametrize("op", OPS)
def test_a_class_without_memory_goes_the_general_way(op: str, rng: np.random.Generator, checked: list[str]) -> None:
    """The bounds of the heap are looked at where a class of rows was not ready."""
    drawn = random.Random(int(rng.integers(1 << 30)))

    def use(world: Any) -> None:
        site = Site(world, op, drawn)
        site.call(*site.arrays(5))
        before = len(checked)
        table = next(table for table in world.table.values() if table.ready)
        table.ready.pop(find(op).class_of(40))
        site.call(*site.arrays(40))
        assert len(checked) == before + 1
        site.call(*site.arrays(39))
        assert len(checked) == before + 1

    in_worlds(use, 1, 1)


def test_few_rows_make_no_form(rng: np.random.Generator) -> None:
    """Strides of a matrix of one row say nothing: those of more rows were not checked with it."""
    drawn = random.Random(int(rng.integers(1 << 30)))

    def use(site: Site) -> None:
        for rows in (0, 1):
            site.call(*site.arrays(rows))
        assert not site.world.forms
        odd = np.lib.stride_tricks.as_strided(site.arrays(1)[0], (1, site.k), (2 * site.k + 2, 2))
        site.call(odd, site.arrays(1)[1])
        rows = np.lib.stride_tricks.as_strided(site.arrays(9)[0], (2, site.k), (2 * site.k + 2, 2))
        with pytest.raises(ArgumentError, match="stride"):
            site.call(rows, site.arrays(2)[1])

    alone(OPS[2], drawn, use)


def test_new_splits_forget_forms(rng: np.random.Generator) -> None:
    drawn = random.Random(int(rng.integers(1 << 30)))

    def use(site: Site) -> None:
        site.call(*site.arrays(5))
        assert site.world.forms
        site.world.set_tuned({})
        assert not site.world.forms

    alone(OPS[0], drawn, use)
