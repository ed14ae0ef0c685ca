"""Arguments nobody would think of: each op gives an ArgumentError, or what it gives for plain copies of its arrays, bit for bit."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mkernel as mk
from mkernel.errors import ArgumentError, CallError
from tests.ops.body import topology
from tests.ops.odd import WORLD, changed_array, one_of, try_on_all_ranks

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CALLS = 40
M, N, K = 8, 24, 16

ODD: list[Any] = [
    None, -1, 0, 1, 3, 1.5, float("nan"), float("inf"), "x", b"x", True, 2**31, 2**32, 2**63, 2**70, -(2**40), 10**400, "", "\0",
    [], (), {}, [1, 2], (1, 2), {"a": 1}, object(), ...,
    np.int64(3), np.float32(2), np.array(4), np.array([1]), "zigzag", "float32", "two_shot", slice(3), type, len,
    mk.Split(), mk.Split(compute=1), mk.Split(-1), mk.Split("a"),
]  # fmt: skip

Change = Callable[[Any], Any]
CHANGES: dict[str, Change] = {
    "float32": lambda a: a.astype(np.float32),
    "float64": lambda a: a.astype(np.float64),
    "int8": lambda a: a.astype(np.int8),
    "of objects": lambda a: a.astype(object),
    "a list": lambda a: a.tolist(),
    "its bits": lambda a: a.view(f"u{a.itemsize}"),
    "one dimension more": lambda a: a[..., None],
    "one in front": lambda a: a[None],
    "one less": lambda a: a[0],
    "flat": lambda a: a.reshape(-1),
    "a number": lambda a: np.array(5.0),
    "no rows": lambda a: a[:0],
    "no columns": lambda a: a[..., :0],
    "one row": lambda a: a[:1],
    "rows backwards": lambda a: a[::-1],
    "columns backwards": lambda a: a[..., ::-1],
    "every other row": lambda a: np.concatenate([a, a])[::2],
    "every other column": lambda a: np.concatenate([a, a], -1)[..., ::2],
    "half the rows": lambda a: a[::2],
    "half the columns": lambda a: a[..., ::2],
    "transposed": lambda a: a.T,
    "by columns": np.asfortranarray,
    "the view of columns": lambda a: np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2),
    "one row many times": lambda a: np.broadcast_to(a[:1], a.shape),
    "with gaps": lambda a: np.concatenate([a, a], -1)[..., : a.shape[-1]],
    "later columns": lambda a: np.concatenate([a, a], -1)[..., 1 : a.shape[-1] + 1],
    "twice the rows": lambda a: np.concatenate([a, a]),
    "twice the columns": lambda a: np.concatenate([a, a], -1),
    "odd strides": lambda a: np.lib.stride_tricks.as_strided(np.concatenate([a, a]), a.shape, tuple(stride + 1 for stride in a.strides)),
    "read-only": lambda a: _read_only(a),
    "a subclass": lambda a: a.view(type("Mine", (np.ndarray,), {})),
    "masked": lambda a: np.ma.masked_array(a, a == 1),
    "between its elements": lambda a: np.frombuffer(b"x" + a.tobytes() + b"x", np.uint8)[1:-1].view(a.dtype).reshape(a.shape),
}


def _read_only(a: Any) -> Any:
    a = a.copy()
    a.setflags(write=False)
    return a


def calls_of(world: Any, rng: np.random.Generator) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Arguments that are right, of each op, and the defaults of all others."""
    return {op: (args, _defaults(op, len(args)) | options) for op, (args, options) in _calls_of(world, rng).items()}


def _defaults(op: str, given: int) -> dict[str, Any]:
    parameters = list(inspect.signature(getattr(mk, op)).parameters.values())[given:]
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "world"}


