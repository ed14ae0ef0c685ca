"""mk.moe_combine on target cpu: drawn routings in worlds of every shape, wrong arguments, planted bugs."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.errors import ArgumentError, CompileError, Error, MismatchError
from mkernel.jit.headers import kernels_src
from mkernel.planner import moe_combine as planner
from mkernel.transport import emulated
from tests.ops import combine_body
from tests.ops.combine_body import DTYPES, KINDS, WORLDS, Drawn, program, routing_of
from tests.ops.planted_bug import Bug
from tests.sanitizer import run_sanitized

# Of each world: choices of a token, dtype, whether rows are weighted. Each is a kernel of its own.
KERNELS = {
    "1x1": (2, "bfloat16", True),
    "1x2": (8, "float16", True),
    "1x4": (3, "bfloat16", False),
    "2x2": (6, "bfloat16", True),
    "3x2": (9, "float16", True),
    "4x1": (1, "float16", True),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows are many chunks, which a slow network brings in any order, and reads again at the end."""
    monkeypatch.setattr(planner, "SCALE", planner.Scale(put_bytes=1024, copy_bytes=1024))
    faults = emulated.Faults(seed=5, delay_us=20.0, reorder_us=20.0, ack_us=20.0)
    monkeypatch.setattr(emulated, "Faults", lambda: faults)


def launch(fn: Any, world: str, *args: Any, seed: int = 0, **options: Any) -> list[Any]:
    ranks, per_node = WORLDS[world]
    defaults = {"heap_bytes": 8 << 20, "timeout": 20.0, "entry_timeout": 20.0}
    return mk.launch(fn, ranks, per_node, "cpu", args, seed=seed, **{**defaults, **options})


@pytest.mark.parametrize("world", WORLDS)
def test_every_element(rng: np.random.Generator, world: str) -> None:
    topk, dtype, weighted = KERNELS[world]
    for _ in range(2):
        drawn = Drawn.draw(rng, world, topk, dtype, weighted=weighted)
        assert launch(program, world, drawn, seed=drawn.seed) == [[]] * WORLDS[world][0], drawn


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("topk", [1, 2, 4, 8, 16])
def test_every_element_of_more_kernels(rng: np.random.Generator, world: str, topk: int) -> None:
    for dtype in DTYPES:
        for weighted in (True, False):
            drawn = Drawn.draw(rng, world, topk, dtype, weighted=weighted, calls=10)
            assert launch(program, world, drawn, seed=drawn.seed) == [[]] * WORLDS[world][0], drawn


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_routing(rng: np.random.Generator, kind: str) -> None:
    topk, dtype, weighted = KERNELS["2x2"]
    drawn = Drawn("2x2", 264, dtype, topk, 3, 17, weighted, (kind,) * 3, int(rng.integers(1 << 30)))
    assert launch(program, "2x2", drawn, seed=drawn.seed) == [[]] * 4, drawn


def repeated(world: Any, drawn: Drawn) -> list[bytes]:
    inputs = drawn.call(0)
    arrays = inputs.rows[world.rank], routing_of(inputs.known[world.rank])
    return [mk.moe_combine(*arrays, topk_weights=inputs.weights[world.rank], add=inputs.adds[world.rank]).tobytes() for _ in range(3)]


def test_the_same_bits_under_every_schedule(rng: np.random.Generator) -> None:
    topk, dtype, weighted = KERNELS["2x2"]
    drawn = Drawn("2x2", 520, dtype, topk, 3, 25, weighted, ("uniform",), int(rng.integers(1 << 30)))
    found = [launch(repeated, "2x2", drawn, seed=seed) for seed in range(2)]
    assert all(of_rank == [found[0][rank][0]] * 3 for run in found for rank, of_rank in enumerate(run)), drawn


