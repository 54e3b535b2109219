"""Which sites are rewritten by which route, and which are refused with which code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.nn import Linear
from fastlinear.rewrite import optimize_
from tests.rewrite.rewrite_models import (
    Functional,
    LoraLinear,
    Residual,
    SharedActivation,
    SharedLinear,
    mlp,
    run,
    snapshot,
)

pytestmark = [
    pytest.mark.usefixtures("fast"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def site(result: Any, fqn: str) -> Any:
    return next(s for s in result.sites if s.fqn == fqn)


class Plus(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w + 1


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class OwnTensor(Tensor):
    pass


def _hook(m: nn.Sequential) -> None:
    m[0].register_forward_hook(lambda *_: None)


def _pre_hook(m: nn.Sequential) -> None:
    m[0].register_forward_pre_hook(lambda *_: None)


def _backward_hook(m: nn.Sequential) -> None:
    m[0].register_full_backward_hook(lambda *_: None)


def _activation_hook(m: nn.Sequential) -> None:
    m[1].register_forward_hook(lambda *_: None)


def _parametrization(m: nn.Sequential) -> None:
    parametrize.register_parametrization(m[0], "weight", Plus())


def _own_forward(m: nn.Sequential) -> None:
    m[0].forward = lambda x: F.linear(x, m[0].weight)  # type: ignore[method-assign]


def _subclass(m: nn.Sequential) -> None:
    m[0] = OwnLinear(16, 32)


def _adapter(m: nn.Sequential) -> None:
    m[0] = LoraLinear(m[0])  # type: ignore[arg-type]


def _weight_subclass(m: nn.Sequential) -> None:
    m[0].weight = nn.Parameter(m[0].weight.detach().as_subclass(OwnTensor))


@pytest.mark.parametrize(
    ("change", "fqn", "code"),
    [
        (_hook, "0", "hooks"),
        (_pre_hook, "0", "hooks"),
        (_backward_hook, "0", "hooks"),
        (_activation_hook, "0", "activation_hooks"),
        (_parametrization, "0", "parametrized"),
        (_own_forward, "0", "own_forward"),
        (_subclass, "0", "subclass"),
        (_adapter, "0.base_layer", "adapter"),
        (_adapter, "0.lora_A", "adapter"),
        (_weight_subclass, "0", "weight_subclass"),
    ],
)
def test_refused(change: Any, fqn: str, code: str) -> None:
    model = mlp().eval()
    change(model)
    keys = [tuple(vars(m)) for m in model.modules()]
    expected = run(model, X)
    result = optimize_(model, X)
    refused = site(result, fqn)
    assert (refused.status, refused.code) == ("refused", code)
    assert refused.reason.endswith(".")
    assert site(result, "2").status == "kept"
    torch.testing.assert_close(run(model, X), expected, check_dtype=True)
    result.revert()
    assert [tuple(vars(m)) for m in model.modules()] == keys


def test_other_modules_stay_out_of_it() -> None:
    model = nn.Sequential(Linear(16, 16, activation="relu"), nn.Linear(16, 4)).eval()
    result = optimize_(model, X)
    assert (site(result, "0").status, site(result, "0").code) == (
        "nothing_to_do",
        "already_fastlinear",
    )
    assert site(result, "1").status == "kept"


def test_quantized_linears_are_counted_and_refused() -> None:
    with pytest.warns(DeprecationWarning, match="torch.ao.quantization"):
        model = torch.ao.quantization.quantize_dynamic(mlp().eval(), {nn.Linear})
    model.append(nn.Linear(4, 4))
    result = optimize_(model.eval(), X)
    assert [s.status for s in result.sites] == ["refused"] * 3 + ["kept"]
    assert site(result, "0").code == "quantized"


def test_a_linear_that_is_never_called_is_nothing_to_do() -> None:
    model = mlp().eval()
    model.spare = nn.Linear(3, 3)  # type: ignore[assignment]
    model.forward = lambda x: nn.Sequential(*list(model)[:5])(x)  # type: ignore[method-assign]
    result = optimize_(model, X)
    assert site(result, "spare").code == "not_called"


def test_an_activation_shared_by_sequentials_is_fused_where_it_stands() -> None:
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(16, 16), act, nn.Linear(16, 16), act).eval()
    expected = run(model, X)
    result = optimize_(model, X)
    assert [(s.activation, s.route) for s in result.sites] == [("relu", "parent")] * 2
    assert "forward" not in vars(act)
    torch.testing.assert_close(run(model, X), expected)
    result.revert()
    model.append(act)
    result = optimize_(model, X)
    assert [(s.activation, s.route) for s in result.sites] == [("relu", "parent")] * 2
    torch.testing.assert_close(run(model, X), expected)


class Branches(nn.Module):
    """An activation module that a path not taken while optimizing calls on something else."""

    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.drop = nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.0)
        self.register_buffer("shift", torch.zeros(16))

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        h = self.act(self.fc(x)) + self.shift + self.offset
        h = h * 2 if self.drop.p > 0 else h
        return self.act(h - 1) if again else h


def test_paths_not_taken_while_optimizing_keep_their_meaning() -> None:
    model = Branches().eval()
    twin = copy.deepcopy(model)

    def same(*args: Any) -> None:
        with torch.no_grad():
            torch.testing.assert_close(model(X, *args), twin(X, *args))

    result = optimize_(model, X)
    assert [(s.activation, s.route) for s in result.sites] == [("relu", "parent")]
    same()
    same(True)
    for m in (model, twin):
        m.drop.p = 0.1
    same()
    for m in (model, twin):
        m.offset = 0.5
    same()
    for m in (model, twin):
        m.drop.p, m.shift = 0.0, torch.ones(16)
    same()
    for m in (model, twin):
        m.act = nn.Tanh()
    same()


def test_hooks_on_a_fused_activation_are_honoured() -> None:
    model = SharedActivation().eval()
    expected = run(model, X)
    result = optimize_(model, X)
    assert [(s.activation, s.route) for s in result.sites] == [("relu", "parent")] * 2
    seen: list[Tensor] = []
    model.act.register_forward_hook(lambda m, a, y: seen.append(y))
    torch.testing.assert_close(run(model, X), expected)
    assert len(seen) == 2


def test_a_replaced_linear_of_the_same_name_is_called_itself() -> None:
    model = Functional().eval()
    optimize_(model, X)
    model.fc2 = Linear(32, 16, activation="tanh")  # type: ignore[assignment]
    twin = Functional().eval()
    twin.load_state_dict(model.state_dict())
    twin.fc2 = model.fc2
    torch.testing.assert_close(run(model, X), run(twin, X))


def test_a_shared_activation_with_another_use_goes_through_the_parent() -> None:
    model = SharedActivation(alone=True).eval()
    expected = run(model, X)
    result = optimize_(model, X)
    assert [(s.activation, s.route) for s in result.sites] == [("relu", "parent")] * 2
    assert "forward" not in vars(model.act)
    torch.testing.assert_close(run(model, X), expected)


def test_units_stand_and_fall_together() -> None:
    model = SharedActivation().eval()
    result = optimize_(model, X, filter_fn=lambda _, fqn: fqn != "fc1")
    assert site(result, "fc1").code == "filtered"
    assert site(result, "fc2").route == "parent"
    assert "forward" not in vars(model.act)


@pytest.mark.parametrize("make", [SharedLinear, Residual])
def test_a_preactivation_read_elsewhere_keeps_its_activation_outside(make: Any) -> None:
    model = make().eval()
    expected = run(model, X)
    result = optimize_(model, X)
    assert site(result, "fc").activation == "none"
    assert "forward" not in vars(model.act)
    torch.testing.assert_close(run(model, X), expected)


def test_hooks_added_later_are_honoured_on_the_parent_route() -> None:
    model = Functional().eval()
    expected = run(model, X)
    optimize_(model, X)
    seen: list[Tensor] = []
    model.fc1.register_forward_hook(lambda m, a, y: seen.append(y))
    torch.testing.assert_close(run(model, X), expected)
    torch.testing.assert_close(seen[0], F.linear(X, model.fc1.weight, model.fc1.bias))
    model.fc2 = OwnLinear(32, 16)  # type: ignore[assignment]
    run(model, X)


class GradMode(nn.Module):
    """Forwards that tracing would get wrong; each must fall back to the linear alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        return y if torch.is_grad_enabled() else y + 0


