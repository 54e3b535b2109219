"""Times of findings are a part of the step's, and what is said of the root model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.timing import Samples
from fastlinear.rewrite.evaluate import findings, site
from fastlinear.rewrite.evaluate.of_the_step import SCALED, of_the_step


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.u, self.d = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.d(F.silu(self.g(x)) * self.u(x))
        return y


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


@pytest.mark.parametrize(
    ("before", "after", "calls", "told"),
    [
        (60.0, 30.0, 1, (60.0, 30.0, "")),
        (200.0, 50.0, 1, (100.0, 25.0, SCALED)),
        (60.0, 30.0, 5, (20.0, 10.0, SCALED)),
        (0.0, 0.0, 3, (0.0, 0.0, "")),
    ],
)
def test_a_part_takes_no_more_than_the_step(
    before: float, after: float, calls: int, told: tuple[Any, ...]
) -> None:
    work: Any = SimpleNamespace(profile=SimpleNamespace(step_us=100.0))
    assert of_the_step(work, before, after, calls) == told


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("make", [Gated, Heads])
def test_findings_stay_within_the_step(
    make: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that had become much slower when they were measured."""

    def interleave(contenders: dict[str, Any], **_: Any) -> dict[str, Samples]:
        times = {"before": 1e6, "after": 5e5}
        return {n: Samples(n, (times[n],) * 5, "wall", 1, "clock") for n in contenders}

    monkeypatch.setattr(site, "interleave", interleave)
    config = fl.Config(mode=mode, draws=1, tune=False, optimizer_steps=1, time_budget_s=5.0)
    result = fl.optimize_(make(), torch.randn(9, 32 if make is Gated else 8), config=config,
                          filter_fn=lambda *_: False)  # fmt: skip
    code = "gated_mlp" if make is Gated else "grouped_linear"
    (found,) = [f for f in result.findings if f.code == code]
    assert found.measured_us == pytest.approx(result.profile.step_us)
    assert found.predicted_gain_us == pytest.approx(result.profile.step_us / 2)
    assert SCALED in found.message
    assert f"{result.profile.step_us:.1f} us" in found.message


@pytest.mark.parametrize("frozen", [True, False])
def test_only_gradients_that_the_model_takes_are_measured(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own input wants none; what a layer before gives does."""
    wanted: list[int] = []
    real = torch.autograd.grad

    def grad(ys: Any, leaves: Any, *rest: Any, **how: Any) -> Any:
        wanted.append(len(leaves))
        return real(ys, leaves, *rest, **how)

    first = nn.Linear(32, 32).requires_grad_(not frozen)
    model = nn.Sequential(first, Gated())
    config = fl.Config(mode="train", draws=1, tune=False, optimizer_steps=1, time_budget_s=5.0)
    real_measured = findings.measured

    def measured(*given: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.autograd, "grad", grad)
            return real_measured(*given)

    monkeypatch.setattr(findings, "measured", measured)
    fl.optimize_(model, torch.randn(9, 32), config=config, filter_fn=lambda *_: False)
    assert set(wanted) == {6 if frozen else 7}


def test_the_root_model_has_a_name_in_notes(clock: Any) -> None:
    clock({"after": 150.0})
    result = fl.optimize_(Gated(), torch.randn(9, 32), config=fl.Config(draws=1))
    assert any(note.startswith("chain of the root model left alone: ") for note in result.notes)
    assert not any("''" in note for note in result.notes)


def test_layers_of_different_sizes_with_one_fate_are_one_row(clock: Any) -> None:
    clock({})
    result = fl.optimize_(
        nn.Sequential(*(nn.Linear(8 + i, 9 + i) for i in range(5))),
        torch.randn(9, 8),
        config=fl.Config(draws=1, families=("linear_act",)),
    )
    assert {s.status for s in result.sites} == {"nothing_to_do"}
    assert "0 (+4 alike)" in result.table(width=200)
    sites = [replace(s, problem={"n": i}) for i, s in enumerate(result.sites)]
    kept = [replace(s, status="kept", before_us=1.0, after_us=0.5, speedup=2.0) for s in sites]
    assert "alike" not in replace(result, sites=tuple(kept)).table(width=200)


class Loop(nn.Module):
    """A loop over the parts of a tensor, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.projs = nn.ModuleList(nn.Linear(8, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.chunk(x, len(self.projs), -1)
        return torch.cat([proj(part) for proj, part in zip(self.projs, parts, strict=True)], -1)


@pytest.mark.parametrize("after", [50.0, 150.0])
@pytest.mark.parametrize(("make", "code"), [(Gated, "gated_mlp"), (Loop, "grouped_linear")])
def test_what_was_tried_is_told_by_the_times_that_decided(
    make: Any, code: str, after: float, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"onednn": 50.0, "cpp": 50.0, "pieces": 50.0, "after": after, "step": after})
    asked: list[Any] = []
    real = findings.measured

    def measured(work: Any, fusion: Any, left: int) -> Any:
        asked.append(fusion)
        return real(work, fusion, left)

    monkeypatch.setattr(findings, "measured", measured)
    result = fl.optimize_(make(), torch.randn(9, 32), config=fl.Config(draws=1, families=(code,)))
    assert not asked
    found = [f for f in result.findings if f.code == code]
    assert bool(result.kept) is (after < 100.0)
    assert bool(found) is (after < 100.0 or make is Gated), "groups are told where they are faster"
    for f in found:
        assert (
            f"100.0 us a call, {after:.1f} us" in f.message or f"100.0 us, {after:.1f}" in f.message
        )
