"""The Strassen chain: its formulas, its error bound, its weights of now; on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.experiments.strassen import chain as strassen
from benchmarks.experiments.strassen import cpu
from benchmarks.experiments.strassen import scheme as schemes
from benchmarks.experiments.strassen.scheme import FORMULAS, Scheme, error_growth, norm_bound
from fastlinear.core.compare import relative_error, unit_rounding
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.problem import problem

SCHEMES = [Scheme(name, levels) for name in ("strassen", "classical") for levels in (1, 2)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHAINS = [(64, (64, 96, 64)), (7, (33, 65, 17, 5)), (1, (1, 1)), (2, (3, 130)), (33, (100, 10, 7))]


def draw(m: int, widths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """x, weights, biases (every second one) of a chain."""
    x = torch.randn(m, widths[0]).to(dtype)
    shapes = list(itertools.pairwise(widths))
    weights = tuple((torch.randn(n, k) * (2 / k) ** 0.5).to(dtype) for k, n in shapes)
    biases = tuple(
        torch.randn(n).to(dtype) if i % 2 == 0 else None for i, (_, n) in enumerate(shapes)
    )
    return x, weights, biases


def oracle(x: Tensor, weights: Any, biases: Any, act: str, last: str) -> Any:
    wide = tuple(b if b is None else b.double() for b in biases)
    return reference.forward(x.double(), tuple(w.double() for w in weights), wide, act, last, True)


def allowed(torch_result: Tensor, exact: Tensor, scheme: Scheme) -> float:
    """The error a chain may have: the ratio of the bounds times torch's own, and two roundings."""
    levels = scheme.levels if scheme.name == "strassen" else 0
    growth = error_growth(levels) if levels else 2
    own = relative_error(torch_result, exact)
    return growth * (own + 2 * unit_rounding(torch_result.dtype))


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_are_a_product(name: str) -> None:
    """Σ_p left[p](x) right[p](W) out = x Wᵀ for every pair of unit blocks."""
    formulas = FORMULAS[name]
    for a, w in itertools.product(range(4), range(4)):
        products = [
            dict(left).get(a, 0) * dict(right).get(w, 0)
            for left, right in zip(formulas.left, formulas.right, strict=True)
        ]
        y = [sum(sign * products[p] for p, sign in terms) for terms in formulas.out]
        (i, k), (n, j) = divmod(a, 2), divmod(w, 2)
        expected = [int(k == j and (i, n) == divmod(c, 2)) for c in range(4)]
        assert y == expected, (a, w)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chain", CHAINS, ids=str)
@pytest.mark.parametrize("acts", [("relu", "none"), ("gelu", "silu"), ("sigmoid", "tanh")])
def test_error(chain: Any, dtype: torch.dtype, scheme: Scheme, acts: tuple[str, str]) -> None:
    m, widths = chain
    x, weights, biases = draw(m, widths, dtype)
    kept = [t.clone() for t in (x, *weights)]
    names = (acts[0],) * (len(weights) - 1) + (acts[1],)
    y, saved = cpu.run(x, weights, biases, names, True, scheme)
    again, none = cpu.run(x, weights, biases, names, False, scheme)
    assert torch.equal(y, again)
    assert none == ()
    assert all(torch.equal(a, b) for a, b in zip(kept, (x, *weights), strict=True))
    exact, exact_saved = oracle(x, weights, biases, *acts)
    own, own_saved = reference.forward(x, weights, biases, *acts, True)
    for ours, theirs, true in zip(
        (y, *saved), (own, *own_saved), (exact, *exact_saved), strict=True
    ):
        assert ours.shape == true.shape
        assert ours.dtype is dtype
        assert relative_error(ours, true) <= allowed(theirs, true, scheme)


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("k", [16, 61, 512])
@pytest.mark.parametrize("spread", [1.0, 1e4])
def test_norm_bound(spread: float, k: int, levels: int) -> None:
    """Higham's bound, also with blocks of very different sizes, where Strassen is at its worst."""
    x, weight = torch.randn(40, k), torch.randn(24, k)
    x[:, : k // 2] *= spread
    weight[12:] /= spread
    y, _ = cpu.run(x, (weight,), (None,), ("none",), False, Scheme("strassen", levels))
    error = (y.double() - x.double() @ weight.double().t()).abs().max()
    limit = norm_bound(k, levels) * 2.0**-24 * x.abs().max() * weight.abs().max()
    assert error <= limit
    assert norm_bound(10_000, levels) / norm_bound(10_000, 0) == pytest.approx(3**levels, rel=0.01)


def test_a_wrong_sign_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    good = FORMULAS["strassen"]
    wrong = (*good.out[:2], ((1, 1), (3, -1)), good.out[3])
    bad = schemes.Formulas(good.left, good.right, wrong)
    monkeypatch.setitem(FORMULAS, "strassen", bad)
    with pytest.raises(AssertionError):
        test_error(CHAINS[0], torch.float32, Scheme("strassen", 1), ("relu", "none"))
    with pytest.raises(AssertionError):
        test_norm_bound(1.0, 512, 1)


def test_not_a_number_is_not_hidden() -> None:
    x, weights, biases = draw(8, (16, 16, 16))
    for value in (float("nan"), float("inf")):
        x[3, 5] = value
        y, _ = strassen.forward(x, weights, biases, "relu", "none", False)
        assert not torch.isfinite(y[3]).any()


def test_forward_and_its_control_agree() -> None:
    x, weights, biases = draw(20, (30, 40, 50))
    ours = strassen.forward(x.t().contiguous().t(), weights, biases, "silu", "none", False)[0]
    control = strassen.forward_classical(x, weights, biases, "silu", "none", False)[0]
    assert not torch.equal(ours, control)
    torch.testing.assert_close(ours, control, rtol=1e-4, atol=1e-5)


# weights of now


def sgd(layer: nn.Linear) -> None:
    layer.weight.grad = torch.randn_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=0.5).step()


