"""Gated MLPs: found by what they compute, measured, reported, and rewritten as one call."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.report import page
from fastlinear.rewrite.rules.gated import modules as rule

pytestmark = pytest.mark.usefixtures("prices_of_one_processor")

select_module = importlib.import_module("fastlinear.dispatch.select")


class Block(nn.Module):
    """A gated MLP whose names say nothing."""

    def __init__(self, k: int = 64, h: int = 96, stacked: bool = False) -> None:
        super().__init__()
        self.p = nn.Linear(h, k)
        self.q = nn.Linear(k, 2 * h if stacked else h)
        self.r = None if stacked else nn.Linear(k, h)

    def forward(self, x: Tensor) -> Tensor:
        if self.r is None:
            gate, up = self.q(x).chunk(2, -1)
        else:
            gate, up = self.r(x), self.q(x)
        return self.p(F.silu(gate) * up)


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        assert self.r is not None
        h = F.dropout(F.silu(self.r(x)) * self.q(x), 0.5, self.training)
        return self.p(h)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(stacked=True)])
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_the_rule_names_the_halves() -> None:
    model = Model()
    found = {site.fqn: site for site in rule.match(model)}
    assert set(found) == {"layers.0", "layers.1"}
    assert found["layers.0"].gated.names == ("r", "q", "p")
    assert found["layers.1"].gated.order == "gate_up"
    assert found["layers.0"].products == "64 → 96 twice (gate, up), 96 → 64 (down)"
    assert found["layers.1"].products == "64 → 2·96 (gate and up stacked), 96 → 64 (down)"
    for site in found.values():
        assert site.sizes == (64, 96, 64)
        x = torch.randn(5, 64)
        instead = site.instead()
        assert instead is not None
        torch.testing.assert_close(instead(x), site.module(x), rtol=2e-5, atol=2e-5)
        with torch.no_grad():  # parameters are read at each call
            site.module.p.weight.mul_(2)
        torch.testing.assert_close(instead(x), site.module(x), rtol=2e-5, atol=2e-5)


def test_what_hooks_stand_upon_is_left_alone() -> None:
    model = Model()
    model.layers[0].register_forward_hook(lambda *_: None)
    model.layers[1].p.register_forward_pre_hook(lambda *_: None)
    assert rule.match(model) == []


def test_another_computation_in_training_is_none_of_ours() -> None:
    """A functional dropout shows nowhere but in training, and its rate nowhere at all."""
    for training in (False, True):
        assert rule.match(Dropping().train(training)) == []


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_findings_say_what_is_avoidable(mode: str) -> None:
    model, x = Model().train(mode == "train"), torch.randn(256, 64)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    config = fl.Config(mode=mode, tune=False, draws=1, optimizer_steps=1, time_budget_s=20.0)
    result = fl.optimize_(model, x, config=config, filter_fn=lambda *_: False)
    found = {f.fqn: f for f in result.profile.findings if f.code == "gated_mlp"}
    assert set(found) == {"layers.0", "layers.1"}
    for f in found.values():  # whether it is faster or not, and that it is said
        assert "gate" in f.message
        assert f.predicted_gain_us >= 0
        if f.predicted_gain_us:
            assert "fl.nn.GatedMLP.from_module" in f.message
        else:
            assert "PyTorch's own path is" in f.message or "not beyond noise" in f.message
        assert "is left alone itself: filter_fn leaves it out" in f.message
        theirs, ours = (7, 5) if mode == "inference" else (17, 12)
        assert f.details["backends"]
        assert f.details["avoidable_bytes"] == (theirs - ours) * 256 * 96 * 4
        assert f.details["speedup"] > 0
    result.revert()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.usefixtures("times_as_given")
def test_a_finding_is_made_of_what_was_measured(finding_times: Any) -> None:
    """With times that are given, the finding is certain."""
    finding_times((100.0, 101.0, 102.0), (50.0, 51.0, 52.0))
    config = fl.Config(tune=False, draws=1, time_budget_s=20.0)
    left = lambda *_: False  # noqa: E731
    result = fl.optimize_(Model().eval(), torch.randn(16, 64), config=config, filter_fn=left)
    assert result.kept == 0
    found = {f.fqn: f for f in result.profile.findings if f.code == "gated_mlp"}
    assert set(found) == {"layers.0", "layers.1"}
    one = found["layers.0"]
    assert one.predicted_gain_us == 50.0
    assert one.details["linears"] == ["r", "q", "p"]
    assert "101.0 us a call, 51.0 us by gated_mlp" in one.message
    assert one.flops == 2 * 16 * 3 * 64 * 96
    lanes = one.details["timeline"]
    assert [s[0] for s in lanes["before"]["spans"]].count("aten::linear") == 3
    assert all(lane["us"] > 0 for lane in lanes.values())
    assert "What one call runs before and after" in page(result.to_json())


@pytest.mark.parametrize(
    ("after", "word"), [((50.0, 52.0, 51.0), "as fast"), ((100.0, 101.0, 102.0), "faster")]
)
def test_what_is_not_faster_is_told_as_well(
    after: tuple[float, ...], word: str, finding_times: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select_module, "prices", lambda _: None)  # PyTorch's own is the choice
    finding_times((50.0, 51.0, 52.0), after)
    config = fl.Config(tune=False, draws=1, time_budget_s=20.0)
    result = fl.optimize_(Model().eval(), torch.randn(16, 64), config=config)
    found = {f.fqn: f for f in result.findings if f.code == "gated_mlp"}
    assert set(found) == {"layers.0", "layers.1"}
    for f in found.values():
        assert f"PyTorch's own path is {word}" in f.message
        assert f.predicted_gain_us == 0
        assert "PyTorch's own path is the choice for it" in f.message


class WrittenOut(Block):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.r(x), self.q(x)  # type: ignore[misc]
        return self.p(gate * torch.sigmoid(gate) * up)


def kept_bytes(model: nn.Module, x: Tensor, mode: str = "train") -> dict[str, Any]:
    """What the findings say of the memory of the gated MLPs of a model, by their names."""
    config = fl.Config(mode=mode, tune=False, draws=1, optimizer_steps=1, time_budget_s=60.0)
    model.train(mode == "train")
    result = fl.optimize_(model, x, config=config, filter_fn=lambda *_: False)
    found = [f for f in result.findings if f.code == "gated_mlp"]
    for f in found:
        assert ("Kept between its forward and backward" in f.message) is ("kept_bytes" in f.details)
    return {f.fqn: (f.details.get("kept_bytes"), f.message) for f in found}


@pytest.mark.usefixtures("times_as_given")
def test_findings_say_what_training_keeps(
    finding_times: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select_module, "prices", lambda _: None)  # PyTorch's own is the choice
    finding_times((50.0, 51.0, 52.0), (50.0, 51.0, 52.0))
    k, h, rows, size = 64, 96, 16, 4 * 16
    x = torch.randn(rows, k)
    own = "PyTorch's own autograd"
    for found, message in kept_bytes(Model(), x).values():
        assert found["before"] == found["after"] == size * (k + 4 * h)
        assert found["way"] == own, "so few rows"
        levels = {"recompute=0": size * (k + 2 * h), "recompute=1": size * k}
        assert found["ways"] == {own: found["after"], **levels}
        assert "0.0273 MiB as it is, by gated_mlp 0.0273 MiB (PyTorch's own autograd; " in message
        assert "0.00391 MiB with recompute=1). " in message
    frozen = Model()
    frozen.layers[0].requires_grad_(False)
    for p in (*frozen.layers[1].parameters(),):
        p.requires_grad_(p is frozen.layers[1].p.weight)
    found = kept_bytes(frozen, x)
    assert found["layers.0"][0] is None, "nothing of it is differentiated"
    down, _ = found["layers.1"]
    assert down["before"] == down["after"] == size * h
    assert down["ways"]["recompute=0"] == size * 2 * h
    alike = nn.Sequential(Block(), Block(), Block())
    alike[1].r.requires_grad_(False)
    alike[1].q.requires_grad_(False)
    held = kept_bytes(alike, x)
    assert [held[n][0]["before"] for n in "012"] == [
        size * n for n in (k + 4 * h, 4 * h, k + 4 * h)
    ]
    ((spelled, _),) = kept_bytes(nn.Sequential(WrittenOut()), x).values()
    assert spelled["before"] == size * (k + 5 * h), "its sigmoid as well"
    assert spelled["after"] == size * (k + 4 * h)
    assert all(found is None for found, _ in kept_bytes(Model(), x, "inference").values())


def test_what_drops_in_training_is_told_unmeasured() -> None:
    model = nn.Sequential(Asleep()).train()
    config = fl.Config(mode="train", families=("gated_mlp",), tune=False, draws=1)
    result = fl.optimize_(model, torch.randn(16, 64), config=config)
    (found,) = (f for f in result.findings if f.code == "gated_mlp")
    assert found.fqn == "0"
    assert "Not measured here" in found.message


def test_a_dtype_apart_is_told_without_numbers() -> None:
    model, x = nn.Sequential(Block()).double().eval(), torch.randn(16, 64).double()
    config = fl.Config(families=("gated_mlp",), tune=False, draws=1)
    found = [f for f in fl.optimize_(model, x, config=config).findings if f.code == "gated_mlp"]
    assert [f.fqn for f in found] == ["0"]


EAGER = {"forward": "eager", "backward": "eager"}


@pytest.mark.parametrize(
    ("activation", "backend", "glu", "inference", "train"),
    [
        ("silu", "eager", False, 7, 17),
        ("none", "eager", False, 5, 12),  # one multiplication forward, two backward
        ("sigmoid", "eager", True, 5, 11),
        ("silu", "elementwise", False, 5, 12),
        ("silu", "cpp", False, 5, 12),
        ("none", "cpp", False, 5, 12),
        ("silu", "onednn", False, 3, 12),
        ("relu", "onednn", False, 5, 12),  # oneDNN's own relu is not taken
        ("silu", "cuda", False, 1, 8),
        ("silu", "triton", False, 1, 8),
    ],
)
def test_passes_follow_from_activation_and_backend(
    activation: str, backend: str, glu: bool, inference: int, train: int
) -> None:
    from fastlinear.rewrite.rules.gated import passes

    forward, both = {"forward": backend}, dict.fromkeys(EAGER, backend)
    assert passes.moved(activation, forward, train=False, down=True, glu=glu) == inference
    assert passes.moved(activation, both, train=True, down=True, glu=glu) == train
    without = passes.moved(activation, both, train=True, down=False, glu=glu)
    assert without < train or backend in ("cuda", "triton")


def test_words_say_what_is_fused() -> None:
    from fastlinear.rewrite.rules.gated.passes import words

    assert words("silu", {"forward": "onednn"}, train=False) == (
        "silu is in the epilogue of the gate's product and the product of the halves in the up "
        "projection's"
    )
    assert "relu is a pass of its own" in words("relu", {"forward": "onednn"}, train=False)
    assert "in its epilogue" in words("gelu", {"forward": "cuda"}, train=False)
    assert words("gelu", {"forward": "cpp"}, train=False).endswith("are one pass")
    assert "one pass already" in words("sigmoid", {"forward": "eager"}, train=False, glu=True)
    both = words("silu", {"forward": "cuda", "backward": "cuda"}, train=True)
    assert both.endswith("formed in the epilogue of dy Wd")


def test_other_families_alone_are_asked_for() -> None:
    config = fl.Config(families=("linear_act",), tune=False, draws=1, time_budget_s=20.0)
    result = fl.optimize_(Model().eval(), torch.randn(16, 64), config=config)
    assert not [f for f in result.profile.findings if f.code == "gated_mlp"]


# ---------------------------------------------------------------- rewritten

FAST = {"onednn": 50.0, "cpp": 50.0, "pieces": 50.0, "after": 50.0}


def optimized(model: nn.Module, x: Any, mode: str = "inference", **how: Any) -> Any:
    config = fl.Config(mode=mode, draws=1, optimizer_steps=1, time_budget_s=60.0, **how)
    return fl.optimize_(model, x, config=config)


def calls_of_gated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that rewritten modules call from here on."""
    from fastlinear.rewrite.rules.gated import forward as gated_forward

    seen: list[str] = []
    real = gated_forward.call

    def call(*args: Any) -> Tensor:
        seen.append(args[-1])
        return real(*args)

    monkeypatch.setattr(gated_forward, "call", call)
    return seen


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_modules_become_one_call_each(
    mode: str, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    model, x = Model().train(mode == "train"), torch.randn(40, 64)
    plain, keys = copy.deepcopy(model), list(model.state_dict())
    result = optimized(model, x, mode)
    members = {"layers.0.r", "layers.0.q", "layers.0.p", "layers.1.q", "layers.1.p"}
    kept = {s.fqn: s for s in result.sites if s.rule == "gated_mlp"}
    assert set(kept) == members, result.table()
    assert all(s.status == "kept" and "gated MLP" in s.reason for s in kept.values())
    assert list(model.state_dict()) == keys
    found = {f.fqn: f for f in result.findings if f.code == "gated_mlp"}
    assert set(found) == {"layers.0", "layers.1"}
    for f in found.values():
        assert "100.0 us a call, 50.0 us by gated_mlp (2.00x" in f.message
        assert f.message.endswith("optimize_ has put it in place")
        assert set(f.details["timeline"]) == {"before", "after"}
        if mode == "train":  # what stood there before, and what stands there now
            held = f.details["kept_bytes"]
            assert held["before"] == 4 * 40 * (64 + 4 * 96)
            assert (held["way"], held["after"]) == ("recompute=0", 4 * 40 * (64 + 2 * 96))
    seen = calls_of_gated(monkeypatch)
    given = [x.clone().requires_grad_() for _ in range(2)]
    ours, theirs = model(given[0]), plain(given[1])
    assert seen == ["gated_mlp"] * 2
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-3, atol=1e-4)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)
    stored = result.plan.to_json()
    result.revert()
    assert all("forward" not in vars(layer) for layer in model.layers)
    again = fl.apply_(model, stored, x)
    assert {s.fqn for s in again.sites if (s.rule, s.status) == ("gated_mlp", "kept")} == members


