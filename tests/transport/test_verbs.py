"""The verbs boundary without cards: which errors it raises, its numbers, and that pyverbs is needed nowhere else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest

from mkernel.errors import TransportError
from mkernel.transport import Card, rdma, verbs
from mkernel.transport.verbs import pyverbs as boundary


@pytest.fixture
def pyverbs(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A package of that name with its exceptions and nothing else."""
    package, errors = types.ModuleType("pyverbs"), types.ModuleType("pyverbs.pyverbs_error")
    package.__path__ = []

    class PyverbsError(Exception):
        pass

    class PyverbsRDMAError(PyverbsError):
        def __init__(self, text: str, error_code: int = -1) -> None:
            super().__init__(text)
            self.error_code = error_code

    errors.PyverbsError, errors.PyverbsRDMAError = PyverbsError, PyverbsRDMAError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyverbs", package)
    monkeypatch.setitem(sys.modules, "pyverbs.pyverbs_error", errors)
    boundary._enums.cache_clear()
    yield package
    boundary._enums.cache_clear()


@pytest.mark.parametrize("name", ["enums", "libibverbs_enums"])
def test_both_names_of_the_enums(pyverbs: types.ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = types.ModuleType(f"pyverbs.{name}")
    monkeypatch.setitem(sys.modules, f"pyverbs.{name}", module)
    assert boundary._enums() is module


@pytest.mark.parametrize(
    ("code", "status", "expected"), [(errno.ENOMEM, "ENOMEM", errno.ENOMEM), (-errno.EINVAL, "EINVAL", errno.EINVAL), (-1, "no errno", 0)]
)
def test_errors_keep_their_number(pyverbs: types.ModuleType, code: int, status: str, expected: int) -> None:
    from pyverbs.pyverbs_error import PyverbsRDMAError

    with pytest.raises(verbs.VerbsError) as caught, boundary._verb("opening x"):
        raise PyverbsRDMAError("Failed to open", code)
    assert (caught.value.op, caught.value.code, caught.value.status) == ("opening x", expected, status)
    assert str(caught.value).startswith(f"opening x: {status}")


def test_errors_without_number_keep_their_text(pyverbs: types.ModuleType) -> None:
    from pyverbs.pyverbs_error import PyverbsError

    with pytest.raises(verbs.VerbsError, match="no such device"), boundary._verb("opening x"):
        raise PyverbsError("no such device")
    with pytest.raises(ZeroDivisionError), boundary._verb("opening x"):
        raise ZeroDivisionError


def test_without_pyverbs_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(TransportError, match=r"install pyverbs: docs/transports\.md"):
        rdma.open_card(Card("mlx5_0", 1, 0), 3)


def test_the_boundary_imports_nothing_of_pyverbs() -> None:
    program = "import sys, mkernel.transport.rc, mkernel.transport.srd; sys.exit('pyverbs' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_tables_are_complete() -> None:
    assert list(verbs.STATUSES) == list(range(24))
    assert list(verbs.EVENTS) == list(range(20))
    assert all(
        name.startswith("IBV_WC_") and meaning and (remedy or not number) for number, (name, meaning, remedy) in verbs.STATUSES.items()
    )
    for name, fatal, meaning, remedy in verbs.EVENTS.values():
        assert name.startswith("IBV_EVENT_")
        assert meaning
        assert bool(remedy) == fatal
    assert verbs.STATUSES[verbs.FLUSHED][0] == "IBV_WC_WR_FLUSH_ERR"
    assert not hasattr(verbs.Access, "relaxed_ordering"), "a signal could overtake its data on the way to memory"


def test_access_has_the_numbers_of_ibv_access_flags() -> None:
    access = verbs.Access
    assert (access.local_write, access.remote_write, access.remote_read, access.remote_atomic) == (1, 2, 4, 8)


@pytest.mark.parametrize(("field", "least", "most"), [("timeout", 1, 31), ("retry_count", 0, 6), ("rnr_retry", 0, 6), ("rnr_timer", 1, 31)])
def test_retries_are_bounded(field: str, least: int, most: int) -> None:
    """7 would mean forever in the counts, 0 in the times."""
    for good in (least, most):
        assert getattr(verbs.RetryPolicy(**{field: good}), field) == good
    for bad in (least - 1, most + 1):
        with pytest.raises(ValueError, match="unbounded"):
            verbs.RetryPolicy(**{field: bad})


@pytest.mark.parametrize(
    ("code", "text", "told"),
    [
        (errno.ENOMEM, "", f"posting: ENOMEM ({os.strerror(errno.ENOMEM)})"),
        (errno.ENOMEM, "the queue is full", "posting: ENOMEM (the queue is full)"),
        (0, "no such device", "posting: no errno (no such device)"),
        (0, "", "posting: no errno"),
        (errno.EOPNOTSUPP, "unsupported", "posting: EOPNOTSUPP (unsupported)"),
        (12345, "odd", "posting: errno 12345 (odd)"),
    ],
)
def test_an_error_tells_all_that_is_known(code: int, text: str, told: str) -> None:
    assert str(verbs.VerbsError("posting", code, text)) == told


@pytest.mark.parametrize(
    ("infiniband", "demanded", "subnet", "by_gid"),
    [(True, False, "fe80", False), (True, True, "fe80", True), (True, False, "fec0", True), (False, False, "fe80", True)],
)
def test_packets_have_a_global_route_where_they_need_one(infiniband: bool, demanded: bool, subnet: str, by_gid: bool) -> None:
    """Between subnets, outside InfiniBand, and where the port demands it (IBV_QPF_GRH_REQUIRED), e.g. with virtual functions."""
    gid = "fe80:0000:0000:0000:0000:0000:0000:0001"
    port = verbs.Port("mlx5_0", 1, 0, gid, 7, infiniband, 5, global_route=demanded)
    assert port.routes_by_gid(gid.replace("fe80", subnet)) == by_gid