def mixed(world: Any, drawn: Drawn) -> list[str]:
    """Between GEMMs, whose workspace lies where this op's does."""
    a, b = np.full((24, 64), world.rank + 1, np.float16), np.full((64, 16), 0.125, np.float16)
    found = []
    for number in range(len(drawn.kinds)):
        gathered = mk.allgather_gemm(a, b)
        inputs = drawn.call(number)
        arrays = inputs.rows[world.rank], routing_of(inputs.known[world.rank])
        y = mk.moe_combine(*arrays, topk_weights=inputs.weights[world.rank], add=inputs.adds[world.rank])
        reduced = mk.gemm_reduce_scatter(np.repeat(a, world.size, axis=0), b)
        if not (gathered == np.repeat(np.arange(1, world.size + 1), 24)[:, None] * 8).all():
            found.append(f"{number}: allgather_gemm")
        if not (reduced == 8 * sum(range(1, world.size + 1))).all():
            found.append(f"{number}: gemm_reduce_scatter")
        if not inputs.worst(world.rank, y) <= 1:
            found.append(f"{number}: moe_combine")
    return found


def test_between_other_ops(rng: np.random.Generator) -> None:
    topk, dtype, weighted = KERNELS["2x2"]
    drawn = Drawn.draw(rng, "2x2", topk, dtype, weighted=weighted)
    assert launch(mixed, "2x2", drawn, seed=drawn.seed) == [[]] * 4, drawn


def with_plan(world: Any, drawn: Drawn) -> tuple[int, float]:
    inputs = drawn.call(0)
    operands = inputs.rows[world.rank], *routing_of(inputs.known[world.rank]), inputs.weights[world.rank], None
    plan = mk.plan("moe_combine", *operands)
    agreed = world.problems.collectives
    y = plan.run(*operands[:-1], inputs.adds[world.rank])
    return world.problems.collectives - agreed, inputs.worst(world.rank, y)


def test_a_prepared_plan(rng: np.random.Generator) -> None:
    topk, dtype, weighted = KERNELS["1x2"]
    drawn = Drawn.draw(rng, "1x2", topk, dtype, weighted=weighted)
    for more, worst in launch(with_plan, "1x2", drawn):
        assert more == 0
        assert worst <= 1


# ---- what does not come
@pytest.mark.parametrize(
    ("put", "what"),
    [(1, "weights of rank|sums of tokens|sums of node"), (2, r"chunk \d+ of the sums of node"), (4, r"chunk \d+ of the sums of node")],
)
def test_what_the_network_loses_is_named(monkeypatch: pytest.MonkeyPatch, put: int, what: str) -> None:
    """Put 0 of a rank is its entry, 1 brings its weights, the others sums. All threads of all ranks leave.

    Who names it first is a matter of the schedule: a receiver what has not come, or the sender the put that is not complete.
    """
    faults = dataclasses.replace(emulated.Faults(), drop=frozenset({put}))
    monkeypatch.setattr(emulated, "Faults", lambda: faults)
    topk, dtype, weighted = KERNELS["2x2"]
    drawn = Drawn("2x2", 136, dtype, topk, 3, 25, weighted, ("uniform",), 1)
    with pytest.raises(mk.TimeoutError, match=rf"{what}|put {put}, to rank \d, is not complete"):
        launch(program, "2x2", drawn, timeout=0.5)


# ---- what is wrong with a call
def arguments(world: Any) -> dict[str, Any]:
    inputs = Drawn("1x1", 16, "float16", 2, 2, 3, True, ("uniform",), 1).call(0)
    return {f"routing.{name}": array for name, array in routing_of(inputs.known[0])._asdict().items()} | {
        "rows": inputs.rows[0],
        "topk_weights": inputs.weights[0],
        "add": np.zeros((len(inputs.ids[0]), 16), np.float16),
        "out": np.zeros((len(inputs.ids[0]), 16), np.float16),
    }