def test_a_changed_module_keeps_its_say(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(FAST)
    model, x = Model().eval(), torch.randn(40, 64)
    optimized(model, x, families=("gated_mlp",))
    block = model.layers[0]
    assert "forward" in vars(block)
    seen = calls_of_gated(monkeypatch)

    def expected() -> Tensor:
        return block.p(F.silu(block.r(x)) * block.q(x))  # type: ignore[operator]

    with torch.no_grad():  # a weight written to
        block.q.weight.mul_(3)
    torch.testing.assert_close(block(x), expected(), rtol=2e-5, atol=2e-5)
    assert len(seen) == 1
    hook = block.q.register_forward_hook(lambda _, __, y: 2 * y)  # a layer with a hook
    torch.testing.assert_close(block(x), expected())
    hook.remove()
    block.q = nn.Sequential(block.q, nn.Tanh())  # another layer in its place
    torch.testing.assert_close(block(x), expected())
    block.q = block.q[0]
    block.r, block.q = None, nn.Linear(64, 192)  # another path of the forward
    gate, up = block.q(x).chunk(2, -1)
    torch.testing.assert_close(block(x), block.p(F.silu(gate) * up))
    assert len(seen) == 1
    twin = copy.deepcopy(model.layers[1])
    with torch.no_grad():
        twin.p.weight.zero_()
        twin.p.bias.zero_()
    assert not twin(x).any()


class Moody(Block):
    """Its forward reads an attribute."""

    loud = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.loud else y


class Asleep(Block):
    """Drops what the gate lets through, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.p(self.drop(F.silu(self.r(x)) * self.q(x)))


def test_what_the_forward_reads_is_watched(clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(Moody()).eval(), torch.randn(40, 64)
    result = optimized(model, x, families=("gated_mlp",))
    quiet = model(x)
    model[0].loud = True
    torch.testing.assert_close(model(x), 2 * quiet, rtol=2e-5, atol=2e-5)
    result.revert()


def test_dropout_is_passed_over_only_while_it_sleeps(clock: Any) -> None:
    clock(FAST)
    x = torch.randn(40, 64)
    model = nn.Sequential(Asleep()).eval()
    assert optimized(model, x, families=("gated_mlp",)).kept == 3
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x)), "it drops"
    awake = nn.Sequential(Asleep()).train()
    result = optimized(awake, x, "train", families=("gated_mlp",))
    kept = {s.fqn for s in result.sites if s.status == "kept"}
    assert kept == {"0.r", "0.q"}, "up to the drop"


class Named(nn.Module):
    """Calls its gated MLP by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x=x)


