"""gated_mlp: which backend serves a call, and that a broken one is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core.errors import InputError
from fastlinear.dispatch import backend as registry
from fastlinear.dispatch.backend import Backend
from fastlinear.dispatch.tune import tune
from fastlinear.families.gated import explain, reference
from fastlinear.families.gated.problem import problem
from fastlinear.families.gated.spec import FRONT
from fastlinear.fastpath import autograd_node, lookup
from tests.families.gated.gated_layers import BACKENDS, H, K, N, by_hand, called, close, parameters


def test_forced_backends_say_why_not() -> None:
    x, p = torch.randn(7, K), parameters()
    with pytest.raises(InputError, match="backend in"):
        called(x, p, "silu", backend="fastest")


def test_explain_names_every_backend() -> None:
    x, p = torch.randn(7, K), parameters()
    told = explain(x, *p)
    assert [c.problem.piece for c in told.choices][:2] == ["forward", "backward"]
    (choice,) = explain(x, *p, needs_grad=False).choices
    assert {choice.backend.name, *dict(choice.passed_over)} == set(BACKENDS)
    wg, wu, wd, *_ = p
    for options in ({"up_weight": wu}, {"up_weight": wu, "down_weight": wd}):
        (choice, *_) = fl.explain(x, wg, p[3], **options, needs_grad=False).choices
        assert choice.problem.family == "gated_mlp"
        assert ("N" in dict(choice.problem.dims)) is ("down_weight" in options)
    (choice, *_) = fl.explain(x, torch.cat([wg, wu]), stacked="gate_up", needs_grad=False).choices
    assert choice.problem.option("order") == "gate_up"


def test_plans_are_forgotten_when_a_tuning_is_stored() -> None:
    x, p = torch.randn(64, K), parameters(grad=False)
    called(x, p, "silu")
    lookup.wait(lookup.PATIENCE_S)  # plans are made anew once the fast path is there
    autograd_node.wait(lookup.PATIENCE_S)
    FRONT.plans.clear()
    called(x, p, "silu")
    assert len(FRONT.plans) == 1
    asked = problem(
        *("forward", 64, K, H, N), dtype="float32", device="cpu", bias="yes", precision="highest"
    )
    tuned = tune(asked, rounds=5, budget_s=0.05)
    assert tuned.stored
    assert not FRONT.plans
    (choice,) = explain(x, *p).choices
    remembered = (choice.backend.name, choice.source) == (tuned.best, "tuned")
    assert remembered or "in doubt" in choice.reason  # of a busy machine
    close(called(x, p, "silu"), by_hand(x, *p, "silu"))


def _as_if_dense(w: Tensor | None) -> Tensor | None:
    return None if w is None else torch.as_strided(w, w.shape, (w.shape[1], 1))


MUTANTS: dict[str, Callable[..., Any]] = {
    "gate's bias dropped": lambda x, w, b, *rest: reference.forward(
        x, w, b._replace(gate=None), *rest
    ),
    "down bias dropped": lambda x, w, b, *rest: reference.forward(
        x, w, b._replace(down=None), *rest
    ),
    "halves exchanged": lambda x, w, b, act, order, save: reference.forward(
        *(x, w, b, act, {"gate_up": "up_gate", "up_gate": "gate_up"}.get(order, order), save)
    ),
    "last token skipped": lambda x, *rest: reference.forward(
        torch.cat((x[:-1], 0 * x[-1:])), *rest
    ),
    "last feature skipped": lambda x, *rest: reference.forward(
        torch.cat((x[:, :-1], 0 * x[:, -1:]), 1), *rest
    ),
    "down weight read as if dense": lambda x, w, *rest: reference.forward(
        x, w._replace(down=_as_if_dense(w.down)), *rest
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_backends_fail_the_contract(
    name: str, contract: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "mutant", MUTANTS[name], raising=False)
    target = "fastlinear.families.gated.reference:mutant"
    registry._load.cache_clear()
    broken = Backend("gated_mlp", "forward", "broken", target, lambda _: None)
    problems = contract.problems("gated_mlp", "forward", "float32", "cpu")
    assert any(contract.failures(broken, p) for p in problems)
    registry._load.cache_clear()


def _wrong_gradient(index: int) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        found = list(reference.backward(*args))
        if found[index] is not None:
            found[index] = found[index] * 1.001
        return tuple(found)

    return run


@pytest.mark.parametrize("index", range(7))
def test_a_wrong_gradient_fails_the_contract(
    index: int, contract: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "mutant", _wrong_gradient(index), raising=False)
    registry._load.cache_clear()
    target = "fastlinear.families.gated.reference:mutant"
    broken = Backend("gated_mlp", "backward", "broken", target, lambda _: None)
    problems = contract.problems("gated_mlp", "backward", "float32", "cpu")
    assert any(contract.failures(broken, p) for p in problems)
    registry._load.cache_clear()


def test_what_equals_a_level_is_none() -> None:
    x, p = torch.randn(7, K), parameters()
    called(x, p, "silu", recompute=1)
    for level in (True, 1.0, 2, "1"):
        with pytest.raises(InputError, match="recompute"):
            called(x, p, "silu", recompute=level)
