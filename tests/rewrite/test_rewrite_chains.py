"""Chains inside Sequentials become one call of mlp where that is faster."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import fastlinear as fl
from fastlinear.core.timing import Samples
from fastlinear.rewrite.evaluate import chains, site
from fastlinear.rewrite.fusion import Fusion, InSequential
from fastlinear.rewrite.swap import forwards
from fastlinear.rewrite.swap.sequential_forward import sequential_forward

optimizing = importlib.import_module("fastlinear.rewrite.optimize")


def net(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers).eval()


def deep(width: int = 48, layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts).eval()


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The chain wins its A/B whatever the clock says; the names of the arms that took part."""
    arms: list[str] = []
    real = site.times

    def times(candidate: Any, runs: Any, device: Any, budget_s: float) -> Any:
        if "after" not in runs or not isinstance(candidate, Fusion):
            return real(candidate, runs, device, budget_s)
        for run in runs.values():
            run(candidate.calls.kinds[0].x)
        arms.extend(runs)
        us = {name: (1.0 if name == "after" else 3.0,) * 5 for name in runs}
        return {n: Samples(n, t, "wall", 1, "clock") for n, t in us.items()}, 1

    monkeypatch.setattr(site, "times", times)
    return arms


def alone(chain: Fusion) -> Any:
    """The Sequential's forward with this chain as one call."""
    assert isinstance(chain.forward, InSequential)
    return sequential_forward([(chain.forward.segment, chain.dispatch.backend)], chain.module)


def matched(model: nn.Module, x: torch.Tensor) -> list[Fusion]:
    work = optimizing.prepare("test", model, x, fl.Config(), None, lambda *_: None)
    candidates, _ = optimizing.watch(work, x, None)
    return chains.match(work, candidates)


def test_a_tiny_net_is_one_call_in_earnest() -> None:
    """Six layers at batch 1 cost PyTorch's overhead six times: measured, no help from a mock."""
    model, x = deep(), torch.randn(1, 48)
    expected = model(x)
    result = fl.optimize_(model, x)
    assert result.kept == 6, result.table()
    assert {s.rule for s in result.sites} == {"mlp"}
    assert result.speedup.low > 1.0
    (predicted,) = {s.predicted_gain_us for s in result.sites}  # the chain's, in equal shares
    assert predicted is not None
    assert predicted > 0
    torch.testing.assert_close(model(x), expected)
    stored = result.plan.to_json()
    assert {r["route"] for r in stored["rewrites"]} == {"chain"}
    result.revert()
    assert "forward" not in vars(model)
    again = fl.apply_(model, stored)
    assert again.kept == 6
    assert "forward" in vars(model)


LAYOUTS: dict[str, tuple[Any, tuple[int, int, int] | None, tuple[str, str] | None]] = {
    "plain": (
        lambda: net(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
        (0, 3, 2),
        ("relu", "none"),
    ),
    "final activation": (
        lambda: net(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3), nn.Tanh()),
        (0, 4, 2),
        ("gelu", "tanh"),
    ),
    "no activation": (lambda: net(nn.Linear(4, 5), nn.Linear(5, 3)), (0, 2, 2), ("none", "none")),
    "something before and after": (
        lambda: net(nn.LayerNorm(4), nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 3), nn.Softmax(-1)),
        (1, 4, 2),
        ("silu", "none"),
    ),
    "two kinds between": (
        lambda: net(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)),
        (0, 4, 2),
        ("relu", "tanh"),
    ),
    "dropout asleep": (
        lambda: net(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)),
        (0, 4, 2),
        ("relu", "none"),
    ),
    "one linear": (lambda: net(nn.Linear(4, 5), nn.ReLU()), None, None),
    "a norm between": (
        lambda: net(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)),
        None,
        None,
    ),
    "an unknown activation": (
        lambda: net(nn.Linear(4, 5), nn.Hardswish(), nn.Linear(5, 3)),
        None,
        None,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_counts_as_a_chain(name: str) -> None:
    make, run, activations = LAYOUTS[name]
    found = matched(make(), torch.randn(2, 4))
    if run is None:
        assert found == []
        return
    (chain,) = found
    layout = chain.forward.segment
    assert (layout.start, layout.stop, len(layout.linears)) == run
    assert (layout.activation, layout.final_activation) == activations


def test_one_linear_used_twice_is_no_chain() -> None:
    shared = nn.Linear(4, 4)
    assert matched(net(shared, nn.ReLU(), shared), torch.randn(2, 4)) == []


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_the_rewritten_sequential_computes_the_same(mode: str, always_faster: list[str]) -> None:
    model = net(nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5), nn.Softmax(-1))
    x = torch.randn(7, 6)
    other = copy.deepcopy(model)
    work = optimizing.prepare("t", model, x, fl.Config(mode=mode), None, lambda *_: None)
    candidates, _ = optimizing.watch(work, x, None)
    (chain,) = chains.match(work, candidates, ("mlp",))
    assert site.failure(chain) is None
    model.__dict__["forward"] = alone(chain).__get__(model)
    for m in (model, other):
        m(x).square().sum().backward()
    torch.testing.assert_close(model(x), other(x))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_chain_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    (chain,) = matched(deep(8, 3), torch.randn(5, 8))
    assert site.failure(chain) is None
    real = forwards.call_mlp
    monkeypatch.setattr(
        forwards, "call_mlp", lambda x, w, b, *names: real(x, w, [None] * len(w), *names)
    )
    assert site.failure(chain) is not None


