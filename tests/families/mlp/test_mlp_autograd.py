"""Gradients of fl.mlp: right, only where asked for, to any order, under checkpoint and compile."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.core import calls
from fastlinear.core.compare import Verdict, judge, over_draws
from fastlinear.families.mlp import autograd, reference
from fastlinear.fastpath import autograd_node, lookup

DRAWS = 16
BACKENDS = (None, "whole_cpp", "layerwise", "eager")


@pytest.fixture(params=["in Python", "in C++"], autouse=True)
def recorded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both forms of the formula: what is recorded by C++ was called before."""
    if request.param == "in Python":
        monkeypatch.setattr(autograd_node, "begun", lambda: False)
        return request.param
    if autograd_node.reason_not() is not None:
        pytest.skip(str(autograd_node.reason_not()))
    assert lookup.wait()
    assert autograd_node.wait()
    plain = fl.mlp

    def again(*arguments: Any, **options: Any) -> Tensor:
        if not torch.compiler.is_compiling() and not calls.transforms_active():
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                plain(*arguments, **options)
        return plain(*arguments, **options)

    monkeypatch.setattr(fl, "mlp", again)
    return request.param


def parameters(
    m: int, widths: tuple[int, ...], bias: str = "yes", scale: float = 2.0
) -> list[Tensor | None]:
    """x, the weights, the biases (None where there is none); all leaves."""
    given = {"yes": lambda i: True, "no": lambda i: False, "some": lambda i: i % 2 == 0}[bias]
    tensors = [torch.randn(m, widths[0])]
    tensors += [torch.randn(n, k) * (scale / k) ** 0.5 for k, n in pairwise(widths)]
    return [*tensors, *(torch.randn(n) if given(i) else None for i, n in enumerate(widths[1:]))]


def gradients(
    run: Callable[..., Tensor], tensors: list[Tensor | None], dy: Tensor, dtype: torch.dtype
) -> list[Tensor | None]:
    """y, then the gradient of each tensor, computed in ``dtype``."""
    leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
    layers = (len(leaves) - 1) // 2
    y = run(leaves[0], leaves[1 : layers + 1], leaves[layers + 1 :])
    y.backward(dy.to(dtype))
    return [y.detach(), *(None if t is None else t.grad for t in leaves)]


def verdicts(
    ours: Callable[..., Tensor], names: tuple[str, str], m: int, widths: tuple[int, ...], bias: str
) -> list[Any]:
    """y and every gradient judged over several draws, so that no single number's luck decides."""

    def plain(x: Any, ws: Any, bs: Any) -> Tensor:
        return reference.mlp(x, ws, bs, *names)

    scale = 0.3 if names[0] == "relu2" else 2.0
    columns: list[list[Any]] = []
    for draw in range(DRAWS):
        torch.manual_seed(draw)
        tensors, dy = parameters(m, widths, bias, scale), torch.randn(m, widths[-1])
        results = (
            gradients(ours, tensors, dy, torch.float32),
            gradients(plain, tensors, dy, torch.float32),
            gradients(plain, tensors, dy, torch.float64),
        )
        columns.append(list(zip(*results, strict=True)))
    found = []
    for i, triples in enumerate(zip(*columns, strict=True)):
        if triples[0][2] is None:
            assert all(t[0] is None for t in triples)
            continue
        found.append(judge(str(i), *(torch.stack(t) for t in zip(*triples, strict=True))))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", NAMES)
def test_gradients(activation: str, backend: str | None) -> None:
    i = NAMES.index(activation)
    names = activation, NAMES[(i + 3) % len(NAMES)]
    m, widths, bias = ((5, (7, 33, 20, 17), "some"), (33, (48, 30, 16), "yes"))[i % 2]

    def ours(x: Any, ws: Any, bs: Any) -> Tensor:
        return fl.mlp(x, ws, bs, activation=names[0], final_activation=names[1], backend=backend)

    wrong = [str(v) for v in verdicts(ours, names, m, widths, bias) if not v.passed]
    assert wrong == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("m", "widths"), [(1, (64,) * 5), (1, (1, 1)), (130, (9, 1, 12)), (64, (16, 16))]
)
def test_gradients_of_odd_sizes(m: int, widths: tuple[int, ...], backend: str | None) -> None:
    names = "relu", "none"
    wrong = [
        str(v)
        for v in verdicts(lambda *a: fl.mlp(*a, backend=backend), names, m, widths, "yes")
        if not v.passed
    ]
    assert wrong == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", [(0,), (1,), (3,), (4,), (6,), (2, 5), (0, 6)])
