"""Whole models: what is built, and what fastlinear makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.contenders import models
from benchmarks.experiments.models import cases
from fastlinear.core.compare import judge
from fastlinear.core.settings import Config

pytest.importorskip("transformers")

WIDTHS = {"smollm": (576, 1536), "t5": (768, 2048)}


def work_of(name: str) -> models.ModelWork:
    """The model with two layers, on one short sequence."""
    case = next(c for c in cases("cpu") if c.option("model") == name)
    small = replace(case, dims=(("B", 1), ("T", 8), ("L", 2)))
    return models.make_work(small, torch.device("cpu"))


def test_every_model_runs_and_the_gated_ones_are_among_them() -> None:
    names = {c.option("model") for c in cases("cpu")}
    assert names == set(models._MODELS)
    assert set(WIDTHS) <= names
    assert {c.option("model") for c in cases("cpu", quick=True)} == {"gpt2", "smollm"}
    assert all(c.dim("L") == 2 for c in cases("cpu", quick=True))


@pytest.mark.parametrize("name", WIDTHS)
def test_gated_models_have_their_published_sizes(name: str) -> None:
    k, h = WIDTHS[name]
    work = work_of(name)
    shapes = [tuple(p.shape) for n, p in work.model.named_parameters() if p.dim() == 2]
    assert shapes.count((h, k)) == 4, "gate and up of two layers"
    assert shapes.count((k, h)) == 2
    with work.mode():
        (y,) = work.unit(work.model)(None)
    assert y.shape == (1, 8, k)
    assert work.shapes() == {"input_ids": [1, 8]}
    assert work.cost().flops > 2 * 2 * 3 * 8 * k * h


@pytest.mark.parametrize("name", WIDTHS)
def test_gated_models_are_rewritten_and_verified(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gated MLPs are told, and the model left computes the same."""
    asked: list[Any] = []

    def brief(**options: Any) -> Config:
        asked.append(options)
        return Config(**(options | {"time_budget_s": 2.0, "draws": 1, "tune": False}))

    monkeypatch.setattr(models, "Config", brief)
    work = work_of(name)
    model = models._optimized(work)
    assert model is models._optimized(work)
    assert len(asked) == 1
    found = [f for f in work.result[0].findings if f.code == "gated_mlp"]
    assert len(found) == 2
    assert {f.details["activation"] for f in found} == {"silu" if name == "smollm" else "gelu_tanh"}
    with work.mode():
        (ours,), (theirs,) = (work.unit(m)(None) for m in (model, work.model))
    (oracle,) = work.reference(torch.float64)
    verdict = judge("output", ours, theirs, oracle)
    assert verdict.passed, str(verdict)
    assert work.chosen()
