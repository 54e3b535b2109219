"""diagonal_linear as its callers see it: values, gradients, errors, autocast, compile."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import judge
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.families.diagonal.backends import clear_of_kink
from fastlinear.families.diagonal.cpu import cpp
from fastlinear.families.diagonal.spec import FRONT
from fastlinear.fastpath import autograd_node, lookup

BACKENDS = (None, "eager", "addcmul", "cpp")


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def exact(x: Tensor, w: Tensor, b: Tensor | None, name: str, r: Tensor | None) -> Tensor:
    """The formula written out once more, by hand."""
    pre = x * w
    if b is not None:
        pre = pre + b
    y = activation_of(name).value(pre)
    return y if r is None else y + r


def gradients(run: Any, tensors: list[Tensor | None], dy: Tensor) -> list[Tensor]:
    """y and its gradients with respect to every tensor."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    y = run(*leaves)
    wanted = [t for t in leaves if t is not None]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_and_gradients_keep_the_rule(backend: str | None, dtype: torch.dtype) -> None:
    """Every activation, with bias and residual and without, in one dimension to three."""
    if backend == "cpp" and dtype is torch.float64:
        pytest.skip("serves no float64")
    shapes = itertools.cycle(((300, 160), (2, 5, 33), (7,)))
    turns = itertools.cycle(itertools.product((True, False), (True, False)))
    for name in NAMES:
        for _ in range(3):
            shape, (bias, residual) = next(shapes), next(turns)
            if backend == "addcmul" and not bias:
                continue
            k = shape[-1]
            w, b = draw(k, dtype=dtype), draw(k, dtype=dtype) if bias else None
            x = clear_of_kink(draw(*shape, dtype=dtype), w, b, lambda s=shape: draw(*s).to(dtype))
            r, dy = draw(*shape, dtype=dtype) if residual else None, draw(*shape, dtype=dtype)
            given = [x, w, b, r]

            def ours(x: Tensor, w: Tensor, b: Any, r: Any, name: str = name) -> Tensor:
                return fl.diagonal_linear(x, w, b, activation=name, residual=r, backend=backend)

            def torchs(x: Tensor, w: Tensor, b: Any, r: Any, name: str = name) -> Tensor:
                return exact(x, w, b, name, r)

            wide = [None if t is None else t.double() for t in given]
            found, theirs = gradients(ours, given, dy), gradients(torchs, given, dy)
            oracle = gradients(torchs, wide, dy.double())
            for i, (f, t, o) in enumerate(zip(found, theirs, oracle, strict=True)):
                if dtype is torch.float64:  # there is no oracle above it
                    torch.testing.assert_close(f, t)
                    continue
                verdict = judge(str(i), f, t, o)
                assert verdict.passed, (name, shape, bias, residual, verdict)


@pytest.mark.parametrize("wrong", ["bias", "weight", "residual", "activation", "mask"])
def test_what_is_wrong_is_seen(wrong: str) -> None:
    """The comparison above fails for a result that is wrong in one thing."""
    x, w, b, r = draw(300, 160), draw(160), draw(160), draw(300, 160)
    theirs, oracle = exact(x, w, b, "gelu", r), exact(*map(Tensor.double, (x, w, b)), "gelu", r)
    w2, b2 = w.clone(), b.clone()
    w2[3] *= 1.001
    b2[159] += 1e-3
    ours = {
        "bias": exact(x, w, b2, "gelu", r),
        "weight": exact(x, w2, b, "gelu", r),
        "residual": exact(x, w, b, "gelu", r.roll(1)),
        "activation": exact(x, w, b, "gelu_tanh", r),
        "mask": torch.where(torch.arange(160) < 159, theirs, 0.0),
    }[wrong]
    assert judge("right", theirs, theirs, oracle).passed
    assert not judge(wrong, ours, theirs, oracle).passed


