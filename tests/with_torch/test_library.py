"""Which way a call takes: past torch's dispatcher where nobody watches, through it where somebody does, with the same results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make test-torch`")

from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from mkernel.torch import library

X = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
calls: list[str] = []  # of what the op does


def _call(x: torch.Tensor, y: torch.Tensor, by: float) -> torch.Tensor:
    calls.append("call")
    return x.detach() * y.detach() * by


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, y = ctx.saved_tensors
    return product(gradient, y, ctx.by), product(gradient, x, ctx.by), None


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, y, ctx.by = inputs
    ctx.save_for_backward(x, y)


product = library.define(
    "product_of_tests(Tensor x, Tensor y, float by) -> Tensor",
    _call,
    lambda x, y, by: x.new_empty(x.shape),
    backward=_backward,
    save=_save,
)
plain = library.define("copy_of_tests(Tensor x) -> Tensor", lambda x: x.detach().clone(), lambda x: x.new_empty(x.shape))


@pytest.fixture(autouse=True)
def _as_it_is(monkeypatch: pytest.MonkeyPatch, _watched: None) -> None:
    monkeypatch.undo()  # what this folder draws
    calls.clear()


@contextlib.contextmanager
def dispatched() -> Iterator[list[str]]:
    """Names of the ops that are looked up at torch's dispatcher meanwhile, but for modes, which would be watching."""
    seen, real = [], library.torch.ops.mkernel.product_of_tests.default
    original = type(real).__call__

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        if self is real:
            seen.append(str(self))
        return original(self, *args, **options)

    type(real).__call__ = noted
    try:
        yield seen
    finally:
        type(real).__call__ = original


def test_nobody_watches() -> None:
    """Neither forward nor backward pass, with gradients or without, asks the dispatcher."""
    x, y = X.clone().requires_grad_(), torch.nn.Parameter(X.t())
    with dispatched() as seen:
        product(x, y, 2.0).sum().backward()
        with torch.no_grad():
            product(x, y, 2.0)
        product(X, X, 2.0)
    assert seen == []
    assert len(calls) == 5
    assert torch.equal(x.grad, 2 * y)
    assert torch.equal(y.grad, 2 * x)


def test_gradients_are_those_of_the_op() -> None:
    found = []
    for function in (product, product.op):
        x, y = X.clone().requires_grad_(), (X + 1).requires_grad_()
        found.append(torch.autograd.grad(product(function(x, y, 3.0), x, 1.0).sum(), (x, y)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_gradients_of_gradients_are_refused() -> None:
    """Where torch would form them of a part: also beside another term, and where only the operands that were kept require a gradient."""
    for function in (product, product.op):
        x, y = X.clone().requires_grad_(), (X + 1).requires_grad_()
        loss = function(x, y, 3.0).sum() + x.square().sum()
        with pytest.raises(NotImplementedError, match="product_of_tests has no gradient of its gradient"):
            torch.autograd.grad(loss, x, create_graph=True)


def test_without_a_gradient_it_is_said() -> None:
    """An op that has none says so, where torch would go on with a part of the gradient and a warning."""
    for function in (plain, plain.op):
        x = X.clone().requires_grad_()
        with pytest.raises(NotImplementedError, match="copy_of_tests has no gradient"):
            (function(x) + x).sum().backward()


class _Noting(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _by_mode(function: Callable[..., Any]) -> list[str]:
    seen: list[str] = []
    with _Noting(seen):
        function(X, X, 1.0)
    return seen


def _by_profiler(function: Callable[..., Any]) -> list[str]:
    with torch.profiler.profile() as profiler:
        function(X, X, 1.0)
    return [event.key for event in profiler.key_averages()]


def _by_trace(function: Callable[..., Any]) -> list[str]:
    return [node.kind() for node in torch.jit.trace(lambda x: function(x, x, 1.0), X).graph.nodes()]


def _by_fx(function: Callable[..., Any]) -> list[str]:
    return [str(node.target) for node in make_fx(lambda x: function(x, x, 1.0))(X).graph.nodes]


def _by_compiling(function: Callable[..., Any]) -> list[str]:
    seen: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compile(lambda x: function(x, x, 1.0), backend=backend, fullgraph=True)(X)
    return seen


def _by_subclass(function: Callable[..., Any]) -> list[str]:
    seen: list[str] = []

    class Noting(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return torch.zeros(2, 2)

    function(torch.Tensor._make_subclass(Noting, X), X, 1.0)
    return seen


@pytest.mark.parametrize("by", [_by_mode, _by_profiler, _by_trace, _by_fx, _by_compiling, _by_subclass])
@pytest.mark.filterwarnings("ignore")
def test_who_watches_sees_the_op(by: Callable[[Any], list[str]]) -> None:
    assert any("product_of_tests" in name for name in by(product)), by(product)


def test_compiled_graphs_ask_for_no_gradients() -> None:
    """Forward and backward graphs call the op below autograd, whose gradients are those of the op."""
    seen: list[str] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "product_of_tests" in str(node.target))
        return make_boxed_func(graph.forward)

    x, y = X.clone().requires_grad_(), (X + 1).requires_grad_()
    backend = aot_autograd(fw_compiler=compiler)
    torch.compile(lambda x, y: product(x, y, 3.0), backend=backend, fullgraph=True)(x, y).sum().backward()
    assert seen == 3 * ["mkernel._product_of_tests.default"]
    assert torch.equal(x.grad, 3 * y)
    assert torch.equal(y.grad, 3 * x)


def test_nothing_is_computed_of_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(X)
        assert product(fake, fake, 1.0).shape == X.shape
    assert calls == []


def _transformed(function: Callable[..., Any]) -> Any:
    return torch.func.grad(lambda x: function(x, X, 2.0).sum())(X)


def _mapped(function: Callable[..., Any]) -> Any:
    return torch.vmap(lambda x: function(x, X, 2.0))(torch.stack([X, X]))


@pytest.mark.parametrize("what", [_transformed, _mapped])
def test_transforms(what: Callable[[Any], Any]) -> None:
    """Those of torch.func are refused, or done, as by the op itself."""
    outcomes = []
    for function in (product, product.op):
        try:
            outcomes.append(what(function).tolist())
        except (RuntimeError, NotImplementedError) as error:
            outcomes.append(f"{type(error)}: {error}")
    assert outcomes[0] == outcomes[1]


def _dual() -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(product(X, forward_ad.make_dual(X, X), 1.0)).tangent


@pytest.mark.parametrize(
    "what",
    [
        _dual,
        lambda: torch.func.jvp(lambda x: product(x, X, 1.0), (X,), (X,)),
        lambda: torch.func.jacfwd(lambda x: product(x, X, 1.0))(X),
        lambda: torch.compile(lambda x: torch.func.jvp(lambda x: product(x, X, 1.0), (x,), (x,)), backend="aot_eager")(X),
    ],
    ids=["dual", "jvp", "jacfwd", "compiled jvp"],
)
def test_forward_mode_is_refused(what: Callable[[], Any]) -> None:
    """Where torch would take the op for a constant, with a tangent of zeros or none."""
    with pytest.raises(NotImplementedError, match="product_of_tests has no forward-mode gradient"):
        what()


def test_constants_of_forward_mode_are_taken() -> None:
    _, tangent = torch.func.jvp(lambda x: product(X, X, 1.0) * x, (X,), (torch.ones_like(X),))
    assert torch.equal(tangent, X * X)