class BufferBranch(GradMode):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("on", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        return y if self.on else -y


class PlainTensor(GradMode):
    def __init__(self) -> None:
        super().__init__()
        self.on = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        return y if self.on else -y


class DrawsNoise(GradMode):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x)) + torch.rand(16)


class ClassConfig(GradMode):
    table = {"scale": 1.0}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x)) * self.table["scale"]


class Context(GradMode):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return F.relu(self.fc(x))


class Tries(GradMode):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        try:
            return y if y.sum() > 0 else -y
        except RuntimeError:
            return y * 2


class Counts(GradMode):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return F.relu(self.fc(x))


class ReadsConfig(GradMode):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x)) * self.config["scale"]


class OnValues(GradMode):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        return y if y.sum() > 0 else -y


UNFAITHFUL = [
    *(GradMode, Context, Counts, ReadsConfig, OnValues, Tries),
    *(BufferBranch, PlainTensor, ClassConfig),
]


def test_a_forward_that_draws_numbers_keeps_drawing_them() -> None:
    model = DrawsNoise().eval()
    found = site(optimize_(model, X), "fc")
    assert (found.activation, found.route) == ("none", "plain")
    assert not torch.equal(run(model, X), run(model, X))


@pytest.mark.parametrize("make", UNFAITHFUL)
def test_forwards_that_cannot_be_traced_faithfully_are_left(make: Any) -> None:
    model = make().eval()
    before, expected = snapshot(model), run(model, X)
    result = optimize_(model, X)
    found = site(result, "fc")
    assert (found.status, found.activation) == ("kept", "none")
    assert "activation left alone" in found.reason or isinstance(
        model, OnValues | Tries | BufferBranch
    )
    assert "forward" not in vars(model)
    torch.testing.assert_close(run(model, X), expected)
    result.revert()
    if not isinstance(model, Counts):
        assert snapshot(model) == before