@pytest.mark.parametrize("backend", [None, "cpp"])
def test_gradcheck_of_any_subset(backend: str | None) -> None:
    dtype = torch.float64 if backend is None else torch.float32
    for needs in itertools.product((True, False), repeat=4):
        if not any(needs):
            continue
        shapes = ((60, 8), (8,), (8,), (60, 8))
        given = [
            draw(*s, dtype=dtype).requires_grad_(n) for s, n in zip(shapes, needs, strict=True)
        ]
        y = fl.diagonal_linear(*given[:3], activation="gelu", residual=given[3], backend=backend)
        wanted = [t for t in given if t.requires_grad]
        found = torch.autograd.grad(y.sum(), wanted)
        expected = torch.autograd.grad(exact(*given[:3], "gelu", given[3]).sum(), wanted)
        for a, e in zip(found, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", [None, "addcmul", "eager"])
@pytest.mark.parametrize("name", ["none", "gelu", "tanh", "relu2"])
def test_second_derivatives(name: str, backend: str | None) -> None:
    given = [
        draw(s, dtype=torch.float64) if s == 4 else draw(3, 4, dtype=torch.float64)
        for s in (3, 4, 4, 3)
    ]

    def ours(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return fl.diagonal_linear(x, w, b, activation=name, residual=r, backend=backend)

    leaves = [t.requires_grad_() for t in given]
    assert torch.autograd.gradcheck(ours, leaves)
    assert torch.autograd.gradgradcheck(ours, leaves)


def test_second_derivatives_of_a_compiled_pass() -> None:
    """The formula's own double backward, which float64 never takes."""

    def second(run: Any) -> tuple[Tensor, ...]:
        x, w, b = (t.clone().requires_grad_() for t in given)
        grads = torch.autograd.grad(run(x, w, b).square().sum(), (x, w, b), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), (x, w, b))

    given = draw(40, 6), draw(6), draw(6)
    for name in ("none", "silu", "sigmoid"):
        ours = second(
            lambda x, w, b, n=name: fl.diagonal_linear(x, w, b, activation=n, backend="cpp")
        )
        theirs = second(lambda x, w, b, n=name: exact(x, w, b, n, None))
        for a, e in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-2)


def test_kept_for_the_backward_are_inputs_only() -> None:
    x, w, b = draw(300, 200).requires_grad_(), draw(200).requires_grad_(), draw(200)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.data_ptr()) or t, lambda t: t
    ):
        fl.diagonal_linear(x, w, b, activation="gelu", backend="cpp")
    assert set(kept) == {x.data_ptr(), w.data_ptr(), b.data_ptr()}


def test_a_changed_input_is_noticed() -> None:
    x, w = draw(300, 200).requires_grad_(), draw(200).requires_grad_()
    y = fl.diagonal_linear(x, w, backend="cpp")
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --------------------------------------------------------------------------------------------
# Arguments


def test_errors_name_what_is_wrong() -> None:
    x, w = torch.ones(2, 3), torch.ones(3)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"x": torch.ones(2, 4)}, "x of shape"),
        ({"x": torch.ones(())}, "x of shape"),
        ({"weight": torch.ones(3, 3)}, "weight of shape"),
        ({"bias": torch.ones(4)}, "bias of shape"),
        ({"residual": torch.ones(3)}, "residual of x's shape"),
        ({"activation": "swish"}, "activation in"),
        ({"activation": []}, "activation in"),
        ({"x": torch.ones(2, 3, dtype=torch.int64)}, "a dtype in"),
        ({"weight": torch.ones(3).double()}, "weight of x's dtype"),
        ({"bias": torch.ones(3).half()}, "bias of x's dtype"),
        ({"residual": torch.ones(2, 3).double()}, "residual of x's dtype"),
        ({"weight": torch.ones(3, device="meta")}, "weight on x's device"),
        ({"x": [1.0]}, "x to be a tensor"),
        ({"backend": 3}, "backend to be a name"),
    ]
    for change, words in cases:
        with pytest.raises(InputError, match=words):
            fl.diagonal_linear(**({"x": x, "weight": w} | change))
    with pytest.raises(UnsupportedError, match="no bias"):
        fl.diagonal_linear(x, w, backend="addcmul")
    with pytest.raises(UnsupportedError, match="CUDA"):
        fl.diagonal_linear(x, w, backend="triton")


