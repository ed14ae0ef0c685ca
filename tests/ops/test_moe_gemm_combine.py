"""mk.moe_gemm_combine on target cpu: drawn routings in worlds of every shape, wrong arguments, planted bugs."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.errors import ArgumentError, CompileError, Error
from mkernel.jit.headers import kernels_src
from mkernel.planner import moe_combine as planner
from mkernel.planner import moe_gemm_combine as multiplied
from mkernel.transport import emulated
from tests.ops.combine_body import KINDS, WORLDS, Drawn, program, routing_of
from tests.ops.planted_bug import Bug

# Of each world, whose kernel it is: choices of a token, dtype, whether rows are weighted, whether the experts' weights are row-major.
KERNELS = {
    "1x1": (2, "bfloat16", True, True),
    "1x2": (3, "float16", True, False),
    "1x4": (2, "bfloat16", False, True),
    "2x2": (6, "bfloat16", True, True),
    "3x2": (5, "float16", True, False),
    "4x1": (1, "float16", True, True),
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


def draw(rng: np.random.Generator, world: str, **more: Any) -> Drawn:
    """K and the number of experts, which are compiled in, are the same in all runs, so that a kernel is compiled once."""
    topk, dtype, weighted, row_major = KERNELS[world]
    kinds = tuple(str(kind) for kind in rng.choice(KINDS, 4))
    sizes = {"columns": 8 * int(rng.integers(17, 50)), "max_tokens": int(rng.integers(1, 90 if world.startswith("1x") else 30))}
    return Drawn(world, **(sizes | more), dtype=dtype, topk=topk, experts=3, weighted=weighted, kinds=kinds, inner=72, row_major=row_major,
                 seed=int(rng.integers(1 << 30)))  # fmt: skip


@pytest.fixture(params=[1 << 30, 0], ids=["", "windows"])
def _windows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether rows are fetched before all experts are done."""
    monkeypatch.setattr(planner, "SCALE", dataclasses.replace(planner.SCALE, window_rows=request.param))


@pytest.mark.parametrize(("world", "window_rows"), [*((world, 1 << 30) for world in WORLDS), ("1x4", 0), ("2x2", 0)])
@pytest.mark.drawn(3)
def test_every_element(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, world: str, window_rows: int) -> None:
    monkeypatch.setattr(planner, "SCALE", dataclasses.replace(planner.SCALE, window_rows=window_rows))
    drawn = draw(rng, world)
    assert launch(program, world, drawn, seed=drawn.seed) == [[]] * WORLDS[world][0], drawn


