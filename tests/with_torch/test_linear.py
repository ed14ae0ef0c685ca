"""Layers of plain tensors, on threads: every element of results and gradients against float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make test-torch`")

import mkernel as mk
import mkernel.torch as mkt
from mkernel.errors import ArgumentError
from tests.with_torch.matrices import place_of

S, B, IN, OUT = 16, 2, 64, 96  # of the whole layer: for two ranks, and for four
WORLD: dict[str, Any] = {"target": "cpu", "heap_bytes": 1 << 24, "specialize": "none"}
ROUNDINGS = 4  # of a result or gradient on its way: partial sums, the sum, the bias, their sum


def worst(made: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> float:
    """The largest error over what so many roundings of terms of that magnitude allow."""
    return float(((made.detach().cpu().double() - exact).abs() / (ROUNDINGS * 2**-8 * magnitude)).max())


def whole(seed: int, bias: bool) -> tuple[Any, ...]:
    """The layer, what goes in and the gradient of what comes out; exact results, and the magnitudes of their terms.

    Drawn once for all ranks, because their threads share torch's random numbers.
    """
    torch.manual_seed(seed)
    layer = torch.nn.Linear(IN, OUT, bias, dtype=torch.bfloat16)
    x, gradient = torch.randn(S, B, IN).bfloat16(), torch.randn(S, B, OUT).bfloat16()
    found = []
    for how in (lambda t: t.double(), lambda t: t.double().abs()):
        w, b, xs, g = (how(t.detach()) for t in (layer.weight, layer.bias if bias else torch.zeros(OUT), x, gradient))
        found.append((xs @ w.t() + b, g @ w, g.flatten(0, 1).t() @ xs.flatten(0, 1), g.sum((0, 1))))
    return layer, x, gradient, list(zip(*found, strict=True))


def _errors(world: Any, kind: str, bias: bool, sequence: bool, everything: tuple[Any, ...], masters: bool = False) -> dict[str, float]:
    """``masters``: parameters and x are float32, under torch.autocast."""
    rank, size, place = world.rank, world.size, place_of(world)
    layer, x, gradient, expected = everything

    def part(t: torch.Tensor, dim: int | None) -> torch.Tensor:
        return t if dim is None else t.chunk(size, dim)[rank]

    row, along = kind == "RowParallelLinear", 0 if sequence else None
    places = (2, along, 1, None) if row else (along, 2, 0, 0)  # dimensions along which x, y, weight and bias are split
    stored = torch.float32 if masters else torch.bfloat16
    made = getattr(mkt, kind).from_linear(copy.deepcopy(layer).to(place, stored), sequence_parallel=sequence)
    mine = part(x, places[0]).to(place, stored, copy=True).requires_grad_()
    with torch.autocast(torch.device(place).type, torch.bfloat16, enabled=masters):
        y = made(mine)
    assert (y.dtype, mine.dtype, made.weight.dtype) == (torch.bfloat16, stored, stored)
    y.backward(part(gradient, places[1]).to(place))
    found = {"y": (y, 0, places[1]), "x": (mine.grad, 1, places[0]), "weight": (made.weight.grad, 2, places[2])}
    if bias:
        found["bias"] = (made.bias.grad, 3, places[3])
    return {name: worst(value, *(part(t, dim) for t in expected[at])) for name, (value, at, dim) in found.items()}


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "replicated"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kind", ["ColumnParallelLinear", "RowParallelLinear"])
def test_layers(kind: str, bias: bool, sequence: bool, rng: np.random.Generator) -> None:
    for errors in mk.launch(_errors, 2, args=(kind, bias, sequence, whole(int(rng.integers(1 << 30)), bias)), **WORLD):
        assert set(errors) == {"y", "x", "weight", *(["bias"] if bias else [])}
        assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "replicated"])
@pytest.mark.parametrize("kind", ["ColumnParallelLinear", "RowParallelLinear"])
def test_layers_under_autocast(kind: str, sequence: bool, rng: np.random.Generator) -> None:
    for errors in mk.launch(_errors, 2, args=(kind, True, sequence, whole(int(rng.integers(1 << 30)), True), True), **WORLD):
        assert set(errors) == {"y", "x", "weight", "bias"}
        assert max(errors.values()) <= 1, errors


def test_float32_needs_autocast() -> None:
    def rank(world: Any) -> None:
        layer = mkt.ColumnParallelLinear(IN, OUT, dtype=torch.float32)
        with pytest.raises(ArgumentError, match=r"weight.dtype = torch.float32.*torch.autocast"):
            layer(torch.randn(S, B, IN))
        with torch.autocast("cpu", torch.float16):
            assert layer(torch.randn(S, B, IN)).dtype == torch.float16

    mk.launch(rank, 2, **WORLD)


def test_without_values() -> None:
    """On torch's meta device there are shapes only."""

    def rank(world: Any) -> None:
        up = mkt.ColumnParallelLinear(IN, OUT, device="meta")
        down = mkt.RowParallelLinear(OUT, IN, device="meta")
        x = torch.empty(S, B, IN, dtype=torch.bfloat16, device="meta", requires_grad=True)
        y = down(up(x))
        y.sum().backward()
        assert (y.shape, y.device.type, x.grad is not None) == ((S, B, IN), "meta", True)
        with pytest.raises(ArgumentError, match=r"weight.dtype = torch.float32"):
            mkt.ColumnParallelLinear(IN, OUT, device="meta", dtype=torch.float32)(x)

    mk.launch(rank, 2, **WORLD)


