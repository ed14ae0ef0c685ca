"""Tensors and arguments nobody would think of: an error that says so, or results and gradients as of plain copies, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make test-torch`")

import mkernel.torch as mkt
from mkernel.errors import ArgumentError, CallError
from tests.ops.odd import changed_array, one_of, try_on_all_ranks

CALLS = 40
M, N, K = 8, 24, 16
REFUSED = ArgumentError, CallError, TypeError, NotImplementedError
OF_DISPATCH = "Expected a value of type", "Inference tensors cannot be saved"  # what torch says of options, and of those
OF_TORCH = ("replicated_gemm", "shared")  # whose forward pass is torch's own, with its errors
ODD: list[Any] = [None, -1, 0, 1.5, float("nan"), "x", True, 2**70, [], (), {}, object(), ..., np.int64(3), np.ones((8, 8)), torch.float32]

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": lambda t: t.float(),
    "float64": lambda t: t.double(),
    "int8": lambda t: t.to(torch.int8),
    "bool": lambda t: t != 0,
    "complex": lambda t: torch.complex(t.float(), t.float()),
    "one in front": lambda t: t[None],
    "one less": lambda t: t[0],
    "flat": lambda t: t.reshape(-1),
    "a number": lambda t: torch.tensor(5.0),
    "no rows": lambda t: t[:0],
    "no columns": lambda t: t[..., :0],
    "one row": lambda t: t[:1],
    "rows backwards": lambda t: t.flip(0),
    "every other row": lambda t: torch.cat([t, t])[::2],
    "every other column": lambda t: torch.cat([t, t], -1)[..., ::2],
    "transposed": lambda t: t.transpose(-1, -2),
    "the view of columns": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "one row many times": lambda t: t[:1].expand(t.shape),
    "one number many times": lambda t: t.flatten()[:1].expand(t.shape),
    "with gaps": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "later columns": lambda t: torch.cat([t, t], -1)[..., 1 : t.shape[-1] + 1],
    "twice the rows": lambda t: torch.cat([t, t]),
    "negated when it is read": lambda t: torch._neg_view(t),  # type: ignore[attr-defined]
    "sparse": lambda t: t.to_sparse(),
    "without values": lambda t: t.to("meta"),
    "a parameter": lambda t: torch.nn.Parameter(t),
    "a subclass": lambda t: t.as_subclass(type("Mine", (torch.Tensor,), {})),
    "made in inference mode": lambda t: _inferred(t),
    "of a graph": lambda t: t.detach().requires_grad_() * 1 if t.is_floating_point() else t,
}


def _inferred(t: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return t.clone()


def _calls_of(world: Any, rng: np.random.Generator) -> dict[str, tuple[list[Any], dict[str, Any]]]:
    """Arguments that are right. The same on all ranks."""
    size = world.size

    def integers(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(-2, 3, shape)).to(torch.bfloat16)

    first = rng.integers(2 * size, size=(M, 1))
    ids = torch.from_numpy(np.concatenate([first, (first + 1) % (2 * size)], 1).astype(np.int32))
    weights = torch.from_numpy(rng.integers(1, 4, (M, 2)).astype(np.float32))
    return {
        "allgather_gemm": ([integers(M, K), integers(K, N)], {"gather_again": bool(rng.integers(2))}),
        "gemm_reduce_scatter": ([integers(M * size, K), integers(K, N)], {"partials": "output"}),
        "gemm_allreduce": ([integers(M, K), integers(K, N)], {"partials": "output"}),
        "replicated_gemm": ([integers(M, K), integers(K, N)], {}),
        "shared": ([integers(N)], {}),
        "moe_layer": ([integers(M, K), ids, weights, integers(2, K, 16), integers(2, 8, K)], {"max_tokens": 16, "add": integers(M, K)}),
        "ring_attention": ([integers(1, 2, 6, 64), integers(1, 1, 6, 64), integers(1, 1, 6, 64)], {"causal": True, "scale": None}),
    }


def changed(rng: np.random.Generator, args: list[Any], options: dict[str, Any]) -> str:
    """Change one argument; what has been done to it."""
    where, place = one_of(rng, args, options)
    if done := changed_array(rng, where, place, torch.Tensor, CHANGES):
        return done
    where[place] = ODD[int(rng.integers(len(ODD)))]
    return f"{place}: {where[place]!r}"


def _leaf(value: Any, wanted: bool) -> Any:
    """The tensor as a leaf that requires a gradient, or not; what else there is as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.is_inference():
        return value
    return value.detach().requires_grad_(wanted)


