"""The public functions: stacks, strides, dtypes, levels, autocast, gradients, callers, errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.compare import judge
from fastlinear.core.errors import InputError
from fastlinear.families.gated.stacking import STACKED
from fastlinear.fastpath import recorder
from tests.families.gated.gated_layers import (
    ABLE,
    LEVELS,
    H,
    K,
    N,
    by_hand,
    called,
    close,
    grads,
    parameters,
    stack,
)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backend", [None, *ABLE])
@pytest.mark.parametrize("shape", [(K,), (7, K), (2, 3, K), (1, K)])
def test_mlp_and_linear(shape: tuple[int, ...], backend: str | None, level: int | None) -> None:
    for down in (True, False):
        p = parameters(down=down)
        x = torch.randn(shape, requires_grad=True)
        expected = by_hand(x, *p, "gelu_tanh")
        for _ in range(2):  # the second call takes the plan of the first
            y = called(x, p, "gelu_tanh", backend=backend, recompute=level)
            assert y.is_contiguous()
            close(y, expected)
            dy = torch.randn_like(y)
            theirs = torch.autograd.grad(
                expected, [x, *(t for t in p if t is not None)], dy, retain_graph=True
            )
            close(grads(y, [x, *p], dy), theirs)
        with torch.no_grad():
            close(called(x, p, "gelu_tanh", backend=backend, recompute=level), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backend", [None, *ABLE])
@pytest.mark.parametrize("order", STACKED)
def test_stacked(order: str, backend: str | None, level: int | None) -> None:
    wg, wu, wd, bg, bu, bd = parameters()
    for down, b in ((wd, bd), (None, None)):
        for bias in (True, False):
            both = stack(wg, wu, order).detach().requires_grad_()
            given_bias = stack(bg, bu, order).detach().requires_grad_() if bias else None
            x = torch.randn(7, K, requires_grad=True)
            first, second = (bg, bu) if bias else (None, None)
            expected = by_hand(x, wg, wu, down, first, second, b, "silu")
            p = [both, None, down, given_bias, None, b]
            y = called(x, p, "silu", stacked=order, backend=backend, recompute=level)
            close(y, expected)
            dy = torch.randn_like(y)
            dx, dw, *rest = grads(y, [x, both, given_bias, down, b], dy)
            theirs = dict(
                zip(
                    ("x", "wg", "wu", "down", "b", "bg", "bu"),
                    torch.autograd.grad(
                        expected,
                        [t if t is not None else x for t in (x, wg, wu, down, b, first, second)],
                        dy,
                    ),
                    strict=True,
                )
            )
            close(dx, theirs["x"])
            close(dw, stack(theirs["wg"], theirs["wu"], order))
            if bias:
                close(rest[0], stack(theirs["bg"], theirs["bu"], order))
            if down is not None:
                close(rest[-2], theirs["down"])
                close(rest[-1], theirs["b"])


@pytest.mark.parametrize("backend", [None, *ABLE])
def test_any_strides(backend: str | None) -> None:
    wg = torch.randn(K, H).t().requires_grad_()
    wu = torch.randn(2 * H, 2 * K)[::2, ::2].requires_grad_()
    wd = torch.randn(N, 2 * H)[:, :H].requires_grad_()
    bg, bu, bd = torch.randn(2 * H)[::2], torch.randn(()).expand(H), torch.randn(N)
    views = (
        torch.randn(K, 7).t(),
        torch.randn(7, 2 * K)[:, ::2],
        torch.randn(2, 3, 2 * K)[..., :K],
        torch.randn(3, 2, K).transpose(0, 1),
        torch.randn(1, K).expand(7, K),
        torch.randn(()).expand(7, K),
    )
    for view in views:
        x = view.detach().requires_grad_()
        p: list[Tensor | None] = [wg, wu, wd, bg, bu, bd]
        y, expected = called(x, p, "silu", backend=backend), by_hand(x, *p, "silu")
        close(y, expected)
        wanted = [x, wg, wu, wd]
        close(torch.autograd.grad(y.sum(), wanted), torch.autograd.grad(expected.sum(), wanted))


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_errors_are_torchs(dtype: torch.dtype, activation: str, level: int) -> None:
    """Output and every gradient, against the same in plain PyTorch and in float64."""
    m, k, h, n = 40, 24, 32, 16
    shapes = ((m, k), (h, k), (h, k), (n, h), (h,), (h,), (n,))
    scales = (1.0, k**-0.5, k**-0.5, h**-0.5, 1.0, 1.0, 1.0)
    given = [
        (torch.randn(s) * c).to(dtype).requires_grad_() for s, c in zip(shapes, scales, strict=True)
    ]

    def all_of(f: Callable[..., Tensor], *t: Tensor) -> tuple[Tensor, ...]:
        y = f(*t)
        return (y.detach(), *torch.autograd.grad(y, t, torch.ones_like(y)))

    ours = all_of(lambda *t: fl.gated_mlp(*t, activation=activation, recompute=level), *given)
    theirs = all_of(lambda *t: by_hand(*t, activation), *given)
    exact = (t.detach().double().requires_grad_() for t in given)
    oracle = all_of(lambda *t: by_hand(*t, activation), *exact)
    names = ("y", "dx", "dWg", "dWu", "dWd", "dbg", "dbu", "dbd")
    for name, a, t, o in zip(names, ours, theirs, oracle, strict=True):
        verdict = judge(name, a, t, o)
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("backend", [None, *ABLE])
def test_frozen_tensors_skip_their_products(
    backend: str | None, level: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any subset may be frozen; what is not wanted is None, and costs no product."""
    asked: list[tuple[bool, ...]] = []
    from fastlinear.families.gated import autograd

    plain = autograd.run_backward

    def watched(*args: Any) -> Any:
        found = plain(*args)
        needs = args[-3]
        assert [g is not None for g in found] == list(needs)
        if recorder.active() is None:
            asked.append(needs)
        return found

    monkeypatch.setattr(autograd, "run_backward", watched)
    for wanted in ((0,), (1,), (2,), (3,), (4,), (5,), (6,), (0, 3), (1, 6), (2, 4), (3, 6)):
        given = [torch.randn(7, K), *parameters(grad=False)]
        for i in wanted:
            given[i].requires_grad_()
        y = called(given[0], given[1:], "sigmoid", backend=backend, recompute=level)
        expected = by_hand(*given, "sigmoid")
        chosen = [given[i] for i in wanted]
        close(torch.autograd.grad(y.sum(), chosen), torch.autograd.grad(expected.sum(), chosen))
    if backend not in (None, "eager") or level is not None:
        assert len(asked) == 11


