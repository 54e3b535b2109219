"""Gradients: every order, every subset, every way torch asks for them."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import calls
from fastlinear.core.errors import InputError
from fastlinear.families.linear import reference
from fastlinear.families.linear.autograd import Formula, LinearAct, backward_from
from fastlinear.families.linear.cpu import onednn
from fastlinear.families.linear.problem import problem
from fastlinear.fastpath import autograd_node, lookup

ONEDNN = onednn.reason_not(problem("forward", 1, 1, 1, dtype="float32", device="cpu")) is None
FORCED = [None, "eager"]
FORCED += [pytest.param("onednn", marks=pytest.mark.skipif(not ONEDNN, reason="oneDNN"))]


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
    plain = fl.linear_act

    def again(x: Any, w: Any, *rest: Any, **options: Any) -> Tensor:
        if not torch.compiler.is_compiling() and not calls.transforms_active():
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                plain(x, w, *rest, **options)
        return plain(x, w, *rest, **options)

    monkeypatch.setattr(fl, "linear_act", again)
    return request.param


def tensors(
    *x_shape: int, n: int = 5, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves x, weight, bias that require grad."""
    k = x_shape[-1]
    made = (torch.randn(x_shape), torch.randn(n, k) / k**0.5, torch.randn(n))
    return tuple(t.to(dtype).requires_grad_() for t in made)  # type: ignore[return-value]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_and_gradgradcheck(activation: str) -> None:
    x, w, b = tensors(3, 4, dtype=torch.float64)

    def f(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return fl.linear_act(x, w, b, activation=activation)

    assert torch.autograd.gradcheck(f, (x, w, b))
    assert torch.autograd.gradgradcheck(f, (x, w, b))


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_first_and_second_order_match_torch(activation: str, backend: str) -> None:
    x, w, b = tensors(2, 3, 8)
    dy = torch.randn(2, 3, 5)

    def both_orders(y: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(y, (x, w, b), dy, create_graph=True)
        plain = torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
        square = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(square, (x, w, b), materialize_grads=True)
        return [*first, *plain, *second]

    close(
        both_orders(fl.linear_act(x, w, b, activation=activation, backend=backend)),
        both_orders(reference.linear_act(x, w, b, activation)),
    )


@pytest.mark.parametrize("backend", FORCED)
def test_create_graph_when_x_depends_on_the_weight(backend: str) -> None:
    """A recurrent weight: each gradient stops at its own argument and none counts twice."""
    x, w, _ = tensors(3, 6, n=6)

    def unrolled(step: Any) -> Tensor:
        h = x
        for _ in range(3):
            h = step(h, w)
        loss = h.square().sum()
        g = torch.autograd.grad(loss, (x, w), create_graph=True)
        return torch.cat([t.flatten() for t in (*g, *torch.autograd.grad(g[1].sum(), (x, w)))])

    close(
        unrolled(lambda h, w: fl.linear_act(h, w, activation="tanh", backend=backend)),
        unrolled(lambda h, w: torch.tanh(F.linear(h, w))),
    )


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize("create_graph", [False, True])
def test_one_tensor_as_x_and_weight(create_graph: bool, backend: str) -> None:
    a = torch.randn(4, 4, requires_grad=True)
    y = fl.linear_act(a, a, activation="gelu", backend=backend).sum()
    ours = torch.autograd.grad(y, a, create_graph=create_graph)
    close(ours, torch.autograd.grad(F.gelu(F.linear(a, a)).sum(), a))


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)])
def test_frozen_parts_get_no_gradient(
    needs: tuple[int, int, int], activation: str, backend: str
) -> None:
    ours, theirs = [], []
    for f, out in ((fl.linear_act, ours), (None, theirs)):
        torch.manual_seed(0)
        made = tensors(3, 4)
        for t, need in zip(made, needs, strict=True):
            t.requires_grad_(bool(need))
        if f is None:
            y = reference.linear_act(*made, activation)
        else:
            y = f(*made, activation=activation, backend=backend)
        y.square().sum().backward()
        out += [t.grad for t in made]
    assert [g is not None for g in ours] == [bool(n) for n in needs]
    close([g for g in ours if g is not None], [g for g in theirs if g is not None])