def test_activation_and_residual_have_positions() -> None:
    x, w, b, r = draw(4, 3), draw(3), draw(3), draw(4, 3)
    y = fl.diagonal_linear(x, w, b, "relu", r)
    assert torch.equal(y, fl.diagonal_linear(x, w, b, activation="relu", residual=r))


def test_no_rows_and_no_features() -> None:
    for shape in ((0, 5), (3, 0), (2, 0, 5)):
        x, w = draw(*shape).requires_grad_(), draw(shape[-1]).requires_grad_()
        y = fl.diagonal_linear(x, w, w, activation="gelu", residual=x)
        assert y.shape == shape
        dx, dw = torch.autograd.grad(y.sum(), (x, w))
        assert dx.shape == shape
        assert torch.equal(dw, torch.zeros_like(w))


@pytest.mark.parametrize("backend", [None, "cpp"])
def test_layouts(backend: str | None) -> None:
    """Strided, expanded and overlapping inputs, lazy signs, parameters that are views."""
    w, b = draw(60)[::2], draw(1).expand(30)
    base = draw(64, 90)
    inputs = {
        "apart": base[:, :30],
        "expanded": base[:1, :30].expand(64, 30),
        "overlapping": base.view(-1).as_strided((64, 30), (1, 1)),
        "batch": draw(4, 16, 90)[..., :30],
        "negated": torch._neg_view(base)[:, :30],
    }
    if backend is None:
        inputs |= {"strided": draw(30, 64).t(), "permuted": draw(16, 4, 30).transpose(0, 1)}
    assert inputs["negated"].is_neg()
    for name, x in inputs.items():
        for _ in range(3):
            y = fl.diagonal_linear(x, w, b, activation="silu", backend=backend)
            torch.testing.assert_close(y, exact(x, w, b, "silu", None), msg=name)
        leaf, scale = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = fl.diagonal_linear(leaf, scale, b, residual=leaf, backend=backend)
        dx, dw = torch.autograd.grad(y.sum(), (leaf, scale))
        torch.testing.assert_close(dx, (w + 1).expand_as(x), msg=name)
        torch.testing.assert_close(dw, x.reshape(-1, 30).sum(0), rtol=1e-4, atol=1e-4, msg=name)


def test_nan_and_infinities_go_where_eager_sends_them() -> None:
    bad = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e38]
    x = torch.tensor(bad).repeat(200, 40)
    w, b = draw(240), draw(240)
    for name in ("none", "relu", "silu"):
        for backend in ("addcmul", "cpp"):
            y = fl.diagonal_linear(x, w, b, activation=name, backend=backend)
            torch.testing.assert_close(y, exact(x, w, b, name, None), equal_nan=True)


@pytest.mark.parametrize("backend", ["addcmul", "cpp"])
@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinities_in_values_and_gradients(name: str, backend: str) -> None:
    """As eager, but where its formula loses a limit: gelu of infinity, gelu_tanh's slope."""
    bad = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e38, -1e38, 3.0]
    x = torch.tensor(bad).repeat(5, 40).requires_grad_()
    w, b, dy = draw(320), draw(320), draw(5, 320)
    pre = x * w + b
    theirs = activation_of(name).value(pre)
    ours = fl.diagonal_linear(x, w, b, activation=name, backend=backend)
    (dx,), (by_eager,) = (torch.autograd.grad(y, x, dy) for y in (ours, theirs))
    steep = pre.detach() > 0
    limits = (torch.where(steep, pre.detach(), 0.0), torch.where(steep, dy * w, 0.0))
    for found, eager, limit in zip((ours, dx), (theirs, by_eager), limits, strict=True):
        lost = ~pre.isnan() & (eager.isnan() | (eager.isinf() & pre.isfinite()))
        same = (found == eager) | (found.isnan() & eager.isnan())
        other = lost & ~same
        assert name in ("gelu", "gelu_tanh", "quick_gelu") or not other.any()
        torch.testing.assert_close(found[~lost], eager[~lost], equal_nan=True)
        torch.testing.assert_close(found[other], limit[other])
    assert ours[pre.isnan()].isnan().all()