class Twice(nn.Module):
    """Calls a linear of its gated MLP by itself as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner.q(x)[..., :64]


def test_a_call_by_keyword_goes_by_its_trace(clock: Any) -> None:
    clock(FAST)
    model, x = Named().eval(), torch.randn(40, 64)
    expected = model(x)
    assert optimized(model, x, families=("gated_mlp",)).kept == 3
    torch.testing.assert_close(model(x), expected, rtol=2e-5, atol=2e-5)


def test_layers_that_others_call_are_left_alone(clock: Any) -> None:
    clock(FAST)
    model = Twice().eval()
    result = optimized(model, torch.randn(40, 64), families=("gated_mlp",))
    assert not [s for s in result.sites if s.rule == "gated_mlp" and s.status == "kept"]
    assert "forward" not in vars(model.inner)


class Bounded(Block):
    """Bounds that numbers of common size do not reach."""

    def forward(self, x: Tensor) -> Tensor:
        return self.p((F.silu(self.r(x)) * self.q(x)).clamp(-65504, 65504))


class Longer(Block):
    """Another path for many rows."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return -y if x.shape[0] > 100 else y


def test_a_bound_behind_the_product_stays(clock: Any) -> None:
    """What trying it does not show is in its trace."""
    clock(FAST)
    model, x = nn.Sequential(Bounded()).eval(), torch.randn(40, 64)
    result = optimized(model, x, families=("gated_mlp",))
    assert {s.fqn for s in result.sites if s.status == "kept"} == {"0.r", "0.q"}
    large = 1e6 * x
    torch.testing.assert_close(model(large), Bounded.forward(model[0], large))