class Layers(nn.Module):
    """Linears in a list, called in a loop by the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_list_of_layers_is_fused_and_guarded_against_growth() -> None:
    model = Layers().eval()
    expected = run(model, X)
    result = optimize_(model, X)
    assert [(s.activation, s.route) for s in result.sites] == [("tanh", "parent")] * 3
    torch.testing.assert_close(run(model, X), expected)
    model.layers.append(nn.Identity())
    torch.testing.assert_close(run(model, X), expected.tanh())


@pytest.mark.parametrize("how", ["function", "method"])
def test_compiled_parts_are_refused_and_the_rest_is_rewritten(how: str) -> None:
    model = nn.Sequential(mlp(), nn.Linear(4, 4)).eval()
    expected = run(model, X)
    if how == "function":
        model[0][0] = torch.compile(model[0][0], backend="eager")
    else:
        model[0].compile(backend="eager")
    before = snapshot(model)
    result = optimize_(model, X)
    fqns = ["0.0._orig_mod"] if how == "function" else ["0.0", "0.2", "0.4"]
    assert {site(result, f).code for f in fqns} == {"compiled"}
    assert site(result, "1").status == "kept"
    torch.testing.assert_close(run(model, X), expected)
    result.revert()
    assert snapshot(model) == before


def test_models_that_cannot_be_profiled_are_refused_with_an_error() -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.compile"):
        optimize_(torch.compile(mlp(), backend="eager"), X)
    with pytest.raises(InputError, match="meta"):
        optimize_(mlp().to("meta"), X)


def test_a_rewritten_model_compiles() -> None:
    model = Functional().eval()
    expected = run(model, X)
    optimize_(model, X)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, X), expected)
    instance = mlp().eval()
    expected = run(instance, X)
    optimize_(instance, X)
    compiled = torch.compile(instance, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, X), expected)


def test_autocast_inside_the_model() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(x)

    model = Half().eval()
    expected = run(model, X)
    result = optimize_(model, X)
    assert site(result, "body.0").problem["dtype"] == "bfloat16"
    assert all(v.passed for v in result.verdicts)
    assert run(model, X).dtype is expected.dtype
