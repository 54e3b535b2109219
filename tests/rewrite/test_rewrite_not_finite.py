"""Results that are not finite: NaN beside NaN shows nothing, and is told so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.compare import Verdict
from fastlinear.rewrite.verify.verdicts import compare_all, pool, together

NAN, INF = float("nan"), float("inf")


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


class Masked(nn.Module):
    """Scores of which some are hidden, and a bias that is in no use."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 64)
        self.unused = nn.Parameter(torch.full((3,), NAN))
        self.hidden = hidden

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.zeros(64, dtype=torch.bool)
        mask[: self.hidden] = True
        y = nn.functional.gelu(self.fc(x)).masked_fill(mask, -INF)
        return y, torch.full((4,), -INF)


def untouched(model: nn.Module) -> bool:
    return not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("what", ["weight", "inputs"])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.usefixtures("fast")
def test_a_model_without_a_finite_output_is_refused(mode: str, what: str, value: float) -> None:
    model, x = mlp(), torch.randn(8, 32)
    with torch.no_grad():
        (model[0].weight if what == "weight" else x).fill_(value)
    result = fl.optimize_(model, x, config=fl.Config(mode=mode))
    assert untouched(model)
    assert result.summary()["refused"] == len(result.sites) == 2
    for site in result.sites:
        assert site.code == "not_finite"
        assert "the model's outputs are not finite: 256 of 256 numbers" in site.reason
        assert ("'0.weight'" if what == "weight" else "of the inputs") in site.reason
    assert any("nothing is rewritten: cannot be verified" in note for note in result.notes)
    assert not result.verdicts


@pytest.mark.usefixtures("fast")
def test_a_loss_without_a_number_is_refused() -> None:
    model = mlp()
    config = fl.Config(mode="train")
    result = fl.optimize_(model, torch.randn(8, 32), config=config, loss_fn=lambda y: y.sum() * NAN)
    assert untouched(model)
    assert {s.code for s in result.sites} == {"not_finite"}
    assert "the model's loss is not finite: 1 of 1 numbers" in result.sites[0].reason


@pytest.mark.usefixtures("fast")
def test_gradients_without_a_number_are_refused() -> None:
    def loss(y: Tensor) -> Tensor:
        return (y - y.detach()).abs().sum().sqrt()  # 0, with a slope that is not finite

    model = mlp()
    result = fl.optimize_(model, torch.randn(8, 32), config=fl.Config(mode="train"), loss_fn=loss)
    assert untouched(model)
    assert {s.code for s in result.sites} == {"not_finite"}
    assert "the model's gradients are not finite" in result.sites[0].reason


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.usefixtures("fast")
def test_finite_numbers_beside_others_are_compared(mode: str) -> None:
    def loss(ys: Any) -> Tensor:
        return ys[0][:, 5:].square().mean()

    model, x = Masked(hidden=5), torch.randn(8, 32)
    loss_fn = loss if mode == "train" else None
    result = fl.optimize_(model, x, config=fl.Config(mode=mode), loss_fn=loss_fn)
    assert result.kept == 1
    assert all(v.passed for v in result.verdicts)
    note = next(n for n in result.notes if "where results are finite" in n)
    per_draw = 8 * 5
    found = next(v for v in result.verdicts if v.name == "output[0]")
    assert found.not_finite % per_draw == 0
    assert found.not_finite * 64 == found.numbers * 5
    assert "output[0] (" in note
    assert "output[1] (" in note


@pytest.mark.usefixtures("fast")
def test_a_site_whose_own_results_are_not_finite_is_refused() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(32, 64)
            self.a.weight.data.fill_(NAN)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.gelu(self.a(x)).nan_to_num(0.0) + nn.functional.gelu(self.b(x))

    result = fl.optimize_(Hidden(), torch.randn(8, 32))
    a = next(s for s in result.sites if s.fqn == "a")
    assert (a.status, a.code) == ("refused", "not_finite")
    assert "a.output cannot be verified: the oracle's are not finite: 512 of 512" in a.reason


@pytest.mark.usefixtures("fast")
def test_a_plan_is_not_verified_by_nan() -> None:
    model, x = mlp(), torch.randn(8, 32)
    result = fl.optimize_(model, x)
    assert result.kept
    plan = result.plan.to_json()
    result.revert()
    again = fl.apply_(model, plan, x * NAN)
    assert untouched(model)
    assert again.kept == 0
    assert again.refused > 0


