"""Groups by planes against float64: CUDA C++ run on a CPU, thread by thread, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import ACTIVATIONS
from fastlinear.core.compare import judge
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import planes, reference
from fastlinear.families.grouped.problem import problem
from fastlinear.families.linear.cuda import planes_product
from fastlinear.families.linear.cuda.planes import Config
from fastlinear.families.linear.cuda.planes_split import Source, split
from tests.families.planes_places import PLACES, placed, values

SIZES = [(70, 3, 72, 130), (1, 2, 64, 8), (129, 2, 200, 7), (64, 1, 33, 65), (5, 4, 3, 9)]
"""Tokens, groups, features before and after."""
_ALL = (True, True, True)


@pytest.fixture(params=PLACES, autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    with placed(request.param):
        yield


def drawn(sizes: tuple[int, int, int, int], order: str) -> tuple[Tensor, ...]:
    """x, weight, bias and dy."""
    m, groups, k, n = sizes
    x, dy = (
        layouts.dense(values(1, m, groups, size, seed=i), order) for i, size in enumerate((k, n))
    )
    return x, values(groups, n, k, seed=2) * k**-0.5, values(groups, n, seed=3), dy


def check(given: tuple[Tensor, ...], activation: str, order: str, needs: Any = _ALL) -> None:
    """Forward and backward, beside PyTorch's own operations, and float64."""
    x, weight, bias, dy = given
    keeps = ACTIVATIONS[activation].saved
    results: list[list[Tensor | None]] = []
    for dtype in (torch.float32, torch.float64):
        a, w, b, d = (t.to(dtype) for t in given)
        y, pre = reference.forward(a, w, b, activation, True, order)
        saved = {"none": None, "output": y, "pre": pre}[keeps]
        results.append([y, pre, *reference.backward(d, saved, a, w, activation, needs, order)])
        if dtype == torch.float32:
            ours = list(planes.forward(x, weight, bias, activation, True, order))
            kept = {"none": None, "output": ours[0], "pre": ours[1]}[keeps]
            assert layouts.is_dense(ours[0], order)
            ours += planes.backward(dy, saved, x, weight, activation, needs, order)
            assert kept is None or kept.stride() == saved.stride()
    for own, theirs, oracle in zip(ours, *results, strict=True):
        assert (own is None) == (theirs is None)
        if own is not None:
            verdict = judge("groups", own, theirs, oracle)
            assert verdict.passed, str(verdict)


