"""The public function: layouts, strides, dtypes, autocast, gradients, odd callers, bad input."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import judge
from fastlinear.core.errors import FastlinearError, InputError, UnsupportedError
from fastlinear.core.timing import Samples
from fastlinear.dispatch import backend as registry
from fastlinear.dispatch.backend import Backend, family
from fastlinear.dispatch.tune import tune
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.problem import problem
from fastlinear.families.grouped.spec import FRONT

G, K, N = 3, 5, 4
FORCED = (None, "eager", "baddbmm", "loop")

# layout → (x's shape, its shape as (B, L, G, K) by movedim and view)
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "... (g k)": [(15,), (7, 15), (2, 7, 15), (2, 1, 3, 15), (1, 15)],
    "... g k": [(3, 5), (7, 3, 5), (2, 7, 3, 5), (2, 1, 2, 3, 5)],
    "g ... k": [(3, 5), (3, 7, 5), (3, 2, 7, 5), (3, 2, 2, 2, 5)],
    "b (g k) ...": [(7, 15), (2, 15, 6), (2, 15, 1), (2, 15, 3, 4), (1, 15, 6)],
    "b g k ...": [(7, 3, 5), (2, 3, 5, 6), (2, 3, 5, 1), (2, 3, 5, 2, 2)],
}
CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


def by_loop(x: Tensor, w: Tensor, b: Tensor | None, activation: str, layout: str) -> Tensor:
    """A loop over the groups as models write it: independent of the family's own code."""
    dim = {"... (g k)": -1, "... g k": -2, "g ... k": 0}.get(layout, 1)
    merged = "(g k)" in layout
    parts = x.chunk(len(w), dim) if merged else x.unbind(dim)
    outputs = []
    for g, part in enumerate(parts):
        turned = part.movedim(1, -1) if layout.startswith("b") else part
        y = F.linear(turned, w[g], None if b is None else b[g])
        outputs.append(y.movedim(-1, 1) if layout.startswith("b") else y)
    joined = torch.cat(outputs, dim) if merged else torch.stack(outputs, dim)
    return activation_of(activation).value(joined)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def parameters(grad: bool = False) -> tuple[Tensor, Tensor]:
    return torch.randn(G, N, K, requires_grad=grad), torch.randn(G, N, requires_grad=grad)


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize(("layout", "shape"), CASES)
def test_layouts(layout: str, shape: tuple[int, ...], backend: str | None) -> None:
    w, b = parameters(True)
    x = torch.randn(shape, requires_grad=True)
    expected = by_loop(x, w, b, "gelu", layout)
    for _ in range(2):  # the second call takes the plan of the first
        y = fl.grouped_linear(x, w, b, activation="gelu", layout=layout, backend=backend)
        assert y.is_contiguous()
        close(y, expected)
        dy = torch.randn_like(y)
        close(
            torch.autograd.grad(y, (x, w, b), dy),
            torch.autograd.grad(expected, (x, w, b), dy, retain_graph=True),
        )
    with torch.no_grad():
        close(
            fl.grouped_linear(x, w, activation="relu", layout=layout, backend=backend),
            by_loop(x, w, None, "relu", layout),
        )


@pytest.mark.parametrize("backend", FORCED)
@pytest.mark.parametrize("layout", SHAPES)
def test_any_strides(layout: str, backend: str | None) -> None:
    w, b = torch.randn(G, K, N).transpose(1, 2), torch.randn(N, G).t()
    for shape in SHAPES[layout]:
        double = (*shape[:-1], 2 * shape[-1])
        views = (
            torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))),
            torch.randn(double)[..., ::2],
            torch.randn(double)[..., : shape[-1]],
            torch.randn((1, *shape[1:])).expand(shape),
            torch.randn(()).expand(shape),
        )
        for view in views:
            x = view.detach().requires_grad_()
            y = fl.grouped_linear(x, w, b, activation="silu", layout=layout, backend=backend)
            expected = by_loop(x, w, b, "silu", layout)
            close(y, expected)
            close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x))


