"""Diagonal modules: found by what they compute, measured, and reported as findings."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.timing import Ratio
from fastlinear.rewrite.evaluate import findings
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.rules.diagonal import modules as rule
from fastlinear.rewrite.rules.diagonal.find import of_sequence
from fastlinear.rewrite.rules.diagonal.sequences import Watch
from fastlinear.rewrite.session import Times
from tests.rewrite.rewrite_models import Clock


class LayerScale(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class PseudoLinear(nn.Module):
    """The document's: the bias is listed first here, so that names say nothing."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(features))
        self.scale = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.scale + self.shift)


class InPlace(LayerScale):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma)


class Softmax(LayerScale):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x * self.gamma, -1)


class Needy(LayerScale):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x * self.gamma + other


def diagonal(features: int) -> nn.Linear:
    linear = nn.Linear(features, features)
    with torch.no_grad():
        linear.weight.copy_(torch.diag(torch.randn(features)))
    return linear


class Model(nn.Module):
    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.branch = nn.Linear(features, features)
        self.ls1 = LayerScale(features)
        self.fake = PseudoLinear(features)
        self.diagonal = diagonal(features)
        self.norm = nn.LayerNorm(features)
        self.prelu = nn.PReLU(features)
        self.others = nn.ModuleList([InPlace(features), Softmax(features), Needy(features)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.branch(self.norm(x)))
        return self.prelu(self.diagonal(self.fake(x)))


def test_modules_are_known_by_what_they_compute() -> None:
    found = {d.fqn: d for d in rule.match(Model())}
    assert sorted(found) == ["diagonal", "fake", "ls1", "others.0"]
    assert found["others.0"].in_place
    assert found["others.0"].kind == "layer_scale"
    scale, fake, linear = found["ls1"], found["fake"], found["diagonal"]
    assert (scale.kind, scale.activation, scale.weight, scale.bias) == (
        *("layer_scale", "none", "gamma"),
        None,
    )
    assert (fake.kind, fake.activation, fake.weight, fake.bias) == (
        *("affine", "relu", "scale"),
        "shift",
    )
    assert (linear.kind, linear.weight, linear.bias) == ("linear", "weight", "bias")
    assert [d.features for d in (scale, fake, linear)] == [64, 64, 64]


def test_what_is_put_instead_computes_the_same() -> None:
    model = Model()
    with torch.no_grad():
        for parameter in (model.ls1.gamma, model.fake.scale, model.fake.shift):
            parameter.normal_()
    x = torch.randn(5, 64)
    for d in rule.match(model):
        torch.testing.assert_close(d.instead()(x), d.module(x.clone()))


def test_matching_changes_nothing() -> None:
    model = Model().bfloat16()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    assert len(rule.match(model)) == 4
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [p._version for p in model.parameters()] == versions


def test_hooked_modules_and_nearly_diagonal_linears_are_left_out() -> None:
    model = Model()
    model.ls1.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        model.diagonal.weight[0, 1] = 1e-30
    assert [d.fqn for d in rule.match(model)] == ["fake", "others.0"]


@pytest.mark.parametrize("mode", ["inference", "train"])
def test_optimize_reports_what_it_would_save(mode: str, clock: Clock) -> None:
    """A full product with a diagonal is the slowest way there is; nothing is rewritten for it."""
    clock({"before": 1000.0, "after": 50.0})
    model = nn.Sequential(diagonal(512), nn.Tanh(), LayerScale(512))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    config = fl.Config(mode=mode, tune=False, time_budget_s=300.0)
    result = fl.optimize_(model, torch.randn(256, 512), config=config)
    found = {f.fqn: f for f in result.findings if f.code == "diagonal_linear"}
    assert "0" in found
    finding = found["0"]
    assert finding.details["advice"] == "fl.nn.DiagonalLinear.from_linear(model[0])"
    assert (finding.measured_us, finding.predicted_gain_us) == (1000.0, 950.0)
    assert finding.measured_us > finding.floor_us > 0
    assert "exactly diagonal: 512 numbers" in finding.message
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    result.to_json()
    result.revert()
    layer = eval(finding.details["advice"], {"fl": fl, "model": model})
    torch.testing.assert_close(layer.weight, model[0].weight.diagonal())


class Ops(nn.Module):
    """Affine sequences written out in a forward, one whose inside is read again, and others."""

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        names = ("w1", "b1", "w2", "w3", "w4", "b4")
        for name in names:
            setattr(self, name, nn.Parameter(torch.randn(features)))
        self.gelu = nn.GELU("tanh")
        self.scale = LayerScale(features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gelu(self.w1 * x + self.b1) + x
        x = x + self.scale(x)
        x = torch.addcmul(self.b4, x, self.w4).relu_()
        inside = x * self.w2
        x = inside + x
        x = x * inside.mean()
        return torch.softmax(x * self.w3, -1)


@pytest.mark.parametrize("grad", [False, True])
def test_sequences_are_seen_where_they_run(grad: bool) -> None:
    """Whatever module an op belongs to; not where anything else reads what lies between."""
    model = nn.Sequential(Ops(), Ops())
    with torch.set_grad_enabled(grad), Watch(model) as watch:
        model(torch.randn(5, 64))
        model(torch.randn(5, 64))
    found = {(s.fqn, s.weight): s for s in watch.sequences()}
    for i in ("0", "1"):
        first = found.pop((i, f"{i}.w1"))
        assert (first.bias, first.activation, first.residual) == (f"{i}.b1", "gelu_tanh", True)
        assert (first.span, first.ops, first.calls) == (i, 4, 2)
        scale = found.pop((f"{i}.scale", f"{i}.scale.gamma"))
        assert (scale.bias, scale.residual, scale.span, scale.ops) == (None, True, i, 2)
        last = found.pop((i, f"{i}.w4"))
        assert (last.bias, last.activation, last.residual, last.ops) == (
            f"{i}.b4",
            "relu",
            False,
            3,
        )
    assert not found
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Shaped(nn.Module):
    """Parameters of shape (1, 1, K), the bias subtracted."""

    def __init__(self, features: int = 64) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(1, 1, features))
        self.beta = nn.Parameter(torch.randn(1, 1, features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.gamma - self.beta)


class Squared(PseudoLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


class Quick(PseudoLinear):
    def forward(self, x: Tensor) -> Tensor:
        pre = x * self.scale + self.shift
        return pre * torch.sigmoid(1.702 * pre)


def test_modules_of_other_shapes_and_signs() -> None:
    module = Shaped()
    (found,) = rule.match(module)
    assert (found.activation, found.bias, found.minus, found.features) == (
        *("relu", "beta"),
        True,
        64,
    )
    assert found.advice() == (
        "fl.diagonal_linear(x, module.gamma.flatten(), -module.beta.flatten(), activation='relu')"
    )
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(found.instead()(x), module(x))


@pytest.mark.parametrize("grad", [False, True])
def test_sequences_in_place_of_other_shapes_and_signs(grad: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Linear(64, 64)
            self.scale = InPlace(64)
            self.shaped = Shaped()

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.scale(self.branch(x))
            return x + self.shaped(x)

    model = Block()
    nn.init.normal_(model.scale.gamma)
    x = torch.randn(2, 5, 64)
    with torch.set_grad_enabled(grad), Watch(model) as watch:
        model(x)
    found = {s.fqn: s for s in watch.sequences()}
    assert set(found) == {"scale", "shaped"}
    scale, shaped = found["scale"], found["shaped"]
    assert (scale.in_place, scale.residual, scale.ops, scale.span) == (True, True, 2, "")
    assert (shaped.minus, shaped.activation, shaped.residual, shaped.ops) == (True, "relu", True, 4)
    fusion = of_sequence(model, shaped, train=grad)
    assert fusion is not None
    r = fusion.tensors["dr"]
    torch.testing.assert_close(fusion.after(x), fusion.before(x))
    torch.testing.assert_close(fusion.before(x), r + model.shaped(x))
    fusion = of_sequence(model, scale, train=grad)
    assert fusion is not None
    r = fusion.tensors["dr"]
    with torch.set_grad_enabled(grad):
        for _ in range(2):  # x is as it was
            torch.testing.assert_close(fusion.before(x), r + x * model.scale.gamma)


def test_what_is_added_to_itself_is_no_residual() -> None:
    class Doubled(LayerScale):
        def forward(self, x: Tensor) -> Tensor:
            y = x * self.gamma
            return y + y

    class Over(LayerScale):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.mul_(self.gamma)

    for module in (Doubled(64), Over(64)):
        with torch.no_grad(), Watch(module) as watch:
            module(torch.randn(5, 64))
        assert not watch.sequences()


@pytest.mark.parametrize("grad", [False, True])
def test_what_is_read_detached_is_read(grad: bool) -> None:
    class Block(LayerScale):
        def forward(self, x: Tensor) -> Tensor:
            y = x * self.gamma
            z = torch.relu(y)
            return z * y.detach().mean()

    module = Block(64)
    with torch.set_grad_enabled(grad), Watch(module) as watch:
        module(torch.randn(5, 64))
    assert not watch.sequences()


def test_whole_modules_come_before_sequences_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """quick_gelu and relu2 begin as sequences that end before them."""
    model = nn.Sequential(Squared(64), Quick(64), InPlace(64), Shaped())
    asked: list[Fusion] = []

    def measured(_: object, fusion: Fusion, __: int) -> Times:
        asked.append(fusion)
        return Times(1.0, 1.0, Ratio(1.0, 1.0, 1.0))

    monkeypatch.setattr(findings, "measured", measured)
    config = fl.Config(mode="inference", tune=False, families=("diagonal_linear",))
    fl.optimize_(model, torch.randn(2, 5, 64), config=config).revert()
    kinds = {f.fqn: f.report.details["kind"] for f in asked if f.report is not None}
    assert {(f.fqn, kinds[f.fqn], f.activation) for f in asked} == {
        ("0", "affine", "relu2"),
        ("1", "affine", "quick_gelu"),
        ("2", "layer_scale", "none"),
        ("3", "affine", "relu"),
    }
    x = torch.randn(2, 5, 64)
    for fusion in asked:
        torch.testing.assert_close(fusion.after(x), fusion.before(x))


def test_sequences_of_real_models_become_findings() -> None:
    """Dinov2 has LayerScale modules, BEiT scales in its blocks' own forward; both add then."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    image = {"image_size": 32, "patch_size": 16, "intermediate_size": 64}
    dinov2 = transformers.Dinov2Model(transformers.Dinov2Config(**sizes, **image)).eval()
    beit = transformers.BeitModel(
        transformers.BeitConfig(**sizes, **image, layer_scale_init_value=0.1)
    ).eval()
    for model, names in (
        (dinov2, [f"encoder.layer.{i}.layer_scale{j}" for i in (0, 1) for j in (1, 2)]),
        (beit, [f"layers.{i}" for i in (0, 0, 1, 1)]),
    ):
        with torch.no_grad(), Watch(model) as watch:
            model(torch.randn(1, 3, 32, 32))
        found = watch.sequences()
        assert [s.fqn for s in found] == names
        assert all(s.residual and s.ops == 2 and s.x.shape == (1, 5, 64) for s in found)


def test_optimize_reports_a_scaled_branch_with_its_residual(clock: Clock, tmp_path: Path) -> None:
    clock({"before": 1000.0, "after": 50.0})

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branch = nn.Linear(1024, 1024)
            self.scale = LayerScale(1024)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale(self.branch(x))

    model = nn.Sequential(Block(), Block())
    config = fl.Config(mode="inference", tune=False)
    result = fl.optimize_(model, torch.randn(16, 1024), config=config)
    found = {f.fqn: f for f in result.findings if f.code == "diagonal_linear"}
    assert set(found) == {"0.scale", "1.scale"}
    finding = found["0.scale"]
    assert finding.details["residual"]
    advice = finding.details["advice"]
    assert advice == "fl.diagonal_linear(x, model[0].scale.gamma, residual=residual)"
    assert "model[0] scales 1024 features" in finding.message
    assert finding.message.endswith(f"Replace it with {advice}.")
    shown = " ".join(result.table(width=120).split())
    assert "0.scale (+1 alike): sequence of 1024 features, about 1900.0 µs a step." in shown
    assert advice in shown
    stored = json.loads(result.save(tmp_path / "plan.json").read_text())["advice"]
    assert {a["advice"] for a in stored} == {advice, advice.replace("[0]", "[1]")}
    assert {a["fqn"]: a["predicted_gain_us"] for a in stored} == {
        "0.scale": 950.0,
        "1.scale": 950.0,
    }
    page = result.html(tmp_path / "report.html").read_text()
    text = html.unescape(re.sub("<wbr>|\u200b", "", page))
    assert all(a["advice"] in text for a in stored)
    told = result.to_json()["profile"]["findings"]
    assert advice in [f["details"].get("advice") for f in told]
    x, residual = torch.randn(2, 1024), torch.randn(2, 1024)
    given = {"fl": fl, "model": model, "x": x, "residual": residual}
    torch.testing.assert_close(eval(advice, given), residual + model[0].scale(x))
    assert "adds a residual, in 2 ops" in finding.message
    result.to_json()
    result.revert()
    fl.apply_(model, tmp_path / "plan.json", inputs=torch.randn(16, 1024)).revert()


def test_families_that_are_off_are_not_looked_for() -> None:
    model = nn.Sequential(diagonal(512))
    config = fl.Config(families=("linear_act",), tune=False)
    result = fl.optimize_(model, torch.randn(256, 512), config=config)
    assert not [f for f in result.findings if f.code == "diagonal_linear"]