def _calls_of(world: Any, rng: np.random.Generator) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    size = world.size

    def integers(*shape: int) -> Any:
        return rng.integers(-2, 3, shape).astype(BFLOAT16)

    def room(*shape: int, dtype: Any = BFLOAT16) -> Any:
        return np.zeros(shape, dtype)

    first = rng.integers(2 * size, size=(M, 1))
    ids = np.concatenate([first, (first + 1) % (2 * size)], 1).astype(np.int32)
    weights, ends = rng.integers(1, 4, (M, 2)).astype(np.float32), np.array([0, 3 * size, 5 * size], np.int32)
    d = mk.moe_dispatch_gemm(integers(M, K), ids, integers(2, K, N), max_tokens=16)
    layer = {"add": integers(M, K), "max_tokens": 16, "max_rows": None, "activation": "swiglu", "clamp": None, "out": room(M, K)}
    dispatch = {"topk_weights": weights, "max_tokens": 16, "max_rows": None, "activation": None, "split": None}
    attention: dict[str, Any] = {"causal": True, "scale": None, "layout": "contiguous", "split": None}
    of_a_batch = {"out": (room(1, 2, 6, 64), room(1, 2, 6, dtype=np.float32))}
    return {
        "allgather_gemm": ([integers(M, K), integers(K, N)], {"gathered": room(M * size, K), "out": room(M * size, N), "split": None}),
        "gemm_reduce_scatter": ([integers(M * size, K), integers(K, N)], {"partials": "output", "out": room(M, N), "split": None}),
        "gemm_allreduce": ([integers(M, K), integers(K, N)], {"partials": "output", "algorithm": None, "out": room(M, N), "split": None}),
        "moe_dispatch_gemm": ([integers(M, K), ids, integers(2, K, N)], dispatch),
        "moe_combine": ([np.array(d.y), d.routing], {"topk_weights": weights, "add": integers(M, N), "out": room(M, N), "split": None}),
        "moe_gemm_combine": (
            [np.array(d.y), integers(2, N, K), d.routing],
            {"topk_weights": weights, "add": integers(M, K), "split": None},
        ),
        "moe_layer": ([integers(M, K), ids, weights, integers(2, K, 16), integers(2, 8, K)], layer),
        "ring_attention": ([integers(1, 2, 6, 64), integers(1, 1, 6, 64), integers(1, 1, 6, 64)], attention | of_a_batch),
        "ring_attention_varlen": ([integers(6, 2, 64), integers(6, 1, 64), integers(6, 1, 64), ends], attention),
    }


def changed(rng: np.random.Generator, args: list[Any], options: dict[str, Any]) -> str:
    """Change one argument; what has been done to it."""
    where, place = one_of(rng, args, options)
    if done := changed_array(rng, where, place, np.ndarray, CHANGES):
        return done
    if place in ("out", "gathered") and rng.random() < 0.3:
        where[place] = args[int(rng.integers(len(args)))]
        return f"{place}: an operand"
    where[place] = ODD[int(rng.integers(len(ODD)))]
    return f"{place}: {where[place]!r}"


def bits_of(result: Any) -> list[bytes]:
    arrays = result if isinstance(result, tuple) else (result,)
    return [np.ascontiguousarray(array).tobytes() for array in arrays if isinstance(array, np.ndarray)]


def plain(value: Any) -> Any:
    return np.array(np.ma.filled(value, 0), order="C") if isinstance(value, np.ndarray) else value


def bits_for_plain_copies(op: str, args: list[Any], options: dict[str, Any]) -> list[bytes]:
    again = {name: plain(value) for name, value in options.items() if name not in ("out", "gathered")}
    return bits_of(getattr(mk, op)(*map(plain, args), **again))