def plain(value: Any) -> Any:
    """A contiguous copy, whatever kind of tensor it is; of what has values, and they lie in a row."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.is_sparse:
        return value
    made = torch.empty(value.shape, dtype=value.dtype)
    made.copy_(value.detach())
    return made.requires_grad_(value.requires_grad)


def outcome(op: str, args: list[Any], options: dict[str, Any], gradient: Callable[[torch.Tensor], torch.Tensor]) -> list[bytes]:
    """The bits of the first result, and of the gradients by all that require one."""
    result = getattr(mkt, op)(*args, **options)
    first = result if isinstance(result, torch.Tensor) else result[0]
    if first.is_meta:
        raise NotImplementedError("as torch's own ops: without values, of tensors without values")
    leaves = [each for each in (*args, *options.values()) if isinstance(each, torch.Tensor) and each.requires_grad]
    found = [first.detach()]
    if leaves and first.requires_grad:
        found += torch.autograd.grad(first, leaves, gradient(torch.ones_like(first.detach()).cumsum(0) % 3), allow_unused=True)
    return [each.float().contiguous().numpy().tobytes() for each in found if each is not None]


GRADIENTS = [
    "as it is",
    "every other column",
    "the view of columns",
    "one row many times",
    "one number many times",
    "with gaps",
    "negated when it is read",
]


def _tried(world: Any, seed: int) -> tuple[list[str], int]:
    """What is wrong, and how many calls were made."""
    rng, wrong, made = np.random.default_rng(seed), [], 0
    for _ in range(CALLS):
        calls = _calls_of(world, rng)
        op = str(rng.choice(list(calls)))
        args, options = calls[op]
        what = f"{op}: " + ", ".join(changed(rng, args, options) for _ in range(rng.integers(0, 3)))
        args = [_leaf(each, bool(rng.integers(2))) for each in args]
        options = {name: _leaf(each, bool(rng.integers(2))) for name, each in options.items()}
        name = str(rng.choice(GRADIENTS))

        def of_result(t: torch.Tensor, name: str = name) -> torch.Tensor:
            return CHANGES[name](t) if t.dim() > 1 and t.numel() and name in CHANGES else t

        try:
            found = outcome(op, args, options, of_result)
        except REFUSED:
            continue
        except RuntimeError as error:
            if op in OF_TORCH or any(said in str(error) for said in OF_DISPATCH):
                continue
            wrong.append(f"{what}: {error}")
            continue
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
            continue
        made += 1
        as_plain = outcome(
            op, [plain(each) for each in args], {name: plain(each) for name, each in options.items()}, lambda t: plain(of_result(t))
        )
        tensors = [each for each in (*args, *options.values()) if isinstance(each, torch.Tensor)]
        if op != "replicated_gemm" and any(each.is_meta or each.is_sparse for each in tensors):
            wrong.append(f"{what}: taken")
        elif found != as_plain:
            wrong.append(f"{what}, gradient {name}: other bits than for plain copies")
    (a, b), _ = _calls_of(world, rng)["gemm_reduce_scatter"]
    alike = mkt.gemm_allreduce(a, b)
    usable = torch.equal(alike, (world.size * (a.float() @ b.float())).to(torch.bfloat16))
    return wrong if usable else [*wrong, "the world is not usable"], made


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("world", ["1x1", "1x2", "2x1"])
def test_odd_arguments(rng: np.random.Generator, world: str) -> None:
    """All ranks pass the same."""
    try_on_all_ranks(rng, world, _tried, 2, CALLS)