CHANGES: dict[str, Any] = {
    "a hook": lambda m: m[1].register_forward_hook(lambda mod, args, y: y + 1),
    "another layer": lambda m: m.__setitem__(1, nn.Tanh()),
    "a longer net": lambda m: m.append(nn.Linear(3, 3)),
    "another slope": lambda m: setattr(m[1], "negative_slope", 0.5),
    "dropout awake": lambda m: m.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_sequential_runs_as_it_now_is(change: str) -> None:
    """What was matched no longer holds: the class's own forward takes over, on the same layers."""
    model = net(nn.Linear(4, 5), nn.LeakyReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
    x = torch.randn(2, 4)
    (chain,) = matched(model, x)
    other = copy.deepcopy(model)
    model.__dict__["forward"] = alone(chain).__get__(model)
    torch.testing.assert_close(model(x), other(x))
    for m in (model, other):
        torch.manual_seed(1)
        CHANGES[change](m)
    torch.manual_seed(2)
    ours = model(x)
    torch.manual_seed(2)
    torch.testing.assert_close(ours, other(x))


def test_global_module_hooks_see_every_layer() -> None:
    model, x = deep(8, 3), torch.randn(2, 8)
    (chain,) = matched(model, x)
    model.__dict__["forward"] = alone(chain).__get__(model)
    seen: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, y: seen.append(type(module).__name__)
    )
    try:
        model(x)
    finally:
        handle.remove()
    assert seen == ["Linear", "ReLU"] * 3 + ["Sequential"]


def test_a_copy_of_a_rewritten_model_reads_its_own_weights() -> None:
    model, x = deep(8, 3), torch.randn(2, 8)
    (chain,) = matched(model, x)
    model.__dict__["forward"] = alone(chain).__get__(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert model(x).abs().max() == 0
    assert twin(x).abs().max() > 0


def test_a_chain_must_beat_its_layers_rewritten(
    always_faster: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = deep(), torch.randn(1, 48)
    work = optimizing.prepare("t", model, x, fl.Config(), None, lambda *_: None)
    candidates, _ = optimizing.watch(work, x, None)
    monkeypatch.setattr(chains.measure, "backends_of", lambda *_: {"forward": "whole_cpp"})
    monkeypatch.setattr(chains.measure, "tune_all", lambda *_, **__: {})
    found = chains.choose_chains(work, candidates, candidates[:2])
    assert set(always_faster) == {"before", "after", "layers"}
    assert [c.route for c in found] == ["chain"] * 6
    assert len({c.unit for c in found}) == 1


def test_families_decide_whether_chains_are_looked_for() -> None:
    model, x = deep(), torch.randn(1, 48)
    result = fl.optimize_(model, x, config=fl.Config(families=("linear_act",)))
    assert all(s.rule == "linear_act" for s in result.sites)
    result.revert()
    result = fl.optimize_(model, x, config=fl.Config(families=("mlp",)))
    assert result.kept in (0, 6)
    result.revert()


def test_profiling_sees_the_sites_of_a_rewritten_chain() -> None:
    model, x = deep(), torch.randn(1, 48)
    (chain,) = matched(model, x)
    model.__dict__["forward"] = alone(chain).__get__(model)
    assert len(fl.profile(model, x).sites) == 6