def _tried(world: Any, seed: int) -> tuple[list[str], int]:
    """What is wrong, and how many calls were made."""
    rng, wrong, made = np.random.default_rng(seed), [], 0
    for _ in range(CALLS):
        ops = calls_of(world, rng)
        op = str(rng.choice(list(ops)))
        args, options = ops[op]
        what = f"{op}: " + ", ".join(changed(rng, args, options) for _ in range(rng.integers(1, 3)))
        try:
            result = getattr(mk, op)(*args, **options)
            world.synchronize()
        except (ArgumentError, CallError):  # the latter of a call that looks at its inputs on the device
            continue
        except mk.MismatchError as error:
            assert "rows came to its experts" in str(error), what  # fewer rows than a combine needs: that is the world's end
            return wrong, made
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
            break
        made += 1
        if op.startswith("moe_dispatch"):  # whose rows that there are not are undefined
            continue
        if bits_of(result) != bits_for_plain_copies(op, args, options):
            wrong.append(f"{what}: other bits than for plain copies")
    args, options = calls_of(world, rng)["gemm_reduce_scatter"]
    exact = args[0].astype(np.float32) @ args[1].astype(np.float32)
    alike = mk.gemm_allreduce(*args)  # all ranks have drawn the same
    return wrong if np.array_equal(alike, (world.size * exact).astype(BFLOAT16)) else [*wrong, "the world is not usable"], made


@pytest.mark.filterwarnings("ignore:invalid value")  # of NaNs that become integers
@pytest.mark.parametrize("world", ["1x1", "1x2", "2x1"])
def test_odd_arguments(rng: np.random.Generator, world: str) -> None:
    """All ranks pass the same."""
    try_on_all_ranks(rng, world, _tried, 3, CALLS)


def _tried_by_one(world: Any, seed: int, notes: str) -> None:
    """Calls of which one rank has other arguments, until something is refused: notes what happened here, and what was changed."""
    Path(notes, str(world.rank)).write_text(" | ".join(_outcome(world, seed)))


def _outcome(world: Any, seed: int) -> tuple[str, str]:
    rng = np.random.default_rng(seed)
    what = ""
    for _ in range(CALLS):
        ops = calls_of(world, rng)
        op, who = str(rng.choice(list(ops))), int(rng.integers(world.size))
        args, options = ops[op]
        odd_args, odd_options = list(args), dict(options)
        what = f"rank {who}, {op}: " + ", ".join(changed(rng, odd_args, odd_options) for _ in range(rng.integers(1, 3)))
        if world.rank == who:
            args, options = odd_args, odd_options
        try:
            result = getattr(mk, op)(*args, **options)
            world.synchronize()
        except (ArgumentError, CallError) as error:
            return ("refused" if world.rank == who or isinstance(error, CallError) else f"{type(error).__name__}: {error}"), what
        except mk.Error as error:
            return "failed", f"{what}: {type(error).__name__}"
        except Exception as error:
            return f"{type(error).__name__}: {error}", what
        if op.startswith("moe_dispatch"):
            continue
        if bits_of(result) != bits_for_plain_copies(op, args, options):
            return "other bits than for plain copies", what
    return "right", what


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("world", ["1x2", "2x2"])
def test_odd_arguments_of_one_rank(rng: np.random.Generator, world: str, tmp_path: Path) -> None:
    """What one rank does not take ends the call of the others before a deadline does, and what it takes is right on all of them."""
    shape, seen = topology(world), set[str]()
    for _ in range(15):
        seed = int(rng.integers(1 << 30))
        for note in tmp_path.iterdir():
            note.unlink()
        with contextlib.suppress(mk.Error):  # a rank that was refused leaves, in the middle of the others' call
            mk.launch(_tried_by_one, shape.size, shape.ranks_per_node, args=(seed, str(tmp_path)), **WORLD)
        found = [note.read_text() for note in tmp_path.iterdir()]  # of ranks that have not been stopped because of another one's error
        outcomes = [text.split(" | ")[0] for text in found]
        assert outcomes, (seed, "who leaves first has said why")
        seen.update(outcomes)
        assert set(outcomes) <= {"refused", "failed", "right"} and (set(outcomes) == {"right"} or "right" not in outcomes), (seed, found)
        assert all(text.endswith(": MismatchError") for text in found if text.startswith("failed")), (seed, found)  # nobody waited
    assert "refused" in seen, "some are not taken"