def verdict(ours: list[float], theirs: list[float], exact: list[float], name: str) -> Verdict:
    one = [torch.tensor(v) for v in (ours, theirs)]
    return compare_all(
        {name: one[0]}, {name: one[1]}, {name: torch.tensor(exact, dtype=torch.float64)}
    )[name]


@pytest.mark.parametrize("name", ["output[0]", "grad.weight", "loss"])
def test_what_a_comparison_shows(name: str) -> None:
    nothing = verdict([NAN, INF], [NAN, INF], [NAN, INF], name)
    assert not nothing.passed
    assert "the oracle's are not finite: 2 of 2 numbers" in str(nothing)
    overflow = verdict([INF, INF], [INF, INF], [1e39, 1e39], name)
    assert not overflow.passed
    assert "PyTorch's, unlike the oracle's, are not finite: 2 of 2" in overflow.unproven
    stranger = verdict([1.0, 2.0], [1.0, 2.0], [1.0, NAN], name)
    assert not stranger.passed
    assert "not finite where PyTorch's are: 1 of 2" in stranger.unproven
    some = verdict([1.0, -INF], [1.0, -INF], [1.0, -INF], name)
    assert some.passed
    assert (some.numbers, some.not_finite) == (2, 1)
    for wrong in ([1.1, -INF], [1.0, INF], [1.0, NAN], [1.0, 0.0]):
        found = verdict(wrong, [1.0, -INF], [1.0, -INF], name)
        assert not found.passed
        assert not found.unproven
    failed = verdict([0.0], [NAN], [NAN], name)
    assert not failed.passed
    assert not failed.unproven


def test_an_infinite_gradient_does_not_excuse_another() -> None:
    exact = {"grad.a": torch.tensor([INF, 1.0]).double(), "grad.b": torch.tensor([1e-9]).double()}
    theirs = {"grad.a": torch.tensor([INF, 1.0]), "grad.b": torch.tensor([1.6e-9])}
    ours = theirs | {"grad.b": torch.tensor([1.0])}
    assert not compare_all(ours, theirs, exact)["grad.b"].passed


def test_draws_and_results_that_show_nothing_are_left_out() -> None:
    nothing = Verdict("output[1]", 0.0, 0.0, 1.0, 4, 4, "none")
    shows = Verdict("output[1]", 0.5, 0.5, 1.0, 4, 0)
    assert pool("output[1]", [nothing, nothing]).unproven
    assert pool("output[1]", [nothing, shows]).error == 0.5
    assert pool("output[1]", [nothing, shows]).not_finite == 4
    other = Verdict("output[0]", 0.5, 0.5, 1.0, 4, 0)
    assert all(v.passed for v in together([other, nothing]))
    assert not all(v.passed for v in together([nothing]))
    grads = [Verdict("grad.a", 0.0, 0.0, 1.0, 4, 4, "none"), Verdict("grad.b", 0.0, 0.0, 1.0, 4)]
    assert not all(v.passed for v in together([*grads, other]))


class OracleFails(nn.Module):
    """Has numbers in float32, and none in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.fc(x))
        return y if x.dtype == torch.float32 else y * NAN


@pytest.mark.usefixtures("fast")
def test_an_oracle_without_a_number_judges_nothing() -> None:
    model = OracleFails()
    result = fl.optimize_(model, torch.randn(8, 32))
    assert untouched(model)
    assert (result.sites[0].status, result.sites[0].code) == ("refused", "not_finite")
    assert "the oracle's are not finite where PyTorch's are: 512 of 512" in result.sites[0].reason


@pytest.mark.usefixtures("fast", "tape")
def test_neither_graphs_nor_the_compiler_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    config = fl.Config(compile=True, graphs=True)
    result = fl.optimize_(mlp(), torch.randn(8, 32) * NAN, config=config)
    whole = [s for s in result.sites if s.fqn == ""]
    assert {(s.rule, s.status) for s in whole} >= {("compiled", "refused")}
    assert all(s.code in ("not_finite", "needs_cuda") for s in whole)