# --------------------------------------------------------------------------------------------
# States a call is made in


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_adds_a_residual_of_another_dtype(dtype: torch.dtype) -> None:
    x, weight, residual = torch.randn(4, 8, dtype=dtype), torch.randn(8), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fl.diagonal_linear(x, weight, activation="silu", residual=residual)
        expected = residual + fl.diagonal_linear(x, weight, activation="silu")
        assert y.dtype is torch.float32
        assert torch.equal(y, expected)
        with pytest.raises(InputError, match="expected residual of x's shape"):
            fl.diagonal_linear(x, weight, residual=residual[:3])


def test_autocast_casts_as_for_linear() -> None:
    x, w, b, r = draw(8, 5), draw(5).requires_grad_(), draw(5), draw(8, 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for backend in (None, "cpp"):
            y = fl.diagonal_linear(x, w, b, backend=backend)
            assert y.dtype is torch.bfloat16
            z = fl.diagonal_linear(x, w, b, residual=r, backend=backend)
            assert z.dtype is torch.float32  # as torch adds a bfloat16 branch to it
            torch.testing.assert_close(z, r + y)
            half = fl.diagonal_linear(x, w, b, residual=r.bfloat16(), backend=backend)
            assert half.dtype is torch.bfloat16
        assert fl.diagonal_linear(x.double(), w.double()).dtype is torch.float64
    z.sum().backward()
    assert w.grad is not None
    assert w.grad.dtype is torch.float32


def test_compile_without_graph_breaks() -> None:
    torch.compiler.reset()

    def run(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
        return fl.diagonal_linear(x, w, b, activation="gelu", residual=r) * 2

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    given: list[Tensor | None] = [draw(40, 6), draw(6), draw(6), draw(40, 6)]
    dy = draw(40, 6)
    for a, e in zip(gradients(compiled, given, dy), gradients(run, given, dy), strict=True):
        torch.testing.assert_close(a, e)


def test_registered_ops_are_sound() -> None:
    x, w, b, r = (t.requires_grad_() for t in (draw(9, 6), draw(6), draw(6), draw(9, 6)))
    ops = torch.ops.fastlinear
    opcheck(ops.diagonal_linear, (x, w, b, r, "gelu", True, ""))
    opcheck(ops.diagonal_linear, (x, w, None, None, "relu", True, "cpp"))
    dy, *given = (t.detach() for t in (r, x, w, b))
    needs = [True, False, True, False]
    opcheck(ops.diagonal_linear_backward, (dy, [], *given, None, "gelu", needs, ""))
    needs = [False, True, False, False]
    opcheck(ops.diagonal_linear_backward, (dy, [], *given[:2], None, None, "none", needs, ""))


def test_transforms_and_forward_mode() -> None:
    x, w, b = draw(5, 3), draw(3), draw(3)

    def run(x: Tensor) -> Tensor:
        return fl.diagonal_linear(x, w, b, activation="silu")

    torch.testing.assert_close(torch.vmap(run)(x), run(x))
    value, tangent = torch.func.jvp(run, (x,), (torch.ones_like(x),))
    expected = torch.func.vjp(run, x)[1](torch.ones_like(x))[0]
    torch.testing.assert_close(value, run(x))
    torch.testing.assert_close(tangent, expected)  # elementwise: the Jacobian is diagonal


def test_tracing_sees_torchs_ops() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    w = draw(3)
    graph = make_fx(lambda x: fl.diagonal_linear(x, w, w, backend="cpp"))(draw(5, 3))
    assert "aten.mul" in graph.code


def test_through_the_compiled_fast_path() -> None:
    if not lookup.wait(120):
        pytest.skip(f"no fast path here: {lookup.reason_not()}")
    x, w, b, r = draw(300, 200), draw(200), draw(200), draw(300, 200)
    FRONT.forget()
    for _ in range(3):
        y = fl.diagonal_linear(x, w, b, activation="relu", residual=r)
    call = (x, w, (b, r), "relu", None)
    assert torch.equal(FRONT.table(*call), y)
    assert FRONT.table(x, w, (b, None), "relu", None) is None
    leaf = w.clone().requires_grad_()
    for _ in range(3):
        trained = fl.diagonal_linear(x, leaf, b, activation="relu", residual=r)
        torch.testing.assert_close(
            torch.autograd.grad(trained.sum(), leaf)[0],
            ((x * w + b > 0) * x).sum(0),
            rtol=1e-4,
            atol=1e-3,
        )
    assert FRONT.table(x, leaf, (b, r), "relu", None) is not None


def test_explain_says_why() -> None:
    x, w = draw(300, 200), draw(200)
    story = fl.explain(x, w, w, activation="relu", needs_grad=True)
    assert [c.problem.piece for c in story.choices] == ["forward", "backward", "step"]
    assert "cpp" in str(story)
    assert fl.explain(x, w, backend="eager").choices[0].source == "forced"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("shape", [(64, 48), (2, 5, 7), (1, 16), (3000, 100)])
def test_cpp_calls_run_without_python(
    shape: tuple[int, ...], grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a call is known, neither direction comes back to the backend's Python function."""
    if not (lookup.wait(120) and autograd_node.wait(180)):
        pytest.skip(f"no nodes here: {lookup.reason_not() or autograd_node.reason_not()}")
    x, r, dy = (draw(*shape) for _ in range(3))
    if len(shape) == 2:  # rows apart
        x = torch.cat([x, x], dim=1)[:, : shape[1]]
    leaves = [x, draw(shape[-1]), draw(shape[-1]), r]
    for t in leaves:
        t.requires_grad_(grad)

    def run() -> list[Tensor]:
        x, w, b, r = leaves
        y = fl.diagonal_linear(x, w, b, activation="silu", residual=r, backend="cpp")
        return [y.detach(), *(torch.autograd.grad(y, leaves, dy) if grad else ())]

    FRONT.forget()
    expected = run()
    for _ in range(3):  # the kind is seen, wanted, known
        run()

    def fail(*_: Any) -> None:
        raise AssertionError("in Python")

    monkeypatch.setattr(cpp, "_library", fail)  # both functions load it at every call
    for a, e in zip(run(), expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "cpp"), pytest.param("cuda", "triton", marks=pytest.mark.gpu)]
)
def test_training_calls_become_one_node(device: str, backend: str) -> None:
    """In C++ where it can be built: the same gradients, the same error for a changed input."""
    if not (lookup.wait(120) and autograd_node.wait(180)):
        pytest.skip(f"no nodes here: {lookup.reason_not() or autograd_node.reason_not()}")
    shape = (300, 200)
    x, r, dy, w, b = (draw(*s).to(device) for s in (shape, shape, shape, (200,), (200,)))
    for t in (x, r, w, b):
        t.requires_grad_()
    FRONT.forget()

    def run(name: str) -> Tensor:
        return fl.diagonal_linear(x, w, b, activation=name, residual=r, backend=backend)

    for name in ("none", "silu"):
        for wanted in ((x, w, b, r), (w,), (x, r), (r,)):
            for _ in range(4):
                y = run(name)
                found = torch.autograd.grad(y, wanted, dy)
            assert y.grad_fn is not None
            assert y.grad_fn.name() == "DiagonalLinearBackward"
            expected = torch.autograd.grad(exact(x, w, b, name, r), wanted, dy)
            for a, e in zip(found, expected, strict=True):
                torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    grads = torch.autograd.grad(run("silu").sum(), (x, w, b), create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in grads), (x, w))
    theirs = torch.autograd.grad(exact(x, w, b, "silu", r).sum(), (x, w, b), create_graph=True)
    for a, e in zip(
        again, torch.autograd.grad(sum(g.square().sum() for g in theirs), (x, w)), strict=True
    ):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-2)
    y = run("silu")
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