BAD = {
    "rows of another dtype": ("rows", lambda x: x.astype(np.float32), r"rows\.dtype"),
    "rows that are not contiguous": ("rows", lambda x: np.repeat(x, 2, 0)[::2], r"rows\.strides"),
    "H": ("rows", lambda x: np.ascontiguousarray(x[:, :12]), "H = 12"),
    "ids of 64 bits": ("routing.topk_ids", lambda x: x.astype(np.int64), r"routing\.topk_ids = .* int64"),
    "too many tokens": ("routing.topk_ids", lambda x: np.zeros((4, 2), np.int32), "at most max_tokens = 3"),
    "another topk": ("routing.topk_ids", lambda x: x[:, :1].copy(), r"routing\.topk_ids = "),
    "another world's": ("routing.rows", lambda x: np.repeat(x, 2, 0), "1 nodes"),
    "sums of another routing": ("routing.sums", lambda x: x[:, :1].copy(), r"routing\.sums = "),
    "no experts": ("routing.expert_offsets", lambda x: x[:1], r"routing\.expert_offsets = "),
    "counts that are not contiguous": ("routing.listed", lambda x: np.repeat(x, 2, 1)[:, ::2], r"routing\.listed\.strides"),
    "weights of another dtype": ("topk_weights", lambda x: x.astype(np.float64), r"topk_weights\.dtype"),
    "weights of other tokens": ("topk_weights", lambda x: np.zeros((7, 2), np.float32), r"topk_weights\.shape"),
    "add of another width": ("add", lambda x: np.zeros((len(x), 8), np.float16), r"add\.shape"),
    "add of another dtype": ("add", lambda x: x.astype(DTYPES["bfloat16"]), r"add\.dtype"),
    "out of other tokens": ("out", lambda x: np.zeros((7, 16), np.float16), r"out\.shape"),
}  # fmt: skip


def test_bad_arguments() -> None:
    def use(world: Any) -> None:
        for what, (name, change, message) in BAD.items():
            given = arguments(world)
            given[name] = change(given[name])
            routing = mk.Routing(*(given[f"routing.{field}"] for field in mk.Routing._fields))
            with pytest.raises(ArgumentError, match=message):
                mk.moe_combine(given["rows"], routing, **{key: given[key] for key in ("topk_weights", "add", "out")})
                pytest.fail(what)
        given = arguments(world)
        routing = mk.Routing(*(given[f"routing.{field}"] for field in mk.Routing._fields))
        with pytest.raises(ArgumentError, match="overlaps add"):
            mk.moe_combine(given["rows"], routing, add=given["add"], out=given["add"])
        assert not mk.moe_combine(given["rows"][:], routing, topk_weights=given["topk_weights"] * 0).any()

    launch(use, "1x1")


def test_weights_on_one_rank_only_are_a_mismatch() -> None:
    def use(world: Any) -> None:
        topk, dtype, _ = KERNELS["1x2"]
        inputs = Drawn("1x2", 16, dtype, topk, 8, 3, True, ("uniform",), 1).call(0)
        arrays = inputs.rows[world.rank], routing_of(inputs.known[world.rank])
        with pytest.raises(MismatchError):
            mk.moe_combine(*arrays, topk_weights=inputs.weights[world.rank] if world.rank else None)
            world.check()

    launch(use, "1x2", timeout=2.0, entry_timeout=2.0)


