"""optimize_ puts one call in place of transformers' stacked experts, and takes it back."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastlinear as fl
from tests.rewrite.rewrite_models import Clock

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("transformers.integrations.moe")

from tests.nn.test_nn_experts import MODELS, made, stacked

rule: Any = import_module("fastlinear.rewrite.rules.experts.find")
IDS = torch.arange(22).view(2, 11) % 48


def given(train: bool) -> dict[str, Any]:
    ids = {"input_ids": IDS, "use_cache": False}
    return {**ids, "labels": IDS} if train else ids


def optimized(model: nn.Module, train: bool, **options: Any) -> Any:
    mode = "train" if train else "inference"
    options = {"tune": False, "time_budget_s": 300, "families": ("experts",), **options}
    config = fl.Config(mode=mode, **options)  # a library that is being compiled is waited for
    return fl.optimize_(model.train(train), given(train), config=config)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    ran: list[Any] = []
    op = rule.by_op
    monkeypatch.setattr(rule, "by_op", lambda *a: ran.append(a[0]) or op(*a))
    return ran


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen3", "gpt-oss"])
def test_experts_that_gain_become_one_call(
    name: str, train: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"after": 50.0})
    model = made(name)
    before = model(**given(train))
    result = optimized(model, train)
    sites = {s.fqn: s for s in result.sites if s.fqn.endswith("mlp.experts")}
    assert len(sites) == len(stacked(model)) == 2
    assert all(s.status == "kept" for s in sites.values()), [s.reason for s in sites.values()]
    ran = counted(monkeypatch)
    after = model(**given(train))
    assert len(ran) == 2
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-4, atol=1e-4)
    if train:
        after.loss.backward()
        assert all(p.grad is not None for layer in stacked(model) for p in layer.parameters())
    result.revert()
    ran.clear()
    torch.testing.assert_close(model(**given(train)).logits, before.logits)
    assert not ran


def test_experts_that_do_not_gain_stay(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock({"after": 200.0})
    model = made("mixtral")
    result = optimized(model, False)
    assert {s.status for s in result.sites if s.fqn.endswith("experts")} == {"rejected"}
    ran = counted(monkeypatch)
    model(**given(False))
    assert not ran


def test_a_plan_puts_them_in_place_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock({"after": 50.0})
    path = tmp_path / "plan.json"
    optimized(made("qwen3"), False).save(path)
    model, ran = made("qwen3"), counted(monkeypatch)
    fl.apply_(model.eval(), path, given(False))
    ran.clear()
    model(**given(False))
    assert len(ran) == 2


def test_a_gate_that_is_not_known_any_more_is_the_modules_own(clock: Clock) -> None:
    clock({"after": 50.0})
    model = made("mixtral")
    optimized(model, False)
    for layer in stacked(model):
        layer.act_fn = nn.Softsign()  # type: ignore[assignment]
    expected = made("mixtral").eval()
    for layer in stacked(expected):
        layer.act_fn = nn.Softsign()  # type: ignore[assignment]
    torch.testing.assert_close(model(**given(False)).logits, expected(**given(False)).logits)


def test_what_is_left_alone_says_why() -> None:
    model = made("mixtral")
    first, second = stacked(model)
    first.register_forward_hook(lambda *_: None)
    config = fl.Config(mode="inference", time_budget_s=20, families=("experts",))
    result = fl.optimize_(
        model.eval(), given(False), config=config, filter_fn=lambda module, _: module is not second
    )
    told = {f.fqn: f.message for f in result.profile.findings if f.code == "experts"}
    assert "4 experts run by transformers' " in told["model.layers.0.mlp.experts"]
    assert "MixtralExperts carries a forward hook" in told["model.layers.0.mlp.experts"]
    assert "filter_fn leaves it out" in told["model.layers.1.mlp.experts"]
    assert not any(s.status == "kept" for s in result.sites)


def test_a_profile_names_what_they_would_gain(clock: Clock) -> None:
    clock({"after": 50.0})
    report = fl.profile(made("mixtral"), given(False))
    found = [f for f in report.findings if f.code == "experts"]
    assert {f.fqn for f in found} == {f"model.layers.{i}.mlp.experts" for i in range(2)}
    assert all(f.predicted_gain_us > 0 for f in found)
    assert "fl.nn.Experts.from_module(model.model.layers[0].mlp.experts)" in str(found[0].details)


def test_models_without_experts_do_not_run_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "_observed", lambda *_: pytest.fail("ran"))
    fl.optimize_(nn.Sequential(nn.Linear(8, 8)).eval(), torch.ones(2, 8))


def test_every_model_that_is_known_is_found() -> None:
    for name in MODELS:
        assert all(rule._is_stack(m) for m in stacked(made(name))), name


def test_a_plan_of_training_keeps_its_backends(clock: Clock, tmp_path: Path) -> None:
    clock({"after": 50.0})
    path = tmp_path / "plan.json"
    result = optimized(made("qwen3"), True, backends={"experts": "eager"})
    assert "eager, its 6 experts in one call" in result.table(width=200)
    result.save(path)
    model = made("qwen3").train()
    applied = fl.apply_(model, path, given(True))
    kept = [s for s in applied.sites if s.fqn.endswith("mlp.experts")]
    assert {(s.status, s.backends["step"]) for s in kept} == {("kept", "eager")}
    assert not any("other backends than planned" in n for n in applied.notes)


def test_a_backend_that_serves_none_is_refused() -> None:
    with pytest.raises(fl.UnsupportedError, match="CUDA"):
        optimized(made("qwen3"), False, backends={"experts": "triton"})


def test_who_watches_sees_every_call(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks on an activation, or on all modules, from before or after."""
    clock({"after": 50.0})
    seen: list[str] = []

    def look(module: nn.Module, *_: Any) -> None:
        seen.append(type(module).__name__)

    model = made("mixtral")
    for layer in stacked(model):
        layer.act_fn.register_forward_hook(look)
    assert not any(s.status == "kept" for s in optimized(model, False).sites)
    model = made("mixtral")
    optimized(model, False)
    ran = counted(monkeypatch)
    handle = torch.nn.modules.module.register_module_forward_hook(look)
    seen.clear()
    model(**given(False))
    handle.remove()
    assert not ran
    assert any("SiLU" in name for name in seen)
    for layer in stacked(model):
        layer.act_fn.register_forward_hook(look)
    model(**given(False))
    assert not ran