@pytest.mark.parametrize("level", [0, 1])
def test_what_is_kept(level: int) -> None:
    """Level 0 keeps the two pre-activations besides x, level 1 nothing of hidden size."""
    p, x = parameters(), torch.randn(7, K, requires_grad=True)
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        called(x, p, "silu", recompute=level)
    given = {t.data_ptr() for t in (x, *p) if t is not None}
    hidden = [t for t in kept if t.data_ptr() not in given]
    assert sum(t.numel() for t in hidden) == (2 * 7 * H if level == 0 else 0)


def test_nothing_is_kept_without_gradients() -> None:
    x, p = torch.randn(7, K), parameters(grad=False)
    y = called(x, p, "silu", recompute=0)
    assert y.grad_fn is None
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("level", [0, 1])
def test_retain_graph_and_checkpoint(level: int) -> None:
    p, x = parameters(), torch.randn(7, K, requires_grad=True)
    wanted = [x, *(t for t in p if t is not None)]
    y = called(x, p, "gelu_tanh", recompute=level)
    first = torch.autograd.grad(y.sum(), wanted, retain_graph=True)
    close(torch.autograd.grad(y.sum(), wanted), first)
    again = checkpoint(lambda t: called(t, p, "gelu_tanh", recompute=level), x, use_reentrant=False)
    close(torch.autograd.grad(again.sum(), wanted), first)


