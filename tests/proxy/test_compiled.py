"""The compiled engine's boundary: the mirrors of its structs, its pace, when it is used, and how queue pairs of pyverbs are recognized."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import re
import struct
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from mkernel.abi import RING_SLOTS
from mkernel.errors import ArgumentError
from mkernel.proxy import compiled
from mkernel.proxy import pace as pace_module
from mkernel.proxy.compiled import CompiledEngine, CompiledPace, library, open_engine
from mkernel.proxy.engine import Engine
from mkernel.proxy.pace import GRAPH_SPIN_NS, LONG_NAP_NS, NAP_NS, SPIN_NS, Pace
from mkernel.proxy.ring import RingReader
from mkernel.transport import compiled as structs
from mkernel.transport import compiled_side
from mkernel.transport.null import NullSide, NullTransport
from mkernel.transport.striped_compiled import MOST_LINKS
from mkernel.transport.verbs import Handles, handles
from tests.transport.harness import Producer
from tests.transport.standin import Mood
from tests.transport.standin_calls import Calls
from tests.transport.striped_networks import Cards

INTERFACE = Path(__file__).parents[2] / "kernels_src" / "proxy" / "interface.hpp"


# ---- mirrors
def declared() -> dict[str, list[str]]:
    """The fields of the header's structs, all of which are 64-bit words but for an array of structs."""
    text = re.sub(r"//.*", "", INTERFACE.read_text())
    found = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        fields = re.findall(r"(\w+) (\w+)(\[\w+\])?;", body)
        assert {kind for kind, _, array in fields if not array} <= {"uint64_t"}, name
        found[name] = [field for _, field, _ in fields]
    return found


def test_mirrors() -> None:
    mirrors = {kind.__name__: kind for kind in (structs.Target, structs.Setup, structs.Failed, structs.Report)}
    mirrors["Pace"] = CompiledPace
    assert {name: [field[0] for field in kind._fields_] for name, kind in mirrors.items()} == declared()


@pytest.mark.parametrize(
    ("name", "mirror"), [("Kind", structs.Kind), ("Signal", structs.Signal), ("Trouble", structs.Trouble), ("Rule", structs.Rule)]
)
def test_numbers(name: str, mirror: type[structs.Kind]) -> None:
    text = re.sub(r"//.*", "", INTERFACE.read_text())
    body = re.findall(rf"enum {name} : \w+ \{{(.*?)\}}", text, re.DOTALL)[0]
    there = {re.sub("(?<!^)([A-Z])", r"_\1", word).lower(): int(number) for word, number in re.findall(r"k(\w+) = (\d+)", body)}
    assert {{"write": "plain"}.get(member.name, member.name): member.value for member in mirror} == there