@pytest.mark.parametrize("backend", FORCED)
def test_expanded_and_transposed_gradients(backend: str) -> None:
    x, w, b = tensors(4, 6)
    for dy in (torch.ones(()).expand(4, 5), torch.randn(5, 4).t(), torch.randn(4, 10)[:, ::2]):
        ours = torch.autograd.grad(
            fl.linear_act(x, w, b, activation="silu", backend=backend), (x, w, b), dy
        )
        close(ours, torch.autograd.grad(F.silu(F.linear(x, w, b)), (x, w, b), dy))


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool, backend: str) -> None:
    x, w, b = tensors(4, 6)

    def f(x: Tensor) -> Tensor:
        return fl.linear_act(x, w, b, activation="gelu_tanh", backend=backend)

    checkpoint(f, x, use_reentrant=reentrant).sum().backward()
    got = [t.grad for t in (x, w, b)]
    y = F.gelu(F.linear(x, w, b), approximate="tanh")
    close(got, list(torch.autograd.grad(y.sum(), (x, w, b))))


@pytest.mark.parametrize("backend", FORCED)
def test_retain_graph_gives_the_same_twice_and_then_an_error(backend: str) -> None:
    x, w, b = tensors(4, 6)
    y = fl.linear_act(x, w, b, activation="relu", backend=backend).sum()
    first = torch.autograd.grad(y, (x, w, b), retain_graph=True)
    second = torch.autograd.grad(y, (x, w, b))
    assert all(torch.equal(a, c) for a, c in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match=r"second time|freed"):
        torch.autograd.grad(y, (x, w, b))


@pytest.mark.parametrize("backend", FORCED)
def test_changing_what_was_saved_is_noticed(backend: str) -> None:
    x, w, b = tensors(4, 6)
    y = fl.linear_act(x, w, b, activation="gelu", backend=backend)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_non_leaf_inputs_and_accumulation() -> None:
    x, w, b = tensors(4, 6)
    y = fl.linear_act(x * 2, w + 1, b.exp(), activation="silu")
    (y.sum() + x.sum() + w.sum()).backward()
    got = [t.grad for t in (x, w, b)]
    z = F.silu(F.linear(x * 2, w + 1, b.exp()))
    close(got, list(torch.autograd.grad(z.sum() + x.sum() + w.sum(), (x, w, b))))


def test_modes() -> None:
    x, w, b = tensors(4, 6)
    with torch.no_grad():
        assert not fl.linear_act(x, w, b, activation="relu").requires_grad
    with torch.inference_mode():
        y = fl.linear_act(x, w, b, activation="relu")
    assert y.is_inference()
    close(y.clone(), F.relu(F.linear(x, w, b)).detach())


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_torch_func(activation: str) -> None:
    x, w, b = (t.detach() for t in tensors(4, 6))

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return fl.linear_act(x, w, b, activation=activation)

    def theirs(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return reference.linear_act(x, w, b, activation)

    close(
        torch.func.grad(lambda *a: ours(*a).sum(), (0, 1, 2))(x, w, b),
        torch.func.grad(lambda *a: theirs(*a).sum(), (0, 1, 2))(x, w, b),
    )
    ws, bs = torch.stack([w, 2 * w]), torch.stack([b, b + 1])
    close(
        torch.vmap(ours, (None, 0, 0))(x, ws, bs),
        torch.stack([theirs(x, w, b), theirs(x, 2 * w, b + 1)]),
    )
    close(torch.vmap(ours, (0, None, None))(x, w, b), theirs(x, w, b))
    tangents = (torch.ones_like(x), torch.ones_like(w), torch.ones_like(b))
    close(torch.func.jvp(ours, (x, w, b), tangents), torch.func.jvp(theirs, (x, w, b), tangents))
    per_sample = torch.vmap(torch.func.grad(lambda w, x: ours(x, w, b).sum()), (None, 0))
    assert per_sample(w, x).shape == (4, 5, 6)


def test_forward_mode_keeps_the_tangent() -> None:
    x, w, b = (t.detach() for t in tensors(4, 6))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        ours = forward_ad.unpack_dual(fl.linear_act(dual, w, b, activation="gelu")).tangent
        theirs = forward_ad.unpack_dual(F.gelu(F.linear(dual, w, b))).tangent
        assert ours is not None
        close(ours, theirs)


@pytest.mark.skipif(not ONEDNN, reason="oneDNN")
def test_forced_backend_refuses_forward_mode_rather_than_drop_it() -> None:
    x, w, b = (t.detach() for t in tensors(4, 6))
    for weight in (w, w.clone().requires_grad_()):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(InputError, match="forward-mode"):
                fl.linear_act(dual, weight, b, activation="gelu", backend="onednn")
    with pytest.raises(InputError, match="transforms"):
        torch.vmap(lambda r: fl.linear_act(r, w, b, backend="onednn"))(x)


def test_functional_call() -> None:
    layer = fl.nn.Linear(6, 5, activation="relu")
    x = torch.randn(4, 6)
    doubled = {k: 2 * v.detach() for k, v in layer.named_parameters()}
    y = torch.func.functional_call(layer, doubled, (x,))
    close(y, F.relu(F.linear(x, doubled["weight"], doubled["bias"])))


def test_saved_tensors_hooks_see_what_is_saved() -> None:
    x, w, b = tensors(4, 6)
    seen: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        seen.append(t)
        return t

    backend = "onednn" if ONEDNN else None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fl.linear_act(x, w, b, activation="gelu", backend=backend).sum().backward()
    assert {tuple(t.shape) for t in seen} >= {(4, 6), (5, 6)}


NEEDS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)]