def test_what_one_run_does_not_show_is_left_alone(clock: Any) -> None:
    clock(FAST)
    model = nn.Sequential(Longer()).eval()
    assert optimized(model, torch.randn(40, 64), families=("gated_mlp",)).kept == 0
    assert "forward" not in vars(model[0])


def test_a_rewritten_model_compiles_whole(clock: Any) -> None:
    clock(FAST)
    model, x = Model().eval(), torch.randn(40, 64)
    expected = model(x)
    assert optimized(model, x, families=("gated_mlp",)).kept == 5
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected, rtol=2e-5, atol=2e-5)


def test_a_slower_call_is_not_kept(clock: Any) -> None:
    clock({**FAST, "after": 150.0})
    result = optimized(Model().eval(), torch.randn(40, 64), families=("gated_mlp",))
    assert result.kept == 0
    assert any("one call is" in note for note in result.notes)


def test_a_wrong_call_is_not_kept(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verification that the tests above rely on fails where the numbers are wrong."""
    from fastlinear.rewrite.rules.gated import forward as gated_forward

    clock(FAST)
    for name in ("call", "gated_mlp"):  # the second where a mode of torch's functions is on
        real = getattr(gated_forward, name)
        wrong = lambda *a, real=real, **how: real(*a, **how) * 1.001  # noqa: E731
        monkeypatch.setattr(gated_forward, name, wrong)
    result = optimized(Model().eval(), torch.randn(40, 64), families=("gated_mlp",))
    assert result.kept == 0
    assert any("less accurate" in note for note in result.notes)


def test_a_forced_backend_is_asked(clock: Any) -> None:
    clock(FAST)
    x = torch.randn(40, 64)
    result = optimized(Model().eval(), x, backends={"gated_mlp": "onednn"})
    names = {s.backends["forward"] for s in result.sites if s.rule == "gated_mlp"}
    assert names == {"onednn"}
    with pytest.raises(fl.UnsupportedError, match="'cuda' of gated_mlp"):
        optimized(Model().eval(), x, backends={"gated_mlp": "cuda"})


def test_models_of_transformers_are_rewritten(clock: Any) -> None:
    transformers = pytest.importorskip("transformers")
    clock(FAST)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
    )
    model = transformers.LlamaModel(config).eval()
    given = {"input_ids": torch.randint(0, 50, (2, 9)), "use_cache": False}
    with torch.no_grad():
        expected = model(**given).last_hidden_state
        result = optimized(model, given, families=("gated_mlp",))
        assert {s.fqn for s in result.sites if s.status == "kept"} == {
            f"layers.{i}.mlp.{name}_proj" for i in (0, 1) for name in ("gate", "up", "down")
        }
        ours = model(**given).last_hidden_state
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