def test_only_what_is_asked_for(wanted: tuple[int, ...], backend: str | None) -> None:
    tensors = parameters(6, (8, 12, 10, 4))
    leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(tensors) if t is not None]
    fl.mlp(leaves[0], leaves[1:4], leaves[4:], backend=backend).square().sum().backward()
    plain = [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate(leaves)]
    reference.mlp(plain[0], plain[1:4], plain[4:], "relu", "none").square().sum().backward()
    for ours, theirs in zip(leaves, plain, strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_the_backward_reaches_only_the_layers_it_must() -> None:
    x, *rest = parameters(6, (8, 12, 10, 4))
    weights, biases = tuple(rest[:3]), tuple(rest[3:])
    _, saved = reference.forward(x, weights, biases, "relu", "none", True)
    needs = (False, (False, False, True), (False, True, False))
    dx, dws, dbs = reference.backward(torch.randn(6, 4), x, weights, saved, "relu", "none", needs)
    assert dx is None
    assert [g is None for g in dws] == [True, True, False]
    assert [g is None for g in dbs] == [True, False, True]
    assert reference.first_needed(needs) == 1


@pytest.mark.parametrize("names", [("gelu", "none"), ("tanh", "sigmoid"), ("relu", "silu")])
def test_double_backward(names: tuple[str, str]) -> None:
    tensors = [t.double().requires_grad_() for t in parameters(3, (4, 5, 2)) if t is not None]

    def run(*leaves: Tensor) -> Tensor:
        return fl.mlp(
            leaves[0],
            leaves[1:3],
            leaves[3:],
            activation=names[0],
            final_activation=names[1],
            backend="eager",
        )

    torch.autograd.gradcheck(run, tensors)
    torch.autograd.gradgradcheck(run, tensors)


def test_double_backward_through_our_formula() -> None:
    """A gradient penalty, as torch's own ops give it."""
    found = []
    for run in (
        lambda x, w, b: fl.mlp(x, w, b, activation="silu", backend="whole_cpp"),
        lambda x, w, b: reference.mlp(x, w, b, "silu", "none"),
    ):
        torch.manual_seed(1)
        leaves = [t.requires_grad_() for t in parameters(6, (8, 9, 3)) if t is not None]
        y = run(leaves[0], leaves[1:3], leaves[3:])
        (dx,) = torch.autograd.grad(y.sum(), leaves[0], create_graph=True)
        dx.square().sum().backward()
        found.append([t.grad for t in leaves[1:]])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)  # dx does not depend on the last bias
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def orders(run: Callable[..., Tensor], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """y, dx, the derivative of a function of dx, and what a function of that derives."""
    torch.manual_seed(seed)
    tensors = [t for t in parameters(14, (5, 16, 9, 2), scale=0.5) if t is not None]
    leaves = [t.to(dtype).requires_grad_() for t in tensors]
    x = leaves[0].view(2, 7, 5)
    y = run(x, leaves[1:4], leaves[4:])
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.pow(3).sum(), x, create_graph=True)
    third = torch.autograd.grad(second.square().sum() + dx.sum(), leaves)
    return [y, dx, second, *third]


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("final", ["none", "activation"])
def test_three_orders_of_derivatives(activation: str, final: str) -> None:
    names = activation, activation if final == "activation" else "none"

    def plain(x: Any, ws: Any, bs: Any) -> Tensor:
        return reference.mlp(x, ws, bs, *names)

    def fast(x: Any, ws: Any, bs: Any) -> Tensor:
        return fl.mlp(x, ws, bs, *names)

    def judged(draw: int, _: Any = None) -> dict[str, list[Verdict]]:
        ways = (fast, torch.float32), (plain, torch.float32), (plain, torch.float64)
        found = [orders(*way, draw) for way in ways]
        return {"": [judge(str(i), *ts) for i, ts in enumerate(zip(*found, strict=True))]}

    for verdict in over_draws(judged(0), judged)[""]:  # db of two numbers is few roundings
        assert verdict.passed, verdict


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("create_graph", [False, True])
def test_batches_of_gradients(activation: str, create_graph: bool) -> None:
    torch.manual_seed(4)
    given = [t for t in parameters(6, (5, 8, 3)) if t is not None]
    drawn, found = torch.randn(4, 6, 3), []
    ways = (fl.mlp, torch.float32), (reference.mlp, torch.float32), (reference.mlp, torch.float64)
    for run, dtype in ways:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in given]
        dys = drawn.to(dtype)
        y = run(leaves[0], leaves[1:3], leaves[3:], activation, "none")
        how = {"is_grads_batched": True, "create_graph": create_graph}
        first = torch.autograd.grad(y, leaves, dys, **how)
        found.append(list(first))
        if create_graph:
            total = torch.stack([t.square().sum() for t in first]).sum()
            found[-1] += torch.autograd.grad(total, leaves[:3])
    for i, results in enumerate(zip(*found, strict=True)):
        verdict = judge(str(i), *results)
        assert verdict.passed, verdict


def test_a_gradient_with_a_graph_computes_no_layer_again() -> None:
    leaves = [t.requires_grad_() for t in parameters(6, (8, 9, 7, 3)) if t is not None]
    products: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                products.append(op)
            return op(*args, **(kwargs or {}))

    y = fl.mlp(leaves[0], leaves[1:4], leaves[4:], activation="silu", backend="layerwise")
    with Watch():
        torch.autograd.grad(y.sum(), leaves[0], create_graph=True)
    assert len(products) == 3  # dx of each layer