def test_as_many_rows_in_a_piece_as_fit(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Rows of any length, fetched one to eight at once; the last piece may have fewer."""
    monkeypatch.setattr(planner, "SCALE", dataclasses.replace(planner.SCALE, window_rows=0))
    drawn = draw(rng, "1x4", columns=8 * int(2 ** rng.uniform(5, 10.1)), max_tokens=int(rng.integers(1, 40)))
    assert launch(program, "1x4", drawn, seed=drawn.seed) == [[]] * 4, drawn


@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.drawn(2)
def test_tiles_of_any_width(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, width: int) -> None:
    monkeypatch.setattr(multiplied, "choose_tile", lambda problem: multiplied.fitting_tile(problem)(width))
    drawn = draw(rng, "1x2")
    assert launch(program, "1x2", drawn, seed=drawn.seed) == [[]] * 2, drawn


@pytest.mark.slow
@pytest.mark.usefixtures("_windows")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("topk", [1, 4, 8, 16])
def test_every_element_of_more_kernels(rng: np.random.Generator, world: str, topk: int) -> None:
    for dtype in ("bfloat16", "float16"):
        more = {"inner": 8 * int(rng.integers(1, 20)), "row_major": bool(rng.integers(2))}
        drawn = Drawn.draw(rng, world, topk, dtype, weighted=bool(rng.integers(2)), calls=8, **more)
        assert launch(program, world, drawn, seed=drawn.seed) == [[]] * WORLDS[world][0], drawn


def mixed(world: Any, drawn: Drawn) -> list[str]:
    """Between ops whose workspace lies where this op's does."""
    a, b = np.full((24, 64), world.rank + 1, np.float16), np.full((64, 16), 0.125, np.float16)
    found = []
    for number in range(len(drawn.kinds)):
        inputs = drawn.call(number)
        routing, rank = routing_of(inputs.known[world.rank]), world.rank
        options = {"topk_weights": inputs.weights[rank], "add": inputs.adds[rank]}
        y = mk.moe_gemm_combine(inputs.rows[rank], inputs.experts[rank], routing, **options)
        reduced = mk.gemm_reduce_scatter(np.repeat(a, world.size, axis=0), b)
        plain = mk.moe_combine(np.ones((drawn.max_rows, drawn.columns), inputs.rows[rank].dtype), routing)
        if not (reduced == 8 * sum(range(1, world.size + 1))).all():
            found.append(f"{number}: gemm_reduce_scatter")
        if not (plain == (inputs.ids[rank] >= 0).sum(1)[:, None]).all():
            found.append(f"{number}: moe_combine")
        if not inputs.worst(rank, y) <= 1:
            found.append(f"{number}: moe_gemm_combine")
    return found


def test_between_other_ops(rng: np.random.Generator) -> None:
    drawn = draw(rng, "2x2")
    assert launch(mixed, "2x2", drawn, seed=drawn.seed) == [[]] * 4, drawn


def repeated(world: Any, drawn: Drawn) -> list[bytes]:
    inputs, rank = drawn.call(0), world.rank
    arrays = inputs.rows[rank], inputs.experts[rank], routing_of(inputs.known[rank])
    return [mk.moe_gemm_combine(*arrays, topk_weights=inputs.weights[rank]).tobytes() for _ in range(2)]


@pytest.mark.slow
def test_the_same_bits_under_every_schedule(rng: np.random.Generator) -> None:
    drawn = draw(rng, "2x2")
    found = [launch(repeated, "2x2", drawn, seed=seed) for seed in range(3)]
    assert all(of_rank == [found[0][rank][0]] * 2 for run in found for rank, of_rank in enumerate(run)), drawn


# ---- what is wrong with a call, beside what is wrong with one of moe_combine
BAD = {
    "a of another dtype": ("a", lambda x: x.astype(np.float32), r"a\.dtype"),
    "a of other columns": ("a", lambda x: x[:, :64].copy(), r"w\.shape"),
    "F": ("a", lambda x: x[:, :20], "F = 20"),
    "w of another dtype": ("w", lambda x: x.astype(np.float32), r"w\.dtype = float32"),
    "w of other experts": ("w", lambda x: x[:1], "3 experts"),
    "w with gaps": ("w", lambda x: np.repeat(x, 2, 2)[:, :, ::2], r"w\.strides"),
    "add of another width": ("add", lambda x: x[:, :8], r"add\.shape"),
    "out of other tokens": ("out", lambda x: x[:-1], r"out\.shape"),
}  # fmt: skip


def test_bad_arguments() -> None:
    def use(world: Any) -> None:
        topk, dtype, _, row_major = KERNELS["1x1"]
        drawn = Drawn("1x1", 136, dtype, topk, 3, 30, True, ("one expert",), 1, 72, row_major)
        inputs = drawn.call(0)
        adding = np.zeros((len(inputs.ids[0]), 136), inputs.rows[0].dtype)
        arrays = {"a": inputs.rows[0], "w": inputs.experts[0], "add": adding, "out": adding.copy()}
        for what, (name, change, message) in BAD.items():
            given: dict[str, Any] = arrays | {name: change(arrays[name])}
            with pytest.raises(ArgumentError, match=message):
                mk.moe_gemm_combine(routing=routing_of(inputs.known[0]), **given)
                pytest.fail(what)
        for name in ("add", "w"):
            with pytest.raises(ArgumentError, match=f"overlaps {name}"):
                out = arrays["add"] if name == "add" else arrays["w"].reshape(-1, 136)[: len(adding)]
                mk.moe_gemm_combine(arrays["a"], arrays["w"], routing_of(inputs.known[0]), add=arrays["add"], out=out)
        y = mk.moe_gemm_combine(arrays["a"], arrays["w"], routing_of(inputs.known[0]), topk_weights=inputs.weights[0], add=inputs.adds[0])
        assert inputs.worst(0, y) <= 1

    launch(use, "1x1")


# ---- planted bugs: the device code with something left out
_OP = "ops/moe_gemm_combine.cuh"
_FLAG, _ARRIVED = "return is_fetched(choice) ? wait_fetched(entered) : wait_expert(entered, choice);", "ArrivedFlags<Parameters>{p, token}"
BUGS = [
    Bug("an expert is told before its last tile", _OP, "experts.tile_rows(expert) * tiles_n();", "experts.tile_rows(expert);"),
    Bug("counters of the call before", _OP, "zeroed.finished[expert] = 0;", "", slow=True),
    Bug("tiles are counted before the counters are zero", _OP, "    if (!wait_all(entered, ZeroedFlag{p}, 1)) return;\n", slow=True),
    Bug("products are not waited for", _OP, _FLAG, "return true;"),
    Bug(
        "rows are fetched before they are there",
        _OP,
        "if (!wait_all(entered, WindowFlags{rows, first, count}, count * (kR - 1))) break;",
        "",
        workload="windows",
    ),
    Bug(
        "a window's last expert is not waited for",
        _OP,
        "WindowFlags{rows, first, count}, count *",
        "WindowFlags{rows, first, count}, (count - 1) *",
        workload="windows",
        slow=True,
    ),
    Bug("no rows, no word", _OP, "first_row[expert] != first_row[expert + 1]) continue", "true) continue", workload="windows"),
    Bug(
        "rows are fetched to the next choice's place",
        _OP,
        "fetched_offset(c.index));",
        "fetched_offset(c.index + 1));",
        workload="windows",
        slow=True,
    ),
    Bug(
        "bulk copies of rows that they may not see",
        _OP,
        "    ptx::fence_proxy_async();  // what was acquired is copied by bulk copies\n",
        "",
        workload="windows",
        slow=True,
    ),
    Bug(
        "a last piece of too many rows",
        "moe/fetch.cuh",
        "return rows_of_piece(batch(item).rows - item.row % kFetchGroup);",
        "return kRowsPerPiece;",
        workload="windows",
        slow=True,
    ),
    Bug("fetched rows are not waited for", _OP, "? wait_fetched(entered) :", "? true :", workload="windows"),
    Bug(
        "rows are told of as fetched too soon",
        _OP,
        "  ring.copy(copies);\n  if (ZeroedFlag{p}.wait(entered, 0))",
        "  if (ZeroedFlag{p}.wait(entered, 0))",
        workload="windows",
        slow=True,
    ),
    Bug(
        "items of the call before",
        _OP,
        "zeroed.fetched = zeroed.next_item = 0;",
        "zeroed.fetched = 0;",
    ),
    Bug(
        "a batch is written while its rows are copied",
        "moe/fetch.cuh",
        "    if (ptx::lane_index() == 0) barriers_.batches.wait_taken(at_);\n    ptx::sync_warp();\n",
        "    if (ptx::lane_index() == 0) barriers_.batches.wait_taken(at_);\n",
        workload="many rows",
        sms=3,
    ),
    Bug("another window is fetched", _OP, "rows.window(c) == window;", "rows.window(c) == 0;", workload="windows", slow=True),
    Bug("another expert is waited for", _OP, "1 + holder * Config::kExperts + expert;", "1 + holder * 0 + expert;", slow=True),
    Bug("nobody waits for entries", "comm/sync.cuh", " && wait_all(call, EntryFlags{}, call.world.size - 1));", ");", slow=True),
    Bug("combined before the last part", "moe/combine.cuh", f"{_ARRIVED}, kNodes)", f"{_ARRIVED}, 0)", world="2x2", slow=True),
]


def noticed(bug: Bug, seed: int) -> bool:
    rng = np.random.default_rng(seed)
    columns, max_tokens = (40, 300) if bug.workload == "many rows" else (264, 60)  # many: more than a CTA has batches for
    drawn = draw(rng, bug.world, columns=columns, max_tokens=max_tokens)
    try:
        return any(launch(program, bug.world, drawn, seed=seed, timeout=1.0, entry_timeout=1.0))
    except CompileError:
        raise
    except (Error, AssertionError):
        return True


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
def test_planted(monkeypatch: pytest.MonkeyPatch, copy: Path, bug: Bug) -> None:
    bug.plant(copy)
    if bug.workload != "tiles":
        monkeypatch.setattr(planner, "SCALE", dataclasses.replace(planner.SCALE, window_rows=0))
    with env.override(MKERNEL_CPU_SMS=bug.sms):
        assert any(noticed(bug, seed) for seed in range(bug.seeds)), "the bug was not noticed"


@pytest.mark.parametrize("seed", range(2))
def test_more_rows_than_batches(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Few CTAs fetch so many rows that their batches come round."""
    monkeypatch.setattr(planner, "SCALE", dataclasses.replace(planner.SCALE, window_rows=0))
    (bug,) = (bug for bug in BUGS if bug.workload == "many rows")
    with env.override(MKERNEL_CPU_SMS=bug.sms):
        assert not noticed(bug, seed)