@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 7, 5)])
def test_one_input_for_all_groups(shape: tuple[int, ...]) -> None:
    w, b = parameters(True)
    x = torch.randn(shape, requires_grad=True)
    y = fl.grouped_linear(x, w, b, activation="relu", layout="... k")
    expected = torch.stack([F.relu(F.linear(x, w[g], b[g])) for g in range(G)], -2)
    close(y, expected)
    wanted = (x, w, b)
    close(torch.autograd.grad(y.sum(), wanted), torch.autograd.grad(expected.sum(), wanted))
    assert fl.explain(x, w, b, layout="... k").choices[0].problem.family == "linear_act"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_errors_are_torchs(dtype: torch.dtype, activation: str) -> None:
    """Output and every gradient, against the loop in the same dtype and in float64."""
    x = torch.randn(40, G * K).to(dtype).requires_grad_()
    w, b = (t.detach().to(dtype).requires_grad_() for t in parameters())

    def all_of(f: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
        y = f(*given)
        return (y.detach(), *torch.autograd.grad(y, given, torch.ones_like(y)))

    ours = all_of(lambda *t: fl.grouped_linear(*t, activation=activation), x, w, b)
    theirs = all_of(lambda *t: by_loop(*t, activation, "... (g k)"), x, w, b)
    exact = (t.detach().double().requires_grad_() for t in (x, w, b))
    oracle = all_of(lambda *t: by_loop(*t, activation, "... (g k)"), *exact)
    for name, a, t, o in zip(("y", "dx", "dW", "db"), ours, theirs, oracle, strict=True):
        verdict = judge(name, a, t, o)
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("... (g k)", (0, 15)),
        ("g ... k", (3, 0, 5)),
        ("b (g k) ...", (2, 15, 0)),
        ("b g k ...", (0, 3, 5, 2)),
    ],
)
@pytest.mark.parametrize("backend", FORCED)
def test_no_tokens(layout: str, shape: tuple[int, ...], backend: str | None) -> None:
    w, b = parameters(True)
    x = torch.randn(shape, requires_grad=True)
    y = fl.grouped_linear(x, w, b, activation="gelu", layout=layout, backend=backend)
    assert y.shape == by_loop(x, w, b, "gelu", layout).shape
    dx, dw, db = torch.autograd.grad(y.sum(), (x, w, b))
    assert dx.shape == shape
    assert not dw.any()
    assert not db.any()


def test_no_features() -> None:
    w, b = torch.randn(G, N, 0), torch.randn(G, N)
    close(fl.grouped_linear(torch.randn(7, G, 0), w, b, layout="... g k"), b.expand(7, G, N))
    w = torch.randn(G, 0, K)
    assert fl.grouped_linear(torch.randn(7, G * K), w).shape == (7, 0)


@pytest.mark.parametrize("backend", [None, "loop"])
def test_only_gradients_that_are_wanted(backend: str | None) -> None:
    for wanted in ((0,), (1,), (2,), (0, 2), (1, 2)):
        given = [torch.randn(7, G * K), *parameters()]
        for i in wanted:
            given[i].requires_grad_()
        y = fl.grouped_linear(*given, activation="tanh", backend=backend)
        expected = by_loop(*given, "tanh", "... (g k)")
        chosen = [given[i] for i in wanted]
        close(torch.autograd.grad(y.sum(), chosen), torch.autograd.grad(expected.sum(), chosen))


@pytest.mark.parametrize("activation", ["none", "sigmoid", "gelu"])
def test_second_derivatives(activation: str) -> None:
    x, w, b = (t.detach().double().requires_grad_() for t in (torch.randn(2, G * K), *parameters()))

    def f(*t: Tensor) -> Tensor:
        return fl.grouped_linear(*t, activation=activation, backend="loop")

    assert torch.autograd.gradgradcheck(f, (x, w, b))


def test_inputs_stay_what_they_are() -> None:
    x, (w, b) = torch.randn(7, G * K), parameters()
    before = [t.clone() for t in (x, w, b)]
    for backend in FORCED:
        fl.grouped_linear(x, w, b, activation="relu2", backend=backend)
    assert all(torch.equal(now, then) for now, then in zip((x, w, b), before, strict=True))