@pytest.fixture
def world() -> Iterator[Any]:
    with mk.init(**WORLD) as world:
        yield world


def test_no_argument_is_left_out(world: Any, rng: np.random.Generator) -> None:
    """Each by itself: what means nothing is refused by name, not ignored."""
    for op, (args, options) in calls_of(world, rng).items():
        names = [name for name in inspect.signature(getattr(mk, op)).parameters if name != "world"]
        for name in names:
            given = dict(zip(names, args, strict=False)) | options
            with pytest.raises(ArgumentError, match=name.removeprefix("topk_")):
                getattr(mk, op)(**(given | {name: object()}))
    x, ids, w = calls_of(world, rng)["moe_dispatch_gemm"][0]
    routing = mk.moe_dispatch_gemm(x, ids, w).routing
    with pytest.raises(ArgumentError, match="topk_ids says where tokens go"):
        mk.moe_dispatch_gemm(x, ids, w, routing=routing)


def others_of(world: Any) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """What is public beside the ops, with arguments that are right."""
    a, b = np.ones((M, K), BFLOAT16), np.ones((K, N), BFLOAT16)
    rows = np.arange(16)
    plan = mk.plan("allgather_gemm", a, b)
    options = {name: value for name, value in WORLD.items() if name != "target"}
    return {
        "init": (lambda **given: mk.init(**given).close(), options | {"target": "cpu", "transport": "auto", "max_sms": None}),
        "plan": (
            lambda op, a, b, **given: mk.plan(op, a, b, **given),
            {"op": "allgather_gemm", "a": a, "b": b, "max_rows": 8, "split": None},
        ),
        "plan, tiled": (lambda tiling: mk.plan("allgather_gemm", a, b, tiling=tiling), {"tiling": {"block_n": 64}}),
        "describe": (lambda rows: plan.describe(rows) + str(plan.split(rows)), {"rows": 3}),
        "run": (lambda a, b: plan.run(a, b), {"a": a, "b": b}),
        "tune": (lambda **given: mk.tune("allgather_gemm", a, b, **given), {"samples": 1, "save": False}),
        "empty": (world.empty, {"shape": (2, 8), "dtype": "float16"}),
        "zeros": (world.zeros, {"shape": 8, "dtype": np.float16}),
        "split": (lambda **given: mk.allgather_gemm(a, b, split=mk.Split(**given)), {"compute": 1, "intra_comm": None}),
        "zigzag_shard": (mk.zigzag_shard, {"x": rows, "axis": 0, "rank": 1, "ranks": 2, "cu_seqlens": [0, 5, 16]}),
        "zigzag_unshard": (mk.zigzag_unshard, {"shards": [rows, rows], "axis": 0, "cu_seqlens": None}),
    }


@pytest.mark.filterwarnings("ignore")
def test_odd_arguments_of_what_is_no_op(world: Any, rng: np.random.Generator) -> None:
    """An error of mkernel's own, if any, and the world stays usable."""
    taken = 0
    for _ in range(40):
        for what, (function, right) in others_of(world).items():
            place = str(rng.choice(list(right)))
            odd = ODD[int(rng.integers(len(ODD)))]
            if (what, place) == ("tune", "samples") and isinstance(odd, int) and odd > 3:
                continue  # it would take as long
            try:
                function(**(right | {place: odd}))
                taken += 1
            except mk.Error:
                continue
            except Exception as error:
                raise AssertionError(f"{what}, {place} {odd!r}: {type(error).__name__}: {error}") from error
    assert taken > 0, "some are right"
    args, _ = calls_of(world, rng)["gemm_allreduce"]
    assert bits_of(mk.gemm_allreduce(*args)) == bits_for_plain_copies("gemm_allreduce", args, {})