def adam_foreach(layer: nn.Linear) -> None:
    layer.weight.grad = torch.randn_like(layer.weight)
    torch.optim.AdamW([layer.weight], lr=0.5, foreach=True).step()


def load(layer: nn.Linear) -> None:
    layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()})


def load_assign(layer: nn.Linear) -> None:
    state = {k: torch.randn_like(v) for k, v in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def no_grad_row(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[3] += 1


def data_scaled(layer: nn.Linear) -> None:
    layer.weight.data.mul_(2)


def data_replaced(layer: nn.Linear) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


def new_parameter(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


CHANGES: list[Callable[[nn.Linear], None]] = [
    sgd,
    adam_foreach,
    load,
    load_assign,
    no_grad_row,
    data_scaled,
    data_replaced,
    new_parameter,
]


def check_now(layer: nn.Linear, x: Tensor) -> None:
    y, _ = strassen.forward(x, (layer.weight,), (layer.bias,), "none", "none", False)
    torch.testing.assert_close(y, layer(x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights(change: Callable[[nn.Linear], None]) -> None:
    layer, x = nn.Linear(40, 48), torch.randn(12, 40)
    for _ in range(3):
        check_now(layer, x)
        change(layer)
    check_now(layer, x)


def test_inference_mode() -> None:
    with torch.inference_mode():
        x, weights, biases = draw(8, (16, 24))
        for _ in range(2):
            y, _ = strassen.forward(x, weights, biases, "none", "none", False)
            weights[0].mul_(2)
            x = x / 2
        torch.testing.assert_close(y * 2 - biases[0], x * 2 @ weights[0].t() + biases[0])


# choice


def posed(m: int = 4096, width: int = 4096, dtype: str = "float32", **options: Any) -> Any:
    options = {"precision": "highest", "device": "cpu"} | options
    return problem("forward", m, (width,) * 5, dtype=dtype, **options)


def test_what_has_no_chain() -> None:
    assert strassen.reason_not(posed()) is None
    assert "float64" in str(strassen.reason_not(posed(dtype="float64")))
    assert "empty" in str(strassen.reason_not(posed(m=0)))
    assert "empty" in str(strassen.reason_not(posed(width=0)))
    assert "meta" in str(strassen.reason_not(posed(device="meta")))


@pytest.mark.parametrize(
    ("levels", "m", "width", "dtype", "precision"),
    [
        (2, 4096, 2048, "float32", "highest"),
        (2, 16384, 8192, "float32", "highest"),
        (0, 64, 4096, "float32", "highest"),
        (0, 4096, 256, "float32", "highest"),
        (0, 4096, 1024, "float32", "highest"),
        (0, 4096, 8192, "bfloat16", "n/a"),
        (0, 16384, 8192, "float32", "high"),
        (1, 16384, 16384, "bfloat16", "n/a"),
    ],
)
def test_levels(levels: int, m: int, width: int, dtype: str, precision: str) -> None:
    assert strassen.levels_for(m, (width,) * 5, dtype, "cuda", precision) == levels
    pose = posed(m, width, dtype, device="cuda", precision=precision)
    assert strassen.pays(pose) == (levels > 0)
    assert not strassen.pays(posed(m, width, dtype, precision=precision))  # on a CPU