@pytest.mark.parametrize("activation", ["none", "sigmoid", "gelu"])
@pytest.mark.parametrize("level", LEVELS)
def test_second_derivatives(activation: str, level: int | None) -> None:
    given = [torch.randn(2, K), *parameters()]
    given = [t.detach().double().requires_grad_() for t in given]

    def f(*t: Tensor) -> Tensor:
        return fl.gated_mlp(*t, activation=activation, recompute=level)

    assert torch.autograd.gradgradcheck(f, given)


def test_one_tensor_twice() -> None:
    """Gate and up may share their weight, and x may depend on it."""
    w = torch.randn(K, K, requires_grad=True)
    x = torch.randn(3, K) @ w
    y = fl.gated_mlp(x, w, w, w, activation="tanh", recompute=0)
    expected = by_hand(x, w, w, w, None, None, None, "tanh")
    close(y, expected)
    close(
        torch.autograd.grad(y.sum(), w, retain_graph=True), torch.autograd.grad(expected.sum(), w)
    )


def test_inputs_stay_what_they_are() -> None:
    given = [torch.randn(7, K), *parameters(grad=False)]
    before = [t.clone() for t in given]
    for backend in ABLE:
        fl.gated_mlp(*given, activation="relu2", backend=backend)
    assert all(torch.equal(now, then) for now, then in zip(given, before, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_no_tokens_and_no_features(level: int | None) -> None:
    p = parameters()
    x = torch.randn(0, K, requires_grad=True)
    y = called(x, p, "gelu", recompute=level)
    assert y.shape == (0, N)
    for g, t in zip(grads(y, [x, *p], torch.ones_like(y)), (x, *p), strict=True):
        assert t is not None
        assert g.shape == t.shape
        assert not g.any()
    assert called(torch.randn(2, 0, K), p, "gelu").shape == (2, 0, N)
    none = torch.zeros(H, 0)
    close(
        fl.gated_mlp(torch.zeros(3, 0), none, none, p[2], p[3], p[4], activation="tanh"),
        by_hand(torch.zeros(3, 0), none, none, p[2], p[3], p[4], None, "tanh"),
    )
    empty = torch.zeros(0, K)
    assert fl.gated_linear(torch.zeros(3, K), empty, empty).shape == (3, 0)


def test_autocast() -> None:
    p, x = parameters(), torch.randn(7, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = called(x, p, "silu")
        again = called(x.bfloat16(), p, "silu")
    assert y.dtype is again.dtype is torch.bfloat16
    expected = by_hand(x, *p, "silu")
    torch.testing.assert_close(y.float(), expected, rtol=5e-2, atol=2e-1)
    for g in grads(y, [x, *p], torch.ones_like(y)):
        assert g.dtype is torch.float32


def test_transforms_and_recorders() -> None:
    x, p = torch.randn(6, K), parameters(grad=False)
    expected = by_hand(x, *p, "relu")

    def f(x: Tensor) -> Tensor:
        return called(x, p, "relu")

    close(torch.vmap(f)(x), expected)
    close(
        torch.func.grad(lambda t: f(t).sum())(x),
        torch.func.grad(lambda t: by_hand(t, *p, "relu").sum())(x),
    )
    close(torch.func.jvp(f, (x,), (torch.ones_like(x),))[0], expected)
    close(make_fx(f)(x)(x), expected)
    for order in STACKED:
        both = stack(p[0], p[1], order)
        bias = stack(p[3], p[4], order)
        run = torch.vmap(
            lambda t, w=both, b=bias, o=order: fl.gated_linear(
                t, w, None, b, activation="relu", stacked=o
            )
        )
        close(run(x), by_hand(x, p[0], p[1], None, p[3], p[4], None, "relu"))
    with pytest.raises(InputError, match="forced backend"):
        torch.vmap(lambda t: called(t, p, "relu", backend="onednn"))(x)


def test_symbolic_tracing_keeps_the_calls() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.d = torch.nn.Parameter(torch.randn(2 * H, K)), torch.randn(K, H)

        def forward(self, x: Tensor) -> Tensor:
            h = fl.gated_linear(x, self.w, activation="relu", stacked="interleaved")
            return fl.gated_mlp(h @ self.d.t(), self.w, None, self.d, stacked="gate_up")

    module = Both()
    traced = torch.fx.symbolic_trace(module)
    x = torch.randn(7, K)
    close(traced(x), module(x))
    targets = {n.target for n in traced.graph.nodes}
    assert {fl.gated_linear, fl.gated_mlp} <= targets


def test_lazy_signs_are_resolved() -> None:
    x = torch.randn(7, K, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    p = parameters(grad=False)
    close(called(x, p, "silu"), by_hand(x.resolve_neg(), *p, "silu"))


def test_meta_tensors_have_shapes() -> None:
    x, w, d = (torch.empty(s, device="meta") for s in ((7, K), (H, K), (N, H)))
    assert fl.gated_mlp(x, w, w, d).shape == (7, N)
    assert fl.gated_linear(x, w, w).shape == (7, H)


ODD = torch.zeros(2 * H + 1, K)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": "swish"}, r"swish"),
        ({"stacked": "both"}, r"stacked in 'gate_up'"),
        ({"stacked": 3}, r"stacked in"),
        ({"stacked": ["gate_up"]}, r"stacked in"),
        ({"stacked": "gate_up"}, r"no up_weight with stacked"),
        ({"up_weight": None}, r"Name how gate and up lie"),
        ({"up_weight": None, "stacked": "gate_up", "up_bias": torch.zeros(H)}, r"no up_bias"),
        ({"up_weight": None, "stacked": "gate_up", "gate_weight": ODD}, r"even number of rows"),
        (
            {
                "up_weight": None,
                "stacked": "gate_up",
                "gate_weight": ODD[1:],
                "gate_bias": torch.zeros(H),
            },
            r"gate_bias of shape \(12,\) \(gate and up stacked\)",
        ),
        ({"up_weight": torch.zeros(H + 1, K)}, r"up_weight of gate_weight's shape"),
        ({"down_weight": torch.zeros(N, H + 1)}, r"down_weight of shape \(N, 6\)"),
        ({"down_weight": torch.zeros(H, N)}, r"looks transposed"),
        ({"down_weight": None}, r"down_weight to be a tensor; .* fastlinear.gated_linear"),
        ({"x": torch.zeros(2, 6)}, r"x with 5 features.*looks transposed"),
        ({"x": torch.zeros(2, 7)}, r"x with 5 features"),
        ({"x": torch.zeros(())}, r"at least one dimension"),
        ({"x": torch.zeros(2, K).long()}, r"dtype"),
        ({"x": torch.zeros(2, K).double()}, r"gate_weight of x's dtype"),
        ({"x": [1.0]}, r"x to be a tensor"),
        ({"gate_weight": torch.zeros(K)}, r"two dimensions"),
        ({"gate_weight": 3}, r"gate_weight to be a tensor"),
        ({"up_weight": torch.zeros(H, K).double()}, r"up_weight of x's dtype"),
        ({"down_bias": torch.zeros(H)}, r"down_bias of shape \(4,\)"),
        ({"up_bias": torch.zeros(H, device="meta")}, r"up_bias on x's device"),
        ({"recompute": 2}, r"recompute to be 0, 1 or None"),
        ({"recompute": True}, r"recompute to be"),
        ({"backend": 7}, r"backend to be a name"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "x": torch.zeros(2, K),
        "gate_weight": torch.zeros(H, K),
        "up_weight": torch.zeros(H, K),
        "down_weight": torch.zeros(N, H),
    }
    with pytest.raises(InputError, match=words):
        fl.gated_mlp(**(given | change))


def test_a_bias_on_one_half_is_served() -> None:
    x, (wg, wu, wd, bg, bu, bd) = torch.randn(7, K), parameters()
    for p in ([wg, wu, wd, bg, None, None], [wg, wu, wd, None, bu, bd]):
        for backend in ABLE:
            y, expected = called(x, p, "relu", backend=backend), by_hand(x, *p, "relu")
            close(y, expected)
            wanted = [t for t in p if t is not None]
            close(torch.autograd.grad(y.sum(), wanted), torch.autograd.grad(expected.sum(), wanted))