def test_autocast() -> None:
    x, (w, b) = torch.randn(7, G * K, requires_grad=True), parameters(True)
    with torch.autocast("cpu", torch.bfloat16):
        y = fl.grouped_linear(x, w, b, activation="relu")
        again = fl.grouped_linear(x.bfloat16(), w, b, activation="relu")
    assert y.dtype is again.dtype is torch.bfloat16
    torch.testing.assert_close(
        y, by_loop(x, w, b, "relu", "... (g k)").bfloat16(), rtol=2e-2, atol=5e-2
    )
    dx, dw, db = torch.autograd.grad(y.float().sum(), (x, w, b))
    assert dx.dtype is dw.dtype is db.dtype is torch.float32


def test_transforms_and_recorders() -> None:
    x, (w, b) = torch.randn(6, G * K), parameters()
    expected = by_loop(x, w, b, "relu", "... (g k)")

    def f(x: Tensor) -> Tensor:
        return fl.grouped_linear(x, w, b, activation="relu")

    close(torch.vmap(f)(x), expected)
    close(
        torch.func.grad(lambda t: f(t).sum())(x),
        torch.func.grad(lambda t: by_loop(t, w, b, "relu", "... (g k)").sum())(x),
    )
    close(torch.func.jvp(f, (x,), (torch.ones_like(x),))[0], expected)
    close(make_fx(f)(x)(x), expected)
    with pytest.raises(InputError, match="forced backend"):
        torch.vmap(lambda t: fl.grouped_linear(t, w, b, backend="loop"))(x)


def test_lazy_signs_are_resolved() -> None:
    x = torch.randn(7, G * K, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    w, b = parameters()
    close(fl.grouped_linear(x, w, b), by_loop(x.resolve_neg(), w, b, "none", "... (g k)"))


def test_meta_tensors_have_shapes() -> None:
    x, w = torch.empty(7, G * K, device="meta"), torch.empty(G, N, K, device="meta")
    assert fl.grouped_linear(x, w).shape == (7, G * N)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layout": "g k"}, r"expected layout in .*received 'g k'"),
        ({"layout": 3}, r"expected layout"),
        ({"layout": ["... k"]}, r"expected layout"),
        ({"activation": "swish"}, r"swish"),
        ({"x": torch.zeros(2, 14)}, r"15 = G·K features.*shape \(2, 14\)"),
        ({"x": torch.zeros(2, 12)}, r"looks transposed"),
        ({"x": torch.zeros(2, 3, 5)}, r"fits layout '... g k'"),
        ({"x": torch.zeros(2, 3, 6), "layout": "... g k"}, r"3 groups of 5"),
        ({"x": torch.zeros(5), "layout": "... g k"}, r"at least 2 dimensions"),
        ({"x": torch.zeros(2, 3), "layout": "b g k ..."}, r"at least 3 dimensions"),
        ({"x": torch.zeros(2, 6), "layout": "... k"}, r"x with 5 features"),
        ({"x": torch.zeros(2, 15).long()}, r"dtype"),
        ({"x": torch.zeros(2, 15).double()}, r"weight of x's dtype"),
        ({"x": [1.0]}, r"x to be a tensor"),
        ({"weight": torch.zeros(4, 5)}, r"weight of shape \(G, N, K\)"),
        ({"weight": torch.zeros(0, 4, 5)}, r"at least one group"),
        ({"weight": [torch.zeros(4, 5)]}, r"torch.stack"),
        ({"bias": torch.zeros(4)}, r"bias of shape \(3, 4\)"),
        ({"bias": torch.zeros(3, 4, device="meta")}, r"bias on x's device"),
        ({"backend": 7}, r"backend to be a name"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], words: str) -> None:
    call: dict[str, Any] = {"x": torch.zeros(2, 15), "weight": torch.zeros(G, N, K), "bias": None}
    with pytest.raises(InputError, match=words):
        fl.grouped_linear(**(call | change))


def test_forced_backends_say_why_not() -> None:
    x, (w, b) = torch.randn(7, G * K), parameters()
    with pytest.raises(UnsupportedError, match="CUDA devices only"):
        fl.grouped_linear(x, w, b, backend="triton")
    with pytest.raises(UnsupportedError, match="channels first only"):
        fl.grouped_linear(x, w, b, backend="conv")
    with pytest.raises(InputError, match="backend in"):
        fl.grouped_linear(x, w, b, backend="fastest")
    many = torch.randn(600, 1, 1)
    with pytest.raises(UnsupportedError, match="512 groups"):
        fl.grouped_linear(torch.randn(2, 600), many, backend="loop")