def needing(needs: tuple[int, int, int], *x_shape: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    made = tensors(*x_shape)
    for t, need in zip(made, needs, strict=True):
        t.requires_grad_(bool(need))
    return made


@pytest.mark.skipif(not ONEDNN, reason="oneDNN")
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("needs", NEEDS)
def test_nothing_is_saved_that_no_gradient_reads(
    needs: tuple[int, int, int], activation: str
) -> None:
    """x for dW, weight for dx, one tensor for the activation's derivative; no more."""
    x, w, b = needing(needs, 2, 3, 7)  # x (2, 3, 7), weight (5, 7), y (2, 3, 5)
    seen: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        seen.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = fl.linear_act(x, w, b, activation=activation, backend="onednn")
        kept = list(seen)
    expected = {x.data_ptr(): needs[1], w.data_ptr(): needs[0]}
    for pointer, wanted in expected.items():
        assert any(t.data_ptr() == pointer for t in kept) == bool(wanted)
    others = [t for t in kept if t.data_ptr() not in expected]
    assert [t.numel() for t in others] == ([] if activation == "none" else [y.numel()])


@pytest.mark.skipif(not ONEDNN, reason="oneDNN")
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_memory_of_what_is_not_saved_is_given_back(activation: str) -> None:
    """With a frozen weight x dies with its last user; with a frozen x the weight does."""
    for frozen, dies in ((1, 0), (0, 1)):
        made = [t * 1 for t in tensors(4, 6)[:2]]
        made[frozen] = made[frozen].detach()
        y = fl.linear_act(*made, None, activation=activation, backend="onednn")
        gone = weakref.ref(made[dies])
        del made
        assert gone() is None
        y.sum().backward()


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("needs", NEEDS)
def test_second_order_of_every_subset(
    needs: tuple[int, int, int], activation: str, backend: str
) -> None:
    x, w, b = needing(needs, 3, 4)
    leaves = [t for t in (x, w, b) if t.requires_grad]
    dy = torch.randn(3, 5, requires_grad=True)

    def orders(y: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(y, leaves, dy, create_graph=True)
        mixed = sum((g * g.detach().cos()).sum() + g.square().sum() for g in first)
        second = torch.autograd.grad(mixed, [dy, *leaves], materialize_grads=True)
        return [*first, *second]

    ours = orders(fl.linear_act(x, w, b, activation=activation, backend=backend))
    close(ours, orders(reference.linear_act(x, w, b, activation)))


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh", "quick_gelu"])
def test_third_order(activation: str, backend: str) -> None:
    def orders(f: Any) -> list[Tensor]:
        made = needing((1, 1, 1), 3, 4)
        value = f(*made, activation).square().sum()
        found = []
        for last in (False, False, True):
            grads = torch.autograd.grad(value, made, create_graph=not last)
            found += list(grads)
            value = sum(g.square().sum() for g in grads)  # type: ignore[assignment]
        return found

    def ours(x: Tensor, w: Tensor, b: Tensor, activation: str) -> Tensor:
        return fl.linear_act(x, w, b, activation=activation, backend=backend)

    for a, c in zip(orders(ours), orders(reference.linear_act), strict=True):
        torch.testing.assert_close(a, c, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_chosen_backends_run_every_plain_backward(activation: str) -> None:
    """torch's differentiable ops stand in only where a graph of the gradients is asked for."""
    ran: list[str] = []

    def counted(*arguments: Any) -> Any:
        ran.append(activation)
        return plain(*arguments)

    plain = backward_from(reference.grad_pre, reference.grad_input, reference.grad_weight)
    formula = Formula(activation, activation_of(activation).saved, reference.forward, counted)
    x, w, b = tensors(4, 6)
    y = LinearAct.apply(x, w, b, formula)
    torch.autograd.grad(y.sum(), (x, w, b), retain_graph=True)
    assert len(ran) == 1
    torch.autograd.grad(y.sum(), (x, w, b), create_graph=True)
    assert len(ran) == 1