def test_calls_that_the_op_refuses_are_the_modules_own(clock: Clock) -> None:
    clock({"after": 50.0})
    model = made("mixtral")
    layer: Any = stacked(model)[0]
    index, weight = torch.tensor([[0, 1], [2, 3]], dtype=torch.int16), torch.rand(2, 2)
    model.set_experts_implementation("grouped_mm")
    x = torch.randn(2, 32)
    before = layer(x, index, weight)
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x, index.long(), weight)
    optimized(model, False)
    torch.testing.assert_close(layer(x, index, weight), before)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x, index.long(), weight), cast)


def test_a_class_of_ones_own_is_left_alone() -> None:
    moe = import_module("transformers.integrations.moe")

    @moe.use_experts_implementation
    class Mine(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.w1 = nn.Parameter(torch.randn(2, 8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w1[0].t()

    class Config:
        _experts_implementation = "eager"

    net = nn.Sequential(Mine(Config())).eval()
    fl.optimize_(net, torch.randn(3, 4), config=fl.Config(time_budget_s=5))


def test_a_model_that_checkpoints_is_verified_in_float64(clock: Clock) -> None:
    clock({"after": 50.0})
    model: Any = made("mixtral")
    model.activation_checkpointing_enable()
    implementation = model.config._experts_implementation
    result = optimized(model, True)
    assert "accuracy judged against: float64 model" in result.notes
    assert model.config._experts_implementation == implementation
    assert {s.status for s in result.sites if s.fqn.endswith("mlp.experts")} == {"kept"}