# ---- planted bugs: the device code with something left out
_COMBINE, _SEND, _OP = "moe/combine.cuh", "moe/combine_send.cuh", "ops/moe_combine.cuh"
_GROUPS, _ARRIVED = "ceil_shift(count, c.group_shift))) return false;", "ArrivedFlags<Parameters>{p, token}"
BUGS = [
    Bug(
        "rows are read before they are staged",
        _OP,
        "sources[choice.holder].staged == 0) return true;",
        "sources[choice.holder].staged <= 1) return true;",
    ),
    Bug("a chunk of rows is told before all warps have copied", _OP, "    ptx::sync_cta();\n    if (ptx::warp", "    if (ptx::warp"),
    Bug("rows are given back while others read them", _OP, "if (p.stage_rows == 0) wait_all(entered, DoneFlags{p}, kR);", sms=8),
    Bug("nobody waits for entries", "comm/sync.cuh", " && wait_all(call, EntryFlags{}, call.world.size - 1));", ");", slow=True),
    Bug(
        "a sum is told before all lanes have stored it", _COMBINE, "  ptx::sync_warp();  // all lanes have stored\n", world="2x2", slow=True
    ),
    Bug("a chunk is sent before its sums are made", _SEND, _GROUPS, "0)) return false;", world="2x2", slow=True),
    Bug("a chunk is sent before its last sums", _SEND, _GROUPS, "1)) return false;", world="2x2"),
    Bug("combined before the last part", _COMBINE, f"{_ARRIVED}, kNodes)", f"{_ARRIVED}, 0)", world="2x2"),
    Bug("the sum of one node is not waited for", _COMBINE, f"{_ARRIVED}, kNodes)", f"{_ARRIVED}, kNodes - 1)", world="3x2", slow=True),
    Bug("weights are not waited for", _COMBINE, "WeightFlags<Parameters>{p}, kNodes - 1)", "WeightFlags<Parameters>{p}, 0)", world="2x2"),
    Bug("the place of another token", _COMBINE, "load_index(c.listed, token_index(c, node, place))", "int32_t(place)", world="2x2"),
]


def as_it_is(bug: Bug, seed: int) -> str:
    """What is noticed in calls of the bug's world; "" if nothing."""
    topk, dtype, weighted = KERNELS[bug.world]
    drawn = Drawn(bug.world, 136, dtype, topk, 3, 25, weighted, ("uniform", "holes", "ragged", "uniform"), seed)
    try:
        return str([wrong for wrong in launch(program, bug.world, drawn, seed=seed, timeout=1.0, entry_timeout=1.0) if wrong] or "")
    except CompileError:
        raise
    except (Error, AssertionError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For copies of the device code: the same for all bugs, so that only what has changed is compiled again."""
    return tmp_path_factory.mktemp("planted") / "kernels_src"


@pytest.fixture
def copy(place: Path) -> Iterator[Path]:
    shutil.copytree(kernels_src(), place)
    with env.override(MKERNEL_KERNELS_SRC=place):
        yield place
    shutil.rmtree(place)


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.slow] * bug.slow, id=bug.name) for bug in BUGS])
@pytest.mark.drawn(3)
def test_planted(copy: Path, bug: Bug) -> None:
    bug.plant(copy)
    with env.override(MKERNEL_CPU_SMS=bug.sms):
        assert any(as_it_is(bug, seed) for seed in range(bug.seeds)), "the bug was not noticed"


def raced(copy: Path, world: str, seed: int, inner: int = 0) -> tuple[int, str]:
    """Whether results are wrong, and what ThreadSanitizer says: a process of its own, with its library preloaded."""
    variables = {"MKERNEL_KERNELS_SRC": str(copy), "MKERNEL_CPU_SMS": "3"}  # few: starting threads is slow there
    done = run_sanitized([sys.executable, str(combine_body.__file__), world, str(inner), str(seed)], variables)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.tsan
@pytest.mark.parametrize("world", ["1x2", "2x2", "3x2", "4x1"])
@pytest.mark.parametrize("inner", [0, 40], ids=["moe_combine", "moe_gemm_combine"])
def test_no_race(request: pytest.FixtureRequest, copy: Path, world: str, inner: int) -> None:
    wrong, errors = raced(copy, world, request.config.getoption("--seed"), inner)
    assert wrong == 0, errors[-3000:]
    assert "WARNING: ThreadSanitizer" not in errors, errors[:5000]


@pytest.mark.slow
@pytest.mark.tsan
def test_a_race_is_found(copy: Path) -> None:
    """Chunks of rows are told before all warps have copied them."""
    BUGS[1].plant(copy)
    assert "WARNING: ThreadSanitizer: data race" in raced(copy, "1x2", 1)[1]