def test_shared_weights_and_dependent_inputs() -> None:
    found = []
    for run in (fl.mlp, lambda x, w, b: reference.mlp(x, w, b, "relu", "none")):
        torch.manual_seed(2)
        w = torch.randn(8, 8, requires_grad=True)
        b = torch.randn(8, requires_grad=True)
        run(w * 2, [w, w, w], [b, None, b]).square().sum().backward()
        found.append((w.grad, b.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4)


def test_retain_graph_checkpoint_and_accumulation() -> None:
    leaves = [t.requires_grad_() for t in parameters(6, (8, 9, 3)) if t is not None]

    def run(x: Tensor) -> Tensor:
        return fl.mlp(x, leaves[1:3], leaves[3:], activation="gelu", final_activation="tanh")

    loss = run(leaves[0]).sum()
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in leaves if t.grad is not None]
    loss.backward()
    assert all(torch.allclose(t.grad, 2 * g) for t, g in zip(leaves, once, strict=True))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    for t in leaves:
        t.grad = None
    checkpoint(run, leaves[0], use_reentrant=False).sum().backward()
    assert all(torch.equal(t.grad, g) for t, g in zip(leaves, once, strict=True))  # type: ignore[arg-type]


def test_a_weight_changed_before_the_backward_is_noticed() -> None:
    leaves = [t.requires_grad_() for t in parameters(6, (8, 9, 3)) if t is not None]
    y = fl.mlp(leaves[0], leaves[1:3], leaves[3:], backend="whole_cpp")
    with torch.no_grad():
        leaves[2].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_optimizer_steps_follow_torchs() -> None:
    """Several steps of SGD, the parameters written in place between calls."""
    found = []
    for run in (
        lambda x, w, b: fl.mlp(x, w, b, backend="whole_cpp"),
        lambda x, w, b: reference.mlp(x, w, b, "relu", "none"),
    ):
        torch.manual_seed(3)
        leaves = [t.requires_grad_() for t in parameters(16, (8, 24, 3))[1:] if t is not None]
        optimizer = torch.optim.SGD(leaves, lr=0.05, momentum=0.9)
        for _ in range(8):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            run(x, leaves[:2], leaves[2:]).square().mean().backward()
            optimizer.step()
        found.append([t.detach() for t in leaves])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_autocast_training() -> None:
    leaves = [t.requires_grad_() for t in parameters(6, (8, 9, 3)) if t is not None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fl.mlp(leaves[0], leaves[1:3], leaves[3:]).float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype is torch.float32 for t in leaves)


def test_compiled_training() -> None:
    leaves = [t.requires_grad_() for t in parameters(6, (8, 9, 3)) if t is not None]

    def run() -> Tensor:
        return fl.mlp(leaves[0], leaves[1:3], leaves[3:], activation="gelu").square()

    run().sum().backward()
    expected = [t.grad.clone() for t in leaves if t.grad is not None]
    for t in leaves:
        t.grad = None
    torch.compile(run, fullgraph=True, backend="aot_eager")().sum().backward()
    for t, g in zip(leaves, expected, strict=True):
        assert t.grad is not None
        assert torch.allclose(t.grad, g, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_training_under_autocast(inside: bool) -> None:
    leaves = [t.requires_grad_() for t in parameters(6, (8, 9, 3)) if t is not None]

    def run(enabled: bool = inside) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return fl.mlp(leaves[0], leaves[1:3], leaves[3:]).float()

    compiled = torch.compile(
        run if inside else lambda: fl.mlp(leaves[0], leaves[1:3], leaves[3:]).float(),
        fullgraph=True,
        backend="aot_eager",
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        y = compiled()
    y.sum().backward()
    assert torch.equal(y, run(True))
    assert all(t.grad is not None and t.grad.dtype is torch.float32 for t in leaves)


def test_lead_dims_and_expanded_gradients() -> None:
    leaves = [t.requires_grad_() for t in parameters(12, (8, 9, 3)) if t is not None]
    x = leaves[0].detach().reshape(2, 6, 8).transpose(0, 1).requires_grad_()
    fl.mlp(
        x, leaves[1:3], leaves[3:], final_activation="relu", backend="whole_cpp"
    ).sum().backward()
    other = x.detach().clone().requires_grad_()
    reference.mlp(other, leaves[1:3], leaves[3:], "relu", "relu").sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, other.grad, atol=1e-5)


@pytest.mark.parametrize("kind", ["skipped derivative", "halved dW", "dx of another layer"])
def test_the_rule_catches_mutations(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaking the backward's result makes the verdicts fail."""
    right = autograd.run_backward

    def broken(dy: Any, x: Any, weights: Any, saved: Any, *rest: Any) -> Any:
        if kind == "skipped derivative":
            saved = [torch.ones_like(s) if s is not None else None for s in saved]
        dx, dws, dbs = right(dy, x, weights, saved, *rest)
        if kind == "halved dW":
            dws = (*dws[:-1], dws[-1] / 2)
        if kind == "dx of another layer":
            dx = dx.flip(1)
        return dx, dws, dbs

    monkeypatch.setattr(autograd, "run_backward", broken)
    found = verdicts(
        lambda *a: fl.mlp(*a, backend="whole_cpp"), ("relu", "none"), 12, (8, 16, 16, 8), "yes"
    )
    assert any(not v.passed for v in found)