def test_a_shared_float32_is_summed_exactly(rng: np.random.Generator) -> None:
    """Bits of any kind travel: the sum is that of float32 numbers in the order of ranks, on every rank."""
    values = rng.standard_normal((4, 3, 7)).astype(np.float32) * np.float32(2.0) ** rng.integers(-60, 60, (4, 3, 7)).astype(np.float32)
    values[1, 0, 0], values[2, 1, 1] = np.nan, np.inf

    def rank(world: Any) -> np.ndarray[Any, Any]:
        parameter = torch.zeros(3, 7, device=place_of(world)).requires_grad_()
        mkt.shared(parameter).backward(torch.from_numpy(values[world.rank]).to(parameter.device))
        assert parameter.grad is not None
        return parameter.grad.cpu().numpy()

    expected = values[0] + values[1] + values[2] + values[3]
    for found in mk.launch(rank, 4, **WORLD):
        np.testing.assert_array_equal(found, expected)


def test_a_bias_whose_gradient_is_not_summed_is_seen(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr(mkt.linear, "shared", lambda bias, world: bias)
    for errors in mk.launch(_errors, 2, args=("RowParallelLinear", True, True, whole(int(rng.integers(1 << 30)), True)), **WORLD):
        assert errors.pop("bias") > 1
        assert max(errors.values()) <= 1


def test_layers_are_alike_for_any_number_of_ranks() -> None:
    def rank(world: Any) -> list[torch.Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            layers = mkt.ColumnParallelLinear(IN, OUT), mkt.RowParallelLinear(IN, OUT)
        return [p.detach() for layer in layers for p in layer.parameters()]

    torch.manual_seed(7)
    expected = [p.detach() for _ in range(2) for p in torch.nn.Linear(IN, OUT, dtype=torch.bfloat16).parameters()]
    found = mk.launch(rank, 1, **WORLD)[0]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_one_batch_first() -> None:
    def rank(world: Any) -> None:
        column = mkt.ColumnParallelLinear(IN, OUT, batch_first=True)
        x = torch.randn(1, 8, IN).bfloat16()
        other = mkt.ColumnParallelLinear.from_linear(torch.nn.Linear(IN, OUT, dtype=torch.bfloat16))
        with torch.no_grad():
            other.weight.copy_(column.weight)
            other.bias.copy_(column.bias)
            assert torch.equal(column(x)[0], other(x.transpose(0, 1))[:, 0])
            assert column(x).shape == (1, 8 * world.size, OUT // world.size)
            with pytest.raises(ArgumentError, match=r"x.shape = \(2, 8, 64\).*one batch.*Megatron"):
                column(x.expand(2, -1, -1))

    mk.launch(rank, 2, **WORLD)


@pytest.mark.parametrize(
    ("arguments", "options", "rule"),
    [
        ((IN, 40), {}, "out_features = 40.*multiple of 8 x 2 ranks"),
        ((IN, OUT), {"dtype": torch.float64}, "dtype = .*bfloat16, float16, or float32 under"),
        ((60, OUT), {}, "multiples of 8"),
    ],
)
def test_layers_that_do_not_fit(arguments: tuple[int, int], options: dict[str, Any], rule: str) -> None:
    def rank(world: Any) -> None:
        with pytest.raises(ArgumentError, match=rule):
            mkt.ColumnParallelLinear(*arguments, **options)

    mk.launch(rank, 2, **WORLD)


def _drawn_again(world: Any, kind: str) -> list[bool]:
    """Whether a layer that came from the meta device has the parameters of one that was drawn at once. Threads share random numbers."""
    layers: list[torch.nn.Module] = []
    for rank in range(world.size):
        if rank == world.rank:
            torch.manual_seed(5)
            layers.append(getattr(mkt, kind)(IN, OUT))
            with torch.device("meta"):
                layers.append(getattr(mkt, kind)(IN, OUT))
            layers[1].to_empty(device="cpu")
            torch.manual_seed(5)
            layers[1].reset_parameters()  # type: ignore[operator]
        world.barrier()
    return [torch.equal(a, b) for a, b in zip(*(layer.parameters() for layer in layers), strict=True)]


@pytest.mark.parametrize("kind", ["ColumnParallelLinear", "RowParallelLinear"])
def test_parameters_are_drawn_of_the_whole_layer(kind: str) -> None:
    """By nn.Linear's reset_parameters all ranks would have one and the same part, of a layer with fewer inputs."""
    assert mk.launch(_drawn_again, 4, args=(kind,), **WORLD) == [[True, True]] * 4
