"""float16 on a CPU: computed in float32 and rounded once, forward and backward alike."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.families.diagonal import reference

BACKENDS = (None, "eager", "addcmul", "cpp")
Values = tuple[float, float, float | None]
BEYOND: dict[str, Values] = {  # x, w, b with x * w beyond 65504
    "back in range": (300.0, 300.0, -60000.0),
    "above": (300.0, 300.0, None),
    "below": (300.0, -300.0, None),
    "near the end": (200.0, 200.0, 0.0),
}


def results(
    dtype: torch.dtype, given: list[Tensor | None], dy: Tensor, **options: Any
) -> list[Tensor]:
    """y and the gradients of x, w, b and the residual, in the dtype."""
    x, w, b, r = (None if t is None else t.to(dtype).requires_grad_() for t in given)
    assert x is not None
    assert w is not None
    y = fl.diagonal_linear(x, w, b, residual=r, **options)
    wanted = [t for t in (x, w, b, r) if t is not None]
    return [y.detach(), *torch.autograd.grad(y, wanted, dy.to(dtype))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", BEYOND)
def test_products_beyond_the_range_of_float16(case: str, backend: str | None) -> None:
    """What float32 makes of them, rounded: neither NaN nor infinite where the result is not."""
    x, w, b = BEYOND[case]
    if backend == "addcmul" and b is None:
        pytest.skip("there is no bias to add")
    given = [torch.full((1, 8), x), torch.full((8,), w), None if b is None else torch.full((8,), b)]
    dy = torch.full((1, 8), 2**-8)
    for name in NAMES:
        found = results(torch.float16, [*given, None], dy, activation=name, backend=backend)
        exact = results(torch.float64, [*given, None], dy, activation=name)
        for f, e in zip(found, exact, strict=True):
            assert torch.allclose(f, e.half(), rtol=1e-3, atol=1e-5), (name, f, e)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_rounded_once(backend: str | None) -> None:
    """Of float32's: the same bits but where its own rounding decides."""
    turns = itertools.cycle(itertools.product((True, False), ((64, 33), (2, 5, 33), (33,))))
    for name, (residual, shape) in zip((*NAMES, *NAMES), turns, strict=False):
        generator = torch.Generator().manual_seed(len(shape))
        draw = [
            torch.randn(s, generator=generator).half().float() for s in (shape, (33,), (33,), shape)
        ]
        dy = torch.randn(shape, generator=generator).half().float()
        given: list[Tensor | None] = [*draw[:3], draw[3] if residual else None]
        found = results(torch.float16, given, dy, activation=name, backend=backend)
        wide = results(torch.float32, given, dy, activation=name, backend="eager")
        for f, e in zip(found, wide, strict=True):
            assert f.dtype is torch.float16
            same = f == e.half()
            assert (~same).sum() <= max(1, f.numel() // 100), (name, shape)
            torch.testing.assert_close(f, e.half(), rtol=1e-3, atol=1e-6)


def test_sums_of_gradients_do_not_overflow() -> None:
    """The sum of a thousand products, each within range, and of some that are not."""
    x, dy = torch.full((1000, 4), 300.0), torch.full((1000, 4), 300.0)
    dy[500:] *= -1
    for bias in (torch.zeros(4), None):
        found = results(torch.float16, [x, torch.ones(4), bias, None], dy)
        assert torch.equal(found[2], torch.zeros(4).half())


def test_second_derivatives_and_transforms_compute_alike() -> None:
    x, w, b = (torch.full((4,), v).half() for v in (300.0, 300.0, -60000.0))

    def run(x: Tensor, w: Tensor) -> Tensor:
        return fl.diagonal_linear(x, w, b, activation="silu").float().sum()

    assert torch.equal(torch.func.grad(run)(x, w), w)
    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    (dx,) = torch.autograd.grad(run(leaf, weight), leaf, create_graph=True)
    assert torch.equal(dx.detach(), w)
    (second,) = torch.autograd.grad(dx.float().sum(), weight)
    assert torch.equal(second, torch.ones(4).half())


def test_out_and_a_wider_residual() -> None:
    x, w, b = (torch.full((1, 4), 300.0).half(), *(torch.full((4,), v).half() for v in (300, -6e4)))
    out = torch.empty_like(x)
    for backend in BACKENDS:
        fl.diagonal_linear(x, w, b, activation="gelu", out=out, backend=backend)
        assert torch.equal(out, torch.full((1, 4), 30000.0).half())
    found = reference.diagonal_linear(x, w, b, "none", torch.full((1, 4), 0.5))
    assert found.dtype is torch.float32
    assert torch.equal(found, torch.full((1, 4), 30000.5))