# ---- pace
@pytest.mark.parametrize("follows", [True, False])
def test_both_engines_nap_alike(follows: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    now, launching, captured = [10**12], [False], [False]
    monkeypatch.setattr(pace_module, "time", types.SimpleNamespace(monotonic_ns=lambda: now[0]))
    spin_ns = int(rng.integers(3 * SPIN_NS))
    python = Pace((lambda: launching[0]) if follows else None, lambda: captured[0], spin_ns)
    other = CompiledPace.of(python)
    seen = set()
    for _ in range(3000):
        now[0] += int(10 ** rng.uniform(1, 9.5))
        launching[0], captured[0] = bool(rng.integers(2)), bool(rng.integers(2))
        moved = rng.random() < 0.1
        expected = python.nap(moved)
        assert library().mkp_nap(ctypes.byref(other), moved, now[0], launching[0], captured[0]) == expected
        seen.add(expected)
    assert {0, LONG_NAP_NS if follows else NAP_NS} <= seen
    assert python.graph_spin_ns == other.graph_spin_ns == GRAPH_SPIN_NS


# ---- credits and commands, beside the engine in Python
@pytest.mark.parametrize("kind", ["python", "compiled"])
def test_bursts_of_any_length(kind: str, rng: np.random.Generator) -> None:
    producer, transport = Producer(), NullTransport()
    ring = RingReader(producer.buffer)
    engine = Engine(ring, transport) if kind == "python" else CompiledEngine(ring, transport, NullSide(transport))
    with engine:
        assert not engine.step()
        assert engine.next_event_ns() is None
        while producer.head < 20 * RING_SLOTS:
            for _ in range(rng.integers(1, RING_SLOTS + 1)):
                producer.issue(0, 1, 0, 0, 8, 0, producer.head + 1)
            assert engine.next_event_ns() == 0
            steps = 0
            while engine.step():
                steps += 1
            assert producer.completed == producer.head
            assert steps >= 1
    assert not engine.step()
    assert engine.next_event_ns() is None


# ---- which engine runs
def kind_of(name: str) -> type[Engine]:
    transport = NullTransport()
    with open_engine(name, RingReader(Producer().buffer), transport) as engine:
        return type(engine)


def test_the_user_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, kind in (("auto", CompiledEngine), ("compiled", CompiledEngine), ("python", Engine)):
        monkeypatch.setenv("MKERNEL_ENGINE", value)
        assert kind_of("null") is kind


def test_without_a_compiler_python_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("MKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MKERNEL_NO_COMPILE", "1")
    monkeypatch.setattr(compiled, "library", library.__wrapped__)
    with caplog.at_level(logging.INFO, "mkernel"):
        assert kind_of("null") is Engine
    assert "engine runs in Python" in caplog.text
    monkeypatch.setenv("MKERNEL_ENGINE", "compiled")
    with pytest.raises(ArgumentError, match="MKERNEL_NO_COMPILE"):
        kind_of("null")


def test_a_transport_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_of("emulated") is Engine
    monkeypatch.setenv("MKERNEL_ENGINE", "compiled")
    with pytest.raises(ArgumentError, match="does not know transport emulated"):
        kind_of("emulated")


def test_several_cards() -> None:
    with Cards(ranks=2, compiled=True) as network, open_engine("rc", RingReader(Producer().buffer), network.transports[0]) as engine:
        assert type(engine) is CompiledEngine
    with Cards(ranks=2, moods=(Mood(),) * (MOST_LINKS + 1)) as network:
        for fabric in network.fabrics:
            fabric.calls = Calls(fabric)
        with pytest.raises(structs.UnfitError, match="16 cards at most"):
            compiled_side("rc", network.transports[0])


# ---- queue pairs of pyverbs
def structures(number: int = 77, kind: int = 2, *, alien: int = -1) -> tuple[Handles, ctypes.Array[ctypes.c_uint64], list[object]]:
    """A queue pair in memory: what is to be found, its structure, and all that must live. ``alien``: a part of another context."""
    operations = (ctypes.c_uint64 * 33)(*range(1000, 1033))
    context, other = ctypes.addressof(operations), ctypes.addressof((ctypes.c_uint64 * 1)())
    parts = [(ctypes.c_uint64 * 2)(other if place == alien else context, 5) for place in range(3)]
    domain, sends, arrivals = map(ctypes.addressof, parts)
    words = struct.unpack("=8Q", struct.pack("=6Q4I", context, 0, domain, sends, arrivals, 0, 3, number, 1, kind))
    pair = (ctypes.c_uint64 * 8)(*words)
    # The functions' places in struct ibv_context: its device, and 25, 26 and 11 functions.
    found = Handles(ctypes.addressof(pair), sends, arrivals, 1026, 1027, 1012)
    return found, pair, [operations, parts]


@contextlib.contextmanager
def held_by(words: list[int]) -> Iterator[object]:
    """An object of Python whose own memory holds these words, until Python, or its garbage collector, would take them for objects."""
    kind = type("Holder", (), {"__slots__": [f"word{place}" for place in range(len(words))]})
    thing: object = kind()
    collects = gc.isenabled()
    gc.disable()
    (ctypes.c_uint64 * len(words)).from_address(id(thing) + object.__basicsize__)[:] = words
    try:
        yield thing
    finally:
        ctypes.memset(id(thing) + object.__basicsize__, 0, type(thing).__basicsize__ - object.__basicsize__)
        if collects:
            gc.enable()


def find(words: list[int], number: int = 77, kind: Literal["RC", "SRD"] = "RC") -> Handles | None:
    with held_by(words) as thing:
        return handles.find(thing, number, kind)


def find_route(words: list[int], pair: Handles) -> int | None:
    with held_by(words) as thing:
        return handles.find_route(thing, pair)


def test_a_queue_pair_is_recognized(rng: np.random.Generator) -> None:
    expected, pair, alive = structures()
    address = ctypes.addressof(pair)
    noise = [0, 1, 8, 4096, (1 << 47) - 8, 1 << 63, *rng.integers(1 << 48, size=4, dtype=np.uint64).tolist()]
    assert find([*noise, address]) == expected
    assert find([address, address, *noise]) == expected, "a QPEx has the address twice"
    assert find(noise) is None
    assert find([address], 78) is None, "another number"
    assert alive


def test_a_queue_pair_of_srd_is_recognized() -> None:
    expected, pair, alive = structures(kind=0xFF)  # IBV_QPT_DRIVER
    assert find([ctypes.addressof(pair)], kind="SRD") == expected
    assert find([ctypes.addressof(pair)]) is None, "no RC queue pair"
    assert alive


def test_an_address_handle_is_recognized(rng: np.random.Generator) -> None:
    """Its structure begins with the context and the protection domain."""
    pair, words, alive = structures(kind=0xFF)
    context, _, domain = words[:3]
    routes = [(ctypes.c_uint64 * 3)(*start, 9) for start in ((context, domain), (context, domain ^ 8), (domain, domain), (context, domain))]
    mine, of_another_domain, of_another_context, also_mine = map(ctypes.addressof, routes)
    noise = [0, 1, 8, (1 << 47) - 8, 1 << 63, *rng.integers(1 << 48, size=4, dtype=np.uint64).tolist()]
    assert find_route([*noise, domain, mine, of_another_domain, of_another_context, context], pair) == mine
    assert find_route([*noise, of_another_domain, of_another_context], pair) is None
    assert find_route([mine, also_mine], pair) is None, "two that fit"
    assert alive


@pytest.mark.parametrize("change", [{"kind": 3}, {"alien": 0}, {"alien": 1}, {"alien": 2}])
def test_what_only_looks_like_a_queue_pair(change: dict[str, int]) -> None:
    _, pair, alive = structures(**change)
    assert find([ctypes.addressof(pair)]) is None
    assert alive


def test_two_that_fit_are_none() -> None:
    _, pair, alive = structures()
    _, other, also = structures()
    assert find([ctypes.addressof(pair), ctypes.addressof(other)]) is None
    assert alive
    assert also
