"""Tests of the tests: a backend broken on purpose must fail the contract, whatever is broken."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastlinear  # noqa: F401  (registers the families)
from fastlinear.dispatch.backend import Backend
from fastlinear.families.linear import reference

MODULE = "fastlinear_mutants"


def forward(**change: Any) -> Callable[..., Any]:
    """The reference forward with some arguments or its result changed."""

    def run(x: Any, weight: Any, bias: Any, activation: str, save_pre: bool) -> Any:
        if "bias" in change and bias is not None:
            bias = change["bias"](bias)
        if "weight" in change:
            weight = change["weight"](weight)
        if "x" in change:
            x = change["x"](x)
        if "activation" in change:
            activation = change["activation"](activation)
        y, pre = reference.forward(x, weight, bias, activation, save_pre)
        return change["result"](y, pre) if "result" in change else (y, pre)

    return run


def other_activation(name: str) -> str:
    near = {"gelu": "gelu_tanh", "gelu_tanh": "gelu", "relu": "leaky_relu", "silu": "quick_gelu"}
    return near.get(name, name)


def memory_order(weight: torch.Tensor) -> torch.Tensor:
    """The weight's memory read as (N, K) rows whatever its strides say."""
    n, k = weight.shape
    return torch.as_strided(weight, (n, k), (k, 1), weight.storage_offset())


def without_last(t: torch.Tensor, dim: int) -> torch.Tensor:
    t = t.clone()
    t.select(dim, -1).zero_()
    return t


def unwritten(y: torch.Tensor) -> torch.Tensor:
    """All rows copied but the last, as a mask off by one leaves it."""
    out = torch.empty_like(y)
    out[:-1] = y[:-1]
    return out


def in_place(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(1.5)


_noise = torch.Generator().manual_seed(3)

FORWARDS = {
    "bias_dropped": forward(bias=torch.zeros_like),
    "bias_shifted": forward(bias=lambda b: b.roll(1)),
    "bias_after_activation": lambda x, w, b, a, s: (
        reference.forward(x, w, None, a, s)[0] + (0 if b is None else b),
        reference.forward(x, w, b, a, s)[1],
    ),
    "weight_strides_ignored": forward(weight=memory_order),
    "x_strides_ignored": forward(
        x=lambda x: torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())
    ),
    "k_tail_masked": forward(x=lambda x: without_last(x, 1)),
    "last_row_skipped": forward(result=lambda y, p: (without_last(y, 0), p)),
    "last_column_skipped": forward(result=lambda y, p: (without_last(y, 1), p)),
    "last_row_unwritten": forward(result=lambda y, p: (unwritten(y), p)),
    "near_activation": forward(activation=other_activation),
    "post_saved_as_pre": forward(result=lambda y, p: (y, None if p is None else y)),
    "pre_dropped": forward(result=lambda y, p: (y, None)),
    "computed_in_bfloat16": lambda x, w, b, a, s: tuple(
        None if t is None else t.to(x.dtype)
        for t in reference.forward(
            x.bfloat16(), w.bfloat16(), None if b is None else b.bfloat16(), a, s
        )
    ),
    "returns_bfloat16": forward(result=lambda y, p: (y.bfloat16(), p)),
    "transposed_output": forward(result=lambda y, p: (y.t().contiguous().view(y.shape), p)),
    "input_modified": lambda x, w, b, a, s: (reference.forward(x, w, b, a, s), in_place(x))[0],
    "not_deterministic": forward(
        result=lambda y, p: (y * (1 + 1e-7 * torch.rand(y.shape, generator=_noise)), p)
    ),
    "nan_for_zero": forward(result=lambda y, p: (y / (y != 0), p)),
}


def wrong_derivative(dy: Any, saved: Any, activation: str, need: bool) -> Any:
    return reference.grad_pre(dy, saved, other_activation(activation), need)


def pre_mask(dy: Any, saved: Any, activation: str, need: bool) -> Any:
    dpre, db = reference.grad_pre(dy, saved, activation, need)
    return dpre, None if db is None else dpre[:-1].sum(0)


GRAD_PRES = {
    "wrong_derivative": wrong_derivative,
    "db_misses_a_row": pre_mask,
    "db_of_dy": lambda dy, s, a, need: (
        reference.grad_pre(dy, s, a, False)[0],
        dy.sum(0) if need else None,
    ),
    "db_dropped": lambda dy, s, a, need: (reference.grad_pre(dy, s, a, False)[0], None),
    "dy_passed_through": lambda dy, s, a, need: reference.grad_pre(dy, None, "none", need),
}

GRAD_INPUTS = {
    "weight_strides_ignored": lambda dpre, w: reference.grad_input(dpre, memory_order(w)),
    "last_feature_masked": lambda dpre, w: reference.grad_input(without_last(dpre, 1), w),
    "last_row_unwritten": lambda dpre, w: unwritten(reference.grad_input(dpre, w)),
}

GRAD_WEIGHTS = {
    "last_token_masked": lambda dpre, x: reference.grad_weight(without_last(dpre, 0), x),
    "mean_instead_of_sum": lambda dpre, x: reference.grad_weight(dpre, x) / len(x),
    "transposed": lambda dpre, x: (
        reference.grad_weight(dpre, x).t().contiguous().view(dpre.shape[1], x.shape[1])
    ),
}

CASES = [
    pytest.param(piece, name, run, id=f"{piece}-{name}")
    for piece, mutants in (
        ("forward", FORWARDS),
        ("grad_pre", GRAD_PRES),
        ("grad_input", GRAD_INPUTS),
        ("grad_weight", GRAD_WEIGHTS),
    )
    for name, run in mutants.items()
]


def as_backend(
    piece: str, name: str, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Backend:
    module = types.ModuleType(MODULE)
    attribute = f"{piece}_{name}"
    setattr(module, attribute, run)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return Backend("linear_act", piece, name, f"{MODULE}:{attribute}", lambda _: None)


@pytest.mark.parametrize(("piece", "name", "run"), CASES)
def test_broken_backend_fails_the_contract(
    piece: str,
    name: str,
    run: Callable[..., Any],
    contract: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = as_backend(piece, name, run, monkeypatch)
    problems = contract.problems("linear_act", piece, "float32", "cpu")
    assert any(contract.failures(backend, p) for p in problems)


@pytest.mark.parametrize("piece", ["forward", "grad_pre", "grad_input", "grad_weight"])
def test_unbroken_backend_passes(
    piece: str, contract: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness itself is not what fails above."""
    backend = as_backend(piece, "whole", getattr(reference, piece), monkeypatch)
    for p in contract.problems("linear_act", piece, "float32", "cpu"):
        assert contract.failures(backend, p) == []


def test_tuning_rejects_a_broken_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verification inside tuning turns it away before it is ever timed."""
    from dataclasses import replace

    from fastlinear.dispatch import backend as registry
    from fastlinear.dispatch.backend import family
    from fastlinear.dispatch.tune import tune
    from fastlinear.families.linear.problem import problem

    fam = family("linear_act")
    broken = as_backend("forward", "broken", FORWARDS["bias_dropped"], monkeypatch)
    monkeypatch.setitem(
        registry._FAMILIES, "linear_act", replace(fam, backends=(*fam.backends, broken))
    )
    p = problem("forward", 8, 8, 8, dtype="float32", device="cpu", activation="relu")
    result = tune(p, rounds=5, budget_s=0.05, save=False)
    assert "less accurate than allowed" in result.rejected["broken"]
    assert "broken" not in result.samples