@pytest.mark.parametrize("order", ["tokens", "groups"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_of_any_size(sizes: tuple[int, int, int, int], order: str) -> None:
    check(drawn(sizes, order), "gelu", order)


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_activations(activation: str) -> None:
    check(drawn((66, 2, 40, 72), "tokens"), activation, "tokens")


@pytest.mark.parametrize(
    "needs",
    [
        *((True, False, False), (False, True, False), (False, False, True)),
        *((True, False, True), (False, True, True), (False, False, False)),
    ],
)
def test_what_is_wanted(needs: tuple[bool, bool, bool]) -> None:
    check(drawn((66, 2, 40, 72), "groups"), "relu", "groups", needs)


def test_weights_that_lie_turned() -> None:
    x, weight, bias, dy = drawn((70, 3, 72, 130), "tokens")
    check((x, weight.transpose(1, 2).contiguous().transpose(1, 2), bias, dy), "none", "tokens")


@pytest.mark.parametrize("order", ["tokens", "groups"])
def test_two_axes_of_tokens_without_a_bias(order: str) -> None:
    x, weight, _, dy = drawn((66, 2, 40, 72), order)
    x, dy = (layouts.dense(t[0].unflatten(0, (2, 33)), order) for t in (x, dy))
    y, pre = planes.forward(x, weight, None, "gelu", True, order)
    oracle = reference.forward(x.double(), weight.double(), None, "gelu", True, order)
    theirs = reference.forward(x, weight, None, "gelu", True, order)
    grads = planes.backward(dy, theirs[1], x, weight, "gelu", (True, True, False), order)
    given = dy.double(), oracle[1], x.double(), weight.double()
    right = reference.backward(*given, "gelu", (True, True, False), order)
    own = reference.backward(dy, theirs[1], x, weight, "gelu", (True, True, False), order)
    assert layouts.is_dense(y, order)
    for ours, plain, exact in zip(
        (y, pre, *grads[:2]), (*theirs, *own[:2]), (*oracle, *right[:2]), strict=True
    ):
        verdict = judge("groups", ours, plain, exact)
        assert verdict.passed, str(verdict)


def test_groups_of_different_scales() -> None:
    """Lines of a tile that are the next group's change nothing."""
    given = list(drawn((70, 3, 72, 130), "tokens"))
    scales = torch.tensor([1e-20, 1e20, 1.0])
    given[0] = given[0] * scales[:, None]
    y, _ = planes.forward(*given[:3], "none", False, "tokens")
    oracle = reference.forward(*(t.double() for t in given[:3]), "none", False, "tokens")[0]
    theirs, _ = reference.forward(*given[:3], "none", False, "tokens")
    for g in range(3):
        verdict = judge("group", y[:, :, g], theirs[:, :, g], oracle[:, :, g])
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e38])
@pytest.mark.parametrize("which", [0, 1, 3])
def test_numbers_without_planes_stay_in_their_group(which: int, value: float) -> None:
    """Of x, the weight and dy; the groups beside have the bits that they have without."""
    given = list(drawn((66, 3, 72, 40), "groups"))
    clean = list(given)
    given[which] = given[which].clone()
    of_group = given[which][1] if which == 1 else given[which][0, :, 1]
    of_group[5, 7] = value

    def results(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
        y, _ = planes.forward(x, weight, bias, "none", False, "groups")
        dx, dw, db = planes.backward(dy, None, x, weight, "none", _ALL, "groups")
        assert dx is not None
        assert dw is not None
        assert db is not None
        return [y[0].transpose(0, 1), dx[0].transpose(0, 1), dw, db]

    found = results(*given)
    for ours, before in zip(found, results(*clean), strict=True):
        assert torch.equal(ours[0], before[0])
        assert torch.equal(ours[2], before[2])
    x, weight, bias, dy = (t.double() for t in given)
    theirs = [
        reference.forward(x, weight, bias, "none", False, "groups")[0][0].transpose(0, 1),
        *reference.backward(dy, None, x, weight, "none", _ALL, "groups"),
    ]
    theirs[1] = theirs[1][0].transpose(0, 1)
    for ours, right in zip(found, theirs, strict=True):
        assert torch.equal(ours.isnan(), right.float().isnan())
        finite = right.float().isfinite()
        assert torch.equal(ours.isfinite(), finite)
        known = torch.where(finite, right, 0.0).abs()
        scale = known.amax(-1, keepdim=True) if right.dim() > 2 else known
        off = torch.where(finite, ours.double() - right, 0.0).abs()
        assert bool((off <= 1e-5 * scale + 1e-6).all())


@pytest.mark.parametrize("config", [Config(64, 4, slices=4), Config(128, 3, slices=2)], ids=str)
@pytest.mark.parametrize("order", ["tokens", "groups"])
def test_sums_in_slices(config: Config, order: str) -> None:
    x, weight, bias, _ = drawn((70, 3, 200, 40), order)
    a, b = split((Source(reference.by_group(x), True), Source(weight, True)))
    made = [layouts.empty((1, 70, 3, 40), order, x, x.dtype) for _ in range(2)]
    y, pre = map(reference.by_group, made)
    planes_product.product(a, b, bias, "relu", True, into=(y, pre), config=config)
    oracle = reference.forward(x.double(), weight.double(), bias.double(), "relu", True, order)
    theirs = reference.forward(x, weight, bias, "relu", True, order)
    for ours, own, right in zip(made, theirs, oracle, strict=True):
        verdict = judge("slices", ours, own, right)
        assert verdict.passed, str(verdict)


def test_which_problems_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "why_no_hopper", lambda _: None)
    facts: Any = {"dtype": "float32", "device": "cuda", "precision": "highest"}
    p = problem("forward", 64, 8, 64, 64, **facts)
    assert planes.reason_not(p) is None
    for other in (
        replace(p, dtype="bfloat16"),
        replace(p, precision="high"),
        problem("forward", 64, 8, 64, 64, order="channels", length=8, **facts),
        problem("forward", 64, 8, 64, 64, x="strided", **facts),
        problem("forward", 64, 0, 64, 64, **facts),
        problem("forward", 0, 8, 64, 64, **facts),
        problem("backward", 1 << 16, 1 << 8, 64, 64, **facts),
    ):
        assert planes.reason_not(other) is not None, other.describe()
