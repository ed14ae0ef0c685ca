"""A world that fails, over a device without kernels: who hears of it, when, in which words, and what still works."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from mkernel import abi, errors
from mkernel.errors import AbortedError, ArgumentError, MismatchError, TransportError
from mkernel.runtime.launch import run
from mkernel.runtime.options import Options
from mkernel.runtime.world import World
from tests.runtime.fake import FakeBackend, FakePlan
from tests.runtime.worlds import call, ranks, surfaced, until_failed

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_rank_that_stays_away(target: str, caplog: pytest.LogCaptureFixture) -> None:
    caught: dict[int, errors.Error] = {}

    def use(w: World) -> None:
        call(w)
        w.barrier()
        if w.rank != 1:
            caught[w.rank] = surfaced(lambda: (call(w), w.barrier()))
            assert surfaced(w.check).args == caught[w.rank].args, "it stays"
            assert surfaced(lambda: w.empty(1, "int8")).args == caught[w.rank].args
            w.close()  # surfaced already: closes in silence
            assert "closed" in str(surfaced(w.check))
        else:
            caught[w.rank] = surfaced(lambda: until_failed(w))

    with caplog.at_level(logging.ERROR, "mkernel"):
        ranks(use, 3, target, entry_timeout=0.5)
    for error in caught.values():
        assert isinstance(error, errors.TimeoutError)
        assert error.record is not None
        assert (error.record.peer, error.record.epoch, error.record.role, error.record.cta) == (1, 2, "compute", 3)
        assert str(error).endswith("CTA 3 waited 0.5 s for rank 1, which never entered call 2 (null(digest 0x1234))")
    logged = [record for record in caplog.records if record.name == "mkernel"]
    assert 1 <= len(logged) <= 2, "by the ranks it happened on, once each"


def test_another_plan_in_the_same_call(target: str) -> None:
    """Both plans are known everywhere: only the entry flags can tell."""
    a, b = FakePlan(op="sum", digest=1), FakePlan(op="gemm", digest=2)
    caught = {}

    def use(w: World) -> None:
        call(w, a)
        call(w, b)
        w.barrier()
        caught[w.rank] = surfaced(lambda: (call(w, b if w.rank == 1 else a), w.barrier()))

    ranks(use, 3, target)
    for error in caught.values():
        assert isinstance(error, MismatchError)
        assert "call 3" in str(error)
        assert "gemm(digest 0x2)" in str(error)
        assert "sum(digest 0x1)" in str(error)


def test_a_new_plan_against_a_cached_one() -> None:
    caught = {}

    def use(w: World) -> None:
        call(w)
        w.barrier()
        plan = FakePlan(op="new", digest=99) if w.rank == 1 else FakePlan()
        caught[w.rank] = surfaced(lambda: (call(w, plan), w.barrier()))

    ranks(use, 3, "cuda")
    for error in caught.values():
        assert isinstance(error, MismatchError)
        assert "rank 1 asked for new(digest 0x63) after 1 calls" in str(error)
        assert "has launched null(digest 0x1234)" in str(error)


def test_late_agreement_is_no_mismatch() -> None:
    """Waiting in an agreement while others still make the calls before it is fine."""

    def use(w: World) -> None:
        call(w)
        w.barrier()
        for turn in range(20):
            call(w, delay_ns=(w.rank == turn % 3) * 2_000_000)
            call(w, FakePlan(digest=turn + 100))

    ranks(use, 3, "cuda")


def test_abort_reaches_everyone(target: str) -> None:
    caught = {}

    def use(w: World) -> None:
        w.barrier()
        if w.rank == 2:
            w.abort("the input is bad")
        caught[w.rank] = surfaced(w.barrier)
        assert w.failures._block.abort == 1, "kernels are asked to leave"
        w.close()

    ranks(use, 3, target)
    assert {type(e) for e in caught.values()} == {AbortedError}
    assert {str(e) for e in caught.values()} == {"rank 2 aborted: the input is bad"}


def test_close_reports_what_nobody_saw(target: str) -> None:
    def use(w: World) -> None:
        w.abort("unseen") if w.rank == 0 else surfaced(lambda: until_failed(w))
        if w.rank == 0:
            assert "unseen" in str(surfaced(w.close))
        w.close()
        assert w.backend.closed

    ranks(use, 2, target)


def test_leaving_with_an_exception_aborts(target: str) -> None:
    def use(w: World) -> None:
        if w.rank == 1:
            raise KeyError("mine")
        w.barrier()

    with pytest.raises(KeyError, match="mine") as caught:
        ranks(use, 3, target)
    assert caught.value.__notes__[0] == "raised on rank 1 of mk.launch"
    assert sum("AbortedError: rank 1 aborted: KeyError: 'mine'" in note for note in caught.value.__notes__) == 2


def test_the_root_cause_is_raised_though_it_comes_last() -> None:
    def use(w: World) -> None:
        if w.rank == 1:
            try:
                raise ZeroDivisionError("root")
            finally:
                w.abort("echo first")
                time.sleep(0.3)
        w.barrier()

    with pytest.raises(ZeroDivisionError, match="root"):
        ranks(use, 3)


def test_the_engine_fails(target: str) -> None:
    """A transport error on one rank is everybody's, and names the peer."""
    caught = {}

    def use(w: World) -> None:
        w.barrier()
        if w.rank == 0:
            slot = abi.Ring.from_address(w._ring.host_address).slots[0]
            slot.dst_rank, slot.bytes = 3, 1 << 40
            slot.ticket = 1
        if target == "cpu" and w.rank == 0:
            time.sleep(0.2)
        caught[w.rank] = surfaced(lambda: until_failed(w))

    ranks(use, 4, target, ranks_per_node=2)
    assert {type(e) for e in caught.values()} == {TransportError}
    assert {e.peer for e in caught.values()} == {3}  # type: ignore[attr-defined]


def test_init_fails_on_all_ranks_alike() -> None:
    class Broken(FakeBackend):
        def segment(self, *args: Any, **options: Any) -> Any:
            if self.rank == 1:
                raise OSError("no memory")
            return super().segment(*args, **options)

    told = "heap_bytes = 65536: cannot be had: no memory"
    with pytest.raises(ArgumentError, match=told) as caught:
        run(lambda w: None, 3, Options(target="cuda", heap_bytes=1 << 16), make_backend=Broken)
    assert sum(f"rank 1 could not open its device and memory: ArgumentError: {told}" in note for note in caught.value.__notes__) == 2
