"""The attention that ring attention builds on, by itself: every element, nothing outside, and planted bugs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mkernel as mk
from mkernel import env
from mkernel.abi import TraceKind
from mkernel.jit.headers import kernels_src
from mkernel.planner.attention_tile import AttentionTile
from tests.ops import attention_races
from tests.ops.attention_body import Case, bits, check, run
from tests.ops.attention_op import OP, AttentionPlan, AttentionProblem, Parameters, local_attention
from tests.ops.planted_bug import Bug
from tests.sanitizer import run_sanitized
from tests.shared.mirrors import errors_of_mirror

_SMS = 3
_ROWS = (1, 15, 16, 63, 64, 65, 100, 127, 128, 129, 191, 193, 300)
_KEYS = (1, 2, 16, 127, 128, 129, 191, 192, 193, 256, 257, 384, 400)


@pytest.fixture(autouse=True)
def _few_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKERNEL_CPU_SMS", str(_SMS))


# Without room for all of o beside q; more stages, of few keys; three warpgroups; as many stages of V as of K, and other ones.
_OTHER_TILES = {
    64: (
        AttentionTile(64, 64, 3, 2),
        AttentionTile(64, 128, 3, 3),
        AttentionTile(64, 128, 2, 2, value_stages=3),
    ),
    128: (AttentionTile(128, 128, 2, 2),),
}


def drawn(rng: np.random.Generator, **fixed: object) -> Case:
    rows, keys, kv_heads = int(rng.choice(_ROWS)), int(rng.choice(_KEYS)), int(rng.integers(1, 3))
    chosen: dict[str, object] = {
        "batches": int(rng.integers(1, 3)),
        "kv_heads": kv_heads,
        "heads": kv_heads * int(rng.integers(1, 4)),
        "scale": float(rng.choice((0.0, 0.03, 1.7))) or None,
        "q_position": int(rng.choice((keys - rows, 0, keys, -rows // 2, -rows, int(rng.integers(-rows, keys + 1))))),
        "tile_rows": int(rng.choice((0, 0, 1 + rng.integers(128)))) if rows < 200 else 0,
        "padding": int(rng.choice((0, 3, 200))),
        "sizes": str(rng.choice(("plain", "growing", "large"))),
    }
    return Case(rows, keys, **(chosen | fixed))  # type: ignore[arg-type]


@pytest.mark.cases(
    head_dim=(64, 128),
    dtype=("bfloat16", "float16"),
    causal=(False, True),
    chunk=(0, 64, 200),
    parts=(1, 2, 5),
    transposed=(False, True),
    usual=(True, False),
)
def test_every_element(
    rng: np.random.Generator, head_dim: int, dtype: str, causal: bool, chunk: int, parts: int, transposed: bool, usual: bool
) -> None:
    fixed: dict[str, object] = {
        "head_dim": head_dim,
        "dtype": dtype,
        "causal": causal,
        "chunk": chunk,
        "parts": parts,
        "transposed": transposed,
    }
    if not usual:
        fixed["tile"] = rng.choice(np.array(_OTHER_TILES[head_dim], dtype=object))
    if parts > 1:
        fixed["tile_rows"] = 0  # few tiles: each takes workspace
    cases = tuple(drawn(rng, **fixed) for _ in range(3))
    seed = int(rng.integers(1 << 30))
    assert run(cases, seed, int(rng.integers(1, 3))) is None, (cases, seed)


@pytest.mark.parametrize("offset", [-2, -1, 0, 1, 2, 63, 64, 65, 190, 191, 192])
def test_edges_of_the_mask(rng: np.random.Generator, offset: int) -> None:
    """The first row sees so many keys more than one, or none; the mask cuts blocks at every place."""
    cases = tuple(Case(130, keys, q_position=offset, causal=True, heads=2) for keys in (192, 387))
    seed = int(rng.integers(1 << 30))
    assert run(cases, seed) is None, (cases, seed)


def test_rows_that_see_nothing(rng: np.random.Generator) -> None:
    """``o`` is 0 and ``lse`` minus infinity, in whole tiles and beside rows that see something."""
    cases = tuple(Case(200, 100, q_position=position, causal=True) for position in (-1000, -200, -199, -129, -70))
    seed = int(rng.integers(1 << 30))
    assert run(cases, seed) is None, (cases, seed)


@pytest.mark.parametrize("parts", [1, 3])
def test_same_bits_in_any_order(rng: np.random.Generator, parts: int) -> None:
    """Whichever CTA is there first, and whatever comes late."""
    case, inputs = Case(150, 400, heads=2, parts=parts, sizes="large"), int(rng.integers(1 << 30))
    assert len({bits(case, inputs, int(rng.integers(1 << 30))) for _ in range(6)}) == 1


def _traced(world: Any) -> int:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2, 300, 64)).astype(np.float16) for _ in range(3))
    with mk.trace(world) as recorded:
        local_attention(q, k, v)
    return int(np.sum(recorded.events["kind"] == TraceKind.tile))


def test_the_trace_has_every_tile() -> None:
    assert mk.launch(_traced, 1, 1, "cpu") == [2 * 3]


@pytest.mark.parametrize("missing", [0, 1, 4])
def test_keys_that_never_come(rng: np.random.Generator, missing: int) -> None:
    """All warps leave, whatever is on its way."""
    case, seed = Case(300, 300, heads=2, chunk=70, missing=missing), int(rng.integers(1 << 30))
    report = check((case,), seed)
    assert report is not None
    assert "TimeoutError" in report, (report, case, seed)


def test_keys_that_are_used_again(rng: np.random.Generator) -> None:
    """A credit says that the chunk has been read: then it becomes NaNs."""
    cases = tuple(Case(int(rng.integers(1, 129)), keys, chunk=chunk, padding=7, reuses=True) for keys, chunk in ((900, 141), (700, 65)))
    for seed in rng.integers(1 << 30, size=6):
        assert run(cases, int(seed)) is None, (cases, seed)


def test_parameters_are_those_of_the_kernel() -> None:
    from mkernel.planner.topology import Topology

    plan: AttentionPlan = OP.make_plan(AttentionProblem(Topology(1, 1), 64, "bfloat16"), 100, _SMS)
    assert plan.spec.folder is not None
    assert errors_of_mirror(plan.spec, Parameters, (plan.spec.folder,)) == ""


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_the_tile_fits(head_dim: int, causal: bool) -> None:
    tile = AttentionTile.of(head_dim, causal)
    assert tile.shared_bytes <= 232448
    assert (tile.q_rows, tile.threads) == (64 * tile.warpgroups, 128 * (1 + tile.warpgroups))


# ---- planted bugs

_SOON = AttentionTile(64, 128, 2, 2)  # two stages, so that each is soon used again
_FULL = Case(130, 400, heads=2, sizes="growing", tile=_SOON)
_CAUSAL = Case(200, 259, q_position=30, causal=True, tile=_SOON)
_CHUNKS = Case(100, 300, chunk=70, head_dim=128, padding=60)
_PARTS = Case(130, 770, parts=3, sizes="growing", tile=_SOON)
_WORKLOADS = {
    "tiles": (_FULL, _FULL),
    "causal": (_CAUSAL,),
    "chunks": (_CHUNKS,),
    "parts": (_PARTS, _PARTS),
    "plain": (Case(130, 384, parts=3, tile=_SOON),),
}
_ATTEND, _LOAD, _SOFTMAX, _STORE = (f"attention/{name}.cuh" for name in ("attend", "load", "softmax", "epilogue"))
_PARTIAL = "attention/partial.cuh"
_OF_CREDITS_ONLY = "      if (storage_.credit[at.index] == kNoCredit) continue;\n      storage_.values.wait_filled(at);\n"
BUGS = [
    Bug("nothing is rescaled", _ATTEND, "    if (rescales) rescale_rows(o, rescale);\n", found_as="wrong: batch"),
    Bug("sums are not rescaled", _SOFTMAX, "        sum_[i] *= rescale[i];\n", found_as="wrong: batch"),
    Bug("lanes of a row have bases of their own", _SOFTMAX, "ptx::shuffle_xor(largest[i], 2)", "largest[i]", "wrong: batch"),
    Bug(
        "a base that one lane alone has found is missed",
        _SOFTMAX,
        "ptx::any_of_warp(",
        "ptx::all_of_warp(",
        "wrong: batch",
        workload="float16",
    ),
    Bug("a row is rescaled by the other's factor", "attention/products.cuh", "factor[j / 2 % 2]", "factor[1 - j / 2 % 2]", "wrong: batch"),
    Bug(
        "the mask's edge is one too far",
        _ATTEND,
        "seen[i] = first + row + 1;",
        "seen[i] = first + row + 2;",
        "wrong: batch",
        workload="causal",
    ),
    Bug(
        "a row does not see its own key", _ATTEND, "seen[i] = first + row + 1;", "seen[i] = first + row;", "wrong: batch", workload="causal"
    ),
    Bug(
        "a block whose last key alone is hidden is not masked",
        _ATTEND,
        "first + 1 < int32_t(Shape::kKeyBlock)",
        "first + 2 < int32_t(Shape::kKeyBlock)",
        "wrong: batch",
        workload="edge",
    ),
    Bug("keys after the last one are seen", _ATTEND, "block.rows < Shape::kKeyBlock || ", "", "wrong: batch", workload="chunks"),
    Bug(
        "both warpgroups mask as the first",
        _ATTEND,
        " + warpgroup * AttentionShape<Config>::kBlockRows",
        "",
        "wrong: batch",
        workload="causal",
    ),
    Bug(
        "values of nobody are not zeroed",
        _LOAD,
        "block.is_padded && block.rows < Shape::kKeyBlock",
        "false",
        "wrong: batch",
        workload="chunks",
    ),
    Bug(
        "K is given back before it is used",
        _ATTEND,
        "    ptx::wgmma_wait<1>(s);\n    if (reports) storage.keys.take(key_at);\n",
        "    if (reports) storage.keys.take(key_at);\n    ptx::wgmma_wait<1>(s);\n",
        "gave different operands",  # threads that come late read the header of another block
    ),
    Bug(
        "V is given back before it is used",
        _ATTEND,
        "    ptx::wgmma_wait<1>(s);\n",
        "    if (reports) storage.values.take(value_at);\n    ptx::wgmma_wait<1>(s);\n",
        "",
        also=(("      if (reports) storage.values.take(value_at);\n      value_at.advance();", "      value_at.advance();"),),
    ),
    Bug(
        "weights are replaced while values are multiplied",
        _ATTEND,
        "    ptx::wgmma_wait<0>(o);\n    if (multiplies) {",
        "    round_weights<Config>(weights, s);\n    ptx::wgmma_wait<0>(o);\n    if (multiplies) {",
        "wrong: batch",
    ),
    Bug(
        "q is given back before it is used",
        _ATTEND,
        "    block = storage.block[key_at.index];\n",
        "    block = storage.block[key_at.index];\n    if (reports && block.is_last != 0) storage.query.take(query_at);\n",
        "wrong: batch",
        also=(
            ("  if (reports) storage.query.take(query_at);  // the", "  if (reports && !multiplies) storage.query.take(query_at);  // the"),
        ),
        workload="items",
        seeds=16,
    ),
    Bug(
        "o is written before the one before it has left",
        _STORE,
        "  if (leads) ptx::store_wait_read<0>();",
        "",
        "wrong: batch",
        workload="items",
        seeds=16,
    ),
    Bug("no fence before o is stored", _STORE, "    ptx::fence_proxy_async_shared();\n", found_as="missing fence"),
    Bug(
        "a credit is given while a block before it is loaded",
        _LOAD,
        "      storage_.keys.wait_filled(keys);  // of",
        "      // of",
        also=(("      storage_.values.wait_filled(at);\n", _OF_CREDITS_ONLY),),
        workload="credits",
        seeds=16,
    ),
    Bug("a credit is given before loads have landed", _LOAD, "      storage_.values.wait_filled(at);\n", workload="credits"),
    Bug("parts are not waited for", _LOAD, "ok_ && op_.wait_parts(*entered_, item)", "ok_", "wrong: batch", workload="parts"),
    Bug(
        "a part is announced before it is there",
        _PARTIAL,
        "  ptx::sync_warp();  // all lanes have stored\n",
        workload="parts",
    ),
    Bug("parts are added as if they had one base", _SOFTMAX, "ptx::exp2(base - base_[i])", "1.0f", "wrong: batch", workload="parts"),
    Bug("the last part is not scaled", _PARTIAL, "o[j] *= own[j / 2 % 2]", "o[j] *= 1.0f", "wrong: batch", workload="plain"),
    Bug(
        "one row too many",
        _STORE,
        "    if (row < rows) ptx::store_global",
        "    if (row <= rows) ptx::store_global",
        "wrong: ",
    ),
    Bug("one sum too many", _STORE, "if (row < rows) ptx::store_word", "if (row <= rows) ptx::store_word", "wrong:"),
    Bug(
        "a tile that is not full is stored whole",
        _STORE,
        "is_whole = rows >= Shape::kBlockRows;",
        "is_whole = rows > 0;",
        "wrong: elements outside",
    ),
    Bug("rows that see nothing are divided by 0", _SOFTMAX, "sum_[i] == 0.0f ? 1.0f : ptx", "ptx", "wrong: batch", workload="nothing"),
    Bug(
        "a row that has seen nothing has a NaN",
        _SOFTMAX,
        "base_[i] == minus_infinity() ? 0.0f : base_[i]",
        "base_[i]",
        "wrong: batch",
        workload="nothing",
    ),
]
_WORKLOADS |= {
    "edge": (Case(64, 128, q_position=126, causal=True, tile=_SOON),),
    "items": (Case(128, 200, heads=12, tile=_SOON),),
    "credits": (Case(64, 900, chunk=141, padding=5, reuses=True, tile=_SOON),),
    "float16": (Case(128, 400, dtype="float16", sizes="large", tile=_SOON),),
    "nothing": (Case(150, 100, q_position=-70, causal=True, tile=_SOON),),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "kernels_src"
    shutil.copytree(kernels_src(), folder)
    return folder


_QUICK = ("nothing is rescaled", "the mask's edge is one too far", "values of nobody are not zeroed", "V is given back before it is used")


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.name, marks=[] if bug.name in _QUICK else [pytest.mark.slow]) for bug in BUGS])
def test_found(copy: Path, bug: Bug) -> None:
    bug.plant(copy)
    reports = []
    with env.override(MKERNEL_KERNELS_SRC=copy):
        for seed in range(bug.seeds):  # the same ones in every run
            report = check(_WORKLOADS[bug.workload], seed)
            if report is not None:
                reports.append(report)
                if bug.found_as in report:
                    return
    pytest.fail(f"{bug.found_as or 'nothing'} is not reported over {bug.seeds} seeds, but:\n" + "\n".join(reports))


@pytest.mark.parametrize("workload", _WORKLOADS)
def test_nothing_is_found_in_the_device_code_as_it_is(request: pytest.FixtureRequest, workload: str) -> None:
    assert check(_WORKLOADS[workload], request.config.getoption("--seed")) is None


# ---- ThreadSanitizer


def _reported(kernels: Path, *, right: bool = True) -> str:
    """What ThreadSanitizer says of a process that makes a few calls with these kernels. ``right``: their results must be."""
    variables = {"MKERNEL_KERNELS_SRC": str(kernels), "MKERNEL_CPU_SMS": "2"}  # few: starting threads is slow there
    done = run_sanitized([sys.executable, str(attention_races.__file__)], variables)
    assert done.returncode == 0 or not right, done.stdout + done.stderr[-3000:]
    return done.stderr


@pytest.mark.tsan
def test_no_race() -> None:
    errors = _reported(kernels_src())
    assert "WARNING: ThreadSanitizer" not in errors, errors[:5000]


@pytest.mark.tsan
@pytest.mark.slow
def test_rows_of_o_that_lanes_read_before_others_have_written_are_a_race(copy: Path) -> None:
    Bug("", _STORE, "  ptx::sync_warp();  // all lanes have written\n").plant(copy)
    assert "WARNING: ThreadSanitizer: data race" in _reported(copy, right=False)