def test_explain_names_every_backend() -> None:
    x, (w, b) = torch.randn(7, G * K), parameters(True)
    told = fl.explain(x, w, b, activation="relu")
    assert [c.problem.piece for c in told.choices][:2] == ["forward", "backward"]
    names = {b.name for b in family("grouped_linear").candidates("forward")}
    for choice in fl.explain(x, w, b, needs_grad=False).choices:
        assert {choice.backend.name, *dict(choice.passed_over)} == names
    assert "CUDA devices only" in str(told)


def test_plans_are_forgotten_when_a_tuning_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleave(contenders: dict[str, Any], **_: Any) -> dict[str, Samples]:
        times = {name: (50.0 if name == "baddbmm" else 100.0,) * 5 for name in contenders}
        return {name: Samples(name, t, "wall", 1, "clock") for name, t in times.items()}

    monkeypatch.setattr(
        importlib.import_module("fastlinear.dispatch.tune"), "interleave", interleave
    )
    x, (w, b) = torch.randn(64, G * K), parameters()
    FRONT.plans.clear()
    fl.grouped_linear(x, w, b)
    assert len(FRONT.plans) == 1
    p = problem("forward", 64, G, K, N, dtype="float32", device="cpu", precision="highest")
    tuned = tune(p, rounds=5, budget_s=0.05)
    assert tuned.stored
    assert not FRONT.plans
    (choice,) = fl.explain(x, w, b).choices
    assert (choice.backend.name, choice.source, tuned.best) == ("baddbmm", "tuned", "baddbmm")
    close(fl.grouped_linear(x, w, b), by_loop(x, w, b, "none", "... (g k)"))


MUTANTS: dict[str, Callable[..., Any]] = {
    "bias dropped": lambda x, w, b, *rest: reference.forward(x, w, None, *rest),
    "bias of the next group": lambda x, w, b, *rest: reference.forward(
        x, w, None if b is None else b.roll(1, 0), *rest
    ),
    "weight of the next group": lambda x, w, *rest: reference.forward(x, w.roll(1, 0), *rest),
    "last token skipped": lambda x, w, *rest: reference.forward(
        torch.cat((x[:, :-1], 0 * x[:, -1:]), 1), w, *rest
    ),
    "last feature skipped": lambda x, w, *rest: reference.forward(
        torch.cat((x[..., :-1], 0 * x[..., -1:]), -1), w, *rest
    ),
    "weight's strides ignored": lambda x, w, *rest: reference.forward(
        x, torch.as_strided(w, w.shape, (w.shape[1] * w.shape[2], w.shape[2], 1)), *rest
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_backends_fail_the_contract(
    name: str, contract: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "mutant", MUTANTS[name], raising=False)
    target = "fastlinear.families.grouped.reference:mutant"
    registry._load.cache_clear()
    broken = Backend("grouped_linear", "forward", "broken", target, lambda _: None)
    problems = contract.problems("grouped_linear", "forward", "float32", "cpu")
    assert any(contract.failures(broken, p) for p in problems)
    registry._load.cache_clear()


def test_orders_are_views() -> None:
    """What backends see of a dense x is never a copy, and their results are the user's y."""
    for layout, shape in CASES:
        x = torch.randn(shape)
        rows = layouts.blocks(x, layout, G, K)
        assert rows.data_ptr() == x.data_ptr()
        assert rows.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        order = layouts.order_of(layout, shape)
        assert layouts.is_dense(rows, order)
        y = layouts.empty((*rows.shape[:3], N), order, x, x.dtype)
        assert layouts.unblocked(y, layout, shape).data_ptr() == y.data_ptr()


@pytest.mark.parametrize("layout", ["... (g k)", "... k"])
@pytest.mark.parametrize("backend", ["nope", "cublaslt", "conv"])
def test_a_wrong_backend_is_this_functions_error(layout: str, backend: str) -> None:
    x = torch.randn(5, 8 if "g" in layout else 4)
    with pytest.raises(FastlinearError, match=r"^grouped_linear: ") as raised:
        fl.grouped_linear(x, torch.randn(2, 3, 4), layout=layout, backend=backend)
    assert raised.value.function == "grouped_linear"
