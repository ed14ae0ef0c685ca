"""Options of ``init``: an explicit value, else the environment's, else the default; and ranks that came with different ones."""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.errors import ArgumentError, MismatchError
from mkernel.jit import headers
from mkernel.runtime.init import open_world
from mkernel.runtime.launch import _Launch, launch
from mkernel.runtime.opening.infos import sources
from mkernel.runtime.opening.memory import HEAP_BYTES
from mkernel.runtime.opening.placement import require_same_build
from mkernel.runtime.options import DEFAULT_ENTRY_TIMEOUT, DEFAULT_TIMEOUT, Options
from mkernel.runtime.ranks.bootstrap import ThreadGroup
from tests.runtime.fake import FakeBackend

ROOT = Path(__file__).parents[2]
# Of every option: a text for its variable, what that means, and explicit values, the option's own default among them where it has one.
VALUES: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
    "ranks_per_node": ("3", 3, (1, 2)),
    "transport": ("srd", "srd", ("rc", "emulated")),
    "heap_bytes": ("1M", 1 << 20, (HEAP_BYTES["cpu"], 512)),
    "max_sms": ("3", 3, (1, 132)),
    "batch_invariant": ("1", True, (True,)),
    "specialize": ("n,k", "n,k", ("none", "split")),
    "timeout": ("7", 7.0, (DEFAULT_TIMEOUT, 2.5)),
    "entry_timeout": ("8", 8.0, (DEFAULT_ENTRY_TIMEOUT, 2.5)),
}
OPTIONS = {field.name: field.default for field in dataclasses.fields(Options)}


def test_every_option_is_examined() -> None:
    named = {name for name in OPTIONS if f"MKERNEL_{name.upper()}" in env.ALL}
    assert VALUES.keys() == named
    assert inspect.signature(mk.init).parameters.keys() - {"comm"} == OPTIONS.keys()


@pytest.mark.parametrize("name", VALUES)
def test_open_then_environment_then_default(name: str) -> None:
    text, meaning, explicit = VALUES[name]
    left_open = inspect.signature(mk.init).parameters[name].default
    assert left_open in (None, "auto", False)
    assert getattr(Options.resolve(**{name: left_open}), name) == getattr(Options.resolve(), name) == OPTIONS[name]
    with env.override(**{f"MKERNEL_{name.upper()}": text}):
        for given in ({}, {name: left_open}, {name: None}):
            assert getattr(Options.resolve(**given), name) == meaning
        for value in explicit:
            assert getattr(Options.resolve(**{name: value}), name) == value, "an explicit value wins, the default too"


@pytest.mark.parametrize("name", ["timeout", "entry_timeout"])
@pytest.mark.parametrize("value", [True, 0, float("nan"), float("inf"), "3"])
def test_bad_seconds(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        Options.resolve(**{name: value})


def init_differently(options: list[Options], **patches: Any) -> list[BaseException]:
    """What each rank's ``init`` raises."""
    together = _Launch(lambda w: None, len(options), options[0], (), None, FakeBackend)
    open_one = open_world

    def one(bootstrap: Any, _: Options, **more: Any) -> Any:
        return open_one(bootstrap, options[bootstrap.rank], **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mkernel.runtime.launch.open_world", one)
        with pytest.raises(Exception):  # noqa: B017 -- which one is what the caller looks at
            together.run()
    return [error for _, error in sorted(together.failures, key=lambda item: item[0])]


@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_that_pass_different_options(name: str) -> None:
    """Every option; the error is the same on every rank, and names the option and the rank."""
    same = Options(target="cpu", heap_bytes=1 << 16, timeout=5.0)
    other = {"target": "auto", "transport": "emulated", "batch_invariant": True}.get(name, 1)
    errors = init_differently([same, same, dataclasses.replace(same, **{name: other})])
    assert [type(error) for error in errors] == [ArgumentError] * 3
    assert len({str(error) for error in errors}) == 1
    assert f"{name} = {other}: rank 2 differs from rank 0" in str(errors[0])


def test_ranks_with_different_kernels_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(self: ThreadGroup, rank: int, number: int, data: bytes, timeout: float) -> list[bytes]:
        return exchange(self, rank, number, data.replace(b'"version": "0', b'"version": "9') if rank == 1 else data, timeout)

    exchange = ThreadGroup.exchange
    monkeypatch.setattr(ThreadGroup, "exchange", told)
    errors = init_differently([Options(target="cpu", heap_bytes=1 << 16)] * 3)
    assert [type(error) for error in errors] == [MismatchError] * 3
    digest = headers.sources_digest()
    for error in errors:
        assert f"rank 0, 2: mkernel {mk.__version__} with kernels {digest}; rank 1: mkernel 9" in str(error)


def test_builds() -> None:
    require_same_build([("1", "a"), ("1", "a")])
    with pytest.raises(MismatchError, match="rank 0: mkernel 1 with kernels a; rank 1: mkernel 1 with kernels b"):
        require_same_build([("1", "a"), ("1", "b")])


def test_a_rank_without_kernels_does_not_leave_the_others_waiting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MKERNEL_KERNELS_SRC", str(tmp_path))
    assert "no ptx.cuh there" in sources()


def test_the_package_has_one_version() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == mk.__version__


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"timeout": 0}, "timeout"),
        ({"entry_timeout": -1.0}, "entry_timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"heap_bytes": 0}, "heap_bytes"),
        ({"heap_bytes": 1 << 46}, "heap_bytes"),  # more than a process can map of three ranks
        ({"heap_bytes": 1 << 65}, "heap_bytes"),
        ({"seed": "x"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"ranks_per_node": 2.0}, "ranks_per_node"),
        ({"ranks_per_node": 2}, "ranks_per_node"),
        ({"transport": "carrier pigeon"}, "transport"),
        ({"transport": "rc", "ranks_per_node": 1}, "transport"),
        ({"target": "tpu"}, "target"),
        ({"colour": "red"}, "init_options"),
    ],
)
def test_bad_options(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        launch(lambda w: None, ranks=3, **{"target": "cpu", **options})
    assert caught.value.argument == argument


def test_integers_of_numpy() -> None:
    found = launch(lambda w: w.size, ranks=np.int64(2), target="cpu", seed=np.uint32(7), heap_bytes=np.int64(1 << 22), max_sms=np.int8(4))
    assert found == [2, 2]


@pytest.mark.parametrize("capacity", [1, True, 10.0, "x", None, 1 << 32])
def test_bad_capacities(capacity: Any) -> None:
    def rank(world: Any) -> None:
        with pytest.raises(ArgumentError, match="capacity"), mk.trace(world, capacity=capacity):
            pass
        with pytest.raises(ArgumentError, match="world = 3: must be a World"):
            mk.trace(3)  # type: ignore[arg-type]

    launch(rank, ranks=1, target="cpu", heap_bytes=1 << 22)


@pytest.mark.parametrize("count", [0, -1, True, 2.0])
def test_bad_rank_counts(count: Any) -> None:
    with pytest.raises(ArgumentError):
        launch(lambda w: None, ranks=count, target="cpu")


def test_the_environment_completes_options() -> None:
    with env.override(MKERNEL_TIMEOUT="3", MKERNEL_HEAP_BYTES="1M", MKERNEL_RANKS_PER_NODE="2"):
        assert Options.resolve() == Options(timeout=3.0, heap_bytes=1 << 20, ranks_per_node=2)
        assert Options.resolve(timeout=4.0, heap_bytes=5).timeout == 4.0, "arguments go first"
    assert Options.resolve() == Options()
